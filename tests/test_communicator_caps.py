"""What planners are told about a transport: its facts, less what the configuration does not allow."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from commbackend import communicator, schedules
from commbackend.communicator import Communicator
from commbackend.config import resolve
from commbackend.plan import Problem
from commbackend.testing import run_threads


def told(rank: int, group: Any, numerics: str, check: bool) -> set[str]:
    """Reduce over a transport that may sum in its own order; return what the planner was told."""
    config = resolve(transport="local", timeout_s=20.0, numerics=numerics, check=check)
    comm = Communicator(group, config, torch.device("cpu"))
    try:
        transport = comm._live().transport
        transport.caps = dataclasses.replace(transport.caps, numerics="library")  # as nccl says
        x, out = torch.ones(4, 3), torch.zeros(2, 3)
        comm.run(Problem("reduce_scatter", (2, 2), k=3, dtype="float32"), {"x": x, "out": out})
        assert bool((out == 2).all())
        return {comm.caps.numerics, *SEEN[rank]}
    finally:
        comm.close()


SEEN: dict[int, list[str]] = {}


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("numerics", ["fixed", "library"])
def test_planners_are_told_what_the_configuration_allows(
    numerics: str, check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    SEEN.clear()
    SEEN.update({0: [], 1: []})

    def program(problem: Problem, rank: int, caps: Any, knobs: Any) -> Any:
        SEEN[rank].append(caps.numerics)
        return schedules.program(problem, rank, caps, knobs)

    monkeypatch.setattr(communicator, "schedules", _Watched(program))
    assert run_threads(told, 2, numerics, check) == [{numerics}] * 2
    assert all(SEEN.values())


class _Watched:
    """``schedules`` with another ``program``."""

    def __init__(self, program: Any) -> None:
        self.program = program

    def __getattr__(self, name: str) -> Any:
        return getattr(schedules, name)
