"""Every example runs as its first lines say: two processes, CPUs, in time, and says what was overlapped."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(p.stem for p in (ROOT / "examples").glob("*.py"))
#: What an example needs beside torch.
NEEDS = {
    "transformers_llama": "transformers",
}
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")


def torchrun(script: str, *arguments: str, processes: int = 2) -> str:
    """Output of an example that must succeed, without the variables of a launcher around the tests."""
    env = {k: v for k, v in os.environ.items() if not k.startswith((*LAUNCHERS, "COMMBACKEND_"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    command = (*launch, str(ROOT / "examples" / f"{script}.py"), *arguments)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


#: These have tests of their own: test_example_mlp, test_fabric, test_megatron, test_deepspeed.
TESTED_ELSEWHERE = {"mlp_dp_tp", "fabric_tp", "megatron_gpt", "deepspeed_autotp"}
#: Compiling with inductor takes most of a run; test_inductor runs these as they are.
ARGUMENTS = {"parallelize_compile": ("--backend", "aot_eager")}
CXX = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler: none is on PATH"
)
COMPILED = ("async_tp",)


def check(name: str, output: str) -> None:
    said = r"overlapped: +[1-9]\d* x |[1-9]\d* (of them )?overlapped|/\w+': [1-9]|[1-9]\d* collectives of our own"
    assert re.search(said, output), output
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\d\S*?)(?:,|\n)", output)]
    alone = [float(loss) for loss in re.findall(r"one process (\d\S*)", output)]
    if alone:
        assert losses == pytest.approx(alone[: len(losses)], rel=1e-4), output
    if losses:
        assert len(losses) >= 3 and losses[-1] < losses[0], output
    if name == "async_tp":
        assert re.search(r"differ by \d\.\de-?\+?0[0-9]; served over shm: .*all_gather_matmul/\w+': 3", output), output


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=CXX) if n in COMPILED else n for n in EXAMPLES if n not in TESTED_ELSEWHERE]
)
def test_example(name):
    needs = NEEDS.get(name)
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    check(name, torchrun(name, *ARGUMENTS.get(name, ())))


@pytest.mark.slow
@CXX
@pytest.mark.parametrize("name", ARGUMENTS)
def test_inductor(name):
    check(name, torchrun(name))


def test_the_first_lines_say_how_to_start_it():
    for name in EXAMPLES:
        text = (ROOT / "examples" / f"{name}.py").read_text()
        assert f"torchrun --standalone --nproc-per-node 2 examples/{name}.py" in text or name == "mlp_dp_tp", name
