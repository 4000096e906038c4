"""All-reduces by one kernel without a GPU: kernels compiled for real targets and their PTX read, what is chosen, and
that calls compile and load nothing.
"""

from __future__ import annotations

import re

import pytest
import torch
from plan_cases import CAPS
from test_triton_tile import FakeDriver

from commbackend.contract import ExchangeMemory
from commbackend.errors import CommTimeout, ShapeError, Unsupported
from commbackend.gemm.triton_launch import Runtime
from commbackend.gemm.triton_tile import TritonTile
from commbackend.plan import EXCHANGE_PROGRAMS, EXCHANGE_SLOT_NBYTES, Problem
from commbackend.schedules.catalog import KERNEL_NBYTES, foldable

triton = pytest.importorskip("triton", reason="triton is not installed here")
BF16 = torch.bfloat16


def memory(size=2, rank=0):
    at = tuple(range(1 << 20, (1 << 20) * (size + 1), 1 << 20))
    return ExchangeMemory(rank, at, at, tuple(a + 4096 for a in at), EXCHANGE_PROGRAMS, EXCHANGE_SLOT_NBYTES)


def provider(capability=90):
    return TritonTile(runtime=Runtime(FakeDriver(capability), torch.device("cpu")))


def in_order(ptx, *patterns):
    at = 0
    for pattern in patterns:
        found = re.compile(pattern).search(ptx, at)
        assert found, f"{pattern} is missing, or stands before what must precede it"
        at = found.end()


FLAGS_ORDER = (
    r"st\.global\.v",
    r"bar\.sync",
    r"fence\.acq_rel\.sys;\s*(\.loc.*\n)?\s*st\.release\.sys\.global\.b64 \[addr\]",
    r"ld\.acquire\.sys",
    r"bar\.sync",
    r"ld\.global\.cg",
)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_flags_are_raised_after_the_rows_and_acquired_before_them(capability, norm):
    one = provider(capability).exchange(memory())
    kernel = one.prepare(BF16, 32, 4096, bias=norm, residual=norm, norm=norm)
    assert not kernel.choice.few
    ptx = kernel._loaded.asm["ptx"]
    in_order(ptx, *FLAGS_ORDER)
    with pytest.raises(AssertionError):
        in_order(ptx.replace("bar.sync", ""), *FLAGS_ORDER)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_words_of_the_low_latency_protocol_are_whole(capability, dtype):
    """Rows travel in words of 8 bytes that are stored and loaded as one, at system scope; nothing else is stored to
    peers, so nothing needs an order.
    """
    kernel = provider(capability).exchange(memory()).prepare(dtype, 1, 1024, bias=False, residual=False, norm=False)
    assert kernel.choice.few
    ptx = kernel._loaded.asm["ptx"]
    before, after = ptx.split("ld.volatile.global", 1)
    assert after.startswith((".v2.b64", ".b64")), "a word is not loaded whole"
    stored = re.findall(r"\bst\.[\w.]+", before)
    assert stored and set(stored) == {"st.relaxed.sys.global.b64"}, "a word is not stored whole"
    each = 32 // (8 * dtype.itemsize)
    assert len(stored) == 2 * 1024 // each // 128, "both ranks, 128 threads"
    assert "4611686018427387904" in after and "globaltimer" in after and "fence" not in before


def test_what_is_chosen():
    one = provider().exchange(memory())
    choose = one.choose
    assert choose(BF16, 1, 8192, norm=False) == (True, 1024, 8)
    assert choose(BF16, 1, 8192, norm=True) == (False, 8192, 1)
    assert choose(BF16, 2, 8192, norm=False) == (False, 1024, 16)
    assert choose(BF16, 64, 8192, norm=False) == (False, 1024, 512)
    assert choose(BF16, 64, 8192, norm=True) == (False, 8192, 64)
    assert choose(torch.float32, 3, 328, norm=False) == (True, 512, 3)
    assert choose(BF16, 9, 1032, norm=False).block == 128, "blocks leave few columns idle"
    for dtype, rows, cols, norm in ((BF16, 1, 12, False), (torch.float64, 1, 8, False), (BF16, 64, 16384, True)):
        with pytest.raises(Unsupported):
            choose(dtype, rows, cols, norm=norm)
    with pytest.raises(Unsupported, match="2 to 16 ranks"):
        provider().exchange(memory(17))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_whatever_the_planner_gives_it_fits(size, norm):
    """Every size that ``one_shot_kernel`` takes has room in the slots."""
    one, taken = provider().exchange(memory(size)), 0
    flags = ("norm", "residual") if norm else ()
    for dtype in ("bfloat16", "float32"):
        for cols in (8, 64, 1000, 1032, 4096, 8192, 12288, 16384, 65536, 131072):
            for rows in (1, 2, 3, 31, 32, 33, 64, 65, 1000, 4096):
                split = (rows, *(0,) * (size - 1))
                problem = Problem("matmul_all_reduce", split, k=64, n=(cols,), dtype=dtype, flags=flags)
                if foldable(problem, CAPS["kernels"]):
                    choice, taken = one.choose(getattr(torch, dtype), rows, cols, norm=norm), taken + 1
                    assert choice.tasks == rows * -(-cols // choice.block)
    assert taken > 20 and KERNEL_NBYTES // 16 > 65536


@pytest.fixture(scope="module")
def prepared():
    made = provider()
    one = made.exchange(memory())
    kernels = [one.prepare(BF16, rows, 512, bias=False, residual=False, norm=False) for rows in (1, 2, 3, 200)]
    return made, one, kernels


def test_ten_thousand_calls_compile_and_load_nothing(prepared):
    """One kernel serves all sizes of a shape; calls add no compilation, no module and no upload."""
    made, one, kernels = prepared
    driver = made.runtime.driver
    before, launches = (made.compilations, driver.loads, driver.uploads, driver.beside), len(driver.launches)
    assert made.compilations == 2, "one for each protocol"
    tensors = [torch.zeros(rows, 512, dtype=BF16) for rows in (1, 2, 3, 200)]
    for _ in range(2500):
        for kernel, x in zip(kernels, tensors, strict=True):
            kernel(x, x, stream=5)
    assert (made.compilations, driver.loads, driver.uploads, driver.beside) == before
    assert len(driver.launches) - launches == 10_000
    assert one.prepare(BF16, 2, 512, bias=False, residual=False, norm=False) is kernels[1]


def test_nothing_is_compiled_in_a_capture(prepared):
    made, one, _ = prepared
    driver = made.runtime.driver
    driver.captures.add(driver.current_stream())
    try:
        assert one.prepare(BF16, 4, 512, bias=False, residual=False, norm=False), "loaded before"
        with pytest.raises(Unsupported, match="once eagerly"):
            one.prepare(torch.float16, 4, 512, bias=False, residual=False, norm=False)
    finally:
        driver.captures.clear()


def test_what_does_not_fit_is_refused(prepared):
    made, _, kernels = prepared
    driver, x = made.runtime.driver, torch.zeros(2, 512, dtype=BF16)
    launches = len(driver.launches)
    for text, out, options in (
        ("want \\(2, 512\\)", x[:1], {}),
        ("prepared", x, {"residual": x}),
        ("16 bytes", torch.zeros(2 * 512 + 1, dtype=BF16)[1:].view(2, 512), {}),
        ("torch.float32", x.float(), {}),
    ):
        with pytest.raises(ShapeError, match=text):
            kernels[1](out, x, **options)
    made.runtime.fault.host[:5] = torch.tensor([1, 1, 3, 9, 8])
    with pytest.raises(CommTimeout, match="rank 1: word 3 is 8, wanted 9"):
        kernels[1](x, x)
    made.runtime.fault.clear()
    assert len(driver.launches) == launches
