"""Choosing a transport: votes, agreement, fallback of all ranks together (F041, F042, F050, F084)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any, ClassVar

import pytest
import torch

from commbackend import registry, select
from commbackend.config import Config, resolve
from commbackend.contract import Caps, GemmProvider, Rendezvous, Transport
from commbackend.errors import CommBackendError, CommTimeout, ConfigError, Unavailable
from commbackend.group import Group
from commbackend.testing import run_ranks

CPU = torch.device("cpu")


class Fake(Transport):
    """A transport whose probe and connect do what ``script`` says for this rank: name -> rank -> text or a number."""

    name: ClassVar[str] = "fake"
    caps = Caps(device="cpu")
    script: ClassVar[dict[str, dict[int, Any]]] = {}
    log: ClassVar[list[str]] = []
    rank_here: ClassVar[int] = 0

    @classmethod
    def probe(cls, device: torch.device) -> None:
        Fake.log.append(f"probe {cls.name}")
        said = Fake.script.get("probe " + cls.name, {}).get(Fake.rank_here)
        if isinstance(said, Exception):
            raise said

    @classmethod
    def connect(cls, group: Rendezvous, device: torch.device, options: Mapping[str, Any]) -> Transport:
        Fake.log.append(f"connect {cls.name} {group.timeout_s}")
        said = Fake.script.get("connect " + cls.name, {}).get(group.rank)
        if isinstance(said, Exception):
            raise said
        if said:
            time.sleep(said)
        assert options["hosts"] == (0,) * group.size and options["chunks"] == 0
        return cls(group)

    def _barrier(self, deadline: float) -> None:
        raise AssertionError("not needed")

    def _close(self, timeout_s: float) -> None:
        Fake.log.append(f"close {self.name} {type(self.fault).__name__}")


class First(Fake):
    name = "first"


class Second(Fake):
    name = "second"


TABLE = (
    registry.Entry("first", f"{__name__}:First", "cpu", auto=0),
    registry.Entry("missing", ".transports.not_there:Missing", "cpu", extra="mpi", auto=2),
    registry.Entry("second", f"{__name__}:Second", "cpu", auto=1),
)


def _choose(
    rank: int, group: Group, script: dict[str, dict[int, Any]], overrides: dict[int, dict[str, Any]] | dict[str, Any]
) -> tuple[Any, ...]:
    """Return (name of the transport or the error, its text, the log of what happened, why)."""
    registry._TABLES["transport"] = TABLE
    Fake.script, Fake.rank_here, Fake.log = script, rank, []
    mine = overrides.get(rank, {}) if rank in overrides or not all(map(_is_name, overrides)) else overrides
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commbackend").addHandler(handler)
    logging.getLogger("commbackend").setLevel("INFO")
    try:
        transport, choice = select.connect(group, CPU, resolve(**mine))  # type: ignore[arg-type]
    except CommBackendError as e:
        return type(e).__name__, str(e), Fake.log, "", seen
    group.barrier()  # everyone got here together
    return (transport.name if transport else None), str(choice.reasons), Fake.log, choice.why(), seen


def _is_name(key: object) -> bool:
    return isinstance(key, str)


def test_the_first_that_every_rank_passes() -> None:
    for name, _, log, why, seen in run_ranks(_choose, 3, {}, {}):
        assert name == "first"
        assert log == ["probe first", "probe second", f"connect first {27.0}"], log  # nine tenths: then comes the vote
        assert "transport first for cpu (transport=auto, from default)" in why
        assert "not missing: rank 0 and 2 more ranks: this build has no commbackend.transports.not_there" in why
        assert seen in ([], ["commbackend: " + why])


def test_one_rank_without_it_moves_all() -> None:
    """F042: the reason and the rank are said."""
    script = {"probe first": {2: Unavailable("no driver 535 found", "install one")}}
    found = run_ranks(_choose, 3, script, {})
    assert [f[0] for f in found] == ["second"] * 3
    assert all("connect first" not in " ".join(f[2]) for f in found)
    assert "rank 2: no driver 535 found (install one)" in found[0][3]
    assert any("transport first is passed over: rank 2: no driver 535" in line for line in found[0][4])


def test_a_probe_that_breaks_is_a_no() -> None:
    found = run_ranks(_choose, 2, {"probe first": {0: ZeroDivisionError("oops")}}, {})
    assert [f[0] for f in found] == ["second"] * 2 and "ZeroDivisionError: oops" in found[1][1]


@pytest.mark.parametrize("error", [Unavailable("bytes arrive changed"), RuntimeError("driver"), CommTimeout("rank 1")])
def test_a_connect_that_fails_moves_all(error: Exception) -> None:
    """F041: ranks that could connect give it up again and leave nothing."""
    found = run_ranks(_choose, 3, {"connect first": {1: error}}, {"init_timeout_s": 20})
    assert [f[0] for f in found] == ["second"] * 3
    assert str(error) in found[0][1] and "1:" in found[0][1]
    assert found[1][2] == ["probe first", "probe second", "connect first 18.0", "connect second 18.0"]
    assert found[0][2][3] == "close first CommAborted", "the rank that had connected must let go"


def test_nothing_fits() -> None:
    script = {
        "probe first": {0: Unavailable("no GPU"), 1: Unavailable("no GPU")},
        "connect second": {2: Unavailable("EPERM")},
    }
    for kind, text, _, _, _ in run_ranks(_choose, 3, script, {}):
        assert kind == "Unavailable"
        lines = text.splitlines()
        assert "no transport for cpu works on every rank (transport=auto, from default)" in lines[0]
        assert lines[1].split() == "first ranks 0-1: no GPU".split()
        assert lines[2].split() == "second rank 2: EPERM".split()
        assert lines[3].split()[:3] == ["missing", "ranks", "0-2:"]


def test_one_name_is_that_or_an_error() -> None:
    script = {"probe first": {1: Unavailable("no GPU")}}
    for kind, text, log, _, _ in run_ranks(_choose, 2, script, {"transport": "first"}):
        assert kind == "Unavailable" and "rank 1: no GPU" in text and "second" not in text
        assert log == ["probe first"]


def test_a_list_is_an_order() -> None:
    found = run_ranks(_choose, 2, {}, {"transport": "second,first"})
    assert [f[0] for f in found] == ["second"] * 2
    found = run_ranks(_choose, 2, {"connect second": {0: Unavailable("x")}}, {"transport": "second,first"})
    assert [f[0] for f in found] == ["first"] * 2


def test_off() -> None:
    for name, _, log, why, _ in run_ranks(_choose, 2, {}, {"transport": "off"}):
        assert name is None and log == [] and why == "transport off for cpu (transport=off, from argument)"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({0: {"transport": "first"}, 2: {"transport": "first"}}, ["transport", "first on ranks 0,2", "auto on rank 1"]),
        ({1: {"transport": "off"}}, ["transport", "off on rank 1", "auto on ranks 0,2"]),
        ({2: {"chunks": 4}}, ["chunks", "0 on ranks 0-1", "4 on rank 2"]),
    ],
)
def test_ranks_configured_apart(overrides: dict[int, dict[str, Any]], words: list[str]) -> None:
    """F084: every rank raises the same, naming field, values and ranks; nobody connects."""
    found = run_ranks(_choose, 3, {}, {**{0: {}, 1: {}, 2: {}}, **overrides})
    assert {f[0] for f in found} == {"ConfigError"} and len({f[1] for f in found}) == 1
    assert all(w in found[0][1] for w in words), found[0][1]
    assert not any("connect" in line for f in found for line in f[2])


def _protocol(rank: int, group: Group) -> str:
    select.PROTOCOL = 1 + rank // 2
    return str(_choose(rank, group, {}, {})[1])


def test_ranks_of_other_versions() -> None:
    found = run_ranks(_protocol, 3)
    assert found == ["ranks disagree on protocol: 1 on ranks 0-1, 2 on rank 2; it must be the same everywhere"] * 3


def test_an_unknown_name_is_raised_by_all() -> None:
    for kind, text, _, _, _ in run_ranks(_choose, 2, {}, {"transport": "frist"}):
        assert kind == "ConfigError" and "unknown transport 'frist' (did you mean first?)" in text


def _absent(rank: int, group: Group) -> tuple[Any, ...] | None:
    group.barrier()
    return _choose(rank, group, {}, {"init_timeout_s": 1.5}) if rank else None


def test_a_rank_that_does_not_come() -> None:
    for kind, text, *_ in run_ranks(_absent, 3)[1:]:
        assert kind == "CommTimeout" and "choice of a transport" in text and "rank 0 of 3 has not come" in text


def _slow(rank: int, group: Group) -> tuple[Any, ...]:
    group.barrier()
    return _choose(rank, group, {"connect first": {0: 4.0}}, {"init_timeout_s": 1.5})


def test_a_connect_that_never_answers_ends() -> None:
    """F050: the others raise within init_timeout_s, naming the transport and the peer."""
    found = run_ranks(_slow, 2)
    assert all(f[0] == "CommTimeout" and "vote on transport first" in f[1] and "rank 0" in f[1] for f in found), found


def _real(rank: int, group: Group, asked: str) -> str:
    transport, choice = select.connect(group, CPU, resolve(transport=asked, timeout_s=7))
    assert transport is not None and transport.timeout_s == 7 and choice.hosts == (0,) * group.size
    transport.barrier(time.monotonic() + 10)
    transport.close()
    return choice.name


def test_the_real_ones() -> None:
    assert run_ranks(_real, 2, "auto") == ["shm"] * 2
    assert run_ranks(_real, 2, "gloo") == ["gloo"] * 2
    assert run_ranks(_real, 1, "auto") == ["shm"]


def test_ballots_of_strangers() -> None:
    whole = select._pack("a=1\nb=2", [(1, ""), (0, "reason")])
    assert select._unpack(whole, 0).verdicts == ((1, ""), (0, "reason"))
    for cut in range(len(whole) - 6):
        with pytest.raises(ConfigError, match="rank 3 sent something else"):
            select._unpack(whole[:cut], 3)
    assert select._unpack(b"XXXX" + whole[4:], 0).protocol == -1


# -- names


def test_tables() -> None:
    for table in (registry.TRANSPORTS, registry.GEMMS):
        assert [e.name for e in table] == sorted({e.name for e in table})
    assert registry.auto_names("transport", "cpu") == ["shm", "mpi", "gloo"]
    assert registry.auto_names("transport", "cuda")[0] == "userbuffers"
    assert registry.auto_names("transport", "cuda")[-1] == "nccl"
    assert "local" in registry.names("transport", "cpu") and registry.auto_names("gemm", "cpu") == ["torch"]
    for name in registry.names("transport"):
        assert registry.transport(name).name == name


def test_unknown_and_broken_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"unknown transport 'glo' \(did you mean gloo\?\); known: gloo, local, "):
        registry.transport("glo")
    with pytest.raises(ConfigError, match="unknown gemm 'cutlass'"):
        registry.gemm("cutlass")
    broken = (
        registry.Entry("lib", "no_such_library_here:X", "cpu", extra="mpi"),
        registry.Entry("name", ".errors:Nothing", "cpu"),
        registry.Entry("none", ".transports.not_there:X", "cpu"),
        registry.Entry("type", ".errors:Unavailable", "cpu"),
    )
    monkeypatch.setitem(registry._TABLES, "transport", broken)
    for name, words in {
        "lib": "not importable|no_such_library_here",
        "name": "has no Nothing",
        "none": "this build",
    }.items():
        with pytest.raises(Unavailable, match=words):
            registry.transport(name)
    with pytest.raises(ConfigError, match=r"not a subclass of commbackend\.contract\.Transport"):
        registry.transport("type")


def test_entry_points_are_looked_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def entry_points(**wanted: Any) -> list[metadata.EntryPoint]:
        asked.append(wanted)
        point = metadata.EntryPoint("theirs", f"{__name__}:First", wanted["group"])
        return [point] if wanted.get("name", "theirs") == "theirs" else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    assert registry.transport("theirs") is First
    assert asked == [{"group": "commbackend.transports", "name": "theirs"}]
    registry.transport("shm")
    assert len(asked) == 1, "built-in names need no look at what is installed"
    with pytest.raises(ConfigError, match="theirs"):
        registry.transport("other")


def test_provider() -> None:
    provider, choice = select.provider(CPU, Config())
    assert isinstance(provider, GemmProvider) and choice.name == "torch" and choice.kind == "gemm"
    with pytest.raises(Unavailable, match="no GEMM provider for cpu"):
        select.provider(CPU, resolve(gemm="triton"))
    with pytest.raises(ConfigError, match="unknown gemm"):
        select.provider(CPU, resolve(gemm="cublas"))
