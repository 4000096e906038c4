"""``commbackend bench model FILE...``: what the cost model predicts beside what ``bench overlap`` measured.

On GPUs times are predicted from a cost table (``--costs``, default the shipped one of the device). Files of CPUs bring
their own: products as the file's GEMM column has them, copies as ``--copies`` (a file of ``bench collectives``) has
them. So what is tested is the model of plans: lanes, chunks, waits, and products cut into blocks that nobody measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import schedules
from ..contract import Caps
from ..errors import ConfigError
from ..plan import ITEMSIZE, Knobs, Problem
from ..tuning.cost import predict, stock_us
from ..tuning.costs import CostTable, load_table, shipped
from .names import GEMM, MEMCPY, MOVE, OURS, SEQUENCE
from .report import Table, load, text

__all__ = ["Checked", "checked", "main", "summary", "table_of"]

_CUDA = Caps("cuda", one_sided=True, peer_view=True, stream_ordered=True, copy_engine=True, device_signal=True)
_CPU = Caps("cpu", one_sided=True, peer_view=True, copy_lanes=0)
#: Processes of several hosts: they put, and a copy lane does it.
_HOSTS = Caps("cpu", one_sided=True)
#: What a message between hosts takes besides its bytes, microseconds.
_MESSAGE_US = 100.0
#: Bytes a second (1e9) that a sum reads and writes on a CPU core, by element size: 2-byte types are widened first.
_CPU_SUMS = {8: 18.0, 4: 18.0, 2: 6.0, 1: 3.0}


@dataclass(frozen=True, slots=True)
class Checked:
    """One time that was measured, and its prediction, microseconds."""

    case: str
    what: str
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_us / self.measured_us - 1


def main(arguments: Sequence[str]) -> int:
    """Compare and print. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="commbackend bench model", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="written by commbackend bench overlap --json")
    parser.add_argument("--costs", default="", help="a shipped cost table or a file (default: the device's)")
    parser.add_argument("--copies", metavar="FILE", help="a file of bench collectives of the same CPU")
    parser.add_argument("--link-gbit-s", type=float, help="for files of several hosts: what joins them, Gbit/s")
    options = parser.parse_args(list(arguments))
    copies = load(options.copies) if options.copies else None
    found: list[Checked] = []
    for path in options.files:
        report = load(path)
        if report["kind"] != "overlap":
            raise ConfigError(f"{path} is of bench {report['kind']}: the model is compared with bench overlap")
        found += checked(
            report, load_table(options.costs) if options.costs else table_of(report, copies, options.link_gbit_s)
        )
    print(text(_table(found)))
    for line in summary(found):
        print(line)
    return 0


def table_of(
    report: Mapping[str, Any], copies: Mapping[str, Any] | None, link_gbit_s: float | None = None
) -> CostTable:
    """The cost table for a file. Raises ConfigError if there is none."""
    gpus = report["machine"].get("gpus", [])
    if gpus:
        for name in shipped():
            if (table := load_table(name)).device == gpus[0]:
                return table
        raise ConfigError(f"no cost table of {gpus[0]} is shipped: give --costs (commbackend tune --out FILE)")
    if copies is None:
        raise ConfigError("a file of a CPU needs --copies, a file of bench collectives of the same machine")
    products: dict[str, list[tuple[int, int, int, float]]] = {}
    for case in (c for run in report["runs"] for c in run["cases"]):
        shape = (case["m"], case["n"], case["k"])
        products.setdefault(case["dtype"], []).append((*shape, case["samples"][GEMM]["median_us"]))
    points: dict[int, float] = {}
    for case in (c for run in copies["runs"] if run["ranks"] == 2 for c in run["cases"]):
        size, us = int(case["shard_nbytes"]), float(case["samples"][MEMCPY]["median_us"])
        points[size] = min(us, points.get(size, us))
    moved = [(0.0, 2.0), *((float(n), us) for n, us in sorted(points.items()))]
    sources = {"gemm": "the file", "copy": "memcpy of bench collectives"}
    link = moved
    if link_gbit_s is not None:
        link = [(0.0, _MESSAGE_US), (float(1 << 30), _MESSAGE_US + (1 << 30) * 8 / link_gbit_s / 1e3)]
    table = CostTable(report["machine"]["cpu"], sources, products, {"local": moved, "link": link})
    return CostTable(**{**_fields(table), "launch_us": 3.0, "signal_us": 2.0, "wait_us": 2.0, "flags": {"link": 5.0}})


def _fields(table: CostTable) -> dict[str, Any]:
    return {name: getattr(table, name) for name in table.__dataclass_fields__}


def checked(report: Mapping[str, Any], table: CostTable) -> list[Checked]:
    """Every time of a file that the model can predict."""
    return [c for run in report["runs"] for case in run["cases"] for c in _of_case(run, case, table)]


def _of_case(run: Mapping[str, Any], case: Mapping[str, Any], table: CostTable) -> Iterator[Checked]:
    size, cuda = int(run["ranks"]), run["device"] == "cuda"
    caps = _CUDA if cuda else _CPU if run["transport"] == "shm" else _HOSTS
    rows = (case["m"] // size,) * size
    problem = Problem(case["op"], rows, k=case["k"], n=(case["n"],), dtype=case["dtype"])
    if not cuda:
        table = CostTable(**{**_fields(table), "reduce_gbyte_s": _CPU_SUMS[ITEMSIZE[case["dtype"]]]})
    plain = {"all_gather_matmul": "all_gather", "matmul_reduce_scatter": "reduce_scatter"}.get(case["op"], "all_reduce")
    moved = Problem(plain, rows, k=case["k"] if plain == "all_gather" else case["n"], dtype=case["dtype"])
    usual = schedules.default_knobs(moved, caps)
    named = {OURS: (problem, _knobs(problem, caps, case["schedule"])), MOVE: (moved, usual)}
    named[SEQUENCE] = (problem, Knobs("sequence", 1, usual.lanes))
    label = f"{case['op']} {case['m']}x{case['k']}x{case['n']} {case['dtype']} {case['mode']}"
    for what, (call, knobs) in named.items():
        sample = case["samples"].get(what)
        if sample is not None and schedules.supports(call, caps, knobs) is None:
            schedule = f" {knobs}" if what == OURS else ""
            yield Checked(label, what + schedule, sample["median_us"], predict(call, caps, knobs, table).time_us)
    if cuda and "nccl" in case["samples"]:
        yield Checked(label, "nccl", case["samples"]["nccl"]["median_us"], stock_us(problem, table))


def _knobs(problem: Problem, caps: Caps, said: str) -> Knobs:
    """The knobs that a file names, in the form that they are chosen in."""
    name, chunks, lanes = said.split()[0].split("/")[:3]
    polls = "polls" in said
    knobs = schedules.default_knobs(problem, caps, polls, always=polls)
    if (knobs.schedule, knobs.chunks, knobs.lanes, knobs.polls) == (name, int(chunks), int(lanes), polls):
        return knobs
    return Knobs(name, int(chunks), int(lanes), polls)


def _table(found: Sequence[Checked]) -> Table:
    table = Table("measured and predicted", ("case", "what", "measured us", "predicted us", "error"))
    for c in found:
        times = (f"{c.measured_us:,.1f}", f"{c.predicted_us:,.1f}", f"{c.error:+.1%}")
        table.rows.append((c.case, c.what, *times))
    return table


def summary(found: Sequence[Checked]) -> list[str]:
    """Median and worst error of everything, and of each kind of time."""
    groups: dict[str, list[Checked]] = {"everything": list(found)}
    for c in found:
        groups.setdefault(c.what.split(" ")[0], []).append(c)
    lines = []
    for name, group in groups.items():
        worst = max(group, key=lambda c: abs(c.error))
        median = statistics.median(abs(c.error) for c in group)
        lines.append(f"{name}: {len(group)} times, median error {median:.1%}, worst {worst.error:+.1%} ({worst.case})")
    return lines
