"""Sums of partial results on a GPU: the ``Reduce`` step as one kernel, and a one-shot all-reduce for small messages.

Both add in rank order with fp32 accumulation, so all ranks get the same bits. What the kernels do stands at the head of
``triton_reduce_kernels``.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..contract import ExchangeMemory
from ..errors import ShapeError, Unsupported
from .triton_launch import DTYPES, Loaded, Runtime

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FEW_NBYTES",
    "MAX_PARTIALS",
    "MAX_RANKS",
    "LoadedKernels",
    "OneShot",
    "OneShotAllReduce",
    "ReduceKernel",
    "summable",
]

#: Most ranks of a one-shot all-reduce; most partials of one sum: all ranks' and a residual.
MAX_RANKS, MAX_PARTIALS = 16, 17
_SUMS = (torch.bfloat16, torch.float16, torch.float32)
#: Programs of the low-latency protocol and bytes of a slot: for all-reduces of a few rows.
_FEW, _FEW_SLOT_NBYTES = 8, 8 << 10
#: Most bytes of rows that go by it, without a norm: that wants whole rows in one program, where flags are faster. Two
#: ranks on one H200, us: 4.4-4.7 against 5.2-5.5 by flags up to 16 KiB, 6.2 against 5.5 at 32 KiB
#: (benchmarks/results/2026-12-01/h200-gemm-reduce.json); never measured over a link.
FEW_NBYTES = 16 << 10
#: Blocks of columns that tasks are cut into, wherever those leave few columns idle.
_BLOCKS = (1024, 512, 256, 128)


def summable(dtype: torch.dtype, count: int) -> str | None:
    """Return None if sums of ``count`` partials of ``dtype`` are offered here, else the reason in one line."""
    if dtype not in _SUMS:
        return f"kernels sum bfloat16, float16 and float32, not {dtype}"
    if not 1 <= count <= MAX_PARTIALS:
        return f"a kernel sums 1 to {MAX_PARTIALS} partials, not {count}"
    return None


class ReduceKernel:
    """out = sum of ``count`` partials in order (+ bias). All variants are compiled here."""

    def __init__(self, runtime: Runtime, dtype: torch.dtype, count: int) -> None:
        reason = summable(dtype, count)
        if reason is not None:
            raise Unsupported(reason)
        self._runtime, self._dtype, self._count = runtime, dtype, count
        self._lock = threading.Lock()
        both = (False, True)
        self._variants = {(bias, aligned): self._compile(bias, aligned) for bias in both for aligned in both}

    def _compile(self, bias: bool, aligned: bool) -> Loaded:
        from .triton_reduce_kernels import reduce_kernel

        value, count = "*" + DTYPES[self._dtype][0], range(self._count)
        types = dict.fromkeys(reduce_kernel.arg_names, "i32") | dict.fromkeys(("out", "bias"), value)
        types |= {f"s{i}": value for i in range(MAX_PARTIALS)}
        constants = _constants(self._dtype, _BLOCKS[0]) | {"COUNT": self._count, "BIAS": bias}
        constants |= {f"{p}{i}": 0 for p in ("s", "ld") for i in range(self._count, MAX_PARTIALS)}
        promises = {"out": 16, "bias": 16, "n": 8, "ldo": 8}
        promises |= {f"s{i}": 16 for i in count} | {f"ld{i}": 8 for i in count}
        return self._runtime.compile(reduce_kernel, types, constants, promises if aligned else {}, warps=4, stages=1)

    def __call__(
        self,
        out: Tensor,
        srcs: Sequence[Tensor],
        *,
        bias: Tensor | None = None,
        stream: int | None = None,
        sm_limit: int = 0,
    ) -> None:
        """Enqueue the sum. ``out`` and ``srcs`` are (rows, n) with unit column stride; ``out`` may be one of ``srcs``.

        Raises:
            ShapeError: A tensor does not fit.
        """
        if len(srcs) != self._count:
            raise ShapeError(f"{len(srcs)} partials: prepared for {self._count}")
        _check("out", out, out.shape, self._dtype)
        _check_row("bias", bias, out)
        values = {
            "out": out.data_ptr(), "ldo": out.stride(0), "bias": _pointer(bias), "rows": out.shape[0],
            "n": out.shape[1],
        }  # fmt: skip
        for i, src in enumerate(srcs):
            _check(f"partial {i}", src, out.shape, self._dtype)
            values |= {f"s{i}": src.data_ptr(), f"ld{i}": src.stride(0)}
        if out.numel() == 0:
            return
        loaded = self._variants[bias is not None, _aligned((out, bias, *srcs))]
        blocks = out.shape[0] * -(-out.shape[1] // _BLOCKS[0])
        _launch(self._runtime, self._lock, loaded, min(blocks, 8 * (sm_limit or self._runtime.sms)), stream, values)


class _Choice(NamedTuple):
    """How one all-reduce is done.

    Attributes:
        few: By the low-latency protocol.
        block: Columns of a task; tasks: how many.
    """

    few: bool
    block: int
    tasks: int


class LoadedKernels:
    """Kernels that all ``OneShot`` of a provider share. A kernel has one parameter buffer: launches take the lock."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[Any, ...], Loaded] = {}
        self.lock = threading.Lock()


class OneShot:
    """The one-shot all-reduces of one rank over one ``ExchangeMemory``."""

    def __init__(
        self,
        runtime: Runtime,
        memory: ExchangeMemory,
        timeout_s: float,
        loaded: LoadedKernels,
        few_nbytes: int = FEW_NBYTES,
    ) -> None:
        size = len(memory.data)
        if not 2 <= size <= MAX_RANKS:
            raise Unsupported(f"one-shot all-reduces are of 2 to {MAX_RANKS} ranks, not {size}")
        self.runtime, self.memory, self.size, self.timeout_s = runtime, memory, size, timeout_s
        self.loaded, self._few_nbytes = loaded, few_nbytes
        addresses = [*memory.data, *memory.raised, *memory.waited]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=runtime.device)
        #: What every program has counted, those of the low-latency protocol last.
        self.epochs = torch.zeros(memory.programs + _FEW, dtype=torch.int64, device=runtime.device)
        self._kernels: dict[tuple[torch.dtype, int, int, bool, bool, bool], OneShotAllReduce] = {}

    @staticmethod
    def nbytes(size: int, programs: int, slot_nbytes: int) -> tuple[int, int]:
        """Bytes, and words a writer, of the memory; the last word only tells of poison."""
        return 2 * size * (programs * slot_nbytes + _FEW * _FEW_SLOT_NBYTES), programs + 1

    def prepare(
        self, dtype: torch.dtype, rows: int, cols: int, *, bias: bool, residual: bool, norm: bool
    ) -> OneShotAllReduce:
        """Compile and load the kernel for such sizes. Cached.

        Raises:
            Unsupported: The type, or the size, is not offered.
        """
        key = (dtype, rows, cols, bias, residual, norm)
        found = self._kernels.get(key)
        if found is None:
            choice = self.choose(dtype, rows, cols, norm=norm)
            what = (dtype, self.size, choice.few, choice.block, bias, residual, norm)
            with self.loaded.lock:
                if what not in self.loaded.kernels:
                    self.loaded.kernels[what] = self._compile(*what)
            if len(self._kernels) >= 4096:
                del self._kernels[next(iter(self._kernels))]
            found = self._kernels[key] = OneShotAllReduce(self, self.loaded.kernels[what], key, choice)
        return found

    def choose(self, dtype: torch.dtype, rows: int, cols: int, *, norm: bool) -> _Choice:
        """The protocol and the tasks of an all-reduce: low latency where it fits."""
        if (reason := summable(dtype, self.size)) is not None:
            raise Unsupported(reason)
        if cols % 8 or not rows * cols:
            raise Unsupported(f"one-shot all-reduces are of rows of a multiple of 8 elements, not {rows} x {cols}")
        if norm:
            block = max(128, 1 << (cols - 1).bit_length())
        elif cols <= _BLOCKS[0]:
            block = max(64, 1 << (cols - 1).bit_length())
        else:
            block = next((b for b in _BLOCKS if 8 * (-(-cols // b) * b) <= 9 * cols), _BLOCKS[-1])
        tasks, memory = rows * -(-cols // block), self.memory
        # A 32-bit word of data takes 8 bytes.
        few = not norm and rows * cols * dtype.itemsize <= self._few_nbytes
        if few and -(-tasks // _FEW) * block * dtype.itemsize * 2 <= _FEW_SLOT_NBYTES:
            return _Choice(True, block, tasks)
        if -(-tasks // memory.programs) * min(cols, block) * dtype.itemsize > memory.slot_nbytes:
            raise Unsupported(
                f"one-shot all-reduce of {rows} x {cols} of {dtype}: its {memory.programs} slots have"
                f" {memory.slot_nbytes} bytes each"
            )
        return _Choice(False, block, tasks)

    def _compile(
        self, dtype: torch.dtype, size: int, few: bool, block: int, bias: bool, residual: bool, norm: bool
    ) -> Loaded:
        from .triton_reduce_kernels import low_latency_kernel, one_shot_kernel

        driver = self.runtime.driver
        if driver.capturing(driver.current_stream()):
            raise Unsupported(
                "a kernel is not compiled in a capture: run the op once eagerly with the same sizes first"
            )
        kernel = low_latency_kernel if few else one_shot_kernel
        constants = _constants(dtype, block)
        constants |= {"SIZE": size, "BIAS": bias, "RESIDUAL": residual}
        types = dict.fromkeys(kernel.arg_names, "i32")
        values = ("x", "out", "residual", "bias", "normed", "weight")
        types |= dict.fromkeys(values, "*" + DTYPES[dtype][0]) | {"eps": "fp32"}
        types |= dict.fromkeys(("data", "epochs", "fault"), "*i64")
        types |= dict.fromkeys(("fault_host", "slot_nbytes", "timeout_ns", "at", "poison"), "i64")
        if not few:
            types |= dict.fromkeys(("raised", "waited"), "*i64")
        promises = dict.fromkeys(values, 16) | dict.fromkeys(("ldx", "ldo", "ldr", "ldn", "n"), 8)
        promises |= {"at": 16, "slot_nbytes": 16}
        warps = 4 if block <= 4096 else 8 if block <= 8192 else 16
        constants |= {"WAITERS": 32 * warps} if few else {"NORM": norm}
        return self.runtime.compile(kernel, types, constants, promises, warps=warps, stages=1)


class OneShotAllReduce:
    """One prepared all-reduce; see ``contract.ExchangeKernel``."""

    def __init__(self, one_shot: OneShot, loaded: Loaded, key: tuple[Any, ...], choice: _Choice) -> None:
        self._one_shot, self._loaded, self.choice = one_shot, loaded, choice
        self._dtype, self._rows, self._cols, *self._what = key
        memory, size, runtime = one_shot.memory, one_shot.size, one_shot.runtime
        programs = _FEW if choice.few else memory.programs
        lists, epochs = one_shot.addresses.data_ptr(), one_shot.epochs.data_ptr()
        self._grid = min(choice.tasks, programs)
        self._values = {
            "data": lists, "raised": lists + 8 * size, "waited": lists + 16 * size, "rank": memory.rank,
            "programs": programs, "slot_nbytes": _FEW_SLOT_NBYTES if choice.few else memory.slot_nbytes,
            "at": 2 * size * memory.programs * memory.slot_nbytes if choice.few else 0,
            "epochs": epochs + 8 * memory.programs * choice.few,
            "poison": memory.waited[memory.rank] + 8 * memory.programs, "rows": self._rows, "n": self._cols,
            "timeout_ns": int(one_shot.timeout_s * 1e9), "fault": runtime.fault.device.data_ptr(),
            "fault_host": runtime.fault.host.data_ptr(),
        }  # fmt: skip

    def __call__(
        self,
        out: Tensor,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        normed: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        stream: int | None = None,
    ) -> None:
        """Enqueue. Rows that a fault has cut short are NaN, and ``runtime.fault`` says why.

        Raises:
            ShapeError: A tensor does not fit what was prepared; rows want 16-byte alignment.
            CommTimeout, CommAborted: An earlier kernel met a fault.
        """
        runtime = self._one_shot.runtime
        fault = runtime.fault.error("all_reduce")
        if fault is not None:
            raise fault
        if [bias is not None, residual is not None, norm_weight is not None] != self._what:
            raise ShapeError(f"(bias, residual, norm) = {self._what} was prepared")
        shape = (self._rows, self._cols)
        for what, tensor in (("out", out), ("x", x), ("residual", residual), ("normed", normed)):
            if tensor is not None:
                _check(what, tensor, shape, self._dtype)
        _check_row("bias", bias, out)
        _check_row("norm_weight", norm_weight, out)
        if not _aligned((out, x, residual, normed, bias, norm_weight)):
            raise ShapeError("rows of a one-shot all-reduce want addresses and strides of multiples of 16 bytes")
        values = self._values | {
            "x": x.data_ptr(), "ldx": x.stride(0), "out": out.data_ptr(), "ldo": out.stride(0),
            "bias": _pointer(bias), "residual": _pointer(residual), "ldr": _stride(residual),
            "normed": _pointer(normed), "ldn": _stride(normed), "weight": _pointer(norm_weight),
            "eps": struct.unpack("<i", struct.pack("<f", eps))[0],
        }  # fmt: skip
        _launch(runtime, self._one_shot.loaded.lock, self._loaded, self._grid, stream, values)


def _launch(
    runtime: Runtime, lock: threading.Lock, loaded: Loaded, grid: int, stream: int | None, values: Mapping[str, int]
) -> None:
    where = runtime.driver.current_stream() if stream is None else stream
    with lock:
        loaded.launch(runtime.driver, grid, where, [values[x] for x in loaded.names])


def _constants(dtype: torch.dtype, block: int) -> dict[str, Any]:
    import triton.language as tl

    return {"DTYPE": getattr(tl, str(dtype).removeprefix("torch.")), "BLOCK": block}


def _check(what: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tensor.dim() != 2 or tensor.shape != shape or tensor.dtype != dtype or (shape[1] > 1 and tensor.stride(1) != 1):
        raise ShapeError(
            f"{what} {tuple(tensor.shape)} of {tensor.dtype}: want {tuple(shape)} of {dtype}, column stride 1"
        )


def _check_row(what: str, row: Tensor | None, out: Tensor) -> None:
    if row is not None and (row.shape != out.shape[1:] or row.dtype != out.dtype or not row.is_contiguous()):
        raise ShapeError(f"{what} {tuple(row.shape)} of {row.dtype}: want ({out.shape[1]},) of {out.dtype}")


def _aligned(tensors: Sequence[Tensor | None]) -> bool:
    some = [t for t in tensors if t is not None]
    return some[0].shape[1] % 8 == 0 and not any(
        t.data_ptr() % 16 or (t.dim() == 2 and t.shape[0] > 1 and t.stride(0) % 8) for t in some
    )


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)
