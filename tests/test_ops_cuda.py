"""The ops and layers on GPUs, over the userbuffers transport: the very cases that run on CPUs."""

from __future__ import annotations

import pytest
import test_nn
import test_ops_autograd
import test_ops_gather
import test_ops_plain
import test_ops_reduce
import test_ops_scatter
import torch
from ops_world import spmd_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

CASES = {
    "all_gather_matmul": (test_ops_gather.every_case,),
    "matmul_reduce_scatter": (test_ops_scatter.every_case,),
    "matmul_all_reduce": (test_ops_reduce.all_reduce_cases,),
    "column_parallel_linear": (test_ops_reduce.column_cases,),
    "plain collectives": (test_ops_plain.every_cut,),
    "sixteen forwards, sequence parallel": (test_ops_autograd.pipeline, test_ops_autograd.pair),
    "sixteen forwards, replicated": (test_ops_autograd.pipeline, test_ops_autograd.replicated_pair),
    "transformer block": (test_nn.block_case, 0, True, 1e4, False),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    case, *args = CASES[name]
    spmd_gpus(case, 2, *args)


def test_what_a_caller_did_before_and_does_after():
    """Inputs are what the current stream has made them; results can be used, and inputs overwritten, right after."""
    spmd_gpus(streams, 2)


def streams(comm):
    from commbackend import ops

    w = torch.ones(64, 256, dtype=torch.float64)
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            for step in range(20):
                x = torch.zeros(32, 256, dtype=torch.float64)
                torch.cuda._sleep(1_000_000)
                x += comm.rank + step
                out = ops.all_gather_matmul(x, w, comm)
                x.fill_(-1.0)
                total = ops.matmul_all_reduce(torch.full_like(x, 1.0 + step), w, comm)
                want = torch.arange(comm.size, dtype=torch.float64).repeat_interleave(32)[:, None] + step
                assert torch.equal(out, 256 * want.expand(-1, 64)), step
                assert torch.equal(total, torch.full_like(total, 256.0 * comm.size * (1 + step))), step
        torch.cuda.synchronize()
