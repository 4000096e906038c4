"""Messages between the ranks of an MPI job: non-blocking, with deadlines, taken by whoever waits or by a thread.

A message says what to do; a long payload follows it under a tag of its own and lands right where the receiver wants it.
Messages of one thread of one rank are carried out in their order.

MPI is neither initialised nor finalised here: importing mpi4py initialises it if nobody has, and mpi4py finalises it
then. What was on its way at a fault cannot be taken back from MPI: its memory, and the communicator, stay until the
process ends.
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..contract import Rendezvous
from ..errors import CommAborted, CommBackendError, PeerDied, ShapeError, Unavailable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["INLINE_NBYTES", "NO_TAG", "URGENT", "Mail", "MpiLink", "Owner", "join", "library", "vote"]

log = logging.getLogger("commbackend")

# A message: this, two numbers a dimension (extent, stride), and the payload unless that travels under a tag of its own.
_HEAD = struct.Struct("<4sBBHqqqqqqii")
_MAGIC = b"cbM1"
#: Kinds of messages are numbers below this one.
_KINDS = 16
#: Tag of messages. Payloads have even ones, answers odd ones, from _FREE_TAG on; no tag: within the message.
_MAIL_TAG, _FREE_TAG = 1, 16
NO_TAG = 0
_DIMENSIONS = 64
#: A payload up to this size travels in its message: below every MPI's limit of messages sent at once.
INLINE_NBYTES = 3072
#: Longest single MPI message, so that no 32-bit count is met on the way.
_PIECE_NBYTES = 1 << 30
# Looking for news: at once for a while, then with pauses; the thread's pauses grow while there is nothing.
_EAGER_LOOKS, _PAUSE_S, _IDLE_S = 20, 50e-6, 1e-3
#: Lanes of one rank: their numbers come again. The last one is for messages that wait for no other.
_LANES = URGENT = (1 << 16) - 1
_FLUSH_S = 0.5


@dataclass(frozen=True, slots=True)
class Mail:
    """A message. What its fields mean depends on the kind: see who sends it.

    Attributes:
        lane: The sender's thread; messages of one lane are carried out in order, those of URGENT at once.
        memory, offset: A buffer and the first byte, or whatever number the kind needs.
        table, word, value: The slot to raise; table -1: none.
        nbytes: Of the payload, or of what is asked for. tag, answer_tag: Of the payload that follows, and of the one
            that is to be sent back; or NO_TAG.
        shape, stride: Of the window in bytes; the last dimension is an element.
    """

    kind: int
    lane: int = 0
    memory: int = 0
    offset: int = 0
    table: int = -1
    word: int = 0
    value: int = 0
    nbytes: int = 0
    tag: int = NO_TAG
    answer_tag: int = NO_TAG
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """Return the bytes of everything but the payload."""
        where = (self.memory, self.offset, self.table, self.word, self.value, self.nbytes, self.tag, self.answer_tag)
        head = _HEAD.pack(_MAGIC, self.kind, len(self.shape), self.lane, *where)
        return head + struct.pack(f"<{2 * len(self.shape)}q", *self.shape, *self.stride)

    @classmethod
    def unpack(cls, raw: memoryview) -> tuple[Mail, memoryview]:
        """Return a message and its payload. Raises struct.error if ``raw`` is something else."""
        magic, kind, count, lane, *where = _HEAD.unpack_from(raw)
        if magic != _MAGIC or kind >= _KINDS or count > _DIMENSIONS:
            raise struct.error(f"kind {kind} with {count} dimensions")
        dims = struct.unpack_from(f"<{2 * count}q", raw, _HEAD.size)
        payload = raw[_HEAD.size + 16 * count :]
        mail = replace(cls(kind, lane, *where), shape=dims[:count], stride=dims[count:])
        if len(payload) != (mail.nbytes if mail.tag == mail.answer_tag == NO_TAG else 0):
            raise struct.error(f"{len(payload)} bytes of payload, {mail.nbytes} announced")
        return mail, payload


@dataclass(slots=True)
class _Arrival:
    """A message whose turn has not come, or whose payload is on its way."""

    mail: Mail
    payload: memoryview | Tensor
    requests: list[Any] = field(default_factory=list)


class Owner(Protocol):
    """What a link tells; all of it comes from a thread that takes messages."""

    @property
    def fault(self) -> CommBackendError | None:
        """Set: nothing is carried out any more."""
        ...

    def landing(self, mail: Mail) -> Tensor:
        """Return contiguous bytes that the payload of ``mail`` shall be received into."""
        ...

    def act(self, source: int, mail: Mail, payload: Tensor | memoryview) -> None:
        """Carry out a message whose turn has come. Raises LookupError, ShapeError where it makes no sense."""
        ...

    def broke(self, cause: CommBackendError) -> CommBackendError:
        """Make ``cause`` the fault unless there is one; return the fault."""
        ...

    def here(self) -> str:
        """Name this rank and what it is doing, for messages."""
        ...


class MpiLink:
    """Messages over a communicator of its own. Every MPI call here is a non-blocking one."""

    def __init__(self, owner: Owner, mpi: Any, comm: Any, name: str) -> None:
        self._owner, self._mpi, self._comm = owner, mpi, comm
        self.rank = int(comm.Get_rank())
        self._tags, self._lanes, self._lane = itertools.count(), itertools.count(), threading.local()
        self._most_tags = (int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)) - _FREE_TAG) // 4 - 1
        self._news = threading.Condition()
        self._turn = threading.Lock()  # one thread at a time takes messages; the queues belong to it
        self._heads: dict[int, deque[tuple[bytearray, Any]]] = defaultdict(deque)
        self._lines: dict[tuple[int, int], deque[_Arrival]] = defaultdict(deque)
        self._outgoing: deque[tuple[Any, Any]] = deque()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Let the thread take messages from now on."""
        self._thread.start()

    # -- sending
    # ----------------------------------------------------------------------------------------------------------
    def lane(self) -> int:
        """The number of the calling thread."""
        if not hasattr(self._lane, "number"):
            self._lane.number = next(self._lanes) % _LANES
        number: int = self._lane.number
        return number

    def tag(self) -> int:
        """A tag for a payload to come; one more is a tag for an answer."""
        return _FREE_TAG + 2 * (next(self._tags) % self._most_tags)

    def shared_tag(self, number: int) -> int:
        """The tag, above all of ``tag``, of bytes that both sides know to be the ``number``-th of their kind."""
        return _FREE_TAG + 2 * (self._most_tags + 1) + number % self._most_tags

    def send(self, peer: int, mail: Mail, payload: Any = b"") -> None:
        """Send ``mail`` with a short payload. Does not wait."""
        raw = replace(mail, nbytes=len(payload)).pack() + bytes(payload) if len(payload) else mail.pack()
        self._outgoing.extend((request, raw) for request in self.isend(raw, peer, _MAIL_TAG))

    def isend(self, raw: Any, peer: int, tag: int) -> list[Any]:
        """Begin to send bytes under ``tag``. Returns MPI's requests."""
        requests: list[Any] = self._try(lambda: self._isend(raw, peer, tag), peer)
        return requests

    def irecv(self, raw: Any, peer: int, tag: int) -> list[Any]:
        """Begin to receive bytes under ``tag``. Returns MPI's requests."""
        requests: list[Any] = self._try(lambda: self._irecv(raw, peer, tag), peer)
        return requests

    def answer(self, raw: Any, peer: int, tag: int) -> None:
        """Send bytes under ``tag`` while others go on. Called by ``Owner.act``."""
        self._outgoing.extend((request, raw) for request in self._isend(raw, peer, tag))

    def _isend(self, raw: Any, peer: int, tag: int) -> list[Any]:
        return [self._comm.Isend([piece, self._mpi.BYTE], peer, tag) for piece in _pieces(raw)]

    def _irecv(self, raw: Any, peer: int, tag: int) -> list[Any]:
        return [self._comm.Irecv([piece, self._mpi.BYTE], peer, tag) for piece in _pieces(raw)]

    def finish(self, requests: list[Any], raw: Any, peer: int, until: float) -> bool:
        """Wait until ``requests``, which use the memory ``raw``, are done (True), or ``until`` or a fault (False)."""
        if self.wait(lambda: self._try(lambda: all(r.Test() for r in requests), peer), until):
            return True
        _ABANDONED.append((requests, raw))
        return False

    def _try(self, call: Callable[[], Any], peer: int) -> Any:
        try:
            return call()
        except self._mpi.Exception as e:
            raise self._owner.broke(self._explain(e, peer)) from e

    def _explain(self, error: Any, peer: int) -> CommBackendError:
        """The only place that maps errors of MPI."""
        if self._owner.fault is not None:
            return self._owner.fault
        text = f"{self._owner.here()}: MPI: {error.Get_error_string()} (class {error.Get_error_class()})"
        if error.Get_error_class() not in (self._mpi.ERR_PROC_FAILED, self._mpi.ERR_PROC_FAILED_PENDING):
            return CommAborted(text, rank=peer)
        failed, ours = self._comm.Get_failed(), self._comm.Get_group()
        dead = [int(r) for r in failed.Translate_ranks(list(range(failed.Get_size())), ours)]
        self._comm.Ack_failed()  # so that the others' messages can still be taken
        peer = dead[0] if dead else peer
        return PeerDied(f"rank {peer} died: {text}", rank=peer)

    def tell(self, peers: Sequence[int], mail: Mail, payload: bytes) -> None:
        """Send to ``peers`` after a fault: those that MPI does not reach any more are left out."""
        raw = replace(mail, nbytes=len(payload)).pack() + payload
        for peer in peers:
            try:
                self.answer(raw, peer, _MAIL_TAG)
            except self._mpi.Exception:
                log.debug("commbackend: rank %d cannot tell rank %d of its fault", self.rank, peer, exc_info=True)

    # -- taking
    # ----------------------------------------------------------------------------------------------------------
    def wait(self, done: Callable[[], bool], until: float) -> bool:
        """Take what arrives until ``done()`` (True), ``until`` or a fault (False)."""
        looks = 0
        while not done():
            if self._owner.fault is not None or time.monotonic() >= until:
                return False
            if self._turn.acquire(blocking=False):
                try:
                    looks = 0 if self._take() else looks + 1
                finally:
                    self._turn.release()
                time.sleep(0 if looks < _EAGER_LOOKS else _PAUSE_S)
            else:
                with self._news:
                    self._news.wait(_PAUSE_S)
        return self._owner.fault is None

    def _serve(self) -> None:
        """Body of the thread: take what arrives while this rank computes."""
        pause_s = _PAUSE_S
        while not self._ending.wait(pause_s):
            if self._turn.acquire(blocking=False):
                try:
                    busy = self._take() or any(self._lines.values()) or bool(self._outgoing)
                finally:
                    self._turn.release()
                pause_s = _PAUSE_S if busy else min(2 * pause_s, _IDLE_S)

    def _take(self) -> bool:
        """Look once for what has arrived or been sent. Returns whether anything was. The caller has the turn."""
        moved = False
        try:
            for source, raw in self._arrived():
                moved = True
                self._open(source, raw)
            for (source, _), line in list(self._lines.items()):
                # After a fault no payload lands any more: whoever holds the buffer may be about to drop it.
                while line and self._owner.fault is None and all(r.Test() for r in line[0].requests):
                    moved, arrival = True, line.popleft()
                    self._owner.act(source, arrival.mail, arrival.payload)
            for _ in range(len(self._outgoing)):
                sent = self._outgoing.popleft()
                if not sent[0].Test():
                    self._outgoing.append(sent)
        except self._mpi.Exception as e:
            self._owner.broke(self._explain(e, -1))
        except (struct.error, ShapeError, LookupError, ValueError) as e:
            text = f"rank {self.rank}: got a message that no rank of this communicator sends: {e!r}"
            self._owner.broke(CommAborted(text))
        if moved:
            with self._news:
                self._news.notify_all()
        return moved

    def _arrived(self) -> Iterator[tuple[int, memoryview]]:
        """Yield the messages that are here whole, those of a rank in their order."""
        status = self._mpi.Status()
        while (found := self._comm.Improbe(self._mpi.ANY_SOURCE, _MAIL_TAG, status)) is not None:
            raw = bytearray(status.Get_count(self._mpi.BYTE))
            self._heads[status.Get_source()].append((raw, found.Irecv([raw, self._mpi.BYTE])))
        for source, heads in self._heads.items():
            while heads and heads[0][1].Test():
                yield source, memoryview(heads.popleft()[0])

    def _open(self, source: int, raw: memoryview) -> None:
        """Put a message in its line, and let its payload come."""
        mail, payload = Mail.unpack(raw)
        if mail.lane == URGENT:
            self._owner.act(source, mail, payload)
        elif self._owner.fault is None:
            arrival = _Arrival(mail, payload)
            if mail.tag != NO_TAG:
                arrival.payload = landing = self._owner.landing(mail)
                raw_landing: Any = landing.numpy()
                arrival.requests = self._irecv(memoryview(raw_landing), source, mail.tag)
            self._lines[source, mail.lane].append(arrival)

    def pending(self, source: int) -> bool:
        """Whether messages of ``source`` have come that are not carried out yet."""
        return any(line for (rank, _), line in list(self._lines.items()) if rank == source)

    # -- leaving
    # ----------------------------------------------------------------------------------------------------------
    def flushed(self) -> bool:
        """Whether all that was sent is on its way."""
        return not self._outgoing

    def close(self, *, healthy: bool) -> None:
        """Stop taking messages, give the communicator back. Local in effect; when ``healthy`` all ranks call it."""
        until = time.monotonic() + _FLUSH_S
        while self._outgoing and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(2 * _FLUSH_S)
        if healthy and not self._outgoing:
            self._comm.Free()
        else:  # freeing is collective, and MPI may still read or write that memory
            _ABANDONED.append((self._outgoing, self._heads, self._lines))


#: Requests that a fault interrupted, with the memory that MPI may use until the process ends.
_ABANDONED: list[Any] = []


def _pieces(raw: Any) -> list[Any]:
    return [raw[at : at + _PIECE_NBYTES] for at in range(0, len(raw), _PIECE_NBYTES)]


# -- MPI
# --------------------------------------------------------------------------------------------------------------


def library() -> Any:
    """Return mpi4py's MPI, initialised and ready for threads. Raises Unavailable."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as e:
        text = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise Unavailable(f"mpi4py finds no MPI: {text}", "install an MPI and mpi4py for it") from e
    if MPI.Is_finalized():
        raise Unavailable("MPI has been finalised in this process")
    if not MPI.Is_initialized():
        raise Unavailable(
            "MPI is not initialised: mpi4py.rc.initialize is off", "call MPI.Init_thread(MPI.THREAD_MULTIPLE) before"
        )
    found = MPI.Query_thread()
    if found < MPI.THREAD_MULTIPLE:
        names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
        raise Unavailable(
            f"MPI was initialised with THREAD_{names.get(found, found)}, and THREAD_MULTIPLE is needed",
            "initialise it by MPI.Init_thread(MPI.THREAD_MULTIPLE), which importing mpi4py.MPI asks for",
        )
    return MPI


def vote(group: Rendezvous, reason: str) -> None:
    """Raise Unavailable on all ranks if some rank gives a reason. Collective."""
    votes = [v.decode("utf-8", "replace") for v in group.exchange(reason.encode("utf-8", "replace"))]
    lost = [f"rank {rank}: {vote}" for rank, vote in enumerate(votes) if vote]
    if lost:
        raise Unavailable(reason if len(set(votes)) == 1 else "; ".join(lost))


def join(mpi: Any, places: Sequence[int], token: bytes, deadline: float) -> tuple[Any, str]:
    """Return a communicator of the ranks at ``places`` of COMM_WORLD, or why there is none. Collective over them.

    MPI has no form of it with a deadline, so it runs in a thread, which is left behind if it never returns.
    """
    made: list[Any] = []

    def make() -> None:
        try:
            world = mpi.COMM_WORLD.Get_group()
            comm = mpi.COMM_WORLD.Create_group(world.Incl(list(places)), 1 + token[0] * 16 + token[1] % 16)
            comm.Set_errhandler(mpi.ERRORS_RETURN)
            made.append(comm)
        except mpi.Exception as e:
            made.append(f"MPI_Comm_create_group: {e.Get_error_string()}")

    maker = threading.Thread(target=make, name="commbackend-mpi-join", daemon=True)
    maker.start()
    maker.join(max(deadline - time.monotonic(), 0.001))
    if not made:
        return None, f"MPI did not join ranks {list(places)} of its world in time: are they of one job?"
    return (None, made[0]) if isinstance(made[0], str) else (made[0], "")
