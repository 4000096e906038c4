"""Where ranks are: domains, GPUs, addresses, and the map of which transport connects which pair."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from commbackend import reach, registry, select, topology
from commbackend.config import Config, resolve
from commbackend.errors import HeapExhausted
from commbackend.group import Group
from commbackend.host import memory as hostmem
from commbackend.reach import Verdict
from commbackend.testing import run_ranks
from commbackend.topology import Place, Topology

CPU = torch.device("cpu")
ONE, TWO = b"\1" * 16, b"\2" * 16


# -- NVLink domains, GPUs


def test_domains_are_cliques_of_a_fabric_or_hosts() -> None:
    """Hosts of one clique are one domain; two cliques of one cluster, and two clusters of equal cliques, are not."""
    hosts = (0, 0, 1, 2, 3, 4)
    places = (Place("a", ONE, 7), Place("b", ONE, 7), Place("c", ONE, 7), Place("d", ONE, 8), Place("e", TWO, 7))
    assert Topology(hosts, (*places, Place("f"))).domains == (0, 0, 0, 1, 2, 3)
    assert Topology(hosts).domains == hosts
    assert Topology((0, 0, 1), (Place("a"), Place("b", ONE, 1), Place("c", ONE, 1))).domains == (0, 1, 1)


def test_gpus_are_known_by_uuid() -> None:
    """F037, F047: one GPU visible a rank, each of them ordinal 0; and two ranks on one."""
    apart = Topology((0, 0), (Place("GPU-1"), Place("GPU-2")))
    assert apart.sharing() == {}
    assert Topology((0, 0, 0), (Place("GPU-1"), Place("GPU-2"), Place("GPU-1"))).sharing() == {"GPU-1": (0, 2)}
    assert Topology((0, 0), (Place(), Place())).sharing() == {}, "ranks without a GPU share none"


def test_places_travel() -> None:
    for at in (Place(), Place("GPU-1", ONE, 3), Place("x" * 300, TWO, (1 << 32) - 1)):
        found = topology._unpack(topology._pack(at))
        assert (found.gpu, found.cluster, found.clique) == (at.gpu[:255], at.cluster, at.clique)
    for hostile in (b"", b"\xff", b"\xff" * 21, b"\0" * 5):
        topology._unpack(hostile)


class _Nvml:
    """A driver library that knows one GPU."""

    def __init__(self, state: int = 3, failed: int = 0, status: int = 0) -> None:
        self.state, self.failed, self.status, self.open = state, failed, status, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        return 0 if name == b"GPU-1234" else 6

    def nvmlDeviceGetGpuFabricInfo(self, handle: Any, info: Any) -> int:
        raw = struct.pack("<16siIB", ONE, self.status, 7, self.state)
        ctypes.memmove(info, raw, len(raw))
        return self.failed


def test_fabric_as_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(gpu: str, nvml: _Nvml) -> tuple[bytes, int]:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
        found = topology._fabric(gpu)
        assert nvml.open == 0
        return found

    assert ask("GPU-1234", _Nvml()) == ask("1234", _Nvml()) == (ONE, 7)
    none = (bytes(16), 0)
    assert ask("GPU-9", _Nvml()) == none, "another process's GPU"
    assert ask("GPU-1234", _Nvml(state=2)) == none, "registration in progress"
    assert ask("GPU-1234", _Nvml(failed=3)) == ask("GPU-1234", _Nvml(status=999)) == none


def test_no_driver_is_no_fabric() -> None:
    assert topology._fabric("GPU-1", "libno-such-library.so.1") == (bytes(16), 0)
    assert topology.place(None) == topology.place(CPU) == Place()


# -- addresses


def test_ipv6_addresses_of_one_link_or_host_are_left_out(tmp_path: Path) -> None:
    lines = [
        "00000000000000000000000000000001 01 80 10 80       lo",
        "fe800000000000006052f5fffecc71bf 02 40 20 80     net0",
        "fd770000000000000000000000000001 02 40 00 80     net0",
        "fd770000000000000000000000000009 02 40 00 80     net0",
    ]
    assert dict(topology._ipv6(lines)) == {"net0": "fd77::1"}
    assert topology._lines(str(tmp_path / "none")) == []


# -- agreement


def _baseline(rank: int, group: Group) -> tuple[str, str, str]:
    """Rank 1's memory fails while shm connects, once; returns footprints and what was said."""

    def footprint() -> str:
        import gc
        import os
        import threading

        gc.collect()
        group.barrier()
        with open("/proc/self/maps") as maps:
            shared = sum(1 for line in maps if "s" in line.split()[1])
        found = f"{len(os.listdir('/proc/self/fd'))} {threading.active_count()} {shared}"
        group.barrier()
        return found

    def connect(name: str) -> str:
        transport, choice = select.connect(group, CPU, resolve(transport=name, init_timeout_s=20.0))
        assert transport is not None
        transport.close()
        return choice.why()

    connect("shm,gloo")
    connect("gloo")
    before = footprint()
    reserve = hostmem.reserve

    def short(nbytes: int) -> int:
        raise HeapExhausted(f"{nbytes} bytes of shared memory are needed, 7 are available (ENOSPC: no space)")

    hostmem.reserve = short if rank == 1 else reserve
    why = connect("shm,gloo")
    hostmem.reserve = reserve
    return before, footprint(), why


def test_one_failing_rank_moves_all_and_leaves_nothing() -> None:
    """F042: the next transport together, memory back to where it was, one line that names rank, call and code."""
    for before, after, why in run_ranks(_baseline, 3, timeout_s=60.0):
        assert before == after, "(descriptors, threads, shared mappings)"
        assert why.startswith("transport gloo") and "rank 1" in why and "ENOSPC" in why and "\n" not in why


# -- the map


def _map(rank: int, group: Group) -> list[tuple[tuple[int, int], str, str]]:
    """The map of four ranks where rank 3 is told to be on a host of its own and rank 1 lacks shm."""
    where = Topology((0, 0, 0, 1), (Place(),) * 4)
    probes: Sequence[dict[str, str]] = [{"shm": "", "mpi": "none here", "gloo": ""} for _ in range(4)]
    probes[1]["shm"] = "no memory"
    found = reach.pairs(group, CPU, probes, where, Config(interface="127.0.0.1"), 20.0)
    return [(pair, v.transport, v.passed_over.get("shm", "")) for pair, v in sorted(found.items())]


def test_pairs_are_tried() -> None:
    expected = [
        ((0, 1), "gloo", "rank 1: no memory"),
        ((0, 2), "shm", ""),
        ((0, 3), "gloo", "they share no host"),
        ((1, 2), "gloo", "rank 1: no memory"),
        ((1, 3), "gloo", "rank 1: no memory"),
        ((2, 3), "gloo", "they share no host"),
    ]
    assert run_ranks(_map, 4, timeout_s=60.0) == [expected] * 4


def test_the_picture() -> None:
    near, far = Verdict("shm", {}), Verdict("gloo", {"shm": "they share no host"})
    hosts = [0, 0, 1]
    lines = reach.draw({(0, 1): near, (0, 2): far, (1, 2): far}, hosts)
    assert [line.split() for line in lines[:4]] == [
        ["host", "rank", "0", "1", "2"],
        ["0", "0", ".", "shm", "gloo"],
        ["0", "1", "shm", ".", "gloo"],
        ["1", "2", "gloo", "gloo", "."],
    ]
    assert lines[4:] == ["  pairs of one host: shm", "  pairs of two hosts: gloo", "      not shm: they share no host"]
    assert reach.draw({(0, 1): Verdict("", {"gloo": "no"})}, [0, 1])[-2:] == [
        "  all pairs: nothing connects them",
        "      not gloo: no",
    ]
    many = {(a, b): near for a in range(20) for b in range(a + 1, 20)}
    many[0, 1] = far
    wide = reach.draw(many, [0] * 20)
    assert not any("." in line for line in wide) and any("and 181 more" in line for line in wide), wide
    assert registry.auto_names("transport", "cpu")[0] == "shm"
