"""Binding for transports whose verbs can be prepared (``contract.Prepares``): steps that only enqueue.

Addresses of the heap and the scratch are fixed when a program is bound; of the caller's tensors only the address may
differ from call to call, and one look at shape, strides and type tells whether that is so. Words that follow one
another in a lane become one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ..contract import Prepares, Word
from ..errors import ShapeError
from ..plan import Buffer, Copy, Get, Put, Region, Signal, Step, Wait
from .binding import Binder, Bound, alike, geometry
from .lanes import BoundStep

if TYPE_CHECKING:
    from .engine import Call
    from .streams import StreamLanes

__all__ = ["StreamBinder"]

#: Address and strides of an operand in this call; strides are None where its bytes are not its values.
Place = Callable[["Call"], tuple[int, "tuple[int, ...] | None"]]
_Run = Callable[["Call"], None]


class StreamBinder(Binder):
    """Binds one program for a transport that prepares."""

    def bound(self) -> Bound:
        found = super().bound()
        steps: list[BoundStep] = []
        groups: dict[int, list[Word]] = {}
        for bound, step in zip(found.steps, self._program.steps, strict=True):
            word = self._word(step)
            before = steps[-1] if steps else None
            if word is None:
                steps.append(bound)
            elif before is None or id(before) not in groups or not _joins(before, bound):
                groups[id(bound)] = [word]
                steps.append(bound)
            else:
                # A wait that joined a batch would hold up whoever waits for that batch, so only the last has ``done``.
                groups[id(before)].append(word)
                before.label += f", {bound.label}"
                before.done = bound.done
                for other in found.steps:
                    other.after = [before if a is bound else a for a in other.after]
        for bound in steps:
            if id(bound) in groups:
                bound.run = self._words(groups[id(bound)], bound.lane)
        return Bound(found.program, tuple(steps), found.lanes, found.outputs, found.inputs)

    def _word(self, step: Step) -> Word | None:
        match step:
            case Wait():
                return Word(step.peer, step.slot, max(step.delta, -self._engine.lag), True)
            case Signal():
                return Word(step.peer, step.slot, step.delta, False)
        return None

    def _words(self, words: Sequence[Word], lane: int) -> _Run:
        enqueue = self._prepares().prepare_words(self._table(), words)

        def run(call: Call) -> None:
            enqueue(call.seq, call.deadline, call.streams[lane])  # type: ignore[arg-type]

        return run

    def _put(self, step: Put) -> _Run:
        there, here = alike(step.dst, step.src)
        windows, src, table = self._window(there), self._place(here), self._table()
        prepare, slot, lane, by_verb = self._prepares().prepare_put, (table, step.slot), step.lane, super()._put(step)
        known: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})

        def run(call: Call) -> None:
            address, stride = src(call)
            of_half = known[call.half]
            if stride not in of_half:
                window = windows[call.half]
                of_half[stride] = None if stride is None else prepare(window, stride, step.peer, slot)
            put = of_half[stride]
            if put is None:
                by_verb(call)
            else:
                put(address, call.seq, call.streams[lane])

        return run

    def _get(self, step: Get) -> _Run:
        there, here = alike(step.src, step.dst)
        return self._between(here, there, step.lane, super()._get(step), current=False)

    def _copy(self, step: Copy) -> _Run:
        src, dst = alike(step.src, step.dst)
        by_torch = super()._copy(step)
        self._on_current = False
        return self._between(dst, src, step.lane, by_torch, current=True)

    def _between(self, dst: Region, src: Region, lane: int, otherwise: _Run, *, current: bool) -> _Run:
        """A copy; ``otherwise`` (on torch's current stream if ``current``) copies what is not rows of bytes."""
        to, source = self._place(dst), self._place(src)
        known: dict[Any, Callable[[int, int, int], None] | None] = {}
        lanes = cast("StreamLanes", self._engine.lanes)
        prepare, buffer = self._prepares().prepare_copy, self._buffers[dst.buf]
        shape = geometry(dst, buffer, 0, 0)[0]
        itemsize = self._dtypes[buffer.name].itemsize

        def run(call: Call) -> None:
            (at, into), (address, stride) = to(call), source(call)
            key = (into, stride)
            if key not in known:
                if into is None or stride is None:
                    known[key] = None
                else:
                    known[key] = prepare(shape, into, stride, itemsize)
            copy = known[key]
            if copy is not None:
                copy(at, address, cast(int, call.streams[lane]))
            elif current and lane:
                lanes.on(lane, otherwise, call)
            else:
                otherwise(call)

        return run

    def _prepares(self) -> Prepares:
        return cast(Prepares, self._engine.transport)

    # -- addresses -----------------------------------------------------------------------------------------------------
    def _place(self, region: Region) -> Place:
        buffer = self._buffers[region.buf]
        if buffer.space == "heap":
            windows = self._window(region)
            rank = self._program.rank if region.at < 0 else region.at
            at, stride = tuple(self._prepares().address(w, rank) for w in windows), windows[0].stride
            return lambda call: (at[call.half], stride)
        if buffer.space == "scratch":
            view = self._getter(region)(cast(Any, None))
            fixed = view.data_ptr(), view.stride()
            return lambda call: fixed
        return self._callers(region, buffer)

    def _callers(self, region: Region, buffer: Buffer) -> Place:
        name = buffer.name
        known: dict[Any, tuple[int, tuple[int, ...] | None]] = {}
        dtype = self._dtypes[name]

        def place(call: Call) -> tuple[int, tuple[int, ...] | None]:
            t = call.tensors[name]
            # All that decides which bytes are meant, but for the address.
            key = t.shape, t.stride(), t.dtype, t.get_device(), t.is_neg()
            found = known.get(key)
            if found is None:
                found = known[key] = self._admit(t, region, buffer, dtype)
            return t.data_ptr() + found[0], found[1]

        return place

    def _admit(
        self, t: torch.Tensor, region: Region, buffer: Buffer, dtype: torch.dtype
    ) -> tuple[int, tuple[int, ...] | None]:
        here, device, op = t.device, self._engine.device, self._engine.transport.op
        who = f"{op}: rank {self._engine.rank}: {buffer.name} is"
        if tuple(t.shape) != (buffer.rows, buffer.cols) or t.dtype != dtype:
            raise ShapeError(f"{who} {tuple(t.shape)}, {t.dtype}: ({buffer.rows}, {buffer.cols}), {dtype} is needed")
        if here.type != device.type or (device.index is not None and here.index != device.index):
            raise ShapeError(f"{who} on {here}, the communicator on {device}")
        if t.is_neg() or t.is_complex():  # a conjugated tensor has nothing in its key that says so
            return 0, None
        _, stride, first = geometry(region, buffer, t.stride(0), t.stride(1))
        return first * dtype.itemsize, stride


def _joins(before: BoundStep, bound: BoundStep) -> bool:
    return before.lane == bound.lane and before.done is None and not bound.after
