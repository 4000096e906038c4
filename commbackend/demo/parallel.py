"""The demo's model spread over ranks: attention by heads, MLP by features, everything else by positions."""

from __future__ import annotations

from .. import nn
from ..communicator import Communicator
from .model import Block, LanguageModel

__all__ = ["parallelize"]


def parallelize(model: LanguageModel, comm: Communicator) -> None:
    """Replace attention and MLP of every block by this rank's part of them, with the same weights. Local.

    After backward ``nn.reduce_replicated_grads`` sums the gradients of what stays whole: embedding and norms, of which
    each rank has seen its positions only.

    Raises:
        ShapeError: The number of ranks does not divide the heads.
    """
    config = model.config
    for parameter in model.parameters():
        parameter.sequence_parallel = True  # type: ignore[attr-defined]
    for block in model.blocks:
        assert isinstance(block, Block)
        common = {"group": comm, "sequence_parallel": True, "norm": False}
        attention = nn.Attention(
            config.hidden,
            config.heads,
            config.kv_heads,
            rope_base=config.rope_base,
            **common,  # type: ignore[arg-type]
        )
        mlp = nn.GatedMLP(config.hidden, config.ffn, **common)  # type: ignore[arg-type]
        attention.load_full(block.attention.state_dict())
        mlp.load_full(block.mlp.state_dict())
        block.attention, block.mlp = attention, mlp
