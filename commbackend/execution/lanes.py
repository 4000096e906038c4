"""Lanes: what runs the steps of one rank's program, in order within a lane and by ``after`` between lanes.

On a CPU lane 0 is the caller's thread and lanes 1... are worker threads that live as long as the communicator; torch's
copies and products release the interpreter lock, so a copy in a worker goes on while the caller multiplies. On a GPU
every lane is a stream.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CommTimeout

if TYPE_CHECKING:
    from .binding import Bound
    from .engine import Call

__all__ = ["BoundStep", "HostLanes", "Recorder"]

#: ``recorder(label, lane, start_ns, end_ns)``, times of ``time.monotonic_ns``.
Recorder = Callable[[str, int, int, int], None]


class BoundStep:
    """A step ready to run: its function, its lane, and the steps of other lanes it waits for."""

    __slots__ = ("after", "done", "label", "lane", "number", "on_current", "run")

    def __init__(self, label: str, lane: int, run: Callable[[Call], None], *, on_current: bool = False) -> None:
        self.label, self.lane, self.run = label, lane, run
        #: Whether ``run`` uses torch's current stream rather than ``call.streams[lane]``.
        self.on_current = on_current
        self.after: list[BoundStep] = []
        #: Its place in the program, from 1.
        self.number = 0
        #: What steps of other lanes wait for (``gate()`` of the lanes); None if no other lane waits for this step.
        self.done: Any = None


class HostLanes:
    """Worker threads for one communicator. ``run`` is used by one thread at a time (the communicator's lock sees to
    that).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []

    def gate(self) -> threading.Lock:
        """A turnstile: locked while its step has not finished in the present call."""
        return threading.Lock()

    def run(self, bound: Bound, call: Call, recorder: Recorder | None) -> None:
        """Run the steps. Returns when all have finished; raises the first error of any lane after all have ended."""
        steps, lanes = bound.steps, bound.lanes
        if lanes <= 1:
            for step in steps:
                _run_step(step, call, recorder)
            return
        for step in steps:
            if step.done is not None:
                step.done.acquire(blocking=False)
        by_lane: list[list[BoundStep]] = [[] for _ in range(lanes)]
        for step in steps:
            by_lane[step.lane].append(step)
        run = _Run(steps, call, recorder)
        ended = []
        for lane in range(1, lanes):
            if by_lane[lane]:
                gate = threading.Lock()
                gate.acquire()
                ended.append(gate)
                self._queue(lane).put(_Job(run, by_lane[lane], gate))
        run.lane(by_lane[0])
        for gate in ended:
            # Every step ends by the call's deadline; the grace covers a product or copy that was running at that
            # moment.
            while not gate.acquire(timeout=1.0):
                if time.monotonic() > call.deadline + 60.0:
                    raise CommTimeout(f"a worker lane of {self._name} did not end within 60 s after its deadline")
        if run.error is not None:
            raise run.error

    def _queue(self, lane: int) -> queue.SimpleQueue[Callable[[], None] | None]:
        while len(self._queues) < lane:
            jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            name = f"{self._name}-lane{len(self._queues) + 1}"
            thread = threading.Thread(target=_work, args=(jobs,), name=name, daemon=True)
            thread.start()
            self._queues.append(jobs)
            self._threads.append(thread)
        return self._queues[lane - 1]

    def close(self) -> None:
        """End the worker threads. Local, idempotent."""
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)
        self._queues.clear()
        self._threads.clear()


class _Run:
    """One call in flight: shared by its lanes."""

    __slots__ = ("_lock", "call", "error", "recorder", "steps")

    def __init__(self, steps: Sequence[BoundStep], call: Call, recorder: Recorder | None) -> None:
        self.steps, self.call, self.recorder = steps, call, recorder
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def lane(self, steps: Sequence[BoundStep]) -> None:
        try:
            for step in steps:
                for before in step.after:
                    self._pass(before)
                if self.error is not None:
                    return
                _run_step(step, self.call, self.recorder)
                if step.done is not None:
                    step.done.release()
        except BaseException as e:
            self._fail(e)

    def _pass(self, before: BoundStep) -> None:
        turnstile = before.done
        while not turnstile.acquire(timeout=1.0):
            if self.error is not None:
                return
            if time.monotonic() > self.call.deadline + 30.0:
                raise CommTimeout(f"step {before.label!r} did not end within 30 s after the deadline of its call")
        turnstile.release()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            first = self.error is None
            if first:
                self.error = error
        if first:
            # Waits of other lanes end by the fault; then every turnstile opens, and the lanes see ``error``.
            self.call.failed(error)
            for step in self.steps:
                if step.done is not None and step.done.locked():
                    _open(step.done)


class _Job:
    __slots__ = ("_gate", "_run", "_steps")

    def __init__(self, run: _Run, steps: Sequence[BoundStep], gate: threading.Lock) -> None:
        self._run, self._steps, self._gate = run, steps, gate

    def __call__(self) -> None:
        try:
            self._run.lane(self._steps)
        finally:
            self._gate.release()


def _open(turnstile: threading.Lock) -> None:
    try:
        turnstile.release()
    except RuntimeError:
        # Its step finished between the look and the release: it is open already.
        return


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    import torch

    # Grad mode belongs to a thread: without this, copies out of tensors that require grad would build a graph.
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            job()
            del job


def _run_step(step: BoundStep, call: Call, recorder: Recorder | None) -> None:
    call.marks[step.lane] = step.number
    if recorder is None:
        step.run(call)
        return
    start = time.monotonic_ns()
    step.run(call)
    recorder(step.label, step.lane, start, time.monotonic_ns())
