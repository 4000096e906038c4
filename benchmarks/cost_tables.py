"""Assemble ``commbackend/tuning/cost_tables``: measured figures from ``results/``, published rates for the rest.

``python benchmarks/cost_tables.py`` writes the tables that the package ships. Figures of one kind that stand here by
themselves were measured on the same two H200s on 2026-11-30 with torch 2.11, CUDA events, medians, slowest rank.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from pathlib import Path

from commbackend.bench.names import GEMM
from commbackend.tuning.costs import CostTable

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
MIB, GIB = 1 << 20, float(1 << 30)
#: Files whose products count: back to back, so that the chip is as warm as in training.
OVERLAP = ("h200x2-overlap-polling-never.json", "h200x2-overlap-polling-always.json")

#: MiB -> GiB/s of a copy engine that pushes to the peer.
PUSHED = {4: 173, 16: 272, 64: 342, 256: 362}
#: Bytes a rank sends -> microseconds, NCCL 2.28.9 all-gather and reduce-scatter of two ranks.
NCCL = {0.25: 11.7, 2: 34, 4: 40, 8: 55, 16: 93, 24: 129, 32: 162, 64: 308, 96: 458, 128: 618}
#: (m, n, k, us) of cuBLAS in bf16.
CUBLAS = (
    *((64, 3584, 4096, 12.5), (64, 4096, 1792, 9.8), (64, 7168, 8192, 34.7), (64, 8192, 3584, 21.8)),
    *((64, 12288, 12288, 76.7), (64, 12288, 6144, 43.8), (64, 13312, 16384, 108.7), (64, 16384, 6656, 57.8)),
    *((512, 3584, 4096, 24.8), (512, 4096, 1792, 16.2), (512, 7168, 8192, 91.5), (512, 8192, 3584, 43.8)),
    *((512, 12288, 12288, 213.0), (512, 12288, 6144, 113.8), (512, 13312, 16384, 326.8), (512, 16384, 6656, 152.2)),
    *((2048, 12288, 12288, 783.0), (2048, 12288, 6144, 405.3), (2048, 13312, 16384, 1169.5)),
    *((2048, 16384, 6656, 589.2), (8192, 12288, 12288, 3432.0), (8192, 12288, 6144, 1704.0)),
    *((8192, 13312, 16384, 5332.1), (8192, 16384, 6656, 2601.3)),
)


def products() -> list[tuple[int, int, int, float]]:
    """Every measured product once: the median of what the files and ``CUBLAS`` say."""
    found: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for name in OVERLAP:
        for run in json.loads((RESULTS / "2026-11-30" / name).read_text())["runs"]:
            for case in run["cases"]:
                found[case["m"], case["n"], case["k"]].append(case["samples"][GEMM]["median_us"])
    for case in json.loads((RESULTS / "2026-11-30/h200-gemm-flags.json").read_text())["results"]:
        if "m" in case and case["m"] != 4096:  # that session ran hotter: they would bend the others
            shape = case["m"], case["n"], case["k"]
            if shape not in found:
                found[shape].append(statistics.median(case["back_to_back_us"]["cublas"]))
    for m, n, k, us in CUBLAS:
        if (m, n, k) not in found:
            found[m, n, k].append(us)
    return [(*shape, round(statistics.median(us), 1)) for shape, us in sorted(found.items())]


def h200() -> CostTable:
    """Two H200s of one host, as measured; the network as its vendor says."""
    link = [(0.0, 11.0), *((float(m * MIB), round(m * MIB / (rate * GIB) * 1e6, 1)) for m, rate in PUSHED.items())]
    local = [(0.0, 2.0), (float(64 * MIB), round(64 * MIB / 1.9e12 * 1e6, 1))]
    return CostTable(
        device="NVIDIA H200",
        sources={
            "gemm": "measured: benchmarks/results/2026-11-30 (overlap and gemm-flags, back to back) and cuBLAS 13.1 in"
            " the same session",
            "copy.link": "measured: copy engine to the peer over 18 NVLinks, 4 to 256 MiB; below that the line goes on",
            "copy.local": "estimated: half of the published 4.8 TB/s, since a copy reads and writes, at 80 %",
            "copy.network": "published: 400 Gbit/s a GPU (NDR InfiniBand), 5 us; never measured",
            "collective": "measured: NCCL 2.28.9, two ranks, multicast off",
            "launch_us, signal_us, wait_us, flags.link": "fitted to benchmarks/results/2026-11-30 (overlap)",
            "flags.network": "published: a few microseconds; never measured",
            "reduce_gbyte_s": "fitted to benchmarks/results/2026-11-30 (overlap)",
            "gemm_slowdown": "measured: x1.03 while a copy engine pushes at full rate",
            "polling_factor": "measured: benchmarks/results/2026-11-30/h200-gemm-flags.json",
        },
        gemm={"bfloat16": products()},
        copy={"local": local, "link": link, "network": [(0.0, 5.0), (float(256 * MIB), 5.0 + 256 * MIB / 50e9 * 1e6)]},
        collective=[(m * MIB, us) for m, us in NCCL.items()],
        launch_us=2.0,
        signal_us=1.5,
        wait_us=1.5,
        flags={"link": 2.0, "network": 5.0},
        reduce_gbyte_s=2800.0,
        gemm_slowdown=1.03,
        polling_factor=1.1,
        tile=(128, 256),
        units=132,
        base_us=4.0,
    )


def gb200() -> CostTable:
    """A rack of NVLink: nothing measured, every rate as published."""
    dense = 2500e12  # bf16 without sparsity
    shapes = [(m, n, k) for m in (128, 1024, 8192) for n in (1024, 8192) for k in (1024, 8192)]
    published = "published: "
    return CostTable(
        device="NVIDIA GB200",
        sources={
            "gemm": published + "2.5 PFLOP/s dense bf16, always reached",
            "copy.link": published + "NVLink 5, 900 GB/s a direction, always reached",
            "copy.network": published + "400 Gbit/s a GPU",
            "copy.local": published + "8 TB/s, half of it",
            "the rest": "as measured on H200",
        },
        gemm={"bfloat16": [(m, n, k, 4.0 + 2.0 * m * n * k / dense * 1e6) for m, n, k in shapes]},
        copy={
            "local": [(0.0, 2.0), (float(GIB), GIB / 4e12 * 1e6)],
            "link": [(0.0, 5.0), (float(GIB), 5.0 + GIB / 900e9 * 1e6)],
            "network": [(0.0, 5.0), (float(GIB), 5.0 + GIB / 50e9 * 1e6)],
        },
        collective=[(0.0, 10.0), (float(GIB), 10.0 + GIB / 900e9 * 1e6)],
        launch_us=2.0,
        signal_us=1.5,
        wait_us=1.5,
        flags={"link": 2.0, "network": 5.0},
        reduce_gbyte_s=4000.0,
        gemm_slowdown=1.03,
        polling_factor=1.1,
        tile=(128, 256),
        units=148,
        base_us=4.0,
    )


def main() -> None:
    """Write the shipped tables."""
    for name, table in (("h200", h200()), ("gb200-published", gb200())):
        path = ROOT / "commbackend/tuning/cost_tables" / f"{name}.json"
        path.write_text(_text(table))
        assert CostTable.from_json(path.read_text()) == CostTable.from_json(table.to_json())
        print(f"{path.relative_to(ROOT)}: {sum(len(v) for v in table.gemm.values())} products")


def _text(table: CostTable) -> str:
    """The table with one measured point a line."""
    raw = {"format": json.loads(table.to_json())["format"], **dataclasses.asdict(table)}
    lines = []
    for key, value in raw.items():
        if isinstance(value, dict) and value and isinstance(next(iter(value.values())), (list, tuple)):
            inner = [
                f"  {json.dumps(k)}: [\n" + ",\n".join(f"   {json.dumps(list(p))}" for p in points) + "\n  ]"
                for k, points in value.items()
            ]
            lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(inner) + "\n }")
        elif isinstance(value, dict):
            inner = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
            lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(inner) + "\n }" if inner else f' "{key}": {{}}')
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
