"""The control plane: who we are, exchange of bytes, barrier, deadlines. Never used inside a call.

A ``Group`` works over a torch ``Store``. ``resolve_group`` finds that store: a ProcessGroup's own, the launcher's, or a
private one (``bootstrap``). Payloads are bytes; nothing received is executed.

An exchange is one round of O(size) keys: every rank writes its payload, rank 0 collects and publishes them together,
and the keys are deleted. Waiting polls: a blocked store call could neither be interrupted nor see that a peer has
given up.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..config import Config, Launch, launcher
from ..errors import CommAborted, CommBackendError, CommTimeout, ConfigError, PeerDied, pack_fault, unpack_fault

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

__all__ = ["DEFAULT_TIMEOUT_S", "Group", "process_group_of", "resolve_group"]

log = logging.getLogger("commbackend")

#: Deadline of groups that come without one (a launcher's, an MPI communicator's).
DEFAULT_TIMEOUT_S = 600.0
#: Bytes of ``Group.token``.
TOKEN_NBYTES = 16

_FAIL = "fail"

#: A store and what closes it, or None where it is somebody else's.
Opened: TypeAlias = "tuple[Store, Callable[[bool], None] | None]"


class Group:
    """The ranks of one communicator; implements ``contract.Rendezvous``.

    Attributes:
        rank, size: Position of this process and number of processes.
        timeout_s: Deadline of a step for which none is given.
        name: For messages.
        key: Equal for groups of the same process group, launch or MPI communicator.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        open_store: Callable[[], Opened],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        name: str = "group",
        key: Hashable = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"group {name!r}: rank {rank} of {size}")
        self.rank, self.size = rank, size
        self.timeout_s, self.name = timeout_s, name
        self.key: Hashable = key if key is not None else ("group", id(self))
        self._open_store: Callable[[], Opened] | None = open_store
        self._on_close: Callable[[bool], None] | None = None
        self._store: Store | None = None
        self._token = b""
        self._round = self._scopes = 0
        self._lock, self._open_lock = threading.Lock(), threading.Lock()
        self._fault: CommBackendError | None = None
        #: Time (monotonic) at which every step ends, however long its own deadline: set while a communicator is made.
        self.limit: float | None = None

    @classmethod
    def from_store(
        cls, store: Store, rank: int, size: int, *, timeout_s: float = DEFAULT_TIMEOUT_S, name: str = "group"
    ) -> Group:
        """Return the group ``name`` over ``store``. Local.

        Two groups over one store need different names; all ranks of a group pass the same one.
        """

        def open_store() -> Opened:
            from torch._C._distributed_c10d import PrefixStore

            return PrefixStore(f"commbackend/{name}", store), None

        return cls(rank, size, open_store, timeout_s=timeout_s, name=name)

    @property
    def store(self) -> Store:
        """A torch Store private to this group; ``scope`` gives parts of it to transports. Opened at first use.

        Raises:
            CommTimeout, ConfigError: At first use, where ranks meet at a place that the launcher names (``bootstrap``).
        """
        with self._open_lock:
            if self._store is None:
                open_store, self._open_store = self._open_store, None  # one attempt: ranks count them alike
                if open_store is None:
                    raise self._fault or CommAborted(f"group {self.name!r} is closed", rank=self.rank)
                try:
                    self._store, self._on_close = open_store()
                except CommBackendError as e:
                    self._fault = e
                    raise
                if self.rank == 0:
                    self._token = secrets.token_bytes(TOKEN_NBYTES)
                    self._store.set("token", self._token)  # type: ignore[arg-type]
        return self._store

    @property
    def token(self) -> bytes:
        """16 random bytes of rank 0, the same on all ranks. Waits for rank 0 at first use.

        Raises:
            CommTimeout: Rank 0 has not come within ``timeout_s``.
        """
        with self._lock, self._store_errors("read the token"):
            store = self.store
            if not self._token:
                budget_s = self._within(self.timeout_s)
                if self._wait(["token"], time.monotonic() + budget_s):
                    raise self._break("the token", budget_s, [0])
                self._token = store.get("token")
        return self._token

    def scope(self, label: str) -> Store:
        """Return a part of the store that no other call returns. Collective in order: all ranks make the same calls."""
        from torch._C._distributed_c10d import PrefixStore

        self._scopes += 1
        return PrefixStore(f"scope{self._scopes}/{label}", self.store)

    def part(self, ranks: Sequence[int], label: str) -> Group:
        """Return the group of some ``ranks``, this one among them, over a part of the store. Collective in order, as
        ``scope``; ranks of one part pass the same ``label``, those of different parts different ones.
        """
        store, name = self.scope(label), f"{self.name} {label}"
        return Group.from_store(store, ranks.index(self.rank), len(ranks), timeout_s=self.timeout_s, name=name)

    def exchange(self, payload: bytes, *, timeout_s: float | None = None, what: str = "") -> list[bytes]:
        """Return every rank's ``payload``, by rank. Collective.

        Args:
            timeout_s: Deadline of this step; unset: the group's.
            what: Name of the step, for the message of a timeout.
        Raises:
            CommTimeout: Names all ranks that have not come; raised by every rank, also by those that come later.
            PeerDied: The process that serves the store is gone.
        """
        with self._lock:
            if self._fault is not None:
                raise self._fault
            if self.size == 1:
                return [bytes(payload)]
            self._round += 1
            budget_s = self._within(self.timeout_s if timeout_s is None else timeout_s)
            step = what or f"exchange #{self._round}"
            with self._store_errors(step):
                run = self._collect if self.rank == 0 else self._contribute
                return run(self._round, bytes(payload), budget_s, step)

    def _within(self, budget_s: float) -> float:
        return budget_s if self.limit is None else max(min(budget_s, self.limit - time.monotonic()), 0.0)

    def barrier(self, *, timeout_s: float | None = None, what: str = "") -> None:
        """Return when all ranks have called it. Collective; raises as ``exchange`` does."""
        self.exchange(b"", timeout_s=timeout_s, what=what or f"barrier #{self._round + 1}")

    def close(self, *, healthy: bool = True) -> None:
        """Give up the store. Collective where rank 0 serves it (it waits a few seconds for the others to leave, unless
        the caller knows of a fault), else local; idempotent.
        """
        healthy = healthy and self._fault is None
        self._fault = self._fault or CommAborted(f"group {self.name!r} of rank {self.rank} is closed", rank=self.rank)
        with self._open_lock:
            done, self._on_close, self._open_store, self._store = self._on_close, None, None, None
        if done is not None:
            done(healthy)

    # -- one round
    # ----------------------------------------------------------------------------------------------------------
    def _collect(self, n: int, payload: bytes, budget_s: float, step: str) -> list[bytes]:
        deadline = time.monotonic() + budget_s
        keys = [f"{n}/{r}" for r in range(self.size)]
        self._set(keys[0], b"here")
        missing = self._wait(keys[1:], deadline)
        if missing:
            raise self._break(step, budget_s, [keys.index(k) for k in missing])
        if self.store.check([_FAIL]):  # who waited for this rank has given up meanwhile
            raise self._told()
        parts = [payload, *(self.store.get(k) for k in keys[1:])]
        self._set(f"{n}/all", _pack(parts))
        for key in (*keys, f"{n - 1}/all"):  # all ranks are in round n, so that round n - 1 has been read
            self._delete(key)
        return parts

    def _contribute(self, n: int, payload: bytes, budget_s: float, step: str) -> list[bytes]:
        deadline = time.monotonic() + budget_s
        keys = [f"{n}/{r}" for r in range(self.size)]
        self._set(keys[self.rank], payload)
        if self._wait([f"{n}/all"], deadline):
            late = [r for r, k in enumerate(keys) if not self.store.check([k])]
            # Nobody is late: rank 0 is publishing at this moment.
            if self._wait([f"{n}/all"], time.monotonic() + (0.0 if late else 1.0)):
                raise self._break(step, budget_s, late or [0])
        parts = _unpack(self.store.get(f"{n}/all"))
        if len(parts) != self.size:
            raise CommAborted(f"rank {self.rank}: {step} of group {self.name!r} got {len(parts)} payloads", rank=0)
        return parts

    def _wait(self, keys: list[str], deadline: float) -> list[str]:
        """Return [] as soon as all keys exist, else those that do not at ``deadline``. Raises if a peer gave up."""
        pause_s = 0.0002
        while not self.store.check(keys):
            if self.store.check([_FAIL]):
                raise self._told()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return [k for k in keys if not self.store.check([k])]
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, 0.02)
        return []

    def _set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)  # type: ignore[arg-type]  # the binding takes bytes, its stub says str

    def _delete(self, key: str) -> None:
        try:
            self.store.delete_key(key)
        except RuntimeError:
            log.debug("commbackend: this store keeps its keys (%s)", key)  # harmless: every round has its own

    # -- faults
    # ----------------------------------------------------------------------------------------------------------
    def _break(self, step: str, budget_s: float, late: Sequence[int]) -> CommTimeout:
        """Make a timeout the group's fault, here and at all ranks, and return it."""
        ranks = ", ".join(map(str, late))
        text = (
            f"{step} of group {self.name!r}: after {budget_s:g} s {'ranks' if len(late) > 1 else 'rank'} {ranks} of"
            f" {self.size} {'have' if len(late) > 1 else 'has'} not come"
        )
        self._fault = fault = CommTimeout(f"rank {self.rank}: {text}", rank=late[0], op=step, waiting_for=late)
        self._set(_FAIL, pack_fault(CommTimeout(text, rank=late[0], op=step, waiting_for=late)))
        return fault

    def fail(self, cause: BaseException) -> None:
        """Have the others, who wait in an exchange or come to one, raise ``cause`` too. Local, idempotent."""
        if self.size == 1 or self._store is None or self._fault is not None:
            return
        text = f"rank {self.rank} failed in group {self.name!r}: {type(cause).__name__}: {cause}"
        self._fault = cause if isinstance(cause, CommBackendError) else CommAborted(text, rank=self.rank)
        told = cause if isinstance(cause, CommTimeout | PeerDied | CommAborted) else CommAborted(text, rank=self.rank)
        try:
            if not self._store.check([_FAIL]):
                self._set(_FAIL, pack_fault(told))
        except (RuntimeError, OSError) as e:
            log.debug("commbackend: rank %d cannot tell of its failure: %s", self.rank, e)  # nobody is there to hear

    def _told(self) -> CommBackendError:
        """Return the fault that a peer has published."""
        if self._fault is None:
            told = unpack_fault(self.store.get(_FAIL))
            text = str(told) if told is not None else f"group {self.name!r} failed at another rank"
            self._fault = told = told or CommAborted(text)
            told.args = (f"rank {self.rank}: {text}",)
        return self._fault

    def _store_errors(self, step: str) -> _StoreErrors:
        return _StoreErrors(self, step)


class _StoreErrors:
    """Maps what a torch Store raises, in one place."""

    def __init__(self, group: Group, step: str) -> None:
        self.group, self.step = group, step

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, CommBackendError) or not isinstance(error, (RuntimeError, OSError)):
            return
        g = self.group
        message = (
            f"rank {g.rank}: {self.step} of group {g.name!r}: the store is gone, so the process that serves it"
            f" (usually rank 0) has ended: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        g._fault = g._fault or PeerDied(message, rank=0, op=self.step)
        raise g._fault from error


def _pack(parts: Sequence[bytes]) -> bytes:
    return struct.pack(f"<I{len(parts)}I", len(parts), *map(len, parts)) + b"".join(parts)


def _unpack(raw: bytes) -> list[bytes]:
    """Return what ``_pack`` packed, or [] if ``raw`` is something else."""
    if len(raw) < 4:
        return []
    count = struct.unpack_from("<I", raw)[0]
    at = 4 + 4 * count
    if at > len(raw):
        return []
    lengths = struct.unpack_from(f"<{count}I", raw, 4)
    if at + sum(lengths) != len(raw):
        return []
    parts = []
    for length in lengths:
        parts.append(raw[at : at + length])
        at += length
    return parts


# -- from what the user has to a Group
# --------------------------------------------------------------------------------------------------------------

# Groups opened so far on each (process group's name, ranks, name): all members open them in the same order, so that
# every one gets keys of its own, also when a process group of the same name comes back on the same store.
_opened: Counter[Hashable] = Counter()
_lock = threading.Lock()
# Process groups by a number, not by id(): the id of a destroyed one may come again.
_serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_serial = itertools.count()


def resolve_group(group: Any = None, *, name: str = "default", config: Config | None = None) -> Group:
    """Return a Group of the ranks that ``group`` means. Local: it meets the others at its first exchange, and all ranks
    use their groups for the first time in the same order.

    Args:
        group: None (the default process group if torch.distributed is initialised, else who the launcher's variables
            say), a ProcessGroup, a 1-D DeviceMesh, ``(mesh, "dim")``, a process group's name, an mpi4py communicator,
            or a Group (returned as it is).
        name: Tells several communicators on one group apart.
        config: Its ``init_timeout_s`` bounds the first meeting where the group comes without a timeout of its own.
    Raises:
        ConfigError: ``group`` is none of these; this process is not in it; the launcher's variables disagree.
    """
    if isinstance(group, Group):
        return group
    budget_s = (config.init_timeout_s if config is not None else None) or DEFAULT_TIMEOUT_S
    if _is_mpi(group):
        return _of_mpi(group, name, budget_s)
    found = process_group_of(group)
    if found is None:
        return _of_launcher(launcher(), name, budget_s)
    if group is None:
        _not_alone(found.size())
    return _of_process_group(found, name)


def _of_process_group(pg: ProcessGroup, name: str) -> Group:
    from torch.distributed import distributed_c10d as c10d

    ranks = tuple(c10d.get_process_group_ranks(pg))
    base = c10d._get_process_group_store(pg)
    if base is None:
        raise ConfigError(f"process group {pg.group_name!r} has no store (backend {pg.name()}); use gloo or nccl")
    with _lock:
        key = ("process_group", _serials.setdefault(pg, next(_serial)))
    label = f"{pg.group_name}/{'-'.join(map(str, ranks))}/{name}"

    def open_store() -> Opened:
        return _numbered(base, label), None

    return Group(pg.rank(), pg.size(), open_store, timeout_s=_timeout_s(pg), name=f"{pg.group_name}:{name}", key=key)


def _of_launcher(launch: Launch, name: str, budget_s: float) -> Group:
    def open_store() -> Opened:
        from .bootstrap import launcher_store

        return launcher_store(launch, budget_s)

    label = f"{launch.dialect}:{name}"
    return Group(launch.rank, launch.size, open_store, timeout_s=budget_s, name=label, key=("launcher",))


def _of_mpi(comm: Any, name: str, budget_s: float) -> Group:
    def open_store() -> Opened:
        from .bootstrap import mpi_store

        return mpi_store(comm, budget_s)

    key = ("mpi", int(comm.py2f()))
    return Group(comm.Get_rank(), comm.Get_size(), open_store, timeout_s=budget_s, name=f"mpi:{name}", key=key)


def _numbered(base: Store, label: str) -> Store:
    from torch._C._distributed_c10d import PrefixStore

    with _lock:
        _opened[label] += 1
        return PrefixStore(f"commbackend/{label}/{_opened[label]}", base)


def _is_mpi(group: Any) -> bool:
    return any(c.__module__.startswith("mpi4py") and c.__name__ == "Intracomm" for c in type(group).__mro__)


def process_group_of(group: Any) -> ProcessGroup | None:
    """Return the ProcessGroup that ``group`` (as in ``resolve_group``) means, or None where none is behind it: the
    launcher's processes, an mpi4py communicator, a Group. Local; raises ConfigError as ``resolve_group`` does.
    """
    if isinstance(group, Group) or _is_mpi(group):
        return None
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not dist.is_available():
        raise ConfigError("this torch has no torch.distributed: its build lacks USE_DISTRIBUTED")
    if group is None:
        return c10d._get_default_group() if dist.is_initialized() else None
    if isinstance(group, str):
        try:
            return c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type,no-any-return]
        except (RuntimeError, ValueError, KeyError) as e:
            raise ConfigError(f"no process group is called {group!r}") from e
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("this process is not a member of the group (new_group returned no group here)")
    mesh, dim = group if isinstance(group, tuple) and len(group) == 2 else (group, None)
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"group={group!r}: must be None, a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, dim), a group's name, an"
            " mpi4py Intracomm or a Group"
        )
    if dim is None and mesh.ndim != 1:
        names = mesh.mesh_dim_names or list(range(mesh.ndim))
        raise ConfigError(f"a mesh of {mesh.ndim} dimensions: pass (mesh, dim) with one of {names}")
    try:
        return mesh.get_group(dim)
    except (KeyError, IndexError, RuntimeError, ValueError) as e:
        raise ConfigError(f"the mesh has no dimension {dim!r} for this process: {e}") from e


def _timeout_s(pg: ProcessGroup) -> float:
    """Return the shortest timeout of the group's backends in seconds."""
    found = []
    for device in pg._device_types:
        options = getattr(pg._get_backend(device), "options", None)
        if options is not None:
            found.append(options._timeout.total_seconds())
    return min(found, default=DEFAULT_TIMEOUT_S)


def _not_alone(size: int) -> None:
    launch = launcher() if size == 1 else None
    if launch is not None and launch.size > 1:
        raise ConfigError(
            f"the default process group has one rank, but this process is {launch.describe()}; pass group= if that is"
            " meant"
        )
