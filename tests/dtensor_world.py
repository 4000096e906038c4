"""What the tests of framework adapters share: ranks under torch.distributed, a small transformer, and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import commbackend
from commbackend.testing import run_ranks


def _gloo(rank: int, group: Any, fn: Callable[..., Any], transport: str, folder: str, args: Any) -> Any:
    """``fn(rank, *args)`` with gloo up and a communicator of the default group over ``transport``."""
    store = dist.FileStore(str(Path(folder) / "gloo"), group.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=group.size, timeout=timedelta(seconds=90))
    try:
        commbackend.init(transport=transport, device="cpu")
        return fn(rank, *args)
    finally:
        dist.destroy_process_group()


def gloo_ranks(fn: Callable[..., Any], size: int, folder: Path, *args: Any, transport: str = "shm") -> list[Any]:
    """``fn(rank, *args)`` in ``size`` processes under torch.distributed over gloo. Results by rank."""
    return run_ranks(_gloo, size, fn, transport, str(folder), args, timeout_s=110.0)


class Attention(nn.Module):
    """Causal self-attention over [batch, sequence, hidden]; as many heads as the projections are wide."""

    def __init__(self, hidden: int, head: int, bias: bool) -> None:
        super().__init__()
        self.head = head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in (self.wq(x), self.wk(x), self.wv(x)))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, wide: int, bias: bool) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(hidden, wide, bias), nn.Linear(hidden, wide, bias)
        self.w2 = nn.Linear(wide, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, hidden: int = 16, wide: int = 24, head: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(hidden, head, bias), FeedForward(hidden, wide, bias)
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


def whole(t: Any) -> Tensor:
    """All of a tensor or DTensor, detached. Collective for DTensors."""
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def grads(model: nn.Module) -> dict[str, Tensor]:
    """All gradients, whole. Collective."""
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Equal names, and values within ``tolerance`` of the largest one wanted."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    for name, value in want.items():
        assert got[name].shape == value.shape, (name, got[name].shape, value.shape)
        error = (got[name] - value).abs().max().item()
        assert error <= tolerance * max(1.0, value.abs().max().item()), (name, error)
