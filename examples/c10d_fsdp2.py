"""FSDP2 over torch.distributed's backend "commbackend".

torchrun --standalone --nproc-per-node 2 examples/c10d_fsdp2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from commbackend.integrations import c10d


def main() -> None:
    c10d.register()
    dist.init_process_group("cpu:commbackend")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    for layer in model:
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if dist.get_rank() == 0:
        print(f"backend {dist.get_backend()}: {dist.group.WORLD.stats()['cpu']['calls']} collectives of our own")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
