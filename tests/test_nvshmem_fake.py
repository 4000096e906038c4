"""The nvshmem transport on a replaced library: both its forms, sharing of the instance, failures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import test_userbuffers_fake as single
import torch
from fake_cuda import FakeCuda
from fake_nvshmem import FakeNvshmem, FakeNvshmemTransport

from commbackend.contract import Slot
from commbackend.errors import CommBackendError, HeapExhausted, Unavailable
from commbackend.testing import TransportSuite

CPU = torch.device("cpu")


@pytest.mark.slow
class TestSuiteMapped(TransportSuite):
    transport = "fake_nvshmem:ProcessNvshmem"
    size = 2


class TestSuiteFar(TransportSuite):
    transport = "fake_nvshmem:FarNvshmem"
    size = 2


class World(single.World):
    """Ranks as threads, each a PE."""

    def __init__(self, size: int = 2, **kw: Any) -> None:
        super().__init__(size, **kw)
        self.pes = [FakeNvshmem(fake) for fake in self.fakes]

    def connect(self, group: Any, **options: Any) -> FakeNvshmemTransport:
        FakeNvshmemTransport.fakes = dict(enumerate(self.fakes))
        FakeNvshmemTransport.pes = dict(enumerate(self.pes))
        return FakeNvshmemTransport.connect(group, CPU, options)


@contextlib.contextmanager
def world(size: int = 2, **kw: Any) -> Iterator[World]:
    w = World(size, **kw)
    try:
        yield w
        assert w.live() == [{}] * w.size
    finally:
        for fake in w.fakes:
            fake.stop()


def _ring(t: Any, fake: FakeCuda) -> list[float]:
    """Every rank puts 8 rows of a wider window to its right neighbour, then signals once more."""
    buffer, slots = t.alloc(1 << 16), t.alloc_slots(4)
    source = buffer.window(0, (8, 4), torch.float32)
    window = buffer.window(4096, (8, 4), torch.float32, (16, 1))
    source.local.fill_(float(t.rank + 1))
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    t.barrier(single.soon())
    t.put(window, source.local, right, slot=Slot(slots, 1, 1), stream=0)
    t.signal(right, Slot(slots, 2, 7), stream=0)
    t.wait(left, Slot(slots, 2, 7), deadline=single.soon())
    t.wait(left, Slot(slots, 1, 1), deadline=single.soon())
    got = torch.empty(8, 4)
    t.get(got, source, left, stream=0)
    fake.synchronize()
    t.barrier(single.soon())
    return [*window.local.unique().tolist(), *got.unique().tolist()]


def test_where_memory_is_mapped_no_call_of_the_library_moves_data() -> None:
    with world(3) as w:
        assert w.run(_ring) == [[3.0, 3.0], [1.0, 1.0], [2.0, 2.0]]
        for pe in w.pes:
            assert not set(pe.calls) & {"put", "get", "signal", "quiet", "wait"}, pe.calls
            assert pe.calls["finalize"] == 1 and pe.calls["malloc"] == pe.calls["free"]


@pytest.mark.parametrize("how", ["unreachable", "option"])
def test_elsewhere_puts_and_signals_are_the_librarys(how: str) -> None:
    with world(3) as w:
        options: dict[str, Any] = {"peer_views": False} if how == "option" else {}
        w.pes[1].unreachable = how == "unreachable"  # one rank that maps nothing decides for all
        assert w.run(_ring, **options) == [[3.0, 3.0], [1.0, 1.0], [2.0, 2.0]]
        for pe in w.pes:
            assert pe.calls["put"] and pe.calls["get"] and pe.calls["signal"]


def test_a_signal_that_covers_several_puts_follows_a_quiet() -> None:
    """A put's own signal covers that put only."""

    def work(t: Any, fake: FakeCuda) -> list[str]:
        buffer, slots = t.alloc(1 << 16), t.alloc_slots(4)
        flat, rows = buffer.window(0, (64,), torch.float32), buffer.window(4096, (4, 4), torch.float32, (8, 1))
        log: list[str] = []
        enqueue = t._library._core._enqueue
        t._library._core._enqueue = lambda name, stream, step: (log.append(name), enqueue(name, stream, step))
        stream = fake.new_stream()
        t.put(flat, flat.local, 1 - t.rank, slot=Slot(slots, 0, 1), stream=stream)
        log.append("|")
        t.put(rows, rows.local, 1 - t.rank, slot=Slot(slots, 1, 1), stream=stream)
        log.append("|")
        t.signal(1 - t.rank, Slot(slots, 2, 1), stream=stream)
        fake.synchronize()
        t.barrier(single.soon())
        del t._library._core._enqueue
        return log

    with world() as w:
        for log in w.run(work, peer_views=False):
            assert log == ["put", "signal", "|", "put", "put", "put", "put", "quiet", "signal", "|", "signal"]


def test_two_communicators_share_the_instance_and_the_last_one_ends_it() -> None:
    with world() as w:

        def work(t: Any, fake: FakeCuda) -> int:
            return int(w.pes[t.rank].calls["init"])

        def nested(rank: int, group: Any) -> tuple[int, int]:
            first = w.connect(group)
            second = w.connect(group)
            first.close()
            between = int(w.pes[rank].calls["finalize"])
            second.close()
            return between, int(w.pes[rank].calls["finalize"])

        assert single.run_threads(nested, 2) == [(0, 1), (0, 1)]
        # And again, of another size of heap, after it was finalised.
        assert w.run(work) == [2, 2]


def test_an_instance_of_the_application_is_used_and_left() -> None:
    with world() as w:
        uid = w.pes[0].get_unique_id().raw.raw

        def rank_main(rank: int, group: Any) -> tuple[list[int], int]:
            w.pes[rank].join(uid, 1 - rank, 2)  # the application numbers its PEs its own way
            t = w.connect(group)
            pes = list(t._pes)
            t.close()
            return pes, int(w.pes[rank].calls["finalize"])

        assert single.run_threads(rank_main, 2) == [([1, 0], 0), ([1, 0], 0)]


def test_an_instance_of_other_ranks_is_refused_by_all() -> None:
    with world(3) as w:
        uid = w.pes[0].get_unique_id().raw.raw

        def rank_main(rank: int, group: Any) -> str:
            w.pes[rank].join(uid, rank, 3)
            w.pes[rank].n_pes = lambda: 8  # type: ignore[method-assign]
            with pytest.raises(Unavailable) as e:
                w.connect(group)
            return str(e.value)

        assert all("8 PEs" in text and "collective over all" in text for text in single.run_threads(rank_main, 3))


def test_a_library_that_is_there_on_some_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Any, rank: int) -> Any:
        if rank == 1:
            raise Unavailable("nvshmem4py cannot be imported: no such module")
        return found(device, rank)

    with world() as w:
        found = FakeNvshmemTransport.open_library
        monkeypatch.setattr(FakeNvshmemTransport, "open_library", staticmethod(refuse))
        for error in w.outcomes():
            assert isinstance(error, Unavailable) and "rank 1: nvshmem4py cannot be imported" in str(error)


def test_a_shared_gpu_without_mps_is_refused_before_the_library_ends_the_process() -> None:
    with world() as w:
        for pe in w.pes:
            pe.ready = 3  # STATUS_LIMITED_MPG
        assert w.outcomes() == [None, None]
        for error in w.outcomes(peer_views=False):
            assert isinstance(error, Unavailable) and "share a GPU without MPS" in str(error)


def test_memory_that_is_not_there_is_said_before_the_library_blocks() -> None:
    def work(t: Any, fake: FakeCuda) -> int:
        before = t._library._core.calls["malloc"]
        with pytest.raises(HeapExhausted, match=r"rank 0: nvshmem malloc of .* bytes on rank 0: available"):
            t.alloc(1 << 34)
        return int(t._library._core.calls["malloc"] - before)

    with world() as w:
        assert w.run(work) == [0, 0]


def test_after_a_fault_nobody_waits_in_the_library() -> None:
    def work(t: Any, fake: FakeCuda) -> Any:
        t.alloc(4096)
        if t.rank == 0:
            t.abort("enough")
        single.fault_of(t)
        return None

    with world() as w:
        w.run(work)
        left = [pe.calls["malloc"] - pe.calls["free"] for pe in w.pes]
        assert left[0] == left[1] > 0 and [pe.calls["finalize"] for pe in w.pes] == [0, 0]
        # The next communicator of the same ranks gives back what the failed one has left, and leaves in order.
        assert w.outcomes() == [None, None]
        assert [pe.calls["malloc"] - pe.calls["free"] for pe in w.pes] == [0, 0]
        assert [pe.calls["finalize"] for pe in w.pes] == [1, 1]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(CommBackendError, match="bootstrap='slurm'"):
        FakeNvshmemTransport(
            type("G", (), {"rank": 0, "size": 1, "token": b"", "timeout_s": 1.0})(), CPU, {"bootstrap": "slurm"}, None
        )  # type: ignore[arg-type]
