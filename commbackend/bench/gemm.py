"""``commbackend bench gemm``: the kernels that wait for flags and raise them, on one GPU with all flags up, against
cuBLAS in the same turns.

Forms of a product of M rows, as a rank of two runs it:

* ``plain``: one segment, a kernel that does not poll;
* ``consume``: own rows, then a peer's from a heap, in two chunks with a flag each (all-gather + GEMM);
* ``produce``: the peer's rows into a send buffer, two chunks, a flag raised after each; own rows last;
* ``fold``: the same, and own rows wait for the peer's partials and add them (GEMM + reduce-scatter).

Every result is compared with an fp32 product first. Times are CUDA events behind a GPU sleep that hides the host,
candidates in turn call by call; isolated calls, and several in a row, which read higher as the chip heats.
``--tiles`` measures the forms with other tile shapes than the built-in choice.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import registry
from ..errors import CommBackendError, ConfigError
from ..plan import EXCHANGE_PROGRAMS, EXCHANGE_SLOT_NBYTES
from .facts import machine, versions
from .names import CUBLAS, FORMAT, SCALED, widths
from .report import compare, load, summary, tables, text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..contract import GemmProblem, GemmSegment

__all__ = ["main"]

FORMS = {"gather": ("plain", "consume"), "scatter": ("plain", "produce", "fold")}
PARTS = ("gather", "scatter", "fp8", "reduce", "host")
_TP = 8
_BURST = 8
#: What relative error a product of bf16 (of fp8) may have against fp32.
_ERROR = 6e-3


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and show it. Returns the exit status: 0, 1 (a wrong result), 2 (usage, no GPU)."""
    options = _parser().parse_args(list(arguments))
    try:
        old = load(options.compare) if options.compare else None
        if options.plot and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot: matplotlib is not installed (pip install 'commbackend[viz]')")
        bench = _Bench(options)
    except CommBackendError as e:
        print(f"bench: {e}", file=sys.stderr)
        return 2
    run = bench.run()
    report: dict[str, Any] = {
        "format": FORMAT,
        "kind": "gemm",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["commbackend", "bench", "gemm", *arguments],
        "machine": machine() | {"gpus": [bench.gpu]},
        "versions": versions() | bench.versions,
        "runs": [run],
    }
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for table in [*tables(report), *([compare(report, old)] if old is not None else [])]:
        print(text(table), end="\n\n")
    if options.plot:
        from .plot import draw

        draw(report, options.plot)
    if run.get("failed"):
        print(f"bench: {run['failed']}", file=sys.stderr)
    return 1 if run.get("failed") else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="commbackend bench gemm", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--models", default="8B,70B,175B", help="widths as at tensor-parallel size 8, or hN")
    parser.add_argument("--rows", default="512,2048,8192", help="M (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=21, help="calls of each candidate (default %(default)s)")
    parser.add_argument(
        "--tiles",
        nargs="*",
        default=[],
        metavar="BM,BN,BK,STAGES,WARPS[,GROUP][,split][,x2]",
        help="shapes to try",
    )
    parser.add_argument("--json", metavar="PATH", help="write samples and machine")
    parser.add_argument("--plot", metavar="PNG", help="draw (needs matplotlib)")
    parser.add_argument("--compare", metavar="OLD.json", help="print ratios to an older file")
    return parser


class _Bench:
    """One run on the current GPU. Raises ConfigError or Unavailable if there is nothing to measure on."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self.options, self.only = options, options.only.split(",")
        if unknown := set(self.only) - set(PARTS):
            raise ConfigError(f"--only {','.join(sorted(unknown))}: some of {','.join(PARTS)}")
        try:
            self.models = [(m, widths(m)) for m in options.models.split(",")]
            self.rows = [int(r) for r in options.rows.split(",")]
        except ValueError as e:
            raise ConfigError(str(e)) from None
        if options.rounds < 1 or min(self.rows) < 4:
            raise ConfigError("--rounds is 1 or more, --rows 4 or more")
        kind: Any = registry.gemm("triton")
        self.device = torch.device("cuda")
        kind.probe(self.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        self.gemm: Any = kind(timeout_s=20.0)
        self.gpu = torch.cuda.get_device_name()
        import triton

        self.versions = {"triton": triton.__version__, "CUDA": str(torch.version.cuda)}
        self.cases: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self._kept: list[Tensor] = []
        self.tiles: dict[str, Any] = {"": self.gemm}
        shape = type(self.gemm.variants(_problem(256, 256, 256))["nt"].config)
        for given in options.tiles:
            words = given.split(",")
            numbers = [int(w) for w in words if w.isdecimal()]
            if not 5 <= len(numbers) <= 6:
                raise ConfigError(f"--tiles {given}: BM,BN,BK,STAGES,WARPS[,GROUP][,split][,x2]")
            tile = shape(*numbers, split="split" in words, ctas=2 if "x2" in words else 1)
            self.tiles[given] = kind(timeout_s=20.0, config=tile, runtime=self.gemm.runtime)

    def run(self) -> dict[str, Any]:
        """Measure everything that was asked for."""
        self._compile()
        for part in self.only:
            getattr(self, f"_{part}")()
        run = {"ranks": 1, "launcher": "this process", "threads": 1, "transport": "none", "device": "cuda"}
        found: dict[str, Any] = {**run, "cases": self.cases, "notes": []}
        if self.wrong:
            found["failed"] = "wrong results: " + "; ".join(self.wrong)
        return found

    def _products(self) -> list[tuple[str, str, int, int, int]]:
        """(part, model, m, k, n) of every product, with the widths of one of eight ranks."""
        found = []
        for part in ("gather", "scatter"):
            for model, (hidden, first, second) in self.models:
                k, n = (hidden, first // _TP) if part == "gather" else (second // _TP, hidden)
                found += [(part, model, m, k, n) for m in self.rows]
        return [f for f in found if f[0] in self.only]

    def _compile(self) -> None:
        """All variants at once, side by side."""
        for gemm in self.tiles.values():
            problems = []
            for part, _, m, k, n in self._products():
                problems += [_problem(m, n, k, **_FLAGS[form]) for form in FORMS[part]]
            if "fp8" in self.only:
                problems += [_problem(m, n, k, dtype="float8_e4m3fn", scales=True) for _, m, k, n in self._fp8_shapes()]
            gemm.compile_ahead(problems)

    # -- products
    def _gather(self) -> None:
        self._polling("gather")

    def _scatter(self) -> None:
        self._polling("scatter")

    def _polling(self, part: str) -> None:
        import torch

        for kind, model, m, k, n in self._products():
            if kind != part:
                continue
            case = _Operands(self.device, m, k, n)
            candidates: dict[str, Callable[[], Any]] = {
                CUBLAS: lambda case=case: torch.mm(case.gathered, case.w.t(), out=case.out)  # type: ignore[misc]
            }
            for tile, gemm in self.tiles.items():
                for form in FORMS[part]:
                    segments, name = getattr(case, form)(), f"{form} {tile}".strip()
                    kernel = gemm.prepare(_problem(m, n, k, **_FLAGS[form]))
                    self._right(f"{name} {m}x{k}x{n}", functools.partial(kernel, segments), segments)
                    candidates[name] = functools.partial(kernel, segments)
            facts = {"op": part, "model": model, "tp": _TP, "m": m, "k": k, "n": n, "dtype": "bfloat16"}
            for mode, burst in (("isolated", 1), ("back-to-back", _BURST)):
                self._measure(facts | {"mode": mode}, candidates, burst)

    def _fp8_shapes(self) -> list[tuple[str, int, int, int]]:
        return [
            (model, m, second // _TP, hidden)
            for model, (hidden, _, second) in self.models
            for m in self.rows
            if second % (16 * _TP) == 0 and m >= 512
        ]

    def _fp8(self) -> None:
        import torch

        from ..contract import GemmSegment

        for model, m, k, n in self._fp8_shapes():
            a, b = (torch.randn(x, k, device=self.device).to(torch.float8_e4m3fn) for x in (m, n))
            scale_a, scale_b = torch.rand(m, 1, device=self.device) + 0.5, torch.rand(1, n, device=self.device) + 0.5
            out = torch.empty(m, n, device=self.device, dtype=torch.bfloat16)
            one = torch.ones((), device=self.device)
            candidates: dict[str, Callable[[], Any]] = {}
            for name, scales in {"tensor": (one, one), "row": (scale_a, scale_b)}.items():
                args: Any = (a, b.t(), *scales)
                candidates[f"{SCALED} {name}"] = lambda args=args, out=out: torch._scaled_mm(  # type: ignore[misc]
                    *args, out_dtype=torch.bfloat16, out=out
                )
                kernel = self.gemm.prepare(_problem(m, n, k, dtype="float8_e4m3fn", scales=True))
                segments = [GemmSegment(a, b, out, scale_a=scales[0].reshape(-1), scale_b=scales[1].reshape(-1))]
                candidates[f"ours {name}"] = lambda s=segments, kern=kernel: kern(s)  # type: ignore[misc]
                self._right(f"fp8 {name} {m}x{k}x{n}", candidates[f"ours {name}"], segments)
            facts = {"op": "fp8", "model": model, "tp": _TP, "m": m, "k": k, "n": n, "dtype": "float8_e4m3fn"}
            self._measure(facts | {"mode": "isolated"}, candidates, 1)

    # -- all-reduces and host time
    def _reduce(self) -> None:
        """All-reduces by one kernel, two ranks on this GPU, by both protocols: an upper bound of their latency."""
        import torch

        side = torch.cuda.Stream().cuda_stream
        protocols = {"low latency": self._exchanges(1 << 30), "flags": self._exchanges(0)}
        sizes = [(m, hidden) for _, (hidden, _, _) in self.models for m in (1, 2, 4, 8, 32)]
        for m, n in dict.fromkeys(sizes):
            x, residual, *outs = (torch.randn(m, n, device=self.device).bfloat16() for _ in range(6))
            candidates: dict[str, Callable[[], Any]] = {}
            for norm, (protocol, ranks) in itertools.product((False, True), protocols.items()):
                if norm and n * 2 > EXCHANGE_SLOT_NBYTES:
                    continue
                flags = {"bias": False, "residual": norm, "norm": norm}
                pair = [r.prepare(torch.bfloat16, m, n, **flags) for r in ranks]
                if pair[0].choice.few is not (protocol == "low latency"):
                    continue  # it does not fit
                calls = []
                for i, (kernel, stream) in enumerate(zip(pair, (None, side), strict=True)):
                    extra: dict[str, Any] = {"residual": residual, "norm_weight": residual[0].clone(), "eps": 1e-6}
                    extra = extra | {"normed": outs[2 + i]} if norm else {}
                    calls.append(functools.partial(kernel, outs[i], x, stream=stream, **extra))
                candidates[f"{protocol}{', norm' * norm}"] = functools.partial(_both, calls[1], calls[0])
            facts = {"op": "all-reduce of 2 on one GPU", "m": m, "n": n, "dtype": "bfloat16"}
            self._measure(facts | {"mode": "back-to-back"}, candidates, 10)
            if not torch.equal(outs[0], outs[1]):
                self.wrong.append(f"all-reduce {m}x{n}: ranks differ")

    def _host(self) -> None:
        """Host microseconds a call, by number of segments."""
        import torch

        case = _Operands(self.device, 512, 512, 1024)
        kernel = self.gemm.prepare(_problem(512, 1024, 512, polls=True))
        segments = case.consume()
        x, side, sums = (
            torch.randn(1, 1024, device=self.device).bfloat16(),
            torch.cuda.Stream().cuda_stream,
            self.gemm.prepare_sum(torch.bfloat16, 2),
        )
        out, other = torch.empty_like(x), torch.empty_like(x)
        one, two = (
            r.prepare(torch.bfloat16, 1, 1024, bias=False, residual=False, norm=False) for r in self._exchanges(1 << 16)
        )
        candidates: dict[str, Callable[[], Any]] = {
            "torch.mm": lambda: torch.mm(case.gathered, case.w.t(), out=case.out),
            "3 segments": lambda: kernel(segments),
            "3 segments, made anew": lambda: kernel(case.consume()),
            "sum of 2": lambda: sums(out, [x, x]),
            "2 all-reduces": lambda: (two(other, x, stream=side), one(out, x)),
        }
        found = {}
        for name, call in candidates.items():
            call()
            samples = []
            for _ in range(self.options.rounds):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    call()
                samples.append((time.perf_counter() - start) / 20 * 1e6)
            found[name] = summary(samples)
        self.cases.append({"op": "host", "mode": "host time", "samples": found})

    def _exchanges(self, few_nbytes: int) -> list[Any]:
        """All-reduces of two ranks that exchange rows on this GPU."""
        import torch

        from ..contract import ExchangeMemory

        nbytes, words = self.gemm.exchange_nbytes(2, EXCHANGE_PROGRAMS, EXCHANGE_SLOT_NBYTES)
        data = [torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        flags = [torch.zeros(2, words, dtype=torch.int64, device=self.device) for _ in range(2)]
        self._kept += [*data, *flags]
        found = []
        for rank in range(2):
            raised, waited = (f[rank].data_ptr() for f in flags), (flags[rank][q].data_ptr() for q in range(2))
            addresses = (tuple(d.data_ptr() for d in data), tuple(raised), tuple(waited))
            memory = ExchangeMemory(rank, *addresses, EXCHANGE_PROGRAMS, EXCHANGE_SLOT_NBYTES)
            found.append(self.gemm.exchange(memory, few_nbytes=few_nbytes))
        torch.cuda.synchronize()
        return found

    # -- measuring
    def _right(self, what: str, call: Callable[[], Any], segments: Sequence[GemmSegment]) -> None:
        import torch

        for s in segments:
            s.out.fill_(float("nan"))
        call()
        torch.cuda.synchronize()
        for s in segments:
            want = s.a.float() @ s.b.float().t()
            if s.scale_a is not None and s.scale_b is not None:
                want *= s.scale_a.reshape(-1, 1) * s.scale_b.reshape(1, -1)
            for add in s.addends:
                want += add.float()
            error = float((s.out.float() - want).norm() / want.norm())
            if not error < _ERROR:
                self.wrong.append(f"{what}: error {error:.1e}")
                return

    def _measure(self, facts: dict[str, Any], candidates: dict[str, Callable[[], Any]], burst: int) -> None:
        import torch

        names, rounds = list(candidates), self.options.rounds if burst == 1 else max(5, self.options.rounds // 3)
        events = {n: [tuple(torch.cuda.Event(enable_timing=True) for _ in "se") for _ in range(rounds)] for n in names}
        for call in candidates.values():
            call()
        torch.cuda.synchronize()
        for i in range(rounds):
            for name in names:
                start, end = events[name][i]
                torch.cuda._sleep(200_000 + 120_000 * burst)
                start.record()
                for _ in range(burst):
                    candidates[name]()
                end.record()
            torch.cuda.synchronize()
        found = {n: summary([1e3 * s.elapsed_time(e) / burst for s, e in pairs]) for n, pairs in events.items()}
        self.cases.append({**facts, "samples": found})


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    first()
    second()


_FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "consume": {"polls": True},
    "produce": {"polls": True},
    "fold": {"polls": True, "addends": True},
}


def _problem(m: int, n: int, k: int, *, dtype: str = "bfloat16", **flags: Any) -> GemmProblem:
    from ..contract import GemmProblem

    return GemmProblem(m, n, k, dtype, "bfloat16", "cuda", **flags)


class _Operands:
    """Tensors of one product as rank 0 of two has them, and its flags, all up."""

    def __init__(self, device: torch.device, m: int, k: int, n: int) -> None:
        import torch

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        self.m, self.gathered, self.w, self.x = m, random(m, k), random(n, k), random(m // 2, k)
        self.partial = random(m // 2, n)
        self.out, self.sent = (torch.empty(m, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.words = _table(torch.full((2, 8), 1 << 40, dtype=torch.int64, device=device))

    def _halves(self) -> list[slice]:
        """The peer's rows in two chunks."""
        half, rest = self.m // 2, self.m - self.m // 2
        return [slice(half, half + rest // 2), slice(half + rest // 2, self.m)]

    def plain(self) -> list[GemmSegment]:
        from ..contract import GemmSegment

        return [GemmSegment(self.gathered, self.w, self.out)]

    def consume(self) -> list[GemmSegment]:
        from ..contract import GemmSegment, Slot

        own = GemmSegment(self.x, self.w, self.out[: self.m // 2])
        return [own] + [
            GemmSegment(self.gathered[p], self.w, self.out[p], ready=((1, Slot(self.words, i, 1)),))
            for i, p in enumerate(self._halves())
        ]

    def produce(self, *, fold: bool = False) -> list[GemmSegment]:
        from ..contract import GemmSegment, Slot

        made = [
            GemmSegment(self.gathered[p], self.w, self.sent[p], done=((1, Slot(self.words, i, 1)),))
            for i, p in enumerate(self._halves())
        ]
        own = GemmSegment(self.gathered[: self.m // 2], self.w, self.out[: self.m // 2])
        if fold:
            own = replace(own, addends=(self.partial,), ready=((1, Slot(self.words, 4, 1)),))
        return [*made, own]

    def fold(self) -> list[GemmSegment]:
        return self.produce(fold=True)


def _table(memory: Tensor) -> Any:
    """Slots in this GPU's memory: row 0 is read here, row 1 stands for the peer's."""
    from ..contract import DeviceSlotTable

    class Words(DeviceSlotTable):
        words = memory.shape[1]

        def read(self, writer: int, word: int) -> int:
            return int(memory[0, word])

        def close(self) -> None:
            """Nothing to give back: the tensor is."""

        def address(self, writer: int, word: int) -> int:
            return memory.data_ptr() + 8 * word

        def peer_address(self, peer: int, word: int) -> int:
            return memory.data_ptr() + 8 * (memory.shape[1] + word)

    return Words()
