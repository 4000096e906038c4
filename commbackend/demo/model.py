"""The demo's language model in plain torch, and the same model with its linear layers spread over ranks.

Activations are ``[sequence, batch, hidden]``. In one process a rank's shard of the sequence is the whole sequence; over
several ranks every rank keeps ``sequence / size`` positions outside attention and MLP (sequence parallelism), and the
norms, the embedding and the tied output head are replicated, so their gradients are summed over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LanguageModel", "ModelConfig", "batch", "corpus"]

#: Tokens are bytes.
VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. ``heads`` and ``kv_heads`` are multiples of the number of ranks, ``hidden`` of ``heads``."""

    hidden: int = 256
    ffn: int = 704
    layers: int = 3
    heads: int = 8
    kv_heads: int = 4
    sequence: int = 256
    batch: int = 6
    rope_base: float = 10000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotary(x: Tensor, base: float) -> Tensor:
    """Rotate pairs of elements of ``x`` [sequence, batch, heads, head_dim] by their position's angles."""
    length, head_dim = x.shape[0], x.shape[-1]
    positions = torch.arange(length, device=x.device, dtype=torch.float32)
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=x.device, dtype=torch.float32) / head_dim)
    angles = torch.outer(positions, frequencies)[:, None, None, :]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, head_dim: int, base: float) -> Tensor:
    """Grouped-query attention of ``q`` [sequence, batch, heads * head_dim] over ``k``, ``v`` with fewer heads."""
    q, k, v = (t.unflatten(-1, (-1, head_dim)) for t in (q, k, v))
    q, k = rotary(q, base), rotary(k, base)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [batch, heads, sequence, head_dim]
    repeat = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.permute(2, 0, 1, 3).flatten(2)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kv = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv, bias=False)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.head_dim, self.rope_base = config.head_dim, config.rope_base

    def forward(self, x: Tensor) -> Tensor:
        y = causal_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.head_dim, self.rope_base)
        out: Tensor = self.o_proj(y)
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.eps)
        self.attention: nn.Module = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp: nn.Module = SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class LanguageModel(nn.Module):
    """A Llama-style decoder over bytes; weights depend on ``seed`` alone."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() == 2:
                    # Layers that write into the residual start smaller, so that depth does not blow it up.
                    last = name.endswith((".o_proj.weight", ".down_proj.weight"))
                    weight.normal_(0.0, 0.02 / (math.sqrt(2 * config.layers) if last else 1.0), generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, batch, 256] of ``tokens`` [rows, batch]; over several ranks the rows are this rank's."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        # The head shares the embedding's weight.
        return functional.linear(self.norm(x), self.embedding.weight)


@lru_cache(maxsize=1)
def corpus() -> Tensor:
    """Return the text of Python's language reference, which the standard library ships, as a uint8 tensor."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode("utf-8")), dtype=torch.uint8)


def batch(config: ModelConfig, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of ``step``, both [sequence, batch] int64: the same on every rank and in every run."""
    data = corpus()
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(data) - config.sequence - 1, (config.batch,), generator=generator)
    window = torch.stack([data[s : s + config.sequence + 1] for s in starts.tolist()], dim=1).long()
    return window[:-1], window[1:]
