"""Runs the checks of ``gpu_checks`` and the conformance suite on a machine with a GPU; see scripts/gpu-test."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_checks
import torch

from commbackend.errors import CommBackendError
from commbackend.testing import run_ranks
from commbackend.testing.harness import Setup, load, promises, run_promise

TRANSPORT = "commbackend.transports.userbuffers:UserbuffersTransport"
NVSHMEM = "commbackend.transports.nvshmem_:NvshmemTransport"
#: Ways to run the conformance suite: transport and options. Those with options only run the promises about moving
#: bytes, with the first of --ranks.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": (TRANSPORT, {}),
    "kernel-waits": (TRANSPORT, {"waits": "kernel"}),
    "ctas": (TRANSPORT, {"comm_ctas": 8}),
    "ipc": (TRANSPORT, {"ipc": True}),
    "nvshmem": (NVSHMEM, {}),
    "nvshmem-far": ("gpu_transports:FarNvshmem", {}),
}
#: Environments a second run of some checks is made in.
QUEUES: dict[str, dict[str, str]] = {
    **{f"max-connections-{n}": {"CUDA_DEVICE_MAX_CONNECTIONS": str(n)} for n in (1, 2, 32)},
    "launch-blocking": {"CUDA_LAUNCH_BLOCKING": "1"},
}


class Table:
    """Rows of results, printed as they come and kept as JSON."""

    def __init__(self, out: Path, budget_s: float) -> None:
        self.out, self.rows, self.end = out, [], time.monotonic() + budget_s
        out.mkdir(parents=True, exist_ok=True)
        print(f"{'check':52} {'ranks':>5} {'result':8} {'s':>7}  detail")

    def add(self, name: str, ranks: int, work: Callable[[], Any]) -> None:
        start, detail, result = time.monotonic(), "", "passed"
        try:
            figures = work() if start < self.end else "the time of --budget is over"
        except Exception:
            result, figures, text = "FAILED", None, traceback.format_exc()
            detail = text.strip().splitlines()[-1][:100]
            (self.out / f"{name.replace('/', '_')}-{ranks}.log").write_text(text)
        if isinstance(figures, str):
            result, detail, figures = "skipped", figures, None
        elif figures:
            detail = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
        seconds = time.monotonic() - start
        self.rows.append(
            {"check": name, "ranks": ranks, "result": result, "seconds": round(seconds, 3), "figures": figures,
             "detail": detail}
        )  # fmt: skip
        print(f"{name:52} {ranks:5} {result:8} {seconds:7.2f}  {detail}", flush=True)
        self.save()

    def save(self) -> None:
        (self.out / "results.json").write_text(json.dumps({"machine": machine(), "rows": self.rows}, indent=1))

    def count(self, result: str) -> int:
        return sum(r["result"] == result for r in self.rows)


def machine() -> dict[str, Any]:
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "environment": {k: v for k, v in os.environ.items() if k.startswith("CUDA_") or k == "COMMBACKEND_MARK"},
    }


def options_for(ranks: int, **more: Any) -> dict[str, Any]:
    return {"allow_shared_device": ranks > torch.cuda.device_count(), **more}


def conformance(table: Table, ranks: int, variant: str, patience_s: float) -> None:
    transport, options = VARIANTS[variant]
    kind = load(transport)
    try:
        kind.probe(torch.device("cuda", 0))
    except CommBackendError as e:
        table.add(f"conformance/{variant}", ranks, lambda why=str(e): why)
        return
    for promise in promises():
        name = f"conformance/{variant}/{promise.name}"
        if not issubclass(kind, promise.role):
            continue
        if options and not promise.fn.__module__.endswith("moving"):
            continue
        if why := promise.needs(kind.caps):
            table.add(name, ranks, lambda why=why: why)
            continue
        setup = Setup(transport, "cuda", options_for(ranks, **options), patience_s)

        def work(promise: Any = promise, setup: Any = setup) -> None:
            limit_s = 3 * patience_s + 60
            run_ranks(run_promise, ranks, setup, promise.fn, timeout_s=limit_s, expect_death=promise.dies)

        table.add(name, ranks, work)


def own(table: Table, ranks: int, check: Callable[..., Any], limit_s: float) -> None:
    def work() -> Any:
        found = run_ranks(check, ranks, options_for(ranks), timeout_s=limit_s)
        return found[0]

    table.add(f"userbuffers/{check.__name__}", ranks, work)


def in_environment(table: Table, args: argparse.Namespace, name: str, environment: dict[str, str]) -> None:
    """Run the checks that depend on queues in a process of their own."""

    def work() -> dict[str, Any]:
        folder = args.out / name
        command = [sys.executable, __file__, "--out", str(folder), "--ranks", "2", "--plain", "--only", "queues"]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
        )
        (args.out / f"{name}.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            raise RuntimeError(f"see {name}.log: {(done.stdout.strip().splitlines() or ['?'])[-1]}")
        rows = json.loads((folder / "results.json").read_text())["rows"]
        return {"passed": sum(r["result"] == "passed" for r in rows)}

    table.add(f"environment/{name}", 2, work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-test"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", default=[], help="run only names that contain one of these")
    parser.add_argument("--patience", type=float, default=10.0, help="deadline of what should succeed at once, s")
    parser.add_argument("--budget", type=float, default=540.0, help="start no check after so many seconds")
    parser.add_argument("--plain", action="store_true", help="no second runs in other environments")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()

    def wanted(name: str) -> bool:
        return not args.only or any(part in name for part in args.only)

    if args.list:
        print("\n".join(f"userbuffers/{c.__name__}" for c in gpu_checks.CHECKS))
        print("\n".join([*(f"conformance/{v}" for v in VARIANTS), *(f"environment/{q}" for q in QUEUES)]))
        return 0
    try:
        load(TRANSPORT).probe(torch.device("cuda", 0))
    except CommBackendError as e:
        print(f"transport userbuffers cannot be used here: {e}")
        return 2
    table = Table(args.out, args.budget)
    for ranks in args.ranks:
        for check in gpu_checks.CHECKS:
            if wanted(f"userbuffers/{check.__name__}"):
                own(table, ranks, check, 120.0)
    for name, environment in QUEUES.items() if not args.plain else ():
        if wanted(f"environment/{name}"):
            in_environment(table, args, name, environment)
    for ranks in args.ranks:
        if wanted("conformance/default"):
            conformance(table, ranks, "default", args.patience)
    for variant in list(VARIANTS)[1:]:
        if wanted(f"conformance/{variant}"):
            conformance(table, args.ranks[0], variant, args.patience)
    print(f"{table.count('passed')} passed, {table.count('FAILED')} failed, {table.count('skipped')} skipped")
    return 1 if table.count("FAILED") else 0


if __name__ == "__main__":
    sys.exit(main())
