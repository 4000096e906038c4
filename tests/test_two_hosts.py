"""Two hosts for real on one machine: network namespaces joined by a cable, with equal host names (F026, F034)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

RANK = """
import os, subprocess, time, torch
from commbackend import select, topology
from commbackend.config import Config, resolve
from commbackend.group import resolve_group
group = resolve_group(None, config=Config(init_timeout_s=40))
assert topology.survey(group).hosts == (0, 0, 1, 1)
transport, choice = select.connect(group, torch.device("cpu"), resolve(init_timeout_s=40))
assert transport.name == "gloo" and choice.hosts == (0, 0, 1, 1), choice
assert set(choice.reasons["shm"]) == {0, 1, 2, 3} and "connect" in choice.why()
y = torch.empty(3)
transport.all_reduce(y, torch.full((3,), group.rank + 1.0))
assert y.tolist() == [10.0] * 3
seen = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout.splitlines()
mine = {l.split()[3].rpartition(":")[0] for l in seen if f"pid={os.getpid()}," in l}
assert mine == {os.environ["OWN"]}, mine  # neither all interfaces nor loopback
transport.barrier(time.monotonic() + 20)
transport.close()
group.close()
print("GOOD", group.rank)
"""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces, 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip (iproute2) is not here")
    a, b = f"cb{os.getpid()}a", f"cb{os.getpid()}b"
    try:
        try:
            for n in (a, b):
                _run("ip", "netns", "add", n)
            _run("ip", "link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        except subprocess.CalledProcessError as e:
            pytest.skip(f"network namespaces cannot be made here: {e.stderr.strip()}")
        for n, address in ((a, "10.77.0.1/24"), (b, "10.77.0.2/24")):
            _run("ip", "-n", n, "addr", "add", address, "dev", "cable")
            _run("ip", "-n", n, "link", "set", "lo", "up")
            _run("ip", "-n", n, "link", "set", "cable", "up")
        yield a, b
    finally:
        for n in (a, b):
            subprocess.run(["ip", "netns", "del", n], capture_output=True, check=False)


def test_two_hosts(hosts: tuple[str, str], tmp_path: Path) -> None:
    """Hosts are told apart by proof; shm gives way to gloo on all ranks; listeners have the one address they need."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    jobs = []
    for rank in range(4):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_", "COMMBACKEND_"))}
        env |= {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29555"}
        env |= {"OWN": f"10.77.0.{1 + rank // 2}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", hosts[rank // 2], sys.executable, str(script)]
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env))
    outs = [job.communicate(timeout=100)[0] for job in jobs]
    assert all(f"GOOD {rank}" in out for rank, out in enumerate(outs)), "\n".join(outs)
