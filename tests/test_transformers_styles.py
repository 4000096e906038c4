"""Hugging Face transformers under our styles: training and generating equal one process; files and fallbacks."""

from __future__ import annotations

import copy
import json
import logging
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dtensor_world import close, gloo_ranks, grads, whole
from torch import nn

import commbackend
from commbackend.errors import ConfigError, Unavailable, Unsupported

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, without which transformers shards nothing")

import transformers
from transformers.distributed import DistributedConfig

from commbackend.integrations import transformers as adapter
from commbackend.integrations.dtensor import ColwiseLinear, RowwiseLinear
from commbackend.integrations.transformers import tp_plan

IDS = (torch.arange(24).view(2, 12) * 7) % 61


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    """A checkpoint of a random Llama of two layers."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=64,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    folder = str(tmp_path_factory.mktemp("llama"))
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder: str, plan=None, **sizes):
    """The model: in one process, with transformers' own plan ("stock"), or with ours."""
    if plan is None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder)
    given = {"tp_size": dist.get_world_size(), **sizes, **({} if plan == "stock" else {"tp_plan": plan})}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**given))


def train(model) -> dict[str, torch.Tensor]:
    """Loss and gradients of one backward, whole."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return grads(model) | {"loss": loss.detach().clone()}


def generate(model, **options) -> torch.Tensor:
    mask = torch.ones_like(IDS)
    return model.generate(IDS, attention_mask=mask, max_new_tokens=6, do_sample=False, **options)


def calls(model_stats) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, n in (model_stats["overlapped_by_op"] | model_stats["fallback_by_op"]).items():
        found[name.split("/")[0]] = found.get(name.split("/")[0], 0) + n
    return found


def like_one_process(rank, folder, saved):
    reference = load(folder)
    model = load(folder, tp_plan(folder))
    want = train(reference)
    close(train(model), want)
    # Two layers of q, k, v / gate, up, and the head: one sum each; o and down.
    assert calls(commbackend.stats(dist.group.WORLD)) == {"matmul_all_reduce": 4, "dgrad_all_reduce": 5}
    close({n: 2 * g for n, g in train(model).items()}, {n: 2 * g for n, g in want.items()})

    model.activation_checkpointing_enable()
    model.train()
    close(train(model), want)
    model.activation_checkpointing_disable()
    model.eval()

    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    compiled(input_ids=IDS, labels=IDS).loss.backward()
    close(grads(model) | {"loss": want["loss"]}, want)

    expected = generate(reference)
    for options in ({}, {"cache_implementation": "static"}):
        assert torch.equal(generate(model, **options), expected), options
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, reference(IDS).logits, rtol=0.05, atol=0.05)

    model.save_pretrained(saved)
    dist.barrier()
    again = load(saved)  # without commbackend
    close({n: whole(p) for n, p in model.state_dict().items()}, dict(again.state_dict()), 0.0)
    assert "commbackend" not in Path(saved, "config.json").read_text()
    kinds = {type(m) for m in model.modules()}
    assert {ColwiseLinear, RowwiseLinear} <= kinds and nn.Linear not in kinds
    return json.loads(Path(saved, "config.json").read_text()) == json.loads(Path(folder, "config.json").read_text())


# Over gloo the layers are the same; test_dtensor_styles tries both transports.
@pytest.mark.parametrize("transport", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_training_and_generating_equal_one_process(llama, tmp_path, transport):
    """Also with checkpointed activations, compiled, with a static cache, autocast; it saves what one process saves."""
    saved = str(tmp_path / "saved")
    assert gloo_ranks(like_one_process, 2, tmp_path, llama, saved, transport=transport) == [True, True]


def over_four(rank, folder, saved):
    """A checkpoint of TP 2 over TP 4, and with FSDP2 over 2 x 2."""
    reference = load(folder)
    want = train(reference)
    close(train(load(saved, tp_plan(saved))), want)
    for plan in ("stock", tp_plan(folder)):
        model = load(folder, plan, tp_size=2, fsdp_size=2)
        found = train(model)
        assert found.keys() == want.keys()
        close({n: g for n, g in found.items() if n != "loss"}, {n: g for n, g in want.items() if n != "loss"})
    return True


def save_over_two(rank, folder, saved):
    load(folder, tp_plan(folder)).save_pretrained(saved)


def test_over_more_ranks_and_with_fsdp(llama, tmp_path):
    saved = str(tmp_path / "saved")
    two, four = tmp_path / "two", tmp_path / "four"
    two.mkdir()
    four.mkdir()
    gloo_ranks(save_over_two, 2, two, llama, saved)
    assert all(gloo_ranks(over_four, 4, four, llama, saved))


def off(rank, folder):
    results = []
    for plan in ("stock", tp_plan(folder, strict=True)):
        model = load(folder, plan)
        results.append(train(model) | {"generated": generate(model)})
    close(results[1], results[0], 0.0)
    stats = commbackend.stats(dist.group.WORLD)
    assert stats["overlapped"] == 0 and stats["symmetric_nbytes"] == 0
    assert {name.split("/", 1)[1] for name in stats["fallback_by_op"]} == {"transport is off"}
    return True


def test_off_is_transformers_bitwise(llama, tmp_path):
    assert all(gloo_ranks(off, 2, tmp_path, llama, transport="off"))


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def fallbacks(rank):
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    plan = tp_plan(transformers.LlamaConfig(architectures=["LlamaForCausalLM"]), strict=False)
    loose = transformers.distributed.parallel_utils.ALL_PARALLEL_STYLES[plan["model.layers.*.mlp.down_proj"]]
    layer = loose.install_forward(OwnForward(4, 4), mesh)
    assert type(layer) is OwnForward and "forward" in vars(layer)  # as transformers does it
    strict_plan = tp_plan(transformers.LlamaConfig(architectures=["LlamaForCausalLM"]), strict=True)
    strict = transformers.distributed.parallel_utils.ALL_PARALLEL_STYLES[strict_plan["model.layers.*.mlp.down_proj"]]
    with pytest.raises(Unsupported, match="OwnForward"):
        strict.install_forward(OwnForward(4, 4), mesh)
    return commbackend.stats(mesh)["fallback_by_op"]


def test_layers_with_a_forward_of_their_own_stay(tmp_path):
    (found, _) = gloo_ranks(fallbacks, 2, tmp_path)
    assert len(found) == 1 and "OwnForward" in next(iter(found))


# -- plans ------------------------------------------------------------------------------------------------------------


def test_plans_of_paths_configs_and_models(llama):
    config = transformers.AutoConfig.from_pretrained(llama)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    plan = tp_plan(llama)
    assert plan == tp_plan(config) == tp_plan(model)
    assert plan["model.layers.*.self_attn.q_proj"] == "commbackend_colwise"
    assert plan["model.layers.*.mlp.down_proj"] == "commbackend_rowwise"
    assert plan["lm_head"] == "commbackend_colwise_gather_output"
    inner = tp_plan(config, model_class=transformers.LlamaModel)
    assert inner["layers.*.self_attn.q_proj"] == "commbackend_colwise" and "lm_head" not in inner
    assert set(tp_plan(llama, strict=True).values()) > {"commbackend_rowwise_strict"}


@pytest.mark.parametrize("name", ["Qwen2", "Mistral", "Gemma", "Mixtral", "Phi3", "Cohere"])
def test_plans_of_other_models(name):
    """Every layer that transformers shards by columns or rows; what it packs or routes stays as it is."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, num_key_value_heads=2, vocab_size=16, pad_token_id=0)
    config.architectures = [f"{name}ForCausalLM"]
    with torch.device("meta"):
        stock_plan = getattr(transformers, f"{name}ForCausalLM")(config).tp_plan
    wanted = {k for k, style in stock_plan.items() if style.startswith(("colwise", "rowwise"))}
    assert {k for k, style in tp_plan(config).items() if style != "commbackend_block"} == wanted != set()


def test_a_model_without_a_plan_says_so():
    config = transformers.ViTConfig(architectures=["ViTModel"], hidden_size=16, num_hidden_layers=1)
    with pytest.raises(ConfigError, match="ViTModel: nothing in its tensor-parallel plan"):
        tp_plan(config)
    with pytest.raises(ConfigError, match="pass model_class="):
        tp_plan(transformers.LlamaConfig())


def test_style_names_stand_for_the_names_they_replace():
    name = adapter.StyleName("commbackend_colwise", "colwise")
    assert name == "colwise" and name == "commbackend_colwise" and name != "rowwise"
    assert {name: 1}["commbackend_colwise"] == 1 and copy.deepcopy(name) == "colwise"
    assert json.dumps([name]) == '["commbackend_colwise"]'


def test_a_static_cache_is_as_wide_as_this_ranks_heads(llama):
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    assert get_kv_heads_per_rank(tp_plan(llama), 4, 2) == 2


def test_no_false_warnings_of_rules_that_are_not_applied(llama, caplog):
    """transformers says which rules of a plan named nothing; the rule for whole layers is not among them."""
    from transformers.distributed.tensor_parallel import verify_tp_plan

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(llama))
    logger = logging.getLogger("transformers.distributed.tensor_parallel")
    logger.addHandler(caplog.handler)
    try:
        verify_tp_plan(list(model.state_dict()), model.tp_plan | tp_plan(llama))
        verify_tp_plan(list(model.state_dict()), {"no.such.layer": "colwise"})
    finally:
        logger.removeHandler(caplog.handler)
    (found,) = {r.getMessage() for r in caplog.records if "not applied" in r.getMessage()}
    assert "no.such.layer" in found


@pytest.mark.parametrize("found", ["4.57.6", "5.0.0", "5.23.9"])
def test_older_versions_are_refused_clearly(monkeypatch, found):
    monkeypatch.setattr(metadata, "version", lambda name: found)
    with pytest.raises(Unavailable, match=rf"transformers {found} has another interface.*pip install"):
        adapter._version()


def test_newer_versions_are_taken(monkeypatch):
    for found in ("5.24.0", "5.100.0.dev0", "6.0"):
        monkeypatch.setattr(metadata, "version", lambda name, found=found: found)
        assert adapter._version() == found


def test_the_adapter_does_not_shadow_the_package():
    assert adapter.transformers is transformers
    assert "commbackend" not in transformers.__file__
