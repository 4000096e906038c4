"""The control plane of GPU transports: all-gathers of bytes, records of calls, barriers and faults, without the GPU.

``HostControl`` keeps it in shared memory and Unix sockets of one host, ``NetControl`` (in ``netlink``) reaches over a
network; the transports above do not know which one they have.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..contract import Rendezvous
from ..errors import CommBackendError, CommTimeout, PeerDied, pack_fault
from .link import HostLink
from .memory import HostBoard

if TYPE_CHECKING:
    from .netlink import NetControl

__all__ = ["Control", "HostControl", "NetPlane"]

#: Told of a peer's fault, or of its death (None).
FaultCallback = Callable[[int, CommBackendError | None], None]
Stop = Callable[[], object]
_LENGTH = struct.Struct("<q")


class Control(Protocol):
    """One rank's end. Waits end at ``deadline``, when ``stop()`` is true, or when the control plane is lost."""

    rank: int
    size: int

    def exchange(self, payload: bytes, deadline: float) -> list[bytes]:
        """All-gather of bytes. Collective. Raises CommTimeout, PeerDied, CommAborted."""

    def post(self, seq: int, record: bytes) -> None:
        """Publish the record of call ``seq``. Local."""

    def record(self, peer: int, seq: int, deadline: float, stop: Stop) -> bytes | None:
        """Wait for ``peer``'s record of call ``seq``; None if it has not come."""

    def peek(self, peer: int, seq: int) -> bytes | None:
        """``peer``'s record of call ``seq`` if it is here. Local."""

    def entered(self, peer: int) -> int:
        """Number of the last call that ``peer`` is known to have entered. Local."""

    def barrier(self, deadline: float, stop: Stop) -> list[int]:
        """Wait for all ranks; return those that have not come. Collective."""

    def on_fault(self, callback: FaultCallback) -> None:
        """Have another thread call ``callback(rank, fault)`` when a peer tells a fault or (None) dies."""

    def peer_fault(self) -> CommBackendError | None:
        """A fault that a peer has shown, or None. Local and cheap."""

    def tell(self, fault: CommBackendError) -> None:
        """Tell the peers of this rank's fault. Does not block; the first one stays."""

    def interrupt(self, fault: CommBackendError) -> None:
        """Make present and later exchanges here raise ``fault``."""

    def close(self, goodbye: bool) -> None:
        """Leave; without ``goodbye`` the peers take this rank for dead. Idempotent."""


class HostControl:
    """Over Unix sockets and shared memory: see ``link`` and ``memory``. ``link`` also carries descriptors."""

    def __init__(self, link: HostLink, board: HostBoard) -> None:
        self.link, self._board = link, board
        self.rank, self.size = link.rank, link.size
        self.exchange, self.on_fault, self.interrupt = link.exchange, link.on_fault, link.interrupt
        self.post, self.peek, self.barrier = board.post, board.record, board.barrier
        self.peer_fault = board.peer_fault

    @classmethod
    def open(cls, group: Rendezvous, deadline: float) -> HostControl:
        """Connect the ranks of one host. Collective. Raises Unavailable or CommTimeout, on every rank."""
        link = HostLink.open(group, timeout_s=max(deadline - time.monotonic(), 0.001))
        try:
            return cls(link, HostBoard(link, deadline))
        except BaseException:
            link.close(goodbye=False)
            raise

    def record(self, peer: int, seq: int, deadline: float, stop: Stop) -> bytes | None:
        word, value = self._board.posted(seq)
        return self._board.record(peer, seq) if self._board.words.wait(peer, word, value, deadline, stop) else None

    def entered(self, peer: int) -> int:
        return self._board.words.read(peer, self._board.posted(0)[0]) - 1

    def tell(self, fault: CommBackendError) -> None:
        packed = pack_fault(fault)
        self._board.show_fault(packed)
        self.link.tell(packed)

    def close(self, goodbye: bool) -> None:
        self._board.close()
        self.link.close(goodbye=goodbye)


class NetPlane:
    """Over gloo's connections between hosts: see ``netlink``.

    A fault or death that the network reports fails ``net`` first, and comes from there.
    """

    def __init__(self, net: NetControl) -> None:
        self._net, self.rank, self.size = net, net.rank, net.size
        self._entered = [-1] * net.size
        self.post = net.post
        self.peek = net.peek

    @classmethod
    def open(cls, group: Rendezvous, deadline: float, options: Mapping[str, Any]) -> NetPlane:
        """Connect the ranks over the network. Collective. Raises Unavailable or CommTimeout, on every rank."""
        import torch

        from .netlink import NetControl

        return cls(NetControl.connect(group, torch.device("cpu"), options))

    def exchange(self, payload: bytes, deadline: float) -> list[bytes]:
        lengths = [_LENGTH.unpack(raw)[0] for raw in self._swap(_LENGTH.pack(len(payload)), [8] * self.size, deadline)]
        return self._swap(payload, lengths, deadline)

    def _swap(self, payload: bytes, lengths: list[int], deadline: float) -> list[bytes]:
        import torch

        heard = [torch.empty(n, dtype=torch.uint8) for n in lengths]
        mine = torch.tensor(list(payload), dtype=torch.uint8)
        self._net.swap(heard, [mine] * self.size, deadline)
        return [bytes(t.numpy().tobytes()) for t in heard]

    def record(self, peer: int, seq: int, deadline: float, stop: Stop) -> bytes | None:
        try:
            found = self._net.record(peer, seq, deadline)
        except CommBackendError:
            return None  # the cause has gone to the callback
        self._entered[peer] = seq
        return found

    def entered(self, peer: int) -> int:
        return self._entered[peer]

    def barrier(self, deadline: float, stop: Stop) -> list[int]:
        try:
            self._net.barrier(deadline)
        except CommTimeout as e:
            return list(e.waiting_for)
        except CommBackendError:
            return [p for p in range(self.size) if p != self.rank]  # the cause has gone to the callback
        return []

    def on_fault(self, callback: FaultCallback) -> None:
        def heard(fault: CommBackendError) -> None:
            if isinstance(fault, PeerDied) and fault.rank not in (-1, self.rank):
                callback(fault.rank, None)
            else:
                callback(-1, fault)

        self._net.on_fault(heard)

    def peer_fault(self) -> CommBackendError | None:
        return self._net.fault

    def tell(self, fault: CommBackendError) -> None:
        self._net.abort(str(fault), fault)

    def interrupt(self, fault: CommBackendError) -> None:
        self._net.abort(str(fault), fault)

    def close(self, goodbye: bool) -> None:
        if not goodbye:
            self._net.abort(f"rank {self.rank} gives up")
        self._net.close()
