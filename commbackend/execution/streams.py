"""Lanes of a GPU: every lane is a CUDA stream, lane 0 the caller's current one. The whole program is enqueued; nothing
waits on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .lanes import Recorder

if TYPE_CHECKING:
    from .binding import Bound
    from .engine import Call

__all__ = ["StreamLanes", "TorchStreams"]


class TorchStreams:
    """torch's streams of one device. A test puts its own in their place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        # The number alone: making torch's object for it takes ten times as long.
        self._number: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._current: torch.cuda.Stream | None = None

    def current(self) -> torch.cuda.Stream:
        """The caller's current stream."""
        found = self._current
        if found is None or found.cuda_stream != self._number(self._index):
            found = self._current = torch.cuda.current_stream(self._device)
        return found

    def capturing(self) -> bool:
        """Whether the current stream is being captured in a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def new(self) -> torch.cuda.Stream:
        """A stream for a copy lane, of high priority: a chunk that is ready to move should not queue behind the product
        it feeds.
        """
        return torch.cuda.Stream(self._device, priority=-1)

    def event(self) -> torch.cuda.Event:
        """An event without a time."""
        return torch.cuda.Event()

    def use(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` torch's current one."""
        torch.cuda.set_stream(stream)


class StreamLanes:
    """Streams for one communicator. Calls are ordered one after the other, also when the caller changes streams between
    them.
    """

    def __init__(self, device: torch.device) -> None:
        self._api: Any = TorchStreams(device)
        self._streams: list[Any] = []
        self._fork, self._end = self._api.event(), self._api.event()
        self._joins: list[Any] = []
        self._last: Any = None
        self._now: list[Any] = []
        self.capturing: Callable[[], bool] = self._api.capturing
        #: ``torch.cuda.nvtx``, where every step is to be a range of its label; None costs nothing.
        self.ranges: Any = None

    def gate(self) -> Any:
        """What a step of one lane records for steps of other lanes."""
        return self._api.event()

    def on(self, lane: int, run: Callable[[Call], None], call: Call) -> None:
        """Run a step, within a call, with its lane's stream as torch's current one."""
        self._api.use(self._now[lane])
        try:
            run(call)
        finally:
            self._api.use(self._now[0])

    def run(self, bound: Bound, call: Call, recorder: Recorder | None) -> None:
        """Enqueue the steps in their order; lanes fork from the current stream and join it again.

        ``recorder`` is given the host's time for each step, and for ``fork`` and ``join``.
        """
        clock = time.monotonic_ns if recorder is not None else _no_clock
        start = clock()
        current = self._api.current()
        streams = self._now = [current, *self._lanes(bound.lanes - 1)]
        call.streams = tuple([s.cuda_stream for s in streams])
        capturing = call.captured
        # Within a capture the graph's own edges order its calls; events from outside must not be waited for there.
        if self._last is not None and self._last != current and not capturing:
            current.wait_event(self._end)
        if bound.lanes > 1:
            self._fork.record(current)
            for stream in streams[1:]:
                stream.wait_event(self._fork)
        if recorder is not None:
            recorder("fork", 0, start, clock())
        for step in bound.steps:
            start = clock()
            lane = step.lane
            for before in step.after:
                streams[lane].wait_event(before.done)
            if self.ranges is not None:
                self.ranges.range_push(step.label)
            try:
                if lane and step.on_current:
                    self.on(lane, step.run, call)
                else:
                    step.run(call)
            finally:
                if self.ranges is not None:
                    self.ranges.range_pop()
            if step.done is not None:
                step.done.record(streams[lane])
            if recorder is not None:
                recorder(step.label, lane, start, clock())
        start = clock()
        for lane in bound.loose:
            self._joins[lane - 1].record(streams[lane])
            current.wait_event(self._joins[lane - 1])
        if not capturing:
            self._end.record(current)
            self._last = current
        if recorder is not None:
            recorder("join", 0, start, clock())

    def close(self) -> None:
        """Forget the streams; torch's pool keeps them. Local, idempotent."""
        self._streams.clear()
        self._joins.clear()
        self._now = []

    def _lanes(self, count: int) -> list[Any]:
        while len(self._streams) < count:
            self._streams.append(self._api.new())
            self._joins.append(self._api.event())
        return self._streams[:count]


def _no_clock() -> int:
    return 0
