"""Stores for groups that torch.distributed did not make: the launcher's processes and mpi4py communicators.

Processes of one host meet in a private directory and listen nowhere. Processes of several hosts meet at
MASTER_ADDR:MASTER_PORT, or, under mpi4py, at an address that all of them have reached.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import hashlib
import ipaddress
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Launch
from ..errors import CommTimeout, ConfigError
from ..topology import addresses
from .meeting import Meeting, Member, publish

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["launcher_store", "mpi_store"]

log = logging.getLogger("commbackend")

#: Gives up a store; its argument says whether the group is healthy, so that waiting for others makes sense.
Closer = Callable[[bool], None]
_LOOPBACK = "127.0.0.1"
#: How long the process that serves a store waits for the others to leave, at most.
_FAREWELL_S = 5.0

# Stores this process has opened through its launcher, so that every one gets its own name; all ranks count alike.
_opened = 0


def launcher_store(launch: Launch, timeout_s: float) -> tuple[Store, Closer | None]:
    """Return a new store of the processes of ``launch`` and what closes it. Collective in order.

    Raises:
        ConfigError: Several hosts and no MASTER_ADDR and MASTER_PORT; the port is in use.
        CommTimeout: Rank 0 has not opened the store, or not been reached.
    """
    global _opened
    from torch._C import _distributed_c10d as c10d

    _opened += 1
    if launch.size == 1:
        return c10d.HashStore(), None
    if launch.dialect in ("torchrun", "env") or (launch.address and not launch.one_host):
        return _tcp_store(launch, timeout_s)
    if not launch.one_host or not launch.job:
        world = _mpi_world(launch)
        if world is not None:
            return mpi_store(world, timeout_s)
        raise ConfigError(
            f"{launch.describe()} spans hosts and says no place to meet: set MASTER_ADDR and MASTER_PORT to a free port"
            " of rank 0's host, or import mpi4py.MPI before, or pass an mpi4py communicator as group="
        )
    uid = os.getuid()
    key = hashlib.sha256(f"{launch.dialect}/{launch.job}/{launch.size}".encode()).hexdigest()[:16]
    meeting = Meeting(Path(tempfile.gettempdir()) / f"commbackend-{uid}-{key}", _opened)
    try:
        deadline = time.monotonic() + timeout_s
        path = meeting.open(deadline) if launch.rank == 0 else meeting.find(deadline)
    except TimeoutError as e:
        raise CommTimeout(f"{launch.describe()}: {e} within {timeout_s:g} s", rank=0, op="init") from None
    return c10d.FileStore(str(path), launch.size), lambda healthy: meeting.close()


def _mpi_world(launch: Launch) -> Any:
    """Return MPI's world if the application has imported mpi4py and its ranks are the launcher's, else None."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    world = mpi.COMM_WORLD
    return world if (world.Get_rank(), world.Get_size()) == (launch.rank, launch.size) else None


def _farewell(store: Store, rank: int, size: int) -> Closer:
    """Return a closer that says goodbye; rank 0, who serves the store, waits a little for all goodbyes if healthy."""

    def close(healthy: bool) -> None:
        if not healthy:
            return  # some rank may never say goodbye
        try:
            store.set(f"bye/{rank}", "")
            deadline = time.monotonic() + _FAREWELL_S
            while rank == 0 and not store.check([f"bye/{r}" for r in range(size)]) and time.monotonic() < deadline:
                time.sleep(0.005)
        except RuntimeError as e:  # the store may have gone with its server; nothing is left to wait for
            log.debug("commbackend: rank %d: closing the store: %s", rank, str(e).splitlines()[0])

    return close


# -- several hosts: an address
# --------------------------------------------------------------------------------------------------------------


def _tcp_store(launch: Launch, timeout_s: float) -> tuple[Store, Closer | None]:
    from torch._C import _distributed_c10d as c10d

    if not launch.address or not launch.port:
        raise ConfigError(f"{launch.describe()}: MASTER_ADDR and MASTER_PORT must say where rank 0 can be met")
    # One host: never listen beyond loopback, whatever name MASTER_ADDR gives this host.
    host = _LOOPBACK if launch.one_host and not launch.agent_store else launch.address
    serves = launch.rank == 0 and not launch.agent_store
    if not launch.one_host and not launch.agent_store:
        host = _known_outside(host)
    try:
        base = _served(host, launch.port, timeout_s) if serves else _dial(host, launch.port, timeout_s, launch.rank)
    except CommTimeout as e:
        if not launch.one_host or launch.address == host:
            raise
        said = f"the launcher says that all {launch.size} ranks share this host (LOCAL_WORLD_SIZE); if not, correct it"
        raise CommTimeout(f"{e}; {said}", rank=0, op="init") from e
    store = c10d.PrefixStore(f"commbackend/{launch.job}/{_opened}", base)
    return store, None if launch.agent_store else _farewell(store, launch.rank, launch.size)


def _known_outside(host: str) -> str:
    """Return ``host``, or this host's other address where its name means loopback here, as distributions like to have
    it. Whoever says localhost or 127.0.0.1 means it. Raises ConfigError if there is not exactly one address.
    """
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return host  # who listens or dials there says so
    meant = host == "localhost" or host in found
    if meant or not all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in found):
        return host
    others = addresses()
    if len(others) == 1:
        return next(iter(others.values()))
    listed = ", ".join(f"{address} ({name})" for name, address in others.items()) or "none"
    raise ConfigError(
        f"MASTER_ADDR = {host!r} is loopback on its own host, where ranks of other hosts cannot come; set it to one of"
        f" its addresses: {listed}"
    )


# Kept as long as the process: a peer that opens its next group may be faster than the close of the last one here.
_servers: dict[tuple[str, int], Store] = {}


def _served(host: str, port: int, timeout_s: float) -> Store:
    """Return this process's store at ``host``:``port``, served from the first call on."""
    store = _servers.get((host, port))
    if store is None:
        store = _servers[host, port] = _serve(_listen(host, port), timeout_s)
    return store


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host`` alone. Raises ConfigError naming the holder of a port in use."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as e:
        raise ConfigError(f"rank 0 cannot resolve MASTER_ADDR = {host!r}: {e}") from e
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(f"rank 0: {host}:{port} is in use{_holder(port)}; set MASTER_PORT to a free port") from e
        raise ConfigError(
            f"rank 0 cannot listen on {host}:{port}: {e}; set MASTER_ADDR to an address of its host"
        ) from e
    return listener


def _holder(port: int) -> str:
    """Return " by process <pid> (<command>)" for who listens on ``port``, or "" where it is not visible."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{words[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) in inodes:
                command = Path(f"/proc/{link.parts[2]}/comm").read_text().strip()
                return f" by process {link.parts[2]} ({command})"
    return ""


def _serve(listener: socket.socket, timeout_s: float) -> Store:
    """Return a store served on ``listener``, which it takes over."""
    from torch._C import _distributed_c10d as c10d

    host, port = listener.getsockname()[:2]
    # multi_tenant: a later init_process_group of this process on the same port shares the server.
    return c10d.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def _dial(host: str, port: int, timeout_s: float, rank: int) -> Store:
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    try:
        return c10d.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as e:
        first = str(e).splitlines()[0]
        raise CommTimeout(
            f"rank {rank}: no store at {host}:{port} within {timeout_s:g} s, so rank 0 has not come: {first}",
            rank=0,
            op="init",
        ) from e


# -- mpi4py
# --------------------------------------------------------------------------------------------------------------


def mpi_store(comm: Any, timeout_s: float) -> tuple[Store, Closer | None]:
    """Return a new store of the processes of ``comm`` (an mpi4py Intracomm). Collective.

    MPI carries three small exchanges on a duplicate of ``comm``; it is neither initialised nor finalised here.

    Raises:
        CommTimeout: Not every rank has come.
        ConfigError: MPI is not initialised, or no address of rank 0 is reached by all ranks.
    """
    from mpi4py import MPI
    from torch._C import _distributed_c10d as c10d

    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise ConfigError("the mpi4py communicator cannot be used: MPI is not initialised, or finalised already")
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return c10d.HashStore(), None
    wire = _MpiWire(comm, timeout_s)
    try:
        shared = _shared_file(wire)
        if shared is not None:
            directory, member = shared
            return c10d.FileStore(str(directory / "store"), size), lambda healthy: member.leave()
        store = _reached_by_all(wire, timeout_s)
        return store, _farewell(store, rank, size)
    finally:
        wire.close()


class _MpiWire:
    """All-gather of bytes over a private duplicate of an MPI communicator, with a deadline."""

    def __init__(self, comm: Any, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = comm.Get_rank(), comm.Get_size(), timeout_s
        self.comm, request = comm.Idup()
        self._finish(request)

    def exchange(self, payload: bytes) -> list[bytes]:
        lengths = array.array("i", [0] * self.size)
        self._finish(self.comm.Iallgather(array.array("i", [len(payload)]), lengths))
        everything = bytearray(sum(lengths))
        self._finish(
            self.comm.Iallgatherv([payload, len(payload), _byte()], [everything, list(lengths), None, _byte()])
        )
        parts, at = [], 0
        for length in lengths:
            parts.append(bytes(everything[at : at + length]))
            at += length
        return parts

    def _finish(self, request: Any) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not request.Test():
            if time.monotonic() >= deadline:
                raise CommTimeout(
                    f"rank {self.rank} of {self.size}: after {self.timeout_s:g} s not every rank of the MPI"
                    " communicator has called init (MPI does not say which)",
                    op="init",
                )
            time.sleep(0.0005)

    def close(self) -> None:
        self.comm.Free()


_MPI_MEMBERS = "members-mpi"


def _byte() -> Any:
    from mpi4py import MPI

    return MPI.BYTE


def _shared_file(wire: _MpiWire) -> tuple[Path, Member] | None:
    """Return a private directory of rank 0 that every rank has proven to see, or None if some do not."""
    nonce, made, fd = b"", b"", -1
    if wire.rank == 0:
        made = os.fsencode(tempfile.mkdtemp(prefix=f"commbackend-{os.getuid()}-mpi-"))
        nonce = secrets.token_bytes(16)
        fd = publish(Path(os.fsdecode(made)) / _MPI_MEMBERS, nonce, fcntl.LOCK_SH)
    told = wire.exchange(nonce + made)[0]
    path = Path(os.fsdecode(told[16:]))

    def remove() -> None:
        shutil.rmtree(path, ignore_errors=True)

    member = Member(path / _MPI_MEMBERS, fd, remove) if wire.rank == 0 else None
    try:
        if (path / _MPI_MEMBERS).read_bytes() == told[:16] and os.lstat(path).st_uid == os.getuid():
            member = member or Member.join(path / _MPI_MEMBERS, remove, time.monotonic() + wire.timeout_s)
    except OSError as e:
        log.debug("commbackend: rank %d does not see %s: %s", wire.rank, path, e)
    if all(v == b"1" for v in wire.exchange(b"1" if member is not None else b"0")) and member is not None:
        return path, member
    if member is not None:
        member.leave()
    return None


def _reached_by_all(wire: _MpiWire, timeout_s: float) -> Store:
    """Serve a store at the first address of rank 0 that every rank has connected to."""
    listeners = [_listen(a, 0) for a in addresses().values()] if wire.rank == 0 else []
    try:
        offers = [":".join(map(str, s.getsockname()[:2])) for s in listeners]
        told = [o.rpartition(":") for o in wire.exchange(",".join(offers).encode())[0].decode().split(",") if o]
        votes = wire.exchange(bytes(_reaches(host, int(port)) for host, _, port in told))
        good = [i for i in range(len(told)) if all(v[i] for v in votes)]
        if not good:
            raise ConfigError(
                f"rank {wire.rank}: no address of rank 0 is reached by every rank; tried"
                f" {', '.join(h for h, _, _ in told) or 'none: its host has only loopback'}"
            )
        host, _, port = told[good[0]]
        if wire.rank == 0:
            return _serve(listeners.pop(good[0]), timeout_s)
        return _dial(host, int(port), timeout_s, wire.rank)
    finally:
        for listener in listeners:
            listener.close()


def _reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError:
        return False
    return True
