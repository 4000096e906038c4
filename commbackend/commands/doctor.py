"""``commbackend doctor``: what works here, what does not and why, with the sizes, versions and settings that matter.

Under torchrun, mpirun or srun every rank looks at its own process, all try the transports on each other, and rank 0
prints one report, with a map of the ranks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, flight, reach, registry
from ..config import Config, launcher, resolve, settings, unknown_variables
from ..errors import CommBackendError, ConfigError, Unavailable
from ..group import resolve_group
from ..topology import Topology, survey

if TYPE_CHECKING:
    import torch

__all__ = ["examine", "main", "show_versions", "versions"]

# Distributions whose version matters, by the name shown.
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "numpy": ("numpy",),
    "triton": ("triton",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "cuda-bindings": ("cuda-bindings",),
    "nvshmem4py": ("nvshmem4py-cu13", "nvshmem4py-cu12"),
    "mpi4py": ("mpi4py",),
    "rich": ("rich",),
    "matplotlib": ("matplotlib",),
}

Report = dict[str, Any]
#: Dialects of launchers that start MPI jobs.
MPI_LAUNCHERS = ("openmpi", "pmi")


def examine() -> Report:
    """Return what this process finds about itself. Local; leaves nothing behind.

    The keys: "launch", "host", "transports" and "gemm" (name -> usable, reason, hint, device), "sizes", "gpus",
    "versions", "config" (field -> value, source), "unknown_variables", "config_error".
    """
    launch = launcher()
    report: Report = {
        "launch": {
            "dialect": launch.dialect,
            "rank": launch.rank,
            "size": launch.size,
            "local_rank": launch.local_rank,
        },
        "host": socket.gethostname(),
        "transports": _probe_all("transport"),
        "gemm": _probe_all("gemm"),
        "sizes": _sizes(),
        "gpus": _gpus(),
        "versions": versions(),
        "config": {},
        "unknown_variables": unknown_variables(),
        "config_error": "",
    }
    try:
        config = resolve()
        report["config"] = {
            f.name: {"value": getattr(config, f.name), "source": config.sources[f.name]} for f in settings()
        }
    except ConfigError as e:
        report["config_error"] = str(e)
    return report


def _probe_all(kind: str) -> dict[str, dict[str, Any]]:
    import torch

    found: dict[str, dict[str, Any]] = {}
    has_cuda = torch.cuda.is_available()
    for name in registry.names(kind) + registry.third_party(kind):
        entry = registry.entry(kind, name)
        row: dict[str, Any] = {"device": entry.device, "usable": False, "reason": "", "hint": ""}
        try:
            cls: Any = registry.transport(name) if kind == "transport" else registry.gemm(name)
            if kind == "transport" and entry.device == "any":
                row["device"] = cls.caps.device  # a third party's entry point says nothing about it
            types = [row["device"]]
            if row["device"] == "any":
                types = ["cpu", "cuda"] if has_cuda else ["cpu"]
            for device in types:
                cls.probe(torch.device(device))
            row["usable"] = True
        except Unavailable as e:
            row |= {"reason": e.reason, "hint": e.hint}
        except Exception as e:  # a provider's own bug must not hide what the others say
            row["reason"] = f"its probe raised {type(e).__name__}: {e}"
        row["automatic"] = entry.auto >= 0
        found[name] = row
    return found


# -- facts
# --------------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return name -> version of everything that matters here, "" for what is not installed. Imports only torch."""
    found = {
        "commbackend": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for name, distributions in _DISTRIBUTIONS.items():
        found[name] = ""
        for distribution in distributions:
            try:
                found[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    import torch

    found["torch"] = torch.__version__  # with the local part that its metadata may lack
    found["cuda"] = torch.version.cuda or ""
    found["nccl"] = ""
    if torch.cuda.is_available():
        nccl: Any = torch.cuda.nccl
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found


def show_versions() -> None:
    """Print the versions of everything that matters, for bug reports."""
    for name, version in versions().items():
        print(f"{name:<14} {version or 'not installed'}")


def _sizes() -> dict[str, Any]:
    """Return limits of this process and its host; bytes, or -1 for unlimited or unknown."""
    shm = {"total_nbytes": -1, "free_nbytes": -1}
    try:
        stat = os.statvfs("/dev/shm")
        shm = {"total_nbytes": stat.f_blocks * stat.f_frsize, "free_nbytes": stat.f_bavail * stat.f_frsize}
    except OSError:
        shm["total_nbytes"] = 0  # no /dev/shm here
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "dev_shm": shm,
        "open_files": {"soft": soft, "hard": hard},
        "memlock_nbytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_limit_nbytes": _cgroup_limit(),
    }


def _cgroup_limit() -> int:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        # Version 1 says "no limit" by a number near 2**63.
        return int(text) if text.isdigit() and int(text) < 1 << 60 else -1
    return -1


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append({"name": about.name, "uuid": str(about.uuid), "memory_nbytes": about.total_memory})
    return found


# -- the report
# --------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return 0 if some transport works on every rank, else 1. Collective under a launcher."""
    parser = argparse.ArgumentParser(prog="commbackend doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="how long to wait for other ranks (default 60)")
    parser.add_argument("--pid", type=int, help="print, as JSON, what process PID and its peers here are doing")
    args = parser.parse_args(argv)
    if args.pid is not None:
        print(json.dumps(flight.observe(args.pid), indent=2))
        return 0
    reports, world = _gather(examine(), args.timeout_s)
    if not reports:
        return 0  # rank 0 prints
    usable = [n for n in reports[0]["transports"] if all(r["transports"][n]["usable"] for r in reports)]
    if args.json:
        about = {"ranks": reports, "hosts": world.where.hosts, "domains": world.where.domains, "usable": usable}
        maps = {device: reach.as_json(found) for device, found in world.pairs.items()}
        print(json.dumps({**about, "pairs": maps, "problem": world.problem}, indent=2))
    else:
        print("\n".join(_render(reports, world)))
    return 0 if usable and not world.problem and not any(r["config_error"] for r in reports) else 1


@dataclass(frozen=True)
class World:
    """What the ranks found out together: where they are, device type -> which pairs connect, and what went wrong."""

    where: Topology
    pairs: dict[str, dict[tuple[int, int], reach.Verdict]] = field(default_factory=dict)
    problem: str = ""


def _gather(report: Report, timeout_s: float) -> tuple[list[Report], World]:
    """Return all ranks' reports (rank 0; none elsewhere) and what they found out together. Collective."""
    launch = report["launch"]
    if launch["size"] == 1:
        return [report], World(Topology((0,)))
    try:
        # No transport is chosen, so the settings about that do not count here.
        group = resolve_group(_meeting(launch["dialect"]), name="doctor", config=Config(init_timeout_s=timeout_s))
        reports = [json.loads(raw) for raw in group.exchange(json.dumps(report).encode(), timeout_s=timeout_s)]
        devices = _devices(reports, group.rank)
        where = survey(group, device=devices[-1], timeout_s=timeout_s)
        found = {d.type: reach.pairs(group, d, _probes(reports), where, Config(), timeout_s) for d in devices}
        group.close()
    except CommBackendError as e:
        return ([report], World(Topology((0,)), problem=str(e))) if launch["rank"] == 0 else ([], World(Topology((0,))))
    return (reports, World(where, found)) if launch["rank"] == 0 else ([], World(where))


def _meeting(dialect: str) -> Any:
    """Where the ranks meet: MPI's world in an MPI job whose mpi4py works, else the place that the launcher names."""
    if dialect not in MPI_LAUNCHERS:
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError):
        return None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.Get_size() > 1 else None


def _devices(reports: list[Report], rank: int) -> list[torch.device]:
    """The CPU, and this rank's GPU where every rank has one."""
    import torch

    devices = [torch.device("cpu")]
    if all(r["gpus"] for r in reports):
        local = max(reports[rank]["launch"]["local_rank"], 0)
        devices.append(torch.device("cuda", local % len(reports[rank]["gpus"])))
        torch.cuda.set_device(devices[-1])
    return devices


def _probes(reports: list[Report]) -> list[dict[str, str]]:
    """For every rank, transport -> why it cannot use it, or ""."""
    found = []
    for report in reports:
        reasons = {n: "" if t["usable"] else t["reason"] for n, t in report["transports"].items()}
        # Connecting it would start MPI, which outside an MPI job may end the process.
        if not reasons.get("mpi") and report["launch"]["dialect"] not in MPI_LAUNCHERS:
            reasons["mpi"] = f"the launcher ({report['launch']['dialect']}) is not MPI's"
        found.append(reasons)
    return found


def _render(reports: list[Report], world: World) -> list[str]:
    first = reports[0]
    out = [f"commbackend {__version__}: {len(reports)} rank{'s' if len(reports) > 1 else ''}"]
    if world.problem:
        out += ["", f"The other ranks were not reached: {world.problem}"]
    if len(reports) > 1:
        out += _places(reports, world.where)
    for device, found in world.pairs.items():
        out += ["", f"Map for {device} tensors: the fastest transport that connects each pair, as tried"]
        out += reach.draw(found, world.where.hosts)
    for kind, title in (("transports", "Transports"), ("gemm", "GEMM providers")):
        out += ["", title, *_table(["name", "for", "usable", "reason"], _verdicts(reports, kind))]
    sizes = first["sizes"]
    rows = [
        ["/dev/shm", f"{_mib(sizes['dev_shm']['free_nbytes'])} free of {_mib(sizes['dev_shm']['total_nbytes'])}"],
        ["memory", f"{_mib(sizes['memory_nbytes'])}, limit {_mib(sizes['memory_limit_nbytes'])}"],
        ["locked memory", _mib(sizes["memlock_nbytes"])],
        ["open files", f"{sizes['open_files']['soft']} (may be raised to {sizes['open_files']['hard']})"],
        ["cpus", str(sizes["cpus"])],
        ["gpus", _gpu_names(first) or "none"],
    ]
    out += ["", "Sizes" + (" (rank 0)" if len(reports) > 1 else ""), *_table([], rows)]
    out += ["", "Versions", *_table([], [[n, v or "not installed"] for n, v in first["versions"].items()])]
    out += [f"  rank {r}: {d}" for r, d in _different(reports, "versions")]
    shown = {n: "unset" if c["value"] in (None, "") else str(c["value"]) for n, c in first["config"].items()}
    rows = [[n, shown[n], c["source"]] for n, c in first["config"].items()]
    out += ["", "Configuration", *_table(["field", "value", "from"], rows)]
    out += [f"  rank {r}: {d}" for r, d in _different(reports, "config")]
    for rank, report in enumerate(reports):
        out += [f"  rank {rank}: unknown variable {v}{hint}" for v, hint in report["unknown_variables"].items()]
        out += [f"  rank {rank}: {report['config_error']}"] if report["config_error"] else []
    return out


def _places(reports: list[Report], where: Topology) -> list[str]:
    head = ["rank", "host", "NVLink domain", "name", "GPU used", "GPUs seen"]
    rows = []
    for rank, report in enumerate(reports):
        gpu = where.places[rank].gpu if where.places else ""
        domain = str(where.domains[rank]) if gpu else "-"
        rows.append([str(rank), str(where.hosts[rank]), domain, report["host"], gpu or "-", _gpu_names(report) or "-"])
    out = ["", "Ranks (hosts as proven by reaching each other)", *_table(head, rows)]
    shared = where.sharing().items()
    return [*out, *(f"  ranks {', '.join(map(str, ranks))} use one GPU: {gpu}" for gpu, ranks in shared)]


def _verdicts(reports: list[Report], kind: str) -> list[list[str]]:
    """Return name, device, usable, reason; ranks with the same verdict share a row."""
    rows = []
    for name, about in reports[0][kind].items():
        by_verdict: dict[tuple[bool, str, str], list[int]] = {}
        for rank, report in enumerate(reports):
            v = report[kind].get(name, {"usable": False, "reason": "not known at this rank", "hint": ""})
            by_verdict.setdefault((v["usable"], v["reason"], v["hint"]), []).append(rank)
        for (usable, reason, hint), ranks in by_verdict.items():
            where = "" if len(ranks) == len(reports) else f" (rank {', '.join(map(str, ranks))})"
            text = "" if about["automatic"] else "only by name"
            if reason:
                text = f"{reason} -> {hint}" if hint else reason
            rows.append([name, about["device"], ("yes" if usable else "no") + where, text])
    return rows


def _different(reports: list[Report], key: str) -> list[tuple[int, str]]:
    """Return (rank, "name value") for what differs from rank 0."""
    out = []
    for rank, report in enumerate(reports[1:], 1):
        for name, value in report[key].items():
            if value != reports[0][key].get(name):
                out.append((rank, f"{name} is {value['value'] if isinstance(value, dict) else value}"))
    return out


def _gpu_names(report: Report) -> str:
    names = [g["name"] for g in report["gpus"]]
    return ", ".join(f"{names.count(n)} x {n}" for n in sorted(set(names)))


def _mib(nbytes: int) -> str:
    return "unlimited" if nbytes < 0 else f"{nbytes / (1 << 20):,.0f} MiB"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return rows as aligned lines; the last column is free. Heads are bold on a terminal."""
    every = ([head] if head else []) + rows
    widths = [max(len(row[i]) for row in every) for i in range(len(every[0]) - 1)] if every else []
    lines = ["  " + "  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[-1]]).rstrip() for row in every]
    if head and sys.stdout.isatty():
        lines[0] = f"\033[1m{lines[0]}\033[0m"
    return lines
