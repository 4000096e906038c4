"""How the ops live with autograd: order of backwards, accumulation, checkpoints, sinks, modes, and what they refuse."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from ops_world import ints, leaf, near, normal, same, spmd, spmd_processes
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from commbackend import ops
from commbackend.errors import ConfigError, Unsupported

HIDDEN, WIDE = 6, 8


def weights(comm, dtype=torch.float32):
    """A column weight and a row weight of this rank."""
    return [normal(10 + comm.rank, WIDE, HIDDEN, dtype=dtype), normal(20 + comm.rank, HIDDEN, WIDE, dtype=dtype)]


def pair(comm, x, up, down, **options):
    """A column product, an activation, a row product: sequence parallel."""
    h = torch.nn.functional.gelu(ops.all_gather_matmul(x, up, comm, **options))
    return ops.matmul_reduce_scatter(h, down, comm, wgrad=options.get("wgrad"))


def replicated_pair(comm, x, up, down, **options):
    h = torch.nn.functional.gelu(ops.column_parallel_linear(x, up, comm, **options))
    return ops.matmul_all_reduce(h, down, comm, **options)


PAIRS = [pair, replicated_pair]


def alone(comm, forward, seed, up, down):
    """Gradients of one micro-batch by itself: (output, dx, d up, d down)."""
    x, up, down = leaf(normal(seed, 4, HIDDEN, dtype=torch.float32)), leaf(up), leaf(down)
    out = forward(comm, x, up, down)
    out.square().sum().backward()
    return out.detach(), x.grad, up.grad, down.grad


def pipeline(comm, forward):
    """Sixteen forwards before the first backward, then all backwards in order, as pipeline schedules do."""
    up, down = (leaf(w) for w in weights(comm))
    xs = [leaf(normal(s, 4, HIDDEN, dtype=torch.float32)) for s in range(16)]
    outs = [forward(comm, x, up, down) for x in xs]
    want_up, want_down = torch.zeros_like(up), torch.zeros_like(down)
    for seed, (x, out) in enumerate(zip(xs, outs, strict=True)):
        out.square().sum().backward()
        value, dx, d_up, d_down = alone(comm, forward, seed, up, down)
        same(out, value, seed)
        same(x.grad, dx, seed)
        want_up += d_up
        want_down += d_down
        # Accumulated bit by bit as if each had been alone.
        same(up.grad, want_up, seed)
        same(down.grad, want_down, seed)


@pytest.mark.parametrize("forward", PAIRS)
def test_sixteen_forwards_before_the_first_backward(forward):
    spmd(pipeline, 3, forward)


def test_sixteen_forwards_over_shared_memory():
    spmd_processes(pipeline, 2, pair)


@pytest.mark.parametrize("forward", PAIRS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_full_recompute(forward, reentrant):
    def body(comm):
        up, down = (leaf(w) for w in weights(comm))
        x = leaf(normal(3, 4, HIDDEN, dtype=torch.float32))
        out = checkpoint(forward, comm, x, up, down, use_reentrant=reentrant)
        out.square().sum().backward()
        value, *want = alone(comm, forward, 3, up, down)
        same(out, value)
        for got, grad in zip((x, up, down), want, strict=True):
            same(got.grad, grad)

    spmd(body, 2)


def test_selective_recompute():
    """Only the middle is recomputed: the ops around it keep what they saved."""

    def body(comm):
        up, down = (leaf(w) for w in weights(comm))
        x = leaf(normal(3, 4, HIDDEN, dtype=torch.float32))
        h = ops.all_gather_matmul(x, up, comm)
        before = comm.stats()["calls"]
        out = ops.matmul_reduce_scatter(checkpoint(torch.nn.functional.gelu, h, use_reentrant=False), down, comm)
        out.square().sum().backward()
        # The row product, its backward, the column product's backward: nothing was gathered twice.
        assert comm.stats()["calls"] == before + 3
        value, *want = alone(comm, pair, 3, up, down)
        same(out, value)
        for got, grad in zip((x, up, down), want, strict=True):
            same(got.grad, grad)

    spmd(body, 2)


def test_save_modes_give_the_same_bits():
    def body(comm):
        grads = []
        for save in ("shard", "gathered"):
            up, down = (leaf(w) for w in weights(comm))
            x = leaf(normal(3, 4, HIDDEN, dtype=torch.float32))
            pair(comm, x, up, down, save=save).square().sum().backward()
            grads.append((x.grad, up.grad, down.grad))
        for shard, gathered in zip(*grads, strict=True):
            same(shard, gathered)

    spmd(body, 2)


def recorded(comm):
    """The problems that ``comm`` runs from now on."""
    problems, run = [], comm.run
    comm.run = lambda problem, tensors: (problems.append(problem), run(problem, tensors))
    return problems


def test_what_is_saved():
    """save="shard" keeps the input itself and no copy of the whole; a frozen weight keeps neither."""

    def body(comm):
        x, w = leaf(ints(comm.rank, 5, HIDDEN)), leaf(ints(9, 4, HIDDEN))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
            ops.all_gather_matmul(x, w, comm)
            assert sorted(kept) == [(4, HIDDEN), (5, HIDDEN)]
            kept.clear()
            ops.all_gather_matmul(x, w, comm, save="gathered")
            assert sorted(kept) == [(4, HIDDEN), (5 * comm.size, HIDDEN)]
            kept.clear()
            ops.all_gather_matmul(x, w.detach(), comm, save="gathered")
            assert kept == [(4, HIDDEN)]
            kept.clear()
            ops.all_gather_matmul(x.detach(), w, comm)
            assert kept == [(5, HIDDEN)]
            kept.clear()
            problems = recorded(comm)
            with torch.no_grad():
                ops.all_gather_matmul(x, w, comm, save="gathered")
            assert kept == [] and problems[-1].flags == ()

    spmd(body, 2)


def test_nothing_keeps_inputs_alive():
    def body(comm):
        x, w = leaf(ints(comm.rank, 5, HIDDEN)), leaf(ints(9, 4, HIDDEN))
        out = ops.all_gather_matmul(x, w, comm)
        seen = weakref.ref(x)
        out.sum().backward()
        del x, out
        gc.collect()
        assert seen() is None

    spmd(body, 2)


@pytest.mark.parametrize("victim", ["x", "w"])
def test_input_changed_before_backward(victim):
    def body(comm):
        x, w = leaf(ints(comm.rank, 4, HIDDEN)), leaf(ints(9, 4, HIDDEN))
        outs = [
            ops.all_gather_matmul(x, w, comm),
            ops.matmul_reduce_scatter(x, w, comm),
            ops.matmul_all_reduce(x, w, comm),
            ops.column_parallel_linear(x, w, comm),
        ]
        with torch.no_grad():
            {"x": x, "w": w}[victim].add_(1)
        for out in outs:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()

    spmd(body, 2)


def test_results_may_be_changed_in_place():
    def body(comm):
        x, w = leaf(ints(comm.rank, 4, HIDDEN)), leaf(ints(9, 4, HIDDEN))
        for op in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce, ops.column_parallel_linear):
            x.grad = None
            op(x, w, comm).mul_(2).sum().backward()
            twice = x.grad
            x.grad = None
            op(x, w, comm).sum().backward()
            same(twice, 2 * x.grad, op)

    spmd(body, 2)


def test_main_grad():
    """Megatron-Core's contract: fp32 accumulation beside bf16 weights, the flag, a dummy gradient, zeros on request."""

    def body(comm):
        for forward in PAIRS:
            plain = [leaf(w) for w in weights(comm, torch.bfloat16)]
            fused = [leaf(w) for w in weights(comm, torch.bfloat16)]
            for i, w in enumerate(fused):
                w.main_grad = torch.full(w.shape, 0.5)
                w.grad_added_to_main_grad = False
                w.zero_out_wgrad = i == 0
            for seed in range(2):
                x = normal(seed, 4, HIDDEN, dtype=torch.bfloat16)
                want_x, got_x = leaf(x), leaf(x)
                for w in (*plain, *fused):
                    w.grad = None
                before = [w.main_grad.clone() for w in fused]
                forward(comm, want_x, *plain).sum().backward()
                forward(comm, got_x, *fused, wgrad="main_grad").sum().backward()
                same(got_x.grad, want_x.grad)
                for w, want, start in zip(fused, plain, before, strict=True):
                    same(w.main_grad, start + want.grad.float())
                    assert w.grad_added_to_main_grad and w.grad is not None and w.grad.shape == w.shape
                assert not fused[0].grad.any()
        # Without the flag nobody would ignore a dummy: autograd gets nothing.
        bare = leaf(ints(1, 4, HIDDEN))
        bare.main_grad = torch.zeros(4, HIDDEN)
        ops.all_gather_matmul(ints(comm.rank, 2, HIDDEN), bare, comm, wgrad="main_grad").sum().backward()
        assert bare.grad is None and bare.main_grad.any()
        with pytest.raises(ConfigError, match="main_grad"):
            ops.matmul_all_reduce(ints(1, 2, HIDDEN), leaf(ints(1, 4, HIDDEN)), comm, wgrad="main_grad")
        with torch.no_grad():
            ops.matmul_all_reduce(ints(1, 2, HIDDEN), leaf(ints(1, 4, HIDDEN)), comm, wgrad="main_grad")

    spmd(body, 2)


def test_sharded_main_grad():
    """A weight that says where its gradient lives (``get_main_grad``) is asked."""

    def body(comm):
        w = leaf(ints(1, 4, HIDDEN))
        home = torch.zeros(4, HIDDEN)
        w.__fsdp_param__, w.get_main_grad = True, lambda: home
        ops.all_gather_matmul(ints(comm.rank, 2, HIDDEN), w, comm, wgrad="main_grad").sum().backward()
        full = torch.cat([ints(r, 2, HIDDEN) for r in range(comm.size)])
        once = full.sum(0).expand(4, HIDDEN).float()
        same(home, once)
        # ``overwrite_main_grad``: what the buffer held is no gradient. A weight that is used twice in a backward adds.
        w.overwrite_main_grad, w.grad_added_to_main_grad = True, False
        home.fill_(99)
        x = ints(comm.rank, 2, HIDDEN)
        sum(ops.all_gather_matmul(x, w, comm, wgrad="main_grad").sum() for _ in range(2)).backward()
        assert w.grad_added_to_main_grad
        same(home, 2 * once)

    spmd(body, 2)


def test_sink():
    def body(comm):
        for forward in PAIRS:
            plain = [leaf(w) for w in weights(comm)]
            up, down = (leaf(w) for w in weights(comm))
            got = []
            x = normal(1, 4, HIDDEN, dtype=torch.float32)
            forward(comm, x, *plain).sum().backward()
            forward(comm, x, up, down, wgrad=lambda w, g, to=got: to.append((w, g))).sum().backward()
            assert up.grad is None and down.grad is None
            assert [w is want for (w, _), want in zip(got, (down, up), strict=True)] == [True, True]
            for (_, g), want in zip(got, reversed(plain), strict=True):
                same(g, want.grad)
            # Under autocast it is still the caller's weight that the sink is about.
            got.clear()
            with torch.autocast("cpu", torch.bfloat16):
                out = forward(comm, x, up, down, wgrad=lambda w, g, to=got: to.append((w, g)))
            out.sum().backward()
            assert [w is want for (w, _), want in zip(got, (down, up), strict=True)] == [True, True]
            assert all(g.dtype == torch.bfloat16 for _, g in got)
            # A frozen weight has no gradient to hand over.
            ops.matmul_all_reduce(leaf(x), up.detach(), comm, wgrad=lambda w, g: pytest.fail("frozen")).sum().backward()
            with pytest.raises(ConfigError, match="wgrad"):
                ops.matmul_all_reduce(x, up, comm, wgrad="grad")

    spmd(body, 2)


@pytest.mark.parametrize("dim", [0, -1])
def test_sink_of_products_along_any_dimension(dim):
    def body(comm):
        x, got = ints(comm.rank, 4, HIDDEN // comm.size if dim else HIDDEN), []
        w = leaf(ints(9, 4, HIDDEN))
        ops.all_gather_matmul(x, w, comm, dim=dim, wgrad=lambda w, g: got.append(g)).sum().backward()
        assert w.grad is None and got[0].shape == w.shape
        w = leaf(ints(9, 4, x.shape[1]))
        ops.matmul_reduce_scatter(x, w, comm, dim=dim, wgrad=lambda w, g: got.append(g)).sum().backward()
        assert w.grad is None and got[1].shape == w.shape

    spmd(body, 2)


def test_double_backward_is_refused():
    """Only an attempt to differentiate a gradient again raises: create_graph alone does not."""

    def body(comm):
        x, w = leaf(normal(comm.rank, 4, HIDDEN)), leaf(normal(9, 4, HIDDEN))
        for op in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce, ops.column_parallel_linear):
            loss = op(x, w, comm).square().sum()
            plain = torch.autograd.grad(loss, (x, w), retain_graph=True)
            graphed = torch.autograd.grad(loss, (x, w), create_graph=True)
            for a, b in zip(plain, graphed, strict=True):
                same(a, b.detach())
            with pytest.raises(Unsupported, match=f"{op.__name__}.*double backward"):
                torch.autograd.grad(graphed[0].sum(), w)

    spmd(body, 2)


def test_no_grad_and_inference_mode():
    def body(comm):
        x, w = leaf(normal(comm.rank, 4, HIDDEN)), leaf(normal(9, 4, HIDDEN))
        calls = [
            lambda x: ops.all_gather(x, comm),
            lambda x: ops.reduce_scatter(x, comm),
            lambda x: ops.all_reduce(x, comm),
            lambda x: ops.all_gather_matmul(x, w, comm, save="gathered"),
            lambda x: ops.all_gather_matmul(x, w, comm, return_gathered=True)[1],
            lambda x: ops.matmul_reduce_scatter(x, w, comm),
            lambda x: ops.matmul_reduce_scatter(x, w, comm, dim=1),
            lambda x: ops.matmul_all_reduce(x, w, comm),
            lambda x: ops.column_parallel_linear(x, w, comm),
        ]
        for call in calls:
            want = call(x)
            for mode in (torch.no_grad(), torch.inference_mode()):
                with mode:
                    got = call(x)
                    inside = call(x * 1)  # Under inference mode, an inference tensor.
                    assert not got.requires_grad
                    same(got, want.detach())
                    same(inside, want.detach())

    spmd(body, 2)


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(lower):
    """Operands are cast as linear's are, gradients come back in the parameters' types, fp64 is left alone."""

    def body(comm):
        x, w, b = leaf(normal(1, 4, HIDDEN).float()), leaf(normal(9, 4, HIDDEN).float()), leaf(normal(8, 4).float())
        stock = [leaf(t) for t in (x, w, b)]
        with torch.autocast("cpu", lower):
            got = ops.matmul_all_reduce(x, w, comm, bias=b)
            want = linear(stock[0], stock[1])
            assert got.dtype == want.dtype == lower
            assert ops.all_gather_matmul(x, w, comm).dtype == lower
            assert ops.all_gather(x, comm).dtype == torch.float32
            assert ops.matmul_all_reduce(x.double(), w.double(), comm).dtype == torch.float64
            # Backward inside the region stays in the forward's types.
            got.sum().backward()
        (comm.size * want + stock[2].to(lower)).sum().backward()
        assert x.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32
        near(w.grad * comm.size, stock[1].grad, 2e-2)
        # A sum of all ranks' identical products; the gradient of the replicated result is local.
        near(x.grad * comm.size, stock[0].grad, 2e-2)
        # Backward inside a region, of a forward outside: in the forward's types too.
        for op, times in ((ops.all_gather_matmul, comm.size), (ops.matmul_all_reduce, 1)):
            x.grad = None
            out = op(x, w, comm)
            with torch.autocast("cpu", lower):
                out.sum().backward()
            near(x.grad, times * w.detach().sum(0).expand(4, HIDDEN), 1e-6)

    spmd(body, 2)


def test_zero_rows_join_every_backward():
    """F011: a rank without rows gets gradients of the right, empty shapes, and its weights' gradients."""

    def body(comm):
        rows = (0, *(3,) * (comm.size - 1))
        x, up, down = leaf(normal(comm.rank, rows[comm.rank], HIDDEN)), *(leaf(w.double()) for w in weights(comm))
        h = ops.all_gather_matmul(x, up, comm, rows=rows)
        out = ops.matmul_reduce_scatter(h, down, comm, rows=rows)
        assert out.shape == x.shape
        out.sum().backward()
        assert x.grad.shape == x.shape and up.grad.any() and down.grad.any()

    spmd(body, 3)


def test_backward_of_two_graphs_at_once():
    """One backward call over two losses: autograd's order is the ranks' order."""

    def body(comm):
        up, down = (leaf(w) for w in weights(comm))
        x = [leaf(normal(s, 4, HIDDEN, dtype=torch.float32)) for s in range(2)]
        outs = [pair(comm, t, up, down).square().sum() for t in x]
        torch.autograd.backward(outs)
        for s in range(2):
            _, dx, _, _ = alone(comm, pair, s, up, down)
            same(x[s].grad, dx)

    spmd(body, 2)
