"""Ops in CUDA graphs over userbuffers: replayed with new inputs, mixed with eager calls, bitwise equal to eager."""

from __future__ import annotations

import pytest
import torch
from ops_world import spmd_gpus

import commbackend
from commbackend import ops
from commbackend.errors import Unsupported

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

ROWS, K, N = 64, 128, 256


def layer(x, w, v, comm):
    """A gather, a scatter and a small all-reduce: an odd number of calls."""
    gathered = ops.all_gather_matmul(x, w, comm)
    scattered = ops.matmul_reduce_scatter(gathered, v, comm)
    return gathered, scattered, ops.matmul_all_reduce(scattered[:4], v[:, :K].contiguous(), comm)


def fresh(comm, seed, dtype=torch.bfloat16):
    g = torch.Generator(device="cuda").manual_seed(1000 * comm.rank + seed)
    return torch.randn(ROWS, K, generator=g, device="cuda", dtype=dtype)


def weights(comm, dtype=torch.bfloat16):
    g = torch.Generator(device="cuda").manual_seed(comm.rank)
    w = torch.randn(N, K, generator=g, device="cuda", dtype=dtype)
    return w, torch.randn(K, N, generator=g, device="cuda", dtype=dtype)


@torch.no_grad()
def replay(comm, rounds):
    w, v = weights(comm)
    x = fresh(comm, 0)
    with pytest.raises(Unsupported, match="prepare_capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ops.all_gather_matmul(x, w, comm)
    torch.cuda.synchronize()
    for _ in range(2):
        layer(x, w, v, comm)
    comm.prepare_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x, w, v, comm)
    for round_ in range(rounds):
        x.copy_(fresh(comm, round_))
        graph.replay()
        if round_ % 3 == 0:
            eager = layer(x, w, v, comm)
            for a, b in zip(captured, eager, strict=True):
                assert torch.equal(a, b), round_
        if round_ % 7 == 0:
            graph.replay()
    torch.cuda.synchronize()
    return comm.stats()["calls"]


def test_replays_mix_with_eager_calls():
    assert spmd_gpus(replay, 2, 1000)


@torch.no_grad()
def larger_than_prepared(comm):
    w, v = weights(comm)
    x = fresh(comm, 0)
    layer(x, w, v, comm)
    comm.prepare_capture()
    big = torch.randn(4096, K, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match="heap for captured calls"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ops.all_gather_matmul(big, w, comm)
    torch.cuda.synchronize()
    assert isinstance(layer(x, w, v, comm)[0], torch.Tensor)


def test_a_call_larger_than_prepared_says_what_to_do():
    spmd_gpus(larger_than_prepared, 2)
    assert commbackend.__version__
