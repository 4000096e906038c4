"""What the demo prints: a progress bar (rich's where it is installed, plain lines otherwise) and a report."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

__all__ = ["Progress", "show"]

_PLAIN_EVERY_S = 5.0


class Progress:
    """A bar over all steps of all runs, on standard error. Without rich or a terminal: a line every few seconds.

    Args:
        total: Steps of all runs together.
        quiet: Plain lines only, so that a log of a program stays readable.
    """

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._total, self._done, self._name = total, 0, ""
        self._shown_at = 0.0
        self._bar = None if quiet or not sys.stderr.isatty() else _rich_bar()
        self._task = self._bar.add_task("", total=total) if self._bar else None

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def begin(self, name: str, ranks: int) -> None:
        """Say which run starts."""
        self._name, self._shown_at = f"{name} ({ranks} {'rank' if ranks == 1 else 'ranks'})", 0.0
        self._show("starting")

    def step(self, step: int, loss: float) -> None:
        """Count one step."""
        self._done += 1
        self._show(f"step {step + 1}, loss {loss:.3f}")

    def _show(self, text: str) -> None:
        if self._bar:
            self._bar.update(self._task, completed=self._done, description=f"{self._name:<24} {text:<24}")
        elif time.monotonic() - self._shown_at > _PLAIN_EVERY_S:
            self._shown_at = time.monotonic()
            print(f"[{self._done:>3}/{self._total}] {self._name}: {text}", file=sys.stderr, flush=True)


def _rich_bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bar(*columns, console=Console(stderr=True))


def show(report: Mapping[str, Any]) -> None:
    """Print the demo's report."""
    print()
    _table([_row(run) for run in report["runs"]])
    print()
    print("\n".join(f"Chosen for {line}" for line in report["why"]))
    for run in report["runs"]:
        if run["overlap"]:
            o = run["overlap"]
            print(
                f"Overlapped in one step of rank 0 over {run['transport']}: {o['moving_ms']:.1f} ms of moving bytes, "
                f"{o['hidden_ms']:.1f} ms of it while a GEMM ran ({o['share']:.0%});\n  GEMMs took {o['gemm_ms']:.1f} "
                f"ms (what they read from peers' memory by themselves included), waits {o['waiting_ms']:.1f} ms."
            )
        if run["stats"]:
            s = run["stats"]
            print(f"Calls of rank 0 in '{run['run']}': {s['overlapped']} overlapped, {s['fallback']} in sequence.")
    for error in report["kill"].get("raised", ()):
        print(
            f"Killed rank {report['kill']['killed']} in the middle of a step; rank {error['rank']} raised "
            f"{error['type']} {error['after_ms']:.0f} ms later:\n  {error['message']}"
        )
    print()
    for what, passed, seen in report["checks"]:
        print(f"{'ok  ' if passed else 'FAIL'} {what} ({seen})")
    for note in report["notes"]:
        print(f"note {note}")
    print(f"\nWritten: {', '.join(report['files'])}  (open trace.json in Perfetto: ui.perfetto.dev)")
    print(f"{'All checks passed' if report['ok'] else 'A CHECK FAILED'} in {report['seconds']:.0f} s.")


def _row(run: Mapping[str, Any]) -> dict[str, str]:
    hidden = run["overlap"].get("share")
    return {
        "run": run["run"],
        "ranks": str(run["ranks"]),
        "transport": run["transport"],
        "steps": str(run["steps"]),
        "loss": f"{run['loss_start']:.3f} -> {run['loss_end']:.3f}",
        "difference": "-" if run["ranks"] == 1 else f"{run['largest_relative_difference']:.1e}",
        "tokens/s": f"{run['tokens_per_s']:,}",
        "hidden": "-" if hidden is None else f"{hidden:.0%}",
    }


def _table(rows: Sequence[Mapping[str, str]]) -> None:
    if not rows:
        return
    widths = {k: max(len(k), *(len(r[k]) for r in rows)) for k in rows[0]}
    print("  ".join(k.ljust(w) for k, w in widths.items()))
    print("  ".join("-" * w for w in widths.values()))
    for row in rows:
        print("  ".join(row[k].ljust(w) for k, w in widths.items()))
