"""Rows, shards and chunks: who holds which rows of a gathered matrix, and how a shard is cut for travelling.

A gathered matrix has ``blocks * total`` rows laid out ``[blocks, total]``; rank r's shard is rows ``offset(r)`` to
``offset(r) + rows[r]`` of every block. A :class:`Piece` is a rectangle of that (block, row) grid: what one chunk
carries. A :class:`Layout` says where a shard's grid lies in a buffer, so that a piece becomes a ``Region``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

from ..plan import Problem, Region

__all__ = ["EMPTY", "Hosts", "Layout", "Piece", "Shards", "Turn", "cut", "parted", "regions", "runs"]

T = TypeVar("T")

#: Chunk borders of long shards are multiples of this, so that GEMM tiles do not straddle two chunks.
_TILE_ROWS = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``row`` to ``row + rows`` of each of ``blocks`` blocks from block ``block`` of a shard."""

    block: int
    blocks: int
    row: int
    rows: int

    def __bool__(self) -> bool:
        return self.blocks * self.rows > 0


#: What a zero-row shard sends: nothing, but its slot still rises.
EMPTY = Piece(0, 1, 0, 0)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a shard lies in a buffer: block b starts at row ``base + b * stride``; ``at`` as in ``Region``."""

    buf: str
    base: int
    stride: int
    at: int = -1

    def packs(self, piece: Piece) -> bool:
        """Return whether the rows of ``piece`` are consecutive rows of the buffer."""
        return piece.blocks == 1 or piece.rows == self.stride

    def on(self, rank: int) -> Layout:
        """Return the same place in ``rank``'s copy of the buffer."""
        return replace(self, at=rank)


@lru_cache(1024)
def cut(rows: int, blocks: int, chunks: int) -> tuple[Piece, ...]:
    """Cut a shard into at most ``chunks`` pieces: whole blocks where there are enough of them, else rows of all blocks.

    A function of its arguments alone, so that sender and receiver agree. A shard without rows is one empty piece.
    """
    if rows * blocks == 0:
        return (EMPTY,)
    if blocks > 1 and blocks >= chunks:
        step = -(-blocks // chunks)
        return tuple(Piece(b, min(step, blocks - b), 0, rows) for b in range(0, blocks, step))
    step = -(-rows // chunks)
    if step >= 2 * _TILE_ROWS:
        step = -(-step // _TILE_ROWS) * _TILE_ROWS
    return tuple(Piece(0, blocks, r, min(step, rows - r)) for r in range(0, rows, step))


def regions(piece: Piece, *layouts: Layout) -> tuple[Region, ...]:
    """Return the regions of ``piece`` in all layouts, of one shape: one block if its rows are consecutive in all."""
    if not piece:
        return tuple(Region(x.buf, 0, 0, at=x.at) for x in layouts)
    rows = [x.base + piece.block * x.stride + piece.row for x in layouts]
    if all(x.packs(piece) for x in layouts):
        count = piece.blocks * piece.rows
        return tuple(Region(x.buf, row, count, at=x.at) for x, row in zip(layouts, rows))
    return tuple(
        Region(x.buf, row, piece.rows, blocks=piece.blocks, block_stride=x.stride, at=x.at)
        for x, row in zip(layouts, rows)
    )


def runs(piece: Piece, *layouts: Layout) -> Iterator[Piece]:
    """Yield ``piece`` itself if its rows are consecutive in every layout, else one piece a block; nothing if empty."""
    if not piece:
        return
    if all(x.packs(piece) for x in layouts):
        yield piece
    else:
        for b in range(piece.blocks):
            yield Piece(piece.block + b, 1, piece.row, piece.rows)


def parted(items: Sequence[T], blocks: int) -> Iterator[Sequence[T]]:
    """Cut ``items``, in their order, into ``blocks`` parts of nearly one length, longer ones last; 0: one each."""
    count = min(blocks or len(items), len(items))
    for i in range(count):
        yield items[i * len(items) // count : (i + 1) * len(items) // count]


class Turn:
    """Ranks in turn: steps from rank to rank that look the same from every rank, so that no two serve one peer at once.

    Without domains step i leads i ranks further, round the group. With domains of ``domain`` consecutive ranks it leads
    ``i % domain`` ranks further within the domain and ``i // domain`` domains further, so that the own domain comes
    first.
    """

    def __init__(self, size: int, domain: int) -> None:
        self.size, self.domain = size, domain or size

    def add(self, rank: int, step: int) -> int:
        """Return the rank that ``step`` leads to from ``rank``."""
        d, size = self.domain, self.size
        return (rank // d * d + step // d * d) % size + (rank + step) % d

    def minus(self, rank: int, step: int) -> int:
        """Return the rank from which ``step`` leads to ``rank``."""
        d, size = self.domain, self.size
        return (rank // d * d - step // d * d) % size + (rank % d - step % d) % d


class Hosts:
    """Where ranks are, as ``rank`` sees it: hosts that hold equally many ranks, in any order.

    Attributes:
        count: Number of hosts. here: Number of the own one. others: The other ones, each rank's in another turn.
        local: Number of this rank among those of its host.
        ranks: Of every host its ranks, by their numbers there.
        targets, sources: The other ranks of the own host, in the order in which they are served, or expected.
    """

    def __init__(self, hosts: Sequence[int], rank: int) -> None:
        self.count, self.here = max(hosts) + 1, hosts[rank]
        self.ranks = tuple(tuple(r for r, at in enumerate(hosts) if at == h) for h in range(self.count))
        near = self.ranks[self.here]
        self.local = near.index(rank)
        self.others = tuple((self.here + i) % self.count for i in range(1, self.count))
        self.targets = tuple(near[(self.local + i) % len(near)] for i in range(1, len(near)))
        self.sources = tuple(near[(self.local - i) % len(near)] for i in range(1, len(near)))

    @property
    def twins(self) -> tuple[int, ...]:
        """Of every host the rank with this rank's number."""
        return tuple(ranks[self.local] for ranks in self.ranks)

    @staticmethod
    def uneven(hosts: Sequence[int]) -> str | None:
        """Return why ranks on ``hosts`` make no two levels, or None."""
        counts = [list(hosts).count(h) for h in sorted(set(hosts))]
        if len(counts) < 2:
            return "all ranks share one host"
        if counts != [counts[0]] * len(counts):
            return f"hosts have {', '.join(map(str, counts))} ranks: two levels need equally many on each"
        return None if counts[0] > 1 else "every host has one rank: there is nothing to share within it"


class Shards:
    """The shards of a problem, cut into ``chunks``."""

    def __init__(self, problem: Problem, chunks: int) -> None:
        self.rows, self.blocks, self.total = problem.rows, problem.blocks, problem.total
        self.offsets = (0, *accumulate(self.rows[:-1]))
        by_rows = {rows: cut(rows, self.blocks, chunks) for rows in set(self.rows)}
        self.pieces = tuple(by_rows[rows] for rows in self.rows)
        #: Chunks of the longest shard: collectives run in this many rounds.
        self.rounds = max(len(p) for p in self.pieces)

    @property
    def gathered_rows(self) -> int:
        """Rows of the gathered matrix."""
        return self.blocks * self.total

    @property
    def longest(self) -> int:
        """Rows (of all blocks) of the longest shard: what symmetric buffers are sized by."""
        return self.blocks * max(self.rows)

    def held(self, rank: int) -> int:
        """Rows (of all blocks) of ``rank``'s shard."""
        return self.blocks * self.rows[rank]

    def whole(self, rank: int) -> Piece:
        """All of ``rank``'s shard as one piece."""
        return cut(self.rows[rank], self.blocks, 1)[0]

    def piece(self, rank: int, chunk: int) -> Piece:
        """Chunk ``chunk`` of ``rank``'s shard, empty past its last one."""
        pieces = self.pieces[rank]
        return pieces[chunk] if chunk < len(pieces) else EMPTY

    def gathered(self, buf: str, rank: int) -> Layout:
        """Where ``rank``'s shard lies in a gathered matrix."""
        return Layout(buf, self.offsets[rank], self.total)

    def packed(self, buf: str, rank: int, base: int = 0) -> Layout:
        """Where ``rank``'s shard lies when it is stored by itself from row ``base``."""
        return Layout(buf, base, self.rows[rank])
