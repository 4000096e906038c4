"""Pictures of what ran, as PNG: loss curves and timelines. Needs matplotlib, imported here alone and only when used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Unavailable
from .trace import PHASE_LANE, Span, Trace, kind, moves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "loss_curves", "pyplot", "timeline"]

#: One colour a kind of step; told apart also by readers who confuse red and green.
COLOURS: Mapping[str, str] = {
    "gemm": "#4477aa",
    "put": "#ee7733",
    "get": "#ddaa33",
    "collective": "#cc3311",
    "reduce": "#228833",
    "copy": "#aa4499",
    "signal": "#222222",
    "wait": "#cccccc",
    "phase": "#dfe7ef",
}


def pyplot() -> Any:
    """Return matplotlib's pyplot, for files. Raises Unavailable without matplotlib."""
    try:
        import matplotlib
    except ImportError as e:
        raise Unavailable("matplotlib is not installed", "pip install 'commbackend[viz]'") from e
    matplotlib.use("Agg")  # files only: no display is needed, and none is opened
    from matplotlib import pyplot as found

    return found


def loss_curves(runs: Mapping[str, Sequence[float]], path: str | Path, *, title: str = "Training loss") -> None:
    """Draw one curve a run, and below it each run's relative distance from the first.

    Args:
        runs: Losses by step, by the run's name; the first run is the reference.
    Raises:
        Unavailable: matplotlib is not installed.
    """
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    reference = next(iter(runs.values()), ())
    for number, (name, losses) in enumerate(runs.items()):
        # Curves that agree hide each other: thick and pale below, thin and dashed on top.
        style = {"linewidth": 5.0, "alpha": 0.35} if number == 0 else {"linewidth": 1.6, "linestyle": "--"}
        top.plot(range(1, len(losses) + 1), losses, label=name, **style)
        if number:
            gaps = [max(abs(a - b) / abs(b), 1e-9) for a, b in zip(losses, reference, strict=False)]
            bottom.plot(range(1, len(gaps) + 1), gaps, color=top.lines[-1].get_color(), label=name)
    top.set(ylabel="loss (nats a byte)", title=title)
    top.legend()
    top.grid(alpha=0.3)
    if len(runs) > 1:
        bottom.set_yscale("log")
        bottom.axhline(1e-4, color="#cc3311", linewidth=1, linestyle=":")
        bottom.annotate("allowed: 1e-4", (1, 1e-4), (0, -10), textcoords="offset points", fontsize=8, color="#cc3311")
    bottom.set(xlabel="step", ylabel="relative\ndifference")
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def timeline(traces: Sequence[Trace], path: str | Path, *, title: str = "Timeline") -> None:
    """Draw one row a lane and rank, one bar a step: everything above, and below the eighth in which most bytes move.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    plt = pyplot()
    rows = [(t, lane) for t in traces for lane in sorted({s.lane for s in t.spans})]
    spans = [s for t in traces for s in t.spans]
    start, end = min((s.start_ns for s in spans), default=0), max((s.end_ns for s in spans), default=1)
    height = 1.4 + 0.42 * max(len(rows), 2)
    figure, panels = plt.subplots(2, 1, figsize=(15, 2 * height), layout="constrained")
    _panel(panels[0], rows, start, start, end)
    _panel(panels[1], rows, start, *_busiest(spans, start, end))
    used = {kind(s.name) for s in spans if s.lane != PHASE_LANE}
    handles = [plt.Rectangle((0, 0), 1, 1, color=c, label=k) for k, c in COLOURS.items() if k in used]
    figure.legend(handles=handles, ncols=len(handles) or 1, loc="outside upper right", frameon=False)
    panels[0].set_title(title, loc="left", fontsize=12)
    panels[1].set_title("Zoom: where most bytes move", loc="left", fontsize=12)
    panels[1].set_xlabel("milliseconds")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _busiest(spans: Sequence[Span], start: int, end: int) -> tuple[int, int]:
    """The eighth of the time, on a grid of sixteenths, in which most time goes into moving bytes."""
    step = max((end - start) // 16, 1)
    moving = [s for s in spans if moves(s.name)]
    windows = [(start + i * step, start + (i + 2) * step) for i in range(15)]
    return max(windows, key=lambda w: sum(max(0, min(s.end_ns, w[1]) - max(s.start_ns, w[0])) for s in moving))


def _panel(axes: Axes, rows: Sequence[tuple[Trace, int]], origin: int, start: int, end: int) -> None:
    for y, (trace, lane) in enumerate(rows):
        inside = [s for s in trace.spans if s.lane == lane and s.end_ns >= start and s.start_ns <= end]
        for span in sorted(inside, key=lambda s: s.start_ns):
            _bar(axes, y, span, origin, start, end)
    axes.set_yticks(range(len(rows)), [_row_name(t, lane) for t, lane in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim((start - origin) / 1e6, (end - origin) / 1e6)
    for y in range(1, len(rows)):
        if rows[y][0] is not rows[y - 1][0]:
            axes.axhline(y - 0.5, color="#888888", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _bar(axes: Axes, y: int, span: Span, origin: int, start: int, end: int) -> None:
    what = kind(span.name)
    left, right = (span.start_ns - origin) / 1e6, (span.end_ns - origin) / 1e6
    # An edge of its own colour keeps the shortest steps visible.
    axes.broken_barh([(left, right - left)], (y - 0.4, 0.8), facecolor=COLOURS[what], edgecolor=COLOURS[what], lw=0.7)
    visible = (min(span.end_ns, end) - max(span.start_ns, start)) / max(end - start, 1)
    if what == "phase" and visible > 0.008 * len(span.name):
        middle = (max(span.start_ns, start) + min(span.end_ns, end)) / 2
        axes.text((middle - origin) / 1e6, y, span.name, ha="center", va="center", fontsize=9, clip_on=True)


def _row_name(trace: Trace, lane: int) -> str:
    if lane == PHASE_LANE:
        return f"rank {trace.rank}"
    return f"lane {lane}" + (" (caller)" if lane == 0 else "")
