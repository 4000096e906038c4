"""A norm and a gated MLP: tensor-parallel with overlap, and replicated by DistributedDataParallel.

    torchrun --standalone --nproc-per-node 4 examples/mlp_dp_tp.py --tp 2
    mpirun -n 4 python examples/mlp_dp_tp.py --tp 4

Over two hosts, with TP groups inside a host (--tp 8) or across both (--tp 16):

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST_A:29500 \\
        examples/mlp_dp_tp.py --tp 8                                       (on each host)
    mpirun -n 16 --host HOST_A:8,HOST_B:8 -x MASTER_ADDR=HOST_A -x MASTER_PORT=29500 \\
        python examples/mlp_dp_tp.py --tp 16

Any TP size that divides the number of processes will do; a TP group is consecutive ranks, and DDP connects the ranks
that hold the same part. Activations [sequence, batch, hidden] are sharded along the sequence inside a TP group. Every
step prints the loss beside that of the whole model, trained in one process on the whole batch. Runs on CPUs over gloo,
and on GPUs where there are enough of them over NCCL.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss, silu
from torch.nn.parallel import DistributedDataParallel

import commbackend
from commbackend.config import launcher
from commbackend.group import resolve_group
from commbackend.nn import GatedMLP, reduce_replicated_grads


class WholeMLP(nn.Module):
    """What the parallel model is compared with; its parameters have the same names."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, 1e-5)
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.down_proj(silu(self.gate_proj(h)) * self.up_proj(h))


def join(use_cuda: bool) -> torch.device:
    """Initialise torch.distributed under torchrun, mpirun or srun alike; return this process's device."""
    world = resolve_group()
    device = torch.device("cpu")
    if use_cuda:
        device = torch.device("cuda", max(launcher().local_rank, 0) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "nccl" if use_cuda else "gloo"
    dist.init_process_group(backend, store=world.scope("torch"), rank=world.rank, world_size=world.size)
    return device


def data(step: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, the same on every rank: inputs and targets [sequence, batch, hidden]."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (options.sequence, options.batch, options.hidden)
    x = torch.randn(shape, generator=generator)
    return x, torch.sin(x.roll(1, -1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="ranks of a tensor-parallel group")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="samples a step, over all DP replicas")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()

    local_size = launcher().local_size
    enough = torch.cuda.is_available() and 0 < local_size <= torch.cuda.device_count()
    device = join(options.device == "cuda" or (options.device == "auto" and enough))
    world, tp = dist.get_world_size(), options.tp
    dp = world // tp
    for number, what in ((world, "processes"), (options.sequence, "of --sequence"), (options.intermediate, "features")):
        if number % tp:
            parser.error(f"--tp {tp} must divide {number} {what}")
    if options.batch % dp:
        parser.error(f"{dp} replicas must divide --batch {options.batch}")
    mesh = dist.init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    comm = commbackend.init(mesh["tp"], device=device)

    torch.manual_seed(0)
    whole = WholeMLP(options.hidden, options.intermediate)
    mlp = GatedMLP(options.hidden, options.intermediate, group=comm, sequence_parallel=True, device=device)
    mlp.load_full(whole.state_dict())
    model = DistributedDataParallel(mlp, process_group=mesh["dp"].get_group())
    ours = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    reference = torch.optim.AdamW(whole.parameters(), lr=3e-3, eps=1e-6)

    replica, position = mesh["dp"].get_local_rank(), comm.rank
    worst = 0.0
    for step in range(options.steps):
        x, target = data(step, options)
        # This replica's samples, and of them this rank's positions.
        mine, wanted = (t.chunk(dp, 1)[replica].chunk(tp, 0)[position].to(device) for t in (x, target))
        ours.zero_grad()
        # The mean over the replica is the sum over its ranks of their parts.
        loss = mse_loss(mine + model(mine), wanted) / tp
        loss.backward()
        reduce_replicated_grads(mlp, comm)
        ours.step()
        total = loss.detach().clone()
        dist.all_reduce(total)

        reference.zero_grad()
        expected = mse_loss(x + whole(x), target)
        expected.backward()
        reference.step()
        difference = abs(total.item() / dp - expected.item()) / expected.item()
        worst = max(worst, difference)
        if dist.get_rank() == 0:
            print(
                f"step {step}: loss {total.item() / dp:.6f}, unsharded {expected.item():.6f}, differ {difference:.1e}"
            )

    if dist.get_rank() == 0:
        stats = comm.stats()
        print(f"dp {dp} x tp {tp} over {comm.transport}: {stats['overlapped']} overlapped calls,", end=" ")
        print(f"{stats['fallback']} fallbacks; largest relative difference {worst:.1e}")
    if worst > 1e-4:
        raise SystemExit(f"rank {dist.get_rank()}: the parallel model drifted from the unsharded one: {worst:.1e}")
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
