"""Pictures of benchmark files, as PNG. Needs matplotlib, imported only when used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import Unavailable
from .names import CUBLAS, GEMM, MEMCPY, MOVE, MPI, NEW, OURS, SCALED, SEQUENCE, SEQUENCE_NEW
from .report import nbytes_text

__all__ = ["draw"]

#: One colour a thing measured, ours the strongest; told apart also by readers who confuse red and green.
COLOURS: Mapping[str, str] = {
    OURS: "#004488",
    NEW: "#6699cc",
    SEQUENCE: "#ddaa33",
    SEQUENCE_NEW: "#eecc66",
    "gloo": "#bb5566",
    "nccl": "#bb5566",
    MPI: "#997700",
    MEMCPY: "#888888",
    GEMM: "#555555",
    MOVE: "#bbbbbb",
}


def draw(report: Mapping[str, Any], path: str | Path) -> None:
    """Draw one benchmark file: lines over sizes for collectives, grouped bars for the others.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as e:
        raise Unavailable("matplotlib is not installed", "pip install 'commbackend[viz]'") from e
    matplotlib.use("Agg")  # files only: no display is needed, and none is opened
    from matplotlib import pyplot

    runs = [run for run in report["runs"] if run["cases"]]
    kind = report["kind"]
    figure = _lines(pyplot, runs) if kind == "collectives" else _bars(pyplot, runs, kind)
    machine = report["machine"]
    about = ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine.get("gpus", [])[:1]])
    figure.suptitle(f"commbackend bench {kind}: {about}", fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    if kind == "overlap":
        _heat_map(pyplot, runs, Path(path).with_stem(f"{Path(path).stem}-heat"), about)


def _lines(pyplot: Any, runs: list[Mapping[str, Any]]) -> Any:
    """One panel for every op and number of ranks; both axes logarithmic."""
    ops = list(dict.fromkeys(c["op"] for run in runs for c in run["cases"])) or ["-"]
    shape = (max(len(runs), 1), len(ops))
    figure, grid = pyplot.subplots(
        *shape, figsize=(4.6 * shape[1], 3.6 * shape[0] + 0.6), squeeze=False, layout="constrained"
    )
    for run, row in zip(runs, grid, strict=False):
        for op, axes in zip(ops, row, strict=True):
            cases = [c for c in run["cases"] if c["op"] == op]
            for name in dict.fromkeys(n for c in cases for n in c["samples"]):
                found = [(c["shard_nbytes"], c["samples"][name]) for c in cases if name in c["samples"]]
                sizes, colour = [size for size, _ in found], COLOURS.get(name)
                style = "--" if name in (NEW, MEMCPY) else "-"
                axes.plot(sizes, [s["median_us"] for _, s in found], style, marker="o", color=colour, label=name, ms=3)
                low, high = ([s[p] for _, s in found] for p in ("p10_us", "p90_us"))
                axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
            ticks = sorted({c["shard_nbytes"] for c in cases})
            axes.set(xscale="log", yscale="log", title=f"{op}, {run['ranks']} ranks, {run['transport']}")
            axes.set_xticks(ticks, [nbytes_text(t) for t in ticks], rotation=45, fontsize=7)
            axes.set_xticks([], minor=True)
            axes.set(xlabel="shard", ylabel="us a call, slowest rank")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
    return figure


def _bars(pyplot: Any, runs: list[Mapping[str, Any]], kind: str) -> Any:
    """One panel for every number of ranks and, for products, every op; one group of bars a case."""
    panels = [
        (run, op) for run in runs for op in ([""] if kind == "host" else dict.fromkeys(c["op"] for c in run["cases"]))
    ]
    longest = max((len(_cases(run, op)) for run, op in panels), default=1)
    rows = max(len(panels), 1)
    size = (max(8.0, 2.0 + 0.7 * longest), 3.6 * rows + 0.5)
    figure, grid = pyplot.subplots(rows, 1, figsize=size, squeeze=False, layout="constrained")
    for (run, op), axes in zip(panels, grid[:, 0], strict=False):
        cases = _cases(run, op)
        groups = [_group(case, kind) for case in cases]
        names = list(dict.fromkeys(n for g in groups for n in g))
        width = 0.8 / max(len(names), 1)
        for j, name in enumerate(names):
            at = [i + (j - (len(names) - 1) / 2) * width for i, g in enumerate(groups) if name in g]
            axes.bar(at, [g[name] for g in groups if name in g], width, label=name, color=COLOURS.get(name))
        axes.set_xticks(range(len(groups)), [_label(c, op) for c in cases], fontsize=7, rotation=45, ha="right")
        axes.set(ylabel=_UNITS[kind], title=f"{op} {run['ranks']} ranks, {run['transport']}".strip())
        if kind in ("overlap", "gemm"):
            axes.axhline(1.0, color="#222222", linewidth=0.8, linestyle=":")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _heat_map(pyplot: Any, runs: list[Mapping[str, Any]], path: Path, about: str) -> None:
    """Sequence over ours, one panel for every op and mode: layers from top to bottom, M from left to right."""
    cases = [(run, c) for run in runs for c in run["cases"] if SEQUENCE in c["samples"] and OURS in c["samples"]]
    panels = list(dict.fromkeys((c["op"], c["mode"]) for _, c in cases))
    if not panels:
        return
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(1.5 + 3.4 * len(panels), 4.5), squeeze=False, layout="constrained"
    )
    for (op, mode), axes in zip(panels, grid[0], strict=True):
        here = [(run, c) for run, c in cases if (c["op"], c["mode"]) == (op, mode)]
        rows = list(dict.fromkeys(f"{c['model']} tp{c['tp']} {c['dtype']}, {run['ranks']} ranks" for run, c in here))
        columns = sorted({c["m"] for _, c in here})
        values = [[float("nan")] * len(columns) for _ in rows]
        for run, c in here:
            row = rows.index(f"{c['model']} tp{c['tp']} {c['dtype']}, {run['ranks']} ranks")
            ratio = c["samples"][SEQUENCE]["median_us"] / c["samples"][OURS]["median_us"]
            values[row][columns.index(c["m"])] = ratio
            axes.text(columns.index(c["m"]), row, f"{ratio:.2f}", ha="center", va="center", fontsize=8)
        axes.imshow(values, cmap="PuOr_r", vmin=0.5, vmax=1.5, aspect="auto")
        axes.set_xticks(range(len(columns)), [f"M{m}" for m in columns], fontsize=7)
        axes.set_yticks(range(len(rows)), rows, fontsize=7)
        axes.set_title(f"{op}\n{mode}", fontsize=8)
    figure.suptitle(f"sequence / commbackend (above 1: overlap wins): {about}", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


_UNITS = {"overlap": "time / max(GEMM, communication)", "host": "us a call", "memory": "MiB a rank"}
_UNITS["gemm"] = "time / the library's product, or us"


def _cases(run: Mapping[str, Any], op: str) -> list[Mapping[str, Any]]:
    return [case for case in run["cases"] if op in ("", case["op"])]


def _group(case: Mapping[str, Any], kind: str) -> dict[str, float]:
    """The bars of one case: bytes, microseconds, or times over the longer of product and communication."""
    if kind == "memory":
        return {"operand": case["operand_nbytes"] / 2**20, "symmetric": case["symmetric_nbytes"] / 2**20}
    found = {name: float(s["median_us"]) for name, s in case["samples"].items()}
    if kind == "gemm":
        unit = found.get(CUBLAS) or next((t for n, t in found.items() if n.startswith(SCALED)), 1.0)
        return {name: t / unit for name, t in found.items() if name != CUBLAS}
    if kind == "host":
        return found
    # gloo is so far off that nothing else could be told apart beside it; the table has it.
    shown = (GEMM, MOVE, SEQUENCE, OURS, "nccl")
    unit = max(found[GEMM], found[MOVE])
    return {name: found[name] / unit for name in shown if name in found}


def _label(case: Mapping[str, Any], op: str) -> str:
    fields = [str(case[f]) for f in ("model", "dtype", "mode") if f in case]
    return " ".join([*fields, f"M{case['m']}" if "m" in case else ""]).strip() if op else str(case["op"])
