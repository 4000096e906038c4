"""Calls captured in CUDA graphs: an engine of their own, whose flags count from a word in device memory.

A captured call runs again with every replay, so nothing in it may depend on how often it has run. Its slots, its heap
and its scratch belong to captured calls alone; a 64-bit *epoch* word in device memory counts them, moved on by the
first kernel of every captured call, and flags and waits are kernels that read it when they run. As the half a call uses
is fixed when it is captured, a captured call waits until its peers have finished the captured call before it (eager
calls alternate halves and wait for the one before that). Eager calls and replays share no word and no byte, so they mix
freely, as long as all ranks issue them in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..contract import GemmKernel, GemmProblem, GemmProvider, GraphCapture
from ..errors import Unsupported
from .binding import Bound
from .engine import Call, Engine

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GraphEngine"]

_HOW = (
    "before a capture, run the op once eagerly with the same sizes (or reserve), then call prepare_capture() on all"
    " ranks"
)


class GraphEngine(Engine):
    """The engine of one communicator's captured calls. Made and grown outside captures, collectively."""

    halves = 1
    lag = 1

    def __init__(self, eager: Engine, providers: Sequence[GemmProvider], name: str) -> None:
        if not isinstance(eager.transport, GraphCapture):
            raise Unsupported(f"transport {eager.transport.name!r} cannot be captured in a CUDA graph: use userbuffers")
        super().__init__(eager.transport, providers, eager.device, name)
        self._eager, self._capture = eager, eager.transport
        self._epoch = torch.zeros(1, dtype=torch.int64, device=eager.device)
        self.epoch = self._epoch.data_ptr()

    def prepare(self) -> None:
        """Hold what the eager engine's calls have needed so far. Collective."""
        self.grow(max(self._eager.half_nbytes, 1))
        self.reserve_scratch(self._eager.scratch_nbytes)
        if self._eager.exchanger.ready:
            self.exchanger.open()

    def kernel(self, problem: GemmProblem) -> GemmKernel:
        """As the eager engine has prepared it: nothing may be compiled within a capture."""
        found = self._eager.prepared(problem)
        if found is None:
            raise Unsupported(f"no kernel is prepared for {problem}: {_HOW}")
        return found

    def refuse(self, why: str) -> Unsupported:
        """The error for a captured call that is not prepared."""
        return Unsupported(f"{why}: {_HOW}")

    def run(self, bound: Bound, tensors: Mapping[str, Tensor], record: bytes, timeout_s: float) -> None:
        """Capture one call. Its record was published by the eager engine."""
        self.number = self._eager.number
        # In a capture the host may wait for its peers' hosts: all of them capture the same call now.
        self._eager.agree_all(record, timeout_s)
        call = Call(self, 0, time.monotonic() + timeout_s, record, tensors)
        call.captured = True
        current = torch.cuda.current_stream(self.device).cuda_stream
        try:
            if bound.counted:
                self._capture.advance(self.epoch, current)
            with torch.no_grad(), self._capture.epochs(self.epoch):
                self.lanes.run(bound, call, None)
            self.guard(bound, call)
        except BaseException as e:
            self.fail(e)
            raise
