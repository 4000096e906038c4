"""Starting the demo's ranks as processes, watching them, and reading what they logged."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Result", "Run", "find_mpirun", "launch"]

_POLL_S = 0.05


@dataclass(frozen=True)
class Run:
    """One training run to start.

    Attributes:
        name: Names its log files.
        ranks: Number of processes.
        steps: Training steps.
        transport: Value of ``commbackend.init(transport=)``; "" is the plain model in one process.
        mpirun: Path of an Open MPI ``mpirun`` that starts the ranks, or "" for plain child processes.
        options: Further arguments of ``demo.worker``.
    """

    name: str
    ranks: int
    steps: int
    transport: str
    mpirun: str = ""
    options: tuple[str, ...] = ()


@dataclass
class Result:
    """What a run left behind: its events by rank, and how its processes ended."""

    run: Run
    events: list[list[dict[str, Any]]]
    exit_codes: list[int] = field(default_factory=list)
    output: str = ""

    def of(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return the events of that name that ``rank`` logged."""
        return [e for e in self.events[rank] if e["event"] == event]

    @property
    def losses(self) -> list[float]:
        """Loss of every step, in nats a byte."""
        return [float(e["loss"]) for e in self.of("step")]

    def tokens_per_s(self, tokens: int) -> float:
        """Median speed in steps of ``tokens`` tokens; the first two steps, which warm up, do not count."""
        seconds = [float(e["seconds"]) for e in self.of("step")]
        seconds = sorted(seconds[2:] or seconds)
        return tokens / seconds[len(seconds) // 2] if seconds else 0.0


def find_mpirun() -> str:
    """Return the path of an Open MPI ``mpirun`` (beside this Python, or on PATH), or "" where there is none."""
    for found in (shutil.which("mpirun", path=str(Path(sys.executable).parent)), shutil.which("mpirun")):
        if found:
            try:
                said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if "Open MPI" in said.stdout:
                return found
    return ""


def launch(
    run: Run, logs: Path, arguments: Sequence[str], timeout_s: float, on_step: Callable[[int, float], None]
) -> Result:
    """Run ``run`` to its end and return what it logged. ``on_step(step, loss)`` is called as rank 0 proceeds.

    After ``timeout_s`` its processes are killed, which their exit codes show.
    """
    prefix = logs / run.name
    for old in logs.glob(f"{run.name}-rank*"):
        old.unlink()
    worker = [sys.executable, "-m", "commbackend.demo.worker", "--log", str(prefix), "--steps", str(run.steps)]
    worker += [*(["--transport", run.transport] if run.transport else ["--single"]), *arguments, *run.options]
    deadline = time.monotonic() + timeout_s
    output = logs / f"{run.name}.log"
    with open(output, "w", encoding="utf-8") as sink:
        children = [
            subprocess.Popen(c, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT)
            for c in _commands(run, worker)
        ]
        try:
            seen = 0
            while any(child.poll() is None for child in children) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                seen = _report(_events(prefix, 0), seen, on_step)
        finally:
            for child in children:
                child.kill()
                child.wait()
    result = Result(run, [_events(prefix, rank) for rank in range(run.ranks)], [c.returncode for c in children])
    _report(result.events[0], seen, on_step)
    result.output = output.read_text(encoding="utf-8", errors="replace")
    if time.monotonic() >= deadline:
        result.output += f"\nkilled: it did not end within {timeout_s:.0f} s"
    return result


def _commands(run: Run, worker: list[str]) -> list[list[str]]:
    """One command a process, or one ``mpirun`` for all."""
    if run.mpirun:
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [[run.mpirun, *as_root, "--oversubscribe", "--bind-to", "none", "-n", str(run.ranks), *worker]]
    if not run.transport:
        return [worker]
    # env(1) adds the launcher's variables for the child alone: nothing here reads or writes the environment.
    shared = [f"WORLD_SIZE={run.ranks}", f"LOCAL_WORLD_SIZE={run.ranks}"]
    shared += ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={_free_port()}"]
    return [["env", *shared, f"RANK={rank}", f"LOCAL_RANK={rank}", *worker] for rank in range(run.ranks)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _events(prefix: Path, rank: int) -> list[dict[str, Any]]:
    try:
        text = Path(f"{prefix}-rank{rank}.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []  # it has not begun to log
    # The last line may be half written.
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _report(events: Sequence[dict[str, Any]], seen: int, on_step: Callable[[int, float], None]) -> int:
    steps = [e for e in events if e["event"] == "step"]
    for event in steps[seen:]:
        on_step(int(event["step"]), float(event["loss"]))
    return len(steps)
