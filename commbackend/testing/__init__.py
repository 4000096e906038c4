"""What proves a transport or a GEMM provider: conformance suites, and ranks to run them on.

``TransportSuite`` and ``GemmSuite`` are classes of pytest tests to subclass; ``run_ranks`` runs a function in fresh
processes, ``run_threads`` in threads of this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .ranks import RankError, run_ranks, run_threads

if TYPE_CHECKING:
    from .gemm_suite import GemmSuite as GemmSuite
    from .transport_suite import TransportSuite as TransportSuite

__all__ = ["GemmSuite", "RankError", "TransportSuite", "run_ranks", "run_threads"]


def __getattr__(name: str) -> Any:
    # Ranks need no pytest; only the suites do.
    if name == "TransportSuite":
        from .transport_suite import TransportSuite

        return TransportSuite
    if name == "GemmSuite":
        from .gemm_suite import GemmSuite

        return GemmSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
