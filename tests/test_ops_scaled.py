"""fp8 operands with scales: values against fp64, types, what travels, and what is refused before a byte moves."""

from __future__ import annotations

import pytest
import torch
from ops_world import spmd, spmd_processes

from commbackend import ops
from commbackend.communicator import Communicator
from commbackend.errors import ShapeError, Unsupported, UnsupportedDtype

F8 = (torch.float8_e4m3fn, torch.float8_e5m2)
K, N = 32, 48


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(_where())


def positive(seed, *shape):
    return torch.rand(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(_where()) + 0.5


def _where():
    return torch.get_default_device()


def close(found, want, dtype):
    """Accumulated in fp32 (tensor cores keep a few bits less), rounded once."""
    bound = torch.finfo(dtype).eps * want.abs() + 2.0**-12 * want.abs().max() + 1e-6
    assert found.dtype == dtype
    assert bool(((found.double() - want).abs() <= bound).all()), (found.double() - want).abs().max()


def scales_of(by_row, seed, rows, features):
    """Of x's rows and of the weight's."""
    return (positive(seed, rows, 1), positive(seed + 1, features)) if by_row else (positive(7), positive(seed + 1, 1))


def gathers(comm):
    for dtype in F8:
        for by_row in (False, True):
            for out_dtype in (torch.bfloat16, torch.float32):
                counts = [6 + 5 * r for r in range(comm.size)]
                xs = [drawn(r, c, K).to(dtype) for r, c in enumerate(counts)]
                sas = [scales_of(by_row, 20 + r, c, N)[0] for r, c in enumerate(counts)]
                ws, sbs = zip(*((drawn(40 + i, n, K).to(dtype), scales_of(by_row, 50, 1, n)[1]) for i, n in PAIR))
                bias = drawn(60, N).to(out_dtype)
                outs, whole = ops.all_gather_matmul(
                    xs[comm.rank], ws, comm, rows=counts, bias=[bias, None], return_gathered=True,
                    scale_a=sas[comm.rank], scale_b=sbs, out_dtype=out_dtype,
                )  # fmt: skip
                assert whole.dtype == dtype and torch.equal(whole.view(torch.uint8), torch.cat(xs).view(torch.uint8))
                x = torch.cat([x.double() * s.double() for x, s in zip(xs, sas, strict=True)])
                for out, w, sb, b in zip(outs, ws, sbs, (bias.double(), 0.0), strict=True):
                    close(out, x @ (w.double() * sb.double().reshape(-1, 1)).t() + b, out_dtype)


PAIR = ((0, N), (1, 2 * N))


def reduces(comm):
    for dtype in F8:
        for by_row in (False, True):
            for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
                x = drawn(70 + comm.rank, 2, 8 * comm.size, K).to(dtype)
                w = drawn(80 + comm.rank, N, K).to(dtype)
                sa, sb = scales_of(by_row, 90 + comm.rank, 16 * comm.size, N)
                sa = sa.view(2, -1, 1) if by_row else sa
                options = {"scale_a": sa, "scale_b": sb, "out_dtype": out_dtype}
                total = ops.matmul_all_reduce(x, w, comm, **options)
                part = ops.matmul_reduce_scatter(x, w, comm, dim=1, **options)
                by_feature = ops.matmul_reduce_scatter(x, w, comm, dim=-1, **options)
                mine = (x.double() * sa.double()) @ (w.double() * sb.double().reshape(-1, 1)).t()
                want = ops.all_reduce(mine, comm)
                # Partials are rounded to the type of the result before they travel.
                slack = torch.finfo(out_dtype).eps * ops.all_reduce(mine.abs(), comm)
                for found, exact, room in (
                    (total, want, slack),
                    (part, want.chunk(comm.size, 1)[comm.rank], slack.chunk(comm.size, 1)[comm.rank]),
                    (by_feature, want.chunk(comm.size, -1)[comm.rank], slack.chunk(comm.size, -1)[comm.rank]),
                ):
                    assert found.dtype == out_dtype and found.shape == exact.shape
                    bound = 2 * room + 2.0**-12 * exact.abs().max()
                    assert bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", [gathers, reduces])
def test_values(case, size):
    spmd(case, size)


@pytest.mark.parametrize("case", [gathers, reduces])
def test_values_over_shared_memory(case):
    spmd_processes(case, 2)


def no_rows(comm):
    x, w = torch.empty(0, K, dtype=F8[0]), drawn(1, N, K).to(F8[0])
    options = {"scale_a": torch.ones(0, 1), "scale_b": torch.ones(N)}
    for op in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        assert op(x, w, comm, **options).shape == (0, N)


def test_no_rows():
    spmd(no_rows, 3)


def wire(comm):
    """Shards travel as fp8: half the bytes of bf16."""
    x, w = drawn(1, 512, 256).to(F8[0]), drawn(2, 64, 256).to(F8[0])
    ops.all_gather_matmul(x, w, comm, scale_a=torch.ones(()), scale_b=torch.ones(()))
    scaled = comm.stats()["symmetric_nbytes"]
    ops.all_gather_matmul(x.bfloat16(), w.bfloat16(), comm)
    return scaled, comm.stats()["symmetric_nbytes"]


def test_what_is_gathered_travels_as_fp8():
    for scaled, wide in spmd(wire, 2):
        assert wide > 1.6 * scaled


def refused(comm: Communicator):
    x, w, one = drawn(1, 6, K).to(F8[0]), drawn(2, N, K).to(F8[0]), torch.ones(())
    ok = {"scale_a": one, "scale_b": one}
    wrong = [
        (UnsupportedDtype, "without both scale_a and scale_b", x, w, {"scale_a": one}),
        (ShapeError, "1 or 6 elements", x, w, {**ok, "scale_a": torch.ones(5)}),
        (ShapeError, f"1 or {N} elements", x, w, {**ok, "scale_b": torch.ones(N - 1)}),
        (ShapeError, "of torch.float64: 1 or 6 elements of float32", x, w, {**ok, "scale_a": one.double()}),
        (ShapeError, "for fp8 operands", x.float(), w.float(), ok),
        (ShapeError, "operands must be of one type", x, w.to(torch.bfloat16), ok),
        (ShapeError, "operands must be of one type", x, w.to(F8[1]), ok),
        (ShapeError, "a bias is torch.float32", x, w, {**ok, "bias": torch.zeros(N)}),
        (UnsupportedDtype, "out_dtype=torch.float64", x, w, {**ok, "out_dtype": torch.float64}),
        (TypeError, "only fp8 operands have another", x.float(), w.float(), {"out_dtype": torch.bfloat16}),
        (ShapeError, "needed|Tensor", x, w, {**ok, "scale_a": 1.0}),
        (Unsupported, "no gradients", x, w.clone().requires_grad_(), ok),
    ]
    before = comm.stats()["calls"]
    for op in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        for error, text, a, b, options in wrong:
            with pytest.raises(error, match=text):
                op(a, b, comm, **options)
    with pytest.raises(Unsupported, match="along the last dimension"):
        ops.all_gather_matmul(x, w, comm, dim=-1, **ok)
    with pytest.raises(ShapeError, match="1 entries of scale_b for 2 weights"):
        ops.all_gather_matmul(x, (w, w), comm, **ok)
    assert comm.stats()["calls"] == before, "something was called"


def test_refused_before_a_byte_moves():
    spmd(refused, 2)
