"""Lightning Fabric with tensor parallelism: the styles go into the function that parallelises the model.

    torchrun --standalone --nproc-per-node 2 examples/fabric_tp.py
    torchrun --standalone --nproc-per-node 4 examples/fabric_tp.py               # two replicas of TP 2

A LightningModule does the same in ``configure_model``, with ``self.device_mesh["tensor_parallel"]``. Prints the loss,
and what was overlapped. Needs: pip install lightning-fabric
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import mse_loss, silu

import commbackend
from commbackend.config import launcher
from commbackend.integrations.dtensor import RowwiseParallel, SharedColwiseParallel  # commbackend


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(hidden, wide), nn.Linear(hidden, wide), nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(silu(self.gate(x)) * self.up(x))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What Fabric calls with the model and its mesh ("data_parallel", "tensor_parallel")."""
    plan = {"*": SharedColwiseParallel("gate", "up"), "*.down": RowwiseParallel()}  # commbackend
    parallelize_module(model, mesh["tensor_parallel"], plan)
    if mesh["data_parallel"].size() > 1:
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    ranks = launcher().local_size
    if ranks % options.tp:
        parser.error(f"--tp {options.tp} must divide the {ranks} processes: start this with torchrun")
    strategy = ModelParallelStrategy(parallelize, ranks // options.tp, options.tp)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = fabric.setup(nn.Sequential(GatedMLP(64, 128), GatedMLP(64, 128)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    mesh = strategy.device_mesh

    first = last = 0.0
    for step in range(options.steps):
        # The ranks of a TP group have the same data, replicas their own.
        generator = torch.Generator().manual_seed(10 * step + mesh["data_parallel"].get_local_rank())
        x = torch.randn(8, 128, 64, generator=generator)
        loss = mse_loss(model(x), x.roll(1, -1))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
        first = first or last
        if fabric.global_rank == 0:
            print(f"step {step}: loss {last:.4f}")

    if fabric.global_rank == 0:
        stats = commbackend.stats(mesh["tensor_parallel"])
        print(f"dp {ranks // options.tp} x tp {options.tp} over {stats['transport']}")
        for name, calls in sorted(stats["overlapped_by_op"].items()):
            print(f"  overlapped: {calls:4d} x {name}")
        for name, calls in sorted(stats["fallback_by_op"].items()):
            print(f"  in sequence: {calls:3d} x {name}")
    if not last < first:
        raise SystemExit(f"rank {fabric.global_rank}: the loss did not fall: {first:.4f}, then {last:.4f}")
    commbackend.init(mesh["tensor_parallel"], device="cpu").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
