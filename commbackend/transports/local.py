"""Threads of one process: the transport of tests. From a seed it delays, reorders, loses, and lets a rank die.

Puts with a slot are delivered when their receiver next waits, in an order the seed chooses, so that a schedule that
relies on more than the contract promises fails here.
"""

from __future__ import annotations

import dataclasses
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contract import POISON, Caps, Collective, OneSided, Rendezvous, Slot, SlotTable, SymBuffer, Window
from ..errors import (
    CollectiveMismatch,
    CommAborted,
    CommBackendError,
    CommTimeout,
    HeapExhausted,
    PeerDied,
    ShapeError,
    Unavailable,
    pack_fault,
    unpack_fault,
)

__all__ = ["LocalTransport"]


@dataclass(slots=True)
class _Mail:
    """A verb on its way: what it does on arrival, and what it must not overtake."""

    sender: int
    thread: int
    order: int
    deliver: Callable[[], None]
    start: int = 0
    stop: int = 0
    free: bool = False  # a put with a slot: others like it may overtake where their bytes do not meet


class _Fabric:
    """What the ranks of one communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.news = threading.Condition()
        self.transports: list[LocalTransport | None] = [None] * size
        self.mail: list[list[_Mail]] = [[] for _ in range(size)]
        self.order = 0
        self.records: list[dict[int, bytes]] = [{} for _ in range(size)]
        self.meetings: dict[tuple[str, int], dict[int, Any]] = {}
        self.left: set[int] = set()


_Take = Callable[[list[Sequence[Tensor]]], None]
_FABRICS: dict[bytes, _Fabric] = {}


class LocalBuffer(SymBuffer):
    """One ordinary tensor a rank."""

    def __init__(self, owner: LocalTransport, views: list[Tensor]) -> None:
        self.nbytes = views[0].numel()
        self._owner, self.views = owner, views

    @property
    def local(self) -> Tensor:
        return self.views[self._owner.rank]

    def view(self, rank: int) -> Tensor | None:
        return self.views[rank] if self._owner.caps.peer_view or rank == self._owner.rank else None

    def close(self) -> None:
        self._owner.release(self)


class LocalSlots(SlotTable):
    """``blocks[reader][writer][word]``."""

    def __init__(self, owner: LocalTransport, blocks: list[list[list[int]]]) -> None:
        self.words = len(blocks[0][0])
        self._owner, self.blocks = owner, blocks

    def read(self, writer: int, word: int) -> int:
        return self.blocks[self._owner.rank][writer][word]

    def close(self) -> None:
        self._owner.release(self)


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and how often.

    Attributes:
        seed: Of all random choices; each rank draws its own from it.
        delay_s: Longest random pause before and after every verb.
        reorder: Whether independent puts may overtake each other.
        loss: Share of puts and signals that never arrive.
        die: (rank, n): that rank dies instead of its n-th verb, counted from 0.
        peer_view, source: As in ``Caps``, to try engines without views or with packing.
        heap_nbytes: Most bytes a rank can allocate, all buffers together.
    """

    seed: int = 0
    delay_s: float = 0.0
    reorder: bool = False
    loss: float = 0.0
    die: tuple[int, int] | None = None
    peer_view: bool = True
    source: str = "any"
    heap_nbytes: int = 1 << 40


class LocalTransport(OneSided, Collective):
    """Threads of one process, CPU tensors. ``options``: the fields of ``Faults``."""

    name = "local"
    caps = Caps(device="cpu", one_sided=True, collective=True, scope="process", peer_view=True)

    def __init__(self, group: Rendezvous, fabric: _Fabric, faults: Faults) -> None:
        super().__init__(group)
        self.caps = dataclasses.replace(type(self).caps, peer_view=faults.peer_view, source=faults.source)
        self._fabric, self._faults = fabric, faults
        self._random = random.Random(faults.seed * 1000003 + self.rank)
        self._verbs = 0
        self._rounds: dict[str, int] = {}
        self._held: list[LocalBuffer | LocalSlots] = []
        self._allocated = 0
        fabric.transports[self.rank] = self

    @classmethod
    def probe(cls, device: torch.device) -> None:
        if device.type != "cpu":
            raise Unavailable(f"local moves CPU tensors, not {device.type}")

    @classmethod
    def connect(cls, group: Rendezvous, device: torch.device, options: Mapping[str, Any]) -> LocalTransport:
        # Settings that are not this transport's are the communicator's, given to every transport alike.
        known = {f.name for f in dataclasses.fields(Faults)}
        faults = Faults(**{name: value for name, value in options.items() if name in known})
        nonce = secrets.token_bytes(16)
        if group.rank == 0:
            _FABRICS[nonce] = _Fabric(group.size)
        try:
            nonce = group.exchange(nonce)[0]
            fabric = _FABRICS.get(nonce)
            answers = group.exchange(b"yes" if fabric is not None else str(os.getpid()).encode())
        finally:
            if group.rank == 0:
                _FABRICS.pop(nonce, None)
        if fabric is None or set(answers) != {b"yes"}:
            others = [r for r, a in enumerate(answers) if a != b"yes"]
            raise Unavailable(f"local joins threads of one process; rank(s) {others} run in another", "use shm")
        transport = cls(group, fabric, faults)
        group.barrier()
        return transport

    # -- faults on demand
    def _verb(self) -> None:
        """Count a verb, pause, or die."""
        if self._faults.die == (self.rank, self._verbs):
            self._die()
        self._verbs += 1
        if self._faults.delay_s:
            time.sleep(self._random.random() * self._faults.delay_s)

    def _die(self) -> None:
        for peer, other in enumerate(self._fabric.transports):
            if other is not None and peer != self.rank:
                text = f"rank {self.rank} died at its verb {self._verbs}"
                other.fail(PeerDied(text, rank=self.rank, op=other.op, seq=other.seq))
        raise self.fail(CommAborted(f"rank {self.rank} was told to die at its verb {self._verbs}", rank=self.rank))

    def _send(self, peer: int, deliver: Callable[[], None], start: int = 0, stop: int = 0, free: bool = False) -> None:
        if self._faults.loss and self._random.random() < self._faults.loss:
            return
        fabric = self._fabric
        with fabric.news:
            if not self._faults.reorder:
                deliver()
            else:
                fabric.order += 1
                mail = _Mail(self.rank, threading.get_ident(), fabric.order, deliver, start, stop, free)
                fabric.mail[peer].append(mail)
            fabric.news.notify_all()

    def _deliver(self, peer: int, *, sender: int = -1) -> bool:
        """Let one random piece of ``peer``'s mail arrive (of ``sender``, if given). The caller holds the lock."""
        box = self._fabric.mail[peer]
        ready = [m for m in box if sender in (-1, m.sender) and not any(_before(e, m) for e in box)]
        if not ready:
            return False
        mail = self._random.choice(ready)
        box.remove(mail)
        mail.deliver()
        self._fabric.news.notify_all()
        return True

    def _flush(self, sender: int = -1, receiver: int = -1) -> None:
        with self._fabric.news:
            for peer in range(self.size) if receiver < 0 else (receiver,):
                while self._deliver(peer, sender=sender):
                    pass

    # -- meetings: how ranks agree and find each other's tensors
    def _meet(self, what: str, item: Any, deadline: float) -> list[Any]:
        """All-gather of Python objects among the threads. Collective."""
        fabric = self._fabric
        round_ = self._rounds[what] = self._rounds.get(what, 0) + 1
        start = time.monotonic()
        with fabric.news:
            met = fabric.meetings.setdefault((what, round_), {})
            met[self.rank] = item
            fabric.news.notify_all()
            while len(met) < self.size:
                if self._fault is not None:
                    raise self._fault
                if (left := deadline - time.monotonic()) <= 0:
                    break
                fabric.news.wait(left)
            late = [r for r in range(self.size) if r not in met]
            if not late and (what, round_ - 1) in fabric.meetings:
                del fabric.meetings[what, round_ - 1]
        if late:
            where = f"{what} of {self.op} (call {self.seq})" if self.op else what
            waited = f"rank {self.rank} waited {time.monotonic() - start:.3f} s in {where} for rank(s) "
            text = waited + ", ".join(map(str, late))
            raise self._broke(CommTimeout(text, rank=late[0], waiting_for=late, op=self.op, seq=self.seq))
        return [met[r] for r in range(self.size)]

    def _broke(self, cause: CommBackendError) -> CommBackendError:
        fault = self.fail(cause)
        self._tell(fault)
        return fault

    def _soon(self) -> float:
        return time.monotonic() + self.timeout_s

    def _barrier(self, deadline: float) -> None:
        self._verb()
        self._flush(sender=self.rank)
        self._meet("barrier", None, deadline)

    # -- memory
    def _alloc(self, nbytes: int) -> LocalBuffer:
        self._agree("alloc", nbytes)
        short = self._allocated + nbytes > self._faults.heap_nbytes
        own = None if short else torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        views = self._meet("alloc", own, self._soon())
        if lacking := [r for r, v in enumerate(views) if v is None]:
            free = self._faults.heap_nbytes - self._allocated
            raise HeapExhausted(f"alloc: {nbytes} bytes are needed, rank {lacking[0]} has {free} available")
        self._allocated += nbytes
        buffer = LocalBuffer(self, views)
        self._held.append(buffer)
        return buffer

    def _alloc_slots(self, words: int) -> LocalSlots:
        self._agree("alloc_slots", words)
        blocks = self._meet("alloc_slots", [[0] * words for _ in range(self.size)], self._soon())
        table = LocalSlots(self, blocks)
        self._held.append(table)
        return table

    def _agree(self, what: str, value: Any) -> None:
        for rank, other in enumerate(self._meet("agreement", (what, value), self._soon())):
            if other != (what, value):
                theirs = f"rank {rank} calls {other[0]} of {other[1]}"
                raise CollectiveMismatch(f"{theirs}, rank {self.rank} {what} of {value}")

    def release(self, held: LocalBuffer | LocalSlots) -> None:
        """Close one buffer or table: collective when healthy, idempotent."""
        if held not in self._held:
            return
        self._held.remove(held)
        if isinstance(held, LocalBuffer):
            self._allocated -= held.nbytes
        if self._fault is None:
            self._barrier(self._soon())

    # -- one-sided
    def _put(self, dst: Window, src: Tensor, peer: int, slot: Slot | None, stream: int | None) -> None:
        self._verb()
        buffer: Any = dst.buffer
        there = _at(dst, buffer.views[peer])
        if not src.is_cpu:
            raise ShapeError(f"put of a tensor on {src.device}: local moves CPU tensors")
        if self.caps.source == "symmetric" and src.numel() and not any(_inside(src, h) for h in self._held):
            raise ShapeError("put of a tensor outside the symmetric heap: caps.source is 'symmetric'")
        bytes_ = src.detach().clone() if self._faults.reorder else src.detach()

        def deliver() -> None:
            if there.numel():
                there.copy_(bytes_)
            if slot is not None:
                self._raise_slot(peer, slot)

        start = there.data_ptr() if there.numel() else 0
        stop = start + sum((e - 1) * s for e, s in zip(there.shape, there.stride())) * there.itemsize + there.itemsize
        self._send(peer, deliver, start, stop if start else 0, free=slot is not None)
        if self._faults.delay_s:
            time.sleep(self._random.random() * self._faults.delay_s)

    def _get(self, dst: Tensor, src: Window, peer: int, stream: int | None) -> None:
        self._verb()
        self._flush(sender=self.rank, receiver=peer)
        buffer: Any = src.buffer
        if dst.numel():
            dst.detach().copy_(_at(src, buffer.views[peer]))

    def _signal(self, peer: int, slot: Slot, stream: int | None) -> None:
        self._verb()
        self._send(peer, lambda: self._raise_slot(peer, slot))

    def _raise_slot(self, peer: int, slot: Slot) -> None:
        table: Any = slot.table
        table.blocks[peer][self.rank][slot.word] = slot.value

    def _wait(self, peer: int, slot: Slot, until: float) -> bool:
        self._verb()
        fabric = self._fabric
        with fabric.news:
            while (seen := slot.table.read(peer, slot.word)) < slot.value:
                if self._fault is not None or (left := until - time.monotonic()) <= 0:
                    return False
                if not self._deliver(self.rank):
                    fabric.news.wait(left)
        return seen < POISON

    # -- records
    def _post(self, seq: int, record: bytes) -> None:
        self._verb()
        with self._fabric.news:
            mine = self._fabric.records[self.rank]
            mine[seq] = bytes(record)
            mine.pop(seq - 4, None)
            self._fabric.news.notify_all()

    def peek(self, peer: int, seq: int) -> bytes | None:
        with self._fabric.news:
            return self._fabric.records[peer].get(seq)

    def _record(self, peer: int, seq: int, deadline: float) -> bytes:
        self._verb()
        start = time.monotonic()
        with self._fabric.news:
            while (found := self._fabric.records[peer].get(seq)) is None:
                if self._fault is not None:
                    raise self._fault
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._fabric.news.wait(left)
        if found is None:
            waited = (
                f"rank {self.rank} waited {time.monotonic() - start:.3f} s for rank {peer} in {self.op or 'a call'}"
            )
            text = f"{waited} (call {seq}): it has published no record"
            raise self._broke(CommTimeout(text, rank=peer, op=self.op, seq=self.seq))
        return found

    # -- collectives
    def _exchange_tensors(self, what: str, mine: Sequence[Tensor], take: _Take) -> None:
        """Show all ranks this rank's tensors, ``take`` from theirs, and leave when all have taken."""
        self._verb()
        self._flush(sender=self.rank)
        error: CommBackendError | None = None
        try:
            take(self._meet(what, [t.detach() for t in mine], self._soon()))
        except ShapeError as e:
            error = CollectiveMismatch(f"{what}: {e}")
        taken = self._meet(what + " end", str(error or ""), self._soon())
        if any(taken):
            raise CollectiveMismatch("; ".join(t for t in taken if t)) from error

    def _all_gather(self, dsts: Sequence[Tensor], src: Tensor, stream: int | None) -> None:
        def take(theirs: list[Sequence[Tensor]]) -> None:
            for rank, dst in enumerate(dsts):
                self._fill(dst, theirs[rank][0], rank)

        self._exchange_tensors("all_gather", [src], take)

    def _all_to_all(self, dsts: Sequence[Tensor], srcs: Sequence[Tensor], stream: int | None) -> None:
        def take(theirs: list[Sequence[Tensor]]) -> None:
            for rank, dst in enumerate(dsts):
                self._fill(dst, theirs[rank][self.rank], rank)

        self._exchange_tensors("all_to_all", srcs, take)

    def _reduce_scatter(self, dst: Tensor, srcs: Sequence[Tensor], op: str, stream: int | None) -> None:
        def take(theirs: list[Sequence[Tensor]]) -> None:
            self._sum(dst, [t[self.rank] for t in theirs], op)

        self._exchange_tensors("reduce_scatter", srcs, take)

    def _all_reduce(self, dst: Tensor, src: Tensor, op: str, stream: int | None) -> None:
        # In place: peers read ``src`` while ``dst``, which may be the same memory, is written.
        def take(theirs: list[Sequence[Tensor]]) -> None:
            self._sum(dst, [t[0] for t in theirs], op)

        self._exchange_tensors("all_reduce", [src.detach().clone()], take)

    def _fill(self, dst: Tensor, src: Tensor, rank: int) -> None:
        if dst.shape != src.shape or dst.dtype != src.dtype:
            wanted, sent = (tuple(dst.shape), dst.dtype), (tuple(src.shape), src.dtype)
            raise ShapeError(f"rank {self.rank} expects {wanted} of rank {rank}, which sends {sent}")
        dst.detach().copy_(src)

    def _sum(self, dst: Tensor, addends: Sequence[Tensor], op: str) -> None:
        if op != "sum":
            raise ShapeError(f"reduction {op!r}: local sums")
        wide = torch.float32 if dst.dtype in (torch.bfloat16, torch.float16) else dst.dtype
        total = torch.zeros(dst.shape, dtype=wide)
        for rank, addend in enumerate(addends):
            part = torch.empty_like(dst)
            self._fill(part, addend, rank)
            total += part
        dst.detach().copy_(total)

    # -- faults
    def _release(self) -> None:
        with self._fabric.news:
            self._fabric.news.notify_all()

    def _tell(self, fault: CommBackendError) -> None:
        for peer, other in enumerate(self._fabric.transports):
            if other is not None and peer != self.rank and (copy := unpack_fault(pack_fault(fault))) is not None:
                other.fail(copy)

    def _close(self, timeout_s: float) -> None:
        try:
            if self._fault is None:
                self._barrier(time.monotonic() + timeout_s)
        finally:
            self._fabric.transports[self.rank] = None
            self._held.clear()


def _before(earlier: _Mail, mail: _Mail) -> bool:
    """Whether ``mail`` must not overtake ``earlier``: only free, disjoint puts of one thread overtake each other."""
    if earlier.order >= mail.order or (earlier.sender, earlier.thread) != (mail.sender, mail.thread):
        return False
    meet = earlier.start < mail.stop and mail.start < earlier.stop
    return meet or not (earlier.free and mail.free)


def _inside(tensor: Tensor, held: LocalBuffer | LocalSlots) -> bool:
    own = tensor.untyped_storage().data_ptr()
    return isinstance(held, LocalBuffer) and held.local.untyped_storage().data_ptr() == own


def _at(window: Window, raw: Tensor) -> Tensor:
    """The window's tensor in ``raw``, also where the transport offers no view of it."""
    typed = raw[: raw.numel() - raw.numel() % window.dtype.itemsize].view(window.dtype)
    return typed.as_strided(window.shape, window.stride, window.offset // window.dtype.itemsize)
