"""A transformer under tensor parallelism (DTensor styles, sequence-parallel) and FSDP2, trained for a few steps.

    torchrun --standalone --nproc-per-node 2 examples/dtensor_fsdp.py
    torchrun --standalone --nproc-per-node 4 examples/dtensor_fsdp.py            # TP 2 x FSDP 2

The styles are torch's, imported from commbackend: what differs from a script for stock PyTorch are the lines marked
``commbackend``. Prints the loss, and what was overlapped. Runs on CPUs over gloo, and on GPUs over NCCL.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import commbackend
from commbackend.integrations.dtensor import ColwiseParallel, RowwiseParallel, SharedColwiseParallel  # commbackend
from commbackend.integrations.fallback import require_overlap  # commbackend


class Attention(nn.Module):
    def __init__(self, hidden: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in (self.wq(x), self.wk(x), self.wv(x)))
        return self.wo(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(hidden, wide, bias=False), nn.Linear(hidden, wide, bias=False)
        self.w2 = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(hidden, 32), FeedForward(hidden, 3 * hidden)
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


#: Between the blocks each rank holds its part of the sequence (dimension 1).
PLAN = {
    "embed": torch.distributed.tensor.parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm1": SequenceParallel(use_local_output=True),
    "layers.*.attention": SharedColwiseParallel("wq", "wk", "wv", input_layouts=Shard(1)),  # one gather for three
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.norm2": SequenceParallel(use_local_output=True),
    "layers.*.feed_forward": SharedColwiseParallel("w1", "w3", input_layouts=Shard(1)),
    "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(use_local_output=True),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="ranks of a tensor-parallel group")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(options.device, rank % torch.cuda.device_count() if options.device == "cuda" else None)
    if world % options.tp or options.sequence % options.tp:
        parser.error(f"--tp {options.tp} must divide {world} processes and --sequence {options.sequence}")
    mesh = init_device_mesh(options.device, (world // options.tp, options.tp), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)
    model = Model(vocabulary=64, hidden=128, layers=2).to(device)
    parallelize_module(model, mesh["tp"], PLAN)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    first = last = 0.0
    for step in range(options.steps):
        # Tokens that count up: easy to learn. Every replica has its own; the ranks of a TP group have the same.
        generator = torch.Generator().manual_seed(100 * step + mesh["dp"].get_local_rank())
        start = torch.randint(64, (2, 1), generator=generator)
        tokens = ((start + torch.arange(options.sequence + 1)) % 64).to(device)
        with require_overlap(mesh["tp"]):  # commbackend: an error if nothing of this step overlapped
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
        first = first or last
        if rank == 0:
            print(f"step {step}: loss {last:.4f}")

    if rank == 0:
        stats = commbackend.stats(mesh["tp"])
        print(f"dp {world // options.tp} x tp {options.tp} over {stats['transport']}")
        for name, calls in sorted(stats["overlapped_by_op"].items()):
            print(f"  overlapped: {calls:4d} x {name}")
        for name, calls in sorted(stats["fallback_by_op"].items()):
            print(f"  in sequence: {calls:3d} x {name}")
    if not last < first:
        raise SystemExit(f"rank {rank}: the loss did not fall: {first:.4f}, then {last:.4f}")
    commbackend.init(mesh["tp"], device=device).close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
