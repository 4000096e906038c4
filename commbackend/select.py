"""Which transport and GEMM provider: every rank probes, all vote, the first that every rank passes is connected."""

from __future__ import annotations

import logging
import platform
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import __version__, registry, topology
from .config import Config
from .contract import Collective, OneSided
from .errors import CommBackendError, ConfigError, Unavailable
from .levels import TwoLevels, members
from .schedules.shards import Hosts

if TYPE_CHECKING:
    import torch

    from .contract import GemmProvider, Transport
    from .group import Group

__all__ = ["PROTOCOL", "Choice", "attempt", "connect", "provider"]

log = logging.getLogger("commbackend")

#: Number of the form of everything ranks send each other; ranks with different numbers do not work together.
PROTOCOL = 2

# A ballot: magic, protocol, length of the agreement text, number of verdicts; then the text; then the verdicts.
_HEAD = struct.Struct("<4sHHB")
_VERDICT = struct.Struct("<BH")
_NO, _PASSED, _UNKNOWN = range(3)
_MAGIC = b"cbV1"
_TEXT_NBYTES = 1000
#: Two levels that the automatic choice tries after a transport that does not reach all ranks.
_AUTO_LEVELS: Mapping[str, tuple[str, ...]] = {"shm": ("shm+mpi", "shm+gloo")}


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, over what, and why.

    Attributes:
        kind: "transport" or "gemm".
        name: The winner, or "off".
        device: Device type it was chosen for.
        asked: The configured value, and ``source`` where it came from.
        candidates: Names in the order they were tried.
        reasons: Name -> rank -> why that rank could not use it, for every candidate that lost.
        hosts: The host number of every rank, proven; () where nothing was connected. domains: Their NVLink domains.
    """

    kind: str
    name: str
    device: str
    asked: str
    source: str
    candidates: tuple[str, ...] = ()
    reasons: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    hosts: tuple[int, ...] = ()
    domains: tuple[int, ...] = ()

    def why(self) -> str:
        """Return one line: the winner, what asked for it, and what was passed over for which reason."""
        line = f"{self.kind} {self.name} for {self.device} ({self.kind}={self.asked}, from {self.source})"
        lost = []
        for name in self.candidates:
            reasons = self.reasons.get(name)
            if reasons:
                rank = min(reasons)
                more = f" and {len(reasons) - 1} more ranks" if len(reasons) > 1 else ""
                lost.append(f"not {name}: rank {rank}{more}: {reasons[rank]}")
        return "; ".join([line, *lost])

    def table(self) -> str:
        """Return ranks x candidates -> reason, a line each; ranks with one reason share a line."""
        return _table(self.candidates, self.reasons)


def _table(candidates: Sequence[str], reasons: Mapping[str, Mapping[int, str]]) -> str:
    lines = []
    for name in candidates:
        by_reason: dict[str, list[int]] = {}
        for rank, reason in reasons.get(name, {}).items():
            by_reason.setdefault(reason, []).append(rank)
        for reason, ranks in by_reason.items():
            lines.append(f"  {name:<12} {'ranks' if len(ranks) > 1 else 'rank'} {_ranges(ranks)}: {reason}")
    return "\n".join(lines)


def _ranges(ranks: Sequence[int]) -> str:
    """Return 0-3,5 for [0, 1, 2, 3, 5]."""
    out: list[list[int]] = []
    for rank in sorted(ranks):
        if out and rank == out[-1][1] + 1:
            out[-1][1] = rank
        else:
            out.append([rank, rank])
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in out)


def connect(group: Group, device: torch.device, config: Config) -> tuple[Transport | None, Choice]:
    """Choose and connect a transport for ``group``. Collective; all ranks get the same one or the same error.

    Returns:
        (transport, choice); the transport is None when ``config.transport`` is "off".
    Raises:
        ConfigError: Ranks run different versions or settings (names the field and the ranks), or a name is unknown.
        Unavailable: Nothing fits; the message is the table of ranks x transports -> reason.
        CommTimeout: A rank has not come within ``init_timeout_s``.
    """
    names = _candidates("transport", config.transport, device.type)
    automatic = config.transport == "auto"
    if automatic:
        names = [pair for name in names for pair in (name, *_AUTO_LEVELS.get(name, ()))]
    ballot = _pack(_agreement(config, device), [_probe(name, device, automatic) for name in names])
    budget_s = config.init_timeout_s or group.timeout_s
    raws = group.exchange(ballot, timeout_s=budget_s, what="choice of a transport")
    reasons = _count(names, [_unpack(raw, rank) for rank, raw in enumerate(raws)])
    asked = dict(
        kind="transport",
        device=device.type,
        asked=config.transport,
        source=config.sources.get("transport", "argument"),
    )
    if config.transport == "off":
        return None, Choice(name="off", **asked)  # type: ignore[arg-type]
    where = topology.Topology(())
    if any(n not in reasons for n in names):
        where = topology.survey(group, device=device, timeout_s=budget_s)
    if automatic and where.one_host:  # nothing to say about levels
        names = [name for name in names if "+" not in name]
    for name in names:
        transport = None if name in reasons else _connect(name, group, device, config, where, budget_s, reasons)
        if transport is not None:
            more = {"candidates": tuple(names), "hosts": where.hosts, "domains": where.domains}
            choice = Choice(name=name, reasons=reasons, **more, **asked)  # type: ignore[arg-type]
            if group.rank == 0:
                log.info("commbackend: %s", choice.why())
            return transport, choice
        if group.rank == 0 and len(names) > 1:
            rank = min(reasons[name])
            log.info("commbackend: transport %s is passed over: rank %d: %s", name, rank, reasons[name][rank])
    raise Unavailable(
        f"no transport for {device.type} works on every rank (transport={config.transport}, from {asked['source']}):\n"
        + _table(names, reasons)
    )


def _candidates(kind: str, asked: str, device: str) -> list[str]:
    if asked == "off":
        return []
    return registry.auto_names(kind, device) if asked == "auto" else asked.split(",")


def _probe(name: str, device: torch.device, automatic: bool) -> tuple[int, str]:
    """Return whether this process can use transport ``name``, and why not."""
    try:
        for one in name.split("+"):
            needs = registry.entry("transport", one).needs if automatic else ""
            if needs and needs not in sys.modules:
                return _NO, f"{needs} has not been imported here, and no choice but yours starts it (transport={name})"
            registry.transport(one).probe(device)
    except Unavailable as e:
        return _NO, str(e) or "unavailable"
    except ConfigError as e:
        return _UNKNOWN, str(e)  # raised after the vote, by all ranks: peers must not wait for this one
    except Exception as e:  # a probe that breaks is a transport that cannot be used, on this rank
        log.debug("commbackend: the probe of transport %s raised", name, exc_info=True)
        return _NO, f"its probe raised {type(e).__name__}: {e}"
    return _PASSED, ""


def _connect(
    name: str,
    group: Group,
    device: torch.device,
    config: Config,
    where: topology.Topology,
    budget_s: float,
    reasons: dict[str, dict[int, str]],
) -> Transport | None:
    """Connect ``name`` on all ranks, or on none: then ``reasons`` says why, and nothing is left. Collective."""
    transport: Transport | None = None
    failed = ""
    # The vote comes after, and all is to end by the limit: then it can still name who has not come.
    left_s = budget_s if group.limit is None else min(budget_s, group.limit - time.monotonic())
    usual_s, group.timeout_s = group.timeout_s, max(0.9 * left_s, 0.001)
    try:
        options = {**config.options(), "hosts": where.hosts, "domains": where.domains}
        if "+" in name:
            transport = _two_levels(name, group, device, options, where.hosts)
        else:
            transport = registry.transport(name).connect(group, device, options)
    except Exception as e:  # whatever it is, all ranks must hear of it and move on together
        failed = (str(e) or "failed") if isinstance(e, Unavailable) else f"connect raised {type(e).__name__}: {e}"
        log.debug("commbackend: connecting transport %s raised", name, exc_info=True)
        cause: Exception | None = e
    else:
        cause = None
    finally:
        group.timeout_s = usual_s
    try:
        votes = group.exchange(failed.encode("utf-8", "replace"), timeout_s=budget_s, what=f"vote on transport {name}")
    except CommBackendError as e:
        if transport is not None:
            transport.abort(f"the vote on transport {name} failed: {e}")
            transport.close()
        raise e from cause
    lost = {rank: vote.decode("utf-8", "replace") for rank, vote in enumerate(votes) if vote}
    if not lost and transport is not None:
        transport.timeout_s = config.timeout_s or usual_s
        return transport
    reasons[name] = lost
    if transport is not None:  # this rank was fine, another was not
        transport.abort(f"rank {min(lost)} could not connect transport {name}")
        transport.close()
    return None


def _two_levels(
    name: str, group: Group, device: torch.device, options: Mapping[str, Any], hosts: Sequence[int]
) -> TwoLevels:
    """Connect the first transport of ``name`` within every host and the second between the ranks of one number."""
    first, second = (registry.transport(one) for one in name.split("+"))
    if not issubclass(first, OneSided) or not issubclass(second, Collective):
        lacks = f"{second.name} has no collectives" if issubclass(first, OneSided) else f"{first.name} is not one-sided"
        raise Unavailable(lacks, "two levels are a one-sided transport + one with collectives")
    if first.caps.stream_ordered != second.caps.stream_ordered:
        raise Unavailable(f"{first.name} and {second.name} move tensors of different devices")
    if (uneven := Hosts.uneven(hosts)) is not None:
        raise Unavailable(uneven)
    near, twins = members(hosts, group.rank)
    inside = group.part(near, f"within host {hosts[group.rank]}")
    across = group.part(twins, f"between hosts, number {near.index(group.rank)}")
    inner, failed = None, ""
    try:
        inner = first.connect(inside, device, {**options, "hosts": (0,) * len(near), "domains": (0,) * len(near)})
    except CommBackendError as e:  # whatever it is on this host, the others must not wait in the second
        failed = str(e) or type(e).__name__
    votes = group.exchange(failed.encode("utf-8", "replace"), what=f"vote on {first.name} within hosts")
    between = None
    try:
        if any(votes) or not isinstance(inner, OneSided):
            lost = {r: v.decode("utf-8", "replace") for r, v in enumerate(votes) if v}
            raise Unavailable(failed or f"rank {min(lost)}: {lost[min(lost)]}")
        numbers = tuple(range(len(twins)))
        between = second.connect(across, device, {**options, "hosts": numbers, "domains": numbers})
        assert isinstance(between, Collective)
        return TwoLevels(group, inner, between, hosts)
    except BaseException as e:
        for level in (inner, between):
            if level is not None:
                level.abort(f"{name} does not connect: {e}")
                level.close()
        raise


def attempt(
    name: str, group: Group, device: torch.device, config: Config, where: topology.Topology, timeout_s: float
) -> dict[int, str]:
    """Connect transport ``name``, move bytes between all pairs, and close it. Collective.

    Returns:
        Why it does not connect ``group``, by rank; {} if it does.
    """
    reasons: dict[str, dict[int, str]] = {}
    transport = _connect(name, group, device, config, where, timeout_s, reasons)
    if transport is not None:
        transport.close(timeout_s)
    return reasons.get(name, {})


def provider(device: torch.device, config: Config) -> tuple[GemmProvider, Choice]:
    """Choose the GEMM provider. Local; raises Unavailable with every candidate's reason when none fits."""
    names = _candidates("gemm", config.gemm, device.type)
    source = config.sources.get("gemm", "argument")
    reasons: dict[str, dict[int, str]] = {}
    for name in names:
        try:
            cls = registry.gemm(name)
            cls.probe(device)
        except Unavailable as e:
            reasons[name] = {0: str(e)}
            continue
        return cls(), Choice("gemm", name, device.type, config.gemm, source, tuple(names), reasons)
    raise Unavailable(
        f"no GEMM provider for {device.type} (gemm={config.gemm}, from {source}):\n" + _table(names, reasons)
    )


# -- ballots
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ballot:
    protocol: int
    agreement: dict[str, str]
    verdicts: tuple[tuple[int, str], ...]


def _agreement(config: Config, device: torch.device) -> str:
    """Return what all ranks must share, one ``name=value`` a line."""
    import torch

    facts = {
        "commbackend": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else "",
        "machine": platform.machine(),
        "device": device.type,
    }
    return "\n".join([*(f"{k}={v}" for k, v in facts.items()), config.agreement()])


def _pack(agreement: str, verdicts: Sequence[tuple[int, str]]) -> bytes:
    text = agreement.encode("utf-8", "replace")
    out = [_HEAD.pack(_MAGIC, PROTOCOL, len(text), len(verdicts)), text]
    for verdict, reason in verdicts:
        raw = reason.encode("utf-8", "replace")[:_TEXT_NBYTES]
        out += [_VERDICT.pack(verdict, len(raw)), raw]
    return b"".join(out)


def _unpack(raw: bytes, rank: int) -> _Ballot:
    try:
        magic, protocol, length, count = _HEAD.unpack_from(raw)
        if magic != _MAGIC or protocol != PROTOCOL:
            return _Ballot(protocol if magic == _MAGIC else -1, {}, ())
        at = _HEAD.size + length
        lines = raw[_HEAD.size : at].decode("utf-8", "replace").splitlines()
        verdicts = []
        for _ in range(count):
            verdict, length = _VERDICT.unpack_from(raw, at)
            at += _VERDICT.size
            verdicts.append((verdict, raw[at : at + length].decode("utf-8", "replace")))
            at += length
    except struct.error:
        raise ConfigError(f"rank {rank} sent something else than a ballot ({len(raw)} bytes)") from None
    return _Ballot(protocol, dict(line.split("=", 1) for line in lines if "=" in line), tuple(verdicts))


def _count(names: Sequence[str], ballots: Sequence[_Ballot]) -> dict[str, dict[int, str]]:
    """Return name -> rank -> reason for the names that some rank cannot use.

    Raises ConfigError, the same on every rank, if the ballots do not agree or a name is unknown.
    """
    _compare(ballots)
    if any(len(b.verdicts) != len(names) for b in ballots):
        raise ConfigError("ranks know different transports for automatic choice; install the same version everywhere")
    reasons: dict[str, dict[int, str]] = {}
    for i, name in enumerate(names):
        for rank, ballot in enumerate(ballots):
            verdict, reason = ballot.verdicts[i]
            if verdict == _UNKNOWN:
                raise ConfigError(f"{reason} (rank {rank})")
            if verdict != _PASSED:
                reasons.setdefault(name, {})[rank] = reason
    return reasons


def _compare(ballots: Sequence[_Ballot]) -> None:
    fields: dict[str, list[str]] = {"protocol": [str(b.protocol) for b in ballots]}
    for b in ballots:
        for name in b.agreement:
            fields.setdefault(name, [x.agreement.get(name, "unknown") for x in ballots])
    for name, values in fields.items():
        by_value: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            by_value.setdefault(value, []).append(rank)
        if len(by_value) > 1:
            parts = [f"{value} on rank{'s' if len(r) > 1 else ''} {_ranges(r)}" for value, r in by_value.items()]
            raise ConfigError(f"ranks disagree on {name}: {', '.join(parts)}; it must be the same everywhere")
