"""What ranks do on two hosts with two levels of transports: ``python levels.py TRANSPORT CASE``, as ``each.py``.

Started by ``scripts/multihost --each`` (gloo between hosts) or by mpirun in it (mpi).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import commbackend
from commbackend.communicator import Communicator
from commbackend.errors import CollectiveMismatch, CommBackendError, CommTimeout, PeerDied, Unavailable

Tensors = list[torch.Tensor]


def world(transport: str) -> Any:
    """The ranks: the launcher's, or MPI's."""
    if "mpi" not in transport:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


def opened(transport: str, name: str, timeout_s: float = 60.0) -> Communicator:
    return commbackend.init(
        world(transport), device="cpu", transport=transport, name=name, timeout_s=timeout_s, init_timeout_s=60.0
    )


def made(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def every_op(comm: Communicator, rows: Sequence[int], dtype: torch.dtype) -> Tensors:
    """All operations with their backward passes. Results, and of what must be equal on all ranks the bits."""
    r, total, k, n = comm.rank, sum(rows), 24, 20
    found: Tensors = []
    x, w = made(r, rows[r], k, dtype=dtype).requires_grad_(), made(50 + r, n, k, dtype=dtype).requires_grad_()
    y = commbackend.all_gather_matmul(x, w, comm, rows=rows)
    y.backward(made(90 + r, total, n, dtype=dtype))
    assert x.grad is not None and w.grad is not None
    found += [y.detach(), x.grad, w.grad]
    x, w = made(200 + r, total, k, dtype=dtype).requires_grad_(), made(50 + r, n, k, dtype=dtype).requires_grad_()
    y = commbackend.matmul_reduce_scatter(x, w, comm, rows=rows)
    y.backward(made(300 + r, rows[r], n, dtype=dtype))
    assert x.grad is not None and w.grad is not None
    found += [y.detach(), x.grad, w.grad]
    x, w = made(200 + r, total, k, dtype=dtype).requires_grad_(), made(50 + r, n, k, dtype=dtype).requires_grad_()
    y = commbackend.matmul_all_reduce(x, w, comm)
    y.backward(made(400, total, n, dtype=dtype))
    assert x.grad is not None and w.grad is not None
    found += [y.detach(), x.grad, w.grad]
    x = made(500, total, k, dtype=dtype).requires_grad_()
    y = commbackend.column_parallel_linear(x, made(600 + r, n, k, dtype=dtype), group=comm)
    y.backward(made(700 + r, total, n, dtype=dtype))
    assert x.grad is not None
    found += [y.detach(), x.grad]
    found.append(commbackend.all_gather(made(r, rows[r], k, dtype=dtype), comm, rows=rows))
    found.append(commbackend.reduce_scatter(made(800 + r, total, k, dtype=dtype), comm, rows=rows))
    found.append(commbackend.all_reduce(made(800 + r, total, k, dtype=dtype), comm))
    return found


def same_bits(plain: Communicator, mine: torch.Tensor) -> None:
    """``mine`` has the same bits on all ranks of ``plain``."""
    flat = mine.reshape(1, -1).contiguous().view(torch.uint8)
    for theirs in commbackend.all_gather(flat, plain):
        assert torch.equal(theirs, flat[0]), "ranks have different bits"


def ops(transport: str) -> None:
    """Every operation and its backward pass against one level: uneven rows, none, chunks; twice the same bits."""
    one = transport.split("+")[1]
    with opened(transport, "two") as two, opened(one, "one") as plain:
        assert two.transport == transport and two.choice is not None and two.choice.hosts == (0, 0, 1, 1)
        for rows, dtype, tolerance in (
            ((5, 3, 4, 2), torch.float32, 1e-4),
            ((5, 0, 4, 2), torch.bfloat16, 0.15),
            ((0, 7, 0, 1), torch.float32, 1e-4),
            ((0, 0, 0, 0), torch.float32, 0.0),
        ):
            wanted = every_op(plain, rows, dtype)
            for knobs in ({"chunks": 1, "lanes": 0}, {"chunks": 4, "lanes": 1}, {"chunks": 3, "lanes": 2}):
                two.configure("*", **knobs)
                got = every_op(two, rows, dtype)
                for a, b in zip(got, wanted, strict=True):
                    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            again = every_op(two, rows, dtype)
            assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "runs differ"
            for summed in (got[6], got[10], got[13]):
                same_bits(plain, summed)
        text = two.explain()
        assert "two_level/3/2" in text and f"transport {transport}" in text, text
        assert "the transport has two levels" in text, text
        refused = two.chooser
        two.configure("*", schedule="push")
        assert "two levels" in str(refused.chosen(refused.problems()[0]).refused)


def sent_nbytes() -> int:
    """Bytes that have left this host's network interface."""
    return int(Path("/sys/class/net/net0/statistics/tx_bytes").read_text())


def crossing(comm: Communicator, call: Callable[[], object]) -> int:
    """Bytes that leave the host while all ranks make ``call`` five times."""
    call()
    comm.barrier()
    time.sleep(0.2)
    before = sent_nbytes()
    for _ in range(5):
        call()
    comm.barrier()
    time.sleep(0.2)
    return sent_nbytes() - before


def counted(transport: str) -> None:
    """Over the network goes 1/2 of what one level sends (F061: each byte crosses once for a host, not once a rank)."""
    x, w, full = torch.randn(256, 1024), torch.randn(64, 1024), torch.randn(1024, 512)
    down = torch.randn(1024, 512)
    with opened(transport, "two") as two, opened(transport.split("+")[1], "one") as plain:
        for call in (
            lambda comm: commbackend.all_gather_matmul(x, w, comm),
            lambda comm: commbackend.matmul_reduce_scatter(full, down, comm),
            lambda comm: commbackend.matmul_all_reduce(full, down, comm),
        ):
            near, far = (crossing(plain, functools.partial(call, comm)) for comm in (two, plain))
            assert 0.4 < near / far < 0.6, (near, far)


def faults(transport: str) -> None:
    """Ranks that disagree, whichever is the odd one: all raise, and the next communicator works."""
    for odd in (1, 3):
        comm = opened(transport, f"odd{odd}", timeout_s=20.0)
        try:
            rows = 4 + (comm.rank == odd)
            commbackend.all_reduce(torch.ones(rows, 3), comm)
            raise AssertionError("ranks that disagree went on")
        except CollectiveMismatch as e:
            assert "rank" in str(e), e
        except CommBackendError as e:
            assert "disagree" in str(e), e
        comm.close()


def cut(transport: str) -> None:
    """The cable is cut in the middle of a call: all ranks of both hosts raise, within the deadline."""
    comm = opened(transport, "cut", timeout_s=3.0)
    x, w = torch.randn(4, 8), torch.randn(5, 8)
    commbackend.all_gather_matmul(x, w, comm)
    comm.barrier()
    time.sleep(0.5)  # what the barrier sends has arrived everywhere
    if comm.rank == 3:
        subprocess.run(["ip", "link", "set", "net0", "down"], check=True)
    start = time.monotonic()
    try:
        for _ in range(100):
            commbackend.all_gather_matmul(x, w, comm)
        raise AssertionError("the calls went on without a cable")
    except (CommTimeout, PeerDied) as e:
        assert time.monotonic() - start < 25.0, "long after the deadline"
        # Whoever's deadline comes first: of the link's ends, or of those who wait for them on their host.
        assert "which it counts from 0" in str(e) or "died" in str(e) or "ended" in str(e), e
        assert 0 <= e.rank < 4, e
    try:
        commbackend.all_reduce(x, comm)
        raise AssertionError("a fault is sticky")
    except (CommTimeout, PeerDied):
        comm.close()


def dies(transport: str) -> None:
    """A rank dies: its neighbour and the other host raise PeerDied that names it."""
    comm = opened(transport, "dies", timeout_s=20.0)
    commbackend.all_reduce(torch.ones(3), comm)
    if comm.rank == 2:
        sys.stdout.write("GOOD 2\n")
        sys.stdout.flush()
        os._exit(0)
    try:
        for _ in range(100):
            commbackend.all_reduce(torch.ones(3), comm)
        raise AssertionError("the calls went on without a rank")
    except PeerDied as e:
        assert e.rank == 2 and "rank 2" in str(e), (e.rank, e)
    comm.close()


def auto(transport: str) -> None:
    """The automatic choice over uniform hosts, and its reasons."""
    comm = commbackend.init(world(transport), device="cpu", init_timeout_s=60.0)
    assert comm.transport == transport, comm.explain()
    assert "not shm: " in comm.explain() and "they must share a host" in comm.explain(), comm.explain()
    assert commbackend.all_reduce(torch.full((3,), float(comm.rank)), comm).tolist() == [6.0] * 3
    comm.close()


def uneven(transport: str) -> None:
    """3 + 1 ranks: no two levels, the reason in the error and in ``explain``; one level serves."""
    try:
        opened(transport, "no")
        raise AssertionError("two levels of uneven hosts")
    except Unavailable as e:
        assert "hosts have 3, 1 ranks" in str(e), e
    comm = commbackend.init(device="cpu", init_timeout_s=60.0)
    assert comm.transport == transport.split("+")[1] and "hosts have 3, 1 ranks" in comm.explain(), comm.explain()
    comm.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[2]](sys.argv[1])
    rank = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    if not (sys.argv[2] == "dies" and rank == "2"):
        sys.stdout.write(f"GOOD {rank}\n")  # in one piece: ranks share the stream
