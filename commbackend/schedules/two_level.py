"""Schedules over two transports: puts within a host, collectives between the ranks of one number on all hosts.

Whatever travels crosses between two hosts once: a shard goes from its owner to the rank of the same number on every
other host and is spread there by puts; partial sums are added on their host first, and the host's sum crosses. So one
level's bytes between hosts are divided by the ranks of a host.

Order of sums: ranks of a host in rank order, rounded; then hosts in order. Every element is summed by one rank, so all
ranks have the same bits, which are not always those of one level.

Nobody reads a neighbour's memory, so what a rank writes into its own half of the heap needs no credit; puts do.

Lanes: the first copy lane carries what crosses; puts have the second, or the caller's where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..plan import MAX_CHUNKS, Segment, data_slot
from .draft import Draft, merged
from .gather_side import Gather
from .reduce_side import Between, Partial, Reduced, ignore, nothing
from .shards import EMPTY, Hosts, Layout, Piece, parted, regions

__all__ = ["all_reduce", "gather", "gather_for_wgrad", "most_chunks", "reduce"]


def most_chunks(hosts: int) -> int:
    """Chunks a shard may have: every chunk has a word for every host."""
    return MAX_CHUNKS // hosts


def _places(d: Draft) -> Hosts:
    assert d.hosts is not None, "supports() lets only transports of two levels have these schedules"
    return d.hosts


def _put_lane(d: Draft) -> int:
    """The lane of puts within the host: never the one that waits for the network, if it can be helped."""
    return 2 if d.knobs.lanes > 1 else 0


def _word(d: Draft, host: int, chunk: int, phase: int = 0) -> int:
    """The word of what a neighbour sends of chunk ``chunk`` that comes from, or is for, ``host``."""
    return data_slot(chunk * _places(d).count + host, phase)


# -- gathers


def _send(d: Draft, heap: str, source: Layout, made: Sequence[int | None] = (), phase: int = 0) -> list[int]:
    """Send the own shard, which lies in ``source``, into the gathered matrix ``heap`` of all ranks.

    Args:
        made: The step that makes each chunk of ``source``; () if it is there.
    Returns:
        The collectives that bring the shards of the ranks of this number, one a chunk.
    """
    me, shards, hosts = d.rank, d.shards, _places(d)
    lane = _put_lane(d)
    credit = d.credits(lane)
    for chunk, piece in enumerate(shards.pieces[me]):
        for peer in d.targets:
            there = shards.gathered(heap, me).on(peer)
            d.put(lane, source, there, piece, _word(d, hosts.here, chunk, phase), (credit, *made[chunk : chunk + 1]))
    rounds = []
    for chunk in range(shards.rounds):
        mine, *_ = regions(shards.piece(me, chunk), source)
        empty, *_ = regions(EMPTY, source)
        srcs = [empty if host == hosts.here else mine for host in range(hosts.count)]
        dsts = [regions(EMPTY if r == me else shards.piece(r, chunk), shards.gathered(heap, r))[0] for r in hosts.twins]
        rounds.append(d.collective("all_to_all", srcs, dsts, after=made[chunk : chunk + 1], between=True))
        for host in hosts.others:
            twin = hosts.twins[host]
            if chunk < len(shards.pieces[twin]):
                came, piece = shards.gathered(heap, twin), shards.piece(twin, chunk)
                for peer in d.targets:
                    # In the lane of what crosses, unless puts have a lane: the caller's must not wait for the network.
                    on = lane or d.copy_lane()
                    d.put(on, came, came.on(peer), piece, _word(d, host, chunk, phase), (credit, rounds[-1]))
    return rounds


def _arrivals(d: Draft, rounds: Sequence[int], phase: int = 0) -> Iterator[tuple[int, Piece, int, int]]:
    """What arrives, the own host's first: (rank, piece, its collective or -1, its word or -1)."""
    shards, hosts = d.shards, _places(d)
    for chunk in range(shards.rounds):
        for peer in d.sources:
            if chunk < len(shards.pieces[peer]):
                yield peer, shards.piece(peer, chunk), -1, _word(d, hosts.here, chunk, phase)
    for chunk in range(shards.rounds):
        for host in hosts.others:
            for neighbour in (d.rank, *d.sources):
                local = hosts.ranks[hosts.here].index(neighbour)
                rank = hosts.ranks[host][local]
                if chunk < len(shards.pieces[rank]):
                    twin = neighbour == d.rank
                    word = -1 if twin else _word(d, host, chunk, phase)
                    yield rank, shards.piece(rank, chunk), rounds[chunk] if twin else -1, word


def _sender(d: Draft, rank: int) -> int:
    """The neighbour who puts ``rank``'s shard here: the one of its number."""
    hosts = _places(d)
    local = next(ranks.index(rank) for ranks in hosts.ranks if rank in ranks)
    return hosts.ranks[hosts.here][local]


def _await(d: Draft, heap: str, arrival: tuple[int, Piece, int, int]) -> int:
    """Hold lane 0 until ``arrival`` is in ``heap``, or return its collective, which later steps have to name."""
    rank, piece, collective, word = arrival
    if collective >= 0:
        return collective
    return d.wait(0, _sender(d, rank), word, piece, d.shards.gathered(heap, rank))


def gather(d: Draft, g: Gather) -> None:
    """Own rows are multiplied first, then those of the own host, then the others, as they come."""
    me, shards = d.rank, d.shards
    heap = d.buffer("gathered.heap", "heap", shards.gathered_rows, g.cols)
    stored, source = None, shards.packed("x", me)
    if g.wgrad or d.caps.source != "any":
        stored = _store_own(d, heap)
    if d.caps.source != "any":
        source = shards.gathered(heap, me)
    rounds = _send(d, heap, source, [stored] * len(shards.pieces[me]) if d.caps.source != "any" else ())
    live = [p for p in g.products if d.cols(p.out)]
    mine = shards.packed("x", me)
    for p in live:
        d.gemm(d.rows_product(shards.whole(me), mine, p.weight, shards.gathered(p.out, me), bias=p.bias))
    lane = _put_lane(d) if g.products else 0
    if g.out:
        d.move(lane, mine, shards.gathered(g.out, me), shards.whole(me))
    for part in parted(list(_arrivals(d, rounds)), d.knobs.blocks if g.products else 0):
        ready = [_await(d, heap, arrival) for arrival in part]
        for p in live:
            segments: list[Segment] = []
            for rank, piece, _, _ in part:
                rows, out = shards.gathered(heap, rank), shards.gathered(p.out, rank)
                segments += d.rows_product(piece, rows, p.weight, out, bias=p.bias)
            d.gemm(merged(segments), after=ready)
        for (rank, piece, _, _), step in zip(part, ready) if g.out else ():
            d.move(lane, shards.gathered(heap, rank), shards.gathered(str(g.out), rank), piece, (step,))
    if g.wgrad:
        y, dw = g.wgrad
        d.weight_product(heap, y, dw, (stored, *rounds))


def _store_own(d: Draft, heap: str) -> int | None:
    """Copy the own shard into the own gathered matrix."""
    lane, me = _put_lane(d), d.rank
    own, gathered = d.shards.packed("x", me), d.shards.gathered(heap, me)
    return d.move(lane, own, gathered, d.shards.whole(me))


def gather_for_wgrad(d: Draft, heap: str) -> tuple[Between, tuple[int, ...]]:
    """Send ``x``, once it is stored there, on its way to all ranks' ``heap``. Returns what holds lane 0 until the
    neighbours' puts are there, and the steps that bring the rest.
    """
    stored = _store_own(d, heap)
    made = [stored] * len(d.shards.pieces[d.rank])
    rounds = _send(d, heap, d.shards.gathered(heap, d.rank), made, phase=1)

    def finish() -> None:
        for arrival in _arrivals(d, rounds, phase=1):
            _await(d, heap, arrival)

    return finish, tuple(rounds)


# -- reductions


def _part(d: Draft, heap: str, owner: int, sender: int, rank: int) -> Layout:
    """Where, in the memory of ``owner``, the partial lies that its neighbour ``sender`` made of ``rank``'s rows."""
    hosts = _places(d)
    near = hosts.ranks[hosts.here]
    i, j = near.index(owner), near.index(sender)
    host = next(h for h, ranks in enumerate(hosts.ranks) if rank in ranks)
    return d.shards.packed(heap, rank, ((j - (j > i)) * hosts.count + host) * d.shards.longest)


def reduce(d: Draft, p: Partial, dst: Layout, between: Between = nothing, reduced: Reduced = ignore) -> None:
    """Partials for other hosts first. Each goes to the neighbour of its owner's number, who adds up the host's; the
    sums cross, and their owner adds them.
    """
    me, shards, hosts = d.rank, d.shards, _places(d)
    heap = d.buffer("parts.heap", "heap", len(d.targets) * hosts.count * shards.longest, p.cols)
    lane, sent = _put_lane(d), "x"
    credit = d.credits(lane)
    space = "scratch" if d.caps.source == "any" else "heap"
    if p.terms or space == "heap":
        sent = d.buffer(f"sent.{space}", space, shards.gathered_rows, p.cols)
    made: dict[tuple[int, int], int | None] = {}
    for host in (*hosts.others, hosts.here):
        outgoing = [
            (rank, chunk)
            for chunk in range(shards.rounds)
            for rank in (hosts.ranks[host][hosts.ranks[hosts.here].index(q)] for q in (*d.targets, me))
            if chunk < len(shards.pieces[rank]) and (rank != me or sent != "x")
        ]
        for part in parted(outgoing, d.knobs.blocks if p.terms else 0):
            step = _make(d, p, part, sent)
            made |= dict.fromkeys(part, step)
            for rank, chunk in part:
                peer = _sender(d, rank)
                if peer != me:
                    there = _part(d, heap, peer, me, rank).on(peer)
                    word = _word(d, host, chunk)
                    d.put(lane, _outbox(d, sent, rank), there, shards.piece(rank, chunk), word, (credit, step))
    rounds, came = _cross(d, p, heap, sent, made)
    between()
    _sum(d, p, heap, sent, made, rounds, came, dst, reduced)


def _outbox(d: Draft, sent: str, rank: int) -> Layout:
    """Where the partial of ``rank``'s rows waits for its journey: shard by shard, unless it is ``x`` itself."""
    if sent == "x":
        return d.shards.gathered(sent, rank)
    return d.shards.packed(sent, rank, d.shards.blocks * d.shards.offsets[rank])


def _make(d: Draft, p: Partial, part: Sequence[tuple[int, int]], sent: str) -> int | None:
    """Store the partials of chunks, given by (rank, chunk), in ``sent``: one product a term, or a copy."""
    made: int | None = None
    if sent != "x" and not p.terms:
        for rank, chunk in part:
            lane = _put_lane(d)
            made = d.move(lane, d.shards.gathered("x", rank), _outbox(d, sent, rank), d.shards.piece(rank, chunk))
    for term, (a, b) in enumerate(p.terms):
        segments: list[Segment] = []
        for rank, chunk in part:
            out, rows = _outbox(d, sent, rank), d.shards.gathered(a, rank)
            segments += d.rows_product(d.shards.piece(rank, chunk), rows, b, out, addends=(out,) if term else ())
        made = d.gemm(merged(segments), p.form)
    return made


def _host_sum(
    d: Draft, p: Partial, heap: str, sent: str, rank: int, chunk: int, dst: Layout, made: int | None, lane: int
) -> int | None:
    """Add up, in rank order, what this host's ranks made of chunk ``chunk`` of ``rank``'s rows."""
    hosts, piece = _places(d), d.shards.piece(rank, chunk)
    host = next(h for h, ranks in enumerate(hosts.ranks) if rank in ranks)
    for peer in d.sources:
        d.wait(lane, peer, _word(d, host, chunk), piece, _part(d, heap, d.rank, peer, rank))
    near = hosts.ranks[hosts.here]
    srcs = [_outbox(d, sent, rank) if q == d.rank else _part(d, heap, d.rank, q, rank) for q in near]
    return d.reduce(piece, srcs, dst, None, (made,), lane)


def _cross(
    d: Draft, p: Partial, heap: str, sent: str, made: dict[tuple[int, int], int | None]
) -> tuple[list[int], list[Layout]]:
    """Sum what is for other hosts and exchange it. Returns the collectives, and where each host's sum arrives."""
    me, shards, hosts = d.rank, d.shards, _places(d)
    out = d.buffer("host.scratch", "scratch", hosts.count * shards.longest, p.cols)
    into = d.buffer("hosts.scratch", "scratch", hosts.count * shards.longest, p.cols)
    leaving = [shards.packed(out, twin, host * shards.longest) for host, twin in enumerate(hosts.twins)]
    came = [shards.packed(into, me, host * shards.longest) for host in range(hosts.count)]
    rounds = []
    for chunk in range(shards.rounds):
        sums = []
        for host in hosts.others:
            twin = hosts.twins[host]
            if chunk < len(shards.pieces[twin]):
                ready = made.get((twin, chunk))
                sums.append(_host_sum(d, p, heap, sent, twin, chunk, leaving[host], ready, d.copy_lane()))
        ways = [(EMPTY, EMPTY) if r == me else (shards.piece(r, chunk), shards.piece(me, chunk)) for r in hosts.twins]
        srcs = [regions(going, at)[0] for (going, _), at in zip(ways, leaving)]
        dsts = [regions(coming, at)[0] for (_, coming), at in zip(ways, came)]
        rounds.append(d.collective("all_to_all", srcs, dsts, after=sums, between=True))
    return rounds, came


def _sum(
    d: Draft,
    p: Partial,
    heap: str,
    sent: str,
    made: dict[tuple[int, int], int | None],
    rounds: Sequence[int],
    came: Sequence[Layout],
    dst: Layout,
    reduced: Reduced,
) -> None:
    """Add up the hosts' sums of the own rows, in the order of hosts, as they come."""
    me, hosts = d.rank, _places(d)
    srcs = list(came)
    if p.residual:
        srcs.append(d.shards.gathered(p.residual, me))
    for chunk, piece in enumerate(d.shards.pieces[me]):
        _host_sum(d, p, heap, sent, me, chunk, came[hosts.here], made.get((me, chunk)), 0)
        reduced(chunk, piece, d.reduce(piece, srcs, dst, p.bias, (rounds[chunk],)))


def all_reduce(d: Draft, p: Partial, out: str, between: Between = nothing) -> None:
    """Reduce to the owners of rows, whose sums then travel to all, both in two levels."""
    me, shards = d.rank, d.shards
    heap = d.buffer("sums.heap", "heap", shards.total, p.cols)
    mine = shards.gathered(heap if d.caps.source != "any" else out, me)
    made: list[int | None] = []
    reduce(d, p, mine, between, lambda chunk, piece, step: made.append(step))
    rounds = _send(d, heap, mine, made, phase=1)
    if mine.buf != out:
        d.move(0, mine, shards.gathered(out, me), shards.whole(me))
    for arrival in _arrivals(d, rounds, phase=1):
        rank, piece, *_ = arrival
        ready = _await(d, heap, arrival)
        d.move(0, shards.gathered(heap, rank), shards.gathered(out, rank), piece, (ready,))
