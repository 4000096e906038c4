"""Plain collectives: every dimension, every dtype, layouts, known answers, gradients."""

from __future__ import annotations

import pytest
import torch
from ops_world import SIZES, alike, cuts, ints, leaf, same, spmd, spmd_processes

from commbackend import ops
from commbackend.errors import UnsupportedDtype

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
GATHERED = [
    *FP8,
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]
SUMMED = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]


def every_cut(comm):
    size, rank = comm.size, comm.rank
    for seed, cut in enumerate(cuts(size)):
        # Without trailing features the cut dimension may be the last one.
        for features in ((), (4,)):
            xs = [ints(seed + r, *cut.local(r, *features)) for r in range(size)]
            fulls = [ints(30 + seed + r, *cut.full(*features)) for r in range(size)]
            full, total = torch.cat(xs, cut.dim), sum(fulls)
            x, y = leaf(xs[rank]), leaf(fulls[rank])
            gathered = ops.all_gather(x, comm, dim=cut.dim, rows=cut.rows)
            same(gathered, full, cut)
            part = ops.reduce_scatter(y, comm, dim=cut.dim, rows=cut.rows)
            same(part, cut.part(total, rank), cut)
            # Each is the other's gradient.
            gathered.backward(fulls[rank])
            same(x.grad, cut.part(total, rank), cut)
            part.backward(xs[rank])
            same(y.grad, full, cut)
            z = leaf(fulls[rank])
            summed = ops.all_reduce(z, comm)
            same(summed, total, cut)
            summed.backward(fulls[0])
            same(z.grad, fulls[0], cut)
    scalar = torch.tensor(float(rank + 1), requires_grad=True)
    summed = ops.all_reduce(scalar, comm)
    assert summed.shape == () and summed.item() == size * (size + 1) / 2
    summed.backward()
    assert scalar.grad == 1.0
    ops.barrier(comm)


@pytest.mark.parametrize("size", [*SIZES, 8])
def test_every_dimension_and_count(size):
    spmd(every_cut, size)


def test_over_shared_memory():
    spmd_processes(every_cut, 3)


def test_gather_of_every_dtype():
    """F012, F013: any type travels as bytes, every byte of the output is written."""

    def body(comm):
        for dtype in GATHERED:
            for dim, counts in ((0, (2, 0, 3)), (1, (1, 2, 0))):
                raw = [
                    torch.randint(
                        0,
                        2 if dtype == torch.bool else 256,
                        (12 * dtype.itemsize,),
                        dtype=torch.uint8,
                        generator=torch.Generator().manual_seed(r),
                    )
                    for r in range(comm.size)
                ]
                wide = [r.view(dtype).view(3, 4) for r in raw]
                xs = [w.narrow(dim, 0, n) for w, n in zip(wide, counts, strict=True)]
                out = ops.all_gather(xs[comm.rank], comm, dim=dim, rows=counts)
                want = torch.cat([x.contiguous().view(torch.uint8) for x in xs], dim)
                assert out.dtype == dtype and torch.equal(out.view(torch.uint8), want), (dtype, dim)

    spmd(body, 3)


def test_lazily_conjugated_and_negated_views():
    def body(comm):
        z = torch.complex(ints(comm.rank, 2, 3), ints(9 + comm.rank, 2, 3))
        for view in (z.conj(), z.conj().imag):
            want = torch.cat([v.resolve_conj().resolve_neg() for v in comm_views(comm, view)])
            same(ops.all_gather(view, comm), want)
            same(ops.all_reduce(view, comm), sum(want.split(2)))

    def comm_views(comm, view):
        every = [torch.complex(ints(r, 2, 3), ints(9 + r, 2, 3)).conj() for r in range(comm.size)]
        return [e.imag for e in every] if not view.is_complex() else every

    spmd(body, 2)


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_sums(dtype):
    def body(comm):
        xs = [ints(r, 6, 4).abs().to(dtype) for r in range(comm.size)]
        want = sum(x.to(torch.complex128) for x in xs)
        want = want.to(dtype) if dtype.is_complex else want.real.to(dtype)
        same(ops.all_reduce(xs[comm.rank], comm), want)
        same(ops.reduce_scatter(xs[comm.rank], comm), want[2 * comm.rank : 2 * comm.rank + 2])

    spmd(body, 3)


@pytest.mark.parametrize("dtype", [*FP8, torch.bool, torch.uint16], ids=str)
def test_types_without_sums(dtype):
    """F012: refused before communication, as a TypeError; the communicator goes on."""

    def body(comm):
        x = torch.ones(4, 4).to(dtype)
        for op in (ops.all_reduce, ops.reduce_scatter):
            with pytest.raises(UnsupportedDtype, match=op.__name__) as caught:
                op(x, comm)
            assert isinstance(caught.value, TypeError) and isinstance(caught.value, NotImplementedError)
        if dtype.is_floating_point:
            # Its gradient would be a sum.
            with pytest.raises(UnsupportedDtype, match="gradient of all_gather"):
                ops.all_gather(x.requires_grad_(), comm)
            with torch.no_grad():
                ops.all_gather(x, comm)
        assert ops.all_reduce(torch.ones(2), comm).tolist() == [2.0, 2.0]

    spmd(body, 2)


def layouts(t):
    """The values of 2-D ``t`` in layouts that are not dense and row-major."""
    rows, cols = t.shape
    wide = torch.full((rows, 2 * cols), 99.0, dtype=t.dtype)
    wide[:, 1 : 1 + cols] = t
    yield "sliced columns", wide[:, 1 : 1 + cols]
    spread = torch.full((rows, 3 * cols), 99.0, dtype=t.dtype)
    spread[:, ::3] = t
    yield "strided columns", spread[:, ::3]
    yield "transposed", t.t().contiguous().t()
    tall = torch.full((2 * rows + 1, cols), 99.0, dtype=t.dtype)
    tall[1::2] = t
    yield "strided rows at an offset", tall[1::2]
    yield "flipped storage", t.flip(0).contiguous().flip(0)


def test_layouts():
    """F005: strided, transposed, sliced and expanded inputs give what their dense copies give, in every op."""

    def body(comm):
        x, w = ints(comm.rank, 6, 4), ints(10 + comm.rank, 3, 4)
        calls = [
            lambda x, w: ops.all_gather(x, comm),
            lambda x, w: ops.all_gather(x, comm, dim=1),
            lambda x, w: ops.reduce_scatter(x, comm),
            lambda x, w: ops.reduce_scatter(x, comm, dim=1),
            lambda x, w: ops.all_reduce(x, comm),
            lambda x, w: ops.all_gather_matmul(x, w, comm),
            lambda x, w: ops.matmul_reduce_scatter(x, w, comm),
            lambda x, w: ops.matmul_reduce_scatter(x, w, comm, dim=1, rows=(1, 2)),
            lambda x, w: ops.matmul_all_reduce(x, w, comm),
            lambda x, w: ops.column_parallel_linear(x, w, comm),
        ]
        for i, call in enumerate(calls):
            want_x, want_w = leaf(x), leaf(w)
            want = call(want_x, want_w)
            want.sum().backward()  # The gradient is one expanded number.
            for (name, odd_x), (_, odd_w) in zip(layouts(x), layouts(w), strict=True):
                got_x, got_w = odd_x.detach().requires_grad_(), odd_w.detach().requires_grad_()
                got = call(got_x, got_w)
                same(got, want, (i, name))
                # A gradient in another layout than the output's.
                got.backward(torch.ones_like(want).t().contiguous().t())
                same(got_x.grad, want_x.grad, (i, name))
                if want_w.grad is not None:
                    same(got_w.grad, want_w.grad, (i, name))
        for call in calls:
            row = x[:1].expand(6, 4)
            same(call(row, w), call(row.contiguous(), w))

    spmd(body, 2)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_known_answers(size):
    """F087: input = rank + 1, so that sums are triangular numbers and gathers are counted off."""

    def body(comm):
        n, total = comm.rank + 1, comm.size * (comm.size + 1) / 2
        rows = 2 * comm.size
        assert ops.all_gather(torch.full((1, 2), float(n)), comm)[:, 0].tolist() == [float(r + 1) for r in range(size)]
        assert ops.all_reduce(torch.full((3,), float(n)), comm).tolist() == [total] * 3
        assert ops.reduce_scatter(torch.full((rows, 1), float(n)), comm).tolist() == [[total]] * 2
        x, w = torch.full((rows, 3), float(n)), torch.ones(4, 3)
        assert torch.equal(ops.matmul_reduce_scatter(x, w, comm), torch.full((2, 4), 3 * total))
        assert torch.equal(ops.matmul_all_reduce(x, w, comm), torch.full((rows, 4), 3 * total))
        want = torch.arange(1.0, size + 1).repeat_interleave(rows)[:, None].expand(-1, 4) * 3
        assert torch.equal(ops.all_gather_matmul(x, w, comm), want)
        replicated = torch.ones(2, 3, requires_grad=True)
        ops.column_parallel_linear(replicated, n * w, comm).sum().backward()
        assert torch.equal(replicated.grad, torch.full((2, 3), 4 * total))
        return ops.all_reduce(torch.full((5,), 0.1 * n), comm)

    alike(spmd(body, size))


def test_results_do_not_alias_the_heap():
    """Results of earlier calls stay as they were, whatever runs later on the communicator."""

    def body(comm):
        x = ints(comm.rank, 6, 4)
        kept = [op(x, comm) for op in (ops.all_gather, ops.reduce_scatter, ops.all_reduce)]
        copies = [k.clone() for k in kept]
        for seed in range(6):
            y = ints(100 + seed, 6, 4)
            ops.all_gather(y, comm), ops.reduce_scatter(y, comm), ops.all_reduce(y, comm)
        for k, c in zip(kept, copies, strict=True):
            same(k, c)
        same(x, ints(comm.rank, 6, 4))

    spmd(body, 3)
