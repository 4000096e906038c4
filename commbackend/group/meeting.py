"""Where the processes of one host meet: a private directory that names the file of their store.

Everything here is told by locks (flock), which end with the process that holds them: who is alive is never asked by
process id, which containers hide. Three kinds of lock:

* The *pointer* file ``current-N`` is locked by rank 0 as long as it lives: what a dead job left is not believed.
* The *members* file is shared-locked by every process that uses the store: the last to leave removes it all.
* The *directory* itself is locked by whoever publishes in it or removes it, so that the last process of one meeting
  does not take away what rank 0 has just published for the next.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import ConfigError

__all__ = ["Meeting", "Member", "publish"]

#: How long a process that leaves waits for the lock of the directory. What it then leaves is swept by the next job.
_LEAVING_S = 1.0


class Member:
    """A shared lock on a file of a directory that several processes use: the last to leave removes the directory.

    A process leaves when it closes its group or exits; one that was killed has left too. Only where all were killed
    something stays, until the next job sweeps it away.
    """

    def __init__(self, path: Path, fd: int, remove: Callable[[], None]) -> None:
        self._path, self.fd, self._remove, self._pid = path, fd, remove, os.getpid()
        atexit.register(self.leave)

    @classmethod
    def join(cls, path: Path, remove: Callable[[], None], deadline: float) -> Member | None:
        """Become a member; None if the directory is gone, or going, or not to be had until ``deadline``."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if not _lock(fd, fcntl.LOCK_SH, deadline) or os.fstat(fd).st_nlink == 0:
            os.close(fd)
            return None
        return cls(path, fd, remove)

    def leave(self) -> None:
        """Local, idempotent; waits for nobody but who is removing the directory."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        os.close(fd)
        if os.getpid() != self._pid:
            return  # a fork's copy
        atexit.unregister(self.leave)
        # Everybody gives up the own lock before trying for all, so that of several who leave at once one succeeds.
        with contextlib.suppress(OSError):  # it is gone
            last = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _lock(last, fcntl.LOCK_EX):
                    self._remove()
            finally:
                os.close(last)


class Meeting:
    """One store of a job, found by all its processes: ``attempt`` numbers the stores of a process, alike on all."""

    def __init__(self, directory: Path, attempt: int) -> None:
        self.directory, self.pointer = directory, directory / f"current-{attempt}"
        self._fd, self._name = -1, ""
        self._member: Member | None = None

    def open(self, deadline: float) -> Path:
        """Make a new store file, publish it, and return its path. Rank 0.

        Raises:
            TimeoutError: Somebody holds the directory until ``deadline``.
            ConfigError: The directory is not this user's alone.
        """
        _sweep(self.directory)
        self._name = f"store-{secrets.token_hex(8)}"
        while time.monotonic() < deadline:
            _private(self.directory)
            with _alone(self.directory, deadline) as held:
                if held:  # else the last process of an earlier meeting of this job has just removed it
                    self._member = Member(self._members, publish(self._members, b"", fcntl.LOCK_SH), self._remove)
                    self._fd = publish(self.pointer, self._name.encode(), fcntl.LOCK_EX)
                    return self.directory / self._name
        raise TimeoutError(f"rank 0 has not got the lock of {self.directory}")

    @property
    def _members(self) -> Path:
        return self.directory / self._name.replace("store-", "members-")

    def find(self, deadline: float) -> Path:
        """Return the path that rank 0 has published. Raises TimeoutError if there is none until ``deadline``."""
        while True:
            self._name = self._read()
            self._member = Member.join(self._members, self._remove, deadline) if self._name else None
            if self._member is not None:
                return self.directory / self._name
            if time.monotonic() >= deadline:
                raise TimeoutError(f"rank 0 has not opened {self.pointer}")
            time.sleep(0.005)

    def _read(self) -> str:
        try:
            fd = os.open(self.pointer, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return ""
        try:
            if os.fstat(fd).st_uid != os.getuid():
                raise ConfigError(f"{self.pointer} belongs to user {os.fstat(fd).st_uid}, not to this one")
            if _lock(fd, fcntl.LOCK_SH):
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
        with _alone(self.directory, time.monotonic() + _LEAVING_S) as held:
            if not held:
                return
            with contextlib.suppress(OSError):
                if self.pointer.read_bytes() == self._name.encode():  # not that of a later meeting
                    self.pointer.unlink()
            for path in (self.directory / self._name, self._members):
                path.unlink(missing_ok=True)
            if not any(map(_live, _held(self.directory))):  # a later meeting of the same job may use it
                shutil.rmtree(self.directory, ignore_errors=True)


def publish(path: Path, content: bytes, lock: int) -> int:
    """Make ``path``, locked from the moment it can be seen. Returns its descriptor, which holds the lock."""
    draft = path.with_name(f"draft-{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    _lock(fd, lock)  # nobody else can hold it
    os.write(fd, content)
    os.rename(draft, path)
    return fd


def _lock(fd: int, kind: int, deadline: float = 0.0) -> bool:
    """Take the lock, trying until ``deadline`` and at least once; returns whether it is held."""
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.001)


@contextlib.contextmanager
def _alone(directory: Path, deadline: float = 0.0) -> Iterator[bool]:
    """Hold the lock of ``directory``; yields whether it is held, which it is not if the directory is gone by then."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _lock(fd, fcntl.LOCK_EX, deadline) and _same(fd, directory)
    finally:
        os.close(fd)


def _same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _private(directory: Path) -> None:
    """Make ``directory`` with mode 0700, or check that it is one and this user's."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return  # removed in between: who locks it will see that
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a directory of user {os.getuid()} with mode 0700; found user {found.st_uid}, mode"
            f" {stat.filemode(found.st_mode)}; remove it or set TMPDIR"
        )


def _sweep(keep: Path) -> None:
    """Remove the directories of this user's jobs that were killed."""
    for directory in keep.parent.glob(f"commbackend-{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or not a directory
            if directory == keep or os.lstat(directory).st_uid != os.getuid():
                continue
            with _alone(directory) as held:
                files = _held(directory) if held else []
                if files and not any(map(_live, files)):
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
        return not _lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)
