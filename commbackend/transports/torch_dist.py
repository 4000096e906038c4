"""Transports ``gloo`` and ``nccl``: collectives through torch.distributed's backends, on groups of their own."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..contract import Caps, torch_stream
from ..errors import CommBackendError, CommTimeout, Unavailable, Unsupported
from ..host.collectives import REDUCTIONS, HostCollectives, as_bytes, land, landing, packed
from ..host.netlink import FOR_EVER, NetTransport, backend

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store, Work

__all__ = ["GlooTransport", "NcclTransport"]


class GlooTransport(HostCollectives, NetTransport):
    """Collectives on CPU tensors over gloo: works wherever TCP does."""

    name: ClassVar[str] = "gloo"
    caps = Caps(device="cpu", collective=True, scope="cluster", numerics="fixed")

    @classmethod
    def probe(cls, device: torch.device) -> None:
        if device.type != "cpu":
            raise Unavailable(f"gloo moves CPU tensors, not {device.type} ones", "use nccl")
        backend("ProcessGroupGloo")

    def _all_to_all(self, dsts: Sequence[Tensor], srcs: Sequence[Tensor], stream: int | None) -> None:
        kept = {id(s): packed(s) for s in srcs}
        landed = [landing(d) for d in dsts]
        deadline = time.monotonic() + self.timeout_s
        self._swap([as_bytes(t) for t in landed], [as_bytes(kept[id(s)]) for s in srcs], deadline)
        land(dsts, landed)


class NcclTransport(NetTransport):
    """Collectives on CUDA tensors over NCCL, enqueued on the caller's stream; records and barriers go over gloo."""

    name: ClassVar[str] = "nccl"
    caps = Caps(device="cuda", collective=True, scope="cluster", numerics="library", stream_ordered=True)

    _nccl: Any = None
    _enqueued: collections.deque[tuple[torch.cuda.Event, float]] = collections.deque()

    @classmethod
    def probe(cls, device: torch.device) -> None:
        if device.type != "cuda":
            raise Unavailable(f"nccl moves CUDA tensors, not {device.type} ones", "use gloo or shm")
        if not torch.cuda.is_available():
            raise Unavailable("torch sees no CUDA device", "install a CUDA build of torch, and check nvidia-smi")
        backend("ProcessGroupNCCL")
        backend("ProcessGroupGloo")

    def _join(self, store: Store, device: torch.device) -> None:
        from torch._C._distributed_c10d import PrefixStore

        nccl = backend("ProcessGroupNCCL")
        options = nccl.Options()
        # Deadlines are kept by the watch thread here: torch's own watchdog ends the whole process at its timeout.
        options._timeout = FOR_EVER
        self._device, self._enqueued = device, collections.deque()
        self._nccl = nccl(PrefixStore("data", store), self.rank, self.size, options)
        with torch.cuda.device(device):
            # NCCL connects at its first collectives: now, so that what does not work shows here.
            found = torch.zeros(self.size, dtype=torch.int32, device=device)
            mine = torch.full((1,), self.rank + 1, dtype=torch.int32, device=device)
            self._all_gather(found.split(1), mine, torch.cuda.current_stream().cuda_stream)
            if found.tolist() != list(range(1, self.size + 1)):
                raise Unavailable(f"nccl gathered {found.tolist()} at rank {self.rank}")

    def _enqueue(self, call: Callable[[], Work]) -> None:
        """Run ``call`` on the current stream and note when it must have finished."""
        deadline = time.monotonic() + self.timeout_s
        try:
            call().wait()  # lets the stream wait, not the host
        except RuntimeError as e:
            raise self._explain(e, -1) from e
        event = torch.cuda.Event()
        event.record()
        while self._enqueued and self._enqueued[0][0].query():
            self._enqueued.popleft()
        self._enqueued.append((event, deadline))

    def _overdue(self, now: float) -> CommBackendError | None:
        # An event is queried only once it is overdue: a query from this thread would break a capture elsewhere.
        if all(now < deadline or event.query() for event, deadline in list(self._enqueued)[:1]):
            return None
        return CommTimeout(f"{self._here()}: a collective of nccl has not ended in time", op=self.op, seq=self.seq)

    def _cut(self, peers: Sequence[int]) -> None:
        super()._cut(peers)
        nccl = self._nccl
        if nccl is not None and self._fault is not None:
            nccl.abort()

    def _close(self, timeout_s: float) -> None:
        try:
            super()._close(timeout_s)
        finally:
            nccl, self._nccl = self._nccl, None
            if nccl is not None and self._fault is None:
                nccl.shutdown()

    def _on(self, stream: int | None) -> Any:
        return torch.cuda.stream(None if stream is None else torch_stream(stream, self._device))

    def _all_gather(self, dsts: Sequence[Tensor], src: Tensor, stream: int | None) -> None:
        self._all_to_all(dsts, [src] * self.size, stream)

    def _all_to_all(self, dsts: Sequence[Tensor], srcs: Sequence[Tensor], stream: int | None) -> None:
        with self._on(stream):
            kept = {id(s): packed(s) for s in srcs}
            landed = [landing(d) for d in dsts]
            outs, ins = [as_bytes(t) for t in landed], [as_bytes(kept[id(s)]) for s in srcs]
            self._enqueue(lambda: self._nccl.alltoall(outs, ins))
            land(dsts, landed)

    def _reduce_scatter(self, dst: Tensor, srcs: Sequence[Tensor], op: str, stream: int | None) -> None:
        from torch._C._distributed_c10d import ReduceScatterOptions

        options = ReduceScatterOptions()
        options.reduceOp = _reduce_op(op)
        with self._on(stream):
            ins, out = [packed(s) for s in srcs], landing(dst)
            self._enqueue(lambda: self._nccl.reduce_scatter([out], [ins], options))
            land([dst], [out])

    def _all_reduce(self, dst: Tensor, src: Tensor, op: str, stream: int | None) -> None:
        from torch._C._distributed_c10d import AllreduceOptions

        options = AllreduceOptions()
        options.reduceOp = _reduce_op(op)
        with self._on(stream):
            out = landing(dst)
            out.copy_(src)
            self._enqueue(lambda: self._nccl.allreduce([out], options))
            land([dst], [out])


# -- helpers
# --------------------------------------------------------------------------------------------------------------


def _reduce_op(op: str) -> Any:
    from torch._C._distributed_c10d import ReduceOp

    if op not in REDUCTIONS:
        raise Unsupported(f"reduction {op!r}: one of {', '.join(REDUCTIONS)}")
    return getattr(ReduceOp, op.upper())
