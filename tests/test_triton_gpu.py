"""The flag kernels on a real GPU: the checks of ``benchmarks/gemm_checks.py`` as tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from commbackend.errors import Unavailable
from commbackend.gemm.triton_tile import TritonTile

pytestmark = pytest.mark.gpu

try:
    TritonTile.probe(torch.device("cuda"))
except Unavailable as e:
    pytest.skip(f"triton provider: {e}", allow_module_level=True)


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "gemm_checks.py"
    spec = importlib.util.spec_from_file_location("gemm_checks", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gemm_checks"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def provider() -> TritonTile:
    return TritonTile(timeout_s=5.0)


@pytest.mark.parametrize("name", ["products", "fp8", "waiting", "graph"])
def test_check(checks: ModuleType, provider: TritonTile, name: str) -> None:
    if name == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs capability 8.9")
    checks.FAILED.clear()
    getattr(checks, f"check_{name}")(provider)
    provider.check()
    assert not checks.FAILED


def test_faults(checks: ModuleType) -> None:
    checks.FAILED.clear()
    checks.check_faults()
    assert not checks.FAILED


def test_reduce(checks: ModuleType, provider: TritonTile) -> None:
    checks.FAILED.clear()
    checks.check_reduce(provider.runtime)
    assert not checks.FAILED


@pytest.mark.slow
def test_ten_thousand_calls(checks: ModuleType, provider: TritonTile) -> None:
    checks.FAILED.clear()
    checks.check_steady(provider, 10_000)
    assert not checks.FAILED
