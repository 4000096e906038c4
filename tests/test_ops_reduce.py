"""matmul_all_reduce and column_parallel_linear against one process. Integer data: equality is exact."""

from __future__ import annotations

import itertools

import pytest
import torch
from ops_world import SIZES, alike, ints, leaf, normal, same, spmd, spmd_processes
from torch.nn.functional import linear

from commbackend import ops

N = 5
LEADS = [(), (1,), (2,), (7,), (2, 3), (0,), (2, 0, 3)]


def all_reduce_cases(comm):
    size, rank = comm.size, comm.rank
    for seed, lead in enumerate(LEADS):
        xs, ws = [ints(seed + r, *lead, 3 + r) for r in range(size)], [ints(20 + r, N, 3 + r) for r in range(size)]
        bias, grad = ints(40, N), ints(60 + seed, *lead, N)
        want_x, want_w, want_b = [leaf(t) for t in xs], [leaf(t) for t in ws], leaf(bias)
        total = sum(linear(x, w) for x, w in zip(want_x, want_w, strict=True)) + want_b
        total.backward(grad)
        x, w, b = leaf(xs[rank]), leaf(ws[rank]), leaf(bias)
        out = ops.matmul_all_reduce(x, w, comm, bias=b)
        same(out, total.detach(), lead)
        out.backward(grad)
        same(x.grad, want_x[rank].grad, lead)
        same(w.grad, want_w[rank].grad, lead)
        # Whole on every rank: the result is replicated.
        same(b.grad, want_b.grad, lead)


def column_cases(comm):
    size, rank = comm.size, comm.rank
    for seed, lead in enumerate(LEADS):
        x0 = ints(seed, *lead, 6)
        ws = [[ints(20 + r, N + r, 6), ints(30 + r, 2, 6)] for r in range(size)]
        bs = [[ints(25 + r, N + r), None] for r in range(size)]
        grads = [[ints(60 + r, *lead, N + r), ints(70 + r, *lead, 2)] for r in range(size)]
        want_x, want_w = leaf(x0), [leaf(w) for w in ws[rank]]
        for r in range(size):
            for i in range(2):
                w = want_w[i] if r == rank else ws[r][i]
                (linear(want_x, w, bs[r][i]) * grads[r][i]).sum().backward()
        x, mine, b = leaf(x0), [leaf(w) for w in ws[rank]], leaf(bs[rank][0])
        outs = ops.column_parallel_linear(x, mine, comm, bias=(b, None))
        same(outs[0], linear(x0, ws[rank][0], bs[rank][0]), lead)
        same(outs[1], linear(x0, ws[rank][1]), lead)
        torch.autograd.backward(outs, grads[rank])
        same(x.grad, want_x.grad, lead)
        for w, want in zip(mine, want_w, strict=True):
            same(w.grad, want.grad, lead)
        same(b.grad, grads[rank][0].reshape(-1, N + rank).sum(0), lead)


@pytest.mark.parametrize("size", [*SIZES, 8])
def test_matmul_all_reduce(size):
    spmd(all_reduce_cases, size)


@pytest.mark.parametrize("size", SIZES)
def test_column_parallel_linear(size):
    spmd(column_cases, size)


def both(comm):
    all_reduce_cases(comm)
    column_cases(comm)


def test_over_shared_memory():
    spmd_processes(both, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_same_bits_on_all_ranks(dtype, rows):
    """F085: whichever path a size takes, every rank gets the same bits; and they are near the fp64 sum."""

    def body(comm):
        xs = [normal(r, rows, 40, dtype=dtype) for r in range(comm.size)]
        ws = [normal(9 + r, 33, 40, dtype=dtype) for r in range(comm.size)]
        product = ops.matmul_all_reduce(xs[comm.rank], ws[comm.rank], comm)
        total = ops.all_reduce(xs[comm.rank], comm)
        x = leaf(xs[0])
        ops.column_parallel_linear(x, ws[comm.rank], comm).sum().backward()
        exact = sum(a.double() @ b.double().t() for a, b in zip(xs, ws, strict=True))
        bound = comm.size * 8 * torch.finfo(dtype).eps
        assert (product.double() - exact).abs().max() <= bound * exact.abs().max()
        return torch.cat([product.reshape(-1), total.reshape(-1), x.grad.reshape(-1)])

    alike(spmd(body, 3))


FROZEN = [pattern for pattern in itertools.product((False, True), repeat=3) if any(pattern)]


@pytest.mark.parametrize("needs", FROZEN, ids=str)
def test_only_what_requires_grad(needs):
    def body(comm):
        tensors = [ints(3, 4, 6), ints(10 + comm.rank, 4, 6), ints(20 + comm.rank, 2, 6)]
        mine = [t.requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        outs = ops.column_parallel_linear(mine[0], mine[1:], comm)
        sum(o.sum() for o in outs).backward()
        assert [t.grad is not None for t in mine] == list(needs)
        if needs[0]:
            want = sum(ints(10 + r, 4, 6).sum(0) + ints(20 + r, 2, 6).sum(0) for r in range(comm.size))
            same(mine[0].grad, want.expand(4, 6).clone())
        for w in [t for t, need in zip(mine[1:], needs[1:], strict=True) if need]:
            same(w.grad, mine[0].detach().sum(0).expand(len(w), 6).clone())
        return comm.stats()["calls"]

    # Only the input's gradient is summed over ranks.
    assert spmd(body, 2) == [int(needs[0])] * 2
