"""N-d tensors as the 2-D operands of a call: which rows of which block belong to which rank."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Cut", "columns", "cut", "empty", "matrix", "split"]


@dataclass(frozen=True, slots=True)
class Cut:
    """How the leading dimensions of a tensor are spread over ranks along one of them.

    Attributes:
        full, local: Leading shape of the whole tensor, and of this rank's part.
        blocks: Product of the dimensions before the cut one.
        rows: Rows of one block that each rank holds, as ``Problem.rows``.
    """

    full: tuple[int, ...]
    local: tuple[int, ...]
    blocks: int
    rows: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def cut(lead: tuple[int, ...], dim: int, counts: tuple[int, ...], rank: int) -> Cut:
    """Spread leading shape ``lead`` along ``dim``, ``counts[r]`` indices to rank r; what ``lead`` says at ``dim`` is
    ignored.
    """
    before, after = tuple(lead[:dim]), tuple(lead[dim + 1 :])
    inner = math.prod(after)
    return Cut(
        full=(*before, sum(counts), *after),
        local=(*before, counts[rank], *after),
        blocks=math.prod(before),
        rows=tuple(c * inner for c in counts),
    )


def split(total: int, size: int) -> tuple[int, ...]:
    """Near-equal counts that add up to ``total``, the larger ones first."""
    return tuple(total // size + (r < total % size) for r in range(size))


def columns(x: Tensor, dim: int) -> Tensor:
    """Give ``x`` a last dimension that is not ``dim``, so that every cut is a cut of leading dimensions."""
    return x.unsqueeze(-1) if dim == x.dim() - 1 else x


def matrix(x: Tensor) -> Tensor:
    """``x`` (..., k) as (rows, k) with unit column stride and rows that do not overlap: a view where strides allow,
    else a copy.
    """
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    elif x.dim() == 2 and x.is_contiguous():
        return x
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows, cols = flat.shape
    if (cols > 1 and flat.stride(1) != 1) or (rows > 1 and flat.stride(0) < cols):
        return flat.contiguous()
    return flat


def empty(
    shape: Sequence[int], like: Tensor, *, features_first: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """A fresh tensor of ``shape``; with ``features_first`` the last dimension has the largest stride.

    Never an inference tensor: worker threads, which are not in inference mode, must be able to write it.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # type: ignore[no-untyped-call]
            return empty(shape, like, features_first=features_first, dtype=dtype)
    if not features_first:
        return like.new_empty(shape, dtype=dtype)  # in half of torch.empty's time, as the device is not looked up
    dtype = dtype or like.dtype
    strides = [math.prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)] + [math.prod(shape[:-1])]
    return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)


def dimension(op: str, x: Tensor, dim: int) -> int:
    """``dim`` counted from the front. Raises ShapeError if ``x`` has no such dimension."""
    try:
        dim = operator.index(dim)
    except TypeError:
        raise ShapeError(f"{op}: dim={dim!r}: an integer is needed") from None
    if x.dim() == 0 or not -x.dim() <= dim < x.dim():
        raise ShapeError(f"{op}: dim {dim} of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def gather_counts(op: str, extent: int, dim: int, rows: Sequence[int] | None, rank: int, size: int) -> tuple[int, ...]:
    """Indices along ``dim`` that each rank brings: ``rows``, or this rank's extent for all."""
    if rows is None:
        return (extent,) * size
    counts = _counts(op, rows, size)
    if counts[rank] != extent:
        raise ShapeError(
            f"{op}: rank {rank} of {size} holds {extent} along dim {dim}, but rows={counts} says {counts[rank]}"
        )
    return counts


def scatter_counts(op: str, extent: int, dim: int, rows: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Indices along ``dim`` that each rank gets: ``rows``, or equal parts."""
    if rows is None:
        if extent % size:
            raise ShapeError(
                f"{op}: dim {dim} has {extent} indices, which do not divide by the {size} ranks of the group:"
                " pass rows= for uneven parts"
            )
        return (extent // size,) * size
    counts = _counts(op, rows, size)
    if sum(counts) != extent:
        raise ShapeError(f"{op}: dim {dim} has {extent} indices, but rows={counts} add up to {sum(counts)}")
    return counts


def _counts(op: str, rows: Sequence[int], size: int) -> tuple[int, ...]:
    try:
        counts = tuple(map(operator.index, rows))
    except TypeError:
        counts = ()
    if len(counts) != size or min(counts) < 0:
        shown = repr(rows) if len(repr(rows)) < 200 else f"{repr(rows)[:200]}..."
        raise ShapeError(
            f"{op}: rows={shown}: one count of 0 or more for each of the {size} ranks of the group is needed"
        )
    return counts
