"""Every op's schedules, what each needs, and how a program is made of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import PlanError
from ..plan import (
    EXCHANGE_PROGRAMS,
    EXCHANGE_SLOT_NBYTES,
    ITEMSIZE,
    MAX_CHUNKS,
    PHASES,
    Knobs,
    Plan,
    PlanCaps,
    Problem,
    Program,
)
from . import all_gather_matmul, collectives, dgrad, matmul_all_reduce, matmul_reduce_scatter
from .draft import Draft
from .reduce_side import local_words
from .shards import Hosts
from .two_level import most_chunks

__all__ = [
    "KERNEL_NBYTES",
    "OPS",
    "POLLING",
    "SCHEDULES",
    "foldable",
    "needs_free_queues",
    "plan",
    "program",
    "supports",
]

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
    "matmul_all_reduce": {"norm", "residual"},
    "all_gather_matmul": {"gathered", "wgrad"},
    "dgrad_reduce_scatter": {"wgrad", "saved", "no_dgrad"},
    "dgrad_all_reduce": {"wgrad", "no_dgrad"},
}
#: Operations with fp8 operands.
_SCALED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
#: Schedules that read or write a peer's memory like their own.
_READ_PEERS = {"pull", "direct", "one_shot_pull", "two_shot_pull", "two_shot_direct"}
#: What ``one_shot_kernel`` sums.
_KERNEL_DTYPES, _KERNEL_RANKS = ("bfloat16", "float16", "float32"), 16
#: The widest rows that it normalises.
_NORMED_COLS = 16384
#: op -> schedules with a polling form.
POLLING: Mapping[str, tuple[str, ...]] = {
    "all_gather_matmul": ("push", "pull", "collective"),
    "matmul_reduce_scatter": ("push",),
    "matmul_all_reduce": ("two_shot",),
    "dgrad_reduce_scatter": ("push",),
    "dgrad_all_reduce": ("two_shot",),
}
_MAX_LANES = 16
#: Bytes that arrive at a rank in an all-reduce by one kernel, at most: rows of all ranks.
KERNEL_NBYTES = 2 << 20


def supports(problem: Problem, caps: PlanCaps, knobs: Knobs) -> str | None:
    """Return None if ``knobs`` can serve ``problem`` on a transport with ``caps``, else the reason in one line."""
    if reason := malformed(problem):
        return reason
    schedules = SCHEDULES[problem.op]
    if knobs.schedule not in schedules:
        return f"{problem.op} has no schedule {knobs.schedule!r}: it has {', '.join(schedules)}"
    if (problem.out_dtype or problem.scales) and problem.op not in _SCALED:
        return f"{problem.op} takes no scales"
    if not 1 <= knobs.chunks <= MAX_CHUNKS:
        return f"chunks={knobs.chunks}: 1 to {MAX_CHUNKS}"
    if not 0 <= knobs.lanes < _MAX_LANES:
        return f"lanes={knobs.lanes}: 0 to {_MAX_LANES - 1}"
    if knobs.domain and (knobs.domain < 0 or problem.size % knobs.domain):
        return f"domain={knobs.domain}: {problem.size} ranks are not domains of as many"
    if knobs.blocks < 0:
        return f"blocks={knobs.blocks}: must not be negative"
    if knobs.polls and knobs.schedule not in POLLING.get(problem.op, ()):
        return f"schedule {knobs.schedule!r} of {problem.op} has no polling form"
    if reason := _lacks(problem, caps, knobs.schedule):
        return reason
    if knobs.schedule == "two_level" and problem.size > 1 and (reason := _not_two_levels(problem, caps, knobs)):
        return reason
    if "norm" in problem.flags and (knobs.schedule != "one_shot_kernel" or problem.size == 1):
        return f"schedule {knobs.schedule!r} folds no norm in"
    return _cannot_poll(problem, caps, knobs) if knobs.polls and problem.size > 1 else None


def malformed(problem: Problem) -> str | None:
    """Return why no planner could serve the problem, whatever the knobs; None if one could."""
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
    if bool(caps.hosts) != (schedule == "two_level"):
        return "the transport has one level" if not caps.hosts else "the transport has two levels: two_level uses both"
    if schedule == "two_level":
        return None
    if schedule == "collective":
        return None if caps.collective else "the transport has no collectives"
    if schedule == "sequence":
        return None if caps.one_sided or caps.collective else "the transport has no role"
    if not caps.one_sided:
        return "the transport is not one-sided"
    if schedule == "one_shot_kernel":
        return _cannot_exchange(problem, caps)
    if schedule in _READ_PEERS and not caps.peer_view:
        return "the transport gives no view of peers' memory"
    return None


def _not_two_levels(problem: Problem, caps: PlanCaps, knobs: Knobs) -> str | None:
    """Why the hosts of a transport of two levels do not fit the problem."""
    if len(caps.hosts) != problem.size:
        return f"the transport has {len(caps.hosts)} ranks"
    most = most_chunks(len(set(caps.hosts)))
    if knobs.chunks > most:
        return f"chunks={knobs.chunks}: 1 to {most} with {len(set(caps.hosts))} hosts"
    return Hosts.uneven(caps.hosts)


def _cannot_poll(problem: Problem, caps: PlanCaps, knobs: Knobs) -> str | None:
    """Why the polling form of a schedule that has one does not fit the problem or the transport."""
    if problem.op == "all_gather_matmul":
        return None
    if len(problem.n) > 1 or "no_dgrad" in problem.flags:
        return f"the polling form of {problem.op} reduces the product of one weight"
    if knobs.folds and not caps.free_queues:
        return "folds: its kernel and its puts wait for each other, and this transport's lanes share one queue"
    if knobs.folds and not knobs.lanes:
        return "folds with lanes=0: the puts would queue behind the kernel that waits for the peers'"
    publishes = knobs.folds and problem.op.endswith("all_reduce")
    words, free = local_words(problem, knobs.chunks, publishes=publishes), PHASES * MAX_CHUNKS
    return (
        f"polls: {words} parts to tell of, a rank has {free} words for that: use fewer chunks" if words > free else None
    )


def _cannot_exchange(problem: Problem, caps: PlanCaps) -> str | None:
    """Why no kernel does this all-reduce alone."""
    cols = problem.n[0] if problem.op == "matmul_all_reduce" else problem.k
    if not caps.exchanges:
        return "no kernel here exchanges rows with peers"
    if problem.moved not in _KERNEL_DTYPES or problem.size > _KERNEL_RANKS:
        return f"the kernel sums {', '.join(_KERNEL_DTYPES)} of 2 to {_KERNEL_RANKS} ranks"
    if cols % 8 or ("norm" in problem.flags and cols > _NORMED_COLS):
        return f"the kernel takes rows of a multiple of 8 elements, up to {_NORMED_COLS} with a norm, not {cols}"
    row_nbytes = cols * ITEMSIZE[problem.moved]
    if problem.total * row_nbytes > KERNEL_NBYTES // problem.size:
        return f"more than {KERNEL_NBYTES // problem.size} bytes"
    if "norm" in problem.flags and -(-problem.total // EXCHANGE_PROGRAMS) * row_nbytes > EXCHANGE_SLOT_NBYTES:
        return f"whole rows for each of {EXCHANGE_PROGRAMS} thread blocks are more than {EXCHANGE_SLOT_NBYTES} bytes"
    return None


@functools.lru_cache(1024)
def foldable(problem: Problem, caps: PlanCaps) -> bool:
    """Whether one kernel does the whole of ``problem``, with all that its flags ask for."""
    return supports(problem, caps, Knobs("one_shot_kernel", lanes=0)) is None


def needs_free_queues(problem: Problem, knobs: Knobs) -> bool:
    """Whether the plan ends only where every lane has a queue of its own (``PlanCaps.free_queues``).

    Every other plan ends also where all lanes of a rank share one in-order queue.
    """
    return problem.size > 1 and knobs.polls and knobs.folds and problem.op != "all_gather_matmul"


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
    meta: dict[str, Any] = {"problem": dataclasses.asdict(problem), "knobs": dataclasses.asdict(knobs)}
    if needs_free_queues(problem, knobs):
        meta["queues"] = "free"
    if caps.hosts and problem.size > 1:
        meta["hosts"] = list(caps.hosts)
    return Plan(problem.op, problem.size, programs, meta)
