"""Ahead-of-time compilation and launch of Triton kernels: no compiler, no specialisation and no allocation in a call.

Triton's own launcher compiles a new variant when an integer argument happens to be 1 or a multiple of 16, and spends
tens of microseconds a launch. Here a kernel is compiled once from a fixed signature (``Runtime.compile``), loaded
through the driver, and launched with a parameter buffer that is packed in one go.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..contract import POISON, torch_stream
from ..errors import CommAborted, CommBackendError, CommTimeout, Unavailable

__all__ = ["CudaDriver", "Driver", "FaultRecord", "Loaded", "Runtime"]

#: dtype -> (Triton's name, CUtensorMapDataType). fp8 travels as bytes.
DTYPES: Mapping[torch.dtype, tuple[str, int]] = {
    torch.bfloat16: ("bf16", 9),
    torch.float16: ("fp16", 6),
    torch.float32: ("fp32", 7),
    torch.float8_e4m3fn: ("fp8e4nv", 0),
    torch.float8_e5m2: ("fp8e5", 0),
}


#: Words of the fault record: kind (0 none, 1 timeout, 2 poison, -1 being written), writer, word, wanted, seen.
FAULT_WORDS = 8
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Driver(Protocol):
    """What is needed of the CUDA driver; tests replace it."""

    def capability(self) -> int:
        """Compute capability of the device, times 10."""
        ...

    def multiprocessors(self) -> int: ...
    def shared_nbytes(self) -> int:
        """Shared memory a block may opt in to."""
        ...

    def load(self, cubin: bytes, name: str, shared_nbytes: int) -> int:
        """Load a module, return the function ``name`` with its dynamic shared memory allowed."""
        ...

    def launch(self, function: int, grid: int, threads: int, shared_nbytes: int, stream: int, params: int) -> None: ...
    def encode(
        self,
        into: int,
        kind: int,
        address: int,
        rows: int,
        cols: int,
        ld_nbytes: int,
        box: tuple[int, int],
        swizzle: int,
    ) -> None:
        """Write the tensor map of a row-major matrix to the 64-byte aligned host address ``into``."""
        ...

    def upload(self, dst: int, src: bytes, stream: int) -> None:
        """Copy to the device in stream order. ``src`` may be reused at once."""
        ...

    def upload_now(self, dst: int, src: bytes) -> None:
        """Copy to the device and wait for it, beside whatever is being captured. Not for memory that is in use."""
        ...

    def follow(self, stream: int, other: int) -> None:
        """Make ``stream`` wait for what ``other`` has been given so far."""
        ...

    def current_stream(self) -> int: ...
    def capturing(self, stream: int) -> bool: ...


class CudaDriver:
    """The driver API of one device, through ctypes: nothing to install beyond the driver itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as e:
            raise Unavailable(f"libcuda.so.1 cannot be loaded: {e}", "install the NVIDIA driver") from e
        u, p, i = ctypes.c_uint, ctypes.c_void_p, ctypes.c_int
        self._launch = self._function("cuLaunchKernel", p, u, u, u, u, u, u, u, p, p, p)
        self._load = self._function("cuModuleLoadData", p, p)
        self._get = self._function("cuModuleGetFunction", p, p, ctypes.c_char_p)
        self._attribute = self._function("cuFuncSetAttribute", p, i, i)
        self._encode = self._function("cuTensorMapEncodeTiled", p, i, u, p, p, p, p, p, i, i, i, i)
        self._upload = self._function("cuMemcpyHtoDAsync_v2", ctypes.c_uint64, p, ctypes.c_size_t, p)
        self._capture = self._function("cuStreamIsCapturing", p, p)
        self._exchange_mode = self._function("cuThreadExchangeStreamCaptureMode", p)
        self._synchronize = self._function("cuStreamSynchronize", p)
        torch.cuda.init()
        properties: Any = torch.cuda.get_device_properties(self.device)
        self._capability = 10 * properties.major + properties.minor
        self._sms = properties.multi_processor_count
        self._shared = int(properties.shared_memory_per_block_optin)
        self._event, self._beside = torch.cuda.Event(), torch.cuda.Stream(self.device)
        self._state = ctypes.c_int()
        self._dims, self._ld = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 1)()
        self._box, self._ones = (ctypes.c_uint32 * 2)(), (ctypes.c_uint32 * 2)(1, 1)

    def _function(self, name: str, *argtypes: Any) -> Callable[..., int]:
        function = getattr(self._lib, name)
        function.argtypes, function.restype = argtypes, ctypes.c_int
        found: Callable[..., int] = function
        return found

    def _check(self, code: int, what: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(code, ctypes.byref(text))
            said = (text.value or b"unknown error").decode()
            raise CommBackendError(f"{what} failed on {self.device}: CUDA error {code}: {said}")

    def capability(self) -> int:
        return int(self._capability)

    def multiprocessors(self) -> int:
        return int(self._sms)

    def shared_nbytes(self) -> int:
        return self._shared

    def load(self, cubin: bytes, name: str, shared_nbytes: int) -> int:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().query()  # makes the primary context current in this thread
            self._check(self._load(ctypes.byref(module), cubin), f"cuModuleLoadData of {name}")
            self._check(self._get(ctypes.byref(function), module, name.encode()), f"cuModuleGetFunction {name}")
            # 8: MAX_DYNAMIC_SHARED_SIZE_BYTES; more than 48 KiB must be asked for.
            self._check(
                self._attribute(function, 8, shared_nbytes), f"cuFuncSetAttribute {name}, {shared_nbytes} bytes"
            )
        return function.value or 0

    def launch(self, function: int, grid: int, threads: int, shared_nbytes: int, stream: int, params: int) -> None:
        code = self._launch(function, grid, 1, 1, threads, 1, 1, shared_nbytes, stream, params, None)
        if code:
            self._check(code, f"cuLaunchKernel of {grid} blocks of {threads} threads, {shared_nbytes} bytes")

    def encode(
        self,
        into: int,
        kind: int,
        address: int,
        rows: int,
        cols: int,
        ld_nbytes: int,
        box: tuple[int, int],
        swizzle: int,
    ) -> None:
        self._dims[0], self._dims[1] = cols, rows
        self._ld[0] = ld_nbytes
        self._box[0], self._box[1] = box[1], box[0]
        # Interleave none, L2 promotion to 128 bytes, zeros out of bounds.
        code = self._encode(into, kind, 2, address, self._dims, self._ld, self._box, self._ones, 0, swizzle, 2, 0)
        if code:
            self._check(
                code, f"cuTensorMapEncodeTiled of {rows}x{cols}, {ld_nbytes} bytes a row, box {box}, at {address:#x}"
            )

    def upload(self, dst: int, src: bytes, stream: int) -> None:
        # From pageable memory: the driver stages the bytes before it returns.
        self._check(self._upload(dst, src, len(src), stream), f"cuMemcpyHtoDAsync of {len(src)} bytes")

    def upload_now(self, dst: int, src: bytes) -> None:
        mode, stream = ctypes.c_int(_RELAXED), self._beside.cuda_stream
        self._check(self._exchange_mode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
        try:
            self.upload(dst, src, stream)
            self._check(self._synchronize(stream), "cuStreamSynchronize")
        finally:
            self._check(self._exchange_mode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")

    def follow(self, stream: int, other: int) -> None:
        self._event.record(torch_stream(other, self.device))
        self._event.wait(torch_stream(stream, self.device))

    def current_stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def capturing(self, stream: int) -> bool:
        self._check(self._capture(stream, ctypes.byref(self._state)), "cuStreamIsCapturing")
        return bool(self._state.value)


class FaultRecord:
    """The first fault of any kernel of one runtime: sticky, written by the kernel, read by the host without
    synchronising."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.zeros(FAULT_WORDS, dtype=torch.int64, device=device)
        self.host = torch.zeros(FAULT_WORDS, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._kind = ctypes.c_int64.from_address(self.host.data_ptr())

    def error(self, op: str = "") -> CommBackendError | None:
        """The fault as an exception, or None."""
        kind = self._kind.value
        if not kind:
            return None
        writer, word, wanted, seen = self.host[1:5].tolist()
        where = f"a kernel waited for rank {writer}: word {word}"
        if kind == 2:
            return CommAborted(
                f"{where} holds {seen}: the communicator has failed (poison is {POISON})", rank=writer, op=op
            )
        return CommTimeout(
            f"{where} is {seen}, wanted {wanted}, at its deadline", rank=writer, op=op, wanted=wanted, seen=seen
        )

    def clear(self) -> None:
        """Forget the fault. Synchronises; for a caller that has thrown away everything the fault touched."""
        self.device.zero_()
        if self.device.is_cuda:
            torch.cuda.synchronize(self.device.device)
        self.host.zero_()


@dataclass(slots=True)
class Loaded:
    """A kernel with a parameter buffer: maps first, then every scalar and pointer as 8 bytes (a 4-byte parameter reads
    the low half)."""

    function: int
    threads: int
    shared_nbytes: int
    names: tuple[str, ...]
    maps: tuple[str, ...]
    boxes: Mapping[str, tuple[tuple[int, int], int]]
    scratch: torch.Tensor | None
    asm: Mapping[str, Any]
    _buffer: Any = field(init=False)
    _base: int = field(init=False)
    _params: Any = field(init=False)
    _pack: struct.Struct = field(init=False)
    _encoded: dict[tuple[str, int, int, int, int], bytes] = field(init=False, default_factory=dict)
    _present: dict[str, tuple[str, int, int, int, int]] = field(init=False, default_factory=dict)

    def layout(self, order: Sequence[str]) -> None:
        """Lay out the buffer. ``order``: the kernel's parameters; a map is followed by its shape and strides, which
        these kernels never read."""
        scalars = [n for n in order if n not in self.maps]
        self._pack = struct.Struct(f"<{len(scalars)}q")
        nbytes = 128 * len(self.maps) + 8 + 8 * len(scalars) + 16
        self._buffer = (ctypes.c_char * (nbytes + 64))()
        self._base = -(-ctypes.addressof(self._buffer) // 64) * 64
        zero = self._base + 128 * len(self.maps)
        at = {n: self._base + 128 * i for i, n in enumerate(self.maps)}
        at |= {n: zero + 8 + 8 * i for i, n in enumerate(scalars)}
        addresses: list[int] = []
        for name in order:
            addresses += [at[name], zero, zero, zero, zero] if name in self.maps else [at[name]]
        # Triton appends two scratch pointers to every kernel.
        scratch = zero + 8 + 8 * len(scalars)
        addresses += [scratch, zero]
        ctypes.c_uint64.from_address(scratch).value = 0 if self.scratch is None else self.scratch.data_ptr()
        self._params = (ctypes.c_void_p * len(addresses))(*addresses)
        self.names = tuple(scalars)

    def map(self, driver: Driver, name: str, kind: int, address: int, rows: int, cols: int, ld_nbytes: int) -> None:
        """Make parameter ``name`` the tensor map of a matrix; encoded maps are remembered."""
        key = (name, address, rows, cols, ld_nbytes)
        if self._present.get(name) == key:
            return
        into = self._base + 128 * self.maps.index(name)
        found = self._encoded.get(key)
        if found is None:
            box, swizzle = self.boxes[name]
            driver.encode(into, kind, address, rows, cols, ld_nbytes, box, swizzle)
            if len(self._encoded) >= 512:
                self._encoded.clear()
            self._encoded[key] = ctypes.string_at(into, 128)
        else:
            ctypes.memmove(into, found, 128)
        self._present[name] = key

    def launch(self, driver: Driver, grid: int, stream: int, scalars: Sequence[int]) -> None:
        """Enqueue ``grid`` blocks. ``scalars``: values of ``names``, in that order."""
        self._pack.pack_into(
            self._buffer, self._base - ctypes.addressof(self._buffer) + 128 * len(self.maps) + 8, *scalars
        )
        driver.launch(self.function, grid, self.threads, self.shared_nbytes, stream, ctypes.addressof(self._params))


class Runtime:
    """Compiles and loads kernels for one device.

    Attributes:
        compilations: Kernels compiled and loaded so far. It does not grow in a call.
        fault: What went wrong in a kernel, sticky.
    """

    def __init__(self, driver: Driver, device: torch.device) -> None:
        self.driver, self.device = driver, device
        self.compilations = 0
        self.fault = FaultRecord(device)
        self.capability, self.sms, self.shared_nbytes = (
            driver.capability(),
            driver.multiprocessors(),
            driver.shared_nbytes(),
        )

    def compile(
        self,
        kernel: Any,
        types: Mapping[str, str],
        constants: Mapping[str, Any],
        aligned: Mapping[str, int],
        *,
        warps: int,
        stages: int,
        ctas: int = 1,
    ) -> Loaded:
        """Compile ``kernel`` for exactly these argument types and load it.

        Args:
            types: Argument name -> Triton type; the names in ``constants`` are compile-time constants.
            aligned: Argument name -> what it is always a multiple of (pointers: bytes).
            ctas: Most blocks on one SM.
        """
        compiled = compile_offline(kernel, types, constants, aligned, self.capability, warps=warps, stages=stages)
        meta = compiled.metadata
        order = [n for n in kernel.arg_names if n not in constants]
        maps = tuple(n for n in order if types[n].startswith("tensordesc"))
        expected = len(order) + 4 * len(maps) + 2
        found = parameters(compiled.asm["ptx"])
        if found != expected:
            import triton

            raise Unavailable(
                f"kernel {meta.name} has {found} parameters, {expected} expected",
                f"triton {triton.__version__} lays parameters out in an unknown way: use triton 3.6 to 3.9",
            )
        described = meta.tensordesc_meta if maps else ()
        boxes = {n: (tuple(d["block_size"]), d["swizzle"]) for n, d in zip(maps, described, strict=True)}
        scratch = None
        if meta.global_scratch_size:
            scratch = torch.empty(meta.global_scratch_size * self.sms * ctas, dtype=torch.uint8, device=self.device)
        function = self.driver.load(compiled.asm["cubin"], meta.name, meta.shared)
        self.compilations += 1
        loaded = Loaded(function, 32 * warps, meta.shared, (), maps, boxes, scratch, compiled.asm)
        loaded.layout(order)
        return loaded


def compile_offline(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: Mapping[str, int],
    capability: int,
    *,
    warps: int,
    stages: int,
) -> Any:
    """Compile ``kernel`` for ``capability`` (80, 90, 100 ...); needs no GPU. Returns Triton's compiled kernel
    (``asm``, ``metadata``)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", aligned[n]]]
        for i, n in enumerate(kernel.arg_names)
        if n in aligned and n not in constants
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=attrs)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def parameters(ptx: str) -> int:
    """Number of parameters of the one kernel in ``ptx``."""
    entry = re.search(r"\.entry\s+\w+\((.*?)\)\s*\n", ptx, re.S)
    return 0 if entry is None else entry.group(1).count(".param")
