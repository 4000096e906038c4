"""DTensor styles: equal to torch's and to one process in every layout; copies, checkpoints, FSDP2, modes, fallbacks."""

from __future__ import annotations

import copy
import io
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dtensor_world import Block, FeedForward, close, gloo_ranks, grads, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as stock
from torch.distributed.tensor.parallel import parallelize_module

import commbackend
from commbackend.errors import ConfigError, Unsupported
from commbackend.integrations import dtensor as ours

SEQUENCE = stock.SequenceParallel


def plan(styles, sequence_parallel: bool, dim: int = 1):
    """The plan of a Block: in ``styles`` (torch's module or ours), without sharing."""
    kept = {"input_layouts": Shard(dim)} if sequence_parallel else {}
    back = {"output_layouts": Shard(dim)} if sequence_parallel else {}
    found = {f"attention.{n}": styles.ColwiseParallel(**kept) for n in ("wq", "wk", "wv")}
    found |= {f"feed_forward.{n}": styles.ColwiseParallel(**kept) for n in ("w1", "w3")}
    found |= {n: styles.RowwiseParallel(**back) for n in ("attention.wo", "feed_forward.w2")}
    if sequence_parallel:
        found |= {n: SEQUENCE(sequence_dim=dim, use_local_output=True) for n in ("norm1", "norm2")}
    return found


def shared(sequence_parallel: bool, dim: int = 1):
    """The same with layers that share their input."""
    kept = {"input_layouts": Shard(dim)} if sequence_parallel else {}
    alone = ("attention.wo", "feed_forward.w2", "norm1", "norm2")
    found = {n: s for n, s in plan(ours, sequence_parallel, dim).items() if n in alone}
    found["attention"] = ours.SharedColwiseParallel("wq", "wk", "wv", **kept)
    found["feed_forward"] = ours.SharedColwiseParallel("w1", "w3", **kept)
    return found


def block(seed: int = 0, **sizes) -> Block:
    torch.manual_seed(seed)
    return Block(**sizes)


def data(seed: int = 1, batch: int = 3, sequence: int = 8, hidden: int = 16) -> torch.Tensor:
    return torch.randn(batch, sequence, hidden, generator=torch.Generator().manual_seed(seed))


def step(model, x, mesh, sequence_parallel: bool, dim: int = 1):
    """Output and all gradients after one backward, whole."""
    x = x.clone().requires_grad_()
    out = model(x.chunk(mesh.size(), dim)[mesh.get_local_rank()] if sequence_parallel else x)
    if sequence_parallel:
        out = DTensor.from_local(out, mesh, [Shard(dim)]).full_tensor()
    (out.square().sum() / 100).backward()
    if sequence_parallel:  # every rank has the gradient of its part
        dist.all_reduce(x.grad, group=mesh.get_group())
    return grads(model) | {"out": whole(out), "x": x.grad}


def one_process(x):
    model = block()
    x = x.clone().requires_grad_()
    out = model(x)
    (out.square().sum() / 100).backward()
    return grads(model) | {"out": whole(out), "x": x.grad.clone()}


def overlapped(before, after) -> dict[str, int]:
    """Calls by operation between two ``stats``."""
    count: dict[str, int] = {}
    for stats, sign in ((before, -1), (after, 1)):
        for name, n in (stats["overlapped_by_op"] | stats["fallback_by_op"]).items():
            op = name.split("/")[0]
            count[op] = count.get(op, 0) + sign * n
    return {op: n for op, n in count.items() if n}


# -- one step in all layouts ------------------------------------------------------------------------------------------


def layouts(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for sequence_parallel, dim in ((False, 1), (True, 1), (True, 0)):
        batch = 4 if dim == 0 else 3
        x, sp = data(batch=batch), sequence_parallel
        want = one_process(x)
        torchs = step(parallelize_module(block(), mesh, plan(stock, sp, dim)), x, mesh, sp, dim)
        close(torchs, want)
        for styles in (plan(ours, sp, dim), shared(sp, dim)):
            before = commbackend.stats(mesh)
            model = parallelize_module(block(), mesh, styles)
            close(step(model, x, mesh, sp, dim), want)
            calls = overlapped(before, commbackend.stats(mesh))
            column = 2 if "attention" in styles else 5
            if sp:
                assert calls["all_gather_matmul"] == column + 2, calls  # the backward of the row layers gathers too
                assert calls["dgrad_reduce_scatter"] == column, calls
                assert calls["matmul_reduce_scatter"] == 2, calls
            else:
                assert calls == {"matmul_all_reduce": 2, "dgrad_all_reduce": column}, calls
    return True


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_step_in_every_layout_equals_one_process(tmp_path, transport):
    """Also: q, k and v, and gate and up, share one gather and one exchange in backward where their parent says so."""
    assert gloo_ranks(layouts, 2, tmp_path, transport=transport) == [True, True]


# -- inputs, outputs and shapes of a single layer ---------------------------------------------------------------------


def linear(bias: bool = True, rows: int = 12, cols: int = 8) -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(cols, rows, bias=bias)


def compare(mesh, style: str, given, dtensor_input: bool, uneven: bool = False, bias: bool = True, **options):
    """One layer under torch's style and ours, on the same input: the same outputs and gradients."""
    results = []
    for styles in (stock, ours):
        features = 7 if uneven else 12
        layer = linear(bias, 11 if uneven else 12, features)
        layer = parallelize_module(layer, mesh, getattr(styles, style)(**options))
        batch = 2 if dtensor_input else 6  # plain parts must be equal: nothing says how they are cut
        x = torch.randn(batch, 5 if uneven else 6, features, generator=torch.Generator().manual_seed(3))
        if isinstance(given, Partial):
            x = DTensor.from_local(x / mesh.size(), mesh, [Partial()]).requires_grad_()
        else:
            x = distribute_tensor(x, mesh, [given], src_data_rank=None).requires_grad_()
        out = layer(x if dtensor_input else x.to_local())
        assert isinstance(out, DTensor) == (options.get("use_local_output") is False)
        if isinstance(out, DTensor):
            assert out.shape == (*x.shape[:2], layer.weight.shape[0]), out.shape
            (whole_out := out.full_tensor()).square().sum().backward()
            results.append({"out": whole_out.detach(), "x": whole(x.grad)} | grads(layer))
        else:
            out.square().sum().backward()
            results.append({"out": out.detach()} | grads(layer))
    close(results[1], results[0])
    return results


def single_layers(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fused = {"use_local_output": False}
    for given in (Replicate(), Shard(0), Shard(1), Shard(2), Shard(-1), Partial()):
        for out in (Shard(-1), Replicate(), Shard(1)):
            compare(mesh, "ColwiseParallel", given, True, input_layouts=given, output_layouts=out, **fused)
            compare(mesh, "RowwiseParallel", given, True, input_layouts=given, output_layouts=out, **fused)
    for given in (Replicate(), Shard(1)):
        # Sums over features, positions and parts of features that no number of ranks divides.
        compare(mesh, "ColwiseParallel", given, True, uneven=True, input_layouts=given, **fused)
        for out in (Replicate(), Shard(1), Shard(0), Shard(-1)):
            compare(mesh, "RowwiseParallel", Shard(-1), True, uneven=True, output_layouts=out, **fused)
    for given in (Replicate(), Shard(0), Shard(1)):
        compare(mesh, "ColwiseParallel", given, False, input_layouts=given)
        compare(mesh, "ColwiseParallel", given, False, bias=False, input_layouts=given)
    for out in (Replicate(), Shard(0), Shard(1)):
        compare(mesh, "RowwiseParallel", Shard(-1), False, output_layouts=out)
        compare(mesh, "RowwiseParallel", Shard(-1), False, bias=False, output_layouts=out)
    return commbackend.stats(mesh)["fallback_by_op"]


def test_single_layers_equal_torchs_styles(tmp_path):
    fallbacks = gloo_ranks(single_layers, 2, tmp_path)[0]
    reasons = {name.split("/", 1)[1] for name in fallbacks}
    assert "the input is sharded along its last dimension" in reasons
    assert any(r.startswith("the input is P") for r in reasons), reasons


def test_uneven_parts_on_three_ranks(tmp_path):
    gloo_ranks(single_layers, 3, tmp_path)


def mixed(rank):
    """Torch's layers before and after ours; what torch's hand over may still be under way."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = data().requires_grad_()
    out = reference(x)
    out.square().sum().backward()
    want = grads(reference) | {"x": x.grad.clone(), "out": out.detach()}
    for first, second in ((stock, ours), (ours, stock)):
        model = copy.deepcopy(reference)
        model.zero_grad()
        plan = {
            "0": first.ColwiseParallel(output_layouts=Replicate()),
            "1": second.ColwiseParallel(),
            "2": first.RowwiseParallel(),
            "3": second.ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, plan)
        given = data().requires_grad_()
        out = model(given)
        out.square().sum().backward()
        close(grads(model) | {"x": given.grad, "out": out.detach() + 0}, want)
    return True


def test_layers_mix_with_torchs(tmp_path):
    assert all(gloo_ranks(mixed, 2, tmp_path))


# -- independent copies -----------------------------------------------------------------------------------------------


def copies(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(block(), mesh, shared(False))
    x = data()
    ema = copy.deepcopy(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    with torch.no_grad():
        before = model(x)
        for p in ema.parameters():
            p.mul_(0.5)
        again = model(x)
        averaged = ema(x)
        torch.testing.assert_close(again, before, rtol=0, atol=0)
        half = block()
        for p in half.parameters():
            p.mul_(0.5)
        torch.testing.assert_close(averaged, half(x), rtol=1e-5, atol=1e-5)
        # Its layers share with each other, not with the original's.
        assert all(m is getattr(ema.attention, n) for m, n in zip(ema.attention.wq.shared.members, ("wq", "wk", "wv")))
        for p in model.parameters():
            p.zero_()
        torch.testing.assert_close(ema(x), averaged, rtol=0, atol=0)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=False)
        torch.testing.assert_close(loaded(x), before, rtol=0, atol=0)
    assert type(loaded.attention.wq) is ours.ColwiseLinear
    calls = commbackend.stats(mesh)
    (loaded(x).square().sum()).backward()
    assert overlapped(calls, commbackend.stats(mesh)) == {"matmul_all_reduce": 2, "dgrad_all_reduce": 2}
    return True


def test_copies_and_pickles_use_their_own_weights(tmp_path):
    """An EMA of a model must not follow the model."""
    assert all(gloo_ranks(copies, 2, tmp_path))


# -- FSDP2 and checkpoints --------------------------------------------------------------------------------------------


def fsdp(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    trained = []
    for styles in (plan(stock, True), plan(ours, True), shared(True)):
        model = nn.Sequential(block(0), block(1))
        for layer in model:
            parallelize_module(layer, mesh["tp"], styles)
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # the gradient of wk's bias is rounding
        for i in range(3):
            x = data(10 + i, batch=4).chunk(2)[mesh["dp"].get_local_rank()]
            local = x.chunk(2, 1)[mesh["tp"].get_local_rank()]
            model(local).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        trained.append({n: whole(p) for n, p in model.named_parameters()})
    close(trained[1], trained[0], 2e-5)
    close(trained[2], trained[0], 2e-5)
    state = get_model_state_dict(model)
    assert all(isinstance(t, DTensor) and t.device_mesh.ndim == 2 for n, t in state.items() if "norm" not in n)
    dcp.save({"model": state}, checkpoint_id=folder)
    dist.barrier()
    # Over TP 4 now, and into torch's styles.
    flat = init_device_mesh("cpu", (4,))
    for styles in (plan(ours, True), plan(stock, True)):
        other = nn.Sequential(block(7), block(8))
        for layer in other:
            parallelize_module(layer, flat, styles)
        empty = get_model_state_dict(other)
        dcp.load({"model": empty}, checkpoint_id=folder)
        assert other.load_state_dict(empty, strict=True).missing_keys == []
        close({n: whole(p) for n, p in other.named_parameters()}, trained[2], 0.0)
    return True


def test_fsdp2_and_checkpoints(tmp_path):
    """FSDP2 x TP equals torch's styles after three steps; the checkpoint opens over TP 4, and without commbackend."""
    assert all(gloo_ranks(fsdp, 4, tmp_path, str(tmp_path / "checkpoint")))


def state_dicts(rank):
    mesh = init_device_mesh("cpu", (2,))
    models = [
        parallelize_module(block(seed), mesh, styles)
        for seed, styles in ((0, plan(stock, True)), (1, shared(True)), (2, plan(stock, True)))
    ]
    for source, target in itertools.pairwise(models):
        target.load_state_dict(source.state_dict(), strict=True)
    close(*({n: whole(t) for n, t in m.state_dict().items()} for m in (models[2], models[0])), 0.0)
    return list(models[1].state_dict())


def test_state_dicts_go_to_stock_and_back(tmp_path):
    assert gloo_ranks(state_dicts, 2, tmp_path)[0] == list(block().state_dict())


# -- modes ------------------------------------------------------------------------------------------------------------


def modes(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = data()
    local = x.chunk(2, 1)[rank]
    model = parallelize_module(block(), mesh, shared(True))
    want = step(model, x, mesh, True)
    reference = block()

    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(model(local), want["out"].chunk(2, 1)[rank])

    model.zero_grad()
    for _ in range(2):  # gradients accumulate
        model(local).square().sum().div(100).backward()
    close(grads(model), {n: 2 * g for n, g in want.items() if n not in ("x", "out")})

    for reentrant in (False, True):  # activation checkpointing
        model.zero_grad()
        given = local.clone().requires_grad_()
        out = torch.utils.checkpoint.checkpoint(model, given, use_reentrant=reentrant)
        out.square().sum().div(100).backward()
        close(grads(model), {n: g for n, g in want.items() if n not in ("x", "out")})

    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(local)
        expected = reference(x)
    out.float().square().sum().div(100).backward()
    expected.float().square().sum().div(100).backward()
    torch.testing.assert_close(out.float(), expected.float().chunk(2, 1)[rank], rtol=0.05, atol=0.05)
    close(grads(model), grads(reference), 0.05)

    model.zero_grad()
    model.attention.wk.weight.requires_grad_(False)  # frozen, as adapters do
    model(local).square().sum().div(100).backward()
    frozen = {n: g for n, g in want.items() if n not in ("x", "out", "attention.wk.weight")}
    close(grads(model), frozen)

    with pytest.raises(RuntimeError, match="interrupted"):  # what a layer computed for others is not kept
        model.attention.wk.register_forward_pre_hook(_interrupt)
        model(local)
    assert model.attention.wq.shared._outs == {}
    return True


def _interrupt(module, args):
    raise RuntimeError("interrupted")


def test_modes(tmp_path):
    """no_grad, inference_mode, accumulation, checkpointing, autocast, frozen weights, a forward that fails."""
    assert all(gloo_ranks(modes, 2, tmp_path))


class Wayward(FeedForward):
    """Calls its layers in ways that sharing must not be fooled by."""

    way = "plain"

    def forward(self, x):
        if self.way == "checkpointed":
            gate = torch.utils.checkpoint.checkpoint(self.w1, x, use_reentrant=False)
            return self.w2(nn.functional.silu(gate) * self.w3(x))
        gate = self.w1(x)
        if self.way == "second checkpointed":
            up = torch.utils.checkpoint.checkpoint(lambda x: self.w3(x).sin(), x, use_reentrant=False)
        elif self.way == "reentrant":
            up = torch.utils.checkpoint.checkpoint(self.w3, x, use_reentrant=True)
        elif self.way == "other tensor":
            up = self.w3(x * 2)
        elif self.way == "changed in place":
            up = self.w3(_doubled(x))
        elif self.way == "no grad":
            with torch.no_grad():
                up = self.w3(x)
        elif self.way == "twice":
            up = self.w3(x) + self.w3(x) + self.w1(x)
        else:
            return self.w2(nn.functional.silu(gate))
        return self.w2(nn.functional.silu(gate) * up)


def _doubled(x):
    with torch.no_grad():
        x.mul_(2)
    return x


def wayward(rank):
    mesh = init_device_mesh("cpu", (2,))
    ways = ("plain", "other tensor", "changed in place", "no grad", "twice")
    for way in (*ways, "checkpointed", "second checkpointed", "reentrant"):
        found = []
        for parallel in (False, True):
            torch.manual_seed(0)
            model = Wayward(16, 24, True)
            model.way = way
            if parallel:
                styles = {"": ours.SharedColwiseParallel("w1", "w3"), "w2": ours.RowwiseParallel()}
                parallelize_module(model, mesh, styles)
            given = data() if way == "changed in place" else data().requires_grad_()
            out = model(given)
            if way != "changed in place":  # autograd refuses that
                out.square().sum().backward()
            found.append(grads(model) | {"out": out.detach()} | ({} if given.grad is None else {"x": given.grad}))
        uncalled = {n: found[1].pop(n) for n in found[1].keys() - found[0].keys()}
        assert way in ("plain", "no grad") or not uncalled, way
        assert all(n.startswith("w3") and g.abs().max() == 0 for n, g in uncalled.items())
        close(found[1], found[0])
        assert model.w1.shared._outs == {} and not model.w1.shared._open
        # Outside its parent's forward a layer works alone.
        torch.testing.assert_close(model.w3(data()), nn.functional.linear(data(), *map(_local, model.w3.parameters())))
        assert model.w1.shared._outs == {}
    return True


def _local(parameter):
    return parameter.to_local()


def test_sharing_is_not_fooled(tmp_path):
    """Another tensor, one changed in place, other modes, repeated and checkpointed calls, layers that nobody calls."""
    assert all(gloo_ranks(wayward, 2, tmp_path))


def compiled(rank):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = FeedForward(16, 24, True)
    reference = copy.deepcopy(model)
    kept, back = {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}
    parallelize_module(
        model, mesh, {"": ours.SharedColwiseParallel("w1", "w3", **kept), "w2": ours.RowwiseParallel(**back)}
    )
    x = data()
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(x.chunk(2, 1)[rank])
    out.square().sum().backward()
    expected = reference(x)
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected.chunk(2, 1)[rank])
    close(grads(model), grads(reference))
    return commbackend.stats(mesh)


def test_torch_compile(tmp_path):
    """In one graph; w1 and w3 share one gather there too."""
    calls = overlapped({"overlapped_by_op": {}, "fallback_by_op": {}}, gloo_ranks(compiled, 2, tmp_path)[0])
    # The second gather is the row layer's backward.
    assert calls == {"all_gather_matmul": 2, "matmul_reduce_scatter": 1, "dgrad_reduce_scatter": 1}, calls


# -- fallbacks --------------------------------------------------------------------------------------------------------


class OwnForward(nn.Linear):
    """As adapters (LoRA) do it."""

    def forward(self, x):
        return super().forward(x) * 2


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.own, self.plain = nn.Embedding(8, 8), OwnForward(8, 8), nn.Linear(8, 8)

    def forward(self, tokens):
        return self.plain(self.own(self.embed(tokens)))


class Quantised(torch.Tensor):
    pass


def fallbacks(rank):
    mesh = init_device_mesh("cpu", (2,))
    tokens = torch.arange(6).view(2, 3)
    results = []
    for styles in (stock, ours):
        torch.manual_seed(0)
        model = parallelize_module(
            Mixed(),
            mesh,
            {
                "embed": styles.RowwiseParallel(input_layouts=Replicate()),
                "own": styles.ColwiseParallel(),
                "plain": styles.RowwiseParallel(output_layouts=Partial(), use_local_output=False),
            },
        )
        out = model(tokens)
        out.full_tensor().sum().backward()
        results.append({"out": whole(out)} | grads(model))
    close(results[1], results[0])
    found = commbackend.stats(mesh)["fallback_by_op"]
    assert any("OwnForward" in name for name in found), found
    assert any("output is P" in name for name in found), found

    with pytest.raises(Unsupported, match=r"OwnForward is not torch\.nn\.Linear"):
        parallelize_module(Mixed(), mesh, {"own": ours.ColwiseParallel(strict=True)})
    strict = parallelize_module(linear(), mesh, ours.ColwiseParallel(input_layouts=Shard(-1), strict=True))
    with pytest.raises(Unsupported, match="last dimension; with strict=False"):
        strict(torch.randn(2, 4))
    with pytest.raises(ConfigError, match="two or more"):
        ours.SharedColwiseParallel("wq")

    # Weights whose numbers are not the matrix, such as quantised ones, and types that do not fit: not ours.
    quantised = parallelize_module(linear().requires_grad_(False), mesh, ours.ColwiseParallel())
    quantised.weight._local_tensor = quantised.weight._local_tensor.as_subclass(Quantised)
    quantised(torch.randn(2, 8))
    with pytest.raises(RuntimeError, match="same dtype"):  # as torch says it
        parallelize_module(linear(), mesh, ours.RowwiseParallel())(torch.randn(2, 4).bfloat16())
    found = commbackend.stats(mesh)["fallback_by_op"]
    assert "column_parallel_linear/the weight is a Quantised" in found, found
    assert "matmul_all_reduce/input is torch.bfloat16, weight is torch.float32" in found, found
    return True


def test_what_cannot_be_fused_runs_stock_and_is_counted(tmp_path):
    assert all(gloo_ranks(fallbacks, 2, tmp_path))


def off(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = data()
    for sp in (False, True):
        want = step(parallelize_module(block(), mesh, plan(stock, sp)), x, mesh, sp)
        styles = shared(sp)
        styles["feed_forward"].style.strict = True  # off was asked for: no error
        got = step(parallelize_module(block(), mesh, styles), x, mesh, sp)
        close(got, want, 0.0)
    stats = commbackend.stats(mesh)
    assert stats["overlapped"] == 0 and stats["fallback"] > 0 and stats["symmetric_nbytes"] == 0
    assert all(name.endswith("transport is off") for name in stats["fallback_by_op"])
    return True


def test_off_is_torchs_style_bitwise(tmp_path):
    assert all(gloo_ranks(off, 2, tmp_path, transport="off"))


# -- meshes -----------------------------------------------------------------------------------------------------------


def subgroups(rank):
    """F094: meshes of any shape and order, made before and after the first communicator; groups closed in any order."""
    before = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = data()
    results = [step(parallelize_module(block(), before["tp"], shared(True)), x, before["tp"], True)]
    after = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))  # TP ranks 0, 2 and 1, 3
    results.append(step(parallelize_module(block(), after["tp"], shared(True)), x, after["tp"], True))
    for found in results:
        close(found, one_process(x))
    first, second = commbackend.init(before["tp"], device="cpu"), commbackend.init(after["tp"], device="cpu")
    assert first is not second and (first.size, second.size) == (2, 2)
    order = (first, second) if rank % 2 else (second, first)
    for comm in sorted(order, key=lambda c: c is first):
        comm.close()
    # A closed communicator is made anew by the next call.
    close(step(parallelize_module(block(), before["tp"], shared(False)), x, before["tp"], False), one_process(x))
    dist.destroy_process_group(after["tp"].get_group())
    close(step(parallelize_module(block(), before["tp"], shared(False)), x, before["tp"], False), one_process(x))
    return True


def test_meshes_of_any_shape_before_and_after(tmp_path):
    assert all(gloo_ranks(subgroups, 4, tmp_path))


def destroyed_first(rank, group, folder):
    """The process group goes first, the communicator later: closing still ends well, and a new job can begin."""
    for turn in range(2):
        store = dist.FileStore(str(Path(folder) / f"gloo{turn}"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        layer = parallelize_module(linear(), mesh, ours.ColwiseParallel())
        layer(torch.ones(2, 8, requires_grad=True)).sum().backward()
        comm = commbackend.init(mesh, device="cpu")
        if turn == 0:
            dist.destroy_process_group()
            comm.close()
        else:
            comm.close()
            dist.destroy_process_group()
    return True


def test_either_may_be_destroyed_first(tmp_path):
    """F094."""
    from commbackend.testing import run_ranks

    assert run_ranks(destroyed_first, 2, str(tmp_path), timeout_s=100.0) == [True, True]


def test_feed_forward_of_the_tests_is_what_it_says():
    """The reference itself: gate times up."""
    layer = FeedForward(4, 6, True)
    x = torch.randn(2, 4)
    torch.testing.assert_close(layer(x), layer.w2(nn.functional.silu(layer.w1(x)) * layer.w3(x)))
