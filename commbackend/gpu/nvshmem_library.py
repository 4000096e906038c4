"""NVSHMEM as this package uses it: one table of calls over ``nvshmem4py``, and the one instance a process can have.

NVSHMEM is initialised once a process, over a fixed set of processing elements (PEs); its allocations are collective
over all of them. So all communicators of a process share one instance, which must consist of exactly their ranks. An
instance that the application (or torch) has initialised is used as it is and not finalised.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CommBackendError, Unavailable

__all__ = ["Instance", "Nvshmem", "NvshmemError", "attach", "import_nvshmem"]

_INSTALL = 'pip install "commbackend[cu13]" (nvidia-nvshmem and nvshmem4py of the same CUDA version)'


class NvshmemError(CommBackendError):
    """A call of NVSHMEM failed. Attributes: call: its name."""

    def __init__(self, message: str, *, call: str) -> None:
        super().__init__(message)
        self.call = call


def import_nvshmem() -> tuple[Any, Any]:
    """Return the modules ``nvshmem.core`` and ``nvshmem.bindings``. Raises Unavailable where they cannot be used."""
    try:
        import nvshmem.bindings
        import nvshmem.core
    except Exception as e:  # its import runs other packages', which raise anything
        raise Unavailable(f"nvshmem4py cannot be imported: {type(e).__name__}: {e}", _INSTALL) from e
    try:
        nvshmem.core.get_version()
    except Exception as e:
        raise Unavailable(f"the NVSHMEM library cannot be loaded: {type(e).__name__}: {e}", _INSTALL) from e
    return nvshmem.core, nvshmem.bindings


class Nvshmem:
    """The calls, with errors that name them. Addresses, PEs and streams are plain integers.

    Args:
        core, bindings: The modules; a test puts others in their place.
    Attributes:
        loaded: What stands for the library that this process has loaded.
    """

    def __init__(self, core: Any, bindings: Any) -> None:
        self._core, self._bindings = core, bindings
        self.loaded = bindings
        self._set = int(bindings.Signal_op.SIGNAL_SET)
        self._geq = int(bindings.Cmp_type.CMP_GE)
        self._put, self._put_signal = bindings.putmem_on_stream, bindings.putmem_signal_on_stream
        self._get, self._quiet = bindings.getmem_on_stream, bindings.quiet_on_stream
        self._signal, self._wait = bindings.signal_op_on_stream, bindings.signal_wait_until_on_stream

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as e:  # the bindings raise classes of their own, and RuntimeError where a symbol is missing
            raise NvshmemError(f"nvshmem {name} failed: {type(e).__name__}: {e}", call=name) from e

    # -- the instance ------------------------------------------------------------------------------------------------
    def initialised(self) -> bool:
        status = int(self.call("init_status", self._bindings.init_status))
        found = self._bindings.Init_status
        return int(found.STATUS_IS_INITIALIZED) <= status < int(found.STATUS_INVALID)

    def shares_a_gpu_without_mps(self) -> bool:
        """Whether PEs share a GPU in a way in which the library ends the process at its first wait or barrier."""
        return int(self.call("init_status", self._bindings.init_status)) == int(
            self._bindings.Init_status.STATUS_LIMITED_MPG
        )

    def unique_id(self) -> bytes:
        """What ``init`` needs on every rank; made by one."""
        uid = self.call("get_uniqueid", self._core.get_unique_id)
        return ctypes.string_at(int(uid.ptr), self._bindings.uniqueid_dtype.itemsize)

    def init(self, ordinal: int, raw: bytes, rank: int, size: int) -> None:
        """Join the instance that ``raw`` names as PE ``rank`` of ``size``. Collective."""
        from cuda.core import Device

        device = Device(ordinal)
        device.set_current()
        uid = self._core.get_unique_id(empty=True)
        ctypes.memmove(int(uid.ptr), raw, len(raw))

        def join() -> None:
            self._core.init(device=device, uid=uid, rank=rank, nranks=size, initializer_method="uid")

        self.call("init", join)

    def init_mpi(self, ordinal: int, comm: Any) -> None:
        """Join the instance of an mpi4py communicator's ranks. Collective."""
        from cuda.core import Device

        device = Device(ordinal)
        device.set_current()
        self.call("init", lambda: self._core.init(device=device, mpi_comm=comm, initializer_method="mpi"))

    def finalise(self) -> None:
        self.call("finalize", self._core.finalize)

    def my_pe(self) -> int:
        return int(self.call("my_pe", self._bindings.my_pe))

    def n_pes(self) -> int:
        return int(self.call("n_pes", self._bindings.n_pes))

    # -- memory ------------------------------------------------------------------------------------------------------
    def malloc(self, nbytes: int) -> int:
        """Symmetric memory, or 0. Collective over all PEs, without a deadline: vote first."""
        return int(self.call("malloc", self._bindings.align, 512, nbytes))

    def free(self, address: int) -> None:
        """Collective over all PEs, without a deadline."""
        self.call("free", self._bindings.free, address)

    def reach(self, address: int, pe: int) -> int:
        """Where ``pe``'s copy of the symmetric ``address`` is mapped here, or 0: then only puts and gets reach it."""
        return int(self.call("ptr", self._bindings.ptr, address, pe))

    # -- enqueued work -----------------------------------------------------------------------------------------------
    def put(self, dst: int, src: int, nbytes: int, pe: int, stream: int) -> None:
        self.call("putmem_on_stream", self._put, dst, src, nbytes, pe, stream)

    def put_signal(self, dst: int, src: int, nbytes: int, word: int, value: int, pe: int, stream: int) -> None:
        """A put, then the word at ``pe``. The signal covers these bytes alone."""
        self.call("putmem_signal_on_stream", self._put_signal, dst, src, nbytes, word, value, self._set, pe, stream)

    def get(self, dst: int, src: int, nbytes: int, pe: int, stream: int) -> None:
        self.call("getmem_on_stream", self._get, dst, src, nbytes, pe, stream)

    def quiet(self, stream: int) -> None:
        """Hold ``stream`` until its puts and signals are complete at their targets."""
        self.call("quiet_on_stream", self._quiet, stream)

    def signal(self, word: int, value: int, pe: int, stream: int) -> None:
        self.call("signal_op_on_stream", self._signal, word, value, self._set, pe, stream)

    def wait(self, word: int, value: int, stream: int) -> None:
        """Hold ``stream`` until the word here is ``value`` or more, and make what was put before it visible."""
        self.call("signal_wait_until_on_stream", self._wait, word, self._geq, value, stream)


class Instance:
    """The process's instance of NVSHMEM, and how many communicators use it.

    Attributes:
        orphans: Memory of communicators that ended by a fault, in the order of its allocation: giving it back is
            collective, so it waits for the next communicator of these ranks.
    """

    def __init__(self, library: Nvshmem, *, ours: bool) -> None:
        self.library, self.ours, self.users = library, ours, 0
        self.orphans: list[int] = []

    def leave(self, *, healthy: bool) -> None:
        """One user less; the last one finalises what this package has initialised. Collective when healthy.

        Finalising waits for all PEs: after a fault it would hang, so the instance stays, until a communicator of the
        same ranks leaves it in order or the process ends.
        """
        with _lock:
            self.users -= 1
            last = healthy and not self.users and not self.orphans
            if last:
                _present.pop(self.library.loaded, None)
        if last and self.ours:
            self.library.finalise()


_lock = threading.Lock()
#: By the loaded library, of which a process has one.
_present: dict[Any, Instance] = {}


def attach(
    library: Nvshmem,
    rank: int,
    size: int,
    exchange: Callable[[bytes], Sequence[bytes]],
    init: Callable[[bytes], None],
) -> tuple[Instance, list[int]]:
    """Make this process's instance one of ``size`` ranks, or find that it is. Collective.

    Args:
        exchange: All-gather of bytes among the ranks.
        init: Initialises NVSHMEM from a unique id (empty where it needs none).
    Returns:
        The instance, and the PE of every rank.
    Raises:
        Unavailable: Some rank is in another instance, or in one that a fault has left uneven; on every rank.
    """
    with _lock:
        present = _present.get(library.loaded)
    found = exchange(b"in" if library.initialised() else b"out")
    if set(found) == {b"out"}:
        uid = exchange(library.unique_id() if rank == 0 else b"")[0]
        init(uid)
        present = Instance(library, ours=True)
    elif set(found) == {b"in"}:
        present = present or Instance(library, ours=False)
        _free_orphans(present, exchange)
    else:
        raise Unavailable(f"NVSHMEM is initialised on rank(s) {_ranks(found, b'in')} only", "initialise it on all")
    pes = [int.from_bytes(raw[:4], "little") for raw in exchange(_facts(library))]
    total = library.n_pes()
    if sorted(pes) != list(range(size)) or total != size:
        raise Unavailable(
            f"NVSHMEM runs over {total} PEs and this group is PEs {pes}: its allocations are collective over all",
            "use one group of all its PEs, or userbuffers, mnnvl or nccl for this group",
        )
    with _lock:
        present.users += 1
        _present[library.loaded] = present
    return present, pes


def _free_orphans(present: Instance, exchange: Callable[[bytes], Sequence[bytes]]) -> None:
    """Give back what communicators that failed have left, if every rank has as much of it. Collective."""
    counts = [int.from_bytes(raw, "little") for raw in exchange(len(present.orphans).to_bytes(4, "little"))]
    if len(set(counts)) > 1:
        raise Unavailable(f"a fault has left NVSHMEM with {counts} allocations, by rank", "restart the processes")
    while present.orphans:
        present.library.free(present.orphans.pop(0))


def _facts(library: Nvshmem) -> bytes:
    return library.my_pe().to_bytes(4, "little")


def _ranks(found: Sequence[bytes], what: bytes) -> str:
    return ", ".join(str(r) for r, f in enumerate(found) if f == what)
