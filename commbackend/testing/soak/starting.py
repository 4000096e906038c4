"""Failures while ranks connect: at every step, of one rank's probe, and under a shower of strangers."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from ... import registry
from ...communicator import Communicator
from ...config import resolve
from ...errors import CommBackendError, Unavailable, unpack_fault
from ...group import Group, _unpack
from ...host.link import HostLink
from ..ranks import RankError, run_ranks
from .traffic import CPU, connect, leftovers, one_call

__all__ = ["broken_frames", "count_steps", "failed_probe", "failed_step", "listeners", "strangers"]

_INIT_S = 1.5
_PATIENCE_S = 60.0


class _Planted(RuntimeError):
    """What the victim raises."""


def _trap(step: int, act: Callable[[], None]) -> list[str]:
    """Have ``act`` called instead of the ``step``-th collective step from here on; return the list of steps seen."""
    seen: list[str] = []

    def wrap(kind: type[Any], name: str) -> None:
        real = getattr(kind, name)

        def stepped(self: Any, *args: Any, **kw: Any) -> Any:
            seen.append(f"{kind.__name__}.{name} {kw.get('what', '')}".strip())
            if len(seen) - 1 == step:
                act()
            return real(self, *args, **kw)

        setattr(kind, name, stepped)

    wrap(Group, "exchange")
    wrap(HostLink, "exchange_fds")
    return seen


def _all_steps(rank: int, group: Group, transport: str) -> list[str]:
    seen = _trap(-1, lambda: None)
    comm = connect(group, transport)
    found = list(seen)
    comm.close()
    return found


def count_steps(transport: str) -> list[str]:
    """Return the numbered steps of ``init`` over ``transport``: every one at which ranks wait for each other."""
    found: list[str] = run_ranks(_all_steps, 3, transport, timeout_s=_PATIENCE_S)[0]
    return found


def _victim(how: str) -> Callable[[], None]:
    def act() -> None:
        if how == "raise":
            raise _Planted("planted")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSTOP)

    return act


def _fails(rank: int, group: Group, transport: str, victim: int, step: int, how: str) -> dict[str, Any] | None:
    pids = [struct.unpack("<i", raw)[0] for raw in group.exchange(struct.pack("<i", os.getpid()))]
    group.barrier()
    if rank == victim:
        _trap(step, _victim(how))
    start = time.monotonic()
    try:
        comm = connect(group, transport, init_s=_INIT_S, init_timeout_s=_INIT_S, timeout_s=_INIT_S)
        comm.close()
        outcome = "success"
    except (CommBackendError, _Planted) as e:
        e.__traceback__ = None
        outcome = f"{type(e).__name__}: {e}"
        about = getattr(e, "rank", -1)
    took_s = time.monotonic() - start
    if rank == victim:
        return None
    if how == "stop" and rank == (victim + 1) % group.size:
        time.sleep(0.5)
        os.kill(pids[victim], signal.SIGCONT)
    named = outcome != "success" and (about == victim or f"rank {victim}" in outcome)
    return {"took_s": took_s, "outcome": outcome, "named": named, "left": leftovers()}


def failed_step(transport: str, victim: int, step: int, how: str) -> list[dict[str, Any]]:
    """The victim fails at ``step`` of its init by ``how`` ("raise", "exit", "stop"); return what the others saw."""
    dies = (victim,) if how == "exit" else ()
    found = run_ranks(_fails, 3, transport, victim, step, how, timeout_s=_PATIENCE_S, expect_death=dies)
    return [f for f in found if f is not None]


def _falls_back(rank: int, group: Group, victim: int, where: str) -> dict[str, Any]:
    shm: Any = registry.transport("shm")
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("commbackend")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def no(*_args: Any, **_kw: Any) -> Any:
        raise Unavailable("planted") if where != "crash" else ValueError("planted")

    def full(*_args: Any, **_kw: Any) -> None:
        raise OSError(errno.EMFILE, "planted: too many open files")

    if rank == victim and where == "connect":
        HostLink.__init__ = full  # type: ignore[method-assign]
    elif rank == victim:
        shm.probe = classmethod(no)
    own = Group.from_store(group.store, rank, group.size, timeout_s=10.0, name="soak")
    with Communicator(own, resolve(transport="shm,gloo", timeout_s=10.0), CPU) as comm:
        one_call(comm, random.Random(1))
        return {"transport": comm.transport, "said": sum("passed over" in s for s in said)}


def failed_probe(victim: int, where: str) -> list[dict[str, Any]]:
    """The victim cannot use ``shm``: its probe says so, breaks ("crash"), or it fails to connect ("connect")."""
    return run_ranks(_falls_back, 3, victim, where, timeout_s=_PATIENCE_S)


# -- strangers
def _unix_names() -> list[bytes]:
    with open("/proc/net/unix", "rb") as table:
        return [b"\0" + line.split(b"@", 1)[1].strip() for line in table if b"@commbackend-" in line]


def _tcp_ports() -> list[int]:
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.read().splitlines()[1:]]
    return [int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A"]


def _pester(stop: threading.Event, count: list[int], seed: int) -> None:
    """Connect to every listener of the package on this host: silence, junk, a true-looking hello, half a frame."""
    dice = random.Random(seed)
    junk = [
        b"",
        b"\0" * 7,
        b"cbH1" + dice.randbytes(40),
        dice.randbytes(44),
        b"GET / HTTP/1.0\r\n\r\n",
        dice.randbytes(900),
    ]
    held: list[socket.socket] = []
    while not stop.wait(0.0005):
        for name in _unix_names():
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            try:
                sock.connect(name)
                count[0] += 1
                sock.send(dice.choice(junk) or b"\0")
                count[0] += 1
            except OSError:
                pass  # gone already, or its backlog is full
            if dice.random() < 0.3:
                held.append(sock)
            else:
                sock.close()
            if len(held) > 50:
                held.pop(0).close()
    for sock in held:
        sock.close()


def _joins(rank: int, group: Group, seconds: float, seed: int) -> tuple[int, int, list[str]]:
    stop, count, inits = threading.Event(), [0], 0
    failed: list[str] = []
    thread = threading.Thread(target=_pester, args=(stop, count, seed + rank), daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    while True:
        more = group.exchange(b"1" if time.monotonic() < end and not failed else b"0")
        if b"0" in more:
            break
        try:
            with connect(group, "shm", name=f"{inits}", timeout_s=20.0) as comm:
                one_call(comm, random.Random(seed))
            inits += 1
        except CommBackendError as e:
            failed.append(f"{type(e).__name__}: {e}")
    stop.set()
    thread.join(5.0)
    return count[0], inits, failed


def strangers(dice: random.Random, seconds: float) -> tuple[int, int, list[str]]:
    """Return how many hostile connections and frames came while ranks connected, the inits, and those that failed."""
    try:
        found = run_ranks(_joins, 3, seconds, dice.randrange(1 << 30), timeout_s=seconds + _PATIENCE_S)
    except RankError as e:
        return 0, 0, [str(e)]
    return sum(f[0] for f in found), found[0][1], [text for f in found for text in f[2]]


def broken_frames(dice: random.Random, count: int) -> list[str]:
    """Give random and mutated bytes to everything that parses what comes from outside; return what went wrong."""
    from ...errors import CommTimeout, ConfigError, pack_fault
    from ...select import _pack
    from ...select import _unpack as ballot

    wrong = []
    good = [pack_fault(CommTimeout("late", rank=1, waiting_for=(1, 2))), _pack("a=b", [(1, ""), (0, "why")])]
    good.append(struct.pack("<I2I", 2, 3, 1) + b"abcd")
    for i in range(count):
        raw = bytearray(dice.choice(good) if i % 2 else dice.randbytes(dice.choice((0, 1, 4, 17, 64, 700))))
        for _ in range(dice.randrange(6)):
            if raw:
                raw[dice.randrange(min(len(raw), 64))] = dice.randrange(256)
        cut = bytes(raw[: dice.randrange(len(raw) + 1)]) if dice.random() < 0.3 else bytes(raw)
        for parse in (unpack_fault, _unpack, lambda b: ballot(b, 0)):
            try:
                parse(cut)
            except ConfigError:
                continue
            except Exception as e:
                wrong.append(f"{parse} on {cut[:40]!r}: {e!r}")
    return wrong


# -- who listens
#: Flags of a Unix socket that accepts connections, as /proc/net/unix writes them.
_LISTENS = "00010000"


def _listening(rank: int, group: Group, transport: str) -> list[str]:
    with connect(group, transport) as comm:
        one_call(comm, random.Random(3))
        inodes = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        found = []
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with contextlib.suppress(OSError), open(table) as file:
                for row in (line.split() for line in file.read().splitlines()[1:]):
                    if row[3] == "0A" and f"socket:[{row[9]}]" in inodes:
                        found.append(row[1].partition(":")[0])
        with open("/proc/net/unix") as file:
            for row in (line.split() for line in file.read().splitlines()[1:]):
                if len(row) > 7 and row[3] == _LISTENS and f"socket:[{row[6]}]" in inodes and "commbackend" in row[7]:
                    found.append(row[7])
        comm.barrier()
        return found


def listeners(transport: str) -> list[str]:
    """Return the addresses, as /proc/net/tcp writes them, that ranks of a one-host job listen on beyond loopback, and
    the names in /proc/net/unix that still accept connections after init.
    """
    found = run_ranks(_listening, 2, transport, timeout_s=_PATIENCE_S)
    loopback = ("0100007F", "00000000000000000000000001000000")
    return [a for of_rank in found for a in of_rank if a not in loopback]
