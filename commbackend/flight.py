"""The flight record: what every rank last entered and last finished, in memory that other processes can read.

Every communicator keeps one page in an anonymous file of its process: the last call entered, the last finished, the
step every lane is in, and the process ids of all ranks. The processes of one user on one host read each other's pages
through /proc, so a rank that waits in vain can say who is late and where everybody is, and so can an observer of a hung
job: ``commbackend doctor --pid PID``. Writing costs about a microsecond a call; nothing is ever sent.

A reader may see a page in the middle of a change: what it says is for people, never for control.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import signal
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from .errors import CommBackendError, CommTimeout, HeapExhausted, PeerDied, Unavailable

__all__ = ["Flight", "State", "dump", "observe", "on_signal", "verdict"]

log = logging.getLogger("commbackend")

_NAME = "commbackend-flight"
_MAGIC = b"cbR1"
_HEAD = struct.Struct("<4siiiq16s16s")  # magic, rank, size, process id, made at (ns), token, transport
_PID = struct.Struct("<i")
# Words of 64 bits after the head: see the properties that write them.
_WORDS, _LANES = 64, 16
_ENTERED, _ENTERED_NS, _FINISHED, _FINISHED_NS, _FAILED, _MARKS = range(6)
_TEXTS, _TEXT_NBYTES = 256, 256  # of the last two calls, by the parity of their numbers
_LABELS, _LABEL_NBYTES, _MOST_LABELS = 1024, 32, 127
_PEERS = _LABELS + _LABEL_NBYTES * (_MOST_LABELS + 1)
#: Steps that wait for nobody.
_WORK = ("put", "get", "signal", "copy", "gemm", "reduce")
#: Ranks that one message describes; of larger groups the late ones come first.
_SHOWN = 8


class _Meets(Protocol):
    """What of a group is needed here."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def token(self) -> bytes: ...
    def exchange(self, payload: bytes, *, timeout_s: float | None = None, what: str = "") -> list[bytes]: ...


class _Step(Protocol):
    label: str


class _Program(Protocol):
    """What is recorded of a bound program; ``labels`` is kept there for its next call."""

    @property
    def steps(self) -> Sequence[_Step]: ...

    labels: bytes


@dataclass(frozen=True)
class State:
    """What one rank's page says.

    Attributes:
        entered, finished: Numbers of the last call entered and the last finished; 0: none. On streams a call is
            finished when all of it is enqueued.
        op, finished_op: What these calls are, with sizes.
        entered_s_ago, finished_s_ago: Seconds since then.
        steps: The step of every lane that is in one, while a call runs; "" where nothing is known.
        process: "running", "stopped" (by a signal or a debugger) or "ended".
        failed: Whether the communicator has failed there.
    """

    rank: int
    size: int
    pid: int
    transport: str
    entered: int
    finished: int
    op: str
    finished_op: str
    entered_s_ago: float
    finished_s_ago: float
    steps: tuple[str, ...]
    process: str
    failed: bool

    @property
    def blocked(self) -> bool:
        """Whether every lane is in a step that waits for peers."""
        return bool(self.steps) and not any(_first(s) in _WORK for s in self.steps)

    def text(self) -> str:
        """Return one line without the rank's number."""
        state = "" if self.process == "running" else f"its process {self.pid} has {self.process}; "
        if self.process == "stopped":
            state = f"its process {self.pid} is stopped; "
        last = f"last finished call {self.finished} ({_first(self.finished_op)})" if self.finished else "finished none"
        if self.entered > self.finished:
            where = f" at {', '.join(self.steps)}" if self.steps else ""
            return f"{state}in call {self.entered} ({_first(self.op)}) for {self.entered_s_ago:.1f} s{where}, {last}"
        return f"{state}in no call, {last} {self.finished_s_ago:.1f} s ago" if self.finished else f"{state}in no call"


def _first(op: str) -> str:
    return op.partition(" ")[0]


class Flight:
    """One communicator's page, and its view of the peers' pages. Collective to make; everything else is local."""

    def __init__(self, group: _Meets, transport: str, *, timeout_s: float | None = None) -> None:
        self.rank, self.size = group.rank, group.size
        self._pid = os.getpid()
        self._program: _Program | None = None
        nbytes = _page_nbytes(self.size)
        fd = _file(nbytes)
        try:
            self._map(mmap.mmap(fd, nbytes, **_untracked()))
            if sys.version_info >= (3, 13):
                self._fd = fd  # /proc shows the page as long as a descriptor is open
            else:
                self._fd = -1
                os.close(fd)  # the mapping has a descriptor of its own
        except BaseException:
            os.close(fd)
            raise
        self._views: dict[int, mmap.mmap] = {}
        try:
            name = transport.encode()[:16]
            head = _MAGIC, self.rank, self.size, self._pid, time.monotonic_ns(), group.token, name
            _HEAD.pack_into(self._memory, 0, *head)
            told = group.exchange(_PID.pack(self._pid), timeout_s=timeout_s, what="exchange of flight records")
            for rank, raw in enumerate(told):
                pid = _PID.unpack(raw)[0] if len(raw) == _PID.size else 0
                _PID.pack_into(self._memory, _PEERS + rank * _PID.size, pid)
                view = None if rank == self.rank else _find(pid, group.token, rank)
                if view is not None:
                    self._views[rank] = view
        except BaseException:
            self.close()
            raise
        _OPEN.add(self)

    # -- written in every call
    def enter(self, number: int, record: bytes) -> None:
        """The call ``number`` begins; ``record`` says what it is."""
        words, at = self._words, _TEXTS + (number & 1) * _TEXT_NBYTES
        text = record[: _TEXT_NBYTES - 1] + b"\0"
        self._memory[at : at + len(text)] = text
        words[_ENTERED_NS] = time.monotonic_ns()
        self.marks[:] = _NO_MARKS
        words[_ENTERED] = number

    def begin(self, program: _Program) -> None:
        """The call that begins runs ``program``."""
        if program is not self._program:
            self._program = program
            if not program.labels:
                program.labels = _labels([s.label for s in program.steps])
            self._memory[_LABELS : _LABELS + len(program.labels)] = program.labels

    def finish(self, number: int) -> None:
        """The call ``number`` has ended well."""
        words = self._words
        words[_FINISHED_NS] = time.monotonic_ns()
        words[_FINISHED] = number

    # -- read when something is wrong
    def states(self) -> dict[int, State]:
        """Return every rank's state, by rank, as far as this process can read it."""
        pages = {**self._views, self.rank: self._memory}
        return {rank: _state(pages[rank], time.monotonic_ns()) for rank in sorted(pages)}

    def explain(self, fault: CommBackendError) -> None:
        """Add to a timeout or a death where every rank is, and name the ranks that are late. Never raises."""
        if not isinstance(fault, CommTimeout | PeerDied) or fault.explained or os.getpid() != self._pid:
            return
        fault.explained = True
        with contextlib.suppress(ValueError, TypeError, struct.error):  # the page has just been closed
            self._words[_FAILED] = 1
            states = self.states()
            late = verdict(states, self.rank)
            if isinstance(fault, CommTimeout) and late:
                late = sorted({*late, *(r for r in fault.waiting_for if r not in states)})
                fault.waiting_for = tuple(late)
                if fault.rank not in late:
                    fault.rank = late[0]
            fault.args = (f"{fault}{_report(states, late)}",)

    def close(self) -> None:
        """Give the pages back. Idempotent."""
        _OPEN.discard(self)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        for view in self._views.values():
            view.close()
        self._views = {}
        memory, self._program = self._memory, None
        self._map(bytearray(_page_nbytes(self.size)))
        if isinstance(memory, mmap.mmap):
            memory[:4] = bytes(4)  # observers pass it by
            with contextlib.suppress(BufferError):  # a call still runs in another thread: the page goes with it
                memory.close()

    def _map(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        self._words = memoryview(memory)[_WORDS:_TEXTS].cast("q")
        #: Item ``lane`` is the number, from 1, of the step that the lane is in.
        self.marks = self._words[_MARKS : _MARKS + _LANES]


_NO_MARKS = memoryview(bytes(8 * _LANES)).cast("q")
_OPEN: weakref.WeakSet[Flight] = weakref.WeakSet()


def _labels(names: Sequence[str]) -> bytes:
    cut = [n.encode("ascii", "replace")[:_LABEL_NBYTES].ljust(_LABEL_NBYTES, b"\0") for n in names[:_MOST_LABELS]]
    return b"".join([*cut, bytes(_LABEL_NBYTES)])


def verdict(states: dict[int, State], rank: int) -> list[int]:
    """Return the ranks that hold up ``rank``: those that have not entered its call; else those that are in it and wait
    for nobody, or whose process is stopped. Nobody, if all of them wait.
    """
    mine = states[rank].entered
    others = {r: s for r, s in states.items() if r != rank}
    late = [r for r, s in others.items() if s.entered < mine or s.process == "ended"]
    within = [r for r, s in others.items() if s.entered == mine > s.finished and not s.failed]
    stopped = [r for r, s in others.items() if s.process == "stopped" and s.finished < mine]
    busy = [r for r in within if states[r].steps and not states[r].blocked]
    return sorted({*late, *stopped} or busy)


def _report(states: dict[int, State], late: Sequence[int]) -> str:
    order = [*(r for r in late if r in states), *(r for r in states if r not in late)]
    lines = [f"rank {r}: {states[r].text()}" for r in order[:_SHOWN]]
    rest = len(order) - len(lines)
    names = f"late: rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}; " if late else ""
    return f" [{names}{'; '.join(lines)}{f'; {rest} more ranks' if rest > 0 else ''}]"


# -- for observers -----------------------------------------------------------------------------------------------------
def observe(pid: int) -> dict[str, Any]:
    """Return what the communicators of process ``pid`` and their peers on this host are doing: plain data. Local.

    Raises:
        Unavailable: There is no such process, it is another user's, or it has no communicator.
    """
    found, seen = [], set()
    for memory in _pages(pid):
        own, token = _state(memory, time.monotonic_ns()), _HEAD.unpack_from(memory)[5]
        if (own.rank, token) in seen:  # ranks that are threads of one process have each other's pages mapped
            memory.close()
            continue
        seen.add((own.rank, token))
        states = {own.rank: own}
        for rank in range(own.size):
            peer = _PID.unpack_from(memory, _PEERS + rank * _PID.size)[0]
            view = _find(peer, token, rank) if rank != own.rank and peer else None
            if view is not None:
                states[rank] = _state(view, time.monotonic_ns())
                view.close()
        memory.close()
        found.append(
            {
                "rank": own.rank,
                "size": own.size,
                "transport": own.transport,
                "late": verdict(states, own.rank) if own.entered > own.finished else [],
                "unreadable": [r for r in range(own.size) if r not in states],
                "ranks": [asdict(states[r]) for r in sorted(states)],
            }
        )
    if not found:
        raise Unavailable(f"process {pid} has no communicator", "name the process id of a rank")
    return {"pid": pid, "communicators": found}


def dump() -> str:
    """Return ``observe`` of this process as one line of JSON."""
    try:
        return json.dumps(observe(os.getpid()))
    except Unavailable:
        return json.dumps({"pid": os.getpid(), "communicators": []})


def on_signal(name: str) -> None:
    """Have the signal ``name`` ("USR2") write ``dump()`` to stderr. From the main thread; idempotent.

    A handler that was there before is called afterwards.
    """
    number = signal.Signals[f"SIG{name}"]
    if number in _handled:
        return
    if threading.current_thread() is not threading.main_thread():
        log.warning("commbackend: only the main thread can set the handler of %s; use commbackend doctor --pid", name)
        return
    before = signal.getsignal(number)

    def handle(caught: int, frame: Any) -> None:
        os.write(2, dump().encode() + b"\n")
        if callable(before):
            before(caught, frame)

    signal.signal(number, handle)
    _handled.add(number)


_handled: set[int] = set()


# -- pages -------------------------------------------------------------------------------------------------------------
def _page_nbytes(size: int) -> int:
    return -(-(_PEERS + size * _PID.size) // mmap.PAGESIZE) * mmap.PAGESIZE


def _file(nbytes: int) -> int:
    """An anonymous file whose name /proc shows; it is gone with the last process that has it."""
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    except (OSError, AttributeError):  # a sandbox forbids it: the record is then this process's own
        fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as e:
        os.close(fd)
        raise HeapExhausted(f"{nbytes} bytes of shared memory are needed for the flight record: {e}") from e
    return fd


def _untracked() -> dict[str, Any]:
    return {"trackfd": False} if sys.version_info >= (3, 13) else {}


def _pages(pid: int) -> Iterator[mmap.mmap]:
    """Yield the pages of process ``pid``, read-only. Raises Unavailable where the process cannot be looked into."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError as e:
        raise Unavailable(f"process {pid} cannot be looked into: {e.strerror}", "it must be this user's") from e
    for name in names:
        path = f"{folder}/{name}"
        with contextlib.suppress(OSError, ValueError, struct.error):  # closed meanwhile
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ, **_untracked())
            finally:
                os.close(fd)
            magic, _, _, owner, *_ = _HEAD.unpack_from(memory)
            if magic == _MAGIC and owner == pid:  # not a peer's page that is mapped there
                yield memory
            else:
                memory.close()


def _find(pid: int, token: bytes, rank: int) -> mmap.mmap | None:
    """Return the page of ``rank`` of the group with ``token`` in process ``pid``, or None where it cannot be read."""
    found = None
    with contextlib.suppress(Unavailable):
        for memory in _pages(pid):
            head = _HEAD.unpack_from(memory)
            if found is None and head[1] == rank and head[5] == token:
                found = memory
            else:
                memory.close()
    return found


def _state(memory: mmap.mmap | bytearray, now_ns: int) -> State:
    _, rank, size, pid, _, _, name = _HEAD.unpack_from(memory)
    words = struct.unpack_from(f"<{_MARKS + _LANES}q", memory, _WORDS)
    entered, finished = words[_ENTERED], words[_FINISHED]
    inside = entered > finished
    return State(
        rank=rank,
        size=size,
        pid=pid,
        transport=_text(name),
        entered=entered,
        finished=finished,
        op=_call(memory, entered),
        finished_op=_call(memory, finished) if entered - finished < 2 else "",
        entered_s_ago=round((now_ns - words[_ENTERED_NS]) / 1e9, 3) if entered else -1.0,
        finished_s_ago=round((now_ns - words[_FINISHED_NS]) / 1e9, 3) if finished else -1.0,
        steps=tuple(_label(memory, mark) for mark in words[_MARKS:] if mark) if inside else (),
        process=_process(pid),
        failed=bool(words[_FAILED]),
    )


def _call(memory: mmap.mmap | bytearray, number: int) -> str:
    at = _TEXTS + (number & 1) * _TEXT_NBYTES
    return _text(memory[at : at + _TEXT_NBYTES]) if number else ""


def _label(memory: mmap.mmap | bytearray, mark: int) -> str:
    at = _LABELS + (min(mark, _MOST_LABELS + 1) - 1) * _LABEL_NBYTES
    return _text(memory[at : at + _LABEL_NBYTES]) or f"step {mark}"


def _text(raw: bytes | bytearray) -> str:
    return bytes(raw).partition(b"\0")[0].decode("utf-8", "replace")


def _process(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "ended"
    return {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended"}.get(state, "running")
