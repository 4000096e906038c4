"""Checks of the flag kernels on one GPU: they multiply, wait, raise, fail and reduce as promised.

    PYTHONPATH=. python benchmarks/gemm_checks.py

tests/test_triton_gpu.py runs them as tests. Each ``check_*`` function prints one line a promise and adds what is broken
to ``FAILED``. Several streams of one GPU stand for the ranks, so memory order between GPUs is not proven here.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from commbackend.contract import POISON, DeviceSlotTable, ExchangeMemory, GemmProblem, GemmSegment, Slot
from commbackend.errors import CommAborted, CommTimeout
from commbackend.gemm.torch_mm import TorchMM
from commbackend.gemm.triton_launch import Runtime
from commbackend.gemm.triton_reduce import LoadedKernels, OneShot, ReduceKernel
from commbackend.gemm.triton_tile import TritonTile

START = time.perf_counter()
FAILED: list[str] = []
DEV = torch.device("cuda")


class Words(DeviceSlotTable):
    """Slots in this GPU's memory: row 0 is read here, row 1 stands for the peers'."""

    def __init__(self, words: int = 256) -> None:
        self.words = words
        self.memory = torch.zeros((2, words), dtype=torch.int64, device=DEV)

    def read(self, writer: int, word: int) -> int:
        return int(self.memory[0, word])

    def close(self) -> None:
        """Nothing to give back: the tensor is."""

    def address(self, writer: int, word: int) -> int:
        return self.memory.data_ptr() + 8 * word

    def peer_address(self, peer: int, word: int) -> int:
        return self.memory.data_ptr() + 8 * (self.words + word)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def error_of(out: torch.Tensor, want: torch.Tensor) -> float:
    if not torch.isfinite(out.float()).all():
        return float("inf")
    return float((out.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def expect(name: str, good: bool, detail: str = "") -> None:
    FAILED.extend([] if good else [name])
    say(f"{'ok  ' if good else 'FAIL'} {name} {detail}")


def reference(segments: Sequence[GemmSegment]) -> list[torch.Tensor]:
    wants = []
    for s in segments:
        want = s.a.float() @ s.b.float().t()
        if s.scale_a is not None and s.scale_b is not None:
            want *= s.scale_a.reshape(-1, 1) * s.scale_b.reshape(1, -1)
        for extra in (*(() if s.bias is None else (s.bias,)), *s.addends):
            want += extra.float()
        wants.append(want)
    return wants


def problem(m: int, n: int, k: int, *, polls: bool = False, dtype: str = "bfloat16", **flags: bool) -> GemmProblem:
    return GemmProblem(
        m, n, k, dtype, "bfloat16" if dtype.startswith("float8") else dtype, "cuda", polls=polls, **flags
    )


class Case:
    """One product in every form."""

    def __init__(self, m: int, n: int, k: int, ranks: int = 2) -> None:
        self.m, self.n, self.k, self.ranks = m, n, k, ranks
        self.words = Words()
        self.words.memory[0].fill_(1 << 40)
        self.gathered = torch.randn(m, k, device=DEV, dtype=torch.bfloat16)
        self.w = torch.randn(n, k, device=DEV, dtype=torch.bfloat16)
        self.out = torch.empty(m, n, device=DEV, dtype=torch.bfloat16)
        rows = m // ranks
        self.x = self.gathered[:rows].clone()
        self.send = torch.empty(m, n, device=DEV, dtype=torch.bfloat16)
        self.partials = [torch.randn(rows, n, device=DEV, dtype=torch.bfloat16) for _ in range(ranks - 1)]

    def consume(self, chunks: int, seq: int = 7) -> list[GemmSegment]:
        rows = self.m // self.ranks
        segments = [GemmSegment(self.x, self.w, self.out[:rows])]
        for c in range(chunks):
            for peer in range(1, self.ranks):
                lo, hi = peer * rows + c * rows // chunks, peer * rows + (c + 1) * rows // chunks
                ready = ((peer, Slot(self.words, peer * 8 + c, seq)),)
                segments.append(GemmSegment(self.gathered[lo:hi], self.w, self.out[lo:hi], ready=ready))
        return segments

    def produce(self, chunks: int, fold: bool, seq: int = 7) -> list[GemmSegment]:
        rows = self.m // self.ranks
        segments = []
        for peer in range(1, self.ranks):
            for c in range(chunks):
                lo, hi = peer * rows + c * rows // chunks, peer * rows + (c + 1) * rows // chunks
                done = ((peer, Slot(self.words, 100 + peer * 8 + c, seq)),)
                segments.append(GemmSegment(self.gathered[lo:hi], self.w, self.send[lo:hi], done=done))
        ready = tuple((p, Slot(self.words, p, seq)) for p in range(1, self.ranks)) if fold else ()
        own = GemmSegment(
            self.gathered[:rows], self.w, self.out[:rows], addends=tuple(self.partials) if fold else (), ready=ready
        )
        return [*segments, own]


def check_products(provider: TritonTile) -> None:
    """Layouts, ragged sizes, bias, addends, fp16 and fp8, with and without slots, against fp32."""
    g = torch.Generator(device=DEV).manual_seed(1)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=DEV, generator=g).to(dtype)

    cases = (
        ("ragged rows", (200, 1, 0, 333), 512, 256, {}), ("ragged n and k", (130, 70), 1000, 1048, {"bias": True}),
        ("odd sizes", (33, 100), 77, 45, {"bias": True, "adds": 2}), ("b by columns", (256, 100), 768, 512,
        {"b_cols": True}),
        ("addends", (300, 256), 1024, 512, {"adds": 3, "bias": True}), ("fp16", (128, 129), 512, 264,
        {"dtype": torch.float16}),
        ("transposed a", (128, 64), 256, 192, {"transposed": True}), ("one row", (1, 1), 4096, 512, {}), ("k of 8",
        (64, 64), 64, 8, {}),
    )  # fmt: skip
    for polls in (False, True):
        for name, rows, n, k, o in cases:
            dtype: Any = o.get("dtype", torch.bfloat16)
            total = sum(rows)
            x, heap = random(rows[0], k, dtype=dtype), random(total, k, dtype=dtype)
            if o.get("transposed"):
                x, heap = random(k, rows[0], dtype=dtype).t(), random(k, total, dtype=dtype).t()
            b = random(k, n, dtype=dtype).t() if o.get("b_cols") else random(n, k, dtype=dtype)
            out = torch.full((total, n), float("nan"), device=DEV, dtype=dtype)
            bias = random(n, dtype=dtype) if o.get("bias") else None
            words, segments, at = Words(), [], 0
            words.memory[0].fill_(5)
            for i, count in enumerate(rows):
                part = slice(at, at + count)
                adds = tuple(random(count, n, dtype=dtype) for _ in range(int(o.get("adds", 0))))
                ready = ((1, Slot(words, i, 5)),) if polls and i else ()
                done = ((1, Slot(words, 20 + i, 9)),) if polls else ()
                own_bias = None if i == 1 else bias  # as peers' rows have none
                segments.append(GemmSegment(heap[part] if i else x, b, out[part], own_bias, adds, ready, done))
                at += count
            flags = {"bias": bias is not None, "addends": bool(o.get("adds"))}
            p = problem(total, n, k, polls=polls, dtype=str(dtype).removeprefix("torch."), **flags)
            provider.prepare(p)(segments)
            torch.cuda.synchronize()
            wants = reference(segments)
            worst = max(error_of(s.out, w) for s, w in zip(segments, wants, strict=True) if w.numel())
            raised = not polls or words.memory[1, 20 : 20 + len(rows)].tolist() == [9] * len(rows)
            expect(
                f"product: {name}{', polling' if polls else ''}",
                worst < 5e-3 and raised,
                f"error {worst:.1e} raised {raised}",
            )


def check_fp8(provider: TritonTile) -> None:
    """fp8 with per-tensor and per-row scales against fp32."""
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        for per_row in (False, True):
            a, b = torch.randn(300, 512, device=DEV).to(kind), torch.randn(768, 512, device=DEV).to(kind)
            out = torch.full((300, 768), float("nan"), device=DEV, dtype=torch.bfloat16)
            scale_a = torch.rand(300 if per_row else 1, device=DEV) + 0.5
            scale_b = torch.rand(768 if per_row else 1, device=DEV) + 0.5
            parts = [slice(0, 100), slice(100, 300)]
            segments = [
                GemmSegment(a[p], b, out[p], scale_a=scale_a[p] if per_row else scale_a, scale_b=scale_b) for p in parts
            ]
            name = str(kind).removeprefix("torch.")
            provider.prepare(problem(300, 768, 512, dtype=name, scales=True))(segments)
            worst = max(error_of(s.out, w) for s, w in zip(segments, reference(segments), strict=True))
            expect(f"product: {name}, scales per {'row' if per_row else 'tensor'}", worst < 5e-3, f"error {worst:.1e}")


def check_waiting(provider: TritonTile) -> None:
    """A launch spins until another stream has copied the rows and raised the flag; its done flags feed a second launch
    that runs beside it."""
    case = Case(1024, 1024, 512)
    source = case.gathered.clone()
    kernel = provider.prepare(problem(1024, 1024, 512, polls=True))
    side, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    want = (source.float() @ case.w.float().t()).bfloat16().float()
    worst, waited = 0.0, 0.0
    for i in range(20):
        seq = 100 + i
        case.gathered[512:].fill_(float("nan"))
        case.words.memory[0].fill_(seq - 1)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(4_000_000)
            case.gathered[512:].copy_(source[512:])
            case.words.memory[0].fill_(seq)
        start.record()
        kernel(case.consume(2, seq))
        end.record()
        torch.cuda.synchronize()
        waited = max(waited, start.elapsed_time(end))
        worst = max(worst, error_of(case.out, want))
    expect(
        "a launch waits and is released by another stream",
        worst < 5e-3 and waited > 1.0,
        f"error {worst:.1e}, held {waited:.2f} ms",
    )
    chain(provider)


def chain(provider: TritonTile, loops: int = 30) -> None:
    """Producer -> flags -> consumer, both running at once on halves of the GPU; the rows change every time."""
    m, n, k = 2048, 1024, 512
    words = Words()
    x, w1, w2 = (torch.randn(*s, device=DEV, dtype=torch.bfloat16) for s in ((m, k), (n, k), (512, n)))
    mid, out = (
        torch.empty(m, n, device=DEV, dtype=torch.bfloat16),
        torch.empty(m, 512, device=DEV, dtype=torch.bfloat16),
    )
    words.peer_address = words.address  # type: ignore[method-assign]  # both rows are this GPU's here
    first, second = provider.prepare(problem(m, n, k, polls=True)), provider.prepare(problem(m, 512, n, polls=True))
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    half, worst = provider.runtime.sms // 2, 0.0
    for seq in range(1, loops + 1):
        x.normal_()
        mid.fill_(float("nan"))
        chunk = m // 8
        parts = [slice(i * chunk, (i + 1) * chunk) for i in range(8)]
        torch.cuda.synchronize()
        second(
            [GemmSegment(mid[p], w2, out[p], ready=((0, Slot(words, i, seq)),)) for i, p in enumerate(parts)],
            stream=b.cuda_stream, sm_limit=half,
        )  # fmt: skip
        first(
            [GemmSegment(x[p], w1, mid[p], done=((0, Slot(words, i, seq)),)) for i, p in enumerate(parts)],
            stream=a.cuda_stream, sm_limit=half,
        )  # fmt: skip
        torch.cuda.synchronize()
        want = (x.float() @ w1.float().t()).bfloat16().float() @ w2.float().t()
        worst = max(worst, error_of(out, want))
    expect("done flags feed a launch that runs beside the first", worst < 5e-3, f"error {worst:.1e} in {loops} runs")


def check_faults() -> None:
    """A deadline and a poisoned word: NaN everywhere, a record, POISON to the peers, a sticky error; healthy after
    ``clear``."""
    for what, value, kind in (("deadline", 3, CommTimeout), ("poison", POISON, CommAborted)):
        provider = TritonTile(timeout_s=0.05)
        case = Case(1024, 1024, 256)
        case.words.memory[0].fill_(value)
        kernel = provider.prepare(problem(1024, 1024, 256, polls=True))
        segments = case.consume(2, 9)
        segments[1].done = ((1, Slot(case.words, 50, 9)),)
        case.out.zero_()
        kernel(segments)
        torch.cuda.synchronize()
        spoiled = bool(torch.isnan(case.out).all())
        raised: BaseException | None = None
        try:
            kernel(segments)
        except (CommTimeout, CommAborted) as e:
            raised = e
        told = int(case.words.memory[1, 50]) == POISON
        provider.runtime.fault.clear()
        case.words.memory[0].fill_(9)
        kernel(segments)
        torch.cuda.synchronize()
        healed = error_of(case.out, case.gathered.float() @ case.w.float().t()) < 5e-3
        expect(
            f"fault: {what}",
            spoiled and type(raised) is kind and told and healed,
            f"NaN {spoiled} told {told} healed {healed}: {raised}",
        )


def check_steady(provider: TritonTile, calls: int) -> None:
    """Thousands of calls with growing slots: no compilation, no allocation, no slow call."""
    case = Case(256, 512, 256)
    kernel = provider.prepare(problem(256, 512, 256, polls=True))
    kernel(case.consume(1, 1))
    torch.cuda.synchronize()
    # Allocations and not bytes held: garbage of earlier checks may be freed meanwhile.
    before, allocations, slow = provider.compilations, allocated(), 0.0
    start = time.perf_counter()
    for seq in range(1, calls + 1):
        then = time.perf_counter()
        kernel(case.consume(1, seq))
        slow = max(slow, time.perf_counter() - then)
        if seq % 512 == 0:
            torch.cuda.synchronize()
    each = (time.perf_counter() - start) / calls
    grown = provider.compilations - before, allocated() - allocations
    expect(
        f"{calls} calls compile and allocate nothing",
        grown == (0, 0),
        f"{grown}; {1e6 * each:.0f} us a call, slowest {1e3 * slow:.1f} ms",
    )


def allocated() -> int:
    """How many pieces of device memory torch has given out so far."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def check_streams(provider: TritonTile) -> None:
    """Stream 0 is the default stream: what follows it, and what runs on it, is ordered after its work."""
    side, driver = torch.cuda.Stream(), provider.runtime.driver
    x, copied = torch.zeros(1024, 1024, device=DEV), torch.zeros(1024, 1024, device=DEV)
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    x.fill_(1.0)
    driver.follow(side.cuda_stream, 0)
    with torch.cuda.stream(side):
        copied.copy_(x)
    torch.cuda.synchronize()
    expect("a stream follows stream 0", bool((copied == 1).all()))
    out, library = torch.zeros(1024, 1024, device=DEV), TorchMM().prepare(problem(1024, 1024, 1024, dtype="float32"))
    library([GemmSegment(x, x, out)])
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    x.fill_(0.5)
    with torch.cuda.stream(side):
        library([GemmSegment(x, x, out)], stream=0)
    torch.cuda.synchronize()
    expect("a library product on stream 0", bool((out == 256).all()), f"{out[0, 0].item()}")


def check_graph(provider: TritonTile) -> None:
    """Captured with the epoch in memory, replayed with growing epochs and new data, mixed with eager calls."""
    case = Case(512, 512, 256)
    kernel = provider.prepare(problem(512, 512, 256, polls=True))
    epoch = torch.zeros(1, dtype=torch.int64, device=DEV)
    side = torch.cuda.Stream()
    kernel(case.consume(2, 0), epoch=epoch.data_ptr())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            kernel(case.consume(2, 0), epoch=epoch.data_ptr())
    worst = 0.0
    for e in range(1, 40):
        case.gathered.normal_()
        case.x.copy_(case.gathered[:256])
        epoch.fill_(e)
        case.words.memory[0].fill_(e)
        case.out.fill_(float("nan"))
        if e % 3:
            graph.replay()
        else:
            kernel(case.consume(2, e))
        torch.cuda.synchronize()
        worst = max(worst, error_of(case.out, case.gathered.float() @ case.w.float().t()))
    expect("captured, replayed, mixed with eager calls", worst < 5e-3, f"error {worst:.1e}")


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.float()


def check_reduce(runtime: Runtime) -> None:
    """Sums, and the one-shot all-reduce of several ranks on this GPU, one stream a rank."""
    kernel = ReduceKernel(runtime, torch.bfloat16, 3)
    for cols in (1000, 1003, 64):
        parts = [torch.randn(37, cols, device=DEV, dtype=torch.bfloat16) for _ in range(3)]
        bias, out = torch.randn(cols, device=DEV, dtype=torch.bfloat16), torch.empty_like(parts[0])
        kernel(out, parts, bias=bias)
        want = parts[0].float() + parts[1].float() + parts[2].float() + bias.float()
        expect(f"reduce of 3 partials, {cols} columns", torch.equal(out, want.bfloat16()))
    for size, dtype in ((2, torch.bfloat16), (3, torch.float32), (8, torch.float16)):
        one_shot(runtime, size, dtype)


def one_shots(runtime: Runtime, size: int, timeout_s: float = 5.0, programs: int = 32) -> list[OneShot]:
    """The one-shot all-reduces of ``size`` ranks in this process."""
    slot_nbytes = 40 << 10
    nbytes, words = OneShot.nbytes(size, programs, slot_nbytes)
    memory = [torch.zeros(nbytes, dtype=torch.uint8, device=DEV) for _ in range(size)]
    tables = [torch.zeros(size, words, dtype=torch.int64, device=DEV) for _ in range(size)]
    data, loaded = tuple(m.data_ptr() for m in memory), LoadedKernels()
    found = []
    for r in range(size):
        raised = tuple(t[r].data_ptr() for t in tables)
        waited = tuple(tables[r][q].data_ptr() for q in range(size))
        found.append(
            OneShot(runtime, ExchangeMemory(r, data, raised, waited, programs, slot_nbytes), timeout_s, loaded)
        )
        found[-1].kept = memory, tables  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    return found


def one_shot(runtime: Runtime, size: int, dtype: torch.dtype, rounds: int = 72) -> None:
    """Both protocols, in turn and mixed, with and without residual, bias and norm; same bits on all ranks."""
    ranks, good, protocols = one_shots(runtime, size), True, set()
    streams = [torch.cuda.Stream() for _ in range(size)]
    for i in range(rounds):
        rows, cols = (1, 32, 7, 64, 2)[i % 5], (2048, 1024, 328, 4096)[i % 4]
        xs = [torch.randn(rows, cols, device=DEV).to(dtype) for _ in range(size)]
        residual, bias, weight = (torch.randn(*s, device=DEV).to(dtype) for s in ((rows, cols), (cols,), (cols,)))
        flags = {"bias": i % 3 == 1, "residual": i % 2 == 1, "norm": i % 2 == 1}
        want = sum((x.float() for x in xs[1:]), xs[0].float())
        extra: dict[str, Any] = {"bias": bias} if flags["bias"] else {}
        if flags["residual"]:
            want, extra = want + residual.float(), extra | {"residual": residual}
        want = (want + bias.float() if flags["bias"] else want).to(dtype)
        outs, normed = ([torch.full_like(x, float("nan")) for x in xs] for _ in range(2))
        kernels = [r.prepare(dtype, rows, cols, **flags) for r in ranks]
        protocols.add((kernels[0].choice.few, flags["norm"]))
        torch.cuda.synchronize()
        for r in range(size):
            norm = {"normed": normed[r], "norm_weight": weight, "eps": 1e-6} if flags["norm"] else {}
            kernels[r](outs[r], xs[r], stream=streams[r].cuda_stream, **extra, **norm)
        torch.cuda.synchronize()
        good = good and all(torch.equal(o, want) for o in outs)
        if flags["norm"]:
            good = good and error_of(normed[0], rms(want.float(), weight)) < 5e-3
            good = good and all(torch.equal(n, normed[0]) for n in normed)
    right = protocols == {(True, False), (False, False), (False, True)}
    expect(f"one-shot all-reduce of {size} ranks, {dtype}", good and right, f"{rounds} rounds, {protocols}")


def check_one_shot_faults() -> None:
    """A rank that does not come: NaN, a record, an error at the next call, by both protocols; poison likewise."""
    for rows, few in ((1, True), (64, False)):
        for what, kind in (("deadline", CommTimeout), ("poison", CommAborted)):
            runtime = TritonTile().runtime
            ranks = one_shots(runtime, 2, timeout_s=0.05)
            kernel = ranks[0].prepare(torch.bfloat16, rows, 4096, bias=False, residual=False, norm=False)
            x = torch.randn(rows, 4096, device=DEV, dtype=torch.bfloat16)
            out = torch.zeros_like(x)
            if what == "poison":
                ranks[0].kept[1][0].fill_(POISON)  # type: ignore[attr-defined]
            kernel(out, x)
            torch.cuda.synchronize()
            spoiled, raised = bool(out.isnan().all()), None
            try:
                kernel(out, x)
            except (CommTimeout, CommAborted) as e:
                raised = e
            right = kernel.choice.few is few and spoiled and type(raised) is kind
            expect(f"one-shot fault: {what}, {'low latency' if few else 'flags'}", right, f"{spoiled} {raised}")


def problems() -> list[GemmProblem]:
    """What the checks compile for, so that it can be compiled ahead in parallel."""
    sizes = ((300, 768, 512), (533, 512, 256), (1024, 1024, 512), (2048, 1024, 512), (2048, 512, 1024), (133, 77, 45))
    found = []
    for m, n, k in sizes:
        for polls, bias, addends in itertools.product((False, True), repeat=3):
            found.append(problem(m, n, k, polls=polls, bias=bias, addends=addends))
            found.append(problem(m, n, k, polls=polls, dtype="float16"))
        found += [problem(304, 768, 512, dtype=t, scales=True) for t in ("float8_e4m3fn", "float8_e5m2")]
    return found


def checks(calls: int) -> None:
    provider = TritonTile(timeout_s=5.0)
    for check in (check_products, check_fp8, check_streams, check_waiting, check_graph):
        check(provider)
    check_faults()
    check_steady(provider, calls)
    check_reduce(provider.runtime)
    check_one_shot_faults()
    provider.check()
    say(f"{provider.compilations} kernels compiled")


if __name__ == "__main__":
    checks(10_000)
    say(f"{len(FAILED)} failed: {FAILED}" if FAILED else "all checks passed")
    sys.exit(bool(FAILED))
