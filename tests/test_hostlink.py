"""The host link: descriptors, faults and deaths over Unix sockets, among strangers and under stress."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import resource
import signal
import socket
import struct
import threading
import time
from typing import Any

import pytest

from commbackend.errors import FAULT_NBYTES, CommAborted, CommTimeout, PeerDied, Unavailable, pack_fault
from commbackend.group import Group
from commbackend.host import link as hostlink
from commbackend.host.link import HostLink
from commbackend.testing import run_ranks, run_threads

CLONE_NEWNET = 0x40000000


def _soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def _until(condition: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.001)


# -- exchange
def _exchange(rank: int, group: Group) -> None:
    link = HostLink.open(group, timeout_s=5)
    before = len(os.listdir("/proc/self/fd"))
    for round_ in range(20):
        mine = [os.memfd_create(f"{rank}.{round_}.{i}") for i in range(rank)]
        for fd in mine:
            os.write(fd, b"%d %d" % (rank, round_))
        parcels = link.exchange_fds(mine, bytes([rank]) * round_ * 100, _soon())
        assert parcels[rank][1] == mine
        for peer, (payload, fds) in enumerate(parcels):
            assert payload == bytes([peer]) * round_ * 100 and len(fds) == peer
            for fd in fds:
                assert os.pread(fd, 100, 0) == b"%d %d" % (peer, round_)
                assert not os.get_inheritable(fd) or peer == rank
                os.close(fd)
    assert link.exchange(b"%d" % rank, _soon()) == [b"%d" % r for r in range(group.size)]
    assert len(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(ValueError, match="32768"):
        link.exchange(b"x" * 40000, _soon())
    assert link.exchange(b"x" * 32768, _soon()) == [b"x" * 32768] * group.size
    link.close()
    link.close()
    with pytest.raises(CommAborted, match="closed"):
        link.exchange(b"", _soon())


def test_exchange_of_bytes_and_descriptors() -> None:
    run_ranks(_exchange, 4)


def _late_exchange(rank: int, group: Group) -> None:
    link = HostLink.open(group, timeout_s=5)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(CommTimeout) as caught:
            link.exchange(b"", _soon(0.5))
        assert caught.value.waiting_for == (1, 2) and 0.5 <= time.monotonic() - start < 1.0
        threading.Timer(0.2, link.interrupt, (CommAborted("enough"),)).start()
        with pytest.raises(CommAborted, match="enough"):
            link.exchange(b"", _soon(10))
    group.barrier()
    link.close()


def test_an_exchange_ends_by_its_deadline_and_by_interrupt() -> None:
    run_threads(_late_exchange, 3)


def _few_descriptors(rank: int, group: Group) -> str:
    link = HostLink.open(group, timeout_s=5)
    mine = [os.memfd_create("x") for _ in range(8)]
    said, spare = "", list[int]()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.dup(0))
        for fd in spare[-3:]:
            os.close(fd)
    link.exchange(b"rank 1 is short of descriptors now", _soon())
    try:
        link.exchange_fds(mine, b"", _soon())
    except Unavailable as e:
        said = str(e)
    link.exchange(b"the link still works", _soon())
    link.close()
    return said


def test_descriptors_that_do_not_fit_are_an_error() -> None:
    said = run_ranks(_few_descriptors, 2)
    assert said[0] == "" and "ulimit -n" in said[1]


# -- strangers
def _names() -> list[bytes]:
    with open("/proc/net/unix", "rb") as table:
        return [line.split()[-1].replace(b"@", b"\0", 1) for line in table if b"@commbackend-" in line]


def _pester(stop: threading.Event, held: list[socket.socket], count: list[int]) -> None:
    """Connect to every listener found, and say nothing, too little, nonsense, or the right form with a wrong token."""
    dice = random.Random(1)
    hello = struct.pack("<4sii32s", b"cbH1", 1, 0, b"w" * 32)
    while not stop.is_set():
        for name in set(_names()):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            try:
                sock.connect(name)
                word = dice.choice([b"", b"\0" * 7, dice.randbytes(44), hello, dice.randbytes(1000)])
                if word:
                    sock.send(word)
                count[0] += 1
            except OSError:
                sock.close()
                continue
            if dice.random() < 0.3 and len(held) < 300:
                held.append(sock)
            else:
                sock.close()


def _among_strangers(rank: int, group: Group) -> int:
    stop, held, count = threading.Event(), [], [0]
    threads = []
    if rank == 0:
        threads = [threading.Thread(target=_pester, args=(stop, held, count)) for _ in range(2)]
        for thread in threads:
            thread.start()
    group.barrier()
    try:
        for _ in range(5):
            link = HostLink.open(_Slow(group), timeout_s=10)
            assert link.exchange(b"%d" % rank, _soon()) == [b"%d" % r for r in range(group.size)]
            group.barrier()
            link.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for sock in held:
            sock.close()
    return count[0]


class _Slow:
    """A group whose exchanges leave time for strangers."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self.token, self.timeout_s = group.rank, group.size, group.token, group.timeout_s
        self.group = group

    def exchange(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        answers = self.group.exchange(payload, timeout_s=timeout_s)
        time.sleep(0.1)
        return answers

    def barrier(self, *, timeout_s: float | None = None) -> None:
        self.group.barrier(timeout_s=timeout_s)


def test_strangers_do_not_disturb() -> None:
    """F031: junk connections during the bootstrap."""
    attacks = run_ranks(_among_strangers, 3)[0]
    assert attacks > 200, f"only {attacks} connections were tried"


def _other_token(rank: int, group: Group) -> None:
    group = _Slow(group)  # type: ignore[assignment]
    group.token = b"wrong token 0123" if rank == 1 else group.token  # type: ignore[misc]
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unavailable, match="rank 1: rank 0 closed the connection"):
        HostLink.open(group, timeout_s=1)
    assert len(os.listdir("/proc/self/fd")) == fds and threading.active_count() == 1


def test_the_token_is_checked() -> None:
    run_ranks(_other_token, 2)


def _elsewhere(rank: int, group: Group) -> str:
    group.token  # noqa: B018 - read before the namespace changes
    if rank == 2 and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        group.exchange(b"no")
        return "unshare is not permitted here"
    if b"no" in group.exchange(b"yes"):
        return "unshare is not permitted here"
    fds, start = len(os.listdir("/proc/self/fd")), time.monotonic()
    with pytest.raises(Unavailable) as caught:
        HostLink.open(group, timeout_s=10)
    assert "rank 2: connect to rank 0" in str(caught.value) and "network namespace" in caught.value.hint
    assert time.monotonic() - start < 2
    assert len(os.listdir("/proc/self/fd")) == fds and threading.active_count() == 1
    return ""


def test_a_rank_in_another_namespace() -> None:
    """F022, F042: who cannot be reached makes the link unavailable on every rank, quickly, and nothing is left."""
    if reason := max(run_ranks(_elsewhere, 3)):
        pytest.skip(reason)


def _other_user(rank: int, group: Group) -> None:
    class AsNobody(_Slow):
        def exchange(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes]:
            os.seteuid(0)
            answers = self.group.exchange(payload, timeout_s=timeout_s)
            os.seteuid(65534 if rank else 0)
            return answers

    slow = AsNobody(group)
    os.seteuid(65534 if rank else 0)
    with pytest.raises(Unavailable, match="runs as user"):
        HostLink.open(slow, timeout_s=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_refused() -> None:
    run_ranks(_other_user, 2)


# -- faults and deaths
def _listen(link: HostLink) -> list[tuple[int, Any, float]]:
    heard: list[tuple[int, Any, float]] = []
    link.on_fault(lambda peer, fault: heard.append((peer, fault, time.monotonic())))
    return heard


def _death(rank: int, group: Group, how: str) -> float:
    link = HostLink.open(group, timeout_s=5)
    heard = _listen(link)
    moment = struct.unpack("<d", group.exchange(struct.pack("<d", time.monotonic() + 0.2))[0])[0]
    if rank == 1:
        if how == "forked child holds the sockets":
            # A fork that Python does not see: no hook closes the child's copies.
            child = ctypes.PyDLL(None).fork()
            if child == 0:
                time.sleep(3)
                os._exit(0)
        time.sleep(max(moment - time.monotonic(), 0))
        if how == "exit":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    _until(lambda: heard)
    assert [(p, f) for p, f, _ in heard] == [(1, None)]
    with pytest.raises(PeerDied, match="rank 1"):
        link.exchange(b"", _soon())
    time.sleep(0.3)
    link.close()
    return heard[0][2] - moment


@pytest.mark.parametrize("how", ["kill", "exit", "forked child holds the sockets"])
def test_a_death_is_noticed_at_once(how: str) -> None:
    late = [x for x in run_ranks(_death, 3, how, expect_death=(1,)) if x is not None]
    assert max(late) < 0.5, late


def _stopped(rank: int, group: Group) -> None:
    link = HostLink.open(group, timeout_s=5)
    heard = _listen(link)
    pids = [int(p) for p in link.exchange(b"%d" % os.getpid(), _soon())]
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.5)
        assert not heard
        with pytest.raises(CommTimeout) as caught:
            link.exchange(b"late", _soon(0.3))
        assert caught.value.waiting_for == (1,)
        os.kill(pids[1], signal.SIGCONT)
    else:
        time.sleep(0.05)
        assert link.exchange(b"late", _soon())[0] == b"late"
    group.barrier()
    assert not heard
    link.close()


def test_a_stopped_peer_is_not_dead() -> None:
    run_ranks(_stopped, 2)


def _faults(rank: int, group: Group) -> None:
    link = HostLink.open(group, timeout_s=5)
    if rank == 0:
        link.tell(pack_fault(CommTimeout("rank 2 is late", rank=2, seq=4, wanted=9, seen=8)))
        with pytest.raises(ValueError, match=str(FAULT_NBYTES)):
            link.tell(b"short")
    else:
        time.sleep(0.1)  # what came before on_fault is reported too
        heard = _listen(link)
        _until(lambda: heard)
        fault = heard[0][1]
        assert heard[0][0] == 0 and type(fault) is CommTimeout
        assert (fault.rank, fault.seq, fault.wanted, fault.seen, str(fault)) == (2, 4, 9, 8, "rank 2 is late")
    link.exchange(b"", _soon())
    link.close()


def test_faults_are_told() -> None:
    run_threads(_faults, 3)


def _goodbye(rank: int, group: Group) -> None:
    link = HostLink.open(group, timeout_s=5)
    heard = _listen(link)
    if rank == 0:
        link.close()
        group.barrier()
        return
    _until(lambda: link._gone)
    with pytest.raises(CommAborted, match="rank 0 has closed"):
        link.exchange(b"", _soon())
    group.barrier()
    link.close()
    assert not heard


def test_a_goodbye_is_no_death() -> None:
    run_threads(_goodbye, 2)


def _close_storm(rank: int, group: Group) -> None:
    for _ in range(40):
        link = HostLink.open(group, timeout_s=5)
        heard = _listen(link)
        link.exchange(b"", _soon())
        link.close()
        assert not heard, heard


def test_leaving_together_is_no_death() -> None:
    run_threads(_close_storm, 4)


def _broken_protocol(rank: int, group: Group) -> None:
    link = HostLink.open(group, timeout_s=5)
    heard = _listen(link)
    if rank == 1:
        link._peers[0].send(b"GET / HTTP/1.1")
    else:
        _until(lambda: heard)
        assert heard[0][0] == 1 and isinstance(heard[0][1], CommAborted) and "protocol" in str(heard[0][1])
    group.barrier()
    link.close()


def test_a_peer_that_breaks_the_protocol_is_dropped() -> None:
    run_threads(_broken_protocol, 2)


def _fuzz(rank: int, group: Group) -> None:
    link = HostLink.open(group, timeout_s=5)
    if rank == 0:
        dice = random.Random(3)
        good = hostlink._FRAME.pack(hostlink._FRAME_MAGIC, 1, 0, 0)
        for i in range(50_000):
            kind = dice.randrange(4)
            raw = bytearray(dice.randbytes(dice.randrange(600)) if kind == 0 else good + dice.randbytes(kind * 30))
            for _ in range(dice.randrange(4) if kind else 0):
                raw[dice.randrange(len(raw))] = dice.randrange(256)
            if bytes(raw[:5]) == b"cbL1\x03":
                continue  # a goodbye is a goodbye
            fd = os.dup(0) if i % 16 == 0 else -1
            fds = [fd] if fd >= 0 else []
            taken = link._take(1, bytes(raw), fds, dice.random() < 0.1)
            if not taken and fds:
                os.close(fd)
    group.barrier()
    link.close()


def test_frames_are_parsed_safely() -> None:
    """F102: no frame crashes the parser, and no descriptor leaks."""
    gc.collect()  # what earlier tests in this process have dropped
    before = set(os.listdir("/proc/self/fd"))
    run_threads(_fuzz, 2, timeout_s=60)
    gc.collect()
    new = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in set(os.listdir("/proc/self/fd")) - before if _is_open(fd)}
    assert not new, new


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


# -- fork
def _fork(rank: int, group: Group) -> None:
    link = HostLink.open(group, timeout_s=5)
    heard = _listen(link)
    fds = len(os.listdir("/proc/self/fd"))
    if rank == 1:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert heard and heard[0][0] == 1 and "fork" in str(heard[0][1])
                assert len(os.listdir("/proc/self/fd")) < fds
                link.exchange(b"", _soon())
            except CommAborted as e:
                code = 0 if "fork" in str(e) else 2
            finally:
                link.close()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert link.exchange(b"%d" % rank, _soon()) == [b"0", b"1"]
    time.sleep(0.1)
    assert not heard
    link.close()


def test_a_forked_child_cannot_use_the_link_and_does_no_harm() -> None:
    run_ranks(_fork, 2)


# -- nothing left
def _cycles(rank: int, group: Group) -> None:
    HostLink.open(group, timeout_s=5).close()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for i in range(30):
        link = HostLink.open(group, timeout_s=5)
        if i % 3 == 0:
            for fd in link.exchange_fds([0], b"", _soon())[1 - rank][1]:
                os.close(fd)
        elif rank == i % 2:  # descriptors that the peer never takes
            with pytest.raises(CommTimeout):
                link.exchange_fds([0, 1], b"", _soon(0.02))
        group.barrier()
        link.close(goodbye=bool(i % 2))
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_nothing_is_left() -> None:
    run_ranks(_cycles, 2)


def _dies_in_bootstrap(rank: int, group: Group, step: int) -> None:
    """F032: a rank that ends at the n-th step of the bootstrap."""

    class Mortal(_Slow):
        steps = 0

        def exchange(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes]:
            if rank == 1 and self.steps == step:
                os._exit(0)
            self.steps += 1
            return self.group.exchange(payload, timeout_s=timeout_s)

    group.timeout_s = 1.0
    mortal = Mortal(group)
    start = time.monotonic()
    with pytest.raises((CommTimeout, PeerDied, Unavailable)) as caught:
        link = HostLink.open(mortal, timeout_s=1.0)
        if rank == 1:
            os._exit(0)
        link.exchange(b"", _soon(1.0))
    assert time.monotonic() - start < 3 and "1" in str(caught.value)
    assert threading.active_count() <= 2


@pytest.mark.parametrize("step", range(3))
def test_a_death_during_the_bootstrap(step: int) -> None:
    run_ranks(_dies_in_bootstrap, 3, step, expect_death=(1,))
