"""The benchmarks: that they parse, measure, compare and report rightly. Speed is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commbackend import bench
from commbackend.bench import report as bench_report
from commbackend.bench.cases import _relative
from commbackend.bench.names import GEMM, MEMCPY, MOVE, MPI, NEW, OURS, SEQUENCE, widths
from commbackend.bench.world import Candidate, Rounds, SpinBarrier, World
from commbackend.errors import CommAborted, CommBackendError, CommTimeout, ConfigError

TINY = ["--seconds", "0.02", "--least", "2", "--most", "3", "--warmup", "1", "--timeout-s", "60"]


def stats(median: float, spread: float = 0.1) -> dict[str, float]:
    return {"median_us": median, "p10_us": median * (1 - spread), "p90_us": median * (1 + spread), "n": 9}


def report(kind: str, cases: list[dict[str, Any]], **run: Any) -> dict[str, Any]:
    base = {"ranks": 2, "launcher": "mpirun", "threads": 1, "transport": "shm", "device": "cpu", "notes": []}
    return {
        "format": "commbackend-bench-1",
        "kind": kind,
        "date": "2026-01-02T03:04:05+00:00",
        "command": ["commbackend", "bench", kind],
        "machine": {"cpu": "abacus", "cores": 2, "memory_nbytes": 3 << 30, "gpus": [], "load": [0.1, 0.0, 0.0]},
        "versions": {"commbackend": "0.1.0", "torch": "2.9"},
        "runs": [{**base, **run, "cases": cases}],
    }


def gather(ours: float = 200.0, **times: float) -> dict[str, Any]:
    samples = {OURS: ours, NEW: 260.0, MEMCPY: 80.0, "gloo": 1800.0, MPI: 190.0, **times}
    case = {"op": "all_gather", "shard_nbytes": 1 << 20, "size_nbytes": 2 << 20, "dtype": "float32"}
    return {**case, "samples": {n: stats(t) for n, t in samples.items()}, "errors": {OURS: 0.0}}


def product(**changes: Any) -> dict[str, Any]:
    samples = {GEMM: 100.0, MOVE: 50.0, SEQUENCE: 154.0, OURS: 110.0, "gloo": 440.0}
    case = {"op": "all_gather_matmul", "model": "8B", "tp": 8, "m": 2048, "k": 4096, "n": 3584, "dtype": "bfloat16"}
    case |= {"mode": "isolated", "schedule": "pull/1/1", "errors": {OURS: 2.5e-3}}
    return {**case, "samples": {n: stats(t) for n, t in samples.items()}, **changes}


def row(table: bench_report.Table, number: int = 0) -> dict[str, str]:
    return dict(zip(table.head, table.rows[number], strict=True))


# -- statistics
def test_summary_interpolates_and_counts() -> None:
    assert bench_report.summary([4.0, 1.0, 3.0, 2.0, 5.0]) == pytest.approx(
        {"median_us": 3.0, "p10_us": 1.4, "p90_us": 4.6, "n": 5}
    )
    assert bench_report.summary([7.0]) == {"median_us": 7.0, "p10_us": 7.0, "p90_us": 7.0, "n": 1}
    with pytest.raises(ValueError, match="no samples"):
        bench_report.summary([])


def test_relative_error_is_zero_only_for_equal_values() -> None:
    want = torch.tensor([1.0, -4.0, 0.5], dtype=torch.float64)
    assert _relative(want.float(), want.float()) == 0.0
    assert _relative(torch.tensor([1.0, -4.0, 1.5]), want) == pytest.approx(0.25)
    assert _relative(torch.tensor([1.0, float("nan"), 0.5]), want) != 0.0


# -- options
@pytest.mark.parametrize(("raw", "nbytes"), [("64K", 65536), ("1m", 1 << 20), ("2G", 2 << 30), ("100", 100)])
def test_sizes(raw: str, nbytes: int) -> None:
    assert bench._parser().parse_args(["collectives", "--max", raw]).max == nbytes


def test_lists_and_defaults() -> None:
    options = bench._parser().parse_args(["overlap", "--ranks", "2,4", "--models", "8B,h64", "--device", "cpu"])
    bench._defaults(options)
    assert (options.ranks, options.models, options.tp) == ([2, 4], ["8B", "h64"], [0])
    assert options.transport == "shm" and options.dtypes == ["float32", "bfloat16"]
    assert options.modes == ["isolated", "back-to-back"] and options.max_gflop == 5.0
    options = bench._parser().parse_args(["collectives", "--device", "cpu"])
    bench._defaults(options)
    assert (options.min, options.max, options.factor, options.ranks) == (64 << 10, 64 << 20, 4, [2, 4])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["collectives", "--max", "64X"], "a number of bytes"),
        (["collectives", "--max", "0"], "a number of bytes"),
        (["collectives", "--ranks", "2,0"], "1 or more"),
        (["collectives", "--ops", "all_gather_matmul"], "one of all_gather, reduce_scatter, all_reduce"),
        (["overlap", "--models", "9B"], "8B, 70B, 175B, or hN"),
        (["overlap", "--modes", "hot"], "isolated, back-to-back"),
        (["frobnicate"], "invalid choice"),
        ([], "required"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)
    assert caught.value.code == 2 and says in capsys.readouterr().err


def test_what_cannot_be_run_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old.json"
    old.write_text(json.dumps(report("host", [])))
    refused = {
        "own path": ["--transport", "off"],
        "does not exist": ["--json", str(tmp_path / "no" / "x.json")],
        "is of bench host": ["--compare", str(old)],
        "is not a benchmark": ["--compare", _written(tmp_path / "other.json", "{}")],
        "No such file": ["--compare", str(tmp_path / "absent.json")],
    }
    for says, arguments in refused.items():
        assert bench.main(["collectives", "--device", "cpu", *arguments]) == 2
        assert says in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench.main(["collectives", "--device", "cpu"]) == 2
    assert "rank 1 of 2" in capsys.readouterr().err


def _written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_widths_of_models() -> None:
    assert widths("8B") == (4096, 28672, 14336) and widths("h96") == (96, 384, 384)
    for wrong in ("h0", "h", "x12", ""):
        with pytest.raises(ValueError, match="hN"):
            widths(wrong)


# -- tables
def test_collectives_columns() -> None:
    (table,) = bench_report.tables(report("collectives", [gather()]))
    found = row(table)
    assert found["shard"] == "1 MiB" and found["size"] == "2 MiB" and found["p10...p90"] == "180...220"
    assert found["algbw GB/s"] == "10.49" and found["busbw GB/s"] == "5.24"  # 2 MiB in 200 us; half of it travels
    assert (found["x gloo"], found["x Open MPI"]) == ("9.00", "0.95")
    assert "2 ranks, shm, cpu, 1 thread a rank, mpirun" in table.title


def test_all_reduce_moves_twice_and_missing_columns_are_dashes() -> None:
    case = gather() | {"op": "all_reduce"}
    del case["samples"][MPI], case["samples"]["gloo"]
    found = row(bench_report.tables(report("collectives", [case]))[0])
    assert found["busbw GB/s"] == "10.49"
    assert (found["gloo us"], found["x gloo"], found["Open MPI us"], found["x Open MPI"]) == ("-", "-", "-", "-")


def test_overlap_columns() -> None:
    (table,) = bench_report.tables(report("overlap", [product()]))
    found = row(table)
    assert (found["T/max"], found["hidden"], found["x sequence"], found["x gloo"]) == ("1.10", "80%", "1.40", "4.00")
    assert found["M x K x N"] == "2048 x 4096 x 3584" and found["model"] == "8B tp 8" and found["error"] == "2.5e-03"


def test_hidden_share_is_negative_where_overlap_lost() -> None:
    lost = product()
    lost["samples"][OURS] = stats(175.0)
    assert row(bench_report.tables(report("overlap", [lost]))[0])["hidden"] == "-50%"


def test_schedules_have_a_table_of_their_own() -> None:
    case = product()
    case["samples"]["push/4/1"] = stats(120.0)
    main, more = bench_report.tables(report("overlap", [case, product(mode="back-to-back")]))
    assert "push/4/1" not in main.head
    assert [row(more, i)["push/4/1"] for i in range(2)] == ["120", "-"]


def test_host_and_memory_columns() -> None:
    case = {"op": "barrier", "samples": {NEW: stats(20.0), "gloo": stats(90.0)}}
    assert row(bench_report.tables(report("host", [case]))[0])["x gloo"] == "4.50"
    sizes = {"operand_nbytes": 1 << 20, "symmetric_nbytes": 3 << 19, "samples": {}}
    found = row(bench_report.tables(report("memory", [product() | sizes]))[0])
    assert (found["operand"], found["symmetric"], found["symmetric/operand"]) == ("1 MiB", "1.5 MiB", "1.50")


def test_compare_marks_only_what_ranges_tell_apart() -> None:
    old = report("collectives", [gather(200.0, gloo=1000.0)])
    new = report("collectives", [gather(100.0, **{"gloo": 1100.0, MPI: 180.5}), gather() | {"shard_nbytes": 4096}])
    new["machine"]["cpu"] = "slide rule"
    table = bench_report.compare(new, old)
    assert len(table.rows) == 1
    assert row(table)[OURS] == "0.50 faster" and row(table)["gloo"] == "1.10" and row(table)[MPI] == "0.95"
    notes = "\n".join(table.notes)
    assert "1 cases are new" in notes and "then abacus" in notes and "now slide rule" in notes
    assert row(bench_report.compare(old, new))[OURS] == "2.00 slower"
    with pytest.raises(ConfigError, match="cannot be compared"):
        bench_report.compare(new, report("host", []))


def test_report_prints_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _written(tmp_path / "o.json", json.dumps(report("overlap", [product(schedule="a|b")], notes=["why not"])))
    assert bench_report.main([path, "--compare", path]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "### bench overlap (o.json)"
    assert "abacus, 2 cores, 3 GiB, commbackend 0.1.0, torch 2.9" in out and "`commbackend bench overlap`" in out
    grids = [x for x in lines if x.startswith("|")]
    assert grids[1].startswith("| --- | ---: |") and "a\\|b" in grids[2] and "Note: why not" in out
    assert any("1.00 | 1.00" in x for x in grids)
    assert bench_report.main([_written(tmp_path / "x.json", "[1]")]) == 2
    assert "x.json is not a benchmark" in capsys.readouterr().err


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from commbackend.bench.plot import draw

    for kind, case in {"collectives": gather(), "overlap": product()}.items():
        draw(report(kind, [case]), tmp_path / f"{kind}.png")
        assert (tmp_path / f"{kind}.png").read_bytes().startswith(b"\x89PNG")


# -- measuring
def test_barrier_names_who_is_late(tmp_path: Path) -> None:
    words = tmp_path / "barrier"
    words.write_bytes(bytes(3 * 128))
    SpinBarrier(str(words), 1, 3, 5.0)._words[1] = 1
    start = time.monotonic()
    with pytest.raises(CommTimeout, match=r"ranks \[2\]"):
        SpinBarrier(str(words), 0, 3, 0.05)()
    assert 0.05 <= time.monotonic() - start < 5.0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """One rank, in this process."""
    spec: dict[str, Any] = {name: str(tmp_path / name) for name in ("store", "barrier", "out")}
    Path(spec["barrier"]).write_bytes(bytes(128))
    options = {"timeout_s": 20.0, "threads": torch.get_num_threads(), "device": "cpu", "transport": "shm"}
    made = World({**spec, "ranks": 1, "launcher": os.getpid(), "options": options}, rank=0)
    yield made
    made.close()
    assert not dist.is_initialized()


def test_candidates_take_turns_on_rotating_buffers(world: World) -> None:
    calls: list[tuple[str, int]] = []
    found = [Candidate(n, lambda i, n=n: calls.append((n, i))) for n in ("a", "b", "c")]  # type: ignore[misc]
    samples = world.interleave(found, 4, Rounds(seconds=10.0, least=2, most=12, warmup=1), burst=2)
    assert {n: s["n"] for n, s in samples.items()} == {"a": 12, "b": 12, "c": 12}
    assert [i for _, i in calls] == [(2 + j) % 4 for j in range(len(calls))]
    turns = [n for n, _ in calls[::2]]
    assert [n for n, _ in calls[1::2]] == turns  # bursts of two
    rounds = [turns[i : i + 3] for i in range(6, len(turns), 3)]  # after warm-up and the round that is timed
    assert len(rounds) == 12 and all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_a_rank_ends_when_its_launcher_is_gone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.settle()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(world, "_launcher", ended.pid)
    with pytest.raises(CommAborted, match="the launcher of this benchmark has ended"):
        world.settle()


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_a_wrong_result_stops_the_benchmark(world: World, error: float) -> None:
    right = Candidate("right", print, lambda i: 0.1, 0.2)
    unchecked = Candidate("unchecked", print)
    assert world.verify([right, unchecked]) == {"right": 0.1}
    with pytest.raises(CommBackendError, match="wild is wrong"):
        world.verify([right, Candidate("wild", print, lambda i: error, 0.2)])


# -- whole runs, the smallest there are
@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run bench on the CPU and return (exit status, report or None); nothing may stay in the temporary folder."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(bench.__file__).parents[2]), os.getenv("PYTHONPATH", "")])
    )

    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "out.json"
        status = bench.main([*arguments, "--device", "cpu", "--json", str(path)])
        assert not list(scratch.glob("commbackend-bench-*"))
        return status, bench_report.load(path)

    return call


def test_collectives_run(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run("collectives", "--ranks", "2", "--min", "4K", "--max", "16K", *TINY)
    (one,) = found["runs"]
    assert status == 0, capsys.readouterr().err
    assert [(c["op"], c["shard_nbytes"]) for c in one["cases"]] == [
        (op, size) for op in ("all_gather", "reduce_scatter", "all_reduce") for size in (4096, 16384)
    ]
    measured = {OURS, NEW, MEMCPY, "gloo"} | ({MPI} if one["launcher"] == "mpirun" else set())
    for case in one["cases"]:
        assert set(case["samples"]) == measured and case["sets"] >= 2
        assert set(case["errors"]) == measured - {MEMCPY}
        assert all(s["n"] >= 2 and 0 < s["p10_us"] <= s["median_us"] <= s["p90_us"] for s in case["samples"].values())
    assert one["launcher"] == "mpirun" or "no Open MPI column" in one["notes"][0]
    assert found["machine"]["cores"] >= 1 and found["versions"]["torch"] and one["transport"] == "shm"
    assert "collectives: 2 ranks, shm" in capsys.readouterr().out


def test_overlap_run(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--models", "h32", "--rows", "16,17", "--dtypes", "float32", "--modes", "back-to-back", "--new"]
    status, found = run("overlap", "--launcher", "processes", *options, "--schedules", "push/2/1", *TINY)
    (one,) = found["runs"]
    assert status == 0, capsys.readouterr().err
    assert one["launcher"] == "processes" and "M 17 does not divide by 2 ranks" in one["notes"]
    ops = {c["op"]: c for c in one["cases"]}
    assert list(ops) == ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
    assert (ops["all_gather_matmul"]["k"], ops["all_gather_matmul"]["n"]) == (32, 64)
    assert (ops["matmul_all_reduce"]["k"], ops["matmul_all_reduce"]["n"]) == (64, 32)
    for case in ops.values():
        assert {GEMM, MOVE, SEQUENCE, OURS, NEW, "gloo"} <= set(case["samples"])
        assert all(e < 1e-5 for e in case["errors"].values())
    assert "push/2/1" in ops["all_gather_matmul"]["samples"]
    assert "push/2/1" not in ops["matmul_all_reduce"]["samples"]


def test_memory_run(run: Any) -> None:
    options = ["--models", "h32", "--rows", "4096", "--dtypes", "float32", "--ops", "all_gather_matmul"]
    status, found = run("memory", "--launcher", "processes", *options, "--timeout-s", "60")
    (case,) = found["runs"][0]["cases"]
    assert status == 0 and case["operand_nbytes"] == 4096 * 32 * 4
    assert 0 < case["symmetric_nbytes_before"] < case["symmetric_nbytes"] and case["heap_growths"] >= 1


def test_host_run_mixes_barriers_and_products(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ops", "barrier,all_reduce,matmul_all_reduce", "--burst", "5"]
    status, found = run("host", "--launcher", "processes", *options, *TINY)
    assert status == 0, capsys.readouterr().err
    assert [c["op"] for c in found["runs"][0]["cases"]] == ["barrier", "all_reduce", "matmul_all_reduce"]
    assert all({NEW, "gloo"} <= set(c["samples"]) for c in found["runs"][0]["cases"])


def test_a_run_that_fails_says_why(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run("collectives", "--launcher", "processes", "--ranks", "2", "--transport", "pigeons", *TINY)
    assert status == 1 and found["runs"][0]["cases"] == []
    assert "ranks ended with status [1, 1]" in found["runs"][0]["failed"]
    said = capsys.readouterr()
    assert "unknown transport 'pigeons'" in said.err and "Traceback" not in said.err and not said.out


def test_a_run_that_hangs_is_ended(run: Any) -> None:
    status, found = run("collectives", "--launcher", "processes", "--ranks", "2", "--timeout-s", "0.3")
    assert status == 1 and "did not end within --timeout-s" in found["runs"][0]["failed"]
