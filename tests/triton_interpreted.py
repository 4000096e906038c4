"""Runs the Triton kernels in Triton's interpreter against fp64 references; started by test_triton_tile.py with
TRITON_INTERPRET=1.

fp16 only: the interpreter multiplies bf16 as integers and truncates when it rounds to it. The whole host side of the
provider is real: only
``Runtime.compile`` is replaced, by launches through the interpreter.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from commbackend.contract import GemmProblem, GemmSegment
from commbackend.execution.reduction import reduce_into
from commbackend.gemm.triton_launch import Runtime
from commbackend.gemm.triton_reduce import ReduceKernel
from commbackend.gemm.triton_tile import TileConfig, TritonTile

TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "i64": torch.int64,
    "fp8e4nv": torch.float8_e4m3fn,
}


def tensor_at(address: int, dtype: torch.dtype, count: int = 1) -> torch.Tensor:
    if not address:
        return torch.zeros(1, dtype=dtype)
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype)


class InterpretedDriver:
    """CPU memory; uploads are copies."""

    def __init__(self, capability: int, sms: int) -> None:
        self._capability, self._sms = capability, sms

    def capability(self) -> int:
        return self._capability

    def multiprocessors(self) -> int:
        return self._sms

    def shared_nbytes(self) -> int:
        return 227 << 10

    def upload(self, dst: int, src: bytes, stream: int) -> None:
        ctypes.memmove(dst, src, len(src))

    def current_stream(self) -> int:
        return 0

    def capturing(self, stream: int) -> bool:
        return False


class InterpretedKernel:
    def __init__(self, kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> None:
        self.kernel, self.types, self.constants = kernel, types, constants
        self.maps = tuple(n for n in kernel.arg_names if n not in constants and types[n].startswith("tensordesc"))
        self.names = tuple(n for n in kernel.arg_names if n not in constants and n not in self.maps)
        self.mapped: dict[str, TensorDescriptor] = {}

    def map(self, driver: Any, name: str, kind: int, address: int, rows: int, cols: int, ld_nbytes: int) -> None:
        dtype, box = self.types[name].removeprefix("tensordesc<").removesuffix("]>").split("[")
        size = TORCH[dtype].itemsize
        flat = tensor_at(address, TORCH[dtype], (rows - 1) * (ld_nbytes // size) + cols)
        view = flat.as_strided((rows, cols), (ld_nbytes // size, 1))
        self.mapped[name] = TensorDescriptor(
            view, [rows, cols], [ld_nbytes // size, 1], [int(x) for x in box.split(",")]
        )

    def launch(self, driver: Any, grid: int, stream: int, scalars: Sequence[int]) -> None:
        args: dict[str, Any] = dict(self.constants) | self.mapped
        for name, value in zip(self.names, scalars, strict=True):
            kind = self.types[name]
            if kind.startswith("*"):
                args[name] = tensor_at(value, TORCH[kind[1:]])
            else:
                args[name] = struct.unpack("<f", struct.pack("<i", value))[0] if kind == "fp32" else value
        # The interpreter wants one tensor an address.
        args |= {c: self.mapped[o].base for c, o in (("c0", "o0"), ("c1", "o1")) if o in self.mapped}
        self.kernel[(grid,)](**args)


class InterpretedRuntime(Runtime):
    def compile(self, kernel: Any, types: Any, constants: Any, aligned: Any, **options: Any) -> Any:
        self.compilations += 1
        return InterpretedKernel(kernel, types, constants)


def provider(capability: int = 90, sms: int = 3, **options: Any) -> TritonTile:
    return TritonTile(runtime=InterpretedRuntime(InterpretedDriver(capability, sms), torch.device("cpu")), **options)  # type: ignore[arg-type]


def reference(s: GemmSegment) -> torch.Tensor:
    out = s.a.double() @ s.b.double().t()
    if s.scale_a is not None and s.scale_b is not None:
        out *= s.scale_a.double().reshape(-1, 1) * s.scale_b.double().reshape(1, -1)
    for extra in (*(() if s.bias is None else (s.bias,)), *s.addends):
        out += extra.double()
    return out


def run(
    name: str, rows: Sequence[int], n: int, k: int, *, capability: int = 90, dtype: torch.dtype = torch.float16,
    b_cols: bool = False,
    bias: bool = False, addends: int = 0, config: TileConfig | None = None, own: int = 0, pad: int = 0,
    transposed: bool = False, own_bias: bool = False, stacked: bool = False,
) -> None:  # fmt: skip
    """Segments of ``rows`` rows; segment ``own`` lies in a tensor of its own, the others in one heap, last first."""
    g = torch.Generator().manual_seed(hash(name) % 1000)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    total = sum(rows)
    x, heap = random(rows[own], k + pad)[:, :k], random(total, k + pad)[:, :k]
    if transposed:
        x, heap = random(k, rows[own]).t(), random(k, total).t()
    b = random(k, n).t() if b_cols else random(n, k)
    out = torch.full((total, n), 7.0, dtype=dtype)
    row_bias = random(n) if bias else None
    starts = [sum(rows[:i]) for i in range(len(rows))]
    order = [own, *(i for i in reversed(range(len(rows))) if i != own)]
    segments = []
    for i in order:
        part = slice(starts[i], starts[i] + rows[i])
        adds = tuple(random(rows[i], n) for _ in range(addends)) if i == own else ()
        if stacked and i == own:
            adds = (*random((1 + addends) * rows[i], n).split(rows[i])[1:], *adds)
        with_bias = None if own_bias and i != own else row_bias
        segments.append(GemmSegment(x if i == own else heap[part], b, out[part], with_bias, adds))
    name_of = str(dtype).removeprefix("torch.")
    problem = GemmProblem(total, n, k, name_of, name_of, "cuda", bias=bias, addends=addends > 0)
    provider(capability, config=config).prepare(problem)(segments)
    for s in segments:
        want = reference(s)
        error = (s.out.double() - want).norm() / max(want.norm().item(), 1e-9)
        assert torch.isfinite(s.out.float()).all() and error < 6e-3, f"{name}: relative error {error:.2e}"
    print("ok", name)


def run_scaled(per_row: bool) -> None:
    """fp8 with scales; the rows' scales of the second segment lie before those of the first."""
    g = torch.Generator().manual_seed(3)
    a, b = (
        torch.randn(40, 32, generator=g).to(torch.float8_e4m3fn),
        torch.randn(48, 32, generator=g).to(torch.float8_e4m3fn),
    )
    out = torch.full((40, 48), 7.0, dtype=torch.float16)
    scale_a, scale_b = (
        torch.rand(40 if per_row else 1, generator=g) + 0.5,
        torch.rand(48 if per_row else 1, generator=g) + 0.5,
    )
    parts = [slice(24, 40), slice(0, 24)]
    segments = [
        GemmSegment(a[p], b, out[p], scale_a=scale_a[p] if per_row else scale_a, scale_b=scale_b) for p in parts
    ]
    problem = GemmProblem(40, 48, 32, "float8_e4m3fn", "float16", "cuda", scales=True)
    provider(config=SMALL).prepare(problem)(segments)
    for s in segments:
        error = (s.out.double() - reference(s)).norm() / reference(s).norm()
        assert error < 2e-3, f"relative error {error:.2e}"
    print("ok fp8, scales per", "row" if per_row else "tensor")


def run_expanded() -> None:
    """A row that stands for all rows (stride 0), and one row in rows of odd stride."""
    g = torch.Generator().manual_seed(4)
    b = torch.randn(24, 32, generator=g).half()
    for a in (torch.randn(1, 32, generator=g).half().expand(20, 32), torch.randn(5, 33, generator=g).half()[2:3, :32]):
        out = torch.full((a.shape[0], 24), 7.0, dtype=torch.float16)
        provider(config=SMALL).prepare(GemmProblem(20, 24, 32, "float16", "float16", "cuda"))([GemmSegment(a, b, out)])
        want = reference(GemmSegment(a, b, out))
        assert (out.double() - want).norm() / want.norm() < 2e-3
    print("ok expanded and odd rows")


def run_reduce() -> None:
    """Sums bit for bit as ``reduce_into`` makes them."""
    runtime = InterpretedRuntime(InterpretedDriver(90, 3), torch.device("cpu"))  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(5)
    for dtype, count, cols in ((torch.float16, 3, 40), (torch.float16, 1, 37), (torch.float32, 17, 1030)):
        kernel = ReduceKernel(runtime, dtype, count)
        parts = [torch.randn(5, cols, generator=g).to(dtype) for _ in range(count)]
        bias, out, want = torch.randn(cols, generator=g).to(dtype), torch.empty(5, cols, dtype=dtype), parts[0].clone()
        for with_bias in (None, bias):
            kernel(out, parts, bias=with_bias)
            reduce_into(want, [p.clone() for p in parts], with_bias)
            assert torch.equal(out, want), f"{dtype}: sums differ"
        kernel(parts[0], parts)
        assert torch.isfinite(parts[0].float()).all(), "out may be one of the partials"
    print("ok reduce")


SMALL = TileConfig(16, 32, 16, 2, 4, group=2)
SPLIT = TileConfig(16, 32, 16, 2, 4, group=2, split=True)
MAPS = TileConfig(16, 32, 16, 2, 4, device_maps=True)

if __name__ == "__main__":
    run("maps made by the host", (32, 16, 48), 64, 32, config=SMALL)
    run("ragged segments keep to their rows", (17, 5, 1, 30), 72, 40, config=SMALL, own=2)
    run("no rows", (0, 9, 0), 32, 32, config=SMALL, own=1)
    run("split store, addends in order, bias", (20, 33), 64, 48, config=SPLIT, bias=True, addends=3)
    run("addends of one memory and of others", (20, 33), 64, 48, config=SPLIT, bias=True, addends=2, stacked=True)
    run("own rows alone have a bias", (20, 33, 9), 64, 48, config=SPLIT, bias=True, own_bias=True, own=1)
    run("the same through pointers", (20, 33), 37, 29, capability=80, bias=True, own_bias=True)
    run("maps made by the kernel", (20, 33), 40, 24, config=MAPS, bias=True)
    run("b by columns", (20, 33), 40, 24, config=SMALL, b_cols=True)
    run("pointers", (20, 33), 40, 24, capability=80, config=SMALL, addends=1)
    run("pointers, b by columns, even k", (20, 33), 64, 32, capability=80, config=SMALL, b_cols=True, bias=True)
    run("odd sizes", (7, 66), 37, 29, bias=True, addends=2)
    run("transposed a", (24, 16), 40, 24, config=SMALL, transposed=True)
    run("row strides", (24, 16), 40, 24, config=SMALL, pad=8)
    run_scaled(False)
    run_scaled(True)
    run_expanded()
    run_reduce()
    sys.exit(0)
