"""Shared memory of one host: segments that never fault, words that ranks raise and wait for, and a board for each rank.

A segment is reserved page by page before anybody touches it, so that a full /dev/shm or a container's limit is an error
that all ranks raise together, never a SIGBUS. Segments have no name: their descriptors travel over a ``HostLink``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import platform
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..contract import RECORD_NBYTES, SlotTable
from ..errors import FAULT_NBYTES, CollectiveMismatch, CommBackendError, HeapExhausted, Unavailable, unpack_fault
from .link import HostLink

__all__ = ["HostBoard", "HostWords", "Segment", "agree", "available", "probe", "room", "share"]

log = logging.getLogger("commbackend")

# What the kernel calls by number: the C library has no wrapper for futex.
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ACQUIRE, _RELEASE = 2, 3
# Reservation proceeds in pieces, so that a program whose timer fires every millisecond gets through.
_PIECE = 1 << 18
_LINE = 8  # words of a cache line: writers do not share lines
_SPIN_S, _SLICE_S = 40e-6, 0.002
_SHM_DIR = "/dev/shm"
_HINT = "docker: --shm-size or --memory; Kubernetes: the limit of the pod and of its emptyDir with medium: Memory"


# -- the machine -------------------------------------------------------------------------------------------------------
class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Machine:
    """System calls and, where stores are not ordered by the hardware, fences."""

    def __init__(self) -> None:
        arch = platform.machine()
        number = _FUTEX_CALL.get(arch)
        if sys.platform != "linux" or number is None or sys.byteorder != "little" or sys.maxsize < 1 << 32:
            raise Unavailable(f"shared memory words need Linux on x86_64 or aarch64, not {sys.platform} on {arch}")
        libc = ctypes.CDLL(None)
        self._futex = libc.syscall
        self._futex.argtypes = (*[ctypes.c_long] * 4, ctypes.c_void_p, *[ctypes.c_long] * 2)
        self._futex.restype = ctypes.c_long
        self._number = number
        self.sched_yield: Callable[[], int] = libc.sched_yield
        #: Orders the bytes before a word and the word; None where the hardware does (x86: stores are seen in order).
        self.fence: Callable[[int], Any] | None = None
        if arch != "x86_64":
            try:
                self.fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
            except (OSError, AttributeError) as e:
                raise Unavailable(
                    f"{arch} orders stores only with fences, and libatomic.so.1 cannot be loaded: {e}",
                    "install the libatomic1 package",
                ) from e

    def wait(self, address: int, low: int, seconds: float) -> None:
        """Sleep until woken, unless the 32 bits at ``address`` are not ``low`` any more. Spurious wake-ups happen."""
        limit = _Timespec(0, int(seconds * 1e9))
        self._futex(self._number, address, _FUTEX_WAIT, low, ctypes.addressof(limit), 0, 0)

    def wake(self, address: int) -> None:
        self._futex(self._number, address, _FUTEX_WAKE, 0x7FFFFFFF, None, 0, 0)


_machine: _Machine | None = None


def machine() -> _Machine:
    """The system calls of this machine, looked up once. Raises Unavailable where words in shared memory cannot work."""
    global _machine
    if _machine is None:
        _machine = _Machine()
    return _machine


def probe() -> None:
    """Raise Unavailable if this process cannot make shared memory with words that others wait for. Local."""
    machine()
    try:
        os.close(_anonymous_file())
    except OSError as e:
        raise Unavailable(f"neither memfd_create nor a file in {_SHM_DIR} works: {e}", _HINT) from e


# -- segments ----------------------------------------------------------------------------------------------------------
class Segment:
    """Shared memory: a descriptor, its size, and the mapping. Dropping the last view unmaps it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map ``fd``, which stays the caller's. Raises Unavailable if the file is smaller than ``nbytes``."""
        size = os.fstat(fd).st_size
        if size < nbytes:
            raise Unavailable(f"a peer's segment has {size} bytes, {nbytes} were agreed")
        self.nbytes = nbytes
        # Since 3.13 a mapping can do without a descriptor of its own.
        self.memory = mmap.mmap(fd, nbytes, **({"trackfd": False} if sys.version_info >= (3, 13) else {}))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


def _anonymous_file() -> int:
    try:
        return os.memfd_create("commbackend", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError):  # forbidden by a sandbox, or an old kernel
        return os.open(_SHM_DIR, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def reserve(nbytes: int) -> int:
    """Return a descriptor of ``nbytes`` zero bytes that are all there. Local. Raises HeapExhausted."""
    fd = -1
    try:
        fd = _anonymous_file()
        for start in range(0, nbytes, _PIECE):
            os.posix_fallocate(fd, start, min(_PIECE, nbytes - start))
        try:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)  # nobody can take the pages away from under a mapping
        except OSError:
            pass  # a file in /dev/shm cannot be sealed; only this user's processes can reach it
        return fd
    except OSError as e:
        if fd >= 0:
            os.close(fd)
        name = errno.errorcode.get(e.errno or 0, "?")
        raise HeapExhausted(f"{nbytes} bytes of shared memory are needed, {room()} ({name}: {e.strerror})") from e


def room() -> str:
    """What this process could still allocate, in words. Local."""
    stat = os.statvfs(_SHM_DIR) if os.path.isdir(_SHM_DIR) else None
    shm = f", {stat.f_bavail * stat.f_frsize} in {_SHM_DIR}" if stat else ""
    return f"{available()} are available{shm}"


def available() -> int:
    """Bytes that this process could still allocate, by the host's memory and its control group's limit. Local."""
    return min(_free_memory(), _limit()[0])


def _lines(path: str) -> list[str]:
    """The lines of a file of the kernel's; none where it is hidden or has another form."""
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def _fields(path: str) -> dict[str, int]:
    """Lines of "name number" or "name: number unit"; a line that is a number alone is called ""."""
    found = {}
    for line in _lines(path):
        words = line.replace(":", " ").split()
        name, number = ("", words[0]) if len(words) == 1 else (words[0], words[1]) if words else ("", "")
        if number.isdigit():
            found[name] = int(number)
    return found


def _free_memory() -> int:
    free = _fields("/proc/meminfo").get("MemAvailable")
    return sys.maxsize if free is None else free * 1024


def _limit() -> tuple[int, int]:
    """Room below the memory limit of this process's control group, and the group's identity; (maxsize, 0) if none."""
    best = (sys.maxsize, 0)
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        v2 = controllers == ""
        if not v2 and "memory" not in controllers.split(","):
            continue
        root = "/sys/fs/cgroup" if v2 else "/sys/fs/cgroup/memory"
        top, used = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder = root + path.rstrip("/") if os.path.isdir(root + path) else root
        while folder.startswith(root):
            limit, current = _fields(f"{folder}/{top}").get(""), _fields(f"{folder}/{used}").get("")
            if limit is not None and current is not None:
                # Cached file pages count as used, but give way.
                stat, total = _fields(f"{folder}/memory.stat"), "" if v2 else "total_"
                cached = stat.get(f"{total}inactive_file", 0) + stat.get(f"{total}active_file", 0)
                best = min(best, (max(limit - current + cached, 0), os.stat(folder).st_ino))
            folder = os.path.dirname(folder)
    return best


# -- agreement over a link ---------------------------------------------------------------------------------------------
def agree(link: HostLink, reason: str, deadline: float) -> None:
    """Exchange reasons; raise HeapExhausted naming each rank that gave one. Collective."""
    votes = link.exchange(reason.encode()[:1024], deadline)
    bad = [f"rank {r}: {v.decode(errors='replace')}" for r, v in enumerate(votes) if v]
    if bad:
        raise HeapExhausted("; ".join(bad) + f" ({_HINT})")


_WISH = struct.Struct("<QQQQ")  # bytes wanted, free memory, room below the control group's limit, its identity


def _check_room(link: HostLink, nbytes: int, deadline: float) -> None:
    """Refuse on all ranks what would not fit, before the kernel kills somebody for trying."""
    room, group = _limit()
    notes = link.exchange(_WISH.pack(nbytes, _free_memory(), room, group), deadline)
    for rank, note in enumerate(notes):
        if len(note) != _WISH.size:
            raise CollectiveMismatch(f"rank {link.rank} allocates {nbytes} bytes, rank {rank} is in another call")
    wishes = [_WISH.unpack(note) for note in notes]
    for rank, wish in enumerate(wishes):
        if wish[0] != wishes[0][0]:
            raise CollectiveMismatch(
                f"rank {rank} allocates {wish[0]} bytes, rank 0 allocates {wishes[0][0]}: all ranks must pass the same"
            )
    for rank, (_, free, room, group) in enumerate(wishes):
        sharing = sum(1 for w in wishes if w[3] == group)
        for needed, available, what in (
            (nbytes * len(wishes), free, "the host's memory"),
            (nbytes * sharing, room, "the memory limit of the container"),
        ):
            if needed > available:
                text = f"{needed} bytes are needed, rank {rank} finds {available} available in {what}"
                raise HeapExhausted(f"{text} ({_HINT})")


def share(link: HostLink, nbytes: int, deadline: float) -> list[Segment]:
    """Make a segment of ``nbytes`` zero bytes at every rank and map them all. Collective.

    Returns:
        One segment a rank.
    Raises:
        HeapExhausted: On every rank, naming the rank that lacks memory; nothing stays allocated.
        CollectiveMismatch: Ranks pass different sizes.
        CommTimeout, PeerDied: As ``HostLink.exchange_fds``.
    """
    _check_room(link, nbytes, deadline)
    fds: list[int] = []
    segments: list[Segment] = []
    reason = ""
    try:
        try:
            fds = [reserve(nbytes)]
        except HeapExhausted as e:
            reason = str(e)
        agree(link, reason, deadline)
        try:
            fds = [fd for _, received in link.exchange_fds(fds, b"", deadline) for fd in received]
            segments = [Segment(fd, nbytes) for fd in fds]
        except (OSError, ValueError, Unavailable) as e:  # descriptors or address space ran out
            reason = f"cannot map {nbytes} bytes of each of {link.size} ranks: {e}"
        agree(link, reason, deadline)
        return segments
    finally:
        for fd in fds:
            os.close(fd)


_NOTHING = memoryview(b"").cast("q")


# -- words -------------------------------------------------------------------------------------------------------------
class HostWords(SlotTable):
    """Slots in shared memory: ``words`` for every writer at every rank, each in its writer's own cache lines.

    Layout of a rank's segment: a line for every writer, whose first word counts the owner's threads that sleep until
    that writer raises something; then every writer's block.
    """

    def __init__(self, segments: Sequence[Segment], rank: int, words: int) -> None:
        self.words = words
        self._rank, self._size = rank, len(segments)
        self._stride = -(-words // _LINE) * _LINE
        self._base = self._size * _LINE
        self._mine = self._base + rank * self._stride  # where this rank's words are at every peer
        self._views = [memoryview(s.memory).cast("B")[: self.nbytes(self._size, words)].cast("q") for s in segments]
        self._addresses = [s.address for s in segments]
        self._own = self._views[rank]
        self._announcing = threading.Lock()
        self._machine = machine()
        self._fence = self._machine.fence

    @staticmethod
    def nbytes(size: int, words: int) -> int:
        """Bytes of a rank's segment."""
        return 8 * size * (_LINE + -(-words // _LINE) * _LINE)

    def read(self, writer: int, word: int) -> int:
        return self._own[self._index(writer, word)]

    def _index(self, writer: int, word: int) -> int:
        if not (0 <= writer < self._size and 0 <= word < self.words):
            raise IndexError(f"word {word} of writer {writer}: there are {self.words} words for {self._size} writers")
        return self._base + writer * self._stride + word

    def store(self, peer: int, word: int, value: int) -> None:
        """Raise my ``word`` at ``peer`` after everything this thread has stored before, and wake who waits for it."""
        view, index = self._views[peer], self._mine + word
        if not 0 <= word < self.words:
            self._index(peer, word)
        if self._fence is not None:
            self._fence(_RELEASE)
        view[index] = value
        if view[self._rank * _LINE]:
            self._machine.wake(self._addresses[peer] + 8 * index)

    def wait(self, writer: int, word: int, value: int, until: float, stop: Callable[[], object]) -> bool:
        """Block until ``writer`` has raised ``word`` here to ``value`` (True), or ``until`` or ``stop()`` (False).

        Spins for some ten microseconds, giving the core away in between, then sleeps in slices of two milliseconds: a
        wake-up that is lost between a store and an announcement costs no more than that.
        """
        own, index = self._own, self._index(writer, word)
        if own[index] < value and not self._spin(own, index, value):
            address = self._addresses[self._rank] + 8 * index
            self._announce(writer, 1)
            try:
                while (seen := own[index]) < value:
                    left = until - time.monotonic()
                    if left <= 0 or stop():
                        return False
                    self._machine.wait(address, seen & 0xFFFFFFFF, min(left, _SLICE_S))
            finally:
                self._announce(writer, -1)
        if self._fence is not None:
            self._fence(_ACQUIRE)
        return True

    def _spin(self, own: memoryview, index: int, value: int) -> bool:
        until = time.perf_counter() + _SPIN_S
        while time.perf_counter() < until:
            self._machine.sched_yield()
            if own[index] >= value:
                return True
        return False

    def _announce(self, writer: int, change: int) -> None:
        with self._announcing:
            self._own[writer * _LINE] += change

    def close(self) -> None:
        """Drop the views. Local: the transport that owns the table makes closing collective."""
        self._views, self._own = [], _NOTHING


# -- the board ---------------------------------------------------------------------------------------------------------
_BARRIER, _POSTED, _PROOF = 0, 1, 2
_RECORD = struct.Struct("<qq")  # sequence number + 1 (0: none), length; the bytes follow
_RING = 4


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where things are in a rank's board."""

    ring: int
    fault: int
    nbytes: int


class HostBoard:
    """What every rank shows its peers: the records of its last calls, a barrier word, and a box with its fault.

    Collective to make; ``close`` is local.
    """

    WORDS = 8

    def __init__(self, link: HostLink, deadline: float) -> None:
        """Raises as ``share``."""
        ring = HostWords.nbytes(link.size, self.WORDS)
        fault = ring + _RING * (_RECORD.size + RECORD_NBYTES)
        self._layout = _Layout(ring, fault, fault + 8 + FAULT_NBYTES)
        self.rank, self.size = link.rank, link.size
        segments = share(link, self._layout.nbytes, deadline)
        self.words = HostWords(segments, link.rank, self.WORDS)
        self._raw = [memoryview(s.memory) for s in segments]
        self._rounds = 0
        self._peers = [p for p in range(self.size) if p != self.rank]
        self._machine = machine()

    # -- records
    def post(self, seq: int, record: bytes) -> None:
        """Publish the record of call ``seq`` >= 0; it is readable until ``seq + 4`` is posted. Local."""
        raw, start = self._raw[self.rank], self._place(seq)
        body = start + _RECORD.size
        _RECORD.pack_into(raw, start, 0, 0)  # whoever is reading the record that was here finds it gone
        self._order(_RELEASE)
        raw[body : body + len(record)] = record
        self._order(_RELEASE)
        _RECORD.pack_into(raw, start, seq + 1, len(record))
        for peer in range(self.size):
            self.words.store(peer, _POSTED, seq + 1)

    @staticmethod
    def posted(seq: int) -> tuple[int, int]:
        """The word and the value that say ``record(peer, seq)`` can be read."""
        return _POSTED, seq + 1

    def record(self, peer: int, seq: int) -> bytes | None:
        """``peer``'s record of call ``seq``; None if it is not posted yet, or overwritten already. Local."""
        raw, start = self._raw[peer], self._place(seq)
        found, length = _RECORD.unpack_from(raw, start)
        if found != seq + 1 or not 0 <= length <= RECORD_NBYTES:
            return None
        self._order(_ACQUIRE)
        record = bytes(raw[start + _RECORD.size : start + _RECORD.size + length])
        self._order(_ACQUIRE)
        return record if _RECORD.unpack_from(raw, start)[0] == found else None

    def _place(self, seq: int) -> int:
        return self._layout.ring + seq % _RING * (_RECORD.size + RECORD_NBYTES)

    def _order(self, order: int) -> None:
        if self._machine.fence is not None:
            self._machine.fence(order)

    # -- barrier
    def barrier(self, deadline: float, stop: Callable[[], object]) -> list[int]:
        """Wait until all ranks have called it; warn of the late ones after a tenth of the time. Collective.

        Returns:
            The ranks that had not come by ``deadline``, or when ``stop()`` said so.
        """
        self._rounds += 1
        for peer in self._peers:
            self.words.store(peer, _BARRIER, self._rounds)
        start = time.monotonic()
        late = self._late(min(deadline, start + (deadline - start) / 10), stop)
        if late and not stop():
            waited = f"rank {self.rank} has waited {time.monotonic() - start:.1f} s in a barrier"
            log.warning("commbackend: %s for rank(s) %s", waited, ", ".join(map(str, late)))
            late = self._late(deadline, stop)
        return late

    def _late(self, until: float, stop: Callable[[], object]) -> list[int]:
        for peer in self._peers:
            if not self.words.wait(peer, _BARRIER, self._rounds, until, stop):
                return [p for p in self._peers if self.words.read(p, _BARRIER) < self._rounds]
        return []

    # -- faults
    def show_fault(self, packed: bytes) -> None:
        """Put this rank's fault, packed by ``errors.pack_fault``, into its box. Local; the first one stays."""
        raw, start = self._raw[self.rank], self._layout.fault
        if not raw[start]:
            raw[start + 8 : start + 8 + FAULT_NBYTES] = packed
            self._order(_RELEASE)
            raw[start] = 1

    def peer_fault(self) -> CommBackendError | None:
        """A fault that some peer shows, or None. Local, cheap enough for every slice of a wait."""
        start = self._layout.fault
        for peer in self._peers:
            raw = self._raw[peer]
            if raw[start]:
                self._order(_ACQUIRE)
                return unpack_fault(bytes(raw[start + 8 : start + 8 + FAULT_NBYTES]))
        return None

    def close(self) -> None:
        """Drop the views. Local, idempotent."""
        self.words.close()
        self._raw = []
        self._peers = []
