"""A small stream machine in the place of ``cuda.bindings``: what the CUDA transports are tested on without a GPU.

``FakeCuda`` is one process's view of the driver. Physical memory is a memfd, an address reservation is one of this
process, mapping is ``mmap``: so descriptors travel between real processes, and CPU tensors look at the memory. Streams
feed a fixed number of hardware queues, as CUDA_DEVICE_MAX_CONNECTIONS sets; a queue is in order, so a stream wait at
its head holds everything behind it, also work of other streams. Values and addresses are taken when work is enqueued.
Any call can be made to fail, and everything that is alive is counted.
"""

from __future__ import annotations

import collections
import ctypes
import enum
import functools
import itertools
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from commbackend.contract import Caps, Rendezvous, Window
from commbackend.gpu import copy_kernels
from commbackend.gpu.driver import Driver, tensor_at
from commbackend.gpu.symmetric import CudaSymmetric
from commbackend.transports.mnnvl import MnnvlTransport
from commbackend.transports.userbuffers import UserbuffersTransport

GRAIN = 1 << 21
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for _name in ("munmap", "mprotect"):
    getattr(_LIBC, _name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * (_name == "mprotect")]
_RW, _SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 3, 1, 2, 0x10, 0x20, 0x4000
#: Number of parameters of every kernel, as its source declares them.
_ARITY = {m[1]: m[2].count(",") + 1 for m in re.finditer(r"(cb_\w+)\(([^)]*)\) *\{", copy_kernels.SOURCE)}


def _mmap(address: int, nbytes: int, prot: int, flags: int, fd: int = -1) -> int:
    found = _LIBC.mmap(address or None, nbytes, prot, flags, fd, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mmap of {nbytes} bytes")
    return int(found)


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801


OK = CUresult.CUDA_SUCCESS
INVALID = CUresult.CUDA_ERROR_INVALID_VALUE


@dataclass
class Gpu:
    """A GPU of the host, whoever sees it."""

    uuid: bytes
    nbytes: int = 1 << 30
    attributes: Mapping[str, int] = field(default_factory=dict)
    #: uuids of GPUs whose memory this one cannot map, and of those whose writes arrive with a bit flipped.
    unreachable: frozenset[bytes] = frozenset()
    #: Whether an IMEX channel permits fabric handles.
    imex: bool = True
    flips: frozenset[bytes] = frozenset()


def gpus(count: int, **kw: Any) -> list[Gpu]:
    return [Gpu(bytes([0xA0 + i]) * 16, **kw) for i in range(count)]


class _Names:
    """An enum whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class _Struct:
    """A C struct of the bindings, as a bag of attributes."""

    def __init__(self) -> None:
        self.location = SimpleNamespace()


class _IpcHandle:
    def __init__(self) -> None:
        self.raw = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.raw)


@dataclass(eq=False)
class _Physical:
    fd: int
    nbytes: int
    team: _Team | None = None

    @property
    def uuid(self) -> bytes:
        return bytes.fromhex(os.readlink(f"/proc/self/fd/{self.fd}").split(":")[1].split(" ")[0])


@dataclass(eq=False)
class _Team:
    """A multicast object: known to all fakes of this Python process."""

    size: int
    devices: set[bytes] = field(default_factory=set)
    bound: dict[bytes, int] = field(default_factory=dict)


_TEAMS: dict[int, _Team] = {}


@dataclass(eq=False)
class Op:
    """Work of a stream. ``step`` returns whether it has completed; a kernel does not hold its queue while it runs."""

    name: str
    stream: int
    step: Callable[[], bool]
    kernel: bool = False
    done: bool = False
    after: tuple[Op, ...] = ()


@dataclass(eq=False)
class _Event:
    record: Op | None = None


@dataclass(eq=False)
class Graph:
    """Captured work: per stream, in its order."""

    ops: list[Op] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)
    spoilt: str = ""


class StreamMachine:
    """Queues, and the thread that plays the GPU."""

    def __init__(self, connections: int, blocking: bool) -> None:
        self.queues: list[collections.deque[Op]] = [collections.deque() for _ in range(connections)]
        self.extra: list[collections.deque[Op]] = []  # branches of running graphs: no enqueue order binds them
        self.running: dict[int, Op] = {}
        self.queue_of: dict[int, int] = {0: 0}
        self.blocking = blocking
        self.paused = False
        self.capturing: Graph | None = None
        self.news = threading.Condition()
        self.progress = time.monotonic()
        self.stopping = False
        self.thread = threading.Thread(target=self._run, name="fake-gpu", daemon=True)
        self.thread.start()

    def add_stream(self, stream: int) -> None:
        self.queue_of[stream] = len(self.queue_of) % len(self.queues)

    def enqueue(self, op: Op) -> None:
        with self.news:
            if self.capturing is not None and self.capturing.thread == threading.get_ident():
                self.capturing.ops.append(op)
                return
            self.queues[self.queue_of[op.stream]].append(op)
            self.news.notify_all()
        if self.blocking and op.name != "wait_value":
            while not op.done and not self.stopping:
                time.sleep(2e-5)

    def launch(self, graph: Graph) -> None:
        """Enqueue a graph: every captured stream is a branch of its own."""
        again = {op: Op(op.name, op.stream, op.step, op.kernel) for op in graph.ops}
        for op, copy in again.items():
            copy.after = tuple(again[a] for a in op.after if a in again)
        with self.news:
            for stream in {op.stream for op in graph.ops}:
                self.extra.append(collections.deque(again[op] for op in graph.ops if op.stream == stream))
            self.news.notify_all()

    def busy(self, stream: int) -> bool:
        with self.news:
            return stream in self.running or any(op.stream == stream for q in self._all() for op in q)

    def stalled(self) -> list[str]:
        """Names of what stands at the heads of queues while nothing has moved for a while."""
        with self.news:
            heads = [f"{q[0].name} on stream {q[0].stream}" for q in self._all() if q]
            return heads if heads and time.monotonic() - self.progress > 0.2 else []

    def _all(self) -> list[collections.deque[Op]]:
        return [*self.queues, *self.extra]

    def _run(self) -> None:
        with self.news:
            while not self.stopping:
                if self.paused or not self._round():
                    self.news.wait(0.0003 if self.running or any(self._all()) else 0.05)

    def _round(self) -> bool:
        moved = False
        for stream, op in list(self.running.items()):
            if op.step():
                op.done, moved = True, True
                del self.running[stream]
        for queue in self._all():
            while queue:
                op = queue[0]
                if op.stream in self.running or not all(a.done for a in op.after):
                    break
                if op.kernel and not op.step():
                    self.running[op.stream] = op
                elif op.kernel or op.step():
                    op.done = True
                else:
                    break
                queue.popleft()
                moved = True
        self.extra = [q for q in self.extra if q]
        if moved:
            self.progress = time.monotonic()
        return moved

    def stop(self) -> None:
        with self.news:
            self.stopping = True
            self.news.notify_all()
        self.thread.join(5)


def _call(method: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """A driver function: counted, made to fail on request, with the bindings' form of result."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: FakeCuda, *args: Any) -> tuple[Any, ...]:
        self.calls[name] += 1
        left = self.failing.get(name)
        if left is not None:
            self.failing[name] = (left[0] - 1, left[1])
            if left[0] == 1:
                return (left[1],)
        found = method(self, *args)
        if isinstance(found, CUresult):
            return (found,)
        return (OK, *found) if isinstance(found, tuple) else (OK, found)

    return call


class FakeCuda:
    """The driver of one process, as the module ``cuda.bindings.driver``.

    Args:
        host: The host's GPUs. visible: Which of them this process sees, in its order (CUDA_VISIBLE_DEVICES).
        connections: Hardware queues (CUDA_DEVICE_MAX_CONNECTIONS).
        blocking: Work has completed when the call that enqueues it returns (CUDA_LAUNCH_BLOCKING), stream waits apart.
    """

    CUresult = CUresult
    CUDA_MEMCPY2D = CUmemAllocationProp = CUmemAccessDesc = CUmulticastObjectProp = _Struct
    CUipcMemHandle = _IpcHandle
    CUdevice_attribute = CUmemLocationType = CUmemAllocationType = CUmemAccess_flags = CUmemorytype = _Names()
    CUmemAllocationGranularity_flags = CUmulticastGranularity_flags = CUstreamCaptureMode = _Names()
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1, CU_MEM_HANDLE_TYPE_FABRIC=8)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)

    def __init__(
        self, host: Sequence[Gpu], visible: Sequence[int], *, connections: int = 8, blocking: bool = False
    ) -> None:
        self.host, self.visible = host, list(visible)
        self.machine = StreamMachine(connections, blocking)
        self.calls: collections.Counter[str] = collections.Counter()
        #: Calls that are to fail: name -> (at which call from now on, with which code).
        self.failing: dict[str, tuple[int, Any]] = {}
        self._ids = itertools.count(1)
        self._current = threading.local()
        self._contexts = 0
        self._used: collections.Counter[bytes] = collections.Counter()
        self._reserved: dict[int, int] = {}
        self._physical: dict[int, _Physical] = {}
        self._mapped: dict[int, tuple[int, _Physical]] = {}
        self._allocated: dict[int, tuple[int, int]] = {}
        self._opened: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        self._streams: set[int] = set()
        self._events: set[_Event] = set()
        self._modules: set[int] = set()
        self._bound = 0

    # -- for tests --------------------------------------------------------------------------------------------------
    def fail(self, name: str, code: CUresult = CUresult.CUDA_ERROR_NOT_SUPPORTED, at: int = 1) -> None:
        """Make the ``at``-th call of ``name`` from now on return ``code``."""
        self.failing[name] = (at, code)

    def live(self) -> dict[str, int]:
        """Everything that has been made and not been given back."""
        counts = {
            "contexts": self._contexts, "reservations": len(self._reserved), "handles": len(self._physical),
            "mappings": len(self._mapped), "allocations": len(self._allocated), "ipc": len(self._opened),
            "pinned": len(self._pinned), "streams": len(self._streams), "events": len(self._events),
            "modules": len(self._modules), "bound": self._bound,
        }  # fmt: skip
        return {k: v for k, v in counts.items() if v}

    def stop(self) -> None:
        self.machine.stop()

    def new_stream(self) -> int:
        """A stream of the test's own."""
        stream = 1000 + next(self._ids)
        self.machine.add_stream(stream)
        return stream

    def synchronize(self, timeout_s: float = 10.0) -> None:
        end = time.monotonic() + timeout_s
        while any(self.machine.busy(s) for s in list(self.machine.queue_of)):
            if time.monotonic() > end:
                raise TimeoutError(f"the fake GPU hangs: {self.machine.stalled()}")
            time.sleep(1e-4)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture what ``work`` enqueues."""
        graph = self.machine.capturing = Graph()
        try:
            work()
        finally:
            self.machine.capturing = None
        assert not graph.spoilt, f"{graph.spoilt} spoilt the capture"
        return graph

    def _gpu(self, ordinal: int) -> Gpu:
        return self.host[self.visible[ordinal]]

    @property
    def _here(self) -> bool:
        return getattr(self._current, "context", None) is not None

    # -- device -----------------------------------------------------------------------------------------------------
    def cuInit(self, flags: int) -> Any:
        return ()

    def cuDriverGetVersion(self) -> Any:
        return 13000

    def cuDeviceGet(self, ordinal: int) -> Any:
        return ordinal if ordinal < len(self.visible) else CUresult.CUDA_ERROR_INVALID_DEVICE

    def cuDeviceGetUuid(self, device: int) -> Any:
        return SimpleNamespace(bytes=self._gpu(device).uuid)

    def cuDeviceGetAttribute(self, name: str, device: int) -> Any:
        short = name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        default = {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0}.get(short, 1)
        return self._gpu(device).attributes.get(short, default)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        self._contexts += 1
        self._device = device
        return ("context", device)

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        self._contexts -= 1
        return ()

    def cuCtxSetCurrent(self, context: Any) -> Any:
        self._current.context = context
        return ()

    def cuCtxGetStreamPriorityRange(self) -> Any:
        return (0, -5)

    def cuMemGetInfo(self) -> Any:
        gpu = self._gpu(self._device)
        return (gpu.nbytes - self._used[gpu.uuid], gpu.nbytes)

    # -- virtual memory ---------------------------------------------------------------------------------------------
    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> Any:
        return GRAIN

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> Any:
        if nbytes % GRAIN:
            return INVALID
        found = _mmap(0, nbytes, 0, _PRIVATE | _ANONYMOUS | _NORESERVE)
        self._reserved[found] = nbytes
        return found

    def cuMemAddressFree(self, address: int, nbytes: int) -> Any:
        mapped = any(address <= a < address + nbytes for a in self._mapped)
        if self._reserved.get(address) != nbytes or mapped:
            return INVALID
        del self._reserved[address]
        _LIBC.munmap(address, nbytes)
        return ()

    def _new_memory(self, gpu: Gpu, nbytes: int) -> int | None:
        if self._used[gpu.uuid] + nbytes > gpu.nbytes:
            return None
        self._used[gpu.uuid] += nbytes
        fd = os.memfd_create(gpu.uuid.hex())
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, b"\xcd" * 4096, 0)  # new memory holds anything but zeros
        return fd

    def cuMemCreate(self, nbytes: int, prop: Any, flags: int) -> Any:
        if nbytes % GRAIN or prop.requestedHandleTypes not in (1, 8):
            return INVALID
        if prop.requestedHandleTypes == 8 and not self._gpu(prop.location.id).imex:
            return CUresult.CUDA_ERROR_NOT_PERMITTED
        fd = self._new_memory(self._gpu(prop.location.id), nbytes)
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY if fd is None else self._hold(_Physical(fd, nbytes))

    def _hold(self, physical: _Physical) -> int:
        handle = next(self._ids)
        self._physical[handle] = physical
        return handle

    def cuMemRelease(self, handle: int) -> Any:
        physical = self._physical.pop(handle, None)
        if physical is None:
            return INVALID
        self._let_go(physical)
        return ()

    def _let_go(self, physical: _Physical) -> None:
        """Close memory that neither a handle nor a mapping needs."""
        if physical not in self._physical.values() and all(p is not physical for _, p in self._mapped.values()):
            if physical.team is None and physical.uuid == self._gpu(self._device).uuid:
                self._used[physical.uuid] = max(0, self._used[physical.uuid] - physical.nbytes)
            os.close(physical.fd)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> Any:
        fd = self._physical[handle].fd
        if kind == 1:
            return os.dup(fd)
        # A fabric handle names the memory to every process, as the name of an open file of this one does.
        return SimpleNamespace(data=f"/proc/{os.getpid()}/fd/{fd}".encode().ljust(64, b"\0"))

    def cuMemImportFromShareableHandle(self, given: Any, kind: int) -> Any:
        fd = os.dup(given) if kind == 1 else os.open(given.rstrip(b"\0"), os.O_RDWR | os.O_CLOEXEC)
        stat = os.fstat(fd)
        return self._hold(_Physical(fd, stat.st_size, _TEAMS.get(stat.st_ino)))

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> Any:
        physical = self._physical[handle]
        inside = any(a <= address and address + nbytes <= a + n for a, n in self._reserved.items())
        taken = any(a < address + nbytes and address < a + n for a, (n, _) in self._mapped.items())
        if not inside or taken or nbytes > physical.nbytes or nbytes % GRAIN or address % 4096:
            return INVALID
        if physical.team is not None and len(physical.team.devices) < physical.team.size:
            raise AssertionError("cuMemMap of a multicast object would block: not every device has joined")
        _mmap(address, nbytes, 0, _SHARED | _FIXED, physical.fd)
        self._mapped[address] = (nbytes, physical)
        return ()

    def cuMemSetAccess(self, address: int, nbytes: int, access: Any, count: int) -> Any:
        size, physical = self._mapped.get(address, (0, None))
        if size != nbytes or physical is None:
            return INVALID
        if physical.team is None and physical.uuid in self._gpu(access[0].location.id).unreachable:
            return CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
        _LIBC.mprotect(address, nbytes, _RW)
        return ()

    def cuMemUnmap(self, address: int, nbytes: int) -> Any:
        if self._mapped.get(address, (0, None))[0] != nbytes:
            return INVALID
        _, physical = self._mapped.pop(address)
        _mmap(address, nbytes, 0, _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED)
        self._let_go(physical)
        return ()

    # -- memory of the older kinds ----------------------------------------------------------------------------------
    def cuMemAlloc(self, nbytes: int) -> Any:
        fd = self._new_memory(self._gpu(self._device), nbytes)
        if fd is None:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY
        address = _mmap(0, nbytes, _RW, _SHARED, fd)
        self._allocated[address] = (nbytes, fd)
        return address

    def cuMemFree(self, address: int) -> Any:
        if address not in self._allocated:
            return INVALID
        nbytes, fd = self._allocated.pop(address)
        self._used[self._gpu(self._device).uuid] -= nbytes
        _LIBC.munmap(address, nbytes)
        os.close(fd)
        return ()

    def cuIpcGetMemHandle(self, address: int) -> Any:
        handle = _IpcHandle()
        handle.raw.raw = struct.pack("<QQQ", os.getpid(), self._allocated[address][1], 7).ljust(64, b"\0")
        return handle

    def cuIpcOpenMemHandle(self, handle: _IpcHandle, flags: int) -> Any:
        pid, fd, _ = struct.unpack_from("<QQQ", handle.raw.raw)
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        nbytes = os.fstat(opened).st_size
        address = _mmap(0, nbytes, _RW, _SHARED, opened)
        os.close(opened)
        self._opened[address] = nbytes
        return address

    def cuIpcCloseMemHandle(self, address: int) -> Any:
        _LIBC.munmap(address, self._opened.pop(address))
        return ()

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        address = _mmap(0, nbytes, _RW, _PRIVATE | _ANONYMOUS)
        self._pinned[address] = nbytes
        return address

    def cuMemFreeHost(self, address: int) -> Any:
        _LIBC.munmap(address, self._pinned.pop(address))
        return ()

    # -- multicast --------------------------------------------------------------------------------------------------
    def cuMulticastGetGranularity(self, prop: Any, option: Any) -> Any:
        return GRAIN

    def cuMulticastCreate(self, prop: Any) -> Any:
        fd = os.memfd_create("multicast")
        os.ftruncate(fd, prop.size)
        team = _TEAMS[os.fstat(fd).st_ino] = _Team(prop.numDevices)
        return self._hold(_Physical(fd, prop.size, team))

    def cuMulticastAddDevice(self, handle: int, device: int) -> Any:
        team = self._physical[handle].team
        assert team is not None
        team.devices.add(self._gpu(device).uuid)
        return ()

    def cuMulticastBindMem(self, handle: int, at: int, memory: int, offset: int, nbytes: int, flags: int) -> Any:
        team, physical = self._physical[handle].team, self._physical[memory]
        assert team is not None
        if len(team.devices) < team.size:
            raise AssertionError("cuMulticastBindMem would block: not every device has joined")
        team.bound[physical.uuid] = physical.fd
        self._bound += 1
        return ()

    def cuMulticastUnbind(self, handle: int, device: int, at: int, nbytes: int) -> Any:
        team = self._physical[handle].team
        assert team is not None
        if team.bound.pop(self._gpu(device).uuid, None) is None:
            return INVALID
        self._bound -= 1
        return ()

    # -- streams and events -----------------------------------------------------------------------------------------
    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        stream = next(self._ids) + 10
        self._streams.add(stream)
        self.machine.add_stream(stream)
        return stream

    def cuStreamDestroy(self, stream: int) -> Any:
        self._streams.remove(stream)
        return ()

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        self._current.relaxed = mode == "CU_STREAM_CAPTURE_MODE_RELAXED"
        return mode

    def _unsafe(self, name: str) -> None:
        """A call that spoils a capture, made by whichever thread, unless that thread has relaxed its mode."""
        graph = self.machine.capturing
        if graph is not None and not getattr(self._current, "relaxed", False):
            graph.spoilt = name

    def cuStreamQuery(self, stream: int) -> Any:
        self._unsafe("cuStreamQuery")
        return CUresult.CUDA_ERROR_NOT_READY if self.machine.busy(stream) else ()

    def cuEventCreate(self, flags: int) -> Any:
        event = _Event()
        self._events.add(event)
        return event

    def cuEventRecord(self, event: _Event, stream: int) -> Any:
        event.record = self._add("event", stream, lambda: True)
        return ()

    def cuEventQuery(self, event: _Event) -> Any:
        self._unsafe("cuEventQuery")
        return () if event.record is None or event.record.done else CUresult.CUDA_ERROR_NOT_READY

    def cuEventDestroy(self, event: _Event) -> Any:
        self._events.remove(event)
        return ()

    def cuStreamWaitEvent(self, stream: int, event: _Event, flags: int) -> Any:
        self._add("wait_event", stream, lambda: True, after=(event.record,) if event.record else ())
        return ()

    # -- work -------------------------------------------------------------------------------------------------------
    def _add(self, name: str, stream: int, step: Callable[[], bool], **kw: Any) -> Op:
        op = Op(name, stream, step, **kw)
        self.machine.enqueue(op)
        return op

    def _move(self, dst: int, src: int, nbytes: int) -> None:
        ctypes.memmove(dst, src, nbytes)
        for address, (size, physical) in list(self._mapped.items()):
            there = address <= dst < address + size and physical.team is None
            if there and nbytes > 4096 and physical.uuid in self._gpu(self._device).flips:
                ctypes.c_uint8.from_address(dst + nbytes // 2).value ^= 1

    def cuMemcpyAsync(self, dst: int, src: int, nbytes: int, stream: int) -> Any:
        if not self._here:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT
        self._add("copy", stream, lambda: self._move(dst, src, nbytes) is None)
        return ()

    def cuMemcpy2DAsync(self, rect: Any, stream: int) -> Any:
        if rect.WidthInBytes > min(rect.srcPitch, rect.dstPitch):
            return INVALID
        rows = self._rows(rect.dstDevice, rect.dstPitch, rect.srcDevice, rect.srcPitch, rect.WidthInBytes, rect.Height)
        self._add("copy2d", stream, rows)
        return ()

    def _rows(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int) -> Callable[[], bool]:
        def step() -> bool:
            for row in range(rows):
                self._move(dst + row * dst_pitch, src + row * src_pitch, width)
            return True

        return step

    def cuMemsetD8Async(self, address: int, byte: int, nbytes: int, stream: int) -> Any:
        self._add("fill", stream, lambda: ctypes.memset(address, byte, nbytes) is not None)
        return ()

    def cuStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> Any:
        if not self._here:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT
        self._add("write_value", stream, lambda: _store(address, value))
        return ()

    def cuStreamWaitValue64(self, stream: int, address: int, value: int, flags: int) -> Any:
        self._add("wait_value", stream, lambda: _word(address).value >= value)
        return ()

    def cuStreamBatchMemOp(self, stream: int, count: int, params: int, flags: int) -> Any:
        if not self._here:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT
        for i in range(count):
            operation, address, value, _ = struct.unpack_from("<IxxxxQqI", ctypes.string_at(params + 48 * i, 48))
            if operation not in (4, 5):
                return INVALID
            if operation == 4:
                self._add("wait_value", stream, functools.partial(_reached, address, value))
            else:
                self._add("write_value", stream, functools.partial(_store, address, value))
        return ()

    def cuModuleLoadData(self, image: bytes) -> Any:
        module = next(self._ids)
        self._modules.add(module)
        return module

    def cuModuleGetFunction(self, module: int, name: bytes) -> Any:
        return name.decode() if name.decode() in _ARITY else CUresult.CUDA_ERROR_INVALID_HANDLE

    def cuModuleUnload(self, module: int) -> Any:
        self._modules.remove(module)
        return ()

    def cuLaunchKernel(self, name: str, *launch: Any) -> Any:
        grid, block, stream, pointers = launch[0], launch[3], launch[7], launch[8]
        addresses = (ctypes.c_void_p * _ARITY[name]).from_address(pointers)
        args = [ctypes.c_int64.from_address(a or 0).value for a in addresses]
        if not (0 < grid < 1 << 31 and 0 < block <= 1024):
            return INVALID
        self._add(name, stream, getattr(self, f"_{name}")(*args), kernel=True)
        return ()

    # -- kernels: what copy_kernels.SOURCE says, in Python ----------------------------------------------------------
    def _cb_copy(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int) -> Any:
        return self._rows(dst, dst_pitch, src, src_pitch, width, rows)

    def _cb_put(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, slot: int, value: int
    ) -> Any:
        copy = self._rows(dst, dst_pitch, src, src_pitch, width, rows)
        return lambda: copy() and _store(slot, value)

    def _cb_raise(self, slot: int, value: int, epoch: int) -> Any:
        return lambda: _store(slot, value + (_word(epoch).value if epoch else 0))

    def _cb_wait(
        self, slot: int, value: int, epoch: int, timeout_ns: int, status: int, report: int, tag: int, poison: int
    ) -> Callable[[], bool]:
        start: list[float] = []

        def step() -> bool:
            start.append(time.monotonic()) if not start else None
            wanted, seen = value + (_word(epoch).value if epoch else 0), _word(slot).value
            late = time.monotonic() - start[0] > timeout_ns * 1e-9
            if (seen >= wanted and seen < poison) or (_word(status).value and seen < poison):
                start.clear()
                return True
            if seen < poison and not late:
                return False
            state = copy_kernels.POISONED if seen >= poison else copy_kernels.TIMED_OUT
            if _word(status).value == 0:
                _store(status, state)
                for i, word in enumerate((tag, wanted, seen), 1):
                    _store(report + 8 * i, word)
                _store(report, state)
            start.clear()
            return True

        return step

    def _cb_guard(self, dst: int, pitch: int, width: int, rows: int, status: int) -> Any:
        def step() -> bool:
            for row in range(rows if _word(status).value else 0):
                ctypes.memset(dst + row * pitch, 0xFF, width)
            return True

        return step

    def _cb_advance(self, epoch: int) -> Any:
        return lambda: _store(epoch, _word(epoch).value + 1)

    def _cb_multicast(self, address: int, value: int) -> Any:
        def step() -> bool:
            for start, (nbytes, physical) in self._mapped.items():
                if start <= address < start + nbytes and physical.team is not None:
                    for fd in physical.team.bound.values():
                        os.pwrite(fd, struct.pack("<q", value), address - start)
            return True

        return step


for _key, _method in list(vars(FakeCuda).items()):
    if _key.startswith("cu") and callable(_method):
        setattr(FakeCuda, _key, _call(_method))


def _word(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def _reached(address: int, value: int) -> bool:
    return bool(_word(address).value >= value)


def _store(address: int, value: int) -> bool:
    _word(address).value = value
    return True


class FakeNvrtc:
    """``cuda.bindings.nvrtc`` whose cubin is the source."""

    def nvrtcGetSupportedArchs(self) -> Any:
        return OK, [80, 90, 100]

    def nvrtcCreateProgram(self, source: bytes, *rest: Any) -> Any:
        return OK, source

    def nvrtcCompileProgram(self, program: bytes, count: int, options: Any) -> Any:
        return (OK,)

    def nvrtcGetCUBINSize(self, program: bytes) -> Any:
        return OK, len(program)

    def nvrtcGetCUBIN(self, program: bytes, image: bytearray) -> Any:
        image[:] = program
        return (OK,)

    def nvrtcDestroyProgram(self, program: bytes) -> Any:
        return (OK,)


class FakeDriver(Driver):
    """``Driver`` over a fake, its tensors on the CPU."""

    api: FakeCuda

    def __init__(self, ordinal: int, fake: FakeCuda, rank: int) -> None:
        batch = lambda *args: int(fake.cuStreamBatchMemOp(*args)[0])  # noqa: E731 - libcuda's form of result
        super().__init__(ordinal, rank=rank, api=fake, nvrtc=FakeNvrtc(), batch=batch)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return tensor_at(address, nbytes, 1, 0)

    def current_stream(self) -> int:
        return 0

    def strided_copy(self, dst: torch.Tensor, src: torch.Tensor, stream: int) -> None:
        self.api._add("strided", stream, lambda: dst.copy_(src) is not None)


class _OnFake(CudaSymmetric):
    """A transport on ``fakes[rank]``: its tensors are on the CPU, its GPU is the first that the fake sees."""

    fakes: ClassVar[dict[int, FakeCuda]]

    def _put(self, dst: Window, src: torch.Tensor, *rest: Any) -> None:
        # A caching allocator gives memory out again in stream order; the CPU's gives it out at once.
        self.__dict__.setdefault("sources", []).append(src)
        super()._put(dst, src, *rest)

    @classmethod
    def probe(cls, device: torch.device) -> None:
        if device.type != "cpu":
            super().probe(device)  # which says what is missing on a machine without a GPU

    @classmethod
    def open_driver(cls, device: torch.device, rank: int) -> Driver:
        return FakeDriver(device.index or 0, cls.fakes[rank], rank)


class FakeUserbuffers(_OnFake, UserbuffersTransport):
    """``userbuffers`` on fakes."""


class FakeMnnvl(_OnFake, MnnvlTransport):
    """``mnnvl`` on fakes."""

    @classmethod
    def probe(cls, device: torch.device) -> None:
        if device.type != "cpu":
            super().probe(device)
        else:
            cls._try_fabric(cls.open_driver(device, 0))


class _InProcess(_OnFake):
    """For suites that run ranks as processes: each makes its own fake and puts it in the place of ``torch.cuda``.

    Work completes when it is enqueued, as under CUDA_LAUNCH_BLOCKING=1, because CPU tensors are freed at once.
    """

    fakes: ClassVar[dict[int, FakeCuda]] = {}

    @classmethod
    def connect(cls, group: Rendezvous, device: torch.device, options: Mapping[str, Any]) -> CudaSymmetric:
        if group.rank not in cls.fakes:
            cls.fakes[group.rank] = FakeCuda(gpus(8), [group.rank, (group.rank + 1) % 8], blocking=True)
        fake = cls.fakes[group.rank]
        torch.cuda.synchronize = lambda *_: fake.synchronize()  # type: ignore[assignment]
        torch.cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=0)  # type: ignore[assignment]
        torch.cuda.Stream = lambda *_: SimpleNamespace(cuda_stream=fake.new_stream())  # type: ignore[assignment,misc]
        return super().connect(group, device, options)


class ProcessUserbuffers(_InProcess, FakeUserbuffers):
    caps: Caps = replace(UserbuffersTransport.caps, device="cpu")


class ProcessMnnvl(_InProcess, FakeMnnvl):
    caps: Caps = replace(MnnvlTransport.caps, device="cpu")

    @classmethod
    def probe(cls, device: torch.device) -> None:
        if device.type != "cpu":
            super().probe(device)
