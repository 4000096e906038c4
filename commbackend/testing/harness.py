"""What a promise runs on: one connected rank, with helpers that know streams and where sources must live."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..contract import Collective, OneSided, Slot, SymBuffer, Transport, Window
from ..group import Group

__all__ = ["DTYPES", "Harness", "Promise", "Setup", "keep", "load", "promises", "run_promise", "same_bytes"]


@dataclass(frozen=True)
class Promise:
    """One promise of the contract.

    Attributes:
        fn: Breaks with an exception on some rank when the transport does not keep it.
        role: The role it belongs to.
        needs: Tells from the caps why it does not apply, or "".
        dies: Ranks whose process ends during it.
    """

    fn: Callable[[Harness], None]
    role: type[Any]
    needs: Callable[[Any], str]
    dies: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.fn.__name__


_STAGING_NBYTES = 1 << 24

_PROMISES: list[Promise] = []


def keep(
    role: type[Any], needs: Callable[[Any], str] = lambda caps: "", dies: tuple[int, ...] = ()
) -> Callable[[Callable[[Harness], None]], Callable[[Harness], None]]:
    """Register a function as a promise."""

    def register(fn: Callable[[Harness], None]) -> Callable[[Harness], None]:
        _PROMISES.append(Promise(fn, role, needs, dies))
        return fn

    return register


def promises() -> list[Promise]:
    """All promises, the quickest to break first."""
    for name in ("moving", "collectives", "faults", "leaving"):
        importlib.import_module(f".promises_{name}", __package__)
    return list(_PROMISES)


def load(spec: str) -> Any:
    """Return what "module:name" names."""
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Setup:
    """How ranks make the transport; travels to their processes.

    Attributes:
        transport: "module:Class".
        device: "cpu" or "cuda".
        options: For ``connect``.
        patience_s: Deadline of everything that should succeed at once.
    """

    transport: str
    device: str
    options: dict[str, Any]
    patience_s: float


class Harness:
    """One rank in a promise."""

    def __init__(self, group: Group, setup: Setup) -> None:
        self.group, self.setup = group, setup
        self.rank, self.size = group.rank, group.size
        self.next, self.prev = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.peers = [p for p in range(self.size) if p != self.rank]
        self.kind: type[Transport] = load(setup.transport)
        if setup.device == "cuda":
            self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device(setup.device)
        self.t = self.connect()
        #: Where sources are copied when puts read only the symmetric heap, one after the other.
        self.staging: SymBuffer | None = None
        self._own = threading.local()
        self.staged = 0
        if isinstance(self.t, OneSided) and self.t.caps.source == "symmetric":
            self.staging = self.t.alloc(_STAGING_NBYTES)

    def connect(self) -> Transport:
        return self.kind.connect(self.group, self.device, self.setup.options)

    # -- typed views of the transport
    @property
    def one(self) -> OneSided:
        return cast(OneSided, self.t)

    @property
    def many(self) -> Collective:
        return cast(Collective, self.t)

    @property
    def stream(self) -> int | None:
        """The current stream; in other threads than the main one a stream of their own: a wait holds what follows."""
        if not self.t.caps.stream_ordered:
            return None
        if threading.current_thread() is threading.main_thread():
            return int(torch.cuda.current_stream().cuda_stream)
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream()
        return int(self._own.stream.cuda_stream)

    def sync(self) -> None:
        """Let everything enqueued finish, and raise the fault it met."""
        if self.t.caps.stream_ordered:
            torch.cuda.synchronize()
        if self.t.fault is not None:
            raise self.t.fault

    def soon(self, seconds: float | None = None) -> float:
        return time.monotonic() + (self.setup.patience_s if seconds is None else seconds)

    # -- tensors
    def tensor(self, values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.as_tensor(values).to(dtype).to(self.device)

    def random(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        """Random bytes, the same for the same arguments on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        top = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, top, (count,), generator=generator, dtype=torch.uint8)
        return raw.view(dtype).reshape(shape).to(self.device)

    def source(self, tensor: Tensor) -> Tensor:
        """``tensor`` where puts may read it: itself, or a copy in the symmetric heap. Local."""
        if self.staging is None:
            return tensor
        nbytes = -(-tensor.numel() * tensor.itemsize // 64) * 64
        if self.staged + nbytes > self.staging.nbytes:
            self.sync()
            self.staged = 0
        window = self.staging.window(self.staged, tuple(tensor.shape), tensor.dtype)
        self.staged += nbytes
        window.local.copy_(tensor)
        return window.local

    # -- verbs on the right stream
    def put(self, dst: Window, src: Tensor, peer: int, slot: Slot | None = None) -> None:
        self.one.put(dst, self.source(src), peer, slot=slot, stream=self.stream)

    def get(self, dst: Tensor, src: Window, peer: int) -> None:
        self.one.get(dst, src, peer, stream=self.stream)
        self.sync()

    def signal(self, peer: int, slot: Slot) -> None:
        self.one.signal(peer, slot, stream=self.stream)

    def wait(self, peer: int, slot: Slot, seconds: float | None = None) -> None:
        self.one.wait(peer, slot, deadline=self.soon(seconds), stream=self.stream)
        self.sync()

    def barrier(self) -> None:
        self.sync()
        self.t.barrier(self.soon())

    # -- expectations
    def raises(self, kind: type[BaseException], call: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """Call, and return the exception of ``kind`` that it must raise."""
        try:
            call(*args, **kw)
        except kind as e:
            return e
        raise AssertionError(f"rank {self.rank}: {getattr(call, '__name__', call)} did not raise {kind.__name__}")

    @contextlib.contextmanager
    def takes(self, low: float, high: float) -> Iterator[None]:
        """The block must take between ``low`` and ``high`` seconds."""
        start = time.monotonic()
        yield
        took = time.monotonic() - start
        assert low <= took <= high, f"rank {self.rank}: took {took:.3f} s, not {low}...{high}"

    @contextlib.contextmanager
    def warnings(self) -> Iterator[list[str]]:
        """Collect what the library warns of."""
        seen: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("commbackend")
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)  # whatever the process has chosen to see
        try:
            yield seen
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)

    def later(self, seconds: float, call: Callable[[], Any]) -> threading.Timer:
        timer = threading.Timer(seconds, call)
        timer.start()
        return timer


def run_promise(rank: int, group: Group, setup: Setup, fn: Callable[[Harness], None]) -> None:
    """One rank's part of a promise: connect, keep it, leave."""
    group.timeout_s = max(setup.patience_s, 1.0)
    harness = Harness(group, setup)
    try:
        fn(harness)
    except BaseException as e:
        harness.t.abort(f"the promise {fn.__name__} broke: {e!r}")
        raise
    finally:
        harness.t.close()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    return bool((a.contiguous().view(-1).view(torch.uint8) == b.contiguous().view(-1).view(torch.uint8)).all())


def _copyable() -> list[torch.dtype]:
    """The dtypes whose tensors torch can copy strided; the rest (quantized, sub-byte) are placeholders."""
    found: dict[torch.dtype, None] = {}
    for name in sorted(dir(torch)):
        dtype = getattr(torch, name)
        if isinstance(dtype, torch.dtype):
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                raw = torch.zeros(4 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(2, 2)
                raw.t().contiguous().view(-1).view(torch.uint8)
                found[dtype] = None
    return list(found)


#: Every dtype a tensor can be copied in.
DTYPES = _copyable()
