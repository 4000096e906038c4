"""The operators on GPUs: the cases that run on CPUs, torch.compile with CUDA graphs, and torch's symm_mem operators."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import test_library
import test_library_compile
import torch
import torch.distributed as dist
from ops_world import near, normal, same, spmd_gpus

import commbackend
from commbackend import ops
from commbackend.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
SIZE = 2
CASES = {
    "opcheck": (test_library.check,),
    "gradients": (test_library.gradients,),
    "inductor": (test_library_compile.compiled, "inductor"),
    "residual, norm and fp8": (test_library_compile.serving,),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    case, *args = CASES[name]
    spmd_gpus(case, SIZE, *args)


def cuda_graphs(comm):
    """``mode="reduce-overhead"``: inductor captures the operators; replays with new inputs equal eager."""
    w1, w2 = normal(1 + comm.rank, 256, 128).bfloat16(), normal(3 + comm.rank, 128, 256).bfloat16()

    def mlp(x):
        return ops.matmul_reduce_scatter(torch.relu(ops.all_gather_matmul(x, w1, comm)), w2, comm)

    model = torch.compile(mlp, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        mlp(normal(comm.rank, 64, 128).bfloat16())
        comm.prepare_capture()
        for seed in range(6):
            x = normal(10 * seed + comm.rank, 64, 128).bfloat16()
            near(model(x).clone(), mlp(x), 2e-2, seed)


def test_reduce_overhead():
    spmd_gpus(cuda_graphs, SIZE)


def routed(rank, group, folder):
    """The CUDA key of torch's operators goes through us; the process group only lends its name."""
    from commbackend.integrations import symm_mem

    count = torch.cuda.device_count()
    torch.cuda.set_device(rank % count)
    device = torch.device("cuda", rank % count)
    store = dist.FileStore(str(Path(folder) / "gloo"), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=60))
    world = dist.group.WORLD
    symm_mem.install(world, transport="userbuffers", device="cuda", allow_shared_device=count < SIZE, timeout_s=60.0)
    comm = commbackend.init(world, device="cuda")
    shards = [normal(r, 2, 32, 64).bfloat16().to(device) for r in range(SIZE)]
    b = normal(9, 48, 64).bfloat16().to(device).t()
    for dim in (0, 1):
        whole, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(shards[rank], [b], dim, world.group_name)
        same(whole, torch.cat(shards, dim))
        near(out, torch.cat(shards, dim) @ b, 1e-2)
        part = torch.ops.symm_mem.fused_matmul_reduce_scatter(shards[rank], b, "avg", dim, world.group_name)
        near(part, (sum(s.double() for s in shards) / SIZE @ b.double()).chunk(SIZE, dim)[rank], 2e-2)
    assert comm.stats()["calls"] == 4
    symm_mem.uninstall()
    comm.close()
    dist.destroy_process_group()


def test_symm_mem_operators(tmp_path):
    run_ranks(routed, SIZE, str(tmp_path), timeout_s=100.0)
