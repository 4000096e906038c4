"""Building blocks of all reductions: partial sums travel to the rank that owns their rows, which adds them up.

A sum is always over ranks 0, 1, ... in this order with the own partial at its place, so that its bits depend neither
on arrival nor on the schedule; a residual follows, then the bias. Where the product's own launch adds (``Knobs.folds``)
the order is another fixed one: the own partial, not yet rounded, then the bias, then the peers' in rank order, then a
residual. Chunks are made peers' first, in rotated order, own rows last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..plan import DATA, Problem, Region, Segment, data_slot
from .draft import Draft, merged
from .shards import EMPTY, Layout, Piece, Shards, cut, parted, regions

__all__ = [
    "Between",
    "Partial",
    "Reduced",
    "alone",
    "collective",
    "direct",
    "local_words",
    "nothing",
    "one_shot",
    "one_shot_kernel",
    "one_shot_pull",
    "pull",
    "push",
    "sequence",
]

#: Called when all partials are under way, before the first wait for those of peers: work that hides their journey.
Between = Callable[[], None]
#: Called with (chunk, piece, step of its sum or None) as each chunk of own rows is reduced.
Reduced = Callable[[int, Piece, "int | None"], None]


@dataclass(frozen=True, slots=True)
class Partial:
    """What every rank sums over ranks: rows of ``x`` itself (no terms), or of the sum of products a @ b.

    Attributes:
        cols: Columns of the result.
        terms: (a, b) buffers; a has the gathered rows.
        form: "nt" (b is (cols, K)) or "nn" (b is (K, cols)).
        bias: Added once, with the sum over ranks.
        residual: Rows like the result's, added once before the bias.
    """

    cols: int
    terms: tuple[tuple[str, str], ...] = ()
    form: str = "nt"
    bias: str | None = None
    residual: str | None = None


def nothing() -> None:
    return None


def ignore(chunk: int, piece: Piece, step: int | None) -> None:
    return None


def _make(
    d: Draft,
    p: Partial,
    piece: Piece,
    rows: Callable[[str], Layout],
    out: Layout,
    after: Sequence[int | None] = (),
    lane: int = 0,
    bias: str | None = None,
    residual: str | None = None,
) -> int | None:
    """Store ``piece`` of the partial in ``out``; ``rows`` says where the same rows of an operand lie."""
    if not p.terms:
        return d.move(lane, rows("x"), out, piece, after)
    sums, final = out, len(p.terms) - 1
    if final and (out.at >= 0 or d.space(out.buf) == "output"):
        # Terms add up in private memory; only the last one writes to a peer or to the caller.
        sums = Layout(d.buffer("terms.scratch", "scratch", d.shards.longest, p.cols), 0, out.stride)
    last: int | None = None
    for i, (a, b) in enumerate(p.terms):
        target, row = (out, bias) if i == final else (sums, None)
        added = [sums] if i else []
        if residual and i == final:
            added.append(rows(residual))
        segments = d.rows_product(piece, rows(a), b, target, bias=row, addends=added)
        last = d.gemm(segments, p.form, after)
    return last


def alone(d: Draft, p: Partial, out: str, between: Between = nothing) -> None:
    """One rank's reduction: its partial, bias and all, is the result."""
    everything = Piece(0, 1, 0, d.shards.gathered_rows)
    _make(d, p, everything, _rows_of, _rows_of(out), bias=p.bias, residual=p.residual)
    between()


def _gathered(d: Draft, rank: int) -> Callable[[str], Layout]:
    return lambda buf: d.shards.gathered(buf, rank)


def _part(d: Draft, buf: str, owner: int, sender: int) -> Layout:
    """Where ``sender``'s partial of ``owner``'s rows lies among the size - 1 received ones."""
    return d.shards.packed(buf, owner, d.shards.longest * (sender - (sender > owner)))


def _outgoing(d: Draft) -> Iterator[tuple[int, int, int, Piece]]:
    """Peers' chunks in the order in which they are made, as (i, peer, chunk, piece)."""
    for chunk in range(d.shards.rounds):
        for i, peer in enumerate(d.targets):
            if chunk < len(d.shards.pieces[peer]):
                yield i, peer, chunk, d.shards.piece(peer, chunk)


def _own(d: Draft, p: Partial) -> Layout:
    """Make the partial of the own rows and return where it lies."""
    me = d.rank
    if not p.terms:
        return d.shards.gathered("x", me)
    own = d.shards.packed(d.buffer("own.scratch", "scratch", d.shards.held(me), p.cols), me)
    _make(d, p, d.shards.whole(me), _gathered(d, me), own)
    return own


def _sum(
    d: Draft,
    p: Partial,
    own: Layout,
    parts: dict[int, Layout],
    dst: Layout,
    reduced: Reduced,
    rounds: Sequence[int] | None = None,
) -> None:
    """Sum each chunk of ``parts`` (sender -> place) with ``own`` into ``dst`` when it is there.

    ``rounds`` are the collectives that bring the chunks; None: a slot of each peer tells.
    """
    for chunk in range(d.shards.rounds if rounds else len(d.shards.pieces[d.rank])):
        piece = d.shards.piece(d.rank, chunk)
        for peer in d.sources if rounds is None else ():
            d.wait(0, peer, data_slot(chunk), piece, parts[peer])
        srcs = [parts.get(r, own) for r in range(d.size)]
        if p.residual:
            srcs.append(d.shards.gathered(p.residual, d.rank))
        after = (rounds[chunk],) if rounds else ()
        reduced(chunk, piece, d.reduce(piece, srcs, dst, p.bias, after))


def _parts_heap(d: Draft, p: Partial) -> tuple[str, dict[int, Layout]]:
    """The buffer of received partials, and where each sender's own-row partials lie in it."""
    heap = d.buffer("parts.heap", "heap", (d.size - 1) * d.shards.longest, p.cols)
    return heap, {q: _part(d, heap, d.rank, q) for q in d.sources}


def push(d: Draft, p: Partial, dst: Layout, between: Between = nothing, reduced: Reduced = ignore) -> None:
    """Each chunk is made in private memory, then put to its owner on a copy lane."""
    if d.knobs.polls:
        _push_polling(d, p, dst, between, reduced)
        return
    heap, parts = _parts_heap(d, p)
    credit = d.credits(d.copy_lane())
    sent, space = "x", "scratch" if d.caps.source == "any" else "heap"
    if p.terms or space == "heap":
        sent = d.buffer(f"sent.{space}", space, d.shards.gathered_rows, p.cols)
    needs = (credit,) if space == "heap" else ()
    for part in parted(list(_outgoing(d)), d.knobs.blocks if p.terms else 0):
        made = _make_sent(d, p, part, sent, needs)
        for i, peer, chunk, piece in part:
            lane, src = d.copy_lane(i), _outbox(d, sent, peer)
            if not p.terms and sent != "x":
                made = d.move(lane, d.shards.gathered("x", peer), src, piece, needs)
            d.put(lane, src, _part(d, heap, peer, d.rank).on(peer), piece, data_slot(chunk), (credit, made))
    own = _own(d, p)
    between()
    _sum(d, p, own, parts, dst, reduced)


def _make_sent(
    d: Draft, p: Partial, part: Sequence[tuple[int, int, int, Piece]], sent: str, after: Sequence[int | None]
) -> int | None:
    """Store the partials of some of peers' chunks in ``sent``, with one product a term."""
    made: int | None = None
    for term, (a, b) in enumerate(p.terms):
        segments: list[Segment] = []
        for _, peer, _, piece in part:
            out = _outbox(d, sent, peer)
            segments += d.rows_product(piece, d.shards.gathered(a, peer), b, out, addends=(out,) if term else ())
        made = d.gemm(merged(segments), p.form, after)
    return made


def _push_polling(d: Draft, p: Partial, dst: Layout, between: Between, reduced: Reduced) -> None:
    """One launch: peers' chunks, each raising a word when it is stored, then own rows; copy lanes wait for the words.

    The words are this rank's own: nobody else raises any in its block here, so all of the block's data words are free.
    ``folds``: own rows wait, chunk by chunk, for the peers' partials and add them. Kernel and puts of two ranks then
    wait for each other, and end only where the puts' lanes do not queue behind the kernel's. Else own rows are stored
    like peers', the launch waits for nothing, and a sum follows.
    """
    ((a, b),) = p.terms
    me, shards, words = d.rank, d.shards, itertools.count(DATA)
    heap, parts = _parts_heap(d, p)
    credit = d.credits(d.copy_lane())
    space = "scratch" if d.caps.source == "any" else "heap"
    sent = d.buffer(f"sent.{space}", space, shards.gathered_rows, p.cols)
    segments: list[Segment] = []
    launched: list[list[Segment]] = []
    for _, peer, _, piece in _outgoing(d):
        product = d.rows_product(piece, shards.gathered(a, peer), b, _outbox(d, sent, peer))
        launched.append(_telling(product, me, words))
        segments += launched[-1]
    own: list[list[Segment]] = []
    if d.knobs.folds:
        own = _folding(d, p, parts, dst, words if reduced is not ignore else None)
        segments += itertools.chain.from_iterable(own)
    else:
        segments += d.rows_product(shards.whole(me), shards.gathered(a, me), b, _outbox(d, sent, me))
    d.gemm(segments, p.form, (credit,) if space == "heap" else ())
    for (i, peer, chunk, piece), made in zip(_outgoing(d), launched, strict=True):
        _await_stored(d, d.copy_lane(i), made)
        there = _part(d, heap, peer, me).on(peer)
        d.put(d.copy_lane(i), _outbox(d, sent, peer), there, piece, data_slot(chunk), (credit,))
    between()
    if not d.knobs.folds:
        _sum(d, p, _outbox(d, sent, me), parts, dst, reduced)
        return
    for chunk, (piece, made) in enumerate(zip(shards.pieces[me], own, strict=True)):
        for peer in () if made else d.sources:
            d.wait(0, peer, data_slot(chunk), piece, parts[peer])
        reduced(chunk, piece, _await_stored(d, d.copy_lane(), made))


def _folding(
    d: Draft, p: Partial, parts: dict[int, Layout], dst: Layout, words: Iterator[int] | None
) -> list[list[Segment]]:
    """Products of own rows, a list a chunk, that wait for the peers' partials of the chunk and add them."""
    ((a, b),) = p.terms
    found = []
    for chunk, piece in enumerate(d.shards.pieces[d.rank]):
        ready = tuple((q, data_slot(chunk)) for q in d.sources)
        added = [parts[q] for q in sorted(parts)]
        if p.residual:
            added.append(d.shards.gathered(p.residual, d.rank))
        product = d.rows_product(piece, d.shards.gathered(a, d.rank), b, dst, bias=p.bias, addends=added, ready=ready)
        found.append(product if words is None else _telling(product, d.rank, words))
    return found


def _telling(product: Iterable[Segment], rank: int, words: Iterator[int]) -> list[Segment]:
    """The same segments, each raising the next of ``rank``'s own words when it is stored."""
    return [replace(s, done=((rank, next(words)),)) for s in product]


def _await_stored(d: Draft, lane: int, product: Sequence[Segment]) -> int | None:
    """Hold ``lane`` until the segments have raised their own words. Returns the last wait."""
    last: int | None = None
    for s in product:
        for peer, word in s.done:
            last = d.wait_for(lane, peer, word, s.out)
    return last


def local_words(problem: Problem, chunks: int, *, publishes: bool) -> int:
    """Most words of its own that a rank needs for the polling form; ``publishes``: for its own rows too."""
    shards = Shards(problem, chunks)
    needs = []
    for rank, pieces in enumerate(shards.pieces):
        # A piece of several blocks is one segment a block, unless its rows are consecutive.
        packed = problem.rows[rank] == problem.total
        needs.append(sum(1 if packed else piece.blocks for piece in pieces if piece))
    return sum(needs) - (0 if publishes else min(needs))


def _outbox(d: Draft, sent: str, peer: int) -> Layout:
    """Where the partial of ``peer``'s rows waits for its journey: shard by shard, unless it is ``x`` itself."""
    if sent == "x":
        return d.shards.gathered(sent, peer)
    return d.shards.packed(sent, peer, d.shards.blocks * d.shards.offsets[peer])


def direct(d: Draft, p: Partial, dst: Layout, between: Between = nothing, reduced: Reduced = ignore) -> None:
    """The products write their rows straight into the owner's memory; a signal follows each chunk."""
    heap, parts = _parts_heap(d, p)
    credit = d.credits(0)
    for _, peer, chunk, piece in _outgoing(d):
        _make(d, p, piece, _gathered(d, peer), _part(d, heap, peer, d.rank).on(peer), (credit,))
        d.signal(0, peer, data_slot(chunk))
    own = _own(d, p)
    between()
    _sum(d, p, own, parts, dst, reduced)


def pull(d: Draft, p: Partial, dst: Layout, between: Between = nothing, reduced: Reduced = ignore) -> None:
    """Each rank keeps its partials in its own heap; the sum of the owner reads them there."""
    me, shards = d.rank, d.shards
    heap = d.buffer("partial.heap", "heap", shards.gathered_rows, p.cols)
    lane = 0 if p.terms else d.copy_lane()
    credit = d.credits(lane)
    for _, peer, chunk, piece in _outgoing(d):
        _make(d, p, piece, _gathered(d, peer), shards.gathered(heap, peer), (credit,), lane)
        d.signal(lane, peer, data_slot(chunk))
    own = _own(d, p)
    between()
    _sum(d, p, own, {q: shards.gathered(heap, me).on(q) for q in d.sources}, dst, reduced)


def collective(d: Draft, p: Partial, dst: Layout, between: Between = nothing, reduced: Reduced = ignore) -> None:
    """The transport's all-to-all, chunk by chunk on the first copy lane, then our own sum."""
    parts = _parts_scratch(d, p)
    sent = d.buffer("sent.scratch", "scratch", d.shards.gathered_rows, p.cols) if p.terms else "x"
    rounds = []
    for chunk in range(d.shards.rounds):
        made = [
            _make(d, p, d.shards.piece(peer, chunk), _gathered(d, peer), _outbox(d, sent, peer))
            for peer in (d.targets if p.terms else ())
        ]
        rounds.append(_exchange(d, [_outbox(d, sent, r) for r in range(d.size)], parts, chunk, made))
    own = _own(d, p)
    between()
    _sum(d, p, own, parts, dst, reduced, rounds)


def _parts_scratch(d: Draft, p: Partial) -> dict[int, Layout]:
    """Where each sender's partials of the own rows lie in private memory."""
    held = d.shards.held(d.rank)
    parts = d.buffer("parts.scratch", "scratch", d.size * held, p.cols)
    return {q: d.shards.packed(parts, d.rank, held * q) for q in d.sources}


def _exchange(
    d: Draft, sent: Sequence[Layout], parts: dict[int, Layout], chunk: int, after: Sequence[int | None]
) -> int:
    """All-to-all of chunk ``chunk`` of ``sent`` (one a rank); nothing travels from a rank to itself."""
    me, shards = d.rank, d.shards
    srcs, dsts = list[Region](), list[Region]()
    for r in range(d.size):
        srcs += regions(EMPTY if r == me else shards.piece(r, chunk), sent[r])
        dsts += regions(EMPTY if r == me else shards.piece(me, chunk), parts.get(r, Layout("parts.scratch", 0, 1)))
    return d.collective("all_to_all", srcs, dsts, after=after)


def sequence(d: Draft, p: Partial, dst: Layout, between: Between = nothing, reduced: Reduced = ignore) -> None:
    """One product of all rows, then everything travels, then the sum: nothing overlaps."""
    shards, sent, made = d.shards, "x", None
    credit = d.credits(0) if d.caps.one_sided else None
    space = "scratch" if d.caps.source == "any" or not d.caps.one_sided else "heap"
    if p.terms or space == "heap":
        sent = d.buffer(f"sent.{space}", space, shards.gathered_rows, p.cols)
        everything = Piece(0, 1, 0, shards.gathered_rows)
        made = _make(d, p, everything, _rows_of, Layout(sent, 0, 1), (credit,))
    own, rounds = shards.gathered(sent, d.rank), None
    if d.caps.one_sided:
        heap, parts = _parts_heap(d, p)
        for i, peer, chunk, piece in _outgoing(d):
            there = _part(d, heap, peer, d.rank).on(peer)
            d.put(d.copy_lane(i), shards.gathered(sent, peer), there, piece, data_slot(chunk), (credit, made))
    else:
        parts = _parts_scratch(d, p)
        shares = [shards.gathered(sent, r) for r in range(d.size)]
        rounds = [_exchange(d, shares, parts, chunk, (made,)) for chunk in range(shards.rounds)]
    between()
    _sum(d, p, own, parts, dst, reduced, rounds)


def one_shot(d: Draft, p: Partial, dst: Layout, between: Between = nothing) -> None:
    """All-reduce: every rank puts all its rows to all, and all sum all rows. For few rows."""
    heap = d.buffer("parts.heap", "heap", d.size * d.shards.total, p.cols)
    lane, needs = d.copy_lane(), (d.credits(d.copy_lane()),)
    sent, space = "x", "scratch" if d.caps.source == "any" else "heap"
    if p.terms or space == "heap":
        sent = d.buffer(f"sent.{space}", space, d.shards.total, p.cols)
    pieces, own, made = cut(d.shards.total, 1, d.knobs.chunks), _rows_of(sent), list[int | None]()
    for chunk, piece in enumerate(pieces):
        if sent != "x":
            made.append(_make(d, p, piece, _rows_of, own, needs if space == "heap" else (), lane))
        for i, peer in enumerate(d.targets):
            there = Layout(heap, d.rank * d.shards.total, 1, peer)
            d.put(d.copy_lane(i), own, there, piece, data_slot(chunk), (*needs, *made))
    between()
    _sum_all(d, p, own, {q: Layout(heap, q * d.shards.total, 1) for q in d.sources}, dst, made)


def one_shot_kernel(d: Draft, p: Partial, dst: Layout, between: Between = nothing) -> None:
    """All-reduce by one kernel a rank: it pushes all rows to all, waits for the peers' and sums. For few rows."""
    sent = "x"
    if p.terms:
        sent = d.buffer("sent.scratch", "scratch", d.shards.total, p.cols)
        _make(d, p, Piece(0, 1, 0, d.shards.total), _rows_of, _rows_of(sent))
    between()
    d.one_shot(sent, dst.buf, p.bias)


def one_shot_pull(d: Draft, p: Partial, dst: Layout, between: Between = nothing) -> None:
    """All-reduce: every rank keeps its partial in its own heap, and all read it there. For few rows."""
    own = _rows_of(d.buffer("partial.heap", "heap", d.shards.total, p.cols))
    lane = 0 if p.terms else d.copy_lane()
    credit, made = d.credits(lane), list[int | None]()
    for chunk, piece in enumerate(cut(d.shards.total, 1, d.knobs.chunks)):
        made.append(_make(d, p, piece, _rows_of, own, (credit,), lane))
        for peer in d.targets:
            d.signal(lane, peer, data_slot(chunk))
    between()
    _sum_all(d, p, own, {q: own.on(q) for q in d.sources}, dst, made)


def _rows_of(buf: str) -> Layout:
    return Layout(buf, 0, 1)


def _sum_all(
    d: Draft, p: Partial, own: Layout, parts: dict[int, Layout], dst: Layout, made: Sequence[int | None]
) -> None:
    """Sum all rows, chunk by chunk; ``made`` are the steps that store the chunks of ``own``, if it is not ``x``."""
    srcs = [parts.get(r, own) for r in range(d.size)]
    if p.residual:
        srcs.append(_rows_of(p.residual))
    for chunk, piece in enumerate(cut(d.shards.total, 1, d.knobs.chunks)):
        for peer in d.sources:
            d.wait(0, peer, data_slot(chunk), piece, parts[peer])
        d.reduce(piece, srcs, dst, p.bias, made[chunk : chunk + 1])
