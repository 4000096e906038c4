"""Where ranks are: which share a host (proven), which GPU each has, and whose GPUs one NVLink fabric joins.

Host names, boot ids and local ranks are never asked: containers share them and launchers get them wrong. Fabrics are
told apart by what the driver says (cluster UUID and clique); that memory really is reached over one is proven by the
transport that uses it, which moves bytes between every pair when it connects.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .contract import Rendezvous

if TYPE_CHECKING:
    import torch

__all__ = ["Place", "Topology", "addresses", "place", "survey"]

_PEERCRED = struct.Struct("iII")
_SIOCGIFADDR = 0x8915
# A place on the wire: length of the GPU's UUID, cluster UUID, clique; the UUID follows.
_PLACE = struct.Struct("<B16sI")
_NO_CLUSTER = bytes(16)


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank says about its GPU.

    Attributes:
        gpu: Its UUID, as the driver writes it, or "" without a GPU.
        cluster: UUID of the NVLink fabric that it is registered in, 16 bytes, all zero for none.
        clique: Within a cluster, GPUs of one clique reach each other.
    """

    gpu: str = ""
    cluster: bytes = _NO_CLUSTER
    clique: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """Attributes:
    hosts: For every rank the number of its host; hosts are numbered by their lowest rank.
    places: For every rank what it says about its GPU; () where nobody was asked.
    """

    hosts: tuple[int, ...]
    places: tuple[Place, ...] = ()

    @property
    def one_host(self) -> bool:
        """Whether all ranks share one host."""
        return len(set(self.hosts)) <= 1

    @property
    def domains(self) -> tuple[int, ...]:
        """For every rank the number of its NVLink domain: one fabric's clique, or else its host. Numbered as hosts."""
        known: dict[object, int] = {}
        return tuple(known.setdefault(self._domain(r), len(known)) for r in range(len(self.hosts)))

    def _domain(self, rank: int) -> object:
        at = self.places[rank] if self.places else Place()
        return ("host", self.hosts[rank]) if at.cluster == _NO_CLUSTER else (at.cluster, at.clique)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on ``rank``'s host, itself included."""
        return tuple(r for r, h in enumerate(self.hosts) if h == self.hosts[rank])

    def sharing(self) -> dict[str, tuple[int, ...]]:
        """Return the GPUs that several ranks use: UUID -> ranks."""
        ranks: dict[str, list[int]] = {}
        for rank, at in enumerate(self.places):
            ranks.setdefault(at.gpu, []).append(rank)
        return {gpu: tuple(of_gpu) for gpu, of_gpu in ranks.items() if gpu and len(of_gpu) > 1}


def survey(group: Rendezvous, *, device: torch.device | None = None, timeout_s: float | None = None) -> Topology:
    """Return who shares a host with whom, and the GPU of every rank. Collective; two exchanges.

    Two ranks share a host when each has connected to an abstract Unix socket of the other under a random name and the
    kernel says that its owner is the same user: exactly what passing descriptors needs. Containers with equal host
    names, boot ids or process ids do not pass for one host; containers that share a network namespace do.

    Args:
        device: This rank's device. None, or a CPU: no GPU is looked at.
    """
    nonce = secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0commbackend-{nonce}")
        listener.listen(group.size)
        names = group.exchange(nonce.encode(), timeout_s=timeout_s)
        row = bytes(_opens(name.decode("ascii", "replace")) for name in names)
        rows = group.exchange(row + _pack(place(device)), timeout_s=timeout_s)
    hosts: list[int] = []
    for rank in range(group.size):
        # A rank joins the host of the first earlier rank with which it has proven itself both ways.
        twin = next((r for r in range(rank) if rows[rank][r] and rows[r][rank]), rank)
        hosts.append(hosts[twin] if twin < rank else max(hosts, default=-1) + 1)
    return Topology(tuple(hosts), tuple(_unpack(row[group.size :]) for row in rows))


def _opens(nonce: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # connecting to a listener with room succeeds at once
        try:
            probe.connect(f"\0commbackend-{nonce}")
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        except OSError:
            return False
        return bool(_PEERCRED.unpack(raw)[1] == os.getuid())


def _pack(at: Place) -> bytes:
    raw = at.gpu.encode("ascii", "replace")[:255]
    return _PLACE.pack(len(raw), at.cluster, at.clique) + raw


def _unpack(raw: bytes) -> Place:
    if len(raw) < _PLACE.size:
        return Place()
    length, cluster, clique = _PLACE.unpack_from(raw)
    return Place(raw[_PLACE.size : _PLACE.size + length].decode("ascii", "replace"), cluster, clique)


# -- GPUs
# --------------------------------------------------------------------------------------------------------------


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


_FABRIC_COMPLETED = 3


def place(device: torch.device | None) -> Place:
    """Return the GPU of ``device`` by its UUID (ordinals mean something else in every process). Local."""
    if device is None or device.type != "cuda":
        return Place()
    import torch

    gpu = str(torch.cuda.get_device_properties(device).uuid)
    cluster, clique = _fabric(gpu)
    return Place(gpu, cluster, clique)


def _fabric(gpu: str, library: str = "libnvidia-ml.so.1") -> tuple[bytes, int]:
    """Return cluster UUID and clique of a GPU; zeros where the driver knows of no fabric, or is too old to."""
    try:
        nvml = ctypes.CDLL(library)
        handle, info = ctypes.c_void_p(), _FabricInfo()
        name = (gpu if gpu.startswith(("GPU-", "MIG-")) else f"GPU-{gpu}").encode("ascii", "replace")
        failed = nvml.nvmlInit_v2()
        if failed:
            return _NO_CLUSTER, 0
        try:
            failed = nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
            failed = failed or nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return _NO_CLUSTER, 0
    if failed or info.status or info.state != _FABRIC_COMPLETED:
        return _NO_CLUSTER, 0
    return bytes(info.cluster), int(info.clique)


# -- addresses
# --------------------------------------------------------------------------------------------------------------


def addresses() -> dict[str, str]:
    """Return interface -> address for the interfaces of this host, loopback left out. Local (Linux).

    An interface's IPv4 address, or, where it has none, its first IPv6 address that other hosts may know it by.
    """
    found = dict(_ipv6(_lines("/proc/net/if_inet6")))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                raw = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(raw[20:24])
    return {name: found[name] for name in sorted(found) if not ipaddress.ip_address(found[name]).is_loopback}


def _ipv6(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return (interface, address) for the lines of the kernel's table, without addresses of one link or host alone.

    The first address of an interface comes last, so that it stays in a dict.
    """
    found = []
    for line in lines:
        raw, _, _, scope, _, name = line.split()
        if int(scope, 16) == 0:  # global
            found.append((name, str(ipaddress.IPv6Address(bytes.fromhex(raw)))))
    return found[::-1]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return []
