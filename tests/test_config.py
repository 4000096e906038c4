"""Configuration: precedence, refusals, launcher dialects (F024, F044)."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commbackend import config
from commbackend.config import PREFIX, Config, Launch, launcher, reference, resolve
from commbackend.errors import ConfigError

LAUNCHER_PREFIXES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "TORCHELASTIC_",
    "OMPI_",
    "PMI",
    "SLURM_",
    "MPI_",
    "PALS_",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, no COMMBACKEND_ variables, nothing said yet."""
    for name in list(os.environ):
        if name.startswith((PREFIX, *LAUNCHER_PREFIXES)):
            monkeypatch.delenv(name)
    monkeypatch.setattr(config, "_warned", set())
    monkeypatch.setattr(config, "_announced", set())
    level = logging.getLogger("commbackend").level
    yield
    logging.getLogger("commbackend").setLevel(level)


def _set(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


# -- settings


def test_argument_beats_variable_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    assert resolve() == Config() and set(resolve().sources.values()) == {"default"}
    monkeypatch.setenv("COMMBACKEND_CHUNKS", "4")
    found = resolve()
    assert (found.chunks, found.sources["chunks"]) == (4, "COMMBACKEND_CHUNKS")
    found = resolve(chunks=2, lanes=None)
    assert (found.chunks, found.sources["chunks"]) == (2, "argument")
    assert found.sources["lanes"] == "default"
    monkeypatch.delenv("COMMBACKEND_CHUNKS")
    assert dict(os.environ) == before


VALUES: list[tuple[str, str, object, list[str]]] = [
    ("transport", "shm, gloo", "shm,gloo", ["", "shm,,gloo", "auto,shm", "shm,off", "shm,shm", "no name"]),
    ("gemm", "triton", "triton", ["auto,torch", "torch,"]),
    ("schedule", "push", "push", ["auto,push"]),
    ("chunks", "32", 32, ["33", "-1", "two", "1.5"]),
    ("lanes", "-1", -1, ["-2", "17"]),
    ("timeout_s", "1.5", 1.5, ["0", "-1", "inf", "nan", "soon", "1e300"]),
    ("init_timeout_s", "30", 30.0, ["0"]),
    ("numerics", "Library", "library", ["fast"]),
    ("batch_invariant", "1", True, ["maybe"]),
    ("log_level", "INFO", "info", ["loud"]),
    ("strict", "yes", True, ["maybe", "2"]),
    ("check", "off", False, ["nope"]),
    ("allow_shared_device", "1", True, ["y e s"]),
    ("polling", "always", "always", ["sometimes"]),
    ("serve", "on", True, ["vllm"]),
    ("tp_comm_overlap_cfg", "tuned/h100 tp8.yaml", "tuned/h100 tp8.yaml", []),
    ("dump_signal", "SIGUSR2", "USR2", ["USR3", "KILL"]),
    ("choices", "tuned/choices.json", "tuned/choices.json", []),
    ("nvtx", "on", True, ["ranges"]),
    ("tune", "true", True, ["now"]),
]


@pytest.mark.parametrize(("field", "good", "value", "bad"), VALUES)
def test_every_value_is_parsed_or_refused(
    monkeypatch: pytest.MonkeyPatch, field: str, good: str, value: object, bad: list[str]
) -> None:
    variable = PREFIX + field.upper()
    monkeypatch.setenv(variable, good)
    assert getattr(resolve(), field) == value
    monkeypatch.delenv(variable)
    assert getattr(resolve(**{field: good}), field) == value
    accepts = {row["name"]: row["accepts"] for row in reference()}[field]
    for raw in bad:
        if raw:
            monkeypatch.setenv(variable, raw)
            with pytest.raises(ConfigError) as e:
                resolve()
            assert variable in str(e.value) and repr(raw) in str(e.value) and accepts in str(e.value)
            monkeypatch.delenv(variable)
        with pytest.raises(ConfigError, match=f"argument {field}"):
            resolve(**{field: raw})


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, COMMBACKEND_TRANSPORT="", COMMBACKEND_CHUNKS=" ")
    assert resolve() == Config()


def test_every_field_is_tested_and_documented() -> None:
    rows = reference()
    assert {r["name"] for r in rows} == {v[0] for v in VALUES} | {"interface"}
    assert [r["name"] for r in rows] == [f.name for f in dataclasses.fields(Config) if f.name != "sources"]
    for row in rows:
        assert row["variable"] == PREFIX + row["name"].upper()
        assert row["doc"].endswith(".") and row["accepts"] and row["type"]


def test_the_page_of_settings_is_current() -> None:
    page = (Path(__file__).parent.parent / "docs/settings.md").read_text()
    rows = [
        f"| `{r['name']}` | `{r['variable']}` | {r['default'] or 'unset'} | {r['accepts']} | {r['doc']} |"
        for r in reference()
    ]
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows


def test_unknown_options_and_variables(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'chunk' \(did you mean chunks\?\)"):
        resolve(chunk=1)
    _set(monkeypatch, COMMBACKEND_TRANSPROT="shm", COMMBACKEND_XYZZY="1")
    with caplog.at_level("WARNING", "commbackend"):
        resolve()
        resolve()
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2, said
    assert "COMMBACKEND_TRANSPROT" in said[0] and "did you mean COMMBACKEND_TRANSPORT?" in said[0]
    assert "COMMBACKEND_XYZZY" in said[1] and "did you mean" not in said[1]
    with pytest.raises(ConfigError, match="COMMBACKEND_TRANSPROT"):
        resolve(strict=True)


def test_interface_falls_back_to_gloos_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7,eth8")
    found = resolve()
    assert (found.interface, found.sources["interface"]) == ("eth7", "GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("COMMBACKEND_INTERFACE", "ib0")
    assert resolve().interface == "ib0"


def test_log_level() -> None:
    logger = logging.getLogger("commbackend")
    before = logger.level
    resolve()
    assert logger.level == before
    resolve(log_level="debug")
    assert logger.level == logging.DEBUG


def test_fingerprint_is_of_what_ranks_must_share() -> None:
    one, other = resolve(transport="shm"), resolve(transport="gloo")
    assert one.fingerprint() != other.fingerprint() and len(one.fingerprint()) == 16
    assert one.fingerprint() == resolve(transport="shm", log_level="debug", strict=True).fingerprint()
    assert resolve(timeout_s=5).fingerprint() != resolve().fingerprint()
    assert "transport=shm" in one.agreement().splitlines()
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.transport = "gloo"  # type: ignore[misc]


# -- launchers

TORCHRUN = dict(
    RANK=3, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, MASTER_ADDR="node0", MASTER_PORT=29500,
    TORCHELASTIC_RUN_ID="run7", TORCHELASTIC_RESTART_COUNT=1, TORCHELASTIC_USE_AGENT_STORE=True,
)  # fmt: skip
ENV = dict(RANK=3, WORLD_SIZE=8, MASTER_ADDR="node0", MASTER_PORT=29500)
OPENMPI = dict(
    OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=8, OMPI_COMM_WORLD_LOCAL_RANK=3, OMPI_COMM_WORLD_LOCAL_SIZE=8,
    PMIX_RANK=3, PMIX_NAMESPACE="prterun-host-77@1", PMIX_SERVER_URI41="tcp",
)  # fmt: skip
PMI = dict(PMI_RANK=3, PMI_SIZE=8, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=2)
SLURM = dict(
    SLURM_PROCID=3, SLURM_NTASKS=8, SLURM_STEP_NUM_TASKS=8, SLURM_LOCALID=3, SLURM_JOB_ID=42, SLURM_STEP_ID=0,
    SLURM_NNODES=1,
)  # fmt: skip
BY_TORCHRUN = Launch("torchrun", 3, 8, 1, 2, "run7.1", "node0", 29500, True)
BY_OPENMPI = Launch("openmpi", 3, 8, 3, 8, "prterun-host-77@1")
BY_SLURM = Launch("slurm", 3, 8, 3, 8, "42.0")


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, Launch()),
        (TORCHRUN, BY_TORCHRUN),
        (ENV, Launch("env", 3, 8, address="node0", port=29500)),
        (OPENMPI, BY_OPENMPI),
        (PMI, Launch("pmi", 3, 8, 1, 2, f"parent{os.getppid()}")),
        (SLURM, BY_SLURM),
        ({**SLURM, "PMIX_RANK": 3, "PMIX_SERVER_URI2": "tcp"}, BY_SLURM),
        ({**SLURM, "SLURM_NNODES": 2}, Launch("slurm", 3, 8, 3, -1, "42.0")),
        # The step's own numbers count, not those of the job around it.
        ({**SLURM, "SLURM_NTASKS": 64, "SLURM_NNODES": 8, "SLURM_STEP_NUM_NODES": 1}, BY_SLURM),
        # A shell of sbatch (no step) or salloc (an interactive one) is not a launch.
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, Launch()),
        ({**SLURM, "SLURM_STEP_ID": 0xFFFFFFFA}, Launch()),
        ({**SLURM, "SLURM_STEP_ID": 0xFFFFFFFB}, Launch()),
        # Half a dialect is somebody else's variable.
        ({"RANK": 1}, Launch()),
        ({"PMIX_RANK": 0}, Launch()),
        # A launcher started by another one hides it.
        ({**TORCHRUN, **OPENMPI, "OMPI_COMM_WORLD_SIZE": 4}, BY_TORCHRUN),
        ({**OPENMPI, **SLURM, "SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 2}, BY_OPENMPI),
    ],
)  # fmt: skip
def test_dialects(monkeypatch: pytest.MonkeyPatch, variables: dict[str, object], wanted: Launch) -> None:
    _set(monkeypatch, **variables)
    assert launcher() == wanted
    assert wanted.one_host == (wanted.size == 1 or wanted.local_size == wanted.size)


def test_a_launch_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _set(monkeypatch, **OPENMPI)
    with caplog.at_level("INFO", "commbackend"):
        launcher()
        launcher()
    assert [r.getMessage() for r in caplog.records] == [
        "commbackend: launched by openmpi: rank 3 of 8 (local rank 3 of 8)"
    ]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**ENV, **OPENMPI, "OMPI_COMM_WORLD_RANK": 2, "PMIX_RANK": 2}, ["env: rank 3 of 8", "openmpi: rank 2 of 8"]),
        ({**ENV, **SLURM, "SLURM_STEP_NUM_TASKS": 4}, ["env: rank 3 of 8", "slurm: rank 3 of 4"]),
        ({**OPENMPI, **PMI, "PMI_SIZE": 4}, ["openmpi: rank 3 of 8", "pmi: rank 3 of 4"]),
        # World 1 under a launcher of several.
        ({**OPENMPI, "RANK": 0, "WORLD_SIZE": 1}, ["env: rank 0 of 1", "openmpi: rank 3 of 8"]),
        ({**OPENMPI, **TORCHRUN, "RANK": 0, "WORLD_SIZE": 1}, ["torchrun: rank 0 of 1", "openmpi: rank 3 of 8"]),
        ({**OPENMPI, "PMIX_RANK": 1}, ["PMIX_RANK = 1", "openmpi: rank 3 of 8"]),
        ({"PMIX_RANK": 1, "PMIX_SERVER_URI41": "tcp"}, ["PMIX_RANK = 1", "WORLD_SIZE"]),
        ({"RANK": "one", "WORLD_SIZE": 2}, ["RANK = 'one'", "integer"]),
        ({"RANK": 2, "WORLD_SIZE": 2}, ["env", "rank 2 of 2"]),
        ({**ENV, "MASTER_PORT": "http"}, ["MASTER_PORT = 'http'"]),
    ],
)
def test_what_disagrees_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, object], words: list[str]
) -> None:
    _set(monkeypatch, **variables)
    with pytest.raises(ConfigError) as e:
        launcher()
    assert all(w in str(e.value) for w in words), e.value


def test_the_cache_is_where_xdg_says_or_below_home_or_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert config.cache_folder() == Path("/somewhere/commbackend")
    monkeypatch.setenv("HOME", "/home/somebody")
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert config.cache_folder() == Path("/home/somebody/.cache/commbackend")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user id that nobody knows
    assert config.cache_folder() is None


def test_the_short_name_of_the_log_level_prints_without_the_application_logging() -> None:
    """COMMBACKEND_LOG=info: what is logged must be seen, also where nobody configured logging."""
    code = "import logging; from commbackend.config import resolve; resolve();"
    code += " logging.getLogger('commbackend').info('seen')"
    root = str(Path(__file__).parent.parent)
    for level, seen in (("info", "seen\n"), ("warning", "")):
        env = {"COMMBACKEND_LOG": level, "PYTHONPATH": root}
        said = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True
        )
        assert said.stderr == seen
