"""The local transport: the contract's suite, plain and with injected faults, then what is its own."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from commbackend.contract import Slot
from commbackend.errors import (
    CollectiveMismatch,
    CommBackendError,
    CommTimeout,
    HeapExhausted,
    ShapeError,
    Unavailable,
)
from commbackend.group import Group
from commbackend.testing import TransportSuite, run_ranks, run_threads
from commbackend.transports.local import LocalTransport


class TestLocal(TransportSuite):
    transport = "commbackend.transports.local:LocalTransport"
    runner = staticmethod(run_threads)


class TestLocalReordering(TestLocal):
    options = {"seed": 7, "reorder": True, "delay_s": 0.0005, "peer_view": False, "source": "symmetric"}


CPU = torch.device("cpu")


def _soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def _connect(group: Group, **options: Any) -> LocalTransport:
    return LocalTransport.connect(group, CPU, options)


# -- loss
def _lossy(rank: int, group: Group) -> int:
    """Every rank sends numbered puts and signals; the receiver counts how many arrive before one is missing."""
    t = _connect(group, seed=3, loss=0.2)
    buffer, slots = t.alloc(64), t.alloc_slots(1)
    window, x = buffer.window(0, (4,), torch.float32), torch.ones(4)
    for value in range(1, 100):
        try:
            t.put(window, x * value, 1 - rank, slot=Slot(slots, 0, value))
            t.wait(1 - rank, Slot(slots, 0, value), deadline=_soon(0.3))
            assert window.local.tolist() == [value] * 4
            t.barrier(_soon())
        except CommTimeout as e:
            assert e.rank in (0, 1)
            return value
    return 100


def test_loss_becomes_a_timeout() -> None:
    """A lost put never looks like success, and the same seed loses the same verb."""
    lost = run_threads(_lossy, 2)
    assert max(lost) < 100 and run_threads(_lossy, 2) == lost


# -- death
def _mortal(rank: int, group: Group, verb: int) -> str:
    t = _connect(group, die=(1, verb))
    slots = t.alloc_slots(1)
    try:
        for value in range(1, 50):
            t.signal((rank + 1) % t.size, Slot(slots, 0, value))
            t.wait((rank - 1) % t.size, Slot(slots, 0, value), deadline=_soon())
            t.barrier(_soon())
    except CommBackendError as e:
        t.close()
        return f"{type(e).__name__} {getattr(e, 'rank', None)} {e}"
    return "lived"


@pytest.mark.parametrize("verb", [0, 1, 2, 7, 30])
def test_a_rank_dies_at_its_nth_verb(verb: int) -> None:
    said = run_threads(_mortal, 3, verb)
    assert said[1].startswith("CommAborted 1") and f"verb {verb}" in said[1]
    assert all(s.startswith("PeerDied 1") for s in (said[0], said[2])), said


# -- order
def _racing(rank: int, group: Group, seed: int) -> tuple[bool, bool]:
    """Rank 1 waits for the second of two independent puts; was the first there already? And was its slot honest?"""
    t = _connect(group, seed=seed, reorder=True)
    buffer, slots = t.alloc(64), t.alloc_slots(4)
    first, second = buffer.window(0, (4,), torch.int32), buffer.window(16, (4,), torch.int32)
    here = honest = True
    if rank == 0:
        x = torch.ones(4, dtype=torch.int32)
        t.put(first, x, 1, slot=Slot(slots, 0, 1))
        t.put(second, x, 1, slot=Slot(slots, 1, 1))
        x.zero_()  # a put has taken its source when it returns
        t.signal(1, Slot(slots, 2, 1))
    group.barrier()
    if rank == 1:
        t.wait(0, Slot(slots, 1, 1), deadline=_soon())
        here = slots.read(0, 0) == 1
        honest = second.local.tolist() == [1] * 4 and here == bool(first.local.any())
        t.wait(0, Slot(slots, 2, 1), deadline=_soon())
        honest = honest and first.local.tolist() == [1] * 4 and slots.read(0, 0) == 1
    group.barrier()
    t.close()
    return here, honest


def test_independent_puts_overtake_but_slots_never_do() -> None:
    seen = [run_threads(_racing, 2, seed)[1] for seed in range(20)]
    assert {here for here, _ in seen} == {True, False}, "the seeds never changed the order"
    assert all(honest for _, honest in seen)
    assert seen == [run_threads(_racing, 2, seed)[1] for seed in range(20)], "a seed is not enough to repeat it"


def _overlapping(rank: int, group: Group, seed: int) -> None:
    t = _connect(group, seed=seed, reorder=True)
    buffer, slots = t.alloc(64), t.alloc_slots(3)
    window = buffer.window(0, (4,), torch.int32)
    if rank == 0:
        for value in (1, 2, 3):
            t.put(window, torch.full((4,), value, dtype=torch.int32), 1, slot=Slot(slots, value - 1, 1))
        found = torch.zeros(4, dtype=torch.int32)
        t.get(found, window, 1)
        assert found.tolist() == [3] * 4
    t.barrier(_soon())
    assert rank == 0 or window.local.tolist() == [3] * 4
    t.close()


def test_puts_to_the_same_bytes_keep_their_order() -> None:
    for seed in range(10):
        run_threads(_overlapping, 2, seed)


# -- reach, sizes, sources
def _elsewhere(rank: int, group: Group) -> str:
    try:
        _connect(group)
    except Unavailable as e:
        return str(e)
    return "connected"


def test_other_processes_are_out_of_reach() -> None:
    said = run_ranks(_elsewhere, 2)
    assert all("threads of one process" in s and "[1]" in s for s in said), said


def _small_heap(rank: int, group: Group) -> None:
    t = _connect(group, heap_nbytes=1000 if rank else 2000)
    buffer = t.alloc(900)
    with pytest.raises(HeapExhausted, match="rank 1"):
        t.alloc(200)
    buffer.close()
    t.alloc(200)
    t.close()


def test_heaps_of_limited_size() -> None:
    run_threads(_small_heap, 2)


def _outside(rank: int, group: Group) -> None:
    t = _connect(group, source="symmetric", peer_view=False)
    assert t.caps.source == "symmetric" and not t.caps.peer_view
    buffer = t.alloc(64)
    window = buffer.window(0, (4,), torch.float32)
    with pytest.raises(ShapeError, match="symmetric"):
        t.put(window, torch.ones(4), 1 - rank)
    assert window.at(1 - rank) is None and window.at(rank) is not None
    t.close()


def test_symmetric_sources_are_demanded() -> None:
    run_threads(_outside, 2)


def _mismatch(rank: int, group: Group) -> None:
    t = _connect(group)
    x = torch.zeros(3 if rank == 2 else 4)
    for call in (
        lambda: t.all_gather([torch.empty(4) for _ in range(3)], x),
        lambda: t.all_reduce(torch.empty(4), x),
        lambda: t.all_reduce(torch.empty(4), torch.ones(4, dtype=torch.float64 if rank else torch.float32)),
        lambda: t.all_reduce(torch.empty(4), torch.ones(4), op="no such reduction"),
    ):
        with pytest.raises(CollectiveMismatch):
            call()
    out = torch.empty(4)
    t.all_reduce(out, torch.full((4,), 1.0 + rank))
    assert out.tolist() == [6.0] * 4
    t.close()


def test_collectives_of_different_shapes_raise_on_all() -> None:
    run_threads(_mismatch, 3)


def _delayed(rank: int, group: Group) -> float:
    t = _connect(group, delay_s=0.02, seed=rank)
    slots = t.alloc_slots(1)
    start = time.monotonic()
    for value in range(1, 11):
        t.signal(rank, Slot(slots, 0, value))
    took = time.monotonic() - start
    t.close()
    return took


def test_delays_are_taken() -> None:
    assert all(0.02 < took < 2 for took in run_threads(_delayed, 2))
