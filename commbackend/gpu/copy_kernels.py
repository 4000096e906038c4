"""CUDA C++ kernels of the CUDA transports, compiled by NVRTC for the GPU at hand, and their launches.

Copy engines and stream memory operations do the same work without an SM and are the default. Kernels are for where
those do not reach: a chosen number of CTAs (``comm_ctas``), values that are only known when a CUDA graph replays
(``epoch``), waits that must end by a deadline of their own, and the fill of outputs after a fault.

Every parameter of every kernel is 64 bits wide. ``Kernels.load`` compiles, loads and launches each kernel once, so that
no later launch compiles or loads anything.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import CommBackendError, Unavailable
from .driver import Driver

__all__ = ["KERNELS", "SOURCE", "TIMED_OUT", "Kernels", "Move", "compile_source", "moves"]

KERNELS = ("cb_copy", "cb_put", "cb_raise", "cb_wait", "cb_guard", "cb_advance", "cb_multicast")
#: Words of the report that ``cb_wait`` leaves in host memory: state, tag, wanted, seen.
REPORT_WORDS = 4
#: States of the status word and the report.
TIMED_OUT, POISONED = 1, 2
_BLOCK = 512
# More copies than this, or rows farther apart than a copy engine takes: element by element instead.
_MOST_MOVES, _MOST_PITCH = 16, 1 << 31

SOURCE = r"""
typedef unsigned long long u64;
typedef long long s64;

__device__ __forceinline__ u64 load_acquire(const u64 *p) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_release(u64 *p, u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// Byte offset of element i of rows that are ``width`` elements of ``unit`` bytes, ``pitch`` bytes apart.
__device__ __forceinline__ u64 offset_of(u64 i, u64 width, u64 unit, u64 pitch, bool small) {
    const u64 row = small ? (u64)((unsigned)i / (unsigned)width) : i / width;  // 64-bit division is many times slower
    return row * pitch + (i - row * width) * unit;
}

// rows x row_nbytes; 16 bytes a load where both sides allow it, four loads in flight a thread.
__device__ __forceinline__ void copy_rows(
        char *dst, u64 dst_pitch, const char *src, u64 src_pitch, u64 row_nbytes, u64 rows) {
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    const bool flat = rows == 1 || (dst_pitch == row_nbytes && src_pitch == row_nbytes);
    if (flat) { row_nbytes *= rows; rows = 1; dst_pitch = src_pitch = 0; }
    const u64 unit = ((((u64)dst | (u64)src | row_nbytes | dst_pitch | src_pitch) & 15) == 0) ? 16 : 1;
    const u64 width = row_nbytes / unit, total = width * rows;
    const bool small = total < (1ull << 32);
    u64 i = first;
    if (unit == 16) {
        for (; i + 3 * step < total; i += 4 * step) {
            uint4 v[4];
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const u64 k = i + j * step;
                v[j] = *(const uint4 *)(src + (flat ? k * 16 : offset_of(k, width, 16, src_pitch, small)));
            }
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const u64 k = i + j * step;
                *(uint4 *)(dst + (flat ? k * 16 : offset_of(k, width, 16, dst_pitch, small))) = v[j];
            }
        }
        for (; i < total; i += step)
            *(uint4 *)(dst + offset_of(i, width, 16, dst_pitch, small)) =
                *(const uint4 *)(src + offset_of(i, width, 16, src_pitch, small));
        return;
    }
    for (; i < total; i += step)
        dst[offset_of(i, width, 1, dst_pitch, small)] = src[offset_of(i, width, 1, src_pitch, small)];
}

extern "C" __global__ void __launch_bounds__(512) cb_copy(
        char *dst, u64 dst_pitch, const char *src, u64 src_pitch, u64 row_nbytes, u64 rows) {
    copy_rows(dst, dst_pitch, src, src_pitch, row_nbytes, rows);
}

// One CTA: copy, then raise the slot: every thread's stores are ordered before the barrier, and it before the store.
extern "C" __global__ void __launch_bounds__(512) cb_put(
        char *dst, u64 dst_pitch, const char *src, u64 src_pitch, u64 row_nbytes, u64 rows, u64 *slot, u64 value) {
    copy_rows(dst, dst_pitch, src, src_pitch, row_nbytes, rows);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) store_release(slot, value);
}

// One thread: slot = value (+ *epoch), after all earlier work of the stream.
extern "C" __global__ void cb_raise(u64 *slot, u64 value, const u64 *epoch) {
    __threadfence_system();
    store_release(slot, value + (epoch ? *epoch : 0));
}

// One thread: return when *slot >= value (+ *epoch). At the deadline, or where the slot is poisoned, set *status and,
// once, the report in host memory; later waits return at once then.
extern "C" __global__ void cb_wait(
        const u64 *slot, u64 value, const u64 *epoch, u64 timeout_ns, u64 *status, u64 *report, u64 tag, u64 poison) {
    const u64 wanted = value + (epoch ? *epoch : 0), start = now_ns();
    unsigned pause = 20;
    u64 seen, state = 0;
    while (true) {
        seen = load_acquire(slot);
        if ((s64)seen >= (s64)poison) { state = 2; break; }
        if ((s64)seen >= (s64)wanted) break;
        if (load_acquire(status)) return;
        if (now_ns() - start > timeout_ns) { state = 1; break; }
        __nanosleep(pause);
        if (pause < 640) pause *= 2;
    }
    if (state && atomicCAS_system(status, 0ull, state) == 0) {
        report[1] = tag;
        report[2] = wanted;
        report[3] = seen;
        store_release(report, state);
    }
}

// Fill with 0xff bytes (NaN in every float format there is) if *status is set.
extern "C" __global__ void cb_guard(char *dst, u64 pitch, u64 row_nbytes, u64 rows, const u64 *status) {
    if (load_acquire(status) == 0) return;
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < row_nbytes * rows; i += step)
        dst[(i / row_nbytes) * pitch + i % row_nbytes] = (char)0xff;
}

// One thread: the epoch of a CUDA graph's next replay.
extern "C" __global__ void cb_advance(u64 *epoch) { *epoch += 1; }

// One thread: a store to a multicast address reaches every rank's memory.
extern "C" __global__ void cb_multicast(u64 *address, u64 value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("multimem.st.release.sys.global.u64 [%0], %1;" :: "l"(address), "l"(value) : "memory");
#endif
}
"""


@lru_cache(maxsize=8)
def compile_source(nvrtc: Any, capability: int, source: str = SOURCE) -> bytes:
    """Compile for compute capability ``capability`` (90 for 9.0). Needs no GPU.

    Returns a cubin, or PTX where NVRTC is older than the GPU (the driver finishes the work then).
    Raises Unavailable with the compiler's words.
    """

    def check(result: tuple[Any, ...]) -> Any:
        code, *out = result
        if code != 0:
            raise Unavailable(f"NVRTC failed with {getattr(code, 'name', code)}", "install NVRTC of the CUDA version")
        return out[0] if out else None

    try:
        supported = [int(a) for a in check(nvrtc.nvrtcGetSupportedArchs())] if _lists(nvrtc) else []
    except RuntimeError as e:  # cuda-bindings loads libnvrtc at the first call
        why = " ".join(str(e).split())
        raise Unavailable(f"NVRTC cannot be loaded: {why}", "pip install nvidia-cuda-nvrtc") from e
    native = not supported or capability in supported
    arch = f"sm_{capability}" if native else f"compute_{max(a for a in supported if a <= capability)}"
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"commbackend.cu", 0, [], []))
    try:
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if code != 0:
            text = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
            check(nvrtc.nvrtcGetProgramLog(program, text))
            raise Unavailable(f"NVRTC cannot compile for {arch}: {bytes(text).rstrip(bytes(1)).decode()}")
        size, get = ("nvrtcGetCUBINSize", "nvrtcGetCUBIN") if native else ("nvrtcGetPTXSize", "nvrtcGetPTX")
        image = bytearray(check(getattr(nvrtc, size)(program)))
        check(getattr(nvrtc, get)(program, image))
        return bytes(image)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _lists(nvrtc: Any) -> bool:
    return hasattr(nvrtc, "nvrtcGetSupportedArchs")


class Kernels:
    """The kernels of one device and their launches. Local; every launch is a few microseconds of host time."""

    def __init__(self, driver: Driver) -> None:
        capability = 10 * driver.attribute("COMPUTE_CAPABILITY_MAJOR") + driver.attribute("COMPUTE_CAPABILITY_MINOR")
        self._driver = driver
        self._module = driver.module(compile_source(driver.nvrtc, capability))
        try:
            self._copy, self._put, self._raise, self._wait, self._guard, self._advance, self._multicast = (
                driver.kernel(self._module, name) for name in KERNELS
            )
        except CommBackendError:
            self.close()
            raise

    def copy(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, row_nbytes: int, rows: int, ctas: int, stream: int
    ) -> None:
        """Copy rows with ``ctas`` CTAs."""
        self._driver.launch(self._copy, ctas, _BLOCK, (dst, dst_pitch, src, src_pitch, row_nbytes, rows), stream)

    def put(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, row_nbytes: int, rows: int, slot: int, value: int,
        stream: int,
    ) -> None:  # fmt: skip
        """Copy rows with one CTA, which then stores ``value`` to the slot."""
        args = (dst, dst_pitch, src, src_pitch, row_nbytes, rows, slot, value)
        self._driver.launch(self._put, 1, _BLOCK, args, stream)

    def raise_slot(self, slot: int, value: int, epoch: int, stream: int) -> None:
        """Store ``value``, plus the word at ``epoch`` if that is not 0, after all earlier work of ``stream``."""
        self._driver.launch(self._raise, 1, 1, (slot, value, epoch), stream)

    def wait_slot(
        self, slot: int, value: int, epoch: int, timeout_ns: int, status: int, report: int, tag: int, poison: int,
        stream: int,
    ) -> None:  # fmt: skip
        """Hold ``stream`` until the slot is there, ``timeout_ns`` after the kernel began at the latest."""
        self._driver.launch(self._wait, 1, 1, (slot, value, epoch, timeout_ns, status, report, tag, poison), stream)

    def guard(self, dst: int, pitch: int, row_nbytes: int, rows: int, status: int, stream: int) -> None:
        """Fill rows with 0xff bytes if the word at ``status`` is set by then."""
        grid = max(1, min(64, row_nbytes * rows // (16 * _BLOCK)))
        self._driver.launch(self._guard, grid, _BLOCK, (dst, pitch, row_nbytes, rows, status), stream)

    def advance(self, epoch: int, stream: int) -> None:
        """Add one to the word at ``epoch``."""
        self._driver.launch(self._advance, 1, 1, (epoch,), stream)

    def multicast_store(self, address: int, value: int, stream: int) -> None:
        """Store to a multicast address."""
        self._driver.launch(self._multicast, 1, 1, (address, value), stream)

    def load(self, scratch: int, stream: int) -> None:
        """Launch every kernel once on 128 zero bytes at ``scratch`` (multicast excepted, which needs an address of its
        kind).

        CUDA loads a kernel at its first launch and may synchronise for that: never while a peer waits.
        """
        self.copy(scratch, 16, scratch + 16, 16, 16, 1, 1, stream)
        self.put(scratch, 16, scratch + 16, 16, 16, 1, scratch + 56, 1, stream)
        self.raise_slot(scratch + 32, 1, 0, stream)
        self.wait_slot(scratch + 32, 1, 0, 1_000_000_000, scratch + 40, scratch + 64, 0, 1 << 62, stream)
        self.guard(scratch, 16, 16, 1, scratch + 40, stream)
        self.advance(scratch + 48, stream)

    def close(self) -> None:
        self._driver.module_unload(self._module)


class Move(NamedTuple):
    """A copy of rows, in bytes; offsets are from the first elements."""

    dst: int
    src: int
    row_nbytes: int
    rows: int
    dst_pitch: int
    src_pitch: int


@lru_cache(maxsize=4096)
def moves(
    shape: tuple[int, ...], dst_stride: tuple[int, ...], src_stride: tuple[int, ...], itemsize: int
) -> tuple[Move, ...] | None:
    """Return the copies of rows that copy a strided tensor, or None where element by element is better."""
    dims = [(n, d, s) for n, d, s in zip(shape, dst_stride, src_stride, strict=True) if n != 1]
    merged: list[tuple[int, int, int]] = []
    for n, d, s in reversed(dims):
        if merged and d == merged[-1][1] * merged[-1][0] and s == merged[-1][2] * merged[-1][0]:
            n0, d0, s0 = merged[-1]
            merged[-1] = (n0 * n, d0, s0)
        else:
            merged.append((n, d, s))
    if not merged:
        return (Move(0, 0, itemsize, 1, itemsize, itemsize),)
    width, unit_d, unit_s = merged[0]
    if (unit_d, unit_s) != (1, 1):
        return None
    row_nbytes = width * itemsize
    if len(merged) == 1:
        return (Move(0, 0, row_nbytes, 1, row_nbytes, row_nbytes),)
    rows, d, s = merged[1]
    if min(d, s) * itemsize < row_nbytes or max(d, s) * itemsize >= _MOST_PITCH:
        return None
    starts = [(0, 0)]
    for n, outer_d, outer_s in merged[2:]:
        starts = [(a + i * outer_d, b + i * outer_s) for a, b in starts for i in range(n)]
        if len(starts) > _MOST_MOVES:
            return None
    return tuple(Move(a * itemsize, b * itemsize, row_nbytes, rows, d * itemsize, s * itemsize) for a, b in starts)
