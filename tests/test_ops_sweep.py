"""Sizes: every combination that has bitten someone, on one communicator, against fp64."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from ops_world import ints, leaf, normal, same, spmd

from commbackend import ops

EXTENTS = (1, 7, 8, 16, 31, 64, 127, 128, 1000, 4096)
WORLDS = (1, 2, 3, 4, 8)


def check_size(comm, m, n, k):
    """All products of m rows a rank, n out and k in features."""
    size, rank = comm.size, comm.rank
    f32 = torch.float32
    xs, ws = [ints(r, m, k, dtype=f32) for r in range(size)], [ints(20 + r, n, k, dtype=f32) for r in range(size)]
    what = (m, n, k, size)
    same(ops.all_gather_matmul(xs[rank], ws[rank], comm), torch.cat(xs) @ ws[rank].t(), what)
    total = sum(x @ w.t() for x, w in zip(xs, ws, strict=True))
    same(ops.matmul_all_reduce(xs[rank], ws[rank], comm), total, what)
    rows = tuple(m // size + (r < m % size) for r in range(size))
    first = sum(rows[:rank])
    same(ops.matmul_reduce_scatter(xs[rank], ws[rank], comm, rows=rows), total[first : first + rows[rank]], what)


@pytest.mark.parametrize("size", WORLDS)
def test_sampled_sizes(size):
    """F002, a sample: small combinations and a few large ones."""
    every = list(itertools.product(EXTENTS, repeat=3))
    cheap = [c for c in every if c[0] * c[1] * c[2] <= 2**18]
    chosen = random.Random(size).sample(cheap, 24)

    def body(comm):
        for m, n, k in chosen:
            check_size(comm, m, n, k)

    spmd(body, size)


@pytest.mark.slow
@pytest.mark.parametrize("size", WORLDS)
def test_all_sizes(size):
    """F002, all of them up to products of 2^26 multiplications."""

    def body(comm):
        for m, n, k in itertools.product(EXTENTS, repeat=3):
            if m * n * k <= 2**26:
                check_size(comm, m, n, k)

    spmd(body, size, timeout_s=900.0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_change_at_every_call(size):
    """F001: one communicator, M growing, shrinking, empty, forward and backward; nothing stale."""

    def body(comm):
        w = ints(5, 9, 16)
        for m in (0, 1, 7, 1024, 768, 1000, 1, 0):
            xs = [ints(m + r, m, 16) for r in range(comm.size)]
            x, mine = leaf(xs[comm.rank]), leaf(w)
            out = ops.all_gather_matmul(x, mine, comm)
            full = torch.cat(xs)
            same(out, full @ w.t(), m)
            back = ops.matmul_reduce_scatter(out, mine.t(), comm)
            same(back, comm.size * xs[comm.rank] @ w.t() @ w, m)
            back.sum().backward()
            # back = size * x @ (w.t() @ w), summed over all ranks' rows by backward's reduce-scatter.
            ones = torch.ones(m, 16, dtype=torch.float64)
            same(x.grad, comm.size * ones @ (w.t() @ w), m)

    spmd(body, size)


def test_gathered_has_its_shape_for_any_n():
    """F003: the returned gathered input is (world * m, k), N = 16384 included."""

    def body(comm):
        for n in (1, 256, 16384):
            x, w = normal(comm.rank, 3, 8).float(), normal(9, n, 8).float()
            out, gathered = ops.all_gather_matmul(x, w, comm, return_gathered=True)
            assert out.shape == (6, n)
            same(gathered, torch.cat([normal(r, 3, 8).float() for r in range(2)]))

    spmd(body, 2)


@pytest.mark.parametrize("empty", ["k", "n", "lead"])
def test_empty_extents(empty):
    """No in features: zeros (and the bias); no out features or no rows in another dimension: empty."""
    m, n, k = 4, 0 if empty == "n" else 3, 0 if empty == "k" else 5

    def body(comm):
        shape = (0, m) if empty == "lead" else (2, m)
        x, w, b = leaf(ints(comm.rank, *shape, k)), leaf(ints(9, n, k)), leaf(ints(8, n))
        want = torch.nn.functional.linear(torch.cat([ints(r, *shape, k) for r in range(2)], 1), w, b)
        out = ops.all_gather_matmul(x, w, comm, dim=1, bias=b)
        same(out, want)
        out.sum().backward()
        assert x.grad.shape == x.shape and w.grad.shape == w.shape and b.grad.shape == b.shape
        total = sum(torch.nn.functional.linear(ints(r, *shape, k), w) for r in range(2))
        part = ops.matmul_reduce_scatter(x, w, comm, dim=1, bias=b)
        same(part, total[:, 2 * comm.rank : 2 * comm.rank + 2] + b)
        part.sum().backward()
        same(ops.matmul_all_reduce(x, w, comm, bias=b), total + b)
        ops.column_parallel_linear(x, w, comm).sum().backward()

    spmd(body, 2)


BOUNDS = {torch.float64: 2e-15, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_error_against_fp64(dtype, size):
    """F090: sums accumulate in fp32, so that the error stays near one rounding of the result, for any world."""

    def body(comm):
        xs = [normal(r, 32, 64, dtype=dtype) for r in range(size)]
        ws = [normal(50 + r, 24, 64, dtype=dtype) for r in range(size)]
        exact = sum(x.double() @ w.double().t() for x, w in zip(xs, ws, strict=True))
        scale = exact.abs().max()
        x, w, rows = xs[comm.rank], ws[comm.rank], 32 // size
        for got, want in (
            (ops.matmul_all_reduce(x, w, comm), exact),
            (ops.matmul_reduce_scatter(x, w, comm), exact[rows * comm.rank : rows * (comm.rank + 1)]),
            (ops.all_gather_matmul(x, w, comm), torch.cat(xs).double() @ w.double().t()),
        ):
            assert (got.double() - want).abs().max() <= BOUNDS[dtype] * scale

    spmd(body, size)
