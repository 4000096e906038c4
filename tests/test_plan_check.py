"""The rules of ``check``, each broken by hand once; test_plan_mutants.py breaks every planner."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import pytest
from plan_cases import CAPS, FakeCaps, problem

from commbackend.check import check
from commbackend.errors import PlanError
from commbackend.plan import (
    CREDIT,
    SLOTS_PER_RANK,
    Buffer,
    Collective,
    Copy,
    Gemm,
    Get,
    Knobs,
    Plan,
    Program,
    Put,
    Reduce,
    Region,
    Segment,
    Signal,
    Step,
    Wait,
    data_slot,
)
from commbackend.schedules import default_knobs, plan

SLOT = data_slot(0)
BUFFERS = (
    Buffer("x", "input", 2, 3, "float32"),
    Buffer("w", "input", 3, 3, "float32"),
    Buffer("out", "output", 2, 3, "float32"),
    Buffer("heap", "heap", 2, 3, "float32"),
    Buffer("tmp", "scratch", 2, 3, "float32"),
)
X, W, OUT, HEAP, TMP = (Region(b.name, 0, b.rows) for b in BUFFERS)


def at(region: Region, rank: int) -> Region:
    return dataclasses.replace(region, at=rank)


def exchange(rank: int) -> list[Step]:
    """Two ranks swap ``x``: the smallest program that needs every rule."""
    peer = 1 - rank
    return [
        Wait(1, (), peer, CREDIT, -2),
        Put(1, (), X, at(HEAP, peer), peer, SLOT),
        Wait(0, (), peer, SLOT, 0, (HEAP,)),
        Copy(0, (), HEAP, OUT),
        Signal(0, (1,), peer, CREDIT),
    ]


def made(*programs: Sequence[Step], buffers: Sequence[Buffer] = BUFFERS) -> Plan:
    return Plan(
        "swap", len(programs), tuple(Program(r, tuple(buffers), tuple(steps)) for r, steps in enumerate(programs))
    )


def broken(change: dict[int, Step] | None = None, *, drop: int = -1, more: Sequence[Step] = ()) -> Plan:
    """The swap with rank 0's steps replaced, dropped, or followed by others (before its credit)."""
    steps = exchange(0)
    for i, step in (change or {}).items():
        steps[i] = step
    if drop >= 0:
        steps = [
            dataclasses.replace(s, after=tuple(a - (a > drop) for a in s.after)) for s in steps if s != steps[drop]
        ]
    steps[-1:-1] = more
    return made(steps, exchange(1))


def fails(whole: Plan | Sequence[Plan], match: str, caps: FakeCaps | None = None) -> None:
    with pytest.raises(PlanError, match=match):
        check([whole] if isinstance(whole, Plan) else whole, caps=caps)


def test_the_swap_itself_holds() -> None:
    check([made(exchange(0), exchange(1))])
    check([made(exchange(0), exchange(1))] * 3, caps=CAPS["puts"])
    check([])


PUT, COPY = exchange(0)[1], exchange(0)[3]
assert isinstance(PUT, Put)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({3: Copy(0, (), Region("y", 0, 2), OUT)}, "rank 0, step 3 .Copy.: .*buf='y'.* names no buffer"),
        ({3: Copy(0, (), Region("heap", 1, 2), OUT)}, "lies outside of"),
        ({3: Copy(0, (), Region("heap", 0, 2, 1, 3), OUT)}, "lies outside of"),
        ({3: Copy(0, (), Region("heap", 0, 1, blocks=3, block_stride=1), OUT)}, "lies outside of"),
        ({3: Copy(0, (), Region("heap", 0, 2, blocks=2, block_stride=1), OUT)}, "blocks overlap"),
        ({3: Copy(0, (), Region("heap", 0, 1), OUT)}, r"has shape \(1, 1, 3\), but .* has \(1, 2, 3\)"),
        ({3: Copy(0, (), at(HEAP, 1), OUT)}, "is not this rank's own"),
        ({3: Copy(0, (), at(TMP, 1), OUT)}, "is not this rank's own"),
        ({3: Copy(0, (), HEAP, X)}, "writes to the input 'x'"),
        ({3: Copy(0, (4,), HEAP, OUT)}, "only earlier steps can be named"),
        ({3: Copy(0, (3,), HEAP, OUT)}, "only earlier steps can be named"),
        ({3: Copy(-1, (), HEAP, OUT)}, "lane -1"),
        ({1: dataclasses.replace(PUT, dst=HEAP)}, "writes to the heap of its peer"),
        ({1: dataclasses.replace(PUT, dst=at(TMP, 1))}, "writes to the heap of its peer"),
        ({1: dataclasses.replace(PUT, slot=CREDIT)}, "raises a data word"),
        ({1: dataclasses.replace(PUT, peer=0, dst=at(HEAP, 0))}, "peer 0 of 2 ranks"),
        ({1: dataclasses.replace(PUT, peer=2, dst=at(HEAP, 2))}, "peer 2 of 2 ranks"),
        ({1: dataclasses.replace(PUT, slot=SLOTS_PER_RANK)}, "a rank has 66 for every writer"),
        ({0: Wait(1, (), 1, CREDIT, -1)}, "delta -1 for word 1: it must be -2"),
        ({2: Wait(0, (), 1, SLOT, -1)}, "delta -1 for word 2: it must be 0"),
        ({4: Signal(0, (1,), 1, CREDIT, 1)}, "delta 1 for word 1: it must be 0"),
        ({3: Reduce(0, (), (HEAP, Region("x", 0, 1)), OUT)}, "has shape"),
        ({3: Reduce(0, (), (), OUT)}, "op 'sum' of 0 regions"),
        ({3: Reduce(0, (), (HEAP,), OUT, Region("x", 0, 2))}, "is not one row of 3"),
        ({3: Gemm(0, (), (Segment(HEAP, Region("w", 0, 2), OUT),))}, "nt product of"),
        ({3: Gemm(0, (), (Segment(HEAP, W, OUT),), "tt")}, "form 'tt'"),
        ({3: Gemm(0, (), (Segment(HEAP, W, OUT, bias=X),))}, "is not one row of 3"),
        ({3: Gemm(0, (), (Segment(HEAP, W, OUT, ready=((1, CREDIT),)),))}, "not credits"),
        ({3: Get(0, (), HEAP, OUT, 1)}, "a get reads from the heap of its peer"),
        ({3: Collective(0, (), "all_gather", (HEAP,), (OUT,))}, "'all_gather' of 1 and 1 regions"),
    ],
)
def test_structure(change: dict[int, Step], match: str) -> None:
    fails(broken(change), match)


@pytest.mark.parametrize(
    ("buffers", "match"),
    [
        ((*BUFFERS, BUFFERS[0]), "two buffers have one name"),
        ((*BUFFERS, Buffer("y", "vram", 1, 1, "float32")), "is no buffer"),
        ((*BUFFERS, Buffer("y", "heap", 1, -1, "float32")), "is no buffer"),
        ((*BUFFERS, Buffer("y", "output", 1, 1, "float32")), "output 'y' is never written"),
        ((*BUFFERS[:3], dataclasses.replace(BUFFERS[3], dtype="int32"), BUFFERS[4]), "differ in dtype"),
    ],
)
def test_buffers(buffers: Sequence[Buffer], match: str) -> None:
    fails(made(exchange(0), exchange(1), buffers=buffers), match)


def test_heap_buffers_are_the_same_everywhere() -> None:
    good = made(exchange(0), exchange(1))
    larger = [dataclasses.replace(b, rows=9) if b.space == "heap" else b for b in BUFFERS]
    programs = (good.programs[0], dataclasses.replace(good.programs[1], buffers=tuple(larger)))
    fails(dataclasses.replace(good, programs=programs), "rank 1: its heap buffers differ from rank 0's")
    fails(dataclasses.replace(good, programs=good.programs[:1]), "a plan of 2 ranks has programs for ranks")


@pytest.mark.parametrize(
    ("whole", "match"),
    [
        (broken({1: dataclasses.replace(PUT, slot=SLOT + 1)}), "waits for word 2 of rank 0 for ever"),
        (broken(drop=1), "waits for word 2 of rank 0 for ever"),
        (broken({2: Wait(0, (), 1, SLOT + 1)}), "waits for word 3 of rank 1 for ever"),
        (broken(more=[Signal(0, (), 1, SLOT + 1)]), "which nobody there waits for"),
        (broken(more=[Signal(0, (), 1, SLOT)]), "raises word 2 at rank 1, as step 1 did"),
        (broken(more=[Wait(0, (), 1, SLOT)]), "waits for word 2 of rank 1, as step 2 did"),
        (broken(drop=4), "raises no credit at rank 1"),
        (broken(more=[Signal(0, (1,), 1, CREDIT)]), "raises the credit at rank 1 a second time"),
    ],
)
def test_pairing(whole: Plan, match: str) -> None:
    fails(whole, match)


def test_a_waiter_enqueued_before_its_producer_hangs_a_shared_queue() -> None:
    def late(rank: int) -> list[Step]:
        credit, put, wait, copy, told = exchange(rank)
        assert isinstance(told, Signal)
        return [wait, credit, put, copy, dataclasses.replace(told, after=(2,))]

    fails(made(late(0), late(1)), "only by steps that come later where lanes share one in-order queue")
    # One rank alone may: its peer's put does not depend on it.
    check([made(late(0), exchange(1))])


@pytest.mark.parametrize(
    ("whole", "match"),
    [
        (broken({2: Wait(1, (), 1, SLOT)}), "reads .*'heap'.* while rank 1, step 1 .Put., writes"),
        (broken(drop=2, more=[Wait(0, (), 1, SLOT)]), "reads .*'heap'.* (nothing orders|before anything)"),
        (broken({3: Copy(0, (), TMP, OUT)}), "reads .*'tmp'.* before anything was written there"),
        (broken(more=[Copy(1, (), X, TMP), Copy(0, (), X, TMP)]), "writes .*'tmp'.* nothing orders the two"),
        (broken(more=[Copy(0, (), HEAP, Region("heap", 0, 2))]), "nothing orders the two"),
        (broken(more=[Copy(0, (), X, OUT)]), "writes output .* again, after step 3"),
        (broken({3: Copy(0, (), Region("heap", 0, 1), Region("out", 0, 1))}), "row 1 of output 'out' is never written"),
        (broken({3: Copy(0, (), Region("heap", 0, 2, 0, 2), Region("out", 0, 2, 0, 2))}), "'out' is never written"),
        (broken({4: Signal(0, (), 1, CREDIT)}), "raises the credit before step 1 .Put. has ended"),
        (
            broken(
                {3: Gemm(0, (), (Segment(HEAP, W, TMP), Segment(TMP, W, OUT)))},
            ),
            "reads .*'tmp'.* nothing orders the two",
        ),
    ],
)
def test_races(whole: Plan, match: str) -> None:
    fails(whole, match)


def test_columns_are_told_apart() -> None:
    """Two lanes may write different columns of the same rows, and a read may need both."""
    halves = [
        Copy(lane, (), Region("x", 0, 2, c, n), Region("tmp", 0, 2, c, n)) for lane, c, n in ((0, 0, 2), (1, 2, 1))
    ]
    good = broken(more=[*halves, Reduce(0, (5,), (TMP, TMP), HEAP)])
    assert isinstance(good.programs[0].steps[5], Copy)
    check([good])
    steps = list(good.programs[0].steps)
    steps[6] = dataclasses.replace(steps[6], after=())
    fails(made(steps, exchange(1)), r"reads .*'tmp'.* while rank 0, step 5")


def test_a_segment_may_add_in_place_and_nothing_else_may() -> None:
    first = Gemm(0, (), (Segment(X, W, TMP),))
    check([broken(more=[first, Gemm(0, (), (Segment(X, W, TMP, addends=(TMP,)),))])])
    fails(broken(more=[first, Gemm(0, (), (Segment(TMP, W, TMP),))]), "nothing orders the two")


def test_credits_are_needed_of_the_owner_and_of_readers() -> None:
    """A half that peers read is free when the readers have finished, not when its owner has."""
    fails(broken(drop=0), "writes to rank 1's half without the credit of a rank that finished, two calls before")

    def reading(rank: int, *, credit: bool = True) -> list[Step]:
        peer = 1 - rank
        first: list[Step] = [Wait(0, (), peer, CREDIT, -2)] if credit else []
        rest: list[Step] = [Copy(0, (), X, HEAP), Signal(0, (), peer, SLOT), Wait(0, (), peer, SLOT)]
        return [*first, *rest, Get(0, (), at(HEAP, peer), OUT, peer), Signal(0, (), peer, CREDIT)]

    check([made(reading(0), reading(1)), made(exchange(0), exchange(1))])
    fails(made(reading(0, credit=False), reading(1)), "rank 0, step 0 .Copy.: writes to rank 0's half")


def test_a_put_by_a_third_rank_needs_the_credit_of_readers_too() -> None:
    """Alone a put needs its target's credit; after a call in which others read the target's heap, theirs too."""

    def without(whole: Plan, rank: int, peer: int) -> Plan:
        one = whole.programs[rank]
        drop = next(i for i, s in enumerate(one.steps) if isinstance(s, Wait) and (s.peer, s.slot) == (peer, CREDIT))
        steps = [
            dataclasses.replace(s, after=tuple(a - (a > drop) for a in s.after))
            for i, s in enumerate(one.steps)
            if i != drop
        ]
        programs = list(whole.programs)
        programs[rank] = dataclasses.replace(one, steps=tuple(steps))
        return dataclasses.replace(whole, programs=tuple(programs))

    # Only rank 2 has rows to receive elsewhere than at rank 0, so rank 0 alone has no half to write at rank 1.
    p = problem("reduce_scatter", (0, 0, 4))
    puts, reads = (
        plan(p, CAPS["everything"], Knobs("push")),
        plan(problem("all_gather"), CAPS["everything"], Knobs("pull")),
    )
    short = without(puts, 0, 1)
    check([puts, reads])
    check([short])
    fails([short, reads], "writes to rank 2's half without the credit")


def test_plans_that_share_nothing_raise_no_credits() -> None:
    """They are not counted, so they may stand between calls that are."""
    silent = plan(problem("all_gather", (4, 4)), CAPS["collectives"], Knobs("collective"))
    again = plan(problem("all_gather", (4, 4)), CAPS["everything"], Knobs("collective"))
    assert silent.programs == again.programs and not any(p.counted for p in again.programs)
    check([silent, made(exchange(0), exchange(1))], caps=CAPS["everything"])
    single = plan(problem("all_gather", (4,)), CAPS["everything"], Knobs("push"))
    fails([single, made(exchange(0), exchange(1))], "plans of 1 and 2 ranks|raises no credits")


def test_roles() -> None:
    whole = made(exchange(0), exchange(1))
    fails(whole, "this transport is not one-sided", CAPS["collectives"])
    fails(whole, "puts read only the heap", CAPS["symmetric"])
    reading = broken({3: Gemm(0, (), (Segment(at(HEAP, 1), W, OUT),))})
    fails(reading, "no view of a peer's memory", CAPS["puts"])
    gathered = Collective(0, (), "all_reduce", (X,), (TMP,))
    both = made(*([*exchange(r)[:-1], gathered, exchange(r)[-1]] for r in (0, 1)))
    check([both])
    fails(both, "the library's own order", CAPS["everything"])
    check([both], caps=dataclasses.replace(CAPS["everything"], numerics="library"))
    fails(both, "has no collectives", CAPS["puts"])


def test_collectives_meet_in_one_order_with_one_size() -> None:
    def pair(*kinds: Collective) -> Plan:
        return made(*([k, Copy(0, (), X, OUT)] for k in kinds), buffers=[b for b in BUFFERS if b.space != "heap"])

    gathered = Collective(0, (), "all_gather", (Region("x", 0, 1),), (Region("tmp", 0, 1), Region("tmp", 1, 1)))
    check([pair(gathered, gathered)])
    summed = Collective(0, (), "all_reduce", (X,), (TMP,))
    fails(pair(gathered, summed), "is all_gather, but rank 1, step 0 is all_reduce|is all_reduce, but")
    larger = dataclasses.replace(gathered, srcs=(X,))
    fails(pair(gathered, larger), "rank 1, step 0 .all_gather. sends .* to rank [01], which expects")
    missing = made(
        [gathered, Copy(0, (), X, OUT)], [Copy(0, (), X, OUT)], buffers=[b for b in BUFFERS if b.space != "heap"]
    )
    fails(missing, "not all ranks come to this collective")


def test_a_kernel_that_raises_words_orders_only_the_segment_that_raised() -> None:
    """A copy lane may put a segment's rows when its word is up, not those of a neighbour in the same launch."""
    rows = [Region("tmp", i, 1) for i in range(2)]

    def steps(rank: int, source: int) -> list[Step]:
        peer = 1 - rank
        credit, _, _, copy, told = exchange(rank)
        assert isinstance(told, Signal)
        launch = Gemm(
            0, (), tuple(Segment(Region("x", i, 1), W, rows[i], done=((rank, data_slot(1 + i)),)) for i in range(2))
        )
        parts = [
            Put(1, (), rows[i if source < 0 else source], at(Region("heap", i, 1), peer), peer, data_slot(5 + i))
            for i in range(2)
        ]
        met: list[Step] = [Wait(0, (), peer, data_slot(5 + i)) for i in range(2)]
        gated = [s for i in range(2) for s in (Wait(1, (), rank, data_slot(1 + i)), parts[i])]
        return [credit, launch, *gated, *met, copy, dataclasses.replace(told, after=(5,))]

    check([made(steps(0, -1), steps(1, -1))])
    fails(made(steps(0, 1), steps(1, -1)), "reads .*'tmp'.* while rank 0, step 1 .Gemm.")


def test_sixty_four_ranks_are_planned_and_proved_in_a_moment() -> None:
    """About 0.3 s each when the machine is idle; a proof that compared all pairs would take minutes."""
    for op in ("all_gather_matmul", "matmul_all_reduce"):
        p = problem(op, (128,) * 64, k=64, n=64)
        for caps in (CAPS["everything"], CAPS["puts"]):
            start = time.perf_counter()
            check([plan(p, caps, default_knobs(p, caps))], caps=caps)
            assert time.perf_counter() - start < 10
