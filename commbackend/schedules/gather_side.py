"""Building blocks of all gathers: every rank's shard travels to every rank, products start as chunks arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..plan import Segment, data_slot
from .draft import Draft, merged
from .shards import Layout, Piece, parted, regions

__all__ = [
    "Gather",
    "Product",
    "await_shards",
    "collective",
    "collective_round",
    "move_shards",
    "pull",
    "push",
    "sequence",
    "store_own",
]


@dataclass(frozen=True, slots=True)
class Product:
    """out = gathered rows @ weight.T (+ bias)."""

    weight: str
    out: str
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class Gather:
    """What becomes of the gathered rows.

    Attributes:
        cols: Columns of the shard ``x``.
        products: Products of the gathered rows.
        out: The output that receives the gathered rows, or None.
        wgrad: (y, dw) for dw = gathered.T @ y, or None.
    """

    cols: int
    products: tuple[Product, ...] = ()
    out: str | None = None
    wgrad: tuple[str, str] | None = None


def _arrivals(d: Draft, phase: int = 0) -> Iterator[tuple[int, Piece, int]]:
    """Peers' chunks in the order in which they are expected, as (peer, piece, slot)."""
    for chunk in range(d.shards.rounds):
        for peer in d.sources:
            if chunk < len(d.shards.pieces[peer]):
                yield peer, d.shards.piece(peer, chunk), data_slot(chunk, phase)


def move_shards(d: Draft, heap: str, phase: int = 0) -> int | None:
    """Put the own shard ``x`` into every peer's gathered matrix ``heap``, every peer's first chunk first.

    Returns the step that stored the own shard in the own ``heap``, or None where the puts read ``x`` itself.
    """
    me, shards = d.rank, d.shards
    source, stored = shards.packed("x", me), None
    credit = d.credits(d.copy_lane())
    if d.caps.source != "any":
        stored = store_own(d, heap)
        source = shards.gathered(heap, me)
    for chunk, piece in enumerate(shards.pieces[me]):
        for i, peer in enumerate(d.targets):
            target = shards.gathered(heap, me).on(peer)
            d.put(d.copy_lane(i), source, target, piece, data_slot(chunk, phase), (credit, stored))
    return stored


def store_own(d: Draft, heap: str) -> int | None:
    """Copy the own shard into the own gathered matrix."""
    lane, me = d.copy_lane(), d.rank
    packed, gathered = d.shards.packed("x", me), d.shards.gathered(heap, me)
    return d.move(lane, packed, gathered, d.shards.whole(me), (d.credits(lane),))


def await_shards(d: Draft, heap: str, phase: int = 0) -> None:
    """Hold lane 0 until all peers' shards have arrived in the gathered matrix ``heap``."""
    for peer, piece, slot in _arrivals(d, phase):
        d.wait(0, peer, slot, piece, d.shards.gathered(heap, peer))


def push(d: Draft, g: Gather) -> None:
    """Own chunks are put to each peer on the copy lanes; lane 0 multiplies own rows, then chunks as they come."""
    shards = d.shards
    heap = d.buffer("gathered.heap", "heap", shards.gathered_rows, g.cols)
    stored = move_shards(d, heap)
    if g.wgrad and stored is None:
        stored = store_own(d, heap)
    _consume(d, g, {p: shards.gathered(heap, p) for p in d.sources})
    if g.wgrad:
        y, dw = g.wgrad
        d.weight_product(heap, y, dw, (stored,))


def pull(d: Draft, g: Gather) -> None:
    """Each rank copies its shard once into its own heap; the products and copies of its peers read it there."""
    me, shards = d.rank, d.shards
    heap = d.buffer("shard.heap", "heap", shards.longest, g.cols)
    lane = d.copy_lane()
    credit = d.credits(lane)
    for chunk, piece in enumerate(shards.pieces[me]):
        if d.targets:
            d.move(lane, shards.packed("x", me), shards.packed(heap, me), piece, (credit,))
        for peer in d.targets:
            d.signal(lane, peer, data_slot(chunk))
    whole = g.out
    if g.wgrad and whole is None:
        whole = d.buffer("gathered.scratch", "scratch", shards.gathered_rows, g.cols)
    copies = _consume(d, g, {p: shards.packed(heap, p).on(p) for p in d.sources}, whole)
    if g.wgrad and whole is not None:
        y, dw = g.wgrad
        d.weight_product(whole, y, dw, copies)


def _consume(d: Draft, g: Gather, arrived: dict[int, Layout], whole: str | None = None) -> list[int | None]:
    """Multiply and copy out own rows, then each chunk of ``arrived`` (peer -> where its shard can be read).

    ``whole`` names a buffer that receives all rows; it defaults to the output for them. Returns the copies' steps.
    """
    whole = whole or g.out
    me, shards = d.rank, d.shards
    live = [p for p in g.products if d.cols(p.out)]
    own, mine = shards.packed("x", me), shards.whole(me)
    if not d.knobs.polls:
        for p in live:
            d.gemm(d.rows_product(mine, own, p.weight, shards.gathered(p.out, me), bias=p.bias))
    copies: list[int | None] = []

    def copy(i: int, rank: int, src: Layout, piece: Piece, ready: int | None = None) -> None:
        # Where there is nothing to multiply the caller's lane copies; else it must not be held up by copies.
        lane = d.copy_lane(i) if g.products else 0
        copies.append(d.move(lane, src, shards.gathered(whole, rank), piece, (ready,)) if whole else None)

    copy(0, me, own, mine)
    if d.knobs.polls:
        _launch_polling(d, live, arrived)
        for i, (peer, piece, slot) in enumerate(_arrivals(d)):
            if whole or not (piece and live):
                ready = d.wait(d.copy_lane(i) if whole else 0, peer, slot, piece, arrived[peer])
                copy(i, peer, arrived[peer], piece, ready)
        return copies
    for part in parted(list(enumerate(_arrivals(d))), d.knobs.blocks if g.products else 0):
        waits = [d.wait(0, peer, slot, piece, arrived[peer]) for _, (peer, piece, slot) in part]
        for p in live:
            segments: list[Segment] = []
            for _, (peer, piece, _) in part:
                out = shards.gathered(p.out, peer)
                segments += d.rows_product(piece, arrived[peer], p.weight, out, bias=p.bias)
            d.gemm(merged(segments))
        for ready, (i, (peer, piece, _)) in zip(waits, part):
            copy(i, peer, arrived[peer], piece, ready)
    return copies


def _launch_polling(d: Draft, live: list[Product], arrived: dict[int, Layout]) -> None:
    """One launch a product: own rows first, then peers' chunks, each polling its slot."""
    me, shards = d.rank, d.shards
    for p in live:
        segments: list[Segment] = []
        segments += d.rows_product(
            shards.whole(me), shards.packed("x", me), p.weight, shards.gathered(p.out, me), bias=p.bias
        )
        for peer, piece, slot in _arrivals(d):
            out = shards.gathered(p.out, peer)
            segments += d.rows_product(piece, arrived[peer], p.weight, out, bias=p.bias, ready=((peer, slot),))
        d.gemm(segments)


def collective(d: Draft, g: Gather) -> None:
    """The transport's all-gather, chunk by chunk on the first copy lane; lane 0 multiplies what is there."""
    me, shards = d.rank, d.shards
    whole = g.out or d.buffer("gathered.scratch", "scratch", shards.gathered_rows, g.cols)
    polled = d.knobs.polls and any(d.cols(p.out) for p in g.products)
    rounds = [collective_round(d, whole, chunk, polled=polled) for chunk in range(shards.rounds)]
    own, mine = shards.packed("x", me), shards.whole(me)
    if d.knobs.polls:
        for p in g.products:
            segments = d.rows_product(mine, own, p.weight, shards.gathered(p.out, me), bias=p.bias)
            for chunk in range(shards.rounds):
                segments += _round_product(d, p, whole, chunk, ((me, data_slot(chunk)),))
            d.gemm(segments)
    else:
        for p in g.products:
            d.gemm(d.rows_product(mine, own, p.weight, shards.gathered(p.out, me), bias=p.bias))
        for part in parted(list(enumerate(rounds)), d.knobs.blocks):
            for p in g.products:
                segments = [s for chunk, _ in part for s in _round_product(d, p, whole, chunk)]
                d.gemm(merged(segments), after=[arrived for _, arrived in part])
    if g.wgrad:
        y, dw = g.wgrad
        d.weight_product(whole, y, dw, rounds)


def collective_round(d: Draft, whole: str, chunk: int, *, polled: bool = False) -> int:
    """All-gather chunk ``chunk`` of every shard into the gathered matrix ``whole``; ``polled``: then raise its slot."""
    shards = d.shards
    slots = (data_slot(chunk),) if polled and any(shards.piece(p, chunk) for p in d.sources) else ()
    (src,) = regions(shards.piece(d.rank, chunk), shards.packed("x", d.rank))
    dsts = [regions(shards.piece(p, chunk), shards.gathered(whole, p))[0] for p in range(d.size)]
    return d.collective("all_gather", [src], dsts, slots)


def _round_product(
    d: Draft, p: Product, whole: str, chunk: int, ready: tuple[tuple[int, int], ...] = ()
) -> list[Segment]:
    segments: list[Segment] = []
    for peer in d.sources:
        src, out = d.shards.gathered(whole, peer), d.shards.gathered(p.out, peer)
        segments += d.rows_product(d.shards.piece(peer, chunk), src, p.weight, out, bias=p.bias, ready=ready)
    return segments


def sequence(d: Draft, g: Gather) -> None:
    """Gather everything, then one product: nothing overlaps. For calls so small that a second launch costs more."""
    shards = d.shards
    done: list[int | None] = []
    everything = Piece(0, 1, 0, shards.gathered_rows)
    if d.size == 1:
        whole = "x"
        if g.out:
            d.move(0, Layout(whole, 0, 1), Layout(g.out, 0, 1), everything)
    elif d.caps.one_sided:
        whole = d.buffer("gathered.heap", "heap", shards.gathered_rows, g.cols)
        stored = move_shards(d, whole)
        if stored is None:
            stored = store_own(d, whole)
        done = [stored]
        await_shards(d, whole)
        if g.out:
            d.move(0, Layout(whole, 0, 1), Layout(g.out, 0, 1), everything, done)
    else:
        whole = g.out or d.buffer("gathered.scratch", "scratch", shards.gathered_rows, g.cols)
        done = [collective_round(d, whole, chunk) for chunk in range(shards.rounds)]
    for p in g.products:
        d.gemm(d.rows_product(everything, Layout(whole, 0, 1), p.weight, Layout(p.out, 0, 1), bias=p.bias), after=done)
    if g.wgrad:
        y, dw = g.wgrad
        d.weight_product(whole, y, dw, done)
