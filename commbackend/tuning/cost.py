"""What a plan costs: a discrete-event run of one call on measured times, for any number of ranks and any topology.

``simulate`` runs a ``Plan`` step by step, or a ``SymmetricPlan`` on its one program, and returns a ``Timeline``: when
every step ran, what it waited for, how long the call takes, and how much of the moving was hidden. A ``CostTable`` says
what steps cost; ``Topology`` says which ranks share a fast link. Both predict; ``tune`` measures.

The model, and what it leaves out:

* a product takes the time measured for its shape; between measured shapes, what the measured ones near by took over the
  time that whole waves of tiles would take at the highest measured rate;
* a put holds its rank's way out (one for the own domain, one for the network) for its bytes, and its flag rises a
  latency later; puts of several lanes share the way, their latencies overlap. What comes in is not limited by itself:
  in these plans every rank sends and receives alike;
* a product that runs while its rank copies is slower by ``gemm_slowdown``, for the part of its time that copies run;
* a call starts on all ranks at once, with nothing left over from the call before. Launches cost the device what the
  table says; the host that enqueues them is ahead, as in a captured graph or behind earlier work.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .. import schedules
from ..errors import PlanError
from ..plan import (
    CREDIT,
    ITEMSIZE,
    Collective,
    Copy,
    Gemm,
    Get,
    Knobs,
    Plan,
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
from ..schedules.symmetric import SymmetricPlan, symmetric_plan
from .costs import CostTable, Topology

__all__ = ["Timed", "Timeline", "lower_bound_us", "predict", "simulate", "stock_us"]

#: (rank, index of a step).
Where = tuple[int, int]
#: (waiter, writer, word).
Word = tuple[int, int, int]
_MOVES = (Put, Get, Collective)


@dataclass(frozen=True, slots=True)
class Timed:
    """A step of ``rank``'s program, with its index, from ``start_us`` to ``end_us``; a wait's length is waiting.

    ``cause`` is the step that it could not begin, or a wait could not end, before; None for the first ones.
    """

    rank: int
    index: int
    step: Step
    start_us: float
    end_us: float
    cause: Where | None = None


@dataclass(frozen=True)
class Timeline:
    """One call. ``steps`` in order of start; where ``symmetric``, those of the rank in the middle, for all ranks."""

    op: str
    size: int
    steps: tuple[Timed, ...]
    symmetric: bool = False
    _by_rank: Mapping[int, list[Timed]] = field(default_factory=dict, compare=False, repr=False)

    def of(self, rank: int) -> list[Timed]:
        """The steps of ``rank``."""
        if not self._by_rank:
            by_rank: dict[int, list[Timed]] = defaultdict(list)
            for t in self.steps:
                by_rank[t.rank].append(t)
            object.__setattr__(self, "_by_rank", by_rank)
        return self._by_rank.get(self.ranks[0] if self.symmetric else rank, [])

    @property
    def ranks(self) -> range:
        """The ranks that were run: all, or the one in the middle for all."""
        return range(self.size // 2, self.size // 2 + 1) if self.symmetric else range(self.size)

    def end_us(self, rank: int) -> float:
        """When ``rank`` has finished."""
        return max((t.end_us for t in self.of(rank)), default=0.0)

    @property
    def time_us(self) -> float:
        """When the last rank has finished."""
        return max((t.end_us for t in self.steps), default=0.0)

    def busy_us(self, rank: int, *kinds: type[Step]) -> float:
        """Time ``rank`` spends in at least one step of these kinds."""
        return sum(b - a for a, b in self._spans(rank, kinds))

    def hidden_share(self, rank: int) -> float:
        """Part of the time in which ``rank`` moves bytes that it also multiplies in; 0 where nothing moves."""
        moving, products = self._spans(rank, _MOVES), self._spans(rank, (Gemm,))
        total = sum(b - a for a, b in moving)
        hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in moving for c, d in products)
        return hidden / total if total else 0.0

    def exposed_us(self, rank: int) -> float:
        """Time of the call in which ``rank`` does not multiply."""
        return self.end_us(rank) - self.busy_us(rank, Gemm)

    def critical_path(self) -> list[Timed]:
        """The steps that the end of the call waited for, one after the other, the last one last."""
        by = {(t.rank, t.index): t for t in self.steps}
        last = max(self.steps, key=lambda t: (t.end_us, t.rank, t.index), default=None)
        path: list[Timed] = []
        while last is not None and len(path) <= len(by):
            path.append(last)
            last = by.get(last.cause) if last.cause is not None else None
        return path[::-1]

    def _spans(self, rank: int, kinds: Sequence[type[Step]]) -> list[tuple[float, float]]:
        merged: list[tuple[float, float]] = []
        for t in sorted(self.of(rank), key=lambda t: t.start_us):
            if not isinstance(t.step, tuple(kinds)) or t.end_us <= t.start_us:
                continue
            if merged and t.start_us <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], t.end_us))
            else:
                merged.append((t.start_us, t.end_us))
        return merged


def simulate(plan: Plan | SymmetricPlan, table: CostTable, topology: Topology | None = None) -> Timeline:
    """Run ``plan`` once, as the first call on a communicator. Local.

    Args:
        table: What steps cost.
        topology: Which ranks share a fast link; None: all.

    Raises:
        PlanError: Some steps never start; they are named.
    """
    where = topology or Topology(plan.size)
    steps = _Run(plan, table, where, {}).run()
    if table.gemm_slowdown > 1 and (slowed := _slowed(steps, table.gemm_slowdown)):
        steps = _Run(plan, table, where, slowed).run()
    ordered = tuple(sorted(steps, key=lambda t: (t.start_us, t.rank, t.index)))
    return Timeline(plan.op, plan.size, ordered, isinstance(plan, SymmetricPlan))


def _slowed(steps: Sequence[Timed], factor: float) -> dict[Where, float]:
    """How much longer each product takes for the copies of its rank that ran beside it."""
    copies: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for t in steps:
        if isinstance(t.step, (Put, Get, Copy, Collective)):
            copies[t.rank].append((t.start_us, t.end_us))
    found = {}
    for t in steps:
        if isinstance(t.step, Gemm) and t.end_us > t.start_us:
            beside = sum(max(0.0, min(t.end_us, b) - max(t.start_us, a)) for a, b in copies[t.rank])
            share = min(1.0, beside / (t.end_us - t.start_us))
            if share > 0:
                found[t.rank, t.index] = 1 + (factor - 1) * share
    return found


class _Run:
    """Lanes advance in order of time, so that whoever comes first gets the way out first."""

    def __init__(
        self, plan: Plan | SymmetricPlan, table: CostTable, topology: Topology, slowed: Mapping[Where, float]
    ) -> None:
        self.plan, self.table, self.topology, self.slowed = plan, table, topology, slowed
        self.turn = plan.turn if isinstance(plan, SymmetricPlan) else None
        programs: Sequence[Program] = [plan.middle] if isinstance(plan, SymmetricPlan) else plan.programs
        self.programs = {p.rank: p for p in programs}
        self.buffers = {p.rank: {b.name: b for b in p.buffers} for p in programs}
        self.queues: dict[tuple[int, int], list[int]] = {}
        for p in programs:
            for i in reversed(range(len(p.steps))):
                self.queues.setdefault((p.rank, p.steps[i].lane), []).append(i)
        self.free = dict.fromkeys(self.queues, 0.0)
        self.before: dict[tuple[int, int], Where | None] = dict.fromkeys(self.queues)
        self.ended: dict[Where, float] = {}
        self.raised: dict[Word, tuple[float, Where]] = {}
        self.ways: dict[tuple[int, str], float] = defaultdict(float)
        #: What is not there yet -> the lanes that wait for it.
        self.blocked: dict[object, list[tuple[int, int]]] = defaultdict(list)
        self.partly: dict[Where, tuple[int, float]] = {}
        self.meetings: dict[int, dict[int, tuple[float, Where | None]]] = defaultdict(dict)
        self.attended: dict[Where, int] = {}
        self.heap: list[tuple[float, int, int]] = [(0.0, *key) for key in sorted(self.queues)]
        self.done: list[Timed] = []

    def run(self) -> list[Timed]:
        while self.heap:
            at, rank, lane = heapq.heappop(self.heap)
            self._advance((rank, lane), at)
        if left := [(key, queue[-1]) for key, queue in self.queues.items() if queue]:
            stuck = ", ".join(f"rank {r} lane {n} at step {i}" for (r, n), i in left[:8])
            raise PlanError(f"the plan does not end: {stuck}")
        return self.done

    def _advance(self, key: tuple[int, int], at: float) -> None:
        """Run the next step of a lane, or note what it waits for."""
        queue, rank = self.queues[key], key[0]
        index = queue[-1]
        step = self.programs[rank].steps[index]
        start, cause = self.free[key], self.before[key]
        for j in step.after:
            ended = self.ended.get((rank, j))
            if ended is None:
                self.blocked[rank, j].append(key)
                return
            if ended > start:
                start, cause = ended, (rank, j)
        if start > at:
            heapq.heappush(self.heap, (start, *key))
            return
        found = self._end(key, index, step, start, cause)
        if found is None:
            return
        end, cause = found
        self.ended[rank, index] = self.free[key] = end
        self.before[key] = (rank, index)
        self.done.append(Timed(rank, index, step, start, end, cause))
        queue.pop()
        if queue:
            heapq.heappush(self.heap, (end, *key))
        self._wake((rank, index), end)

    def _wake(self, what: object, at: float) -> None:
        for key in self.blocked.pop(what, ()):
            heapq.heappush(self.heap, (max(at, self.free[key]), *key))

    # -- steps: when they end, and what that waited for; None while something is missing
    def _end(
        self, key: tuple[int, int], index: int, step: Step, start: float, cause: Where | None
    ) -> tuple[float, Where | None] | None:
        rank, table = key[0], self.table
        match step:
            case Put():
                end = self._moved(rank, step.peer, step.src, start)
                self._raise(step.peer, rank, step.slot, end + table.flag_us(self._path(rank, step.peer)), (rank, index))
            case Get():
                end = self._moved(rank, step.peer, step.src, start)
            case Signal():
                end = start + table.signal_us
                if step.slot != CREDIT:  # credits are for the call after the next
                    latency = table.flag_us(self._path(rank, step.peer))
                    self._raise(step.peer, rank, step.slot, end + latency, (rank, index))
            case Wait():
                if step.delta < 0:
                    return start, cause
                word = self._word(rank, step.peer, step.slot)
                seen = self.raised.get(word)
                if seen is None:
                    self.blocked[word].append(key)
                    return None
                end = start + table.wait_us
                return (end, cause) if seen[0] <= end else seen
            case Copy():
                end = start + table.launch_us + sum(table.copy_us(self._nbytes(rank, step.src), "local"))
            case Reduce():
                moved = sum(self._nbytes(rank, s) for s in (*step.srcs, step.dst))
                end = start + table.launch_us + table.reduce_us(moved)
            case Gemm():
                return self._gemm(key, index, step, start, cause)
            case Collective():
                return self._collective(key, index, step, start, cause)
        return end, cause

    def _moved(self, rank: int, peer: int, src: Region, start: float) -> float:
        path = self._path(rank, peer)
        busy, latency = self.table.copy_us(self._nbytes(rank, src), path)
        begin = max(start + self.table.launch_us, self.ways[rank, path])
        self.ways[rank, path] = begin + busy
        return begin + busy + latency

    def _gemm(
        self, key: tuple[int, int], index: int, step: Gemm, start: float, cause: Where | None
    ) -> tuple[float, Where | None] | None:
        """Segments in order; in the polling form each waits for its words, and raises some when it is done."""
        rank, where = key[0], (key[0], index)
        first, at = self.partly.get(where, (0, start + self.table.launch_us))
        polls = any(s.ready or s.done for s in step.segments)
        costs = self._products(rank, step, polls)
        factor = self.slowed.get(where, 1.0)
        for i in range(first, len(step.segments)):
            segment = step.segments[i]
            for writer, number in segment.ready:
                word = self._word(rank, writer, number)
                seen = self.raised.get(word)
                if seen is None:
                    self.partly[where] = (i, at)
                    self.blocked[word].append(key)
                    return None
                if seen[0] > at:
                    at, cause = seen
            at += costs[i] * factor + (self.table.launch_us if i and not polls else 0.0)
            for peer, number in segment.done:
                self._raise(peer, rank, number, at, where)
        return at, cause

    def _products(self, rank: int, step: Gemm, polls: bool) -> list[float]:
        """What each segment costs: by itself, or its share of the one launch that polls."""
        shapes = [self._product(rank, s, step.form) for s in step.segments]
        dtype = self.buffers[rank][step.segments[0].a.buf].dtype
        if not polls:
            return [self.table.gemm_us(*shape, dtype) for shape in shapes]
        m, n, k = sum(s[0] for s in shapes), shapes[0][1], shapes[0][2]
        whole = self.table.gemm_us(m, n, k, dtype) * self.table.polling_factor
        return [whole * s[0] / max(m, 1) for s in shapes]

    def _collective(
        self, key: tuple[int, int], index: int, step: Collective, start: float, cause: Where | None
    ) -> tuple[float, Where | None] | None:
        """The n-th collective of every rank begins when all ranks that take part have come to theirs."""
        rank = key[0]
        lane = self.programs[rank].steps
        number = self.attended.setdefault((rank, index), sum(isinstance(s, Collective) for s in lane[:index]))
        meeting = self.meetings[number]
        meeting.setdefault(rank, (start, cause))
        members = self._members(rank) if step.between else tuple(self.programs)
        came = {r: meeting[r] for r in members if r in meeting}
        if len(came) < len(members):
            self.blocked["collective", number].append(key)
            return None
        begin, cause = max(came.values(), key=lambda m: m[0])
        self._wake(("collective", number), begin)
        sent = step.dsts if step.kind == "all_gather" else step.srcs[:1] if step.kind == "one_shot" else step.srcs
        nbytes = sum(self._nbytes(rank, r) for r in sent)
        if step.between:  # what leaves a rank, and nothing else, is in ``srcs``
            end = begin + sum(self.table.copy_us(nbytes, "network"))
        else:
            end = begin + self.table.collective_us(step.kind, nbytes, self.topology, self.plan.size)
        for word in step.slots:
            self._raise(rank, rank, word, end, (rank, index))
        return end, cause

    def _members(self, rank: int) -> tuple[int, ...]:
        """The ranks with ``rank``'s number on their hosts."""
        hosts = self.plan.meta["hosts"]
        number = [hosts[:r].count(h) for r, h in enumerate(hosts)]
        return tuple(r for r in range(len(hosts)) if number[r] == number[rank])

    # -- words and sizes
    def _word(self, waiter: int, writer: int, word: int) -> Word:
        """The name of a word; with one program for all, the way from its writer to its waiter stands for both."""
        if self.turn is not None:
            return self.turn.minus(waiter, writer), 0, word
        return waiter, writer, word

    def _raise(self, waiter: int, writer: int, number: int, at: float, by: Where) -> None:
        word = self._word(waiter, writer, number)
        if word not in self.raised:
            self.raised[word] = (at, by)
            self._wake(word, at)

    def _path(self, rank: int, peer: int) -> str:
        return self.topology.path(rank, peer)

    def _width(self, rank: int, region: Region) -> int:
        return region.cols if region.cols >= 0 else self.buffers[rank][region.buf].cols - region.col

    def _nbytes(self, rank: int, region: Region) -> int:
        itemsize = ITEMSIZE[self.buffers[rank][region.buf].dtype]
        return region.blocks * region.rows * self._width(rank, region) * itemsize

    def _product(self, rank: int, s: Segment, form: str) -> tuple[int, int, int]:
        inner = self._width(rank, s.a) if form != "tn" else s.a.rows * s.a.blocks
        return s.out.rows * s.out.blocks, self._width(rank, s.out), inner


def predict(
    problem: Problem, caps: PlanCaps, knobs: Knobs, table: CostTable, topology: Topology | None = None
) -> Timeline:
    """Plan ``problem`` and run it: by one program where all shards are equal, else with every rank's. Local.

    Raises:
        PlanError: There is no such plan.
    """
    plan: Plan | SymmetricPlan
    if len(set(problem.rows)) == 1 and problem.size > 2 and not caps.hosts:
        plan = symmetric_plan(problem, caps, knobs)
    else:
        plan = schedules.plan(problem, caps, knobs)
    return simulate(plan, table, topology)


def stock_us(problem: Problem, table: CostTable, topology: Topology | None = None) -> float:
    """Time of the library's product and the library's collective, one after the other, as ``table`` has them."""
    where = topology or Topology(problem.size)
    kind = {"all_gather": "all_gather", "all_gather_matmul": "all_gather"}.get(
        problem.op, "all_reduce" if problem.op.endswith("all_reduce") else "reduce_scatter"
    )
    rows = problem.blocks * problem.total
    reduced = problem.op in ("matmul_reduce_scatter", "matmul_all_reduce")
    moved = rows * (problem.n[0] if reduced else problem.k) * ITEMSIZE[problem.moved]
    products = sum(table.gemm_us(rows, n, problem.k, problem.dtype) + table.launch_us for n in problem.n)
    collective = table.collective_us(kind, moved, where, problem.size) if problem.size > 1 else 0.0
    return products + collective


def lower_bound_us(timeline: Timeline) -> float:
    """The longer of what any rank multiplies and what it moves: no schedule can be faster."""
    busiest = [(timeline.busy_us(r, Gemm), timeline.busy_us(r, *_MOVES)) for r in timeline.ranks]
    return max(map(max, busiest), default=math.nan)
