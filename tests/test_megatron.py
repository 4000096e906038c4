"""Megatron-Core's own GPT model at TP 2 on CPUs: with our projections it computes what it does without, to the bit, and
its calls are overlapped. Megatron's code runs as released; what stands in for torch.cuda is in the example.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint

import commbackend
from commbackend.errors import Unsupported

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron_world import (
    apart,
    connect,
    gpt,
    megatron_ranks,
    model,
    one_batch,
    stock_spec,
    tp_group,
    two_micro_batches,
    wrapped,
)

from commbackend.integrations import megatron as ours

Facts = dict[Any, Any]
ROOT = Path(__file__).parents[1]


# -- one run of two ranks ---------------------------------------------------------------------------------------------
def _apex_stand_in() -> Any:
    """What APEX's kernels do, so that stock layers run with gradient_accumulation_fusion too."""

    def accumulate(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(dy.t() @ x)

    layers = ours.stock
    kernels = mock.Mock(wgrad_gemm_accum_fp32=accumulate)
    return mock.patch.multiple(
        layers, create=True, _grad_accum_fusion_available=True, fused_weight_gradient_mlp_cuda=kernels
    )


def _compare(sequence_parallel: bool, fusion: bool, **options: Any) -> Facts:
    """Stock against ours: without a wrapper, and over two micro-batches under Megatron's DDP."""
    config = gpt.gpt_config(2, sequence_parallel, gradient_accumulation_fusion=fusion, **options)
    facts: Facts = {}
    if not fusion:
        a, b = model(config, stock_spec()), model(config, ours.layer_spec("local", strict=True))
        (loss_a, grads_a), (loss_b, grads_b) = one_batch(a), one_batch(b)
        facts["loss"], facts["grad"] = (loss_a - loss_b).abs().item(), apart(grads_b, grads_a)
        facts["largest"] = max(g.abs().max().item() for g in grads_a.values())
        facts["keys"] = list(a.state_dict()) == list(b.state_dict())
        b.load_state_dict(a.state_dict(), strict=True)
        a.load_state_dict(b.state_dict(), strict=True)
        # TransformerEngine's layers save an _extra_state; checkpoints with one, and with none, load strictly.
        state = a.state_dict()
        extra = [key for key in state if key.endswith("_extra_state")]
        b.load_state_dict({**state, **{key: torch.ones(3) for key in extra}}, strict=True)
        b.load_state_dict({key: value for key, value in state.items() if key not in extra}, strict=True)
        facts["extra states"] = len(extra)
        named = [type(m) for m in b.modules() if isinstance(m, ours.Overlapped)]
        facts["projections"] = len(named)
    a, b = wrapped(config, stock_spec()), wrapped(config, ours.layer_spec("local", strict=True))
    (losses_a, main_a), (losses_b, main_b) = two_micro_batches(a), two_micro_batches(b)
    facts["losses"] = max((x - y).abs().item() for x, y in zip(losses_a, losses_b, strict=True))
    facts["main_grad"] = apart(main_b, main_a)
    weight = b.module.decoder.layers[0].mlp.linear_fc1.weight
    facts["flag"], facts["grad is left"] = weight.grad_added_to_main_grad, weight.grad is not None
    return facts


def _two_ranks() -> Facts:
    torch.use_deterministic_algorithms(True)
    facts: Facts = {}
    for transport in ("shm", "gloo"):
        comm = connect(transport)
        for sp in (False, True):
            facts[transport, sp, False] = _compare(sp, False)
            with _apex_stand_in():
                facts[transport, sp, True] = _compare(sp, True)
        facts[transport] = comm.stats()
        comm.close()
    facts["off"] = _off()
    facts["fallbacks"] = _fallbacks()
    facts["wishes"] = _wishes()
    facts["model"] = _whole_model()
    facts["forms"] = _forms()
    return facts


def _off() -> Facts:
    """``transport="off"``: stock layers' own code."""
    comm = connect("off")
    config = gpt.gpt_config(2, True)
    stock, off = model(config, stock_spec()), model(config, ours.layer_spec("local", strict=True))
    (loss_a, grads_a), (loss_b, grads_b) = one_batch(stock), one_batch(off)
    found = {"apart": max((loss_a - loss_b).abs().item(), apart(grads_b, grads_a)), "stats": comm.stats()}
    comm.close()
    return found


def _layer(cls: type, config: Any, **options: Any) -> Any:
    common = {"init_method": config.init_method, "bias": True, "skip_bias_add": False}
    given = {"gather_output": False} if cls is ours.ColumnParallelLinear else {"input_is_parallel": True}
    layer = cls(32, 32, config=config, **{**common, **given, **options})
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(0.125)
    return layer


def _fallbacks() -> Facts:
    """Options that keep a layer stock: each is counted by its name, gives stock's values, and raises under strict."""
    comm = connect("shm")
    column, row = ours.ColumnParallelLinear, ours.RowParallelLinear
    x, half = torch.ones(4, 2, 32), torch.ones(4, 2, 16)

    class Offloading:
        inside_context = True

    cases: dict[str, tuple[type, dict[str, Any], dict[str, Any], torch.Tensor]] = {
        "gather_output": (column, {}, {"gather_output": True}, x),
        "deterministic_mode": (row, {"deterministic_mode": True}, {}, half),
        "batch_invariant_mode": (row, {"batch_invariant_mode": True}, {}, half),
        "cpu_offloading": (column, {"_cpu_offloading_context": Offloading()}, {}, x),
        "fp8 recipe (local projections do not quantise)": (row, {"fp8": "hybrid"}, {}, half),
        "fp4 recipe (local projections do not quantise)": (column, {"fp4": "e2m1"}, {}, x),
        "input_is_parallel=False": (row, {}, {"input_is_parallel": False}, x),
        "no communication in this layer": (column, {}, {"disable_grad_reduce": True}, x),
        "expert layers communicate in the token dispatcher": (
            row, {}, {"is_expert": True, "skip_bias_add": True}, half,
        ),
        "defer_embedding_wgrad_compute": (column, {"defer_embedding_wgrad_compute": True}, {
            "grad_output_buffer": [], "embedding_activation_buffer": [],
        }, x),
    }  # fmt: skip
    facts: Facts = {}
    for reason, (cls, settings, options, given) in cases.items():
        config = gpt.gpt_config(2, False)
        for name, value in settings.items():
            setattr(config, name, value)
        before = comm.stats()["fallback_by_op"]
        layer = _layer(cls, config, tp_group=tp_group(), **options)
        out = layer(given)[0]
        after = comm.stats()["fallback_by_op"]
        counted = [key for key, n in after.items() if n != before.get(key, 0)]
        want = cls.__mro__[2](
            32, 32, config=config, init_method=config.init_method, bias=True,
            **{"skip_bias_add": False, **({"gather_output": False} if cls is column else {"input_is_parallel": True}),
               "tp_group": tp_group(), **options},
        )  # fmt: skip
        want.load_state_dict(layer.state_dict())
        same = torch.equal(out, want(given)[0])
        layer.strict = True
        try:
            layer(given)
            strict = "ran"
        except Unsupported as e:
            strict = str(e)
        facts[reason] = (counted, same, strict)
    comm.close()
    return facts


def _wishes() -> Facts:
    """A tp-comm-overlap file by argument: calls of the named layers follow it, forward and backward apart."""
    from commbackend.integrations import te_config

    cfg = te_config.parse(
        {
            "fc1_fprop": {"method": "ring_exchange"},
            "proj_fprop": {"method": "pipeline", "num_splits": 2},
            "qkv_dgrad": {"method": "pipeline", "num_splits": 4},
        }
    )
    comm = commbackend.init(tp_group(), device="cpu", transport="shm")  # the automatic choice is "sequence" here
    config = gpt.gpt_config(2, True, num_layers=1)
    a = model(config, stock_spec())
    b = model(config, ours.layer_spec("local", overlap_cfg=cfg))
    (loss_a, grads_a), (loss_b, grads_b) = one_batch(a), one_batch(b)
    found = {"apart": max((loss_a - loss_b).abs().item(), apart(grads_b, grads_a)), "stats": comm.stats()}
    comm.close()
    return found


def _whole_model() -> Facts:
    """A model that is built already: its output layer too."""
    comm = connect("shm")
    config = gpt.gpt_config(2, True, num_layers=1)
    a, b = model(config, stock_spec()), model(config, stock_spec())
    found: Facts = {"exchanged": ours.overlap_model(b, strict=True)}
    (loss_a, grads_a), (loss_b, grads_b) = one_batch(a), one_batch(b)
    found["apart"] = max((loss_a - loss_b).abs().item(), apart(grads_b, grads_a))
    for name, mode in {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.items():
        with mode():
            found[name] = (gpt.loss_of(b, 5) - loss_a).abs().item()
    with torch.autocast("cpu", torch.bfloat16):
        loss_b, grads_b = one_batch(b)  # Megatron's own layers fail here: their backward scatters into another type
    found["autocast"] = max((loss_a - loss_b).abs().item(), apart(grads_b, grads_a))
    checkpoint = torch.utils.checkpoint.checkpoint
    for layer in b.decoder.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    loss_b, grads_b = one_batch(b)
    loss_a, grads_a = one_batch(a)
    found["checkpoint"] = max((loss_a - loss_b).abs().item(), apart(grads_b, grads_a))
    for m in (a, b):
        for name, p in m.decoder.named_parameters():
            p.requires_grad_("norm" in name)  # as with adapters: projections are frozen, gradients pass through them
        m.zero_grad()
        gpt.loss_of(m, 5).backward()
    grads_a, grads_b = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (a, b))
    found["frozen"] = (apart(grads_b, grads_a), len(grads_a) < len(list(a.parameters())))
    found["stats"] = comm.stats()
    comm.close()
    return found


def _forms() -> Facts:
    """Other models: grouped and gated ones, Megatron's own recomputation, tied embeddings, a step after one that
    failed, a compiled layer.
    """
    from megatron.core.tensor_parallel import random

    @contextlib.contextmanager
    def cpu_states() -> Iterator[None]:
        """Megatron's recomputation restores random states of torch.cuda."""
        states = {"_get_all_rng_states": lambda: (), "_set_all_rng_states": lambda *a: None}
        with mock.patch.multiple(random, _fork_rng=contextlib.nullcontext, **states):
            yield

    def failed(m: Any) -> None:
        hook = m.decoder.layers[0].mlp.linear_fc2.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            one_batch(m)
        hook.remove()

    def compiled(m: Any) -> None:
        m.decoder.layers[0].mlp.compile(backend="aot_eager", fullgraph=True)

    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    forms: dict[str, tuple[dict[str, Any], Callable[[Any], None] | None]] = {
        "grouped, gated": ({"num_query_groups": 2, "gated_linear_unit": True, "add_bias_linear": False}, None),
        "recompute": (whole, None),
        "recompute attention": ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, None),
        "tied": ({}, None),
        "failed before": ({}, failed),
        "compiled": ({}, compiled),
    }
    comm = connect("shm")
    facts: Facts = {}
    for name, (options, change) in forms.items():
        config = gpt.gpt_config(2, True, num_layers=1, **options)
        tied = {"share_embeddings_and_output_weights": True} if name == "tied" else {}
        a, b = model(config, stock_spec(), **tied), model(config, stock_spec(), **tied)
        ours.overlap_model(b, strict=True)
        if change is not None:
            change(b)
        with cpu_states():
            (loss_a, grads_a), (loss_b, grads_b) = one_batch(a), one_batch(b)
        facts[name] = max((loss_a - loss_b).abs().item(), apart(grads_b, grads_a))
    comm.close()
    return facts


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    return megatron_ranks(_two_ranks, 2, 2, tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_loss_gradients_and_checkpoint_keys_are_those_of_stock(
    two: list[Facts], transport: str, sequence_parallel: bool
) -> None:
    for facts in (rank[transport, sequence_parallel, False] for rank in two):
        assert facts["largest"] > 1e-3  # there are gradients to compare
        assert (facts["loss"], facts["grad"]) == (0.0, 0.0)
        assert facts["keys"] and facts["projections"] == 8 and facts["extra states"] >= 8


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("fusion", [False, True])
def test_main_grad_over_two_micro_batches_is_that_of_stock(
    two: list[Facts], transport: str, sequence_parallel: bool, fusion: bool
) -> None:
    for facts in (rank[transport, sequence_parallel, fusion] for rank in two):
        assert (facts["losses"], facts["main_grad"]) == (0.0, 0.0)
        assert facts["flag"] is fusion and not facts["grad is left"]


@pytest.mark.parametrize(("transport", "how"), [("shm", "push"), ("gloo", "collective")])
def test_calls_were_overlapped(two: list[Facts], transport: str, how: str) -> None:
    for facts in (rank[transport] for rank in two):
        assert facts["fallback"] == 0
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "dgrad_reduce_scatter"):
            assert facts["overlapped_by_op"][f"{op}/{how}"] > 0
        assert any(key.startswith("matmul_all_reduce/") for key in facts["overlapped_by_op"])
        assert any(key.startswith("dgrad_all_reduce/") for key in facts["overlapped_by_op"])


def test_off_is_stock_to_the_bit_and_counted(two: list[Facts]) -> None:
    for facts in (rank["off"] for rank in two):
        assert facts["apart"] == 0.0
        assert facts["stats"]["overlapped"] == 0
        assert facts["stats"]["fallback_by_op"] == {
            "all_gather_matmul/transport is off": 4,
            "matmul_reduce_scatter/transport is off": 4,
        }


def test_what_is_not_fused_runs_stock_is_counted_and_raises_under_strict(two: list[Facts]) -> None:
    for facts in (rank["fallbacks"] for rank in two):
        for reason, (counted, same, strict) in facts.items():
            assert len(counted) == 1 and counted[0].endswith(f"/{reason}"), (reason, counted)
            assert same, reason
            assert reason in strict and "strict=False" in strict, (reason, strict)


def test_a_tp_comm_overlap_file_steers_the_named_layers(two: list[Facts]) -> None:
    for facts in (rank["wishes"] for rank in two):
        assert facts["apart"] == 0.0
        stats = facts["stats"]
        # fc1 forward, proj forward, qkv backward follow the file; fc2 and the others keep the automatic choice.
        assert stats["overlapped_by_op"] == {
            "all_gather_matmul/push": 1,
            "matmul_reduce_scatter/push": 1,
            "dgrad_reduce_scatter/push": 1,
        }
        assert stats["fallback_by_op"]["all_gather_matmul/sequence"] > 0


def test_a_built_model_is_overlapped_with_its_output_layer(two: list[Facts]) -> None:
    for facts in (rank["model"] for rank in two):
        assert facts["exchanged"] == 5
        assert facts["apart"] == 0.0
        assert facts["stats"]["fallback"] == 0


def test_other_models_recomputation_and_compilation(two: list[Facts]) -> None:
    for facts in (rank["forms"] for rank in two):
        assert len(facts) == 6 and set(facts.values()) == {0.0}, facts


def test_modes_and_frozen_projections(two: list[Facts]) -> None:
    for facts in (rank["model"] for rank in two):
        assert (facts["no_grad"], facts["inference_mode"], facts["checkpoint"]) == (0.0, 0.0, 0.0)
        assert facts["frozen"] == (0.0, True)
        assert 0 < facts["autocast"] <= 5e-2  # from float32


# -- specs, in this process -------------------------------------------------------------------------------------------
def _projections(spec: Any) -> list[type]:
    layer = spec.submodules
    attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
    return [attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2]


def test_specs_for_the_command_line_are_globals_of_the_module() -> None:
    from megatron.core.transformer.spec_utils import ModuleSpec

    column, row = ours.ColumnParallelLinear, ours.RowParallelLinear
    for name in ("local_spec", "local_rmsnorm_spec"):
        spec = vars(ours)[name]
        assert isinstance(spec, ModuleSpec)
        assert _projections(spec) == [column, row, column, row]


def test_a_spec_is_copied_and_only_stock_projections_are_exchanged() -> None:
    class Mine(ours.stock.RowParallelLinear):  # type: ignore[misc]
        pass

    spec = stock_spec()
    spec.submodules.mlp.submodules.linear_fc2 = Mine
    made = ours.overlapped(spec)
    assert _projections(made)[3] is Mine and _projections(made)[0] is ours.ColumnParallelLinear
    assert _projections(spec)[0] is ours.stock.ColumnParallelLinear
    assert made.submodules.sharded_state_dict_keys_map == spec.submodules.sharded_state_dict_keys_map


def test_experts_and_latent_attention_are_exchanged_too() -> None:
    spec = ours.layer_spec("local", num_experts=4, multi_latent_attention=True)
    attention = spec.submodules.self_attention.submodules
    assert attention.linear_q_up_proj is ours.ColumnParallelLinear
    assert attention.linear_proj is ours.RowParallelLinear
    experts = spec.submodules.mlp.submodules.experts
    assert experts.submodules.linear_fc2 is ours.RowParallelLinear


def test_the_provider_serves_builders_that_take_one() -> None:
    mlp = ours.gpt_layer_specs.get_mlp_module_spec_for_backend(backend=ours.OverlapSpecProvider())
    assert mlp.submodules.linear_fc1 is ours.ColumnParallelLinear
    assert mlp.submodules.linear_fc2 is ours.RowParallelLinear


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ours.layer_spec("apex"), commbackend.ConfigError, "'local' or 'te'"),
        (lambda: ours.layer_spec("te"), commbackend.Unavailable, "TransformerEngine"),
    ],
)
def test_bad_bases_are_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    if ours.HAVE_TE and error is commbackend.Unavailable:
        pytest.skip("TransformerEngine is installed")
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("attributes", "fusion", "sink"),
    [
        ({}, True, None),  # no wrapper yet
        ({"main_grad": 0}, False, None),
        ({"main_grad": 0}, True, "main_grad"),
        ({"main_grad": 0, "__fsdp_param__": True}, True, None),  # Megatron-FSDP overwrites its buffer
        ({"main_grad": 0, "frozen": True}, True, None),
    ],
)
def test_where_the_gradient_of_a_weight_goes(attributes: dict[str, Any], fusion: bool, sink: str | None) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2), requires_grad="frozen" not in attributes)
    for name, value in attributes.items():
        setattr(weight, name, value)
    assert ours.wgrad_sink(fusion, weight) == sink


def test_arguments_of_later_releases_keep_a_layer_stock() -> None:
    column = ours.ColumnParallelLinear
    layer = mock.Mock(explicit_expert_comm=False, gather_output=False, refusal=lambda: None, config=None)
    x = torch.ones(2, 2)
    for kwargs, reason in (
        ({"gtp_remat_size": 2}, "gtp_remat_size"),
        ({"gtp_remat_size": 1}, None),
        ({"output_dtype": torch.bfloat16}, "output_dtype"),
        ({"output_dtype": torch.float32}, None),
    ):
        assert column._refusal_of(layer, x, kwargs) == reason


# -- one run of four ranks: DP 2 x TP 2, then TP 4 --------------------------------------------------------------------
def _four_ranks(folder: str) -> Facts:
    from megatron.core import dist_checkpointing, parallel_state

    facts: Facts = {}
    comm = connect("shm")
    config = gpt.gpt_config(2, True)
    a, b = wrapped(config, stock_spec()), wrapped(config, ours.layer_spec("local", strict=True))
    (_, main_a), (_, main_b) = two_micro_batches(a), two_micro_batches(b)
    facts["main_grad"], facts["overlapped"] = apart(main_b, main_a), comm.stats()["overlapped"]
    with torch.no_grad():
        for trained in (a, b):
            for p in trained.parameters():
                p -= 0.1 * p.main_grad
    facts["loss"] = gpt.loss_of(b, 9).item()
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    saved_a = a.module.sharded_state_dict(metadata=metadata)
    saved_b = b.module.sharded_state_dict(metadata=metadata)
    facts["same keys"] = {k: getattr(v, "global_shape", None) for k, v in saved_a.items()} == {
        k: getattr(v, "global_shape", None) for k, v in saved_b.items()
    }
    # Megatron's writer has helper processes, which a daemon such as this rank may not start.
    not_daemon = mock.patch.dict(multiprocessing.current_process()._config, daemon=False)  # type: ignore[attr-defined]
    with mock.patch("torch.cuda.synchronize"), not_daemon:
        for name, state in (("stock", saved_a), ("ours", saved_b)):
            Path(folder, name).mkdir(exist_ok=True)
            torch.distributed.barrier()
            dist_checkpointing.save(state, str(Path(folder, name)))
        comm.close()
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
        comm = connect("shm")
        config = gpt.gpt_config(4, True)
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        wide: dict[str, dict[str, torch.Tensor]] = {}
        for saved, spec in (("stock", ours.layer_spec("local")), ("ours", stock_spec()), ("ours", ours.layer_spec())):
            loaded = model(config, spec)
            state = dist_checkpointing.load(loaded.sharded_state_dict(metadata=metadata), str(Path(folder, saved)))
            loaded.load_state_dict(state, strict=True)
            wide[f"{saved} {len(wide)}"] = {n: p.detach().clone() for n, p in loaded.named_parameters()}
        facts["wide"] = max(apart(wide["stock 0"], wide["ours 1"]), apart(wide["stock 0"], wide["ours 2"]))
        facts["wide loss"] = gpt.loss_of(loaded, 9).item()
        facts["wide overlapped"] = comm.stats()["overlapped"]
        comm.close()
    return facts


def test_in_a_larger_world_and_reloaded_at_another_tp_size(tmp_path: Path) -> None:
    ranks = megatron_ranks(_four_ranks, 4, 2, tmp_path, str(tmp_path))
    for facts in ranks:
        assert facts["main_grad"] == 0.0 and facts["overlapped"] > 0
        assert facts["same keys"]
        assert facts["wide"] == 0.0
        assert facts["wide loss"] == pytest.approx(facts["loss"], rel=1e-6)
        assert facts["wide overlapped"] > 0


def test_the_example_trains_as_stock_does() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/megatron_gpt.py"]
    done = subprocess.run(
        [sys.executable, *command, "--steps", "2"], env=env, cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(r"step \d+: loss (\S+), stock (\S+)", done.stdout)
    assert len(steps) == 2 and all(ours == stock for ours, stock in steps) and steps[0] != steps[1]
    assert re.search(r"over shm: [1-9]\d* overlapped calls, 0 fallbacks", done.stdout), done.stdout
