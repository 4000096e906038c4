"""Two levels of transports: on posed hosts of this machine, and on hosts for real (``multihost/levels.py``)."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_two_hosts import ROOT, multihost

import commbackend
from commbackend import select
from commbackend.communicator import Communicator
from commbackend.errors import (
    CollectiveMismatch,
    CommAborted,
    CommBackendError,
    ConfigError,
    HeapExhausted,
    ShapeError,
    Unavailable,
)
from commbackend.testing import run_ranks
from commbackend.topology import Topology

LEVELS = str(ROOT / "tests" / "multihost" / "levels.py")


def posed(group: Any, hosts: tuple[int, ...], transport: str = "shm+gloo", **options: Any) -> Communicator:
    """A communicator of ranks that believe to be on ``hosts``; all the rest is as it is."""
    surveyed = lambda *_, **__: Topology(hosts)  # noqa: E731
    select.topology.survey = surveyed  # type: ignore[assignment]  # in this rank's process alone
    return commbackend.init(group, device="cpu", transport=transport, interface="127.0.0.1", timeout_s=30.0, **options)


def ints(seed: int, *shape: int) -> torch.Tensor:
    """Small integers: sums and products are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def _exact(rank: int, group: Any, hosts: tuple[int, ...]) -> list[str]:
    """Forward and backward of gather and scatter against one process; the heap grows on the way."""
    size, n, k = len(hosts), 16, 32
    with posed(group, hosts) as comm:
        assert comm.transport == "shm+gloo" and comm.caps.hosts == hosts
        for scale in (1, 40):
            rows = [scale * (2 + 3 * r) for r in range(size)]
            total, first = sum(rows), sum(rows[:rank])
            mine = slice(first, first + rows[rank])
            whole, ws = torch.cat([ints(r, rows[r], k) for r in range(size)]), [ints(50 + r, n, k) for r in range(size)]
            dys = [ints(90 + r, total, n) for r in range(size)]
            x, w = whole[mine].clone().requires_grad_(), ws[rank].clone().requires_grad_()
            y = commbackend.all_gather_matmul(x, w, comm, rows=rows)
            y.backward(dys[rank])
            assert x.grad is not None and w.grad is not None
            assert torch.equal(y, whole @ ws[rank].t()) and torch.equal(w.grad, dys[rank].t() @ whole)
            assert torch.equal(x.grad, sum(dy @ v for dy, v in zip(dys, ws))[mine])
            xs = [ints(200 + r, total, k) for r in range(size)]
            summed = sum(a @ v.t() for a, v in zip(xs, ws))
            x = xs[rank].clone().requires_grad_()
            y = commbackend.matmul_reduce_scatter(x, ws[rank], comm, rows=rows)
            y.backward(dys[0][mine])
            assert torch.equal(y, summed[mine]) and torch.equal(x.grad, dys[0] @ ws[rank])
            assert torch.equal(commbackend.matmul_all_reduce(xs[rank], ws[rank], comm), summed)
        # N-d, gathered along dim 1.
        batch = ints(7, 3, 4 * size, k)
        part = batch[:, 4 * rank : 4 * rank + 4]
        assert torch.equal(commbackend.all_gather(part, comm, dim=1), batch)
        return comm.explain().splitlines()


@pytest.mark.parametrize("hosts", [(0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1)], ids=str)
def test_ranks_in_any_order(hosts: tuple[int, ...]) -> None:
    for lines in run_ranks(_exact, 4, hosts, timeout_s=120.0):
        assert lines[0].endswith("transport shm+gloo"), lines
        assert any("two_level/" in line for line in lines) and any("out: push: the tr" in line for line in lines)


def _mismatch(rank: int, group: Any, odd: int) -> str:
    comm = posed(group, (0, 1, 0, 1))
    commbackend.all_reduce(torch.ones(3, 2), comm)
    with pytest.raises(CommBackendError, match="disagree") as caught:
        commbackend.all_reduce(torch.ones(3 + (rank == odd), 2), comm)
    with pytest.raises(CommBackendError, match="disagree"):
        comm.barrier()
    comm.close()
    return type(caught.value).__name__


@pytest.mark.parametrize("odd", [0, 3])
def test_all_hear_of_a_mismatch(odd: int) -> None:
    """Also the rank that neither shares a host nor a number with the odd one."""
    assert set(run_ranks(_mismatch, 4, odd, timeout_s=90.0)) == {CollectiveMismatch.__name__}


def _fault_met_elsewhere(rank: int, group: Any) -> None:
    comm = posed(group, (0, 1, 0, 1))
    if rank == 0:  # a thread of a level has met a fault, and is about to tell
        comm._engine.transport._fault = CommAborted("met in another thread", rank=0)  # type: ignore[union-attr]
    else:
        with pytest.raises(CommBackendError, match="met in another thread"):
            comm.barrier()
    comm.close()


def test_closing_tells_of_a_fault_that_was_not_told_yet() -> None:
    run_ranks(_fault_met_elsewhere, 4, timeout_s=25.0)


def _late_for_barrier(rank: int, group: Any) -> float:
    with posed(group, (0, 1, 0, 1)) as comm:
        comm.barrier()
        if rank == 0:
            time.sleep(1.0)
        entered = time.monotonic()
        comm.barrier()
        return entered if rank == 0 else time.monotonic()


def test_a_barrier_waits_for_ranks_that_are_no_partners() -> None:
    """Rank 3 shares neither host nor number with rank 0. Clocks of processes of one machine compare."""
    entered, *left = run_ranks(_late_for_barrier, 4, timeout_s=60.0)
    assert all(t >= entered for t in left), (entered, left)


def _little_memory(rank: int, group: Any) -> None:
    comm = posed(group, (0, 1, 0, 1))
    inner, alloc = comm._engine.transport.inner, None  # type: ignore[union-attr]
    if rank % 2:
        alloc, inner.alloc = inner.alloc, _none_left
    with pytest.raises(HeapExhausted, match="on the host of rank 1: none left"):
        comm.reserve(1000, 1000, torch.float32)
    if alloc is not None:
        inner.alloc = alloc
    comm.reserve(1000, 1000, torch.float32)  # nobody failed, and nothing is lost
    assert commbackend.all_reduce(torch.ones(2), comm).tolist() == [4.0, 4.0]
    with pytest.raises(ShapeError, match="another host"):
        comm._engine.transport._local((rank + 1) % 4)  # type: ignore[union-attr]
    comm.close()


def _none_left(nbytes: int) -> Any:
    raise HeapExhausted("none left")


def test_memory_of_one_host_is_everybodys() -> None:
    run_ranks(_little_memory, 4, timeout_s=90.0)


def _refused(rank: int, group: Any) -> None:
    for transport, hosts, reason in (
        ("shm+gloo", (0, 0, 1), "hosts have 2, 1 ranks"),
        ("shm+gloo", (0, 0, 0), "all ranks share one host"),
        ("shm+gloo", (0, 1, 2), "every host has one rank"),
        ("gloo+shm", (0, 0, 1), "gloo is not one-sided"),
        ("shm+local", (0, 0, 1), "local"),
    ):
        with pytest.raises(Unavailable, match=reason):
            posed(group, hosts, transport)
    with pytest.raises(ConfigError, match="unknown transport 'gloom'"):
        posed(group, (0, 0, 1), "shm+gloom")
    with pytest.raises(ConfigError, match=r"two joined by \+"):
        posed(group, (0, 0, 1), "shm+gloo+mpi")
    with posed(group, (0, 0, 1), "shm+gloo,gloo") as comm:
        assert comm.transport == "gloo" and "not shm+gloo: rank 0" in comm.explain()


def test_refused_with_its_reason() -> None:
    run_ranks(_refused, 3, timeout_s=90.0)


# -- hosts for real


def levels(transport: str, case: str, *options: str) -> None:
    """Run a case of ``multihost/levels.py`` on two hosts of two ranks."""
    if "mpi" in transport:
        pytest.importorskip("mpi4py", reason="mpi4py is not installed")
        if shutil.which("mpirun") is None and not Path(sys.executable).with_name("mpirun").exists():
            pytest.skip("mpirun is not installed")
        command = ("--", "mpirun", "-n", "4", sys.executable, LEVELS, transport, case)
    else:
        command = ("--each", "--", sys.executable, LEVELS, transport, case)
    found = multihost(*options, *command, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    good = {line for line in found.stdout.splitlines() if line.startswith("GOOD")}
    assert found.returncode == 0 and good == {f"GOOD {r}" for r in range(4)}, found.stdout + found.stderr


@pytest.mark.parametrize("transport", ["shm+gloo", "shm+mpi"])
def test_operations_over_two_hosts(transport: str) -> None:
    levels(transport, "ops")


def test_each_byte_crosses_once() -> None:
    levels("shm+gloo", "counted")


def test_a_cable_that_is_cut() -> None:
    levels("shm+gloo", "cut")


def test_a_rank_that_dies() -> None:
    levels("shm+gloo", "dies")


@pytest.mark.slow
def test_uneven_hosts() -> None:
    levels("shm+gloo", "uneven", "--ranks-per-host", "3,1")


@pytest.mark.slow
def test_automatic_choice_and_mismatches_over_mpi() -> None:
    levels("shm+mpi", "auto")
    levels("shm+mpi", "faults")
    levels("shm+mpi", "counted")
