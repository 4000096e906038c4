"""Sums of partial results on a GPU: the ``Reduce`` step as one kernel, and a one-shot all-reduce for small messages.

Both add in rank order with fp32 accumulation, so all ranks get the same bits. What the kernels do stands at the head of
``triton_reduce_kernels``.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ShapeError, Unsupported
from .triton_launch import DTYPES, Loaded, Runtime

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_RANKS", "OneShotAllReduce", "ReduceKernel"]

#: Most partials of one sum, and most ranks of a one-shot all-reduce.
MAX_RANKS = 16
_SUMS = (torch.bfloat16, torch.float16, torch.float32)
#: Widest row that RMSNorm and the one-shot all-reduce take, in elements.
_MAX_COLS = 16384


def summable(dtype: torch.dtype, count: int) -> str | None:
    """Return None if sums of ``count`` partials of ``dtype`` are offered here, else the reason in one line."""
    if dtype not in _SUMS:
        return f"kernels sum bfloat16, float16 and float32, not {dtype}"
    if not 1 <= count <= MAX_RANKS:
        return f"a kernel sums 1 to {MAX_RANKS} partials, not {count}"
    return None


class _Epilogue:
    """Variants of a kernel by (bias, residual, norm), and the arguments they share."""

    def __init__(self, runtime: Runtime, dtype: torch.dtype, count: int) -> None:
        reason = summable(dtype, count)
        if reason is not None:
            raise Unsupported(reason)
        self._runtime, self._dtype, self._count = runtime, dtype, count
        self._variants: dict[tuple[bool, bool, bool, bool], tuple[Loaded, int]] = {}
        self._lock = threading.Lock()

    def _types(self, kernel: Any) -> dict[str, str]:
        value = "*" + DTYPES[self._dtype][0]
        types = dict.fromkeys(kernel.arg_names, "i32")
        return types | dict.fromkeys(("out", "residual", "bias", "weight"), value) | {"eps": "fp32"}

    def _constants(
        self, block: int, aligned: bool, what: tuple[bool, bool, bool]
    ) -> tuple[dict[str, Any], dict[str, int]]:
        import triton.language as tl

        name = str(self._dtype).removeprefix("torch.")
        constants = {"DTYPE": getattr(tl, name), "BLOCK": block, "BIAS": what[0], "RESIDUAL": what[1], "NORM": what[2]}
        pointers = ("out", "residual", "bias", "weight")
        promises = dict.fromkeys(pointers, 16) | dict.fromkeys(("n", "ldo", "ldr"), 8)
        return constants, promises if aligned else {}

    def _epilogue(
        self, out: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, eps: float
    ) -> dict[str, int]:
        for what, row in (("bias", bias), ("norm_weight", weight)):
            if row is not None and (row.shape != out.shape[1:] or row.dtype != out.dtype or not row.is_contiguous()):
                raise ShapeError(f"{what} {tuple(row.shape)} of {row.dtype}: want ({out.shape[1]},) of {out.dtype}")
        for what, rows in (("out", out), ("residual", residual)):
            if rows is not None:
                _check(what, rows, out.shape, self._dtype)
        return {
            "out": out.data_ptr(), "ldo": out.stride(0), "bias": _pointer(bias), "weight": _pointer(weight),
            "residual": _pointer(residual), "ldr": 0 if residual is None else residual.stride(0),
            "rows": out.shape[0], "n": out.shape[1], "eps": struct.unpack("<i", struct.pack("<f", eps))[0],
        }  # fmt: skip

    def _launch(self, loaded: Loaded, grid: int, stream: int | None, values: Mapping[str, int]) -> None:
        driver = self._runtime.driver
        where = driver.current_stream() if stream is None else stream
        with self._lock:
            loaded.launch(driver, grid, where, [values[x] for x in loaded.names])


class ReduceKernel(_Epilogue):
    """out = sum of ``count`` partials in order (+ bias) (+ residual), optionally RMSNorm of it. Compiled here, all
    variants asked for.

    Args:
        norm_cols: Row width for which RMSNorm variants are prepared; 0: none.
        residual: Prepare the variants that add a residual.
    Raises:
        Unsupported: As ``summable`` says, or rows wider than 16384 with RMSNorm.
    """

    def __init__(
        self, runtime: Runtime, dtype: torch.dtype, count: int, *, norm_cols: int = 0, residual: bool = False
    ) -> None:
        super().__init__(runtime, dtype, count)
        if norm_cols > _MAX_COLS:
            raise Unsupported(f"RMSNorm of rows of {norm_cols} elements: at most {_MAX_COLS}")
        self._norm_block = max(256, 1 << (norm_cols - 1).bit_length()) if norm_cols else 0
        for norm in (False, True) if norm_cols else (False,):
            for add in (False, True) if residual else (False,):
                for bias in (False, True):
                    for aligned in (False, True):
                        self._variants[bias, add, norm, aligned] = self._compile((bias, add, norm), aligned)

    def _compile(self, what: tuple[bool, bool, bool], aligned: bool) -> tuple[Loaded, int]:
        from .triton_reduce_kernels import reduce_kernel

        block = self._norm_block if what[2] else 1024
        constants, promises = self._constants(block, aligned, what)
        constants |= {"COUNT": self._count}
        constants |= {f"{p}{i}": 0 for p in ("s", "ld") for i in range(self._count, MAX_RANKS)}
        types = self._types(reduce_kernel) | {f"s{i}": "*" + DTYPES[self._dtype][0] for i in range(MAX_RANKS)}
        if aligned:
            promises |= {f"s{i}": 16 for i in range(self._count)} | {f"ld{i}": 8 for i in range(self._count)}
        warps = 8 if block > 4096 else 4
        return self._runtime.compile(reduce_kernel, types, constants, promises, warps=warps, stages=1), block

    def __call__(
        self, out: Tensor, srcs: Sequence[Tensor], *, bias: Tensor | None = None, residual: Tensor | None = None,
        norm_weight: Tensor | None = None, eps: float = 1e-6, stream: int | None = None, sm_limit: int = 0,
    ) -> None:  # fmt: skip
        """Enqueue the sum. ``out``, ``srcs`` and ``residual`` (updated in place) are (rows, n) with unit column
        stride; ``out`` may be
        one of ``srcs``.

        Raises:
            ShapeError: A tensor does not fit, or that variant was not prepared.
        """
        if len(srcs) != self._count:
            raise ShapeError(f"{len(srcs)} partials: prepared for {self._count}")
        values = self._epilogue(out, bias, residual, norm_weight, eps)
        for i, src in enumerate(srcs):
            _check(f"partial {i}", src, out.shape, self._dtype)
            values |= {f"s{i}": src.data_ptr(), f"ld{i}": src.stride(0)}
        if out.numel() == 0:
            return
        key = (
            bias is not None,
            residual is not None,
            norm_weight is not None,
            _aligned((out, residual, bias, norm_weight, *srcs)),
        )
        found = self._variants.get(key)
        if found is None or (norm_weight is not None and out.shape[1] > found[1]):
            raise ShapeError(f"(bias, residual, norm) = {key[:3]} with {out.shape[1]} columns was not prepared")
        loaded, block = found
        blocks = out.shape[0] * -(-out.shape[1] // block)
        self._launch(loaded, min(blocks, 8 * (sm_limit or self._runtime.sms)), stream, values)


class OneShotAllReduce(_Epilogue):
    """All-reduce of small messages in one kernel: every rank pushes its rows to all ranks, then everybody sums.
    Collective: all ranks make
    the same calls in the same order.

    Args:
        bases: Address of this object's symmetric memory at every rank, as mapped in this process: ``nbytes(...)``
        bytes,
            zero, 16-byte aligned, used for nothing else.
        max_cols: Widest row; max_rows: most rows of a call.
        norm, residual, bias: Prepare these variants.
    """

    #: Programs at most; each has its own region and flags.
    PROGRAMS = 64

    def __init__(
        self, runtime: Runtime, dtype: torch.dtype, bases: Sequence[int], rank: int, *, max_rows: int, max_cols: int,
        timeout_s: float, norm: bool = False, residual: bool = False, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(runtime, dtype, len(bases))
        if max_cols > _MAX_COLS:
            raise Unsupported(f"one-shot all-reduce of rows of {max_cols} elements: at most {_MAX_COLS}")
        self._rank, self._own, self._timeout_s = rank, bases[rank], timeout_s
        self._max_rows, self._max_cols = max_rows, max_cols
        self._slot_nbytes = _slot_nbytes(dtype, max_rows, max_cols)
        self._bases = torch.tensor(list(bases), dtype=torch.int64, device=runtime.device)
        self._epochs = torch.zeros(self.PROGRAMS, dtype=torch.int64, device=runtime.device)
        block = max(256, 1 << (max_cols - 1).bit_length())
        for with_norm in (False, True) if norm else (False,):
            for with_residual in (False, True) if residual else (False,):
                for with_bias in (False, True) if bias else (False,):
                    what = (with_bias, with_residual, with_norm)
                    self._variants[*what, True] = self._compile(what, block)

    @classmethod
    def nbytes(cls, dtype: torch.dtype, size: int, max_rows: int, max_cols: int) -> int:
        """Symmetric memory needed at every rank."""
        return size * cls.PROGRAMS * (8 + 2 * _slot_nbytes(dtype, max_rows, max_cols))

    def _compile(self, what: tuple[bool, bool, bool], block: int) -> tuple[Loaded, int]:
        from .triton_reduce_kernels import one_shot_kernel

        constants, promises = self._constants(block, True, what)
        constants |= {"SIZE": self._count}
        types = self._types(one_shot_kernel) | {"x": "*" + DTYPES[self._dtype][0]}
        types |= dict.fromkeys(("bases", "epochs", "fault"), "*i64")
        types |= dict.fromkeys(("fault_host", "own", "slot_nbytes", "timeout_ns"), "i64")
        promises |= {"x": 16, "ldx": 8, "own": 16, "slot_nbytes": 16}
        warps = 4 if block <= 4096 else 8
        return self._runtime.compile(one_shot_kernel, types, constants, promises, warps=warps, stages=1), block

    def __call__(
        self, out: Tensor, x: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None,
        norm_weight: Tensor | None = None, eps: float = 1e-6, stream: int | None = None,
    ) -> None:  # fmt: skip
        """Enqueue out = sum over ranks of x (+ bias) (+ residual), then RMSNorm. Tensors are (rows, n), the same sizes
        on all ranks, unit
        column stride, 16-byte aligned rows. After a fault every output is NaN and ``runtime.fault`` says why.

        Raises:
            ShapeError: A tensor does not fit, is not aligned, or that variant was not prepared.
        """
        fault = self._runtime.fault.error("all_reduce")
        if fault is not None:
            raise fault
        rows, n = out.shape
        values = self._epilogue(out, bias, residual, norm_weight, eps)
        _check("x", x, out.shape, self._dtype)
        key = (
            bias is not None,
            residual is not None,
            norm_weight is not None,
            _aligned((out, x, residual, bias, norm_weight)),
        )
        found = self._variants.get(key)
        if found is None:
            raise ShapeError(f"(bias, residual, norm, aligned) = {key} was not prepared")
        if rows > self._max_rows or n > self._max_cols:
            raise ShapeError(f"message of {rows} x {n}: prepared for {self._max_rows} x {self._max_cols}")
        if out.numel() == 0:
            return
        fault_record = self._runtime.fault
        values |= {
            "x": x.data_ptr(), "ldx": x.stride(0), "bases": self._bases.data_ptr(), "epochs": self._epochs.data_ptr(),
            "own": self._own, "rank": self._rank, "programs": self.PROGRAMS, "slot_nbytes": self._slot_nbytes,
            "fault": fault_record.device.data_ptr(), "fault_host": fault_record.host.data_ptr(),
            "timeout_ns": int(self._timeout_s * 1e9),
        }  # fmt: skip
        self._launch(found[0], min(rows, self.PROGRAMS), stream, values)


def _slot_nbytes(dtype: torch.dtype, max_rows: int, max_cols: int) -> int:
    rows = -(-max_rows // OneShotAllReduce.PROGRAMS)
    return -(-rows * max_cols * dtype.itemsize // 16) * 16


def _check(what: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.dim() != 2 or tensor.shape != shape or tensor.dtype != dtype or (shape[1] > 1 and tensor.stride(1) != 1):
        raise ShapeError(
            f"{what} {tuple(tensor.shape)} of {tensor.dtype}: want {tuple(shape)} of {dtype}, column stride 1"
        )


def _aligned(tensors: Sequence[Tensor | None]) -> bool:
    some = [t for t in tensors if t is not None]
    return some[0].shape[1] % 8 == 0 and not any(t.data_ptr() % 16 or (t.dim() == 2 and t.stride(0) % 8) for t in some)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
