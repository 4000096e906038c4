"""Tables from benchmark files: ``python -m commbackend.bench FILE... [--compare OLD]`` prints Markdown.

A file holds samples only (median, 10th and 90th percentile, count, in microseconds); every ratio is computed here, so
that old files can be read by new columns. docs/benchmarks.md says what the columns mean. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .names import CUBLAS, FILES, FORMAT, GEMM, LONE, MEMCPY, MOVE, MPI, NEW, OURS, RIVALS, SCALED, SEQUENCE, STOCKS

__all__ = ["Table", "compare", "load", "main", "markdown", "nbytes_text", "summary", "tables", "text"]


@dataclass
class Table:
    """A title, column heads, rows of cells, and remarks below them."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def summary(samples_us: Sequence[float]) -> dict[str, float]:
    """Return median, 10th and 90th percentile (linear between samples) and the count. Raises ValueError if empty."""
    if not samples_us:
        raise ValueError("no samples")
    ordered = sorted(float(s) for s in samples_us)
    deciles = statistics.quantiles(ordered, n=10, method="inclusive") if len(ordered) > 1 else ordered * 9
    median = statistics.median(ordered)
    return {"median_us": median, "p10_us": deciles[0], "p90_us": deciles[8], "n": len(ordered)}


def load(path: str | Path) -> dict[str, Any]:
    """Read a benchmark file. Raises ConfigError naming the file if it is something else."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: {e}") from e
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or raw.get("kind") not in FILES:
        found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise ConfigError(f"{path} is not a benchmark of commbackend: {found!r} where {FORMAT!r} is needed")
    return raw


# -- from samples to columns
def _median(case: Mapping[str, Any], name: str) -> float | None:
    found = case["samples"].get(name)
    return None if found is None else float(found["median_us"])


def _stock(case: Mapping[str, Any]) -> str | None:
    return next((s for s in STOCKS if s in case["samples"]), None)


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _spread(case: Mapping[str, Any], name: str) -> str:
    found = case["samples"].get(name)
    return "-" if found is None else f"{_us(found['p10_us'])}...{_us(found['p90_us'])}"


def nbytes_text(nbytes: int) -> str:
    """Return ``nbytes`` in the largest binary unit that keeps it at 1 or more."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:g} {unit}" if value == round(value, 1) else f"{value:.1f} {unit}"


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Return the tables of one file: one for every number of ranks, and one more where schedules were compared."""
    if report["kind"] == "gemm":
        return [t for run in report["runs"] for t in _gemm(run)]
    make = {"collectives": _collectives, "overlap": _overlap, "host": _host, "memory": _memory}[report["kind"]]
    found = []
    for run in (r for r in report["runs"] if r["cases"]):
        found.append(table := make(run))
        table.notes += run.get("notes", [])
        known = {GEMM, MOVE, SEQUENCE, OURS, *STOCKS, *RIVALS}
        if report["kind"] == "host" and any("phases" in c for c in run["cases"]):
            found.append(_host_phases(run))
        if report["kind"] == "overlap" and (names := _further(run["cases"], known)):
            found.append(_variants(run, names))
    return found


def _title(run: Mapping[str, Any], what: str) -> str:
    launcher = f"{run['threads']} thread{'s' if run['threads'] != 1 else ''} a rank, {run['launcher']}"
    return f"{what}: {run['ranks']} ranks, {run['transport']}, {run['device']}, {launcher}"


def _collectives(run: Mapping[str, Any]) -> Table:
    stock = next((s for c in run["cases"] if (s := _stock(c))), "gloo")
    head = (
        "op",
        "dtype",
        "shard",
        "size",
        "time us",
        "p10...p90",
        "algbw GB/s",
        "busbw GB/s",
        "new tensor us",
        "memcpy us",
    )
    table = Table(_title(run, "collectives"), (*head, f"{stock} us", "Open MPI us", f"x {stock}", "x Open MPI"))
    for case in run["cases"]:
        ours, size = _median(case, OURS), int(case["size_nbytes"])
        algbw = None if not ours else size / ours / 1e3
        share = (run["ranks"] - 1) / run["ranks"] * (2 if case["op"] == "all_reduce" else 1)
        theirs, mpi = _median(case, stock), _median(case, MPI)
        cells = (
            case["op"],
            case["dtype"],
            nbytes_text(case["shard_nbytes"]),
            nbytes_text(size),
            _us(ours),
            _spread(case, OURS),
            _number(algbw),
            _number(None if algbw is None else algbw * share),
            _us(_median(case, NEW)),
            _us(_median(case, MEMCPY)),
            _us(theirs),
            _us(mpi),
            _number(_over(theirs, ours)),
            _number(_over(mpi, ours)),
        )
        table.rows.append(cells)
    return table


def _overlap(run: Mapping[str, Any]) -> Table:
    stock = next((s for c in run["cases"] if (s := _stock(c))), "gloo")
    head = (*_SHAPE, "mode", "GEMM us", "comm us", "sequence us", "ours us")
    others = [name for name in RIVALS if any(name in c["samples"] for c in run["cases"])]
    columns = [column for name in others for column in (f"{name} us", f"x {name}")]
    ratios = ("T/max", "hidden", "x sequence", f"{stock} us", f"x {stock}", *columns, "error", "schedule")
    table = Table(_title(run, "overlap"), (*head, *ratios))
    for case in run["cases"]:
        gemm, move, ours = (_median(case, n) for n in (GEMM, MOVE, OURS))
        sequence, theirs = _median(case, SEQUENCE), _median(case, stock)
        longest = None if gemm is None or move is None else max(gemm, move)
        cells = (
            *_shape(case),
            case["mode"],
            *(_us(v) for v in (gemm, move, sequence, ours)),
            _number(_over(ours, longest)),
            _hidden(gemm, move, ours),
            _number(_over(sequence, ours)),
            _us(theirs),
            _number(_over(theirs, ours)),
            *(cell for n in others for cell in (_us(_median(case, n)), _number(_over(_median(case, n), ours)))),
            f"{case['errors'].get(OURS, float('nan')):.1e}",
            case.get("schedule", "-"),
        )
        table.rows.append(cells)
    return table


def _variants(run: Mapping[str, Any], names: Sequence[str]) -> Table:
    """Everything else that ran in the same turns: other schedules, and the forms that return new tensors."""
    table = Table(_title(run, "overlap, other forms, us"), (*_SHAPE, "mode", "ours", *names))
    for case in run["cases"]:
        times = (_us(_median(case, name)) for name in (OURS, *names))
        table.rows.append((*_shape(case), case["mode"], *times))
    return table


_SHAPE = ("op", "model", "M x K x N", "dtype")


def _shape(case: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = " x ".join(str(case[d]) for d in ("m", "k", "n"))
    return (case["op"], f"{case['model']} tp {case['tp']}", sizes, case["dtype"])


def _further(cases: Iterable[Mapping[str, Any]], known: set[str]) -> list[str]:
    """Names measured in any of the cases beyond ``known``, in the order in which they first appear."""
    return list(dict.fromkeys(name for case in cases for name in case["samples"] if name not in known))


def _hidden(gemm: float | None, move: float | None, ours: float | None) -> str:
    """(GEMM + communication - T) / min(GEMM, communication): 100 % hides all that can be hidden; below 0 it lost."""
    if gemm is None or move is None or ours is None or min(gemm, move) <= 0:
        return "-"
    return f"{(gemm + move - ours) / min(gemm, move):.0%}"


def _host(run: Mapping[str, Any]) -> Table:
    names = _further(run["cases"], set())
    others = [name for name in names if name in (*STOCKS, LONE)]
    head = ("op", *(f"{name} us" for name in names), *(f"x {s}" for s in others))
    table = Table(_title(run, "host time a call"), head)
    for case in run["cases"]:
        ratios = [_number(_over(_median(case, s), _median(case, NEW))) for s in others]
        table.rows.append((case["op"], *(_us(_median(case, n)) for n in names), *ratios))
    return table


def _host_phases(run: Mapping[str, Any]) -> Table:
    """Where the time of ``commbackend`` goes, on rank 0."""
    cases = [c for c in run["cases"] if "phases" in c]
    names = list(dict.fromkeys(name for c in cases for name in c["phases"]))
    table = Table(_title(run, "host time a call by phase, us"), ("op", *names))
    table.rows += [(c["op"], *(_number(c["phases"].get(n)) for n in names)) for c in cases]
    return table


def _memory(run: Mapping[str, Any]) -> Table:
    head = (*_SHAPE, "operand", "symmetric", "symmetric/operand", "schedule")
    table = Table(_title(run, "symmetric memory a rank"), head)
    for case in run["cases"]:
        operand, symmetric = int(case["operand_nbytes"]), int(case["symmetric_nbytes"])
        cells = (
            *_shape(case),
            nbytes_text(operand),
            nbytes_text(symmetric),
            _number(_over(symmetric, operand)),
            case.get("schedule", "-"),
        )
        table.rows.append(cells)
    return table


def _gemm(run: Mapping[str, Any]) -> list[Table]:
    """One table for every part of ``bench gemm``; ratios are to the library's product of the same kind."""
    found = []
    for part in dict.fromkeys(c["op"] for c in run["cases"]):
        cases = [c for c in run["cases"] if c["op"] == part]
        names = _further(cases, set())
        against = {n: n.replace("ours", SCALED) for n in names if n.startswith("ours ")}
        if CUBLAS in names:
            against = {n: CUBLAS for n in names if n != CUBLAS}
        head = ("M x K x N", "mode", *(f"{n} us" for n in names), *(f"{n} / {b}" for n, b in against.items()))
        table = Table(f"gemm: {part}", head)
        for case in cases:
            size = " x ".join(str(case[d]) for d in ("m", "k", "n") if d in case) or "-"
            ratios = (_number(_over(_median(case, n), _median(case, b)), 3) for n, b in against.items())
            times = (_us(_median(case, n)) for n in names)
            table.rows.append((f"{case.get('model', '')} {size}".strip(), case["mode"], *times, *ratios))
        found.append(table)
    return found


# -- old against new
def _key(run: Mapping[str, Any], case: Mapping[str, Any]) -> tuple[str, ...]:
    fields = ("op", "shard_nbytes", "model", "tp", "m", "k", "n", "dtype", "mode")
    return (f"{run['ranks']} ranks", *(str(case[f]) for f in fields if f in case))


def _all_cases(report: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    for run in report["runs"]:
        for case in run["cases"]:
            yield _key(run, case), case


def compare(new: Mapping[str, Any], old: Mapping[str, Any]) -> Table:
    """Return new time over old time (below 1: faster now) for all that both files measured.

    Raises:
        ConfigError: The files are of different kinds.
    """
    if new["kind"] != old["kind"]:
        raise ConfigError(f"a file of bench {old['kind']} cannot be compared with one of bench {new['kind']}")
    names = _further([c for _, c in _all_cases(new)], set())
    was = dict(_all_cases(old))
    table = Table(f"{new['kind']}: time now / time then", ("case", *names))
    missing = 0
    for key, case in _all_cases(new):
        before = was.get(key)
        if before is None:
            missing += 1
        elif case["samples"]:
            table.rows.append((" ".join(key), *(_change(case, before, name) for name in names)))
    then, now = (_about(r["machine"], r["versions"]) for r in (old, new))
    if then != now:
        table.notes.append(f"measured elsewhere: then {then}; now {now}")
    if missing:
        table.notes.append(f"{missing} cases are new")
    table.notes.append("faster / slower: the ranges p10...p90 do not meet")
    return table


def _change(now: Mapping[str, Any], then: Mapping[str, Any], name: str) -> str:
    a, b = now["samples"].get(name), then["samples"].get(name)
    if a is None or b is None or not b["median_us"]:
        return "-"
    verdict = " faster" if a["p90_us"] < b["p10_us"] else " slower" if a["p10_us"] > b["p90_us"] else ""
    return f"{a['median_us'] / b['median_us']:.2f}{verdict}"


# -- as text
def text(table: Table) -> str:
    """Return the table in columns: the first left-aligned, numbers to the right."""
    widths = [max(len(row[i]) for row in (table.head, *table.rows)) for i in range(len(table.head))]
    lines = [table.title, _aligned(table.head, widths), "  ".join("-" * w for w in widths)]
    lines += [_aligned(row, widths) for row in table.rows]
    return "\n".join([*lines, *(f"note: {n}" for n in table.notes)])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
    return "  ".join([first, *rest]).rstrip()


def markdown(table: Table) -> str:
    """Return the table in Markdown, its title as a line of its own."""
    cells = [table.head, ("---", *("---:" for _ in table.head[1:])), *table.rows]
    lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in cells]
    return "\n".join([f"**{table.title}**", "", *lines, *(f"\nNote: {n}" for n in table.notes)])


def _about(machine: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    memory = nbytes_text(int(machine.get("memory_nbytes", 0)))
    parts = [f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, {memory}", *machine.get("gpus", [])]
    parts += [f"{name} {found}" for name, found in versions.items() if found]
    return ", ".join(parts)


def _section(path: str, report: Mapping[str, Any]) -> str:
    lines = [f"### bench {report['kind']} ({Path(path).name})", ""]
    lines.append(f"{report['date']}: {_about(report['machine'], report['versions'])}. Load before the run:")
    lines[-1] += f" {report['machine'].get('load', '?')}. `{' '.join(report['command'])}`"
    return "\n".join([*lines, *("\n" + markdown(t) for t in tables(report))])


def main(argv: Sequence[str] | None = None) -> int:
    """Print files as Markdown. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m commbackend.bench", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="written by commbackend bench --json")
    parser.add_argument("--compare", metavar="OLD", help="also print the ratios to this older file")
    options = parser.parse_args(argv)
    try:
        old = load(options.compare) if options.compare else None
        for path in options.files:
            report = load(path)
            print(_section(path, report), end="\n\n")
            if old is not None:
                print(markdown(compare(report, old)), end="\n\n")
    except ConfigError as e:
        print(f"bench: {e}", file=sys.stderr)
        return 2
    return 0
