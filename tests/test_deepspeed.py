"""DeepSpeed AutoTP: layer classes are exchanged while a context lasts. Quick tests run against a stand-in of the four
names that are touched; DeepSpeed itself trains in the slow one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensor_world import gloo_ranks
from torch import Tensor, nn

import commbackend
from commbackend.errors import Unavailable, Unsupported
from commbackend.integrations import deepspeed_

ROOT = Path(__file__).parents[1]


# -- the stand-in -----------------------------------------------------------------------------------------------------
class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _SumBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, x: Tensor, sizes: Any) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        parts = [x.new_empty(*x.shape[:-1], n) for n in sizes]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0].split(ctx.sizes, -1)[ctx.group.rank()].contiguous(), None


class _Layer(nn.Module):
    def __init__(self, module: nn.Linear, mp_group: Any, name: str = "", gather_output: bool = False) -> None:
        super().__init__()
        self.mp_group, self.name, self.gather_output = mp_group, name, gather_output
        self.defer_collectives_to_compiler = False
        self.weight, self.bias = module.weight, module.bias
        self._partition_sizes = [module.weight.shape[0]] * (mp_group.size() if mp_group is not None else 1)


class LinearAllreduce(_Layer):
    def forward(self, input: Tensor) -> Tensor:
        y = input @ self.weight.t()
        y = _Sum.apply(y, self.mp_group) if self.mp_group is not None else y
        return y if self.bias is None else y + self.bias


class LinearLayer(_Layer):
    def forward(self, input: Tensor) -> Tensor:
        x = _SumBack.apply(input, self.mp_group) if self.mp_group is not None else input
        y = x @ self.weight.t()
        y = y if self.bias is None else y + self.bias
        return _Gather.apply(self.mp_group, y, self._partition_sizes) if self.gather_output else y


class LmHeadLinearAllreduce(LinearAllreduce):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class SubParamLinearLayer(LinearLayer):
    pass


def stand_in(version: str = deepspeed_.VERSIONS[0]) -> ModuleType:
    """Put a DeepSpeed of these classes among the modules; returns its ``auto_tp``."""
    names = (
        "deepspeed",
        "deepspeed.module_inject",
        "deepspeed.module_inject.auto_tp",
        "deepspeed.module_inject.layers",
    )
    package, inject, auto_tp, layers = (ModuleType(name) for name in names)
    package.__version__ = version  # type: ignore[attr-defined]
    for cls in (LinearAllreduce, LinearLayer, LmHeadLinearAllreduce, SubParamLinearLayer):
        for module in (auto_tp, layers):
            setattr(module, cls.__name__, cls)
    layers.GatherFromTensorParallelRegion = _Gather  # type: ignore[attr-defined]
    package.module_inject, inject.auto_tp, inject.layers = inject, auto_tp, layers  # type: ignore[attr-defined]
    sys.modules.update(zip(names, (package, inject, auto_tp, layers), strict=True))
    return auto_tp


@pytest.fixture
def auto_tp(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in [n for n in sys.modules if n.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("deepspeed", "deepspeed.module_inject.auto_tp", "deepspeed.module_inject.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "deepspeed.module_inject", ModuleType("deepspeed.module_inject"))
    return stand_in()


def test_classes_are_exchanged_within_and_put_back(auto_tp: Any) -> None:
    before = dict(vars(auto_tp))
    with pytest.raises(RuntimeError, match="the body"), deepspeed_.overlapped() as names:
        assert set(names) == {"LinearAllreduce", "LinearLayer", "SubParamLinearLayer"}
        assert issubclass(auto_tp.LinearAllreduce, LinearAllreduce) and auto_tp.LinearAllreduce is not LinearAllreduce
        # A class with a forward of its own is left alone: ours would skip what it does.
        assert auto_tp.LmHeadLinearAllreduce is LmHeadLinearAllreduce
        built = auto_tp.LinearLayer(nn.Linear(4, 4), None)
        assert isinstance(built, LinearLayer) and built(torch.ones(2, 4)).shape == (2, 4)
        raise RuntimeError("the body")
    assert {k: v for k, v in vars(auto_tp).items() if isinstance(v, type)} == {
        k: v for k, v in before.items() if isinstance(v, type)
    }


def test_other_versions_and_absence_are_refused(auto_tp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["deepspeed"], "__version__", "0.20.0+cpu")
    with pytest.raises(Unavailable, match=r"0\.20\.0: .* only those of"), deepspeed_.overlapped():
        pass
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(Unavailable, match="needs DeepSpeed"), deepspeed_.overlapped():
        pass


def _trained(rank: int) -> dict[str, Any]:
    auto_tp: Any = stand_in()
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(5)
    up, down, head = (torch.randn(n, k, generator=generator) for n, k in ((12, 8), (8, 12), (16, 8)))

    def linear(w: Tensor) -> nn.Linear:
        made = nn.Linear(w.shape[1], w.shape[0])
        with torch.no_grad():
            made.weight.copy_(w)
            made.bias.fill_(0.5)
        return made

    def model() -> nn.Sequential:
        return nn.Sequential(
            auto_tp.LinearLayer(linear(up.chunk(2)[rank]), group, name="up"),
            auto_tp.LinearAllreduce(linear(down.chunk(2, 1)[rank]), group, name="down"),
            auto_tp.LinearLayer(linear(head.chunk(2)[rank]), group, name="lm_head", gather_output=True),
        )

    stock = model()
    with deepspeed_.overlapped(strict=True):
        ours = model()
    runs = []
    for layers in (stock, ours):
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = layers(x)
        (y * torch.arange(16.0)).sum().backward()
        runs.append([y.detach(), x.grad, *(p.grad for p in layers.parameters())])
    stats = commbackend.stats(group)
    ours[1].defer_collectives_to_compiler = True
    try:
        ours(x)
        raised = ""
    except Unsupported as e:
        raised = str(e)
    type(ours[1]).strict = False
    with torch.no_grad():
        kept = torch.equal(ours(x), runs[0][0])
    return {
        "apart": max((a - b).abs().max().item() / a.abs().max().item() for a, b in zip(*runs, strict=True)),
        "stats": stats,
        "raised": raised,
        "kept": kept,
        "fallback": commbackend.stats(group)["fallback_by_op"],
    }


def test_layers_compute_and_learn_as_before(tmp_path: Path) -> None:
    for found in gloo_ranks(_trained, 2, tmp_path):
        assert found["apart"] < 1e-5
        assert found["stats"]["fallback"] == 0 and found["stats"]["calls"] == 3
        assert {key.partition("/")[0] for key in found["stats"]["overlapped_by_op"]} == {
            "matmul_all_reduce",
            "dgrad_all_reduce",
        }
        assert "of down cannot be fused: DeepCompile" in found["raised"]
        assert found["kept"]
        assert found["fallback"] == {"matmul_all_reduce/DeepCompile places the collectives": 1}


# -- DeepSpeed itself -------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_itself_trains_to_the_same_losses() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/deepspeed_autotp.py"]
    done = subprocess.run([sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if ": loss " in line]
    assert len(lines) == 4
    for line in lines:
        ours, stock = (float(part.split()[-1]) for part in line.split(","))
        assert ours == pytest.approx(stock, abs=2e-6)
    assert "matmul_all_reduce/" in done.stdout and "dgrad_all_reduce/" in done.stdout
