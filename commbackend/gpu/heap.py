"""Symmetric GPU memory: CUDA virtual memory whose handles travel as file descriptors (one host) or as fabric handles
(one NVLink domain), or CUDA IPC where virtual memory is missing.

Every change is made by all ranks in the same order and ends with a vote: when a driver call fails on one rank, every
rank undoes its part and raises the same error. Physical memory belongs to its mappings (handles are released as soon as
they are mapped), so what is unmapped is given back, and memory of a rank that died stays readable until then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..contract import SymBuffer
from ..errors import CollectiveMismatch, CommBackendError, HeapExhausted, Unavailable
from .driver import Driver, DriverError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FabricWire", "FdWire", "Heap", "IpcHeap", "Link", "MappedBuffer", "VmmHeap", "agree_on", "together"]

T = TypeVar("T")
_TEXT = 2000


class Link(Protocol):
    """The control plane as memory needs it: an all-gather of bytes that ends by a deadline, or when a rank is lost."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def exchange(self, payload: bytes, deadline: float) -> list[bytes]: ...


class FdLink(Link, Protocol):
    """A control plane that also carries file descriptors: ``host.link.HostLink``."""

    def exchange_fds(self, fds: Sequence[int], payload: bytes, deadline: float) -> list[tuple[bytes, list[int]]]: ...


def together(
    link: Link, what: str, action: Callable[[], T], deadline: float, payload: Callable[[T], bytes] = lambda _: b""
) -> tuple[T, list[bytes]]:
    """Run ``action`` on every rank; return its value and what ``payload`` made of all ranks' values. Collective.

    Raises:
        HeapExhausted, Unavailable: On every rank, if it failed on any, naming the ranks and their reasons.
    """
    value, mine = _try(action)
    said = payload(value) if mine is None else b""  # type: ignore[arg-type]
    votes = link.exchange(_ballot(mine) + said, deadline)
    _judge(what, votes, mine)
    return value, [v[1:] for v in votes]  # type: ignore[return-value]


def _try(action: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return action(), None
    except (CommBackendError, OSError) as e:
        return None, e


def _ballot(problem: BaseException | None) -> bytes:
    if problem is None:
        return b"+"
    kind = b"M" if isinstance(problem, HeapExhausted) else b"-"
    return kind + (str(problem) or type(problem).__name__).encode("utf-8", "replace")[:_TEXT]


def _judge(what: str, votes: list[bytes], mine: BaseException | None) -> None:
    bad = [(r, v) for r, v in enumerate(votes) if v[:1] != b"+"]
    if not bad:
        return
    text = f"{what}: " + "; ".join(f"rank {r}: {v[1:_TEXT].decode('utf-8', 'replace')}" for r, v in bad)
    kind = HeapExhausted if all(v[:1] == b"M" for _, v in bad) else Unavailable
    raise kind(text) from mine


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


# -- how handles travel ------------------------------------------------------------------------------------------------
class FdWire:
    """Handles of physical memory as file descriptors over Unix sockets: within one host."""

    fabric = False

    def __init__(self, link: FdLink) -> None:
        self._link = link

    def swap(self, own: list[Any], ballot: bytes, deadline: float, undo: ExitStack) -> tuple[list[bytes], list[Any]]:
        """Give ``own`` (one exported handle or none) to all ranks. Collective.

        Returns:
            All ranks' ballots, and what each has given (None: nothing); ``undo`` closes what was received and given.
        """
        fds = list(own)
        undo.callback(_close_all, fds)
        parcels = self._link.exchange_fds(fds, ballot, deadline)
        for rank, (_, received) in enumerate(parcels):
            if rank != self._link.rank:
                fds.extend(received)
        return [raw for raw, _ in parcels], [received[0] if received else None for _, received in parcels]


class FabricWire:
    """Handles of physical memory as 64 bytes that any host of the NVLink domain can open, if an IMEX daemon lets it."""

    fabric = True
    _NBYTES = 64

    def __init__(self, link: Link) -> None:
        self._link = link

    def swap(self, own: list[Any], ballot: bytes, deadline: float, undo: ExitStack) -> tuple[list[bytes], list[Any]]:
        """As ``FdWire.swap``; there is nothing to close."""
        given = bytes(own[0]) if own else b""
        found = self._link.exchange(len(given).to_bytes(1, "little") + given + ballot, deadline)
        ballots, handles = [], []
        for raw in found:
            nbytes = min(raw[0], self._NBYTES) if raw else 0
            ballots.append(raw[1 + nbytes :])
            handles.append(raw[1 : 1 + nbytes] or None)
        return ballots, handles


class _Owner(Protocol):
    def release_buffer(self, buffer: MappedBuffer) -> None: ...


class MappedBuffer(SymBuffer):
    """The same number of bytes at every rank, each mapped here.

    Attributes:
        bases: Address here of every rank's bytes. They do not change while the buffer lives, also when it grows.
        room: Bytes it can grow to without moving.
    """

    def __init__(self, driver: Driver, rank: int, bases: list[int], nbytes: int, room: int) -> None:
        self.bases, self.nbytes, self.room = bases, nbytes, room
        self.multicast_base = 0
        self.owner: _Owner | None = None
        self.closed = False
        self._driver, self._rank = driver, rank
        self._views: dict[int, Tensor] = {}

    @property
    def local(self) -> Tensor:
        return self._at(self._rank)

    def view(self, rank: int) -> Tensor | None:
        return self._at(rank)

    def _at(self, rank: int) -> Tensor:
        found = self._views.get(rank)
        if found is None or found.numel() != self.nbytes:
            found = self._views[rank] = self._driver.tensor(self.bases[rank], self.nbytes)
        return found

    @property
    def multicast(self) -> Tensor | None:
        return self._driver.tensor(self.multicast_base, self.nbytes) if self.multicast_base else None

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self.owner is not None:
                self.owner.release_buffer(self)


class Heap(Protocol):
    """Where buffers come from. ``alloc`` and ``grow`` are collective. ``free`` and ``close`` are for a time when no
    rank uses the memory any more; they call ``between`` where every rank must have let go before the owner frees.
    """

    multicast: bool
    multicast_reason: str

    def alloc(self, nbytes: int, deadline: float) -> MappedBuffer: ...
    def grow(self, buffer: MappedBuffer, nbytes: int, deadline: float) -> None: ...
    def free(self, buffer: MappedBuffer, between: Callable[[], None]) -> None: ...
    def close(self, between: Callable[[], None]) -> None: ...


def _nothing() -> None:
    """Mapped memory lives as long as anybody maps it: nobody waits."""


class _Mapping:
    """One stretch of addresses with memory behind it."""

    __slots__ = ("handle", "nbytes", "offset", "team")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset, self.nbytes = offset, nbytes
        self.handle: Any = None  # own physical memory, kept only while a multicast object needs it
        self.team: Any = None  # the multicast object


class VmmHeap:
    """Addresses are reserved once, for every rank; memory is mapped behind them as buffers need it and never moves.

    Collective to make.

    Args:
        wire: How handles travel.
        va_nbytes: Addresses reserved for each rank. They cost nothing; all buffers together must fit.
        multicast: Try to give every buffer a multicast address. What prevents it is in ``multicast_reason``.
    """

    def __init__(
        self, driver: Driver, link: Link, wire: FdWire | FabricWire, va_nbytes: int, multicast: bool, deadline: float
    ) -> None:
        self._driver, self._link, self._rank, self._size = driver, link, link.rank, link.size
        self._wire, self._fabric = wire, wire.fabric
        self.multicast, self.multicast_reason = multicast, "" if multicast else "not asked for"
        self._bases: list[int] = []
        self._team_base = 0
        self._buffers: dict[MappedBuffer, list[_Mapping]] = {}
        # The coarsest unit of all ranks, so that offsets are the same everywhere.
        self._grain = self._va = 1
        self._grain = self._coarsest("memory granularity", lambda: driver.granularity(self._fabric), deadline)
        try:
            if multicast:
                self._grain = self._coarsest("multicast", lambda: self._multicast_grain(), deadline)
        except (Unavailable, HeapExhausted) as e:
            self.drop_multicast(str(e))
        self._va = self._up(va_nbytes)
        try:
            together(link, f"reserving {self._va} addresses for each rank", self._reserve, deadline)
        except CommBackendError:
            self.close()
            raise

    def _coarsest(self, what: str, ask: Callable[[], int], deadline: float) -> int:
        votes = together(self._link, what, ask, deadline, payload=lambda grain: grain.to_bytes(8, "little"))[1]
        return max(int.from_bytes(v, "little") for v in votes)

    def _multicast_grain(self) -> int:
        return max(self._grain, self._driver.multicast_granularity(self._size, self._grain, self._fabric))

    def _reserve(self) -> None:
        for _ in range(self._size):
            self._bases.append(self._driver.reserve(self._va))
        if self.multicast:
            self._team_base = self._driver.reserve(self._va)

    def _up(self, nbytes: int) -> int:
        return -(-nbytes // self._grain) * self._grain

    # -- buffers ----------------------------------------------------------------------------------------------------
    def alloc(self, nbytes: int, deadline: float) -> MappedBuffer:
        need = self._up(nbytes)
        agree_on(self._link, nbytes, deadline)
        start = self._place(need, nbytes)
        mapping = self._map(start, need, deadline)
        bases = [base + start for base in self._bases]
        buffer = MappedBuffer(self._driver, self._rank, bases, nbytes, self._va - start)
        self._buffers[buffer] = [mapping]
        self._rooms()
        self._join(buffer, mapping, deadline)
        return buffer

    def grow(self, buffer: MappedBuffer, nbytes: int, deadline: float) -> None:
        """Map more memory behind ``buffer``'s addresses, so that it has ``nbytes`` bytes; the new ones are zero."""
        agree_on(self._link, nbytes, deadline)
        mappings = self._buffers[buffer]
        have = sum(m.nbytes for m in mappings)
        if nbytes > have:
            if self._up(nbytes) > buffer.room:
                raise HeapExhausted(f"a buffer of {buffer.nbytes} bytes has room for {buffer.room}, not {nbytes}")
            mapping = self._map(mappings[0].offset + have, self._up(nbytes) - have, deadline)
            mappings.append(mapping)
            self._join(buffer, mapping, deadline)
        buffer.nbytes = max(buffer.nbytes, nbytes)

    def _place(self, need: int, nbytes: int) -> int:
        """Where a new buffer begins: in the middle of the largest gap, so that it and the one before can both grow."""
        begin, end, last = 0, 0, 0
        for start, stop in [*self._extents(), (self._va, self._va)]:
            if start - last > end - begin:
                begin, end = last, start
            last = stop
        if end - begin < need:
            raise HeapExhausted(
                f"{nbytes} bytes needed, {end - begin} bytes of reserved addresses in one piece are available"
                f" (of {self._va}; option va_nbytes)"
            )
        return begin if begin == 0 else begin + min((end - begin) // 2 // self._grain * self._grain, end - begin - need)

    def _extents(self) -> list[tuple[int, int]]:
        return sorted((m[0].offset, m[-1].offset + m[-1].nbytes) for m in self._buffers.values())

    def _rooms(self) -> None:
        starts = [*sorted(m[0].offset for m in self._buffers.values()), self._va]
        for buffer, mappings in self._buffers.items():
            start = mappings[0].offset
            buffer.room = min(s for s in starts if s > start) - start

    def free(self, buffer: MappedBuffer, between: Callable[[], None] = _nothing) -> None:
        mappings = self._buffers.pop(buffer, [])
        self._rooms()
        with ExitStack() as undo:  # one call that fails does not keep the others from being made
            for mapping in mappings:
                for base in self._bases:
                    undo.callback(self._driver.unmap, base + mapping.offset, mapping.nbytes)
                undo.callback(self._leave, mapping)

    def close(self, between: Callable[[], None] = _nothing) -> None:
        with ExitStack() as undo:
            for base in (*self._bases, self._team_base):
                if base:
                    undo.callback(self._driver.free_reserved, base, self._va)
            for buffer in list(self._buffers):
                undo.callback(self.free, buffer)
        self._bases, self._team_base = [], 0

    # -- mapping ----------------------------------------------------------------------------------------------------
    def _map(self, offset: int, nbytes: int, deadline: float) -> _Mapping:
        """Create ``nbytes`` here, pass them to every rank and map everybody's at ``offset``. Collective."""
        what = f"mapping {nbytes} bytes of every rank"
        mapping = _Mapping(offset, nbytes)
        own: list[Any] = []
        with ExitStack() as undo:
            with ExitStack() as release:
                handle, problem = _try(lambda: self._create(nbytes, own, undo if self.multicast else release))
                ballots, given = self._wire.swap(own, _ballot(problem), deadline, release)
                _judge(what, ballots, problem)
                together(self._link, what, lambda: self._attach(mapping, handle, given, undo, release), deadline)
            mapping.handle = handle if self.multicast else None
            undo.pop_all()
        return mapping

    def _create(self, nbytes: int, own: list[Any], release: ExitStack) -> Any:
        handle = self._driver.create(nbytes, self._fabric)
        release.callback(self._driver.release, handle)
        own.append(self._driver.export(handle, self._fabric))
        return handle

    def _attach(self, mapping: _Mapping, own: Any, given: list[Any], undo: ExitStack, release: ExitStack) -> None:
        driver, nbytes = self._driver, mapping.nbytes
        for rank, base in enumerate(self._bases):
            address, handle = base + mapping.offset, own
            if rank != self._rank:
                try:
                    handle = driver.import_(given[rank], self._fabric)
                except CommBackendError as e:
                    raise Unavailable(f"memory of rank {rank} cannot be imported: {e}") from e
                release.callback(driver.release, handle)
            try:
                driver.map(address, nbytes, handle)
                undo.callback(driver.unmap, address, nbytes)
                driver.allow(address, nbytes)
            except CommBackendError as e:
                raise Unavailable(f"memory of rank {rank} cannot be mapped: {e}") from e

    # -- multicast --------------------------------------------------------------------------------------------------
    def _join(self, buffer: MappedBuffer, mapping: _Mapping, deadline: float) -> None:
        """Give ``mapping`` a multicast address; where that fails on any rank, all give multicast up. Collective."""
        if not self.multicast:
            return
        try:
            mapping.team = self._team(mapping, deadline)
            buffer.multicast_base = self._team_base + self._buffers[buffer][0].offset
        except (Unavailable, HeapExhausted) as e:
            self.drop_multicast(str(e))

    def drop_multicast(self, reason: str) -> None:
        """Live without multicast from now on. All ranks call it, for the same cause."""
        self.multicast, self.multicast_reason = False, reason
        for buffer, mappings in self._buffers.items():
            buffer.multicast_base = 0
            for mapping in mappings:
                self._leave(mapping)

    def _team(self, mapping: _Mapping, deadline: float) -> Any:
        driver, nbytes = self._driver, mapping.nbytes
        address, what = self._team_base + mapping.offset, f"multicast over {nbytes} bytes of every rank"
        own: list[Any] = []
        with ExitStack() as undo:
            with ExitStack() as release:
                founded, problem = _try(lambda: self._found(nbytes, own, undo) if self._rank == 0 else None)
                ballots, given = self._wire.swap(own, _ballot(problem), deadline, release)
                _judge(what, ballots, problem)

                def join() -> Any:
                    handle = founded
                    if self._rank:
                        handle = driver.import_(given[0], self._fabric)
                        undo.callback(driver.release, handle)
                    driver.multicast_join(handle)
                    return handle

                # Binding and mapping block until every device has joined: the vote comes first.
                team, _ = together(self._link, what, join, deadline)

            def bind() -> None:
                driver.multicast_bind(team, mapping.handle, nbytes)
                undo.callback(driver.multicast_unbind, team, nbytes)
                driver.map(address, nbytes, team)
                undo.callback(driver.unmap, address, nbytes)
                driver.allow(address, nbytes)

            together(self._link, what, bind, deadline)
            undo.pop_all()
        return team

    def _found(self, nbytes: int, own: list[Any], undo: ExitStack) -> Any:
        team = self._driver.multicast_create(self._size, nbytes, self._fabric)
        undo.callback(self._driver.release, team)
        own.append(self._driver.export(team, self._fabric))
        return team

    def _leave(self, mapping: _Mapping) -> None:
        driver = self._driver
        if mapping.team is not None:
            driver.unmap(self._team_base + mapping.offset, mapping.nbytes)
            driver.multicast_unbind(mapping.team, mapping.nbytes)
            driver.release(mapping.team)
            mapping.team = None
        if mapping.handle is not None:
            driver.release(mapping.handle)
            mapping.handle = None


class IpcHeap:
    """Buffers from cuMemAlloc, opened by the peers through CUDA IPC. They do not grow: ``room`` is their size."""

    multicast: bool = False
    multicast_reason: str = "memory shared by CUDA IPC has no multicast address"

    def __init__(self, driver: Driver, link: Link) -> None:
        self._driver, self._link, self._rank = driver, link, link.rank
        self._buffers: set[MappedBuffer] = set()

    def alloc(self, nbytes: int, deadline: float) -> MappedBuffer:
        driver, what = self._driver, f"sharing {nbytes} bytes of every rank by CUDA IPC"
        agree_on(self._link, nbytes, deadline)
        bases = [0] * self._link.size
        with ExitStack() as undo:

            def create() -> bytes:
                bases[self._rank] = driver.alloc(nbytes)
                undo.callback(driver.free, bases[self._rank])
                return driver.ipc_handle(bases[self._rank])

            handle, problem = _try(create)
            votes = self._link.exchange(_ballot(problem) + (handle or b""), deadline)
            _judge(what, votes, problem)

            def attach() -> None:
                for rank, vote in enumerate(votes):
                    if rank != self._rank:
                        try:
                            bases[rank] = driver.ipc_open(vote[1:])
                        except DriverError as e:
                            raise Unavailable(f"memory of rank {rank} cannot be opened: {e}") from e
                        undo.callback(driver.ipc_close, bases[rank])

            together(self._link, what, attach, deadline)
            undo.pop_all()
        buffer = MappedBuffer(driver, self._rank, bases, nbytes, nbytes)
        self._buffers.add(buffer)
        return buffer

    def grow(self, buffer: MappedBuffer, nbytes: int, deadline: float) -> None:
        agree_on(self._link, nbytes, deadline)
        if nbytes > buffer.room:
            raise HeapExhausted(f"a buffer shared by CUDA IPC keeps its {buffer.room} bytes; {nbytes} need a new one")

    def free(self, buffer: MappedBuffer, between: Callable[[], None]) -> None:
        if buffer in self._buffers:
            self._buffers.remove(buffer)
            self._let_go(buffer)
            between()
            self._driver.free(buffer.bases[self._rank])

    def close(self, between: Callable[[], None]) -> None:
        buffers = list(self._buffers)
        self._buffers.clear()
        for buffer in buffers:
            self._let_go(buffer)
        between()
        for buffer in buffers:
            self._driver.free(buffer.bases[self._rank])

    def _let_go(self, buffer: MappedBuffer) -> None:
        with ExitStack() as undo:
            for rank, base in enumerate(buffer.bases):
                if rank != self._rank:
                    undo.callback(self._driver.ipc_close, base)


def agree_on(link: Link, number: int, deadline: float, what: str = "bytes") -> None:
    """Raise CollectiveMismatch on every rank unless all pass the same number. Collective."""
    found = [int.from_bytes(raw, "little") for raw in link.exchange(number.to_bytes(8, "little"), deadline)]
    if len(set(found)) > 1:
        raise CollectiveMismatch(f"ranks ask for different numbers of {what}: {found}, in their order")
