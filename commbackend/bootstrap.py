"""Stores for groups that torch.distributed did not make: the launcher's processes and mpi4py communicators.

Processes of one host meet in a private directory and listen nowhere. Processes of several hosts meet at
MASTER_ADDR:MASTER_PORT, or, under mpi4py, at an address that all of them have reached.
"""

from __future__ import annotations

import array
import atexit
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
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import Launch
from .errors import CommTimeout, ConfigError
from .topology import addresses

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
    meeting = _Meeting(Path(tempfile.gettempdir()) / f"commbackend-{uid}-{key}", _opened)
    path = meeting.open() if launch.rank == 0 else meeting.find(time.monotonic() + timeout_s, launch, timeout_s)
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


# -- one host: a private directory
# ----------------------------------------------------------------------------------------------------------


def _publish(path: Path, content: bytes, lock: int) -> int:
    """Make ``path``, locked from the moment it can be seen. Returns its descriptor, which holds the lock."""
    draft = path.with_name(f"draft-{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, lock)
    os.write(fd, content)
    os.rename(draft, path)
    return fd


class _Member:
    """A shared lock on a file of a directory that several processes use: the last to leave removes the directory.

    A process leaves when it closes its group or exits; one that was killed has left too. Only where all were killed
    something stays, until the next job sweeps it away.
    """

    def __init__(self, path: Path, fd: int, remove: Callable[[], None]) -> None:
        self._path, self.fd, self._remove, self._pid = path, fd, remove, os.getpid()
        atexit.register(self.leave)

    @classmethod
    def join(cls, path: Path, remove: Callable[[], None]) -> _Member | None:
        """Become a member; None if the directory is gone, or going."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink == 0:
            os.close(fd)
            return None
        return cls(path, fd, remove)

    def leave(self) -> None:
        """Local, idempotent, does not wait."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        os.close(fd)
        if os.getpid() != self._pid:
            return  # a fork's copy
        atexit.unregister(self.leave)
        # Everybody gives up the own lock before trying for all, so that of several who leave at once one succeeds.
        with contextlib.suppress(OSError):  # others are still there, or it is gone
            last = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(last, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._remove()
            finally:
                os.close(last)


class _Meeting:
    """A private directory where the processes of a job find the file of their store.

    Rank 0 holds a lock on the pointer file as long as it lives, so that what a dead job left is told from a live one
    without asking for process ids (which containers hide).
    """

    def __init__(self, directory: Path, attempt: int) -> None:
        self.directory, self.pointer = directory, directory / f"current-{attempt}"
        self._fd, self._name = -1, ""
        self._member: _Member | None = None

    def open(self) -> Path:
        """Make a new store file, publish it, and return its path. Rank 0."""
        _sweep(self.directory)
        self._name = f"store-{secrets.token_hex(8)}"
        for attempt in range(10):
            _private(self.directory)
            try:
                fd = _publish(self._members, b"", fcntl.LOCK_SH)
                break
            except FileNotFoundError:  # the last of an earlier meeting of this job has just removed the directory
                if attempt == 9:
                    raise
        self._member = _Member(self._members, fd, self._remove)
        self._fd = _publish(self.pointer, self._name.encode(), fcntl.LOCK_EX)
        return self.directory / self._name

    @property
    def _members(self) -> Path:
        return self.directory / self._name.replace("store-", "members-")

    def find(self, deadline: float, launch: Launch, budget_s: float) -> Path:
        """Return the path that rank 0 has published, waiting for it until ``deadline``."""
        while True:
            self._name = self._read()
            self._member = _Member.join(self._members, self._remove) if self._name else None
            if self._member is not None:
                return self.directory / self._name
            if time.monotonic() >= deadline:
                raise CommTimeout(
                    f"{launch.describe()}: rank 0 has not opened {self.pointer} within {budget_s:g} s",
                    rank=0,
                    op="init",
                )
            time.sleep(0.005)

    def _read(self) -> str:
        try:
            fd = os.open(self.pointer, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return ""
        try:
            if os.fstat(fd).st_uid != os.getuid():
                raise ConfigError(f"{self.pointer} belongs to user {os.fstat(fd).st_uid}, not to this one")
            if not _locked(fd):
                return ""  # left behind by a job that has ended
            name = os.read(fd, 64).decode("ascii", "replace")
            return name if name.startswith("store-") and "/" not in name else ""
        finally:
            os.close(fd)

    def close(self) -> None:
        """Leave. Local, idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        if self._member is not None:
            self._member.leave()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            if self.pointer.read_bytes() == self._name.encode():  # not that of a later meeting
                self.pointer.unlink()
        for path in (self.directory / self._name, self._members):
            path.unlink(missing_ok=True)
        if not any(map(_live, _held(self.directory))):  # a later meeting of the same job may use it
            shutil.rmtree(self.directory, ignore_errors=True)


def _locked(fd: int, probe: int = fcntl.LOCK_SH) -> bool:
    """Whether a lock is held that excludes ``probe``."""
    try:
        fcntl.flock(fd, probe | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _private(directory: Path) -> None:
    """Make ``directory`` with mode 0700, or check that it is one and this user's."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a directory of user {os.getuid()} with mode 0700; found user {found.st_uid}, mode"
            f" {stat.filemode(found.st_mode)}; remove it or set TMPDIR"
        )


def _sweep(keep: Path) -> None:
    """Remove the directories of this user's jobs that were killed."""
    for directory in keep.parent.glob(f"commbackend-{os.getuid()}-*"):
        if directory == keep or os.lstat(directory).st_uid != os.getuid():
            continue
        held = _held(directory)
        if held and not any(map(_live, held)):
            shutil.rmtree(directory, ignore_errors=True)


def _held(directory: Path) -> list[Path]:
    """The files whose locks say that somebody uses ``directory``."""
    return [*directory.glob("current-*"), *directory.glob("members-*")]


def _live(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True  # somebody else is at work on it
    try:
        return _locked(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


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


def _shared_file(wire: _MpiWire) -> tuple[Path, _Member] | None:
    """Return a private directory of rank 0 that every rank has proven to see, or None if some do not."""
    nonce, made, fd = b"", b"", -1
    if wire.rank == 0:
        made = os.fsencode(tempfile.mkdtemp(prefix=f"commbackend-{os.getuid()}-mpi-"))
        nonce = secrets.token_bytes(16)
        fd = _publish(Path(os.fsdecode(made)) / _MPI_MEMBERS, nonce, fcntl.LOCK_SH)
    told = wire.exchange(nonce + made)[0]
    path = Path(os.fsdecode(told[16:]))

    def remove() -> None:
        shutil.rmtree(path, ignore_errors=True)

    member = _Member(path / _MPI_MEMBERS, fd, remove) if wire.rank == 0 else None
    try:
        if (path / _MPI_MEMBERS).read_bytes() == told[:16] and os.lstat(path).st_uid == os.getuid():
            member = member or _Member.join(path / _MPI_MEMBERS, remove)
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
