"""The SGLang plugin against a stand-in of SGLang's hooks and layer: CI has neither SGLang nor a GPU."""

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
from serving_world import RowParallel, sglang

import commbackend
from commbackend.config import Config
from commbackend.integrations import sglang_


def test_the_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    group = "sglang.srt.plugins"
    (found,) = project["entry-points"][group].items()
    assert EntryPoint(*found, group).load() is sglang_.register


def test_it_is_inert_unless_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMBACKEND_SERVE", raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)  # an import of SGLang would raise
    sglang_.register()
    monkeypatch.setenv("COMMBACKEND_SERVE", "1")
    with pytest.raises(ImportError):
        sglang_.register()


def _served(rank: int, server: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    there = sglang(**server)
    sys.modules.update(there)
    with mock.patch.object(sglang_, "resolve", lambda: Config(serve=True)):
        sglang_.register()
        sglang_.register()
    there["sglang.srt.plugins.hook_registry"].HookRegistry.apply_hooks()  # type: ignore[attr-defined]
    layer: Any = there["sglang.srt.layers.linear"].RowParallelLinear  # type: ignore[attr-defined]
    comm = commbackend.init(dist.group.WORLD, device="cpu")

    def compare(options: dict[str, Any], **call: Any) -> tuple[bool, bool, dict[str, int], bool]:
        before = comm.stats()
        ours, stock = layer(16, 8, **options), RowParallel(16, 8, **options)
        x = torch.randn(5, ours.weight.shape[1], generator=torch.Generator().manual_seed(rank))
        got, want = ours(x, **call), stock(x.clone(), **call)
        same = all(a is b is None or torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))
        after = comm.stats()
        new = {k: n for k, n in after["fallback_by_op"].items() if n != before["fallback_by_op"].get(k, 0)}
        return bool(ours._commbackend_group), same, new, after["overlapped"] > before["overlapped"]

    found["plain"] = compare({})
    found["skip"] = compare({"skip_bias_add": True})
    found["quantised"] = compare({"quantized": True})
    found["outside"] = compare({"reduce_results": False})
    found["alone"] = compare({"tp_size": 1})
    found["skip_all_reduce"] = compare({}, skip_all_reduce=True)
    found["unknown option"] = compare({}, use_fused_silu=False)
    there["sglang.srt.runtime_context"].get_forward().sp_active = True  # type: ignore[attr-defined]
    found["sequence parallel"] = compare({})
    return found


def test_calls_are_fused_or_the_original_and_counted(tmp_path: Path) -> None:
    for found in gloo_ranks(_served, 2, tmp_path, {}):
        assert found["plain"] == (True, True, {}, True)
        assert found["skip"] == (True, True, {}, True)
        assert found["quantised"] == (False, True, {"matmul_all_reduce/quantised": 1}, False)
        counted = {"matmul_all_reduce/the sum is made outside the layer": 1}
        assert found["outside"] == (False, True, counted, False)
        assert found["alone"] == (False, True, {}, False)
        for call in ("skip_all_reduce", "unknown option", "sequence parallel"):
            assert found[call] == (True, True, {}, False), call


@pytest.mark.parametrize("option", ["enable_symm_mem", "enable_dp_attention"])
def test_options_that_sum_in_another_way_keep_the_original(tmp_path: Path, option: str) -> None:
    for found in gloo_ranks(_served, 2, tmp_path, {option: True}):
        assert found["plain"] == (False, True, {f"matmul_all_reduce/{option}": 1}, False)
