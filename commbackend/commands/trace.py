"""Who computed, who copied, who waited, and when: recorded by the engine; drawn by Perfetto and by ``plots``.

A ``Trace`` is what ``Communicator.recorder`` calls after every step of a call. Its file is Chrome trace JSON: one
process a rank, one track a lane, arrows from every put to the wait it ends and from there to the product that follows.
A call is a span of the application's track that names its operation and layer. Times are ``time.monotonic_ns`` of the
host, so files of one host merge as they are; those of several hosts are aligned by wall clocks, as well as those agree.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import CommBackendError, ConfigError, Unavailable
from ..plan import CREDIT

__all__ = [
    "PHASE_LANE",
    "Exposed",
    "Overlap",
    "Span",
    "Trace",
    "call_name",
    "chrome",
    "exposed",
    "kind",
    "load",
    "main",
    "moves",
    "one_call",
    "overlap",
    "recording",
    "save",
]

#: Lane of spans that the application records itself (forward, backward, ...).
PHASE_LANE = -1
KINDS = ("gemm", "put", "get", "collective", "wait", "signal", "copy", "reduce", "phase")
_COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "collective")
# The engine's labels: "put x to 1 slot 2" or "signal 1 slot 2" at the writer, "wait 0 slot 2" at the reader.
_PUT = re.compile(r"(?:put .* to|signal) (\d+) slot (\d+)")
_WAIT = re.compile(r"wait (\d+) slot (\d+)")
# Copies into and out of symmetric memory are half of a transfer: peers read or wrote the other side.
_STAGING = re.compile(r"copy .*\.heap\b.*")
# The communicator's own: "call all_gather_matmul in decoder.0.fc1, backward".
_CALL = re.compile(r"call (\w+)(?: in (.*?))?(, backward)?")
_Flow: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """One step on one lane, from ``start_ns`` to ``end_ns`` of ``time.monotonic_ns``."""

    name: str
    lane: int
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)


def kind(name: str) -> str:
    """Return the kind of step a span's name begins with, one of ``KINDS``; "phase" is the application's own."""
    head = name.partition(" ")[0]
    if head in _COLLECTIVES:
        return "collective"
    return head if head in KINDS else "phase"


def moves(name: str) -> bool:
    """Whether the step a span's name speaks of moves bytes between ranks."""
    return kind(name) in ("put", "get", "collective") or _STAGING.fullmatch(name) is not None


def call_name(op: str, layer: str, phase: str) -> str:
    """Return the name of a call's span."""
    return f"call {op}" + f" in {layer}" * bool(layer) + ", backward" * (phase == "backward")


class Trace:
    """A recorder for one rank. Local; lanes call it from their own threads.

    Args:
        rank: Rank in the communicator's group, the trace's process number.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.spans: list[Span] = []
        #: Identity of the clock, and what to add to it to get Unix time.
        self.clock = _boot_id()
        self.wall_offset_ns = time.time_ns() - time.monotonic_ns()

    def __call__(self, name: str, lane: int, start_ns: int, end_ns: int, args: Mapping[str, Any] | None = None) -> None:
        """Record one step. Any thread; a single append, so it needs no lock."""
        self.spans.append(Span(name, lane, start_ns, end_ns, args or {}))

    @contextmanager
    def phase(self, name: str, **args: Any) -> Iterator[None]:
        """Record the body as a span of the application's own track."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self(name, PHASE_LANE, start, time.monotonic_ns(), args)

    def save(self, path: str | Path) -> None:
        """Write this rank's trace as Chrome trace JSON that ``load`` reads back."""
        save([self], path)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # not Linux: every file counts as another clock


def load(path: str | Path) -> list[Trace]:
    """Read a file that ``Trace.save`` or ``save`` wrote. Raises ConfigError naming the file if it is something else."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        traces: dict[int, Trace] = {}
        for head in raw["otherData"]["ranks"]:
            trace = traces[int(head["rank"])] = Trace(int(head["rank"]))
            trace.clock, trace.wall_offset_ns = str(head["clock"]), int(head["wall_offset_ns"])
        origin = int(raw["otherData"]["origin_ns"])
        for event in raw["traceEvents"]:
            if event["ph"] == "X":
                start = origin + round(event["ts"] * 1000)
                end = start + round(event["dur"] * 1000)
                span = Span(str(event["name"]), int(event["tid"]) - 1, start, end, dict(event["args"]))
                traces[int(event["pid"])].spans.append(span)
    except (OSError, KeyError, TypeError, ValueError) as e:
        raise ConfigError(f"{path} is not a trace of commbackend: {type(e).__name__}: {e}") from e
    return list(traces.values())


def chrome(traces: Sequence[Trace]) -> dict[str, Any]:
    """Merge traces of ranks into one Chrome trace: one process a rank, one track a lane, arrows put -> wait."""
    shift = _shifts(traces)
    origin = min((s.start_ns + shift[t.rank] for t in traces for s in t.spans), default=0)
    events: list[dict[str, Any]] = []
    puts: dict[_Flow, list[dict[str, Any]]] = {}
    waits: dict[_Flow, list[dict[str, Any]]] = {}
    for trace in traces:
        events.append(_named("process_name", trace.rank, 0, f"rank {trace.rank}"))
        for lane in sorted({s.lane for s in trace.spans}):
            label = "application" if lane == PHASE_LANE else f"lane {lane}" + (" (caller)" if lane == 0 else "")
            events.append(_named("thread_name", trace.rank, lane + 1, label))
        for span in trace.spans:
            begin = (span.start_ns + shift[trace.rank] - origin) / 1000
            duration = (span.end_ns - span.start_ns) / 1000
            event = {"ph": "X", "name": span.name, "cat": kind(span.name), "pid": trace.rank, "tid": span.lane + 1}
            event |= {"ts": begin, "dur": duration, "args": dict(span.args)}
            events.append(event)
            _note_flow(event, puts, waits)
    events += _arrows(puts, waits)
    events += _uses(events)
    clock, offset = (traces[0].clock, traces[0].wall_offset_ns) if traces else ("", 0)
    ranks = [{"rank": t.rank, "clock": clock, "wall_offset_ns": offset} for t in traces]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"ranks": ranks, "origin_ns": origin},
    }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _note_flow(
    event: dict[str, Any], puts: dict[_Flow, list[dict[str, Any]]], waits: dict[_Flow, list[dict[str, Any]]]
) -> None:
    """File a put or a wait under (writer, reader, word), the name both sides share."""
    rank, name = event["pid"], event["name"]
    if (put := _PUT.fullmatch(name)) and int(put[2]) != CREDIT:  # credits are for the call after the next
        puts.setdefault((rank, int(put[1]), int(put[2])), []).append(event)
    elif wait := _WAIT.fullmatch(name):
        waits.setdefault((int(wait[1]), rank, int(wait[2])), []).append(event)


def _arrows(
    puts: dict[_Flow, list[dict[str, Any]]], waits: dict[_Flow, list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Pair the n-th put of a word with the n-th wait for it: a put is met by one wait; ranks record the same calls."""
    number = 0
    for key in sorted(puts.keys() & waits.keys()):
        for sent, met in zip(puts[key], waits[key], strict=False):
            arrow = {"cat": "flow", "name": "put to wait", "id": number}
            number += 1
            left = sent["ts"] + sent["dur"]
            yield arrow | {"ph": "s", "pid": sent["pid"], "tid": sent["tid"], "ts": left}
            yield arrow | {
                "ph": "f",
                "bp": "e",
                "pid": met["pid"],
                "tid": met["tid"],
                "ts": max(left, met["ts"] + met["dur"]),
            }


def _uses(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """An arrow from the last wait of a lane before a product to that product."""
    found: list[dict[str, Any]] = []
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") in ("wait", "gemm"):
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for lane in lanes.values():
        lane.sort(key=lambda e: e["ts"])
        for wait, product in itertools.pairwise(lane):
            if (wait["cat"], product["cat"]) == ("wait", "gemm"):
                arrow = {"cat": "use", "name": "wait to GEMM", "id": len(found) // 2}
                arrow |= {"pid": wait["pid"], "tid": wait["tid"]}
                end = wait["ts"] + wait["dur"]
                found += [arrow | {"ph": "s", "ts": end}, arrow | {"ph": "f", "bp": "e", "ts": max(end, product["ts"])}]
    return found


def _shifts(traces: Sequence[Trace]) -> dict[int, int]:
    """What to add to each rank's times so that all stand on the first rank's clock."""
    if not traces:
        return {}
    first = traces[0]
    return {
        t.rank: 0 if t.clock == first.clock and t.clock else t.wall_offset_ns - first.wall_offset_ns for t in traces
    }


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much of the moving of bytes ran while this rank also multiplied.

    Attributes:
        gemm_ms, waiting_ms: Time at least one lane spent in a GEMM, in a wait.
        moving_ms: The same for puts, gets, collectives and copies into or out of symmetric memory. What GEMMs and sums
            read from peers' memory by themselves is part of their own time.
        hidden_ms: The part of ``moving_ms`` during which a GEMM ran too.
    """

    gemm_ms: float
    moving_ms: float
    waiting_ms: float
    hidden_ms: float

    @property
    def share(self) -> float:
        """``hidden_ms / moving_ms``, or 0 when nothing moved."""
        return self.hidden_ms / self.moving_ms if self.moving_ms else 0.0


def overlap(spans: Iterable[Span]) -> Overlap:
    """Measure what one rank's spans overlapped."""
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for span in spans:
        what = "moving" if moves(span.name) else kind(span.name)
        by_kind.setdefault(what, []).append((span.start_ns, span.end_ns))
    gemm, moving, waiting = (_union(by_kind.get(k, [])) for k in ("gemm", "moving", "wait"))
    hidden = sum(max(0, min(e, f) - max(s, t)) for s, e in moving for t, f in gemm)
    return Overlap(_length(gemm) / 1e6, _length(moving) / 1e6, _length(waiting) / 1e6, hidden / 1e6)


@dataclass(frozen=True, slots=True)
class Exposed:
    """Calls of one layer on one rank: how many, how long, and how much of it ran without a product."""

    calls: int
    call_ms: float
    exposed_ms: float


def exposed(spans: Iterable[Span]) -> dict[str, Exposed]:
    """Return layer -> what its calls exposed; calls outside layers are filed under their operation."""
    spans = list(spans)
    products = _union([(s.start_ns, s.end_ns) for s in spans if kind(s.name) == "gemm"])
    starts = [start for start, _ in products]
    found: dict[str, Exposed] = {}
    for span in spans:
        made = _CALL.fullmatch(span.name)
        if made is None:
            continue
        name = (made[2] or made[1]) + (made[3] or "")
        near = products[max(0, bisect.bisect(starts, span.start_ns) - 1) : bisect.bisect(starts, span.end_ns)]
        busy = sum(max(0, min(e, span.end_ns) - max(s, span.start_ns)) for s, e in near)
        length = span.end_ns - span.start_ns
        so_far = found.get(name, Exposed(0, 0.0, 0.0))
        found[name] = Exposed(
            so_far.calls + 1, so_far.call_ms + length / 1e6, so_far.exposed_ms + (length - busy) / 1e6
        )
    return found


def one_call(traces: Sequence[Trace]) -> tuple[str, list[Trace]]:
    """The last call of the layer that exposes most: its name, and every rank's spans within it. ("", []) if none."""
    first = next(iter(traces), None)
    by_layer = exposed(first.spans) if first is not None else {}
    if first is None or not by_layer:
        return "", []
    worst = max(by_layer, key=lambda name: by_layer[name].exposed_ms)
    calls = [s for s in first.spans if (m := _CALL.fullmatch(s.name)) and (m[2] or m[1]) + (m[3] or "") == worst]
    number = sum(s.name == calls[-1].name for s in calls) - 1
    found = []
    for trace in traces:
        theirs = [s for s in trace.spans if s.name == calls[-1].name]
        if number < len(theirs):
            window = theirs[number]
            part = Trace(trace.rank)
            part.spans = [s for s in trace.spans if s.start_ns >= window.start_ns and s.end_ns <= window.end_ns]
            found.append(part)
    return calls[-1].name, found


def _union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[tuple[int, int]]) -> int:
    return sum(e - s for s, e in intervals)


@contextmanager
def recording(path: str | Path) -> Iterator[Trace]:
    """Record every call of the body, on communicators that are there or are made in it, and write it to ``path``.

    Local; for a picture of all ranks each records to a file of its own: ``rank0.json``, ... of one folder, for
    ``commbackend trace --merge``.
    """
    from ..communicator import Communicator, communicators
    from ..config import launcher

    alive = communicators()
    trace = Trace(alive[0].rank if alive else launcher().rank)
    before = {comm: comm.recorder for comm in alive}
    default, Communicator.default_recorder = Communicator.default_recorder, trace
    for comm in alive:
        comm.recorder = trace
    try:
        yield trace
    finally:
        Communicator.default_recorder = default
        for comm in communicators():
            comm.recorder = before.get(comm, default)
        trace.save(path)


# -- the command ------------------------------------------------------------------------------------------------------


def save(traces: Sequence[Trace], path: str | Path) -> None:
    """Write the merged traces as Chrome trace JSON, for Perfetto and ``load``."""
    Path(path).write_text(json.dumps(chrome(traces)), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """``commbackend trace``: record a script's communicators, or merge and measure what was recorded."""
    parser = argparse.ArgumentParser(
        prog="commbackend trace",
        description="Record every step of a script's communicators: commbackend trace [--out DIR] -- script.py ARGS "
        "(for several ranks: torchrun --nproc-per-node 2 -m commbackend trace -- script.py, or mpirun -n 2 commbackend "
        "trace -- script.py). Then merge and measure: commbackend trace --merge DIR.",
    )
    parser.add_argument("--out", default="trace-output", help="folder for rank0.json... (default trace-output)")
    parser.add_argument(
        "--merge", metavar="DIR", help="merge the files of DIR into DIR/trace.json and DIR/timeline.png"
    )
    parser.add_argument("--json", action="store_true", help="with --merge: print the overlap of every rank as JSON")
    parser.add_argument("script", nargs="?", help="a Python script, run as __main__ in this process")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    if (options.merge is None) == (options.script is None):
        parser.error("give either -- SCRIPT or --merge DIR")
    try:
        if options.merge is not None:
            return _merge(Path(options.merge), as_json=options.json)
        return _record(options.script, options.args, Path(options.out))
    except CommBackendError as e:
        print(f"commbackend trace: {type(e).__name__}: {e}", file=sys.stderr)
        return 2


def _record(script: str, arguments: Sequence[str], out: Path) -> int:
    import runpy

    if not Path(script).is_file():
        raise ConfigError(f"no such script: {script}")
    from ..communicator import Communicator
    from ..config import launcher

    out.mkdir(parents=True, exist_ok=True)
    launch = launcher()
    trace = Trace(launch.rank)
    path = out / f"rank{trace.rank}.json"
    if trace.rank == 0:  # ranks that an earlier, larger run had would be merged with this one's
        for old in out.glob("rank*.json"):
            if old.stem[4:].isdecimal() and int(old.stem[4:]) >= launch.size:
                old.unlink()
    saved_argv, saved_path = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = [script, *arguments], [str(Path(script).resolve().parent)]
    Communicator.default_recorder = trace
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        Communicator.default_recorder = None
        sys.argv, sys.path[:] = saved_argv, saved_path
        trace.save(path)  # also when the script failed: then one wants to look all the more
        print(f"commbackend trace: {len(trace.spans)} steps of rank {trace.rank} in {path}", file=sys.stderr)
    return 0


def _merge(folder: Path, *, as_json: bool) -> int:
    paths = sorted(folder.glob("rank*.json"))
    if not paths:
        raise ConfigError(f"{folder} holds no rank*.json")
    traces = sorted((t for p in paths for t in load(p)), key=lambda t: t.rank)
    save(traces, folder / "trace.json")
    written = [str(folder / "trace.json")]
    try:
        from . import plots

        plots.timeline(traces, folder / "timeline.png", title=f"Timeline of {len(traces)} ranks")
        written.append(str(folder / "timeline.png"))
        name, part = one_call(traces)
        if part:
            plots.timeline(part, folder / "call.png", title=name)
            written.append(str(folder / "call.png"))
    except Unavailable as e:
        print(f"no picture: {e}", file=sys.stderr)
    found = {t.rank: overlap(t.spans) for t in traces}
    layers = {t.rank: exposed(t.spans) for t in traces}
    if as_json:
        rows = [
            {"rank": r, **asdict(o), "share": o.share, "layers": {n: asdict(e) for n, e in layers[r].items()}}
            for r, o in found.items()
        ]
        print(json.dumps({"ranks": rows, "written": written}, indent=2))
        return 0
    for rank, o in found.items():
        print(
            f"rank {rank}: GEMMs {o.gemm_ms:.1f} ms, moving {o.moving_ms:.1f} ms ({o.share:.0%} of it under a GEMM), "
            f"waits {o.waiting_ms:.1f} ms"
        )
    for line in _by_layer(layers):
        print(line)
    print(f"written: {', '.join(written)} (open trace.json in Perfetto: ui.perfetto.dev)")
    return 0


def _by_layer(layers: Mapping[int, Mapping[str, Exposed]]) -> Iterator[str]:
    """One line a layer: the rank that exposed most, the layers that expose most first."""
    known = dict.fromkeys(name for of in layers.values() for name in of)
    names = {name: max((of[name].exposed_ms, r) for r, of in layers.items() if name in of) for name in known}
    if names:
        yield "exposed (time of calls without a product), slowest rank:"
    for name, (ms, rank) in sorted(names.items(), key=lambda item: -item[1][0]):
        e = layers[rank][name]
        yield f"  {name}: {ms:.2f} of {e.call_ms:.2f} ms in {e.calls} calls, rank {rank}"
