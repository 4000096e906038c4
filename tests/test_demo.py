"""The demo: its model, its ranks, its report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from commbackend import demo
from commbackend.communicator import Communicator
from commbackend.config import resolve
from commbackend.demo import report as demo_show
from commbackend.demo.launch import Result, Run
from commbackend.demo.model import LanguageModel, ModelConfig, batch, corpus
from commbackend.demo.parallel import parallelize
from commbackend.errors import ShapeError
from commbackend.nn import reduce_replicated_grads
from commbackend.testing import run_ranks

ROOT = Path(__file__).resolve().parent.parent
SMALL = ModelConfig(hidden=64, ffn=96, layers=2, heads=4, kv_heads=2, sequence=32, batch=2)


def test_the_text_is_pythons_own_documentation() -> None:
    text = bytes(corpus().tolist())
    assert len(text) > 100_000
    assert b'"assert" statement' in text and b'"yield"' in text


def test_weights_and_batches_depend_on_the_seed_alone() -> None:
    states = [LanguageModel(SMALL, seed).state_dict() for seed in (1, 1, 2)]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert not torch.equal(states[0]["embedding.weight"], states[2]["embedding.weight"])
    (x, y), (again, _), (other, _) = batch(SMALL, 1, 5), batch(SMALL, 1, 5), batch(SMALL, 1, 6)
    assert x.shape == y.shape == (32, 2)
    assert torch.equal(x[1:], y[:-1]) and torch.equal(x, again) and not torch.equal(x, other)


def gradients(model: LanguageModel, rank: int, size: int) -> float:
    """Loss over this rank's positions, backpropagated; ranks' losses add up."""
    tokens, targets = (t.tensor_split(size)[rank] for t in batch(SMALL, 0, 0))
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / 64
    loss.backward()
    return loss.item()


def one_step(rank: int, group: Any) -> tuple[float, dict[str, Any]]:
    with Communicator(group, resolve(transport="shm"), torch.device("cpu")) as comm:
        model = LanguageModel(SMALL, 0)
        parallelize(model, comm)
        loss = gradients(model, rank, comm.size)
        reduce_replicated_grads(model, comm)
        return loss, {name: p.grad.numpy() for name, p in model.named_parameters()}


def test_the_spread_model_has_the_gradients_of_the_whole_one() -> None:
    whole = LanguageModel(SMALL, 0)
    loss = gradients(whole, 0, 1)
    found = run_ranks(one_step, 2)
    assert sum(f[0] for f in found) == pytest.approx(loss, rel=1e-5)
    for name, parameter in whole.named_parameters():
        parts = [torch.from_numpy(f[1][name]) for f in found]
        cut = next((d for d in (0, 1) if parts[0].dim() == 2 and parts[0].shape[d] != parameter.shape[d]), None)
        assert (cut is not None) == name.endswith("proj.weight")
        for gradient in [torch.cat(parts, cut)] if cut is not None else parts:
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def too_many_ranks(rank: int, group: Any) -> str:
    with Communicator(group, resolve(transport="shm"), torch.device("cpu")) as comm:
        with pytest.raises(ShapeError) as error:
            parallelize(LanguageModel(SMALL, 0), comm)
        return str(error.value)


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    assert all("2 key/value heads over 4 ranks" in text for text in run_ranks(too_many_ranks, 4))


def run_demo(folder: Path, *arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    block = f"import sys; sys.modules.update(dict.fromkeys({list(without)!r}))"
    code = f"{block}; from commbackend.demo import main; sys.exit(main(sys.argv[1:]))"
    command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)


def test_demo_trains_kills_and_reports(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--steps", "10", "--no-extra", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and all(passed for _, passed, _ in report["checks"]) and len(report["checks"]) == 3
    assert [(r["run"], r["ranks"], r["transport"], r["steps"]) for r in report["runs"]] == [
        ("one process", 1, "-", 10),
        ("shm", 2, "shm", 10),
    ]
    assert 0 < report["runs"][1]["largest_relative_difference"] < 1e-4  # 0 would be too good: sums are split otherwise
    assert report["runs"][1]["stats"]["calls"] > 100
    (survivor,) = report["kill"]["raised"]
    assert survivor["rank"] == 0 and survivor["type"] == "PeerDied" and "rank 1" in survivor["message"]
    assert 0 <= survivor["after_ms"] < 5000
    steps = [e for e in json.loads((tmp_path / "demo-output/trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in steps} == {0, 1} and {"gemm", "phase"} <= {e["cat"] for e in steps}
    assert all((tmp_path / path).exists() for path in report["files"])


def test_demo_without_rich_and_matplotlib(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--steps", "2", "--no-extra", "--no-kill", without=("rich", "matplotlib"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No pictures: matplotlib is not installed" in done.stdout
    assert not list(tmp_path.glob("**/*.png")) and (tmp_path / "demo-output/trace.json").exists()


def test_demo_says_why_a_run_failed(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--steps", "1", "--no-extra", "--no-kill", "--transport", "carrier-pigeon")
    assert done.returncode == 1
    assert "FAIL carrier-pigeon: runs to its end" in done.stdout and "unknown transport" in done.stdout


@pytest.mark.parametrize("arguments", (["--transport", "a/b"], ["--steps", "0"]))
def test_demo_refuses_what_it_cannot_run(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([*arguments, "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "ConfigError" in capsys.readouterr().err and not list(tmp_path.iterdir())


# -- the checks can fail -----------------------------------------------------------------------------------------------


def result(name: str, losses: list[float], *, exit_code: int = 0, extra: list[dict[str, Any]] | None = None) -> Result:
    start = {"event": "start", "transport": "shm", "why": "because"}
    steps = [{"event": "step", "step": i, "loss": v, "seconds": 0.1} for i, v in enumerate(losses)]
    run = Run(name, 1 if name == "one process" else 2, len(losses), "" if name == "one process" else "shm")
    return Result(run, [[start, *steps, *(extra or [])], []], [exit_code])


def checks(*results: Result) -> dict[str, bool]:
    found = demo._Demo(demo._parser().parse_args(["--device", "cpu"]))
    found._compare(list(results))
    return {what: passed for what, passed, _ in found.report.checks}


FALLING = [5.0 - 0.2 * i for i in range(12)]


def test_losses_that_differ_fail() -> None:
    near, far = [v * (1 + 9e-5) for v in FALLING], [*FALLING[:-1], FALLING[-1] * (1 + 2e-4)]
    assert checks(result("one process", FALLING), result("x", near))["x: losses equal one process's to 1e-04"]
    assert not checks(result("one process", FALLING), result("x", far))["x: losses equal one process's to 1e-04"]
    assert not checks(result("one process", FALLING), result("x", [float("nan")] * 12))[
        "x: losses equal one process's to 1e-04"
    ]


def test_a_loss_that_does_not_fall_and_a_run_that_breaks_off_fail() -> None:
    assert checks(result("one process", FALLING)) == {"the loss falls": True}
    assert checks(result("one process", [5.0] * 12)) == {"the loss falls": False}
    assert not checks(result("one process", FALLING), result("x", FALLING, exit_code=1))["x: runs to its end"]


def test_a_survivor_that_does_not_raise_fails() -> None:
    found = demo._Demo(demo._parser().parse_args(["--device", "cpu"]))
    quiet = result("kill", [5.0])
    quiet.events[1] = [{"event": "dying", "at_ns": 0}]
    found._survivors(quiet)
    assert [passed for _, passed, _ in found.report.checks] == [False] and not found.report.ok


def test_progress_without_a_terminal_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with demo_show.Progress(2, quiet=False) as progress:
        progress.begin("shm", 2)
        progress.step(0, 5.0)
    assert "[  0/2] shm (2 ranks): starting" in capsys.readouterr().err
