"""Several hosts for real on one machine: what ``scripts/multihost`` makes, and ranks that start in it by variables.

The ranks' side of each case is in ``multihost/each.py``; tests that run under mpirun there are ``multihost/test_*.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MULTIHOST = str(ROOT / "scripts" / "multihost")
EACH = str(ROOT / "tests" / "multihost" / "each.py")
CANNOT = 77


def multihost(*words: str, timeout_s: float = 110.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``scripts/multihost``; skip where such hosts cannot be made."""
    hidden = ("OMPI_", "PMI", "SLURM_", "COMMBACKEND_", "MASTER_", "LOCAL_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(hidden) and k not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, MULTIHOST, *words]
    found = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=timeout_s, check=False)
    if found.returncode == CANNOT:
        pytest.skip(found.stderr.strip().splitlines()[-1])
    return found


def each(case: str, ranks: int, *options: str, variables: tuple[str, ...] = ()) -> None:
    """Run a case of ``multihost/each.py`` on every rank, with ``variables`` (NAME=VALUE) in place of the launcher's."""
    found = multihost(*options, "--each", "--", "env", *variables, sys.executable, EACH, case)
    good = {line for line in found.stdout.splitlines() if line.startswith("GOOD")}
    assert found.returncode == 0 and good == {f"GOOD {r}" for r in range(ranks)}, found.stdout + found.stderr


# -- the hosts themselves


def test_hosts_have_a_network_names_and_memory_of_their_own() -> None:
    mine = f"mine-{os.getpid()}"
    look = (
        f"hostname; touch /tmp/{mine} /dev/shm/{mine}; ls /tmp/{mine}; getent hosts node1 node0; ip -br -4 a show net1"
    )
    found = multihost("--hosts", "3", "--ranks-per-host", "1", "--links", "2", "--", "sh", "-c", look)
    lines = found.stdout.splitlines()
    assert found.returncode == 0 and lines[:2] == ["node0", f"/tmp/{mine}"], found.stdout + found.stderr
    assert lines[2].split() == ["10.77.0.2", "node1"] and "10.77.1.1/24" in lines[4]
    assert not Path(f"/tmp/{mine}").exists() and not Path(f"/dev/shm/{mine}").exists()


def test_status_and_options() -> None:
    assert multihost("--", "sh", "-c", "exit 3").returncode == 3
    assert multihost("--hosts", "2", "--ranks-per-host", "1,1,1", "--", "true").returncode == 2
    assert "tbf" in multihost("--rate", "1gbit", "--", "tc", "qdisc", "show", "dev", "net0").stdout


def test_where_hosts_cannot_be_made(tmp_path: Path) -> None:
    command = [sys.executable, MULTIHOST, "--", "true"]
    env = {**os.environ, "PATH": str(tmp_path)}
    found = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert found.returncode == CANNOT and "cannot make hosts here: ip, " in found.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(number: signal.Signals) -> None:
    multihost("--", "true")  # skips where there are no hosts
    mark = f"{os.getpid()}{int(number)}"
    before = set(os.listdir("/tmp"))
    command = [sys.executable, MULTIHOST, "--", "sh", "-c", f"echo up; sleep 1000{mark}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rig:
        assert rig.stdout is not None and rig.stdout.readline() == "up\n"
        os.kill(rig.pid, number)
        rig.wait(20)
    deadline = time.monotonic() + 20
    while (left := _processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left
    assert not [name for name in set(os.listdir("/tmp")) - before if "multihost" in name]


def _processes(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has just ended
        if mark in line:
            found.append(line)
    return found


# -- ranks in them


def test_equal_names_two_interfaces_and_shm_refused() -> None:
    """F034, F103: hosts of one name, with LOCAL_WORLD_SIZE=1 on both."""
    each("refused", 4, "--same-name", "--links", "2", variables=("LOCAL_WORLD_SIZE=1",))


def test_ipv6_alone_and_a_cable_that_is_cut() -> None:
    each("cut", 2, "--ipv6", "--ranks-per-host", "1")


def test_own_name_is_loopback() -> None:
    options = ("--own-name-is-loopback", "--ranks-per-host", "1")
    each("loopback", 2, *options, variables=("MASTER_ADDR=node0",))
    each("loopback_of_two", 2, *options, "--links", "2", variables=("MASTER_ADDR=node0",))


def test_local_world_size_lies() -> None:
    each("lies", 2, "--ranks-per-host", "1", variables=("LOCAL_WORLD_SIZE=2",))


def test_torchrun_on_every_host() -> None:
    found = multihost("--", "torchrun", EACH, "torchrun", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    good = {line for line in found.stdout.splitlines() if line.startswith("GOOD")}
    assert found.returncode == 0 and good == {f"GOOD {r}" for r in range(4)}, found.stdout + found.stderr


@pytest.mark.slow
def test_demo_over_two_hosts(tmp_path: Path) -> None:
    """The demo's ranks on both hosts, over shared memory with MPI between, and gloo: the losses of one process."""
    words = ("demo", "--ranks", "4", "--steps", "8", "--launcher", "mpirun", "--json", "--out", str(tmp_path))
    found = multihost("--share", str(tmp_path), "--", sys.executable, "-m", "commbackend", *words, timeout_s=900.0)
    report = json.loads(found.stdout)
    assert found.returncode == 0 and report["ok"], found.stderr
    assert {run["transport"] for run in report["runs"]} == {"-", "shm+mpi", "gloo"}
    assert any("mpi" in why and "not" not in why.split(";")[0] for why in report["why"])
