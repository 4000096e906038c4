"""GEMMs by torch: the CPU's BLAS, or cuBLAS. Segments are run one after the other; waiting is done outside, between
launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import GemmKernel, GemmProblem, GemmProvider, GemmSegment, torch_stream
from ..errors import Unavailable, Unsupported

__all__ = ["TorchMM"]

_DTYPES = ("float64", "float32", "bfloat16", "float16")


class TorchMM(GemmProvider):
    """``torch.mm``/``torch.addmm`` with ``out=``: any dtype torch multiplies with enough precision, any strides."""

    name: ClassVar[str] = "torch"

    @classmethod
    def probe(cls, device: torch.device) -> None:
        """Every torch build multiplies on the CPU; on CUDA a device must be there."""
        if device.type == "cuda" and not torch.cuda.is_available():
            raise Unavailable("torch sees no CUDA device", "run on the CPU, or install a CUDA build of torch")
        if device.type not in ("cpu", "cuda"):
            raise Unavailable(f"device type {device.type!r}: only cpu and cuda are supported")

    def supports(self, problem: GemmProblem) -> str | None:
        """Gated problems of floating-point types."""
        if problem.polls:
            return "torch launches one library kernel a segment: it cannot poll flags (use gated segments)"
        if problem.scales:
            return "scaled fp8 products are not offered by the torch provider"
        for dtype in (problem.dtype, problem.out_dtype):
            if dtype not in _DTYPES:
                return f"matrix products of {dtype} are not offered: use one of {', '.join(_DTYPES)}"
        return None

    def prepare(self, problem: GemmProblem) -> GemmKernel:
        """Return a launcher; nothing to compile."""
        reason = self.supports(problem)
        if reason is not None:
            raise Unsupported(reason)
        return _Kernel(on_cuda=problem.device == "cuda")


class _Kernel:
    granularity = 1

    def __init__(self, *, on_cuda: bool) -> None:
        self._on_cuda = on_cuda

    def __call__(
        self, segments: Sequence[GemmSegment], *, stream: int | None = None, sm_limit: int = 0, epoch: int = 0
    ) -> None:
        if self._on_cuda and stream is not None and stream != torch.cuda.current_stream().cuda_stream:
            with torch.cuda.stream(torch_stream(stream)):
                self._run(segments)
        else:
            self._run(segments)

    @staticmethod
    def _run(segments: Sequence[GemmSegment]) -> None:
        for s in segments:
            if s.out.numel() == 0:
                continue
            extra = [*s.addends] if s.bias is None else [s.bias, *s.addends]
            if s.a.dtype != s.out.dtype or len(extra) > 1:
                _wide(s, extra)
            elif extra:
                # One addend goes into the product's own accumulator, before rounding.
                torch.addmm(extra[0], s.a, s.b.t(), out=s.out)
            else:
                torch.mm(s.a, s.b.t(), out=s.out)


def _wide(s: GemmSegment, extra: Sequence[Tensor]) -> None:
    """The general case, in fp32 (fp64) from the product to the last addend, rounded once."""
    wide = torch.float64 if torch.float64 in (s.a.dtype, s.out.dtype) else torch.float32
    if s.out.dtype == wide and not any(e.data_ptr() == s.out.data_ptr() for e in extra):
        acc = torch.mm(s.a.to(wide), s.b.t().to(wide), out=s.out)
    else:
        acc = torch.mm(s.a.to(wide), s.b.t().to(wide))
    for e in extra:
        acc.add_(e)
    if acc is not s.out:
        s.out.copy_(acc)
