"""Traces: what is recorded, merged, measured and drawn."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import commbackend
from commbackend.commands import trace
from commbackend.communicator import Communicator
from commbackend.config import resolve
from commbackend.errors import ConfigError
from commbackend.testing import run_ranks

ROOT = Path(__file__).resolve().parent.parent
MS = 1_000_000


def two_ranks() -> list[trace.Trace]:
    """Rank 0 puts for 4 ms, of which a GEMM covers 3; rank 1 waits for it."""
    zero, one = trace.Trace(0), trace.Trace(1)
    zero("gemm out0[0:4] = x x w0", 0, 10 * MS, 14 * MS)
    zero("put x to 1 slot 2", 1, 11 * MS, 15 * MS)
    one("wait 0 slot 2", 0, 10 * MS, 16 * MS)
    one("reduce out[0:4]", 0, 16 * MS, 17 * MS)
    return [zero, one]


def test_chrome_trace_has_a_track_a_lane_and_an_arrow_from_put_to_wait() -> None:
    merged = trace.chrome(two_ranks())
    json.dumps(merged)
    steps = {e["name"]: e for e in merged["traceEvents"] if e["ph"] == "X"}
    put, wait = steps["put x to 1 slot 2"], steps["wait 0 slot 2"]
    assert (put["pid"], put["tid"], put["ts"], put["dur"]) == (0, 2, 1000.0, 4000.0)
    assert (wait["pid"], wait["tid"], wait["ts"], wait["dur"]) == (1, 1, 0.0, 6000.0)
    start, end = (next(e for e in merged["traceEvents"] if e["ph"] == ph) for ph in "sf")
    assert start["id"] == end["id"]
    assert (start["pid"], start["tid"], start["ts"]) == (0, 2, 5000.0)
    assert (end["pid"], end["tid"], end["ts"]) == (1, 1, 6000.0)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "thread_name"}
    assert names == {(0, 1): "lane 0 (caller)", (0, 2): "lane 1", (1, 1): "lane 0 (caller)"}


def test_puts_without_a_wait_have_no_arrow() -> None:
    traces = two_ranks()
    traces[0]("put x to 1 slot 3", 1, 16 * MS, 17 * MS)
    assert sum(e["ph"] == "s" for e in trace.chrome(traces)["traceEvents"]) == 1


def test_save_and_load_give_the_same_spans(tmp_path: Path) -> None:
    traces = two_ranks()
    trace.save(traces, tmp_path / "both.json")
    back = trace.load(tmp_path / "both.json")
    assert [(t.rank, t.clock, t.spans) for t in back] == [(t.rank, t.clock, t.spans) for t in traces]


def test_ranks_of_another_host_are_shifted_by_the_wall_clock() -> None:
    zero, one = two_ranks()
    one.clock, one.wall_offset_ns = "another", zero.wall_offset_ns + 100 * MS
    wait = next(e for e in trace.chrome([zero, one])["traceEvents"] if e["name"] == "wait 0 slot 2")
    assert wait["ts"] == 100_000.0


@pytest.mark.parametrize("text", ("", "[]", "{}", '{"otherData": {"ranks": [{"rank": "x"}]}, "traceEvents": []}'))
def test_what_is_not_a_trace_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(ConfigError, match=r"odd\.json is not a trace"):
        trace.load(tmp_path / "odd.json")


def test_overlap_counts_time_once_and_only_under_gemms() -> None:
    zero, one = two_ranks()
    zero("put x to 1 slot 3", 2, 12 * MS, 13 * MS)  # at the same time as the other put
    zero("copy x to shard.heap", 1, 20 * MS, 22 * MS)  # staging moves bytes
    zero("copy a to b", 1, 30 * MS, 40 * MS)  # a private copy does not
    found = trace.overlap(zero.spans)
    assert (found.gemm_ms, found.moving_ms, found.hidden_ms, found.waiting_ms) == (4.0, 6.0, 3.0, 0.0)
    assert found.share == 0.5
    assert trace.overlap(one.spans) == trace.Overlap(0.0, 0.0, 6.0, 0.0)
    assert trace.overlap([]).share == 0.0


def test_kinds_of_the_engine_labels() -> None:
    kinds = {
        "all_gather x": "collective",
        "reduce_scatter ": "collective",
        "reduce out[0:1]": "reduce",
        "backward": "phase",
    }
    assert {name: trace.kind(name) for name in kinds} == kinds


def record_a_call(rank, group):
    comm = Communicator(group, resolve(transport="shm", schedule="push", chunks=2, lanes=1), torch.device("cpu"))
    found = trace.Trace(rank)
    x, w = torch.ones(64, 32), torch.ones(16, 32)
    commbackend.all_gather_matmul(x, w, comm)
    comm.recorder = found
    commbackend.all_gather_matmul(x, w, comm)
    comm.recorder = None
    commbackend.all_gather_matmul(x, w, comm)
    comm.close()
    return [(s.name, s.lane, s.start_ns, s.end_ns) for s in found.spans]


def test_the_engine_records_every_step_of_the_calls_between() -> None:
    traces = []
    for rank, spans in enumerate(run_ranks(record_a_call, 2)):
        traces.append(trace.Trace(rank))
        for span in spans:
            traces[-1](*span)
    for t in traces:
        counts = {k: sum(trace.kind(s.name) == k for s in t.spans) for k in ("gemm", "put")}
        assert counts == {"gemm": 3, "put": 2}  # own shard and two chunks; two chunks to the peer
        assert all(0 < s.start_ns <= s.end_ns for s in t.spans)
    merged = trace.chrome(traces)
    arrows = [e for e in merged["traceEvents"] if e["ph"] == "s"]
    assert sum(e["name"] == "put to wait" for e in arrows) == 4
    assert sum(e["name"] == "wait to GEMM" for e in arrows) == 4  # every chunk's wait is followed by its product
    for arrow in arrows:
        ends = [
            e for e in merged["traceEvents"] if e["ph"] == "f" and (e["name"], e["id"]) == (arrow["name"], arrow["id"])
        ]
        assert len(ends) == 1 and arrow["ts"] <= ends[0]["ts"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


SCRIPT = """
import sys, torch, commbackend
comm = commbackend.init(device="cpu")
out = commbackend.matmul_all_reduce(torch.ones(8, 4), torch.ones(2, 4), comm)
print(sys.argv[1], float(out[0, 0]))
comm.close()
"""


def test_command_records_a_script_and_merges(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = "import sys; from commbackend.cli import main; sys.exit(main(['trace', *sys.argv[1:]]))"
    command = [sys.executable, "-c", run]
    ranks, port = [], free_port()
    (tmp_path / "out").mkdir()
    for left_by_an_earlier_run in ("rank2.json", "rank10.json", "ranks.json"):
        (tmp_path / "out" / left_by_an_earlier_run).write_text("of four ranks")
    shared = [
        f"PYTHONPATH={ROOT}",
        "WORLD_SIZE=2",
        "LOCAL_WORLD_SIZE=2",
        "MASTER_ADDR=127.0.0.1",
        f"MASTER_PORT={port}",
    ]
    for rank in range(2):
        env = ["env", *shared, f"RANK={rank}", f"LOCAL_RANK={rank}"]
        arguments = ["--out", "out", "--", "script.py", f"hello-{rank}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen([*env, *command, *arguments], cwd=tmp_path, **pipes))
    said = [child.communicate(timeout=100) for child in ranks]
    assert [child.returncode for child in ranks] == [0, 0], said
    assert [out.split() for out, _ in said] == [["hello-0", "8.0"], ["hello-1", "8.0"]]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"rank0.json", "rank1.json", "ranks.json"}
    (tmp_path / "out/ranks.json").unlink()
    merged = subprocess.run(
        ["env", shared[0], *command, "--merge", "out", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(merged.stdout)
    assert [r["rank"] for r in report["ranks"]] == [0, 1]
    assert all(r["gemm_ms"] > 0 for r in report["ranks"])
    assert (tmp_path / "out/trace.json").exists()


def test_command_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.main(["--merge", str(tmp_path)]) == 2
    assert "holds no rank*.json" in capsys.readouterr().err
    assert trace.main(["--out", str(tmp_path / "out"), "--", str(tmp_path / "no.py")]) == 2
    assert "no such script" in capsys.readouterr().err


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from commbackend.commands import plots

    plots.timeline(two_ranks(), tmp_path / "timeline.png", title="t")
    plots.loss_curves({"a": [3.0, 2.0], "b": [3.0, 2.0001]}, tmp_path / "losses.png")
    for name in ("timeline.png", "losses.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_pictures_without_matplotlib_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from commbackend.commands import plots

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(commbackend.Unavailable, match=r"commbackend\[viz\]"):
        plots.timeline(two_ranks(), tmp_path / "t.png")
