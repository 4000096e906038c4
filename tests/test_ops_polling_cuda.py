"""Ops in their polling forms on GPUs, at sizes where these are not the default: right, with bias, in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_world import ints

from commbackend import ops
from commbackend.communicator import Communicator
from commbackend.config import resolve
from commbackend.plan import Problem
from commbackend.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

ROWS, K, N = 1024, 64, 512  # 512 KiB for a peer: above what always stays in the caller's lane


def on_gpus(rank: int, group: Any, fn: Any, *args: Any) -> Any:
    count = torch.cuda.device_count()
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    config = resolve(
        transport="userbuffers", timeout_s=60.0, allow_shared_device=group.size > count, polling="always", chunks=2
    )
    with Communicator(group, config, device) as comm, torch.no_grad():
        return fn(comm, *args)


def data(comm: Communicator, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Partial factors of every rank, and a bias; the same on all ranks, and every sum of theirs is exact in bf16."""
    xs = [ints(100 * seed + r, ROWS, K, dtype=torch.bfloat16) for r in range(comm.size)]
    ws = [ints(1000 + r, N, K, dtype=torch.bfloat16).sign() * (ints(2000 + r, N, K) > 1) for r in range(comm.size)]
    return xs, [w.bfloat16() for w in ws], ints(3000, N, dtype=torch.bfloat16)


def wanted(comm: Communicator, seed: int) -> torch.Tensor:
    xs, ws, bias = data(comm, seed)
    return sum((x.float() @ w.float().t() for x, w in zip(xs, ws, strict=True)), bias.float()).bfloat16()


def calls(comm: Communicator, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    return [ops.matmul_reduce_scatter(x, w, comm, bias=bias), ops.matmul_all_reduce(x, w, comm, bias=bias)]


def shard(comm: Communicator, full: torch.Tensor) -> torch.Tensor:
    return full[comm.rank * ROWS // comm.size : (comm.rank + 1) * ROWS // comm.size]


def check(comm: Communicator, found: list[torch.Tensor], seed: int) -> None:
    full = wanted(comm, seed)
    assert torch.equal(found[0], shard(comm, full)), f"reduce-scatter of {seed}"
    assert torch.equal(found[1], full), f"all-reduce of {seed}"


def eager(comm: Communicator) -> None:
    rows = (ROWS // comm.size,) * comm.size
    problem = Problem("matmul_reduce_scatter", rows, k=K, n=(N,), dtype="bfloat16", bias=True)
    knobs = comm.knobs(problem)
    assert knobs.polls and knobs.folds == comm.caps.free_queues
    for seed in range(20):
        xs, ws, bias = data(comm, seed)
        check(comm, calls(comm, xs[comm.rank], ws[comm.rank], bias), seed)


def captured(comm: Communicator) -> None:
    """Replays with new inputs between eager calls of the same ops."""
    xs, ws, bias = data(comm, 0)
    x, w = xs[comm.rank].clone(), ws[comm.rank]
    calls(comm, x, w, bias)
    comm.prepare_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = calls(comm, x, w, bias)
    for seed in range(60):
        x.copy_(data(comm, seed)[0][comm.rank])
        graph.replay()
        check(comm, outs, seed)
        if seed % 3 == 0:
            check(comm, calls(comm, x, w, bias), seed)


@pytest.mark.parametrize("case", [eager, captured])
def test_polling(case: Any) -> None:
    run_ranks(on_gpus, 2, case, timeout_s=100.0)
