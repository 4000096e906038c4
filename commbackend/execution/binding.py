"""Binding: a program's steps with every address worked out beforehand. One ``match`` over the step kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..contract import GemmProblem, GemmSegment, OneSided, Slot, Window
from ..errors import PlanError
from ..plan import (
    CREDIT,
    ENTERED,
    Buffer,
    Collective,
    Copy,
    Gemm,
    Get,
    Program,
    Put,
    Reduce,
    Region,
    Signal,
    Step,
    Wait,
)
from .exchange import aligned as aligned_rows
from .lanes import BoundStep
from .reduction import reduce_into

if TYPE_CHECKING:
    from torch import Tensor

    from .engine import Call, Engine

__all__ = ["ALIGN", "Binder", "Bound", "aligned", "alike", "geometry"]

ALIGN = 256
Getter = Callable[["Call"], "Tensor"]


@dataclass(slots=True)
class Bound:
    """A program with its addresses, for one engine and one generation of its heap."""

    program: Program
    steps: tuple[BoundStep, ...]
    lanes: int
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    #: Lanes whose last step no step of lane 0 waits for.
    loose: tuple[int, ...] = ()
    #: What fills an output with NaN after a fault: made at the first call, by what the output looks like.
    guards: dict[Any, Callable[[int, int], None]] = field(default_factory=dict)
    #: Whether the call counts where slots and halves of the heap are concerned.
    counted: bool = True
    #: The steps' labels as the flight record keeps them; it makes them at the first call.
    labels: bytes = b""

    def __post_init__(self) -> None:
        for number, step in enumerate(self.steps, 1):
            step.number = number
        self.counted = self.program.counted
        last = {s.lane: s for s in self.steps}
        joined = {id(a) for s in self.steps if s.lane == 0 for a in s.after}
        self.loose = tuple(lane for lane in range(1, self.lanes) if lane not in last or id(last[lane]) not in joined)


class Binder:
    """Binds one program."""

    def __init__(self, engine: Engine, program: Program) -> None:
        self._engine, self._program = engine, program
        self._buffers = {b.name: b for b in program.buffers}
        self._dtypes = {b.name: getattr(torch, b.dtype) for b in program.buffers}
        self._offsets: dict[str, int] = {}
        for space in ("heap", "scratch"):
            at = 0
            for b in program.buffers:
                if b.space == space:
                    self._offsets[b.name] = at
                    at += aligned(b)
        self._windows: dict[Region, tuple[Window, Window]] = {}
        #: Whether the step that is being bound runs on torch's current stream.
        self._on_current = False

    def bound(self) -> Bound:
        program = self._program
        steps = []
        for i, step in enumerate(program.steps):
            try:
                self._on_current = False
                run = self._bind(step)
                steps.append(BoundStep(self._label(step), step.lane, run, on_current=self._on_current))
            except (KeyError, AttributeError) as e:
                raise PlanError(
                    f"step {i} of rank {program.rank} ({type(step).__name__}): {type(e).__name__}: {e}"
                ) from e
        for bound, step in zip(steps, program.steps, strict=True):
            for j in step.after:
                if steps[j].lane != bound.lane:
                    bound.after.append(steps[j])
                    if steps[j].done is None:
                        steps[j].done = self._engine.lanes.gate()
        lanes = 1 + max((s.lane for s in program.steps), default=0)
        names = {space: tuple(b.name for b in program.buffers if b.space == space) for space in ("input", "output")}
        return Bound(program, tuple(steps), lanes, names["output"], names["input"])

    def _bind(self, step: Step) -> Callable[[Call], None]:
        match step:
            case Put():
                return self._put(step)
            case Get():
                return self._get(step)
            case Signal():
                return self._signal(step)
            case Wait():
                return self._wait(step)
            case Copy():
                return self._copy(step)
            case Gemm():
                return self._gemm(step)
            case Reduce():
                return self._reduce(step)
            case Collective():
                return self._collective_step(step)
        raise PlanError(f"unknown step {step!r}")

    def _put(self, step: Put) -> Callable[[Call], None]:
        there, here = alike(step.dst, step.src)
        put, windows, src = self._one_sided().put, self._window(there), self._getter(here)
        table, peer, word, lane = self._table(), step.peer, step.slot, step.lane

        def run(call: Call) -> None:
            put(windows[call.half], src(call), peer, slot=Slot(table, word, call.seq), stream=call.streams[lane])

        return run

    def _get(self, step: Get) -> Callable[[Call], None]:
        there, here = alike(step.src, step.dst)
        get, windows, dst = self._one_sided().get, self._window(there), self._getter(here)
        peer, lane = step.peer, step.lane

        def run(call: Call) -> None:
            get(dst(call), windows[call.half], peer, stream=call.streams[lane])

        return run

    def _signal(self, step: Signal) -> Callable[[Call], None]:
        signal, table = self._one_sided().signal, self._table()
        peer, word, delta, lane = step.peer, step.slot, step.delta, step.lane

        def run(call: Call) -> None:
            signal(peer, Slot(table, word, call.seq + delta), stream=call.streams[lane])

        return run

    def _wait(self, step: Wait) -> Callable[[Call], None]:
        wait, table = self._one_sided().wait, self._table()
        peer, word, lane = step.peer, step.slot, step.lane
        # Credits lie as many calls back as the engine's halves allow; a captured call counts from its epoch.
        delta, captured = max(step.delta, -self._engine.lag), self._engine.epoch != 0
        # Data of a peer is used only after its record of this call has been compared with ours.
        compare = word not in (CREDIT, ENTERED) and peer != self._engine.rank

        def run(call: Call) -> None:
            if compare:
                call.check(peer)
            if captured or call.seq + delta > 0:
                slot = Slot(table, word, call.seq + delta)
                wait(peer, slot, deadline=call.deadline, stream=call.streams[lane])

        return run if self._engine.meter is None else self._engine.meter.waits(peer, run)

    def _copy(self, step: Copy) -> Callable[[Call], None]:
        src, dst = map(self._getter, alike(step.src, step.dst))
        self._on_current = True

        def run(call: Call) -> None:
            dst(call).copy_(src(call))

        return run

    def _gemm(self, step: Gemm) -> Callable[[Call], None]:
        makers, shapes = [], []
        for s in step.segments:
            a, b, out = self._getter(s.a), self._getter(s.b), self._getter(s.out)
            bias = self._getter(s.bias) if s.bias is not None else None
            addends = tuple(self._getter(r) for r in s.addends)
            scales = tuple(None if r is None else self._getter(r) for r in (s.scale_a, s.scale_b))
            makers.append((a, b, out, bias, addends, s.ready, s.done, scales))
            rows, k = (self._cols(s.a), s.a.rows) if step.form == "tn" else (s.a.rows, self._cols(s.a))
            shapes.append((rows, self._cols(s.out), k))
        first = step.segments[0]
        problem = GemmProblem(
            m=sum(m for m, _, _ in shapes),
            n=shapes[0][1],
            k=shapes[0][2],
            dtype=self._buffers[first.a.buf].dtype,
            out_dtype=self._buffers[first.out.buf].dtype,
            device=self._engine.device.type,
            polls=any(s.ready or s.done for s in step.segments),
            bias=any(s.bias is not None for s in step.segments),
            addends=any(s.addends for s in step.segments),
            scales=first.scale_a is not None,
        )
        kernel: Callable[..., None] = self._engine.kernel(problem)
        table: Any = self._engine._slots
        if self._engine.meter is not None:
            kernel = self._engine.meter.products(kernel)
        epoch, sm_limit = self._engine.epoch, self._engine.sm_limit
        # Providers know one convention, out = a @ b.T: other forms are transposed views.
        turn_a, turn_b, lane = step.form == "tn", step.form != "nt", step.lane
        # Kernels that poll are launched on a stream; libraries multiply on torch's current one.
        polls = problem.polls
        self._on_current = not polls

        def words(pairs: Sequence[tuple[int, int]], call: Call) -> tuple[tuple[int, Slot], ...]:
            return tuple((peer, Slot(table, word, call.seq)) for peer, word in pairs) if pairs else ()

        def run(call: Call) -> None:
            segments = []
            for a, b, out, bias, addends, ready, done, (scale_a, scale_b) in makers:
                ta, tb = a(call), b(call)
                segments.append(
                    GemmSegment(
                        ta.t() if turn_a else ta,
                        tb.t() if turn_b else tb,
                        out(call),
                        bias(call)[0] if bias is not None else None,
                        tuple(g(call) for g in addends) if addends else (),
                        words(ready, call),
                        words(done, call),
                        scale_a(call)[0] if scale_a is not None else None,
                        scale_b(call)[0] if scale_b is not None else None,
                    )
                )
            kernel(segments, stream=call.streams[lane] if polls else None, sm_limit=sm_limit, epoch=epoch)

        return run

    def _reduce(self, step: Reduce) -> Callable[[Call], None]:
        regions = alike(step.dst, *step.srcs)
        dst, *srcs = map(self._getter, regions)
        bias = self._getter(step.bias) if step.bias is not None else None
        kernel = self._engine.sum_kernel(self._dtypes[step.dst.buf], len(srcs))
        if kernel is not None and regions[0].blocks == 1:
            fused, lane = kernel, step.lane

            def launch(call: Call) -> None:
                row = bias(call)[0] if bias is not None else None
                fused(dst(call), [s(call) for s in srcs], bias=row, stream=call.streams[lane])

            return launch
        self._on_current = True

        def run(call: Call) -> None:
            reduce_into(dst(call), [s(call) for s in srcs], bias(call)[0] if bias is not None else None)

        return run

    def _one_shot(self, step: Collective) -> Callable[[Call], None]:
        x, *residual = map(self._getter, step.srcs)
        out, *normed = map(self._getter, step.dsts)
        bias, weight = ([] if r is None else [self._getter(r)] for r in (step.bias, step.weight))
        dtype, region = self._dtypes[step.dsts[0].buf], step.dsts[0]
        kernel = self._engine.exchanger.prepare(
            dtype, region.rows, self._cols(region), bias=bool(bias), residual=bool(residual), norm=bool(weight)
        )
        eps, lane = step.eps, step.lane

        def run(call: Call) -> None:
            kernel(
                out(call),
                aligned_rows(x(call)),
                bias=aligned_rows(bias[0](call))[0] if bias else None,
                residual=aligned_rows(residual[0](call)) if residual else None,
                normed=normed[0](call) if normed else None,
                norm_weight=aligned_rows(weight[0](call))[0] if weight else None,
                eps=eps,
                stream=call.streams[lane],
            )

        return run

    def _collective_step(self, step: Collective) -> Callable[[Call], None]:
        if step.kind == "one_shot":
            return self._one_shot(step)
        transport = self._engine.transport
        role = transport.between if step.between else self._engine._collective
        if role is None:
            lacks = "level between hosts" if step.between else "collectives"
            raise PlanError(f"transport {transport.name!r} has no {lacks}")
        if step.slots:
            raise PlanError("local slots after a collective need a stream-ordered transport")
        both = [self._getter(r) for r in alike(*step.srcs, *step.dsts)]
        srcs, dsts = both[: len(step.srcs)], both[len(step.srcs) :]
        # Whom this rank's collective meets; with two levels the others have been compared on their hosts.
        hosts = transport.caps.hosts
        here = hosts[self._engine.rank] if step.between else None
        peers = [p for p in transport.partners if here is None or hosts[p] != here]
        lane = step.lane
        verb: Callable[[Call], None]
        match step.kind:
            case "all_gather":
                verb = lambda c: role.all_gather([d(c) for d in dsts], srcs[0](c), stream=c.streams[lane])  # noqa: E731
            case "all_to_all":
                verb = lambda c: role.all_to_all(  # noqa: E731
                    [d(c) for d in dsts], [s(c) for s in srcs], stream=c.streams[lane]
                )
            case "reduce_scatter":
                verb = lambda c: role.reduce_scatter(  # noqa: E731
                    dsts[0](c), [s(c) for s in srcs], op=step.op, stream=c.streams[lane]
                )
            case "all_reduce":
                verb = lambda c: role.all_reduce(  # noqa: E731
                    dsts[0](c), srcs[0](c), op=step.op, stream=c.streams[lane]
                )
            case _:
                raise PlanError(f"unknown collective {step.kind!r}")

        def run(call: Call) -> None:
            # Libraries hang or write past the end when counts differ: agree first.
            for peer in peers:
                call.check(peer)
            verb(call)

        return run

    # -- addresses -----------------------------------------------------------------------------------------------------
    def _getter(self, region: Region) -> Getter:
        buffer = self._buffers[region.buf]
        if buffer.space == "heap":
            return self._heap_getter(region)
        if region.at not in (-1, self._program.rank):
            raise PlanError(f"region of {region.buf!r} at rank {region.at}: only heap buffers can be reached at a peer")
        if buffer.space == "scratch":
            scratch = self._engine._scratch
            assert scratch is not None
            at = self._offsets[buffer.name]
            typed = scratch[at : at + buffer.nbytes].view(self._dtypes[buffer.name]).view(buffer.rows, buffer.cols)
            fixed = _view(typed, region, buffer)
            return lambda call: fixed
        name = buffer.name
        if _whole(region, buffer):
            return lambda call: call.tensors[name]
        return lambda call: _view(call.tensors[name], region, buffer)

    def _heap_getter(self, region: Region) -> Getter:
        windows = self._window(region)
        if region.at in (-1, self._program.rank):
            mine = (windows[0].local, windows[1].local)
            return lambda call: mine[call.half]
        views = (windows[0].at(region.at), windows[1].at(region.at))
        if views[0] is None or views[1] is None:
            raise PlanError(f"transport {self._engine.transport.name!r} gives no view of rank {region.at}'s memory")
        pair = (views[0], views[1])
        return lambda call: pair[call.half]

    def _window(self, region: Region) -> tuple[Window, Window]:
        found = self._windows.get(region)
        if found is None:
            heap, buffer = self._engine._heap, self._buffers[region.buf]
            if buffer.space != "heap" or heap is None:
                raise PlanError(f"{region.buf!r} is not in the heap")
            dtype = self._dtypes[buffer.name]
            shape, stride, first = geometry(region, buffer, buffer.cols, 1)
            offset = self._offsets[buffer.name] + first * dtype.itemsize
            second = offset + (self._engine.half_nbytes if self._engine.halves == 2 else 0)
            found = (heap.window(offset, shape, dtype, stride), heap.window(second, shape, dtype, stride))
            self._windows[region] = found
        return found

    def _cols(self, region: Region) -> int:
        return region.cols if region.cols >= 0 else self._buffers[region.buf].cols - region.col

    def _one_sided(self) -> OneSided:
        role = self._engine._one_sided
        if role is None:
            raise PlanError(f"transport {self._engine.transport.name!r} is not one-sided")
        return role

    def _table(self) -> Any:
        if self._engine._slots is None:
            raise PlanError("a group of one rank has no slots")
        return self._engine._slots

    def _label(self, step: Step) -> str:
        match step:
            case Put():
                return f"put {step.src.buf} to {step.peer} slot {step.slot}"
            case Get():
                return f"get {step.src.buf} from {step.peer}"
            case Signal():
                return f"signal {step.peer} slot {step.slot}"
            case Wait():
                return f"wait {step.peer} slot {step.slot}"
            case Copy():
                return f"copy {step.src.buf} to {step.dst.buf}"
            case Gemm():
                s = step.segments[0]
                return f"gemm {s.out.buf}[{s.out.row}:{s.out.row + s.out.rows}] = {s.a.buf} x {s.b.buf}"
            case Reduce():
                return f"reduce {step.dst.buf}[{step.dst.row}:{step.dst.row + step.dst.rows}]"
            case Collective():
                return f"{step.kind}{' between hosts' * step.between} {step.srcs[0].buf if step.srcs else ''}"


def aligned(buffer: Buffer) -> int:
    return -(-buffer.nbytes // ALIGN) * ALIGN


def alike(*regions: Region) -> tuple[Region, ...]:
    """The same regions, all cut into as many blocks: consecutive rows are ``blocks`` blocks that touch."""
    blocks = max((r.blocks for r in regions), default=1)
    if blocks == 1:
        return regions
    if any(r.blocks not in (1, blocks) or (r.blocks == 1 and r.rows % blocks) for r in regions):
        raise PlanError(f"regions of different blocks: {', '.join(f'{r.blocks} x {r.rows}' for r in regions)}")
    return tuple(
        r
        if r.blocks == blocks
        else dataclasses.replace(r, rows=r.rows // blocks, blocks=blocks, block_stride=r.rows // blocks)
        for r in regions
    )


def _whole(region: Region, buffer: Buffer) -> bool:
    full = region.row == 0 and region.col == 0 and region.rows == buffer.rows and region.blocks == 1
    return full and region.cols in (-1, buffer.cols)


def geometry(
    region: Region, buffer: Buffer, row_stride: int, col_stride: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and first element of a region in a buffer with these strides (in elements)."""
    cols = region.cols if region.cols >= 0 else buffer.cols - region.col
    first = region.row * row_stride + region.col * col_stride
    if region.blocks == 1:
        return (region.rows, cols), (row_stride, col_stride), first
    return (region.blocks, region.rows, cols), (region.block_stride * row_stride, row_stride, col_stride), first


def _view(tensor: Tensor, region: Region, buffer: Buffer) -> Tensor:
    if _whole(region, buffer):
        return tensor
    shape, stride, first = geometry(region, buffer, tensor.stride(0), tensor.stride(1))
    return tensor.as_strided(shape, stride, tensor.storage_offset() + first)
