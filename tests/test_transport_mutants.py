"""The suite's own proof: every hook of a transport, replaced by a no-op, breaks a promise that is named here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import ProcessMnnvl, ProcessUserbuffers
from fake_nvshmem import FarNvshmem, ProcessNvshmem

from commbackend.contract import Collective, OneSided, SymBuffer, Transport
from commbackend.testing import RankError, TransportSuite, run_threads
from commbackend.testing.harness import promises
from commbackend.transports.local import LocalTransport
from commbackend.transports.shm import ShmTransport
from commbackend.transports.torch_dist import GlooTransport

# Hook -> the promise that its absence breaks.
ONE_SIDED = {
    "_put": "put_arrives_before_its_slot",
    "_get": "get_reads_the_peer",
    "_signal": "a_wait_accepts_greater_values",
    "_wait": "soak_of_random_interleavings",
    "_barrier": "barrier_holds_everybody",
    "_post": "records_can_be_read",
    "_record": "records_can_be_read",
    "_tell": "abort_ends_a_wait",
    "_release": "abort_ends_the_own_allocation",
    "_close": "close_is_collective_and_idempotent",
    "_alloc": "put_arrives_before_its_slot",
    "_alloc_slots": "put_arrives_before_its_slot",
    "_same": "bad_arguments_move_nothing",
    "_peer": "bad_arguments_move_nothing",
    "_ready": "a_wait_ends_by_its_deadline",
}
COLLECTIVE = {
    "_all_gather": "all_gather_of_uneven_counts",
    "_all_to_all": "all_to_all_of_uneven_counts",
    "_reduce_scatter": "reductions_sum",
    "_all_reduce": "reductions_sum",
    "_counts": "lists_have_one_tensor_a_rank",
}
#: Those of every transport.
BOTH = {h: ONE_SIDED[h] for h in ("_barrier", "_post", "_record", "_close")}
BOTH["_ready"] = "close_is_collective_and_idempotent"
#: Where waits are enqueued, the one of the host is a hook of its own.
STREAMS = {**ONE_SIDED, "_wait": "a_wait_of_the_host_holds", "_enqueue_wait": "soak_of_random_interleavings"}


def _nothing(*_args: Any, **_kw: Any) -> None:
    return None


def _true(*_args: Any, **_kw: Any) -> bool:
    return True


def _dirty(self: Any, nbytes: int) -> SymBuffer:
    buffer = super(type(self), self)._alloc(nbytes)
    buffer.local.fill_(0xFF)
    return buffer


def _late_bytes(self: Any, dst: Any, src: torch.Tensor, peer: int, slot: Any, stream: Any) -> None:
    """A put whose slot rises before its bytes are there."""
    if slot is not None:
        self._signal(peer, slot, stream)
        time.sleep(0.01)
    super(type(self), self)._put(dst, src, peer, None, stream)


def _mutants(base: type[Transport], hooks: dict[str, str]) -> dict[str, str]:
    """Make a class a hook, importable from this module; return class name -> promise."""
    found: dict[str, str] = {}
    for hook, promise in hooks.items():
        name = f"{base.__name__}Without{hook}"
        globals()[name] = type(name, (base,), {hook: _true if hook == "_wait" else _nothing})
        found[name] = promise
    for label, hook, fn, promise in (
        ()
        if not issubclass(base, OneSided)
        else (
            ("Dirty", "_alloc", _dirty, "fresh_memory_is_zero"),
            ("Hasty", "_put", _late_bytes, "put_arrives_before_its_slot"),
        )
    ):
        name = f"{base.__name__}{label}"
        globals()[name] = type(name, (base,), {hook: fn})
        found[name] = promise
    return found


SHM = _mutants(ShmTransport, ONE_SIDED)
SHM["ShmTransportDeaf"] = "a_death_is_noticed"
LOCAL = _mutants(LocalTransport, {**ONE_SIDED, **COLLECTIVE})
#: gloo tells faults by cutting connections and the store (``_release``), in its processes' own deaths too.
GLOO = _mutants(GlooTransport, {**BOTH, "_release": "abort_ends_a_barrier_and_a_record", **COLLECTIVE})
USERBUFFERS = _mutants(ProcessUserbuffers, STREAMS)
#: Over the network ``_tell`` and ``_release`` both abort the control plane, which tells and releases: either does.
NETWORK = {h: p for h, p in STREAMS.items() if h not in ("_tell", "_release")}
FABRIC = {
    **_mutants(ProcessMnnvl, NETWORK),
    **_mutants(ProcessNvshmem, NETWORK),
    **_mutants(FarNvshmem, NETWORK),
}
FABRIC |= {f"{kind}Mute": "abort_ends_a_wait" for kind in ("ProcessMnnvl", "ProcessNvshmem", "FarNvshmem")}
#: Their own way of moving and waiting, where what they share with userbuffers is caught there.
OWN = [f"FarNvshmemWithout{h}" for h in ("_put", "_get", "_signal", "_enqueue_wait")]
MPI = {h: p for h, p in {**ONE_SIDED, **COLLECTIVE}.items() if h != "_release"}


class ShmTransportDeaf(ShmTransport):
    """Hears of no death and no fault of its peers."""

    _hear = _nothing


class ProcessMnnvlMute(ProcessMnnvl):
    """Tells nobody of its faults, nor its own waits."""

    _tell = _release = _nothing


class ProcessNvshmemMute(ProcessNvshmem):
    """As that."""

    _tell = _release = _nothing


class FarNvshmemMute(FarNvshmem):
    """As that."""

    _tell = _release = _nothing


def test_every_hook_has_a_mutant() -> None:
    hooks = {n for role in (Transport, OneSided, Collective) for n in vars(role) if n[0] == "_" and n[1] != "_"}
    assert hooks - {"_abc_impl"} == set(ONE_SIDED) | set(COLLECTIVE) | set(STREAMS)


def _breaks(suite: type[TransportSuite], promise: str) -> None:
    with pytest.raises(RankError):
        suite().keep(next(p for p in promises() if p.name == promise))


@pytest.mark.parametrize("mutant", SHM)
def test_shm_mutant_is_caught(mutant: str) -> None:
    class Suite(TransportSuite):
        transport = f"{__name__}:{mutant}"
        patience_s = 1.0

    _breaks(Suite, SHM[mutant])


@pytest.mark.parametrize("mutant", LOCAL)
def test_local_mutant_is_caught(mutant: str) -> None:
    class Suite(TransportSuite):
        transport = f"{__name__}:{mutant}"
        runner = staticmethod(run_threads)
        patience_s = 1.0

    _breaks(Suite, LOCAL[mutant])


@pytest.mark.parametrize("mutant", GLOO)
def test_gloo_mutant_is_caught(mutant: str) -> None:
    class Suite(TransportSuite):
        transport = f"{__name__}:{mutant}"
        patience_s = 1.0
        size = 2

    _breaks(Suite, GLOO[mutant])


def _gpu_mutant(mutant: str, promise: str) -> None:
    class Suite(TransportSuite):
        transport = f"{__name__}:{mutant}"
        patience_s = 1.0
        size = 2

    _breaks(Suite, promise)


@pytest.mark.parametrize("mutant", USERBUFFERS)
def test_userbuffers_mutant_is_caught(mutant: str) -> None:
    """On the fake driver."""
    _gpu_mutant(mutant, USERBUFFERS[mutant])


@pytest.mark.parametrize("mutant", OWN)
def test_nvshmem_mutant_is_caught(mutant: str) -> None:
    _gpu_mutant(mutant, FABRIC[mutant])


@pytest.mark.slow
@pytest.mark.parametrize("mutant", sorted(set(FABRIC) - set(OWN)))
def test_mnnvl_and_nvshmem_mutants_are_caught(mutant: str) -> None:
    _gpu_mutant(mutant, FABRIC[mutant])


def _under_mpirun(hook: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun beside the interpreter or on PATH")
    here = Path(__file__).parent
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "PMIX_"))}
    path = f"{here.parent}{os.pathsep}{here}{os.pathsep}{here / 'mpi'}"
    return subprocess.run(
        [mpirun, *root, "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable, here / "mpi" / "mutant.py",
         hook, MPI.get(hook, "put_arrives_before_its_slot")],
        env={**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


MPI_SAMPLE = ["_put", "_wait", "_barrier", "_all_to_all"]


@pytest.mark.parametrize("hook", MPI_SAMPLE)
def test_mpi_mutant_is_caught(hook: str) -> None:
    done = _under_mpirun(hook)
    assert done.returncode != 0 and "BROKEN" in done.stdout, done.stdout + done.stderr[-2000:]


def test_mpi_as_it_is_passes() -> None:
    done = _under_mpirun("none")
    assert done.returncode == 0 and "BROKEN" not in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("hook", sorted(set(MPI) - set(MPI_SAMPLE)))
def test_every_mpi_mutant_is_caught(hook: str) -> None:
    done = _under_mpirun(hook)
    assert done.returncode != 0 and "BROKEN" in done.stdout, done.stdout + done.stderr[-2000:]
