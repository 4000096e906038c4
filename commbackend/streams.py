"""Lanes of a GPU: every lane is a CUDA stream, lane 0 the caller's current one. The whole program is enqueued; nothing
waits on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .lanes import BoundStep, Recorder

if TYPE_CHECKING:
    from .engine import Call

__all__ = ["StreamLanes"]


class StreamLanes:
    """Streams for one communicator. Calls are ordered one after the other, also when the caller changes streams between
    them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []
        self._fork = torch.cuda.Event()
        self._joins: list[torch.cuda.Event] = []
        self._last: torch.cuda.Stream | None = None
        self._end = torch.cuda.Event()

    def gate(self) -> torch.cuda.Event:
        """What a step of one lane records for steps of other lanes."""
        return torch.cuda.Event()

    def run(self, steps: Sequence[BoundStep], lanes: int, call: Call, recorder: Recorder | None) -> None:
        """Enqueue ``steps`` in their order; lanes fork from the current stream and join it again."""
        current = torch.cuda.current_stream(self._device)
        capturing = torch.cuda.is_current_stream_capturing()
        # Within a capture the graph's own edges order its calls; events from outside must not be waited for there.
        if self._last is not None and self._last != current and not capturing:
            current.wait_event(self._end)
        streams = [current, *self._lanes(lanes - 1)]
        call.streams = tuple(s.cuda_stream for s in streams)
        if lanes > 1:
            self._fork.record(current)
            for stream in streams[1:]:
                stream.wait_event(self._fork)
        for step in steps:
            stream = streams[step.lane]
            for before in step.after:
                stream.wait_event(before.done)
            if step.lane == 0 or not step.on_current:
                step.run(call)
            else:
                with torch.cuda.stream(stream):
                    step.run(call)
            if step.done is not None:
                step.done.record(stream)
        for stream, join in zip(streams[1:], self._joins, strict=False):
            join.record(stream)
            current.wait_event(join)
        if not capturing:
            self._end.record(current)
            self._last = current

    def close(self) -> None:
        """Forget the streams; torch's pool keeps them. Local, idempotent."""
        self._streams.clear()
        self._joins.clear()

    def _lanes(self, count: int) -> list[torch.cuda.Stream]:
        while len(self._streams) < count:
            # High priority: a chunk that is ready to move should not queue behind the product it feeds.
            self._streams.append(torch.cuda.Stream(self._device, priority=-1))
            self._joins.append(torch.cuda.Event())
        return self._streams[:count]
