"""Which knobs may be tried for a problem, and which are used when nothing was measured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from ..errors import PlanError
from ..plan import ITEMSIZE, MAX_CHUNKS, Knobs, PlanCaps, Problem
from .catalog import POLLING, SCHEDULES, supports
from .shards import Piece, cut
from .two_level import most_chunks

__all__ = ["candidates", "default_knobs", "reserve_nbytes"]

_CHUNK_COUNTS = (1, 2, 4, 8, 16, 32)
#: Below this many bytes for one peer, a second lane costs more than it hides.
_TINY_NBYTES = 64 << 10
#: A chunk that a host's copy thread moves at full speed.
_CHUNK_NBYTES = 2 << 20
#: Chunks that a GPU's copy engine moves at about four fifths and at half of its full speed: fewer, larger ones where a
#: chunk costs launches, smaller ones where a kernel polls.
_ENGINE_NBYTES, _POLLED_NBYTES = 16 << 20, 4 << 20
#: Kernels poll by default where all that is gathered or summed is as large as this; with two ranks only all-reduces do.
#: On two H200s, back to back, over cuBLAS in row blocks: all-reduce 128 MiB 0.94, 64 MiB 0.93, 32 MiB 1.00, 16 MiB 1.4;
#: reduce-scatter 1.04, 1.00, 1.09, 1.3 (benchmarks/results/2026-11-30/h200x2-overlap-polling-*.json).
#: By bytes of what travels, since k (n) of a rank's product may differ between ranks.
_LEAST_POLLED_NBYTES = 64 << 20
#: Shards of fewer rows are multiplied in one product on a CPU: each of several would read the whole weight again
#: (sequence over two products: 0.91-0.99 at 128 rows a shard, 0.98-1.02 at 512;
#: benchmarks/results/2026-12-01/cpu2-overlap-two-products.json).
_FEW_ROWS = 256
#: All-reduces up to this size send everything to everyone (on GPUs, on hosts).
_ONE_SHOT_NBYTES, _ONE_SHOT_HOST_NBYTES = 256 << 10, 512 << 10


def candidates(problem: Problem, caps: PlanCaps, polling: bool = False) -> list[Knobs]:
    """Return all knobs worth trying: every legal schedule, in forms and chunk counts whose plans differ.

    Args:
        polling: Whether a GEMM provider is there that polls.
    """
    if problem.size == 1:
        return [default_knobs(problem, caps)]
    cuts: dict[object, int] = {}
    #: The least count that cuts this problem in the same way, by count and by what is cut.
    same = {(c, whole): cuts.setdefault(_cuts(problem, c, whole), c) for c in _CHUNK_COUNTS for whole in (False, True)}
    found: dict[object, Knobs] = {}
    for schedule in SCHEDULES.get(problem.op, ()):
        if supports(problem, caps, Knobs(schedule)) is not None:
            continue
        if schedule in ("sequence", "one_shot_kernel"):
            found.setdefault(_plan_key(problem, caps, knobs := Knobs(schedule, 1, 0)), knobs)
            continue
        one_shot = schedule.startswith("one_shot")
        most = most_chunks(len(set(caps.hosts))) if caps.hosts else MAX_CHUNKS
        for chunks in (c for c in _CHUNK_COUNTS if same[c, one_shot] == c and c <= most):
            for knobs in _forms(problem, caps, Knobs(schedule, chunks), polling):
                found.setdefault(_plan_key(problem, caps, knobs), knobs)
    return list(found.values())


def _cuts(problem: Problem, chunks: int, whole: bool) -> tuple[bool, tuple[tuple[Piece, ...], ...]]:
    """How all rows (``whole``), or the shards, of a problem are cut."""
    lengths = [problem.total] if whole else sorted(set(problem.rows))
    return whole, tuple(cut(rows, problem.blocks, chunks) for rows in lengths)


def _forms(problem: Problem, caps: PlanCaps, knobs: Knobs, polling: bool) -> Iterator[Knobs]:
    """The forms of a schedule: lanes, row blocks where a launch is dear, and polling."""
    blocks: Sequence[int] = (0, 1, 2) if caps.stream_ordered else (0,)
    for lanes, block in itertools.product((0, 1, 2), blocks):
        yield Knobs(knobs.schedule, knobs.chunks, lanes, blocks=block)
    if polling and knobs.schedule in POLLING.get(problem.op, ()):
        gathers = problem.op == "all_gather_matmul"
        for lanes, folds in itertools.product((0, 1, 2) if gathers else (1, 2), (True,) if gathers else (True, False)):
            polled = Knobs(knobs.schedule, knobs.chunks, lanes, True, folds)
            if supports(problem, caps, polled) is None:
                yield polled


def _plan_key(problem: Problem, caps: PlanCaps, knobs: Knobs) -> object:
    """What tells the plan of ``knobs`` from those of other knobs with other cuts."""
    puts = knobs.schedule != "collective" and caps.one_sided
    if problem.op == "dgrad_all_reduce" and "no_dgrad" in problem.flags:
        return None  # the wgrad product alone: nothing travels
    if "no_dgrad" in problem.flags:
        return puts, knobs.chunks, min(knobs.lanes, _lanes_used(problem, knobs))
    blocks = 0 if knobs.blocks >= _gated(problem, knobs) else knobs.blocks
    lanes = min(knobs.lanes, _lanes_used(problem, knobs))
    return knobs.schedule, knobs.chunks, lanes, knobs.polls, knobs.folds, blocks


def _lanes_used(problem: Problem, knobs: Knobs) -> int:
    """How many copy lanes can make a difference: 0, 1, or 2 for any number."""
    op, schedule, many = problem.op, knobs.schedule, 2 if problem.size > 2 else 1
    if schedule == "collective":
        return 1
    if schedule == "two_level":
        return 2
    if op in ("all_gather", "all_gather_matmul"):
        copies = "gathered" in problem.flags or (schedule == "pull" and "wgrad" in problem.flags)
        used = many if schedule == "push" else 1
        return 2 if copies and _arrivals(problem, knobs) > 1 else used
    if schedule in ("push", "one_shot", "two_shot"):
        used = many
    else:
        used = 1 if op in ("reduce_scatter", "all_reduce") and "direct" not in schedule else 0
    gathers = op == "dgrad_reduce_scatter" and "wgrad" in problem.flags and "saved" not in problem.flags
    return max(used, many) if gathers else used


def _arrivals(problem: Problem, knobs: Knobs) -> int:
    """Chunks that rank 0 receives of its peers on the gather side."""
    return sum(len(cut(rows, problem.blocks, knobs.chunks)) for rows in problem.rows[1:])


def _gated(problem: Problem, knobs: Knobs) -> int:
    """Row blocks that can be gated one by one: ``blocks`` of as many, and 0, mean this many. 0: blocks mean nothing."""
    if knobs.polls or not problem.n:
        return 0
    if knobs.schedule == "collective":
        gathers = problem.op == "all_gather_matmul"
        return max(len(cut(rows, problem.blocks, knobs.chunks)) for rows in problem.rows) if gathers else 0
    pulls = (problem.op, knobs.schedule) == ("all_gather_matmul", "pull")
    if knobs.schedule in ("push", "two_shot", "two_level") or pulls:
        return _arrivals(problem, knobs)
    return 0


def default_knobs(problem: Problem, caps: PlanCaps, polling: bool = False, *, always: bool = False) -> Knobs:
    """Return the knobs used when none are given and none were measured. A rule by bytes:

    * one rank: nothing travels, the first schedule in its one form;
    * transports with collectives only: ``collective``; of two levels: ``two_level``, with a lane for what crosses
      between hosts (and one for puts, where the transport says that it is worth having), and chunks of about 2 MiB;
      below 64 KiB in the caller's lane; peers' rows in two products where shards have fewer than 256, and on GPUs;
    * with peer views, ranks read each other's memory (``pull``; all-reduces ``one_shot_pull`` up to 512 KiB, then
      ``two_shot_pull``); else, and on GPUs (``stream_ordered``), they put (``push``, ``one_shot``, ``two_shot``);
    * on GPUs where one kernel can do the whole all-reduce (``exchanges``), and all ranks' rows are 2 MiB at most:
      ``one_shot_kernel``;
    * what one rank sends to one peer below 64 KiB, and on CPUs shards of fewer than 256 rows: one product where there
      is one (``sequence``, ``one_shot``), else one chunk, everything in the caller's lane;
    * above that on CPUs, where the transport says that a copy lane is worth having (``copy_lanes``: cores that do not
      multiply), one lane and chunks of about 2 MiB, at most 8; else one chunk in the caller's lane: copies and products
      then share the cores, and every chunk is only one more thing to do;
    * on GPUs one copy lane for one peer, two for more, and chunks of about 16 MiB, at most 4. Libraries lose time with
      every row block, so peers' rows are multiplied in one (two, where there is more than one peer), and the gather
      side sends whole shards, since smaller chunks would gate nothing;
    * on GPUs with ``polling`` all-reduces poll, and with more than one peer the other operations do, where the whole of
      what is summed or gathered is 64 MiB or more (``always``: the reduce side, whatever the size): chunks of about
      4 MiB, at most 4. The kernel folds received partials in unless a wgrad product can hide their journey.

    Args:
        polling: Whether a GEMM provider is there that polls.
        always: Poll whatever the size; for measuring.
    Raises:
        PlanError: No schedule can serve the problem; the message lists the reasons.
    """
    schedule = _default_schedule(problem, caps)
    nbytes = _peer_nbytes(problem)
    if schedule == "two_level" and problem.size > 1:
        knobs = _two_level(problem, caps, nbytes)
    elif problem.size == 1 or nbytes < _TINY_NBYTES or (caps.stream_ordered and schedule.startswith("one_shot")):
        # All in the caller's lane; on a GPU a launch costs more than the wait for the last peer.
        knobs = Knobs(schedule, 1, lanes=0)
        knobs = _gate(problem, knobs, 1) if caps.stream_ordered and problem.size > 1 else knobs
    elif caps.stream_ordered:
        whole_nbytes = problem.blocks * problem.total * _cols(problem) * ITEMSIZE.get(problem.moved, 1)
        wins = whole_nbytes >= _LEAST_POLLED_NBYTES and (problem.size > 2 or problem.op.endswith("all_reduce"))
        knobs = _on_gpu(problem, caps, schedule, polling and (always or wins))
    elif caps.copy_lanes == 0 and caps.one_sided:
        knobs = Knobs(schedule, 1, lanes=0)
    else:
        knobs = Knobs(schedule, _chunks(nbytes, _CHUNK_NBYTES, 8), lanes=1)
    if (reason := supports(problem, caps, knobs)) is not None:
        raise PlanError(f"no schedule for {problem}: {reason}")
    return knobs


def _two_level(problem: Problem, caps: PlanCaps, nbytes: int) -> Knobs:
    if nbytes < _TINY_NBYTES:
        return _gate(problem, Knobs("two_level", 1, lanes=0), 1)
    chunks = min(_chunks(nbytes, _CHUNK_NBYTES, 8), most_chunks(len(set(caps.hosts))))
    knobs = Knobs("two_level", chunks, lanes=2 if caps.stream_ordered or caps.copy_lanes else 1)
    few = caps.stream_ordered or max(problem.rows) * problem.blocks < _FEW_ROWS
    return _gate(problem, knobs, 2) if few else knobs


def reserve_nbytes(nbytes: int, size: int) -> int:
    """Bytes of a heap half, and of scratch, that hold the default plan of every op whose gathered or summed operand has
    at most ``nbytes`` and shards of about equal rows: a backward pass gathers and scatters at the same time, and a
    one-shot all-reduce keeps a copy a rank.
    """
    return max(2 * nbytes, size * min(nbytes, _ONE_SHOT_HOST_NBYTES)) + 65536


def _on_gpu(problem: Problem, caps: PlanCaps, schedule: str, polling: bool) -> Knobs:
    nbytes, lanes = _peer_nbytes(problem), 1 if problem.size == 2 else 2
    gathers = problem.op == "all_gather_matmul"
    if polling and caps.one_sided and (not gathers or problem.size > 2):
        for chunks in range(_chunks(nbytes, _POLLED_NBYTES, 4), 0, -1):
            folds = caps.free_queues and "wgrad" not in problem.flags
            polled = Knobs(schedule, chunks, lanes, True, gathers or folds)
            if supports(problem, caps, polled) is None:
                return polled
    chunks = 1 if gathers else _chunks(nbytes, _ENGINE_NBYTES, 4)
    return _gate(problem, Knobs(schedule, chunks, lanes), 1 if problem.size == 2 else 2)


def _gate(problem: Problem, knobs: Knobs, blocks: int) -> Knobs:
    """The same knobs with at most ``blocks`` row blocks, where there would be more."""
    return dataclasses.replace(knobs, blocks=blocks) if blocks < _gated(problem, knobs) else knobs


def _chunks(nbytes: int, chunk_nbytes: int, most: int) -> int:
    return max(1, min(most, nbytes // chunk_nbytes))


def _default_schedule(problem: Problem, caps: PlanCaps) -> str:
    op = problem.op
    if problem.size == 1:
        return next(iter(SCHEDULES.get(op, ("",))))
    if caps.hosts:
        return "two_level"
    if not caps.one_sided:
        return "collective"
    reads = caps.peer_view and not caps.stream_ordered
    if op.endswith("all_reduce"):
        most = _ONE_SHOT_NBYTES if caps.stream_ordered else _ONE_SHOT_HOST_NBYTES
        if caps.stream_ordered and supports(problem, caps, Knobs("one_shot_kernel", lanes=0)) is None:
            return "one_shot_kernel"
        small = problem.total * _cols(problem) * ITEMSIZE.get(problem.moved, 1) <= most
        if not caps.stream_ordered and "dgrad" not in op and problem.n and problem.total < 2 * _FEW_ROWS:
            small = True
        return ("one_shot" if small else "two_shot") + ("_pull" if reads else "")
    few = _peer_nbytes(problem) < _TINY_NBYTES or max(problem.rows) * problem.blocks < _FEW_ROWS
    if not caps.stream_ordered and few and "sequence" in SCHEDULES.get(op, ()):
        return "sequence"
    return "pull" if reads else "push"


def _cols(problem: Problem) -> int:
    """Columns of what travels."""
    return problem.n[0] if problem.op in ("matmul_reduce_scatter", "matmul_all_reduce") else problem.k


def _peer_nbytes(problem: Problem) -> int:
    """Bytes the longest shard sends to one peer."""
    return problem.blocks * max(problem.rows) * _cols(problem) * ITEMSIZE.get(problem.moved, 1)
