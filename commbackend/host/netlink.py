"""The control plane of transports without shared memory: bytes between pairs of ranks over gloo, with deadlines.

A transport on top (``transports/torch_dist.py``) moves data; here are joining, records, barriers and faults. The user's
process groups and torch's global state are never touched: a gloo backend object of its own is built over a private part
of the group's store. Every error and every timeout names its peer.

A blocked gloo wait cannot be cancelled, but it ends when its pair of sockets closes, and a receive that times out
closes its pair: that is how ``abort`` and deadlines end waits. The cause is published in the store first, where peers
that find their sockets closed look for it before they call it a death. One thread a peer waits for its goodbye, so that
a death is noticed by all, also by those that wait for somebody else.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch

from ..contract import RECORD_NBYTES, Caps, Collective, Rendezvous, Transport
from ..errors import CommAborted, CommBackendError, CommTimeout, PeerDied, Unavailable, pack_fault, unpack_fault
from ..topology import addresses, survey

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store, Work

__all__ = ["FOR_EVER", "NetControl", "NetTransport", "backend"]

log = logging.getLogger("commbackend")

_RECORD = struct.Struct("<qI")
#: How many records of this rank stay readable; the contract wants two.
_KEPT_RECORDS = 8
#: How often the watch thread looks for waits that are late.
_TICK_S = 0.05
#: Longest message of one send, so that no 32-bit count is met on the way.
_PIECE_NBYTES = 1 << 30
#: Tags: even ones move data, odd ones records; the last two say goodbye and, never sent, break a pair.
_BREAK_TAG = (1 << 31) - 1
_BYE_TAG = _BREAK_TAG - 1
_PROOF_NBYTES = 4096
_NO_TIME = timedelta(milliseconds=1)
#: How long the end of a process that did not close its transport may take.
_EXIT_S = 2.0
#: How long the store may take to answer about a fault.
_STORE_S = 0.5
#: A timeout for torch where something else keeps the deadline.
FOR_EVER = timedelta(days=365)


@dataclass(slots=True)
class _Blocked:
    """A wait in progress, for the watch thread."""

    peer: int
    start: float
    deadline: float
    warned: bool = False
    expired: bool = False


@dataclass(slots=True)
class _Records:
    """Everything about the records of one call."""

    own: Tensor
    heard: Tensor
    receives: dict[int, Work]
    sends: list[Work] = field(default_factory=list)


class NetControl(Transport):
    """Ranks connected by gloo: ``_swap`` moves bytes of CPU tensors. It has records, barriers and faults and no role,
    which subclasses, or a transport that keeps one for its control plane, add.
    """

    name = "net"
    caps = Caps(device="any", scope="cluster")

    def __init__(self, group: Rendezvous, control: Any, notes: Store) -> None:
        super().__init__(group)
        self._control, self._notes = control, notes
        self._tags = itertools.count(0, 2)
        self._records: dict[int, _Records] = {}
        self._record_lock = threading.Lock()
        self._blocked: dict[int, _Blocked] = {}
        self._bell = threading.Event()
        self._left, self._pid, self._storeless = False, os.getpid(), False
        self._listener: Callable[[CommBackendError], None] | None = None
        self._threads = [threading.Thread(target=self._watch, name=f"commbackend-{self.name}", daemon=True)]
        for p in self._peers():
            name = f"commbackend-{self.name}-{p}"
            self._threads.append(threading.Thread(target=self._attend, args=(p,), name=name, daemon=True))

    # -- joining
    # ----------------------------------------------------------------------------------------------------------
    @classmethod
    def probe(cls, device: torch.device) -> None:
        backend("ProcessGroupGloo")

    @classmethod
    def connect(cls, group: Rendezvous, device: torch.device, options: Mapping[str, Any]) -> Self:
        """Build the backends and prove every pair with random bytes. Collective; see ``contract.Transport.connect``.

        Options: ``hosts``, the host number of every rank, where it is known; ``interface``, the network interface or
        address to use between hosts.
        """
        scope: Callable[[str], Store] | None = getattr(group, "scope", None)
        if scope is None:
            raise Unavailable(f"{cls.name} needs a group with a torch store", "use commbackend.group.Group")
        cls.probe(device)
        hosts = options.get("hosts") or survey(group).hosts
        store, reason, transport = scope(cls.name), "", None
        try:
            control = _gloo(store, group, len(set(hosts)) <= 1, str(options.get("interface") or ""))
            transport = cls(group, control, store)
            _OPEN.add(transport)
            for thread in transport._threads:
                thread.start()
            transport._prove(group.token)
            transport._join(store, device)
        except (CommBackendError, RuntimeError, OSError) as e:
            reason = str(e).splitlines()[0] if str(e) else type(e).__name__
            log.debug("commbackend: %s does not connect", cls.name, exc_info=True)
        try:
            votes = group.exchange(reason.encode())
        except BaseException as e:
            if transport is not None:  # its threads must not outlive the attempt
                transport.abort(f"{cls.name} does not connect: {e}")
                transport.close()
            raise
        lost = [f"rank {r}: {v.decode('utf-8', 'replace')}" for r, v in enumerate(votes) if v]
        if lost or transport is None:
            if transport is not None:
                transport.abort("not every rank has connected")
                transport.close()
            raise Unavailable(f"{cls.name} does not connect these ranks: {'; '.join(lost)}")
        return transport

    def _join(self, store: Store, device: torch.device) -> None:
        """Hook: build what moves data."""

    def _prove(self, token: bytes) -> None:
        """Exchange bytes with every peer that only ranks of this group can make."""

        def pattern(source: int, target: int) -> Tensor:
            seed = token + struct.pack("<ii", source, target)
            return torch.frombuffer(bytearray(hashlib.shake_128(seed).digest(_PROOF_NBYTES)), dtype=torch.uint8)

        found = [torch.empty(_PROOF_NBYTES, dtype=torch.uint8) for _ in range(self.size)]
        self._swap(found, [pattern(self.rank, p) for p in range(self.size)], time.monotonic() + self.timeout_s)
        for peer, got in enumerate(found):
            if not torch.equal(got, pattern(peer, self.rank)):
                raise Unavailable(f"bytes from rank {peer} arrive changed at rank {self.rank}")

    # -- bytes between pairs
    # ----------------------------------------------------------------------------------------------------------
    def swap(self, dsts: Sequence[Tensor], srcs: Sequence[Tensor], deadline: float) -> None:
        """All-to-all of flat uint8 CPU tensors whose sizes are agreed. Collective. Raises the transport's fault."""
        self._ready()
        self._swap(dsts, srcs, deadline)

    def _swap(self, dsts: Sequence[Tensor], srcs: Sequence[Tensor], deadline: float) -> None:
        """Move ``srcs[p]`` to peer p and ``dsts[p]`` from it: flat uint8 CPU tensors, sizes agreed; empty ones are
        skipped. Raises the transport's fault.
        """
        self._owned()
        tag = next(self._tags) % _BYE_TAG
        works: list[tuple[int, Work]] = []
        try:
            for step in range(1, self.size):  # every rank starts with another peer
                peer = (self.rank - step) % self.size
                works += [(peer, self._control.recv([part], peer, tag)) for part in _pieces(dsts[peer])]
            for step in range(1, self.size):
                peer = (self.rank + step) % self.size
                works += [(peer, self._control.send([part], peer, tag)) for part in _pieces(srcs[peer])]
        except RuntimeError as e:  # that pair is closed
            raise self._explain(e, peer) from e
        dsts[self.rank].copy_(srcs[self.rank])
        self._finish(works, deadline)

    def _finish(self, works: Sequence[tuple[int, Work]], deadline: float) -> None:
        """Wait for all ``works``. Raises the fault of the first that fails; a timeout names all peers that are late."""
        mine = self._blocked[threading.get_ident()] = _Blocked(-1, time.monotonic(), deadline)
        try:
            for i, (peer, work) in enumerate(works):
                mine.peer = peer
                try:
                    work.wait(FOR_EVER)  # the watch thread ends it at the deadline
                except RuntimeError as e:
                    if not mine.expired:
                        raise self._explain(e, peer) from e
                    late = {p for p, w in works[i + 1 :] if not _done(w)} | {peer}
                    fault = self._late(mine, sorted(late))
                    self.abort(str(fault), fault)
                    raise self._fault or fault from e
        finally:
            del self._blocked[threading.get_ident()]
        if self._fault is not None:  # what came may be the debris of an aborted call
            raise self._fault

    def _late(self, wait: _Blocked, late: Sequence[int]) -> CommTimeout:
        took_s = time.monotonic() - wait.start
        message = f"{self._here()} has waited {took_s:.3f} s for rank {', '.join(map(str, late))} ({self.name})"
        fault = CommTimeout(message, rank=late[0], op=self.op, seq=self.seq, waiting_for=late)
        if self.explain_fault is not None:  # it is published before it becomes this rank's
            self.explain_fault(fault)
        return fault

    def _here(self) -> str:
        return f"rank {self.rank} in {self.op or 'a call'} (call {self.seq})"

    def _explain(self, error: RuntimeError, peer: int) -> CommBackendError:
        """Turn what a backend raised into the transport's fault, and return that. The only place that maps errors."""
        told = self._fault or self._news()
        if told is not None:
            return self.fail(told)
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        cause: CommBackendError
        if any(w in text.lower() for w in ("closed by peer", "reset by peer", "broken pipe")):
            message = f"{self._here()}: rank {peer} has ended or left: its connection is closed ({self.name}: {text})"
            cause = PeerDied(message, rank=peer, op=self.op, seq=self.seq)
        else:
            message = f"{self._here()}: {self.name} failed with rank {peer}: {text}"
            cause = CommAborted(message, rank=peer, op=self.op, seq=self.seq)
        self.abort(message, cause)
        return self._fault or cause

    # -- records, barrier
    # ----------------------------------------------------------------------------------------------------------
    def _post(self, seq: int, record: bytes) -> None:
        self._owned()
        call = self._call(seq)
        raw = _RECORD.pack(seq, len(record)) + record
        call.own[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        try:
            call.sends = [self._control.send([call.own], p, _record_tag(seq)) for p in self._peers()]
        except RuntimeError as e:
            raise self._explain(e, -1) from e

    def _record(self, peer: int, seq: int, deadline: float) -> bytes:
        self._owned()
        call = self._call(seq)
        with self._record_lock:
            work = call.receives.pop(peer, None)
        if work is not None:
            self._finish([(peer, work)], deadline)
        raw = (call.own if peer == self.rank else call.heard[peer]).numpy().tobytes()
        number, length = _RECORD.unpack_from(raw)
        if number != seq or length > RECORD_NBYTES:
            raise self.fail(
                CommAborted(f"rank {self.rank}: rank {peer} sent no record of call {seq}", rank=peer, seq=seq)
            )
        return raw[_RECORD.size : _RECORD.size + length]

    def _call(self, seq: int) -> _Records:
        """Return the records of call ``seq``, with a receive from every peer posted."""
        with self._record_lock:
            call = self._records.get(seq)
            if call is None:
                nbytes = _RECORD.size + RECORD_NBYTES
                heard = torch.zeros(self.size, nbytes, dtype=torch.uint8)
                try:
                    receives = {p: self._control.recv([heard[p]], p, _record_tag(seq)) for p in self._peers()}
                except RuntimeError as e:
                    raise self._explain(e, -1) from e
                call = self._records[seq] = _Records(torch.zeros(nbytes, dtype=torch.uint8), heard, receives)
                while len(self._records) > _KEPT_RECORDS:
                    self._records.pop(min(self._records))
            return call

    def _barrier(self, deadline: float) -> None:
        here = torch.zeros(self.size, 1, dtype=torch.uint8)
        self._swap(list(torch.empty_like(here)), list(here), deadline)

    def _owned(self) -> None:
        if os.getpid() != self._pid:
            raise self.fail(CommAborted(f"rank {self.rank}: a forked child cannot use its parent's communicator"))

    def _peers(self) -> list[int]:
        return [p for p in range(self.size) if p != self.rank]

    # -- faults
    # ----------------------------------------------------------------------------------------------------------
    def _news(self) -> CommBackendError | None:
        """Return the fault that some rank has published, or None."""
        raw = self._ask(lambda: self._notes.get("fault") if self._notes.check(["fault"]) else b"")
        return unpack_fault(raw, op=self.op) if raw else None

    def _ask(self, call: Callable[[], bytes]) -> bytes:
        """What ``call`` gets from the store, or b"" if the store does not answer soon: it may be gone with its server,
        or behind the very cable whose loss is the fault. That a socket closed is then all there is to say.
        """
        answer: list[bytes] = []

        def ask() -> None:
            try:
                answer.append(call())
            except RuntimeError as e:
                log.debug("commbackend: rank %d: the store is gone: %s", self.rank, e)

        if not self._storeless:
            thread = threading.Thread(target=ask, name=f"commbackend-{self.name}-store", daemon=True)
            thread.start()
            thread.join(_STORE_S)
            self._storeless = thread.is_alive()  # until the store's own timeout; nobody asks it again
        return answer[0] if answer else b""

    def on_fault(self, callback: Callable[[CommBackendError], None]) -> None:
        """Have ``callback`` called, from whatever thread meets it, with the first fault; at once if there is one."""
        self._listener = callback
        if self._fault is not None:
            callback(self._fault)

    def _release(self) -> None:
        if self._fault is not None:
            self._publish(self._fault)
        self._bell.set()
        if self._listener is not None and self._fault is not None:
            self._listener(self._fault)

    def _publish(self, fault: CommBackendError) -> None:
        """Tell all ranks why their sockets are going to close, unless somebody has told them already."""
        if os.getpid() != self._pid:
            return  # a forked child's fault is its own
        notes = self._notes

        def publish() -> bytes:
            if not notes.check(["fault"]):
                notes.set("fault", pack_fault(fault))  # type: ignore[arg-type]
            return b""

        self._ask(publish)

    def _attend(self, peer: int) -> None:
        """Body of a thread: notice when the connection to ``peer`` ends without its goodbye."""
        try:
            self._control.recv([torch.empty(1, dtype=torch.uint8)], peer, _BYE_TAG).wait(FOR_EVER)
        except RuntimeError as e:
            # "Pair closure": this rank cuts the connection, because of a fault that is being reported elsewhere.
            if self._fault is None and not self._left and "pair closure" not in str(e):
                self._explain(e, peer)

    def _watch(self) -> None:
        """Body of the watch thread: warn of late peers, keep deadlines, and end all blocked waits after a fault."""
        pause_s = _TICK_S
        while not self._bell.wait(pause_s):
            now = time.monotonic()
            waits = list(self._blocked.values())
            for wait in waits:
                if now >= wait.deadline and not wait.expired:
                    wait.expired = True
                    self._publish(self._late(wait, [wait.peer]))
                    self._cut([wait.peer])
                elif not wait.warned and now > wait.start + max((wait.deadline - wait.start) / 10, _TICK_S):
                    wait.warned = True
                    log.warning(
                        "commbackend: rank %d has waited %.1f s for rank %d in %s (call %d, %s)",
                        self.rank, now - wait.start, wait.peer, self.op or "a call", self.seq, self.name,
                    )  # fmt: skip
            overdue = self._overdue(now)
            if overdue is not None:
                self.abort(str(overdue), overdue)
            pause_s = min([_TICK_S, *(max(w.deadline - now, 0.001) for w in waits if not w.expired)])
        if self._fault is not None:
            waited = [w.peer for w in list(self._blocked.values())]
            self._cut(sorted(self._peers(), key=lambda p: (p not in waited, p)))

    def _overdue(self, now: float) -> CommBackendError | None:
        """Hook: return the fault of something enqueued whose deadline has passed."""
        return None

    def _cut(self, peers: Sequence[int]) -> None:
        """Close the sockets to ``peers``, so that every wait that is blocked on them ends."""
        for peer in peers:
            try:
                self._control.recv([torch.empty(1, dtype=torch.uint8)], peer, _BREAK_TAG).wait(_NO_TIME)
            except RuntimeError:
                continue  # as intended: the receive timed out, or the pair was closed already

    def _close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            if self._fault is None:
                self._barrier(deadline)
                self._goodbye(deadline)
        finally:
            self._end(deadline)

    def _end(self, deadline: float) -> None:
        """End the threads. Local."""
        _OPEN.discard(self)
        self._left = True
        self._bell.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(deadline - time.monotonic(), 1.0))
        self._records.clear()
        self._control = None

    def _exit(self) -> None:
        """The process ends without ``close``: say goodbye and close the sockets. Local.

        A thread that were still blocked in gloo then would wake in an interpreter that is gone, and abort the process.
        """
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + _EXIT_S
        if self._fault is None:
            self._goodbye(deadline)
        self._left = True
        self._cut(self._peers())
        self._end(deadline)

    def _goodbye(self, deadline: float) -> None:
        """Tell every peer that this rank leaves in order; those that have ended meanwhile need no telling."""
        bye = torch.zeros(1, dtype=torch.uint8)
        sent = []
        for peer in self._peers():
            try:
                sent.append((peer, self._control.send([bye], peer, _BYE_TAG)))
            except RuntimeError as e:
                log.debug("commbackend: rank %d: goodbye to rank %d: %s", self.rank, peer, e)
        for peer, work in sent:
            try:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as e:
                log.debug("commbackend: rank %d: goodbye to rank %d: %s", self.rank, peer, e)


class NetTransport(NetControl, Collective):
    """A transport over gloo's connections. Subclasses move data."""


# -- the end of the process
# --------------------------------------------------------------------------------------------------------------

_OPEN: weakref.WeakSet[NetControl] = weakref.WeakSet()


@atexit.register
def _exit_all() -> None:
    for transport in list(_OPEN):
        transport._exit()


# -- torch's backends
# --------------------------------------------------------------------------------------------------------------


def backend(name: str) -> Any:
    """Return torch's class ``name`` of a communication backend. Raises Unavailable if this build has none."""
    from torch.distributed import is_available

    if not is_available():
        raise Unavailable("this torch has no torch.distributed", "install a build with USE_DISTRIBUTED")
    from torch._C import _distributed_c10d as c10d

    if not hasattr(c10d, name):
        raise Unavailable(
            f"this torch has no {name}", f"install a build of torch with {name.removeprefix('ProcessGroup')}"
        )
    return getattr(c10d, name)


def _gloo(store: Store, group: Rendezvous, one_host: bool, interface: str) -> Any:
    """Return a gloo backend of these ranks: on loopback on one host, else on one interface that is not loopback."""
    gloo = backend("ProcessGroupGloo")
    options = gloo._Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    options._threads = 1
    if one_host:
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
    else:
        found = addresses()
        chosen = found.get(interface, interface)
        if not interface:
            if len(found) != 1:
                raise Unavailable(
                    "ranks are on several hosts and gloo needs one network interface here; found"
                    f" {', '.join(f'{n} ({a})' for n, a in found.items()) or 'none but loopback'}",
                    "set COMMBACKEND_INTERFACE to one of them",
                )
            chosen = next(iter(found.values()))
        options._devices = [gloo.create_device(hostname=chosen)]
    return gloo(store, group.rank, group.size, options)


def _done(work: Work) -> bool:
    try:
        work.wait(_NO_TIME)
    except RuntimeError:
        return False
    return True


def _record_tag(seq: int) -> int:
    return (2 * seq + 1) % _BYE_TAG


def _pieces(raw: Tensor) -> Iterable[Tensor]:
    return raw.split(_PIECE_NBYTES) if raw.numel() else ()
