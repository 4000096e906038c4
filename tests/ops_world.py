"""What the tests of ops and layers share: ranks with a communicator, exact data, and references in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commbackend.communicator import Communicator
from commbackend.config import resolve
from commbackend.testing import run_ranks, run_threads

CPU = torch.device("cpu")
SIZES = (1, 2, 3, 4)


def _body(rank: int, group: Any, fn: Callable[..., Any], settings: dict[str, Any], args: Any) -> Any:
    with Communicator(group, resolve(timeout_s=20.0, **settings), CPU) as comm:
        return fn(comm, *args)


def _gpu_body(rank: int, group: Any, fn: Callable[..., Any], args: Any) -> Any:
    count = torch.cuda.device_count()
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    config = resolve(transport="userbuffers", timeout_s=60.0, allow_shared_device=group.size > count)
    with Communicator(group, config, device) as comm:
        return fn(comm, *args)


def spmd(fn: Callable[..., Any], size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """``fn(comm, *args)`` on ``size`` ranks that are threads, over the local transport. Results by rank.

    Chunks and a copy lane even for these small tensors: worker threads move data while products run, as in earnest.
    """
    return run_threads(_body, size, fn, {"transport": "local", "chunks": 2, "lanes": 1}, args, timeout_s=timeout_s)


def spmd_processes(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """The same on processes, over shared memory, with default knobs. ``fn`` is at the top level of a module."""
    return run_ranks(_body, size, fn, {"transport": "shm"}, args, timeout_s=60.0)


def spmd_gpus(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """The same on processes with a GPU each, or sharing what GPUs there are. Tensors are made on the rank's GPU."""
    return run_ranks(_gpu_body, size, fn, args, timeout_s=100.0)


def ints(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small integers: sums and products of a few hundred of them are exact in every type but fp8."""
    drawn = torch.randint(-2, 3, shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


@dataclass(frozen=True)
class Cut:
    """A leading shape cut along ``dim`` into ``counts``; the extent in ``lead`` at ``dim`` stands for them."""

    lead: tuple[int, ...]
    dim: int
    counts: tuple[int, ...]

    def local(self, rank: int, *features: int) -> tuple[int, ...]:
        return (*self.lead[: self.dim], self.counts[rank], *self.lead[self.dim + 1 :], *features)

    def full(self, *features: int) -> tuple[int, ...]:
        return (*self.lead[: self.dim], sum(self.counts), *self.lead[self.dim + 1 :], *features)

    def part(self, full: Tensor, rank: int) -> Tensor:
        return full.narrow(self.dim, sum(self.counts[:rank]), self.counts[rank])

    @property
    def rows(self) -> tuple[int, ...] | None:
        """What a caller passes: nothing where all are equal."""
        return self.counts if len(set(self.counts)) > 1 else None


def cuts(size: int) -> Iterator[Cut]:
    """Every dimension of tensors of one to three leading dimensions; equal, uneven, empty and lopsided counts."""
    equal, uneven = (3,) * size, tuple((2 * r + 1) % 4 for r in range(size))
    lopsided, nothing = (0,) * (size - 1) + (5,), (0,) * size
    yield Cut((0,), 0, equal)
    yield Cut((0,), 0, uneven)
    yield Cut((0,), 0, lopsided)
    yield Cut((0,), 0, nothing)
    yield Cut((0, 2), 0, uneven)
    yield Cut((2, 0), 1, equal)
    yield Cut((2, 0), 1, uneven)
    yield Cut((2, 0, 3), 1, lopsided)
    yield Cut((2, 3, 0), 2, uneven)


def leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


def same(got: Tensor | None, want: Tensor | None, what: object = "") -> None:
    """Equal in shape, type and every bit of the values."""
    assert got is not None and want is not None, what
    assert got.dtype == want.dtype and got.shape == want.shape, (what, got.dtype, want.dtype, got.shape, want.shape)
    assert torch.equal(got, want), (what, (got - want).abs().max())


def near(got: Tensor, want: Tensor, tolerance: float, what: object = "", scale: float = 1e-30) -> None:
    """Within ``tolerance`` of the largest value wanted, or of ``scale`` where that is larger."""
    assert got.shape == want.shape, (what, got.shape, want.shape)
    if want.numel():
        error = (got.double() - want.double()).abs().max().item()
        assert error <= tolerance * max(want.double().abs().max().item(), scale), (what, error)


def alike(results: Sequence[Any]) -> None:
    """Every rank returned tensors of the same bits."""
    for other in results[1:]:
        assert torch.equal(results[0], other)
