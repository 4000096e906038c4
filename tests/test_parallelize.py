"""commbackend.parallelize: models of plain torch modules train over ranks as they do in one process."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from dtensor_world import gloo_ranks
from ops_world import near, normal, same, spmd, spmd_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commbackend
from commbackend.errors import ConfigError, ShapeError, Unsupported
from commbackend.integrations.module import divided, full_state_dict, parallelize
from commbackend.nn import load_full, reduce_replicated_grads

VOCAB, HIDDEN, HEADS, WIDE, BATCH, LENGTH = 24, 16, 4, 24, 2, 8
SIZE = 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.v_proj, self.o_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(HIDDEN, WIDE),
            nn.Linear(HIDDEN, WIDE),
            nn.Linear(WIDE, HIDDEN),
        )

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(HIDDEN), Attention(), nn.LayerNorm(HIDDEN), MLP()
        self.recompute = False

    def run(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.recompute else self.run(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


PLAN = {
    "embed": "split",
    "layers.*.{norm1,norm2}": "replicated",
    "norm": "replicated",
    "layers.*.attn": [divided("num_heads")],
    "layers.*.attn.{q,k,v}_proj": "column",
    "layers.*.attn.o_proj": "row",
    "layers.*.mlp.{gate,up}_proj": "column",
    "layers.*.mlp.down_proj": "row",
    "lm_head": "column_joined",
}


with torch.random.fork_rng():
    torch.manual_seed(1)
    STOCK = Model().double()


def stock():
    # Ranks may be threads, which share torch's generator.
    return copy.deepcopy(STOCK)


def batch(step):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def loss_of(model, step):
    ids, labels = batch(step)
    return functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def train(model, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        reduce_replicated_grads(model) if any(hasattr(p, "partition_dim") for p in model.parameters()) else None
        optimizer.step()
        losses.append(loss.item())
    return losses


def trains(comm, sequence_parallel):
    reference, model = stock(), stock()
    names = list(model.state_dict())
    assert parallelize(model, PLAN, comm, sequence_parallel=sequence_parallel, dim=1) is model
    assert list(model.state_dict()) == names
    calls = comm.stats()["calls"]
    loss_of(model, 0)
    made = comm.stats()["calls"] - calls
    # A gather for q, k and v, one for gate and up, two scatters, a layer; the ends, and the logits. Without sequence
    # parallelism columns are local forward, and rows sum.
    assert made == (2 * 4 + 2 if sequence_parallel else 2 * 2 + 1), made
    near(torch.tensor(train(model)), torch.tensor(train(reference)), 1e-12)
    whole = full_state_dict(model)
    want = reference.state_dict()
    assert whole.keys() == want.keys()
    for name in want:
        near(whole[name], want[name], 1e-11, name)
    # Ours -> stock -> ours, strictly.
    back = stock()
    back.load_state_dict(whole, strict=True)
    again = parallelize(stock(), PLAN, comm, sequence_parallel=sequence_parallel, dim=1)
    load_full(again, back.state_dict())
    for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
        same(a, b)
    near(loss_of(again, 5), loss_of(back, 5), 1e-12)
    near(loss_of(copy.deepcopy(again), 5), loss_of(again, 5), 0.0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_trains_as_in_one_process(size, sequence_parallel):
    spmd(trains, size, sequence_parallel, timeout_s=90.0)


def whole_head(comm):
    """The head stays whole: the last norm's output is joined before it."""
    reference, plan = stock(), {**PLAN, "norm": "join"}
    del plan["lm_head"]
    for sequence_parallel in (False, True):
        model = parallelize(stock(), plan, comm, sequence_parallel=sequence_parallel, dim=1)
        near(torch.tensor(train(model)), torch.tensor(train(copy.deepcopy(reference))), 1e-12)


def test_a_head_that_stays_whole():
    spmd(whole_head, SIZE)


def ways(comm):
    reference = stock()
    want = train(reference)
    # Activation checkpointing.
    model = stock()
    for layer in model.layers:
        layer.recompute = True
    near(torch.tensor(train(parallelize(model, PLAN, comm, sequence_parallel=True, dim=1))), torch.tensor(want), 1e-12)
    # One graph, forward and backward.
    model = parallelize(stock(), PLAN, comm, sequence_parallel=True, dim=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    near(loss_of(compiled, 3), loss_of(model, 3), 1e-12)
    grads = []
    for m in (compiled, model):
        model.zero_grad()
        loss_of(m, 3).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        near(a, b, 1e-10)
    with torch.inference_mode():
        same(model(batch(1)[0]), model(batch(1)[0]))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.float().layers[0].mlp.up_proj(torch.ones(1, 2, HIDDEN)).dtype == torch.bfloat16
    # Gradient accumulation: two halves make the whole.
    first = stock()
    parallelize(first, PLAN, comm, sequence_parallel=True, dim=1)
    for step in (0, 1):
        (loss_of(first, step) / 2).backward()
    reduce_replicated_grads(first)
    second = stock()
    ((loss_of(second, 0) + loss_of(second, 1)) / 2).backward()
    near(first.norm.weight.grad, second.norm.weight.grad, 1e-11)


def test_ways_of_training():
    spmd_processes(ways, SIZE)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(HIDDEN, WIDE) for _ in range(2))

    def forward(self, x):
        return sum(p(x) for p in self.projections)


class Twisted(nn.Module):
    """A parent that calls its layers as told, and says what came."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, WIDE), nn.Linear(HIDDEN, WIDE, bias=False)
        self.outs = []

    def forward(self, *calls):
        self.outs = [call(self) for call in calls]
        return sum(y.sum() for y in self.outs)


with torch.random.fork_rng():
    torch.manual_seed(2)
    TWISTED = Twisted().double()


def together(comm):
    """What shares a gather never gives a stale product."""
    reference = TWISTED
    model = parallelize(copy.deepcopy(reference), {"{gate,up}_proj": "column"}, comm, sequence_parallel=True)

    def part(t):
        n = t.shape[-1] // SIZE
        return t.narrow(-1, comm.rank * n, n)

    def shard(t):
        return t.narrow(0, comm.rank * 3, 3).clone()

    x, y = normal(1, 6, HIDDEN), normal(2, 6, HIDDEN)
    a, b, c = shard(x), shard(y), shard(x)
    gate_x, up_y = part(reference.gate_proj(x)), part(reference.up_proj(y))

    def calls_of(*calls):
        before = comm.stats()["calls"]
        model(*calls)
        return comm.stats()["calls"] - before

    assert calls_of(lambda m: m.gate_proj(a), lambda m: m.up_proj(a)) == 1
    near(model.outs[0], gate_x, 1e-12)
    # Another input in between; one that was taken already.
    took = calls_of(lambda m: m.gate_proj(a), *3 * [lambda m: m.up_proj(b)], lambda m: m.gate_proj(a))
    assert took == 5, took
    for got, want in zip(model.outs, (gate_x, up_y, up_y, up_y, gate_x), strict=True):
        near(got, want, 1e-12)
    # Written in between: what waits for up_proj is of old values.
    model(lambda m: m.gate_proj(c), lambda m: (c.copy_(b), m.up_proj(c))[1])
    near(model.outs[1], up_y, 1e-12)

    def without_gradients(m):
        with torch.no_grad():
            return m.gate_proj(a)

    model(without_gradients, lambda m: m.up_proj(a))
    assert model.outs[1].requires_grad  # a product made without gradients is none with them
    # Outside the parent's forward, and after one that failed, each works alone.
    with pytest.raises(ZeroDivisionError):
        model(lambda m: m.gate_proj(a), lambda m: 1 / 0)
    near(model.up_proj(a), part(reference.up_proj(x)), 1e-12)
    near(model.up_proj(b), up_y, 1e-12)

    # Layers in a list are called by what holds the list.
    with torch.random.fork_rng():
        listed = Listed().double()
    listed = parallelize(listed, {"projections.{0,1}": "column"}, comm, sequence_parallel=True)
    before = comm.stats()["calls"]
    listed(a)
    assert comm.stats()["calls"] - before == 1

    # A checkpoint around one of the layers, of either kind: recomputed without the others, to the same gradients.
    def recomputed(layers, given, reentrant):
        layers.zero_grad()
        given.requires_grad_()
        layers(
            lambda m: checkpoint(m.gate_proj, given, use_reentrant=reentrant).square(), lambda m: m.up_proj(given)
        ).backward()
        return layers.gate_proj.weight.grad, layers.up_proj.weight.grad, given.grad

    for reentrant in (False, True):
        grads = [recomputed(reference, x.clone(), reentrant), recomputed(model, shard(x), reentrant)]
        (gate, up, dx), got = grads[0], grads[1]
        rows = slice(comm.rank * WIDE // SIZE, (comm.rank + 1) * WIDE // SIZE)
        for mine, want in zip(got, (gate[rows], up[rows], shard(dx)), strict=True):
            near(mine, want, 1e-11)


def test_shared_gathers():
    spmd_processes(together, SIZE)


def refused(comm):
    def attempt(kind, match, plan, model=None):
        model = model or stock()
        before = {n: id(m) for n, m in model.named_modules()}
        with pytest.raises(kind, match=match):
            parallelize(model, plan, comm)
        assert before == {n: id(m) for n, m in model.named_modules()}

    attempt(ConfigError, r"'layers\.\*\.mlp\.dwon_proj' matches no module", {"layers.*.mlp.dwon_proj": "row"})
    attempt(ConfigError, "style 'colum' is none of column, row", {"lm_head": "colum"})
    attempt(
        ConfigError,
        r"'layers\.0\.mlp\.up_proj' is matched twice",
        {"layers.*.mlp.up_proj": "column", "layers.0.mlp.{up}_proj": "column"},
    )
    attempt(Unsupported, "norm is a LayerNorm: 'column' is for torch.nn.Linear", {"norm": "column"})
    attempt(
        ShapeError,
        r"layers\.0\.attn\.num_heads=3 does not divide by the 2 ranks",
        {"layers.0.attn": divided("num_heads")},
        _with(stock(), lambda m: setattr(m.layers[0].attn, "num_heads", 3)),
    )
    attempt(
        ShapeError,
        r"odd\.out_features=7 does not divide by the 2 ranks",
        {"odd": "column"},
        nn.ModuleDict({"odd": nn.Linear(4, 7)}),
    )
    attempt(
        ShapeError,
        r"odd\.in_features=7 does not divide by the 2 ranks",
        {"odd": "row"},
        nn.ModuleDict({"odd": nn.Linear(7, 4)}),
    )
    attempt(
        ConfigError,
        r"lm_head shares a parameter with embed\.weight: untie",
        {"lm_head": "column"},
        _with(stock(), lambda m: setattr(m.lm_head, "weight", m.embed.weight)),
    )
    attempt(
        Unsupported,
        "lm_head has _forward_hooks, which would be lost",
        {"lm_head": "column"},
        _with(stock(), lambda m: m.lm_head.register_forward_hook(print)),
    )
    attempt(
        Unsupported,
        "lm_head has parametrizations",
        {"lm_head": "column"},
        _with(stock(), lambda m: nn.utils.parametrizations.weight_norm(m.lm_head)),
    )
    model = parallelize(stock(), PLAN, comm, sequence_parallel=True, dim=1)
    with pytest.raises(ShapeError, match=r"dim 1 of \(1, 3, 16\) does not divide by the 2 ranks"):
        model(torch.zeros(1, 3, dtype=torch.long))

    # The root, frozen weights, meta weights, a callable that makes the module.
    root = parallelize(nn.Linear(4, 6).requires_grad_(False), {"": "column"}, comm)
    assert root.weight.shape == (3, 4) and not root.weight.requires_grad and not root.bias.requires_grad
    with torch.device("meta"):
        meta = nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})
    parallelize(meta, {"up": "column", "down": "row"}, comm)
    assert meta["up"].weight.shape == (3, 4) and meta["down"].weight.is_meta
    other = parallelize(
        stock(), {"norm": lambda module, name, c: nn.Identity() if c is comm and name == "norm" else None}, comm
    )
    assert isinstance(other.norm, nn.Identity)
    return commbackend.parallelize is parallelize and commbackend.full_state_dict is full_state_dict


def _with(model, change):
    change(model)
    return model


def test_what_is_refused():
    assert spmd(refused, SIZE) == [True, True]


def _grads(model):
    model.zero_grad()
    loss_of(model, 0).backward()


def replaced_parameters(rank):
    """What a plan says of parameters also holds for those that take their place."""
    comm = commbackend.init(device="cpu")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = stock()
    _grads(reference)

    def plain(model):
        return model

    def copied(model):
        return copy.deepcopy(model)

    def emptied(model):
        with torch.device("meta"):
            meta = Model().double()
        meta = parallelize(meta, PLAN, mesh["tp"], sequence_parallel=True, dim=1).to_empty(device="cpu")
        load_full(meta, reference.state_dict())
        return meta

    def sharded(model):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    for change in (plain, copied, emptied, sharded):
        model = change(parallelize(stock(), PLAN, mesh["tp"], sequence_parallel=True, dim=1))
        _grads(model)
        reduce_replicated_grads(model)
        for name in ("embed.weight", "layers.0.norm1.weight", "layers.1.attn.o_proj.bias", "norm.bias"):
            got = model.get_parameter(name).grad
            got = got.full_tensor() if hasattr(got, "full_tensor") else got
            near(got, reference.get_parameter(name).grad, 1e-12, f"{change.__name__} {name}")
        whole = full_state_dict(model)
        for name, value in reference.state_dict().items():
            near(whole[name], value, 0.0, f"{change.__name__} {name}")
    replicas = DistributedDataParallel(
        parallelize(stock(), PLAN, mesh["tp"], sequence_parallel=True, dim=1), process_group=mesh["dp"].get_group()
    )
    _grads(replicas)
    reduce_replicated_grads(replicas)
    near(replicas.module.norm.bias.grad, reference.norm.bias.grad, 1e-12)
    with pytest.raises(ConfigError, match="sharded by FSDP2"):
        load_full(model, reference.state_dict())
    with pytest.raises(TypeError, match="belongs to its process"):
        pickle.dumps(parallelize(stock(), PLAN, comm, dim=1))
    return comm.size


def test_copies_empty_weights_and_fsdp2_keep_what_the_plan_says(tmp_path):
    assert gloo_ranks(replaced_parameters, 4, tmp_path) == [4] * 4
