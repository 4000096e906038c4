"""DeepSpeed AutoTP training of a small Llama, with and without overlapped layers. Runs on CPUs.

    DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 examples/deepspeed_autotp.py

Needs deepspeed==0.19.8 and transformers. What a user changes is the ``with overlapped():`` around ``initialize``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
from typing import Any

import torch
import torch.distributed as dist

import commbackend
from commbackend.integrations.deepspeed_ import overlapped


def llama() -> Any:
    """A small Llama, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=64, max_position_embeddings=64,
        )
    )  # fmt: skip


def train(fused: bool, steps: int, tp: int) -> list[float]:
    """The losses of ``steps`` steps, and one of evaluation."""
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": {"autotp_size": tp},
        "zero_optimization": {"stage": 0},
    }
    with overlapped(strict=True) if fused else contextlib.nullcontext():
        engine, *_ = deepspeed.initialize(model=llama(), config=settings)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        losses.append(engine(input_ids=tokens, labels=tokens).loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    stock, ours = train(False, args.steps, args.tp), train(True, args.steps, args.tp)
    counted = [s for s in commbackend.stats().values() if s["calls"]]
    if dist.get_rank() == 0:
        for i, (a, b) in enumerate(zip(stock, ours, strict=True)):
            print(f"{'evaluation' if i == args.steps else f'step {i}'}: loss {b:.6f}, stock {a:.6f}")
        for found in counted:
            print(f"over {found['transport']}: {found['overlapped_by_op']} {found['fallback_by_op']}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
