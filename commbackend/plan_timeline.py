"""When the steps of a plan would run, at given rates: a discrete-event run of one call, and its picture in text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import PlanError
from .plan import Collective, Copy, Gemm, Get, Plan, Program, Put, Reduce, Region, Segment, Signal, Step, Wait

__all__ = ["MARKS", "Rates", "draw", "simulate"]

#: One letter a kind of step in the picture.
MARKS: Mapping[str, str] = {
    "Gemm": "#",
    "Put": ">",
    "Get": "<",
    "Collective": "=",
    "Reduce": "+",
    "Copy": "c",
    "Wait": ".",
    "Signal": "!",
}


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does in a second, and what a step costs besides.

    Attributes:
        link_gbyte_s: Bytes one rank moves to or from a peer, 1e9 a second.
        memory_gbyte_s: Bytes a local copy or sum moves, 1e9 a second.
        tflop_s: Products, 1e12 operations a second.
        launch_us: Start of any step, microseconds.
    """

    link_gbyte_s: float = 300.0
    memory_gbyte_s: float = 2000.0
    tflop_s: float = 700.0
    launch_us: float = 2.0


@dataclass(frozen=True, slots=True)
class Timed:
    """A step of ``rank``'s program, with its index, from ``start_us`` to ``end_us``; a wait's length is waiting."""

    rank: int
    index: int
    step: Step
    start_us: float
    end_us: float


def simulate(plan: Plan, rates: Rates) -> list[Timed]:
    """Run ``plan`` once, as the first call on a communicator. Raises PlanError naming the steps that never start."""
    return _Simulation(plan, rates).run()


class _Simulation:
    def __init__(self, plan: Plan, rates: Rates) -> None:
        self.programs, self.rates = {p.rank: p for p in plan.programs}, rates
        self.cols = {p.rank: {b.name: b.cols for b in p.buffers} for p in plan.programs}
        self.item = {p.rank: {b.name: b.nbytes / max(b.rows * b.cols, 1) for b in p.buffers} for p in plan.programs}
        self.ended: dict[tuple[int, int], float] = {}
        self.raised: dict[tuple[int, int, int], float] = {}  # (waiter, writer, word) -> when
        self.done: list[Timed] = []

    def run(self) -> list[Timed]:
        queues = {(p.rank, lane): _of_lane(p, lane) for p in self.programs.values() for lane in _lanes(p)}
        free = dict.fromkeys(queues, 0.0)
        while any(queues.values()):
            raised = len(self.raised)
            moved = [key for key in sorted(queues) if queues[key] and self._advance(key, queues, free)]
            if not moved and len(self.raised) == raised:
                stuck = ", ".join(f"rank {r} lane {n} at step {q[0]}" for (r, n), q in queues.items() if q)
                raise PlanError(f"the plan does not end: {stuck}")
        return sorted(self.done, key=lambda t: (t.start_us, t.rank, t.index))

    def _advance(
        self, key: tuple[int, int], queues: dict[tuple[int, int], list[int]], free: dict[tuple[int, int], float]
    ) -> bool:
        """Run the next step of a lane if all it waits for is known."""
        rank = key[0]
        index = queues[key][0]
        step = self.programs[rank].steps[index]
        if any((rank, j) not in self.ended for j in step.after):
            return False
        start = max([free[key], *(self.ended[rank, j] for j in step.after)])
        end = self._end(rank, index, step, start, queues, free)
        if end is None:
            return False
        self.ended[rank, index] = free[key] = end
        self.done.append(Timed(rank, index, step, start, end))
        queues[key].pop(0)
        return True

    def _end(
        self,
        rank: int,
        index: int,
        step: Step,
        start: float,
        queues: dict[tuple[int, int], list[int]],
        free: dict[tuple[int, int], float],
    ) -> float | None:
        launch = self.rates.launch_us
        match step:
            case Put():
                end = start + launch + self._nbytes(rank, step.src) / self.rates.link_gbyte_s / 1e3
                self._raise(step.peer, rank, step.slot, end)
                return end
            case Get():
                return start + launch + self._nbytes(rank, step.src) / self.rates.link_gbyte_s / 1e3
            case Signal():
                # Credits and the like of earlier calls: nobody waits for them in a first call.
                if step.delta == 0:
                    self._raise(step.peer, rank, step.slot, start + launch)
                return start + launch
            case Wait():
                seen = 0.0 if step.delta < 0 else self.raised.get((rank, step.peer, step.slot))
                return None if seen is None else max(start, seen)
            case Copy():
                return start + launch + 2 * self._nbytes(rank, step.src) / self.rates.memory_gbyte_s / 1e3
            case Reduce():
                moved = sum(self._nbytes(rank, s) for s in (*step.srcs, step.dst))
                return start + launch + moved / self.rates.memory_gbyte_s / 1e3
            case Gemm():
                return self._gemm(rank, step, start + launch)
            case Collective():
                return self._collective(rank, index, step, queues, free)
        raise PlanError(f"unknown step {step!r}")

    def _gemm(self, rank: int, step: Gemm, at: float) -> float | None:
        """Segments in order; in the polling form each waits for its words, and raises some when it is done."""
        for segment in step.segments:
            seen = [self.raised.get((rank, writer, word)) for writer, word in segment.ready]
            known = [s for s in seen if s is not None]
            if len(known) != len(seen):
                return None  # what is done by now is known: peers may wait for it before they raise what we wait for
            at = max([at, *known]) + self._flops(rank, segment, step.form) / self.rates.tflop_s / 1e6
            for peer, word in segment.done:
                self._raise(peer, rank, word, at)
        return at

    def _collective(
        self,
        rank: int,
        index: int,
        step: Collective,
        queues: dict[tuple[int, int], list[int]],
        free: dict[tuple[int, int], float],
    ) -> float | None:
        """The n-th collective of every rank starts when all ranks have come to theirs."""
        number = [i for i, s in enumerate(self.programs[rank].steps) if isinstance(s, Collective)].index(index)
        starts = []
        for peer, program in self.programs.items():
            theirs = [i for i, s in enumerate(program.steps) if isinstance(s, Collective)][number]
            key = (peer, program.steps[theirs].lane)
            if (peer, theirs) in self.ended:
                return self._meet(rank, step, self.ended[peer, theirs])
            waits_for = program.steps[theirs].after
            if queues[key][0] != theirs or any((peer, j) not in self.ended for j in waits_for):
                return None
            starts.append(max([free[key], *(self.ended[peer, j] for j in waits_for)]))
        nbytes = sum(self._nbytes(rank, r) for r in (step.dsts if len(step.dsts) > 1 else step.srcs))
        return self._meet(rank, step, max(starts) + self.rates.launch_us + nbytes / self.rates.link_gbyte_s / 1e3)

    def _meet(self, rank: int, step: Collective, end: float) -> float:
        for word in step.slots:
            self._raise(rank, rank, word, end)
        return end

    def _raise(self, waiter: int, writer: int, word: int, when: float) -> None:
        self.raised.setdefault((waiter, writer, word), when)

    def _width(self, rank: int, region: Region) -> int:
        return region.cols if region.cols >= 0 else self.cols[rank][region.buf] - region.col

    def _nbytes(self, rank: int, region: Region) -> float:
        return region.blocks * region.rows * self._width(rank, region) * self.item[rank][region.buf]

    def _flops(self, rank: int, segment: Segment, form: str) -> float:
        inner = self._width(rank, segment.a) if form == "nt" else segment.a.rows * segment.a.blocks
        rows = segment.out.rows * segment.out.blocks
        return 2.0 * rows * self._width(rank, segment.out) * inner


def _lanes(program: Program) -> list[int]:
    return sorted({s.lane for s in program.steps})


def _of_lane(program: Program, lane: int) -> list[int]:
    return [i for i, s in enumerate(program.steps) if s.lane == lane]


def draw(timed: Sequence[Timed], *, width: int = 100) -> str:
    """Return one line a rank and lane, time from left to right in ``width`` columns, ``MARKS`` for the steps."""
    total = max((t.end_us for t in timed), default=0.0) or 1.0
    lines = []
    for rank, lane in sorted({(t.rank, t.step.lane) for t in timed}):
        cells = [" "] * width
        for t in timed:
            if (t.rank, t.step.lane) == (rank, lane) and t.end_us > t.start_us:
                first = min(int(t.start_us / total * width), width - 1)
                last = min(max(round(t.end_us / total * width), first + 1), width)
                # Whatever takes time hides what takes none.
                for column in range(first, last):
                    if cells[column] in " .!" or t.end_us - t.start_us > total / width:
                        cells[column] = MARKS[type(t.step).__name__]
        lines.append(f"rank {rank} lane {lane} |{''.join(cells)}|")
    legend = "  ".join(f"{mark} {name.lower()}" for name, mark in MARKS.items())
    scale = f"0 us{f'{total:,.0f} us':>{width + 12}}"
    return "\n".join([*lines, scale, legend])
