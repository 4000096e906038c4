"""The gloo transport: the conformance suite, and what is its own."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commbackend.config import resolve
from commbackend.errors import CommAborted, CommBackendError, CommTimeout, PeerDied, Unavailable, Unsupported
from commbackend.group import Group
from commbackend.host import netlink
from commbackend.testing import TransportSuite, run_ranks
from commbackend.transports.torch_dist import GlooTransport, NcclTransport

CPU = torch.device("cpu")


class TestGloo(TransportSuite):
    transport = "commbackend.transports.torch_dist:GlooTransport"


class TestNccl(TransportSuite):
    """Needs as many GPUs as ranks: NCCL refuses two ranks on one."""

    transport = "commbackend.transports.torch_dist:NcclTransport"
    device = "cuda"
    size = max(2, min(torch.cuda.device_count(), 4))


def raises(kind: type[BaseException], call: Any, *args: Any, **kw: Any) -> Any:
    with pytest.raises(kind) as e:
        call(*args, **kw)
    return e.value


def _connect(group: Group, timeout_s: float = 20.0) -> GlooTransport:
    found = GlooTransport.connect(group, CPU, resolve().options())
    found.timeout_s = timeout_s
    assert isinstance(found, GlooTransport)
    return found


# -- records


def _records(rank: int, group: Group) -> None:
    t = _connect(group)
    for seq in range(40):
        t.post(seq, f"call {seq} of {rank}".encode() * (seq % 3))
        for peer in range(t.size):
            assert t.record(peer, seq, time.monotonic() + 10) == f"call {seq} of {peer}".encode() * (seq % 3)
        if seq and rank:  # the call before stays readable
            wanted = f"call {seq - 1} of {rank - 1}".encode() * ((seq - 1) % 3)
            assert t.record(rank - 1, seq - 1, time.monotonic() + 10) == wanted
        if seq % 7 == rank:
            time.sleep(0.01)
    t.post(99, b"x" * 512)
    assert t.record((rank + 1) % t.size, 99, time.monotonic() + 10) == b"x" * 512
    # Posting waits for nobody.
    t.barrier(time.monotonic() + 10)
    start = time.monotonic()
    for seq in range(100, 100 + rank):
        t.post(seq, b"early")
    assert time.monotonic() - start < 0.5
    t.barrier(time.monotonic() + 10)
    t.close()


def test_records() -> None:
    run_ranks(_records, 3)


def _late_record(rank: int, group: Group) -> None:
    t = _connect(group)
    t.post(0, b"")
    if rank == 1:
        time.sleep(1.5)
        raises(CommTimeout, t.barrier, time.monotonic() + 5)
        return
    start = time.monotonic()
    error = raises(CommTimeout, t.record, 1, 1, start + 1.0)
    assert error.rank == 1 and error.waiting_for == (1,) and 0.9 < time.monotonic() - start < 1.4
    assert t.fault is error
    t.close()


def test_a_record_that_never_comes() -> None:
    run_ranks(_late_record, 2)


# -- data


def _numbers(rank: int, group: Group) -> list[Any]:
    """F085, F087: known answers, and the same bits on every rank."""
    t = _connect(group)
    out = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8):
        x = torch.full((7, 5), rank + 1, dtype=dtype)
        y = torch.empty(5, 7, dtype=dtype).t()  # strided destination
        t.all_reduce(y, x.t().contiguous().t())
        assert bool((y == sum(range(1, t.size + 1))).all())
        for op, wanted in (("max", t.size), ("min", 1)):
            t.all_reduce(y, x, op=op)
            assert bool((y == wanted).all())
    error = raises(Unsupported, t.all_reduce, y, x, op="xor")
    assert "xor" in str(error)
    generator = torch.Generator().manual_seed(rank)
    for n in (0, 1, 3, 1000):
        x = torch.randn(n, generator=generator).to(torch.bfloat16)
        y = torch.empty_like(x)
        t.all_reduce(y, x)
        out.append(y.view(torch.int16).tolist())
    t.close()
    return out


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reductions(size: int) -> None:
    found = run_ranks(_numbers, size)
    assert all(f == found[0] for f in found)


def _rank_order(rank: int, group: Group) -> float:
    # 1 + 2**24 + 1 is 2**24 from left to right in fp32, and 2**24 + 2 in any other order.
    t = _connect(group)
    x = torch.tensor([1.0, float(1 << 24), 1.0][rank])
    y = torch.empty(())
    t.all_reduce(y, x)
    t.close()
    return float(y)


def test_sums_run_in_rank_order() -> None:
    assert run_ranks(_rank_order, 3) == [float(1 << 24)] * 3


def _conjugate(x: torch.Tensor) -> torch.Tensor:
    return torch.conj(torch.complex(x, x))[::2, 1:4]


def _layouts(rank: int, group: Group) -> None:
    t = _connect(group)
    base = torch.arange(24.0).reshape(4, 6) + 100 * rank
    for view in (lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:2].expand(4, 6), _conjugate):
        src, wanted = view(base), [view(base + 100 * (r - rank)) for r in range(t.size)]
        out = torch.full((t.size, *src.shape, 2), -1.0, dtype=src.dtype)
        t.all_gather([o[..., 0] for o in out], src)
        assert all(torch.equal(o[..., 0], w) for o, w in zip(out, wanted))
        assert bool((out[..., 1] == -1).all()), "bytes beside a strided destination were touched"
    x = base.clone().requires_grad_()
    found = [torch.empty(4, 6) for _ in range(t.size)]
    t.all_gather(found, x)
    assert torch.equal(found[rank], base) and not found[0].requires_grad
    t.close()


def test_layouts() -> None:
    run_ranks(_layouts, 3)


def _pieces(rank: int, group: Group) -> None:
    netlink._PIECE_NBYTES = 1000
    t = _connect(group)
    sent = [torch.arange(n, dtype=torch.int32) + r for r, n in enumerate((999, 250, 0))]
    found = [torch.empty_like(s) for s in sent]
    t.all_gather(found, sent[rank])
    assert all(torch.equal(f, s) for f, s in zip(found, sent))
    t.close()


def test_long_messages_go_in_pieces() -> None:
    """F015, with pieces of 1000 bytes instead of 1 GiB."""
    run_ranks(_pieces, 3)


# -- joining


def _listening() -> list[list[str]]:
    """The listening TCP sockets of this network namespace, as /proc prints them."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [line.split() for t in tables if t.exists() for line in t.read_text().splitlines()[1:]]
    return [r for r in rows if r[3] == "0A"]


def _listeners(rank: int, group: Group) -> None:
    t = _connect(group)
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing itself
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = [words[1] for words in _listening() if f"socket:[{words[9]}]" in mine]
    assert found and all(address.startswith("0100007F:") for address in found), found
    t.close()


def test_one_host_listens_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """F103: whatever the host's own name resolves to."""
    run_ranks(_listeners, 2)
    asked: list[str] = []

    class Backend:
        class _Options:
            pass

        def __init__(self, *args: object) -> None:
            self.args = args

        @staticmethod
        def create_device(hostname: str) -> str:
            asked.append(hostname)
            return hostname

    monkeypatch.setattr(netlink, "backend", lambda name: Backend)
    netlink._gloo(dist.HashStore(), Group.from_store(dist.HashStore(), 0, 2), True, "eth0")
    assert asked == ["127.0.0.1"]


def _apart(rank: int, group: Group, found: dict[str, str], interface: str, words: str) -> str:
    netlink.addresses = lambda: found  # type: ignore[assignment]
    options = {"hosts": (0, 1), "interface": interface}
    if not words:
        t = GlooTransport.connect(group, CPU, options)
        t.barrier(time.monotonic() + 10)
        t.close()
        return ""
    error = raises(Unavailable, GlooTransport.connect, group, CPU, options)
    assert words in str(error), error
    return str(error)


def test_several_hosts_choose_an_interface() -> None:
    """F026: loopback is never advertised between hosts; a choice that cannot be made lists the candidates."""
    run_ranks(_apart, 2, {"eth9": "127.0.0.1"}, "", "")  # the only one there is (an address that works here)
    run_ranks(_apart, 2, {"a": "192.0.2.1", "b": "127.0.0.1"}, "b", "")
    run_ranks(_apart, 2, {"a": "192.0.2.1", "b": "192.0.2.2"}, "", "found a (192.0.2.1), b (192.0.2.2)")
    said = run_ranks(_apart, 2, {}, "", "found none but loopback")
    assert "COMMBACKEND_INTERFACE" in said[0] and "rank 0:" in said[0] and "rank 1:" in said[0]


def _flipped(rank: int, group: Group) -> None:
    """F049: a link that changes one byte is not connected, on any rank."""
    if rank == 1:
        honest = netlink.NetTransport._swap

        def swap(self: Any, dsts: Any, srcs: Any, deadline: float) -> None:
            honest(self, dsts, srcs, deadline)
            if dsts[0].numel() > 100:
                dsts[0][17] ^= 1

        netlink.NetTransport._swap = swap  # type: ignore[method-assign]
    error = raises(Unavailable, GlooTransport.connect, group, CPU, {})
    assert "rank 1: bytes from rank 0 arrive changed" in str(error), error
    assert threading.active_count() == 1, threading.enumerate()


def test_reach_is_proven_with_bytes() -> None:
    run_ranks(_flipped, 3)


def _beside_torch(rank: int, group: Group) -> None:
    """The user's groups and torch's state stay as they are."""
    dist.init_process_group("gloo", store=group.scope("torch"), rank=rank, world_size=2)
    before = dict(dist.distributed_c10d._world.pg_map)
    t = _connect(group)
    assert dict(dist.distributed_c10d._world.pg_map) == before
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    y = torch.empty(1)
    t.all_reduce(y, x)
    assert float(x) == 3.0 and float(y) == 6.0
    dist.destroy_process_group()
    t.all_reduce(y, x)
    t.close()


def test_beside_torch_distributed() -> None:
    run_ranks(_beside_torch, 2)


def test_who_can_probe() -> None:
    with pytest.raises(Unavailable, match="use nccl"):
        GlooTransport.probe(torch.device("cuda"))
    with pytest.raises(Unavailable, match="use gloo or shm"):
        NcclTransport.probe(CPU)
    if not torch.cuda.is_available():
        with pytest.raises(Unavailable, match="no CUDA device"):
            NcclTransport.probe(torch.device("cuda"))

    class NoStore:
        rank, size, timeout_s, token = 0, 1, 1.0, b""

    with pytest.raises(Unavailable, match="torch store"):
        GlooTransport.connect(NoStore(), CPU, {})  # type: ignore[arg-type]


# -- faults


def _death(rank: int, group: Group, blocked_on: str) -> float:
    """Rank 1 is killed; ranks that wait for it, and ranks that wait for those, all learn that it was rank 1."""
    t = _connect(group)
    t.op, t.seq = "all_gather", 7
    group.barrier()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    x, out = torch.ones(4), [torch.empty(4) for _ in range(t.size)]
    start = time.monotonic()
    if blocked_on == "a survivor" and rank == 2:
        # Waits for a record of rank 0 alone, which rank 0 will never post.
        error = raises(PeerDied, t.record, 0, 5, time.monotonic() + 20)
    else:
        error = raises(PeerDied, lambda: [t.all_gather(out, x) for _ in range(1000000)])
    took = time.monotonic() - start
    assert error.rank == 1 and "rank 1" in str(error) and "all_gather" in str(error) and "call 7" in str(error), error
    assert raises(PeerDied, t.barrier, time.monotonic() + 1) is t.fault
    start = time.monotonic()
    t.close()
    assert time.monotonic() - start < 2.0
    return took


@pytest.mark.parametrize("blocked_on", ["the dead", "a survivor"])
def test_a_death_is_named_by_all(blocked_on: str) -> None:
    """F080."""
    took = run_ranks(_death, 3, blocked_on, expect_death=[1])
    assert all(t < 1.5 for t in took if t is not None), took


def _abort(rank: int, group: Group, what: str) -> None:
    """F082."""
    t = _connect(group)
    group.barrier()
    if rank == 0:
        threading.Timer(0.4, t.abort, ["the user said so"]).start()
    big, out = torch.ones(1 << 22), [torch.empty(1 << 22) for _ in range(t.size)]
    start = time.monotonic()
    if rank == t.size - 1:
        time.sleep(1.0)  # never joins the call the others are in
        error = raises(CommAborted, t.barrier, time.monotonic() + 20)
    elif what == "barrier":
        error = raises(CommAborted, t.barrier, time.monotonic() + 20)
    elif what == "record":
        error = raises(CommAborted, t.record, t.size - 1, 3, time.monotonic() + 20)
    else:
        error = raises(CommAborted, t.all_gather, out, big)
    assert time.monotonic() - start < 1.6
    assert "rank 0 aborted" in str(error) and "the user said so" in str(error), error
    before = threading.active_count()
    t.close()
    assert threading.active_count() <= before
    fresh = _connect(group)  # the process is alive, and a new communicator works
    fresh.barrier(time.monotonic() + 10)
    fresh.close()


@pytest.mark.parametrize("what", ["barrier", "record", "all_gather"])
def test_abort_ends_what_is_blocked(what: str) -> None:
    run_ranks(_abort, 3, what)


def _stalled(rank: int, group: Group) -> set[int]:
    """F076: a rank that is merely stopped: deadline, all late ranks named, a warning at a tenth."""
    t = _connect(group, timeout_s=2.0)
    t.op, t.seq = "all_reduce", 3
    group.barrier()
    if rank >= 2:
        pid = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {pid}"])
        os.kill(pid, signal.SIGSTOP)
        raises(CommBackendError, t.all_reduce, torch.empty(3), torch.ones(3))
        return set()
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commbackend").addHandler(handler)
    out = torch.full((3,), -7.0)
    start = time.monotonic()
    error = raises(CommTimeout, t.all_reduce, out, torch.ones(3))
    assert 1.9 < time.monotonic() - start < 2.6
    assert set(error.waiting_for) <= {2, 3} and error.rank in (2, 3) and "all_reduce" in str(error), error
    assert "call 3" in str(error)
    assert any(f"rank {rank} has waited" in s and "all_reduce" in s for s in seen), seen
    assert bool((out == -7).all()), "a timeout must not look like a result"
    start = time.monotonic()
    t.close()
    assert time.monotonic() - start < 2.0
    return set(error.waiting_for)


def test_stopped_ranks() -> None:
    # Who reaches the deadline first names all; the other may have heard of it in a form that names one.
    assert {2, 3} in run_ranks(_stalled, 4)


def test_a_port_scan_does_not_disturb() -> None:
    """F031: strangers connect to what gloo listens on while ranks join."""
    stop = threading.Event()

    def scan() -> None:
        while not stop.is_set():
            for words in _listening():
                if words[1].startswith("0100007F:"):
                    try:
                        with socket.create_connection(("127.0.0.1", int(words[1][9:], 16)), 0.2) as s:
                            s.sendall(os.urandom(7))
                    except OSError:
                        continue

    thread = threading.Thread(target=scan)
    thread.start()
    try:
        for _ in range(2):
            run_ranks(_joins, 3)
    finally:
        stop.set()
        thread.join()


def _joins(rank: int, group: Group) -> None:
    for _ in range(5):
        t = _connect(group)
        t.barrier(time.monotonic() + 10)
        t.close()


def _forked(rank: int, group: Group) -> None:
    t = _connect(group)
    pid = os.fork()
    if pid == 0:
        try:
            t.barrier(time.monotonic() + 5)
        except CommAborted as e:
            os._exit(7 if "forked" in str(e) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    t.barrier(time.monotonic() + 10)
    t.close()


def test_a_forked_child_is_refused() -> None:
    run_ranks(_forked, 2)
