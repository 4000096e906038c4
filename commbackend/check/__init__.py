"""The proof of plans: what can be said about a call before it runs, whatever the timing.

``check`` takes plans that may follow each other, in any order, on one heap, and proves of them:

* structure: buffers, regions, shapes, dtypes, lanes, words and values are what ``plan`` allows, and the transport's
  roles allow the steps;
* pairing: every raised word is met by a wait or by segments that poll it, every wait is for a word that is raised;
* it ends, also in the least free model: all lanes of a rank share one in-order queue and each step completes before
  the next begins. Slots only grow, so a set of programs that ends in one interleaving ends in all of them, and one that
  ends in this model ends in every freer one; one run decides for every skew of ranks. A plan that declares that it
  needs a queue for every lane is proved in that model instead, and refused where queues are shared;
* with two levels, that words and memory of other hosts are never touched, and that the ranks of one number on all hosts
  come to the same collectives in the same order;
* no races: two accesses to the same rows of one rank's buffer, one of them a write, are ordered by lanes, ``after`` and
  slots; nothing is read before it was written; every row of every output is written exactly once;
* reuse of a heap half: a call's writes are ordered after everything two calls before did there, for every pair of the
  given plans. Nothing is assumed of the call between them: it may be any third plan, and ranks may be skewed by it.
  Every call is proved by itself and ends with credits, so pairs two calls apart are all that a longer sequence adds.

Ranks of one class can be proved by one program: ``check_symmetric``.

Order is followed with vector clocks, one component a lane of a rank; buffers are swept by rows, so that the cost grows
with the number of steps, not with its square.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ..errors import PlanError
from ..plan import (
    CREDIT,
    Buffer,
    Collective,
    Copy,
    Gemm,
    Get,
    Plan,
    PlanCaps,
    Program,
    Put,
    Reduce,
    Region,
    Signal,
    Step,
    Wait,
)
from .structure import Structure

__all__ = ["Access", "Event", "check", "sweep"]


def check(plans: Sequence[Plan], *, caps: PlanCaps | None = None, free_queues: bool | None = None) -> None:
    """Prove ``plans`` as the module's head says.

    Args:
        plans: Calls that may follow each other on one heap.
        caps: The transport's facts; None: any role may be used.
        free_queues: The queue model: True: every lane has a queue of its own; False: all lanes of a rank share one;
            None: shared, except for plans that declare that they need their own where ``caps`` grants them.
    Raises:
        PlanError: The first rule that is broken, naming op, rank, step and region.
    """
    unique: list[Plan] = []
    for plan in plans:
        if not any(plan is other for other in unique):
            unique.append(plan)
    calls = [_Call(plan, caps, free_queues) for plan in unique]
    for earlier in calls:
        for later in calls:
            _reuse(earlier, later)


def _reuse(earlier: _Call, later: _Call) -> None:
    """``later`` runs two calls after ``earlier`` in the same heap half."""
    if earlier.plan.size != later.plan.size:
        raise PlanError(f"plans of {earlier.plan.size} and {later.plan.size} ranks cannot share a heap")
    if not (earlier.counted and later.counted):
        return
    if earlier.credits != later.credits:
        silent, other = (later, earlier) if earlier.credits else (earlier, later)
        raise PlanError(f"{silent.plan.op} raises no credits, but {other.plan.op} on the same heap waits for them")
    for owner, accesses in earlier.finishers.items():
        for known, write in later.knowing.get(owner, {}).items():
            for finishers, access in accesses.items():
                if not known & finishers:
                    write.fail(
                        f"writes to rank {owner}'s half without the credit of a rank that finished, two calls before, "
                        f"step {access.step} ({type(access.what).__name__}) of rank {access.rank} of "
                        f"{earlier.plan.op}: one of ranks {_ranks(finishers)}"
                    )


def _ranks(mask: int) -> str:
    return ", ".join(str(r) for r in range(mask.bit_length()) if mask >> r & 1)


@dataclass(slots=True, eq=False)
class Event:
    """A step, or a segment of one, with what had happened before it.

    ``clock[t] >= n``: the n-th step of thread t had completed. ``known``: bits of ranks that had finished the call two
    before, as credits told.
    """

    op: str
    rank: int
    step: int
    what: Step
    thread: int
    pos: int
    clock: list[int]
    known: int

    def after(self, other: Event) -> bool:
        """Whether ``other`` had completed before this began."""
        if self.thread == other.thread:
            return other.pos < self.pos
        return self.clock[other.thread] >= other.pos

    def join(self, other: Event) -> None:
        """``other`` completed before this begins."""
        self.known |= other.known
        if not self.after(other):
            clock = list(map(max, self.clock, other.clock))
            clock[other.thread] = other.pos
            self.clock = clock

    def fail(self, text: str) -> NoReturn:
        raise PlanError(f"{self.op}: rank {self.rank}, step {self.step} ({type(self.what).__name__}): {text}")


@dataclass(slots=True)
class _Lane:
    thread: int
    clock: list[int]
    known: int
    pos: int = 0


@dataclass(slots=True, eq=False)
class Access:
    """One rectangle of one buffer that an event reads or writes."""

    region: Region
    cols: tuple[int, int]
    write: bool
    event: Event
    sums: bool = False  # a write that adds to what the same segment reads there


@dataclass(slots=True)
class _Meeting:
    """A collective that ranks have arrived at: who takes part, in the order of its regions, and their steps."""

    members: tuple[int, ...]
    steps: dict[int, tuple[int, Collective]] = field(default_factory=dict)


class _Call:
    """One plan, proved by itself; keeps what the proof of its neighbours needs.

    Attributes:
        counted: Whether it uses the heap or words, as the calls do that take halves of the heap in turn.
        credits: Whether ranks tell each other that they have finished.
        finishers: owner -> {ranks one of whose credits covers an access to the owner's half: such an access}.
        knowing: owner -> {ranks known to have finished two calls before: a write to the owner's half}.
    """

    def __init__(self, plan: Plan, caps: PlanCaps | None, free_queues: bool | None) -> None:
        self.plan = plan
        Structure(plan, caps).check()
        if free_queues is None:
            free_queues = plan.meta.get("queues") == "free" and (caps is None or caps.free_queues)
        steps = [s for p in plan.programs for s in p.steps]
        heap = any(b.space == "heap" for p in plan.programs for b in p.buffers)
        one_sided = heap or any(isinstance(s, Put | Get | Signal | Wait) for s in steps)
        self.counted = any(p.counted for p in plan.programs)
        self.credits = plan.size > 1 and self.counted and (one_sided if caps is None else caps.one_sided)
        self.finishers: dict[int, dict[int, Event]] = defaultdict(dict)
        self.knowing: dict[int, dict[int, Event]] = defaultdict(dict)
        order = _Order(plan, free_queues)
        order.run()
        for (owner, name), accesses in order.accesses.items():
            sweep(owner, order.buffers[owner][name], accesses)
        self._written(order)
        if self.credits:
            self._credited(order)
        self._summarise(order)

    def _credited(self, order: _Order) -> None:
        """Every rank tells every peer (with two levels: on its host) once that it has finished, after its every other
        step.
        """
        for program in self.plan.programs:
            told = order.credits[program.rank]
            hosts = self.plan.meta.get("hosts")
            near = {r for r in range(self.plan.size) if not hosts or hosts[r] == hosts[program.rank]}
            missing = near - {program.rank} - told.keys()
            if missing:
                raise PlanError(
                    f"{self.plan.op}: rank {program.rank} raises no credit at rank {min(missing)}, "
                    "so that nobody may ever write into this half again"
                )
            for last in order.last[program.rank].values():
                for event in told.values():
                    if not event.after(last):
                        event.fail(f"raises the credit before step {last.step} ({type(last.what).__name__}) has ended")

    def _written(self, order: _Order) -> None:
        """Outputs that no step touched must be empty (the sweep looked at the others)."""
        for program in self.plan.programs:
            for b in program.buffers:
                if b.space == "output" and b.rows * b.cols and (program.rank, b.name) not in order.accesses:
                    raise PlanError(f"{self.plan.op}: rank {program.rank}: output {b.name!r} is never written")

    def _summarise(self, order: _Order) -> None:
        # Of the credits a lane raises, the first covers the least.
        first: list[dict[int, Event]] = [{} for _ in order.credits]
        for told, least in zip(order.credits, first, strict=True):
            for event in told.values():
                least.setdefault(event.thread, event)
        for (owner, name), accesses in order.accesses.items():
            if order.buffers[owner][name].space != "heap":
                continue
            for a in accesses:
                finishers = 1 << a.event.rank
                if first[owner] and all(event.after(a.event) for event in first[owner].values()):
                    finishers |= 1 << owner
                self.finishers[owner].setdefault(finishers, a.event)
                if a.write:
                    self.knowing[owner].setdefault(a.event.known, a.event)


def _twins(hosts: Sequence[int], rank: int) -> tuple[int, ...]:
    """The ranks with ``rank``'s number on their hosts, host by host."""
    numbers = [list(hosts[:r]).count(h) for r, h in enumerate(hosts)]
    return tuple(sorted((r for r in range(len(hosts)) if numbers[r] == numbers[rank]), key=lambda r: hosts[r]))


def _queues(program: Program, free: bool) -> list[deque[int]]:
    """The steps of each queue, in enqueue order: all in one, or one a lane."""
    queues: dict[int, deque[int]] = defaultdict(deque)
    for i, step in enumerate(program.steps):
        queues[step.lane if free else 0].append(i)
    return list(queues.values())


class _Order:
    """Runs all ranks, by default in the least free model, and follows what happens before what in the freest one."""

    def __init__(self, plan: Plan, free_queues: bool = False) -> None:
        self.plan, self.size = plan, plan.size
        #: Of every rank, the steps each queue still has to run.
        self._queues = [_queues(p, free_queues) for p in plan.programs]
        self.buffers = [{b.name: b for b in p.buffers} for p in plan.programs]
        self.accesses: dict[tuple[int, str], list[Access]] = defaultdict(list)
        self.credits: list[dict[int, Event]] = [{} for _ in range(self.size)]
        #: The last step of every lane that is not a credit.
        self.last: list[dict[int, Event]] = [{} for _ in range(self.size)]
        self.lanes: list[dict[int, _Lane]] = []
        threads = sum(len({s.lane for s in p.steps}) for p in plan.programs)
        # A segment that raises words of its own is a thread of its own: its kernel orders it with no other segment.
        private = sum(bool(g.done) for p in plan.programs for s in p.steps if isinstance(s, Gemm) for g in s.segments)
        self._private = threads
        start = [0] * (threads + private)
        thread = 0
        for rank, program in enumerate(plan.programs):
            lanes = {}
            for lane in sorted({s.lane for s in program.steps}):
                lanes[lane] = _Lane(thread, start, 1 << rank)
                thread += 1
            self.lanes.append(lanes)
        self._events: list[dict[int, Event]] = [{} for _ in range(self.size)]
        self._segments: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self._raised: dict[tuple[int, int, int], Event] = {}
        self._met: dict[tuple[int, int, int], Event] = {}
        self._polled: set[tuple[int, int, int]] = set()
        #: Word that is not up yet -> (rank, step) that waits for it.
        self._blocked: dict[tuple[int, int, int], tuple[int, int]] = {}
        #: (ranks that take part, number of the collective among those of these ranks) -> who has come.
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self._attended: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
        self._ready = list(range(self.size))

    def run(self) -> None:
        while self._ready:
            self._advance(self._ready.pop())
        for rank, queues in enumerate(self._queues):
            if heads := [queue[0] for queue in queues if queue]:
                self._stuck(rank, heads)
        for (at, writer, word), event in self._raised.items():
            if (at, writer, word) not in self._met and (at, writer, word) not in self._polled:
                event.fail(f"raises word {word} of rank {writer} at rank {at}, which nobody there waits for")

    def _stuck(self, rank: int, heads: Sequence[int]) -> NoReturn:
        """Say which of a rank's next steps, one a queue, never runs, and why."""
        words = {step: key for key, (r, step) in self._blocked.items() if r == rank}
        i = next((head for head in heads if head in words), heads[0])
        what = self.plan.programs[rank].steps[i]
        where = f"{self.plan.op}: rank {rank}, step {i} ({type(what).__name__})"
        if i not in words:
            raise PlanError(f"{where}: not all ranks come to this collective")
        _, writer, word = words[i]
        shared = len(self._queues[rank]) == 1
        raise PlanError(
            f"{where}: waits for word {word} of rank {writer} for ever: it is not raised, or only by steps that "
            + ("come later where lanes share one in-order queue" if shared else "wait for this one themselves")
        )

    def _advance(self, rank: int) -> None:
        """Run steps of ``rank`` until every queue has to wait."""
        moved = True
        while moved:
            moved = False
            for queue in self._queues[rank]:
                while queue and self._run_step(rank, queue[0]):
                    queue.popleft()
                    moved = True

    def _run_step(self, rank: int, i: int) -> bool:
        """Run step ``i``; False if it has to wait."""
        events, step = self._events[rank], self.plan.programs[rank].steps[i]
        if any(j not in events for j in step.after):
            return False
        lane = self.lanes[rank][step.lane]
        event = Event(self.plan.op, rank, i, step, lane.thread, lane.pos + 1, lane.clock, lane.known)
        for j in step.after:
            event.join(events[j])
        if not self._perform(event):
            return False
        events[i] = event
        lane.pos, lane.clock, lane.known = event.pos, event.clock, event.known
        if not (isinstance(step, Signal) and step.slot == CREDIT):
            self.last[rank][lane.thread] = event
        return True

    def _perform(self, event: Event) -> bool:
        """Do what the step does to slots and memory; False if it has to wait."""
        step = event.what
        match step:
            case Wait(slot=slot):
                if slot == CREDIT:
                    event.known |= 1 << step.peer
                    return True
                return self._meet(event, step.peer, slot, polls=False)
            case Signal():
                self._raise(event, step.peer, step.slot)
            case Gemm():
                return self._gemm(event, step)
            case Collective():
                return self._collective(event, step)
            case Put():
                self._touch(event, step.src, False)
                self._touch(event, step.dst, True)
                self._raise(event, step.peer, step.slot)
            case Get() | Copy():
                self._touch(event, step.src, False)
                self._touch(event, step.dst, True)
            case Reduce():
                for src in step.srcs:
                    self._touch(event, src, False)
                self._touch(event, step.dst, True)
        return True

    def _meet(self, event: Event, writer: int, word: int, *, polls: bool) -> bool:
        key = (event.rank, writer, word)
        raised = self._raised.get(key)
        if raised is None:
            self._blocked[key] = (event.rank, event.step)
            return False
        if polls:
            self._polled.add(key)
        elif self._met.setdefault(key, event) is not event:
            event.fail(f"waits for word {word} of rank {writer}, as step {self._met[key].step} did")
        event.join(raised)
        return True

    def _raise(self, event: Event, at: int, word: int) -> None:
        if word == CREDIT:
            if at in self.credits[event.rank]:
                event.fail(f"raises the credit at rank {at} a second time")
            self.credits[event.rank][at] = event
            return
        key = (at, event.rank, word)
        if key in self._raised:
            event.fail(f"raises word {word} at rank {at}, as step {self._raised[key].step} did")
        self._raised[key] = event
        if (waiter := self._blocked.pop(key, None)) is not None:
            self._ready.append(waiter[0])

    def _gemm(self, event: Event, step: Gemm) -> bool:
        """Segments begin in order; each sees what its own ready words tell, and none sees another's result."""
        done = self._segments[event.rank, event.step]
        while len(done) < len(step.segments):
            segment = step.segments[len(done)]
            part = Event(event.op, event.rank, event.step, step, event.thread, event.pos, event.clock, event.known)
            if segment.done:
                part.thread, part.pos = self._private, 1
            if not all(self._meet(part, writer, word, polls=True) for writer, word in segment.ready):
                return False
            self._private += bool(segment.done)
            for region in (segment.a, segment.b, *segment.addends, *((segment.bias,) if segment.bias else ())):
                self._touch(part, region, False)
            self._touch(part, segment.out, True, sums=segment.out in segment.addends)
            for peer, word in segment.done:
                self._raise(part, peer, word)
            done.append(part)
        for part in done:
            if part.clock is not event.clock or part.thread != event.thread:
                event.known |= part.known
                event.clock = list(map(max, event.clock, part.clock))
                if part.thread != event.thread:
                    event.clock[part.thread] = part.pos
        done.clear()
        return True

    def _collective(self, event: Event, step: Collective) -> bool:
        """All ranks, or all of one number on their hosts, come to the same one; its completion tells nothing about
        other memory, so no clock is joined.
        """
        members = _twins(self.plan.meta["hosts"], event.rank) if step.between else tuple(range(self.size))
        number = self._attended[event.rank, members]
        meeting = self._meetings.setdefault((members, number), _Meeting(members))
        if event.rank not in meeting.steps:
            meeting.steps[event.rank] = (event.step, step)
            if len(meeting.steps) == len(members):
                self._agree(meeting)
                self._ready += [r for r in meeting.steps if r != event.rank]
        if len(meeting.steps) < len(members):
            return False
        self._attended[event.rank, members] += 1
        for src in step.srcs:
            self._touch(event, src, False)
        for dst in step.dsts:
            self._touch(event, dst, True)
        for word in step.slots:
            self._raise(event, event.rank, word)
        return True

    def _agree(self, meeting: _Meeting) -> None:
        """All ranks run the same collective, and what one sends is what the other expects."""
        for at, r in enumerate(meeting.members):
            i, step = meeting.steps[r]
            for to, p in enumerate(meeting.members):
                j, other = meeting.steps[p]
                if (step.kind, step.op) != (other.kind, other.op):
                    raise PlanError(
                        f"{self.plan.op}: rank {r}, step {i} is {step.kind}, but rank {p}, step {j} is {other.kind}"
                    )
                match step.kind:
                    case "all_gather":
                        src, dst = step.srcs[0], other.dsts[at]
                    case "all_to_all":
                        src, dst = step.srcs[to], other.dsts[at]
                    case "reduce_scatter":
                        src, dst = step.srcs[to], other.dsts[0]
                    case _:
                        src, dst = step.srcs[0], other.dsts[0]
                if src.blocks * src.rows != dst.blocks * dst.rows:
                    raise PlanError(
                        f"{self.plan.op}: rank {r}, step {i} ({step.kind}) sends {src} to rank {p}, which expects {dst}"
                    )

    def _touch(self, event: Event, region: Region, write: bool, *, sums: bool = False) -> None:
        buffer = self.buffers[event.rank][region.buf]
        if buffer.space == "input" or not region.rows * region.blocks:
            return
        end = buffer.cols if region.cols < 0 else region.col + region.cols
        if end > region.col:
            owner = region.at if region.at >= 0 else event.rank
            self.accesses[owner, region.buf].append(Access(region, (region.col, end), write, event, sums))


def sweep(owner: int, buffer: Buffer, accesses: Sequence[Access]) -> None:
    """Prove the accesses to one buffer, given in an order in which they may happen, free of races."""
    rows = {0, buffer.rows}
    cols = {0, buffer.cols}
    for a in accesses:
        cols.update(a.cols)
        for first, last in _bands(a.region):
            rows.update((first, last))
    row_at, col_at = ({x: i for i, x in enumerate(sorted(s))} for s in (rows, cols))
    width = len(cols) - 1
    written: list[Access | None] = [None] * ((len(rows) - 1) * width)
    readers: list[list[Access]] = [[] for _ in written]
    for a in accesses:
        left, right = col_at[a.cols[0]], col_at[a.cols[1]]
        for first, last in _bands(a.region):
            for row in range(row_at[first], row_at[last]):
                for cell in range(row * width + left, row * width + right):
                    before = written[cell]
                    if before is not None:
                        _ordered(owner, before, a)
                    elif not a.write:
                        a.event.fail(f"reads {a.region} of rank {owner} before anything was written there")
                    if not a.write:
                        readers[cell].append(a)
                        continue
                    if before is not None and buffer.space == "output":
                        a.event.fail(f"writes output {a.region} again, after step {before.event.step}")
                    for reader in readers[cell]:
                        _ordered(owner, reader, a)
                    written[cell], readers[cell] = a, []
    if buffer.space == "output" and None in written:
        row = sorted(rows)[written.index(None) // width]
        raise PlanError(f"{accesses[0].event.op}: rank {owner}: row {row} of output {buffer.name!r} is never written")


def _ordered(owner: int, first: Access, second: Access) -> None:
    """``first`` has completed before ``second`` begins, or both are one segment that adds in place."""
    if second.event is first.event:
        if second.sums and first.region == second.region:
            return
    elif second.event.after(first.event):
        return
    verbs = [("writes", "reads")[not a.write] for a in (second, first)]
    second.event.fail(
        f"{verbs[0]} {second.region} of rank {owner} while rank {first.event.rank}, step {first.event.step} "
        f"({type(first.event.what).__name__}), {verbs[1]} {first.region}: nothing orders the two"
    )


def _bands(region: Region) -> Iterator[tuple[int, int]]:
    """The rows of a region as (first, last + 1)."""
    for b in range(region.blocks):
        first = region.row + b * region.block_stride
        yield first, first + region.rows
