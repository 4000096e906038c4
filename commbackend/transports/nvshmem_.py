"""CUDA GPUs anywhere NVSHMEM reaches: NVLink of one or more hosts, and networks with RDMA.

Where every rank maps every other's symmetric memory (one NVLink domain) the memory is NVSHMEM's and everything else is
as in ``userbuffers``: copy engines, stream memory operations, kernels that reach peers by address. Otherwise a put is
``putmem_signal_on_stream``, whose signal covers its own bytes; a signal that must cover more follows a ``quiet``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..contract import Caps, Rendezvous, Slot, Window, Word
from ..host.control import Control, NetPlane
from ..gpu.copy_kernels import moves
from ..gpu.driver import Driver
from ..gpu.heap import Heap, MappedBuffer, agree_on, together
from ..gpu.symmetric import CudaSymmetric
from ..gpu.watch import PendingWaits
from ..errors import CommBackendError, ConfigError, HeapExhausted, ShapeError, Unavailable, Unsupported
from ..gpu.nvshmem_library import Instance, Nvshmem, NvshmemError, attach, import_nvshmem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["NvshmemTransport"]

#: Options besides those of ``gpu.symmetric``.
_OPTIONS: Mapping[str, Any] = {
    "bootstrap": "uid",  # "uid": over the group; "mpi": by NVSHMEM's MPI plugin over mpi4py's COMM_WORLD
    "peer_views": True,  # False: reach peers by puts and gets only, also where their memory is mapped
}
_BOUNCE_NBYTES = 1 << 22


class NvshmemTransport(CudaSymmetric):
    """One rank of a group of GPUs that NVSHMEM connects. Its device must be current in threads that call verbs.

    A process has one instance of NVSHMEM, so its groups with this transport must all be of the same ranks. After a
    fault its memory stays until the next communicator of these ranks, or until the process ends.
    """

    name: ClassVar[str] = "nvshmem"
    caps: Caps = replace(CudaSymmetric.caps, scope="cluster")
    handles = ()
    _library: Nvshmem
    _pes: list[int]

    def __init__(self, group: Rendezvous, device: torch.device, options: Mapping[str, Any], control: Control) -> None:
        super().__init__(group, device, options, control)
        self._mine = {key: options.get(key, default) for key, default in _OPTIONS.items()}
        if self._mine["bootstrap"] not in ("uid", "mpi"):
            raise ConfigError(f"option bootstrap={self._mine['bootstrap']!r}: uid or mpi")
        self._direct = True
        self._bounce: MappedBuffer | None = None
        # Streams with puts that a later signal must cover.
        self._loud: set[int] = set()

    # -- joining ----------------------------------------------------------------------------------------------------
    @classmethod
    def probe(cls, device: torch.device) -> None:
        super().probe(device)
        import_nvshmem()

    @classmethod
    def open_library(cls, device: torch.device, rank: int) -> Nvshmem:
        """The table of calls."""
        return Nvshmem(*import_nvshmem())

    @classmethod
    def open_control(cls, group: Rendezvous, deadline: float, options: Mapping[str, Any]) -> Control:
        return NetPlane.open(group, deadline, options)

    def _new_heap(self, vmm: bool, multicast: bool, deadline: float) -> Heap:
        control, self.memory = self._control, "nvshmem"
        library = together(control, "loading NVSHMEM", lambda: self.open_library(self.device, self.rank), deadline)[0]
        self._library = library
        try:
            instance, self._pes = attach(
                library, self.rank, self.size, lambda raw: control.exchange(raw, deadline), self._init
            )
        except NvshmemError as e:
            raise Unavailable(str(e)) from e
        self._undo.callback(lambda: instance.leave(healthy=self._fault is None))
        heap = NvshmemHeap(self._driver, instance, control, self._pes, lambda: self._fault is None)
        self._direct = bool(self._mine["peer_views"]) and heap.reaches_all(deadline)
        if not self._direct:
            together(control, "waits of NVSHMEM", self._can_wait, deadline)
            heap.views = False
            self._bounce = heap.alloc(_BOUNCE_NBYTES, deadline)
            # A wait is NVSHMEM's, because it also makes what came over a network visible; a graph cannot hold it.
            self.caps = replace(
                self.caps, peer_view=False, device_signal=False, graph_capture=False, copy_engine=False,
                source="symmetric",
            )  # fmt: skip
        return heap

    def _can_wait(self) -> None:
        if self._library.shares_a_gpu_without_mps():
            raise Unavailable(
                "several PEs share a GPU without MPS, and NVSHMEM then ends the process at its first wait",
                "start nvidia-cuda-mps-control, or give each rank its own GPU",
            )

    def _init(self, uid: bytes) -> None:
        ordinal = self._driver.ordinal
        if self._mine["bootstrap"] == "uid":
            self._library.init(ordinal, uid, self.rank, self.size)
            return
        try:
            from mpi4py import MPI
        except ImportError as e:
            raise Unavailable(f"option bootstrap=mpi: {e}", 'pip install "commbackend[mpi]"') from e
        if MPI.COMM_WORLD.Get_size() != self.size:
            raise Unavailable(f"option bootstrap=mpi: {MPI.COMM_WORLD.Get_size()} ranks of MPI for {self.size} of ours")
        self._library.init_mpi(ordinal, MPI.COMM_WORLD)

    # -- where peers' memory is not mapped --------------------------------------------------------------------------
    def push(self, peer: int, dst: int, src: int, nbytes: int, stream: int) -> None:
        if self._direct or peer == self.rank:
            super().push(peer, dst, src, nbytes, stream)
        else:
            self._loud.add(stream)
            self._library.put(dst, src, nbytes, self._pes[peer], stream)

    def pull(self, peer: int, dst: int, src: int, nbytes: int, stream: int) -> None:
        if self._direct or peer == self.rank:
            super().pull(peer, dst, src, nbytes, stream)
        else:
            self._library.get(dst, src, nbytes, self._pes[peer], stream)

    def raise_words(self, peer: int, address: int, stream: int) -> None:
        if self._direct or peer == self.rank:
            super().raise_words(peer, address, stream)
        else:
            for word in (address, address + 8):
                self._signal_word(word, 1, peer, stream)

    def _signal_word(self, address: int, value: int, peer: int, stream: int) -> None:
        if stream in self._loud:
            self._loud.discard(stream)
            self._library.quiet(stream)
        self._library.signal(address, value, self._pes[peer], stream)

    def _put(self, dst: Window, src: Tensor, peer: int, slot: Slot | None, stream: int | None) -> None:
        if self._direct or peer == self.rank:
            super()._put(dst, src, peer, slot, stream)
            return
        stream = self._stream(stream)
        buffer, table = dst.buffer, slot.table if slot is not None else None
        address: int = buffer.bases[peer] + dst.offset  # type: ignore[attr-defined]
        pieces = self._rows(src, dst.stride)
        try:
            for at_peer, here, nbytes in pieces[:-1] if slot is not None else pieces:
                self.push(peer, address + at_peer, src.data_ptr() + here, nbytes, stream)
            if slot is None or table is None:
                return
            word = table.raise_at[peer] + 8 * slot.word  # type: ignore[attr-defined]
            if len(pieces) == 1:
                at_peer, here, nbytes = pieces[0]
                self._loud.add(stream)
                target, source = address + at_peer, src.data_ptr() + here
                self._library.put_signal(target, source, nbytes, word, slot.value, self._pes[peer], stream)
                return
            for at_peer, here, nbytes in pieces[-1:]:
                self.push(peer, address + at_peer, src.data_ptr() + here, nbytes, stream)
            self._signal_word(word, slot.value, peer, stream)
        except NvshmemError as e:
            raise self._lost(e) from e

    def _rows(self, own: Tensor, there: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """(offset at the peer, offset here, bytes) of every contiguous piece of a copy between ``own`` and a window of
        its shape with strides ``there``.
        """
        if own.device != self.device and self.device.type == "cuda":
            raise ShapeError(f"a tensor on {own.device} for a transport on {self.device}")
        if not own.numel():
            return []
        if own.is_conj() or own.is_neg():
            raise Unsupported(f"{self.name} without peer views moves bytes: resolve_conj() and resolve_neg() first")
        size = own.element_size()
        plan = moves(tuple(own.shape), there, own.stride(), size)
        if plan is not None:
            return [
                (m.dst + row * m.dst_pitch, m.src + row * m.src_pitch, m.row_nbytes)
                for m in plan
                for row in range(m.rows)
            ]
        # Neither side's rows are contiguous: element by element. Slow, and no schedule does it.
        places = itertools.product(*(range(n) for n in own.shape))
        return [(size * _dot(at, there), size * _dot(at, own.stride()), size) for at in places]

    def _get(self, dst: Tensor, src: Window, peer: int, stream: int | None) -> None:
        if self._direct or peer == self.rank:
            super()._get(dst, src, peer, stream)
            return
        stream, bounce = self._stream(stream), self._bounce
        assert bounce is not None
        address: int = src.buffer.bases[peer] + src.offset  # type: ignore[attr-defined]
        try:
            # Over a network only symmetric memory can be written: the bytes come by way of some.
            landing = bounce.bases[self.rank]
            for at_peer, here, nbytes in self._rows(dst, src.stride):
                for start in range(0, nbytes, _BOUNCE_NBYTES):
                    some = min(_BOUNCE_NBYTES, nbytes - start)
                    self._library.get(landing, address + at_peer + start, some, self._pes[peer], stream)
                    self._driver.copy(dst.data_ptr() + here + start, landing, some, stream)
        except NvshmemError as e:
            raise self._lost(e) from e

    def _raise(self, peer: int, slot: Slot, stream: int) -> None:
        if self._direct or peer == self.rank:
            super()._raise(peer, slot, stream)
            return
        try:
            word = slot.table.raise_at[peer] + 8 * slot.word  # type: ignore[attr-defined]
            self._signal_word(word, slot.value, peer, stream)
        except NvshmemError as e:
            raise self._lost(e) from e

    def _enqueue_wait(self, peer: int, slot: Slot, deadline: float, stream: int) -> None:
        if self._direct or peer == self.rank:
            super()._enqueue_wait(peer, slot, deadline, stream)
            return
        table: Any = slot.table
        self._used.add(stream)
        now = time.monotonic()
        words = (Word(peer, slot.word, 0, True),)
        self._watch.pending.append(PendingWaits(table, words, slot.value, now, deadline, self.op, self.seq))
        try:
            self._library.wait(table.wait_at[peer] + 8 * slot.word, slot.value, stream)
        except NvshmemError as e:
            raise self._lost(e) from e

    def _lost(self, error: NvshmemError) -> CommBackendError:
        self.abort(str(error), error)
        return self._fault or error


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


class _Buffer(MappedBuffer):
    """Symmetric memory whose peers' parts may not be mapped here: ``bases`` then hold its own address for them."""

    def __init__(self, driver: Driver, rank: int, bases: list[int], nbytes: int, views: bool) -> None:
        super().__init__(driver, rank, bases, nbytes, nbytes)
        self._mapped = views

    def view(self, rank: int) -> Tensor | None:
        return super().view(rank) if self._mapped or rank == self._rank else None


class NvshmemHeap:
    """Buffers from NVSHMEM's symmetric heap. They do not grow. Allocating and freeing is collective over all PEs.

    Attributes:
        views: Whether peers' memory is used by address.
    """

    multicast: bool = False
    multicast_reason: str = "this transport does not use NVSHMEM's multicast addresses"

    def __init__(
        self, driver: Driver, instance: Instance, control: Control, pes: list[int], healthy: Callable[[], bool]
    ) -> None:
        self._driver, self._instance, self._link, self._pes, self._healthy = driver, instance, control, pes, healthy
        self._library = instance.library
        # In the order of their making, which is the same on all ranks.
        self._buffers: dict[MappedBuffer, None] = {}
        self.views = True

    def reaches_all(self, deadline: float) -> bool:
        """Whether every rank maps every other's memory. Collective."""
        probe = self._new(4096, deadline)
        mapped = all(self._library.reach(probe, pe) for pe in self._pes)
        answers = self._link.exchange(bytes((mapped,)), deadline)
        self._library.free(probe)
        return all(raw == b"\1" for raw in answers)

    def _new(self, nbytes: int, deadline: float) -> int:
        rank = self._link.rank

        def fits() -> None:
            free = self._driver.call("cuMemGetInfo")[0]
            if free < nbytes:
                raise HeapExhausted(f"nvshmem malloc of {nbytes} bytes on rank {rank}: available {free}")

        # The library's own allocation blocks until all PEs have come, and has no deadline: nobody enters it alone.
        together(self._link, f"room for {nbytes} bytes", fits, deadline)
        address = self._library.malloc(nbytes)

        def check() -> None:
            if not address:
                raise HeapExhausted(f"nvshmem malloc of {nbytes} bytes on rank {rank} gave nothing")

        # Where it failed on some, what others got stays until the process ends: giving it back is collective too.
        together(self._link, f"nvshmem malloc of {nbytes} bytes", check, deadline)
        return address

    def alloc(self, nbytes: int, deadline: float) -> MappedBuffer:
        agree_on(self._link, nbytes, deadline)
        address = self._new(nbytes, deadline)
        bases = [self._library.reach(address, pe) if self.views else address for pe in self._pes]
        bases[self._link.rank] = address
        buffer = _Buffer(self._driver, self._link.rank, bases, nbytes, self.views)
        self._buffers[buffer] = None
        return buffer

    def grow(self, buffer: MappedBuffer, nbytes: int, deadline: float) -> None:
        agree_on(self._link, nbytes, deadline)
        if nbytes > buffer.room:
            raise HeapExhausted(f"a buffer of NVSHMEM keeps its {buffer.room} bytes; {nbytes} need a new one")

    def free(self, buffer: MappedBuffer, between: Callable[[], None]) -> None:
        if buffer in self._buffers:
            del self._buffers[buffer]
            address = buffer.bases[self._link.rank]
            if self._healthy():
                between()
                self._library.free(address)
            else:
                self._instance.orphans.append(address)  # freeing waits for all PEs, who may not come

    def close(self, between: Callable[[], None]) -> None:
        for buffer in list(self._buffers):
            self.free(buffer, between)
