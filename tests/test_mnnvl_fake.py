"""The mnnvl transport on fake drivers: conformance, fabric handles, IMEX, failures of every call on every rank.

No multi-node NVLink was at hand: these are its only tests.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import test_userbuffers_fake as single
import torch
from fake_cuda import CUresult, FakeMnnvl, gpus

from commbackend.errors import CommBackendError, PeerDied, Unavailable
from commbackend.testing import TransportSuite

CPU = torch.device("cpu")


class TestSuiteOnFake(TransportSuite):
    transport = "fake_cuda:ProcessMnnvl"
    size = 2


class World(single.World):
    """Ranks as threads; nothing travels between them but bytes over TCP and fabric handles."""

    def connect(self, group: Any, **options: Any) -> FakeMnnvl:
        FakeMnnvl.fakes = dict(enumerate(self.fakes))
        return FakeMnnvl.connect(group, CPU, options)


@contextlib.contextmanager
def world(size: int = 2, **kw: Any) -> Any:
    w = World(size, **kw)
    try:
        yield w
        assert w.live() == [{}] * w.size
    finally:
        for fake in w.fakes:
            fake.stop()


def test_memory_is_shared_by_fabric_handles() -> None:
    with world(3) as w:
        assert w.run(lambda t, fake: (t.memory, t.caps.scope)) == [("fabric", "nvlink")] * 3


def test_a_put_arrives_and_is_signalled() -> None:
    def work(t: Any, fake: Any) -> list[float]:
        buffer, slots = t.alloc(1 << 16), t.alloc_slots(4)
        window = buffer.window(0, (8, 4), torch.float32)
        peer = 1 - t.rank
        t.put(window, torch.full((8, 4), float(t.rank + 1)), peer, slot=single.Slot(slots, 1, 1), stream=0)
        t.wait(peer, single.Slot(slots, 1, 1), deadline=single.soon())
        return window.local.unique().tolist()

    with world() as w:
        assert w.run(work) == [[2.0], [1.0]]


def test_without_an_imex_channel_the_reason_says_what_to_provide() -> None:
    """F043: the attribute says that fabric handles are supported; only making memory tells that they are not."""
    host = gpus(2)
    host[1].imex = False
    with world(host=host) as w:
        FakeMnnvl.fakes = dict(enumerate(w.fakes))
        FakeMnnvl._try_fabric(FakeMnnvl.open_driver(CPU, 0))
        with pytest.raises(Unavailable, match=r"cuMemCreate.*CUDA_ERROR_NOT_PERMITTED") as e:
            FakeMnnvl._try_fabric(FakeMnnvl.open_driver(CPU, 1))
        assert "IMEX channel" in e.value.hint and "/dev/nvidia-caps-imex-channels" in e.value.hint


@pytest.mark.parametrize(
    "call,code",
    [
        ("cuMemImportFromShareableHandle", CUresult.CUDA_ERROR_INVALID_DEVICE),
        ("cuMemSetAccess", CUresult.CUDA_ERROR_NOT_SUPPORTED),
        ("cuMemMap", CUresult.CUDA_ERROR_NOT_SUPPORTED),
        ("cuMemCreate", CUresult.CUDA_ERROR_NOT_PERMITTED),
        ("cuMemExportToShareableHandle", CUresult.CUDA_ERROR_NOT_PERMITTED),
    ],
)
@pytest.mark.parametrize("at", [1, 2])
def test_one_pair_that_fails_takes_the_whole_group_down_this_path(call: str, code: CUresult, at: int) -> None:
    """F038, F039: importing fails with 101, or the k-th SetAccess with 801: no partial mapping stays, all agree."""
    with world(3) as w:
        w.fakes[1].fail(call, code, at=at)
        for error in w.outcomes():
            assert isinstance(error, Unavailable), error
            assert "rank 1" in str(error) and call in str(error) and code.name in str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_any_failing_call_makes_all_ranks_refuse_together(rank: int) -> None:
    with world() as w:
        w.run(lambda t, fake: None)
        calls = w.fakes[rank].calls.copy()
    for name in sorted(set(calls) - single._FREEING - single._LATER):
        with world() as w:
            w.fakes[rank].fail(name)
            outcomes = w.outcomes()
            assert all(isinstance(e, CommBackendError) for e in outcomes), (name, outcomes)


def test_multicast_is_optional_and_given_up_together() -> None:
    with world() as w:
        assert w.run(lambda t, fake: t.caps.multicast, multicast=True) == [True, True]
    with world() as w:
        w.fakes[1].fail("cuMulticastBindMem")
        found = w.run(lambda t, fake: (t.caps.multicast, t.multicast_reason), multicast=True)
        assert [multicast for multicast, _ in found] == [False, False]
        assert all("rank 1" in reason and "cuMulticastBindMem" in reason for _, reason in found)


def test_a_fault_reaches_the_peers_over_the_network() -> None:
    def work(t: Any, fake: Any) -> str:
        if t.rank == 0:
            t.abort("enough")
        return str(single.fault_of(t))

    with world(3) as w:
        assert all("rank 0 aborted the communicator: enough" in text for text in w.run(work))


def test_a_record_that_does_not_come_names_the_rank() -> None:
    def work(t: Any, fake: Any) -> str:
        t.post(1, b"call")
        if t.rank:
            return str(single.fault_of(t, 10.0))
        t.record(1, 1, single.soon())
        with pytest.raises(CommBackendError) as e:
            t.record(2, 2, single.soon(0.3))
        return str(e.value)

    with world(3) as w:
        for text in w.run(work):
            assert "rank 2" in text and "waited" in text, text


def test_death_is_told_as_death() -> None:
    def work(t: Any, fake: Any) -> Any:
        if t.rank == 1:
            t._control._net._cut([0, 2])  # what the end of the process does to its connections
            return PeerDied
        return type(single.fault_of(t, 10.0))

    with world(3) as w:
        found = w.run(work)
        assert found[0] is PeerDied and found[2] is PeerDied
