"""A fault never yields a tensor: faults of every kind at random moments, and a look at every output."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ...communicator import Communicator
from ...errors import CommBackendError
from ...group import Group
from .traffic import WrongResult, canary_call, connect, run_world

__all__ = ["faults"]

_SIZE = 3
_LATE_S = 0.06
_PATIENCE_S = 120.0


def _abort(comm: Communicator) -> None:
    comm.abort("planted")


def _cut(comm: Communicator) -> None:
    """Cut what connects this rank with the next one, as a pulled cable would."""
    transport: Any = comm._engine.transport  # type: ignore[union-attr]
    peer = (comm.rank + 1) % comm.size
    if comm.transport == "shm":
        with contextlib.suppress(OSError):  # closed meanwhile
            transport._link._peers[peer].shutdown(socket.SHUT_RDWR)
    else:
        transport._cut([peer])


def _break(comm: Communicator, after: int) -> None:
    """Have the ``after``-th wait of this rank raise something that nobody expects."""
    transport: Any = comm._engine.transport  # type: ignore[union-attr]
    real, count = transport.wait, [after]

    def wait(*args: Any, **kw: Any) -> Any:
        count[0] -= 1
        if count[0] < 0:
            raise ArithmeticError("planted")
        return real(*args, **kw)

    transport.wait = wait


def _one(comm: Communicator, dice: random.Random, kind: str, victim: int) -> None:
    """Calls until a fault of ``kind`` of rank ``victim`` ends them; then a few more, which must all raise."""
    delay_s, after, limit = dice.random() * 0.01, dice.randrange(12), time.monotonic() + 20.0
    timer: threading.Timer | None = None
    if comm.rank == victim:
        actions: dict[str, Callable[[Communicator], None]] = {"abort": _abort, "cut": _cut}
        if kind in actions:
            timer = threading.Timer(delay_s, actions[kind], (comm,))
            timer.start()
        elif kind == "break":
            _break(comm, after)
    calls = 0
    try:
        while time.monotonic() < limit:
            if kind == "late" and comm.rank == victim and calls == after:
                while comm._engine.transport.fault is None and time.monotonic() < limit:  # type: ignore[union-attr]
                    time.sleep(0.002)
            canary_call(comm, dice)
            calls += 1
        raise AssertionError(f"rank {comm.rank}: {kind} of rank {victim} was not noticed within 20 s")
    except (CommBackendError, ArithmeticError):
        pass
    finally:
        if timer is not None:
            timer.join(5.0)
    for _ in range(3):
        try:
            canary_call(comm, dice, failed=True)
        except CommBackendError:
            continue
        raise WrongResult(f"rank {comm.rank}: a call after {kind} of rank {victim} returned")


def _many(rank: int, group: Group, transport: str, seed: int, count: int) -> tuple[Counter[str], list[str]]:
    kinds = ["abort", "late"] + ["cut"] * (transport != "local") + ["break"] * (transport in ("shm", "local"))
    gc.freeze()
    logging.getLogger("commbackend").setLevel(logging.ERROR)  # it warns of every late rank
    done: Counter[str] = Counter()
    wrong = []
    for case in range(count):
        dice = random.Random(seed * 1_000_003 + case)
        kind, victim = dice.choice(kinds), dice.randrange(group.size)
        timeout_s = _LATE_S if kind == "late" else 20.0
        try:
            comm = connect(group, transport, name=f"canary {seed}.{case}", timeout_s=timeout_s, init_s=20.0)
        except CommBackendError as e:
            wrong.append(f"case {case} of seed {seed}: rank {rank}: {e}")
            break  # the others are told, and stop here too
        try:
            _one(comm, dice, kind, victim)
            done[kind] += 1
        except (AssertionError, CommBackendError) as e:
            wrong.append(f"case {case} of seed {seed} ({transport}): {type(e).__name__}: {e}")
        comm.close()
    return done, wrong


def faults(dice: random.Random, transport: str, count: int) -> tuple[Counter[str], list[str]]:
    """Inject ``count`` faults one after the other; return how many of each kind, and what went wrong.

    Kinds: "abort" from another thread, "late" (a rank that stays away beyond the deadline), "cut" (the connection of
    two ranks), "break" (an unexpected exception in the middle of a call). Deaths and stops are in ``lost``.
    """
    logger = logging.getLogger("commbackend")
    level = logger.level
    try:
        found = run_world(_many, _SIZE, transport, dice.randrange(1 << 30), count, timeout_s=_PATIENCE_S + count)
    finally:
        logger.setLevel(level)  # ranks that are threads have changed it here
    return found[0][0], [text for _, wrong in found for text in wrong]
