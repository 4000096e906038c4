"""Building blocks of all-reduces: a reduction to the owners of rows whose sums then travel to all; or one shot."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..plan import data_slot
from . import reduce_side, two_level
from .draft import Draft
from .reduce_side import Between, Partial, nothing
from .shards import Layout, Piece, regions

__all__ = ["BUILDERS"]


def _one_shot(d: Draft, p: Partial, out: str, between: Between = nothing) -> None:
    reduce_side.one_shot(d, p, Layout(out, 0, 1), between)


def _one_shot_kernel(d: Draft, p: Partial, out: str, between: Between = nothing) -> None:
    reduce_side.one_shot_kernel(d, p, Layout(out, 0, 1), between)


def _one_shot_pull(d: Draft, p: Partial, out: str, between: Between = nothing) -> None:
    reduce_side.one_shot_pull(d, p, Layout(out, 0, 1), between)


def _two_shot(
    d: Draft, p: Partial, out: str, between: Between = nothing, reduce: Callable[..., None] = reduce_side.push
) -> None:
    """Partials are put to their owners, sums to all."""
    me, shards = d.rank, d.shards
    heap = d.buffer("sums.heap", "heap", shards.total, p.cols)
    mine = shards.gathered(heap if d.caps.source != "any" else out, me)

    def publish(chunk: int, piece: Piece, step: int | None) -> None:
        for i, peer in enumerate(d.targets):
            there = shards.gathered(heap, me).on(peer)
            d.put(d.copy_lane(i), mine, there, piece, data_slot(chunk, 1), (step,))

    reduce(d, p, mine, between, publish)
    if mine.buf != out:
        d.move(0, mine, shards.gathered(out, me), shards.whole(me))
    _collect(d, out, {q: shards.gathered(heap, q) for q in d.sources})


def _two_shot_reading(reduce: Callable[..., None]) -> Callable[..., None]:
    """Partials travel by ``reduce``; sums stay in their owner's heap and are read there."""

    def build(d: Draft, p: Partial, out: str, between: Between = nothing) -> None:
        me, shards = d.rank, d.shards
        heap = d.buffer("sums.heap", "heap", shards.longest, p.cols)
        mine = shards.packed(heap, me)

        def publish(chunk: int, piece: Piece, step: int | None) -> None:
            for peer in d.targets:
                d.signal(0, peer, data_slot(chunk, 1))

        reduce(d, p, mine, between, publish)
        d.move(0, mine, shards.gathered(out, me), shards.whole(me))
        _collect(d, out, {q: shards.packed(heap, q).on(q) for q in d.sources})

    return build


def _collect(d: Draft, out: str, sums: Mapping[int, Layout]) -> None:
    """Copy peers' sums to the output as they come."""
    for chunk in range(d.shards.rounds):
        for peer in d.sources:
            if chunk < len(d.shards.pieces[peer]):
                piece = d.shards.piece(peer, chunk)
                d.wait(0, peer, data_slot(chunk, 1), piece, sums[peer])
                d.move(0, sums[peer], d.shards.gathered(out, peer), piece)


def _collective(
    d: Draft, p: Partial, out: str, between: Between = nothing, reduce: Callable[..., None] = reduce_side.collective
) -> None:
    """The transport's all-to-all, our own sum, the transport's all-gather; chunk by chunk."""
    me, shards = d.rank, d.shards
    mine = shards.packed(d.buffer("sums.scratch", "scratch", shards.held(me), p.cols), me)

    def publish(chunk: int, piece: Piece, step: int | None) -> None:
        dsts = [regions(shards.piece(r, chunk), shards.gathered(out, r))[0] for r in range(d.size)]
        d.collective("all_gather", regions(piece, mine), dsts, after=(step,))

    reduce(d, p, mine, between, publish)


def _sequence(d: Draft, p: Partial, out: str, between: Between = nothing) -> None:
    """One product of all rows, then the two shots with whatever role is there."""
    if d.caps.one_sided:
        _two_shot(d, p, out, between, reduce_side.sequence)
    else:
        _collective(d, p, out, between, reduce_side.sequence)


def _or_alone(build: Callable[..., None]) -> Callable[..., None]:
    return lambda d, *args: (build if d.size > 1 else reduce_side.alone)(d, *args)


#: Name -> builder(draft, partial, output, between).
BUILDERS: dict[str, Callable[..., None]] = {
    "one_shot": _or_alone(_one_shot),
    "one_shot_kernel": _or_alone(_one_shot_kernel),
    "one_shot_pull": _or_alone(_one_shot_pull),
    "two_shot": _or_alone(_two_shot),
    "two_shot_direct": _or_alone(_two_shot_reading(reduce_side.direct)),
    "two_shot_pull": _or_alone(_two_shot_reading(reduce_side.pull)),
    "collective": _or_alone(_collective),
    "sequence": _or_alone(_sequence),
    "two_level": _or_alone(two_level.all_reduce),
}
