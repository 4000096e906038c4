"""The collectives of transport ``mpi``: bytes between pairs under tags that both sides count alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .collectives import HostCollectives, as_bytes, land, landing, packed

if TYPE_CHECKING:
    from torch import Tensor

    from .mpilink import MpiLink

__all__ = ["MpiCollectives"]


class MpiCollectives(HostCollectives):
    """The role for a transport with an ``MpiLink``, which takes other messages while a rank waits here."""

    _link: MpiLink
    _collectives = 0

    def _all_to_all(self, dsts: Sequence[Tensor], srcs: Sequence[Tensor], stream: int | None) -> None:
        tag, self._collectives = self._link.shared_tag(self._collectives), self._collectives + 1
        kept = {id(s): packed(s) for s in srcs}
        landed = [landing(d) for d in dsts]
        into: list[Any] = [as_bytes(t).numpy() for t in landed]
        out: list[Any] = [as_bytes(kept[id(s)]).numpy() for s in srcs]
        requests: list[tuple[int, list[Any]]] = []
        for step in range(1, self.size):  # every rank starts with another peer
            peer = (self.rank - step) % self.size
            if len(into[peer]):
                requests.append((peer, self._link.irecv(memoryview(into[peer]), peer, tag)))
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            if len(out[peer]):
                requests.append((peer, self._link.isend(memoryview(out[peer]), peer, tag)))
        landed[self.rank].copy_(kept[id(srcs[self.rank])])
        for peer, pending in requests:
            self._finish(pending, (into, out), peer)
        land(dsts, landed)

    @abstractmethod
    def _finish(self, requests: list[Any], raw: Any, peer: int) -> None:
        """Wait until ``requests``, which use the memory of ``raw``, are done. Raises the fault."""
