"""Under mpirun on the hosts of ``scripts/multihost``: groups that lie on one host, on several, and across them.

    scripts/multihost -- mpirun -n 4 python -m pytest --with-mpi tests/multihost

Any number of ranks a host will do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import commbackend
from commbackend import topology
from commbackend.communicator import Communicator
from commbackend.config import Config
from commbackend.contract import OneSided, Slot
from commbackend.errors import CommBackendError, CommTimeout, Unavailable
from commbackend.group import resolve_group

MPI = pytest.importorskip("mpi4py.MPI", reason="mpi4py is not installed")
pytestmark = pytest.mark.mpi(min_size=2)
WORLD = MPI.COMM_WORLD


@pytest.fixture(scope="module")
def hosts() -> tuple[int, ...]:
    """The host of every rank; skips on one host."""
    group = resolve_group(WORLD, name="survey", config=Config(init_timeout_s=60.0))
    found = topology.survey(group).hosts
    group.close()
    if len(set(found)) == 1:
        pytest.skip("all ranks are on one host: start this with scripts/multihost")
    return found


def communicator(group: Any, **options: Any) -> Communicator:
    return commbackend.init(group, device="cpu", timeout_s=30.0, init_timeout_s=60.0, **options)


def ints(seed: int, *shape: int, grad: bool = False) -> torch.Tensor:
    """Small integers: sums and products are exact in any order."""
    found = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()
    return found.requires_grad_(grad)


def check_ops(comm: Communicator) -> None:
    """All three products with their backward passes, with uneven rows, against one process."""
    rows = [300 + 13 * r for r in range(comm.size)]
    total, k, n = sum(rows), 64, 48
    parts = [ints(r, rows[r], k) for r in range(comm.size)]
    ws = [ints(50 + r, n, k) for r in range(comm.size)]
    x, w = parts[comm.rank].clone().requires_grad_(), ws[comm.rank].clone().requires_grad_()
    y = commbackend.all_gather_matmul(x, w, comm, rows=rows)
    whole = torch.cat(parts)
    assert torch.equal(y, whole @ w.detach().t())
    dys = [ints(90 + r, total, n) for r in range(comm.size)]
    y.backward(dys[comm.rank])
    first = sum(rows[: comm.rank])
    mine = slice(first, first + rows[comm.rank])
    assert x.grad is not None and torch.equal(x.grad, sum(dy @ v for dy, v in zip(dys, ws, strict=True))[mine])
    assert w.grad is not None and torch.equal(w.grad, dys[comm.rank].t() @ whole)

    xs = [ints(200 + r, total, k) for r in range(comm.size)]
    summed = sum(a @ v.t() for a, v in zip(xs, ws, strict=True))
    x = xs[comm.rank].clone().requires_grad_()
    y = commbackend.matmul_reduce_scatter(x, w.detach(), comm, rows=rows)
    assert torch.equal(y, summed[mine])
    y.backward(dys[0][mine])
    assert x.grad is not None and torch.equal(x.grad, dys[0] @ w.detach())
    assert torch.equal(commbackend.matmul_all_reduce(xs[comm.rank], w.detach(), comm), summed)


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_one_transport_over_all_hosts(transport: str, hosts: tuple[int, ...]) -> None:
    """Tensor parallelism over the network."""
    with communicator(WORLD, transport=transport) as comm:
        assert comm.transport == transport
        check_ops(comm)


def test_automatic_choice_over_hosts(hosts: tuple[int, ...]) -> None:
    """shm is refused with its reason; mpi is taken, since the application has imported mpi4py: between hosts of equally
    many ranks, if they have several, else for all.
    """
    counts = {hosts.count(h) for h in hosts}
    with communicator(WORLD) as comm:
        assert comm.transport == ("shm+mpi" if len(counts) == 1 and counts != {1} else "mpi")
        assert comm.choice is not None
        assert comm.choice.hosts == hosts
        assert "not shm" in comm.explain() and "they must share a host" in comm.explain()


def test_shm_is_refused_across_hosts(hosts: tuple[int, ...]) -> None:
    with pytest.raises(Unavailable, match="they must share a host"):
        communicator(WORLD, transport="shm")


def test_shm_within_a_host_and_the_network_between(hosts: tuple[int, ...]) -> None:
    """Tensor parallel inside hosts, data parallel across, and the other way round."""
    here = hosts[WORLD.rank]
    local = sum(1 for h in hosts[: WORLD.rank] if h == here)
    inside, across = WORLD.Split(here, WORLD.rank), WORLD.Split(local, WORLD.rank)
    with communicator(inside, name="inside") as near, communicator(across, name="across", transport="mpi") as far:
        assert near.transport == "shm" and far.transport == ("mpi" if far.size > 1 else far.transport)
        for tp, dp in ((near, far), (far, near)):
            check_ops(tp)
            grad = torch.full((5,), 1.0 + WORLD.rank)
            members = (inside if dp is near else across).allgather(WORLD.rank)
            assert commbackend.all_reduce(grad, dp).tolist() == [sum(1.0 + m for m in members)] * 5
    inside.Free()
    across.Free()


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_groups_that_interleave_hosts(transport: str, hosts: tuple[int, ...]) -> None:
    """Ranks of a group need not be ordered by host, nor by the world's rank."""
    order = sorted(range(WORLD.size), key=lambda r: (sum(1 for h in hosts[:r] if h == hosts[r]), -r))
    shuffled = WORLD.Split(0, order.index(WORLD.rank))
    with communicator(shuffled, name=f"shuffled {transport}", transport=transport) as comm:
        assert comm.choice is not None and comm.choice.hosts[comm.rank] == comm.choice.hosts[order.index(WORLD.rank)]
        check_ops(comm)
    shuffled.Free()


@pytest.fixture
def wire(hosts: tuple[int, ...]) -> Iterator[OneSided]:
    """The transport mpi over all ranks, by itself."""
    from commbackend.transports.mpi import MpiTransport

    group = resolve_group(WORLD, name="wire", config=Config(init_timeout_s=60.0))
    group.timeout_s = 30.0
    transport = MpiTransport.connect(group, torch.device("cpu"), {"hosts": hosts})
    yield transport
    transport.close()
    group.close()


def test_puts_arrive_while_the_target_computes(wire: OneSided) -> None:
    """A rank in a long product takes what is put to it: it need not be in MPI for that (its slot rises meanwhile)."""
    first, last = 0, wire.size - 1
    buffer, slots = wire.alloc(1 << 22), wire.alloc_slots(1)
    window = buffer.window(0, (1 << 20,), torch.float32)
    wire.barrier(time.monotonic() + 30)
    arrived: list[float] = []
    if wire.rank == last:
        looking = threading.Event()

        def look() -> None:
            while not looking.is_set() and slots.read(first, 0) < 1:
                time.sleep(0.001)
            arrived.append(time.monotonic())

        watcher = threading.Thread(target=look)
        watcher.start()
        a, until = torch.randn(700, 700), time.monotonic() + 3.0
        while time.monotonic() < until and not arrived:
            a = (a @ a).clamp(-1, 1)  # some 20 ms or more in torch, without the interpreter
        looking.set()
        watcher.join()
        assert slots.read(first, 0) == 1 and bool((window.local == 3.0).all()), "nothing came while it computed"
    elif wire.rank == first:
        time.sleep(0.3)
        wire.put(window, torch.full((1 << 20,), 3.0), last, slot=Slot(slots, 0, 1))
    wire.barrier(time.monotonic() + 30)


def test_a_cable_that_is_cut(hosts: tuple[int, ...]) -> None:
    """Cut in the middle of a call: the deadline's error at every rank, on both sides. (gloo: ../test_two_hosts.py.)

    All packets of one host are dropped for a while; without its interface MPI itself would give the connections up.
    """
    if not Path("/sys/class/net/net0").exists():
        pytest.skip("net0 is not here: start this with scripts/multihost")
    tc = shutil.which("tc", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if tc is None:
        pytest.skip("tc is not installed (package iproute2)")
    comm = commbackend.init(WORLD, device="cpu", transport="mpi", timeout_s=2.0, init_timeout_s=60.0)
    x, w = torch.randn(40, 64), torch.randn(48, 64)
    commbackend.all_gather_matmul(x, w, comm)
    comm.barrier()
    cutter = WORLD.rank == WORLD.size - 1
    nothing = [tc, "qdisc", "replace", "dev", "net0", "root", "tbf", "rate", "1kbit", "burst", "10", "latency", "1ms"]
    try:
        if cutter:
            subprocess.run(nothing, check=True)
        start = time.monotonic()
        with pytest.raises(CommBackendError) as caught:
            for _ in range(1000):
                commbackend.all_gather_matmul(x, w, comm)
        assert isinstance(caught.value, CommTimeout), repr(caught.value)
        assert time.monotonic() - start < 20.0
    finally:
        if cutter:
            time.sleep(1.0)  # until all have noticed
            subprocess.run([tc, "qdisc", "del", "dev", "net0", "root"], check=True)
    comm.close()
    again = WORLD.Ibarrier()
    until = time.monotonic() + 40
    while not again.Test():
        assert time.monotonic() < until, "the cable is back, MPI's own messages are not"
        time.sleep(0.01)
