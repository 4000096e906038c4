"""What single CUDA driver calls and torch calls cost the host on this GPU, microseconds, one process, back to back.

    python benchmarks/driver_calls.py [--json FILE]

``commbackend/cuda_prepared.py`` is built on these figures: batches of stream memory operations cost hardly more than
one of them, and a launch less than a copy. (They are the least a call can cost: within a program all of them take
about twice as long.)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from commbackend.gpu.copy_kernels import Kernels
from commbackend.gpu.driver import Driver
from commbackend.gpu.prepared import _MemOp

CALLS, ROUNDS = 400, 5


def host_us(call: Callable[[], object]) -> float:
    samples = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter() - start) / CALLS * 1e6)
        torch.cuda.synchronize()
    return round(statistics.median(samples), 2)


def cases() -> dict[str, Callable[[], object]]:
    driver = Driver(torch.cuda.current_device())
    driver.open()
    kernels, stream = Kernels(driver), torch.cuda.Stream(priority=-1)
    words = torch.zeros(64, dtype=torch.int64, device="cuda")
    memory = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    word, at, s = words.data_ptr(), memory.data_ptr(), stream.cuda_stream
    torch.cuda.synchronize()

    def batch(count: int) -> Callable[[], object]:
        params = (_MemOp * count)()
        for i, param in enumerate(params):
            param.operation, param.address = 5 if i % 2 else 4, word + 8 * i
        return lambda: driver.memops(ctypes.addressof(params), count, s)

    event, other = torch.cuda.Event(), torch.cuda.Stream()
    x, w, out = (torch.randn(16, 64, device="cuda") for _ in range(3))
    square = torch.randn(64, 64, device="cuda")
    return {
        "copy of 4 KiB": lambda: driver.copy(at, at + 65536, 4096, s),
        "copy of 512 KiB": lambda: driver.copy(at, at + (1 << 19), 1 << 19, s),
        "write_value": lambda: driver.write_value(word, 0, s),
        "wait_value, satisfied": lambda: driver.wait_value(word, 0, s),
        **{f"batch of {n} stream memory operations": batch(n) for n in (1, 2, 4, 8)},
        "kernel that copies and raises": lambda: kernels.put(at, 4096, at + 65536, 4096, 4096, 1, word + 256, 0, s),
        "guard kernel": lambda: kernels.guard(at, 4096, 4096, 1, word + 264, s),
        "event: record and wait": lambda: (event.record(stream), other.wait_event(event)),
        "torch.mm, out given": lambda: torch.mm(x, square, out=out),
        "as_strided": lambda: out.as_strided((8, 64), (64, 1), 512),
        "t": lambda: w.t(),
        "new_empty": lambda: x.new_empty((16, 64)),
        "torch.empty": lambda: torch.empty((16, 64), dtype=torch.float32, device="cuda"),
        "torch.cuda.current_stream": lambda: torch.cuda.current_stream(0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    for name, call in cases().items():
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        found[name] = host_us(call)
        print(f"{name:42s} {found[name]:7.2f}")
    if options.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "us": found}
        options.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
