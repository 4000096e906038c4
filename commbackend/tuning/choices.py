"""Choices that were measured or exported, and the files they are kept in.

A file is JSON and nothing in it is executed. The cache is ``$XDG_CACHE_HOME/commbackend`` (``~/.cache/commbackend``),
one file for every combination of device, transport, ranks, hosts and versions; it is written under another name and
renamed, so that jobs that run at the same time replace each other's file whole. A file that is damaged, or was made for
something else, is passed over with one line in the log.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import cache_folder
from ..errors import ConfigError
from ..plan import Knobs, Problem
from .costs import CostTable
from .keys import Key, key_of

if TYPE_CHECKING:
    from ..communicator import Communicator

__all__ = ["FORMAT", "Choices", "Entry", "cache_path", "identity", "load", "read_cache", "save", "shared"]

log = logging.getLogger("commbackend")

#: First entry of every file; another number means that old readers would misread it.
FORMAT = "commbackend-choices-1"
#: A choice holds for buckets up to this factor of rows away, where none is nearer.
_REACH = 2.0
#: No file of choices is larger.
_MOST_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """What one layer's calls of one key get.

    Attributes:
        key: Which calls (``keys.Key.text``).
        knobs: What they get.
        layer, phase: As in ``Communicator.configure``; "" where the layer makes no difference.
        us: Time measured, slowest rank, median; 0 if it was not measured.
        others: (knobs as text, time) of what was measured beside it, fastest first.
        source: Where it comes from, for ``explain``.
        stock: torch.distributed's own collective and the product, one after the other, were fastest.
    """

    key: str
    knobs: Knobs
    layer: str = ""
    phase: str = ""
    us: float = 0.0
    others: tuple[tuple[str, float], ...] = ()
    source: str = "measurement of this run"
    stock: bool = False


@dataclass(frozen=True)
class Choices:
    """Entries, what they were made on, and the costs that were measured there."""

    entries: tuple[Entry, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)
    costs: CostTable | None = None

    def __post_init__(self) -> None:
        by: dict[tuple[str, str, str], list[tuple[int, Entry]]] = {}
        for entry in self.entries:
            key = Key.parse(entry.key)
            by.setdefault((entry.layer, entry.phase, key.stem), []).append((key.rows, entry))
        object.__setattr__(self, "_by", by)

    def find(self, problem: Problem, layer: str = "", phase: str = "") -> Entry | None:
        """The entry for ``problem``: this layer's, else any layer's; of its bucket of rows, else of the nearest one."""
        key = key_of(problem)
        by: Mapping[tuple[str, str, str], list[tuple[int, Entry]]] = self._by  # type: ignore[attr-defined]
        for where in dict.fromkeys(((layer, phase), (layer, ""), ("", ""))):
            found = by.get((*where, key.stem))
            if found:
                rows, entry = min(found, key=lambda f: abs(math.log2((f[0] or 0.5) / (key.rows or 0.5))))
                if max(rows, key.rows) <= _REACH * min(rows, key.rows) or rows == key.rows:
                    return entry
        return None

    def merged(self, entries: Iterable[Entry], costs: CostTable | None = None) -> Choices:
        """These choices with ``entries`` in the place of those for the same calls."""
        by = {(e.layer, e.phase, e.key): e for e in (*self.entries, *entries)}
        return Choices(tuple(by.values()), self.machine, costs or self.costs)

    def to_json(self) -> str:
        """Return the choices as JSON; ``from_json`` reads them."""
        entries = [dataclasses.asdict(e) for e in self.entries]
        costs = None if self.costs is None else json.loads(self.costs.to_json())
        return json.dumps(
            {"format": FORMAT, "machine": dict(self.machine), "entries": entries, "costs": costs}, indent=1
        )

    @staticmethod
    def from_json(text: str, *, source: str = "") -> Choices:
        """Read what ``to_json`` wrote; ``source`` replaces the entries' own. Raises ConfigError; executes nothing."""
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise ValueError(f"another format than {FORMAT}")
            entries = tuple(_entry(e, source) for e in raw["entries"])
            costs = None if raw["costs"] is None else CostTable.from_json(json.dumps(raw["costs"]))
            return Choices(entries, {str(k): str(v) for k, v in raw["machine"].items()}, costs)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
            raise ConfigError(f"not a file of choices: {type(e).__name__}: {e}") from e


def _entry(raw: Any, source: str) -> Entry:
    knobs = Knobs(**raw["knobs"])
    for f in dataclasses.fields(Knobs):
        if type(getattr(knobs, f.name)) is not {"str": str, "int": int, "bool": bool}[str(f.type)]:
            raise ValueError(f"knob {f.name}={getattr(knobs, f.name)!r}")
    Key.parse(raw["key"])
    others = tuple((str(name), float(us)) for name, us in raw["others"])
    layer, phase = str(raw["layer"]), str(raw["phase"])
    where = source or str(raw["source"])
    return Entry(str(raw["key"]), knobs, layer, phase, float(raw["us"]), others, where, raw["stock"] is True)


# -- files
def load(path: str | Path, *, source: str = "") -> Choices:
    """Read a file of choices. Raises ConfigError naming the file."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_MOST_NBYTES + 1)
        if len(raw) > _MOST_NBYTES:
            raise ConfigError(f"more than {_MOST_NBYTES} bytes")
        return Choices.from_json(raw.decode("utf-8"), source=source or f"file {path}")
    except (OSError, UnicodeDecodeError, ConfigError) as e:
        raise ConfigError(f"choices {str(path)!r}: {e}") from e


def save(choices: Choices, path: str | Path) -> None:
    """Write a file of choices: whole, or not at all. Raises ConfigError naming the file."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(choices.to_json(), encoding="utf-8")
        os.replace(beside, path)
    except OSError as e:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"choices {str(path)!r} cannot be written: {e}") from e


def identity(comm: Communicator) -> dict[str, str]:
    """What choices depend on: versions, device, transport, ranks, hosts. The same text on all ranks of one kind."""
    import torch

    from .. import __version__

    hosts = comm.choice.hosts if comm.choice is not None else ()
    cuda = comm.device.type == "cuda"
    return {
        "commbackend": __version__,
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda) if cuda else "",
        "device": torch.cuda.get_device_name(comm.device) if cuda else f"cpu {_cpu()}",
        "threads": "" if cuda else str(torch.get_num_threads()),
        "transport": comm.transport,
        "ranks": str(comm.size),
        "hosts": ",".join(str(list(hosts).count(h)) for h in dict.fromkeys(hosts)),
        "numerics": comm.config.numerics,
        "sharing": str(comm.caps.sharing),
    }


def shared(comm: Communicator) -> Choices | None:
    """The choices that rank 0's ``choices`` setting names, on all ranks. Collective.

    Raises:
        ConfigError: Rank 0 was given a file that cannot be read; on all ranks.
    """
    said = b""
    if comm.rank == 0 and comm.config.choices != "off":
        try:
            here = comm.config.choices
            found = read_cache(cache_folder(), identity(comm)) if here == "auto" else load(here)
            said = b"" if found is None else b"+" + found.to_json().encode()
        except ConfigError as e:
            said = b"-" + str(e).encode()
    if comm.size > 1:
        said = comm.group.exchange(said, what="choices")[0]
    if said[:1] == b"-":
        raise ConfigError(f"rank 0: {said[1:].decode('utf-8', 'replace')}")
    return Choices.from_json(said[1:].decode()) if said else None


def _cpu() -> str:
    from ..bench.facts import cpu

    return f"{cpu()}, {len(os.sched_getaffinity(0))} cores"


def cache_path(folder: Path, machine: Mapping[str, str]) -> Path:
    """The file in the cache ``folder`` for what ``machine`` (``identity``) says."""
    text = "\n".join(f"{k}={v}" for k, v in sorted(machine.items()))
    return folder / f"choices-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def read_cache(folder: Path | None, machine: Mapping[str, str]) -> Choices | None:
    """The choices cached for ``machine``, or None; what is damaged or another's is passed over with a line."""
    if folder is None:
        return None
    path = cache_path(folder, machine)
    try:
        if not path.exists():
            return None
        found = load(path, source="cache of commbackend tune")
    except (ConfigError, OSError) as e:
        log.warning("commbackend: %s; it is ignored", e)
        return None
    if dict(found.machine) != dict(machine):
        differing = sorted(k for k in {*machine, *found.machine} if machine.get(k) != found.machine.get(k))
        log.warning("commbackend: %s was made for another %s; it is ignored", path, ", ".join(differing))
        return None
    return found
