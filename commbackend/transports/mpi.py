"""MPI between hosts, CPU tensors: one-sided verbs as messages that each rank takes and carries out itself.

MPI's own one-sided calls move only while the target is inside MPI, which a computing rank is not. So a put is a
message that says where its bytes go, and the bytes; whoever waits at the target, or its thread while it computes,
receives them right into the window and then raises the slot. Every wait has a deadline and ``abort`` ends it.

Deaths: an MPI without fault tolerance ends all ranks when one dies. Open MPI under ``mpirun --with-ft ulfm`` lets the
others live; then they raise PeerDied.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import itertools
import logging
import math
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..contract import Caps, OneSided, Rendezvous, Slot, SlotTable, SymBuffer, Window
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
from ..host.memory import available
from ..host.mpi_collectives import MpiCollectives
from ..host.mpilink import INLINE_NBYTES, NO_TAG, URGENT, Mail, MpiLink, join, library, vote

__all__ = ["MpiTransport"]

log = logging.getLogger("commbackend")

# Kinds of messages.
_PUT, _GET, _SIGNAL, _RECORD, _PARCEL, _FAULT, _BYE = range(7)
_PROOF_NBYTES = 4096
#: Records kept of every rank; the contract wants two.
_KEPT_RECORDS = 8
#: Words of the table that records and barriers count in.
_POSTED, _BARRIER = 0, 1
#: How long a rank that leaves stays for those who are still reading its last message.
_LINGER_S = 1.0


class MpiBuffer(SymBuffer):
    """Private memory of every rank under one number."""

    def __init__(self, owner: MpiTransport, number: int, memory: Tensor) -> None:
        self.nbytes, self.number = memory.numel(), number
        self._owner, self._memory = owner, memory

    @property
    def local(self) -> Tensor:
        return self._memory

    def view(self, rank: int) -> Tensor | None:
        return self._memory if rank == self._owner.rank else None

    def close(self) -> None:
        self._owner.release(self)


class MpiSlots(SlotTable):
    """Words of this rank that messages raise: ``values[writer][word]``."""

    def __init__(self, owner: MpiTransport, number: int, words: int, size: int) -> None:
        self.words, self.number = words, number
        self._owner = owner
        self.values = [[0] * words for _ in range(size)]

    def read(self, writer: int, word: int) -> int:
        return self.values[writer][word]

    def close(self) -> None:
        self._owner.release(self)


class MpiTransport(MpiCollectives, OneSided):
    """Processes of one MPI job, CPU tensors. ``options``: ``hosts``, the host number of every rank, where known."""

    name = "mpi"
    caps = Caps(device="cpu", one_sided=True, collective=True, scope="cluster")

    def __init__(self, group: Rendezvous, mpi: Any, comm: Any, sharing: int) -> None:
        super().__init__(group)
        self._pid, self._token, self._sharing = os.getpid(), group.token, sharing
        self._peers = [p for p in range(self.size) if p != self.rank]
        self._numbers, self._parcel_numbers, self._rounds = itertools.count(), itertools.count(), 0
        self._meeting = threading.Lock()
        self._held: dict[int, MpiBuffer | MpiSlots] = {}
        self._records: list[dict[int, bytes]] = [{} for _ in range(self.size)]
        self._parcels: dict[tuple[int, int], bytes] = {}
        self._left: set[int] = set()
        self._board = self._keep(MpiSlots(self, next(self._numbers), 2, self.size))
        self._link = MpiLink(self, mpi, comm, "commbackend-mpi")

    # -- joining
    # ----------------------------------------------------------------------------------------------------------
    @classmethod
    def probe(cls, device: torch.device) -> None:
        """Initialises nothing: whether MPI itself works shows in ``connect``, unless mpi4py has been imported."""
        if device.type != "cpu":
            raise Unavailable(f"mpi moves CPU tensors, not {device.type} ones")
        if importlib.util.find_spec("mpi4py") is None:
            raise Unavailable("mpi4py is not installed", 'pip install "commbackend[mpi]"')
        if "mpi4py.MPI" in sys.modules:
            library()

    @classmethod
    def connect(cls, group: Rendezvous, device: torch.device, options: Mapping[str, Any]) -> MpiTransport:
        cls.probe(device)
        deadline = time.monotonic() + group.timeout_s
        mpi, reason, card = None, "", b""
        try:
            mpi = library()
            card = struct.pack("<ii", mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
        except Unavailable as e:
            reason = str(e)
        vote(group, reason)
        places = [struct.unpack("<ii", raw) for raw in group.exchange(card)]
        if len(set(places)) < group.size or len({size for _, size in places}) > 1:
            found = ", ".join(f"rank {r} is {place} of {size}" for r, (place, size) in enumerate(places))
            raise Unavailable(f"these ranks are not of one MPI job: {found}", "start them all with one mpirun or srun")
        comm, reason = join(mpi, [place for place, _ in places], group.token, deadline)
        vote(group, reason)
        hosts = options.get("hosts") or [0] * group.size
        transport = cls(group, mpi, comm, sum(1 for h in hosts if h == hosts[group.rank]))
        _OPEN.add(transport)
        transport._link.start()
        try:
            transport._prove()
        except BaseException as e:
            if not isinstance(e, Unavailable):  # that all ranks have voted for, so that they part in order
                transport.broke(e if isinstance(e, CommBackendError) else CommAborted(f"connecting failed: {e!r}"))
            transport.close()
            raise
        return transport

    def _prove(self) -> None:
        """Move a page between every pair and compare it, too large to travel within its message."""
        buffer = self._alloc(self.size * _PROOF_NBYTES)
        windows = [buffer.window(r * _PROOF_NBYTES, (_PROOF_NBYTES,), torch.uint8) for r in range(self.size)]
        for peer in range(self.size):
            self._put(windows[self.rank], self._page(self.rank, peer), peer, None, None)
        self._barrier(time.monotonic() + self.timeout_s)
        bad = [w for w in range(self.size) if not torch.equal(windows[w].local, self._page(w, self.rank))]
        votes = self._exchange(repr(bad).encode() if bad else b"")
        if any(votes):
            failed = {r: v.decode("utf-8", "replace") for r, v in enumerate(votes) if v}
            raise Unavailable(f"bytes sent by MPI did not arrive: {failed} (reader: writers)")
        self.release(buffer)

    def _page(self, writer: int, reader: int) -> Tensor:
        raw = hashlib.shake_128(self._token + struct.pack("<ii", writer, reader)).digest(_PROOF_NBYTES)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    # -- memory
    # ----------------------------------------------------------------------------------------------------------
    def _alloc(self, nbytes: int) -> MpiBuffer:
        needed, free, reason = nbytes * self._sharing, available(), ""
        memory = torch.empty(0, dtype=torch.uint8)
        try:
            if needed > free:
                reason = f"{needed} bytes are needed for the ranks of a host, {free} are available"
            else:
                memory = torch.zeros(nbytes, dtype=torch.uint8)
        except RuntimeError as e:  # what torch raises where memory ends
            reason = f"{nbytes} bytes cannot be allocated: {str(e).splitlines()[0]}"
        # Before the others hear that it is there.
        buffer: MpiBuffer = self._keep(MpiBuffer(self, next(self._numbers), memory))
        self._agree(buffer.number, b"buffer", nbytes, reason)
        return buffer

    def _alloc_slots(self, words: int) -> MpiSlots:
        table: MpiSlots = self._keep(MpiSlots(self, next(self._numbers), words, self.size))
        self._agree(table.number, b"slots", words, "")
        return table

    def _keep(self, held: Any) -> Any:
        self._held[held.number] = held
        return held

    def _agree(self, number: int, kind: bytes, amount: int, reason: str) -> None:
        """Compare what all ranks allocate, and hear whose memory is short. Collective. Drops ``number`` if it fails."""
        try:
            mine = struct.pack("<8sq", kind, amount)
            votes = self._exchange(mine + reason.encode("utf-8", "replace"))
            for rank, vote in enumerate(votes):
                if vote[: len(mine)] != mine:
                    theirs = struct.unpack("<8sq", vote[: len(mine)].ljust(len(mine), b"\0"))[1]
                    text = f"rank {self.rank} allocates {amount} bytes or words, rank {rank} {theirs}"
                    raise CollectiveMismatch(f"{text}: all ranks must pass the same", rank=rank)
            short = {r: v[len(mine) :].decode("utf-8", "replace") for r, v in enumerate(votes) if v[len(mine) :]}
            if short:
                raise HeapExhausted("; ".join(f"rank {r}: {text}" for r, text in short.items()))
        except CommBackendError:
            del self._held[number]
            raise

    def release(self, held: MpiBuffer | MpiSlots) -> None:
        """Close one buffer or table: collective when healthy, idempotent."""
        if self._held.get(held.number) is not held:
            return
        try:
            if self._fault is None:
                self._barrier(time.monotonic() + self.timeout_s)
        finally:
            self._held.pop(held.number, None)

    # -- verbs
    # ----------------------------------------------------------------------------------------------------------
    def _put(self, dst: Window, src: Tensor, peer: int, slot: Slot | None, stream: int | None) -> None:
        if not src.is_cpu:
            raise ShapeError(f"put of a tensor on {src.device}: mpi moves CPU tensors")
        if peer == self.rank:
            dst.local.copy_(src.detach())
        elif src.numel():
            raw = _flat(src)
            inline = len(raw) <= INLINE_NBYTES
            tag = NO_TAG if inline else self._link.tag()
            mail = self._window(_PUT, dst, tag, slot)
            self._link.send(peer, mail, raw if inline else b"")
            if not inline:
                self._finish(self._link.isend(raw, peer, tag), raw, peer)
            return
        if slot is not None:
            self._signal(peer, slot, stream)

    def _get(self, dst: Tensor, src: Window, peer: int, stream: int | None) -> None:
        if not dst.is_cpu:
            raise ShapeError(f"get into a tensor on {dst.device}: mpi moves CPU tensors")
        out = dst.detach()
        if peer == self.rank:
            out.copy_(src.local)
        elif dst.numel():
            landing = torch.empty(src.shape, dtype=src.dtype)
            raw, tag = _flat(landing), self._link.tag() + 1
            requests = self._link.irecv(raw, peer, tag)
            self._link.send(peer, replace(self._window(_GET, src, NO_TAG, None), answer_tag=tag))
            self._finish(requests, raw, peer)
            out.copy_(landing)

    def _signal(self, peer: int, slot: Slot, stream: int | None) -> None:
        table: Any = slot.table
        if peer == self.rank:
            self._raise(self.rank, table.number, slot.word, slot.value)
        else:
            lane = self._link.lane()
            self._link.send(peer, Mail(_SIGNAL, lane, table=table.number, word=slot.word, value=slot.value))

    def _wait(self, peer: int, slot: Slot, until: float) -> bool:
        table: Any = slot.table
        values = table.values[peer]
        if self._link.wait(lambda: values[slot.word] >= slot.value or self._gone(peer), until):
            if values[slot.word] < slot.value:
                text = f"rank {peer} has ended without closing; {self.here()} waits for it"
                self.broke(CommAborted(text, rank=peer, op=self.op, seq=self.seq))
                return False
            return True
        return False

    def _gone(self, peer: int) -> bool:
        """Whether ``peer`` has ended its program, and all that it has sent is carried out."""
        return peer in self._left and not self._link.pending(peer)

    def _window(self, kind: int, window: Window, tag: int, slot: Slot | None) -> Mail:
        """A message about ``window``, whose elements become a dimension of bytes, so that no dtype has to travel."""
        buffer: Any = window.buffer
        size = window.dtype.itemsize
        shape, stride = (*window.shape, size), (*(s * size for s in window.stride), 1)
        mail = Mail(kind, self._link.lane(), buffer.number, window.offset, tag=tag, shape=shape, stride=stride)
        mail = replace(mail, nbytes=math.prod(shape))
        table: Any = None if slot is None else slot.table
        return mail if slot is None else replace(mail, table=table.number, word=slot.word, value=slot.value)

    # -- records, barrier, exchange
    # ----------------------------------------------------------------------------------------------------------
    def _post(self, seq: int, record: bytes) -> None:
        self._note(self.rank, seq, record)
        mail = Mail(_RECORD, self._link.lane(), seq, table=self._board.number, word=_POSTED, value=seq + 1)
        for peer in self._peers:
            self._link.send(peer, mail, record)

    def _note(self, rank: int, seq: int, record: bytes) -> None:
        kept = self._records[rank]
        kept[seq] = record
        while len(kept) > _KEPT_RECORDS:
            del kept[min(kept)]
        self._raise(rank, self._board.number, _POSTED, seq + 1)

    def peek(self, peer: int, seq: int) -> bytes | None:
        return self._records[peer].get(seq)

    def _record(self, peer: int, seq: int, deadline: float) -> bytes:
        self.wait(peer, Slot(self._board, _POSTED, seq + 1), deadline=deadline)
        record = self._records[peer].get(seq)
        if record is None:
            raise CommAborted(f"rank {peer}'s record of call {seq} is gone", rank=peer, seq=seq)
        return record

    def _barrier(self, deadline: float) -> None:
        with self._meeting:
            self._rounds += 1
            mail = Mail(_SIGNAL, self._link.lane(), table=self._board.number, word=_BARRIER, value=self._rounds)
            for peer in self._peers:
                self._link.send(peer, mail)
            values, rounds = self._board.values, self._rounds
            self._all_of("a barrier", lambda p: bool(values[p][_BARRIER] >= rounds), deadline)

    def _exchange(self, payload: bytes) -> list[bytes]:
        """All-gather of a few bytes. Collective; raises the fault."""
        number = next(self._parcel_numbers)
        for peer in self._peers:
            self._link.send(peer, Mail(_PARCEL, self._link.lane(), number), payload)
        self._all_of("an exchange", lambda p: (p, number) in self._parcels, time.monotonic() + self.timeout_s)
        found = {p: self._parcels.pop((p, number)) for p in self._peers} | {self.rank: payload}
        return [found[p] for p in range(self.size)]

    def _all_of(self, what: str, came: Callable[[int], bool], deadline: float) -> None:
        """Wait until ``came(peer)`` for all peers; a warning names the late ones after a tenth of the time."""
        start = time.monotonic()

        def done() -> bool:
            return all(came(p) or self._gone(p) for p in self._peers)

        def waited() -> str:
            late = ", ".join(str(p) for p in self._peers if not came(p))
            return f"rank {self.rank} has waited {time.monotonic() - start:.3f} s in {what} for rank(s) {late}"

        if not self._link.wait(done, min(deadline, start + (deadline - start) / 10)) and self._fault is None:
            log.warning("commbackend: %s", waited())
            self._link.wait(done, deadline)
        if self._fault is not None:
            raise self._fault.with_traceback(None)
        late = [p for p in self._peers if not came(p)]
        if late and not done():
            raise self.broke(CommTimeout(waited(), rank=late[0], waiting_for=late, op=self.op, seq=self.seq))
        if late:
            text = f"rank {late[0]} has ended without closing: {waited()}"
            raise self.broke(CommAborted(text, rank=late[0], op=self.op, seq=self.seq))

    def _finish(self, requests: list[Any], raw: Any, peer: int) -> None:
        """Wait until ``requests``, which use the memory of ``raw``, are done. Raises the fault."""
        start = time.monotonic()
        if not self._link.finish(requests, raw, peer, start + self.timeout_s):
            text = f"{self.here()} has waited {time.monotonic() - start:.3f} s for rank {peer} to take or send bytes"
            fault = self.broke(CommTimeout(text, rank=peer, op=self.op, seq=self.seq))
            raise fault.with_traceback(None)

    def here(self) -> str:
        """Name this rank and its call, for messages."""
        return f"rank {self.rank} in {self.op or 'a call'} (call {self.seq})"

    # -- what peers ask for: called by the link, from whatever thread takes messages
    # ----------------------------------------------------------------------------------------------------------
    def landing(self, mail: Mail) -> Tensor:
        """Where the payload of a put is received: the window itself where it is dense."""
        window = self._named(mail)
        return window.view(-1) if window.is_contiguous() else torch.empty(mail.nbytes, dtype=torch.uint8)

    def _named(self, mail: Mail) -> Tensor:
        """The bytes of this rank that a message names. Raises if there are none such."""
        buffer = self._held[mail.memory]
        if not isinstance(buffer, MpiBuffer) or min(mail.shape, default=1) < 0 or min(mail.stride, default=1) < 0:
            raise LookupError(f"memory {mail.memory} with shape {mail.shape} and stride {mail.stride}")
        window = buffer.window(mail.offset, mail.shape, torch.uint8, mail.stride).local
        if window.numel() != mail.nbytes:
            raise LookupError(f"{mail.nbytes} bytes for a window of {window.numel()}")
        return window

    def act(self, source: int, mail: Mail, payload: Tensor | memoryview) -> None:
        """Carry out a message of ``source``."""
        if mail.kind == _PUT:
            self._land(self._named(mail), payload)
        elif mail.kind == _GET:
            self._link.answer(_flat(self._named(mail)), source, mail.answer_tag)
        elif mail.kind == _RECORD:
            self._note(source, mail.memory, _bytes(payload))
        elif mail.kind == _PARCEL:
            self._parcels[source, mail.memory] = _bytes(payload)
        elif mail.kind == _FAULT:
            self.broke(unpack_fault(_bytes(payload)) or CommAborted(f"rank {source} failed", rank=source))
        elif mail.kind == _BYE:
            self._left.add(source)
        if mail.table >= 0:
            self._raise(source, mail.table, mail.word, mail.value)

    @staticmethod
    def _land(window: Tensor, payload: Tensor | memoryview) -> None:
        landed = payload if isinstance(payload, Tensor) else torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if landed.data_ptr() != window.data_ptr():
            window.copy_(landed.view(window.shape))

    def _raise(self, writer: int, number: int, word: int, value: int) -> None:
        table = self._held[number]
        if not isinstance(table, MpiSlots) or not 0 <= word < table.words:
            raise LookupError(f"word {word} of table {number}")
        table.values[writer][word] = value

    # -- faults, leaving
    # ----------------------------------------------------------------------------------------------------------
    def _ready(self) -> None:
        if os.getpid() != self._pid:
            raise CommAborted(
                f"this communicator belongs to process {self._pid}; process {os.getpid()} is a fork of it and cannot"
                " use it: start workers before commbackend.init, or by spawn"
            )
        super()._ready()

    def broke(self, cause: CommBackendError) -> CommBackendError:
        """As ``abort``, also while closing. Returns the fault, the first one."""
        if isinstance(cause, PeerDied | CommAborted) and not cause.op:
            cause.op, cause.seq = self.op, self.seq
        first = self._fault is None
        fault = self.fail(cause)
        if first:
            self._tell(fault)
        return fault

    def _tell(self, fault: CommBackendError) -> None:
        if os.getpid() == self._pid:
            self._link.tell(self._peers, Mail(_FAULT, URGENT), pack_fault(fault))

    def _close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            if self._fault is None:
                self._barrier(deadline)
        finally:
            self._leave(min(deadline, time.monotonic() + _LINGER_S))

    def _leave(self, until: float) -> None:
        """Stop taking messages, after the last ones have been sent. Local."""
        _OPEN.discard(self)
        if os.getpid() != self._pid:
            return
        if self._fault is None:
            for peer in self._peers:
                self._link.send(peer, Mail(_BYE, self._link.lane()))
            # Who has said goodbye too has heard all of this rank's messages.
            self._link.wait(lambda: self._left.issuperset(self._peers) and self._link.flushed(), until)
        self._link.close(healthy=self._fault is None and self._left.issuperset(self._peers))
        self._held.clear()


# -- the end of the process
# --------------------------------------------------------------------------------------------------------------

_OPEN: weakref.WeakSet[MpiTransport] = weakref.WeakSet()


@atexit.register
def _exit_all() -> None:
    """The program ends without ``close``: say goodbye while MPI still works."""
    for transport in list(_OPEN):
        transport._leave(time.monotonic())


def _flat(tensor: Tensor) -> memoryview:
    """The bytes of ``tensor``, or of a packed copy."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    raw: Any = plain.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _bytes(payload: Tensor | memoryview) -> bytes:
    return payload.numpy().tobytes() if isinstance(payload, Tensor) else bytes(payload)
