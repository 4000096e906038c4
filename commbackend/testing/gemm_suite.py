"""The conformance suite of GEMM providers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ..contract import GemmProblem, GemmProvider, GemmSegment, Slot, SlotTable
from ..errors import Unavailable, Unsupported
from .harness import load

__all__ = ["GemmSuite"]
_SHAPES = [(1, 1, 1), (7, 5, 3), (64, 48, 32), (33, 65, 127), (128, 16, 1024), (5, 256, 8)]
_PAIRS = [
    ("float64", "float64"),
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "float32"),
    ("float16", "float32"),
]
#: Unit roundoff of an accumulator in fp32, and in fp64.
_UNIT = {torch.float64: 2.0**-53}


@functools.cache
def _shared(kind: type[GemmProvider]) -> GemmProvider:
    """One provider for all tests: what one of them has compiled, the others use."""
    return kind()


class GemmSuite:
    """One test for every promise of ``contract.GemmProvider``. Subclass it and name the provider.

    Attributes:
        provider: "module:Class".
        device: "cpu" or "cuda".

    Problems that ``supports`` refuses are skipped with its reason. For kernels that poll, override ``slots``.
    """

    provider: ClassVar[str]
    device: ClassVar[str] = "cpu"

    # -- helpers
    @property
    def gemm(self) -> GemmProvider:
        kind = load(self.provider)
        try:
            kind.probe(torch.device(self.device))
        except Unavailable as e:
            pytest.skip(f"{kind.name}: {e}")
        return _shared(kind)

    def slots(self, words: int) -> tuple[SlotTable, Callable[[int, int], None]]:
        """A table that kernels of this process poll and raise, and a function (word, value) that raises a word."""
        raise pytest.skip.Exception("this suite was given no slots to poll: override GemmSuite.slots")

    @property
    def stream(self) -> int | None:
        return int(torch.cuda.current_stream().cuda_stream) if self.device == "cuda" else None

    def random(self, rows: int, cols: int, dtype: torch.dtype, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, cols, generator=generator, dtype=torch.float64).to(dtype).to(self.device)

    def launch(self, segments: Sequence[GemmSegment], k: int, **flags: Any) -> None:
        """Prepare for ``segments`` and run them."""
        first = segments[0]
        problem = GemmProblem(
            m=sum(s.a.shape[0] for s in segments),
            n=first.b.shape[0],
            k=k,
            dtype=str(first.a.dtype)[6:],
            out_dtype=str(first.out.dtype)[6:],
            device=self.device,
            bias=any(s.bias is not None for s in segments),
            addends=any(s.addends for s in segments),
            **flags,
        )
        gemm = self.gemm
        if reason := gemm.supports(problem):
            pytest.skip(f"{gemm.name}: {reason}")
        gemm.prepare(problem)(segments, stream=self.stream)

    def check(
        self, found: Tensor, a: Tensor, b: Tensor, extra: Sequence[Tensor] = (), unit: float | None = None
    ) -> None:
        """Compare with fp64 under the bound of an fp32 (fp64) accumulation rounded once; ``unit``: its roundoff."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        exact, size = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
        for e in extra:
            exact, size = exact + e.double(), size + e.double().abs()
        unit = unit or _UNIT.get(a.dtype, 2.0**-24)
        bound = torch.finfo(found.dtype).eps * exact.abs() + (a.shape[1] + len(extra) + 1) * unit * size + 1e-300
        error = (found.double() - exact).abs()
        assert bool((error <= bound).all()), f"largest error {error.max().item():.3g} of {exact.abs().max().item():.3g}"

    def empty(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        """Memory in which nothing a kernel forgets can pass for a result."""
        return torch.full((rows, cols), float("nan"), dtype=dtype, device=self.device)

    # -- promises
    @pytest.mark.parametrize(("dtype", "out_dtype"), _PAIRS)  # type: ignore[untyped-decorator]
    def test_products(self, dtype: str, out_dtype: str) -> None:
        """out = a @ b.T, accumulated in fp32 and rounded once, for every pair of dtypes."""
        for m, n, k in _SHAPES:
            a, b = self.random(m, k, getattr(torch, dtype), 1), self.random(n, k, getattr(torch, dtype), 2)
            out = self.empty(m, n, getattr(torch, out_dtype))
            self.launch([GemmSegment(a, b, out)], k)
            self.check(out, a, b)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # type: ignore[untyped-decorator]
    @pytest.mark.parametrize("layout", ["b transposed", "a transposed", "sliced", "expanded", "out in wider rows"])  # type: ignore[untyped-decorator]
    def test_strides(self, layout: str, dtype: str) -> None:
        """Operands of any strides; ``out`` with any row stride, nothing written beside it."""
        m, n, k, kind = 24, 40, 56, getattr(torch, dtype)
        a, b, room = self.random(m, k, kind, 3), self.random(n, k, kind, 4), self.empty(m, n + 8, kind)
        out = self.empty(m, n, kind)
        if layout == "b transposed":
            b = b.t().contiguous().t()
        elif layout == "a transposed":
            a = a.t().contiguous().t()
        elif layout == "sliced":
            a, b = self.random(2 * m, 2 * k, kind, 5)[::2, ::2], self.random(n, 2 * k, kind, 6)[:, k:]
        elif layout == "expanded":
            a = self.random(1, k, kind, 7).expand(m, k)
        else:
            out = room[:, 3 : 3 + n]
        self.launch([GemmSegment(a, b, out)], k)
        self.check(out, a, b)
        assert bool(room[:, :3].isnan().all() and room[:, 3 + n :].isnan().all()), "columns beside out were written"

    @pytest.mark.parametrize(("dtype", "out_dtype"), _PAIRS)  # type: ignore[untyped-decorator]
    def test_bias_and_addends(self, dtype: str, out_dtype: str) -> None:
        """Bias, then addends in order, added before rounding."""
        m, n, k, kind, result = 18, 34, 50, getattr(torch, dtype), getattr(torch, out_dtype)
        a, b, bias = self.random(m, k, kind, 8), self.random(n, k, kind, 9), self.random(1, n, result, 10)[0]
        addends = tuple(self.random(m, n, result, 11 + i) for i in range(3))
        for has_bias in (None, bias):
            for count in range(4):
                out = self.empty(m, n, result)
                self.launch([GemmSegment(a, b, out, bias=has_bias, addends=addends[:count])], k)
                self.check(out, a, b, ([] if has_bias is None else [has_bias]) + list(addends[:count]))

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])  # type: ignore[untyped-decorator]
    @pytest.mark.parametrize("by_row", [False, True])  # type: ignore[untyped-decorator]
    def test_scaled_products(self, by_row: bool, dtype: str) -> None:
        """fp8 operands times their scales, one a tensor or one a row, + bias + addends; rounded once."""
        kind, n, k = getattr(torch, dtype), 48, 64
        for out_dtype in (torch.bfloat16, torch.float32):
            for rows in ((40,), (16, 0, 24)):
                m = sum(rows)
                a, b = self.random(m, k, kind, 40), self.random(n, k, kind, 41)
                scale_a, scale_b = (self.random(1, x if by_row else 1, torch.float32, 42)[0].abs() for x in (m, n))
                bias, addend = self.random(1, n, out_dtype, 43)[0], self.random(m, n, out_dtype, 44)
                out, at, segments = self.empty(m, n, out_dtype), 0, []
                for count in rows:
                    take = slice(at, at + count)
                    row = scale_a[take] if by_row else scale_a
                    made = GemmSegment(a[take], b, out[take], bias, (addend[take],), scale_a=row, scale_b=scale_b)
                    segments.append(made)
                    at += count
                self.launch(segments, k, scales=True)
                wide = (a.double() * scale_a.double().reshape(-1, 1), b.double() * scale_b.double().reshape(-1, 1))
                self.check(out, *wide, [bias, addend], unit=2.0**-18)

    def test_addends_are_added_in_order(self) -> None:
        """In fp32 the order shows: (3 + 2**25) - 2**25 + 1 is not 4."""
        a, b = self._exact("float32")
        addends = [torch.full((4, 4), v, device=self.device) for v in (2.0**25, -(2.0**25), 1.0)]
        for order in ((0, 1, 2), (2, 0, 1), (0, 2, 1)):
            out, wanted = self.empty(4, 4, torch.float32), torch.full((4, 4), 3.0, device=self.device)
            for i in order:
                wanted = wanted + addends[i]
            self.launch([GemmSegment(a, b, out, addends=tuple(addends[i] for i in order))], 3)
            assert torch.equal(out, wanted), f"order {order}: {out[0, 0]} instead of {wanted[0, 0]}"

    def test_rounding_comes_last(self) -> None:
        """bf16 results: 3 + 256 + 1.5 rounds to 260; with 259 rounded in between it would be 262."""
        a, b = self._exact("bfloat16")
        addends = tuple(torch.full((4, 4), v, dtype=torch.bfloat16, device=self.device) for v in (256.0, 1.5))
        out = self.empty(4, 4, torch.bfloat16)
        self.launch([GemmSegment(a, b, out, addends=addends)], 3)
        assert bool((out == 260).all()), out

    def _exact(self, dtype: str) -> tuple[Tensor, Tensor]:
        """Operands whose product is 3 everywhere."""
        kind = getattr(torch, dtype)
        return torch.ones(4, 3, dtype=kind, device=self.device), torch.ones(4, 3, dtype=kind, device=self.device)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # type: ignore[untyped-decorator]
    def test_an_addend_may_be_the_output(self, dtype: str) -> None:
        """``out`` among the addends accumulates onto it, at any place in the order."""
        m, n, k, kind = 16, 24, 32, getattr(torch, dtype)
        a, b, other = self.random(m, k, kind, 14), self.random(n, k, kind, 15), self.random(m, n, kind, 16)
        for place in range(3):
            out = self.random(m, n, kind, 17)
            before = out.clone()
            addends, wanted = [other, other], [other, other]
            addends.insert(place, out)
            wanted.insert(place, before)
            self.launch([GemmSegment(a, b, out, addends=tuple(addends))], k)
            self.check(out, a, b, wanted)

    def test_zero_sizes(self) -> None:
        """No rows, no columns: nothing happens. No inner dimension: bias and addends alone."""
        for m, n, k in ((0, 4, 8), (4, 0, 8), (0, 0, 0)):
            a, b = self.random(m, k, torch.float32, 18), self.random(n, k, torch.float32, 19)
            self.launch([GemmSegment(a, b, self.empty(m, n, torch.float32))], k)
        out, bias = self.empty(3, 4, torch.float32), self.random(1, 4, torch.float32, 20)[0]
        a, b = self.random(3, 0, torch.float32, 21), self.random(4, 0, torch.float32, 22)
        self.launch([GemmSegment(a, b, out, bias=bias)], 0)
        self.check(out, a, b, [bias])

    def test_segments_write_their_own_rows(self) -> None:
        """Several segments of one launch, some empty, some with addends, into rows of one output; the rest stays."""
        k, n, rows = 40, 24, [5, 0, 17, 1]
        x, b, out = (
            self.random(23, k, torch.float32, 23),
            self.random(n, k, torch.float32, 24),
            self.empty(30, n, torch.float32),
        )
        addend, start, segments = self.random(23, n, torch.float32, 25), 0, []
        for i, count in enumerate(rows):
            take = slice(start, start + count)
            extra = (addend[take],) if i == 2 else ()
            segments.append(GemmSegment(x[take], b, out[take], addends=extra))
            start += count
        self.launch(segments, k)
        self.check(out[:5], x[:5], b)
        self.check(out[5:22], x[5:22], b, [addend[5:22]])
        self.check(out[22:23], x[22:23], b)
        assert bool(out[23:].isnan().all()), "rows of no segment were written"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # type: ignore[untyped-decorator]
    def test_some_segments_have_a_bias(self, dtype: str) -> None:
        """Segments with and without bias and addends share a launch; each gets its own alone."""
        m, n, k, kind = 16, 24, 40, getattr(torch, dtype)
        a, b, bias = self.random(3 * m, k, kind, 30), self.random(n, k, kind, 31), self.random(1, n, kind, 32)[0]
        addend = self.random(m, n, kind, 33)
        for place in range(3):
            out, segments = self.empty(3 * m, n, kind), []
            rows = [slice(i * m, (i + 1) * m) for i in range(3)]
            for i, take in enumerate(rows):
                more: dict[str, Any] = {"bias": bias, "addends": (addend,)} if i == place else {}
                segments.append(GemmSegment(a[take], b, out[take], **more))
            self.launch(segments, k)
            for i, take in enumerate(rows):
                self.check(out[take], a[take], b, [bias, addend] if i == place else [])

    def test_same_bits_again(self) -> None:
        """A prepared kernel gives the same bits at every launch."""
        a, b = self.random(40, 300, torch.float32, 26), self.random(50, 300, torch.float32, 27)
        outs = [self.empty(40, 50, torch.float32) for _ in range(3)]
        for out in outs:
            self.launch([GemmSegment(a, b, out)], 300)
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])

    def test_what_it_cannot_do_has_a_reason(self) -> None:
        """``supports`` gives one line, and ``prepare`` raises Unsupported with it."""
        gemm = self.gemm
        for dtype, out_dtype in (("int64", "int64"), ("complex64", "complex64"), ("no_such_dtype", "float32")):
            problem = GemmProblem(8, 8, 8, dtype, out_dtype, self.device)
            reason = gemm.supports(problem)
            assert reason and "\n" not in reason, f"{dtype}: {reason!r}"
            with pytest.raises(Unsupported) as caught:
                gemm.prepare(problem)
            assert reason in str(caught.value)

    def test_granularity(self) -> None:
        """A kernel states the rows of its tiles."""
        gemm = self.gemm
        problem = GemmProblem(64, 64, 64, "float32", "float32", self.device)
        if reason := gemm.supports(problem):
            problem = GemmProblem(64, 64, 64, "bfloat16", "bfloat16", self.device)
            if gemm.supports(problem):
                pytest.skip(f"{gemm.name}: {reason}")
        assert gemm.prepare(problem).granularity >= 1

    def test_polling(self) -> None:
        """Rows wait for their ready slots; done slots rise after their rows are stored; other rows do not wait."""
        m, n, k = 64, 64, 64
        a, b = self.random(2 * m, k, torch.bfloat16, 28), self.random(n, k, torch.bfloat16, 29)
        out = self.empty(2 * m, n, torch.bfloat16)
        probe = GemmProblem(2 * m, n, k, "bfloat16", "bfloat16", self.device, polls=True)
        gemm = self.gemm
        if reason := gemm.supports(probe):
            pytest.skip(f"{gemm.name}: {reason}")
        table, raise_word = self.slots(4)
        free = GemmSegment(a[:m], b, out[:m], done=((0, Slot(table, 0, 1)),))
        gated = GemmSegment(a[m:], b, out[m:], ready=((0, Slot(table, 1, 7)),), done=((0, Slot(table, 2, 1)),))
        gemm.prepare(probe)([free, gated], stream=self.stream)
        self._rises(table, 0)
        time.sleep(0.1)
        assert table.read(0, 2) == 0, "gated rows did not wait"
        raise_word(1, 7)
        self._rises(table, 2)
        self.check(out, a, b)

    @staticmethod
    def _rises(table: SlotTable, word: int) -> None:
        until = time.monotonic() + 10.0
        while table.read(0, word) < 1:
            assert time.monotonic() < until, f"done word {word} did not rise within 10 s"
            time.sleep(0.001)
