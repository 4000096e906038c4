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

__all__ = ["TorchMM", "multiply"]

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_FP8, _SCALED = ("float8_e4m3fn", "float8_e5m2"), ("bfloat16", "float16", "float32")


class TorchMM(GemmProvider):
    """``torch.mm``/``torch.addmm`` with ``out=``: any dtype torch multiplies with enough precision, any strides.

    fp8 with scales: on CUDA ``torch._scaled_mm`` (cuBLAS), for what that takes; on CPUs the operands are cast to
    float32 and multiplied there, so results are exact but for fp32 rounding.
    """

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
            return self._scaled(problem)
        for dtype in (problem.dtype, problem.out_dtype):
            if dtype not in _DTYPES:
                return f"matrix products of {dtype} are not offered: use one of {', '.join(_DTYPES)}"
        return None

    @staticmethod
    def _scaled(p: GemmProblem) -> str | None:
        if p.dtype not in _FP8 or p.out_dtype not in _SCALED:
            return (
                f"scaled products are of {', '.join(_FP8)} into {', '.join(_SCALED)}, not {p.dtype} into {p.out_dtype}"
            )
        if p.device == "cpu":
            return None
        if p.dtype != "float8_e4m3fn" or p.out_dtype != "bfloat16":
            return f"cuBLAS multiplies e4m3 by e4m3 into bfloat16 here, not {p.dtype} into {p.out_dtype}"
        if p.k % 16 or p.n % 16 or not p.k:
            return f"cuBLAS wants k and n of multiples of 16 for fp8: k is {p.k}, n is {p.n}"
        return None

    def prepare(self, problem: GemmProblem) -> GemmKernel:
        """Return a launcher; nothing to compile."""
        reason = self.supports(problem)
        if reason is not None:
            raise Unsupported(reason)
        return _Kernel(on_cuda=problem.device == "cuda")


#: Rows from which on cuBLAS scales by row. (One row of k = n = 16 was CUBLAS_STATUS_NOT_SUPPORTED.)
_SCALED_ROWS = 16


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
            if s.out.numel():
                multiply(s)


def multiply(s: GemmSegment) -> None:
    """One segment by one library call, where the library has one that rounds once."""
    extra = [*s.addends] if s.bias is None else [s.bias, *s.addends]
    if s.scale_a is not None and s.scale_b is not None:
        _run_scaled(s, s.scale_a, s.scale_b, extra)
    elif s.a.dtype != s.out.dtype or len(extra) > 1:
        _wide(s, extra)
    elif extra:
        # One addend goes into the product's own accumulator, before rounding.
        torch.addmm(extra[0], s.a, s.b.t(), out=s.out)
    else:
        torch.mm(s.a, s.b.t(), out=s.out)


def _run_scaled(s: GemmSegment, scale_a: Tensor, scale_b: Tensor, extra: Sequence[Tensor]) -> None:
    by_row = scale_a.numel() > 1 or scale_b.numel() > 1
    if extra or not s.a.is_cuda or (by_row and s.a.shape[0] < _SCALED_ROWS):
        # cuBLAS adds nothing but a bias, and has refused to scale the rows of small products: in fp32, rounded once.
        if s.a.is_cuda:
            one = torch.ones((), device=s.a.device)
            acc = torch._scaled_mm(s.a, s.b.t(), one, one, out_dtype=torch.float32)
        else:
            acc = torch.mm(s.a.float(), s.b.float().t())
        acc.mul_(scale_a.reshape(-1, 1)).mul_(scale_b.reshape(1, -1))
        for e in extra:
            acc.add_(e)
        s.out.copy_(acc)
        return
    # Scales: scalars, or (rows, 1) and (1, n) for both operands.
    if scale_a.numel() == scale_b.numel() == 1:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    else:
        scale_a = scale_a.reshape(-1, 1).expand(s.a.shape[0], 1).contiguous()
        scale_b = scale_b.reshape(1, -1).expand(1, s.b.shape[0]).contiguous()
    torch._scaled_mm(s.a, s.b.t(), scale_a, scale_b, out_dtype=s.out.dtype, out=s.out)


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
