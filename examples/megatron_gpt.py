"""A Megatron-Core GPT model, trained with overlapped projections. Runs on CPUs, where it also compares with stock.

    torchrun --standalone --nproc-per-node 2 examples/megatron_gpt.py                    TP 2, SP
    torchrun --standalone --nproc-per-node 4 examples/megatron_gpt.py --tp 2 --no-sp     DP 2 x TP 2, no SP
    torchrun --standalone --nproc-per-node 2 examples/megatron_gpt.py --overlap-cfg my_tp_overlap.yaml

What a user of Megatron changes is one argument: ``transformer_layer_spec=layer_spec("local")`` (or "te"), or on the
command line ``--spec commbackend.integrations.megatron local_spec``. ``cpu_stand_ins`` is not part of that: Megatron
asks torch.cuda for the current device and for random states, and on a machine without a GPU something must answer.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commbackend

#: Large enough that calls overlap (docs/integrations.md), small enough for a laptop.
SEQUENCE, BATCH, HIDDEN, VOCABULARY = 512, 2, 128, 64


@contextlib.contextmanager
def cpu_stand_ins() -> Iterator[None]:
    """Let Megatron-Core run on a machine without a GPU: as device the CPU, as random states torch's own."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer import transformer_block

    tracker = mock.Mock(fork=lambda *a, **k: contextlib.nullcontext(), is_initialized=lambda: False)
    with (
        mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", lambda *a, **k: tracker),
        mock.patch.object(transformer_block, "LayerNormImpl", Norm),
    ):
        yield


class Norm(nn.LayerNorm):
    """A layer norm for sequence parallelism: Megatron's own needs APEX or TransformerEngine there."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def gpt_config(tp: int, sequence_parallel: bool, **options: Any) -> Any:
    """The options of a small model."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = {
        "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 4, "add_qkv_bias": True,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False, "bias_dropout_fusion": False, "masked_softmax_fusion": False,
    }  # fmt: skip
    return TransformerConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel, **{**given, **options})


def gpt_model(config: Any, spec: Any, **options: Any) -> nn.Module:
    """A GPT model of the layers in ``spec``, whose norms are replaced by ``Norm``; ranks seeded alike, alike."""
    from megatron.core.models.gpt import GPTModel

    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    torch.manual_seed(7)
    return GPTModel(
        config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
        **{"share_embeddings_and_output_weights": False, **options},
    )  # fmt: skip


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [batch, sequence]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """The mean loss of one batch."""
    tokens, labels = batch(seed)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), diagonal=1)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    per_token: Tensor = model(tokens, positions, mask, labels=labels)
    return per_token.float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--no-sp", action="store_true", help="no sequence parallelism")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--overlap-cfg", help="a tp-comm-overlap YAML")
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    from megatron.core import parallel_state

    from commbackend.integrations.megatron import layer_spec

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tp)
    with cpu_stand_ins():
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        config = gpt_config(args.tp, not args.no_sp)
        specs = {"stock": get_gpt_layer_local_spec(), "ours": layer_spec("local", overlap_cfg=args.overlap_cfg)}
        models = {name: gpt_model(config, spec) for name, spec in specs.items()}
        models = {
            name: DistributedDataParallel(config, DistributedDataParallelConfig(), m) for name, m in models.items()
        }
        for step in range(args.steps):
            losses = {}
            for name, model in models.items():
                model.zero_grad_buffer()
                loss = loss_of(model, 100 * step + parallel_state.get_data_parallel_rank())
                loss.backward()
                finalize_model_grads([model])
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.main_grad
                losses[name] = loss.item()
            if dist.get_rank() == 0:
                print(f"step {step}: loss {losses['ours']:.6f}, stock {losses['stock']:.6f}", flush=True)
    found = commbackend.stats(parallel_state.get_tensor_model_parallel_group())
    if dist.get_rank() == 0:
        print(f"over {found['transport']}: {found['overlapped']} overlapped calls, {found['fallback']} fallbacks")
        print(f"  {found['overlapped_by_op']} {found['fallback_by_op']}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
