"""The userbuffers transport on fake drivers: conformance, failures of every call on every rank, deadlines, graphs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_cuda import CUresult, FakeCuda, FakeUserbuffers, Gpu, gpus

from commbackend.contract import POISON, Slot
from commbackend.errors import (
    CollectiveMismatch,
    CommAborted,
    CommBackendError,
    CommTimeout,
    HeapExhausted,
    ShapeError,
    Unavailable,
)
from commbackend.gpu.watch import Watch
from commbackend.testing import TransportSuite, run_threads
from commbackend.transports.userbuffers import UserbuffersTransport

CPU = torch.device("cpu")
NOT_SUPPORTED = CUresult.CUDA_ERROR_NOT_SUPPORTED


class TestSuiteOnFake(TransportSuite):
    transport = "fake_cuda:ProcessUserbuffers"


@pytest.mark.slow
class TestSuiteOnFakeOtherPaths(TransportSuite):
    transport = "fake_cuda:ProcessUserbuffers"
    options = {"ipc": True, "waits": "kernel", "comm_ctas": 3}
    size = 2


# -- worlds -----------------------------------------------------------------------------------------------------------
class World:
    """Ranks as threads, each with a driver of its own. Leaves with everything given back, or the test fails."""

    def __init__(self, size: int = 2, host: list[Gpu] | None = None, timeout_s: float = 5.0, **fake: Any) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.host = host or gpus(size)
        self.fakes = [FakeCuda(self.host, [r, *(i for i in range(size) if i != r)], **fake) for r in range(size)]

    def run(self, work: Callable[[Any, FakeCuda], Any], limit_s: float = 30.0, **options: Any) -> list[Any]:
        """Connect, ``work(transport, fake)``, close on every rank; what ``work`` returned, by rank."""

        def rank_main(rank: int, group: Any) -> Any:
            group.timeout_s = self.timeout_s
            transport = self.connect(group, **options)
            try:
                return work(transport, self.fakes[rank])
            finally:
                with contextlib.suppress(CommBackendError):
                    transport.close()

        return run_threads(rank_main, self.size, timeout_s=limit_s)

    def outcomes(self, **options: Any) -> list[Exception | None]:
        """What connecting raises on every rank; None where it works."""

        def rank_main(rank: int, group: Any) -> Exception | None:
            group.timeout_s = self.timeout_s
            try:
                transport = self.connect(group, **options)
            except CommBackendError as e:
                return e
            with contextlib.suppress(CommBackendError):
                transport.close()
            return None

        return run_threads(rank_main, self.size)

    def connect(self, group: Any, **options: Any) -> UserbuffersTransport:
        FakeUserbuffers.fakes = dict(enumerate(self.fakes))
        return FakeUserbuffers.connect(group, CPU, options)

    def live(self) -> list[dict[str, int]]:
        return [fake.live() for fake in self.fakes]


@contextlib.contextmanager
def world(*args: Any, leaks: bool = False, **kw: Any) -> Iterator[World]:
    before = len(os.listdir("/proc/self/fd"))
    w = World(*args, **kw)
    try:
        yield w
        gc.collect()
        if not leaks:
            assert w.live() == [{}] * w.size
            assert len(os.listdir("/proc/self/fd")) == before, "descriptors were left open"
    finally:
        for fake in w.fakes:
            fake.stop()


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def fault_of(transport: Any, seconds: float = 5.0) -> CommBackendError:
    end = soon(seconds)
    while transport.fault is None:
        assert time.monotonic() < end, "no fault came"
        time.sleep(0.002)
    return transport.fault


# -- joining ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("visible", [([0, 1], [1, 0]), ([0], [1]), ([1, 0], [0, 1])])
def test_identity_is_the_uuid_whatever_the_ordinals(visible: tuple[list[int], list[int]]) -> None:
    """F037: CUDA_VISIBLE_DEVICES in any order and number."""
    with world() as w:
        for fake, seen in zip(w.fakes, visible, strict=True):
            fake.visible = list(seen)
        assert w.run(lambda t, fake: t.memory) == ["vmm", "vmm"]


def test_two_ranks_on_one_gpu_need_leave() -> None:
    """F047."""
    with world(3, host=gpus(3)) as w:
        w.fakes[2].visible = [0]
        for error in w.outcomes():
            assert isinstance(error, Unavailable)
            assert "ranks 0, 2" in str(error) and "GPU-a0a0a0a0-a0a0" in str(error), error
            assert "allow_shared_device" in error.hint
        assert w.outcomes(allow_shared_device=True) == [None] * 3


def test_a_flipped_bit_is_found_by_all() -> None:
    """F049, F041: rank 1's writes into rank 0's memory arrive changed."""
    host = gpus(3)
    host[1].flips = frozenset([host[0].uuid])
    with world(3, host=host) as w:
        for error in w.outcomes():
            assert isinstance(error, Unavailable) and "rank 0: bytes that rank 1 wrote here differ" in str(error)


def test_a_pair_without_a_path_is_named() -> None:
    host = gpus(3)
    host[2].unreachable = frozenset([host[1].uuid])
    with world(3, host=host) as w:
        for error in w.outcomes():
            assert isinstance(error, Unavailable)
            assert "rank 2: memory of rank 1 cannot be mapped" in str(error)
            assert "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" in str(error)


def test_missing_features_choose_ipc_or_say_what_is_missing() -> None:
    host = gpus(2)
    host[1].attributes = {"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 0}
    with world(host=host) as w:
        assert w.run(lambda t, fake: t.memory) == ["ipc", "ipc"]
    host[0].attributes = {"CAN_USE_64_BIT_STREAM_MEM_OPS": 0}
    with world(host=host) as w:
        for error in w.outcomes():
            assert isinstance(error, Unavailable)
            assert "rank 0: 64-bit stream memory operations: found 0, needed 1" in str(error)


def _calls_of_connecting(**options: Any) -> Counter[str]:
    with world() as w:
        w.run(lambda t, fake: w.fakes[0].calls.copy(), **options)
        return w.fakes[0].calls


# Calls that give something back: their failure is reported, and what they were to free is all that may stay.
_FREEING = {
    "cuMemAddressFree", "cuMemRelease", "cuMemUnmap", "cuMemFreeHost", "cuMemFree", "cuIpcCloseMemHandle",
    "cuStreamDestroy", "cuEventDestroy", "cuModuleUnload", "cuDevicePrimaryCtxRelease",
}  # fmt: skip


# Calls of the watch's thread, or of leaving.
_LATER = {
    "cuThreadExchangeStreamCaptureMode", "cuStreamQuery", "cuEventQuery", "cuEventCreate", "cuEventRecord",
}  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ipc", [False, True], ids=["vmm", "ipc"])
def test_any_failing_call_makes_all_ranks_refuse_together(ipc: bool, rank: int) -> None:
    """F039, F042: every call of connecting, the first and the last time it is made, on either rank."""
    for name, count in sorted(_calls_of_connecting(ipc=ipc).items()):
        if name in _FREEING | _LATER:
            continue
        for at in {1, (count + 1) // 2}:
            with world() as w:
                w.fakes[rank].fail(name, NOT_SUPPORTED, at)
                outcomes = w.outcomes(ipc=ipc)
                if outcomes == [None, None]:
                    # Not reached while connecting (it serves closing too): nothing was refused, and nothing stays.
                    assert w.fakes[rank].failing[name][0] > 0 or at > 1, name
                    continue
                for error in outcomes:
                    assert isinstance(error, CommBackendError), (name, at, outcomes)
                if name.startswith(("cuMem", "cuIpc")) and name not in ("cuMemHostAlloc", "cuMemcpyAsync"):
                    for error in outcomes:
                        assert isinstance(error, Unavailable), (name, at, error)
                        assert f"rank {rank}: " in str(error) and name in str(error), error
                        assert "CUDA_ERROR_NOT_SUPPORTED" in str(error)


@pytest.mark.parametrize("name", sorted(_FREEING - {"cuMemFree", "cuIpcCloseMemHandle", "cuEventDestroy"}))
def test_a_call_that_cannot_free_ends_no_other_rank_in_a_hang(name: str) -> None:
    """What fails to free stays, alone; everything else is given back, and everybody leaves."""
    with world(timeout_s=3.0, leaks=True) as w:
        w.fakes[1].fail(name)
        start = time.monotonic()
        w.outcomes()
        assert time.monotonic() - start < 6.0
        assert w.live()[0] == {}
        assert sum(w.live()[1].values()) <= 2, w.live()


# -- memory -----------------------------------------------------------------------------------------------------------
def test_out_of_memory_names_the_rank_and_leaves_the_transport_usable() -> None:
    host = gpus(2, nbytes=64 << 20)

    def work(t: Any, fake: FakeCuda) -> None:
        before = fake.live()
        with pytest.raises(HeapExhausted) as info:
            t.alloc(1 << 30)
        assert "rank 0" in str(info.value) and "rank 1" in str(info.value)
        assert f"needed {1 << 30} bytes, available" in str(info.value)
        assert fake.live() == before
        t.alloc(1 << 20).close()
        assert fake.live() == before and t.fault is None

    with world(host=host) as w:
        w.run(work)


_MAPPING = (
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemSetAccess",
)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("name", _MAPPING)
def test_no_partial_mapping_is_left(name: str, rank: int) -> None:
    """F039: whichever call fails for whichever peer, nothing of the new memory stays anywhere."""

    def work(t: Any, fake: FakeCuda) -> None:
        for at in (1, 2, 3):
            if (at > 1 and name in _MAPPING[:2]) or (at > 2 and name == _MAPPING[2]):
                break
            before = fake.live()
            if t.rank == rank:
                fake.fail(name, NOT_SUPPORTED, at)
            with pytest.raises(Unavailable, match=f"rank {rank}: .*{name} "):
                t.alloc(1 << 20)
            assert fake.live() == before
        t.alloc(1 << 20)

    with world(3) as w:
        w.run(work)


def test_growth_keeps_addresses_and_bytes() -> None:
    def work(t: Any, fake: FakeCuda) -> None:
        buffer, other = t.alloc(3 << 20), t.alloc(1 << 20)
        bases = list(buffer.bases)
        buffer.local.fill_(7)
        peer_view = buffer.view(1 - t.rank)
        t.barrier(soon())
        assert bool((peer_view == 7).all())
        for nbytes in (4 << 20, 9 << 20, 64 << 20):
            t.grow(buffer, nbytes)
            assert buffer.nbytes == nbytes and buffer.bases == bases
            assert bool((buffer.local[: 3 << 20] == 7).all()) and bool((buffer.local[3 << 20 :] == 0).all())
        t.barrier(soon())
        buffer.view(1 - t.rank)[-1] = 40 + t.rank
        t.barrier(soon())
        assert buffer.local[-1] == 41 - t.rank
        assert bool((other.local == 0).all())
        with pytest.raises(HeapExhausted, match="room for"):
            t.grow(buffer, 1 << 40)
        with pytest.raises(CollectiveMismatch):
            t.grow(buffer, (65 << 20) + t.rank)
        buffer.close()
        assert fake.live()["mappings"] == 2 * 2  # the first page and ``other``, of two ranks

    with world() as w:
        w.run(work)


def test_memory_shared_by_ipc_keeps_its_size() -> None:
    def work(t: Any, fake: FakeCuda) -> None:
        buffer = t.alloc(4096)
        assert buffer.room == 4096
        with pytest.raises(HeapExhausted, match="4096"):
            t.grow(buffer, 8192)
        buffer.close()

    with world() as w:
        w.run(work, ipc=True)


def test_addresses_run_out_in_words() -> None:
    def work(t: Any, fake: FakeCuda) -> None:
        with pytest.raises(HeapExhausted, match="option va_nbytes"):
            t.alloc(64 << 20)
        assert t.fault is None

    with world() as w:
        w.run(work, va_nbytes=32 << 20)


def test_slot_tables_reuse_their_place_and_start_at_zero() -> None:
    def work(t: Any, fake: FakeCuda) -> None:
        tables = [t.alloc_slots(66) for _ in range(3)]
        place = tables[1].local
        t.signal(1 - t.rank, Slot(tables[1], 65, 9), stream=0)
        t.wait(1 - t.rank, Slot(tables[1], 65, 9), deadline=soon(), stream=0)
        fake.synchronize()
        tables[1].close()
        again = t.alloc_slots(66)
        assert again.local == place and again.read(1 - t.rank, 65) == 0
        # Kernels reach the same words by address.
        t._driver.write_value(again.peer_address(1 - t.rank, 3), 12, 0)
        t.barrier(soon())
        while ctypes.c_int64.from_address(again.address(1 - t.rank, 3)).value != 12:
            assert t.fault is None
            time.sleep(0.001)
        huge = t.alloc_slots(200_000)  # more than a page
        t.signal(1 - t.rank, Slot(huge, 199_999, 5), stream=0)
        t.wait(1 - t.rank, Slot(huge, 199_999, 5), deadline=soon(), stream=0)
        fake.synchronize()
        assert huge.read(1 - t.rank, 199_999) == 5

    with world() as w:
        w.run(work)


# -- verbs ------------------------------------------------------------------------------------------------------------
_LAYOUTS: list[tuple[str, Callable[[], torch.Tensor], tuple[int, ...], tuple[int, ...] | None, dict[str, int]]] = [
    ("packed", lambda: torch.randn(8, 16), (8, 16), None, {"cuMemcpyAsync": 1}),
    ("rows of a wider tensor", lambda: torch.randn(8, 40)[:, 3:19], (8, 16), None, {"cuMemcpy2DAsync": 1}),
    ("into a wider window", lambda: torch.randn(8, 16), (8, 16), (20, 1), {"cuMemcpy2DAsync": 1}),
    ("batches", lambda: torch.randn(3, 9, 16)[:, :8], (3, 8, 16), (200, 20, 1), {"cuMemcpy2DAsync": 3}),
    ("collapsible", lambda: torch.randn(3, 8, 16), (3, 8, 16), (160, 20, 1), {"cuMemcpy2DAsync": 1}),
    ("transposed", lambda: torch.randn(16, 8).t(), (8, 16), None, {}),
    ("expanded", lambda: torch.randn(1, 16).expand(8, 16), (8, 16), None, {}),
    ("one element", lambda: torch.randn(1, 1), (1, 1), None, {"cuMemcpyAsync": 1}),
    ("conjugate", lambda: torch.randn(4, 4, dtype=torch.complex64).conj(), (4, 4), None, {}),
]


@pytest.mark.parametrize("ctas", [0, 4])
@pytest.mark.parametrize("layout", _LAYOUTS, ids=lambda layout: layout[0])
def test_put_and_get_of_every_layout(layout: Any, ctas: int) -> None:
    _, make, shape, stride, calls = layout
    torch.manual_seed(3)
    source = make()

    def work(t: Any, fake: FakeCuda) -> None:
        buffer, slots = t.alloc(8192), t.alloc_slots(1)
        window = buffer.window(64, shape, source.dtype, stride)
        fake.calls.clear()
        t.put(window, source, 1 - t.rank, slot=Slot(slots, 0, 1), stream=0)
        made = {k: v for k, v in fake.calls.items() if k != "cuLaunchKernel"}
        wanted = {**calls, "cuStreamWriteValue64": 1} if not ctas else {"cuStreamWriteValue64": 1}
        assert made == wanted
        t.wait(1 - t.rank, Slot(slots, 0, 1), deadline=soon(), stream=0)
        fake.synchronize()
        assert torch.equal(window.local, source)
        back = torch.empty_like(source)
        t.get(back, window, 1 - t.rank, stream=0)
        fake.synchronize()
        assert torch.equal(back, source)
        t.barrier(soon())

    with world() as w:
        w.run(work, comm_ctas=ctas)


def test_verbs_enqueue_and_never_synchronise() -> None:
    """The hot path: one driver call a part, no query, no event, nothing that waits; and few Python calls."""

    def work(t: Any, fake: FakeCuda) -> tuple[int, int]:
        buffer, slots = t.alloc(1 << 16), t.alloc_slots(4)
        window, x = buffer.window(0, (64, 64), torch.float32), torch.ones(64, 64)
        stream = fake.new_stream()
        fake.machine.paused = True
        t.put(window, x, 1 - t.rank, slot=Slot(slots, 0, 1), stream=stream)  # fills the caches
        t.wait(1 - t.rank, Slot(slots, 0, 1), deadline=soon(), stream=stream)
        time.sleep(0.3)  # the watch looks now and then; not now
        fake.calls.clear()
        counts = []
        for verb in (
            lambda: t.put(window, x, 1 - t.rank, slot=Slot(slots, 0, 2), stream=stream),
            lambda: t.wait(1 - t.rank, Slot(slots, 0, 2), deadline=soon(), stream=stream),
        ):
            seen = 0

            def profile(frame: Any, event: str, arg: Any) -> None:
                nonlocal seen
                seen += event == "call" and f"commbackend{os.sep}" in frame.f_code.co_filename

            sys.setprofile(profile)
            try:
                verb()
            finally:
                sys.setprofile(None)
            counts.append(seen)
        calls = dict(fake.calls)
        for background in ("cuMemcpyAsync", "cuStreamQuery"):  # the watch may have looked after all
            calls.pop(background, None)
        assert calls == {"cuStreamWriteValue64": 1, "cuStreamWaitValue64": 1}
        assert bool((window.local == 0).all()), "the machines are paused"
        t.barrier(soon())
        fake.machine.paused = False
        fake.synchronize()
        t.barrier(soon())
        assert bool((window.local == 1).all())
        return counts[0], counts[1]

    with world() as w:
        for put, wait in w.run(work):
            assert put <= 16 and wait <= 12, (put, wait)


def test_tensors_of_another_device_are_refused() -> None:
    def work(t: Any, fake: FakeCuda) -> None:
        buffer = t.alloc(64)
        with pytest.raises(ShapeError, match="meta"):
            t.put(buffer.window(0, (4,), torch.float32), torch.empty(4, device="meta"), 1 - t.rank, stream=0)

    with world() as w:
        w.run(work)


def test_a_failing_copy_fails_the_transport_on_all_ranks() -> None:
    """F101: call, code, rank, device, size and hint are in the error."""

    def work(t: Any, fake: FakeCuda) -> str:
        buffer = t.alloc(4096)
        window = buffer.window(0, (1024,), torch.float32)
        t.barrier(soon())
        if t.rank == 0:
            time.sleep(0.2)  # rank 1 leaves the barrier
            fake.fail("cuMemcpyAsync", CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
            with pytest.raises(CommBackendError) as info:
                t.put(window, torch.ones(1024), 1, stream=0)
            with pytest.raises(CommBackendError):
                t.put(window, torch.ones(1024), 1, stream=0)
            return str(info.value)
        return str(fault_of(t))

    with world() as w:
        first, second = w.run(work)
    for word in (
        "cuMemcpyAsync",
        "4096 bytes",
        "CUDA_ERROR_ILLEGAL_ADDRESS (700)",
        "rank 0",
        "cuda:0",
        "context is lost",
    ):
        assert word in first and word in second, (word, first, second)


# -- queues -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("connections", "hangs"), [(1, True), (2, False), (8, False)])
def test_the_queue_model_hangs_where_the_hardware_does(connections: int, hangs: bool) -> None:
    """A wait enqueued before what satisfies it, on another stream (facts measured with CUDA_DEVICE_MAX_CONNECTIONS)."""
    with world(connections=connections, timeout_s=2.0, leaks=hangs) as w:

        def work(t: Any, fake: FakeCuda) -> list[str]:
            slots = t.alloc_slots(1)
            first, second = fake.new_stream(), fake.new_stream()
            t.wait(t.rank, Slot(slots, 0, 1), deadline=soon(60), stream=first)
            t.signal(t.rank, Slot(slots, 0, 1), stream=second)
            end = time.monotonic() + 0.5
            while time.monotonic() < end and not fake.machine.stalled():
                time.sleep(0.01)
            stalled = fake.machine.stalled()
            t.barrier(soon())
            time.sleep(0.2)
            t.abort("done")
            return stalled

        for stalled in w.run(work, waits="stream"):
            assert bool(stalled) == hangs, stalled
            assert not hangs or "wait_value" in stalled[0]


def test_producers_first_end_in_one_queue_and_under_launch_blocking() -> None:
    def work(t: Any, fake: FakeCuda) -> None:
        buffer, slots = t.alloc(4096), t.alloc_slots(2)
        window, lanes = buffer.window(0, (1024,), torch.float32), [fake.new_stream() for _ in range(3)]
        x = torch.full((1024,), float(t.rank))
        for call in range(1, 6):
            t.put(window, x, 1 - t.rank, slot=Slot(slots, 0, call), stream=lanes[call % 3])
            t.wait(1 - t.rank, Slot(slots, 0, call), deadline=soon(), stream=lanes[(call + 1) % 3])
        fake.synchronize()
        t.barrier(soon())
        assert bool((window.local == 1 - t.rank).all())

    for fake in ({"connections": 1}, {"connections": 1, "blocking": True}, {"connections": 2, "blocking": True}):
        with world(**fake) as w:
            w.run(work)


@pytest.mark.parametrize(("connections", "waits"), [(1, "kernel"), (2, "stream")])
def test_the_poison_path_is_proven_and_decides_the_form_of_waits(connections: int, waits: str) -> None:
    with world(connections=connections, timeout_s=10.0) as w:
        assert w.run(lambda t, fake: (t.waits, t.caps.free_queues)) == [(waits, connections > 1)] * 2


def test_one_rank_with_one_queue_tells_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules that need free queues are chosen by all ranks or by none; each waits as it can. Options ask too."""
    found = Watch.prove
    monkeypatch.setattr(Watch, "prove", lambda self: found(self) and self._rank == 0)
    with world(timeout_s=10.0) as w:
        assert w.run(lambda t, fake: (t.waits, t.caps.free_queues)) == [("stream", False), ("kernel", False)]
    monkeypatch.undo()
    with world(timeout_s=10.0, connections=1) as w:
        assert w.run(lambda t, fake: (t.waits, t.caps.free_queues), waits="stream") == [("stream", False)] * 2


# -- deadlines --------------------------------------------------------------------------------------------------------
# Poison does not get past a stream wait in one queue: waits are kernels there.
@pytest.mark.parametrize(("waits", "connections"), [("stream", 8), ("kernel", 8), ("kernel", 1)])
def test_a_wait_ends_by_its_deadline_and_its_outputs_are_nan(waits: str, connections: int) -> None:
    def work(t: Any, fake: FakeCuda) -> None:
        slots, out = t.alloc_slots(3), torch.zeros(4, 6)
        t.op, t.seq = "all_gather", 17
        t.barrier(soon())
        if t.rank == 0:
            start, stream = time.monotonic(), fake.new_stream()
            t.wait(1, Slot(slots, 2, 5), deadline=soon(0.4), stream=stream)
            t.guard(out[:, :4].t(), stream)
            fake.synchronize()
            assert 0.35 < time.monotonic() - start < 1.5
            assert t.fault is not None, "the stream went on before the transport failed"
            with pytest.raises(CommTimeout) as info:
                t.signal(1, Slot(slots, 0, 1), stream=stream)
            error = info.value
            assert (error.rank, error.wanted, error.seen, error.op, error.seq) == (1, 5, 0, "all_gather", 17)
            assert "rank 0" in str(error) and "rank 1" in str(error) and "word 2" in str(error)
            assert bool(out[:, :4].isnan().all()) and bool((out[:, 4:] == 0).all())
            assert t.fault is error
        else:
            error = fault_of(t)
            assert isinstance(error, CommTimeout) and error.rank == 1

    with world(connections=connections, timeout_s=3.0) as w:
        w.run(work, waits=waits)


def test_nothing_is_filled_while_healthy() -> None:
    def work(t: Any, fake: FakeCuda) -> None:
        out = torch.ones(5, 7)
        t.guard(out, 0)
        fake.synchronize()
        assert bool((out == 1).all())
        with pytest.raises(ShapeError, match="rows must be contiguous"):
            t.guard(out[:, ::2], 0)

    with world() as w:
        w.run(work)


def test_poison_is_written_again_over_a_late_put() -> None:
    """A value that arrives after the poison must not leave later waits blocked."""

    def work(t: Any, fake: FakeCuda) -> None:
        slots, stream = t.alloc_slots(1), fake.new_stream()
        t.barrier(soon())
        if t.rank == 0:
            t.wait(1, Slot(slots, 0, 1), deadline=soon(60), stream=stream)
            t.wait(1, Slot(slots, 0, 2), deadline=soon(60), stream=stream)
            time.sleep(0.2)
            t.abort("enough")
            fake.synchronize()
            # The put of a peer that has not heard yet.
            late = fake.new_stream()
            t._driver.write_value(slots.wait_at[1], 1, late)
            assert t._driver.settle(late, 5.0)
            end = soon(2)
            while slots.read(1, 0) < POISON:
                assert time.monotonic() < end
                time.sleep(0.005)

    with world() as w:
        w.run(work)


def test_peers_release_a_rank_whose_own_queue_is_stuck() -> None:
    """Stream waits in one queue, against advice: this rank's poison is stuck behind them, its peer's is not."""
    with world(timeout_s=3.0) as w:
        w.fakes[0].stop()
        w.fakes[0] = FakeCuda(w.host, [0, 1], connections=1)

        def work(t: Any, fake: FakeCuda) -> None:
            slots = t.alloc_slots(1)
            if t.rank == 0:
                t.wait(1, Slot(slots, 0, 1), deadline=soon(60), stream=fake.new_stream())
            t.barrier(soon())
            if t.rank == 1:
                time.sleep(0.2)
                t.abort("rank 1 gives up")
            assert "rank 1 gives up" in str(fault_of(t))
            fake.synchronize()
            time.sleep(1.5 if t.rank else 0.0)  # it helps after a second of grace

        w.run(work, waits="stream")


def test_waits_on_every_hardware_queue_still_end() -> None:
    """Nothing of this rank gets through, its watch reads no slot; yet the deadline holds, and a peer releases it."""

    def work(t: Any, fake: FakeCuda) -> None:
        slots, out = t.alloc_slots(1), torch.zeros(8)
        t.barrier(soon())
        if t.rank == 0:
            streams, start = [fake.new_stream() for _ in range(12)], time.monotonic()
            for stream in streams:
                t.wait(1, Slot(slots, 0, 1), deadline=soon(0.3), stream=stream)
            t.guard(out, streams[3])
            fake.synchronize(10.0)
            assert time.monotonic() - start < 6.0
            error = t.fault
            assert isinstance(error, CommTimeout) and (error.rank, error.wanted, error.seen) == (1, 1, -1)
            assert bool(out.isnan().all())
        else:
            assert isinstance(fault_of(t, 8.0), CommTimeout)
            time.sleep(1.6)  # it helps after a second of grace

    with world(connections=4, timeout_s=8.0) as w:
        w.run(work, waits="stream")


def test_abort_of_a_peer_releases_blocked_streams() -> None:
    def work(t: Any, fake: FakeCuda) -> None:
        slots, stream = t.alloc_slots(1), fake.new_stream()
        peer = (t.rank + 1) % 3
        t.wait(peer, Slot(slots, 0, 1), deadline=soon(60), stream=stream)
        t.barrier(soon())
        if t.rank == 1:
            time.sleep(0.2)
            t.abort("no more")
        fake.synchronize(5.0)
        assert isinstance(t.fault, CommAborted) and "rank 1" in str(t.fault)
        with pytest.raises(CommAborted):
            t.wait(peer, Slot(slots, 0, 1), deadline=soon(), stream=stream)

    with world(3) as w:
        w.run(work)


def test_close_leaves_mapped_what_still_runs() -> None:
    """A kernel that nobody can end: its memory is not pulled away, and close still returns."""

    def work(t: Any, fake: FakeCuda) -> None:
        stream = fake.new_stream()
        t.signal(t.rank, Slot(t.alloc_slots(1), 0, 1), stream=stream)
        fake.synchronize()
        if t.rank == 0:
            fake._add("endless", stream, lambda: fake.machine.stopping, kernel=True)
        t.barrier(soon())
        start = time.monotonic()
        with contextlib.suppress(CommBackendError):
            t.close(0.4)
        assert time.monotonic() - start < 3.0
        assert ("mappings" in fake.live()) == (t.rank == 0)

    with world(leaks=True) as w:
        w.run(work)


# -- graphs -----------------------------------------------------------------------------------------------------------
def test_a_captured_exchange_replays_with_growing_epochs_and_mixes_with_eager_calls() -> None:
    """Flags and waits read the epoch when they run: every replay brings new bytes."""

    def work(t: Any, fake: FakeCuda) -> None:
        buffer, eager, slots, word = t.alloc(8192), t.alloc_slots(1), t.alloc_slots(2), t.alloc_slots(1)
        peer, epoch, lane = 1 - t.rank, word.local, fake.new_stream()
        window, x = buffer.window(0, (256,), torch.int32), torch.zeros(256, dtype=torch.int32)

        def step() -> None:
            with t.epochs(epoch):
                t.advance(epoch, lane)
                t.wait(peer, Slot(slots, 1, -1), deadline=soon(5), stream=lane)  # the peer has read the last one
                t.put(window, x, peer, slot=Slot(slots, 0, 0), stream=lane)
                t.wait(peer, Slot(slots, 0, 0), deadline=soon(5), stream=lane)

        graph = fake.capture(step)
        done = fake.capture(lambda: _credit(t, slots, epoch, peer, lane))
        for i in range(1, 41):
            x.fill_(1000 * i + t.rank)
            fake.machine.launch(graph)
            fake.synchronize()
            assert bool((window.local == 1000 * i + peer).all()), i
            if i % 7 == 0:
                t.signal(peer, Slot(eager, 0, i), stream=lane)
                t.wait(peer, Slot(eager, 0, i), deadline=soon(), stream=lane)
            fake.machine.launch(done)
            fake.synchronize()
        assert t.fault is None and slots.read(peer, 0) == 40

    with world() as w:
        w.run(work)


def _credit(t: Any, slots: Any, epoch: int, peer: int, lane: int) -> None:
    with t.epochs(epoch):
        t.signal(peer, Slot(slots, 1, 0), stream=lane)


def test_the_watch_does_not_spoil_a_capture() -> None:
    """It looks at slots, by queries that are forbidden during a capture, while another thread captures."""

    def work(t: Any, fake: FakeCuda) -> None:
        slots, word, lane = t.alloc_slots(1), t.alloc_slots(1), fake.new_stream()
        t.wait(1 - t.rank, Slot(slots, 0, 1), deadline=soon(60), stream=fake.new_stream())
        before = fake.calls["cuStreamQuery"]

        def step() -> None:
            t.advance(word.local, lane)
            end = soon(5)
            while fake.calls["cuStreamQuery"] < before + 4:
                assert time.monotonic() < end, "the watch does not look"
                time.sleep(0.01)

        fake.capture(step)
        t.signal(1 - t.rank, Slot(slots, 0, 1), stream=lane)
        t.barrier(soon())

    with world() as w:
        w.run(work)


def test_a_captured_wait_ends_by_its_deadline() -> None:
    def work(t: Any, fake: FakeCuda) -> None:
        slots, word, lane = t.alloc_slots(1), t.alloc_slots(1), fake.new_stream()

        def step() -> None:
            with t.epochs(word.local):
                t.wait(1 - t.rank, Slot(slots, 0, 3), deadline=soon(0.3), stream=lane)

        graph = fake.capture(step)
        t.barrier(soon())
        if t.rank == 0:
            fake.machine.launch(graph)
            fake.synchronize()
        error = fault_of(t)
        assert isinstance(error, CommTimeout) and (error.rank, error.wanted, error.seen) == (1, 3, 0)

    with world() as w:
        w.run(work)


# -- multicast --------------------------------------------------------------------------------------------------------
def test_multicast_reaches_every_rank() -> None:
    def work(t: Any, fake: FakeCuda) -> None:
        assert t.caps.multicast and t.multicast_reason == ""
        buffer = t.alloc(1 << 20)
        assert buffer.multicast is not None and buffer.multicast.numel() == 1 << 20
        t.grow(buffer, 5 << 20)
        if t.rank == 1:
            t._kernels.multicast_store(buffer.multicast_base, 77, 0)
            fake.synchronize()
        t.barrier(soon())
        assert buffer.local[:8].view(torch.int64).item() == 77
        t.barrier(soon())

    with world(3) as w:
        w.run(work, multicast=True)


def test_multicast_is_off_unless_asked_for() -> None:
    with world() as w:
        assert w.run(lambda t, fake: (t.caps.multicast, t.multicast_reason)) == [(False, "not asked for")] * 2
        assert not any(name.startswith("cuMulticast") for fake in w.fakes for name in fake.calls)


_TEAM = ("cuMulticastGetGranularity", "cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem")


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        (name, rank)
        for name in (*_TEAM, "cuLaunchKernel", "cuMemMap", "cuMemSetAccess")
        for rank in range(3)
        if name != "cuMulticastCreate" or rank == 0  # which creates the object
    ],
)
def test_multicast_falls_back_on_all_ranks_together(name: str, rank: int) -> None:
    """Each call failing on each rank: all live without multicast, say why, and work; nothing is left."""

    def work(t: Any, fake: FakeCuda) -> str:
        buffer, slots = t.alloc(4096), t.alloc_slots(1)
        assert buffer.multicast is None and not t.caps.multicast
        window = buffer.window(0, (16,), torch.float32)
        t.put(window, torch.ones(16), (t.rank + 1) % 3, slot=Slot(slots, 0, 1), stream=0)
        t.wait((t.rank + 2) % 3, Slot(slots, 0, 1), deadline=soon(), stream=0)
        fake.synchronize()
        assert bool((window.local == 1).all())
        t.barrier(soon())
        return str(t.multicast_reason)

    # After mapping the first page of three ranks comes the map of its multicast object; the kernel after the others'.
    at = {"cuMemMap": 4, "cuMemSetAccess": 4, "cuLaunchKernel": 10}.get(name, 1)
    with world(3) as w:
        w.fakes[rank].fail(name, NOT_SUPPORTED, at)
        reasons = w.run(work, multicast=True)
        assert len(set(reasons)) == 1 and f"rank {rank}" in reasons[0] and name in reasons[0], reasons


def test_multicast_lost_while_growing_is_lost_for_all() -> None:
    def work(t: Any, fake: FakeCuda) -> None:
        buffer = t.alloc(1 << 20)
        assert buffer.multicast is not None
        if t.rank == 1:
            fake.fail("cuMulticastBindMem")
        t.grow(buffer, 4 << 20)
        assert buffer.multicast is None and buffer.nbytes == 4 << 20
        assert t.alloc(1 << 20).multicast is None

    with world() as w:
        w.run(work, multicast=True)


def test_ranks_on_one_gpu_get_no_multicast() -> None:
    with world(host=gpus(1) * 2) as w:
        reasons = w.run(lambda t, fake: t.multicast_reason, multicast=True, allow_shared_device=True)
        assert reasons == ["two ranks share a GPU"] * 2
        assert not any(name.startswith("cuMulticast") for fake in w.fakes for name in fake.calls)


# -- what a machine without a GPU says --------------------------------------------------------------------------------
def test_probe_without_cuda_is_one_line() -> None:
    with pytest.raises(Unavailable) as info:
        UserbuffersTransport.probe(CPU)
    assert "\n" not in str(info.value) and "cpu" in str(info.value)
    if not torch.cuda.is_available():
        with pytest.raises(Unavailable, match="sees no CUDA device") as info:
            UserbuffersTransport.probe(torch.device("cuda", 0))
        assert "\n" not in str(info.value) and "cuda.bindings" not in sys.modules
