"""The text of a handful of plans, so that a change of a planner shows in a diff. scripts/golden rewrites them."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_cases import FakeCaps, golden, golden_text

from commbackend.check import check
from commbackend.plan import Knobs, Plan, Problem
from commbackend.schedules import OPS, SCHEDULES, plan

FOLDER = Path(__file__).with_name("golden")
CASES = list(golden())


@pytest.mark.parametrize(("name", "problem", "caps", "knobs"), CASES, ids=[c[0] for c in CASES])
def test_plan_is_the_one_kept(name: str, problem: Problem, caps: FakeCaps, knobs: Knobs) -> None:
    text = (FOLDER / f"{name}.json").read_text()
    assert golden_text(plan(problem, caps, knobs)) == text, "the planner changed: review, then run scripts/golden"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_kept_text_is_a_plan_that_holds(path: Path) -> None:
    check([Plan.from_json(path.read_text())])


def test_every_file_has_its_case_and_every_schedule_its_file() -> None:
    assert {p.stem for p in FOLDER.glob("*.json")} == {c[0] for c in CASES}
    assert {c[1].op for c in CASES} == set(OPS)
    assert {c[3].schedule for c in CASES} == {name for op in OPS for name in SCHEDULES[op]}
