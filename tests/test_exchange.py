"""All-reduces by one kernel on the engine's side, with a kernel that only records: memory, plans, what is counted."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from plan_cases import CAPS
from plan_machine import run_calls

from commbackend.check import check
from commbackend.contract import Caps, DeviceSlotTable, ExchangeProvider, OneSided
from commbackend.errors import Unsupported
from commbackend.execution.exchange import Exchanger, aligned, exchanges
from commbackend.plan import EXCHANGE_PROGRAMS, Knobs, Problem
from commbackend.schedules import default_knobs, plan, supports

GPU = Caps("cuda", one_sided=True, peer_view=True, device_signal=True, stream_ordered=True)
KERNELS = CAPS["kernels"]


def problem(rows=(2, 2), n=64, dtype="bfloat16", flags=(), op="matmul_all_reduce"):
    return Problem(op, rows, k=64, n=(n,) if "matmul" in op else (), dtype=dtype, flags=flags)


def test_few_rows_are_one_product_and_one_kernel():
    made = plan(problem(), KERNELS, default_knobs(problem(), KERNELS))
    assert [type(s).__name__ for s in made.programs[0].steps] == ["Gemm", "Collective"]
    assert all(exchanges(p) and not p.counted for p in made.programs)
    whole = problem(op="all_reduce")
    assert [s.kind for s in plan(whole, KERNELS, default_knobs(whole, KERNELS)).programs[1].steps] == ["one_shot"]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (problem(n=60), "multiple of 8"),
        (problem(dtype="float64"), "the kernel sums"),
        (problem(rows=(4096, 4097)), "more than 1048576 bytes"),
        (problem(rows=(33, 0), n=16384, flags=("norm", "residual")), "more than"),
        (problem(rows=(1,) * 17), "2 to 16 ranks"),
    ],
)
def test_what_the_kernel_does_not_take_goes_another_way(other, text):
    assert text in str(supports(other, KERNELS, Knobs("one_shot_kernel", lanes=0)))
    if "norm" not in other.flags:
        assert default_knobs(other, KERNELS).schedule in ("one_shot", "two_shot")
    assert "no kernel here" in str(supports(problem(), CAPS["gpu"], Knobs("one_shot_kernel", lanes=0)))


def test_such_calls_stand_between_calls_on_the_heap():
    """They take no half and raise no credit, and the proof of the others does not miss them."""
    kernel = plan(problem(), KERNELS, Knobs("one_shot_kernel", 1, 0))
    counted = plan(problem(rows=(64, 64)), KERNELS, Knobs("two_shot", 2, 1))
    check([counted, kernel, counted, kernel], caps=KERNELS)
    assert counted.programs[0].counted


@pytest.mark.parametrize("seed", range(8))
def test_mixed_calls_are_right_in_any_interleaving(seed):
    """On the machine that runs plans: sums, residual and bias, with calls on the heap between them."""
    residual = dataclasses.replace(problem((2, 0, 1), 8, "float32", ("residual",)), k=3, bias=True)
    heap = dataclasses.replace(problem((2, 2, 1), 8, "float32", ("residual",)), k=3)
    plain = dataclasses.replace(problem((1, 1, 1), 8, "float32", op="all_reduce"), k=8)
    kernel, pushed = Knobs("one_shot_kernel", 1, 0), Knobs("two_shot", 2, 1)
    calls = [(residual, kernel), (heap, pushed), (plain, kernel), (heap, pushed), (residual, kernel), (heap, pushed)]
    run_calls([plan(p, KERNELS, k) for p, k in calls], [p for p, _ in calls], seed)


class Words(DeviceSlotTable):
    def __init__(self, words):
        self.words, self.open = words, True

    def read(self, writer, word):
        return 0

    def close(self):
        self.open = False

    def address(self, writer, word):
        return 1000 + 100 * writer + 8 * word

    def peer_address(self, peer, word):
        return 2000 + 100 * peer + 8 * word


class Provider(ExchangeProvider):
    def __init__(self):
        self.memory = None

    def exchange_nbytes(self, size, programs, slot_nbytes):
        return size * programs * 16, programs + 1

    def exchange(self, memory):
        self.memory = memory
        return SimpleNamespace(prepare=lambda *args, **flags: (args, flags))


def transport(caps=GPU, size=2):
    """Memory and words as a one-sided transport gives them."""
    kind = type("Stub", (OneSided,), {})
    kind.__abstractmethods__ = frozenset()
    made = kind.__new__(kind)
    made.caps, made.rank, made.size, made.name = caps, 1, size, "stub"
    made.buffers = []

    def alloc(nbytes):
        memory = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(size)]
        made.buffers.append(SimpleNamespace(view=lambda r: memory[r], close=lambda: made.buffers.clear()))
        return made.buffers[-1]

    made.alloc, made.alloc_slots = alloc, Words
    return made


def test_memory_is_made_once_and_given_back():
    provider, stub = Provider(), transport()
    exchanger = Exchanger(stub, [SimpleNamespace(), provider])
    assert exchanger.offered and not exchanger.ready and exchanger.nbytes == 0
    with pytest.raises(Unsupported, match="run the op eagerly first"):
        exchanger.prepare(torch.bfloat16, 1, 64, bias=False, residual=False, norm=False)
    exchanger.open()
    exchanger.open()
    memory = provider.memory
    assert len(stub.buffers) == 1 and exchanger.nbytes == 2 * EXCHANGE_PROGRAMS * 16 + 8 * 2 * (EXCHANGE_PROGRAMS + 1)
    assert (memory.rank, memory.raised, memory.waited) == (1, (2000, 2100), (1000, 1100))
    assert memory.data == tuple(stub.buffers[0].view(r).data_ptr() for r in range(2))
    asked = exchanger.prepare(torch.bfloat16, 1, 64, bias=True, residual=False, norm=False)
    assert asked == ((torch.bfloat16, 1, 64), {"bias": True, "residual": False, "norm": False})
    exchanger.close()
    assert not stub.buffers and exchanger.nbytes == 0 and not exchanger.ready


@pytest.mark.parametrize("lacks", ["device_signal", "peer_view", "stream_ordered"])
def test_where_it_is_not_offered(lacks):
    assert not Exchanger(transport(dataclasses.replace(GPU, **{lacks: False})), [Provider()]).offered
    assert not Exchanger(transport(size=1), [Provider()]).offered
    assert not Exchanger(transport(), [SimpleNamespace()]).offered


def test_rows_are_copied_only_where_they_must_be():
    whole = torch.zeros(4, 64, dtype=torch.bfloat16)
    for fits in (whole, whole[1:], whole[:, :32], whole[2:3, 8:]):
        assert aligned(fits) is fits
    for odd in (whole[:, 1:33], torch.zeros(4, 33, dtype=torch.bfloat16)[:, :32]):
        copy = aligned(odd)
        assert copy.data_ptr() % 16 == 0 and copy.is_contiguous() and torch.equal(copy, odd)
