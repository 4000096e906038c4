"""matmul_reduce_scatter, forward and backward, against autograd of the summed reference. Integer data: equality is
exact.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from ops_world import SIZES, Cut, cuts, ints, leaf, same, spmd, spmd_processes
from torch.nn.functional import linear

from commbackend import ops

N = 5


def check_case(comm, cut, with_bias, seed, dtype=torch.float64):
    """One forward and backward of every rank. Row parallelism: ranks may hold different numbers of in features."""
    size, rank = comm.size, comm.rank
    xs = [ints(seed + r, *cut.full(3 + r), dtype=dtype) for r in range(size)]
    ws = [ints(seed + 20 + r, N, 3 + r, dtype=dtype) for r in range(size)]
    bias = ints(seed + 40, N, dtype=dtype) if with_bias else None
    grads = [ints(seed + 60 + r, *cut.local(r, N), dtype=dtype) for r in range(size)]
    want_x, want_w = [leaf(t) for t in xs], [leaf(t) for t in ws]
    total = sum(linear(x, w) for x, w in zip(want_x, want_w, strict=True))
    total.backward(torch.cat(grads, cut.dim))

    x, w, b = leaf(xs[rank]), leaf(ws[rank]), leaf(bias) if with_bias else None
    dim = cut.dim - (len(cut.lead) + 1 if seed % 2 else 0)
    out = ops.matmul_reduce_scatter(x, w, comm, dim=dim, rows=cut.rows, bias=b)
    want = cut.part(total.detach(), rank)
    same(out, want if bias is None else want + bias, cut)
    out.backward(grads[rank])
    same(x.grad, want_x[rank].grad, cut)
    same(w.grad, want_w[rank].grad, cut)
    if b is not None:
        # This rank's part of the sum over all rows.
        same(b.grad, grads[rank].reshape(-1, N).sum(0), cut)


def every_case(comm):
    for seed, cut in enumerate([*cuts(comm.size), *cuts(comm.size)]):
        check_case(comm, cut, seed % 3 == 0, seed)


@pytest.mark.parametrize("size", SIZES)
def test_every_dimension_and_count(size):
    spmd(every_case, size)


def test_over_shared_memory():
    spmd_processes(every_case, 2)


def test_eight_ranks():
    spmd(lambda comm: check_case(comm, Cut((2, 0), 1, (2,) * 8), True, 3), 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_types(dtype):
    spmd(lambda comm: check_case(comm, Cut((0,), 0, (3, 0, 2)), True, 1, dtype), 3)


@pytest.mark.parametrize("lead", [(4,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 0, 4)], ids=str)
def test_last_dimension(lead, counts):
    """Scattered in out features: rows of the weight are scattered, the output is a view of the transposed result."""

    def body(comm):
        size, rank = comm.size, comm.rank
        n, first = sum(counts), sum(counts[:rank])
        mine = slice(first, first + counts[rank])
        xs, ws = [ints(r, *lead, 3 + r) for r in range(size)], [ints(20 + r, n, 3 + r) for r in range(size)]
        bias, grads = ints(40, n), [ints(60 + r, *lead, counts[r]) for r in range(size)]
        want_x, want_w = [leaf(t) for t in xs], [leaf(t) for t in ws]
        total = sum(linear(x, w) for x, w in zip(want_x, want_w, strict=True))
        total.backward(torch.cat(grads, -1))
        x, w, b = leaf(xs[rank]), leaf(ws[rank]), leaf(bias)
        rows = None if len(set(counts)) == 1 else counts
        out = ops.matmul_reduce_scatter(x, w, comm, dim=-1, rows=rows, bias=b)
        same(out, total.detach()[..., mine] + bias[mine])
        # Rows of the transposed result travelled: this is a view of them.
        assert out.numel() <= 1 or out.stride(-1) == math.prod(lead)
        # A result of ours can be changed in place, like one of linear.
        out.mul_(1.0)
        out.backward(grads[rank])
        same(x.grad, want_x[rank].grad)
        same(w.grad, want_w[rank].grad)
        want_b = torch.zeros(n, dtype=torch.float64)
        want_b[mine] = grads[rank].reshape(math.prod(lead), counts[rank]).sum(0)
        same(b.grad, want_b)

    spmd(body, 3)


FROZEN = [pattern for pattern in itertools.product((False, True), repeat=3) if any(pattern)]


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("needs", FROZEN, ids=str)
def test_only_what_requires_grad(needs, dim):
    def body(comm):
        rank = comm.rank
        x, w, b = ints(rank, 6, 4), ints(10 + rank, 6, 4), ints(5, 6)
        mine = [t.requires_grad_(need) for t, need in zip((x, w, b), needs, strict=True)]
        out = ops.matmul_reduce_scatter(x, w, comm, dim=dim, bias=b)
        out.sum().backward()
        assert [t.grad is not None for t in mine] == list(needs)
        if needs[0]:
            same(x.grad, w.detach().sum(0).expand(6, 4).clone())
        if needs[1]:
            same(w.grad, x.detach().sum(0).expand(6, 4).clone())
        return comm.stats()["calls"]

    # Forward, and one gather of the gradient unless only the bias asks.
    assert spmd(body, 3) == [1 + (needs[0] or needs[1])] * 3
