"""Megatron-Core's TransformerEngine layers, overlapped, against a stand-in of TransformerEngine: what is proven is that
the classes fit Megatron's and that recipes keep layers stock; TransformerEngine itself needs a GPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from megatron_world import apart, connect, gpt, megatron_ranks, one_batch

from commbackend.errors import Unsupported

# Not imported here: ranks import this module before the stand-in, which Megatron must find, is in place.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")

OVERLAPPED = ("all_gather_matmul/push", "matmul_reduce_scatter/push", "dgrad_reduce_scatter/push")


def _model(config: Any, spec: Any) -> Any:
    """A GPT model of TransformerEngine layers, but for attention, which is Megatron's local one."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    spec.submodules.self_attention.submodules.core_attention = DotProductAttention
    torch.manual_seed(7)
    return GPTModel(
        config, transformer_layer_spec=spec, vocab_size=gpt.VOCABULARY, max_sequence_length=gpt.SEQUENCE,
        share_embeddings_and_output_weights=False,
    )  # fmt: skip


def _two_ranks() -> dict[Any, Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from te_world import FP8GlobalStateManager

    from commbackend.integrations import megatron as ours

    facts: dict[Any, Any] = {"globals": [n for n in ("te_spec", "te_qk_layernorm_spec") if n in vars(ours)]}
    for sp in (False, True):
        for norm in ("LayerNorm", "RMSNorm"):
            comm = connect("shm")
            config = gpt.gpt_config(2, sp, normalization=norm, layernorm_zero_centered_gamma=norm == "RMSNorm")
            stock = _model(config, get_gpt_layer_with_transformer_engine_spec())
            fused = _model(config, ours.layer_spec("te", strict=True))
            fused.load_state_dict(stock.state_dict(), strict=True)
            (loss_a, grads_a), (loss_b, grads_b) = one_batch(stock), one_batch(fused)
            facts[sp, norm] = {
                "apart": max((loss_a - loss_b).abs().item(), apart(grads_b, grads_a)),
                "keys": list(stock.state_dict()) == list(fused.state_dict()),
                "sharded": sorted(stock.sharded_state_dict(metadata=_metadata()))
                == sorted(fused.sharded_state_dict(metadata=_metadata())),
                "extra": any(k.endswith("_extra_state") and v is not None for k, v in fused.state_dict().items()),
                "stats": comm.stats(),
            }
            comm.close()
    # Under a recipe: TransformerEngine's own forward, with its state, counted; strict raises.
    comm = connect("shm")
    config = gpt.gpt_config(2, True)
    stock = _model(config, get_gpt_layer_with_transformer_engine_spec())
    quantised = _model(config, ours.layer_spec("te"))
    FP8GlobalStateManager.enabled = True
    (loss_a, grads_a), (loss_b, grads_b) = one_batch(stock), one_batch(quantised)
    layer = quantised.decoder.layers[0].mlp.linear_fc2
    facts["fp8"] = {
        "apart": max((loss_a - loss_b).abs().item(), apart(grads_b, grads_a)),
        "quantised_calls": [m.quantised_calls for m in quantised.modules() if hasattr(m, "quantised_calls")],
        "stats": comm.stats(),
    }
    state = {k: v for k, v in layer.state_dict().items() if k == "_extra_state"}
    fresh = _model(config, get_gpt_layer_with_transformer_engine_spec())
    fresh.load_state_dict(quantised.state_dict(), strict=True)
    facts["fp8"]["amax"] = (layer.amax, fresh.decoder.layers[0].mlp.linear_fc2.amax, float(state["_extra_state"][0]))
    try:
        gpt.loss_of(_model(config, ours.layer_spec("te", strict=True)), 1)
        facts["fp8"]["strict"] = "ran"
    except Unsupported as e:
        facts["fp8"]["strict"] = str(e)
    FP8GlobalStateManager.enabled = False
    # Options of TransformerEngine that keep a layer stock.
    for option in ("tp_comm_overlap", "delay_wgrad_compute", "symmetric_ar_type"):
        before = comm.stats()["fallback_by_op"]
        setattr(config, option, True)
        with torch.no_grad():
            gpt.loss_of(quantised, 1)
        setattr(config, option, None)
        after = comm.stats()["fallback_by_op"]
        facts[option] = {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)}
    comm.close()
    return facts


def _metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return megatron_ranks(_two_ranks, 2, 2, tmp_path_factory.mktemp("te"), te_stand_in=True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_te_layers_compute_what_they_did_with_stock_keys(
    two: list[dict[Any, Any]], sequence_parallel: bool, norm: str
) -> None:
    for rank in two:
        facts = rank[sequence_parallel, norm]
        assert facts["apart"] <= 1e-6
        assert facts["keys"] and facts["sharded"] and facts["extra"]
        assert facts["stats"]["fallback"] == 0 and facts["stats"]["overlapped"] > 0
        if sequence_parallel:
            assert set(OVERLAPPED) <= set(facts["stats"]["overlapped_by_op"])


def test_under_a_recipe_layers_run_stock_and_are_counted(two: list[dict[Any, Any]]) -> None:
    for facts in (rank["fp8"] for rank in two):
        assert facts["apart"] == 0.0
        assert facts["quantised_calls"] == [1] * 8  # all eight projections ran quantised, none in bf16
        assert facts["stats"]["overlapped"] == 0
        assert facts["stats"]["fallback_by_op"] == {
            "all_gather_matmul/fp8 or fp4 recipe": 4,
            "matmul_reduce_scatter/fp8 or fp4 recipe": 4,
        }
        assert facts["amax"][0] > 0 and len(set(facts["amax"])) == 1  # _extra_state went back to stock
        assert "fp8 or fp4 recipe" in facts["strict"]


@pytest.mark.parametrize("option", ["tp_comm_overlap", "delay_wgrad_compute", "symmetric_ar_type"])
def test_what_te_does_by_itself_stays_its_own(two: list[dict[Any, Any]], option: str) -> None:
    for rank in two:
        assert rank[option] == {f"all_gather_matmul/{option}": 4, f"matmul_reduce_scatter/{option}": 4}


def test_specs_for_the_command_line_are_there(two: list[dict[Any, Any]]) -> None:
    for rank in two:
        assert rank["globals"] == ["te_spec", "te_qk_layernorm_spec"]
