"""Planners: pure functions from the sizes of a call to its plan. No torch, no transport.

``program`` gives one rank's program alone (what runs); ``plan`` gives all ranks' (what ``check`` proves and pictures
show). ``candidates`` and ``default_knobs`` say what may be chosen and what is chosen when nothing better is known.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

from ..errors import PlanError
from ..plan import ITEMSIZE, MAX_CHUNKS, Knobs, Plan, PlanCaps, Problem, Program
from . import all_gather_matmul, collectives, dgrad, matmul_all_reduce, matmul_reduce_scatter
from .draft import Draft

__all__ = ["OPS", "SCHEDULES", "candidates", "default_knobs", "plan", "program", "supports"]

Planner = Callable[[Draft], None]

#: op -> name of a schedule -> the planner that writes one rank's steps into a draft.
SCHEDULES: Mapping[str, Mapping[str, Planner]] = {
    "all_gather": collectives.ALL_GATHER,
    "reduce_scatter": collectives.REDUCE_SCATTER,
    "all_reduce": collectives.ALL_REDUCE,
    "all_gather_matmul": all_gather_matmul.SCHEDULES,
    "matmul_reduce_scatter": matmul_reduce_scatter.SCHEDULES,
    "matmul_all_reduce": matmul_all_reduce.SCHEDULES,
    "dgrad_reduce_scatter": dgrad.REDUCE_SCATTER,
    "dgrad_all_reduce": dgrad.ALL_REDUCE,
}
OPS: tuple[str, ...] = tuple(SCHEDULES)

_FLAGS = {
    "all_gather_matmul": {"gathered", "wgrad"},
    "dgrad_reduce_scatter": {"wgrad", "saved", "no_dgrad"},
    "dgrad_all_reduce": {"wgrad", "no_dgrad"},
}
#: Schedules that read or write a peer's memory like their own, and the ops whose gather side can poll.
_READ_PEERS = {"pull", "direct", "one_shot_pull", "two_shot_pull", "two_shot_direct"}
_POLLING = {"all_gather_matmul": {"push", "pull", "collective"}}

_MAX_LANES = 16
#: Below this many bytes for one peer, a second lane costs more than it hides.
_TINY_NBYTES = 64 << 10
#: A chunk that a host's copy thread moves at full speed.
_CHUNK_NBYTES = 2 << 20
_CHUNK_COUNTS = (1, 2, 4, 8, 16, 32)
#: All-reduces up to this size send everything to everyone.
_ONE_SHOT_NBYTES = 256 << 10


def supports(problem: Problem, caps: PlanCaps, knobs: Knobs) -> str | None:
    """Return None if ``knobs`` can serve ``problem`` on a transport with ``caps``, else the reason in one line."""
    if reason := _malformed(problem):
        return reason
    schedules = SCHEDULES[problem.op]
    if knobs.schedule not in schedules:
        return f"{problem.op} has no schedule {knobs.schedule!r}: it has {', '.join(schedules)}"
    if not 1 <= knobs.chunks <= MAX_CHUNKS:
        return f"chunks={knobs.chunks}: 1 to {MAX_CHUNKS}"
    if not 0 <= knobs.lanes < _MAX_LANES:
        return f"lanes={knobs.lanes}: 0 to {_MAX_LANES - 1}"
    if knobs.polls and knobs.schedule not in _POLLING.get(problem.op, ()):
        return f"schedule {knobs.schedule!r} of {problem.op} has no polling form"
    return _lacks(problem, caps, knobs.schedule)


def _malformed(problem: Problem) -> str | None:
    """Why no planner could serve the problem, whatever the knobs."""
    op = problem.op
    if op not in SCHEDULES:
        return f"unknown op {op!r}: one of {', '.join(OPS)}"
    if unknown := set(problem.flags) - _FLAGS.get(op, set()):
        return f"{op} has no flag {', '.join(sorted(unknown))}"
    if problem.dtype not in ITEMSIZE:
        return f"unknown dtype {problem.dtype!r}"
    if (
        not problem.rows
        or min(problem.rows) < 0
        or problem.blocks < 0
        or problem.k < 0
        or min(problem.n, default=0) < 0
    ):
        return f"sizes must not be negative and there is at least one rank: {problem}"
    if op.endswith("all_reduce") and problem.blocks != 1:
        return f"{op} splits its rows over ranks in one block, not {problem.blocks}"
    many = op in ("all_gather_matmul", "dgrad_reduce_scatter", "dgrad_all_reduce")
    if (("matmul" in op or many) and not problem.n) or (len(problem.n) > 1 and not many):
        return f"{op} takes {'at least one weight' if many else 'one weight'}, not {len(problem.n)}"
    if op == "all_gather_matmul" and "wgrad" in problem.flags and len(problem.n) != 1:
        return f"{op} with wgrad takes one weight, not {len(problem.n)}"
    return None


def _lacks(problem: Problem, caps: PlanCaps, schedule: str) -> str | None:
    """What the transport lacks for the schedule; a single rank needs none and has one plan."""
    if problem.size == 1:
        return None
    if schedule == "collective":
        return None if caps.collective else "the transport has no collectives"
    if schedule == "sequence":
        return None if caps.one_sided or caps.collective else "the transport has no role"
    if not caps.one_sided:
        return "the transport is not one-sided"
    if schedule in _READ_PEERS and not caps.peer_view:
        return "the transport gives no view of peers' memory"
    return None


def candidates(problem: Problem, caps: PlanCaps) -> list[Knobs]:
    """Return all knobs worth trying: every legal schedule, in forms and chunk counts whose plans differ."""
    if problem.size == 1:
        return [default_knobs(problem, caps)]
    found: dict[Program, Knobs] = {}
    forms = itertools.product(SCHEDULES.get(problem.op, ()), _CHUNK_COUNTS, (0, 1, 2), (False, True))
    for schedule, chunks, lanes, polls in forms:
        knobs = Knobs(schedule, chunks, lanes, polls)
        overlaps = schedule != "sequence" or (chunks, lanes) == (1, 0)
        if overlaps and supports(problem, caps, knobs) is None:
            found.setdefault(program(problem, 0, caps, knobs), knobs)
    return list(found.values())


def default_knobs(problem: Problem, caps: PlanCaps) -> Knobs:
    """Return the knobs used when none are given and none were measured. A rule by bytes:

    * one rank: nothing travels, the first schedule in its one form;
    * transports with collectives only: ``collective``;
    * with peer views, ranks read each other's memory (``pull``; all-reduces ``one_shot_pull`` while small); else
      they put (``push``, ``one_shot``, ``two_shot``);
    * what one rank sends to one peer below 64 KiB: one chunk, everything in the caller's lane; above: one copy lane, in
      chunks of about 2 MiB, at most 8.

    Raises:
        PlanError: No schedule can serve the problem; the message lists the reasons.
    """
    schedule = _default_schedule(problem, caps)
    nbytes = _peer_nbytes(problem)
    chunks = max(1, min(8, nbytes // _CHUNK_NBYTES))
    moves = problem.size > 1 and nbytes >= _TINY_NBYTES
    knobs = Knobs(schedule, chunks, lanes=1) if moves else Knobs(schedule, 1, lanes=0)
    if (reason := supports(problem, caps, knobs)) is not None:
        raise PlanError(f"no schedule for {problem}: {reason}")
    return knobs


def _default_schedule(problem: Problem, caps: PlanCaps) -> str:
    op = problem.op
    if problem.size == 1:
        return next(iter(SCHEDULES.get(op, ("",))))
    if not caps.one_sided:
        return "collective"
    reads = caps.peer_view
    if op.endswith("all_reduce"):
        small = problem.total * _cols(problem) * ITEMSIZE.get(problem.dtype, 1) <= _ONE_SHOT_NBYTES
        return ("one_shot" if small else "two_shot") + ("_pull" if reads else "")
    if op == "reduce_scatter":
        return "push"
    return "pull" if reads else "push"


def _cols(problem: Problem) -> int:
    """Columns of what travels."""
    return problem.n[0] if problem.op in ("matmul_reduce_scatter", "matmul_all_reduce") else problem.k


def _peer_nbytes(problem: Problem) -> int:
    """Bytes the longest shard sends to one peer."""
    return problem.blocks * max(problem.rows) * _cols(problem) * ITEMSIZE.get(problem.dtype, 1)


def program(problem: Problem, rank: int, caps: PlanCaps, knobs: Knobs) -> Program:
    """Return one rank's program. Raises PlanError with ``supports``' reason."""
    if (reason := supports(problem, caps, knobs)) is not None:
        raise PlanError(f"{problem.op} with {knobs}: {reason}")
    if not 0 <= rank < problem.size:
        raise PlanError(f"rank {rank} of {problem.size}")
    draft = Draft(problem, rank, caps, knobs)
    SCHEDULES[problem.op][knobs.schedule](draft)
    return draft.program()


def plan(problem: Problem, caps: PlanCaps, knobs: Knobs) -> Plan:
    """Return all ranks' programs. Where ``k`` or ``n`` differ between ranks this is the plan of equal ones."""
    programs = tuple(program(problem, rank, caps, knobs) for rank in range(problem.size))
    meta = {"problem": dataclasses.asdict(problem), "knobs": dataclasses.asdict(knobs)}
    return Plan(problem.op, problem.size, programs, meta)
