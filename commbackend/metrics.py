"""Numbers of a running communicator, for loggers: flat floats, no synchronising, no collective.

On a CPU every call, product and wait is timed where it happens. On a GPU the host does not wait within a call, so one
call of ``SAMPLED`` is timed by a pair of events that are read once they have passed; sums are extrapolated from those.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .communicator import Communicator
    from .plan import Knobs, Problem

__all__ = ["PREFIX", "SAMPLED", "Meter", "metrics"]

#: Every name starts so.
PREFIX = "commbackend/"
#: Of how many calls of one problem one is timed on a GPU.
SAMPLED = 64
#: Problems whose times are kept.
_KEPT = 4096


class _Times:
    """Times of one problem's calls: how many there were, how many were timed, their sum and the last, microseconds."""

    __slots__ = ("calls", "last_us", "sum_us", "timed")

    def __init__(self) -> None:
        self.calls = self.timed = 0
        self.sum_us = self.last_us = 0.0

    @property
    def mean_us(self) -> float:
        return self.sum_us / self.timed if self.timed else 0.0


class Meter:
    """What one communicator's calls take. Lanes add to it from their threads; every number has one writer or may lose
    an addition.

    Args:
        size: Ranks.
        event: Makes an event with timing, on a GPU; None on a CPU.
        capturing: Whether a graph is captured at the moment.
    """

    def __init__(self, size: int, event: Callable[[], Any] | None = None, capturing: Callable[[], bool] = bool) -> None:
        self._event, self._capturing = event, capturing
        self.times: dict[tuple[Problem, Knobs], _Times] = {}
        self.product_ns = 0
        #: Time waited for every peer, and the longest wait, nanoseconds.
        self.waited_ns, self.worst_ns = [0] * size, [0] * size
        self._open: deque[tuple[_Times, Any, Any]] = deque()

    # -- calls
    def begin(self, problem: Problem, knobs: Knobs) -> Any:
        """A call begins. Returns what ``end`` takes."""
        times = self.times.get((problem, knobs))
        if times is None:
            while len(self.times) >= _KEPT:
                self.times.pop(next(iter(self.times)))
            times = self.times[problem, knobs] = _Times()
        times.calls += 1
        if self._event is None:
            return times, time.perf_counter_ns()
        if times.calls % SAMPLED != 2 or self._capturing():  # the first call prepares
            return None
        began = self._event()
        began.record()
        return times, began

    def end(self, token: Any) -> None:
        """The call that ``begin`` returned ``token`` for has been made."""
        if token is None:
            return
        times, began = token
        if self._event is None:
            self._add(times, (time.perf_counter_ns() - began) / 1e3)
            return
        ended = self._event()
        ended.record()
        self._open.append((times, began, ended))
        self.settle()

    def settle(self) -> None:
        """Read the events that have passed. Never waits."""
        while self._open and self._open[0][2].query():
            times, began, ended = self._open.popleft()
            self._add(times, float(began.elapsed_time(ended)) * 1e3)

    @staticmethod
    def _add(times: _Times, us: float) -> None:
        times.timed += 1
        times.sum_us += us
        times.last_us = us

    def mean_us(self, problem: Problem, knobs: Knobs) -> float:
        """Mean time of the calls that were timed, or 0."""
        self.settle()
        times = self.times.get((problem, knobs))
        return times.mean_us if times is not None else 0.0

    # -- steps, on a CPU
    def waits(self, peer: int, wait: Callable[[Any], None]) -> Callable[[Any], None]:
        """The same step, which waits for ``peer``, timed."""
        if self._event is not None:
            return wait

        def timed(call: Any) -> None:
            began = time.perf_counter_ns()
            wait(call)
            ns = time.perf_counter_ns() - began
            self.waited_ns[peer] += ns
            if ns > self.worst_ns[peer]:
                self.worst_ns[peer] = ns

        return timed

    def products(self, kernel: Callable[..., None]) -> Callable[..., None]:
        """The same kernel, timed."""
        if self._event is not None:
            return kernel

        def timed(*args: Any, **options: Any) -> None:
            began = time.perf_counter_ns()
            kernel(*args, **options)
            self.product_ns += time.perf_counter_ns() - began

        return timed

    def call_ms(self) -> float:
        """Time of all calls, those that were not timed at the mean of those that were."""
        self.settle()
        return sum(t.calls * t.mean_us for t in list(self.times.values())) / 1e3


def metrics(comm: Communicator) -> dict[str, float]:
    """Return ``comm``'s numbers since ``init``, by name. Local; waits for nothing.

    ``calls``, ``overlapped_calls``, ``fallback_calls`` and ``fallback_calls/REASON``; ``call_ms``, the time of calls;
    on CPUs ``gemm_ms`` of products, and ``exposed_ms``, what calls take beyond them; ``wait_ms``, ``wait_ms/peerN`` and
    ``worst_wait_ms/peerN`` (the longest), ``worst_wait_ms``; ``symmetric_nbytes``, ``heap_growths``. All names begin
    with ``commbackend/``. Sums only grow: a logger shows their differences.
    """
    stats = comm.stats()
    found: dict[str, float] = {
        "calls": stats["calls"],
        "overlapped_calls": stats["overlapped"],
        "fallback_calls": stats["fallback"],
        "symmetric_nbytes": stats["symmetric_nbytes"],
        "heap_growths": stats["heap_growths"],
    }
    reasons: Counter[str] = Counter()
    for name, count in stats["fallback_by_op"].items():
        reasons[name.partition("/")[2]] += count
    found |= {f"fallback_calls/{reason}": count for reason, count in reasons.items()}
    meter = comm.meter
    if meter is not None:
        found["call_ms"] = meter.call_ms()
        if comm.device.type != "cuda":
            found["gemm_ms"] = meter.product_ns / 1e6
            found["exposed_ms"] = max(0.0, found["call_ms"] - found["gemm_ms"])
            found["wait_ms"] = sum(meter.waited_ns) / 1e6
            found["worst_wait_ms"] = max(meter.worst_ns, default=0) / 1e6
            for peer in (p for p in range(comm.size) if p != comm.rank):
                found[f"wait_ms/peer{peer}"] = meter.waited_ns[peer] / 1e6
                found[f"worst_wait_ms/peer{peer}"] = meter.worst_ns[peer] / 1e6
    return {PREFIX + name: float(value) for name, value in found.items()}
