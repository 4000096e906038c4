"""Under mpirun: the conformance suite of the transport ``mpi``, with the ranks of mpirun."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from commbackend.config import Config
from commbackend.group import resolve_group
from commbackend.testing import TransportSuite
from commbackend.testing.harness import Promise

MPI = pytest.importorskip("mpi4py.MPI", reason="mpi4py is not installed")
pytestmark = pytest.mark.mpi(min_size=2)

_numbers = itertools.count()


def run_here(fn: Callable[..., Any], size: int, *args: Any, timeout_s: float = 30.0) -> list[Any]:
    """As ``testing.run_ranks``, with this process as one of the ranks."""
    assert size == MPI.COMM_WORLD.size
    config = Config(init_timeout_s=timeout_s)
    group = resolve_group(MPI.COMM_WORLD, name=f"promise {next(_numbers)}", config=config)
    try:
        group.barrier()
        fn(group.rank, group, *args)
    finally:
        # Rank 0 may serve the group's store: it stays until all are through with it.
        ended, deadline = MPI.COMM_WORLD.Ibarrier(), time.monotonic() + timeout_s
        while not ended.Test() and time.monotonic() < deadline:
            time.sleep(0.001)
        group.close()
    return []


class TestMpiTransport(TransportSuite):
    transport = "commbackend.transports.mpi:MpiTransport"
    size = MPI.COMM_WORLD.size
    runner = staticmethod(run_here)

    def keep(self, promise: Promise) -> None:
        if promise.dies:
            pytest.skip("a rank's death ends this mpirun: tests/test_mpi_transport.py has one of its own for it")
        super().keep(promise)
