"""The example script under its launchers: equal to the unsharded model at every TP size, overlapped, exit status 0."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "examples" / "mlp_dp_tp.py")


def run(*command: str) -> str:
    """Output of a launcher that must succeed. It runs without the variables of a launcher around the tests."""
    launchers = (
        "OMPI_",
        "PMI_",
        "PMIX_",
        "PRTE_",
        "SLURM_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "TORCHELASTIC_",
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def judge(output: str, dp: int, tp: int, transport: str) -> None:
    steps = re.findall(r"step \d+: loss (\S+), unsharded (\S+), differ (\S+)", output)
    assert len(steps) == 3
    assert all(abs(float(ours) - float(whole)) <= 1e-4 * float(whole) for ours, whole, _ in steps)
    # Losses are those of training, not of one state.
    assert len({ours for ours, _, _ in steps}) == 3
    summary = re.search(r"dp (\d+) x tp (\d+) over (\w+): (\d+) overlapped calls, (\d+) fallbacks", output)
    assert summary is not None, output
    assert summary.groups()[:3] == (str(dp), str(tp), transport)
    if tp > 1:
        assert int(summary[4]) == 5 * 3 and int(summary[5]) == 0


@pytest.mark.parametrize(("world", "tp"), [(4, 2), (2, 1)])
def test_torchrun(world, tp):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world))
    output = run(*torchrun, SCRIPT, "--tp", str(tp), "--steps", "3", "--device", "cpu")
    judge(output, world // tp, tp, "shm")


def test_mpirun():
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if mpirun is None:
        pytest.skip("no mpirun here")
    launch = (mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "4", sys.executable)
    judge(run(*launch, SCRIPT, "--tp", "4", "--steps", "3", "--device", "cpu"), 1, 4, "shm")


def test_sizes_that_do_not_divide():
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with pytest.raises(AssertionError, match="--tp 3 must divide 2 processes"):
        run(*torchrun, SCRIPT, "--tp", "3", "--device", "cpu")


def test_it_stays_short():
    assert len(Path(SCRIPT).read_text().splitlines()) < 150
