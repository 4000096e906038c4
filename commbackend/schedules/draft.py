"""The program of one rank while a planner writes it: buffers, steps, lanes, credits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..plan import (
    CREDIT,
    Buffer,
    Collective,
    Copy,
    Gemm,
    Get,
    Knobs,
    PlanCaps,
    Problem,
    Program,
    Put,
    Reduce,
    Region,
    Segment,
    Signal,
    Step,
    Wait,
)
from .shards import Hosts, Layout, Piece, Shards, Turn, regions, runs

__all__ = ["Draft", "merged"]


class Draft:
    """Collects one rank's program. Every method that adds a step returns its index, for ``after`` of later steps.

    Steps whose data is empty are left out, except those that raise or meet a slot.
    """

    def __init__(self, problem: Problem, rank: int, caps: PlanCaps, knobs: Knobs) -> None:
        self.problem, self.rank, self.caps, self.knobs = problem, rank, caps, knobs
        self.size = problem.size
        self.shards = Shards(problem, knobs.chunks)
        turn = Turn(self.size, knobs.domain)
        #: Peers in the order in which this rank serves them: every rank starts with another one.
        self.targets = tuple(turn.add(rank, i) for i in range(1, self.size))
        #: Peers in the order in which their chunks are expected.
        self.sources = tuple(turn.minus(rank, i) for i in range(1, self.size))
        #: With two levels: where ranks are. Peers are those of the own host then.
        self.hosts = Hosts(caps.hosts, rank) if caps.hosts and self.size > 1 else None
        if self.hosts is not None:
            self.targets, self.sources = self.hosts.targets, self.hosts.sources
        self._buffers: dict[str, Buffer] = {}
        self._steps: list[Step] = []
        self._last: dict[int, int] = {}
        #: lane -> other lane -> the latest step there that a step here has named.
        self._known: dict[int, dict[int, int]] = {}
        self._credits: int | None = None
        if problem.scales:
            rows = problem.blocks * problem.total if problem.scales == "row" else 1
            self.inputs(("scale_a", 1, rows))
            self.inputs(*((f"scale_b{i}", 1, n if rows > 1 else 1) for i, n in enumerate(problem.n)))

    def program(self) -> Program:
        """Close the draft with the credits of all peers, where anything is shared with them, and return the program."""
        if Program(self.rank, tuple(self._buffers.values()), tuple(self._steps)).counted and self.caps.one_sided:
            for peer in self.targets:
                self._add(Signal(0, self._after(0, self._last.values()), peer, CREDIT))
        return Program(self.rank, tuple(self._buffers.values()), tuple(self._steps))

    # -- buffers
    def buffer(self, name: str, space: str, rows: int, cols: int) -> str:
        """Declare a buffer and return its name; its type follows from what it is for."""
        p = self.problem
        if name.startswith("scale"):
            dtype = "float32"
        elif space == "input":
            dtype = p.result if name.startswith(("bias", "residual", "norm")) else p.dtype
        elif space == "output":
            dtype = p.dtype if name == "gathered" else p.result
        else:
            dtype = p.moved
        self._buffers[name] = Buffer(name, space, rows, cols, dtype)
        return name

    def inputs(self, *shapes: tuple[str, int, int]) -> None:
        """Declare inputs by (name, rows, cols)."""
        for name, rows, cols in shapes:
            self.buffer(name, "input", rows, cols)

    def outputs(self, *shapes: tuple[str, int, int]) -> None:
        """Declare outputs by (name, rows, cols)."""
        for name, rows, cols in shapes:
            self.buffer(name, "output", rows, cols)

    def whole(self, buf: str) -> Region:
        """All of a buffer."""
        return Region(buf, 0, self._buffers[buf].rows)

    def space(self, buf: str) -> str:
        """Where a buffer lies."""
        return self._buffers[buf].space

    def cols(self, buf: str) -> int:
        """Columns of a buffer."""
        return self._buffers[buf].cols

    # -- lanes
    def copy_lane(self, i: int = 0) -> int:
        """The lane of the i-th copy: copy lanes in turn, or the caller's where there are none."""
        return 1 + i % self.knobs.lanes if self.knobs.lanes else 0

    def _after(self, lane: int, steps: Iterable[int | None]) -> tuple[int, ...]:
        """What a step of ``lane`` must name of ``steps``: the latest of each other lane, unless it was named before."""
        latest: dict[int, int] = {}
        for i in steps:
            if i is not None and (other := self._steps[i].lane) != lane:
                latest[other] = max(i, latest.get(other, -1))
        known = self._known.setdefault(lane, {})
        named = [i for other, i in latest.items() if i > known.get(other, -1)]
        for i in named:
            known[self._steps[i].lane] = i
        return tuple(sorted(named))

    def _add(self, step: Step) -> int:
        self._steps.append(step)
        self._last[step.lane] = len(self._steps) - 1
        return len(self._steps) - 1

    # -- steps
    def credits(self, lane: int) -> int | None:
        """Wait once, on the lane that asks first, until every peer has finished call ``seq - 2``.

        Writers of a half need the credit of its owner and of all that read it there; as another schedule may have run
        then, every program waits for all peers. They are two calls back, so this wait costs a look at the words.
        """
        if self._credits is None:
            for peer in self.sources:
                self._credits = self._add(Wait(lane, (), peer, CREDIT, -2))
        return self._credits

    def wait(self, lane: int, peer: int, slot: int, piece: Piece, arrived: Layout) -> int:
        """Hold ``lane`` until ``peer`` has raised ``slot``: then ``piece`` of ``arrived`` may be read."""
        return self.wait_for(lane, peer, slot, *regions(piece, arrived))

    def wait_for(self, lane: int, peer: int, slot: int, *covers: Region) -> int:
        """Hold ``lane`` until ``peer`` has raised ``slot``: then ``covers`` may be read."""
        return self._add(Wait(lane, (), peer, slot, 0, covers))

    def put(
        self, lane: int, src: Layout, dst: Layout, piece: Piece, slot: int, after: Sequence[int | None] = ()
    ) -> int:
        """Put ``piece`` of ``src`` to rank ``dst.at``; where there is nothing to put, the slot still rises."""
        if not piece or not self.cols(dst.buf):
            return self.signal(lane, dst.at, slot)
        here, there = regions(piece, src, dst)
        return self._add(Put(lane, self._after(lane, after), here, there, dst.at, slot))

    def signal(self, lane: int, peer: int, slot: int, after: Sequence[int | None] = ()) -> int:
        """Raise ``slot`` at ``peer``."""
        return self._add(Signal(lane, self._after(lane, after), peer, slot))

    def move(self, lane: int, src: Layout, dst: Layout, piece: Piece, after: Sequence[int | None] = ()) -> int | None:
        """Copy ``piece`` into an own buffer, with a Get where ``src`` is a peer's."""
        if not piece or not self.cols(src.buf):
            return None
        waits, (there, here) = self._after(lane, after), regions(piece, src, dst)
        if src.at >= 0 and src.at != self.rank:
            return self._add(Get(lane, waits, there, here, src.at))
        return self._add(Copy(lane, waits, there, here))

    def gemm(self, segments: Sequence[Segment], form: str = "nt", after: Sequence[int | None] = ()) -> int | None:
        """Multiply on lane 0."""
        if not segments:
            return None
        return self._add(Gemm(0, self._after(0, after), tuple(segments), form))

    def rows_product(
        self,
        piece: Piece,
        a: Layout,
        b: str,
        out: Layout,
        *,
        bias: str | None = None,
        addends: Sequence[Layout] = (),
        ready: tuple[tuple[int, int], ...] = (),
    ) -> list[Segment]:
        """Segments for ``piece``: one, or one a block where its rows are not consecutive; none for an empty result."""
        if not self.cols(out.buf):
            return []
        row = self.whole(bias) if bias else None
        weight = self.whole(b)
        segments = []
        for run in runs(piece, a, out, *addends):
            ra, rout, *more = regions(run, a, out, *addends)
            # Scales lie in the order of gathered rows.
            scales = self._scales(rout if self.problem.op == "all_gather_matmul" else ra, b)
            segments.append(Segment(ra, weight, rout, row, tuple(more), ready, (), *scales))
        return segments

    def _scales(self, rows: Region, b: str) -> tuple[Region, Region] | tuple[()]:
        """Where the scales of ``rows`` of the gathered matrix and of weight ``b`` lie."""
        if not self.problem.scales:
            return ()
        by_row = self.problem.scales == "row"
        mine = Region("scale_a", 0, 1, rows.row, rows.rows) if by_row else self.whole("scale_a")
        return mine, self.whole(f"scale_b{b.removeprefix('w')}")

    def weight_product(self, a: str, b: str, out: str, after: Sequence[int | None] = ()) -> int | None:
        """out = a.T @ b over all rows, on lane 0."""
        if not (self._buffers[out].rows and self._buffers[out].cols):
            return None
        return self.gemm((Segment(self.whole(a), self.whole(b), self.whole(out)),), "tn", after)

    def reduce(
        self,
        piece: Piece,
        srcs: Sequence[Layout],
        dst: Layout,
        bias: str | None,
        after: Sequence[int | None] = (),
        lane: int = 0,
    ) -> int | None:
        """Sum ``piece`` of ``srcs``, in their order."""
        if not piece or not self.cols(dst.buf):
            return None
        row = self.whole(bias) if bias else None
        here, *parts = regions(piece, dst, *srcs)
        return self._add(Reduce(lane, self._after(lane, after), tuple(parts), here, row))

    def collective(
        self,
        kind: str,
        srcs: Sequence[Region],
        dsts: Sequence[Region],
        slots: tuple[int, ...] = (),
        after: Sequence[int | None] = (),
        *,
        between: bool = False,
    ) -> int:
        """Run a collective on the first copy lane; ``between``: hosts."""
        lane = self.copy_lane()
        waits, here, there = self._after(lane, after), tuple(srcs), tuple(dsts)
        return self._add(Collective(lane, waits, kind, here, there, slots, between=between))

    def one_shot(self, src: str, dst: str, bias: str | None) -> int | None:
        """Sum ``src`` over ranks by one kernel on lane 0, with what the problem's flags fold in."""
        p = self.problem
        if not (p.total and self.cols(dst)):
            return None
        srcs, dsts, weight = [src], [dst], None
        if "residual" in p.flags:
            srcs.append("residual")
        if "norm" in p.flags:
            dsts, weight = [dst, "normed"], self.whole("norm_weight")
        row = self.whole(bias) if bias else None
        here, there = (tuple(map(self.whole, names)) for names in (srcs, dsts))
        return self._add(Collective(0, (), "one_shot", here, there, bias=row, weight=weight, eps=p.eps))


def merged(segments: Iterable[Segment]) -> list[Segment]:
    """The same products in as few segments as neighbouring rows allow: a library runs one product a segment."""
    found: list[Segment] = []
    for s in sorted(segments, key=lambda s: (s.a.buf, s.a.at, s.a.row)):
        whole = _joined(found[-1], s) if found else None
        if whole is None:
            found.append(s)
        else:
            found[-1] = whole
    return found


def _joined(first: Segment, second: Segment) -> Segment | None:
    """Both as one segment, if the rows of ``second`` follow those of ``first`` in every operand."""
    ours, theirs = ((s.a, s.out, *s.addends) for s in (first, second))
    follows = tuple(replace(r, row=r.row + r.rows, rows=t.rows) for r, t in zip(ours, theirs)) == theirs
    if not follows or (first.b, first.bias, first.ready, first.done) != (second.b, second.bias, (), ()):
        return None
    a, out, *addends = (replace(r, rows=r.rows + t.rows) for r, t in zip(ours, theirs))
    scale = first.scale_a
    if scale is not None and second.scale_a is not None and scale.cols >= 0:
        scale = replace(scale, cols=scale.cols + second.scale_a.cols)
    return replace(first, a=a, out=out, addends=tuple(addends), scale_a=scale)
