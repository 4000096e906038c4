"""A backend of torch.distributed: ``init_process_group("commbackend")`` after ``c10d.register()``.

A process group of this backend runs all_reduce (sums and averages), all_gather, reduce_scatter, broadcast and barrier,
with their coalesced forms, over a communicator of its own; everything else (send and recv, gather, scatter, all_to_all,
other reductions and types) goes through torch's backend for the device: gloo for CPU tensors, NCCL for CUDA tensors.
It speeds up or extends the reach of collectives; it overlaps nothing with products, for which layers use ``ops``.

Each group has one worker thread, so collectives run in the order of their calls, on CPUs beside the caller's own work
until ``wait``. ``stats`` counts what went elsewhere, by reason. The communicator is connected by the first collective
that it serves; ``destroy_process_group`` closes it. CUDA tensors are served on the stream that is current at the call.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Work

from ..communicator import Communicator, init
from ..config import resolve
from ..errors import CommBackendError, CommTimeout, Unsupported
from ..execution.reduction import reducible
from ..group import Group
from ..layout import split
from ..ops.gradients import name as dtype_name
from ..ops.unfused import execute
from ..plan import Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
else:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["BACKEND", "CommProcessGroup", "register"]

log = logging.getLogger("commbackend")

#: The backend's name for ``init_process_group`` and ``new_group``.
BACKEND = "commbackend"
#: How long leaving waits for peers that have not called ``destroy_process_group`` yet.
_LEAVE_S = 10.0
# Columns that flat buffers are given, so that they can be cut into chunks of rows.
_COLUMNS = 1024
_PLAIN = {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16}
_PLAIN |= {torch.int8, torch.uint8}

_overrides: dict[str, Any] = {}


def register(**overrides: Any) -> None:
    """Make the backend known to torch.distributed. Local; may be called again.

    Args:
        **overrides: Of ``commbackend.init``, for the communicators of all groups made later. With ``strict=True`` a
            reduction or type that is not served raises Unsupported instead of going through torch's backend.
    """
    resolve(**overrides)
    _overrides.clear()
    _overrides.update(overrides)
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> CommProcessGroup:
    return CommProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, options.group_id, dict(_overrides)
    )


class _CollectiveWork(Work):
    """A collective in the worker's queue, or done. Errors are raised by ``wait``, in their own types."""

    def __init__(self, op: str, done: Future[None], results: list[Tensor], timeout_s: float) -> None:
        super().__init__()
        self._op, self._done, self._results, self._timeout_s = op, done, results, timeout_s

    def wait(self, timeout: timedelta | None = None) -> bool:
        asked_s = timeout.total_seconds() if timeout is not None else 0.0
        # Every wait of a call has the group's deadline; this one also covers the calls queued before it.
        limit_s = asked_s if asked_s > 0 else None
        try:
            self._done.result(limit_s)
        except TimeoutError as e:
            if isinstance(e, CommBackendError):
                raise
            raise CommTimeout(f"{self._op} has not ended within {limit_s:g} s", op=self._op) from e
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def is_success(self) -> bool:
        return self._done.done() and self._done.exception() is None

    def exception(self) -> Any:
        return self._done.exception() if self._done.done() else None

    def result(self) -> list[Tensor]:
        return self._results

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        devices: list[Any] = sorted({t.device for t in self._results if t.is_cuda}, key=str)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)

        def deliver(done: Future[None]) -> None:
            error = done.exception()
            if error is None:
                future.set_result(self._results)
            else:
                future.set_exception(error)  # type: ignore[arg-type]  # its annotation says the result's

        self._done.add_done_callback(deliver)
        return future


class CommProcessGroup(ProcessGroup):
    """A process group over a communicator, and torch's backends for what that does not do."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, group_name: str, overrides: dict[str, Any]
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]  # the form that subclasses can use
        self._store, self._place, self._timeout = store, (rank, size), timeout
        self._label, self._config = group_name, overrides
        self._strict = resolve(**overrides).strict
        self._off = resolve(**overrides).transport == "off"
        self._comms: dict[str, Communicator] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._together: list[Future[None]] | None = None
        kind = ProcessGroup.BackendType
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        self._inner: dict[str, Any] = {"cpu": gloo}
        self._register_backend(torch.device("cpu"), kind.GLOO, gloo)
        self._set_default_backend(kind.GLOO)
        if torch.cuda.is_available() and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
            self._inner["cuda"] = nccl
            self._register_backend(torch.device("cuda"), kind.NCCL, nccl)

    def getBackendName(self) -> str:
        return BACKEND

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the counters of this group's communicators, by device type. Local."""
        return {device: comm.stats() for device, comm in self._comms.items()}

    # -- all_reduce ----------------------------------------------------------------------------------------------------
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:  # type: ignore[override]
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        op = getattr(opts, "reduceOp", opts)
        reason = self._reason("all_reduce", given, op)
        if reason is not None:
            return self._elsewhere("all_reduce", given, reason, ("allreduce",), given, opts or dist.AllreduceOptions())
        return self._submit("all_reduce", _each(_all_reduce, given, op), given, given)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op, given = getattr(opts, "reduceOp", None), list(tensors)
        reason = self._reason("all_reduce", given, op)
        if reason is not None:
            return self._elsewhere("all_reduce", given, reason, ("allreduce_coalesced",), given, opts)
        return self._submit("all_reduce", _each(_all_reduce, given, op), given, given)

    # -- all_gather ----------------------------------------------------------------------------------------------------
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        reason = self._reason("all_gather", [output, input])
        if reason is not None:
            return self._elsewhere(
                "all_gather",
                [input],
                reason,
                ("all_gather_single", "_allgather_base"),
                output,
                input,
                opts or AllgatherOptions(),
            )
        return self._submit("all_gather", lambda comm: _all_gather(comm, output, input), [output], [input])

    _allgather_base = all_gather_single  # the older name

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._several([self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]  # the older name

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:  # type: ignore[override]
        several = isinstance(inputs, Tensor)
        lists, shards = ([outputs], [inputs]) if several else (list(outputs), list(inputs))
        flat = [t for parts in lists for t in parts]
        reason = self._reason("all_gather", [*flat, *shards])
        if reason is None and any(t.shape != s.shape for p, s in zip(lists, shards, strict=True) for t in p):
            reason = "parts of several shapes"
        if reason is not None:
            return self._elsewhere(
                "all_gather", shards, reason, ("allgather",), lists, shards, opts or AllgatherOptions()
            )

        def run(comm: Communicator) -> None:
            for parts, shard in zip(lists, shards, strict=True):
                whole = shard.new_empty((comm.size, *shard.shape))
                _all_gather(comm, whole, shard)
                for part, arrived in zip(parts, whole, strict=True):
                    part.detach().copy_(arrived)

        return self._submit("all_gather", run, flat, shards)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """As ``allgather`` of every input; ``outputs`` are by rank."""
        by_input = [list(parts) for parts in zip(*outputs, strict=True)]
        return self.allgather(by_input, inputs, opts)

    # -- reduce_scatter ------------------------------------------------------------------------------------------------
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        op = getattr(opts, "reduceOp", None)
        reason = self._reason("reduce_scatter", [output, input], op)
        if reason is not None:
            return self._elsewhere(
                "reduce_scatter",
                [input],
                reason,
                ("reduce_scatter_single", "_reduce_scatter_base"),
                output,
                input,
                opts or dist.ReduceScatterOptions(),
            )
        return self._submit("reduce_scatter", lambda comm: _reduce_scatter(comm, output, input, op), [output], [input])

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # the older name

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        each = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return self._several(each, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]  # the older name

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:  # type: ignore[override]
        several = isinstance(outputs, Tensor)
        sums, lists = ([outputs], [inputs]) if several else (list(outputs), list(inputs))
        op, flat = getattr(opts, "reduceOp", opts), [t for parts in lists for t in parts]
        reason = self._reason("reduce_scatter", [*sums, *flat], op)
        if reason is None and any(t.shape != s.shape for p, s in zip(lists, sums, strict=True) for t in p):
            reason = "parts of several shapes"
        if reason is not None:
            return self._elsewhere(
                "reduce_scatter", flat, reason, ("reduce_scatter",), sums, lists, opts or dist.ReduceScatterOptions()
            )

        def run(comm: Communicator) -> None:
            for out, parts in zip(sums, lists, strict=True):
                _reduce_scatter(comm, out, torch.stack([p.detach() for p in parts]), op)

        return self._submit("reduce_scatter", run, sums, flat)

    # -- broadcast, barrier --------------------------------------------------------------------------------------------
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:  # type: ignore[override]
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        reason = self._reason("broadcast", given)
        if reason is not None:
            return self._elsewhere("broadcast", given, reason, ("broadcast",), given, _root(opts))
        return self._submit("broadcast", _each(_broadcast, given, root), given, given)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:  # type: ignore[override]
        if self._off:
            barrier: Work = self._inner["cpu"].barrier(opts if opts is not None else dist.BarrierOptions())
            return barrier
        found = next(iter(self._comms), "cpu")
        return self._submit("barrier", lambda comm: comm.barrier(), [], [], device=torch.device(found))

    # -- several calls as one ------------------------------------------------------------------------------------------
    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Work:
        jobs, self._together = self._together or [], None
        return self._all("coalesced", jobs, [])

    def _several(self, works: Sequence[Work], results: list[Tensor]) -> Work:
        """One work for several; those of other backends are waited for in the worker."""
        jobs = [w._done if isinstance(w, _CollectiveWork) else self._queue().submit(_wait, w) for w in works]
        return self._all("coalesced", jobs, results)

    def _all(self, op: str, jobs: list[Future[None]], results: list[Tensor]) -> Work:
        # The queue is in order: when this runs, the jobs before it have ended.
        done = self._queue().submit(_join, jobs)
        return _CollectiveWork(op, done, list(results), self._timeout.total_seconds())

    # -- running -------------------------------------------------------------------------------------------------------
    def _reason(self, op: str, tensors: Sequence[Tensor], reduce_op: Any = None) -> str | None:
        """None if this call is served here, else why not: the same on all ranks, as the call is."""
        if self._off:
            return "transport is off"
        sums = op in ("all_reduce", "reduce_scatter")
        for t in tensors:
            if t.layout != torch.strided or not t.is_contiguous() or t.is_conj() or t.is_neg():
                return "layout"
            if t.device.type not in ("cpu", "cuda") or t.is_inference():
                return "inference tensors" if t.is_inference() else f"tensors on {t.device.type}"
            if sums and reducible(t.dtype) is not None:
                return f"sums of {t.dtype}"
        if len({t.device for t in tensors}) > 1 or (op != "all_reduce" and len({t.dtype for t in tensors}) > 1):
            return "tensors of several types"
        kind = _kind(reduce_op)
        if sums and kind not in ("SUM", "AVG"):
            return f"reduction {kind}"
        if sums and kind == "AVG" and not all(t.is_floating_point() for t in tensors):
            return "average of integers"
        return None

    def _elsewhere(self, op: str, tensors: Sequence[Tensor], reason: str, methods: Sequence[str], *args: Any) -> Work:
        if self._strict and not self._off:
            raise Unsupported(f"{op}: rank {self._place[0]}: {reason}: served by torch's backend without strict=True")
        comm = self._comms.get(tensors[0].device.type) if tensors else None
        if comm is not None:
            comm.count(op, False, reason)
        # Not super(): its methods are virtual and come back here.
        inner = self._inner[tensors[0].device.type if tensors else "cpu"]
        found: Work = next(getattr(inner, m) for m in methods if hasattr(inner, m))(*args)
        return found

    def _submit(
        self,
        op: str,
        run: Callable[[Communicator], Any],
        results: list[Tensor],
        inputs: list[Tensor],
        device: torch.device | None = None,
    ) -> Work:
        where = device or inputs[0].device
        stream = torch.cuda.current_stream(where) if where.type == "cuda" else None

        def job() -> None:
            on = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
            with torch.no_grad(), on:
                run(self._communicator(where))

        done: Future[None] = self._queue().submit(job)
        if self._together is not None:
            self._together.append(done)
        work = _CollectiveWork(op, done, list(results), self._timeout.total_seconds())
        if stream is not None:
            # The host's part only: what is enqueued on the stream after this call must come after the collective.
            work.wait()
        return work

    def _queue(self) -> ThreadPoolExecutor:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"commbackend-c10d-{self._label}")
        return self._worker

    def _communicator(self, device: torch.device) -> Communicator:
        found = self._comms.get(device.type)
        if found is None:
            rank, size = self._place
            store, timeout_s = PrefixStore(f"commbackend/{device.type}", self._store), self._timeout.total_seconds()
            group = Group.from_store(store, rank, size, timeout_s=timeout_s, name=f"{self._label}/{BACKEND}")
            found = self._comms[device.type] = init(group, device=device.type, name="c10d", **self._config)
        return found

    # -- end -----------------------------------------------------------------------------------------------------------
    def shutdown(self) -> None:
        """End queued collectives, close the communicators and torch's backends. Collective; waits a few seconds for
        ranks that come later.
        """
        comms, self._comms = dict(self._comms), {}
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=True)
        for comm in comms.values():
            try:
                comm.close(timeout_s=min(_LEAVE_S, self._timeout.total_seconds()))
            except CommBackendError as e:
                log.warning("commbackend: leaving group %s: %s", self._label, e)
        super().shutdown()

    def abort(self) -> None:
        """Fail the collectives that run, here and at the peers, then shut down. Local."""
        for comm in self._comms.values():
            comm.abort("abort of the process group")
        self.shutdown()


# -- collectives of flat buffers --------------------------------------------------------------------------------------


def _each(collective: Callable[..., None], tensors: Sequence[Tensor], *args: Any) -> Callable[[Communicator], None]:
    def run(comm: Communicator) -> None:
        for t in tensors:
            collective(comm, t, *args)

    return run


def _wait(work: Work) -> None:
    work.wait()


def _join(jobs: Sequence[Future[None]]) -> None:
    for job in jobs:
        job.result()


def _kind(op: Any) -> str:
    """Name of a reduction; torch compares an operation with a kind in this order only."""
    kinds = dist.ReduceOp.RedOpType.__members__.items()
    return "SUM" if op is None else next((name for name, kind in kinds if op == kind), "unknown")


def _root(opts: Any) -> Any:
    if not isinstance(opts, int):
        return opts
    made = dist.BroadcastOptions()
    made.rootRank = opts
    return made


def _rows(t: Tensor) -> Tensor:
    """A contiguous tensor as rows that can be cut into chunks, in bytes where its type is not moved as it is."""
    flat = t.detach().view(-1)
    flat = flat if t.dtype in _PLAIN else flat.view(torch.uint8)
    return flat.view(-1, math.gcd(flat.numel(), _COLUMNS) or _COLUMNS)


def _all_gather(comm: Communicator, output: Tensor, input: Tensor) -> None:
    x = _rows(input)
    out = output.detach().view(-1)
    out = (out if x.dtype == output.dtype else out.view(torch.uint8)).view(-1, x.shape[1])
    problem = Problem("all_gather", (x.shape[0],) * comm.size, 1, x.shape[1], dtype=dtype_name(x.dtype))
    execute(comm, problem, {"x": x, "out": out})


def _broadcast(comm: Communicator, t: Tensor, root: int) -> None:
    """A gather to which the root alone brings rows."""
    x = _rows(t)
    rows = tuple(x.shape[0] if r == root else 0 for r in range(comm.size))
    problem = Problem("all_gather", rows, 1, x.shape[1], dtype=dtype_name(x.dtype))
    if comm.rank == root:
        execute(comm, problem, {"x": x, "out": torch.empty_like(x)})
    else:
        execute(comm, problem, {"x": x[:0], "out": x})


def _reduce_scatter(comm: Communicator, output: Tensor, input: Tensor, op: Any) -> None:
    out = output.detach().view(-1)
    out = out.view(-1, math.gcd(out.numel(), _COLUMNS) or _COLUMNS)
    x = input.detach().view(-1, out.shape[1])
    problem = Problem("reduce_scatter", (out.shape[0],) * comm.size, 1, out.shape[1], dtype=dtype_name(out.dtype))
    execute(comm, problem, {"x": x, "out": out})
    _average(comm, out, op)


def _all_reduce(comm: Communicator, t: Tensor, op: Any) -> None:
    x = t.detach().view(-1)
    x = x.view(-1, math.gcd(x.numel(), _COLUMNS) or _COLUMNS)
    if x.shape[0] < comm.size:
        x = x.view(-1, 1)  # too few rows to share the sum row by row
    out = torch.empty_like(x)
    problem = Problem("all_reduce", split(x.shape[0], comm.size), k=x.shape[1], dtype=dtype_name(x.dtype))
    execute(comm, problem, {"x": x, "out": out})
    _average(comm, out, op)
    x.copy_(out)


def _average(comm: Communicator, total: Tensor, op: Any) -> None:
    if _kind(op) == "AVG":
        total.div_(comm.size)
