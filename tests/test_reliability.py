"""Samples of what ``scripts/soak`` does at length, and the promises of docs/reliability.md that need no chance."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import resource
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from commbackend import flight
from commbackend.communicator import Communicator
from commbackend.config import resolve
from commbackend.contract import Slot
from commbackend.errors import CommBackendError, Unavailable
from commbackend.group import Group
from commbackend.host import memory as hostmem
from commbackend.host.link import HostLink
from commbackend.plan import CREDIT
from commbackend.testing import run_ranks, run_threads
from commbackend.testing.soak import calls, canary, lost, main, percentile, starting
from commbackend.testing.soak.traffic import connect, names, one_call

CPU = torch.device("cpu")
TRANSPORTS = ["shm", "gloo"]


# -- samples of the soak
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kills(transport: str) -> None:
    """F080, F056, F082: named in time, no wrong result before, nothing left, and the rest goes on."""
    dice, before = random.Random(11), names()
    seen = lost.kills(dice, transport, 8)
    assert len(seen) == 24 and all(s["named"] for s in seen), seen
    assert all(s["left"] == [[], [], []] for s in seen), seen
    # scripts/soak measures; this only keeps a busy machine from hiding a timeout in the place of a notice.
    assert percentile([s["late_s"] for s in seen], 80) < 1.0 and max(s["resumed_s"] for s in seen) < 5.0, seen
    assert names() == before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stops(transport: str) -> None:
    """F076, F077: stopped or away: CommTimeout names exactly that rank on every other."""
    dice = random.Random(12)
    seen = lost.stops(dice, transport, 4)
    assert len(seen) == 12 and all(s["named"] and s["left"] == [] for s in seen), seen
    assert {s["how"] for s in seen} == {"stop", "sleep"}
    assert all(0.4 < s["took_s"] < 2.0 for s in seen), seen


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_stopped_for_most_of_the_deadline_goes_on(transport: str) -> None:
    seen = lost.pauses(random.Random(13), transport, timeout_s=4.0)
    assert all(s["calls"] == 20 and (s["warned"] or s["victim"]) for s in seen), seen


@pytest.mark.parametrize(("transport", "count"), [("local", 150), ("shm", 40), ("gloo", 25)])
def test_disagreements(transport: str, count: int) -> None:
    """F008, F084: op, rows, features, dtype, layout, settings."""
    assert calls.disagreements(random.Random(14), transport, count) == []


@pytest.mark.parametrize(("transport", "count"), [("local", 40), ("shm", 15), ("gloo", 15)])
def test_a_fault_yields_no_tensor(transport: str, count: int) -> None:
    """Outputs full of a canary: right to the last element where a call returns, else untouched or not given out."""
    kinds, wrong = canary.faults(random.Random(25), transport, count)
    assert wrong == [] and kinds.total() == count and len(kinds) >= 3, (kinds, wrong)


def _lies(self: Communicator, problem: Any, tensors: Any) -> None:
    with contextlib.suppress(CommBackendError):
        _real_run(self, problem, tensors)


_real_run = Communicator.run


def test_canaries_notice_a_fault_that_is_hidden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Communicator, "run", _lies)
    caplog.set_level("ERROR", "commbackend")  # the canaries' ranks set it too, and are threads here: given back after
    found = run_threads(canary._many, 3, "local", 26, 2, timeout_s=60)
    assert any("wrong tensor" in text for _, wrong in found for text in wrong), found


@pytest.mark.slow
def test_ten_thousand_disagreements() -> None:
    dice = random.Random(15)
    assert [w for _ in range(100) for w in calls.disagreements(dice, "local", 100)] == []


def _step_cases() -> list[tuple[str, int, str]]:
    return [(t, step, how) for t, n in (("shm", 22), ("gloo", 7)) for step in range(n) for how in
            ("raise", "exit", "stop")]  # fmt: skip


def _fails(transport: str, step: int, how: str) -> None:
    for seen in starting.failed_step(transport, step % 3, step, how):
        assert seen["named"] and seen["outcome"] != "success" and seen["left"][0] == [], seen
        assert seen["took_s"] < 2.9, seen  # init_timeout_s is 1.5: not twice, also on a busy machine


@pytest.mark.parametrize(("transport", "step", "how"), random.Random(16).sample(_step_cases(), 8))
def test_a_failure_at_a_step_of_init(transport: str, step: int, how: str) -> None:
    """F032."""
    _fails(transport, step, how)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_failures_at_every_step_of_init(transport: str) -> None:
    for step in range(len(starting.count_steps(transport))):
        for how in ("raise", "exit", "stop"):
            _fails(transport, step, how)


@pytest.mark.parametrize("where", ["probe", "crash", "connect"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_falling_back_is_agreed_and_said_once(victim: int, where: str) -> None:
    """F042."""
    found = starting.failed_probe(victim, where)
    assert [f["transport"] for f in found] == ["gloo"] * 3 and [f["said"] for f in found] == [1, 0, 0], found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_same_bits(transport: str) -> None:
    """F085."""
    assert calls.same_bits(random.Random(17), transport, 40) == 0


def test_strangers() -> None:
    """F031, F102."""
    came, inits, failed = starting.strangers(random.Random(18), 2.0)
    assert came > 200 and inits >= 1 and failed == [], (came, inits, failed)
    assert starting.broken_frames(random.Random(19), 30_000) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_cycles_return_to_the_baseline(transport: str) -> None:
    """F061: descriptors, threads, mappings, children; every fifth cycle ends with a fault."""
    for before, after in calls.cycles(transport, 15):
        assert before == after


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nobody_listens_beyond_loopback(transport: str) -> None:
    """F103."""
    assert starting.listeners(transport) == []


@pytest.mark.slow
def test_soak_of_ten_minutes(tmp_path: Path) -> None:
    assert main(["--seconds", "600", "--no-checkout", "--json", str(tmp_path / "soak.json")]) == 0


# -- no alarm without cause
def _busy(rank: int, group: Group, transport: str) -> list[str]:
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commbackend").addHandler(handler)
    comm = connect(group, transport, timeout_s=1.0)
    one_call(comm, random.Random(1))
    time.sleep(2.5 if rank == 1 else 0.0)  # outside any call, for longer than the deadline
    group.barrier()
    comm.barrier()
    one_call(comm, random.Random(2))
    comm.close()
    return warned


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_busy_rank_raises_no_alarm_while_nobody_waits_for_it(transport: str) -> None:
    assert run_ranks(_busy, 2, transport, timeout_s=60) == [[], []]


# -- counters
def _wraps(rank: int, group: Group, near: int) -> int:
    comm = connect(group, "shm", timeout_s=20.0)
    one_call(comm, random.Random(1))
    engine: Any = comm._engine
    comm.barrier()
    engine.seq = engine.number = near
    for peer in range(group.size):
        engine.transport.signal(peer, Slot(engine._slots, CREDIT, near))
    group.barrier()
    for seed in range(12):
        one_call(comm, random.Random(seed))
    comm.close()
    return int(engine.seq)


@pytest.mark.parametrize("near", [2**31 - 5, 2**32 - 5, 2**53 - 5])
def test_counters_pass_every_width(near: int) -> None:
    """Words have 64 bits; the kernel's sleep looks at 32 of them."""
    assert min(run_ranks(_wraps, 2, near, timeout_s=60)) > near + 5


# -- sandboxes
def _forbid(*numbers: int) -> None:
    """A seccomp filter: these system calls fail with EPERM, as in a container."""
    instructions = [(0x20, 0, 0, 0)]
    instructions += [i for n in numbers for i in ((0x15, 0, 1, n), (0x06, 0, 0, 0x00050001))]
    raw = b"".join(struct.pack("HBBI", *i) for i in [*instructions, (0x06, 0, 0, 0x7FFF0000)])
    buffer = ctypes.create_string_buffer(raw)
    program = struct.pack("HxxxxxxP", len(raw) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if libc.prctl(22, 2, program) != 0:
        pytest.skip(f"seccomp is not available here: {os.strerror(ctypes.get_errno())}")


def _sandboxed(rank: int, group: Group, transport: str) -> str:
    if os.uname().machine != "x86_64":
        return "the numbers of system calls are those of x86_64"
    _forbid(101, 310, 311, 438)  # ptrace, process_vm_readv, process_vm_writev, pidfd_getfd
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with connect(group, transport, timeout_s=20.0) as comm:
        for seed in range(5):
            one_call(comm, random.Random(seed))
        states = comm._flight.states()  # type: ignore[union-attr]
        assert len(states) == 2, states
    return ""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ptrace_denied_few_files_little_locked_memory(transport: str) -> None:
    """F059, F060."""
    for reason in run_ranks(_sandboxed, 2, transport, timeout_s=60):
        if reason:
            pytest.skip(reason)


# -- others' eyes
def test_memory_is_this_users_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memfd is forbidden, the file has no name and mode 0600."""

    def forbidden(*_args: Any) -> int:
        raise PermissionError("memfd_create")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    fd = hostmem._anonymous_file()
    about = os.fstat(fd)
    os.close(fd)
    assert about.st_mode & 0o777 == 0o600 and about.st_nlink == 0 and about.st_uid == os.getuid()


def _as_nobody(attempts: dict[str, Callable[[], object]]) -> list[str]:
    """The attempts that succeed as another user, made in a child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setuid(65534)
        for name, attempt in attempts.items():
            with contextlib.suppress(Unavailable, OSError):
                attempt()
                os.write(writing, name.encode() + b" ")
        os.write(writing, b"end")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        found = answers.read().split()
    os.waitpid(child, 0)
    assert found.pop() == "end", found
    return found


def _knocks(name: bytes, hello: bytes) -> None:
    """Connect to a rank's listener with all it takes but the user; OSError if it hangs up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10.0)
        sock.connect(name)
        sock.sendall(hello)
        if not sock.recv(100):
            raise ConnectionError("it hung up")


def _stranger(rank: int, group: Group) -> list[str]:
    with connect(group, "shm") as comm:
        one_call(comm, random.Random(1))
        link: Any = HostLink(group)  # a rank whose mesh is being built
        assert link._listen() == ""
        told = group.exchange(struct.pack("<i", os.getpid()) + link._name)
        found: list[str] = []
        if rank == 1:
            pid, name = struct.unpack("<i", told[0][:4])[0], told[0][4:]
            held = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
            hello = link._hello(1, 0, name)
            libc = ctypes.CDLL(None, use_errno=True)

            def trace() -> None:
                if libc.ptrace(16, pid, 0, 0) != 0:  # PTRACE_ATTACH
                    raise PermissionError(ctypes.get_errno())

            attempts: dict[str, Callable[[], object]] = {
                f"open:{path}": lambda p=path: os.open(p, os.O_RDONLY) for path in held
            }
            attempts |= {
                "record": lambda: flight.observe(pid),
                "memory": lambda: os.open(f"/proc/{pid}/mem", os.O_RDONLY),
                "trace": trace,
                "connection": lambda: _knocks(name, hello),
                "signal": lambda: os.kill(pid, 0),
            }
            found = _as_nobody(attempts)
            _knocks_as_itself = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _knocks_as_itself.connect(name)  # this user gets in, so that the attempts above are worth something
            _knocks_as_itself.close()
        group.barrier()
        link.close(goodbye=False)
        comm.barrier()
        return found


def test_another_user_cannot_attach() -> None:
    """F103: neither by the process's memory and descriptors, nor by its sockets, though it knows name and token."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    assert run_ranks(_stranger, 2, timeout_s=60) == [[], []]


def test_dump_signal_may_differ_between_ranks() -> None:
    assert len({resolve(dump_signal=s).fingerprint() for s in ("", "USR1", "USR2")}) == 1
