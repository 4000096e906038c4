"""``commbackend bench plan``: time and memory to plan, prove and simulate one call of ever more ranks.

Every number of ranks is a process of its own, which starts, imports what ``commbackend plan --simulate`` imports, and
reports how long each part took and how much memory it ever held. No rank is started, and no GPU or torch is needed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .facts import machine, versions
from .names import FORMAT
from .report import Table, text

__all__ = ["draw", "main", "table"]

PARTS = ("plan", "prove", "simulate", "everything")
_OPS = ("all_gather_matmul", "matmul_reduce_scatter")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and show it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="commbackend bench plan", description=__doc__)
    parser.add_argument("--worlds", default="8,16,72,144,288,576,1152", help="numbers of ranks (default %(default)s)")
    parser.add_argument("--topology", default="nvl72", help="as of commbackend plan (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the median counts (default %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="deadline of one run (default %(default)s)")
    parser.add_argument("--json", metavar="PATH", help="write samples and machine")
    parser.add_argument("--plot", metavar="PNG", help="draw (needs matplotlib)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(list(arguments))
    if options.one:
        op, world = options.one.split(":")
        print(json.dumps(_one(op, int(world), options.topology)))
        return 0
    try:
        worlds = [int(w) for w in options.worlds.split(",")]
        if min(worlds) < 1 or options.repeat < 1:
            raise ValueError
    except ValueError:
        print("bench plan: --worlds and --repeat are whole numbers above 0", file=sys.stderr)
        return 2
    report = _measure(worlds, options, ["commbackend", "bench", "plan", *arguments])
    print(text(table(report)))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        draw(report, options.plot)
    return 0


def _measure(worlds: Sequence[int], options: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    cases = []
    for op in _OPS:
        for world in worlds:
            runs = [_child(op, world, options) for _ in range(options.repeat)]
            cases.append({"op": op, "world": world, "topology": options.topology, "runs": runs})
    head = {"format": FORMAT, "kind": "plan", "date": datetime.now(UTC).isoformat(timespec="seconds")}
    return {**head, "command": command, "machine": machine(), "versions": versions(), "cases": cases}


def _child(op: str, world: int, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "commbackend", "bench", "plan", "--one", f"{op}:{world}"]
    start = time.perf_counter()
    said = subprocess.run(
        [*command, "--topology", options.topology],
        capture_output=True,
        text=True,
        timeout=options.timeout_s,
        check=False,
    )
    if said.returncode:
        raise ConfigError(f"{op} over {world} ranks: {said.stderr.strip()}")
    found: dict[str, float] = json.loads(said.stdout)
    return {**found, "everything_s": time.perf_counter() - start}


def _one(op: str, world: int, where: str) -> dict[str, float]:
    """Plan, prove and simulate one call with a token count that grows with the ranks, in this process."""
    from .. import schedules
    from ..check.symmetric import check_symmetric
    from ..commands.plan import ROLES
    from ..plan import Problem
    from ..schedules.symmetric import symmetric_plan
    from ..tuning.cost import simulate
    from ..tuning.costs import load_table, topology

    caps, k, n = ROLES["gpu"], 8192, 7168
    problem = Problem(op, (128,) * world, k=k, n=(n,), dtype="bfloat16")
    knobs = schedules.default_knobs(problem, caps)
    start = time.perf_counter()
    plan = symmetric_plan(problem, caps, knobs)
    planned = time.perf_counter()
    check_symmetric(plan, lambda rank: schedules.program(problem, rank, caps, knobs), caps=caps)
    proved = time.perf_counter()
    timeline = simulate(plan, load_table("h200"), topology(where, world))
    ended = time.perf_counter()
    times = {"plan_s": planned - start, "prove_s": proved - planned, "simulate_s": ended - proved}
    return {**times, "peak_nbytes": _peak_nbytes(), "steps": len(plan.program.steps), "predicted_us": timeline.time_us}


def _peak_nbytes() -> int:
    """Most memory this process ever held; getrusage would count what its parent held before the fork."""
    held = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(held[1]) * 1024 if held else 0


def _medians(case: dict[str, Any]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in case["runs"]) for key in case["runs"][0]}


def table(report: dict[str, Any]) -> Table:
    """One row an operation and number of ranks."""
    head = ("op", "ranks", "steps a rank", *(f"{p} ms" for p in PARTS), "peak MiB", "predicted us")
    found = Table(f"plan, prove, simulate: {report['cases'][0]['topology']}, costs of H200", head)
    for case in report["cases"]:
        m = _medians(case)
        times = [f"{m[f'{part}_s'] * 1e3:,.0f}" for part in PARTS]
        sizes = (f"{m['peak_nbytes'] / 2**20:,.0f}", f"{m['predicted_us']:,.0f}")
        found.rows.append((case["op"], str(case["world"]), f"{m['steps']:,.0f}", *times, *sizes))
    found.notes.append("everything: from the start of the process to its end; medians")
    return found


def draw(report: dict[str, Any], path: str | Path) -> None:
    """Draw time and memory over the number of ranks. Raises Unavailable without matplotlib."""
    from ..commands.plots import pyplot as load

    pyplot = load()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for op in dict.fromkeys(c["op"] for c in report["cases"]):
        cases = [c for c in report["cases"] if c["op"] == op]
        worlds, medians = [c["world"] for c in cases], [_medians(c) for c in cases]
        for part, style in zip(PARTS, ("o-", "s-", "^-", "k--"), strict=True):
            if part != "everything" or op == _OPS[0]:
                left.plot(worlds, [m[f"{part}_s"] for m in medians], style, ms=3, label=f"{op}: {part}", alpha=0.8)
        right.plot(worlds, [m["peak_nbytes"] / 2**20 for m in medians], "o-", ms=3, label=op)
    left.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds", title="Plan, prove, simulate one call")
    right.set(xscale="log", xlabel="ranks", ylabel="peak MiB of the process", title="Memory", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
