"""The CUDA driver as this package uses it: one table of calls over ``cuda-bindings``, plain integers in and out.

Everything CUDA transports ask of a GPU goes through ``Driver``. It takes the binding modules as arguments, so a test
puts a small stream machine in their place and every line here still runs. Every call's result is checked in one place
(``Driver.error``), which turns a code into an exception of ``commbackend.errors`` that says what was called, with which
size, by which rank, on which device, and what helps.

A ``Driver`` belongs to one device of one process. Its methods want that device to be current in the calling thread
(``make_current`` does so; threads that use torch on the device have it already). Any thread may call them.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import torch_stream
from ..errors import CommBackendError, HeapExhausted, Unavailable

if TYPE_CHECKING:
    import torch

__all__ = ["Driver", "DriverError", "import_bindings", "tensor_at"]

#: What helps, by symbolic code.
_HINTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free device memory or ask for a smaller heap",
    "CUDA_ERROR_NOT_PERMITTED": "the driver forbids this handle type here; fabric handles need an IMEX channel device",
    "CUDA_ERROR_NOT_SUPPORTED": "this GPU, driver or container lacks the feature",
    "CUDA_ERROR_INVALID_DEVICE": "the peer's GPU is not visible or not reachable from this process",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "no peer-to-peer path between these GPUs (PCIe ACS, IOMMU, or topology)",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the fabric manager or the NVSwitch driver is not running",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the user-mode and kernel-mode drivers differ; check the container's libcuda",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel or copy touched unmapped memory; this context is lost, restart the process",
    "CUDA_ERROR_INVALID_CONTEXT": "make the transport's device current in this thread (torch.cuda.device)",
}


class DriverError(CommBackendError):
    """A CUDA driver call failed.

    Attributes:
        call: Name of the driver function.
        code: Its symbolic result, e.g. "CUDA_ERROR_INVALID_VALUE".
    """

    def __init__(self, message: str, *, call: str, code: str) -> None:
        super().__init__(message)
        self.call, self.code = call, code


def import_bindings() -> tuple[Any, Any]:
    """Return the modules ``cuda.bindings.driver`` and ``.nvrtc``. Raises Unavailable where they are absent."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as e:
        raise Unavailable(
            f"cuda-bindings cannot be imported: {e}", "pip install cuda-bindings of the driver's CUDA version"
        ) from e
    return driver, nvrtc


def _libcuda_batch() -> Callable[[int, int, int, int], int]:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    except (OSError, AttributeError) as e:
        raise Unavailable(f"libcuda has no cuStreamBatchMemOp: {e}", "install a driver for CUDA 11.7 or newer") from e
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint), ctypes.c_int
    found: Callable[[int, int, int, int], int] = function
    return found


class _Blocks(threading.local):
    """Where arguments of hot calls are packed: made once a thread, so that no thread waits for another's launch (which
    may block, under CUDA_LAUNCH_BLOCKING=1).
    """

    def __init__(self, api: Any) -> None:
        self.rect = api.CUDA_MEMCPY2D()
        self.rect.srcMemoryType = self.rect.dstMemoryType = api.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        self.args: Any = (ctypes.c_uint64 * 16)()
        base = ctypes.addressof(self.args)
        self._pointers = (ctypes.c_void_p * 16)(*(base + 8 * i for i in range(16)))
        self.pointers_at = ctypes.addressof(self._pointers)


class Driver:
    """One device of this process, by its ordinal here (an ordinal never leaves the process; ``uuid`` does).

    Args:
        ordinal: The device, as torch counts.
        rank: For messages.
        api, nvrtc: The binding modules; ``import_bindings()`` if None.
        batch: cuStreamBatchMemOp by addresses, (stream, count, params, flags) -> code; libcuda's own if None.
    """

    def __init__(
        self, ordinal: int, *, rank: int = -1, api: Any = None, nvrtc: Any = None,
        batch: Callable[[int, int, int, int], int] | None = None,
    ) -> None:  # fmt: skip
        if api is None:
            api, nvrtc = import_bindings()
        self.api, self.nvrtc, self.ordinal, self.rank = api, nvrtc, ordinal, rank
        try:
            self.call("cuInit", 0)
        except RuntimeError as e:  # cuda-bindings loads libcuda at the first call
            why = " ".join(str(e).split())
            raise Unavailable(f"the CUDA driver cannot be loaded: {why}", "install the NVIDIA driver") from e
        self.device = self.call("cuDeviceGet", ordinal)
        self.context: Any = None
        # The calls of the hot path, looked up once.
        self._memcpy, self._memcpy_2d = api.cuMemcpyAsync, api.cuMemcpy2DAsync
        self._write_value, self._wait_value = api.cuStreamWriteValue64, api.cuStreamWaitValue64
        self._launch = api.cuLaunchKernel
        # The bindings would copy a batch, object by object, at every call.
        self._batch = batch or _libcuda_batch()
        self._geq = int(api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        self._blocks = _Blocks(api)

    # -- results ----------------------------------------------------------------------------------------------------
    def call(self, name: str, *args: Any, nbytes: int = -1) -> Any:
        """Call driver function ``name``; return its one result, a tuple of several, or None. For everything but hot
        calls.
        """
        code, *out = getattr(self.api, name)(*args)
        if code != 0:
            raise self.error(name, code, nbytes)
        return out[0] if len(out) == 1 else (tuple(out) or None)

    def error(self, call: str, code: Any, nbytes: int = -1) -> CommBackendError:
        """Return the exception for result ``code`` of ``call``."""
        symbol = getattr(code, "name", None) or f"CUresult {int(code)}"
        size = f" of {nbytes} bytes" if nbytes >= 0 else ""
        text = (
            f"{call}{size} failed with {symbol} ({int(code)}) on rank {self.rank}, cuda:{self.ordinal} of its process"
        )
        if symbol == "CUDA_ERROR_OUT_OF_MEMORY":
            available = self._free_nbytes()
            return HeapExhausted(f"{text}: needed {nbytes} bytes, available {available} ({_HINTS[symbol]})")
        hint = _HINTS.get(symbol, "")
        return DriverError(f"{text} ({hint})" if hint else text, call=call, code=symbol)

    def _free_nbytes(self) -> int:
        code, *sizes = self.api.cuMemGetInfo()
        return int(sizes[0]) if code == 0 else -1

    # -- device and context -----------------------------------------------------------------------------------------
    def attribute(self, name: str) -> int:
        """Value of device attribute CU_DEVICE_ATTRIBUTE_``name``; 0 where the binding does not know the name."""
        key = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return 0 if key is None else int(self.call("cuDeviceGetAttribute", key, self.device))

    def version(self) -> int:
        """Driver version, as 1000 * major + 10 * minor of the CUDA it supports."""
        return int(self.call("cuDriverGetVersion"))

    def uuid(self) -> bytes:
        """16 bytes that name this GPU (or MIG slice) in every process of the host."""
        name = "cuDeviceGetUuid_v2" if hasattr(self.api, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return bytes(self.call(name, self.device).bytes)

    def open(self) -> None:
        """Hold the device's primary context, which torch uses too, and make it current in this thread."""
        if self.context is None:
            self.context = self.call("cuDevicePrimaryCtxRetain", self.device)
        self.make_current()

    def make_current(self) -> None:
        self.call("cuCtxSetCurrent", self.context)

    def relax_capture(self) -> None:
        """Let this thread make calls that would otherwise spoil a CUDA graph that another thread is capturing."""
        self.call("cuThreadExchangeStreamCaptureMode", self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)

    def close(self) -> None:
        """Let the primary context go. Idempotent."""
        if self.context is not None:
            self.context = None
            self.call("cuDevicePrimaryCtxRelease", self.device)

    # -- virtual memory ---------------------------------------------------------------------------------------------
    def _location(self, owner: Any) -> Any:
        owner.location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        owner.location.id = self.ordinal
        return owner

    def _shareable(self, fabric: bool) -> Any:
        kinds = self.api.CUmemAllocationHandleType
        return kinds.CU_MEM_HANDLE_TYPE_FABRIC if fabric else kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _memory(self, fabric: bool) -> Any:
        prop = self._location(self.api.CUmemAllocationProp())
        prop.type = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = self._shareable(fabric)
        return prop

    def granularity(self, fabric: bool = False) -> int:
        """Bytes that sizes and addresses of mapped memory are multiples of."""
        which = self.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self.call("cuMemGetAllocationGranularity", self._memory(fabric), which))

    def reserve(self, nbytes: int) -> int:
        """Reserve ``nbytes`` of addresses; no memory is behind them yet."""
        return int(self.call("cuMemAddressReserve", nbytes, 0, 0, 0, nbytes=nbytes))

    def free_reserved(self, address: int, nbytes: int) -> None:
        self.call("cuMemAddressFree", address, nbytes, nbytes=nbytes)

    def create(self, nbytes: int, fabric: bool = False) -> Any:
        """Allocate physical memory on this device that other processes can map, or with ``fabric`` other hosts of the
        NVLink domain too; returns a handle to ``release``.
        """
        return self.call("cuMemCreate", nbytes, self._memory(fabric), 0, nbytes=nbytes)

    def release(self, handle: Any) -> None:
        self.call("cuMemRelease", handle)

    def export(self, handle: Any, fabric: bool = False) -> Any:
        """What others import ``handle`` by: a file descriptor, which the caller closes, or 64 bytes."""
        found = self.call("cuMemExportToShareableHandle", handle, self._shareable(fabric), 0)
        return bytes(found.data) if fabric else int(found)

    def import_(self, given: Any, fabric: bool = False) -> Any:
        """A handle for what ``export`` gave; a descriptor may be closed afterwards."""
        return self.call("cuMemImportFromShareableHandle", given, self._shareable(fabric))

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self.call("cuMemMap", address, nbytes, 0, handle, 0, nbytes=nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self.call("cuMemUnmap", address, nbytes, nbytes=nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        """Let this device read and write ``nbytes`` mapped at ``address``."""
        access = self._location(self.api.CUmemAccessDesc())
        access.flags = self.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.call("cuMemSetAccess", address, nbytes, [access], 1, nbytes=nbytes)

    # -- memory of the older kinds ----------------------------------------------------------------------------------
    def alloc(self, nbytes: int) -> int:
        return int(self.call("cuMemAlloc", nbytes, nbytes=nbytes))

    def free(self, address: int) -> None:
        self.call("cuMemFree", address)

    def ipc_handle(self, address: int) -> bytes:
        """64 bytes by which another process opens the allocation that starts at ``address``."""
        raw = self.call("cuIpcGetMemHandle", address)  # keeps alive what getPtr points to
        return ctypes.string_at(int(raw.getPtr()), 64)

    def ipc_open(self, handle: bytes) -> int:
        raw = self.api.CUipcMemHandle()
        ctypes.memmove(int(raw.getPtr()), handle, 64)
        flag = int(self.api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return int(self.call("cuIpcOpenMemHandle", raw, flag))

    def ipc_close(self, address: int) -> None:
        self.call("cuIpcCloseMemHandle", address)

    def host_alloc(self, nbytes: int) -> int:
        """Page-locked host memory that kernels reach at the same address."""
        portable_mapped = 0x1 | 0x2  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
        return int(self.call("cuMemHostAlloc", nbytes, portable_mapped, nbytes=nbytes))

    def host_free(self, address: int) -> None:
        self.call("cuMemFreeHost", address)

    # -- streams, events --------------------------------------------------------------------------------------------
    def stream(self) -> int:
        """A new stream that neither waits for the default stream nor for anything else, of the highest priority."""
        _, greatest = self.call("cuCtxGetStreamPriorityRange")
        flag = int(self.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self.call("cuStreamCreateWithPriority", flag, greatest))

    def stream_destroy(self, stream: int) -> None:
        self.call("cuStreamDestroy", stream)

    def idle(self, stream: int) -> bool:
        """Whether everything enqueued on ``stream`` has completed."""
        return self._done("cuStreamQuery", stream)

    def settle(self, stream: int, timeout_s: float) -> bool:
        """Wait on the host until ``stream`` is idle. Never on the hot path."""
        end, pause = time.monotonic() + timeout_s, 20e-6
        while not self.idle(stream):
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        return True

    def event(self) -> Any:
        return self.call("cuEventCreate", int(self.api.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def event_record(self, event: Any, stream: int) -> None:
        self.call("cuEventRecord", event, stream)

    def event_done(self, event: Any) -> bool:
        return self._done("cuEventQuery", event)

    def event_destroy(self, event: Any) -> None:
        self.call("cuEventDestroy", event)

    def _done(self, name: str, what: Any) -> bool:
        (code,) = getattr(self.api, name)(what)
        if code == 0:
            return True
        if getattr(code, "name", "") == "CUDA_ERROR_NOT_READY":
            return False
        raise self.error(name, code)

    # -- enqueued work: the hot path --------------------------------------------------------------------------------
    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between any two addresses (device, peer or page-locked host) on a copy engine."""
        (code,) = self._memcpy(dst, src, nbytes, stream)
        if code != 0:
            self._again("cuMemcpyAsync", code, nbytes, lambda: self._memcpy(dst, src, nbytes, stream))

    def copy_rows(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, row_nbytes: int, rows: int, stream: int
    ) -> None:
        """Enqueue a copy of ``rows`` rows, ``*_pitch`` bytes from row to row, on a copy engine."""
        rect = self._blocks.rect
        rect.srcDevice, rect.srcPitch, rect.dstDevice, rect.dstPitch = src, src_pitch, dst, dst_pitch
        rect.WidthInBytes, rect.Height = row_nbytes, rows
        (code,) = self._memcpy_2d(rect, stream)
        if code != 0:
            self._again("cuMemcpy2DAsync", code, row_nbytes * rows, lambda: self._memcpy_2d(rect, stream))

    def write_value(self, address: int, value: int, stream: int) -> None:
        """Enqueue a 64-bit store that is ordered, at system scope, after all earlier work of ``stream``."""
        (code,) = self._write_value(stream, address, value, 0)  # 0: with the memory barrier
        if code != 0:
            self._again("cuStreamWriteValue64", code, 8, lambda: self._write_value(stream, address, value, 0))

    def wait_value(self, address: int, value: int, stream: int) -> None:
        """Hold ``stream`` until the 64-bit word at ``address`` is ``value`` or more. No SM spins; no deadline."""
        (code,) = self._wait_value(stream, address, value, self._geq)
        if code != 0:
            again = self._wait_value
            self._again("cuStreamWaitValue64", code, 8, lambda: again(stream, address, value, self._geq))

    def memops(self, params: int, count: int, stream: int) -> None:
        """Enqueue the ``count`` stores and waits whose CUstreamBatchMemOpParams are at host address ``params``."""
        code = self._batch(stream, count, params, 0)
        if code:
            named = self.api.CUresult(code)
            self._again(
                "cuStreamBatchMemOp", named, 8 * count,
                lambda: (self.api.CUresult(self._batch(stream, count, params, 0)),),
            )  # fmt: skip

    def launch(self, kernel: Any, grid: int, block: int, args: Sequence[int], stream: int) -> None:
        """Enqueue ``kernel``, whose parameters are all 64 bits wide (so that packing them is one assignment)."""
        blocks = self._blocks
        blocks.args[: len(args)] = args
        call = (kernel, grid, 1, 1, block, 1, 1, 0, stream, blocks.pointers_at, 0)
        (code,) = self._launch(*call)
        if code != 0:
            self._again("cuLaunchKernel", code, -1, lambda: self._launch(*call))

    def _again(self, name: str, code: Any, nbytes: int, call: Callable[[], tuple[Any, ...]]) -> None:
        """After a hot call failed: in a thread that has no device yet, give it this one and call again; else raise."""
        if getattr(code, "name", "") == "CUDA_ERROR_INVALID_CONTEXT" and self.context is not None:
            self.make_current()
            (code,) = call()
        if code != 0:
            raise self.error(name, code, nbytes)

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        self.call("cuMemsetD8Async", address, byte, nbytes, stream, nbytes=nbytes)

    # -- modules ----------------------------------------------------------------------------------------------------
    def module(self, image: bytes) -> Any:
        return self.call("cuModuleLoadData", image, nbytes=len(image))

    def kernel(self, module: Any, name: str) -> Any:
        return self.call("cuModuleGetFunction", module, name.encode())

    def module_unload(self, module: Any) -> None:
        self.call("cuModuleUnload", module)

    # -- multicast (NVLS) -------------------------------------------------------------------------------------------
    def _multicast(self, size: int, nbytes: int, fabric: bool) -> Any:
        prop = self.api.CUmulticastObjectProp()
        prop.numDevices, prop.size, prop.handleTypes, prop.flags = size, nbytes, int(self._shareable(fabric)), 0
        return prop

    def multicast_granularity(self, size: int, nbytes: int, fabric: bool = False) -> int:
        which = self.api.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
        return int(self.call("cuMulticastGetGranularity", self._multicast(size, nbytes, fabric), which))

    def multicast_create(self, size: int, nbytes: int, fabric: bool = False) -> Any:
        """A multicast object for ``size`` devices; exported, imported, mapped and released like memory."""
        return self.call("cuMulticastCreate", self._multicast(size, nbytes, fabric), nbytes=nbytes)

    def multicast_join(self, handle: Any) -> None:
        self.call("cuMulticastAddDevice", handle, self.device)

    def multicast_bind(self, handle: Any, memory: Any, nbytes: int) -> None:
        """Put ``memory`` behind the object for this device. Blocks until every device has joined: vote first."""
        self.call("cuMulticastBindMem", handle, 0, memory, 0, nbytes, 0, nbytes=nbytes)

    def multicast_unbind(self, handle: Any, nbytes: int) -> None:
        self.call("cuMulticastUnbind", handle, self.device, 0, nbytes, nbytes=nbytes)

    # -- torch ------------------------------------------------------------------------------------------------------
    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """``nbytes`` bytes at ``address`` as a 1-D uint8 tensor of this device. It owns nothing."""
        return tensor_at(address, nbytes, 2, self.ordinal)

    def current_stream(self) -> int:
        """torch's current stream of this device."""
        import torch

        return int(torch.cuda.current_stream(self.ordinal).cuda_stream)

    def strided_copy(self, dst: torch.Tensor, src: torch.Tensor, stream: int) -> None:
        """Enqueue an elementwise copy by torch's kernel, for layouts that are not rows of bytes."""
        import torch

        with torch.cuda.stream(torch_stream(stream, self.ordinal)):
            dst.copy_(src, non_blocking=True)


class _DLTensor(ctypes.Structure):
    # The DLManagedTensor of DLPack's C header, its DLTensor flattened in.
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


# A consumer may look at its struct until its last tensor goes, possibly after this module is torn down: without a
# deleter nothing of ours is called then, at the price of keeping about 150 bytes for every view ever made.
_KEPT: list[object] = []


def tensor_at(address: int, nbytes: int, device_type: int, device_id: int) -> torch.Tensor:
    """Return a 1-D uint8 tensor over raw memory, without a copy.

    DLPack and not ``__cuda_array_interface__``, because it says which device the tensor is on: memory of a peer that
    is mapped here must count as this device's, or torch refuses to mix the two in one product.
    """
    import torch

    shape = (ctypes.c_int64 * 1)(nbytes)
    strides = (ctypes.c_int64 * 1)(1)
    raw = _DLTensor(address, device_type, device_id, 1, 1, 8, 1, shape, strides, 0, None, None)
    _KEPT.append((raw, shape, strides))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return torch.utils.dlpack.from_dlpack(new(ctypes.addressof(raw), b"dltensor", None))
