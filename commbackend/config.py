"""Configuration: what can be set, where a value came from, and which launcher started this process.

This is the only module that reads the environment; nothing in commbackend writes it. Precedence: an argument of
``init`` wins over ``COMMBACKEND_<FIELD>``, which wins over the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import logging
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConfigError

__all__ = ["PREFIX", "Config", "Launch", "cache_folder", "launcher", "reference", "resolve", "unknown_variables"]

log = logging.getLogger("commbackend")

#: Every variable commbackend reads for itself starts so.
PREFIX = "COMMBACKEND_"
#: The short name of the log level's variable.
_LOG = PREFIX + "LOG"

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*(\+[A-Za-z][A-Za-z0-9_.-]*)?")


def _names(*alone: str) -> Callable[[Any], str]:
    """Parser of a comma list of names; each of ``alone`` is allowed only by itself."""

    def parse(raw: Any) -> str:
        parts = [p.strip() for p in str(raw).split(",")]
        if not all(_NAME.fullmatch(p) for p in parts) or len(set(parts)) != len(parts):
            raise ValueError
        if len(parts) > 1 and any(p in alone for p in parts):
            raise ValueError
        return ",".join(parts)

    return parse


def _one_of(*values: str) -> Callable[[Any], str]:
    def parse(raw: Any) -> str:
        text = str(raw).strip().lower()
        if text not in values:
            raise ValueError
        return text

    return parse


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(raw: Any) -> int:
        if isinstance(raw, (float, bool)) or not low <= int(raw) <= high:
            raise ValueError
        return int(raw)

    return parse


def _seconds(raw: Any) -> float:
    value = float(raw)
    if isinstance(raw, bool) or not 0 < value <= 1e6:  # more does not fit the counters of stores and sockets
        raise ValueError
    return value


def _boolean(raw: Any) -> bool:
    text = str(raw).strip().lower()
    if text not in _TRUE + _FALSE:
        raise ValueError
    return text in _TRUE


def _setting(default: Any, parse: Callable[[Any], Any], accepts: str, doc: str, *, agreed: bool = True) -> Any:
    """A field of Config. ``agreed``: all ranks of a communicator must have the same value."""
    return field(default=default, metadata={"parse": parse, "accepts": accepts, "doc": doc, "agreed": agreed})


def _signal_name(raw: object) -> str:
    name = str(raw).strip().upper().removeprefix("SIG")
    if name and (f"SIG{name}" not in signal.Signals.__members__ or name in ("KILL", "STOP")):
        raise ValueError(raw)
    return name


@dataclass(frozen=True)
class Config:
    """The resolved settings of one communicator. Made by ``resolve``; every field is ``COMMBACKEND_<FIELD>`` too."""

    transport: str = _setting(
        "auto",
        _names("auto", "off"),
        "'auto', 'off', a transport's name, two joined by +, or a comma list of these in order of preference",
        "How bytes move. auto: the first transport that works on every rank; one name: that or an error; shm+gloo: two"
        " levels, the first within hosts and the second between them; a list: the first of it that works on every rank;"
        " off: the stock path of torch.distributed.",
    )
    gemm: str = _setting(
        "auto",
        _names("auto"),
        "'auto', a GEMM provider's name, or a comma list of names in order of preference",
        "Which library or kernel multiplies.",
    )
    schedule: str = _setting(
        "auto",
        _names("auto"),
        "'auto' or a schedule's name",
        "Which schedule runs, in the operations that have one of that name.",
    )
    chunks: int = _setting(
        0,
        _integer(0, 32),
        "an integer 0...32; 0 chooses automatically",
        "Chunks a shard is cut into for each peer. More chunks overlap earlier and cost more per call.",
    )
    lanes: int = _setting(
        -1,
        _integer(-1, 16),
        "an integer -1...16; -1 chooses automatically",
        "Copy lanes (worker threads or streams) beside the caller's own; 0 runs everything in the caller's lane.",
    )
    polling: str = _setting(
        "auto",
        _one_of("auto", "never", "always"),
        "'auto', 'never' or 'always'",
        "auto: on GPUs, kernels that poll flags are used where they are expected to win; always: wherever there is such"
        " a form; never: kernels are launched only when everything they read is there.",
    )
    timeout_s: float | None = _setting(
        None,
        _seconds,
        "seconds, a number > 0 and up to 1e6",
        "Deadline of every wait in a call. Unset: the process group's timeout.",
    )
    init_timeout_s: float | None = _setting(
        None,
        _seconds,
        "seconds, a number > 0 and up to 1e6",
        "Deadline of init, all its steps together. Unset: the process group's timeout.",
    )
    numerics: str = _setting(
        "fixed",
        _one_of("fixed", "library"),
        "'fixed' or 'library'",
        "fixed: sums run in rank order with fp32 accumulation, the same bits on all ranks; library: a transport's own"
        " reduction may be used, in the order of its library.",
    )
    batch_invariant: bool = _setting(
        False,
        _boolean,
        "1/0, true/false, yes/no or on/off",
        "The bits of a row of a result do not depend on how many rows are multiplied with it, nor on chunks or"
        " schedule. On CPUs; products are slower (docs/reliability.md). Gradients of weights are sums over rows and"
        " not meant.",
    )
    interface: str = _setting(
        "",
        lambda raw: str(raw).strip().split(",")[0],
        "a network interface's name or an address of this host",
        "What gloo uses between hosts. Unset: GLOO_SOCKET_IFNAME, or the only interface besides loopback.",
        agreed=False,
    )
    log_level: str = _setting(
        "default",
        _one_of("default", "debug", "info", "warning", "error"),
        "'default', 'debug', 'info', 'warning' or 'error'",
        "Level of the logger 'commbackend'; default leaves it as the application set it. COMMBACKEND_LOG is the same."
        " Where the application logs nothing, lines go to stderr.",
        agreed=False,
    )
    dump_signal: str = _setting(
        "",
        _signal_name,
        "a signal's name, such as USR2, or empty",
        "On this signal a process writes its flight record (what every rank last entered and finished) to stderr, one"
        " line of JSON. Empty: no handler is installed; `commbackend doctor --pid` reads the record from outside.",
        agreed=False,
    )
    strict: bool = _setting(
        False,
        _boolean,
        "1/0, true/false, yes/no or on/off",
        f"Unknown {PREFIX}* variables are errors instead of warnings, and so are calls that the chosen schedule, chunks"
        " or lanes do not fit, which otherwise take the automatic choice.",
        agreed=False,
    )
    check: bool = _setting(
        False,
        _boolean,
        "1/0, true/false, yes/no or on/off",
        "Prove every plan when it is made (slow; for people who write schedules).",
        agreed=False,
    )
    serve: bool = _setting(
        False,
        _boolean,
        "1/0, true/false, yes/no or on/off",
        "The plugins of vLLM and SGLang do something: without it an installed commbackend does not change serving.",
        agreed=False,
    )
    tp_comm_overlap_cfg: str = _setting(
        "",
        lambda raw: str(raw).strip(),
        "the path of a YAML file",
        "A tp-comm-overlap file of TransformerEngine or Megatron, which Megatron's layers then follow.",
        agreed=False,
    )
    allow_shared_device: bool = _setting(
        False,
        _boolean,
        "1/0, true/false, yes/no or on/off",
        "Let several ranks use one GPU; each gets its share of the SMs.",
    )
    choices: str = _setting(
        "auto",
        lambda raw: str(raw).strip() or "auto",
        "'auto', 'off' or a file that tune or export_choices wrote",
        "Which measured choices are used. auto: what `commbackend tune` left in the cache for this kind of machine;"
        " off: none; a file: those. Rank 0's count for all ranks.",
        agreed=False,
    )
    nvtx: bool = _setting(
        False,
        _boolean,
        "1/0, true/false, yes/no or on/off",
        "Every named layer's calls are an NVTX range with the layer's name and the micro-batch, and on GPUs every step"
        " of a call is one with what it does, for Nsight Systems.",
        agreed=False,
    )
    tune: bool = _setting(
        False,
        _boolean,
        "1/0, true/false, yes/no or on/off",
        "Measure the candidates of every call whose sizes are new, before its first time. For tuning runs: it takes"
        " about a second a call.",
    )
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def options(self) -> dict[str, Any]:
        """Return the settings as the ``options`` a transport's ``connect`` takes."""
        return {f.name: getattr(self, f.name) for f in settings()}

    def agreement(self) -> str:
        """Return the settings that all ranks must share, one ``name=value`` a line, in a fixed order."""
        return "\n".join(f"{f.name}={getattr(self, f.name)}" for f in settings() if f.metadata["agreed"])

    def fingerprint(self) -> bytes:
        """Return 16 bytes that are equal for equal ``agreement()``."""
        return hashlib.sha256(self.agreement().encode()).digest()[:16]


def settings() -> list[dataclasses.Field[Any]]:
    """Return the fields of ``Config`` that can be set."""
    return [f for f in dataclasses.fields(Config) if f.name != "sources"]


def reference() -> list[dict[str, str]]:
    """Return one row a field (name, variable, type, default, accepts, doc): what ``docs`` and ``doctor`` print."""
    return [
        {
            "name": f.name,
            "variable": PREFIX + f.name.upper(),
            "type": str(f.type),
            "default": "unset" if f.default is None else str(f.default),
            "accepts": f.metadata["accepts"],
            "doc": f.metadata["doc"],
        }
        for f in settings()
    ]


def cache_folder() -> Path | None:
    """Return the folder that measurements are cached in: ``$XDG_CACHE_HOME/commbackend``, or ``~/.cache``'s.

    None for a process whose user has no home.
    """
    given = os.environ.get("XDG_CACHE_HOME", "").strip()
    if os.path.isabs(given):  # the specification ignores others
        return Path(given, "commbackend")
    home = os.path.expanduser("~")
    return Path(home, ".cache", "commbackend") if os.path.isabs(home) else None  # "~" itself where no home is known


_warned: set[str] = set()


def resolve(**overrides: Any) -> Config:
    """Return the configuration: ``overrides`` (None means not given) > ``COMMBACKEND_*`` > defaults. Local.

    Raises:
        ConfigError: A value is not accepted (names variable or argument, value, and what is accepted); an argument is
            unknown; under ``strict`` also when a ``COMMBACKEND_*`` variable is unknown.
    """
    known = {f.name: f for f in settings()}
    for name in overrides:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigError(f"unknown option {name!r}{hint}; the options are {', '.join(known)}")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, f in known.items():
        variable = PREFIX + name.upper()
        if name == "interface" and not os.environ.get(variable, "").strip():
            variable = "GLOO_SOCKET_IFNAME"  # what gloo's users know already
        if name == "log_level" and not os.environ.get(variable, "").strip():
            variable = _LOG
        if overrides.get(name) is not None:
            values[name], sources[name] = _parse(f, overrides[name], f"argument {name}"), "argument"
        elif os.environ.get(variable, "").strip():
            values[name], sources[name] = _parse(f, os.environ[variable], variable), variable
        else:
            values[name], sources[name] = f.default, "default"
    config = Config(**values, sources=sources)
    for variable, hint in unknown_variables().items():
        if config.strict:
            raise ConfigError(f"unknown variable {variable}{hint}")
        if variable not in _warned:
            _warned.add(variable)
            log.warning("commbackend: unknown variable %s is ignored%s", variable, hint)
    if config.log_level != "default":
        log.setLevel(config.log_level.upper())
        if not log.hasHandlers():  # else lines below a warning would be asked for and never be seen
            log.addHandler(logging.StreamHandler())
    return config


def unknown_variables() -> dict[str, str]:
    """Return every ``COMMBACKEND_*`` variable of this process that means nothing -> " (did you mean ...?)" or ""."""
    known = [*(f.name.upper() for f in settings()), _LOG.removeprefix(PREFIX)]
    found = {}
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable.removeprefix(PREFIX) not in known:
            close = difflib.get_close_matches(variable.removeprefix(PREFIX), known, n=1)  # the prefix resembles itself
            found[variable] = f" (did you mean {PREFIX}{close[0]}?)" if close else ""
    return found


def _parse(f: dataclasses.Field[Any], raw: Any, where: str) -> Any:
    try:
        return f.metadata["parse"](raw)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{where} = {raw!r}: must be {f.metadata['accepts']}") from None


# -- launchers
# --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """Who this process is, as its launcher says.

    Attributes:
        dialect: "torchrun", "env", "openmpi", "pmi", "slurm", or "none" for a process that nobody launched.
        rank, size: Position and number of processes; 0 and 1 for "none".
        local_rank, local_size: The same on this host, or -1 where the launcher does not say.
        job: Text that differs between jobs that run at the same time on one host, or "" where none is known.
        address, port: Where rank 0's store is or shall be (MASTER_ADDR, MASTER_PORT), or "" and 0.
        agent_store: The launcher itself serves a store at ``address``:``port``.
    """

    dialect: str = "none"
    rank: int = 0
    size: int = 1
    local_rank: int = -1
    local_size: int = -1
    job: str = ""
    address: str = ""
    port: int = 0
    agent_store: bool = False

    @property
    def one_host(self) -> bool:
        """Whether the launcher says that all processes run on this host."""
        return self.size == 1 or self.local_size == self.size

    def describe(self) -> str:
        """Return "dialect: rank r of n"."""
        return f"{self.dialect}: rank {self.rank} of {self.size}"


_announced: set[Launch] = set()

#: Step ids from here up are Slurm's own steps (batch script, extern, interactive shell): not a launch by srun.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0


def launcher() -> Launch:
    """Return who the launcher's variables say this process is. Local. Logged once at INFO.

    A launcher started by another one hides it: torchrun under mpirun or srun, mpirun under srun. Otherwise all
    dialects found must agree.

    Raises:
        ConfigError: A variable is not a number; two dialects name different ranks or sizes; one says that this
            process is alone while the other launched several.
    """
    env = os.environ
    found = [launch for launch in (_torch(env), _openmpi(env), _pmi(env), _slurm(env)) if launch is not None]
    _pmix(env, found)
    if not found:
        return Launch()
    first = found[0]
    for other in found[1:]:
        if (first.rank, first.size) == (other.rank, other.size):
            continue
        nested = first.dialect == "torchrun" or (first.dialect in ("openmpi", "pmi") and other.dialect == "slurm")
        if nested and (first.size > 1 or other.size == 1):
            log.debug("commbackend: %s hides %s", first.describe(), other.describe())
            continue
        raise ConfigError(
            f"launchers disagree: {first.describe()}, but {other.describe()}; unset the variables that do not count,"
            " or initialise torch.distributed and pass group="
        )
    if first not in _announced:
        _announced.add(first)
        log.info(
            "commbackend: launched by %s (local rank %d of %d)", first.describe(), first.local_rank, first.local_size
        )
    return first


def _int(env: Mapping[str, str], *names: str, default: int = -1) -> int:
    for name in names:
        raw = env.get(name, "").strip()
        if raw:
            try:
                return int(raw)
            except ValueError:
                raise ConfigError(f"{name} = {raw!r}: must be an integer") from None
    return default


def _made(dialect: str, rank: int, size: int, **more: Any) -> Launch | None:
    if rank < 0 or size < 0:
        return None  # half of a dialect is somebody else's variable
    if not rank < size:
        raise ConfigError(f"the {dialect} variables say rank {rank} of {size}: a rank must be below the size")
    return Launch(dialect, rank, size, **more)


def _torch(env: Mapping[str, str]) -> Launch | None:
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    address, port = env.get("MASTER_ADDR", ""), _int(env, "MASTER_PORT", default=0)
    return _made(
        "torchrun" if run_id else "env",
        _int(env, "RANK"),
        _int(env, "WORLD_SIZE"),
        local_rank=_int(env, "LOCAL_RANK"),
        local_size=_int(env, "LOCAL_WORLD_SIZE"),
        job=f"{run_id}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}" if run_id else "",
        address=address,
        port=port,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
    )


def _openmpi(env: Mapping[str, str]) -> Launch | None:
    return _made(
        "openmpi",
        _int(env, "OMPI_COMM_WORLD_RANK"),
        _int(env, "OMPI_COMM_WORLD_SIZE"),
        local_rank=_int(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=_int(env, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", ""),
        **_address(env),
    )


def _pmix(env: Mapping[str, str], found: list[Launch]) -> None:
    """Check PMIX_RANK. PMIx has no variable for the size: those of Open MPI or Slurm, which come with it, say it."""
    rank = _int(env, "PMIX_RANK")
    if rank < 0 or not any(v.startswith("PMIX_SERVER_URI") for v in env):
        return  # not launched by a PMIx server; a process that initialised MPI by itself has the rank alone
    peers = [f for f in found if f.dialect in ("openmpi", "slurm")]
    if not found:
        raise ConfigError(
            f"PMIX_RANK = {rank}, but no variable says how many processes were launched; set RANK, WORLD_SIZE,"
            " MASTER_ADDR and MASTER_PORT, or pass group="
        )
    if peers and peers[0].rank != rank:
        raise ConfigError(f"launchers disagree: PMIX_RANK = {rank}, but {peers[0].describe()}")


def _pmi(env: Mapping[str, str]) -> Launch | None:
    rank = _int(env, "PMI_RANK")
    return _made(
        "pmi",
        rank,
        _int(env, "PMI_SIZE"),
        local_rank=_int(env, "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        local_size=_int(env, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        job=env.get("PMI_JOBID") or env.get("PALS_APID") or (f"parent{os.getppid()}" if rank >= 0 else ""),
        **_address(env),
    )


def _slurm(env: Mapping[str, str]) -> Launch | None:
    step = _int(env, "SLURM_STEP_ID", "SLURM_STEPID")
    if not 0 <= step < _SLURM_SPECIAL_STEPS:
        return None  # a shell of sbatch or salloc: Slurm's variables describe the allocation, nobody launched ranks
    size = _int(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    nodes = _int(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    return _made(
        "slurm",
        _int(env, "SLURM_PROCID"),
        size,
        local_rank=_int(env, "SLURM_LOCALID"),
        local_size=size if nodes == 1 else -1,
        job=f"{env.get('SLURM_JOB_ID', '')}.{step}",
        **_address(env),
    )


def _address(env: Mapping[str, str]) -> dict[str, Any]:
    return {"address": env.get("MASTER_ADDR", ""), "port": _int(env, "MASTER_PORT", default=0)}
