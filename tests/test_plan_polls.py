"""The reduce side's polling forms, row blocks, and what is chosen on GPUs."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import CAPS, FakeCaps, problem
from plan_machine import Stuck, run_calls

from commbackend.check import check
from commbackend.errors import PlanError
from commbackend.plan import CREDIT, DATA, Gemm, Knobs, Plan, Problem, Program, Put, Reduce, Segment, Wait, data_slot
from commbackend.schedules import candidates, default_knobs, needs_free_queues, plan, program, supports

GPU, ONE_QUEUE = CAPS["gpu"], CAPS["one queue"]
SCATTER = ("matmul_reduce_scatter", "push")
FOLDING = (
    SCATTER,
    ("matmul_all_reduce", "two_shot"),
    ("dgrad_reduce_scatter", "push"),
    ("dgrad_all_reduce", "two_shot"),
)


def folding(op: str, schedule: str, *, chunks: int = 2, lanes: int = 1, folds: bool = True) -> Knobs:
    return Knobs(schedule, chunks, lanes, polls=True, folds=folds)


def launches(one: Program) -> list[Gemm]:
    return [s for s in one.steps if isinstance(s, Gemm)]


@st.composite
def polled(draw: st.DrawFn) -> tuple[FakeCaps, list[Problem], list[Plan]]:
    """Three calls of one communicator, most of them in a polling form of the reduce side."""
    size = draw(st.integers(2, 5))
    caps = draw(st.sampled_from([GPU, CAPS["symmetric"], ONE_QUEUE]))
    made = []
    for _ in range(3):
        op, schedule = draw(st.sampled_from(FOLDING))
        flags = draw(st.sampled_from([(), ("wgrad",)])) if op.startswith("dgrad") else ()
        rows = tuple(draw(st.lists(st.integers(0, 6), min_size=size, max_size=size)))
        p = problem(op, rows, blocks=draw(st.integers(1, 3)), n=draw(st.integers(0, 3)), flags=flags, bias=True)
        folds = caps.free_queues and draw(st.booleans())
        knobs = Knobs(schedule, draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.booleans()), folds)
        made.append((p, knobs))
    return caps, [p for p, _ in made], [plan(p, caps, knobs) for p, knobs in made]


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(polled(), st.integers(0, 2**20))
def test_polling_sums_are_proved_and_right(made: tuple[FakeCaps, list[Problem], list[Plan]], seed: int) -> None:
    caps, wanted, plans = made
    check(plans, caps=caps)
    run_calls(plans, wanted, seed, one_queue=not caps.free_queues)


@pytest.mark.parametrize(("op", "schedule"), FOLDING)
@pytest.mark.parametrize("size", [2, 3])
def test_folding_ends_in_free_queues_alone(op: str, schedule: str, size: int) -> None:
    """Kernel and puts wait for each other's peers: with one queue a rank the puts stand behind the kernel."""
    p = problem(op, (4,) * size)
    for lanes in (1, 2):
        knobs = folding(op, schedule, lanes=lanes)
        made = plan(p, GPU, knobs)
        assert needs_free_queues(p, knobs) and made.meta["queues"] == "free"
        check([made] * 3, caps=GPU)
        check([Plan.from_json(made.to_json())])
        run_calls([made] * 3, [p] * 3, seed=size)
        for caps, free_queues in ((GPU, False), (ONE_QUEUE, None)):
            with pytest.raises(PlanError, match=r"\(Gemm\): waits for .* for ever: .* share one in-order queue"):
                check([made], caps=caps, free_queues=free_queues)
        with pytest.raises(Stuck):
            run_calls([made], [p], seed=size, one_queue=True)
        with pytest.raises(PlanError, match="lanes share one queue"):
            plan(p, ONE_QUEUE, knobs)


@pytest.mark.parametrize(("op", "schedule"), FOLDING)
def test_a_plan_that_says_nothing_is_proved_for_a_shared_queue(op: str, schedule: str) -> None:
    made = plan(problem(op), GPU, folding(op, schedule))
    with pytest.raises(PlanError, match="share one in-order queue"):
        check([dataclasses.replace(made, meta={})])
    check([dataclasses.replace(made, meta={})], free_queues=True)


@pytest.mark.parametrize(("op", "schedule"), FOLDING)
@pytest.mark.parametrize("lanes", [0, 1, 2])
def test_without_the_fold_one_queue_is_enough(op: str, schedule: str, lanes: int) -> None:
    p = problem(op)
    knobs = folding(op, schedule, lanes=lanes, folds=False)
    made = plan(p, ONE_QUEUE, knobs)
    assert not needs_free_queues(p, knobs) and "queues" not in made.meta
    check([made] * 3, caps=ONE_QUEUE, free_queues=False)
    run_calls([made] * 3, [p] * 3, seed=lanes, one_queue=True)


def test_everything_offered_ends_where_it_is_offered() -> None:
    """What candidates and defaults name for a transport with one queue ends in one queue."""
    for op, _ in FOLDING:
        p = problem(op, (4, 4))
        for caps in (GPU, ONE_QUEUE):
            offered = [*candidates(p, caps, polling=True), default_knobs(p, caps, polling=True)]
            for knobs in offered:
                check([plan(p, caps, knobs)], caps=caps, free_queues=caps.free_queues)
            assert any(needs_free_queues(p, k) for k in offered) == caps.free_queues


def test_folding_needs_a_copy_lane() -> None:
    for op, schedule in FOLDING:
        reason = supports(problem(op), GPU, folding(op, schedule, lanes=0))
        assert reason and "lanes=0: the puts would queue behind the kernel" in reason


def test_a_kernel_that_waits_before_it_tells_hangs_in_every_model() -> None:
    """Own rows first: every rank's kernel waits for partials that its peers' kernels have not made."""
    made = plan(problem(*SCATTER[:1], (4, 4)), GPU, folding(*SCATTER))
    programs = []
    for one in made.programs:
        steps = [dataclasses.replace(s, segments=s.segments[::-1]) if isinstance(s, Gemm) else s for s in one.steps]
        programs.append(dataclasses.replace(one, steps=tuple(steps)))
    with pytest.raises(PlanError, match="for ever: it is not raised, or only by steps that wait for this one"):
        check([dataclasses.replace(made, programs=tuple(programs))], caps=GPU)


# -- the shape of the plans
def test_one_launch_makes_peers_rows_in_rotated_order_then_folds_own() -> None:
    p = problem("matmul_reduce_scatter", (4, 4, 4), bias=True)
    for one in plan(p, GPU, folding(*SCATTER)).programs:
        me, (launch,) = one.rank, launches(one)
        first, second = (me + 1) % 3, (me + 2) % 3
        assert [s.a.row // 2 for s in launch.segments] == [
            2 * first, 2 * second, 2 * first + 1, 2 * second + 1, 2 * me, 2 * me + 1,
        ]  # fmt: skip
        assert launch.lane == 0 and not any(isinstance(s, Reduce) for s in one.steps)
        peers, own = launch.segments[:4], launch.segments[4:]
        assert [s.done for s in peers] == [((me, DATA + i),) for i in range(4)]
        assert all(s.bias is None and not s.addends and not s.ready for s in peers)
        for chunk, s in enumerate(own):
            assert set(s.ready) == {(first, data_slot(chunk)), (second, data_slot(chunk))} and not s.done
            assert s.bias is not None and s.bias.buf == "bias0" and s.out.buf == "out0"


def test_addends_come_in_rank_order() -> None:
    p = problem("matmul_all_reduce", (4, 4, 4))
    made = plan(p, GPU, folding("matmul_all_reduce", "two_shot"))
    for one in made.programs:
        senders = {
            (put.dst.buf, put.dst.row): other.rank
            for other in made.programs
            for put in other.steps
            if isinstance(put, Put) and put.peer == one.rank and put.dst.buf == "parts.heap"
        }
        for s in launches(one)[0].segments[4:]:
            order = [senders[a.buf, a.row] for a in s.addends]
            assert order == [r for r in range(3) if r != one.rank]


def test_every_put_waits_for_the_words_of_its_rows() -> None:
    """Several blocks are several segments of one chunk: the put needs all of them."""
    p = problem("matmul_reduce_scatter", (4, 2, 4), blocks=3)
    for one in plan(p, GPU, folding(*SCATTER, chunks=1)).programs:
        by_word = {s.done[0][1]: s for s in launches(one)[0].segments if s.done}
        met: list[Segment] = []
        for step in one.steps:
            if isinstance(step, Wait) and step.peer == one.rank:
                met.append(by_word[step.slot])
            elif isinstance(step, Put):
                assert [s.out.row for s in met] == [step.src.row + i * step.src.rows // 3 for i in range(3)]
                met = []


def test_all_reduce_sends_a_chunk_when_it_is_folded() -> None:
    for one in plan(problem("matmul_all_reduce", (4, 4)), GPU, folding("matmul_all_reduce", "two_shot")).programs:
        lane = [s for s in one.steps if s.lane == 1 and not (isinstance(s, Wait) and s.slot == CREDIT)]
        assert [type(s) for s in lane] == [Wait, Put] * 4
        assert [s.slot for s in lane if isinstance(s, Put)] == [data_slot(c, phase) for phase in (0, 1) for c in (0, 1)]
        assert [s.slot for s in lane if isinstance(s, Wait)] == [DATA, DATA + 1, DATA + 2, DATA + 3]
        assert len(launches(one)) == 1


@pytest.mark.parametrize(("op", "schedule"), FOLDING)
def test_ranks_need_not_agree_on_folding(op: str, schedule: str) -> None:
    """Words and heap are the same in all forms, so that each rank may take what its own queues allow."""
    p = problem(op, (4, 2, 3))
    forms = [plan(p, GPU, dataclasses.replace(folding(op, schedule), **change)) for change in
             ({}, {"folds": False}, {"polls": False})]  # fmt: skip
    mixed = dataclasses.replace(forms[0], programs=tuple(f.programs[r] for r, f in enumerate(forms)))
    check([mixed] * 3, caps=GPU)
    for seed in range(20):
        run_calls([mixed] * 3, [p] * 3, seed)


def test_words_are_counted() -> None:
    """A rank has 64 words for parts of its own; a plan that needs more is refused, one that needs them all holds."""
    knobs = folding(*SCATTER, chunks=32)
    fits, more = problem(SCATTER[0], (64,) * 3), problem(SCATTER[0], (64,) * 4)
    check([plan(fits, GPU, knobs)], caps=GPU)
    assert re.search("96 parts to tell of, a rank has 64 words", supports(more, GPU, knobs) or "")
    # An all-reduce tells of its own rows too, and a batch of blocks is a part a block.
    assert "96 parts" in (supports(problem("matmul_all_reduce", (64,) * 3), GPU, folding(*FOLDING[1], chunks=32)) or "")
    assert "70 parts" in (supports(problem(SCATTER[0], (8, 8), blocks=70), GPU, folding(*SCATTER, chunks=1)) or "")
    for size in (8, 65):
        p = problem("matmul_all_reduce", (4096,) * size, n=8192)
        assert default_knobs(p, GPU, polling=True).polls == (size == 8)


def test_products_of_several_weights_have_no_polling_form() -> None:
    for p in (problem("dgrad_reduce_scatter", weights=2), problem("dgrad_all_reduce", flags=("no_dgrad", "wgrad"))):
        schedule = "push" if p.op.endswith("scatter") else "two_shot"
        assert "product of one weight" in (supports(p, GPU, folding(p.op, schedule)) or "")
        assert not any(k.polls for k in candidates(p, GPU, polling=True))


# -- row blocks
@pytest.mark.parametrize("schedule", ["push", "pull"])
def test_a_row_block_waits_for_all_its_chunks_and_is_one_product(schedule: str) -> None:
    p = problem("all_gather_matmul", (8, 8))
    for one in plan(p, GPU, Knobs(schedule, 4, blocks=1)).programs:
        lane = [s for s in one.steps if s.lane == 0 and not isinstance(s, Wait)][:2]
        assert [type(s) for s in lane] == [Gemm, Gemm]
        own, peers = launches(one)
        assert [len(g.segments) for g in (own, peers)] == [1, 1] and peers.segments[0].a.rows == 8
        waits = [i for i, s in enumerate(one.steps) if isinstance(s, Wait) and s.slot >= DATA]
        assert len(waits) == 4 and max(waits) < one.steps.index(peers)


def test_row_blocks_join_neighbouring_shards() -> None:
    """Rank 3 of 4 receives from 2, 1, 0: two blocks are rank 2's rows, then those of 0 and 1 in one product."""
    one = program(problem("all_gather_matmul", (4, 4, 4, 4)), 3, GPU, Knobs("push", 1, blocks=2))
    assert [[(s.out.row, s.out.rows) for s in g.segments] for g in launches(one)] == [[(12, 4)], [(8, 4)], [(0, 8)]]
    one = program(problem("matmul_reduce_scatter", (4, 4, 4, 4)), 0, GPU, Knobs("push", 2, blocks=1))
    peers, own = launches(one)
    assert [(s.a.row, s.a.rows) for s in peers.segments] == [(4, 12)] and own.segments[0].a.rows == 4
    puts = [i for i, s in enumerate(one.steps) if isinstance(s, Put)]
    assert len(puts) == 6 and min(puts) > one.steps.index(peers) and max(puts) < one.steps.index(own)


def test_a_put_leaves_before_the_next_block_is_made() -> None:
    one = program(problem("matmul_reduce_scatter", (8, 8)), 0, GPU, Knobs("push", 4, blocks=2))
    kinds = [type(s).__name__ for s in one.steps if isinstance(s, Gemm | Put)]
    assert kinds == ["Gemm", "Put", "Put", "Gemm", "Put", "Put", "Gemm"]


# -- choosing
def chosen(
    op: str, size: int, *, polling: bool = False, caps: FakeCaps = GPU, rows: int = 8192, **more: object
) -> Knobs:
    p = problem(op, (rows // size,) * size, k=8192, n=8192, **more)  # type: ignore[arg-type]
    return default_knobs(dataclasses.replace(p, dtype="bfloat16"), caps, polling)


def test_defaults_on_gpus_put_and_never_read_peers() -> None:
    """8192 x 8192 in bf16: 64 MiB a shard at 2 ranks, 16 MiB at 8."""
    assert chosen("all_gather_matmul", 2) == Knobs("push", 1, 1)
    assert chosen("all_gather_matmul", 8) == Knobs("push", 1, 2, blocks=2)
    assert chosen("matmul_reduce_scatter", 2) == Knobs("push", 4, 1, blocks=1)
    assert chosen("matmul_reduce_scatter", 8) == Knobs("push", 1, 2, blocks=2)
    assert chosen("matmul_all_reduce", 2) == Knobs("two_shot", 4, 1, blocks=1)
    assert chosen("matmul_all_reduce", 2, rows=16) == Knobs("one_shot", 1, 0)
    assert chosen("all_gather", 2) == Knobs("push", 4, 1)
    assert chosen("matmul_reduce_scatter", 4, rows=8).lanes == 0
    assert chosen("all_gather_matmul", 2, caps=FakeCaps(one_sided=False, stream_ordered=True)).schedule == "collective"


def test_defaults_poll_only_where_a_provider_does() -> None:
    assert chosen("all_gather_matmul", 2, polling=True) == chosen("all_gather_matmul", 2)
    assert chosen("all_gather_matmul", 8, polling=True) == Knobs("push", 4, 2, polls=True)
    assert chosen("matmul_reduce_scatter", 2, polling=True) == chosen("matmul_reduce_scatter", 2)
    assert chosen("matmul_reduce_scatter", 4, polling=True) == Knobs("push", 4, 2, polls=True)
    assert chosen("matmul_reduce_scatter", 4, polling=True, caps=ONE_QUEUE) == Knobs("push", 4, 2, True, False)
    assert chosen("dgrad_reduce_scatter", 4, polling=True, flags=("wgrad",)) == Knobs("push", 4, 2, True, False)
    assert not chosen("matmul_all_reduce", 2, polling=True, rows=16).polls
    assert chosen("matmul_reduce_scatter", 4, polling=True, bias=True) == Knobs("push", 4, 2, polls=True)
    assert not chosen("dgrad_reduce_scatter", 4, polling=True, weights=2).polls
    assert not chosen("matmul_reduce_scatter", 4, polling=True, caps=CAPS["puts"]).polls


def test_defaults_poll_where_what_travels_is_large() -> None:
    """From 64 MiB of bf16 on, of all ranks together, both sides; what may differ between ranks does not count."""
    for op, size in (("matmul_reduce_scatter", 4), ("matmul_all_reduce", 2), ("all_gather_matmul", 4)):
        polls = {rows: chosen(op, size, polling=True, rows=rows).polls for rows in (1024, 2048, 4096, 16384)}
        assert polls == {1024: False, 2048: False, 4096: True, 16384: True}, op
        assert chosen(op, size, polling=True, rows=2048) == chosen(op, size, rows=2048)
    scatter = dataclasses.replace(problem("matmul_reduce_scatter", (1024, 1024), n=8192), dtype="bfloat16")
    for k in (64, 65536):
        assert not default_knobs(dataclasses.replace(scatter, k=k), GPU, polling=True).polls
    assert default_knobs(scatter, GPU, polling=True, always=True).polls
    assert not default_knobs(scatter, GPU, polling=False, always=True).polls
