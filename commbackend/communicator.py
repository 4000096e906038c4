"""The communicator: one group, one transport, one engine, and the choices made for them."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from . import names, registry, schedules
from .commands.record import describe, sizes
from .commands.trace import PHASE_LANE, call_name
from .config import Config, resolve
from .contract import GemmProvider
from .errors import CommAborted, ConcurrentUse, ConfigError, ShapeError, Unavailable, Unsupported
from .execution.binding import Bound
from .execution.engine import Engine
from .execution.exchange import exchanges
from .execution.graphs import GraphEngine
from .flight import Flight, on_signal
from .group import Group, process_group_of, resolve_group
from .metrics import Meter, metrics
from .plan import Knobs, Problem
from .select import Choice, connect
from .stock import Stock
from .tuning import choices
from .tuning.chooser import Chooser
from .tuning.explaining import costs_of, explain_call, problem_of, topology_of

if TYPE_CHECKING:
    from torch import Tensor

    from .contract import Caps
    from .execution.lanes import Recorder
    from .tuning.tune import Call

__all__ = ["Communicator", "explain", "init", "resolve_communicator", "stats"]

log = logging.getLogger("commbackend")

#: How many problems a communicator remembers its choices and its bound programs for. A run whose shapes differ at every
#: call forgets the oldest, and works them out again (about a millisecond) should they return.
_KEPT = 1024

_lock = threading.Lock()
#: This process; asking the system at every call costs more than a look at this.
_process = os.getpid()
_alive: dict[Any, Communicator] = {}
# One lock a key of ``_alive``: of several threads that ask for one group, the first connects, the others wait for it.
_connecting: dict[Any, threading.Lock] = {}
# ProcessGroup -> device type -> its default communicator: what an op finds in about a microsecond.
_defaults: weakref.WeakKeyDictionary[Any, dict[str, Communicator]] = weakref.WeakKeyDictionary()


def _forget_parent() -> None:
    """In a forked child: its parent's communicators are not its own, and a thread of the parent may hold the locks."""
    global _lock, _process
    _lock, _process = threading.Lock(), os.getpid()
    for known in (_alive, _connecting, _defaults):
        known.clear()


os.register_at_fork(after_in_child=_forget_parent)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def _keep(cache: dict[K, V], key: K, value: V) -> V:
    """Add to a cache that forgets its oldest entries."""
    while len(cache) >= _KEPT:
        cache.pop(next(iter(cache)), None)
    cache[key] = value
    return value


class Communicator:
    """A group of ranks that runs overlapped operations. Made by ``init``; a context manager that closes itself.

    Attributes:
        rank, size: This rank and the number of ranks of the group.
        device: Where tensors must live.
        config: The resolved configuration, with the source of every value.
        choice: Which transport was chosen, over what, and why; None with ``transport="off"``.
        stock: torch.distributed's collectives on the same group, for ``transport="off"``.
        op_name: The group name by which the operators of ``torch.ops.commbackend`` find this communicator.
        microbatch: Number that NVTX ranges carry, or None; set it before a micro-batch's forward and backward.
        recorder: Set to ``f(label, lane, start_ns, end_ns)`` to see every step; None (default) costs nothing.
    """

    #: The recorder that new communicators of this process start with; ``commbackend trace`` sets it.
    default_recorder: ClassVar[Recorder | None] = None

    def __init__(self, group: Group, config: Config, device: torch.device, stock: Stock | None = None) -> None:
        self.group, self.config, self.device = group, config, device
        self.rank, self.size = group.rank, group.size
        self.timeout_s = config.timeout_s or group.timeout_s
        self.closed = False
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self._bound: dict[tuple[Problem, Knobs], tuple[int, Bound, bytes]] = {}
        self._supported: dict[Problem, str | None] = {}
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._caps: tuple[Caps, Caps] | None = None
        self.choice: Choice | None = None
        self.meter: Meter | None = None
        self.microbatch: int | None = None
        self._graph: GraphEngine | None = None
        self._captured: dict[tuple[Problem, Knobs], tuple[int, Bound]] = {}
        self._providers: list[GemmProvider] = []
        self._engine: Engine | None = None
        self._flight: Flight | None = None
        group.limit = time.monotonic() + (config.init_timeout_s or group.timeout_s)
        try:
            transport, self.choice = connect(group, device, config)
        except (Unavailable, ConfigError):  # what all ranks have found together
            group.limit = None
            raise
        except BaseException as e:
            group.fail(e)
            raise
        self.stock = stock or Stock(group.rank, group.size, None)
        if transport is None:
            if config.batch_invariant:
                raise ConfigError("batch_invariant=True needs a transport: libraries behind 'off' do not promise it")
            self.stock.check()
        else:
            try:
                _known_schedule(config.schedule)
                self._providers = _gemm_providers(config, device, self.timeout_s)
                self._engine = Engine(transport, self._providers, device, f"commbackend-{group.rank}")
                self._engine.recorder = Communicator.default_recorder
                domain = _domain(self.choice, self.size)
                self.chooser = Chooser(config, lambda: self.caps, self._engine.polls, self.transport, domain=domain)
                self.meter = self._engine.meter = _meter(self._engine)
                if config.nvtx:
                    self._engine.show_ranges()
                self.chooser.use(choices.shared(self))
                self._record_flight(config)
            except BaseException as e:
                # The others may be one step ahead or behind, here or in the transport: they need not wait.
                transport.abort(f"init failed: {type(e).__name__}: {e}")
                transport.close()
                group.fail(e)
                if self._flight is not None:
                    self._flight.close()
                raise
        group.limit = None
        self.op_name = names.register(self)

    def _record_flight(self, config: Config) -> None:
        """Have every call and every fault of this communicator recorded. Collective."""
        engine = self._live()
        self._flight = flight = Flight(self.group, self.transport, timeout_s=config.init_timeout_s)
        engine.flight, engine.marks = flight, flight.marks
        engine.transport.explain_fault = flight.explain
        if config.dump_signal:
            on_signal(config.dump_signal)

    # -- facts ---------------------------------------------------------------------------------------------------------
    @property
    def off(self) -> bool:
        """True with ``transport="off"``: the stock path, nothing allocated, nothing launched."""
        return self._engine is None

    @property
    def transport(self) -> str:
        """Name of the transport in use, or "off"."""
        return "off" if self._engine is None else self._engine.transport.name

    @property
    def caps(self) -> Caps:
        """The transport's facts as planners are to see them: a library's own sums only where the configuration allows
        them.
        """
        engine = self._live()
        facts = engine.transport.caps
        if self._caps is None or self._caps[0] is not facts:
            numerics = facts.numerics if self.config.numerics == "library" else "fixed"
            told = dataclasses.replace(facts, exchanges=engine.exchanger.offered, numerics=numerics)
            self._caps = facts, told
        return self._caps[1]

    @property
    def recorder(self) -> Recorder | None:
        """Called for every step of every call, from the thread that ran it."""
        return None if self._engine is None else self._engine.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._live().recorder = recorder

    # -- calls ---------------------------------------------------------------------------------------------------------
    def run(self, problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        """Execute one call. Collective.

        Args:
            problem: Its sizes; equal on all ranks but for the fields that ``Problem`` names.
            tensors: 2-D tensors by the names in docs/architecture.md, outputs included; on ``device``.

        Raises:
            ConcurrentUse: Another thread is in a call of this communicator.
            CollectiveMismatch, CommTimeout, PeerDied, CommAborted: As the contract says; the communicator has failed
                then.
            HeapExhausted: The symmetric heap cannot grow as needed.
        """
        if torch.is_inference_mode_enabled():
            # Views that are kept for later calls would be inference tensors, which those calls could not write.
            with torch.inference_mode(False), torch.no_grad():
                self.run(problem, tensors)
            return
        engine = self._live()
        if self.config.tune and not self.chooser.tuned(problem) and not engine.capturing():
            self.tune([(self.chooser.layer, self.chooser.phase, problem)])
        if not self._busy.acquire(blocking=False):
            raise self._concurrent(engine, problem.op)
        try:
            knobs = self.knobs(problem)
            found = self._bound.get((problem, knobs))
            if engine.capturing():
                self._run_captured(engine, problem, knobs, tensors)
                self._finished(engine)
                return
            if found is not None and found[0] == engine.generation:
                _, bound, record = found
                engine.enter(problem.op, record)
            else:
                bound, record = self._bind(engine, problem, knobs)
            timing = None if self.meter is None else self.meter.begin(problem, knobs)
            began = time.monotonic_ns() if engine.recorder is not None else 0
            engine.run(bound, tensors, record, self.timeout_s)
            self._finished(engine)
            if engine.recorder is not None:
                chooser = self.chooser
                called = call_name(problem.op, chooser.layer, chooser.phase)
                engine.recorder(called, PHASE_LANE, began, time.monotonic_ns())
            if timing is not None:
                self.meter.end(timing)  # type: ignore[union-attr]
        finally:
            self._busy.release()
        overlapped = knobs.schedule != "sequence" and self.size > 1
        self.count(problem.op, overlapped, knobs.schedule if self.size > 1 else "one rank")

    def _concurrent(self, engine: Engine, op: str) -> ConcurrentUse:
        return ConcurrentUse(
            f"rank {self.rank}: {op} was called while {engine.transport.op} (call {engine.number}) runs in another"
            " thread; a communicator has one issue order: use one thread, or a communicator for each"
        )

    @contextlib.contextmanager
    def _agreed(self, op: str, record: bytes) -> Iterator[Engine]:
        """A step that all ranks must take together and that runs no program: they have agreed on it within."""
        engine = self._live()
        if not self._busy.acquire(blocking=False):
            raise self._concurrent(engine, op)
        try:
            engine.enter(op, record)
            engine.agree_all(record, self.timeout_s)
            yield engine
            self._finished(engine)
        finally:
            self._busy.release()

    def _finished(self, engine: Engine) -> None:
        if self._flight is not None:
            self._flight.finish(engine.number)

    def _run_captured(self, eager: Engine, problem: Problem, knobs: Knobs, tensors: Mapping[str, Tensor]) -> None:
        graph = self._graph
        if graph is None:
            raise Unsupported(
                f"{problem.op} is captured in a CUDA graph: before that, run it once eagerly with the same sizes, then"
                " call prepare_capture() on all ranks"
            )
        program = schedules.program(problem, self.rank, self.caps, knobs)
        if not graph.fits(program) or program.scratch_nbytes() > graph.scratch_nbytes:
            raise graph.refuse(f"{problem.op} needs {program.heap_nbytes()} bytes of a heap for captured calls")
        found = self._captured.get((problem, knobs))
        if found is None or found[0] != graph.generation:
            found = self._captured[problem, knobs] = (graph.generation, graph.bind(program))
        record = b"captured " + describe(problem, knobs)
        eager.enter(problem.op, record)
        graph.run(found[1], tensors, record, self.timeout_s)
        self.count(problem.op, knobs.schedule != "sequence" and self.size > 1, knobs.schedule)

    def prepare_capture(self) -> None:
        """Get ready for calls that CUDA graphs capture: as large as the calls run so far, and what was reserved.

        Collective; not within a capture. Captured calls have slots and a heap of their own (as large as one half of the
        eager heap), so that replays and eager calls mix; all ranks must replay and call in the same order.

        Raises:
            Unsupported: The transport cannot be captured.
        """
        engine = self._live()
        if self._graph is None:
            self._graph = GraphEngine(engine, self._providers, f"commbackend-{self.rank}-graph")
        with self._agreed("prepare_capture", f"prepare_capture half={engine.half_nbytes}".encode()):
            self._graph.prepare()

    def _bind(self, engine: Engine, problem: Problem, knobs: Knobs) -> tuple[Bound, bytes]:
        record = describe(problem, knobs)
        program = schedules.program(problem, self.rank, self.caps, knobs)
        if self.config.check:
            from .check import check

            check([schedules.plan(problem, self.caps, knobs)], caps=self.caps)
        engine.enter(problem.op, record)
        if not engine.fits(program):
            # Growing is collective: first make sure that all ranks are in the same call and will take the same step.
            engine.agree_all(record, self.timeout_s)
            engine.grow(program.heap_nbytes())
            if exchanges(program):
                engine.exchanger.open()
        bound = engine.bind(program)
        if self._bound and next(reversed(self._bound.values()))[0] != engine.generation:
            self._bound.clear()
        _keep(self._bound, (problem, knobs), (engine.generation, bound, record))
        return bound, record

    def knobs(self, problem: Problem) -> Knobs:
        """The schedule for ``problem`` and its parameters, by the rules of ``chooser``. Equal on all ranks."""
        self._live()
        return self.chooser.knobs(problem)

    def configure(self, layer: str, *, phase: str = "", op: str = "", **knobs: Any) -> None:
        """Choose by hand for the calls of some layers; later wishes win over earlier ones. Local, but all ranks must
        make the same calls, or their next operations raise CollectiveMismatch.

        Args:
            layer: A layer's name, or a pattern (``fnmatch``) such as ``"*.mlp.fc1"``; "" are calls outside any layer.
                Calls have the name of the ``with comm.layer(name)`` around them, also in their backward pass.
            phase: "forward", "backward" (the gradients of input and weight, one call), or "" for both.
            op: Name of an operation (``schedules.OPS``), or "" for all.
            **knobs: What to choose; what is not named, or None, stays automatic.
                ``schedule``: "push", "pull", "direct", "collective", "sequence" (gathers and scatters), "one_shot",
                "two_shot", ... (all-reduces); ``chunks``: 1...32 a shard; ``lanes``: copy lanes beside the caller's,
                0...15; ``polls``: one kernel that polls flags instead of gated row blocks; ``folds``: that kernel adds
                received partials; ``blocks``: row blocks that peers' rows are multiplied in, 0: one a chunk;
                ``domain``: ranks of one host or NVLink domain, served first, 0: ranks in turn.

        A wish that cannot be met is refused: an error under ``strict``, else the call takes the automatic choice, and
        log and ``explain`` say why.

        Raises:
            ConfigError: A knob, schedule, phase or operation is unknown, or a value is of the wrong type.
        """
        self._live()
        self.chooser.configure(layer, phase=phase, op=op, **knobs)

    def layer(self, name: str, phase: str = "forward") -> AbstractContextManager[None]:
        """Name the layer that makes the calls in the body: for ``configure``, traces, choices by layer, and, with the
        setting ``nvtx``, a range that also names the micro-batch. Local.
        """
        if self.off:
            return contextlib.nullcontext()
        within = self.chooser.within(name, phase)
        return _ranged(within, name, phase, self.microbatch) if self.config.nvtx and name else within

    @property
    def layer_name(self) -> str:
        """Name of the layer whose calls run now, or ""."""
        return "" if self.off else self.chooser.layer

    def supports(self, problem: Problem) -> str | None:
        """None if ``problem`` can be run here, else the reason in one line. Local."""
        if self._engine is None:
            return None
        try:
            return self._supported[problem]
        except KeyError:
            return _keep(self._supported, problem, schedules.supports(problem, self.caps, self.knobs(problem)))

    def stock_wins(self, problem: Problem) -> bool:
        """Whether torch.distributed's own collective and a product were measured to be the fastest for ``problem``."""
        return self._engine is not None and self.chooser.any_stock and self.chooser.chosen(problem).stock

    def reserve(self, rows: int, cols: int, dtype: torch.dtype) -> None:
        """Make room for gathered operands of ``rows`` x ``cols``, so that later calls within it grow nothing.
        Collective.

        With shards of about equal rows and the default schedules, forward and backward passes within it make no hidden
        collective and allocate no symmetric memory. Symmetric memory becomes four times the operand (two halves; a
        backward pass gathers and scatters at the same time), more for small operands of many ranks.

        Raises:
            ShapeError: ``rows`` or ``cols`` is negative, or ``dtype`` is none.
            HeapExhausted: Some rank has less; raised on every rank.
        """
        if not isinstance(dtype, torch.dtype) or rows < 0 or cols < 0:
            raise ShapeError(
                f"reserve: rank {self.rank}: rows={rows}, cols={cols}, dtype={dtype!r}: two counts of 0 or more and a"
                " torch.dtype are needed"
            )
        if self._engine is None:
            return
        nbytes = rows * cols * dtype.itemsize
        with self._agreed("reserve", f"reserve rows={rows} cols={cols} dtype={dtype}".encode()) as engine:
            room = schedules.reserve_nbytes(nbytes, self.size)
            engine.grow(room)
            engine.reserve_scratch(room)
            if engine.exchanger.offered:
                engine.exchanger.open()

    def barrier(self) -> None:
        """Return when all ranks have called it. Collective."""
        if self._engine is None:
            self.stock.barrier()
            return
        with self._agreed("barrier", b"barrier"):
            return

    # -- looking in ----------------------------------------------------------------------------------------------------
    def count(self, op: str, overlapped: bool, reason: str = "") -> None:
        """Count a call that an adapter served, for ``stats``."""
        self._counts[op, self.transport, reason if overlapped else f"fallback:{reason}"] += 1

    def stats(self) -> dict[str, Any]:
        """Counters since ``init``: calls by op, overlapped and fallback with reasons, symmetric bytes. Local, never
        synchronises.
        """
        overlapped = {f"{op}/{how}": n for (op, _, how), n in self._counts.items() if not how.startswith("fallback:")}
        fallback = {f"{op}/{how[9:]}": n for (op, _, how), n in self._counts.items() if how.startswith("fallback:")}
        return {
            "transport": self.transport,
            "calls": sum(self._counts.values()),
            "overlapped": sum(overlapped.values()),
            "fallback": sum(fallback.values()),
            "overlapped_by_op": overlapped,
            "fallback_by_op": fallback,
            "symmetric_nbytes": sum(e.symmetric_nbytes for e in (self._engine, self._graph) if e is not None),
            "heap_growths": 0 if self._engine is None else self._engine.generation,
        }

    def explain(self, op: Problem | str | None = None, shape: tuple[int, ...] = (), *, dtype: str = "bfloat16") -> str:
        """Say what was chosen, over what, and why: transport, then every call so far, or the one that is asked for.
        Local.

        Args:
            op: A problem, or an operation's name with its ``shape``.
            shape: (M, K, N) of a product, (M, K) of a collective; M counts the rows of all ranks.
            dtype: With ``shape``: element type.

        Raises:
            ConfigError: There is no such operation, or the shape does not fit it.
        """
        lines = [f"rank {self.rank} of {self.size} on {self.device}: transport {self.transport}"]
        if self.choice is not None:
            lines.append(f"  {self.choice.why()}")
        given = {name: source for name, source in sorted(self.config.sources.items()) if source != "default"}
        lines += [f"  {name} = {getattr(self.config, name)!r} ({source})" for name, source in given.items()]
        lines.append(f"  {'other ' if given else ''}settings: defaults; waits end after {self.timeout_s:g} s")
        problem = problem_of(self, op, shape, dtype) if isinstance(op, str) else op
        if self.off:
            lines += [f"    {sizes(problem)}: stock"] if problem is not None else []
            return "\n".join(lines)
        asked = self.chooser.problems() if problem is None else [problem]
        lines += ["  calls, by schedule/chunks/lanes:"] if asked else []
        for p in asked:
            lines += explain_call(self, p)
        return "\n".join(lines)

    def metrics(self) -> dict[str, float]:
        """Numbers since ``init`` for loggers, by name (``metrics.metrics``). Local, never synchronises."""
        return metrics(self)

    # -- choosing by measurement ---------------------------------------------------------------------------------------
    def tune(self, calls: Sequence[Call] | None = None, *, seconds: float = 1.0) -> None:
        """Measure candidates for ``calls`` and use the fastest from now on. Collective; all ranks pass the same calls.

        Args:
            calls: (layer, phase, problem) each; None: every call made so far. Run one step, then this.
            seconds: Time for each call.

        Raises:
            Unsupported: ``torch.use_deterministic_algorithms(True)`` holds.
        """
        from .tuning.tune import tune

        self._live()
        tune(self, self.chooser.calls() if calls is None else calls, costs=costs_of(self), seconds=seconds)

    def export_choices(self, path: str) -> None:
        """Write every choice in use to a file: ``choices=path`` makes another run choose alike. Local; one rank is
        enough.

        Raises:
            ConfigError: The file cannot be written.
        """
        self._live()
        choices.save(self.chooser.exported(choices.identity(self)), path)

    # -- end -----------------------------------------------------------------------------------------------------------
    def abort(self, reason: str = "by request") -> None:
        """Fail this communicator here and at its peers: blocked and later calls raise CommAborted. Any thread,
        idempotent.
        """
        if self._engine is not None and not self.closed:
            self._engine.transport.abort(reason)

    def close(self, timeout_s: float | None = None) -> None:
        """Leave the group and give everything back. Collective when healthy, local after a fault; idempotent.

        A call that still runs in another thread is aborted. Whatever is raised, nothing is left behind.

        Raises:
            CommTimeout, PeerDied, CollectiveMismatch: Some rank has not called ``close`` in time, died, or called
                something else.
        """
        with _lock:
            if self.closed:
                return
            self.closed = True
            for key in [k for k, v in _alive.items() if v is self]:
                del _alive[key]
        if os.getpid() != self._pid:
            # A forked child owns none of it.
            return
        engine, graph = self._engine, self._graph
        if engine is None:
            self.group.close()
            return
        transport = engine.transport
        with contextlib.ExitStack() as leaving:  # from the last to the first, each whatever the others raise
            leaving.callback(self._bound.clear)  # they hold views of the heap, which stays mapped as long as these live
            if self._flight is not None:
                leaving.callback(self._flight.close)
                leaving.callback(engine.forget_flight)
            leaving.callback(lambda: self.group.close(healthy=transport.fault is None))
            leaving.callback(transport.close, timeout_s)
            leaving.callback(lambda: engine.close(healthy=transport.fault is None))
            if graph is not None:
                leaving.callback(lambda: graph.close(healthy=transport.fault is None))
            if not self._busy.acquire(blocking=False):
                transport.abort(f"closed while {transport.op} ran in another thread")
            elif transport.fault is None:
                engine.enter("close", b"close")
                engine.agree_all(b"close", self.timeout_s if timeout_s is None else timeout_s)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: Any) -> None:
        if value is not None:
            # Also after an error that only this rank saw (a ShapeError): the others would wait for us in vain.
            self.abort(f"{type(value).__name__}: {value}")
        self.close()

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, transport={self.transport!r}, device={self.device})"

    def __reduce__(self) -> Any:
        raise TypeError("a Communicator belongs to its process: pass the group, and call commbackend.init there")

    def _live(self) -> Engine:
        engine = self._engine
        if self.closed:
            raise CommAborted(f"the communicator of rank {self.rank} is closed", rank=self.rank)
        if _process != self._pid:
            raise CommAborted(
                f"this communicator was made in process {self._pid}, before a fork: call commbackend.init in process"
                f" {_process}",
                rank=self.rank,
            )
        if engine is None:
            raise Unsupported("transport is 'off': only the stock path is served")
        return engine


def init(
    group: Any = None, *, device: torch.device | str | None = None, name: str = "default", **overrides: Any
) -> Communicator:
    """Return the communicator of ``group``, connecting it on the first call. Collective the first time, local
    afterwards.

    Args:
        group: A torch ProcessGroup, a 1-D DeviceMesh (or ``(mesh, "dim")``), a group name, an mpi4py communicator, or
            None for torch.distributed's default group or, without one, the launcher's ranks (torchrun, mpirun, srun).
        device: Where tensors live; default: cuda if torch has a device, else cpu.
        name: Distinguishes several communicators on one group.
        **overrides: Fields of ``config.Config``; an argument wins over its COMMBACKEND_ variable.

    Raises:
        ConfigError: A value cannot be honoured, ranks are configured differently, or the group has a communicator with
            other settings.
        Unsupported: ``transport="off"`` for ranks that torch.distributed does not connect.
        Unavailable: No transport serves all ranks; the message is a table of ranks and reasons.
        CommTimeout: A rank did not come.
    """
    where = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = resolve(**overrides)
    resolved = resolve_group(group, name=name, config=config)
    key = (resolved.key, where.type, name)
    with _lock:
        connecting = _connecting.setdefault(key, threading.Lock())
    with connecting:
        found = _alive.get(key)
        if found is None or found.closed:
            comm = Communicator(resolved, config, where, Stock.of(group, resolved))
            with _lock:
                _alive[key] = comm
            return comm
    if overrides and config != found.config:
        raise ConfigError(
            "this group already has a communicator with other settings:"
            f" {_differences(found.config, config)}; close it first, or make a second one with name="
        )
    return found


def resolve_communicator(group: Any = None, *, device: torch.device | None = None) -> Communicator:
    """Return the communicator an op should use: ``group`` itself if it is one, else ``init(group)``."""
    if isinstance(group, Communicator):
        return group
    where = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    pg = process_group_of(group) if not isinstance(group, Group) else None
    known = _defaults.get(pg, {}).get(where) if pg is not None else None
    if known is not None and not known.closed:
        return known
    comm = init(group, device=where)
    if pg is not None:
        _defaults.setdefault(pg, {})[where] = comm
    return comm


def communicators() -> list[Communicator]:
    """The communicators of this process that are open, in the order in which they were made."""
    with _lock:
        return [c for c in _alive.values() if not c.off]


def explain(group: Any = None, problem: Problem | None = None) -> str:
    """``Communicator.explain`` of a group's communicator."""
    return resolve_communicator(group).explain(problem)


def stats(group: Any = None) -> dict[str, Any]:
    """``Communicator.stats`` of a group's communicator; without ``group`` of all of this process, by transport and
    rank.
    """
    if group is not None:
        return resolve_communicator(group).stats()
    with _lock:
        return {f"{c.transport} {c.rank}/{c.size} #{i}": c.stats() for i, c in enumerate(_alive.values())}


@contextlib.contextmanager
def _ranged(within: AbstractContextManager[None], name: str, phase: str, microbatch: int | None) -> Iterator[None]:
    """``within`` as an NVTX range."""
    label = name + f" micro-batch {microbatch}" * (microbatch is not None) + ", backward" * (phase == "backward")
    torch.cuda.nvtx.range_push(label)
    try:
        with within:
            yield
    finally:
        torch.cuda.nvtx.range_pop()


def _domain(choice: Choice | None, size: int) -> int:
    """Ranks of one host, where hosts are several and hold equally many consecutive ranks; else 0."""
    hosts = choice.hosts if choice is not None else ()
    each = topology_of(hosts, size).domain
    return each if each < size else 0


def _meter(engine: Engine) -> Meter:
    if not engine.deferred:
        return Meter(engine.size)
    return Meter(engine.size, lambda: torch.cuda.Event(enable_timing=True), engine.capturing)


def _known_schedule(asked: str) -> None:
    """Raise ConfigError if no op has a schedule of that name: then it is a slip, and no call would follow it."""
    known = sorted({name for of_op in schedules.SCHEDULES.values() for name in of_op})
    if asked != "auto" and asked not in known:
        close = difflib.get_close_matches(asked, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"unknown schedule {asked!r}{hint}; known: {', '.join(known)}")


def _gemm_providers(config: Config, device: torch.device, timeout_s: float) -> list[GemmProvider]:
    names = registry.auto_names("gemm", device.type) if config.gemm == "auto" else config.gemm.split(",")
    if config.batch_invariant:
        names = _batch_invariant(config, device, names)
    found: list[GemmProvider] = []
    reasons = []
    for name in names:
        try:
            provider = registry.gemm(name)
            provider.probe(device)
        except Unavailable as e:
            if config.gemm != "auto":
                raise
            reasons.append(f"{name}: {e}")
            log.info("commbackend: GEMM provider %s: %s", name, e)
        else:
            found.append(provider(timeout_s=timeout_s))
    if not found:
        raise Unavailable(f"no GEMM provider for {device.type}: {'; '.join(reasons)}")
    return found


def _batch_invariant(config: Config, device: torch.device, names: list[str]) -> list[str]:
    """The names of providers that keep ``batch_invariant``: of those asked for, or of all built-in ones."""
    if config.numerics != "fixed":
        raise ConfigError(f"batch_invariant=True: sums of numerics={config.numerics!r} have an order of their own")
    asked = registry.names("gemm", device.type) if config.gemm == "auto" else names
    kept = [n for n in asked if registry.gemm(n).batch_invariant]
    if not kept:
        raise Unsupported(f"batch_invariant=True: no GEMM provider for {device.type} keeps it (gemm={config.gemm})")
    return kept


def _differences(old: Config, new: Config) -> str:
    fields = [f for f in type(old).__dataclass_fields__ if f != "sources" and getattr(old, f) != getattr(new, f)]
    return ", ".join(f"{f}: {getattr(old, f)!r} there, {getattr(new, f)!r} asked" for f in fields)
