"""Lightning Fabric's ModelParallelStrategy with our styles: the losses of one process, alone and with replicas."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from test_examples import torchrun
from torch import nn
from torch.nn.functional import mse_loss

pytest.importorskip("lightning_fabric", reason="lightning-fabric is not installed")

EXAMPLE = Path(__file__).parents[1] / "examples" / "fabric_tp.py"


def in_one_process(steps: int, replicas: int) -> list[float]:
    """The losses of the first replica when one process trains the example's model on all replicas' data."""
    spec = importlib.util.spec_from_file_location("fabric_tp", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = sys.modules["fabric_tp"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model = nn.Sequential(example.GatedMLP(64, 128), example.GatedMLP(64, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        losses = []
        for replica in range(replicas):
            x = torch.randn(8, 128, 64, generator=torch.Generator().manual_seed(10 * step + replica))
            losses.append(mse_loss(model(x), x.roll(1, -1)))
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses[0].item())
    return found


@pytest.mark.parametrize(("processes", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_losses_are_those_of_one_process(processes, replicas):
    output = torchrun("fabric_tp", "--steps", "4", processes=processes)
    losses = [float(x) for x in re.findall(r"step \d+: loss (\S+)", output)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert losses == pytest.approx(in_one_process(4, replicas), abs=2e-4)
    assert f"dp {replicas} x tp 2 over shm" in output
    assert "overlapped:    8 x matmul_all_reduce" in output
