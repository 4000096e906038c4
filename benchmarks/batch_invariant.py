"""What ``batch_invariant=True`` costs on a CPU: products by blocks of one shape against the library's own.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/batch_invariant.py [FILE]

Prints milliseconds of each (the best of several runs) and their ratio; with FILE also writes them as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from commbackend.commands.doctor import versions
from commbackend.contract import GemmProblem, GemmSegment
from commbackend.gemm.torch_blocks import TorchBlocks
from commbackend.gemm.torch_mm import TorchMM

SHAPES = [(m, k, n) for k, n in ((1024, 1024), (4096, 1024), (1024, 4096)) for m in (1, 8, 32, 100, 512, 2048)]


def best_ms(provider: TorchMM, dtype: torch.dtype, m: int, k: int, n: int) -> float:
    noise = torch.Generator().manual_seed(1)
    a, b = (torch.randn(r, k, generator=noise).to(dtype) for r in (m, n))
    name, out = str(dtype)[6:], torch.empty(m, n, dtype=dtype)
    kernel, segment = provider.prepare(GemmProblem(m, n, k, name, name, "cpu")), [GemmSegment(a, b, out)]
    kernel(segment)
    found, end = [], time.perf_counter() + 0.4
    while len(found) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        kernel(segment)
        found.append(time.perf_counter() - start)
    return min(found) * 1e3


def main() -> None:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for m, k, n in SHAPES:
            plain, blocks = (best_ms(p, dtype, m, k, n) for p in (TorchMM(), TorchBlocks()))
            row = {"dtype": str(dtype)[6:], "m": m, "k": k, "n": n, "plain_ms": plain, "blocks_ms": blocks}
            rows.append(row | {"ratio": blocks / plain})
            print(
                f"{row['dtype']:<9} {m:>5} x {k:>4} x {n:>4}  {plain:8.3f} ms {blocks:8.3f} ms  {blocks / plain:5.2f}x"
            )
    if len(sys.argv) > 1:
        about = {
            "command": "OMP_NUM_THREADS=1 python benchmarks/batch_invariant.py",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "load": os.getloadavg()},
            "versions": versions(),
            "rows": rows,
        }
        Path(sys.argv[1]).write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
