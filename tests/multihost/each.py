"""What one rank does on one of several hosts, started by ``scripts/multihost --each``: ``python each.py CASE``.

Every case ends with "GOOD <rank>" on stdout.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

import torch

import commbackend
from commbackend import select, topology
from commbackend.config import Config, resolve
from commbackend.errors import CommBackendError, CommTimeout, ConfigError, Unavailable
from commbackend.group import resolve_group

CPU = torch.device("cpu")


def listeners() -> set[str]:
    """The addresses that this process listens on."""
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[3].rpartition(":")[0].strip("[]") for line in lines if f"pid={os.getpid()}," in line}


def refused() -> None:
    """Hosts of one name are told apart by proof; shm gives way to gloo on all ranks; which interface must be said;
    nobody listens where nobody asked.
    """
    group = resolve_group(None, config=Config(init_timeout_s=60))
    assert topology.survey(group).hosts == (0, 0, 1, 1)
    try:
        select.connect(group, CPU, resolve(init_timeout_s=60))
        raise AssertionError("gloo had two interfaces to choose from")
    except Unavailable as e:
        assert "net0" in str(e) and "net1" in str(e) and "COMMBACKEND_INTERFACE" in str(e), e
    asked = resolve(interface="net1", transport="shm,gloo", init_timeout_s=60)
    transport, choice = select.connect(group, CPU, asked)
    assert transport is not None and transport.name == "gloo" and choice.hosts == (0, 0, 1, 1), choice
    assert set(choice.reasons["shm"]) == {0, 1, 2, 3} and "connect" in choice.why(), choice
    y = torch.empty(3)
    transport.all_reduce(y, torch.full((3,), group.rank + 1.0))  # type: ignore[attr-defined]
    assert y.tolist() == [10.0] * 3
    wanted = {topology.addresses()["net1"]} | ({os.environ["MASTER_ADDR"]} if group.rank == 0 else set())
    assert listeners() == wanted, (listeners(), wanted)
    transport.barrier(time.monotonic() + 60)
    transport.close()
    group.close()


def cut() -> None:
    """IPv6 alone. Then the cable is cut in the middle of a call: the deadline's error, on both sides, and no data."""
    rank = int(os.environ["RANK"])
    comm = commbackend.init(device="cpu", timeout_s=3.0, init_timeout_s=60.0)
    assert comm.transport == "gloo" and listeners() <= {topology.addresses()["net0"], os.environ["MASTER_ADDR"]}
    x, w = torch.randn(4, 8), torch.randn(5, 8)
    assert commbackend.all_gather_matmul(x, w, comm).shape == (4 * comm.size, 5)
    comm.barrier()
    if rank == comm.size - 1:
        subprocess.run(["ip", "link", "set", "net0", "down"], check=True)
    start = time.monotonic()
    try:
        for _ in range(100):
            commbackend.all_gather_matmul(x, w, comm)
        raise AssertionError("the calls went on without a cable")
    except CommBackendError as e:
        assert time.monotonic() - start < 20.0, "long after the deadline"
        assert isinstance(e, CommTimeout), (type(e), e)
        assert "rank" in str(e), e
    comm.close()


def loopback() -> None:
    """MASTER_ADDR is a name that means loopback on its own host and the right address elsewhere (F026)."""
    comm = commbackend.init(device="cpu", init_timeout_s=60.0)
    assert comm.choice is not None and comm.choice.hosts == (0, 1)
    assert commbackend.all_reduce(torch.ones(2), comm).tolist() == [2.0, 2.0]
    assert not any(address.startswith("127.") for address in listeners()), listeners()
    comm.close()


def loopback_of_two() -> None:
    """As above where rank 0's host has two addresses: an error that lists them; the others are not left waiting."""
    try:
        commbackend.init(device="cpu", init_timeout_s=3.0)
        raise AssertionError("met at a place that cannot be")
    except ConfigError as e:
        assert os.environ["RANK"] == "0" and "10.77.0.1 (net0), 10.77.1.1 (net1)" in str(e), e
    except CommTimeout as e:
        assert os.environ["RANK"] == "1" and "rank 0 has not come" in str(e), e


def lies() -> None:
    """LOCAL_WORLD_SIZE says that all ranks share a host, and they do not."""
    try:
        commbackend.init(device="cpu", init_timeout_s=4.0)
        raise AssertionError("met though nobody could")
    except CommTimeout as e:
        assert "have not come" in str(e) or "has not come" in str(e), e
        assert os.environ["RANK"] == "0" or "LOCAL_WORLD_SIZE" in str(e), e


def torchrun() -> None:
    """Under torchrun on every host: its store serves, its local ranks count for nothing."""
    comm = commbackend.init(device="cpu", init_timeout_s=60.0)
    assert comm.choice is not None and comm.choice.hosts == (0, 0, 1, 1) and comm.transport == "shm+gloo"
    assert commbackend.all_reduce(torch.full((3,), float(comm.rank)), comm).tolist() == [6.0] * 3
    comm.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
    sys.stdout.write(f"GOOD {os.environ['RANK']}\n")  # in one piece: ranks share the stream
