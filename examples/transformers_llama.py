"""A Hugging Face Llama over several ranks: trained for a few steps, then asked to generate.

    torchrun --standalone --nproc-per-node 2 examples/transformers_llama.py
    torchrun --standalone --nproc-per-node 2 examples/transformers_llama.py --model PATH    # your checkpoint

Without --model it makes a small random checkpoint first. What differs from a script for stock transformers is one
argument, ``tp_plan=tp_plan(path)``. Prints the loss beside that of one process, what was overlapped, and what it
generates. Needs: pip install 'transformers>=5.24' accelerate
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import commbackend
from commbackend.integrations.transformers import tp_plan  # commbackend


def random_llama(folder: str) -> str:
    """Save a random Llama, the same on all ranks, as from_pretrained reads it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 128}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=8, pad_token_id=0, **sizes)).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="path of a checkpoint; default: a small random one")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or random_llama(folder)  # before the next line: then every rank saves its own
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        config = DistributedConfig(tp_size=world, tp_plan=tp_plan(path))  # commbackend: the model's own, overlapped
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
        whole = AutoModelForCausalLM.from_pretrained(path).to(model.device)  # to compare with
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole)]

    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    for step in range(options.steps):
        tokens = torch.randint(1, 128, (4, 128), generator=generator).to(model.device)
        losses = []
        for m, optimizer in zip((model, whole), optimizers, strict=True):
            loss = m(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        worst = max(worst, abs(losses[0] - losses[1]) / losses[1])
        if rank == 0:
            print(f"step {step}: loss {losses[0]:.6f}, in one process {losses[1]:.6f}")

    prompt = tokens[:1, :8]
    made = [m.generate(prompt, max_new_tokens=8, do_sample=False) for m in (model, whole)]
    if rank == 0:
        stats = commbackend.stats(dist.group.WORLD)
        print(f"tp {world} over {stats['transport']}")
        for what, calls in sorted(stats["overlapped_by_op"].items()):
            print(f"  overlapped: {calls:4d} x {what}")
        for what, calls in sorted(stats["fallback_by_op"].items()):
            print(f"  in sequence: {calls:3d} x {what}")
        print(f"generated {made[0][0, 8:].tolist()}, in one process {made[1][0, 8:].tolist()}")
    if worst > 1e-4 or not torch.equal(*made):
        raise SystemExit(f"rank {rank}: differs from one process: loss by {worst:.1e}")
    commbackend.init(dist.group.WORLD).close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
