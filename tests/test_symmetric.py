"""Plans and proofs of many ranks by the program of one: they say what the plans and proofs of all ranks say."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from commbackend import schedules
from commbackend.check import check
from commbackend.check.symmetric import check_symmetric
from commbackend.contract import Caps
from commbackend.errors import PlanError
from commbackend.plan import (
    CREDIT,
    Buffer,
    Copy,
    Knobs,
    Plan,
    Problem,
    Program,
    Put,
    Region,
    Signal,
    Step,
    Wait,
    data_slot,
)
from commbackend.schedules.symmetric import SymmetricPlan, symmetric_plan

PUTS = Caps("cuda", one_sided=True, stream_ordered=True)
PACKED = dataclasses.replace(PUTS, source="symmetric")
COLLECTIVE = Caps("cuda", collective=True, stream_ordered=True)

CASES = (
    ("all_gather", PUTS, Knobs("push", 2, 2)),
    ("all_gather_matmul", PUTS, Knobs("push", 2, 2)),
    ("all_gather_matmul", PUTS, Knobs("push", 1, 1, blocks=2)),
    ("all_gather_matmul", PUTS, Knobs("push", 2, 1, polls=True)),
    ("all_gather_matmul", PACKED, Knobs("push", 2, 1)),
    ("all_gather_matmul", PUTS, Knobs("sequence", 1, 1)),
    ("all_gather_matmul", COLLECTIVE, Knobs("collective", 2, 1)),
    ("matmul_reduce_scatter", PUTS, Knobs("push", 2, 2)),
    ("matmul_reduce_scatter", PUTS, Knobs("push", 1, 1, polls=True)),
    ("matmul_reduce_scatter", PUTS, Knobs("push", 1, 1, polls=True, folds=False)),
    ("matmul_reduce_scatter", COLLECTIVE, Knobs("collective", 1, 1)),
    ("matmul_all_reduce", PUTS, Knobs("two_shot", 1, 1)),
    ("matmul_all_reduce", PUTS, Knobs("one_shot", 1, 1)),
    ("dgrad_reduce_scatter", PUTS, Knobs("push", 1, 1)),
)


def problem(op: str, size: int, rows: int = 4) -> Problem:
    flags = ("wgrad",) if op.startswith("dgrad") else ()
    return Problem(op, (rows,) * size, k=8, n=() if op == "all_gather" else (8,), flags=flags)


def prove(p: Problem, caps: Caps, knobs: Knobs, change: Callable[[Program], Program] = lambda program: program) -> None:
    """Prove by one program, each rank's changed by ``change``."""
    made = symmetric_plan(p, caps, knobs)
    changed = dataclasses.replace(made, program=change(made.program))
    check_symmetric(changed, lambda rank: change(schedules.program(p, rank, caps, knobs)), caps=caps)


@pytest.mark.parametrize("size", (2, 3, 4, 6))
@pytest.mark.parametrize(("op", "caps", "knobs"), CASES, ids=str)
def test_what_all_ranks_prove_one_program_proves(op: str, caps: Caps, knobs: Knobs, size: int) -> None:
    for domain in {0, 2 if size % 2 == 0 and size > 2 else 0}:
        chosen = dataclasses.replace(knobs, domain=domain)
        check([schedules.plan(problem(op, size), caps, chosen)], caps=caps)
        prove(problem(op, size), caps, chosen)


def without(i: int, output: str) -> Callable[[Program], Program]:
    """Replace step ``i`` by one that does nothing."""

    def change(program: Program) -> Program:
        steps: list[Step] = list(program.steps)
        old, nothing = steps[i], Region(output, 0, 0)
        steps[i] = Copy(old.lane, old.after, nothing, nothing)
        return dataclasses.replace(program, steps=tuple(steps))

    return change


def unordered(i: int) -> Callable[[Program], Program]:
    """Step ``i`` waits for no step of another lane."""

    def change(program: Program) -> Program:
        steps = list(program.steps)
        steps[i] = dataclasses.replace(steps[i], after=())
        return dataclasses.replace(program, steps=tuple(steps))

    return change


def refused(prove_it: Callable[[], None]) -> bool:
    try:
        prove_it()
    except PlanError:
        return True
    return False


@pytest.mark.parametrize(("op", "caps", "knobs"), CASES, ids=str)
def test_a_mutant_that_all_ranks_refuse_one_program_refuses(op: str, caps: Caps, knobs: Knobs) -> None:
    """Every step left out, and every order between lanes left out, on all ranks at once."""
    p = problem(op, 3)
    whole = schedules.plan(p, caps, knobs)
    output = next(b.name for b in whole.programs[0].buffers if b.space == "output")
    count = len(whole.programs[0].steps)
    changes = [without(i, output) for i in range(count)]
    changes += [unordered(i) for i in range(count) if whole.programs[0].steps[i].after]
    caught = 0
    for change in changes:
        mutant = dataclasses.replace(whole, programs=tuple(map(change, whole.programs)))
        by_all = refused(lambda mutant=mutant: check([mutant], caps=caps))  # type: ignore[misc]
        by_one = refused(lambda change=change: prove(p, caps, knobs, change))  # type: ignore[misc]
        assert by_one or not by_all
        caught += by_one
    assert caught > count // 2


def test_a_put_to_rows_that_nobody_takes_for_it_is_refused() -> None:
    p, knobs = problem("all_gather_matmul", 4), Knobs("push", 1, 1)

    def astray(program: Program) -> Program:
        steps = tuple(
            dataclasses.replace(s, dst=dataclasses.replace(s.dst, row=(s.dst.row + 4) % 16))
            if isinstance(s, Put)
            else s
            for s in program.steps
        )
        return dataclasses.replace(program, steps=steps)

    with pytest.raises(PlanError, match=r"puts .* but rank 1 takes"):
        prove(p, PUTS, knobs, astray)


def test_what_this_proof_does_not_cover_is_refused() -> None:
    views = Caps("cpu", one_sided=True, peer_view=True)
    p = problem("all_gather_matmul", 4)
    with pytest.raises(PlanError, match="reached by puts alone"):
        prove(p, views, Knobs("pull", 1, 1))
    uneven = dataclasses.replace(p, rows=(4, 4, 4, 3))
    with pytest.raises(PlanError, match="more than one class"):
        symmetric_plan(uneven, PUTS, Knobs("push", 1, 1))


def test_a_wait_for_ever_is_refused() -> None:
    def early(program: Program) -> Program:
        """Waits come first: with one queue nobody ever puts."""
        steps = sorted(program.steps, key=lambda s: not (isinstance(s, Wait) and s.delta == 0))
        return dataclasses.replace(program, steps=tuple(dataclasses.replace(s, after=()) for s in steps))

    with pytest.raises(PlanError, match="waits for ever"):
        prove(problem("all_gather_matmul", 4), PUTS, Knobs("push", 1, 1), early)


def twice(rank: int, size: int, answered: bool) -> Program:
    """Each rank puts to the next one twice, into the same rows; the reader may answer when it has read the first."""
    after, before = (rank + 1) % size, (rank - 1) % size
    rows = Region("h", 0, 1)
    put = [Put(0, (), Region("x", 0, 1), dataclasses.replace(rows, at=after), after, data_slot(i)) for i in (0, 1)]
    wait = [Wait(0, (), before, data_slot(i), covers=(rows,)) for i in (0, 1)]
    copies = [Copy(0, (), rows, Region("out", i, 1)) for i in (0, 1)]
    answer = [Signal(0, (), before, data_slot(2)), Wait(0, (), after, data_slot(2))] if answered else []
    peers = [p for p in range(size) if p != rank]
    steps: list[Step] = [Wait(0, (), p, CREDIT, -2) for p in peers]
    steps += [put[0], wait[0], copies[0], *answer, put[1], wait[1], copies[1]]
    steps += [Signal(0, (), p, CREDIT) for p in peers]
    spaces = (("x", "input", 1), ("h", "heap", 1), ("out", "output", 2))
    return Program(rank, tuple(Buffer(b, space, n, 4, "float32") for b, space, n in spaces), tuple(steps))


@pytest.mark.parametrize("size", (3, 5))
def test_what_a_peer_knows_of_others_counts(size: int) -> None:
    """The second put comes after the reading of the first because the reader told the writer so, and only then."""
    for answered in (True, False):
        whole = Plan("all_gather", size, tuple(twice(r, size, answered) for r in range(size)))
        made = SymmetricPlan("all_gather", size, 0, whole.programs[0], whole.programs[size // 2])
        proofs = (
            lambda whole=whole: check([whole], caps=PUTS),
            lambda made=made, answered=answered: check_symmetric(
                made, lambda rank: twice(rank, size, answered), caps=PUTS
            ),
        )
        for proof in proofs:
            if answered:
                proof()  # type: ignore[no-untyped-call]
            else:
                with pytest.raises(PlanError, match="nothing orders the two"):
                    proof()  # type: ignore[no-untyped-call]


def test_576_ranks_are_planned_proved_and_simulated_in_little_memory() -> None:
    """In a process of its own, whose peak counts. F015 is about such worlds."""
    command = [
        sys.executable,
        "-m",
        "commbackend",
        "bench",
        "plan",
        "--one",
        "all_gather_matmul:576",
        "--topology",
        "nvl72",
    ]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(said.stdout)
    assert found["peak_nbytes"] < 300 << 20
    assert found["steps"] > 4 * 575 and found["predicted_us"] > 0


def test_the_command_predicts_and_proves_a_rack() -> None:
    command = [sys.executable, "-m", "commbackend", "plan", "matmul_reduce_scatter", "--simulate", "--world", "72"]
    said = subprocess.run(
        [*command, "--model", "70B", "--json"], capture_output=True, text=True, timeout=300, check=True
    )
    found = json.loads(said.stdout)
    assert found["time_us"] >= found["lower_bound_us"] > 0 and found["critical_path"]
    text = subprocess.run(
        [*command, "--topology", "9x8"], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert "Proved by one program for all 72 ranks" in text and "never measured" in text and "domains of 8" in text


def test_growth_is_the_number_of_peers() -> None:
    """F015: steps a rank grow with its peers, and no faster; planning makes three programs whatever the ranks."""
    steps = {
        n: len(symmetric_plan(problem("all_gather_matmul", n), PUTS, Knobs("push", 1, 2)).program.steps)
        for n in (8, 64)
    }
    assert steps[64] <= 9 * steps[8]  # 63 peers instead of 7


def test_a_symmetric_plan_is_a_plan_of_one_class() -> None:
    made = symmetric_plan(problem("all_gather", 5), PUTS, Knobs("push", 1, 1))
    assert isinstance(made, SymmetricPlan) and made.program.rank == 0 and made.middle.rank == 2
    assert made.meta == schedules.plan(problem("all_gather", 5), PUTS, Knobs("push", 1, 1)).meta
    assert isinstance(schedules.plan(problem("all_gather", 5), PUTS, Knobs("push", 1, 1)), Plan)
