"""Layers: equal to the unsharded modules, from full weights, with the keys, copies and marks that frameworks expect."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from ops_world import ints, leaf, near, normal, same, spmd, spmd_processes
from torch import nn as stock
from torch.nn.functional import scaled_dot_product_attention, silu

from commbackend import nn
from commbackend.errors import ConfigError, ShapeError

HIDDEN, WIDE, HEADS, KV, BATCH = 16, 24, 4, 2, 3
F64 = torch.float64


def linear(seed, inner, outer, bias=True):
    made = stock.Linear(inner, outer, bias, dtype=F64)
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            p.copy_(ints(seed + i, *p.shape))
    return made


def part(t, dim, comm):
    return t.chunk(comm.size, dim)[comm.rank]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sequence", [False, True])
def test_linear_pair_equals_one_process(size, dim, sequence):
    """Column then row layer: outputs and all gradients are parts of the full layers', exactly."""

    def body(comm):
        up, down = linear(1, HIDDEN, WIDE), linear(5, WIDE, HIDDEN)
        column = nn.ColumnParallelLinear.from_linear(up, group=comm, sequence_parallel=sequence, gather_dim=dim)
        row = nn.RowParallelLinear.from_linear(down, group=comm, sequence_parallel=sequence, scatter_dim=dim)
        full, grad = leaf(ints(9, 8, 8, HIDDEN)), ints(10, 8, 8, HIDDEN)
        want = down(up(full))
        want.backward(grad)
        mine = (lambda t: part(t, dim, comm)) if sequence else (lambda t: t)
        x = leaf(mine(full))
        out = row(column(x))
        same(out, mine(want))
        out.backward(mine(grad))
        nn.reduce_replicated_grads(stock.ModuleList([column, row]), comm)
        same(x.grad, mine(full.grad))
        same(column.weight.grad, part(up.weight.grad, 0, comm))
        same(column.bias.grad, part(up.bias.grad, 0, comm))
        same(row.weight.grad, part(down.weight.grad, 1, comm))
        same(row.bias.grad, down.bias.grad)

    spmd(body, size)


@pytest.mark.parametrize("bias", [False, True])
def test_uneven_sequence(bias):
    def body(comm):
        up, down, rows = linear(1, HIDDEN, WIDE, bias), linear(5, WIDE, HIDDEN, bias), (5, 0, 2)
        column = nn.ColumnParallelLinear.from_linear(up, group=comm, sequence_parallel=True)
        row = nn.RowParallelLinear.from_linear(down, group=comm, sequence_parallel=True)
        full = ints(9, 7, HIDDEN)
        out = row(column(full.split(rows)[comm.rank], rows), rows)
        same(out.detach(), down(up(full)).split(rows)[comm.rank].detach())

    up_to_three = 3
    assert WIDE % up_to_three == 0
    spmd(body, up_to_three)


class ReferenceMLP(stock.Module):
    def __init__(self, bias):
        super().__init__()
        self.norm = stock.RMSNorm(HIDDEN, 1e-5, dtype=F64)
        self.gate_proj, self.up_proj = (stock.Linear(HIDDEN, WIDE, bias, dtype=F64) for _ in range(2))
        self.down_proj = stock.Linear(WIDE, HIDDEN, bias, dtype=F64)

    def forward(self, x):
        h = self.norm(x)
        return self.down_proj(silu(self.gate_proj(h)) * self.up_proj(h))


class ReferenceAttention(stock.Module):
    def __init__(self, dim, rope_base, bias):
        super().__init__()
        self.dim, self.rope_base, self.width = dim, rope_base, HIDDEN // HEADS
        self.norm = stock.RMSNorm(HIDDEN, 1e-5, dtype=F64)
        self.q_proj = stock.Linear(HIDDEN, HIDDEN, bias, dtype=F64)
        self.k_proj, self.v_proj = (stock.Linear(HIDDEN, KV * self.width, bias, dtype=F64) for _ in range(2))
        self.o_proj = stock.Linear(HIDDEN, HIDDEN, bias, dtype=F64)

    def turn(self, t):
        """Pairs (i, i + half) as complex numbers, turned by position * base ** (-2 i / head_dim)."""
        half = self.width // 2
        i, position = torch.arange(half, dtype=F64), torch.arange(t.shape[-2], dtype=F64)
        angle = position[:, None] * self.rope_base ** (-2 * i / self.width)
        turned = torch.complex(t[..., :half], t[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), -1)

    def forward(self, x):
        x = x if self.dim == 1 else x.transpose(0, 1)
        h = self.norm(x)
        q, k, v = (
            p(h).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rope_base is not None:
            q, k = self.turn(q), self.turn(k)
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        y = self.o_proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y if self.dim == 1 else y.transpose(0, 1)


class ReferenceBlock(stock.Module):
    def __init__(self, dim, rope_base, bias):
        super().__init__()
        self.attention, self.mlp = ReferenceAttention(dim, rope_base, bias), ReferenceMLP(bias)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


def seeded(seed, make):
    """A reference module with weights of its own, the same on every rank (ranks may be threads: no global seed)."""
    made = make()
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            p.copy_(0.3 * normal(seed + i, *p.shape) + (p.dim() == 1))
    return made


def block_case(comm, dim, sequence, rope_base, bias):
    """A whole block: output, input gradient, every parameter's gradient, and how many gathers that took."""
    full = seeded(3, lambda: ReferenceBlock(dim, rope_base, bias))
    options = {"sequence_parallel": sequence, "dim": dim, "bias": bias, "dtype": F64, "rope_base": rope_base}
    mine = nn.TransformerBlock(HIDDEN, WIDE, HEADS, KV, group=comm, **options)
    mine.load_full(full.state_dict())
    length = 6 * comm.size
    shape = (length, BATCH, HIDDEN) if dim == 0 else (BATCH, length, HIDDEN)
    cut = (lambda t: part(t, dim, comm)) if sequence else (lambda t: t)
    want_x, grad = leaf(normal(4, *shape)), normal(5, *shape)
    want = full(want_x)
    want.backward(grad)
    x = leaf(cut(want_x))
    out = mine(x)
    out.backward(cut(grad))
    nn.reduce_replicated_grads(mine, comm)
    near(out, cut(want), 1e-12)
    near(x.grad, cut(want_x.grad), 1e-12)
    reference = dict(full.named_parameters())
    assert reference.keys() == dict(mine.named_parameters()).keys()
    for name, p in mine.named_parameters():
        whole = reference[name].grad
        # Some gradients are nothing but rounding (of key biases, which softmax ignores).
        near(p.grad, whole if p.partition_dim < 0 else part(whole, p.partition_dim, comm), 1e-12, name, scale=1.0)
    stats = comm.stats()["overlapped_by_op"] | comm.stats()["fallback_by_op"]
    gathers = sum(n for op, n in stats.items() if op.startswith("all_gather_matmul"))
    # Forward: one for q/k/v, one for gate/up; backward: one for o, one for down.
    assert gathers == (4 if sequence else 0)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("dim", "sequence", "rope_base", "bias"),
    [(0, True, 1e4, False), (1, True, None, True), (0, False, None, False), (1, False, 1e4, True)],
)
def test_transformer_block_equals_one_process(size, dim, sequence, rope_base, bias):
    spmd(block_case, size, dim, sequence, rope_base, bias)


def test_transformer_block_over_shared_memory():
    spmd_processes(block_case, 2, 0, True, 1e4, False)


def test_layer_norm_between_sharded_activations():
    def body(comm):
        full = stock.LayerNorm(HIDDEN, dtype=F64)
        mine = nn.LayerNorm(HIDDEN, sequence_parallel=True, dtype=F64)
        x = normal(3, 4 * comm.size, HIDDEN)
        (full(x) * normal(4, *x.shape)).sum().backward()
        (mine(part(x, 0, comm)) * part(normal(4, *x.shape), 0, comm)).sum().backward()
        nn.reduce_replicated_grads(mine, comm)
        near(mine.weight.grad, full.weight.grad, 1e-12)
        near(mine.bias.grad, full.bias.grad, 1e-12)

    spmd(body, 3)


def test_reduction_of_replicated_grads():
    """Only marked parameters, one call a dtype, main_grad where there is one, no call for nothing."""

    def body(comm):
        marked = [nn.RMSNorm(4, sequence_parallel=True, dtype=d) for d in (torch.float32, F64, torch.float32)]
        plain = nn.RMSNorm(4)
        module = stock.ModuleList([*marked, plain])
        for m in module:
            m.weight.grad = torch.full_like(m.weight, comm.rank + 1.0)
        marked[2].weight.main_grad = torch.full((4,), comm.rank + 10.0)
        nn.reduce_replicated_grads(module, comm)
        assert comm.stats()["calls"] == 2
        assert marked[0].weight.grad.tolist() == marked[1].weight.grad.tolist() == [3.0] * 4
        assert marked[2].weight.main_grad.tolist() == [21.0] * 4
        assert marked[2].weight.grad.tolist() == plain.weight.grad.tolist() == [comm.rank + 1.0] * 4
        nn.reduce_replicated_grads(plain, comm)
        assert comm.stats()["calls"] == 2
        nn.mark_replicated(plain.weight)
        nn.reduce_replicated_grads(plain, comm)
        assert plain.weight.grad.tolist() == [3.0] * 4
        # A module's mark is for its copies too, whose parameters are new ones; a shared parameter is summed once.
        inner = stock.Linear(2, 2, bias=False)
        nn.mark_replicated(stock.ModuleList([inner]))
        copied = copy.deepcopy(stock.ModuleList([inner, stock.Linear(2, 2, bias=False)]))
        copied[1].weight = copied[0].weight
        copied[0].weight.grad = torch.full((2, 2), comm.rank + 1.0)
        nn.reduce_replicated_grads(copied, comm)
        assert copied[0].weight.grad.tolist() == [[3.0] * 2] * 2

    spmd(body, 2)


def test_reduction_uses_the_group_of_the_layers():
    """Not the default group, which with data parallelism is another one."""

    def body(comm):
        mlp = nn.GatedMLP(HIDDEN, WIDE, group=comm, sequence_parallel=True)
        mlp(normal(comm.rank, 4, HIDDEN, dtype=torch.float32)).sum().backward()
        want = nn.ops.all_reduce(mlp.norm.weight.grad, comm)
        nn.reduce_replicated_grads(mlp)
        same(mlp.norm.weight.grad, want)
        with pytest.raises(ConfigError, match="belong to 0 groups"):
            nn.reduce_replicated_grads(mlp.norm)

    spmd(body, 2)


def marks(module):
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
    return {k: tuple(getattr(p, n) for n in names) for k, p in module.named_parameters()}


def test_marks_survive_copies():
    """Attributes for gradient norms and checkpoints: after deepcopy, pickled state, meta init, and dtype changes."""

    def body(comm):
        block = nn.GatedMLP(HIDDEN, WIDE, group=comm, sequence_parallel=True, bias=True)
        want = {
            "norm.weight": (False, -1, 1, True),
            **{f"{p}_proj.{t}": (True, 0, 1, False) for p, t in itertools.product(("gate", "up"), ("weight", "bias"))},
            "down_proj.weight": (True, 1, 1, False),
            "down_proj.bias": (False, -1, 1, True),
        }
        assert marks(block) == want
        twin = copy.deepcopy(block)
        assert marks(twin) == want and twin.comm is block.comm is comm
        assert all(a is not b and torch.equal(a, b) for a, b in zip(twin.parameters(), block.parameters(), strict=True))
        assert marks(twin.to(torch.bfloat16)) == want
        meta = nn.GatedMLP(HIDDEN, WIDE, group=comm, sequence_parallel=True, bias=True, device="meta")
        assert all(p.is_meta for p in meta.parameters())
        meta.to_empty(device="cpu")
        assert marks(meta) == want
        file = io.BytesIO()
        torch.save(block.state_dict(), file)
        file.seek(0)
        meta.load_state_dict(torch.load(file, weights_only=True))
        x = normal(1, 4, HIDDEN, dtype=torch.float32)
        same(meta(x), block(x))
        # A copy trains by itself.
        meta(x).sum().backward()
        assert block.gate_proj.weight.grad is None

    spmd(body, 2)


def test_state_dict_has_the_keys_of_linear():
    def body(comm):
        full = linear(1, HIDDEN, WIDE)
        for kind, shape in (
            (nn.ColumnParallelLinear, (WIDE // 2, HIDDEN)),
            (nn.RowParallelLinear, (WIDE, HIDDEN // 2)),
        ):
            made = kind(HIDDEN, WIDE, group=comm, dtype=F64)
            assert list(made.state_dict()) == list(full.state_dict()) == ["weight", "bias"]
            assert made.weight.shape == shape
            assert list(kind(HIDDEN, WIDE, False, group=comm).state_dict()) == ["weight"]
            with pytest.raises(TypeError, match="belongs to its process"):
                torch.save(made, io.BytesIO())

    spmd(body, 2)


def test_init_is_that_of_the_full_layer():
    """Ranks seeded alike hold the parts of the layer that one process with that seed holds."""
    spmd_processes(init_case, 2)


def init_case(comm):
    for kind, dims in ((nn.ColumnParallelLinear, (0, 0)), (nn.RowParallelLinear, (1, None))):
        torch.manual_seed(7)
        full = stock.Linear(HIDDEN, WIDE)
        torch.manual_seed(7)
        made = kind(HIDDEN, WIDE, group=comm)
        same(made.weight, part(full.weight, dims[0], comm))
        same(made.bias, full.bias if dims[1] is None else part(full.bias, dims[1], comm))


def test_loading_refuses_what_does_not_fit():
    def body(comm):
        full = linear(1, HIDDEN, WIDE)
        made = nn.ColumnParallelLinear(HIDDEN, WIDE, group=comm, dtype=F64)
        with pytest.raises(ConfigError, match="missing \\['bias'\\], unknown \\['extra'\\]"):
            made.load_full({"weight": full.weight, "extra": full.bias})
        made.load_full({"weight": full.weight}, strict=False)
        same(made.weight, part(full.weight, 0, comm))
        with pytest.raises(ShapeError, match=f"bias has shape \\(2,\\), the full shape is \\({WIDE},\\)"):
            made.load_full({"weight": torch.zeros(WIDE, HIDDEN), "bias": torch.zeros(2)})
        same(made.weight, part(full.weight, 0, comm))
        # This rank's part is not the full weight.
        with pytest.raises(ShapeError, match="weight"):
            made.load_full(made.state_dict())
        with pytest.raises(ConfigError, match="to_empty"):
            nn.ColumnParallelLinear(HIDDEN, WIDE, group=comm, device="meta").load_full(full.state_dict())

    spmd(body, 2)


def test_loading_into_a_model_with_other_modules():
    def body(comm):
        def model(make):
            return stock.Sequential(stock.Embedding(10, HIDDEN, dtype=F64), make(), stock.BatchNorm1d(WIDE, dtype=F64))

        full = model(lambda: linear(1, HIDDEN, WIDE))
        full[2].running_mean.fill_(3.0)
        mine = model(lambda: nn.ColumnParallelLinear(HIDDEN, WIDE, group=comm, dtype=F64))
        nn.load_full(mine, full.state_dict())
        same(mine[0].weight, full[0].weight)
        same(mine[1].weight, part(full[1].weight, 0, comm))
        same(mine[2].running_mean, full[2].running_mean)

    spmd(body, 2)


def test_sizes_that_do_not_divide():
    def body(comm):
        with pytest.raises(ShapeError, match="out_features=7 does not divide by the 2 ranks"):
            nn.ColumnParallelLinear(4, 7, group=comm)
        with pytest.raises(ShapeError, match="in_features=7"):
            nn.RowParallelLinear(7, 4, group=comm)
        with pytest.raises(ShapeError, match="3 heads"):
            nn.Attention(12, 3, group=comm)
        with pytest.raises(ShapeError, match="dim=2"):
            nn.Attention(12, 4, group=comm, dim=2)
        with pytest.raises(ShapeError, match="\\(4, 12\\)"):
            nn.Attention(12, 4, group=comm)(torch.zeros(4, 12))

    spmd(body, 2)


def test_layers_that_share_an_input_must_agree():
    def body(comm):
        a = nn.ColumnParallelLinear(4, 8, group=comm, sequence_parallel=True)
        b = nn.ColumnParallelLinear(4, 8, group=comm, sequence_parallel=True, gather_dim=1)
        with pytest.raises(ConfigError, match="gather_dim, not \\[0, 1\\]"):
            nn.column_parallel(torch.zeros(2, 2, 4), a, b)

    spmd(body, 2)


def test_wgrad_reaches_the_layers():
    def body(comm):
        got = []
        mlp = nn.GatedMLP(HIDDEN, WIDE, group=comm, sequence_parallel=True, wgrad=lambda w, g: got.append(w), dtype=F64)
        mlp(normal(1, 4, HIDDEN)).sum().backward()
        weights = [mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight]
        assert [w is g for w, g in zip(weights, got, strict=True)] == [True] * 3
        assert all(w.grad is None for w in weights) and mlp.norm.weight.grad is not None

    spmd(body, 2)
