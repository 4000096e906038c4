"""A model of plain torch modules, made tensor-parallel by a plan and compiled as one graph.

    torchrun --standalone --nproc-per-node 2 examples/parallelize_compile.py [--backend aot_eager]

Every step prints the loss beside that of the same model in one process. At the end the weights are gathered and loaded,
strictly, into the stock model. The default backend, inductor, needs a C++ compiler on CPUs.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import commbackend


class Block(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.gate, self.up = nn.Linear(hidden, wide, bias=False), nn.Linear(hidden, wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


PLAN = {
    "0": "split",  # each rank goes on with its part of the sequence
    "*.{gate,up}": "column",  # one gather for both
    "*.down": "row",
    "*.norm": "replicated",
    "3": "join",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    comm = commbackend.init(device="cpu")
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(32, 256), Block(256, 512), Block(256, 512), nn.Linear(256, 32))
    model = commbackend.parallelize(copy.deepcopy(whole), PLAN, comm, sequence_parallel=True)
    compiled = torch.compile(model, fullgraph=True, backend=args.backend)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, whole)]
    for step in range(args.steps):
        x = torch.randn(64, 4, 32, generator=torch.Generator().manual_seed(step))
        losses = []
        for m, optimizer in zip((compiled, whole), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (m(x) - x.roll(1, 0)).square().mean()
            loss.backward()
            if m is compiled:
                commbackend.nn.reduce_replicated_grads(model)
            optimizer.step()
            losses.append(loss.item())
        if comm.rank == 0:
            print(f"step {step}: loss {losses[0]:.6f}, one process {losses[1]:.6f}", flush=True)
    whole.load_state_dict(commbackend.full_state_dict(model), strict=True)
    if comm.rank == 0:
        stats = comm.stats()
        done = stats["overlapped"]
        print(f"over {stats['transport']}: {stats['calls']} calls from one graph a pass, {done} of them overlapped")
    comm.close()


if __name__ == "__main__":
    main()
