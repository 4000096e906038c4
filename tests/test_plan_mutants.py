"""A planner that forgets anything is caught: every step of every schedule is deleted or altered, one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from plan_cases import CAPS, FLAGS, problem, schedules
from plan_machine import run_calls

from commbackend.check import check
from commbackend.errors import PlanError
from commbackend.plan import CREDIT, Gemm, Knobs, Plan, Problem, Put, Reduce, Segment, Signal, Step, Wait
from commbackend.schedules import plan, supports

SCHEDULED = list(schedules())


def without(steps: tuple[Step, ...], i: int) -> list[Step]:
    """The steps without step i."""
    kept = [s for j, s in enumerate(steps) if j != i]
    return [dataclasses.replace(s, after=tuple(a - (a > i) for a in s.after if a != i)) for s in kept]


def altered(size: int, rank: int, step: Step) -> Iterator[tuple[str, Step]]:
    """What a planner might get wrong in one step."""
    for a in step.after:
        yield f"without after {a}", dataclasses.replace(step, after=tuple(x for x in step.after if x != a))
    if isinstance(step, Wait | Signal):
        yield "later value", dataclasses.replace(step, delta=step.delta + 1)
        yield "earlier value", dataclasses.replace(step, delta=step.delta - 1)
    if isinstance(step, Wait | Signal | Put):
        yield "other word", dataclasses.replace(step, slot=step.slot + 1)
        other = next(p for p in range(size) if p not in (rank, step.peer))
        yield "other peer", dataclasses.replace(step, peer=other)
    if isinstance(step, Reduce):
        yield "misses a summand", dataclasses.replace(step, srcs=step.srcs[1:])
    if isinstance(step, Gemm):
        for i, s in enumerate(step.segments):
            for what, changed in altered_segment(rank, s):
                segments = (*step.segments[:i], changed, *step.segments[i + 1 :])
                yield f"segment {i} {what}", dataclasses.replace(step, segments=segments)


def altered_segment(rank: int, s: Segment) -> Iterator[tuple[str, Segment]]:
    """What a planner might get wrong in one segment."""
    # A later word of the same peer would do, and only wait longer.
    for name, step in (("ready", -1), ("done", 1)):
        for i, (peer, word) in enumerate(pairs := getattr(s, name)):
            for what, pair in (("misses", ()), ("names another word of", ((peer, word + step),))):
                changed = dataclasses.replace(s, **{name: (*pairs[:i], *pair, *pairs[i + 1 :])})
                yield f"{what} {name} {i}", changed
    for _, word in s.done:
        yield "tells a peer", dataclasses.replace(s, done=((rank - 1, word),))
    if s.addends:
        yield "misses an addend", dataclasses.replace(s, addends=s.addends[1:])
        yield "adds twice", dataclasses.replace(s, addends=(*s.addends, s.addends[0]))
    if s.bias:
        yield "misses the bias", dataclasses.replace(s, bias=None)


def mutants(whole: Plan, rank: int) -> Iterator[tuple[str, Step, Plan]]:
    """Every plan that differs from ``whole`` in one step of ``rank``."""
    one = whole.programs[rank]

    def with_steps(steps: list[Step]) -> Plan:
        programs = list(whole.programs)
        programs[rank] = dataclasses.replace(one, steps=tuple(steps))
        return dataclasses.replace(whole, programs=tuple(programs))

    for i, step in enumerate(one.steps):
        yield f"step {i} deleted", step, with_steps(without(one.steps, i))
        for what, changed in altered(whole.size, rank, step):
            yield f"step {i} {what}", step, with_steps([*one.steps[:i], changed, *one.steps[i + 1 :]])


def may_survive(knobs: Knobs, what: str, step: Step) -> bool:
    """``after`` of steps whose order follows in another way too: from words of peers, or polled by the lane before."""
    told = isinstance(step, Signal) and step.slot == CREDIT
    polled = knobs.polls and isinstance(step, Gemm) and step.form == "tn"
    return "without after" in what and (told or polled)


def caught(mutant: Plan, companions: list[Plan], wanted: Problem, caps: str) -> bool:
    """Whether the proof or, failing that, a run complains."""
    try:
        check([mutant, *companions], caps=CAPS[caps])
    except PlanError:
        return True
    for seed in range(5):
        try:
            run_calls([mutant] * 3, [wanted] * 3, seed)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize(("op", "flags", "caps", "knobs"), SCHEDULED, ids=lambda v: str(v)[:40])
def test_a_planner_that_forgets_anything_is_caught(op: str, flags: tuple[str, ...], caps: str, knobs: Knobs) -> None:
    weights = 2 if op in FLAGS and op.startswith("dgrad") else 1
    if knobs.polls and "reduce" in op:
        weights = 1
    wanted = problem(op, (4, 2, 4), blocks=2, flags=flags, weights=weights, bias=True)
    whole = plan(wanted, CAPS[caps], knobs)
    # A call after one whose peers read this rank's heap needs more credits than one among its like.
    reading = problem("all_gather", (4, 2, 4))
    companions = (
        [plan(reading, CAPS[caps], Knobs("pull"))] if supports(reading, CAPS[caps], Knobs("pull")) is None else []
    )
    check([whole, *companions], caps=CAPS[caps])
    count = 0
    for what, step, mutant in mutants(whole, rank=1):
        count += 1
        assert caught(mutant, companions, wanted, caps) or may_survive(knobs, what, step), f"{what} of {step}"
    assert count >= len(whole.programs[1].steps)
