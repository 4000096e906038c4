"""Shared memory of one host: every rank maps every peer's heap, so that a put is a copy and a store."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..contract import Caps, OneSided, Rendezvous, Slot, SymBuffer, Window
from ..errors import (
    CommAborted,
    CommBackendError,
    CommTimeout,
    HeapExhausted,
    PeerDied,
    ShapeError,
    Unavailable,
    pack_fault,
)
from ..host.link import HostLink
from ..host.memory import HostBoard, HostWords, Segment, probe, share

__all__ = ["ShmTransport"]

_PROOF_NBYTES = 4096


def _page(token: bytes, writer: int, reader: int) -> Tensor:
    """What ``writer`` puts at ``reader`` to prove that the two share memory."""
    raw = hashlib.shake_128(token + writer.to_bytes(4) + reader.to_bytes(4)).digest(_PROOF_NBYTES)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _idle_cores(size: int) -> bool:
    """Whether every rank finds a core that no rank's products use, so that a copy lane costs nothing."""
    return len(os.sched_getaffinity(0)) >= size * (torch.get_num_threads() + 1)


class ShmBuffer(SymBuffer):
    """A segment of every rank, mapped here."""

    def __init__(self, owner: ShmTransport, segments: list[Segment]) -> None:
        self.nbytes = segments[0].nbytes
        self._owner = owner
        self._own: mmap.mmap | None = segments[owner.rank].memory
        self._views: list[Tensor] = [torch.frombuffer(s.memory, dtype=torch.uint8) for s in segments]

    @property
    def local(self) -> Tensor:
        return self.view(self._owner.rank)

    def view(self, rank: int) -> Tensor:
        if not self._views:
            raise CommAborted(f"this buffer of rank {self._owner.rank} is closed", rank=self._owner.rank)
        return self._views[rank]

    def close(self) -> None:
        self._owner.release(self)

    def drop(self, healthy: bool) -> None:
        """Unmap as soon as the last tensor that the caller still holds is gone. The pages go back at once, unless some
        peer that has not yet heard of a fault may still read them.
        """
        self._views = []
        if healthy and self._own is not None:
            self._own.madvise(mmap.MADV_REMOVE)
        self._own = None


class ShmSlots(HostWords):
    """Slots whose closing is collective."""

    def __init__(self, owner: ShmTransport, segments: list[Segment], words: int) -> None:
        super().__init__(segments, owner.rank, words)
        self._owner = owner

    def close(self) -> None:
        self._owner.release(self)

    def drop(self, healthy: bool) -> None:
        super().close()


class ShmTransport(OneSided):
    """Processes of one host, CPU tensors. ``options``: none."""

    name = "shm"
    caps = Caps(device="cpu", one_sided=True, scope="host", peer_view=True)

    def __init__(self, group: Rendezvous, link: HostLink) -> None:
        super().__init__(group)
        self._pid = os.getpid()
        self._link = link
        self._board: HostBoard | None = None
        self._held: list[ShmBuffer | ShmSlots] = []
        link.on_fault(self._hear)

    @classmethod
    def probe(cls, device: torch.device) -> None:
        if device.type != "cpu":
            raise Unavailable(f"shm moves CPU tensors, not {device.type}")
        probe()

    @classmethod
    def connect(cls, group: Rendezvous, device: torch.device, options: Mapping[str, Any]) -> ShmTransport:
        deadline = time.monotonic() + group.timeout_s
        transport = cls(group, HostLink.open(group, timeout_s=group.timeout_s))
        try:
            transport._board = HostBoard(transport._link, deadline)
            transport._prove(group.token, deadline)
            idle = transport._link.exchange(b"1" if _idle_cores(group.size) else b"0", deadline)
            transport.caps = replace(cls.caps, copy_lanes=1 if all(v == b"1" for v in idle) else 0)
        except BaseException as e:
            # What all ranks have voted on is no fault: they part in an orderly way, so that no rank takes another's
            # leaving for the cause.
            agreed = isinstance(e, Unavailable | HeapExhausted) and transport._board is not None
            if not agreed:
                transport.fail(e if isinstance(e, CommBackendError) else CommAborted(f"connecting failed: {e!r}"))
            transport.close()
            if isinstance(e, HeapExhausted):  # on every rank: the next transport may need less
                raise Unavailable(f"shared memory for the control words: {e}") from e
            raise
        return transport

    def _prove(self, token: bytes, deadline: float) -> None:
        """Move a page between every pair and compare it: a mapping of the wrong file would not do."""
        buffer = self._alloc(self.size * _PROOF_NBYTES)
        windows = [buffer.window(r * _PROOF_NBYTES, (_PROOF_NBYTES,), torch.uint8) for r in range(self.size)]
        for peer in range(self.size):
            self._put(windows[self.rank], _page(token, self.rank, peer), peer, None, None)
        self._barrier(deadline)
        bad = [w for w in range(self.size) if not torch.equal(windows[w].local, _page(token, w, self.rank))]
        votes = self._link.exchange(repr(bad).encode() if bad else b"", deadline)
        if any(votes):
            failed = {r: v.decode() for r, v in enumerate(votes) if v}
            raise Unavailable(f"bytes written to shared memory did not arrive: {failed} (reader: writers)")
        self.release(buffer)

    # -- memory
    def _alloc(self, nbytes: int) -> ShmBuffer:
        buffer = ShmBuffer(self, self._share(nbytes))
        self._held.append(buffer)
        return buffer

    def _alloc_slots(self, words: int) -> ShmSlots:
        table = ShmSlots(self, self._share(HostWords.nbytes(self.size, words)), words)
        self._held.append(table)
        return table

    def _share(self, nbytes: int) -> list[Segment]:
        try:
            return share(self._link, nbytes, time.monotonic() + self.timeout_s)
        except (CommTimeout, PeerDied, CommAborted) as e:
            raise self._broke(e) from None

    def release(self, held: ShmBuffer | ShmSlots) -> None:
        """Close one buffer or table: collective when healthy, idempotent."""
        if held not in self._held:
            return
        self._held.remove(held)
        try:
            if self._fault is None:
                self._barrier(time.monotonic() + self.timeout_s)
        finally:
            held.drop(self._fault is None)

    # -- verbs
    def _put(self, dst: Window, src: Tensor, peer: int, slot: Slot | None, stream: int | None) -> None:
        if src.numel():
            if not src.is_cpu:
                raise ShapeError(f"put of a tensor on {src.device}: shm moves CPU tensors")
            there: Any = dst.at(peer)
            there.copy_(src.detach() if src.requires_grad else src)
        if slot is not None:
            table: Any = slot.table
            table.store(peer, slot.word, slot.value)

    def _get(self, dst: Tensor, src: Window, peer: int, stream: int | None) -> None:
        if dst.numel():
            if not dst.is_cpu:
                raise ShapeError(f"get into a tensor on {dst.device}: shm moves CPU tensors")
            there: Any = src.at(peer)
            (dst.detach() if dst.requires_grad else dst).copy_(there)

    def _signal(self, peer: int, slot: Slot, stream: int | None) -> None:
        table: Any = slot.table
        table.store(peer, slot.word, slot.value)

    def _wait(self, peer: int, slot: Slot, until: float) -> bool:
        table: Any = slot.table
        done: bool = table.wait(peer, slot.word, slot.value, until, self._broken)
        return done

    def _broken(self) -> bool:
        """Whether a wait must end; looks into the peers' boxes too, in case the link's thread gets no time to run."""
        if self._fault is None and self._board is not None and (fault := self._board.peer_fault()) is not None:
            self.fail(fault)
        return self._fault is not None

    def _post(self, seq: int, record: bytes) -> None:
        self._boarded.post(seq, record)

    def peek(self, peer: int, seq: int) -> bytes | None:
        return None if self._board is None else self._board.record(peer, seq)

    def _record(self, peer: int, seq: int, deadline: float) -> bytes:
        word, value = self._boarded.posted(seq)
        self.wait(peer, Slot(self._boarded.words, word, value), deadline=deadline)
        record = self._boarded.record(peer, seq)
        if record is None:
            raise CommAborted(f"rank {peer}'s record of call {seq} is gone: it is four calls ahead", rank=peer, seq=seq)
        return record

    def _barrier(self, deadline: float) -> None:
        start = time.monotonic()
        late = self._boarded.barrier(deadline, self._broken)
        if self._fault is not None:
            raise self._fault
        if late:
            waited = f"rank {self.rank} waited {time.monotonic() - start:.3f} s in a barrier for rank(s) "
            text = waited + ", ".join(map(str, late))
            raise self._broke(CommTimeout(text, rank=late[0], waiting_for=late, op=self.op, seq=self.seq))

    @property
    def _boarded(self) -> HostBoard:
        if self._board is None:
            raise CommAborted(f"transport 'shm' of rank {self.rank} is closed", rank=self.rank)
        return self._board

    # -- faults
    def _hear(self, peer: int, fault: CommBackendError | None) -> None:
        """From the link's thread, or in a forked child."""
        if os.getpid() != self._pid:
            self._fault = fault  # without the lock: a thread of the parent may have held it during the fork
            return
        if fault is None:
            text = f"rank {peer} died: its process ended while rank {self.rank} was in "
            text += f"{self.op} (call {self.seq})" if self.op else "no call"
            fault = PeerDied(text, rank=peer, op=self.op, seq=self.seq)
        if self._fault is None:
            # Pass it on: peers must not take this rank, which may leave at once, for the one that died.
            self._broke(fault)

    def _broke(self, cause: CommBackendError) -> CommBackendError:
        """As ``abort``, also while closing."""
        fault = self.fail(cause)
        self._tell(fault)
        return fault

    def _release(self) -> None:
        if self._fault is not None:
            self._link.interrupt(self._fault)

    def _tell(self, fault: CommBackendError) -> None:
        if os.getpid() != self._pid:
            return  # a fork has the parent's box mapped, and the parent is fine
        packed = pack_fault(fault)
        if self._board is not None:
            self._board.show_fault(packed)
        self._link.tell(packed)

    def _close(self, timeout_s: float) -> None:
        try:
            if self._fault is None:
                self._barrier(time.monotonic() + timeout_s)
        finally:
            if self._fault is not None:
                self._tell(self._fault)
            self._link.close(goodbye=self._fault is None)
            for held in self._held:
                held.drop(self._fault is None)
            self._held.clear()
            if self._board is not None:
                self._board.close()
