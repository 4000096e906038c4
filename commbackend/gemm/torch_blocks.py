"""GEMMs by torch in blocks of one shape (``batch_invariant``): a row's bits depend on the row and the weight alone.

A library picks kernel and order of summation by the number of rows, and treats the last rows of an operand otherwise.
Here every product has as many rows as every other one of the same weight, the last block padded; and the number is one
for which the library gives a row the same bits wherever it stands in the block, which is tried out before its first
use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import GemmKernel, GemmProblem, GemmSegment
from ..errors import Unavailable, Unsupported
from .torch_mm import TorchMM, multiply

__all__ = ["TorchBlocks"]

#: Rows of a block, in order of preference. A block of one row has no places to differ.
_ROWS = (32, 64, 16, 8, 4, 2, 1)
#: Products that are tried before a number of rows is taken.
_TRIALS = 12


class TorchBlocks(TorchMM):
    """``TorchMM`` whose rows do not depend on how many rows are multiplied, nor on where they stand.

    Holds for one machine, one version of torch, one number of threads and one weight in one place: libraries may take
    another path for another alignment.
    """

    name: ClassVar[str] = "torch_blocks"
    batch_invariant: ClassVar[bool] = True

    def __init__(self, *, timeout_s: float = 600.0) -> None:
        super().__init__(timeout_s=timeout_s)
        self._rows: dict[tuple[object, ...], int] = {}

    @classmethod
    def probe(cls, device: torch.device) -> None:
        """CPUs only."""
        if device.type != "cpu":
            raise Unavailable(f"blocks of one shape are multiplied on CPUs, not on {device.type}")

    def prepare(self, problem: GemmProblem) -> GemmKernel:
        """Return a launcher; the rows of a block are found at a weight's first product."""
        reason = self.supports(problem)
        if reason is not None:
            raise Unsupported(reason)
        return _Blocks(self._rows)


class _Blocks:
    granularity = _ROWS[0]

    def __init__(self, rows: dict[tuple[object, ...], int]) -> None:
        self._rows = rows

    def __call__(
        self, segments: Sequence[GemmSegment], *, stream: int | None = None, sm_limit: int = 0, epoch: int = 0
    ) -> None:
        for s in segments:
            if s.out.numel() == 0:
                continue
            b = s.b = s.b if 0 not in s.b.stride() else s.b.contiguous()
            key = (
                b.dtype, s.out.dtype, tuple(b.shape), b.stride(), b.data_ptr() % 64, torch.get_num_threads(),
                s.bias is not None, len(s.addends), s.scale_a is not None,
            )  # fmt: skip
            rows = self._rows.get(key)
            if rows is None:
                rows = self._rows[key] = next(r for r in _ROWS if r == 1 or _places_are_alike(s, r))
            _multiply(s, rows)


def _multiply(s: GemmSegment, rows: int) -> None:
    """``s`` in blocks of ``rows`` rows, which are copied so that they lie in memory alike."""
    total, k = s.a.shape
    padded = -(-total // rows) * rows
    a, out = _padded(s.a, padded), torch.empty(rows, s.out.shape[1], dtype=s.out.dtype)
    block = torch.empty(rows, k, dtype=s.a.dtype)
    extra = [_padded(e, padded) for e in s.addends]
    per_row = s.scale_a is not None and s.scale_a.numel() > 1
    scales = _padded(s.scale_a.reshape(-1, 1), padded) if per_row and s.scale_a is not None else s.scale_a
    for first in range(0, total, rows):
        here = slice(first, first + rows)
        block.copy_(a[here])
        scale = scales[here].clone() if per_row and scales is not None else scales
        addends = tuple(e[here].clone() for e in extra)
        multiply(GemmSegment(block, s.b, out, s.bias, addends, scale_a=scale, scale_b=s.scale_b))
        s.out[here].copy_(out[: min(rows, total - first)])


def _padded(t: Tensor, rows: int) -> Tensor:
    if t.shape[0] == rows:
        return t
    out = torch.zeros(rows, *t.shape[1:], dtype=t.dtype)
    out[: t.shape[0]] = t
    return out


def _places_are_alike(s: GemmSegment, rows: int) -> bool:
    """Whether any row has the same bits at each of ``rows`` places, tried with products like ``s``.

    The terms of every sum cancel in pairs: what is left are its rounding errors alone, which another order of summation
    hardly ever makes alike.
    """
    noise = torch.Generator().manual_seed(1)
    (n, k), size = s.b.shape, s.b.element_size()
    # A weight with the strides and the alignment of this one.
    extent = 1 + sum((length - 1) * step for length, step in zip(s.b.shape, s.b.stride(), strict=True))
    flat = torch.zeros(max(extent, 0) + 64 // size, dtype=s.b.dtype)
    weight = flat.as_strided(s.b.shape, s.b.stride(), (s.b.data_ptr() - flat.data_ptr()) % 64 // size)
    out = torch.empty(rows, n, dtype=s.out.dtype)
    bias = torch.zeros_like(s.bias) if s.bias is not None else None
    addends = tuple(torch.zeros(rows, n, dtype=e.dtype) for e in s.addends)
    scale_a, scale_b = (t if t is None else torch.ones(1) for t in (s.scale_a, s.scale_b))
    for _ in range(_TRIALS):
        one, other = torch.randperm(k, generator=noise)[: k // 2 * 2].view(2, -1)
        row, columns = _noise((k,), noise), _noise((n, k), noise)
        row[other], columns[:, other] = -row[one], columns[:, one]
        weight.copy_(columns)
        a = row.to(s.a.dtype).expand(rows, k).contiguous()
        multiply(GemmSegment(a, weight, out, bias, addends, scale_a=scale_a, scale_b=scale_b))
        if not torch.equal(out, out[:1].expand_as(out)):
            return False
    return True


def _noise(shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    """Numbers of many magnitudes, so that adding them rounds, however short the factors are."""
    numbers = torch.randn(shape, generator=noise, dtype=torch.float64)
    return numbers.mul_(torch.randint(0, 7, shape, generator=noise).exp2())
