"""Proofs that ranks reach each other's GPU memory, made while connecting: real bytes, both ways, on the real paths."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from typing import Protocol

from ..errors import Unavailable
from .copy_kernels import Kernels
from .driver import Driver
from .heap import Link, MappedBuffer, together
from .slots import DeviceSlots
from .watch import Watch

__all__ = ["PROOF_NBYTES", "Paths", "Prover"]

#: Bytes every rank writes to, and reads from, every other.
PROOF_NBYTES = 1 << 20


class Paths(Protocol):
    """How a transport moves bytes between its own memory and the same place in a peer's, and raises words there."""

    def push(self, peer: int, dst: int, src: int, nbytes: int, stream: int) -> None: ...
    def pull(self, peer: int, dst: int, src: int, nbytes: int, stream: int) -> None: ...
    def raise_words(self, peer: int, address: int, stream: int) -> None:
        """Enqueue: make the two words at ``address`` one, each in one of the transport's ways."""


@dataclass(frozen=True, slots=True)
class Prover:
    """What proofs are made with. Methods are collective and raise Unavailable on every rank when one fails on any."""

    driver: Driver
    kernels: Kernels
    watch: Watch
    paths: Paths
    link: Link
    token: bytes
    patience_s: float

    def pairs(self, inbox: MappedBuffer, words: DeviceSlots, deadline: float) -> None:
        """Move 1 MiB of random bytes and raise words between every two ranks, both ways, and look at what came.

        Args:
            inbox: (ranks + 1) * PROOF_NBYTES bytes. words: A table of at least two words.
        """
        for step, what in (
            (lambda: self._fill(inbox), "filling 1 MiB"),
            (lambda: self._push(inbox, words), "writing 1 MiB to every rank"),
            (lambda: self._compare(inbox, words), "comparing what the ranks wrote"),
        ):
            together(self.link, what, step, deadline)

    def multicast(self, page: MappedBuffer, words: DeviceSlots, deadline: float) -> None:
        """Store a word through the multicast address from every rank; all must see all of them."""
        rank, size = self.link.rank, self.link.size

        def store() -> None:
            target = page.multicast_base + words.offset + 8 * words.words * rank
            self.kernels.multicast_store(target, rank + 1, self.watch.stream)
            self._settle("a store to a multicast address")

        def compare() -> None:
            seen = [self.watch.read(address, 1)[0] for address in words.wait_at]
            if seen != [r + 1 for r in range(size)]:
                raise Unavailable(f"stores through the multicast address gave {seen}")

        together(self.link, "storing through multicast", store, deadline)
        together(self.link, "comparing what multicast brought", compare, deadline)

    def _pattern(self, rank: int) -> bytes:
        return hashlib.shake_128(self.token + rank.to_bytes(4, "little")).digest(PROOF_NBYTES)

    def _fill(self, inbox: MappedBuffer) -> None:
        rank, source = self.link.rank, self.driver.host_alloc(PROOF_NBYTES)
        try:
            ctypes.memmove(source, self._pattern(rank), PROOF_NBYTES)
            self.driver.copy(inbox.bases[rank] + rank * PROOF_NBYTES, source, PROOF_NBYTES, self.watch.stream)
            self._settle("a copy from the host")
        finally:
            self.driver.host_free(source)

    def _push(self, inbox: MappedBuffer, words: DeviceSlots) -> None:
        rank, stream = self.link.rank, self.watch.stream
        at = rank * PROOF_NBYTES
        for peer, base in enumerate(inbox.bases):
            if peer != rank:
                self.paths.push(peer, base + at, inbox.bases[rank] + at, PROOF_NBYTES, stream)
            self.paths.raise_words(peer, words.raise_at[peer], stream)
            self._settle(f"writing to rank {peer}")

    def _compare(self, inbox: MappedBuffer, words: DeviceSlots) -> None:
        own, spare = inbox.bases[self.link.rank], inbox.bases[self.link.rank] + self.link.size * PROOF_NBYTES
        bad = []
        for peer, base in enumerate(inbox.bases):
            if peer == self.link.rank:
                continue
            expected, at = self._pattern(peer), peer * PROOF_NBYTES
            if self.watch.read_bytes(own + at, PROOF_NBYTES) != expected:
                bad.append(f"bytes that rank {peer} wrote here differ from what it sent")
            self.paths.pull(peer, spare, base + at, PROOF_NBYTES, self.watch.stream)
            self._settle(f"reading from rank {peer}")
            if self.watch.read_bytes(spare, PROOF_NBYTES) != expected:
                bad.append(f"bytes read from rank {peer} differ from what it holds")
            if (seen := self.watch.read(words.wait_at[peer], 2)) != [1, 1]:
                bad.append(f"the flags that rank {peer} raised here are {seen}, not 1, 1")
        if bad:
            raise Unavailable("; ".join(bad))

    def _settle(self, what: str) -> None:
        if not self.driver.settle(self.watch.stream, self.patience_s):
            raise Unavailable(f"{what} has not ended after {self.patience_s:.0f} s")
