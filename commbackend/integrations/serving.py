"""What the plugins of serving frameworks share: a row-parallel layer's product as one operator of a compiler.

Serving layers run inside ``torch.compile`` and CUDA graphs, where nothing can connect, allocate or count. So everything
is decided when a layer is made: ``prepare`` connects the group, makes room for the largest batch, gets ready for
capture, and says whether the layer is fused. In a call there is one operator,
``torch.ops.commbackend.matmul_all_reduce``. How it runs depends on the number of tokens, by the communicator's choices:
many rows overlap, and few (decoding) are one product and one exchange, without chunks.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from .. import library
from ..communicator import resolve_communicator
from ..errors import Unsupported
from .fallback import OFF, refuse

__all__ = ["prepare", "run", "unsupported_layer"]

log = logging.getLogger("commbackend")

_OP = "matmul_all_reduce"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported_layer(weight: Any, *, unquantized: bool, reduces: bool, parallel_input: bool) -> str | None:
    """Why a row-parallel layer keeps its own forward, or None. Local."""
    if not unquantized:
        return "quantised"
    if not reduces:
        return "the sum is made outside the layer"
    if not parallel_input:
        return "input_is_parallel=False"
    if type(weight) is not Tensor and not isinstance(weight, torch.nn.Parameter):
        return f"the weight is a {type(weight).__name__}"
    return f"products of {weight.dtype}" if weight.dtype not in _DTYPES or weight.dim() != 2 else None


def prepare(group: Any, weight: Tensor, reason: str | None, *, tokens: int, capture: bool) -> str:
    """Get ready for a layer's calls and return the name for ``run``, or "" where the layer stays stock, which is
    counted once for it. Collective.

    Args:
        group: The tensor-parallel ProcessGroup, of more than one rank.
        weight: (n, k), this rank's part.
        reason: Why the layer stays stock, or None.
        tokens: The most rows of a call.
        capture: Calls will be captured in CUDA graphs.
    """
    comm = resolve_communicator(group, device=weight.device)
    why = OFF if comm.off else reason
    if why is None:
        comm.reserve(tokens, weight.shape[0], weight.dtype)
        if capture and weight.is_cuda:
            try:
                comm.prepare_capture()
            except Unsupported as e:
                why = f"{comm.transport} cannot be captured in CUDA graphs"
                log.warning("commbackend: %s stays stock: %s", _OP, e)
    if why is None:
        return comm.op_name
    refuse(comm, _OP, why)
    return ""


def run(x: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """all_reduce(x @ weight.T) + bias over the communicator called ``name``. Collective; may be traced and captured."""
    out: Tensor = torch.ops.commbackend.matmul_all_reduce(x, weight, bias, name)
    return out


# The operator is there once its module is imported, which must not happen in the middle of a trace.
assert library.OPERATORS
