"""all_gather_matmul, forward and backward, against autograd of the gathered reference. Integer data: equality is
exact.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from ops_world import SIZES, Cut, cuts, ints, leaf, same, spmd, spmd_processes
from torch.nn.functional import linear

from commbackend import ops

K = 6


def reference(xs, weights, biases, grads, cut):
    """Leaves and outputs of one process that holds all shards ``xs`` and every rank's weights."""
    x = leaf(torch.cat(xs, cut.dim))
    ws = [[leaf(w) for w in of] for of in weights]
    bs = [[leaf(b) if b is not None else None for b in of] for of in biases]
    outs = [[linear(x, w, b) for w, b in zip(wr, br, strict=True)] for wr, br in zip(ws, bs, strict=True)]
    sum((o * g).sum() for ro, rg in zip(outs, grads, strict=True) for o, g in zip(ro, rg, strict=True)).backward()
    return x, ws, bs, outs


def check_case(comm, cut, features, with_bias, return_gathered, save, seed, dtype=torch.float64):
    """One forward and backward of every rank; ``features`` is the out features of each weight on rank 0."""
    size, rank = comm.size, comm.rank
    xs = [ints(seed + r, *cut.local(r, K), dtype=dtype) for r in range(size)]
    # Column parallelism: ranks may hold different numbers of out features.
    weights = [[ints(seed + 50 * r + i, n + r, K, dtype=dtype) for i, n in enumerate(features)] for r in range(size)]
    biases = [
        [ints(seed + 9 + r, len(w), dtype=dtype) if b else None for w, b in zip(weights[r], with_bias)]
        for r in range(size)
    ]
    grads = [
        [ints(seed + 70 * r + i, *cut.full(len(w)), dtype=dtype) for i, w in enumerate(weights[r])] for r in range(size)
    ]
    want_x, want_w, want_b, want_out = reference(xs, weights, biases, grads, cut)

    x, ws = leaf(xs[rank]), [leaf(w) for w in weights[rank]]
    bs = [leaf(b) if b is not None else None for b in biases[rank]]
    one = len(ws) == 1
    result = ops.all_gather_matmul(
        x,
        ws[0] if one else ws,
        comm,
        dim=cut.dim - (len(cut.lead) + 1 if seed % 2 else 0),
        rows=cut.rows,
        bias=bs[0] if one else bs,
        return_gathered=return_gathered,
        save=save,
    )
    outs, gathered = result if return_gathered else (result, None)
    outs = (outs,) if one else outs
    assert isinstance(outs, tuple)
    what = (cut, features, with_bias, return_gathered, save)
    for out, want in zip(outs, want_out[rank], strict=True):
        same(out, want, what)
    if return_gathered:
        same(gathered, want_x, what)
    torch.autograd.backward(outs, grads[rank])
    same(x.grad, cut.part(want_x.grad, rank), what)
    for w, want in zip(ws, want_w[rank], strict=True):
        same(w.grad, want.grad, what)
    for b, want in zip(bs, want_b[rank], strict=True):
        if b is not None:
            same(b.grad, want.grad, what)


def every_case(comm):
    forms = itertools.cycle(
        [
            ((5,), (False,), False, "shard"),
            ((5,), (True,), True, "gathered"),
            ((4, 3), (True, False), False, "gathered"),
            ((2, 3, 4), (False,) * 3, True, "shard"),
        ]
    )
    for seed, cut in enumerate([*cuts(comm.size), *cuts(comm.size)]):
        features, with_bias, return_gathered, save = next(forms)
        check_case(comm, cut, features, with_bias, return_gathered, save, seed)


@pytest.mark.parametrize("size", SIZES)
def test_every_dimension_and_count(size):
    spmd(every_case, size)


def test_over_shared_memory():
    spmd_processes(every_case, 2)


def test_eight_ranks():
    def body(comm):
        check_case(comm, Cut((2, 0), 1, (2,) * 8), (3,), (True,), True, "shard", 3)

    spmd(body, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_types(dtype):
    def body(comm):
        check_case(comm, Cut((0,), 0, (3, 0, 2)), (4, 5), (True, True), True, "shard", 1, dtype)

    spmd(body, 3)


@pytest.mark.parametrize("shape", [(3,), (3, 4), ()], ids=str)
def test_last_dimension(shape):
    """Gathered in features: the product needs the whole of every row."""

    def body(comm):
        size, rank = comm.size, comm.rank
        counts = (3, 0, 4)
        xs = [ints(r, *shape, counts[r]) for r in range(size)]
        w, g = [ints(20 + r, 5, 7) for r in range(size)], [ints(30 + r, *shape, 5) for r in range(size)]
        full = leaf(torch.cat(xs, -1))
        want_w = [leaf(t) for t in w]
        sum((linear(full, t) * gr).sum() for t, gr in zip(want_w, g, strict=True)).backward()
        x, mine = leaf(xs[rank]), leaf(w[rank])
        out, gathered = ops.all_gather_matmul(x, mine, comm, dim=-1, rows=counts, return_gathered=True)
        same(out, linear(full, w[rank]))
        same(gathered, full)
        out.backward(g[rank])
        first = sum(counts[:rank])
        same(x.grad, full.grad[..., first : first + counts[rank]])
        same(mine.grad, want_w[rank].grad)
        assert comm.stats()["fallback_by_op"] == {"all_gather_matmul/gathered along the last dimension": 1}

    spmd(body, 3)


def test_gradient_through_gathered():
    """A loss that reads the gathered copy too, or alone."""

    def body(comm):
        size, rank = comm.size, comm.rank
        for alone in (False, True):
            xs, w = [ints(r, 3, K) for r in range(size)], ints(7, 4, K)
            factors = [ints(40 + r, 3 * size, K) for r in range(size)]
            full = leaf(torch.cat(xs))
            sum((full * f).sum() + (0 if alone else linear(full, w).sum()) for f in factors).backward()
            x = leaf(xs[rank])
            out, gathered = ops.all_gather_matmul(x, w, comm, return_gathered=True)
            loss = (gathered * factors[rank]).sum() + (0 if alone else out.sum())
            loss.backward()
            same(x.grad, full.grad[3 * rank : 3 * rank + 3], alone)

    spmd(body, 3)


def test_unused_output_of_several():
    """Only the second product reaches the loss: the first one's weight gets zeros, and all ranks make one call."""

    def body(comm):
        x, w = leaf(ints(comm.rank, 2, K)), [leaf(ints(5 + i, 3, K)) for i in range(2)]
        _, second = ops.all_gather_matmul(x, w, comm)
        second.sum().backward()
        full = torch.cat([ints(r, 2, K) for r in range(comm.size)])
        same(w[0].grad, torch.zeros(3, K, dtype=torch.float64))
        same(w[1].grad, torch.ones(len(full), 3, dtype=torch.float64).t() @ full)
        same(x.grad, comm.size * torch.ones(2, 3, dtype=torch.float64) @ w[1].detach())

    spmd(body, 2)


def test_unused_gathered_costs_no_call():
    def body(comm):
        out, _ = ops.all_gather_matmul(leaf(ints(comm.rank, 2, K)), leaf(ints(5, 3, K)), comm, return_gathered=True)
        out.sum().backward()
        assert comm.stats()["calls"] == 2

    spmd(body, 2)


FROZEN = [pattern for pattern in itertools.product((False, True), repeat=3) if any(pattern)]


@pytest.mark.parametrize("save", ["shard", "gathered"])
@pytest.mark.parametrize("needs", FROZEN, ids=str)
def test_only_what_requires_grad(needs, save):
    """Input and two weights, each frozen or not: what is not asked for is None, what is asked for is right."""

    def body(comm):
        size, rank = comm.size, comm.rank
        tensors = [ints(rank, 3, K), ints(10 + rank, 4, K), ints(20 + rank, 2, K)]
        mine = [t.requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        outs = ops.all_gather_matmul(mine[0], mine[1:], comm, save=save)
        sum(o.sum() for o in outs).backward()
        full = torch.cat([ints(r, 3, K) for r in range(size)])
        assert [t.grad is not None for t in mine] == list(needs)
        if needs[0]:
            want = sum(ints(10 + r, 4, K).sum(0) + ints(20 + r, 2, K).sum(0) for r in range(size))
            same(mine[0].grad, want.expand(3, K).clone())
        for w in [t for t, need in zip(mine[1:], needs[1:], strict=True) if need]:
            same(w.grad, full.sum(0).expand(len(w), K).clone())
        return comm.stats()["calls"]

    calls = spmd(body, 3)
    # Forward; input and weights together, or each its own call; weights alone need no call where the gathered copy
    # was saved.
    alone = 0 if save == "gathered" else 1
    mixed = needs[0] + alone * any(needs[1:]) if needs[1] != needs[2] or not needs[0] else 1
    assert calls == [1 + mixed] * 3
