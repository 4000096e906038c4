"""The contract between the engine and what it drives: transports (data) and GEMM providers (compute).

This page is all a stranger needs to write a transport; ``docs/write-a-transport.md`` is a complete one and
``commbackend.testing`` holds the suite that proves one. Roles are classes: a transport implements
``OneSided`` (symmetric memory, put, get, signal, wait), ``Collective`` (all_gather, all_to_all, ...), or both. An
ability is a role implemented or a field of ``Caps``; no method exists to throw. Public verbs check their arguments once
for all transports and call the ``_verb`` hook that a transport writes.

Words. *rank*, *size*, *peer* are positions in the communicator's group. A *stream* is None for CPU transports (the verb
runs in the calling thread and its effect is complete when it returns) or a ``cudaStream_t`` as int (the verb is
enqueued and never blocks the host). A *deadline* is a value of ``time.monotonic()``. *Collective* calls are made by all
ranks in the same order; all others are local.

Promises (each one is a test of the suite):

* Order: verbs one thread issues on one stream take effect in call order; a put's slot rises only after that put's bytes
  are visible to the waiter; a signal is ordered after every earlier put of the same stream to the same peer.
* Slots: 64-bit, one writer a word, values only grow, a wait is satisfied by >=; ``POISON`` satisfies every wait, and
  the wait then raises the fault.
* Every wait ends by its deadline with CommTimeout naming the late peer, the value wanted and the value seen; a warning
  names it after a tenth.
* A peer that dies raises PeerDied on every rank that waits for it. A timeout, a death or an abort never looks like
  success.
* Faults are sticky: after the first one every verb raises it again until ``close``.
* ``abort``: any thread, any time, local (it also tells the peers), idempotent, does not block. ``close``: collective
  with a deadline when healthy, local after a fault; idempotent. Nothing is left behind: no name, descriptor, thread or
  mapping.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from .errors import CommAborted, CommBackendError, CommTimeout, ShapeError, Unsupported

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "POISON",
    "RECORD_NBYTES",
    "Caps",
    "Collective",
    "DeviceSlotTable",
    "Exchange",
    "ExchangeKernel",
    "ExchangeMemory",
    "ExchangeProvider",
    "GemmKernel",
    "GemmProblem",
    "GemmProvider",
    "GemmSegment",
    "GraphCapture",
    "OneSided",
    "Prepares",
    "Rendezvous",
    "Slot",
    "SlotTable",
    "SumKernel",
    "SumProvider",
    "SymBuffer",
    "Transport",
    "Window",
    "Word",
    "torch_stream",
]

log = logging.getLogger("commbackend")

#: The value written into slots when a communicator fails; greater than any value a healthy call uses.
POISON = 1 << 62
#: Longest record of ``Transport.post``, in bytes.
RECORD_NBYTES = 512


def torch_stream(stream: int, device: torch.device | int | None = None) -> torch.cuda.Stream:
    """Return ``stream``, a ``cudaStream_t``, as torch's object for it, for work that torch is to do on it.

    0 is the default stream of ``device`` (None: the current device). ``torch.cuda.ExternalStream(0)`` is another one,
    which nothing orders against the caller's work (seen with torch 2.11): never make one from a number elsewhere.
    """
    import torch

    if stream == 0:
        return torch.cuda.default_stream(device)
    found: torch.cuda.Stream = torch.cuda.ExternalStream(stream, device=device)
    return found


class Rendezvous(Protocol):
    """The control plane as transports see it; ``group.Group`` implements it. Used while connecting, growing and
    closing, never in a call.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def token(self) -> bytes:
        """16 random bytes of rank 0, the same on all ranks: names and authenticates this group's private objects."""
        ...

    def exchange(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """All-gather of bytes. Collective. Raises CommTimeout naming the ranks that have not come."""
        ...

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when all ranks have called it. Collective."""
        ...


@dataclass(frozen=True, slots=True)
class Caps:
    """Facts about a transport that are not methods. Every field is a promise that the suite tests.

    Attributes:
        device: "cpu", "cuda" or "any": where the tensors it moves live.
        one_sided, collective: The roles it implements.
        scope: How far it reaches: "process", "host", "nvlink" or "cluster".
        source: "any": ``put`` reads any tensor on the device; "symmetric": only views of its SymBuffers.
        numerics: "fixed": it never reduces (commbackend sums in rank order); "library": its reductions use their own
            order and are chosen only when allowed.
        peer_view: ``Window.at(peer)`` is a tensor that copies and GEMMs may read and write directly.
        multicast: A SymBuffer has an address whose stores reach all ranks.
        device_signal: Kernels may poll and raise slots by pointer.
        stream_ordered: Verbs take a CUDA stream and are enqueued.
        free_queues: A lane that waits never holds up another lane: threads, or streams that do not share one hardware
            queue. False where CUDA_DEVICE_MAX_CONNECTIONS=1 or CUDA_LAUNCH_BLOCKING=1 was found.
        graph_capture: Those verbs may be captured in a CUDA graph.
        copy_engine: ``put`` needs no SM; prepared puts of some KiB may take one.
        abortable: ``abort`` releases waits that are already blocked.
        bounded_wait: Waits end by their deadline without help from outside.
        copy_lanes: Copy lanes worth having beside the caller's: 0 where they would only take cores from products.
        sharing: Ranks that use this rank's device; kernels that poll take their share of its SMs.
        exchanges: A GEMM provider is there whose kernels exchange rows with peers; the communicator sets it.
        hosts: Of a transport of two levels: the host of every rank. Its one-sided verbs reach the ranks of the own
            host, its collectives (``Transport.between``) those with the same number on other hosts. () for all others.
        nonblocking: ``put`` returns before the bytes have moved (a flush or a slot tells).
    """

    device: str
    one_sided: bool = False
    collective: bool = False
    scope: str = "process"
    source: str = "any"
    numerics: str = "fixed"
    peer_view: bool = False
    multicast: bool = False
    device_signal: bool = False
    stream_ordered: bool = False
    free_queues: bool = True
    graph_capture: bool = False
    copy_engine: bool = False
    abortable: bool = True
    bounded_wait: bool = True
    nonblocking: bool = False
    copy_lanes: int = 1
    sharing: int = 1
    exchanges: bool = False
    hosts: tuple[int, ...] = ()


class SymBuffer(ABC):
    """Symmetric memory: the same number of bytes at every rank, reachable by all. Made by ``OneSided.alloc``."""

    nbytes: int

    @property
    @abstractmethod
    def local(self) -> Tensor:
        """This rank's bytes: a 1-D uint8 tensor of ``nbytes`` elements."""

    @abstractmethod
    def view(self, rank: int) -> Tensor | None:
        """``rank``'s bytes as a 1-D uint8 tensor that loads and stores reach, or None where the transport gives no
        view.
        """

    @property
    def multicast(self) -> Tensor | None:
        """Bytes whose stores reach all ranks, or None."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Collective when healthy (peers may still read it), local after a fault; idempotent."""

    def window(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> Window:
        """Name a tensor inside the buffer, the same on all ranks. Local, cheap, allocates no memory.

        Args:
            offset: First byte; a multiple of the element size.
            shape, stride: In elements; ``stride`` defaults to row-major.
        Raises:
            ShapeError: The tensor does not fit in the buffer.
        """
        shape = tuple(shape)
        if stride is None:
            packed, acc = [], 1
            for extent in reversed(shape):
                packed.append(acc)
                acc *= max(extent, 1)
            stride = tuple(reversed(packed))
        last = sum((e - 1) * s for e, s in zip(shape, stride, strict=True)) if all(shape) else -1
        if offset < 0 or offset % dtype.itemsize or offset + (last + 1) * dtype.itemsize > self.nbytes:
            raise ShapeError(
                f"window of shape {shape}, stride {tuple(stride)}, {dtype} at byte {offset} does not fit a buffer of "
                f"{self.nbytes} bytes"
            )
        return Window(self, offset, shape, tuple(stride), dtype)


class Window:
    """A tensor inside a SymBuffer, named symmetrically: the same offset, shape and strides at every rank."""

    __slots__ = ("_views", "buffer", "dtype", "offset", "shape", "stride")

    def __init__(
        self, buffer: SymBuffer, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.buffer, self.offset, self.shape, self.stride, self.dtype = buffer, offset, shape, stride, dtype
        self._views: dict[int, Tensor | None] = {}

    @property
    def local(self) -> Tensor:
        """This rank's tensor."""
        found = self._views.get(-1)
        if found is None:
            found = self._views[-1] = self._shape(self.buffer.local)
        return found

    def at(self, rank: int) -> Tensor | None:
        """``rank``'s tensor, or None where the transport gives no view of it."""
        if rank not in self._views:
            raw = self.buffer.view(rank)
            self._views[rank] = None if raw is None else self._shape(raw)
        return self._views[rank]

    def _shape(self, raw: Tensor) -> Tensor:
        # Views through a 1-D typed view, so that offset and strides are counted in elements.
        usable = raw.numel() - raw.numel() % self.dtype.itemsize
        typed = raw[:usable].view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset() + self.offset // self.dtype.itemsize)


class SlotTable(ABC):
    """``words`` 64-bit slots for every writer, at every rank, zero at first. Made by ``OneSided.alloc_slots``."""

    words: int

    @abstractmethod
    def read(self, writer: int, word: int) -> int:
        """The present value of ``writer``'s word at this rank, for diagnosis and tests: ``OneSided.wait`` waits."""

    @abstractmethod
    def close(self) -> None:
        """Give the words back; as ``SymBuffer.close``."""


class DeviceSlotTable(SlotTable):
    """A SlotTable whose words kernels poll and raise by address. Transports with ``caps.device_signal`` make these."""

    @abstractmethod
    def address(self, writer: int, word: int) -> int:
        """Device address, at this rank, of the word that ``writer`` raises here."""

    @abstractmethod
    def peer_address(self, peer: int, word: int) -> int:
        """Device address, mapped into this process, of the word that this rank raises at ``peer``."""


class Slot(NamedTuple):
    """A word and the value it is raised to or waited for. Its writer is the rank that puts or signals."""

    table: SlotTable
    word: int
    value: int


class Transport(ABC):
    """What every transport is. Subclass ``OneSided``, ``Collective`` or both.

    A transport file holds one class; ``registry`` names it. Construction is ``connect``; there is one instance a
    communicator.
    """

    name: ClassVar[str]
    caps: Caps
    #: Collectives among the ranks with this rank's number on their hosts, host by host; of transports of two levels.
    between: Collective | None = None

    def __init__(self, group: Rendezvous) -> None:
        self.rank, self.size, self.timeout_s = group.rank, group.size, group.timeout_s
        self.closed = False
        #: Name of the call that is running, for messages; the engine sets both.
        self.op, self.seq = "", -1
        #: Adds to the first fault what is known of the other ranks; does not block, does not raise. The communicator
        #: sets it.
        self.explain_fault: Callable[[CommBackendError], None] | None = None
        self._fault: CommBackendError | None = None
        self._fault_lock = threading.Lock()

    @classmethod
    @abstractmethod
    def probe(cls, device: torch.device) -> None:
        """Raise Unavailable(reason, hint) if this process cannot use the transport on ``device``. Local, cheap, leaves
        nothing behind.
        """

    @classmethod
    @abstractmethod
    def connect(cls, group: Rendezvous, device: torch.device, options: Mapping[str, Any]) -> Transport:
        """Join all ranks of ``group``. Collective; proves reach by moving real bytes between every pair that will use
        it.

        Args:
            options: Settings of the communicator by name (``config.Config``), and more that a caller gives. A transport
                takes those it knows and leaves the others alone.
        Raises:
            Unavailable: Some pair cannot reach each other; raised on every rank, memory back to where it was.
            CommTimeout, PeerDied: A rank did not come or died.
        """

    # -- agreement: a record of every call, readable by all ranks
    def post(self, seq: int, record: bytes) -> None:
        """Publish this rank's record of call ``seq`` (at most RECORD_NBYTES bytes). Local, does not wait for peers.

        A record stays readable until this rank posts ``seq + 2``: the credits of a call keep ranks within two calls of
        each other.
        """
        self._ready()
        if len(record) > RECORD_NBYTES:
            raise ShapeError(f"record of {len(record)} bytes: at most {RECORD_NBYTES}")
        self._post(seq, record)

    def record(self, peer: int, seq: int, deadline: float) -> bytes:
        """Return ``peer``'s record of call ``seq``, waiting for it until ``deadline``. Raises as ``OneSided.wait``
        does.
        """
        self._ready()
        return self._record(peer, seq, deadline)

    def peek(self, peer: int, seq: int) -> bytes | None:
        """``peer``'s record of call ``seq`` if it can be read now, else None. Never waits, never fails."""
        return None

    @property
    def partners(self) -> tuple[int, ...]:
        """The ranks whose records this one compares with its own: all others, or so many that all are compared."""
        return tuple(p for p in range(self.size) if p != self.rank)

    def _post(self, seq: int, record: bytes) -> None:
        raise Unsupported(f"transport {self.name!r} publishes no records")

    def _record(self, peer: int, seq: int, deadline: float) -> bytes:
        raise Unsupported(f"transport {self.name!r} publishes no records")

    def barrier(self, deadline: float) -> None:
        """Return when all ranks have called it. Collective. Raises CommTimeout naming who is late at ``deadline``."""
        self._ready()
        self._barrier(deadline)

    @abstractmethod
    def _barrier(self, deadline: float) -> None: ...

    # -- faults
    @property
    def fault(self) -> CommBackendError | None:
        """The first fault, or None while healthy. Sticky."""
        return self._fault

    def fail(self, cause: CommBackendError) -> CommBackendError:
        """Make ``cause`` the sticky fault unless there is one; release every blocked wait here; return the first fault.
        Any thread.
        """
        if getattr(cause, "op", None) == "":  # of a peer or a link: here it is about the call that runs here
            vars(cause)["op"] = self.op
            if getattr(cause, "seq", None) == -1:
                vars(cause)["seq"] = self.seq
        if self.explain_fault is not None and self._fault is None:
            self.explain_fault(cause)
        with self._fault_lock:
            first = self._fault is None
            if self._fault is None:
                self._fault = cause
            fault = self._fault
        if first:
            self._release()
        return fault

    def abort(self, reason: str, cause: CommBackendError | None = None) -> None:
        """Fail this rank and tell the peers, who raise the same cause. Any thread, idempotent, does not block."""
        if self.closed:
            return
        fault = self.fail(
            cause
            or CommAborted(
                f"rank {self.rank} aborted the communicator: {reason}", rank=self.rank, op=self.op, seq=self.seq
            )
        )
        self._tell(fault)

    def _release(self) -> None:  # noqa: B027 - a transport whose waits poll ``self._fault`` needs nothing here
        """Hook: wake waits that are blocked in this process (poison the local words)."""

    def _tell(self, fault: CommBackendError) -> None:  # noqa: B027 - without a side channel: by deadline
        """Hook: tell the peers of ``fault`` without blocking; they ``fail`` with an equal exception.
        ``errors.pack_fault`` is the wire form.
        """

    def guard(self, tensor: Tensor, stream: int | None) -> None:  # noqa: B027 - a call that raises needs no guard
        """Enqueue: fill ``tensor`` with NaN (bytes of 0xFF) if the transport has failed by then.

        Stream-ordered transports implement it, since a wait that ends by poison lets the stream go on. Transports whose
        waits raise leave it as it is.
        """

    def close(self, timeout_s: float | None = None) -> None:
        """Leave. Collective with a deadline when healthy (all ranks call it), local after a fault. Idempotent; never
        leaves anything behind.
        """
        if self.closed:
            return
        self.closed = True
        self._close(self.timeout_s if timeout_s is None else timeout_s)

    @abstractmethod
    def _close(self, timeout_s: float) -> None: ...

    def _ready(self) -> None:
        if self._fault is not None:
            # Without this every raise would add to the one traceback, which keeps the callers' tensors alive.
            raise self._fault.with_traceback(None)
        if self.closed:
            raise CommAborted(f"transport {self.name!r} of rank {self.rank} is closed", rank=self.rank)

    def _peer(self, peer: int) -> None:
        if not 0 <= peer < self.size:
            raise ShapeError(f"peer {peer}: the group has ranks 0...{self.size - 1}")


class OneSided(Transport):
    """The role of transports with symmetric memory."""

    def alloc(self, nbytes: int) -> SymBuffer:
        """Allocate ``nbytes`` (> 0) at every rank, zero-filled. Collective: all ranks pass the same number.

        Raises:
            HeapExhausted: On every rank, naming needed and available bytes and the rank that lacks them; nothing stays
                allocated.
            CollectiveMismatch: Ranks pass different numbers.
        """
        self._ready()
        if nbytes <= 0:
            raise ShapeError(f"alloc of {nbytes} bytes: must be positive")
        return self._alloc(nbytes)

    def alloc_slots(self, words: int) -> SlotTable:
        """Allocate ``words`` slots for every writer at every rank, zero. Collective."""
        self._ready()
        if words <= 0:
            raise ShapeError(f"alloc_slots of {words} words: must be positive")
        return self._alloc_slots(words)

    def put(self, dst: Window, src: Tensor, peer: int, *, slot: Slot | None = None, stream: int | None = None) -> None:
        """Copy ``src`` into ``dst`` at ``peer`` (which may be this rank), then raise ``slot`` there. Zero elements:
        only the slot rises.

        Args:
            src: Same shape and dtype as ``dst``, any strides; on the transport's device. With ``caps.source ==
                "symmetric"`` a view of ``SymBuffer.local``. It may be reused when the put has completed on ``stream``
                (on a CPU: when the call returns).
        Raises:
            ShapeError: Shape, dtype or device differ, before a byte moves.
        """
        self._ready()
        self._peer(peer)
        self._same(dst, src)
        self._put(dst, src, peer, slot, stream)

    def get(self, dst: Tensor, src: Window, peer: int, *, stream: int | None = None) -> None:
        """Copy ``src`` at ``peer`` into ``dst``. What makes ``src`` ready is for the caller to have waited for."""
        self._ready()
        self._peer(peer)
        self._same(src, dst)
        self._get(dst, src, peer, stream)

    def signal(self, peer: int, slot: Slot, *, stream: int | None = None) -> None:
        """Raise ``slot`` of this rank's block at ``peer``, after every earlier verb of this stream."""
        self._ready()
        self._peer(peer)
        self._signal(peer, slot, stream)

    def wait(self, peer: int, slot: Slot, *, deadline: float, stream: int | None = None) -> None:
        """Wait until ``peer`` has raised its word here to ``slot.value`` or more; what it covers is then visible to
        this rank.

        On a stream: enqueue that wait; the deadline is kept by a watch thread or inside the wait kernel.

        Raises:
            CommTimeout: At ``deadline``, with rank, op, seq, wanted and seen. The communicator has failed then.
            PeerDied, CommAborted: The first fault of the communicator.
        """
        self._ready()
        self._peer(peer)
        if stream is not None:
            self._enqueue_wait(peer, slot, deadline, stream)
            return
        start = time.monotonic()
        if not self._wait(peer, slot, min(deadline, start + (deadline - start) / 10)) and self._fault is None:
            log.warning(
                "commbackend: rank %d has waited %.1f s for rank %d in %s (call %d): word %d is %d, wanted %d",
                self.rank,
                time.monotonic() - start,
                peer,
                self.op or "a call",
                self.seq,
                slot.word,
                slot.table.read(peer, slot.word),
                slot.value,
            )
            self._wait(peer, slot, deadline)
        if self._fault is not None:
            raise self._fault
        seen = slot.table.read(peer, slot.word)
        if seen < slot.value:
            message = (
                f"rank {self.rank} waited {time.monotonic() - start:.3f} s for rank {peer} in {self.op or 'a call'}"
                f" (call {self.seq}): word {slot.word} is {seen}, wanted {slot.value}"
            )
            late = CommTimeout(message, rank=peer, op=self.op, seq=self.seq, wanted=slot.value, seen=seen)
            self.abort(message, late)
            raise self._fault or late

    @abstractmethod
    def _alloc(self, nbytes: int) -> SymBuffer: ...
    @abstractmethod
    def _alloc_slots(self, words: int) -> SlotTable: ...
    @abstractmethod
    def _put(self, dst: Window, src: Tensor, peer: int, slot: Slot | None, stream: int | None) -> None: ...
    @abstractmethod
    def _get(self, dst: Tensor, src: Window, peer: int, stream: int | None) -> None: ...
    @abstractmethod
    def _signal(self, peer: int, slot: Slot, stream: int | None) -> None: ...
    @abstractmethod
    def _wait(self, peer: int, slot: Slot, until: float) -> bool:
        """Hook: block until the word has its value (True), ``until`` passes (False), or ``self._fault`` is set (False,
        at once).
        """

    def _enqueue_wait(self, peer: int, slot: Slot, deadline: float, stream: int) -> None:
        """Hook of stream-ordered transports."""
        raise Unsupported(f"transport {self.name!r} has no streams")

    def _same(self, window: Window, tensor: Tensor) -> None:
        if tuple(tensor.shape) != window.shape or tensor.dtype != window.dtype:
            raise ShapeError(
                f"tensor of shape {tuple(tensor.shape)}, {tensor.dtype} for a window of shape {window.shape}, "
                f"{window.dtype}"
            )


class GraphCapture(ABC):
    """The role of stream-ordered transports whose verbs a CUDA graph may capture."""

    @abstractmethod
    def epochs(self, address: int) -> AbstractContextManager[None]:
        """Within: verbs on streams use ``slot.value`` plus the 64-bit word at ``address``, read when they run."""

    @abstractmethod
    def advance(self, address: int, stream: int) -> None:
        """Enqueue: add one to the 64-bit device word at ``address``."""


class Word(NamedTuple):
    """A slot that a prepared call raises, or waits for, at the value of the call plus ``delta``."""

    peer: int
    word: int
    delta: int
    waits: bool


class Prepares(ABC):
    """The role of stream-ordered transports whose verbs can be prepared: what is the same in every call is worked out
    once, and the functions returned only enqueue. They check nothing: whoever prepares has checked.

    A DriverError that they raise is not a fault of the transport yet; the caller makes it one.
    """

    @abstractmethod
    def prepare_words(self, table: SlotTable, words: Sequence[Word]) -> Callable[[int, float, int], None]:
        """Return ``f(value, deadline, stream)``: raise or wait for ``words``, in their order, at ``value`` + delta."""

    @abstractmethod
    def prepare_put(
        self, dst: Window, src_stride: Sequence[int], peer: int, slot: tuple[SlotTable, int]
    ) -> Callable[[int, int, int], None] | None:
        """Return ``f(address, value, stream)``: put what is at ``address``, of the shape and dtype of ``dst``, and
        raise the slot to ``value``; or None where only the verb ``put`` can.
        """

    @abstractmethod
    def prepare_copy(
        self, shape: Sequence[int], dst_stride: Sequence[int], src_stride: Sequence[int], itemsize: int
    ) -> Callable[[int, int, int], None] | None:
        """Return ``f(dst, src, stream)``, a copy between addresses that this rank can reach; or None where only a copy
        element by element can. Strides are in elements.
        """

    @abstractmethod
    def prepare_guard(self, shape: Sequence[int], stride: Sequence[int], itemsize: int) -> Callable[[int, int], None]:
        """Return ``f(address, stream)``, the ``guard`` of such a tensor."""

    @abstractmethod
    def address(self, window: Window, rank: int) -> int:
        """Where ``window`` of ``rank`` is mapped in this process."""


class Collective(Transport):
    """The role of transports that offer collectives. Ranks issue them in the same order; counts may differ between
    ranks, agreed beforehand.

    On a CPU a verb has completed when it returns; with a stream it is enqueued. Empty tensors are allowed everywhere.
    """

    def all_gather(self, dsts: Sequence[Tensor], src: Tensor, *, stream: int | None = None) -> None:
        """Every rank's ``src`` into ``dsts[rank]`` of every rank. ``dsts`` may be strided views; any dtype, moved as
        bytes.
        """
        self._ready()
        self._counts("dsts", dsts)
        self._all_gather(dsts, src, stream)

    def all_to_all(self, dsts: Sequence[Tensor], srcs: Sequence[Tensor], *, stream: int | None = None) -> None:
        """``srcs[p]`` of this rank into ``dsts[rank]`` of rank p. Strided views and any dtype as in ``all_gather``."""
        self._ready()
        self._counts("dsts", dsts)
        self._counts("srcs", srcs)
        self._all_to_all(dsts, srcs, stream)

    def reduce_scatter(
        self, dst: Tensor, srcs: Sequence[Tensor], *, op: str = "sum", stream: int | None = None
    ) -> None:
        """Sum over ranks of their ``srcs[rank]`` into ``dst``, in the library's own order (``numerics="library"``)."""
        self._ready()
        self._counts("srcs", srcs)
        self._reduce_scatter(dst, srcs, op, stream)

    def all_reduce(self, dst: Tensor, src: Tensor, *, op: str = "sum", stream: int | None = None) -> None:
        """Sum over ranks of ``src`` into ``dst``, in the library's own order (``numerics="library"``)."""
        self._ready()
        self._all_reduce(dst, src, op, stream)

    @abstractmethod
    def _all_gather(self, dsts: Sequence[Tensor], src: Tensor, stream: int | None) -> None: ...
    @abstractmethod
    def _all_to_all(self, dsts: Sequence[Tensor], srcs: Sequence[Tensor], stream: int | None) -> None: ...
    @abstractmethod
    def _reduce_scatter(self, dst: Tensor, srcs: Sequence[Tensor], op: str, stream: int | None) -> None: ...
    @abstractmethod
    def _all_reduce(self, dst: Tensor, src: Tensor, op: str, stream: int | None) -> None: ...

    def _counts(self, name: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.size:
            raise ShapeError(f"{name} has {len(tensors)} tensors: one a rank, {self.size}, is needed")


# -- GEMM


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """What a kernel is prepared for. out (m, n) = a (m, k) @ b (n, k).T; fp32 accumulation for 16-bit types.

    Attributes:
        device: "cpu" or "cuda".
        dtype, out_dtype: Names without "torch."; operands and result.
        m: Rows of all segments of a launch together.
        polls: Whether segments carry ready/done slots that the kernel itself polls and raises.
        bias, addends: Whether some segments carry them; the others need not. scales: Whether all do.
    """

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    device: str
    polls: bool = False
    bias: bool = False
    addends: bool = False
    scales: bool = False


@dataclass(slots=True)
class GemmSegment:
    """Rows of one product, as tensors. out = a @ b.T (+ bias) (+ addends, in order, in fp32 before rounding).

    Attributes:
        a: (rows, k), any strides. b: (n, k), any strides (``weight`` and ``weight.T`` views alike). out: (rows, n),
            unit column stride.
        bias: (n,) or None.
        ready: (writer, Slot) pairs the kernel waits for before it reads ``a``; done: (peer, Slot) pairs it raises after
            ``out`` is stored.
        scale_a, scale_b: fp8 scales, per tensor (one element) or per row, or None.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    bias: Tensor | None = None
    addends: tuple[Tensor, ...] = ()
    ready: tuple[tuple[int, Slot], ...] = ()
    done: tuple[tuple[int, Slot], ...] = ()
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None


class GemmKernel(Protocol):
    """A prepared launch. Calling it allocates nothing, compiles nothing and never synchronises.

    ``granularity`` is the number of rows its tiles cover: chunk borders at multiples of it waste no work. ``epoch`` is
    the address of a 64-bit device word that is added to every slot's value when the kernel runs, or 0.
    """

    @property
    def granularity(self) -> int: ...

    def __call__(
        self, segments: Sequence[GemmSegment], *, stream: int | None = None, sm_limit: int = 0, epoch: int = 0
    ) -> None: ...


class SumKernel(Protocol):
    """A prepared sum: out = srcs[0] + srcs[1] + ... (+ bias row), in that order, accumulated in fp32, rounded once.

    Tensors are (rows, n) with unit column stride. Calling it allocates nothing and never synchronises.
    """

    def __call__(
        self, out: Tensor, srcs: Sequence[Tensor], *, bias: Tensor | None = None, stream: int | None = None
    ) -> None: ...


class SumProvider(ABC):
    """The role of GEMM providers that also sum received partials in one kernel."""

    @abstractmethod
    def sums(self, dtype: torch.dtype, count: int) -> str | None:
        """Return None if sums of ``count`` tensors of ``dtype`` are offered, else the reason in one line."""

    @abstractmethod
    def prepare_sum(self, dtype: torch.dtype, count: int) -> SumKernel:
        """Compile what a launch needs. Cached. Raises Unsupported with the reason of ``sums``."""


class ExchangeMemory(NamedTuple):
    """Symmetric memory that belongs to one ``ExchangeKernel`` of every rank. All addresses are as mapped here.

    Attributes:
        rank: Of this process.
        data: Address of the rows' buffer of every rank, zero at first.
        raised: Address, at every rank, of the first of the words that this rank raises there.
        waited: Address, here, of the first of the words that every rank raises here.
        programs, slot_nbytes: Thread blocks that have a slot for every rank's rows, and its size.
    """

    rank: int
    data: tuple[int, ...]
    raised: tuple[int, ...]
    waited: tuple[int, ...]
    programs: int
    slot_nbytes: int


class ExchangeKernel(Protocol):
    """A prepared all-reduce by one launch a rank: out = sum over ranks of x, in rank order, + residual + bias, in fp32,
    rounded once; with ``normed`` and ``norm_weight`` also normed = RMSNorm of out.

    Tensors are (rows, n), of one size on all ranks. Collective: all ranks make the same calls in the same order, each
    on one stream, or ordered as if they were. A launch waits for its peers' launches; its waits end at the provider's
    deadline or by poison in the words, and leave NaN then.
    """

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
    ) -> None: ...


class ExchangeProvider(ABC):
    """The role of GEMM providers whose kernels do a whole all-reduce of few rows, pushing rows to peers and polling."""

    @abstractmethod
    def exchange_nbytes(self, size: int, programs: int, slot_nbytes: int) -> tuple[int, int]:
        """Bytes, and words a writer, of an ``ExchangeMemory`` of these sizes."""

    @abstractmethod
    def exchange(self, memory: ExchangeMemory) -> Exchange:
        """Take ``memory`` into use."""


class Exchange(Protocol):
    """``ExchangeMemory`` in use."""

    def prepare(
        self, dtype: torch.dtype, rows: int, cols: int, *, bias: bool, residual: bool, norm: bool
    ) -> ExchangeKernel:
        """Compile and load what a launch of such sizes needs. Cached. Nothing is compiled in a call."""
        ...


class GemmProvider(ABC):
    """A source of GEMM kernels for one communicator.

    Args:
        timeout_s: Deadline of waits inside kernels that poll.
    """

    name: ClassVar[str]
    #: Whether a row's bits depend on the row and the weight alone: not on m, nor on where the row stands.
    batch_invariant: ClassVar[bool] = False

    def __init__(self, *, timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s

    def check(self, op: str = "") -> None:  # noqa: B027 - kernels that never wait have no faults
        """Raise the first fault of a kernel of this provider, as far as it is known now. Never synchronises."""

    @classmethod
    @abstractmethod
    def probe(cls, device: torch.device) -> None:
        """Raise Unavailable(reason, hint) if this process cannot use the provider on ``device``. Local and cheap."""

    @abstractmethod
    def supports(self, problem: GemmProblem) -> str | None:
        """Return None if ``problem`` can be served, else the reason in one line."""

    @abstractmethod
    def prepare(self, problem: GemmProblem) -> GemmKernel:
        """Load, compile and allocate all a launch needs, for every value its arguments can take. Cached. Raises
        Unsupported with ``supports``' reason.
        """
