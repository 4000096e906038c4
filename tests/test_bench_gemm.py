"""``commbackend bench gemm`` without a GPU: usage, tables, ratios and pictures of what a GPU measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commbackend.bench import gemm, main
from commbackend.bench.names import FORMAT
from commbackend.bench.report import compare, load, summary, tables

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results" / "2026-12-01"


def report(**samples: float) -> dict[str, object]:
    facts = {"model": "8B", "tp": 8, "m": 64, "k": 32, "n": 48, "dtype": "bfloat16", "mode": "isolated"}
    found = {name: summary([us]) for name, us in samples.items()}
    run = {"ranks": 1, "cases": [{"op": "scatter", **facts, "samples": found}], "notes": []}
    about = {"cpu": "a", "cores": 1, "memory_nbytes": 1, "gpus": ["g"]}
    return {"format": FORMAT, "kind": "gemm", "machine": about, "versions": {}, "runs": [run]}


def test_ratios_are_to_the_library() -> None:
    (table,) = tables(report(cuBLAS=100.0, fold=106.0, plain=101.0))
    assert table.head[-2:] == ("fold / cuBLAS", "plain / cuBLAS")
    assert table.rows == [("8B 64 x 32 x 48", "isolated", "100", "106", "101", "1.060", "1.010")]
    (scaled,) = tables(report(**{"scaled_mm row": 50.0, "ours row": 75.0}))
    assert scaled.head[-1] == "ours row / scaled_mm row" and scaled.rows[0][-1] == "1.500"


def test_old_and_new() -> None:
    change = compare(report(cuBLAS=100.0, fold=105.0), report(cuBLAS=100.0, fold=110.0))
    assert change.rows[0][1:] == ("1.00", "0.95 faster")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("h200-gemm-*.json")), ids=lambda p: p.stem)
def test_recorded_files_can_be_read_and_drawn(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from commbackend.bench.plot import draw

    read = load(path)
    assert all(t.rows for t in tables(read))
    draw(read, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 10_000
    assert "/" not in json.dumps(read["command"]), "a path of the machine"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--only", "nothing"], "some of gather"), (["--rows", "x"], "invalid literal"), (["--models", "9B"], "9B")],
)
def test_usage(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gemm", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gemm.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
