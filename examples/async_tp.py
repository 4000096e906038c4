"""torch.compile's asynchronous tensor parallelism over commbackend: DTensor code is rewritten, nothing else changes.

    torchrun --standalone --nproc-per-node 2 examples/async_tp.py

torch's pass replaces collectives beside products by ``torch.ops.symm_mem.fused_*``, which are served here on CPUs
(compiling for them needs a C++ compiler) as on GPUs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commbackend
from commbackend.integrations import symm_mem


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(model, mesh["tp"], plan)

    symm_mem.install(mesh["tp"], device="cpu")
    compiled = torch.compile(model, options={"post_grad_custom_post_pass": symm_mem.graph_pass()})
    x = torch.randn(512, 64)[rank::size].contiguous()
    difference = (compiled(x) - model(x)).abs().max().item()
    compiled(x).square().sum().backward()

    comm = commbackend.init(mesh["tp"], device="cpu")
    served = {k: n for which in ("overlapped_by_op", "fallback_by_op") for k, n in comm.stats()[which].items()}
    if rank == 0:
        print(f"compiled and eager differ by {difference:.1e}; served over {comm.transport}: {served}")
    symm_mem.uninstall()
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
