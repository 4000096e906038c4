"""``matmul_all_reduce`` with a residual and RMSNorm: values, one rounding, gradients, layers, and what is refused."""

from __future__ import annotations

import pytest
import torch
from ops_world import ints, normal, spmd, spmd_processes

from commbackend import nn, ops
from commbackend.errors import ConfigError, ShapeError
from commbackend.execution.reduction import reduce_into

K, N = 24, 40


def given(comm, dtype, *lead):
    """x, w of this rank, whose products are exact; bias, residual and norm weight of all."""
    own = [ints(10 * comm.rank + i, *s, dtype=dtype) for i, s in enumerate(((*lead, K), (N, K)))]
    return own + [normal(90 + i, *s, dtype=dtype) for i, s in enumerate(((N,), (*lead, N), (N,)))]


def values(comm):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for lead in ((5,), (2, 3), (0,), (1,)):
            x, w, bias, residual, weight = given(comm, dtype, *lead)
            kept = residual.clone()
            for b in (None, bias):
                normed, total = ops.matmul_all_reduce(
                    x, w, comm, bias=b, residual=residual, norm_weight=weight, eps=1e-3
                )
                # Partials in rank order, then the residual, then the bias; rounded once.
                mine = x.reshape(-1, K) @ w.t()
                parts = ops.all_gather(mine.unsqueeze(0), comm).unbind(0)
                want = torch.empty_like(mine)
                reduce_into(want, [*parts, residual.reshape(-1, N)], b)
                if comm.size > 1:
                    assert torch.equal(total, want.view(*lead, N))
                else:
                    close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5}
                    assert torch.allclose(total, want.view(*lead, N), **close)
                other = torch.nn.functional.rms_norm(total, (N,), weight, 1e-3)
                # A kernel of ours on a GPU adds the squares in another order.
                torch.testing.assert_close(normed, other, rtol=1e-2 if normed.is_cuda else 0.0, atol=1e-5)
                assert torch.equal(ops.matmul_all_reduce(x, w, comm, bias=b, residual=residual), total)
            assert torch.equal(residual, kept), "the residual was written to"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values(size):
    spmd(values, size)


def test_values_over_shared_memory():
    spmd_processes(values, 2)


def gradients(comm):
    tensors = [t.requires_grad_() for t in given(comm, torch.float64, 4)]
    x, w, bias, residual, weight = tensors
    for norm in (False, True):
        if norm:
            normed, total = ops.matmul_all_reduce(x, w, comm, bias=bias, residual=residual, norm_weight=weight)
        else:
            total = ops.matmul_all_reduce(x, w, comm, bias=bias, residual=residual)
            normed = total
        (normed.cos().sum() + total.sin().sum()).backward()
        found = [t.grad for t in tensors[: 5 if norm else 4]]
        for t in tensors:
            t.grad = None
        plain = ops.all_reduce(x @ w.t(), comm) + residual + bias
        ref = torch.nn.functional.rms_norm(plain, (N,), weight, 1e-6) if norm else plain
        (ref.cos().sum() + plain.sin().sum()).backward()
        for a, t in zip(found, tensors, strict=False):
            assert torch.allclose(a, t.grad, rtol=1e-9, atol=1e-9)
        for t in tensors:
            t.grad = None
    # Only what asks for a gradient gets one.
    y = ops.matmul_all_reduce(x.detach(), w.detach(), comm, residual=residual)
    y.sum().backward()
    assert torch.equal(residual.grad, torch.ones_like(residual)) and x.grad is None


def test_gradients():
    spmd(gradients, 2)


def layer(comm):
    torch.manual_seed(3)
    made = nn.RowParallelLinear(K * comm.size, N, group=comm, dtype=torch.float64)
    x, _, _, residual, weight = given(comm, torch.float64, 5)
    normed, total = made(x, residual=residual, norm_weight=weight, eps=1e-4)
    want = made(x) + residual
    assert torch.allclose(total, want) and torch.allclose(made(x, residual=residual), want)
    assert torch.allclose(normed, torch.nn.functional.rms_norm(want, (N,), weight, 1e-4))
    scattering = nn.RowParallelLinear(K * comm.size, N, group=comm, sequence_parallel=True, dtype=torch.float64)
    with pytest.raises(ConfigError, match="sequence_parallel"):
        scattering(x, residual=residual)


def test_layer():
    spmd(layer, 2)


def refused(comm):
    x, w, _, residual, weight = given(comm, torch.float32, 4)
    before = comm.stats()["calls"]
    for error, text, options in (
        (ConfigError, "needs residual", {"norm_weight": weight}),
        (ShapeError, r"residual has shape \(3, 40\)", {"residual": residual[:3]}),
        (ShapeError, r"norm_weight has shape \(39,\)", {"residual": residual, "norm_weight": weight[1:]}),
        (ShapeError, "of torch.float64", {"residual": residual.double()}),
        (ShapeError, "torch.Tensor is needed", {"residual": 1.0}),
    ):
        with pytest.raises(error, match=text):
            ops.matmul_all_reduce(x, w, comm, **options)
    assert comm.stats()["calls"] == before


def test_refused_before_a_byte_moves():
    spmd(refused, 2)
