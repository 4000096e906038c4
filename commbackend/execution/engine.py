"""The engine: the only place that executes plans. It knows step kinds and roles, and no transport by name.

``Engine.bind`` turns a ``Program`` into steps with every address worked out beforehand; ``Engine.run`` runs them for
one call. Binding is one ``match`` over the step kinds.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..contract import Collective as CollectiveRole
from ..contract import (
    GemmKernel,
    GemmProblem,
    GemmProvider,
    OneSided,
    Prepares,
    SumKernel,
    SumProvider,
    SymBuffer,
    Transport,
)
from ..errors import CollectiveMismatch, CommBackendError, Unsupported
from ..plan import SLOTS_PER_RANK, Program
from .binding import ALIGN, Binder, Bound
from .exchange import Exchanger, exchanges
from .lanes import HostLanes, Recorder

if TYPE_CHECKING:
    from torch import Tensor

    from ..flight import Flight
    from ..metrics import Meter
    from .streams import StreamLanes

__all__ = ["Call", "Engine", "mismatch_text"]

#: How long a rank that has found a disagreement looks for what the other ranks called.
_LOOK_S = 0.2
#: How many prepared kernels are kept for programs to come; a bound program keeps its own.
_KERNELS = 4096
#: More lanes than any plan has.
_NO_STREAMS: tuple[None, ...] = (None,) * 16


class Call:
    """One execution of a bound program: what its steps need to know."""

    __slots__ = (
        "_engine", "captured", "checked", "deadline", "half", "marks", "number", "record", "seq", "streams", "tensors",
    )  # fmt: skip

    def __init__(self, engine: Engine, seq: int, deadline: float, record: bytes, tensors: Mapping[str, Tensor]) -> None:
        self._engine, self.seq, self.half, self.deadline = engine, seq, seq % 2, deadline
        #: Number of this call among all that publish a record; ``seq`` counts only those that use the heap.
        self.number = engine.number
        self.record, self.tensors = record, tensors
        self.checked: set[int] = set()
        #: One a lane: a cudaStream_t, or None where lanes are threads.
        self.streams: tuple[int | None, ...] = _NO_STREAMS
        #: Whether a CUDA graph is capturing this call.
        self.captured = False
        #: Where every lane notes the number of the step it is in.
        self.marks = engine.marks

    def check(self, peer: int) -> None:
        """Compare ``peer``'s record of this call with ours, once. Raises CollectiveMismatch."""
        if peer not in self.checked and not self._engine.deferred:
            self._engine.agree(self, peer)
            self.checked.add(peer)

    def failed(self, error: BaseException) -> None:
        """A lane failed: release the waits of the other lanes and tell the peers."""
        self._engine.fail(error)


class Engine:
    """Executes programs over one transport, with one GEMM provider.

    Args:
        transport: Connected. The engine allocates its slots and its heap there and closes them; it does not close the
            transport.
        providers: GEMM providers in order of preference; the first that supports a problem serves it.
        device: Where the caller's tensors live.
    """

    #: Halves of the heap that calls alternate between, and how many calls back the credits lie that they wait for.
    halves, lag = 2, 2
    #: Address of a device word that is added to every slot's value, or 0.
    epoch = 0

    def __init__(
        self, transport: Transport, providers: Sequence[GemmProvider], device: torch.device, name: str
    ) -> None:
        self.transport, self.device = transport, device
        self._providers = tuple(providers)
        self._one_sided = transport if isinstance(transport, OneSided) else None
        self._collective = transport if isinstance(transport, CollectiveRole) else None
        self.rank, self.size = transport.rank, transport.size
        self._slots = self._one_sided.alloc_slots(SLOTS_PER_RANK) if self._one_sided and self.size > 1 else None
        self._heap: SymBuffer | None = None
        self._scratch: Tensor | None = None
        self._kernels: dict[GemmProblem, GemmKernel] = {}
        #: All-reduces by one kernel.
        self.exchanger = Exchanger(transport, self._providers)
        #: Whether calls are enqueued on streams, so that the host must not wait for peers within one.
        self.deferred = transport.caps.stream_ordered
        self._peers = transport.partners
        self.lanes: HostLanes | StreamLanes
        #: Whether the caller's stream is being captured in a CUDA graph.
        self.capturing: Callable[[], bool] = bool  # never, on a host
        self._prepares = transport if isinstance(transport, Prepares) else None
        if transport.caps.stream_ordered:
            from .streams import StreamLanes

            self.lanes = StreamLanes(device)
            self.capturing = self.lanes.capturing
        else:
            self.lanes = HostLanes(name)
        #: SMs a kernel may take; 0: its own choice.
        self.sm_limit = 0
        if transport.caps.sharing > 1 and device.type == "cuda":
            sms = torch.cuda.get_device_properties(device).multi_processor_count
            self.sm_limit = max(1, sms // transport.caps.sharing - 2)
        #: Bytes of one half of the heap, and how often it has grown.
        self.half_nbytes, self.generation = 0, 0
        # Calls that run a program, and calls that publish a record (barriers too): only the first raise credits.
        self.seq, self.number = 0, 0
        # Calls on streams whose records have not been compared with the peers' yet.
        self._unchecked: deque[Call] = deque()
        self.recorder: Recorder | None = None
        #: The flight record, set by the communicator; and where lanes note their steps.
        self.flight: Flight | None = None
        #: Times products and waits, set by the communicator.
        self.meter: Meter | None = None
        self.marks: Any = [0] * len(_NO_STREAMS)

    def forget_flight(self) -> None:
        """Write no more to the flight record, which is about to close. Local."""
        self.flight, self.marks = None, [0] * len(_NO_STREAMS)

    # -- memory --------------------------------------------------------------------------------------------------------
    def fits(self, program: Program) -> bool:
        """Whether ``program`` runs without growing the heap. Local."""
        # A heap buffer without rows needs no bytes, but still an address.
        there = self._heap is not None or all(b.space != "heap" for b in program.buffers)
        there = there and (self.exchanger.ready or not exchanges(program))
        return there and program.heap_nbytes(ALIGN) <= self.half_nbytes

    def grow(self, half_nbytes: int) -> None:
        """Make each half hold ``half_nbytes``. Collective: all ranks pass one number. Invalidates bound programs."""
        if self._one_sided is None or (self._heap is not None and half_nbytes <= self.half_nbytes):
            return
        half = -(-max(half_nbytes, 1) // 65536) * 65536
        if self._heap is not None:
            self._heap.close()
            self._heap, self.half_nbytes = None, 0
        self.generation += 1
        self._heap = self._one_sided.alloc(self.halves * half)
        self.half_nbytes = half

    @property
    def symmetric_nbytes(self) -> int:
        """Bytes of symmetric memory held now."""
        slots = 8 * SLOTS_PER_RANK * self.size if self._slots is not None else 0
        return slots + self.exchanger.nbytes + (self._heap.nbytes if self._heap is not None else 0)

    def reserve_scratch(self, nbytes: int) -> None:
        """Make the private scratch hold ``nbytes``. Local. Invalidates bound programs when it grows."""
        if self._scratch is None or self._scratch.numel() < nbytes:
            self.generation += 1
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of private scratch held now."""
        return 0 if self._scratch is None else self._scratch.numel()

    # -- running -------------------------------------------------------------------------------------------------------
    def run(self, bound: Bound, tensors: Mapping[str, Tensor], record: bytes, timeout_s: float) -> None:
        """Execute one call, whose record ``enter`` has published."""
        self.seq += bound.counted
        call = Call(self, self.seq, time.monotonic() + timeout_s, record, tensors)
        if self.flight is not None and not self.deferred:
            self.flight.begin(bound)
        try:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self.lanes.run(bound, call, self.recorder)
            else:
                self.lanes.run(bound, call, self.recorder)
            if self.deferred:
                self._leave(bound, call)
            else:
                self._check_all(call)
        except BaseException as e:
            # Whatever went wrong here (a user's KeyboardInterrupt too), the peers must not wait for the rest of the
            # call.
            self.fail(e)
            raise

    def _leave(self, bound: Bound, call: Call) -> None:
        """The end of a call on streams: guards of its outputs; its records are compared later."""
        for provider in self._providers:
            provider.check(self.transport.op)
        start = time.monotonic_ns() if self.recorder is not None else 0
        self.guard(bound, call)
        if self.recorder is not None:
            self.recorder("guard", 0, start, time.monotonic_ns())
        call.tensors = {}
        if self.size > 1:
            self._unchecked.append(call)

    def guard(self, bound: Bound, call: Call) -> None:
        """Enqueue, for every output, what fills it with NaN if the transport has failed by then."""
        stream, prepares = call.streams[0], self._prepares
        for name in bound.outputs:
            t = call.tensors[name]
            if prepares is None or stream is None:
                self.transport.guard(t, stream)
                continue
            key = t.shape, t.stride(), t.dtype
            found = bound.guards.get(key)
            if found is None:
                found = bound.guards[key] = prepares.prepare_guard(t.shape, t.stride(), t.element_size())
            found(t.data_ptr(), stream)

    def enter(self, op: str, record: bytes) -> int:
        """Begin the next call: give it its number and publish its record. Returns the number.

        On streams the records of a call are compared when the call after the next begins: the host may run ahead of its
        peers' hosts by two calls, and a disagreement surfaces there.
        """
        start = time.monotonic_ns() if self.recorder is not None else 0
        self.settle(self.number)
        self.number += 1
        self.transport.op, self.transport.seq = op, self.number
        if self.size > 1:
            self.transport.post(self.number, record)
        if self.flight is not None:
            self.flight.enter(self.number, record)
        if self.recorder is not None and self.deferred:
            self.recorder("enter", 0, start, time.monotonic_ns())
        return self.number

    def agree_all(self, record: bytes, timeout_s: float) -> None:
        """Compare every peer's record of the present call with ours, before a step that all must take together."""
        try:
            call = Call(self, self.seq, time.monotonic() + timeout_s, record, {})
            self._check_all(call)
            if len(self._peers) < self.size - 1:  # the others are compared by others: wait until that is done
                self.transport.barrier(call.deadline)
        except BaseException as e:
            self.fail(e)
            raise

    def settle(self, before: int) -> None:
        """Compare the records of all calls with numbers below ``before`` that were not compared yet. Waits for peers.

        Records are kept for a few numbers only, so what is not compared in time could not be compared any more.
        """
        while self._unchecked and self._unchecked[0].number < before:
            call = self._unchecked.popleft()
            # By now the records are there, and the same; else what counts is how long the host waits here, since it may
            # have been busy elsewhere for long.
            if all(self.transport.peek(peer, call.number) == call.record for peer in self._peers):
                continue
            call.deadline = time.monotonic() + self.transport.timeout_s
            try:
                self._check_all(call)
            except BaseException as e:
                self.fail(e)
                raise

    def _check_all(self, call: Call) -> None:
        for peer in self._peers:
            if peer not in call.checked:
                self.agree(call, peer)
                call.checked.add(peer)

    def agree(self, call: Call, peer: int) -> None:
        """Raise CollectiveMismatch, on all ranks, if ``peer``'s record of ``call`` differs from ours."""
        theirs = self.transport.record(peer, call.number, call.deadline)
        if theirs == call.record:
            return
        # The verdict is certain; a short look at the others tells who is the odd one.
        said = {self.rank: call.record, peer: theirs}
        soon = min(call.deadline, time.monotonic() + _LOOK_S)
        while len(said) < self.size and time.monotonic() < soon:
            for other in range(self.size):
                if other not in said and (record := self.transport.peek(other, call.number)) is not None:
                    said[other] = record
            time.sleep(1e-3)
        op = call.record.partition(b" ")[0].decode("utf-8", "replace")
        raise CollectiveMismatch(mismatch_text(call.number, said), op=op, seq=call.number)

    def fail(self, error: BaseException) -> None:
        """Make ``error`` the communicator's fault (the first one stays) and tell the peers."""
        if isinstance(error, CommBackendError):
            self.transport.abort(str(error), error)
        else:
            self.transport.abort(f"{type(error).__name__}: {error}")

    def close(self, *, healthy: bool) -> None:
        """Give back heap and slots (collective when healthy) and end the worker threads."""
        self.lanes.close()
        self.exchanger.close()
        if not healthy:
            self._unchecked.clear()
        if self._heap is not None:
            self._heap.close()
        if self._slots is not None:
            self._slots.close()
        self._heap, self._slots, self.half_nbytes = None, None, 0
        self.generation += 1

    # -- binding -------------------------------------------------------------------------------------------------------
    def bind(self, program: Program) -> Bound:
        """Work out every address of ``program``. Local; allocates scratch. Call ``grow`` first where ``fits`` says no.

        Raises:
            PlanError: The program names what does not exist.
            Unsupported: No GEMM provider serves one of its products; the reasons are listed.
        """
        self.reserve_scratch(program.scratch_nbytes(ALIGN))
        if self._prepares is not None and self._slots is not None and not self.epoch:
            from .stream_binding import StreamBinder

            return StreamBinder(self, program).bound()
        return Binder(self, program).bound()

    def show_ranges(self) -> None:
        """Make every step of calls on streams an NVTX range."""
        if isinstance(self.lanes, HostLanes):
            return
        self.lanes.ranges = torch.cuda.nvtx

    def kernel(self, problem: GemmProblem) -> GemmKernel:
        """Return the prepared kernel for ``problem`` from the first provider that supports it."""
        found = self._kernels.get(problem)
        if found is None:
            reasons = []
            for provider in self._providers:
                reason = provider.supports(problem)
                if reason is None:
                    if len(self._kernels) >= _KERNELS:
                        del self._kernels[next(iter(self._kernels))]
                    found = self._kernels[problem] = provider.prepare(problem)
                    break
                reasons.append(f"{provider.name}: {reason}")
            else:
                raise Unsupported(f"no GEMM provider for {problem}: " + "; ".join(reasons or ["none configured"]))
        return found

    def polls(self, dtype: str) -> bool:
        """Whether some provider multiplies ``dtype`` in kernels that poll flags."""
        scaled = dtype.startswith("float8")
        result = "bfloat16" if scaled else dtype
        problem = GemmProblem(128, 128, 128, dtype, result, self.device.type, polls=True, scales=scaled)
        return any(p.supports(problem) is None for p in self._providers)

    def prepared(self, problem: GemmProblem) -> GemmKernel | None:
        """Return the kernel for ``problem`` if it has been prepared, else None."""
        return self._kernels.get(problem)

    def sum_kernel(self, dtype: torch.dtype, count: int) -> SumKernel | None:
        """Return the prepared kernel that sums ``count`` tensors of ``dtype``, or None: then torch sums."""
        for provider in self._providers:
            if isinstance(provider, SumProvider) and provider.sums(dtype, count) is None:
                return provider.prepare_sum(dtype, count)
        return None

    def supports(self, problem: GemmProblem) -> str | None:
        """Return None if some provider supports ``problem``, else all reasons in one line."""
        reasons = [p.supports(problem) for p in self._providers]
        return None if None in reasons else "; ".join(str(r) for r in reasons) or "no GEMM provider"


def mismatch_text(seq: int, said: Mapping[int, bytes]) -> str:
    """Say who differs: ranks grouped by what they called, the smaller groups first."""
    groups: dict[bytes, list[int]] = {}
    for rank in sorted(said):
        groups.setdefault(said[rank], []).append(rank)
    parts = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} called {text.decode('utf-8', 'replace')}"
        for text, ranks in sorted(groups.items(), key=lambda g: (len(g[1]), g[1]))
    ]
    # How a call is cut follows from its rows.
    hint = len({re.sub(rb" rows=\S+| by .*", b"", text) for text in groups}) == 1
    return f"ranks disagree on call {seq}: " + "; ".join(parts) + "; uneven parts need rows= on all ranks" * hint
