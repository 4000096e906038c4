"""The GEMM suite's own proof: kernels that are wrong in one way each are caught by the test that is named here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from commbackend.contract import GemmKernel, GemmProblem, GemmProvider, GemmSegment
from commbackend.testing import GemmSuite


def _right(s: GemmSegment) -> torch.Tensor:
    extra = ([] if s.bias is None else [s.bias]) + list(s.addends)
    wide = torch.float64 if s.a.dtype == torch.float64 else torch.float32
    total = s.a.to(wide) @ s.b.to(wide).t()
    for e in extra:
        total = total + e
    return total


def _no_bias(s: GemmSegment) -> None:
    s.out.copy_(_right(GemmSegment(s.a, s.b, s.out, addends=s.addends)))


_SEEN: list[torch.Tensor] = []


def _bias_everywhere(s: GemmSegment) -> None:
    if s.bias is not None:
        _SEEN[:] = [s.bias]
    bias = s.bias if s.bias is not None or not _SEEN or _SEEN[0].shape[0] != s.out.shape[1] else _SEEN[0]
    s.out.copy_(_right(GemmSegment(s.a, s.b, s.out, bias, s.addends)))


def _addends_reversed(s: GemmSegment) -> None:
    s.out.copy_(_right(GemmSegment(s.a, s.b, s.out, bias=s.bias, addends=s.addends[::-1])))


def _rounds_between(s: GemmSegment) -> None:
    total = (s.a.double() @ s.b.double().t()).to(s.out.dtype)
    for e in ([] if s.bias is None else [s.bias]) + list(s.addends):
        total = total + e
    s.out.copy_(total)


def _ignores_strides_of_b(s: GemmSegment) -> None:
    flat = torch.as_strided(s.b, s.b.shape, (s.b.shape[1], 1))
    s.out.copy_(_right(GemmSegment(s.a, flat, s.out, s.bias, s.addends)))


def _writes_over_aliases(s: GemmSegment) -> None:
    s.out.copy_(_right(GemmSegment(s.a, s.b, s.out)))
    for e in ([] if s.bias is None else [s.bias]) + list(s.addends):
        s.out.add_(e)


def _writes_beside(s: GemmSegment) -> None:
    s.out.copy_(_right(s))
    if s.out.stride(0) > s.out.shape[1] and s.out.numel():
        torch.as_strided(s.out, (s.out.shape[0], s.out.shape[1] + 1), s.out.stride()).select(1, -1).fill_(0)


def _forgets_the_last_row(s: GemmSegment) -> None:
    s.out[:-1].copy_(_right(s)[:-1])


def _accumulates_in_low_precision(s: GemmSegment) -> None:
    total = torch.zeros(s.out.shape, dtype=s.a.dtype)
    for i in range(0, s.a.shape[1], 8):
        total = total + s.a[:, i : i + 8] @ s.b[:, i : i + 8].t()
    s.out.copy_(_right(GemmSegment(total, torch.eye(total.shape[1], dtype=total.dtype), s.out, s.bias, s.addends)))


def _fails_without_inner_dimension(s: GemmSegment) -> None:
    if s.a.shape[1]:
        s.out.copy_(_right(s))


class Wrong(GemmProvider):
    """Multiplies by ``how``."""

    name: ClassVar[str] = "wrong"
    how: ClassVar[Callable[[GemmSegment], None]]

    @classmethod
    def probe(cls, device: torch.device) -> None: ...

    def supports(self, problem: GemmProblem) -> str | None:
        return "no" if problem.polls else None

    def prepare(self, problem: GemmProblem) -> GemmKernel:
        how = type(self).how

        class Kernel:
            granularity = 1

            def __call__(self, segments: Sequence[GemmSegment], *, stream: Any = None, sm_limit: int = 0) -> None:
                for s in segments:
                    how(s)

        return Kernel()


MUTANTS: list[tuple[Callable[[GemmSegment], None], str, tuple[Any, ...]]] = [
    (_no_bias, "test_bias_and_addends", ("float32", "float32")),
    (_bias_everywhere, "test_some_segments_have_a_bias", ("float32",)),
    (_addends_reversed, "test_addends_are_added_in_order", ()),
    (_rounds_between, "test_rounding_comes_last", ()),
    (_ignores_strides_of_b, "test_strides", ("b transposed", "float32")),
    (_writes_over_aliases, "test_an_addend_may_be_the_output", ("float32",)),
    (_writes_beside, "test_strides", ("out in wider rows", "float32")),
    (_forgets_the_last_row, "test_products", ("float32", "float32")),
    (_accumulates_in_low_precision, "test_products", ("bfloat16", "float32")),
    (_fails_without_inner_dimension, "test_zero_sizes", ()),
]


@pytest.mark.parametrize(("how", "test", "args"), MUTANTS, ids=[m[0].__name__.strip("_") for m in MUTANTS])
def test_a_wrong_kernel_is_caught(how: Callable[[GemmSegment], None], test: str, args: tuple[Any, ...]) -> None:
    Wrong.how = staticmethod(how)  # type: ignore[assignment]

    class Suite(GemmSuite):
        provider = f"{__name__}:Wrong"

    with pytest.raises(AssertionError):
        getattr(Suite(), test)(*args)
