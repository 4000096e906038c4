"""The proof of plans of very many ranks by the program of one: what ``check`` proves, for ranks of one class.

All ranks of a ``SymmetricPlan`` run the same program, each seen from itself, and slots only grow: if the steps of rank
0 can be run one after the other, each waiting only for words that rank 0's own earlier steps raise in place of its
peers, then all ranks can take the same steps together, round by round, and a set of programs that ends in one
interleaving ends in all of them. So one program is run, with vector clocks over the lanes of all ranks; what a peer
knows is what rank 0 knows, turned to that peer.

Every rank's memory is like rank 0's. Peers write to it with puts: each put is taken for a write to the rows that rank
0's wait for its word covers. That it writes just those rows is compared with the programs of some ranks as they
are, since where a peer's rows lie does not follow by turning.

What is not proved this way is refused: steps that read or write a peer's memory in other ways than by puts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NoReturn

from ..errors import PlanError
from ..plan import CREDIT, Collective, Copy, Gemm, Get, Plan, PlanCaps, Program, Put, Reduce, Region, Signal, Step, Wait
from ..schedules.symmetric import SymmetricPlan
from . import Access, Event, sweep
from .structure import Structure

__all__ = ["check_symmetric"]

#: Word that rank 0 raises: (rank at which, word).
Word = tuple[int, int]


def check_symmetric(plan: SymmetricPlan, program_of: Callable[[int], Program], *, caps: PlanCaps | None = None) -> None:
    """Prove ``plan``, and that it may follow itself on one heap, as ``check`` would for all its ranks.

    Args:
        program_of: Makes one rank's program, for the comparison of where puts write.
        caps: As in ``check``.

    Raises:
        PlanError: The first rule that is broken, or what this proof does not cover.
    """
    structure = Structure(Plan(plan.op, plan.size, (), plan.meta), caps)
    structure.check_program(plan.program)
    free = plan.meta.get("queues") == "free" and (caps is None or caps.free_queues)
    proof = _Proof(plan, free_queues=bool(free))
    proof.run()
    for peer in sorted({1 % plan.size, plan.size // 2, plan.size - 1} - {0}):
        program = program_of(peer)
        structure.check_program(program)
        proof.compare(program)


class _Proof:
    def __init__(self, plan: SymmetricPlan, free_queues: bool) -> None:
        self.plan, self.program, self.turn, self.size = plan, plan.program, plan.turn, plan.size
        self.buffers = {b.name: b for b in self.program.buffers}
        lanes = sorted({s.lane for s in self.program.steps})
        #: Threads of a rank: its lanes, then one for every segment that raises words of its own.
        self.thread = {lane: i for i, lane in enumerate(lanes)}
        private = sum(bool(g.done) for s in self.program.steps if isinstance(s, Gemm) for g in s.segments)
        self.threads, self.private = len(lanes) + private, len(lanes)
        self.clock = {lane: [0] * (self.size * self.threads) for lane in lanes}
        self.known = dict.fromkeys(lanes, 1)
        self.pos = dict.fromkeys(lanes, 0)
        self.queues: dict[int, list[int]] = defaultdict(list)
        for i in reversed(range(len(self.program.steps))):
            self.queues[self.program.steps[i].lane if free_queues else 0].append(i)
        self.events: dict[int, Event] = {}
        self.raised: dict[Word, Event] = {}
        self.met: set[Word] = set()
        self.parts: dict[int, list[Event]] = defaultdict(list)
        #: What happened to the buffers of rank 0, in an order in which it may happen.
        self.accesses: dict[str, list[Access]] = defaultdict(list)
        #: (peer, word) -> the rows that rank 0 takes for what ``peer`` put.
        self.covers: dict[tuple[int, int], tuple[Region, ...]] = {}
        self.told: dict[int, Event] = {}
        self.last: dict[int, Event] = {}

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for queue in self.queues.values():
                while queue and self._step(queue[-1]):
                    queue.pop()
                    moved = True
        if left := [queue[-1] for queue in self.queues.values() if queue]:
            i = left[0]
            self._fail(i, "waits for ever: its word is not raised, or only by steps that come later or wait themselves")
        for word, event in self.raised.items():
            if word not in self.met:
                self._fail(event.step, f"raises word {word[1]} at rank {word[0]}, which nobody there waits for")
        for name, accesses in self.accesses.items():
            sweep(0, self.buffers[name], accesses)
        for b in self.buffers.values():
            if b.space == "output" and b.rows * b.cols and b.name not in self.accesses:
                raise PlanError(f"{self.plan.op}: output {b.name!r} is never written")
        self._credits()

    def compare(self, other: Program) -> None:
        """Puts of rank 0 to ``other``'s rank write what that rank's waits for them cover, and the other way round."""
        taken = {(s.peer, s.slot): s.covers for s in other.steps if isinstance(s, Wait) and s.slot != CREDIT}
        taken |= _polled(other)
        for writer, reader, covers in ((self.program, other.rank, taken), (other, 0, self.covers)):
            for i, s in enumerate(writer.steps):
                if isinstance(s, Put) and s.peer == reader:
                    rows = covers.get((writer.rank, s.slot), ())
                    if [_place(r) for r in rows] != [_place(s.dst)]:
                        raise PlanError(
                            f"{self.plan.op}: rank {writer.rank}, step {i} puts {s.dst}, but rank {reader} takes"
                            f" {rows} for it"
                        )

    # -- one step of rank 0
    def _fail(self, i: int, text: str) -> NoReturn:
        step = self.program.steps[i]
        raise PlanError(f"{self.plan.op}: rank 0, step {i} ({type(step).__name__}): {text}")

    def _step(self, i: int) -> bool:
        step = self.program.steps[i]
        if any(j not in self.events for j in step.after):
            return False
        lane = step.lane
        thread, pos = self.thread[lane], self.pos[lane] + 1
        event = Event(self.plan.op, 0, i, step, thread, pos, self.clock[lane], self.known[lane])
        for j in step.after:
            event.join(self.events[j])
        if not self._perform(event, step):
            return False
        self.events[i] = event
        self.pos[lane], self.clock[lane], self.known[lane] = event.pos, event.clock, event.known
        if not (isinstance(step, Signal) and step.slot == CREDIT):
            self.last[lane] = event
        return True

    def _perform(self, event: Event, step: Step) -> bool:
        match step:
            case Wait(slot=slot, peer=peer):
                if slot == CREDIT:
                    event.known |= 1 << peer
                    return True
                return self._meet(event, peer, slot, step.covers)
            case Signal():
                self._raise(event, step.peer, step.slot)
            case Put():
                self._touch(event, step.src, False)
                self._raise(event, step.peer, step.slot)
            case Get():
                self._fail(event.step, "reads a peer's memory: not proved by classes of ranks")
            case Copy():
                self._touch(event, step.src, False)
                self._touch(event, step.dst, True)
            case Reduce():
                for src in step.srcs:
                    self._touch(event, src, False)
                self._touch(event, step.dst, True)
            case Gemm():
                return self._gemm(event, step)
            case Collective():  # all ranks come to it: they run the same steps
                for src in step.srcs:
                    self._touch(event, src, False)
                for dst in step.dsts:
                    self._touch(event, dst, True)
                for word in step.slots:
                    self._raise(event, 0, word)
        return True

    def _gemm(self, event: Event, step: Gemm) -> bool:
        done = self.parts[event.step]
        while len(done) < len(step.segments):
            s = step.segments[len(done)]
            part = Event(event.op, 0, event.step, step, event.thread, event.pos, event.clock, event.known)
            if s.done:
                part.thread, part.pos = self.private, 1
            rows = dict(zip(sorted(s.ready), s.addends or (s.a,) * len(s.ready), strict=False))
            if not all(self._meet(part, writer, word, (rows[writer, word],)) for writer, word in s.ready):
                return False
            self.private += bool(s.done)
            for region in (s.a, s.b, *s.addends, *((s.bias,) if s.bias else ())):
                self._touch(part, region, False)
            self._touch(part, s.out, True, sums=s.out in s.addends)
            for peer, word in s.done:
                self._raise(part, peer, word)
            done.append(part)
        for part in done:
            event.known |= part.known
            event.clock = list(map(max, event.clock, part.clock))
            if part.thread != event.thread:
                event.clock[part.thread] = part.pos
        return True

    # -- words
    def _meet(self, event: Event, writer: int, word: int, covers: tuple[Region, ...]) -> bool:
        key = (self.turn.minus(0, writer), word)  # rank 0 raises it there, as the writer does here
        raised = self.raised.get(key)
        if raised is None:
            return False
        there = self._seen_at(raised, writer) if writer else raised
        if key not in self.met:
            self.met.add(key)
            if isinstance(raised.what, Put):
                self.covers[writer, word] = covers
                for region in covers:
                    self._touch(there, region, True)
        elif isinstance(event.what, Wait):
            self._fail(event.step, f"waits for word {word} of rank {writer} a second time")
        event.join(there)
        return True

    def _raise(self, event: Event, at: int, word: int) -> None:
        if word == CREDIT:
            if at in self.told:
                self._fail(event.step, f"raises the credit at rank {at} a second time")
            self.told[at] = event
        elif (at, word) in self.raised:
            self._fail(event.step, f"raises word {word} at rank {at}, as step {self.raised[at, word].step} did")
        else:
            self.raised[at, word] = event

    def _seen_at(self, event: Event, rank: int) -> Event:
        """What rank 0 did, as ``rank`` did it: its clock and credits turned by as much."""
        width, domain = self.threads, self.turn.domain
        clock: list[int] = []
        inner, outer = (domain - rank % domain) % domain * width, rank // domain
        block = domain * width
        for d in range(self.size // domain):
            at = (d - outer) % (self.size // domain) * block
            clock += event.clock[at + inner : at + block] + event.clock[at : at + inner]
        known = event.known
        if known != (1 << self.size) - 1:
            known = sum(1 << self.turn.add(r, rank) for r in range(self.size) if known >> r & 1)
        thread = rank * width + event.thread
        return Event(event.op, rank, event.step, event.what, thread, event.pos, clock, known)

    # -- memory of rank 0
    def _touch(self, event: Event, region: Region, write: bool, *, sums: bool = False) -> None:
        buffer = self.buffers[region.buf]
        if region.at > 0:
            self._fail(event.step, f"touches {region}: a peer's memory is reached by puts alone in this proof")
        if buffer.space == "input" or not region.rows * region.blocks:
            return
        end = buffer.cols if region.cols < 0 else region.col + region.cols
        if end > region.col:
            self.accesses[region.buf].append(Access(region, (region.col, end), write, event, sums))

    def _credits(self) -> None:
        """Every peer is told once, after everything; and whoever writes to a half knows who used it two calls ago."""
        heap = [a for name, found in self.accesses.items() if self.buffers[name].space == "heap" for a in found]
        if not self.told and not self.raised and not heap:
            return  # collectives alone: nothing is shared
        missing = set(range(1, self.size)) - self.told.keys()
        if missing:
            raise PlanError(f"{self.plan.op}: rank 0 raises no credit at rank {min(missing)}")
        for last in self.last.values():
            for event in self.told.values():
                if not event.after(last):
                    self._fail(event.step, f"raises the credit before step {last.step} has ended")
        everyone = (1 << self.size) - 1
        unsure = {a.event.known: a.event for a in heap if a.write and a.event.known != everyone}
        for known, write in unsure.items():
            for used in heap:
                # Rank 0's credit speaks for its peers' accesses to its memory too, where it follows them.
                finishers = 1 << used.event.rank | (1 if self._covered(used.event) else 0)
                if not known & finishers:
                    self._fail(write.step, f"writes to a half that rank {used.event.rank} may still use")

    def _covered(self, event: Event) -> bool:
        return all(told.after(event) for told in self.told.values())


def _polled(program: Program) -> dict[tuple[int, int], tuple[Region, ...]]:
    """(peer, word) -> the rows that a segment of a polling product takes for what the peer put."""
    found: dict[tuple[int, int], tuple[Region, ...]] = {}
    for s in program.steps:
        for segment in s.segments if isinstance(s, Gemm) else ():
            rows = segment.addends or (segment.a,) * len(segment.ready)
            found |= {key: (region,) for key, region in zip(sorted(segment.ready), rows, strict=False)}
    return found


def _place(r: Region) -> tuple[object, ...]:
    return r.buf, r.row, r.rows, r.col, r.cols, r.blocks, r.block_stride
