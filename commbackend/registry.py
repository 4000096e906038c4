"""Names of transports and GEMM providers -> where their classes are.

A table of strings: importing it imports none of them. Third parties add theirs by the entry-point groups
``commbackend.transports`` and ``commbackend.gemm``; an entry point is looked up only when its name is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from .contract import GemmProvider, Transport
from .errors import ConfigError, Unavailable

__all__ = ["GEMMS", "TRANSPORTS", "Entry", "auto_names", "entry", "gemm", "names", "third_party", "transport"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a table.

    Attributes:
        name: What users write.
        target: "module:Class"; a module that starts with "." is ours.
        device: "cpu", "cuda" or "any".
        extra: What ``pip install "commbackend[...]"`` must name for it, or "".
        auto: Place in the automatic choice, smallest first; -1: only by name.
        needs: Module that the application must have imported already for the automatic choice to take it, or "".
    """

    name: str
    target: str
    device: str
    extra: str = ""
    auto: int = -1
    needs: str = ""


TRANSPORTS = (
    Entry("gloo", ".transports.torch_dist:GlooTransport", "cpu", auto=2),
    Entry("local", ".transports.local:LocalTransport", "cpu"),
    Entry("mnnvl", ".transports.mnnvl:MnnvlTransport", "cuda", extra="cu13", auto=1),
    Entry("mpi", ".transports.mpi:MpiTransport", "cpu", extra="mpi", auto=1, needs="mpi4py.MPI"),
    Entry("nccl", ".transports.torch_dist:NcclTransport", "cuda", auto=2),
    Entry("nvshmem", ".transports.nvshmem_:NvshmemTransport", "cuda", extra="cu13"),
    Entry("shm", ".transports.shm:ShmTransport", "cpu", auto=0),
    Entry("userbuffers", ".transports.userbuffers:UserbuffersTransport", "cuda", extra="cu13", auto=0),
)

GEMMS = (
    Entry("torch", ".gemm.torch_mm:TorchMM", "any", auto=0),
    Entry("torch_blocks", ".gemm.torch_blocks:TorchBlocks", "cpu"),
    Entry("triton", ".gemm.triton_tile:TritonTile", "cuda", auto=1),
)

_TABLES = {"transport": TRANSPORTS, "gemm": GEMMS}
_ENTRY_POINTS = {"transport": "commbackend.transports", "gemm": "commbackend.gemm"}

for _table in _TABLES.values():
    if [e.name for e in _table] != sorted({e.name for e in _table}):
        raise AssertionError("registry tables are sorted by name, each name once")


def names(kind: str, device: str | None = None) -> list[str]:
    """Return the built-in names of ``kind`` ("transport" or "gemm"), those for automatic choice on ``device`` first and
    in its order. With ``device`` only those that serve it.
    """
    fit = [e for e in _TABLES[kind] if device is None or e.device in (device, "any")]
    return [e.name for e in sorted(fit, key=lambda e: (e.auto < 0, e.auto, e.name))]


def third_party(kind: str) -> list[str]:
    """Return the names that installed packages add to ``kind`` by entry points. Reads every package's metadata."""
    from importlib.metadata import entry_points

    built_in = {e.name for e in _TABLES[kind]}
    return sorted({p.name for p in entry_points(group=_ENTRY_POINTS[kind])} - built_in)


def auto_names(kind: str, device: str) -> list[str]:
    """Return the names the automatic choice tries on ``device``, in order."""
    entries = {e.name: e for e in _TABLES[kind]}
    return [n for n in names(kind, device) if entries[n].auto >= 0]


def entry(kind: str, name: str) -> Entry:
    """Return the row of ``name``, built in or of a third party. Raises ConfigError (lists the known names)."""
    return next((e for e in _TABLES[kind] if e.name == name), None) or _entry_point(kind, name)


def transport(name: str) -> type[Transport]:
    """Return the class of transport ``name``. Local; imports its module.

    Raises:
        ConfigError: Nobody provides that name (lists the known ones).
        Unavailable: Its module or something that it imports is missing here.
    """
    return _load("transport", name, Transport)


def gemm(name: str) -> type[GemmProvider]:
    """Return the class of GEMM provider ``name``; raises as ``transport`` does."""
    return _load("gemm", name, GemmProvider)


def _load(kind: str, name: str, base: type[Any]) -> type[Any]:
    row = entry(kind, name)
    module, _, attribute = row.target.partition(":")
    full = importlib.util.resolve_name(module, __package__)
    try:
        found = getattr(importlib.import_module(full), attribute)
    except ImportError as e:
        hint = f'pip install "commbackend[{row.extra}]"' if row.extra else ""
        if isinstance(e, ModuleNotFoundError) and e.name == full:
            raise Unavailable(f"this build has no {full}") from e
        raise Unavailable(f"importing {full} failed: {e}", hint) from e
    except AttributeError as e:
        raise Unavailable(f"{full} has no {attribute}") from e
    except Exception as e:  # a third party's module may raise anything while it is imported
        raise Unavailable(f"importing {full} failed: {type(e).__name__}: {e}") from e
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{kind} {name!r}: {row.target} is not a subclass of commbackend.contract.{base.__name__}")
    return found


def _entry_point(kind: str, name: str) -> Entry:
    from importlib.metadata import entry_points

    points = entry_points(group=_ENTRY_POINTS[kind], name=name)
    if points:
        return Entry(name, next(iter(points)).value, "any")
    known = names(kind) + third_party(kind)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(f"unknown {kind} {name!r}{hint}; known: {', '.join(sorted(known))}")
