"""``commbackend plan``: what it prints, refuses and draws."""

from __future__ import annotations

import pytest

from commbackend import schedules
from commbackend.commands.plan import ROLES, main
from commbackend.commands.timeline import draw
from commbackend.errors import PlanError
from commbackend.plan import Buffer, Copy, Gemm, Knobs, Plan, Problem, Program, Put, Region, Wait
from commbackend.tuning.cost import Timed
from commbackend.tuning.cost import simulate as run
from commbackend.tuning.costs import CostTable

RATES = CostTable.flat(link_gbyte_s=1.0, memory_gbyte_s=1.0, tflop_s=1.0, launch_us=0.0)


def simulate(plan: Plan, table: CostTable) -> tuple[Timed, ...]:
    return run(plan, table).steps


def test_json_is_the_plan_the_planner_makes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "3,0,5", "--k", "8", "--n", "4,6", "--dtype", "float32", "--flags", "gathered"]
    knobs = ["--schedule", "push", "--chunks", "2", "--lanes", "1"]
    assert main(["all_gather_matmul", *sizes, *knobs, "--json", "--check"]) == 0
    problem = Problem("all_gather_matmul", (3, 0, 5), k=8, n=(4, 6), dtype="float32", flags=("gathered",))
    expected = schedules.plan(problem, ROLES["views"], Knobs("push", 2, 1))
    assert Plan.from_json(capsys.readouterr().out).programs == expected.programs


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("op", schedules.OPS)
def test_every_op_is_printed_checked_and_drawn_for_every_kind_of_transport(
    op: str, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([op, "--rows", "64", "--size", "3", "--k", "32", "--n", "48", "--role", role, "--check"]) == 0
    said = capsys.readouterr().out
    assert "rank 2:" in said and "rank 2 lane 0 |" in said and "Proved over three calls" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["--schedule", "teleport"], "has no schedule 'teleport'"),
        (["--chunks", "99"], "chunks=99"),
        (["--rows", "1,x"], "--rows '1,x'"),
        (["--rows", "1,2,3", "--size", "4"], "--rows names 3 ranks, --size 4"),
        (["--dtype", "float17"], "float17"),
        (["--role", "puts", "--schedule", "pull"], "no view"),
        (["--link", "0"], "must be positive"),
    ),
)
def test_what_cannot_be_planned_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["all_gather_matmul", *arguments]) == 2
    assert message in capsys.readouterr().err


def plan(chunks: int, lanes: int) -> Plan:
    problem = Problem("all_gather_matmul", (1000, 1000), k=1000, n=(1000,), dtype="float32")
    return schedules.plan(problem, ROLES["puts"], Knobs("push", chunks, lanes))


def test_times_follow_from_the_rates() -> None:
    """Own shard: 2e9 operations, 2 ms; 4 MB to the peer, 4 ms. In one lane one after the other, in two side by side."""
    alone = {(t.rank, type(t.step)): t for t in simulate(plan(1, 0), RATES)}
    assert alone[0, Put].end_us == pytest.approx(4000)
    assert max(t.end_us for t in alone.values()) == pytest.approx(8000)
    timed = simulate(plan(1, 1), RATES)
    waits = [t for t in timed if isinstance(t.step, Wait) and t.rank == 1 and t.step.delta == 0]
    assert [(w.start_us, w.end_us) for w in waits] == [(pytest.approx(2000), pytest.approx(4000))]
    assert max(t.end_us for t in timed) == pytest.approx(6000)
    # In four chunks the peer's rows arrive while others are multiplied: 4 ms of link, then the last quarter's 0.5 ms.
    assert max(t.end_us for t in simulate(plan(4, 1), RATES)) == pytest.approx(4500, rel=0.01)


def test_steps_come_after_what_they_wait_for() -> None:
    timed = {(t.rank, t.index): t for t in simulate(plan(4, 1), RATES)}
    for t in timed.values():
        assert all(timed[t.rank, j].end_us <= t.start_us for j in t.step.after)
    assert sum(isinstance(t.step, Gemm) for t in timed.values()) == 10


def test_a_lane_waits_for_steps_of_other_lanes() -> None:
    """Two copies of 4 MB, read and written, in lane 1, then one in lane 0: 8 ms each."""
    whole = Region("x", 0, 1000), Region("y", 0, 1000)
    steps = (Copy(1, (), *whole), Copy(1, (), *whole), Copy(0, (1,), *whole))
    buffers = tuple(Buffer(name, "scratch", 1000, 1000, "float32") for name in "xy")
    timed = simulate(Plan("all_gather", 1, (Program(0, buffers, steps),)), RATES)
    assert [(t.index, t.start_us, t.end_us) for t in timed] == [(0, 0, 8000), (1, 8000, 16000), (2, 16000, 24000)]


def test_a_plan_that_does_not_end_is_named() -> None:
    waits = tuple(Program(r, (), (Wait(0, (), 1 - r, 2, covers=(Region("x", 0, 1),)),)) for r in (0, 1))
    with pytest.raises(PlanError, match="does not end: rank 0 lane 0 at step 0, rank 1 lane 0 at step 0"):
        simulate(Plan("all_gather", 2, waits), RATES)


def test_picture_shows_what_runs_side_by_side() -> None:
    lines = draw(simulate(plan(1, 1), RATES), width=60).splitlines()
    assert lines[0] == "rank 0 lane 0 |" + "#" * 20 + "." * 20 + "#" * 20 + "|"
    assert lines[1] == "rank 0 lane 1 |" + ">" * 40 + " " * 20 + "|"
    assert "6,000 us" in lines[4]
