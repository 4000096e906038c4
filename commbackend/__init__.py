"""commbackend: tensor-parallel matrix products that overlap with their communication.

Importing this package imports neither torch nor CUDA and reads no environment; every public name loads on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_HOME = {
    "CollectiveMismatch": "errors",
    "CommAborted": "errors",
    "CommBackendError": "errors",
    "CommTimeout": "errors",
    "Communicator": "communicator",
    "ConcurrentUse": "errors",
    "ConfigError": "errors",
    "HeapExhausted": "errors",
    "PeerDied": "errors",
    "ShapeError": "errors",
    "Unavailable": "errors",
    "Unsupported": "errors",
    "UnsupportedDtype": "errors",
    "all_gather": "ops",
    "all_gather_matmul": "ops",
    "all_reduce": "ops",
    "barrier": "ops",
    "column_parallel_linear": "ops",
    "explain": "communicator",
    "full_state_dict": "integrations.module",
    "init": "communicator",
    "matmul_all_reduce": "ops",
    "matmul_reduce_scatter": "ops",
    "name_layers": "tuning.layer_names",
    "parallelize": "integrations.module",
    "reduce_scatter": "ops",
    "stats": "communicator",
}

__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604 - _HOME's keys are strings

if TYPE_CHECKING:
    from . import nn as nn
    from .communicator import Communicator as Communicator
    from .communicator import explain as explain
    from .communicator import init as init
    from .communicator import stats as stats
    from .errors import CollectiveMismatch as CollectiveMismatch
    from .errors import CommAborted as CommAborted
    from .errors import CommBackendError as CommBackendError
    from .errors import CommTimeout as CommTimeout
    from .errors import ConcurrentUse as ConcurrentUse
    from .errors import ConfigError as ConfigError
    from .errors import HeapExhausted as HeapExhausted
    from .errors import PeerDied as PeerDied
    from .errors import ShapeError as ShapeError
    from .errors import Unavailable as Unavailable
    from .errors import Unsupported as Unsupported
    from .errors import UnsupportedDtype as UnsupportedDtype
    from .integrations.module import full_state_dict as full_state_dict
    from .integrations.module import parallelize as parallelize
    from .ops import all_gather as all_gather
    from .ops import all_gather_matmul as all_gather_matmul
    from .ops import all_reduce as all_reduce
    from .ops import barrier as barrier
    from .ops import column_parallel_linear as column_parallel_linear
    from .ops import matmul_all_reduce as matmul_all_reduce
    from .ops import matmul_reduce_scatter as matmul_reduce_scatter
    from .ops import reduce_scatter as reduce_scatter
    from .tuning.layer_names import name_layers as name_layers


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name == "nn":  # as people write commbackend.nn.GatedMLP; not in __all__, where it would hide torch's nn
        return importlib.import_module(".nn", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "nn"])
