"""Which ranks share a host: proven by reaching each other, never inferred from names. And which addresses it has."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
from dataclasses import dataclass

from .contract import Rendezvous

__all__ = ["Topology", "addresses", "survey"]

_PEERCRED = struct.Struct("iII")
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Topology:
    """Attributes:
    hosts: For every rank the number of its host; hosts are numbered by their lowest rank.
    """

    hosts: tuple[int, ...]

    @property
    def one_host(self) -> bool:
        """Whether all ranks share one host."""
        return len(set(self.hosts)) <= 1

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on ``rank``'s host, itself included."""
        return tuple(r for r, h in enumerate(self.hosts) if h == self.hosts[rank])


def survey(group: Rendezvous, *, timeout_s: float | None = None) -> Topology:
    """Return who shares a host with whom. Collective; two exchanges.

    Two ranks share a host when each has connected to an abstract Unix socket of the other under a random name and the
    kernel says that its owner is the same user: exactly what passing descriptors needs. Containers with equal host
    names, boot ids or process ids do not pass for one host; containers that share a network namespace do.
    """
    nonce = secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0commbackend-{nonce}")
        listener.listen(group.size)
        names = group.exchange(nonce.encode(), timeout_s=timeout_s)
        row = bytes(_opens(name.decode("ascii", "replace")) for name in names)
        rows = group.exchange(row, timeout_s=timeout_s)
    hosts: list[int] = []
    for rank in range(group.size):
        # A rank joins the host of the first earlier rank with which it has proven itself both ways.
        twin = next((r for r in range(rank) if rows[rank][r] and rows[r][rank]), rank)
        hosts.append(hosts[twin] if twin < rank else max(hosts, default=-1) + 1)
    return Topology(tuple(hosts))


def _opens(nonce: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # connecting to a listener with room succeeds at once
        try:
            probe.connect(f"\0commbackend-{nonce}")
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        except OSError:
            return False
        return bool(_PEERCRED.unpack(raw)[1] == os.getuid())


def addresses() -> dict[str, str]:
    """Return interface -> IPv4 address for the interfaces of this host, loopback left out. Local (Linux)."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                raw = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(raw[20:24])
    return {name: address for name, address in found.items() if not address.startswith("127.")}
