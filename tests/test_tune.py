"""Tuning: all ranks keep the same, the slowest rank decides, files make runs repeat each other to the bit."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from commbackend import ops
from commbackend.communicator import Communicator, init
from commbackend.config import resolve
from commbackend.errors import CommBackendError, ConfigError, Unsupported
from commbackend.plan import Knobs, Problem
from commbackend.testing import run_ranks, run_threads
from commbackend.testing.ranks import RankError
from commbackend.tuning import choices, tune
from commbackend.tuning.costs import CostTable, Topology
from commbackend.tuning.keys import key_of

CPU = torch.device("cpu")
PROBLEM = Problem("all_gather_matmul", (512, 512), k=64, n=(32,), dtype="float32")
FLAT = CostTable.flat(link_gbyte_s=10.0)


def communicator(group: object, **settings: object) -> Communicator:
    usual = {"transport": "local", "timeout_s": 30.0, "choices": "off"}
    return Communicator(group, resolve(**{**usual, **settings}), CPU)  # type: ignore[arg-type]


def said_to_take(comm: Communicator, us: Callable[[Knobs], float]) -> tune.Clock:
    """A clock of this rank that runs the call, and says what ``us`` says of its knobs."""

    def clock(call: Callable[[], None]) -> float:
        call()
        return us(comm.chooser.knobs(PROBLEM))

    return clock


def opposite(rank: int, group: object) -> tuple[Knobs, float, str]:
    """Rank 0 finds push fast and pull slow, rank 1 the other way round; direct speed differs by rank."""
    with communicator(group) as comm:
        us = {0: {"push": 10.0, "pull": 90.0}, 1: {"push": 70.0, "pull": 20.0}}[rank]
        clock = said_to_take(comm, lambda k: us.get(k.schedule, 80.0) + k.chunks)
        made = tune.tune(comm, [("", "forward", PROBLEM)], costs=FLAT, seconds=0.0, most=60, clock=clock)
        entry = made.find(PROBLEM)
        assert entry is not None and comm.knobs(PROBLEM) == entry.knobs
        x = torch.ones(512, 64) * (rank + 1)
        out = ops.all_gather_matmul(x, torch.ones(32, 64), comm)  # ranks that chose differently would raise
        assert out.shape == (1024, 32)
        return entry.knobs, entry.us, made.to_json()


def test_ranks_that_measure_different_times_keep_the_same() -> None:
    found = run_threads(opposite, 2)
    assert len({(knobs, us) for knobs, us, _ in found}) == 1 and found[0][2] == found[1][2]
    knobs, us, _ = found[0]
    # The slowest rank counts: push takes 70 there, pull 90, the sequence 80.
    assert knobs.schedule == "push" and us == 70.0 + knobs.chunks


@pytest.mark.parametrize(("push_us", "kept"), ((99.0, "sequence"), (97.0, "push")))
def test_the_sequence_is_kept_unless_something_is_clearly_faster(push_us: float, kept: str) -> None:
    def run(rank: int, group: object) -> str:
        with communicator(group) as comm:
            times = {"sequence": 100.0, "push": push_us, "pull": 150.0}
            clock = said_to_take(comm, lambda k: times.get(k.schedule, 150.0))
            tune.tune(comm, [("", "forward", PROBLEM)], costs=FLAT, seconds=0.0, most=60, clock=clock)
            said = comm.explain(PROBLEM)
            assert "tuning measured" in said and "next: " in said and "by measurement of this run" in said
            assert ("overlap would not win here" in said) == (kept == "sequence")
            return comm.knobs(PROBLEM).schedule

    assert run_threads(run, 2) == [kept] * 2


def test_layers_keep_their_own_and_others_take_the_longest_calls() -> None:
    def run(rank: int, group: object) -> list[str]:
        with communicator(group) as comm:
            times = {"fc1": {"push": 10.0, "pull": 20.0}, "fc2": {"push": 60.0, "pull": 50.0}}
            clock = said_to_take(comm, lambda k: times[comm.layer_name].get(k.schedule, 99.0))
            calls = [(name, "forward", PROBLEM) for name in times]
            tune.tune(comm, calls, costs=FLAT, seconds=0.0, most=60, clock=clock)
            found = []
            for name in ("fc1", "fc2", "else"):
                with comm.layer(name):
                    found.append(comm.knobs(PROBLEM).schedule)
            return found

    assert run_threads(run, 2) == [["push", "pull", "pull"]] * 2


def test_ranks_that_tune_different_calls_are_told() -> None:
    def run(rank: int, group: object) -> None:
        with communicator(group) as comm:
            tune.agreed(comm, [1.0] * (rank + 1))

    with pytest.raises(RankError, match="ranks tune different calls"):
        run_threads(run, 2)


def test_deterministic_algorithms_are_obeyed() -> None:
    def run(rank: int, group: object) -> None:
        with communicator(group) as comm:
            tune.tune(comm, [("", "forward", PROBLEM)])

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises((RankError, Unsupported), match="use_deterministic_algorithms"):
            run_threads(run, 1)
    finally:
        torch.use_deterministic_algorithms(before)


def test_nothing_is_measured_unless_asked() -> None:
    """Also where the costs of a cache are known; a call costs its own messages only."""

    def run(rank: int, group: object) -> tuple[int, int]:
        with communicator(group) as comm, communicator(group, tune=True) as tuning:
            x, w = torch.ones(512, 64), torch.ones(32, 64)
            ops.all_gather_matmul(x, w, comm)
            ops.all_gather_matmul(x, w, tuning)
            before = tuning.stats()["calls"]
            ops.all_gather_matmul(x, w, tuning)
            assert tuning.stats()["calls"] == before + 1
            return comm.stats()["calls"], before

    for quiet, busy in run_threads(run, 2):
        assert quiet == 1 and busy > 10


def train(comm: Communicator, steps: range, state: torch.Tensor) -> torch.Tensor:
    """A toy: token counts that change with every step, weights that follow from all steps before."""
    for step in steps:
        rows = 256 + 64 * (step % 3)
        x = torch.sin(torch.arange(rows * 64, dtype=torch.float32).reshape(rows, 64) + comm.rank + step)
        out = ops.matmul_all_reduce(ops.all_gather_matmul(x, state, comm), state.t(), comm)
        state = state + 1e-3 * out[:32]
    return state


def test_kill_and_resume_with_exported_choices_is_bitwise_equal(tmp_path: Path) -> None:
    file = str(tmp_path / "choices.json")

    def whole(rank: int, group: object) -> tuple[torch.Tensor, torch.Tensor, str]:
        with communicator(group) as comm:
            comm.configure("*", op="all_gather_matmul", schedule="push", chunks=4, lanes=1)  # as if tuned
            half = train(comm, range(3), torch.ones(32, 64))
            if rank == 0:
                comm.export_choices(file)
            return half, train(comm, range(3, 6), half), str(comm.knobs(PROBLEM))

    first = run_threads(whole, 2)

    def resumed(rank: int, group: object) -> tuple[torch.Tensor, str, str]:
        with communicator(group, choices=file) as comm:
            end = train(comm, range(3, 6), first[rank][0])
            return end, str(comm.knobs(PROBLEM)), comm.explain(PROBLEM)

    for (_, wanted, knobs), (end, again, said) in zip(first, run_threads(resumed, 2), strict=True):
        assert torch.equal(wanted, end) and knobs == again
        assert f"by file {file}" in said


def test_a_file_that_is_not_there_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def run(rank: int, group: object) -> str:
        with pytest.raises(ConfigError, match=r"rank 0: choices .*nowhere") as caught:
            communicator(group, choices=str(tmp_path / "nowhere"))
        return str(caught.value)

    assert len(set(run_threads(run, 2))) == 1


def test_candidates_are_ranked_by_the_costs_and_always_hold_rule_and_sequence() -> None:
    def run(rank: int, group: object) -> list[str]:
        with communicator(group) as comm:
            found = tune.ranked(comm, PROBLEM, FLAT, 3)
            assert comm.knobs(PROBLEM) in found and any(k.schedule == "sequence" for k in found)
            assert 3 <= len(found) <= 5
            assert len(tune.ranked(comm, PROBLEM, None, 2)) >= 2
            assert tune.topology_of(comm) == Topology(2)
            return [str(k) for k in found]

    found = run_threads(run, 2)
    assert found[0] == found[1]


def test_costs_are_measured_here_in_a_table_that_predicts() -> None:
    def run(rank: int, group: object) -> str:
        with communicator(group) as comm:
            return tune.measure_costs(comm, ["float32"]).to_json()

    found = run_threads(run, 2)
    assert found[0] == found[1]
    table = CostTable.from_json(found[0])
    assert table.gemm_us(256, 512, 1024, "float32") > 0 and table.sources["all"].startswith("measured over local")


@pytest.mark.parametrize(
    ("layer", "message"),
    (
        ({"op": "matmul", "k": 1, "rows": [8]}, "unknown op"),
        ({"op": "all_gather_matmul", "k": 1, "rows": [8]}, "at least one weight"),
        ({"op": "all_gather_matmul", "n": 4, "rows": [8]}, "'k'"),
        ({"op": "all_gather_matmul", "k": 1, "n": 4, "rows": 8}, "not iterable"),
        ({"op": "all_gather_matmul", "k": 1, "n": 4, "rows": [8], "dtype": "float17"}, "float17"),
    ),
)
def test_files_of_layers_that_cannot_be_are_refused(layer: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"layers": [layer]}))
    with pytest.raises(ConfigError, match=message):
        tune.calls_of_file(path, 2)


def test_the_command_measures_and_the_next_run_uses_it(tmp_path: Path) -> None:
    """Two processes by the command; then a run whose cache is theirs."""
    layers = [{"name": "fc1", "op": "all_gather_matmul", "k": 64, "n": 32, "rows": [1024], "dtype": "float32"}]
    (tmp_path / "model.json").write_text(json.dumps({"layers": layers}))
    script = textwrap.dedent(
        """
        import os
        import commbackend
        from commbackend.plan import Problem
        problem = Problem("all_gather_matmul", (512, 512), k=64, n=(32,), dtype="float32")
        with commbackend.init(device="cpu", transport="shm") as comm:
            with comm.layer("fc1"):
                said = comm.explain(problem)
                rule = comm.chooser.chosen(problem).rule
                os.write(1, f"{comm.rank} {rule} | {'predicted' in said}\\n".encode())  # whole lines
        """
    )
    (tmp_path / "use.py").write_text(script)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    env |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parent.parent)}
    options = ["--shapes", str(tmp_path / "model.json"), "--device", "cpu", "--transport", "shm", "--seconds", "0.1"]
    tuned = subprocess.run(
        [sys.executable, "-m", "commbackend", "tune", "--ranks", "2", *options],
        capture_output=True, text=True, env=env, timeout=300, check=False,
    )  # fmt: skip
    assert tuned.returncode == 0, tuned.stderr
    assert "fc1: all_gather_matmul" in tuned.stdout and "costs of cpu" in tuned.stdout
    (kept,) = (tmp_path / "cache/commbackend").glob("choices-*.json")
    assert {e.layer for e in choices.load(kept).entries} == {"fc1", ""}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    used = subprocess.run(
        [*launch, str(tmp_path / "use.py")],
        capture_output=True, text=True, env=env, timeout=300, check=False,
    )  # fmt: skip
    assert used.returncode == 0, used.stderr
    assert sorted(used.stdout.splitlines()) == [f"{r} cache of commbackend tune | True" for r in (0, 1)]


def test_agreed_takes_the_slowest() -> None:
    def run(rank: int, group: object) -> list[float]:
        with communicator(group) as comm:
            return tune.agreed(comm, [float(rank), -float(rank), 5.0])

    assert run_threads(run, 3) == [[2.0, 0.0, 5.0]] * 3
    assert issubclass(Unsupported, CommBackendError) and key_of(PROBLEM).rows == 512


def stock_is_faster(rank: int, group: object, port: int) -> tuple[bool, str, dict[str, int]]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        with init(dist.group.WORLD, device="cpu", transport="shm", timeout_s=30.0, choices="off") as comm:
            x, w = torch.randn(512, 64), torch.randn(32, 64)
            ours = ops.all_gather_matmul(x, w, comm)
            turn = iter([10.0] * 10_000)
            state = {"ours": 0}

            def clock(call: Callable[[], None]) -> float:
                before = comm.stats()["calls"]
                call()
                state["ours"] += comm.stats()["calls"] > before
                return 50.0 if comm.stats()["calls"] > before else next(turn)

            made = tune.tune(comm, [("", "forward", PROBLEM)], costs=FLAT, seconds=0.0, clock=clock)
            assert made.entries[0].stock and made.entries[0].us == 10.0
            theirs = ops.all_gather_matmul(x, w, comm)
            return torch.equal(ours, theirs), comm.explain(), comm.stats()["fallback_by_op"]
    finally:
        dist.destroy_process_group()


def test_the_librarys_own_sequence_runs_where_it_was_fastest_and_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for equal, said, fallback in run_ranks(stock_is_faster, 2, port):
        assert equal
        assert "torch.distributed's collective and the product in sequence, by measurement of this run" in said
        assert fallback["all_gather_matmul/torch.distributed was measured to be faster"] == 1
