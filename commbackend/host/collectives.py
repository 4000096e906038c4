"""Collectives of CPU tensors made of one, ``_all_to_all``, and what such transports do with strided tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..contract import Collective
from ..errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["REDUCTIONS", "HostCollectives", "as_bytes", "land", "landing", "packed"]


class HostCollectives(Collective):
    """The role for transports that implement ``_all_to_all`` alone. Sums are in rank order, narrow floats in fp32."""

    def _all_gather(self, dsts: Sequence[Tensor], src: Tensor, stream: int | None) -> None:
        self._all_to_all(dsts, [src] * self.size, stream)

    def _reduce_scatter(self, dst: Tensor, srcs: Sequence[Tensor], op: str, stream: int | None) -> None:
        parts = [torch.empty(dst.shape, dtype=dst.dtype) for _ in range(self.size)]
        self._all_to_all(parts, srcs, stream)
        dst.copy_(_reduced(parts, op))

    def _all_reduce(self, dst: Tensor, src: Tensor, op: str, stream: int | None) -> None:
        flat = packed(src).view(-1)
        pieces = flat.tensor_split(self.size)
        mine = torch.empty_like(pieces[self.rank])
        self._reduce_scatter(mine, pieces, op, stream)
        out = landing(dst)
        self._all_gather(out.view(-1).tensor_split(self.size), mine, stream)
        land([dst], [out])


def _plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def packed(tensor: Tensor) -> Tensor:
    """Return ``tensor`` or a contiguous copy of its values."""
    return tensor.detach() if _plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()


def landing(dst: Tensor) -> Tensor:
    """Return ``dst`` if bytes can be received right into it, else a buffer that ``land`` copies from."""
    return dst.detach() if _plain(dst) else torch.empty(dst.shape, dtype=dst.dtype, device=dst.device)


def land(dsts: Sequence[Tensor], landed: Sequence[Tensor]) -> None:
    """Copy to ``dsts`` what was not received right into them."""
    for dst, came in zip(dsts, landed, strict=True):
        if not _plain(dst):
            dst.detach().copy_(came)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as flat bytes."""
    return tensor.view(-1).view(torch.uint8)


REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    """Reduce in rank order; 16-bit and 8-bit floats accumulate in fp32."""
    if op not in REDUCTIONS:
        raise Unsupported(f"reduction {op!r}: one of {', '.join(REDUCTIONS)}")
    narrow = parts[0].is_floating_point() and parts[0].dtype.itemsize < 4
    total = parts[0].float() if narrow else parts[0]
    for part in parts[1:]:
        total = REDUCTIONS[op](total, part.float() if narrow else part)
    return total
