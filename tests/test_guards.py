"""The suite's own guards: hangs end the run, vanished tests fail it, and the final count is right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def suite(
    folder: Path, test: str, *, hang_s: float = 120.0, floor: int = 0, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a suite of one file under a copy of our conftest."""
    tests = folder / "tests"
    tests.mkdir()
    conftest = (ROOT / "tests/conftest.py").read_text()
    (tests / "conftest.py").write_text(re.sub(r"^HANG_S = .*$", f"HANG_S = {hang_s}", conftest, flags=re.M))
    (tests / "collected_floor.txt").write_text(str(floor))
    (tests / "test_it.py").write_text(test)
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\n')
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_a_hanging_test_ends_the_run_and_shows_its_stack(tmp_path: Path) -> None:
    done = suite(tmp_path, "import time\ndef test_hangs():\n    time.sleep(50)\n", hang_s=0.5)
    assert done.returncode not in (0, None)
    assert "Timeout" in done.stderr and "test_hangs" in done.stderr


def test_vanished_tests_fail_the_run(tmp_path: Path) -> None:
    done = suite(tmp_path, "def test_one():\n    pass\n", floor=2, options=("--floor",))
    assert done.returncode != 0
    assert "1 tests were collected, at least 2 are expected" in done.stdout + done.stderr
    assert " --floor " in (ROOT / "scripts/test").read_text()


def test_deselected_tests_have_not_vanished(tmp_path: Path) -> None:
    tests = "def test_one():\n    pass\ndef test_two():\n    pass\n"
    assert suite(tmp_path, tests, floor=2, options=("--floor", "-k", "one")).returncode == 0


CASE = '<testcase classname="t" name="{}">{}</testcase>'


def tally(folder: Path, status: str, files: dict[str, list[str]]) -> tuple[int, str]:
    folder.mkdir(exist_ok=True)
    (folder / "checks").write_text("ruff check passed\nmypy passed\n")
    (folder / "status").write_text(status)
    for name, cases in files.items():
        (folder / name).write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    command = [sys.executable, str(ROOT / "scripts/tally.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.splitlines()[-1]


def test_count_adds_checks_tests_and_ranks(tmp_path: Path) -> None:
    ok, bad, skipped = CASE.format("a", ""), CASE.format("b", "<failure/>"), CASE.format("c", "<skipped/>")
    good = {"pytest.xml": [ok, skipped], "mpi-0.xml": [ok], "mpi-1.xml": [ok]}
    assert tally(tmp_path / "good", "pytest 0\nmpi 0\n", good) == (0, "4 passed, 0 failed, 1 skipped")
    # A test that fails on one rank has failed, once.
    one = {"pytest.xml": [ok, bad], "mpi-0.xml": [ok], "mpi-1.xml": [ok.replace('"></', '"><error/></')]}
    assert tally(tmp_path / "one", "pytest 1\nmpi 1\n", one) == (1, "3 passed, 2 failed, 0 skipped")


def test_count_fails_when_a_part_was_killed_or_ran_nothing(tmp_path: Path) -> None:
    ok = CASE.format("a", "")
    assert tally(tmp_path / "hung", "pytest 1\nmpi 0\n", {"mpi-0.xml": [ok]}) == (1, "3 passed, 1 failed, 0 skipped")
    both = {"pytest.xml": [ok], "mpi-0.xml": []}
    assert tally(tmp_path / "none", "pytest 0\nmpi 0\n", both) == (1, "3 passed, 1 failed, 0 skipped")


def test_scripts_are_valid_and_ci_calls_one_of_them() -> None:
    for name in ("scripts/demo", "scripts/test", "scripts/environment", ".ci/run"):
        subprocess.run(["bash", "-n", str(ROOT / name)], check=True, timeout=20)
    assert (ROOT / ".ci/run").read_text().splitlines()[1:] == ["exec bash scripts/test"]
