"""Planners: right results in every interleaving, and the promises a plan's readers rely on."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import CAPS, FLAGS, PLAIN, FakeCaps, problem, schedules
from plan_machine import run_calls

from commbackend.check import check
from commbackend.errors import PlanError
from commbackend.plan import CREDIT, MAX_CHUNKS, Copy, Gemm, Knobs, Plan, Problem, Put, Reduce, Signal, Wait
from commbackend.schedules import (
    OPS,
    SCHEDULES,
    candidates,
    default_knobs,
    needs_free_queues,
    plan,
    program,
    reserve_nbytes,
    supports,
)
from commbackend.schedules.catalog import POLLING

SCHEDULED = list(schedules())


@st.composite
def problems(draw: st.DrawFn, size: int) -> Problem:
    """Any op with any flags and small uneven sizes, zeros among them."""
    op = draw(st.sampled_from(OPS))
    flags = draw(st.sampled_from(FLAGS.get(op, ((),))))
    most = 5 if size <= 4 else 2
    rows = tuple(draw(st.lists(st.integers(0, most), min_size=size, max_size=size)))
    many = op.startswith("dgrad") or (op == "all_gather_matmul" and "wgrad" not in flags)
    weights = draw(st.integers(1, 3)) if many else 1
    made = problem(op, rows, blocks=draw(st.integers(0, 3)), k=draw(st.integers(0, 3)), flags=flags)
    n = () if op in PLAIN else tuple(draw(st.lists(st.integers(0, 3), min_size=weights, max_size=weights)))
    return dataclasses.replace(made, n=n, bias="matmul" in op and draw(st.booleans()))


@st.composite
def calls(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> tuple[FakeCaps, list[Problem], list[Plan]]:
    """Three calls of one communicator, each with its own op and knobs."""
    size, caps = draw(sizes), draw(st.sampled_from(list(CAPS.values())))
    made = [draw(problems(size)) for _ in range(3)]
    polling = draw(st.booleans())
    return caps, made, [plan(p, caps, draw(st.sampled_from(candidates(p, caps, polling)))) for p in made]


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls(st.integers(1, 4)), st.integers(0, 2**20), st.booleans())
def test_three_mixed_calls_are_proved_and_right(
    made: tuple[FakeCaps, list[Problem], list[Plan]], seed: int, one_queue: bool
) -> None:
    caps, wanted, plans = made
    check(plans, caps=caps)
    free = any("queues" in p.meta for p in plans)
    assert caps.free_queues or not free
    run_calls(plans, wanted, seed, one_queue=one_queue and not free)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls(st.integers(5, 16)), st.integers(0, 2**20))
def test_many_ranks_are_proved_and_right(made: tuple[FakeCaps, list[Problem], list[Plan]], seed: int) -> None:
    caps, wanted, plans = made
    check(plans, caps=caps)
    run_calls(plans, wanted, seed)


@pytest.mark.parametrize(("op", "flags", "caps", "knobs"), SCHEDULED, ids=lambda v: str(v)[:40])
def test_every_schedule_at_its_edges(op: str, flags: tuple[str, ...], caps: str, knobs: Knobs) -> None:
    """One rank, a rank without rows, no rows at all, several blocks, more chunks than rows, every lane count."""
    rng = random.Random(1)
    for rows in ((3,), (3, 0, 2), (0, 0), (5, 5)):
        for blocks in (0, 1, 3):
            p = problem(op, rows, blocks=blocks, flags=flags, bias=True)
            for chunks, lanes in ((1, 0), (4, 1), (MAX_CHUNKS, 3)):
                at_edge = dataclasses.replace(knobs, chunks=chunks, lanes=lanes)
                if lanes == 0 and needs_free_queues(p, knobs):
                    continue  # refused: test_folding_needs_a_copy_lane
                made = plan(p, CAPS[caps], at_edge)
                check([made], caps=CAPS[caps])
                run_calls([made] * 3, [p] * 3, rng.randrange(1000))


@pytest.mark.parametrize(("op", "flags", "caps", "knobs"), SCHEDULED, ids=lambda v: str(v)[:40])
def test_promises_of_every_plan(op: str, flags: tuple[str, ...], caps: str, knobs: Knobs) -> None:
    p = problem(op, (6, 4, 2), blocks=2, flags=flags)
    for lanes in (1, 2) if needs_free_queues(p, knobs) else (0, 1, 2):
        made = plan(p, CAPS[caps], dataclasses.replace(knobs, lanes=lanes))
        assert Plan.from_json(made.to_json()) == dataclasses.replace(made, meta=Plan.from_json(made.to_json()).meta)
        for rank, one in enumerate(made.programs):
            assert one == program(p, rank, CAPS[caps], dataclasses.replace(knobs, lanes=lanes))
            assert {s.lane for s in one.steps} <= set(range(lanes + 1))
            tail = [s for s in one.steps if isinstance(s, Signal) and s.slot == CREDIT]
            assert list(one.steps[len(one.steps) - len(tail) :]) == tail
            # A call that touches neither heap nor words has nothing to give credit for.
            assert len(tail) == (2 if CAPS[caps].one_sided and one.counted else 0)


@pytest.mark.parametrize("op", [op for op in OPS if "reduce" in op])
@pytest.mark.parametrize("caps", CAPS)
def test_sums_run_in_rank_order(op: str, caps: str) -> None:
    """F085: one order on all ranks, whatever the schedule; who sent a summand is told by where it came from."""
    p = problem(op, (4, 4, 4))
    for knobs in candidates(p, CAPS[caps]):
        made = plan(p, CAPS[caps], knobs)
        for one in made.programs:
            senders = {
                (s.dst.buf, s.dst.row, sender.rank)
                for sender in made.programs
                for s in sender.steps
                if isinstance(s, Put) and s.peer == one.rank
            }
            for s in one.steps:
                if isinstance(s, Reduce):
                    order = [_sender(src, one.rank, senders, made, s) for src in s.srcs]
                    assert order == [0, 1, 2], (knobs, one.rank, s)


def _sender(src: object, rank: int, senders: set[tuple[str, int, int]], made: Plan, step: Reduce) -> int:
    region = src
    assert hasattr(region, "buf")
    if region.at >= 0:
        return int(region.at)
    if region.buf == "parts.heap":
        found = {r for buf, row, r in senders if (buf, row) == (region.buf, region.row)} or {
            g.rank
            for g in made.programs
            for s in g.steps
            if isinstance(s, Gemm)
            for part in s.segments
            if part.out.at == rank and part.out.row == region.row
        }
        assert len(found) == 1
        return found.pop()
    if region.buf == "parts.scratch":
        return int(region.row) // 4
    return rank


def test_own_rows_are_multiplied_before_any_wait_for_data() -> None:
    for schedule in ("push", "pull"):
        for one in plan(problem("all_gather_matmul"), CAPS["everything"], Knobs(schedule, 2)).programs:
            lane = [s for s in one.steps if s.lane == 0]
            assert isinstance(lane[0], Gemm) and lane[0].segments[0].a.buf == "x"


def test_peers_rows_are_made_first_in_rotated_order() -> None:
    for one in plan(problem("matmul_reduce_scatter"), CAPS["puts"], Knobs("push", 1)).programs:
        rows = [s.segments[0].a.row for s in one.steps if isinstance(s, Gemm)]
        assert rows == [4 * ((one.rank + i) % 3) for i in (1, 2, 3)]


def test_puts_serve_every_peers_first_chunk_first() -> None:
    for one in plan(problem("all_gather"), CAPS["puts"], Knobs("push", 2)).programs:
        puts = [(s.peer, s.slot) for s in one.steps if isinstance(s, Put)]
        first, second = (one.rank + 1) % 3, (one.rank + 2) % 3
        assert puts == [(first, 2), (second, 2), (first, 3), (second, 3)]


def test_polling_is_one_launch_a_weight() -> None:
    p = problem("all_gather_matmul", weights=2)
    for one in plan(p, CAPS["everything"], Knobs("pull", 2, 1, True)).programs:
        gemms = [s for s in one.steps if isinstance(s, Gemm)]
        assert len(gemms) == 2
        assert not any(isinstance(s, Wait) and s.slot != CREDIT for s in one.steps)
        assert all(sum(bool(g.ready) for g in s.segments) == 4 for s in gemms)


def test_wgrad_is_one_product_after_the_partials_are_under_way() -> None:
    p = problem("dgrad_reduce_scatter", flags=("wgrad",), weights=2)
    for one in plan(p, CAPS["puts"], Knobs("push", 2)).programs:
        wgrads = [i for i, s in enumerate(one.steps) if isinstance(s, Gemm) and s.form == "tn"]
        assert len(wgrads) == 2 and all(len(one.steps[i].segments) == 1 for i in wgrads)  # type: ignore[union-attr]
        assert max(i for i, s in enumerate(one.steps) if isinstance(s, Put)) < wgrads[0]
        assert wgrads[-1] < min(i for i, s in enumerate(one.steps) if isinstance(s, Reduce))


def test_no_chunk_is_cut_inside_a_tile() -> None:
    p = problem("all_gather", (1000, 1000))
    rows = {
        s.src.row for one in plan(p, CAPS["puts"], Knobs("push", 4)).programs for s in one.steps if isinstance(s, Put)
    }
    assert rows == {0, 256, 512, 768}


# -- choosing
def test_what_cannot_be_served_says_why() -> None:
    every = CAPS["everything"]
    for p, caps, knobs, reason in (
        (problem("all_gather"), every, Knobs("ring"), "no schedule 'ring': it has push, pull, collective"),
        (Problem("transpose", (1,)), every, Knobs("push"), "unknown op 'transpose'"),
        (problem("all_gather"), CAPS["puts"], Knobs("pull"), "no view of peers"),
        (problem("all_gather"), CAPS["puts"], Knobs("collective"), "no collectives"),
        (problem("all_gather"), CAPS["collectives"], Knobs("push"), "not one-sided"),
        (problem("all_gather"), every, Knobs("push", 33), "chunks=33: 1 to 32"),
        (problem("all_gather"), every, Knobs("push", 0), "chunks=0: 1 to 32"),
        (problem("all_gather"), every, Knobs("push", 1, -1), "lanes=-1: 0 to 15"),
        (problem("all_gather"), every, Knobs("push", 1, 1, True), "no polling form"),
        (problem("matmul_all_reduce", weights=2), every, Knobs("two_shot"), "takes one weight, not 2"),
        (problem("all_gather_matmul", weights=2, flags=("wgrad",)), every, Knobs("push"), "one weight"),
        (problem("all_gather", flags=("gathered",)), every, Knobs("push"), "no flag gathered"),
        (dataclasses.replace(problem("all_reduce"), blocks=2), every, Knobs("two_shot"), "in one block, not 2"),
        (dataclasses.replace(problem("all_gather"), dtype="float3"), every, Knobs("push"), "unknown dtype"),
        (problem("all_gather", (1, -1)), every, Knobs("push"), "must not be negative"),
    ):
        found = supports(p, caps, knobs)
        assert found and reason in found, (found, reason)
        with pytest.raises(PlanError, match=re.escape(f"with {knobs}: ")):
            program(p, 0, caps, knobs)
    with pytest.raises(PlanError, match="rank 3 of 3"):
        program(problem("all_gather"), 3, every, Knobs("push"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("caps", CAPS)
def test_candidates_are_legal_and_hold_every_schedule(op: str, caps: str) -> None:
    p = problem(op, (64, 64))
    found = candidates(p, CAPS[caps], polling=True)
    assert all(supports(p, CAPS[caps], k) is None for k in found)
    legal = {name for name in SCHEDULES[op] if supports(p, CAPS[caps], Knobs(name)) is None}
    assert {k.schedule for k in found} == legal
    assert default_knobs(p, CAPS[caps]).schedule in legal
    assert not any(k.polls for k in candidates(p, CAPS[caps]))
    assert {k.schedule for k in found if k.polls} == set(POLLING.get(op, ())) & legal
    assert {k.folds for k in found if k.polls} == ({True} if "gather" in op else {False, CAPS[caps].free_queues}) or (
        not legal & set(POLLING.get(op, ()))
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("caps", CAPS)
def test_candidates_are_one_for_every_plan(op: str, caps: str) -> None:
    """``candidates`` tells plans apart without making them: made, no two are equal, and none is missing."""
    for flags in FLAGS.get(op, ((),)):
        for rows in ((6, 6), (6, 2, 6), (3, 3, 3, 3)):
            p = problem(op, rows, blocks=2 if len(rows) == 3 else 1, flags=flags)
            found = [program(p, 0, CAPS[caps], k) for k in candidates(p, CAPS[caps], polling=True)]
            assert len(set(found)) == len(found), (flags, rows)
            blocks = (0, 1, 2) if CAPS[caps].stream_ordered else (0,)
            grid = itertools.product(SCHEDULES[op], (1, 2, 4, 8), (0, 1, 2), (False, True), (False, True), blocks)
            for knobs in itertools.starmap(Knobs, grid):
                serial = knobs.schedule == "sequence" and (knobs.chunks, knobs.lanes) != (1, 0)
                hides = not serial and not (knobs.polls and not knobs.folds and not knobs.lanes)
                if hides and supports(p, CAPS[caps], knobs) is None:
                    assert program(p, 0, CAPS[caps], knobs) in found, (flags, rows, knobs)


def test_candidates_cost_little() -> None:
    """``explain`` asks for them: about 1 ms at 8 ranks when the machine is idle, planning them all took 500."""
    for op in OPS:
        p = problem(op, (1024,) * 8, k=4096, n=4096)
        candidates(p, CAPS["gpu"], polling=True)
        start = time.perf_counter()
        assert candidates(p, CAPS["gpu"], polling=True)
        assert time.perf_counter() - start < 0.05


@pytest.mark.parametrize("polling", [False, True])
def test_what_is_reserved_holds_the_default_of_every_op(polling: bool) -> None:
    """``Communicator.reserve``: later calls within it grow nothing, on hosts and on GPUs, forward and backward."""
    hosts = (CAPS["everything"], dataclasses.replace(CAPS["everything"], copy_lanes=0))
    for caps, size, rows, cols in itertools.product((*hosts, CAPS["gpu"]), (2, 3, 8), (8, 64, 512, 4096), (64, 4096)):
        counts = tuple(rows // size + (r < rows % size) for r in range(size))
        room = reserve_nbytes(rows * cols * 2, size)
        for op in OPS:
            for flags in ((), ("wgrad",)) if "dgrad" in op else ((),):
                n = () if op in ("all_gather", "reduce_scatter", "all_reduce") else (cols,)
                p = Problem(op, counts, k=cols, n=n, dtype="bfloat16", flags=flags)
                made = program(p, 0, caps, default_knobs(p, caps, polling and caps.stream_ordered))
                assert made.heap_nbytes() <= room and made.scratch_nbytes() <= room, (p, made.heap_nbytes(), room)


def test_defaults_follow_bytes_and_roles() -> None:
    def chosen(p: Problem, caps: str) -> Knobs:
        return default_knobs(p, CAPS[caps])

    small, large = problem("all_gather_matmul", (4, 4)), problem("all_gather_matmul", (1024, 1024), k=1024)
    assert chosen(small, "puts") == Knobs("sequence", 1, 0)
    assert default_knobs(large, dataclasses.replace(CAPS["everything"], copy_lanes=0)) == Knobs("pull", 1, 0)
    assert chosen(large, "puts") == Knobs("push", 4, 1)
    assert chosen(large, "everything").schedule == "pull"
    assert chosen(large, "collectives").schedule == "collective"
    assert chosen(problem("all_gather_matmul", (4,)), "everything") == Knobs("push", 1, 0)
    assert chosen(problem("all_reduce", (4, 4)), "puts").schedule == "one_shot"
    assert chosen(problem("all_reduce", (4096, 4096), k=1024), "puts").schedule == "two_shot"
    assert chosen(problem("all_reduce", (4096, 4096), k=1024), "everything").schedule == "two_shot_pull"


def test_one_rank_needs_no_transport_and_runs_one_product_a_weight() -> None:
    nobody = FakeCaps(one_sided=False, collective=False, peer_view=False)
    for op in OPS:
        for flags in FLAGS.get(op, ((),)):
            p = problem(op, (4,), blocks=2, flags=flags, bias=True)
            assert len(candidates(p, nobody)) == 1
            one = program(p, 0, nobody, default_knobs(p, nobody))
            assert {b.space for b in one.buffers} == {"input", "output"}
            assert {type(s) for s in one.steps} <= {Gemm, Copy}
            assert all(program(p, 0, nobody, Knobs(name, 8, 2)) == one for name in SCHEDULES[op])
            check([plan(p, nobody, default_knobs(p, nobody))], caps=nobody)


def test_defaults_are_the_same_where_k_and_n_differ_between_ranks() -> None:
    """Ranks choose by themselves: what may differ must not matter."""
    for op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        one, other = (problem(op, (512, 512), k=k, n=1024) for k in (1, 4096))
        assert default_knobs(one, CAPS["puts"]) == default_knobs(other, CAPS["puts"])
    for op in ("all_gather_matmul", "dgrad_reduce_scatter", "dgrad_all_reduce"):
        one, other = (problem(op, (512, 512), k=1024, n=n) for n in (1, 4096))
        assert default_knobs(one, CAPS["puts"]) == default_knobs(other, CAPS["puts"])
