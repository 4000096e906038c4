"""The vLLM plugin against a stand-in of vLLM's registry and layer: CI has neither vLLM nor a GPU."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dtensor_world import gloo_ranks
from serving_world import RowParallel, vllm

import commbackend
from commbackend.config import Config
from commbackend.errors import ConfigError
from commbackend.integrations import vllm_

ON = mock.patch.object(vllm_, "resolve", lambda: Config(serve=True))


def test_the_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    group = "vllm.general_plugins"
    (found,) = project["entry-points"][group].items()
    assert EntryPoint(*found, group).load() is vllm_.register


def test_it_is_inert_unless_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMBACKEND_SERVE", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of vLLM would raise
    vllm_.register()
    monkeypatch.setenv("COMMBACKEND_SERVE", "1")
    with pytest.raises(ImportError):
        vllm_.register()


def test_it_registers_once_and_never_over_another_plugin() -> None:
    there = vllm()
    registry = there["vllm.model_executor.custom_op"].op_registry_oot  # type: ignore[attr-defined]
    with ON, mock.patch.dict(sys.modules, there):
        vllm_.register()
        vllm_.register()
        assert list(registry) == ["RowParallelLinear"] and registry["RowParallelLinear"].__module__ == vllm_.__name__
        registry["RowParallelLinear"] = type("Other", (RowParallel,), {"__module__": "other.plugin"})
        with pytest.raises(ConfigError, match=r"replaced by other\.plugin\.Other"):
            vllm_.register()


def _served(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    there = vllm(enforce_eager=False)
    sys.modules.update(there)
    layer: Any = there["vllm.model_executor.layers.linear"].RowParallelLinear  # type: ignore[attr-defined]
    with ON:
        vllm_.register()
    comm = commbackend.init(dist.group.WORLD, device="cpu")
    for name, options in {
        "plain": {},
        "no bias": {"bias": False},
        "skip": {"skip_bias_add": True},
        "no return": {"return_bias": False},
        "quantised": {"quantized": True},
        "the sum is made outside the layer": {"reduce_results": False},
        "input_is_parallel=False": {"input_is_parallel": False},
        "alone": {"tp_size": 1},
    }.items():
        before = comm.stats()["fallback_by_op"]
        ours, stock = layer(16, 8, **options), RowParallel(16, 8, **options)
        x = torch.randn(5, ours.weight.shape[1] if ours.input_is_parallel else 16, generator=_seed(rank))
        if not ours.input_is_parallel:
            dist.broadcast(x, 0)
        with torch.inference_mode():
            got, want = ours(x), stock(x.clone())
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        same = all(a is b is None or torch.allclose(a, b, atol=1e-5) for a, b in pairs)
        new = {k: n for k, n in comm.stats()["fallback_by_op"].items() if n != before.get(k, 0)}
        found[name] = (type(ours).__name__, bool(ours.commbackend_group), same, new)
    layer_16 = layer(16, 8)
    compiled = torch.compile(layer_16, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.inference_mode():
        found["compiled"] = []
        for tokens in (3, 7):
            x = torch.randn(tokens, 8, generator=_seed(rank))
            found["compiled"].append(torch.allclose(compiled(x)[0], layer_16(x)[0]))
    found["growths"] = comm.stats()["heap_growths"]
    x = torch.randn(4096, 8, generator=_seed(rank))
    layer_16(x)
    found["later growths"] = comm.stats()["heap_growths"] - found["growths"]
    return found


def _seed(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


def test_layers_are_fused_or_stock_and_counted(tmp_path: Path) -> None:
    for found in gloo_ranks(_served, 2, tmp_path):
        for name in ("plain", "no bias", "skip", "no return"):
            assert found[name] == ("OverlappedRowParallelLinear", True, True, {}), (name, found[name])
        for name in ("quantised", "the sum is made outside the layer", "input_is_parallel=False"):
            counted = {f"matmul_all_reduce/{name}": 1}
            assert found[name] == ("OverlappedRowParallelLinear", False, True, counted), (name, found[name])
        assert found["alone"] == ("OverlappedRowParallelLinear", False, True, {})
        assert found["compiled"] == [True, True]
        assert found["later growths"] == 0  # the largest batch was made room for when layers were made
