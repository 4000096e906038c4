"""Verbs of CUDA transports with everything worked out beforehand: what is left for a call is a few driver calls.

On an H200 a copy costs the host 6.3 us, a launch 4.2, a batch of stream memory operations 2.2 and 0.1 for each of them
(``benchmarks/driver_calls.py`` measures it). So words that are raised or waited for one after the other are one batch,
and a small put is one kernel that copies and raises instead of a copy and a write.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..contract import POISON, Prepares, SlotTable, Window, Word
from ..errors import ShapeError
from .copy_kernels import Kernels, Move, moves
from .driver import Driver
from .watch import PendingWaits, Watch

__all__ = ["SMALL_NBYTES", "PreparedVerbs"]

#: Copies up to this size are kernels of one CTA: a copy engine's launch costs the host more than that.
SMALL_NBYTES = 32 << 10
_WAIT_64, _WRITE_64 = 4, 5  # CUstreamBatchMemOpType


class _MemOp(ctypes.Structure):
    # CUstreamBatchMemOpParams for 64-bit values.
    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


class PreparedVerbs(Prepares):
    """What ``CudaSymmetric`` adds to its verbs."""

    op: str
    seq: int
    timeout_s: float
    waits: str
    status: int
    _driver: Driver
    _kernels: Kernels
    _watch: Watch
    _ctas: int
    _used: set[int]

    def prepare_words(self, table: SlotTable, words: Sequence[Word]) -> Callable[[int, float, int], None]:
        slots: Any = table
        parts: list[Callable[[int, float, int], None]] = []
        batch: list[Word] = []
        for word in words:
            if word.waits and self.waits == "kernel":
                if batch:
                    parts.append(self._batch(slots, tuple(batch)))
                batch = []
                parts.append(self._wait_kernel(slots, word))
            else:
                batch.append(word)
        if batch:
            parts.append(self._batch(slots, tuple(batch)))
        if len(parts) == 1:
            return parts[0]

        def all_of_them(value: int, deadline: float, stream: int) -> None:
            for part in parts:
                part(value, deadline, stream)

        return all_of_them

    def _batch(self, table: Any, words: tuple[Word, ...]) -> Callable[[int, float, int], None]:
        count, memops, used = len(words), self._driver.memops, self._used
        params = (_MemOp * count)()
        values = []
        for param, (peer, word, delta, waits) in zip(params, words, strict=True):
            param.operation = _WAIT_64 if waits else _WRITE_64
            param.address = (table.wait_at if waits else table.raise_at)[peer] + 8 * word
            # Views of the values: patching one is a store, where params[i].value would make an object first.
            values.append(
                (
                    ctypes.c_int64.from_buffer(
                        params, ctypes.addressof(param) - ctypes.addressof(params) + _MemOp.value.offset
                    ),
                    delta,
                )
            )
        at, waited, watch = ctypes.addressof(params), tuple(w for w in words if w.waits), self._watch

        def enqueue(value: int, deadline: float, stream: int, _kept: object = params) -> None:
            for view, delta in values:
                view.value = value + delta
            used.add(stream)
            if waited:
                # Before the wait is enqueued, because that may block (CUDA_LAUNCH_BLOCKING=1).
                started = deadline - self.timeout_s  # what the clock said when the call began, without asking it again
                watch.pending.append(PendingWaits(table, waited, value, started, deadline, self.op, self.seq))
            memops(at, count, stream)

        return enqueue

    def _wait_kernel(self, table: Any, word: Word) -> Callable[[int, float, int], None]:
        peer, number, delta, _ = word
        address, tag = table.wait_at[peer] + 8 * number, table.tag(peer, number)
        kernels, watch, used = self._kernels, self._watch, self._used

        def enqueue(value: int, deadline: float, stream: int) -> None:
            now = time.monotonic()
            used.add(stream)
            watch.pending.append(PendingWaits(table, (word,), value, now, deadline, self.op, self.seq))
            left_ns = max(1, int((deadline - now) * 1e9))
            kernels.wait_slot(address, value + delta, 0, left_ns, self.status, watch.report, tag, POISON, stream)

        return enqueue

    def prepare_put(
        self, dst: Window, src_stride: Sequence[int], peer: int, slot: tuple[SlotTable, int]
    ) -> Callable[[int, int, int], None] | None:
        table: Any = slot[0]
        to, raised = self.address(dst, peer), table.raise_at[peer] + 8 * slot[1]
        plan = moves(dst.shape, tuple(dst.stride), tuple(src_stride), dst.dtype.itemsize) if all(dst.shape) else ()
        if plan is None:
            return None
        used, driver = self._used, self._driver
        if self._small(plan):
            (m,), put = plan, self._kernels.put

            def in_one(address: int, value: int, stream: int) -> None:
                used.add(stream)
                put(to + m.dst, m.dst_pitch, address + m.src, m.src_pitch, m.row_nbytes, m.rows, raised, value, stream)

            return in_one
        copy = self._copy(plan)

        def copy_and_write(address: int, value: int, stream: int) -> None:
            used.add(stream)
            copy(to, address, stream)
            driver.write_value(raised, value, stream)

        return copy_and_write

    def prepare_copy(
        self, shape: Sequence[int], dst_stride: Sequence[int], src_stride: Sequence[int], itemsize: int
    ) -> Callable[[int, int, int], None] | None:
        plan = moves(tuple(shape), tuple(dst_stride), tuple(src_stride), itemsize) if all(shape) else ()
        return None if plan is None else self._copy(plan)

    def _small(self, plan: Sequence[Move]) -> bool:
        return len(plan) == 1 and plan[0].row_nbytes * plan[0].rows <= SMALL_NBYTES

    def _copy(self, plan: Sequence[Move]) -> Callable[[int, int, int], None]:
        driver, ctas = self._driver, self._ctas or (1 if self._small(plan) else 0)
        kernel = self._kernels.copy
        if not ctas and len(plan) == 1 and plan[0].rows == 1:
            nbytes, on_engine = plan[0].row_nbytes, driver.copy
            return lambda dst, src, stream: on_engine(dst, src, nbytes, stream)

        def copy(dst: int, src: int, stream: int) -> None:
            for m in plan:
                if ctas:
                    kernel(dst + m.dst, m.dst_pitch, src + m.src, m.src_pitch, m.row_nbytes, m.rows, ctas, stream)
                elif m.rows == 1:
                    driver.copy(dst + m.dst, src + m.src, m.row_nbytes, stream)
                else:
                    driver.copy_rows(dst + m.dst, m.dst_pitch, src + m.src, m.src_pitch, m.row_nbytes, m.rows, stream)

        return copy

    def prepare_guard(self, shape: Sequence[int], stride: Sequence[int], itemsize: int) -> Callable[[int, int], None]:
        if not all(shape):
            return lambda address, stream: None
        # Which element is which does not matter here: the dimension of the smallest stride is the row.
        order = sorted(range(len(shape)), key=lambda d: stride[d], reverse=True)
        steps = tuple(stride[d] for d in order)
        plan = moves(tuple(shape[d] for d in order), steps, steps, itemsize)
        if plan is None:
            text = f"guard of shape {tuple(shape)}, stride {tuple(stride)}: rows must be contiguous"
            raise ShapeError(text)
        fill, status, used = self._kernels.guard, self.status, self._used

        def guard(address: int, stream: int) -> None:
            used.add(stream)
            for m in plan:
                fill(address + m.dst, m.dst_pitch, m.row_nbytes, m.rows, status, stream)

        return guard

    def address(self, window: Window, rank: int) -> int:
        buffer: Any = window.buffer
        found: int = buffer.bases[rank] + window.offset
        return found
