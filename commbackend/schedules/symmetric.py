"""Plans of many ranks made once: where all shards are equal, every rank's program is rank 0's, seen from that rank.

``Turn`` numbers the ways from one rank to another, so that way s leads from rank 0 to rank s, and from any rank to the
one that stands to it as s stands to 0. What rank q does to rank 0 is then what rank 0 does to the rank that stands to
it as 0 stands to q. Costs and proofs of any number of ranks need no more than one program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlanError
from ..plan import (
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
    Signal,
    Wait,
)
from .catalog import needs_free_queues, program
from .shards import Turn

__all__ = ["SymmetricPlan", "seen_from", "symmetric_plan"]


@dataclass(frozen=True, slots=True)
class SymmetricPlan:
    """One call of ``size`` ranks whose programs are all ``program``, rank 0's, seen from the rank that runs it.

    Attributes:
        domain: As in ``Knobs``.
        program: Rank 0's, for proofs.
        middle: The program of the rank in the middle, for costs: where peers' rows lie on both sides of its own, its
            products are cut once more.
        meta: As in ``Plan``.
    """

    op: str
    size: int
    domain: int
    program: Program
    middle: Program
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def turn(self) -> Turn:
        """The numbering of ways between ranks."""
        return Turn(self.size, self.domain)


def symmetric_plan(problem: Problem, caps: PlanCaps, knobs: Knobs) -> SymmetricPlan:
    """Return the plan of all ranks, made of rank 0's program alone; some others are made too, and compared with it.

    Raises:
        PlanError: Shards differ, a rank's program differs, or there is no such plan.
    """
    if len(set(problem.rows)) != 1:
        raise PlanError(f"{problem.op}: shards of different rows: ranks are of more than one class")
    if caps.hosts:
        raise PlanError(f"{problem.op}: ranks of two levels are of more than one class")
    size = problem.size
    first = program(problem, 0, caps, knobs)
    turn = Turn(size, knobs.domain)
    middle = program(problem, size // 2, caps, knobs)
    wanted = seen_from(first, turn)
    for other in (middle, program(problem, size - 1, caps, knobs)):
        if seen_from(other, turn) != wanted:
            raise PlanError(f"{problem.op} with {knobs}: rank {other.rank}'s program is not rank 0's")
    meta: dict[str, Any] = {"problem": dataclasses.asdict(problem), "knobs": dataclasses.asdict(knobs)}
    if needs_free_queues(problem, knobs):
        meta["queues"] = "free"
    return SymmetricPlan(problem.op, size, knobs.domain, first, middle, meta)


def seen_from(p: Program, turn: Turn) -> list[object]:
    """Return what the programs of one class have in common: buffers, and steps with the ways to their peers.

    Where rows lie is left out, and products of one step count by their rows together: neighbouring rows are one product
    at some ranks and two at others.
    """
    ways = {turn.add(p.rank, s): s for s in range(turn.size)}
    found: list[object] = [(b.name, b.space, b.rows, b.cols, b.dtype) for b in p.buffers]
    for s in p.steps:
        head: tuple[object, ...] = (type(s), s.lane, s.after)
        match s:
            case Put():
                found.append((*head, ways[s.peer], s.slot, _shape(s.src), _shape(s.dst)))
            case Get():
                found.append((*head, ways[s.peer], _shape(s.src), _shape(s.dst)))
            case Signal():
                found.append((*head, ways[s.peer], s.slot, s.delta))
            case Wait():
                found.append((*head, ways[s.peer], s.slot, s.delta, *map(_shape, s.covers)))
            case Copy():
                found.append((*head, _shape(s.src), _shape(s.dst)))
            case Reduce():
                found.append((*head, sorted(map(_shape, s.srcs)), _shape(s.dst), s.op))
            case Collective():
                found.append((*head, s.kind, sorted(map(_shape, s.srcs)), sorted(map(_shape, s.dsts)), s.slots, s.op))
            case Gemm():
                words = sorted((ways[q], w) for x in s.segments for q, w in (*x.ready, *x.done))
                rows = sum(x.out.rows * x.out.blocks for x in s.segments)
                found.append((*head, s.form, rows, words, len(s.segments[0].addends)))
    return found


def _shape(r: Region) -> tuple[object, ...]:
    return r.buf, r.rows, r.cols, r.blocks, r.at >= 0
