"""The polling GEMM on CUDA: one persistent Triton kernel that waits for flags, multiplies, folds received partials in,
and raises flags.

Nothing has to be launched between chunks. Rows are taken segment by segment in the order the caller gives. A tile never
straddles two segments, so a segment whose rows are no multiple of ``granularity`` ends with a tile that is partly idle:
at most ``granularity - 1`` rows of work a segment.

A kernel that polls holds its SMs until its flags have risen. It therefore leaves ``RESERVED_SMS`` SMs to kernels of
others (the application's collectives that precede a peer's put, a transport's copy kernels);
``TritonTile(reserve_sms=...)`` or ``sm_limit=`` of a call say otherwise. What it costs was measured: 128 of
an H200's 132 SMs cost at most 3 %, mostly nothing, since they divide most counts of tiles; 124 cost 2-13 % at
m >= 4096, up to 27 % at 2048 and 53 % at 512.

Fast variants want what TMA and vector loads want: operands with one unit stride, addresses and other strides that are
multiples of 16 bytes, n a multiple of 8. Anything else (odd k or n, transposed a) runs on a general variant with
strided
loads: right, polling as well, and slow.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from ..contract import ExchangeMemory, ExchangeProvider, GemmProblem, GemmProvider, GemmSegment, SumProvider
from ..errors import ShapeError, Unavailable, Unsupported
from .triton_choice import FP8, GENERAL, RESERVED_SMS, TileConfig, choose
from .triton_launch import DTYPES, CudaDriver, Loaded, Runtime
from .triton_reduce import FEW_NBYTES, LoadedKernels, OneShot, ReduceKernel, summable
from .triton_segments import Launch, Partials, Table, Tables, grouped, identity, tabulate

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RESERVED_SMS", "TileConfig", "TritonTile", "choose"]

_WIDE = ("bfloat16", "float16")
# Calls whose tensors differ that a kernel remembers.
_BOUND = 256


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    load: str  # "bulk" (TMA), "vector" (aligned pointers) or "strided"
    b_cols: bool
    even_k: bool
    exact: bool
    polls: bool
    bias: bool
    addends: bool
    scales: bool
    config: TileConfig


def specify(v: Variant) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    """Return kernel, argument types, constants and alignment of ``v``, as ``Runtime.compile`` wants them."""
    import triton.language as tl

    from .triton_kernels import gemm_kernel

    c, name, out = v.config, DTYPES[v.dtype][0], DTYPES[v.out_dtype][0]
    types = dict.fromkeys(gemm_kernel.arg_names, "i32")
    types |= dict.fromkeys(("base", "timeout_ns", "fault_host"), "i64") | dict.fromkeys(
        ("table", "fault", "epoch"), "*i64"
    )
    types |= dict.fromkeys(("scale_a0", "scale_a1", "scale_b"), "*fp32") | dict.fromkeys(
        ("o0", "o1", "d", "c0", "c1", "bias"), f"*{out}"
    )
    types |= dict.fromkeys(("a0", "a1", "b"), f"*{name}")
    if v.load == "bulk" and not c.device_maps:
        b_box = (c.bk, c.bn) if v.b_cols else (c.bn, c.bk)
        types |= dict.fromkeys(("a0", "a1"), f"tensordesc<{name}[{c.bm}, {c.bk}]>")
        types["b"] = f"tensordesc<{name}[{b_box[0]}, {b_box[1]}]>"
        stored = ("o0", "o1", "d") if v.addends else ("o0", "o1")
        types |= dict.fromkeys(stored, f"tensordesc<{out}[{c.bm}, {c.bn // 2 if c.split else c.bn}]>")
    constants: dict[str, Any] = {
        "OUT": getattr(tl, str(v.out_dtype).removeprefix("torch.")), "BM": c.bm, "BN": c.bn, "BK": c.bk,
        "GROUP": c.group, "SPLIT": c.split, "BULK": v.load == "bulk", "MAPS": v.load == "bulk" and c.device_maps,
        "ALIGNED": v.load != "strided", "B_COLS": v.b_cols, "EVEN_K": v.even_k, "EXACT": v.exact,
        "POLLS": v.polls, "BIAS": v.bias, "ADDENDS": v.addends, "SCALES": v.scales,
    }  # fmt: skip
    aligned: dict[str, int] = {}
    if v.load != "strided":
        constants["a_step"] = 1
        if v.load == "vector":
            constants["ldb" if v.b_cols else "b_step"] = 1
        else:
            constants["b_step"] = 1
        step = 16 // v.dtype.itemsize
        aligned = {
            n: 16 for n in ("a0", "a1", "b", "o0", "o1", "c0", "c1", "bias") if not types[n].startswith("tensordesc")
        }
        aligned |= dict.fromkeys(("k", "lda0", "lda1", "ldb", "b_step"), step) | dict.fromkeys(("n", "ldc0", "ldc1"), 8)
    return gemm_kernel, types, constants, aligned


class TritonTile(GemmProvider, SumProvider, ExchangeProvider):
    """Products of bf16, fp16 and fp8 that poll and raise slots inside the kernel.

    Args:
        timeout_s: Every wait inside a kernel ends after it: the outputs of the launch become NaN and ``check`` raises.
        reserve_sms: SMs a launch with slots leaves free; ``RESERVED_SMS`` if unset.
        exact_fp8: Promote fp8 partial sums to fp32 at every k step (Hopper's tensor cores add fewer bits); False is
        faster.
        config: Use this tile shape for every problem instead of the built-in choice.
        runtime: Device and driver to use; made at the first ``prepare`` if unset.
    """

    name: ClassVar[str] = "triton"

    def __init__(
        self, *, timeout_s: float = 600.0, reserve_sms: int = RESERVED_SMS, exact_fp8: bool = True,
        config: TileConfig | None = None, runtime: Runtime | None = None,
    ) -> None:  # fmt: skip
        self.timeout_s, self.reserve_sms, self.exact_fp8, self.config = timeout_s, reserve_sms, exact_fp8, config
        self._runtime = runtime
        self._variants: dict[Variant, Loaded] = {}
        self._kernels: dict[GemmProblem, Kernel] = {}
        self._sums: dict[tuple[torch.dtype, int], ReduceKernel] = {}
        self._tables: Tables | None = None
        self._one_shots = LoadedKernels()
        self._lock, self._calls = threading.Lock(), threading.Lock()

    @classmethod
    def probe(cls, device: torch.device) -> None:
        """A CUDA device of capability 8.0 or higher and an importable triton are needed."""
        if device.type != "cuda":
            raise Unavailable(f"device type {device.type!r}: the triton provider multiplies on CUDA devices only")
        try:
            import triton
        except ImportError as e:
            raise Unavailable(f"triton cannot be imported: {e}", "pip install triton") from e
        found = tuple(int(x) for x in triton.__version__.split(".")[:2])
        if found < (3, 6):
            raise Unavailable(f"triton {triton.__version__} is too old", "pip install 'triton>=3.6'")
        if not torch.cuda.is_available():
            raise Unavailable("torch sees no CUDA device", "install a CUDA build of torch and its driver")
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 0):
            raise Unavailable(f"{device} has capability {major}.{minor}; 8.0 or higher is needed (Ampere or newer)")

    @property
    def runtime(self) -> Runtime:
        """The device, driver and fault record in use."""
        if self._runtime is None:
            driver = CudaDriver(torch.device("cuda"))
            self._runtime = Runtime(driver, driver.device)
        return self._runtime

    @property
    def compilations(self) -> int:
        """Kernels compiled and loaded so far; calls never add to it."""
        return self.runtime.compilations

    def check(self, op: str = "") -> None:
        """Raise the first fault of any of this provider's kernels. Does not synchronise: it says what is known by
        now."""
        fault = self.runtime.fault.error(op)
        if fault is not None:
            raise fault

    def supports(self, problem: GemmProblem) -> str | None:
        """bf16 and fp16 of any size; fp8 with scales where k is a multiple of 16 and n one of 8."""
        if problem.device != "cuda":
            return "the triton provider multiplies on CUDA devices only"
        if problem.dtype in FP8:
            if problem.out_dtype not in (*_WIDE, "float32"):
                return f"fp8 products of type {problem.out_dtype} are not offered: use bfloat16, float16 or float32"
            if problem.k % 16 or problem.n % 8 or not problem.k:
                return f"fp8 products need k % 16 == 0 and n % 8 == 0: k is {problem.k}, n is {problem.n}"
            if not problem.scales:
                return "fp8 products need scales"
            found = self.runtime.capability
            if found < 89:
                return f"fp8 products need capability 8.9 (Ada, Hopper): this device has {found // 10}.{found % 10}"
            return None
        if problem.dtype not in _WIDE:
            return f"the triton provider multiplies bfloat16, float16 and fp8, not {problem.dtype}"
        if problem.scales:
            return f"scales are for fp8 operands: these are {problem.dtype}"
        if problem.out_dtype not in (problem.dtype, "float32"):
            return f"products of {problem.dtype} come as {problem.dtype} or float32, not {problem.out_dtype}"
        return None

    def prepare(self, problem: GemmProblem) -> Kernel:
        """Compile and load every variant that ``problem``'s operands may need (layouts of b; the general one), and
        reserve tables. Cached."""
        reason = self.supports(problem)
        if reason is not None:
            raise Unsupported(reason)
        with self._lock:
            found = self._kernels.get(problem)
            if found is None:
                found = self._kernels[problem] = self._prepare(problem)
            return found

    def sums(self, dtype: torch.dtype, count: int) -> str | None:
        """bf16, fp16 and fp32, up to 17 partials."""
        return summable(dtype, count)

    def prepare_sum(self, dtype: torch.dtype, count: int) -> ReduceKernel:
        """Compile the sum of ``count`` partials. Cached."""
        with self._lock:
            found = self._sums.get((dtype, count))
            if found is None:
                found = self._sums[dtype, count] = ReduceKernel(self.runtime, dtype, count)
            return found

    def exchange_nbytes(self, size: int, programs: int, slot_nbytes: int) -> tuple[int, int]:
        """``OneShot.nbytes``."""
        return OneShot.nbytes(size, programs, slot_nbytes)

    def exchange(self, memory: ExchangeMemory, *, few_nbytes: int = FEW_NBYTES) -> OneShot:
        """One-shot all-reduces over ``memory``, which end with this provider's deadline.

        Args:
            few_nbytes: Up to this many bytes of rows go by the low-latency protocol.
        """
        return OneShot(self.runtime, memory, self.timeout_s, self._one_shots, few_nbytes)

    def variants(self, problem: GemmProblem) -> dict[str, Variant]:
        """Return what ``prepare(problem)`` compiles, by layout of the operands: "nt" and "nn" (b's unit stride along
        k, n), "strided"."""
        runtime = self.runtime
        fp8 = problem.dtype in FP8
        config = self.config or choose(problem, runtime.capability, runtime.shared_nbytes, runtime.sms, self.exact_fp8)
        load = "bulk" if runtime.capability >= 90 else "vector"
        whole = load == "vector" and problem.k % config.bk == 0
        flags = problem.polls, problem.bias, problem.addends, problem.scales
        dtypes = getattr(torch, problem.dtype), getattr(torch, problem.out_dtype)
        made = {"nt": Variant(*dtypes, load, False, whole, fp8 and self.exact_fp8, *flags, config)}
        if not fp8:
            made["nn"] = made["nt"]._replace(b_cols=True)
            made["strided"] = made["nt"]._replace(load="strided", even_k=False, config=GENERAL)
        return made

    def compile_ahead(self, problems: Iterable[GemmProblem], *, processes: int = 0) -> int:
        """Compile what ``prepare`` of these will need, in processes side by side. Returns the number of variants.

        Worth it before a start that prepares many: one variant takes a second or two.
        """
        from .triton_ahead import compile_ahead

        wanted = {v: None for p in problems if self.supports(p) is None for v in self.variants(p).values()}
        fresh = [v for v in wanted if v not in self._variants]
        return compile_ahead(fresh, self.runtime.capability, processes=processes)

    def _prepare(self, problem: GemmProblem) -> Kernel:
        if self._tables is None:
            self._tables = Tables(self.runtime)
        kernels = {}
        for layout, v in self.variants(problem).items():
            if v not in self._variants:
                kernel, types, constants, aligned = specify(v)
                self._variants[v] = self.runtime.compile(
                    kernel,
                    types,
                    constants,
                    aligned,
                    warps=v.config.warps,
                    stages=v.config.stages,
                    ctas=v.config.ctas,
                )
            kernels[layout] = self._variants[v], v.config
        return Kernel(self, problem, kernels, self._tables, self._calls)


class _Bound(NamedTuple):
    """One launch with everything worked out that stays the same when the same tensors come again."""

    loaded: Loaded
    ctas: int
    table: Table
    values: dict[str, int]
    maps: tuple[tuple[str, int, int, int, int, int], ...]


class Kernel:
    """A prepared product; see ``contract.GemmKernel``. Calls of one provider are serialised by a lock."""

    def __init__(
        self,
        provider: TritonTile,
        problem: GemmProblem,
        kernels: Mapping[str, tuple[Loaded, TileConfig]],
        tables: Tables,
        lock: threading.Lock,
    ) -> None:
        self._provider, self._problem, self._kernels, self._tables = provider, problem, kernels, tables
        self._runtime, self._lock = provider.runtime, lock
        self._dtype, self._out_dtype = getattr(torch, problem.dtype), getattr(torch, problem.out_dtype)
        self._bound: dict[tuple[Any, ...], list[_Bound]] = {}

    @property
    def granularity(self) -> int:
        """Rows of a tile."""
        return self._kernels["nt"][1].bm

    def __call__(
        self, segments: Sequence[GemmSegment], *, stream: int | None = None, sm_limit: int = 0, epoch: int = 0
    ) -> None:
        """Enqueue the product of ``segments``, in their order.

        Args:
            stream: ``cudaStream_t``; the current stream if None.
            sm_limit: Most SMs to hold; if 0 all of them, less the provider's reserve when segments carry slots.
            epoch: Device address of an int64 that is added to every slot's value when the kernel runs; 0: none.
        Raises:
            ShapeError: Shapes, dtypes or strides do not fit the problem.
            CommTimeout, CommAborted: An earlier kernel met a fault.
        """
        self._provider.check()
        where = self._runtime.driver.current_stream() if stream is None else stream
        base = next((slot.value for s in segments for _, slot in (*s.ready, *s.done)), 0)
        key = tuple(identity(s, base) for s in segments)
        with self._lock:
            bound = self._bound.get(key)
            if bound is None:
                if len(self._bound) >= _BOUND:
                    self._bound.clear()
                bound = self._bound[key] = self._bind(segments, base)
            for launch in bound:
                self._launch(launch, base, where, sm_limit, epoch)

    def _launch(self, bound: _Bound, base: int, stream: int, sm_limit: int, epoch: int) -> None:
        loaded, ctas, table, values, maps = bound
        runtime = self._runtime
        values["table"] = self._tables.address(table, stream)
        values["epoch"] = epoch or self._tables.zero.data_ptr()
        values["base"], values["timeout_ns"] = base, int(self._provider.timeout_s * 1e9)
        for entry in maps:
            loaded.map(runtime.driver, *entry)
        sms = sm_limit or runtime.sms - (self._provider.reserve_sms if table.slots else 0)
        grid = max(1, min(table.tiles, ctas * min(sms, runtime.sms)))
        loaded.launch(runtime.driver, grid, stream, [values[x] for x in loaded.names])

    def _bind(self, segments: Sequence[GemmSegment], base: int) -> list[_Bound]:
        for s in segments:
            self._fits(s)
        bound = []
        for launch in grouped(segments):
            b = launch.frames[0].segments[0].b
            n, k = b.shape
            for f in launch.frames:
                # One row has no stride of its own; no rows have no address, but a map wants one.
                f.lda, f.ldc = _up(k, 16) if f.lda < 0 else f.lda, _up(n, 8) if f.ldc < 0 else f.ldc
                f.a, f.out = f.a or b.data_ptr(), f.out or b.data_ptr()
            name = self._layout(launch)
            loaded, config = self._kernels[name]
            table = tabulate(launch, config.bm, -(-n // config.bn), base)
            if table.tiles or table.slots:
                values = self._values(launch, name == "nn") | {"seals": int(table.waits)}
                maps = self._maps(values, name == "nn", launch.partials) if loaded.maps else ()
                bound.append(_Bound(loaded, config.ctas, table, values, maps))
        return bound

    def _fits(self, s: GemmSegment) -> None:
        p, a, b, out = self._problem, s.a, s.b, s.out
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or out.shape != (a.shape[0], b.shape[0]):
            raise ShapeError(
                f"a {tuple(a.shape)}, b {tuple(b.shape)}, out {tuple(out.shape)}: want (rows, k), (n, k), (rows, n)"
            )
        if a.dtype != self._dtype or b.dtype != self._dtype or out.dtype != self._out_dtype:
            raise ShapeError(f"a {a.dtype}, b {b.dtype}, out {out.dtype}: prepared for {p.dtype} -> {p.out_dtype}")
        if out.shape[1] > 1 and out.stride(1) != 1:
            raise ShapeError(f"out has column stride {out.stride(1)}: 1 is needed")
        has = (s.bias is not None, bool(s.addends), s.scale_a is not None, bool(s.ready or s.done))
        if has[0] > p.bias or has[1] > p.addends or has[2] != p.scales or has[3] > p.polls:
            raise ShapeError(f"segment with (bias, addends, scales, slots) = {has}: prepared for {p}")
        if s.bias is not None:
            _row("bias", s.bias, (b.shape[0],), self._out_dtype)
        if s.scale_a is not None:
            _row("scale_a", s.scale_a, (1, a.shape[0]), torch.float32)
            _row("scale_b", s.scale_b, (1, b.shape[0]), torch.float32)
        for add in s.addends:
            if add.shape != out.shape or add.dtype != out.dtype or (add.shape[1] > 1 and add.stride(1) != 1):
                raise ShapeError(
                    f"addend {tuple(add.shape)} of {add.dtype}: want {tuple(out.shape)} of {out.dtype}, column stride 1"
                )

    def _values(self, launch: Launch, b_cols: bool) -> dict[str, int]:
        first, second = launch.frames[0], launch.frames[-1]
        s = first.segments[0]
        fault = self._runtime.fault
        (a0_rows, o0_rows), (a1_rows, o1_rows) = first.rows(), second.rows()
        split, segments = len(first.segments), len(launch.segments)
        return {
            "a0": first.a, "a1": second.a, "b": s.b.data_ptr(), "o0": first.out, "o1": second.out,
            "c0": first.out, "c1": second.out, "d": 0, "bias": 0 if launch.bias is None else launch.bias.data_ptr(),
            "scale_a0": first.scale, "scale_a1": second.scale,
            "scale_b": 0 if s.scale_b is None else s.scale_b.data_ptr(),
            "scale_a_rows": int(s.scale_a is not None and s.scale_a.numel() != 1),
            "scale_b_rows": int(s.scale_b is not None and s.scale_b.numel() != 1),
            "a0_rows": a0_rows, "a1_rows": a1_rows, "o0_rows": o0_rows, "o1_rows": o1_rows,
            "n": s.b.shape[0], "k": s.b.shape[1], "lda0": first.lda, "lda1": second.lda, "ldc0": first.ldc,
            "ldc1": second.ldc, "a_step": s.a.stride(1), "ldb": s.b.stride(1 if b_cols else 0),
            "b_step": s.b.stride(1), "split": split, "segments": segments,
            "fault": fault.device.data_ptr(), "fault_host": fault.host.data_ptr(),
        }  # fmt: skip

    def _maps(
        self, v: Mapping[str, int], b_cols: bool, partials: Partials
    ) -> tuple[tuple[str, int, int, int, int, int], ...]:
        kind, out_kind = DTYPES[self._dtype][1], DTYPES[self._out_dtype][1]
        size, out_size = self._dtype.itemsize, self._out_dtype.itemsize
        rows, cols = (v["k"], v["n"]) if b_cols else (v["n"], v["k"])
        maps = [("b", kind, v["b"], rows, cols, v["ldb"] * size)]
        for i in "01":
            maps.append((f"a{i}", kind, v[f"a{i}"], v[f"a{i}_rows"], v["k"], v[f"lda{i}"] * size))
            maps.append((f"o{i}", out_kind, v[f"o{i}"], v[f"o{i}_rows"], v["n"], v[f"ldc{i}"] * out_size))
        if self._problem.addends:
            # Without addends any map will do.
            at, rows, ld = partials.place() or (v["o0"], v["o0_rows"], v["ldc0"])
            maps.append(("d", out_kind, at, rows, v["n"], ld * out_size))
        return tuple(maps)

    def _layout(self, launch: Launch) -> str:
        """Name of the variant that serves these operands."""
        b = launch.frames[0].segments[0].b
        n, k = b.shape
        step = 16 // self._dtype.itemsize
        good = launch.bias is None or launch.bias.data_ptr() % 16 == 0
        good = good and n > 0 and k > 0 and n % 8 == 0 and k % step == 0 and b.data_ptr() % 16 == 0
        for f in launch.frames:
            rows = [s for s in f.segments if s.a.shape[0]]
            good = good and all(s.a.stride(1) == 1 for s in rows) and f.lda >= k and f.ldc >= n
            good = good and not (f.a % 16 or f.out % 16 or f.lda % step or f.ldc % 8)
            good = good and not any(x.data_ptr() % 16 or x.stride(0) % 8 for s in rows for x in s.addends)
        if good and b.stride(1) == 1 and b.stride(0) >= k and b.stride(0) % step == 0:
            return "nt"
        if good and "nn" in self._kernels and b.stride(0) == 1 and b.stride(1) >= n and b.stride(1) % step == 0:
            return "nn"
        if "strided" not in self._kernels:
            raise ShapeError(
                "fp8 operands need unit strides along k, and addresses and row strides of 16-byte multiples"
            )
        return "strided"


def _row(what: str, row: Tensor | None, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    if row is None or row.dtype != dtype or row.numel() not in counts or not row.is_contiguous():
        raise ShapeError(f"{what}: want a contiguous row of {dtype} with {' or '.join(map(str, counts))} elements")


def _up(value: int, to: int) -> int:
    return max(to, -(-value // to) * to)
