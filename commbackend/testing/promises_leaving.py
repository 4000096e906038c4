"""Promises about joining and leaving: nothing stays behind."""

from __future__ import annotations

import gc
import os
import threading
import time

import torch

from ..contract import OneSided, Slot, Transport
from ..errors import CommAborted, CommBackendError
from .harness import Harness, keep


@keep(Transport)
def close_is_collective_and_idempotent(h: Harness) -> None:
    """Nobody has left before all have called close; closing again does nothing; a closed transport refuses verbs."""
    h.barrier()
    if h.rank == 0:
        time.sleep(0.3)
        h.t.close()
    else:
        with h.takes(0.15, h.t.timeout_s):
            h.t.close()
    h.t.close()
    h.raises(CommAborted, h.t.barrier, h.soon())
    h.t.abort("too late to matter")
    assert h.t.fault is None


@keep(Transport)
def close_has_a_deadline(h: Harness) -> None:
    """A rank whose peer does not close leaves by its deadline, and the peer then learns that it is alone."""
    h.barrier()
    if h.rank == 0:
        with h.takes(0.0, 2.0):
            h.raises(CommBackendError, h.t.close, 0.5)
        h.t.close()
    else:
        time.sleep(1.0)
        with h.takes(0.0, 3.0):
            h.raises(CommBackendError, h.t.barrier, h.soon(2.0))


@keep(OneSided)
def close_takes_open_buffers_along(h: Harness) -> None:
    """Buffers and slots that are still open go with the transport; closing them afterwards does nothing."""
    buffer, slots = h.one.alloc(4096), h.one.alloc_slots(4)
    h.put(buffer.window(0, (4,), torch.float32), h.tensor([1.0] * 4), h.next, Slot(slots, 0, 1))
    h.wait(h.prev, Slot(slots, 0, 1))
    h.t.close()
    buffer.close()
    slots.close()


@keep(Transport)
def nothing_is_left(h: Harness) -> None:
    """After 20 cycles of connect, use and close the process has the descriptors, threads, names and mappings it had."""
    h.t.close()
    before: tuple[int, ...] = ()
    for cycle in range(22):
        if cycle == 2:
            before = _footprint(h)
        h.t = h.connect()
        h.barrier()
        if isinstance(h.t, OneSided):
            buffer, slots = h.t.alloc(1 << 16), h.t.alloc_slots(4)
            h.signal(h.next, Slot(slots, 0, 1))
            h.wait(h.prev, Slot(slots, 0, 1))
            if cycle % 2:
                buffer.close()
                slots.close()
            del buffer, slots
        if cycle % 5 == 4:
            h.group.barrier()
            h.t.abort("every fifth cycle ends with a fault")
        h.t.close()
    after = _footprint(h)
    assert after == before, f"(descriptors, threads, names, mappings) were {before}, are {after}"


def _footprint(h: Harness) -> tuple[int, ...]:
    """Taken while all other ranks hold still: some may be threads of this process."""
    found: tuple[int, ...] = ()
    h.group.barrier()
    for rank in range(h.size):
        if rank == h.rank:
            gc.collect()
            # Other jobs of this host come and go: their names are not counted.
            listed = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
            names = sum(not n.startswith(("sm_segment.", "vader_segment.", "sem.mp-")) for n in listed)
            with open("/proc/self/maps") as maps:
                shared = sum(1 for line in maps if "s" in line.split()[1])
            found = len(os.listdir("/proc/self/fd")), threading.active_count(), names, shared
        h.group.barrier()
    return found


@keep(Transport)
def who_does_not_come_is_missed(h: Harness) -> None:
    """When a rank never connects, the others raise within the group's deadline."""
    h.t.close()
    h.group.timeout_s = 1.0
    if h.rank == h.size - 1:
        return
    with h.takes(0.0, 1.1 * 1.0 + 1.5):
        h.raises(CommBackendError, h.connect)


@keep(Transport)
def probe_says_what_is_missing(h: Harness) -> None:
    """probe accepts the device that connect accepts and refuses one it does not serve with Unavailable."""
    from ..errors import Unavailable

    h.kind.probe(h.device)
    if h.t.caps.device == "any":
        return
    other = torch.device("cuda" if h.t.caps.device == "cpu" else "cpu")
    error = h.raises(Unavailable, h.kind.probe, other)
    assert error.reason


@keep(Transport)
def strange_options_are_left_alone(h: Harness) -> None:
    """connect takes the options it knows; settings that are for others do not disturb it."""
    options = {**h.setup.options, "chunks": 4, "no transport's setting": object()}
    other = h.kind.connect(h.group, h.device, options)
    other.barrier(h.soon())
    other.close()
