"""Guards of the whole suite: a test that hangs ends the run, and tests cannot vanish unnoticed."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator
from pathlib import Path

import pytest

#: A test that takes longer hangs; exhaustive ones may take ten times as long.
HANG_S = 120.0
#: At least so many tests are collected outside tests/mpi, deselected ones included. Raise it as tests are added.
FLOOR = Path(__file__).with_name("collected_floor.txt")

_stderr_fd = pytest.StashKey[int]()
_collected = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--floor", action="store_true", help=f"fail when fewer tests than {FLOOR.name} says are collected")


def pytest_configure(config: pytest.Config) -> None:
    # Now, before output is captured: the stacks of a hung run must reach the terminal.
    config.stash[_stderr_fd] = os.dup(2)
    config.stash[_collected] = 0


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr_fd])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    limit_s = HANG_S * (10 if item.get_closest_marker("slow") else 1)
    faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[_stderr_fd])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_itemcollected(item: pytest.Item) -> None:
    if "mpi" not in item.path.relative_to(Path(__file__).parent).parts:
        item.config.stash[_collected] += 1


def pytest_collection_finish(session: pytest.Session) -> None:
    found, floor = session.config.stash[_collected], int(FLOOR.read_text())
    if session.config.getoption("floor") and found < floor:
        raise pytest.UsageError(
            f"{found} tests were collected, at least {floor} are expected: tests have vanished, "
            f"or, if they were meant to, lower {FLOOR.name}"
        )
