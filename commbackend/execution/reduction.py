"""Sums in a fixed order: the only arithmetic commbackend does outside a GEMM on a CPU.

Every reduction adds its sources in the order given (ranks' order), in fp32 for 16-bit and fp8 types, in the type itself
for fp32, fp64, complex and integers, and rounds once. So the bits depend on the values and on the group's size only,
never on who arrived first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["reduce_into", "reducible"]

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_SAME = {torch.float32, torch.float64, torch.complex64, torch.complex128}
_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
# Elements summed at a time where a wide accumulator is needed: it then stays in a core's cache.
_BLOCK = 1 << 15


def reducible(dtype: torch.dtype) -> str | None:
    """Return None if sums of ``dtype`` are offered, else the reason in one line."""
    if dtype in _WIDE or dtype in _SAME or dtype in _INTEGERS:
        return None
    return f"sums of {dtype} are not offered: convert to bfloat16 or float32 first"


def reduce_into(dst: Tensor, srcs: Sequence[Tensor], bias: Tensor | None = None) -> None:
    """dst = srcs[0] + srcs[1] + ... (+ bias row). All of one shape and dtype; ``dst`` may be one of ``srcs``."""
    wide = _WIDE.get(dst.dtype)
    if dst.numel() == 0:
        return
    if wide is None:
        _add_in_place(dst, srcs, bias)
        return
    if dst.dim() < 2 or dst.numel() <= _BLOCK or not dst.is_cpu:
        dst.copy_(_add_wide(srcs, bias, wide))
        return
    step = max(1, _BLOCK // max(1, dst[0].numel()))
    for row in range(0, dst.shape[0], step):
        rows = slice(row, row + step)
        dst[rows].copy_(_add_wide([s[rows] for s in srcs], bias, wide))


def _add_wide(srcs: Sequence[Tensor], bias: Tensor | None, wide: torch.dtype) -> Tensor:
    acc = srcs[0].to(wide)
    for src in srcs[1:]:
        acc.add_(src)
    if bias is not None:
        acc.add_(bias)
    return acc


def _add_in_place(dst: Tensor, srcs: Sequence[Tensor], bias: Tensor | None) -> None:
    # The first sum is written to dst before later sources are read, so dst may only alias one of the first two.
    if any(_overlaps(dst, s) for s in srcs[2:]):
        total = srcs[0].clone()
        for src in srcs[1:]:
            total.add_(src)
        dst.copy_(total)
    elif len(srcs) == 1:
        if not _overlaps(dst, srcs[0]):
            dst.copy_(srcs[0])
    else:
        torch.add(srcs[0], srcs[1], out=dst)
        for src in srcs[2:]:
            dst.add_(src)
    if bias is not None:
        dst.add_(bias)


def _overlaps(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()
