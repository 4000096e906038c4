"""What Python costs in a call on a GPU, without one: a call over a driver that does nothing, timed or profiled.

    python benchmarks/host_profile.py [--op all_gather_matmul] [--function] [--rows 8] [--ranks 2] [--profile]

The driver is the tests' fake (``tests/fake_gpu.py``), with its hot calls replaced by functions that return at once; so
are products and sums. Rank 0 alone is timed; records of peers are read where rank 0's own are.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import fake_gpu  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

import commbackend  # noqa: E402
from commbackend.plan import Problem  # noqa: E402

FUSED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def silence(comm: Any, fake: Any) -> None:
    """From now on nothing is enqueued, and peers agree."""
    transport = comm._engine.transport
    driver = transport._driver
    driver._memcpy = driver._memcpy_2d = driver._launch = driver._write_value = lambda *_: (0,)
    driver._batch = lambda *_: 0
    fake.machine.enqueue = lambda op: None
    transport._watch.pending = collections.deque(maxlen=8)  # else its thread looks through all that never come
    control, rank = transport._control, comm.rank
    transport.peek = lambda peer, number: control.peek(rank, number)
    fake_gpu._Event.record = lambda self, stream: None  # type: ignore[method-assign]
    fake_gpu._Stream.wait_event = lambda self, event: None  # type: ignore[method-assign]


def calls(comm: Any, options: argparse.Namespace) -> Callable[[], object]:
    m, size, op = options.rows, comm.size, options.op
    k = n = 64
    x = torch.randn(m if op.startswith("all_gather") else m * size, k)
    w = torch.nn.Parameter(torch.randn(n, k)) if options.grad else torch.randn(n, k)
    out = torch.empty(m if op.endswith("scatter") else m * size, n)
    if options.function:
        function = getattr(commbackend, op)
        return (lambda: function(x, w, comm)) if op in FUSED else (lambda: function(x, comm))
    if op in FUSED:
        problem = Problem(op, (m,) * size, k=k, n=(n,), dtype="float32")
        return lambda: comm.run(problem, {"x": x, "w0": w, "out0": out})
    problem = Problem(op, (m,) * size, k=k, dtype="float32")
    return lambda: comm.run(problem, {"x": x, "out": out})


def body(comm: Any, fake: Any, options: argparse.Namespace) -> None:
    call = calls(comm, options)
    for _ in range(5):
        call()
    fake.synchronize()
    comm.barrier()
    if comm.rank:
        time.sleep(1000)
    time.sleep(0.5)  # until the others have seen the barrier's record, which later ones overwrite
    silence(comm, fake)
    samples = []
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(200):
            call()
        samples.append((time.perf_counter() - start) / 200 * 1e6)
    print(f"{sorted(samples)[len(samples) // 2]:.1f} us a call (least {min(samples):.1f})")
    if options.profile:
        with cProfile.Profile() as profile:
            for _ in range(1000):
                call()
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    sys.stdout.flush()
    os._exit(0)  # the peers, who have not been called, would be waited for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default=FUSED[0])
    parser.add_argument("--function", action="store_true", help="the function users call, not the engine alone")
    parser.add_argument("--grad", action="store_true", help="the weight requires gradients")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with fake_gpu.fake_gpus(options.ranks, pytest.MonkeyPatch()) as fakes:
        fake_gpu.FakeKernels.launches = False
        fake_gpu.spmd_fakes(fakes, body, options)


if __name__ == "__main__":
    main()
