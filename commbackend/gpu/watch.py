"""What keeps deadlines on a GPU: a thread that reads slots, and poisons them when a wait must end.

A stream wait has no deadline of its own. ``Watch`` holds the list of enqueued waits, looks at the slots now and then
over a stream of its own, and when one is overdue makes the transport fail. Once the transport has failed, for whatever
reason, it raises the status word and writes poison into every slot here, and later into this rank's slots at its peers,
again and again until the transport is closed (a late put may overwrite poison).
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
import time
import weakref
from collections import deque
from typing import NamedTuple, Protocol

from ..contract import POISON, Word
from ..errors import CommAborted, CommBackendError, CommTimeout
from .copy_kernels import REPORT_WORDS, TIMED_OUT
from .driver import Driver
from .slots import DeviceSlots

__all__ = ["POISON_NBYTES", "PendingWaits", "Watch"]

log = logging.getLogger("commbackend")

#: Bytes of the page of poison that slots are overwritten from, and of the page slots are read into.
POISON_NBYTES = 65536
_STATUS_FAULT = 3
# How long a peer has to poison its own slots before this rank does it from here.
_GRACE_S = 1.0
_REPOISON_S = 0.05
# How long the device may take to answer on one stream, and on how many streams it is asked.
_ANSWER_S, _TRIES, _PROVE_S = 0.1, 4, 0.5
# A wait whose word cannot be read is not called late before this much more time.
_UNKNOWN_S = 2.0
_MOST_STREAMS = 32
# Page-locked memory: a page for the first stream, a page for reports, then smaller ones for the streams after it.
_LATER_AT, _LATER_NBYTES = POISON_NBYTES + 4096, 8192
_PINNED_NBYTES = _LATER_AT + (_MOST_STREAMS - 1) * _LATER_NBYTES


class PendingWaits(NamedTuple):
    """Waits of one batch on a stream that may not have ended yet, each for ``value`` plus its delta. Times are of
    ``time.monotonic()``.
    """

    table: DeviceSlots
    words: tuple[Word, ...]
    value: int
    started: float
    deadline: float
    op: str
    seq: int


class _Owner(Protocol):
    """The transport, as the watch needs it."""

    rank: int

    @property
    def fault(self) -> CommBackendError | None: ...
    def abort(self, reason: str, cause: CommBackendError | None = None) -> None: ...


class Watch:
    """The watch of one transport. ``start`` begins the thread; ``stop`` ends it and frees what it holds.

    Args:
        statuses: Address here of every rank's device word that is not 0 after a fault.
        poison: Address of POISON_NBYTES bytes of device memory that this object fills with poison.
    """

    def __init__(self, owner: _Owner, driver: Driver, statuses: list[int], poison: int, period_s: float) -> None:
        self._owner, self._rank, self._driver = weakref.ref(owner), owner.rank, driver
        self._statuses, self._poison_page, self._period_s = statuses, poison, period_s
        self._failed_at = 0.0
        #: Tables by the index their tags carry.
        self.tables: dict[int, DeviceSlots] = {}
        self.pending: deque[PendingWaits] = deque()
        self._bell, self._stopping, self._reading = threading.Event(), False, threading.Lock()
        self._warned: set[PendingWaits] = set()
        self._complained = False
        self._streams: list[int] = []
        self._page = 0
        self._thread = threading.Thread(target=self._run, name=f"commbackend-watch-{owner.rank}", daemon=True)
        try:
            self._page = driver.host_alloc(_PINNED_NBYTES)
            #: Address in host memory of the report that wait kernels write.
            self.report = self._page + POISON_NBYTES
            ctypes.memset(self._page, 0, _PINNED_NBYTES)
            self._words = (ctypes.c_int64 * (POISON_NBYTES // 8)).from_address(self._page)
            self._report = (ctypes.c_int64 * REPORT_WORDS).from_address(self.report)
            self._host_word = ctypes.c_int64.from_address(self.report + 64)
            self._streams.append(driver.stream())
            self._fill_poison()
        except CommBackendError:
            self.stop()
            raise

    def _fill_poison(self) -> None:
        for i in range(len(self._words)):
            self._words[i] = POISON
        stream = self._streams[0]
        self._driver.copy(self._poison_page, self._page, POISON_NBYTES, stream)
        self._driver.write_value(self._statuses[self._rank], 0, stream)
        if not self._driver.settle(stream, 10.0):
            raise CommAborted(f"rank {self._rank}: the device does not finish a copy of {POISON_NBYTES} bytes in 10 s")

    def prove(self) -> bool:
        """Whether a store gets past a stream that is held by a stream wait: not so where all streams share one hardware
        queue (CUDA_DEVICE_MAX_CONNECTIONS=1). The wait is for a word in host memory, so this always ends.
        """
        held, word = self._driver.stream(), self._host_word
        word.value = 0
        # A timer lets it go, in case enqueueing itself blocks (CUDA_LAUNCH_BLOCKING=1).
        timer = threading.Timer(_PROVE_S, lambda: setattr(word, "value", 1))
        timer.start()
        try:
            self._driver.wait_value(ctypes.addressof(word), 1, held)
            self._driver.write_value(self._statuses[self._rank], 0, self._streams[0])
            return self._driver.settle(self._streams[0], _PROVE_S) and word.value == 0
        finally:
            timer.cancel()
            timer.join()
            word.value = 1
            self._driver.settle(held, 10.0)
            self._driver.stream_destroy(held)

    # -- use from outside -------------------------------------------------------------------------------------------
    @property
    def stream(self) -> int:
        """A stream that nothing of the caller's runs on, for set-up work. Let it settle."""
        return self._streams[0]

    def read_bytes(self, address: int, nbytes: int) -> bytes:
        """Present bytes of device memory. Raises CommTimeout if the device does not answer."""
        out = b""
        with self._reading:
            while len(out) < nbytes:
                out += self._read_some(address + len(out), nbytes - len(out))
        return out

    def _read_some(self, address: int, nbytes: int) -> bytes:
        for _ in range(_TRIES):
            number, stream = len(self._streams) - 1, self._streams[-1]
            # Every stream reads into memory of its own: what is stuck on an earlier one may still come.
            page = self._page + (_LATER_AT + (number - 1) * _LATER_NBYTES if number else 0)
            some = min(nbytes, _LATER_NBYTES if number else POISON_NBYTES)
            self._driver.copy(page, address, some, stream)
            if self._driver.settle(stream, _ANSWER_S):
                return ctypes.string_at(page, some)
            self._another_stream()
        raise CommTimeout(f"rank {self._rank}: the device has not read {nbytes} bytes in {_TRIES * _ANSWER_S:.1f} s")

    def _another_stream(self) -> int:
        """A stream that is perhaps on a free hardware queue, where the present one is stuck behind a wait."""
        if len(self._streams) < _MOST_STREAMS:
            self._streams.append(self._driver.stream())
        return self._streams[-1]

    def read(self, address: int, words: int) -> list[int]:
        """Present values of ``words`` 64-bit words. Raises as ``read_bytes``."""
        return list(struct.unpack(f"<{words}q", self.read_bytes(address, 8 * words)))

    def start(self) -> None:
        self._thread.start()

    def ring(self) -> None:
        """Have the thread look at once. Any thread."""
        self._bell.set()

    def stop(self) -> None:
        """End the thread and free what this object holds. Local, idempotent."""
        self._stopping = True
        self._bell.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(10.0)
        if not self._thread.is_alive():
            while self._streams:
                self._driver.settle(self._streams[-1], _ANSWER_S)
                self._driver.stream_destroy(self._streams.pop())
            if self._page:
                page, self._page = self._page, 0
                self._report = (ctypes.c_int64 * REPORT_WORDS)(*self._report)  # it is still looked at after close
                self._driver.host_free(page)

    # -- the thread -------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._driver.make_current()
            self._driver.relax_capture()
        except CommBackendError as e:
            self._fail(e)
            return
        while True:
            self._bell.wait(self._nap_s())
            self._bell.clear()
            owner = self._owner()
            if owner is None or self._stopping:
                return
            try:
                if owner.fault is None:
                    self._look(owner)
                if owner.fault is not None:
                    self._poison()
            except CommBackendError as e:
                self._fail(e)
            del owner

    def _fail(self, error: CommBackendError) -> None:
        owner = self._owner()
        if owner is not None:
            owner.abort(str(error), error)
        if not self._complained:
            self._complained = True
            log.error("commbackend: rank %d: watch of device slots: %s", self._rank, error)

    def _nap_s(self) -> float:
        owner = self._owner()
        if owner is None or owner.fault is not None:
            return _REPOISON_S
        soonest = min((p.deadline for p in list(self.pending)), default=float("inf"))
        return min(self._period_s, max(soonest - time.monotonic(), 0.001))

    def _look(self, owner: _Owner) -> None:
        if self.reported:
            owner.abort(*self.reason())
        if not self.pending:
            return
        seen: dict[DeviceSlots, list[int]] = {}
        for table in {p.table for p in list(self.pending)}:
            try:
                seen[table] = self.read(table.local, table.words * table.size)
            except CommTimeout:
                seen[table] = [-1] * (table.words * table.size)
        now = time.monotonic()
        left: list[PendingWaits] = []
        for _ in range(len(self.pending)):  # what is appended meanwhile is looked at next time
            waits = self.pending.popleft()
            values = seen.get(waits.table, [])
            missing = self._missing(waits, values)
            if missing is None:
                continue
            word, found = missing
            left.append(waits)
            oldest = len(left) == 1  # later ones are late because of it
            if now >= waits.deadline + (_UNKNOWN_S if found < 0 else 0):
                owner.abort(*self._late(waits, word, found, now))
            elif oldest and waits not in self._warned and now - waits.started > (waits.deadline - waits.started) / 10:
                self._warned.add(waits)
                log.warning("commbackend: %s", self._late(waits, word, found, now)[0])
        self.pending.extendleft(reversed(left))
        self._warned.intersection_update(left)

    @staticmethod
    def _missing(waits: PendingWaits, values: list[int]) -> tuple[Word, int] | None:
        """The first word that is not there yet, with its value now (-1: unknown); None if all are."""
        for word in waits.words:
            found = values[word.peer * waits.table.words + word.word] if values else -1
            if found < waits.value + word.delta:
                return word, found
        return None

    def _late(self, waits: PendingWaits, word: Word, seen: int, now: float) -> tuple[str, CommTimeout]:
        peer, wanted = word.peer, waits.value + word.delta
        message = (
            f"rank {self._rank} has waited {now - waits.started:.3f} s for rank {peer} in {waits.op or 'a call'}"
            f" (call {waits.seq}): word {word.word} is {seen}, wanted {wanted}"
        )
        return message, CommTimeout(message, rank=peer, op=waits.op, seq=waits.seq, wanted=wanted, seen=seen)

    @property
    def reported(self) -> bool:
        """Whether a wait kernel has reported a fault. As cheap as a look into memory."""
        return self._report[0] != 0

    def reason(self) -> tuple[str, CommBackendError]:
        """The text and the error of what a wait kernel has reported."""
        state, tag, wanted, seen = self._report
        peer, word = tag >> 32 & 0xFFFF, tag & 0xFFFFFFFF
        if state != TIMED_OUT:
            text = f"rank {self._rank}: word {word} of rank {peer} was poisoned (wanted {wanted})"
            return text, CommAborted(text, rank=peer)
        key = peer, word, wanted
        call = next(
            (p for p in list(self.pending) for w in p.words if (w.peer, w.word, p.value + w.delta) == key), None
        )
        op, seq = (call.op, call.seq) if call else ("", -1)
        text = (
            f"rank {self._rank} waited in a kernel for rank {peer} in {op or 'a call'} (call {seq}) until the deadline:"
            f" word {word} is {seen}, wanted {wanted}"
        )
        return text, CommTimeout(text, rank=peer, op=op, seq=seq, wanted=wanted, seen=seen)

    def _poison(self) -> None:
        stream = self._streams[-1]
        if not self._driver.idle(stream):
            stream = self._another_stream()
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        self._driver.write_value(self._statuses[self._rank], _STATUS_FAULT, stream)
        for table in list(self.tables.values()):
            self._overwrite(table.local, table.nbytes, stream)
        # A peer that knows of the fault has poisoned itself by now: in this order, so that nobody's stream goes on
        # before its transport has failed. Only who is stuck behind its own waits needs what follows.
        for peer, status in enumerate(self._statuses if now - self._failed_at > _GRACE_S else ()):
            if peer != self._rank:
                self._driver.write_value(status, _STATUS_FAULT, stream)
                for table in list(self.tables.values()):
                    self._overwrite(table.raise_at[peer], 8 * table.words, stream)
        self._driver.settle(stream, _ANSWER_S)

    def _overwrite(self, address: int, nbytes: int, stream: int) -> None:
        for start in range(0, nbytes, POISON_NBYTES):
            self._driver.copy(address + start, self._poison_page, min(POISON_NBYTES, nbytes - start), stream)
