"""Promises about what goes wrong: deadlines, aborts, deaths."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ..contract import POISON, Caps, Collective, OneSided, Slot, Transport
from ..errors import CommAborted, CommBackendError, CommTimeout, PeerDied
from .harness import Harness, keep

# A wait may overrun its deadline by a tenth, and by what a busy machine needs to schedule a thread.
_SCHEDULING_S = 0.5
# A deadline that is not the reason why something ends.
_LONG_S = 6.0


def _abortable(caps: Caps) -> str:
    return "" if caps.abortable else "it is not abortable: blocked waits end by their own deadline"


def _own_process(caps: Caps) -> str:
    return "its ranks share a process, which cannot die in part" if caps.scope == "process" else ""


@keep(OneSided)
def a_wait_ends_by_its_deadline(h: Harness) -> None:
    """CommTimeout names peer, wanted and seen, comes within the deadline and a tenth, and is sticky."""
    slots = h.one.alloc_slots(3)
    for peer in h.peers:
        h.signal(peer, Slot(slots, 2, 5))
    h.barrier()
    if h.rank == 0:
        with h.takes(1.0, 1.1 + _SCHEDULING_S):
            error = h.raises(CommTimeout, h.wait, h.next, Slot(slots, 2, 6), 1.0)
        assert (error.rank, error.wanted, error.seen, error.waiting_for) == (h.next, 6, 5, (h.next,)), vars(error)
        assert all(word in str(error) for word in ("rank 0", f"rank {h.next}", "6", "5")), error
    elif h.t.caps.abortable:
        # The one that gave up tells the others, which need not wait for their own deadline.
        error = h.raises(CommTimeout, h.wait, 0, Slot(slots, 1, 1), _LONG_S)
        assert error.rank == 1, error
    else:
        h.raises(CommBackendError, h.wait, 0, Slot(slots, 1, 1), 2.0)
    _stays_broken(h, slots)


def _stays_broken(h: Harness, slots: Any) -> None:
    """Every verb raises the first fault, and leaving is quick."""
    first = h.t.fault
    assert first is not None
    x = torch.zeros(1, device=h.device)
    verbs: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (h.one.signal, (h.next, Slot(slots, 0, 1))),
        (h.one.alloc, (64,)),
        (h.one.alloc_slots, (1,)),
        (h.t.barrier, (h.soon(),)),
        (h.t.post, (1, b"")),
        (h.t.record, (h.next, 0, h.soon())),
    ]
    if isinstance(h.t, Collective):
        verbs += [(h.t.all_reduce, (x, x)), (h.t.all_gather, ([x] * h.size, x))]
    for call, args in verbs:
        assert h.raises(CommBackendError, call, *args) is first, f"{call.__name__} raised another fault"
    h.t.peek(h.next, 0)
    error = h.raises(CommBackendError, h.one.wait, h.next, Slot(slots, 0, 1), deadline=h.soon())
    assert error is first
    with h.takes(0.0, 2.0):
        h.t.close()


@keep(OneSided)
def a_late_peer_is_named_early(h: Harness) -> None:
    """A tenth of the way to its deadline a wait warns, naming whom it waits for; then it may still succeed."""
    slots = h.one.alloc_slots(1)
    if h.rank:
        h.wait(0, Slot(slots, 0, 1))
        return

    def signal_all() -> None:
        for peer in range(h.size):
            h.signal(peer, Slot(slots, 0, 1))

    with h.warnings() as seen:
        timer = h.later(0.6, signal_all)
        h.wait(0, Slot(slots, 0, 1), 3.0)
        timer.join()
        h.sync()  # the process may end now, and what it has enqueued with it
    assert len(seen) == 1 and "rank 0" in seen[0] and "wanted 1" in seen[0], seen


@keep(OneSided)
def a_record_is_waited_for(h: Harness) -> None:
    """A record that comes late is waited for; one that never comes raises CommTimeout by the deadline."""
    if h.rank == 0:
        time.sleep(0.3)
    h.t.post(0, b"late")
    assert h.t.record(0, 0, h.soon()) == b"late"
    h.barrier()
    with h.takes(0.0, 1.1 + _SCHEDULING_S):
        error = h.raises(CommTimeout, h.t.record, h.next, 1, h.soon(1.0))
    assert error.rank in [*h.peers, h.rank] and h.t.fault is error


@keep(Transport)
def a_barrier_ends_by_its_deadline(h: Harness) -> None:
    """CommTimeout names every rank that has not come."""
    h.barrier()
    if h.rank == h.size - 1:
        time.sleep(1.5)
        h.raises(CommBackendError, h.t.barrier, h.soon(1.0))
        return
    with h.takes(0.0, 1.1 + _SCHEDULING_S):
        error = h.raises(CommTimeout, h.t.barrier, h.soon(1.0))
    assert h.size - 1 in error.waiting_for, error.waiting_for


@keep(OneSided, needs=_abortable)
def abort_ends_a_wait(h: Harness) -> None:
    """abort from another thread ends blocked waits on all ranks at once with CommAborted; it may be called again."""
    slots = h.one.alloc_slots(1)
    h.barrier()
    if h.rank == 0:
        h.later(0.3, lambda: h.t.abort("the user said so"))
        h.later(0.4, lambda: h.t.abort("again"))
    with h.takes(0.0, 0.3 + 0.3 + _SCHEDULING_S):
        error = h.raises(CommAborted, h.wait, h.next, Slot(slots, 0, 1), _LONG_S)
    assert "the user said so" in str(error) and "rank 0" in str(error), error
    assert slots.read(h.next, 0) in (0, POISON)
    _stays_broken(h, slots)


@keep(Transport, needs=_abortable)
def abort_ends_a_barrier_and_a_record(h: Harness) -> None:
    """As a wait, so a barrier and a record that are blocked when a peer aborts."""
    h.barrier()
    if h.rank == 0:
        time.sleep(0.2)
        h.t.abort("enough")
        return
    with h.takes(0.0, 2.0):
        if h.rank % 2:
            error = h.raises(CommAborted, h.t.barrier, h.soon(_LONG_S))
        else:
            error = h.raises(CommAborted, h.t.record, 0, 3, h.soon(_LONG_S))
    assert "enough" in str(error)


@keep(OneSided, needs=_abortable)
def abort_ends_an_allocation(h: Harness) -> None:
    """As a wait, so a collective call that waits for a peer which aborts instead."""
    h.group.barrier()
    if h.rank == 0:
        time.sleep(0.2)
        h.t.abort("enough")
        return
    h.t.timeout_s = _LONG_S
    with h.takes(0.0, 2.0):
        error = h.raises(CommAborted, h.one.alloc, 4096)
    assert "enough" in str(error) and h.t.fault is error


@keep(OneSided, needs=_abortable)
def abort_ends_the_own_allocation(h: Harness) -> None:
    """abort from another thread ends a collective call that waits for peers which never come."""
    h.group.barrier()
    if h.rank == 0:
        h.t.timeout_s = _LONG_S
        h.later(0.2, lambda: h.t.abort("enough"))
        with h.takes(0.0, 2.0):
            h.raises(CommAborted, h.one.alloc, 4096)
    else:
        time.sleep(0.5)
        h.raises(CommAborted, h.t.barrier, h.soon())
    h.group.barrier()  # nobody leaves before: a peer that leaves would end the allocation too


@keep(Transport)
def abort_does_not_block(h: Harness) -> None:
    """abort is local and quick, from any thread, from several at once; the first cause stays."""
    h.group.barrier()
    if h.rank == 0:
        with h.takes(0.0, 0.5):
            threads = [threading.Thread(target=h.t.abort, args=(f"cause {i}",)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        fault = h.t.fault
        assert isinstance(fault, CommAborted) and "cause" in str(fault)
        h.t.abort("later")
        assert h.t.fault is fault
    else:
        h.raises(CommBackendError, h.t.barrier, h.soon(2.0))


@keep(OneSided, needs=_own_process, dies=(1,))
def a_death_is_noticed(h: Harness) -> None:
    """A peer that dies in a call raises PeerDied, naming it, in every rank that waits, within 100 ms."""
    slots = h.one.alloc_slots(2)
    h.barrier()
    moment = time.monotonic() + 0.3
    moment = max(struct.unpack("<d", raw)[0] for raw in h.group.exchange(struct.pack("<d", moment)))
    if h.rank == 1:
        time.sleep(max(moment - time.monotonic(), 0))
        os.kill(os.getpid(), signal.SIGKILL)
    error = h.raises(PeerDied, h.wait, 1, Slot(slots, 0, 1), _LONG_S)
    late = time.monotonic() - moment
    assert error.rank == 1 and "rank 1" in str(error), error
    assert late < 0.1 + _SCHEDULING_S, f"noticed after {late:.3f} s"
    _stays_broken(h, slots)


def _only_collectives(caps: Caps) -> str:
    return "its waits show deaths already" if caps.one_sided else _own_process(caps)


@keep(Collective, needs=_only_collectives, dies=(1,))
def a_death_ends_a_collective(h: Harness) -> None:
    """A peer that dies in a collective raises an error in the others by the deadline; nothing looks like success."""
    h.barrier()
    if h.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(4, device=h.device)

    def call() -> None:
        for _ in range(2):
            h.many.all_reduce(torch.empty_like(x), x, stream=h.stream)
            h.sync()

    with h.takes(0.0, h.t.timeout_s * 1.1 + 5.0):
        h.raises(CommBackendError, call)
    assert h.t.fault is not None
