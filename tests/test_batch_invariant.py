"""``batch_invariant=True``: a row's bits depend on the row and the weight, not on other rows or the schedule."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from commbackend import ops
from commbackend.communicator import Communicator
from commbackend.config import resolve
from commbackend.contract import GemmProblem, GemmSegment
from commbackend.errors import ConfigError, Unsupported
from commbackend.gemm import torch_blocks
from commbackend.gemm.torch_blocks import TorchBlocks
from commbackend.gemm.torch_mm import TorchMM
from commbackend.group import Group
from commbackend.testing import run_threads
from commbackend.testing.gemm_suite import GemmSuite
from commbackend.testing.soak import calls

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class TestBlocks(GemmSuite):
    """What every provider promises."""

    provider = "commbackend.gemm.torch_blocks:TorchBlocks"


@pytest.mark.parametrize("transport", ["local", "shm"])
def test_rows_do_not_depend_on_the_others(transport: str) -> None:
    compared, differing = calls.invariant_rows(random.Random(21), transport, 25)
    assert compared > 5000 and differing == []


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "count"), [("local", 1000), ("shm", 1000), ("gloo", 100)])
def test_rows_of_a_thousand_shapes(transport: str, count: int) -> None:
    compared, differing = calls.invariant_rows(random.Random(22), transport, count)
    assert compared > 200 * count and differing == []


def _product(provider: Any, a: torch.Tensor, b: torch.Tensor, **more: Any) -> torch.Tensor:
    out = torch.empty(a.shape[0], b.shape[0], dtype=more.pop("out_dtype", a.dtype))
    problem = GemmProblem(
        a.shape[0], b.shape[0], a.shape[1], str(a.dtype)[6:], str(out.dtype)[6:], "cpu",
        bias="bias" in more, addends="addends" in more, scales="scale_a" in more,
    )  # fmt: skip
    provider.prepare(problem)([GemmSegment(a, b, out, **more)])
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["nt", "nn"])
def test_bias_and_addends_too(dtype: torch.dtype, form: str) -> None:
    """Every row of a product of many is that of a product of its own; and rows lie apart or together."""
    dice = random.Random(23)
    for _ in range(6):
        m, k, n = dice.randrange(2, 90), dice.randrange(1, 200), dice.randrange(1, 100)
        a, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
        b = torch.randn(n, k).to(dtype) if form == "nt" else torch.randn(k, n).to(dtype).t()
        more = torch.randn(m, n).to(dtype), torch.randn(m, n).to(dtype)
        provider = TorchBlocks()
        for fused in ({}, {"bias": bias}, {"bias": bias, "addends": more}):
            whole = _product(provider, a, b, **fused)
            spread = _product(provider, torch.cat([a, a], 1)[:, :k], b, **fused)
            assert torch.equal(whole, spread)
            for row in (0, m // 2, m - 1):
                alone = {**fused, **({"addends": tuple(e[row : row + 1] for e in more)} if "addends" in fused else {})}
                assert torch.equal(_product(provider, a[row : row + 1], b, **alone)[0], whole[row])


def test_scales_too() -> None:
    a, b = (torch.randn(r, 48).to(torch.float8_e4m3fn) for r in (50, 24))
    scale_a, scale_b, provider = torch.rand(50), torch.rand(24), TorchBlocks()
    whole = _product(provider, a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    want = _product(TorchMM(), a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    torch.testing.assert_close(whole, want)
    for row in (0, 31, 49):
        one = slice(row, row + 1)
        alone = _product(provider, a[one], b, scale_a=scale_a[one], scale_b=scale_b, out_dtype=torch.bfloat16)
        assert torch.equal(alone[0], whole[row])


def test_a_library_that_treats_places_differently_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of a block of 32 or 64 differs: blocks of 16 are taken, and rows agree."""
    real, sizes = torch_blocks.multiply, []

    def odd(s: GemmSegment) -> None:
        real(s)
        sizes.append(s.a.shape[0])
        if s.a.shape[0] > 16:
            s.out[-1] += 1e-3

    monkeypatch.setattr(torch_blocks, "multiply", odd)
    a, b, provider = torch.randn(64, 32), torch.randn(8, 32), TorchBlocks()
    whole = _product(provider, a, b)
    assert set(sizes[-4:]) == {16} and torch.equal(_product(provider, a[63:], b)[0], whole[63])


def test_without_it_rows_do_depend_on_the_others() -> None:
    """What the promise is for: this library's products of different heights differ, so the tests above can fail."""
    dice, provider, differing = random.Random(24), TorchMM(), 0
    for _ in range(60):
        k, n, dtype = dice.randrange(100, 600), dice.randrange(1, 300), dice.choice(DTYPES[:3])
        a, b = torch.randn(61, k).to(dtype), torch.randn(n, k).to(dtype)
        differing += not torch.equal(_product(provider, a[:3], b), _product(provider, a, b)[:3])
    if not differing:
        pytest.skip("the BLAS of this machine gives rows the same bits at any height, as far as sixty products show")


def _refusals(rank: int, group: Group) -> list[str]:
    said = []
    for number, (settings, device) in enumerate(itertools.product(REFUSED, [CPU])):
        own = Group.from_store(group.store, rank, group.size, timeout_s=20.0, name=f"refused {number}")
        with pytest.raises((ConfigError, Unsupported)) as caught:
            Communicator(own, resolve(batch_invariant=True, **settings), device)
        said.append(str(caught.value))
    return said


REFUSED: list[dict[str, Any]] = [
    {"transport": "local", "numerics": "library"},
    {"transport": "local", "gemm": "torch"},
    {"transport": "off"},
]


def test_what_cannot_keep_it_is_refused() -> None:
    for said in run_threads(_refusals, 2, timeout_s=60):
        assert all("batch_invariant" in text for text in said) and len(set(said)) == 3, said


def _disagree(rank: int, group: Group) -> str:
    with pytest.raises(ConfigError) as caught:
        Communicator(group, resolve(transport="local", batch_invariant=rank == 0), CPU)
    return str(caught.value)


def test_ranks_agree_on_it() -> None:
    assert all("batch_invariant" in said for said in run_threads(_disagree, 2, timeout_s=60))


def _gradients(rank: int, group: Group) -> bool:
    own = Communicator(group, resolve(transport="local", batch_invariant=True), CPU)
    x, w = torch.randn(6, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    ops.matmul_all_reduce(x, w, own).sum().backward()
    own.close()
    want = torch.ones(6, 4) @ w.detach()
    return x.grad is not None and torch.allclose(x.grad, want)


def test_gradients_still_work() -> None:
    assert all(run_threads(_gradients, 2, timeout_s=60))
