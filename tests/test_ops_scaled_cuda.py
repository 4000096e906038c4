"""fp8 operands, residuals and norms on GPUs: the very cases that run on CPUs."""

from __future__ import annotations

import pytest
import test_ops_residual
import test_ops_scaled
import torch
from ops_world import spmd_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize("case", [test_ops_scaled.gathers, test_ops_scaled.reduces])
def test_scaled(case):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs capability 8.9")
    spmd_gpus(case, 2)


@pytest.mark.parametrize("case", [test_ops_residual.values, test_ops_residual.gradients, test_ops_residual.layer])
def test_residual(case):
    spmd_gpus(case, 2)
