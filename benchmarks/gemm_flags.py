# ruff: noqa: B023
"""The flag kernels on one GPU, all flags up, against cuBLAS; before that, checks that they wait, raise, fail and
reduce as promised (``gemm_checks.py``).

    PYTHONPATH=. python benchmarks/gemm_flags.py --out DIR [--quick] [--only checks speed fp8 host reduce]
        [--config 128,256,64,4,8,split ...]

Forms, for two ranks (``--ranks`` for more):

    plain        one segment, a variant that does not poll
    consume1/2/4 own rows in x, the peers' in a heap, in 1, 2 or 4 chunks a peer, a flag each (all-gather + GEMM)
    produce      the peers' rows to a send buffer with a flag a chunk, own rows last (GEMM + reduce-scatter)
    fold         the same; own rows wait for the received partials and add them

Every form is checked against an fp32 product first. Times are CUDA events around one call behind a GPU sleep that hides
the host's time; candidates are interleaved call by call; medians. Raw samples go to DIR/gemm_flags.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gemm_checks import DEV, FAILED, Case, checks, error_of, expect, problem, problems, reference, say

from commbackend.contract import GemmSegment
from commbackend.gemm.triton_launch import CudaDriver, Runtime, compile_offline
from commbackend.gemm.triton_reduce import OneShotAllReduce, ReduceKernel
from commbackend.gemm.triton_tile import Kernel, TileConfig, TritonTile, Variant, choose, specify

#: (model, n, k) as at tensor-parallel size 8.
GATHER = (("8B", 3584, 4096), ("70B", 7168, 8192), ("175B", 12288, 12288))
SCATTER = (("8B", 4096, 1792), ("70B", 8192, 3584), ("175B", 12288, 6144))
CONFIGS = (
    TileConfig(128, 256, 64, 3, 8),
    TileConfig(128, 256, 64, 3, 8, split=True),
    TileConfig(128, 256, 64, 4, 8, split=True),
    TileConfig(128, 256, 64, 4, 8, split=True, device_maps=True),
    TileConfig(256, 128, 64, 4, 8, split=True),
    TileConfig(128, 128, 64, 4, 8),
    TileConfig(128, 128, 64, 4, 4),
    TileConfig(128, 128, 64, 3, 4, split=True, ctas=2),
    TileConfig(64, 256, 64, 4, 4, split=True),
    TileConfig(64, 128, 128, 4, 4),
)


def name_of(config: TileConfig) -> str:
    marks = f"{'s' if config.split else ''}{'d' if config.device_maps else ''}{'x2' if config.ctas == 2 else ''}"
    return f"{config.bm}x{config.bn}x{config.bk}/{config.stages}/{config.warps}{marks}"


# -- speed
# ---------------------------------------------------------------------------------------------------------------


def interleave(candidates: dict[str, Callable[[], Any]], reps: int, batch: int = 1) -> dict[str, list[float]]:
    """Microseconds a call: ``batch`` calls behind a sleep that hides the host, candidates in turn."""
    names, times = list(candidates), {name: [] for name in candidates}  # type: dict[str, list[float]]
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps * len(names))
    ]
    for name in names:
        candidates[name]()
    torch.cuda.synchronize()
    for rep in range(reps):
        for i, name in enumerate(names):
            start, end = events[rep * len(names) + i]
            torch.cuda._sleep(150_000 + 60_000 * batch)
            start.record()
            for _ in range(batch):
                candidates[name]()
            end.record()
        torch.cuda.synchronize()
    for i, (start, end) in enumerate(events):
        times[names[i % len(names)]].append(1e3 * start.elapsed_time(end) / batch)
    return times


class Speed:
    """Kernels by (config, flags), shared by all shapes; refuses configs that do not fit."""

    def __init__(self, configs: Sequence[TileConfig]) -> None:
        driver = CudaDriver(DEV)
        self.runtime = Runtime(driver, driver.device)
        self.configs = [c for c in configs if c.shared_nbytes(2, 2) <= self.runtime.shared_nbytes]
        self.providers = {c: TritonTile(config=c, runtime=self.runtime, timeout_s=10.0) for c in self.configs}

    def kernel(self, config: TileConfig, case: Case, *, polls: bool, addends: bool = False) -> Kernel:
        return self.providers[config].prepare(problem(case.m, case.n, case.k, polls=polls, addends=addends))

    def forms(
        self, case: Case, kind: str, configs: Sequence[TileConfig]
    ) -> dict[str, tuple[Kernel, list[GemmSegment], int]]:
        forms: dict[str, tuple[Kernel, list[GemmSegment], int]] = {}
        for c in configs:
            tag = name_of(c)
            plain = [GemmSegment(case.gathered, case.w, case.out)]
            forms[f"plain {tag}"] = (self.kernel(c, case, polls=False), plain, 0)
            polls = self.kernel(c, case, polls=True)
            if kind == "gather":
                for chunks in (1, 2, 4):
                    forms[f"consume{chunks} {tag}"] = (polls, case.consume(chunks), self.runtime.sms)
            else:
                forms[f"produce {tag}"] = (polls, case.produce(2, False), self.runtime.sms)
                forms[f"fold {tag}"] = (
                    self.kernel(c, case, polls=True, addends=True),
                    case.produce(2, True),
                    self.runtime.sms,
                )
        return forms


def measure(speed: Speed, label: str, kind: str, case: Case, reps: int, results: list[dict[str, Any]]) -> None:
    small = case.m < 1024
    square = 128 * 128
    configs = [c for c in speed.configs if (c.bm * c.bn <= square) == small or c.ctas > 1]
    if case.m == 2048:
        configs += [c for c in speed.configs if c.bm * c.bn == square and c not in configs]
    configs = configs or speed.configs
    forms = speed.forms(case, kind, configs)
    for name, (kernel, segments, sms) in forms.items():
        for s in segments:
            s.out.fill_(float("nan"))
        kernel(segments, sm_limit=sms)
        worst = max(error_of(s.out, w) for s, w in zip(segments, reference(segments), strict=True))
        if worst > 5e-3:
            expect(f"{label} {name}", False, f"error {worst:.1e}")
    candidates: dict[str, Callable[[], Any]] = {"cublas": lambda: torch.mm(case.gathered, case.w.t(), out=case.out)}
    for name, (kernel, segments, sms) in forms.items():
        candidates[name] = lambda kernel=kernel, segments=segments, sms=sms: kernel(segments, sm_limit=sms)
    first = interleave(candidates, reps)
    base = statistics.median(first["cublas"])
    # Again, back to back, the best config of every form only.
    best: dict[str, str] = {}
    for name in forms:
        form = name.split()[0]
        if form not in best or statistics.median(first[name]) < statistics.median(first[best[form]]):
            best[form] = name
    again = interleave({n: candidates[n] for n in ("cublas", *best.values())}, max(3, reps // 4), batch=8)
    hot = statistics.median(again["cublas"])
    reserves = {}
    form = best["consume2" if kind == "gather" else "fold"]
    kernel, segments, _ = forms[form]
    for reserve in (0, 4, 8, 16):
        limit = speed.runtime.sms - reserve
        reserves[f"reserve {reserve}"] = lambda limit=limit: kernel(segments, sm_limit=limit)
    priced = interleave(reserves, max(3, reps // 2))
    rate = 2e-6 * case.m * case.n * case.k / base
    say(f"{label}: cublas {base:.1f} us ({rate:.0f} TFLOP/s), back to back {hot:.1f} us")
    for name in sorted(forms, key=lambda x: (x.split()[0], statistics.median(first[x]))):
        mark = f"  back to back {statistics.median(again[name]) / hot:.3f}" if name in again else ""
        print(f"    {name:34s} {statistics.median(first[name]) / base:.3f}{mark}")
    chosen = name_of(choose(problem(case.m, case.n, case.k, polls=True, addends=kind == "scatter"), 90, 227 << 10))
    print(f"    chosen for {'consume' if kind == 'gather' else 'fold'}: {chosen}")
    print(
        "    " + form + ": " + ", ".join(f"{n} {statistics.median(t) / base:.3f}" for n, t in priced.items()),
        flush=True,
    )
    results.append({
        "label": label, "kind": kind, "m": case.m, "n": case.n, "k": case.k, "ranks": case.ranks,
        "isolated_us": first, "back_to_back_us": again, "reserve_us": priced, "reserve_form": form,
    })  # fmt: skip


def speeds(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    speed = Speed(args.configs)
    rows = (2048, 8192) if args.quick else (64, 512, 2048, 4096, 8192)
    for kind, table in (("gather", GATHER), ("scatter", SCATTER)):
        for model, n, k in table:
            for m in rows:
                if model == "175B" and (m < 2048 or (args.quick and m > 2048)):
                    continue
                case = Case(m, n, k, args.ranks)
                measure(speed, f"{kind} {model} {m}x{n}x{k}", kind, case, args.reps, results)
                del case
    say(f"{speed.runtime.compilations} kernels compiled for the speed runs")


def fp8_configs(runtime: Runtime) -> list[TileConfig]:
    shapes = (
        TileConfig(128, 256, 128, 4, 8, split=True), TileConfig(128, 256, 128, 3, 8),
        TileConfig(128, 128, 128, 4, 8), TileConfig(256, 128, 128, 4, 8, split=True),
    )  # fmt: skip
    return [c for c in shapes if c.shared_nbytes(1, 2) <= runtime.shared_nbytes]


def fp8(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """fp8 against torch's scaled_mm, exact and fast accumulation."""
    driver = CudaDriver(DEV)
    runtime = Runtime(driver, driver.device)
    configs = fp8_configs(runtime)
    for m, n, k in ((8192, 8192, 7168), (2048, 8192, 7168)):
        a, b = (torch.randn(x, k, device=DEV).to(torch.float8_e4m3fn) for x in (m, n))
        scale_a, scale_b = torch.rand(m, 1, device=DEV) + 0.5, torch.rand(1, n, device=DEV) + 0.5
        out = torch.empty(m, n, device=DEV, dtype=torch.bfloat16)
        one = torch.ones(1, device=DEV)
        candidates: dict[str, Callable[[], Any]] = {}
        for fast in (False, True):
            word = "fast" if fast else "exact"
            candidates[f"scaled_mm tensor {word}"] = lambda fast=fast: torch._scaled_mm(
                a, b.t(), one[0], one[0], out_dtype=torch.bfloat16, use_fast_accum=fast
            )
            candidates[f"scaled_mm row {word}"] = lambda fast=fast: torch._scaled_mm(
                a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
            for c in configs:
                provider = TritonTile(config=c, exact_fp8=not fast, runtime=runtime)
                kernel = provider.prepare(problem(m, n, k, dtype="float8_e4m3fn", scales=True))
                s = [GemmSegment(a, b, out, scale_a=scale_a.reshape(-1), scale_b=scale_b.reshape(-1))]
                kernel(s)
                worst = error_of(out, reference(s)[0])
                if worst > 5e-3:
                    expect(f"fp8 {name_of(c)} {word}", False, f"error {worst:.1e}")
                candidates[f"triton row {word} {name_of(c)}"] = lambda kernel=kernel, s=s: kernel(s)
        for name in [n for n in candidates if n.startswith("scaled_mm")]:
            try:
                candidates[name]()
            except RuntimeError as e:
                say(f"{name}: not offered: {str(e).splitlines()[0]}")
                del candidates[name]
        times = interleave(candidates, args.reps)
        say(f"fp8 {m}x{n}x{k}")
        for name, t in times.items():
            print(f"    {name:40s} {statistics.median(t):8.1f} us", flush=True)
        results.append({"label": "fp8", "m": m, "n": n, "k": k, "isolated_us": times})


def host(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Host microseconds a call, by number of segments."""
    provider = TritonTile()
    case = Case(512, 1024, 512)
    kernel = provider.prepare(problem(512, 1024, 512, polls=True))
    found: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> None:
        call()
        samples = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            samples.append((time.perf_counter() - start) / 20)
        found[name] = 1e6 * statistics.median(samples)

    timed("torch.mm", lambda: torch.mm(case.gathered, case.w.t(), out=case.out))
    for chunks in (1, 3, 7):
        segments = case.consume(chunks)
        timed(f"{1 + chunks} segments, launch", lambda segments=segments: kernel(segments))
        timed(f"{1 + chunks} segments, made and launched", lambda chunks=chunks: kernel(case.consume(chunks)))
    say("host: " + ", ".join(f"{n} {t:.1f} us" for n, t in found.items()))
    results.append({"label": "host", "us": found})


def reduce(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Reduce kernels against copying, the one-shot all-reduce of two ranks that share this GPU (an upper bound of its
    latency)."""
    driver = CudaDriver(DEV)
    runtime = Runtime(driver, driver.device)
    kernel = ReduceKernel(runtime, torch.bfloat16, 8)
    for m, n in ((64, 8192), (1024, 8192)):
        parts = [torch.randn(m, n, device=DEV, dtype=torch.bfloat16) for _ in range(8)]
        out = torch.empty_like(parts[0])
        stack = torch.stack(parts)
        times = interleave(
            {"reduce 8": lambda: kernel(out, parts), "torch.sum 8": lambda: torch.sum(stack, 0, out=out)}, args.reps
        )
        say(f"reduce {m}x{n}: " + ", ".join(f"{k} {statistics.median(t):.1f} us" for k, t in times.items()))
        results.append({"label": "reduce", "m": m, "n": n, "isolated_us": times})
    limits = {"max_rows": 64, "max_cols": 8192}
    memory = [
        torch.zeros(OneShotAllReduce.nbytes(torch.bfloat16, 2, **limits), dtype=torch.uint8, device=DEV)
        for _ in range(2)
    ]
    bases = [m.data_ptr() for m in memory]
    ranks = [OneShotAllReduce(runtime, torch.bfloat16, bases, r, timeout_s=5.0, **limits) for r in range(2)]
    side = torch.cuda.Stream()
    for m in (1, 16, 64):
        x = torch.randn(m, 8192, device=DEV, dtype=torch.bfloat16)
        outs = [torch.empty_like(x) for _ in range(2)]

        def both() -> None:
            ranks[1](outs[1], x, stream=side.cuda_stream)
            ranks[0](outs[0], x)

        times = interleave({"one-shot": both}, args.reps, batch=10)
        say(f"one-shot all-reduce, 2 ranks on one GPU, {m}x8192: {statistics.median(times['one-shot']):.1f} us a call")
        results.append({"label": "one-shot", "m": m, "isolated_us": times})


def compile_ahead(variant: Variant, capability: int) -> float:
    """Fill Triton's cache on disk; seconds it took. Runs in a process of its own."""
    start = time.perf_counter()
    kernel, types, constants, aligned = specify(variant)
    compile_offline(
        kernel, types, constants, aligned, capability, warps=variant.config.warps, stages=variant.config.stages
    )
    return time.perf_counter() - start


def warm(args: argparse.Namespace) -> None:
    """Compile in parallel what the parts will load."""
    speed = Speed(args.configs)
    wanted: dict[Variant, None] = {}
    if "checks" in args.only:
        provider = TritonTile(runtime=speed.runtime)
        wanted |= {v: None for p in problems() for v in provider.variants(p).values()}
    if "speed" in args.only:
        for config in speed.configs:
            for flags in ({"polls": False}, {"polls": True}, {"polls": True, "addends": True}):
                made = speed.providers[config].variants(problem(2048, 2048, 2048, **flags))
                wanted |= dict.fromkeys(made.values())
    if "fp8" in args.only:
        for config, exact in itertools.product(fp8_configs(speed.runtime), (False, True)):
            provider = TritonTile(config=config, exact_fp8=exact, runtime=speed.runtime)
            made = provider.variants(problem(2048, 2048, 2048, dtype="float8_e4m3fn", scales=True))
            wanted |= dict.fromkeys(made.values())
    context = multiprocessing.get_context("spawn")
    workers = min(len(wanted) or 1, os.cpu_count() or 1, 16)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(compile_ahead, v, speed.runtime.capability) for v in wanted]
        for i, future in enumerate(concurrent.futures.as_completed(futures), 1):
            future.result()
            if i % 20 == 0 or i == len(futures):
                say(f"compiled {i} of {len(futures)} variants in {workers} processes")


def parse_config(text: str) -> TileConfig:
    words = text.split(",")
    numbers = [int(w) for w in words if w.isdigit()]
    ctas = 2 if "x2" in words else 1
    return TileConfig(*numbers, split="split" in words, device_maps="maps" in words, ctas=ctas)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", default=["checks", "speed", "fp8", "host", "reduce"])
    parser.add_argument(
        "--config",
        dest="configs",
        nargs="*",
        type=parse_config,
        default=list(CONFIGS),
        help="bm,bn,bk,stages,warps[,group][,split][,maps][,x2]",
    )
    parser.add_argument("--reps", type=int, default=21)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=10_000)
    args = parser.parse_args()
    TritonTile.probe(DEV)
    import triton

    args.out.mkdir(parents=True, exist_ok=True)
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,temperature.gpu", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    )
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(), "command": sys.argv, "gpu": smi.stdout.strip(),
        "host": platform.platform(), "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "triton": triton.__version__, "results": [],
    }  # fmt: skip
    say(f"{record['gpu']}, torch {torch.__version__}, triton {triton.__version__}")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    warm(args)
    if "checks" in args.only:
        checks(args.calls)
    for name, part in (("host", host), ("reduce", reduce), ("fp8", fp8), ("speed", speeds)):
        if name in args.only:
            part(args, record["results"])
            (args.out / "gemm_flags.json").write_text(json.dumps(record))
    forms = {"plain": {}, "consume": {"polls": True}, "fold": {"polls": True, "addends": True}}
    picked = {
        f"{form} {m}x{n}x{k}": name_of(choose(problem(m, n, k, **flags), 90, 227 << 10))
        for _, n, k in (*GATHER, *SCATTER)
        for m in (64, 512, 2048, 8192)
        for form, flags in forms.items()
    }
    record["failed"], record["built_in_choice"] = FAILED, picked
    (args.out / "gemm_flags.json").write_text(json.dumps(record))
    say(f"{len(FAILED)} failed: {FAILED}" if FAILED else "all checks passed")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
