"""Which transport each pair of ranks can use, and why not a faster one: found out by connecting them and moving bytes.

What a transport cannot reach by its kind (another host, another NVLink domain) is not tried; everything else is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from . import registry, select
from .errors import CommBackendError
from .group import Group

if TYPE_CHECKING:
    import torch

    from .config import Config
    from .topology import Topology

__all__ = ["Verdict", "draw", "pairs"]

_WIDEST_MATRIX = 16
_UNIT = {"host": "they share no host", "nvlink": "no NVLink domain joins them", "process": "they share no process"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a pair of ranks can use.

    Attributes:
        transport: The first that connects the pair, "" if none does.
        passed_over: Name -> reason, for those that would be faster.
    """

    transport: str
    passed_over: Mapping[str, str]


def pairs(
    group: Group,
    device: torch.device,
    probes: Sequence[Mapping[str, str]],
    where: Topology,
    config: Config,
    timeout_s: float,
) -> dict[tuple[int, int], Verdict]:
    """Return a verdict for every pair of ranks. Collective.

    Args:
        device: Whose transports are tried, those of the automatic choice in its order.
        probes: For every rank, transport -> why the rank cannot use it, or "".
        timeout_s: Deadline of each attempt to connect.
    """
    found: dict[tuple[int, int], Verdict] = {}
    lost: dict[tuple[int, int], dict[str, str]] = {pair: {} for pair in combinations(range(group.size), 2)}
    for name in registry.auto_names("transport", device.type):
        scope = _scope(name)
        units = _units(scope, where)
        able = [[r for r in unit if not probes[r].get(name, "unknown here")] for unit in units]
        failed = _try_units(group, name, device, able, where, config, timeout_s)
        for pair, reasons in lost.items():
            if pair not in found:
                reasons[name] = _why(pair, probes, name, units, _UNIT.get(scope, ""), failed)
                if not reasons[name]:
                    del reasons[name]
                    found[pair] = Verdict(name, reasons)
    return {pair: found.get(pair, Verdict("", reasons)) for pair, reasons in lost.items()}


def _scope(name: str) -> str:
    try:
        return registry.transport(name).caps.scope
    except CommBackendError:
        return "cluster"  # its probe has said why it is not there


def _units(scope: str, where: Topology) -> list[list[int]]:
    """The sets of ranks within which a transport of that scope could reach."""
    ranks = range(len(where.hosts))
    of: Sequence[int] = {"host": where.hosts, "nvlink": where.domains, "process": ranks}.get(scope, [0] * len(ranks))
    return [[r for r in ranks if of[r] == unit] for unit in sorted(set(of))]


def _try_units(
    group: Group,
    name: str,
    device: torch.device,
    units: Sequence[Sequence[int]],
    where: Topology,
    config: Config,
    timeout_s: float,
) -> list[str]:
    """Connect the ranks of each unit, all units at once. Returns, for every rank, why its unit does not connect."""
    mine = next((unit for unit in units if group.rank in unit), ())
    said: dict[int, str] = {}
    if len(mine) > 1:
        label = f"reach/{name}/{mine[0]}"
        part = Group.from_store(group.store, mine.index(group.rank), len(mine), timeout_s=timeout_s, name=label)
        places = tuple(where.places[r] for r in mine) if where.places else ()
        inside = type(where)(tuple(where.hosts[r] for r in mine), places)
        try:
            said = select.attempt(name, part, device, config, inside, timeout_s)
        except CommBackendError as e:
            said = {mine.index(group.rank): str(e)}
    first = min(said, default=-1)
    reason = f"rank {mine[first]}: {said[first]}" if said else ""
    votes = group.exchange(json.dumps(reason).encode(), timeout_s=2 * timeout_s, what=f"attempt at {name}")
    return [str(json.loads(vote)) for vote in votes]


def _why(
    pair: tuple[int, int],
    probes: Sequence[Mapping[str, str]],
    name: str,
    units: Sequence[Sequence[int]],
    apart: str,
    failed: Sequence[str],
) -> str:
    reasons = {rank: probes[rank].get(name, "unknown here") for rank in pair}
    for rank, reason in reasons.items():
        if reason:
            return reason if len(set(reasons.values())) == 1 else f"rank {rank}: {reason}"
    if not any(pair[0] in unit and pair[1] in unit for unit in units):
        return apart
    return failed[pair[0]] or failed[pair[1]]


# -- the picture
# --------------------------------------------------------------------------------------------------------------


def draw(verdicts: Mapping[tuple[int, int], Verdict], hosts: Sequence[int]) -> list[str]:
    """Return the map as lines: a matrix where it is not too wide, then every kind of pair with its reasons."""
    size = len(hosts)
    lines = []
    if size <= _WIDEST_MATRIX:
        width = max([len(v.transport) for v in verdicts.values()] + [2]) + 2
        lines.append("  host  rank  " + "".join(f"{p:<{width}}" for p in range(size)).rstrip())
        for rank in range(size):
            cells = [_cell(verdicts, rank, p) for p in range(size)]
            lines.append(f"  {hosts[rank]:<4}  {rank:<4}  " + "".join(f"{c:<{width}}" for c in cells).rstrip())
    kinds: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[int, int]]] = {}
    for pair, verdict in verdicts.items():
        kinds.setdefault((verdict.transport, tuple(verdict.passed_over.items())), []).append(pair)
    for (transport, passed_over), members in kinds.items():
        lines.append(f"  {_name(members, hosts)}: {transport or 'nothing connects them'}")
        lines += [f"      not {name}: {reason}" for name, reason in passed_over]
    return lines


def _cell(verdicts: Mapping[tuple[int, int], Verdict], a: int, b: int) -> str:
    return "." if a == b else verdicts[min(a, b), max(a, b)].transport or "none"


def _name(members: Sequence[tuple[int, int]], hosts: Sequence[int], most: int = 8) -> str:
    every = set(combinations(range(len(hosts)), 2))
    inside = {p for p in every if hosts[p[0]] == hosts[p[1]]}
    for pairs_of, name in ((every, "all pairs"), (inside, "pairs of one host"), (every - inside, "pairs of two hosts")):
        if set(members) == pairs_of:
            return name
    more = f" and {len(members) - most} more" if len(members) > most else ""
    return "pairs " + ", ".join(f"{a}+{b}" for a, b in members[:most]) + more


def as_json(verdicts: Mapping[tuple[int, int], Verdict]) -> list[dict[str, Any]]:
    """Return the verdicts as JSON can hold them."""
    return [
        {"ranks": list(pair), "transport": v.transport, "passed_over": dict(v.passed_over)}
        for pair, v in verdicts.items()
    ]
