"""The stock path: torch.distributed's own collectives on the caller's group, for ``transport="off"``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .errors import Unsupported
from .group import process_group_of

if TYPE_CHECKING:
    from torch import Tensor

    from .group import Group

__all__ = ["Stock"]


class Stock:
    """Collectives of torch.distributed: blocking on a CPU, on the current stream on a GPU. Holds no memory."""

    def __init__(self, rank: int, size: int, process_group: dist.ProcessGroup | None) -> None:
        self._rank, self._size, self._group = rank, size, process_group

    @classmethod
    def of(cls, given: Any, group: Group) -> Stock:
        """Return the stock path of what the user gave as ``group``; without a ProcessGroup it only serves size 1."""
        return cls(group.rank, group.size, process_group_of(given))

    @property
    def reaches(self) -> bool:
        """Whether a ProcessGroup reaches the other ranks."""
        return self._group is not None

    def check(self) -> None:
        """Raise Unsupported if there are other ranks and no ProcessGroup that reaches them. Local."""
        if self._size > 1:
            self._pg()

    def all_gather(self, x: Tensor, *, dim: int = 0, rows: Sequence[int] | None = None) -> Tensor:
        """Concatenate every rank's ``x`` along ``dim``; ``rows`` gives each rank's extent there where they differ."""
        size = self._size
        if size == 1:
            return x.clone()
        pg = self._pg()
        moved = x.movedim(dim, 0).contiguous()
        counts = list(rows) if rows is not None else [moved.shape[0]] * size
        widest = max(counts)
        if min(counts) == widest:
            out = torch.empty((size * widest, *moved.shape[1:]), dtype=x.dtype, device=x.device)
            dist.all_gather_into_tensor(out, moved, group=pg)
            return out.movedim(0, dim)
        padded = torch.zeros((widest, *moved.shape[1:]), dtype=x.dtype, device=x.device)
        padded[: moved.shape[0]] = moved
        out = torch.empty((size * widest, *moved.shape[1:]), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(out, padded, group=pg)
        return torch.cat([out[r * widest : r * widest + n] for r, n in enumerate(counts)]).movedim(0, dim)

    def reduce_scatter(self, x: Tensor, *, dim: int = 0, rows: Sequence[int] | None = None) -> Tensor:
        """Sum ``x`` over ranks and keep this rank's part of ``dim``."""
        size, rank = self._size, self._rank
        if size == 1:
            return x.clone()
        pg = self._pg()
        moved = x.movedim(dim, 0).contiguous()
        counts = list(rows) if rows is not None else [moved.shape[0] // size] * size
        widest = max(counts)
        if min(counts) != widest:
            first = sum(counts[:rank])
            return self.all_reduce(moved)[first : first + counts[rank]].movedim(0, dim).clone()
        out = torch.empty((widest, *moved.shape[1:]), dtype=x.dtype, device=x.device)
        dist.reduce_scatter_tensor(out, moved, group=pg)
        return out.movedim(0, dim)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over ranks."""
        out = x.clone(memory_format=torch.contiguous_format)
        if self._size > 1:
            dist.all_reduce(out, group=self._pg())
        return out

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        if self._size > 1:
            dist.barrier(group=self._pg())

    def _pg(self) -> dist.ProcessGroup:
        if self._group is None:
            raise Unsupported(
                "transport='off' is torch.distributed's own path: call torch.distributed.init_process_group before"
                " commbackend.init"
            )
        return self._group
