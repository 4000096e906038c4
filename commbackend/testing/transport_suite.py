"""The conformance suite of transports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from ..contract import Collective, OneSided, Transport
from ..errors import Unavailable
from .harness import Promise, Setup, load, promises, run_promise
from .ranks import run_ranks

__all__ = ["TransportSuite"]


class TransportSuite:
    """One test for every promise of ``contract``. Subclass it in a test module and name the transport.

    Attributes:
        transport: "module:Class", importable in fresh processes.
        options: For ``connect``.
        device: "cpu" or "cuda".
        size: Ranks.
        runner: ``run_ranks``, or ``run_threads`` for a transport of scope "process".
        patience_s: Deadline of what should succeed at once.

    What applies follows from the roles and the caps alone; the rest is skipped with its reason.
    """

    transport: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    device: ClassVar[str] = "cpu"
    size: ClassVar[int] = 3
    runner: ClassVar[Callable[..., list[Any]]] = staticmethod(run_ranks)
    patience_s: ClassVar[float] = 10.0

    @pytest.mark.parametrize("promise", promises(), ids=lambda p: p.name)  # type: ignore[untyped-decorator]
    def test_promise(self, promise: Promise) -> None:
        kind = load(self.transport)
        try:
            kind.probe(torch.device(self.device))
        except Unavailable as e:
            pytest.skip(f"{kind.name}: {e}")
        if reason := self.applies(kind, promise):
            pytest.skip(f"{kind.name}: {reason}")
        self.keep(promise)

    @staticmethod
    def applies(kind: type[Transport], promise: Promise) -> str:
        """Return "", or why ``promise`` is none of ``kind``'s."""
        if not issubclass(kind, promise.role):
            return f"it is not {promise.role.__name__}"
        return promise.needs(kind.caps)

    def keep(self, promise: Promise) -> None:
        """Run one promise on fresh ranks. Raises RankError with every rank's traceback if it is broken."""
        setup = Setup(self.transport, self.device, dict(self.options), self.patience_s)
        runner = type(self).runner
        extra = {"expect_death": promise.dies} if promise.dies else {}
        runner(run_promise, self.size, setup, promise.fn, timeout_s=3 * self.patience_s + 30, **extra)

    def test_caps_state_the_roles(self) -> None:
        """Caps and classes say the same."""
        kind = load(self.transport)
        assert kind.caps.one_sided == issubclass(kind, OneSided)
        assert kind.caps.collective == issubclass(kind, Collective)
        assert kind.caps.scope in ("process", "host", "nvlink", "cluster")
        assert kind.caps.source in ("any", "symmetric")
        assert kind.caps.numerics in ("fixed", "library")
        assert kind.name.isidentifier()
