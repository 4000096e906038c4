"""Plans of two levels: proved, run in random interleavings, and every step of them altered or left out."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
from plan_cases import FLAGS, TWO_LEVELS, FakeCaps, problem
from plan_machine import run_calls
from test_plan_mutants import mutants

from commbackend.check import check
from commbackend.errors import PlanError
from commbackend.plan import ITEMSIZE, Collective, Copy, Gemm, Knobs, Plan, Problem, Put, Reduce, Signal, Step
from commbackend.schedules import OPS, candidates, default_knobs, plan, supports
from commbackend.tuning.cost import simulate
from commbackend.tuning.costs import load_table, shipped

EVERY = [(op, flags) for op in OPS for flags in FLAGS.get(op, ((),))]


def sizes(op: str, flags: tuple[str, ...], caps: FakeCaps, rng: random.Random) -> Problem:
    """Uneven rows, zero among them, of one or several blocks and weights."""
    rows = tuple(rng.choice((0, 1, 3, 4)) for _ in caps.hosts)
    weights = 2 if op.startswith("dgrad") else 1
    return problem(op, rows, blocks=rng.choice((1, 2)), flags=flags, weights=weights, bias=True)


@pytest.mark.parametrize("name", TWO_LEVELS)
@pytest.mark.parametrize(("op", "flags"), EVERY, ids=str)
def test_plans_are_right_in_every_interleaving(op: str, flags: tuple[str, ...], name: str) -> None:
    """Proved together with a call of another operation, run three deep, with lanes of their own and with one queue."""
    caps, rng = TWO_LEVELS[name], random.Random(f"{op}{flags}{name}")
    for seed, lanes in enumerate((0, 1, 2) if len(caps.hosts) == 4 else (1,)):
        one = sizes(op, flags, caps, rng)
        other = sizes(rng.choice(OPS), (), caps, rng)
        plans = [
            plan(p, caps, Knobs("two_level", rng.choice((1, 2, 3)), lanes, blocks=rng.choice((0, 1, 2))))
            for p in (one, other, one)
        ]
        check(plans, caps=caps)
        for made in plans:
            assert Plan.from_json(made.to_json()).programs == made.programs
            check([Plan.from_json(made.to_json())], caps=caps)
        run_calls(plans, [one, other, one], seed, one_queue=seed == 1)


def test_nothing_else_crosses_and_each_byte_once() -> None:
    """Puts and words stay within a host; bytes between hosts are one level's, divided by the ranks of a host."""
    for caps in TWO_LEVELS.values():
        size, count = len(caps.hosts), len(set(caps.hosts))
        for op in ("all_gather", "reduce_scatter", "all_reduce"):
            p = problem(op, (4,) * size)
            crossed = 0
            for program in plan(p, caps, Knobs("two_level", 2)).programs:
                for s in program.steps:
                    if isinstance(s, Put | Signal):
                        assert caps.hosts[s.peer] == caps.hosts[program.rank]
                    if isinstance(s, Collective):
                        assert s.between and s.srcs[caps.hosts[program.rank]].rows == 0
                        crossed += sum(r.rows * p.k * ITEMSIZE[p.dtype] for r in s.srcs)
            to_strangers = size * (size - size // count) * 4 * p.k * ITEMSIZE[p.dtype]
            shots = 2 if op == "all_reduce" else 1
            assert crossed == shots * to_strangers // (size // count)


def wrong_collectives(whole: Plan, rank: int) -> Iterator[tuple[str, Step, Plan]]:
    """What a planner might get wrong in a collective between hosts."""
    one = whole.programs[rank]
    for i, s in enumerate(one.steps):
        if not isinstance(s, Collective):
            continue
        for what, changed in (
            ("is of all ranks", dataclasses.replace(s, between=False)),
            ("mixes hosts up", dataclasses.replace(s, srcs=s.srcs[::-1], dsts=s.dsts[::-1])),
            ("is another kind", dataclasses.replace(s, kind="all_gather", srcs=s.srcs[:1])),
        ):
            steps = (*one.steps[:i], changed, *one.steps[i + 1 :])
            programs = list(whole.programs)
            programs[rank] = dataclasses.replace(one, steps=steps)
            yield what, s, dataclasses.replace(whole, programs=tuple(programs))


def caught(mutant: Plan, wanted: Problem, caps: FakeCaps) -> bool:
    """Whether the proof or, failing that, a run complains."""
    try:
        check([mutant], caps=caps)
    except PlanError:
        return True
    for seed in range(5):
        try:
            run_calls([mutant] * 3, [wanted] * 3, seed)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(
    ("op", "flags"), [("all_gather_matmul", ()), ("matmul_all_reduce", ()), ("dgrad_reduce_scatter", ("wgrad",))]
)
def test_a_planner_that_forgets_anything_is_caught(op: str, flags: tuple[str, ...], lanes: int) -> None:
    caps = TWO_LEVELS["in turn"]
    wanted = problem(op, (4, 2, 4, 3), flags=flags, bias=True)
    whole = plan(wanted, caps, Knobs("two_level", 2, lanes))
    check([whole], caps=caps)
    count = 0
    for what, step, mutant in (*mutants(whole, rank=1), *wrong_collectives(whole, rank=1)):
        count += 1
        assert caught(mutant, wanted, caps), f"{what} of {step}"
    assert count > len(whole.programs[1].steps)


def test_what_has_no_two_levels_says_why() -> None:
    caps, p = TWO_LEVELS["by host"], problem("all_gather_matmul", (4,) * 4)
    for hosts, reason in (
        ((0, 0, 0, 1), "hosts have 3, 1 ranks"),
        ((0, 1, 2, 3), "every host has one rank"),
        ((0, 0, 0, 0), "all ranks share one host"),
        ((0, 1), "the transport has 2 ranks"),
        ((), "the transport has one level"),
    ):
        assert reason in str(supports(p, dataclasses.replace(caps, hosts=hosts), Knobs("two_level")))
    assert "the transport has two levels" in str(supports(p, caps, Knobs("push")))
    assert "chunks=17: 1 to 16 with 2 hosts" in str(supports(p, caps, Knobs("two_level", 17)))
    assert "no polling form" in str(supports(p, caps, Knobs("two_level", polls=True)))
    foreign = plan(p, caps, Knobs("two_level"))
    with pytest.raises(PlanError, match="has no collectives"):
        check([foreign], caps=FakeCaps(collective=False))
    programs = list(foreign.programs)
    steps = [dataclasses.replace(s, peer=2) if isinstance(s, Signal) else s for s in programs[0].steps]
    programs[0] = dataclasses.replace(programs[0], steps=tuple(steps))
    with pytest.raises(PlanError, match="rank 2 is on another host"):
        check([dataclasses.replace(foreign, programs=tuple(programs))], caps=caps)


def test_default_and_candidates() -> None:
    caps = TWO_LEVELS["by host"]
    for op, flags in EVERY:
        small, large = problem(op, (4,) * 4, flags=flags), problem(op, (4096,) * 4, k=1024, n=1024, flags=flags)
        assert default_knobs(small, caps).schedule == default_knobs(large, caps).schedule == "two_level"
        assert default_knobs(small, caps).lanes == 0 and default_knobs(large, caps).lanes == 2
        assert default_knobs(large, dataclasses.replace(caps, copy_lanes=0)).lanes == 1
        found = candidates(large, caps)
        assert {k.schedule for k in found} == {"two_level"} and max(k.chunks for k in found) <= 16
        assert all(supports(large, caps, k) is None for k in found)
    gpu = dataclasses.replace(caps, stream_ordered=True)
    assert default_knobs(problem("all_gather_matmul", (4096,) * 4, k=4096), gpu).blocks == 2


def test_own_rows_first_then_the_own_hosts_and_partials_for_others_first() -> None:
    caps = TWO_LEVELS["by host"]
    gathers = plan(problem("all_gather_matmul", (2,) * 4), caps, Knobs("two_level")).programs[1]
    rows = [s.segments[0].out.row for s in gathers.steps if isinstance(s, Gemm)]
    assert rows == [2, 0, 6, 4]
    reduces = plan(problem("matmul_reduce_scatter", (2,) * 4), caps, Knobs("two_level")).programs[1]
    assert [s.segments[0].a.row for s in reduces.steps if isinstance(s, Gemm)] == [4, 6, 0, 2]
    sums = [s for s in reduces.steps if isinstance(s, Reduce)]
    assert [len(s.srcs) for s in sums] == [2, 2, 2], "each host's ranks, then the hosts"
    assert not [s for s in reduces.steps if isinstance(s, Copy)]


def test_costs_of_what_crosses() -> None:
    """The discrete-event run knows who takes part in a collective between hosts, and what it moves."""
    table = load_table(shipped()[0])
    p = problem("all_gather", (1 << 14,) * 4, k=1024)
    times = []
    for hosts in ((0, 0, 1, 1), (0, 1, 1, 0)):
        caps = dataclasses.replace(TWO_LEVELS["by host"], hosts=hosts)
        times.append(simulate(plan(p, caps, Knobs("two_level", 1)), table).time_us)
    alone = sum(table.copy_us((1 << 14) * 1024 * 8, "network"))
    assert times[0] == pytest.approx(times[1]) and alone <= times[0] <= 3 * alone
