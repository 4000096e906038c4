"""Ranks that are lost: killed, stopped, asleep, or stopped for a while; and what the others do then."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import signal
import struct
import tempfile
import threading
import time
from typing import Any

from ...communicator import Communicator
from ...config import resolve
from ...errors import CommBackendError, CommTimeout, PeerDied
from ...group import Group
from ..ranks import RankError, run_ranks
from .traffic import CPU, connect, leftovers, one_call

__all__ = ["kills", "pauses", "stops"]

_SIZE = 4
_PATIENCE_S = 90.0


def _pids(group: Group) -> list[int]:
    return [struct.unpack("<i", raw)[0] for raw in group.exchange(struct.pack("<i", os.getpid()))]


def _moment(group: Group, delay_s: float) -> float:
    """A time, the same on all ranks: ``delay_s`` after the last of them has come."""
    told = group.exchange(struct.pack("<d", time.monotonic()))
    return max(float(struct.unpack("<d", raw)[0]) for raw in told) + delay_s


def _until_fault(comm: Communicator, dice: random.Random, limit_s: float) -> tuple[CommBackendError, int]:
    """Call until it raises; return the error and how many calls were right before."""
    deadline, calls = time.monotonic() + limit_s, 0
    try:
        while time.monotonic() < deadline:
            one_call(comm, dice)
            calls += 1
    except CommBackendError as e:
        return e, calls
    raise AssertionError(f"rank {comm.rank}: nothing was noticed within {limit_s} s")


def _sticky(comm: Communicator, first: CommBackendError) -> None:
    try:
        one_call(comm, random.Random(0))
    except CommBackendError as e:
        assert e is first, f"a second call raised {e!r} after {first!r}"
    else:
        raise AssertionError("a call after the fault returned")


def _killed(rank: int, group: Group, transport: str, rounds: int, seed: int, clock: str) -> list[Any] | None:
    """``rounds`` worlds of four one after the other, each of the survivors of the one before and a process in reserve.

    Returns what the survivors of every round saw, from one of the last three.
    """
    gc.freeze()  # what was loaded before is not searched again at every look for leftovers
    dice, alive = random.Random(seed), list(range(group.size))
    for number in range(rounds):
        members, victim = alive[:_SIZE], _victim(dice, alive)
        delay_s, traffic = dice.random() * 0.05, dice.randrange(1 << 30)
        if rank in members:
            own = Group.from_store(group.store, members.index(rank), _SIZE, timeout_s=_PATIENCE_S, name=f"at {number}")
            dies = members.index(victim)
            seen = _kill(own, transport, dies, delay_s, traffic, (clock, 8 * number))
            group.store.set(f"seen/{number}/{rank}", json.dumps(seen))
    Group.from_store(group.store, alive.index(rank), len(alive), timeout_s=_PATIENCE_S, name="end").barrier()
    if rank != alive[0]:
        return None
    keys = [f"seen/{number}/{r}" for number in range(rounds) for r in range(group.size)]
    return [json.loads(group.store.get(k)) for k in keys if group.store.check([k])]


def _victim(dice: random.Random, alive: list[int]) -> int:
    """Draw who dies of the first four of ``alive``, and take it out."""
    return alive.pop(dice.randrange(_SIZE))


def _die(clock: tuple[str, int]) -> None:
    fd = os.open(clock[0], os.O_WRONLY)
    os.pwrite(fd, struct.pack("<d", time.monotonic()), clock[1])
    os.kill(os.getpid(), signal.SIGKILL)


def _kill(
    group: Group, transport: str, victim: int, delay_s: float, seed: int, clock: tuple[str, int]
) -> dict[str, Any]:
    comm = connect(group, transport, timeout_s=10.0)
    rank, moment = group.rank, _moment(group, delay_s)
    if rank == victim:
        threading.Timer(max(moment - time.monotonic(), 0), _die, (clock,)).start()
    error, calls = _until_fault(comm, random.Random(seed), 10.0)
    noticed = time.monotonic()
    with open(clock[0], "rb") as file:
        moment = float(struct.unpack("<d", os.pread(file.fileno(), 8, clock[1]))[0])
    named = isinstance(error, PeerDied) and error.rank == victim and bool(error.op) and error.seq >= 0
    _sticky(comm, error)
    comm.close()
    del comm
    # The survivors go on, on a communicator of their own.
    rest = [r for r in range(group.size) if r != victim]
    own = Group.from_store(group.store, rest.index(rank), len(rest), timeout_s=10.0, name="rest")
    with Communicator(own, resolve(transport=transport, timeout_s=10.0), CPU) as again:
        one_call(again, random.Random(seed + 1))
        resumed_s = time.monotonic() - moment
    del again
    said = str(error)
    del error  # it and its causes hold the frames of the call, and these the communicator
    return {
        "late_s": noticed - moment,
        "resumed_s": resumed_s,
        "named": named,
        "calls": calls,
        "left": leftovers(),
        "said": said,
    }


def kills(dice: random.Random, transport: str, rounds: int = 8) -> list[dict[str, Any]]:
    """``rounds`` SIGKILLs at random moments of random traffic; return what every survivor of each saw."""
    seed, size = dice.randrange(1 << 30), _SIZE + rounds - 1
    drawn, alive = random.Random(seed), list(range(size))
    dead = []
    for _ in range(rounds):
        before = set(alive)
        _victim(drawn, alive)
        dead += [*(before - set(alive))]
        drawn.random(), drawn.randrange(1 << 30)
    with tempfile.NamedTemporaryFile(prefix="commbackend-clock-") as clock:
        clock.truncate(8 * rounds)
        args = (transport, rounds, seed, clock.name)
        found = run_ranks(_killed, size, *args, timeout_s=_PATIENCE_S + 2 * rounds, expect_death=dead)
    return next(f for f in found if f is not None)


def _stopped(rank: int, group: Group, transport: str, rounds: int, seed: int, timeout_s: float) -> list[Any]:
    gc.freeze()
    logging.getLogger("commbackend").setLevel(logging.ERROR)  # it warns of every late rank
    dice, found = random.Random(seed), []
    for number in range(rounds):
        victim, how = dice.randrange(group.size), dice.choice(("stop", "sleep"))
        args = dice.random() * 0.05, dice.randrange(1 << 30), how, timeout_s
        own = Group.from_store(group.store, rank, group.size, timeout_s=_PATIENCE_S, name=f"at {number}")
        seen = _stop(own, transport, victim, *args)
        if seen is not None:
            found.append(seen | {"how": how})
    return found


def _stop(
    group: Group, transport: str, victim: int, delay_s: float, seed: int, how: str, timeout_s: float
) -> dict[str, Any] | None:
    comm, rank = connect(group, transport, timeout_s=timeout_s), group.rank
    pids, dice = _pids(group), random.Random(seed)
    if rank == victim:
        deadline = time.monotonic() + delay_s
        with contextlib.suppress(CommBackendError):
            while time.monotonic() < deadline:
                one_call(comm, dice)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        end = time.monotonic() + 20 * timeout_s
        while comm._engine is not None and comm._engine.transport.fault is None and time.monotonic() < end:
            time.sleep(0.005)  # asleep in the application, for ever as far as the others can tell
        with contextlib.suppress(CommBackendError):
            comm.close()
        return None
    start, error, calls = 0.0, None, 0
    try:
        while calls < 100_000:
            start = time.monotonic()
            one_call(comm, dice)
            calls += 1
    except CommBackendError as e:
        error = e
    took_s = time.monotonic() - start
    named = isinstance(error, CommTimeout) and error.waiting_for == (victim,)
    said = str(error)
    comm.close()
    del comm, error
    if how == "stop" and rank == min(r for r in range(group.size) if r != victim):
        time.sleep(0.2)  # the others are through as well
        os.kill(pids[victim], signal.SIGCONT)
    return {"took_s": took_s, "named": named, "calls": calls, "left": leftovers()[0], "said": said}


def stops(dice: random.Random, transport: str, rounds: int = 4, timeout_s: float = 0.5) -> list[dict[str, Any]]:
    """``rounds`` times one rank stops (SIGSTOP) or stays away while the others call; return what these saw."""
    args = (transport, rounds, dice.randrange(1 << 30), timeout_s)
    found = run_ranks(_stopped, _SIZE, *args, timeout_s=_PATIENCE_S + 4 * rounds)
    return [seen for of_rank in found for seen in of_rank]


def _paused(rank: int, group: Group, transport: str, victim: int, seed: int, timeout_s: float) -> dict[str, Any]:
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commbackend").addHandler(handler)
    comm = connect(group, transport, timeout_s=timeout_s)
    pids, dice = _pids(group), random.Random(seed)
    one_call(comm, dice)
    if rank == (victim + 1) % group.size:
        threading.Thread(target=_wake, args=(pids[victim], 0.9 * timeout_s), daemon=True).start()
    group.barrier()
    if rank == victim:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGSTOP)
    calls = 0
    for _ in range(20):
        one_call(comm, dice)
        calls += 1
    comm.close()
    late = [w for w in warned if f"{victim}" in w and "waited" in w]
    return {"calls": calls, "warned": bool(late), "victim": rank == victim}


def _wake(pid: int, after_s: float) -> None:
    """Wait until the process is stopped, and let it go on ``after_s`` later."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "T":
                time.sleep(after_s)
                break
        time.sleep(0.001)
    os.kill(pid, signal.SIGCONT)


def pauses(dice: random.Random, transport: str, timeout_s: float = 2.0) -> list[dict[str, Any]]:
    """One rank is stopped for nine tenths of the deadline; all calls then end rightly."""
    args = (transport, dice.randrange(_SIZE), dice.randrange(1 << 30), timeout_s)
    try:
        return run_ranks(_paused, _SIZE, *args, timeout_s=_PATIENCE_S)
    except RankError as e:
        return [{"calls": 0, "warned": False, "victim": False, "said": str(e)}]
