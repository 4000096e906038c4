"""CUDA GPUs that map each other's memory: copy engines move chunks, stream memory operations raise flags.

A put is one copy on a copy engine and one 64-bit stream write; a wait is one stream wait. None of them needs an SM,
and none blocks the host. Where the memory comes from and how ranks talk besides is for subclasses: ``userbuffers`` on
one host, ``mnnvl`` in one NVLink domain. docs/gpu.md describes the options.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..contract import POISON, Caps, GraphCapture, OneSided, Rendezvous, Slot, SlotTable, SymBuffer, Window, Word
from ..errors import CommBackendError, CommTimeout, ConfigError, PeerDied, ShapeError, Unavailable
from ..host.control import Control
from .copy_kernels import Kernels, Move, moves
from .driver import Driver, DriverError, import_bindings
from .heap import Heap, MappedBuffer, VmmHeap, agree_on, together
from .prepared import PreparedVerbs
from .proof import PROOF_NBYTES, Prover
from .slots import DeviceSlots, SlotPages
from .watch import POISON_NBYTES, PendingWaits, Watch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["OPTIONS", "CudaSymmetric"]

log = logging.getLogger("commbackend")

#: What ``connect`` understands in ``options``, with defaults; it ignores what is meant for others.
OPTIONS: Mapping[str, Any] = {
    "allow_shared_device": False,  # several ranks on one GPU
    "comm_ctas": 0,  # CTAs of the copy kernel; 0: copy engines
    "ipc": False,  # share memory by CUDA IPC even where virtual memory management works
    "multicast": False,  # give buffers a multicast address where every rank can
    "va_nbytes": 1 << 36,  # addresses reserved for each rank's memory
    "waits": "auto",  # "stream", "kernel", or stream waits where poison gets past a held stream
}

# The first buffer of every rank: status word, scratch of the kernels' first launch, poison, then slot tables.
_PAGE_NBYTES, _SCRATCH, _POISON_AT, _SLOTS_AT = 1 << 21, 256, 65536, 65536 + POISON_NBYTES


class CudaSymmetric(PreparedVerbs, OneSided, GraphCapture):
    """One rank of a group of GPUs that map each other's memory.

    Attributes:
        handles: Device attributes that virtual memory shared in this transport's way needs.
        memory: How peers' memory is mapped: "vmm", "ipc" or "fabric".
        waits: "stream" or "kernel": how waits are enqueued outside ``epochs``.
        multicast_reason: Why there is no multicast, or "".
        status: Address of a device word that is not 0 once the transport has failed; kernels that poll obey it.
    """

    handles: ClassVar[tuple[str, ...]]
    caps: Caps = Caps(
        device="cuda",
        one_sided=True,
        scope="host",
        peer_view=True,
        device_signal=True,
        stream_ordered=True,
        graph_capture=True,
        copy_engine=True,
        nonblocking=True,
    )
    _driver: Driver
    _heap: Heap
    _page: MappedBuffer
    _slots: SlotPages
    _kernels: Kernels
    _watch: Watch

    def __init__(self, group: Rendezvous, device: torch.device, options: Mapping[str, Any], control: Control) -> None:
        super().__init__(group)
        self.device, self._control, self._token, self._pid = device, control, group.token, os.getpid()
        self.memory, self.waits, self.multicast_reason, self.status = "", "stream", "not asked for", 0
        self._options = {key: options.get(key, default) for key, default in OPTIONS.items()}
        self._ctas = int(self._options["comm_ctas"])
        self._epoch, self._connected = 0, False
        self._used: set[int] = set()
        self._allocating = threading.Lock()
        self._undo = ExitStack()

    # -- joining ----------------------------------------------------------------------------------------------------
    @classmethod
    def open_driver(cls, device: torch.device, rank: int) -> Driver:
        """The driver table of ``device``."""
        return Driver(device.index or 0, rank=rank)

    @classmethod
    @abstractmethod
    def open_control(cls, group: Rendezvous, deadline: float, options: Mapping[str, Any]) -> Control:
        """Hook: connect the ranks' control planes. Collective."""

    @abstractmethod
    def _new_heap(self, vmm: bool, multicast: bool, deadline: float) -> Heap:
        """Hook: return where memory comes from, and set ``memory``. Collective.

        Args:
            vmm: Whether every rank's device has ``handles``.
        """

    @classmethod
    def probe(cls, device: torch.device) -> None:
        if device.type != "cuda":
            raise Unavailable(f"{cls.name} moves tensors on CUDA devices, not on {device.type!r}")
        import torch

        if not torch.cuda.is_available():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            raise Unavailable(f"torch {torch.__version__} ({built}) sees no CUDA device", "use transport shm on CPUs")
        import_bindings()
        _require(cls.open_driver(device, -1))

    @classmethod
    def connect(cls, group: Rendezvous, device: torch.device, options: Mapping[str, Any]) -> CudaSymmetric:
        _check_options(options)
        deadline = time.monotonic() + group.timeout_s
        transport = cls(group, device, options, cls.open_control(group, deadline, options))
        try:
            transport._open(deadline)
        except BaseException:
            transport.closed = True
            transport._drop()
            raise
        return transport

    def _open(self, deadline: float) -> None:
        link, undo, multicast = self._control, self._undo, bool(self._options["multicast"])

        def start() -> bytes:
            self._driver = driver = self.open_driver(self.device, self.rank)
            undo.callback(driver.close)
            driver.open()
            _require(driver)
            vmm = all(driver.attribute(a) for a in self.handles) and not self._options["ipc"]
            return driver.uuid() + bytes((vmm, multicast and driver.attribute("MULTICAST_SUPPORTED") > 0))

        found = together(link, "opening the GPUs", start, deadline, payload=lambda facts: facts)[1]
        shared = self._check_devices([raw[:16] for raw in found])
        self.caps = replace(self.caps, sharing=sum(raw[:16] == found[self.rank][:16] for raw in found))
        why_not = "two ranks share a GPU" if shared else "" if all(raw[17] for raw in found) else "a GPU has none"
        self._heap = self._new_heap(all(raw[16] for raw in found), multicast and not why_not, deadline)
        undo.callback(lambda: self._heap.close(self._between))
        self._page = self._heap.alloc(_PAGE_NBYTES, deadline)
        # Schedules that need free queues are chosen by all ranks or by none.
        free = together(
            link, "starting kernels", lambda: self._start(deadline), deadline, payload=lambda f: bytes((f,))
        )
        self.caps = replace(self.caps, free_queues=all(raw[0] for raw in free[1]))
        self._slots = SlotPages(self.rank, self._page, _SLOTS_AT)
        self._watch.tables = self._slots.tables
        self._prove(deadline, why_not)
        self._watch.start()
        self._connected = True
        self._control.on_fault(self._hear)

    def _check_devices(self, uuids: list[bytes]) -> bool:
        """Whether ranks share a GPU. Raises Unavailable if they may not."""
        for uuid in uuids:
            sharing = [r for r, u in enumerate(uuids) if u == uuid]
            if len(sharing) > 1:
                if self._options["allow_shared_device"]:
                    return True
                raise Unavailable(
                    f"ranks {', '.join(map(str, sharing))} are on one GPU, {_uuid_text(uuid)}",
                    "give each rank its own GPU, or set option allow_shared_device",
                )
        return False

    def _start(self, deadline: float) -> bool:
        """Zero the first page, load every kernel, and see whether a held stream lets others pass: stream waits can be
        ended from here only then.
        """
        driver, self.status = self._driver, self._page.bases[self.rank]
        stream = driver.stream()
        try:
            driver.fill(self.status, 0, _PAGE_NBYTES, stream)
            self._kernels = Kernels(driver)
            self._undo.callback(self._kernels.close)
            self._kernels.load(self.status + _SCRATCH, stream)
        finally:
            # Also when something failed: memory is not unmapped under work that still runs.
            idle = driver.settle(stream, deadline - time.monotonic())
            driver.stream_destroy(stream)
        if not idle:
            raise Unavailable("the GPU does not finish one launch of each kernel before the deadline")
        period_s = min(0.25, max(self.timeout_s / 40, 0.005))
        self._watch = Watch(self, driver, self._page.bases, self.status + _POISON_AT, period_s)
        self._undo.callback(self._watch.stop)
        free = self._watch.prove()
        self.waits = self._options["waits"]
        if self.waits == "auto":
            self.waits = "stream" if free else "kernel"
        if not free:
            log.info("commbackend: rank %d: streams share one hardware queue: waits are %ss", self.rank, self.waits)
        return free

    def _prove(self, deadline: float, why_not: str) -> None:
        """Prove every pair and, where it was asked for, multicast."""
        prover = Prover(
            self._driver, self._kernels, self._watch, self, self._control, self._token, min(self.timeout_s, 30.0)
        )
        inbox = self._heap.alloc((self.size + 1) * PROOF_NBYTES, deadline)
        words = self._new_table(2, deadline)
        prover.pairs(inbox, words, deadline)
        self._heap.free(inbox, self._between)
        if self._options["multicast"]:
            try:
                if not self._heap.multicast:
                    raise Unavailable(why_not or self._heap.multicast_reason)
                self._zero(words.local, words.nbytes, deadline)
                prover.multicast(self._page, words, deadline)
                self.caps, self.multicast_reason = replace(self.caps, multicast=True), ""
            except Unavailable as e:
                self.multicast_reason = str(e)
                if isinstance(self._heap, VmmHeap):
                    self._heap.drop_multicast(str(e))
                log.info("commbackend: rank %d: no multicast: %s", self.rank, e)
        self._slots.forget(words)

    def push(self, peer: int, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy of own bytes to a peer's address."""
        self._driver.copy(dst, src, nbytes, stream)

    def pull(self, peer: int, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy of a peer's bytes to an own address."""
        self._driver.copy(dst, src, nbytes, stream)

    def raise_words(self, peer: int, address: int, stream: int) -> None:
        """Enqueue: make two words at a peer's address one, by a stream memory operation and by a kernel."""
        self._driver.write_value(address, 1, stream)
        self._kernels.raise_slot(address + 8, 1, 0, stream)

    # -- memory -----------------------------------------------------------------------------------------------------
    def _alloc(self, nbytes: int) -> SymBuffer:
        with self._changing() as deadline:
            buffer = self._heap.alloc(nbytes, deadline)
            self._zero(buffer.bases[self.rank], nbytes, deadline)
            buffer.owner = self
            return buffer

    def grow(self, buffer: MappedBuffer, nbytes: int) -> None:
        """Make ``buffer`` at least ``nbytes`` bytes long without moving it; new bytes are zero. Collective.

        Raises:
            HeapExhausted: On every rank: no memory, or more than ``buffer.room``; the buffer stays as it was.
        """
        self._ready()
        with self._changing() as deadline:
            had = buffer.nbytes
            self._heap.grow(buffer, nbytes, deadline)
            self._zero(buffer.bases[self.rank] + had, buffer.nbytes - had, deadline)

    def _alloc_slots(self, words: int) -> SlotTable:
        with self._changing() as deadline:
            return self._new_table(words, deadline)

    def _new_table(self, words: int, deadline: float) -> DeviceSlots:
        agree_on(self._control, words, deadline, "words")
        table = self._slots.open(
            words, self._watch.read, lambda nbytes: self._heap.alloc(max(nbytes, _PAGE_NBYTES), deadline)
        )
        table.release = self.release_table
        self._zero(table.local, table.nbytes, deadline)
        return table

    @contextmanager
    def _changing(self) -> Iterator[float]:
        """A collective change of memory, with its deadline. An error that not every rank has seen makes the transport
        fail, so that no rank waits for another in vain.
        """
        try:
            with self._allocating:
                yield time.monotonic() + self.timeout_s
        except (DriverError, CommTimeout, PeerDied) as e:
            self.abort(str(e), e)
            raise self._fault or e from e

    def _zero(self, address: int, nbytes: int, deadline: float) -> None:
        """Zero own bytes; nobody goes on before all are zero. Collective."""

        def zero() -> None:
            if nbytes > 0:
                self._driver.fill(address, 0, nbytes, self._watch.stream)
                if not self._driver.settle(self._watch.stream, min(self.timeout_s, 30.0)):
                    raise Unavailable(f"filling {nbytes} bytes has not ended in time")

        together(self._control, "zeroing new memory", zero, deadline)

    def release_buffer(self, buffer: MappedBuffer) -> None:
        """What ``MappedBuffer.close`` does: collective when healthy. Closing the transport has freed it already."""
        if not self.closed and self._part(time.monotonic() + self.timeout_s):
            self._heap.free(buffer, self._between)

    def release_table(self, table: DeviceSlots) -> None:
        """What ``DeviceSlots.close`` does: collective when healthy."""
        if not self.closed and self._part(time.monotonic() + self.timeout_s):
            self._slots.forget(table)

    # -- verbs ------------------------------------------------------------------------------------------------------
    def _put(self, dst: Window, src: Tensor, peer: int, slot: Slot | None, stream: int | None) -> None:
        stream = self._stream(stream)
        try:
            if src.numel():
                buffer: Any = dst.buffer
                self._move(dst.at, peer, src, buffer.bases[peer] + dst.offset, dst.stride, stream, into=False)
            if slot is not None:
                self._raise(peer, slot, stream)
        except DriverError as e:
            raise self._broken(e) from e

    def _get(self, dst: Tensor, src: Window, peer: int, stream: int | None) -> None:
        if dst.numel():
            buffer: Any = src.buffer
            try:
                address = buffer.bases[peer] + src.offset
                self._move(src.at, peer, dst, address, src.stride, self._stream(stream), into=True)
            except DriverError as e:
                raise self._broken(e) from e

    def _move(
        self, view: Callable[[int], Tensor | None], peer: int, own: Tensor, address: int, stride: tuple[int, ...],
        stream: int, *, into: bool,
    ) -> None:  # fmt: skip
        """Enqueue a copy between ``own`` and the same shape at ``address``, which is ``view(peer)`` as a tensor."""
        if own.device != self.device:
            raise ShapeError(f"a tensor on {own.device} for a transport on {self.device}")
        plan: tuple[Move, ...] | None = None
        if not (own.is_conj() or own.is_neg()):  # else its bytes are not its values
            strides = (own.stride(), stride) if into else (stride, own.stride())
            plan = moves(tuple(own.shape), *strides, own.element_size())
        if plan is None:
            there: Any = view(peer)
            own = own.detach()
            into_tensor, from_tensor = (own, there) if into else (there, own)
            self._driver.strided_copy(into_tensor, from_tensor, stream)
            return
        dst, src = (own.data_ptr(), address) if into else (address, own.data_ptr())
        for m in plan:
            if self._ctas:
                self._kernels.copy(
                    dst + m.dst, m.dst_pitch, src + m.src, m.src_pitch, m.row_nbytes, m.rows, self._ctas, stream
                )
            elif m.rows == 1:
                self._driver.copy(dst + m.dst, src + m.src, m.row_nbytes, stream)
            else:
                self._driver.copy_rows(dst + m.dst, m.dst_pitch, src + m.src, m.src_pitch, m.row_nbytes, m.rows, stream)

    def _signal(self, peer: int, slot: Slot, stream: int | None) -> None:
        try:
            self._raise(peer, slot, self._stream(stream))
        except DriverError as e:
            raise self._broken(e) from e

    def _raise(self, peer: int, slot: Slot, stream: int) -> None:
        table: Any = slot.table
        address = table.raise_at[peer] + 8 * slot.word
        if self._epoch:
            self._kernels.raise_slot(address, slot.value, self._epoch, stream)
        else:
            self._driver.write_value(address, slot.value, stream)

    def _enqueue_wait(self, peer: int, slot: Slot, deadline: float, stream: int) -> None:
        table: Any = slot.table
        address, now = table.wait_at[peer] + 8 * slot.word, time.monotonic()
        self._used.add(stream)
        if not self._epoch:  # before the wait is enqueued, because that may block (CUDA_LAUNCH_BLOCKING=1)
            words = (Word(peer, slot.word, 0, True),)
            wait = PendingWaits(table, words, slot.value, now, deadline, self.op, self.seq)
            self._watch.pending.append(wait)
        try:
            if self._epoch or self.waits == "kernel":
                self._kernels.wait_slot(
                    address, slot.value, self._epoch, max(1, int((deadline - now) * 1e9)), self.status,
                    self._watch.report, table.tag(peer, slot.word), POISON, stream,
                )  # fmt: skip
            else:
                self._driver.wait_value(address, slot.value, stream)
        except DriverError as e:
            raise self._broken(e) from e

    def _wait(self, peer: int, slot: Slot, until: float) -> bool:
        pause = 20e-6
        while self._fault is None:
            if slot.table.read(peer, slot.word) >= slot.value:
                return self._fault is None
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        return False

    def _stream(self, stream: int | None) -> int:
        if stream is None:
            stream = self._driver.current_stream()
        self._used.add(stream)
        return stream

    def _broken(self, error: DriverError) -> CommBackendError:
        self.abort(str(error), error)
        return self._fault or error

    # -- CUDA graphs, and outputs after a fault ---------------------------------------------------------------------
    @contextmanager
    def epochs(self, address: int) -> Iterator[None]:
        """Within: verbs on streams use ``slot.value`` plus the 64-bit device word at ``address``, read when they run.

        That is what a captured graph needs: its flags and waits become one-thread kernels that read the word, which
        the graph itself moves on with ``advance``.
        """
        self._epoch = address
        try:
            yield
        finally:
            self._epoch = 0

    def advance(self, address: int, stream: int) -> None:
        """Enqueue: add one to the 64-bit device word at ``address``."""
        self._kernels.advance(address, stream)

    def guard(self, tensor: Tensor, stream: int | None) -> None:
        guard = self.prepare_guard(tensor.shape, tensor.stride(), tensor.element_size())
        guard(tensor.data_ptr(), self._stream(stream))

    # -- control ----------------------------------------------------------------------------------------------------
    def _post(self, seq: int, record: bytes) -> None:
        self._control.post(seq, record)

    def peek(self, peer: int, seq: int) -> bytes | None:
        return None if self.closed else self._control.peek(peer, seq)

    def _record(self, peer: int, seq: int, deadline: float) -> bytes:
        found = self._control.record(peer, seq, deadline, self._failed)
        if found is not None:
            return found
        text = f"rank {self.rank} waited for rank {peer} to enter call {seq} ({self.op or 'a call'})"
        seen = self._control.entered(peer)
        raise self._fails(CommTimeout(text, rank=peer, op=self.op, seq=seq, wanted=seq, seen=seen))

    def _barrier(self, deadline: float) -> None:
        late = self._control.barrier(deadline, self._failed)
        if late or self._fault is not None:
            text = f"rank {self.rank} waited in a barrier for rank(s) {', '.join(map(str, late))}"
            raise self._fails(CommTimeout(text, rank=late[0] if late else -1, op=self.op, waiting_for=late))

    def _fails(self, error: CommBackendError) -> CommBackendError:
        """As ``abort``, also while closing: the first fault, which is ``error`` if there was none."""
        fault = self.fail(error)
        self._tell(fault)
        return fault

    def _failed(self) -> bool:
        """Whether a wait on the host must end; looks into the peers' boxes too, in case the link's thread is late."""
        if self._fault is None and (fault := self._control.peer_fault()) is not None:
            self.fail(fault)
        return self._fault is not None

    @property
    def fault(self) -> CommBackendError | None:
        """The first fault, also one that a wait kernel has met and nobody has looked at yet."""
        if self._fault is None and self._watch.reported:
            self.abort(*self._watch.reason())
        return self._fault

    def _ready(self) -> None:
        if self._watch.reported and not self.closed:
            self.abort(*self._watch.reason())
        super()._ready()

    def _hear(self, peer: int, fault: CommBackendError | None) -> None:
        """From the link's thread: a peer has failed, or died. In a forked child: this process must not go on."""
        if os.getpid() != self._pid:
            self._fault = fault  # without the lock: a thread of the parent may have held it during the fork
            return
        if fault is None:
            text = f"rank {peer} died: its process ended while rank {self.rank} was in "
            text += f"{self.op} (call {self.seq})" if self.op else "no call"
            fault = PeerDied(text, rank=peer, op=self.op, seq=self.seq)
        if self._fault is None:
            # Pass it on: peers must not take this rank, which may leave at once, for the one that died.
            self._fails(fault)

    def _release(self) -> None:
        self._watch.ring()
        if self._fault is not None:
            self._control.interrupt(self._fault)

    def _tell(self, fault: CommBackendError) -> None:
        if os.getpid() != self._pid:
            return  # a fork has the parent's box mapped, and the parent is fine
        self._control.tell(fault)

    # -- leaving ----------------------------------------------------------------------------------------------------
    def _part(self, deadline: float) -> bool:
        """Wait until no rank's streams use shared memory any more; after a fault, this rank's. Whether they do not."""
        idle = self._quiesce(deadline)
        if not idle:
            text = f"rank {self.rank}: work on the communicator's streams has not ended before the deadline"
            self._fails(CommTimeout(text, rank=self.rank, op=self.op, seq=self.seq))
        if self._fault is None:
            self._barrier(deadline)
        return idle

    def _quiesce(self, deadline: float) -> bool:
        """Wait on the host for what is enqueued on the streams that this transport has used. Whether it has ended."""
        events: list[Any] = []
        try:
            for stream in self._used:
                events.append(self._driver.event())
                self._driver.event_record(events[-1], stream)
            while not all(self._driver.event_done(e) for e in events):
                if time.monotonic() > deadline:
                    return False
                time.sleep(1e-4)
        except DriverError as e:
            self.fail(e)  # the context is lost: nothing runs any more
        finally:
            for event in events:
                self._driver.event_destroy(event)
        return True

    def _between(self) -> None:
        """All ranks have let go of what they opened; not waited for after a fault or while giving up."""
        if self._connected and self._fault is None:
            self._control.exchange(b"", time.monotonic() + self.timeout_s)

    def _close(self, timeout_s: float) -> None:
        try:
            if not self._part(time.monotonic() + timeout_s):
                # Unmapping memory under a running kernel would kill the context: leave it mapped.
                log.error("commbackend: rank %d: its streams are busy at close; its memory stays mapped", self.rank)
                self._undo.pop_all()
                self._watch.stop()
        finally:
            if self._fault is not None:
                self._tell(self._fault)
            self._drop()

    def _drop(self) -> None:
        """Give everything back."""
        try:
            self._undo.close()
        finally:
            self._control.close(goodbye=self._fault is None)


def _check_options(options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if key == "waits" and value not in ("auto", "stream", "kernel"):
            raise ConfigError(f"option waits={value!r}: auto, stream or kernel")
        if key in ("comm_ctas", "va_nbytes") and (not isinstance(value, int) or value < 0):
            raise ConfigError(f"option {key}={value!r}: a number of {key.split('_')[1]}, not negative")


def _require(driver: Driver) -> None:
    """Raise Unavailable if the device lacks what every path needs."""
    found = driver.attribute("CAN_USE_64_BIT_STREAM_MEM_OPS")
    if not found:
        raise Unavailable(
            f"64-bit stream memory operations: found {found}, needed 1 (driver for CUDA {driver.version() // 1000})",
            "a newer driver has them on Volta and newer GPUs",
        )


def _uuid_text(uuid: bytes) -> str:
    h = uuid.hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"
