"""All-reduces of few rows by one kernel, on GPUs: two ranks and three, which may share one GPU."""

from __future__ import annotations

import pytest
import torch
from ops_world import spmd_gpus

from commbackend import ops
from commbackend.execution.reduction import reduce_into

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

ROWS = (1, 2, 3, 8, 17, 64)


@pytest.mark.parametrize("size", [2, 3])
def test_eager(size):
    spmd_gpus(eager, size)


def test_captured_and_eager_calls_mix():
    spmd_gpus(captured, 2)


def drawn(seed, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to("cuda", dtype)


def everyone(comm, t):
    """Every rank's ``t``, by another way than the kernel."""
    return ops.all_gather(t.unsqueeze(0), comm).unbind(0)


def eager(comm):
    n, k = 1024, 256
    w = drawn(100 + comm.rank, n, k)
    bias, weight = drawn(1, n), drawn(2, n)
    for step, rows in enumerate((*ROWS, 0, *ROWS)):
        x = drawn(10 * step + comm.rank, rows, k)
        residual = drawn(1000 + step, rows, n)
        normed, total = ops.matmul_all_reduce(x, w, comm, bias=bias, residual=residual, norm_weight=weight, eps=1e-5)
        parts = everyone(comm, x @ w.t())
        want = torch.empty_like(total)
        reduce_into(want, [*parts, residual], bias)
        assert torch.equal(total, want), rows
        assert all(torch.equal(t, total) for t in everyone(comm, total)), rows
        assert all(torch.equal(t, normed) for t in everyone(comm, normed)), rows
        if rows:
            right = torch.nn.functional.rms_norm(want.double(), (n,), weight.double(), 1e-5)
            error = (normed.double() - right).norm() / right.norm()
            assert error < 5e-3, error
        plain = ops.all_reduce(x, comm)
        reduce_into(wanted := torch.empty_like(x), list(everyone(comm, x)), None)
        assert torch.equal(plain, wanted), rows
        torch.cuda.synchronize()
    served = {k for k in comm.stats()["overlapped_by_op"] if "all_reduce" in k}
    assert served == {"matmul_all_reduce/one_shot_kernel", "all_reduce/one_shot_kernel"}, comm.stats()


def captured(comm):
    rows, n, k = 4, 2048, 512
    w, weight = drawn(100 + comm.rank, n, k), drawn(2, n)
    x, residual = drawn(comm.rank, rows, k), drawn(7, rows, n)
    with torch.no_grad():
        ops.matmul_all_reduce(x, w, comm, residual=residual, norm_weight=weight)
        comm.prepare_capture()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.matmul_all_reduce(x, w, comm, residual=residual, norm_weight=weight)
        for step in range(25):
            x.copy_(drawn(50 * step + comm.rank, rows, k))
            for _ in range(1 + step % 3):
                graph.replay()
            got = [t.clone() for t in out]
            wanted = ops.matmul_all_reduce(x, w, comm, residual=residual, norm_weight=weight)
            assert all(map(torch.equal, got, wanted)), step
        torch.cuda.synchronize()
