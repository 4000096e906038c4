"""Communicators on fake GPUs: ranks are threads, streams, events and kernels are those of ``fake_cuda``.

So whole calls run as on a GPU, in stream order, by queues of any number, and every driver call is counted.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeUserbuffers, _store, _word, gpus

from commbackend import communicator
from commbackend.communicator import Communicator
from commbackend.config import resolve
from commbackend.contract import GemmProblem, GemmProvider, GemmSegment, SumProvider
from commbackend.execution import binding, streams
from commbackend.execution.engine import Engine
from commbackend.execution.reduction import reduce_into
from commbackend.gemm.torch_mm import TorchMM
from commbackend.metrics import Meter
from commbackend.testing import run_threads

CPU = torch.device("cpu")
_here = threading.local()


class _Stream(SimpleNamespace):
    """torch.cuda.Stream of a fake."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.cuda_stream == other.cuda_stream

    def wait_event(self, event: _Event) -> None:
        self.fake.cuStreamWaitEvent(self.cuda_stream, event.raw, 0)


class _Event:
    def __init__(self, fake: FakeCuda) -> None:
        self.fake, self.raw = fake, fake.cuEventCreate(2)[1]
        fake._events.discard(self.raw)  # torch's events live as long as they are used

    def record(self, stream: _Stream) -> None:
        self.fake.cuEventRecord(self.raw, stream.cuda_stream)


def use_fake(fake: FakeCuda) -> None:
    """This thread is a rank with that GPU."""
    _here.fake, _here.stream = fake, None


class FakeStreams:
    """``streams.TorchStreams`` of the rank whose thread this is."""

    def __init__(self, device: torch.device) -> None:
        self._fake: FakeCuda = _here.fake
        self._default = _Stream(fake=self._fake, cuda_stream=0)

    def current(self) -> _Stream:
        found: _Stream = getattr(_here, "stream", None) or self._default
        return found

    def capturing(self) -> bool:
        return False

    def new(self) -> _Stream:
        return _Stream(fake=self._fake, cuda_stream=self._fake.new_stream())

    def event(self) -> _Event:
        return _Event(self._fake)

    def use(self, stream: _Stream) -> None:
        _here.stream = stream


class FakeKernels(GemmProvider, SumProvider):
    """Products and sums as work of a fake's streams; those that poll run beside their queue, as kernels do."""

    name = "fake"
    #: Whether anything is multiplied at all.
    launches = True

    @classmethod
    def probe(cls, device: torch.device) -> None:
        return

    def supports(self, problem: GemmProblem) -> str | None:
        return None

    def prepare(self, problem: GemmProblem) -> Any:
        fake, streams_ = _here.fake, FakeStreams(CPU)
        run = TorchMM().prepare(GemmProblem(1, 1, 1, problem.dtype, problem.out_dtype, "cpu"))

        def launch(segments: Sequence[GemmSegment], *, stream: Any = None, sm_limit: int = 0, epoch: int = 0) -> None:
            if not self.launches:
                return
            left = list(segments)

            def step() -> bool:
                while left:
                    s = left[0]
                    if not all(_word(slot.table.address(w, slot.word)).value >= slot.value for w, slot in s.ready):  # type: ignore[attr-defined]
                        return False
                    run([s])
                    for peer, slot in s.done:
                        _store(slot.table.peer_address(peer, slot.word), slot.value)  # type: ignore[attr-defined]
                    del left[0]
                return True

            fake.calls["gemm"] += 1
            fake._add("gemm", streams_.current().cuda_stream if stream is None else stream, step, kernel=problem.polls)

        return launch

    def sums(self, dtype: torch.dtype, count: int) -> str | None:
        return None

    def prepare_sum(self, dtype: torch.dtype, count: int) -> Any:
        fake = _here.fake

        def launch(out: Any, srcs: Any, *, bias: Any = None, stream: Any = None, **kw: Any) -> None:
            fake.calls["sum"] += 1
            srcs = list(srcs)
            fake._add("sum", stream or 0, lambda: reduce_into(out, srcs, bias) is None)

        return launch


def _reduce_into(dst: Any, srcs: Any, bias: Any = None) -> None:
    """torch's own sums, on the stream that is current."""
    stream, srcs = FakeStreams(CPU).current().cuda_stream, list(srcs)
    _here.fake._add("torch sum", stream, lambda: reduce_into(dst, srcs, bias) is None)


@contextlib.contextmanager
def fake_gpus(size: int, monkeypatch: pytest.MonkeyPatch, **fake: Any) -> Iterator[list[FakeCuda]]:
    """The fakes of ``size`` ranks, in the places of torch's streams, the transport and the GEMM providers."""
    fakes = [FakeCuda(gpus(size), [r, *(i for i in range(size) if i != r)], **fake) for r in range(size)]
    FakeUserbuffers.fakes = dict(enumerate(fakes))
    run = Engine.run

    def keeping(self: Engine, bound: Any, tensors: Any, *rest: Any) -> None:
        # A caching allocator gives memory out again in stream order; the CPU's gives it out at once.
        _here.fake.__dict__.setdefault("kept", collections.deque(maxlen=256)).append(dict(tensors))
        run(self, bound, tensors, *rest)

    monkeypatch.setattr(Engine, "run", keeping)
    monkeypatch.setattr(streams, "TorchStreams", FakeStreams)
    monkeypatch.setattr(binding, "reduce_into", _reduce_into)
    untimed = SimpleNamespace(record=lambda: None, query=lambda: False)
    monkeypatch.setattr(communicator, "_meter", lambda engine: Meter(engine.size, lambda: untimed))
    monkeypatch.setattr(communicator, "_gemm_providers", lambda *_: [FakeKernels()])
    monkeypatch.setattr(
        communicator, "connect", lambda group, device, config: (FakeUserbuffers.connect(group, device, {}), None)
    )
    try:
        yield fakes
    finally:
        for f in fakes:
            f.stop()


def spmd_fakes(
    fakes: list[FakeCuda],
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    deadline_s: float = 20.0,
    **config: Any,
) -> list[Any]:
    """``fn(comm, fake, *args)`` on every rank."""

    def body(rank: int, group: Any) -> Any:
        use_fake(fakes[rank])
        with Communicator(group, resolve(timeout_s=deadline_s, **config), CPU) as comm:
            return fn(comm, fakes[rank], *args)

    return run_threads(body, len(fakes), timeout_s=timeout_s)
