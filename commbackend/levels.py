"""Two transports as one: a one-sided one within every host, collectives between the ranks of one number on all hosts.

Ranks are those of the whole group outside, and numbers within a host, or of a host, inside: they are translated here,
in faults too. A fault of either level is one of both, and travels on over each rank's other level until all have heard.
Records are compared within hosts and between ranks of one number, so that all ranks are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .contract import Caps, Collective, OneSided, Rendezvous, Slot, SlotTable, SymBuffer, Transport, Window
from .errors import CommBackendError, HeapExhausted, ShapeError, Unsupported

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["TwoLevels", "members"]

Made = TypeVar("Made", SymBuffer, SlotTable)


def members(hosts: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of ``rank``'s host, and those with its number on all hosts, host by host."""
    ranks = [[r for r, at in enumerate(hosts) if at == h] for h in range(max(hosts) + 1)]
    near = ranks[hosts[rank]]
    return tuple(near), tuple(of_host[near.index(rank)] for of_host in ranks)


class _Window(Window):
    """A window of the whole group, and the same within the host."""

    __slots__ = ("inside",)
    inside: Window


class _Buffer(SymBuffer):
    def __init__(self, owner: TwoLevels, inside: SymBuffer) -> None:
        self.nbytes, self.inside = inside.nbytes, inside
        self._owner = owner

    @property
    def local(self) -> Tensor:
        return self.inside.local

    def view(self, rank: int) -> Tensor | None:
        return self.inside.view(self._owner.near.index(rank)) if rank in self._owner.near else None

    def window(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> Window:
        inside = self.inside.window(offset, shape, dtype, stride)
        made = _Window(self, inside.offset, inside.shape, inside.stride, inside.dtype)
        made.inside = inside
        return made

    def close(self) -> None:
        self._owner.spread_fault()
        self.inside.close()


class _Slots(SlotTable):
    def __init__(self, owner: TwoLevels, inside: SlotTable) -> None:
        self.words, self.inside = inside.words, inside
        self._owner = owner

    def read(self, writer: int, word: int) -> int:
        return self.inside.read(self._owner.near.index(writer), word) if writer in self._owner.near else 0

    def close(self) -> None:
        self._owner.spread_fault()
        self.inside.close()


class TwoLevels(OneSided):
    """``inner``, connected over the ranks of this host, and ``between``, over the ranks of this number on all hosts.

    Verbs reach the ranks of the own host: for others ``put``, ``get``, ``signal`` and ``wait`` raise ShapeError.
    """

    def __init__(self, group: Rendezvous, inner: OneSided, between: Collective, hosts: Sequence[int]) -> None:
        self.inner, self.between = inner, between
        self.near, self.twins = members(hosts, group.rank)
        self._levels: tuple[Transport, ...] = (inner, between)
        super().__init__(group)
        self._group = group
        self.name = f"{inner.name}+{between.name}"  # type: ignore[misc]  # of the pair, not of the class
        one = inner.caps
        self.caps = Caps(
            device=one.device,
            one_sided=True,
            scope="cluster",
            source=one.source,
            stream_ordered=one.stream_ordered,
            free_queues=one.free_queues,
            copy_engine=one.copy_engine,
            abortable=one.abortable and between.caps.abortable,
            bounded_wait=one.bounded_wait and between.caps.bounded_wait,
            nonblocking=one.nonblocking,
            copy_lanes=one.copy_lanes,
            sharing=one.sharing,
            hosts=tuple(hosts),
        )
        inner.explain_fault = lambda cause: self._hear(inner, self.near, cause)
        between.explain_fault = lambda cause: self._hear(between, self.twins, cause)

    @classmethod
    def probe(cls, device: torch.device) -> None:
        """Nothing of its own: its two transports are probed."""

    @classmethod
    def connect(cls, group: Rendezvous, device: torch.device, options: Mapping[str, Any]) -> Self:
        raise Unsupported("two levels are made of two connected transports: select.connect")

    # -- what the levels must know too
    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("op", "seq", "timeout_s"):
            for level in self._levels:
                setattr(level, name, value)
        super().__setattr__(name, value)

    # -- verbs
    def _local(self, peer: int) -> int:
        if peer not in self.near:
            raise ShapeError(f"rank {peer} is on another host than rank {self.rank}: verbs reach {self.near}")
        return self.near.index(peer)

    @staticmethod
    def _inside(slot: Slot) -> Slot:
        table: Any = slot.table
        return Slot(table.inside, slot.word, slot.value)

    def _put(self, dst: Window, src: Tensor, peer: int, slot: Slot | None, stream: int | None) -> None:
        window: Any = dst
        there = None if slot is None else self._inside(slot)
        self.inner.put(window.inside, src, self._local(peer), slot=there, stream=stream)

    def _get(self, dst: Tensor, src: Window, peer: int, stream: int | None) -> None:
        window: Any = src
        self.inner.get(dst, window.inside, self._local(peer), stream=stream)

    def _signal(self, peer: int, slot: Slot, stream: int | None) -> None:
        self.inner.signal(self._local(peer), self._inside(slot), stream=stream)

    def wait(self, peer: int, slot: Slot, *, deadline: float, stream: int | None = None) -> None:
        self._ready()
        self.inner.wait(self._local(peer), self._inside(slot), deadline=deadline, stream=stream)

    def _wait(self, peer: int, slot: Slot, until: float) -> bool:
        return self.inner._wait(self._local(peer), self._inside(slot), until)

    def guard(self, tensor: Tensor, stream: int | None) -> None:
        self.inner.guard(tensor, stream)

    # -- memory
    def _alloc(self, nbytes: int) -> SymBuffer:
        return _Buffer(self, self._everywhere(lambda: self.inner.alloc(nbytes)))

    def _alloc_slots(self, words: int) -> SlotTable:
        return _Slots(self, self._everywhere(lambda: self.inner.alloc_slots(words)))

    def _everywhere(self, make: Callable[[], Made]) -> Made:
        """Allocate on every host, or on none."""
        found, reason = None, ""
        try:
            found = make()
        except HeapExhausted as e:  # on every rank of this host; the others must hear of it
            reason = str(e)
        try:
            votes = self._group.exchange(reason.encode("utf-8", "replace"), timeout_s=self.timeout_s)
        except CommBackendError as e:
            self.abort(str(e), e)
            raise
        if found is None or any(votes):
            if found is not None:
                found.close()
            rank = next(r for r, vote in enumerate(votes) if vote)
            raise HeapExhausted(f"on the host of rank {rank}: {votes[rank].decode('utf-8', 'replace')}")
        return found

    # -- agreement
    @property
    def partners(self) -> tuple[int, ...]:
        return tuple(sorted({*self.near, *self.twins} - {self.rank}))

    def _post(self, seq: int, record: bytes) -> None:
        for level in self._levels:
            level.post(seq, record)

    def _level(self, peer: int) -> tuple[Transport, int]:
        return (self.inner, self.near.index(peer)) if peer in self.near else (self._levels[1], self.twins.index(peer))

    def peek(self, peer: int, seq: int) -> bytes | None:
        if peer not in self.near and peer not in self.twins:
            return None
        level, number = self._level(peer)
        return level.peek(number, seq)

    def _record(self, peer: int, seq: int, deadline: float) -> bytes:
        if peer not in self.near and peer not in self.twins:
            raise ShapeError(f"rank {self.rank} hears of rank {peer} through others: its partners are {self.partners}")
        level, number = self._level(peer)
        return level.record(number, seq, deadline)

    def _barrier(self, deadline: float) -> None:
        for level in (self.inner, self._levels[1], self.inner):
            level.barrier(deadline)

    # -- faults
    def _hear(self, level: Transport, ranks: Sequence[int], cause: CommBackendError) -> None:
        """``level`` is about to fail, from whatever thread: say which ranks are meant, and fail the other level too."""
        if self._fault is not None:
            return
        if not getattr(cause, "explained", True):  # else it comes from another rank, which has said it
            names = ", ".join(map(str, ranks))
            cause.args = (f"{level.name} of ranks {names}, which it counts from 0: {cause}",)
            for name in ("rank", "waiting_for"):
                found = getattr(cause, name, ())
                if isinstance(found, int):
                    found = ranks[found] if 0 <= found < len(ranks) else found
                else:
                    found = tuple(ranks[r] for r in found if 0 <= r < len(ranks))
                if hasattr(cause, name):
                    setattr(cause, name, found)
        self.fail(cause)
        cause.explained = True  # type: ignore[attr-defined]

    def _release(self) -> None:
        self.spread_fault()

    def spread_fault(self) -> None:
        """Make both levels fail if this has, whatever thread it has met the fault in. Idempotent."""
        fault = self._fault
        if fault is not None:
            for level in self._levels:
                level.abort(str(fault), fault)

    # -- leaving
    def _close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            if self._fault is None:
                self._barrier(deadline)
        finally:
            self.spread_fault()  # the thread that has met it may not be so far
            try:
                self._levels[1].close(max(deadline - time.monotonic(), 0.001))
            finally:
                self.inner.close(max(deadline - time.monotonic(), 0.001))
