"""What a benchmark was measured on, for its file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from .. import __version__

__all__ = ["cpu", "machine", "versions"]


def machine() -> dict[str, Any]:
    """Return what a benchmark ran on, and the load before it."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    load = [round(x, 2) for x in os.getloadavg()]
    return {"cpu": cpu(), "cores": cores, "memory_nbytes": memory, "system": platform.platform(), "load": load}


def cpu() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []  # not Linux
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return what a benchmark ran with."""
    found = {"commbackend": __version__, "commit": _commit(), "Python": platform.python_version()}
    for name in ("torch", "numpy", "mpi4py"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _commit() -> str:
    """The checkout this package runs from, with "+" if it has changes; "" if it is none."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        said = [
            subprocess.run(["git", "-C", str(root), *c], capture_output=True, text=True, timeout=30, check=True).stdout
            for c in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", "commbackend"])
        ]
    except (OSError, subprocess.SubprocessError):
        return ""  # git is not installed, or will not read this checkout
    return said[0].strip() + ("+" if said[1].strip() else "")
