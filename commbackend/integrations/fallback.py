"""What every adapter shares: a call is fused, or it runs as the framework would have run it, and is counted.

    comm = fused_by("matmul_all_reduce", x, weight, group, strict=self.strict, layer="layers.3.mlp.down_proj")
    if comm is None:
        return super().forward(x)          # stock; ``comm.stats()["fallback_by_op"]`` says how often, and why
    return ops.matmul_all_reduce(x, weight, comm)

A framework's model runs at any rate; what must not happen is that nobody notices that nothing is overlapped. So every
call that an adapter serves shows up in ``commbackend.stats()``: fused calls are counted by the operations themselves,
stock calls here, by operation and reason. ``strict=True`` raises instead, and ``require_overlap`` checks a whole run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..communicator import Communicator, resolve_communicator
from ..errors import Unsupported

__all__ = ["OFF", "fused_by", "operands", "refuse", "require_overlap", "supports"]

#: The reason with ``transport="off"``. It was asked for, so ``strict`` does not object.
OFF = "transport is off"

_PRODUCTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, torch.nn.Parameter)


def supports(x: Tensor, w: Tensor, group: Any = None) -> str | None:
    """Why a fused operation cannot take input ``x`` and weight ``w`` over ``group``, or None. Local once the group has
    a communicator, collective before; the same on all ranks whose tensors are alike.

    Args:
        x: (..., k), as the operation gets it (this rank's part).
        w: (n, k), this rank's part.
        group: As for all ops.
    """
    usual = x.device.type in ("cpu", "cuda")
    comm = resolve_communicator(group, device=x.device if usual else None)
    if comm.off:
        return OFF
    if comm.size == 1:
        return "the group has one rank"
    return operands(x, w, comm.device.type) or _fit(x, w)


def operands(x: Tensor, w: Tensor, device_type: str) -> str | None:
    """Why a product of ``x`` and ``w`` is not one of plain matrices on ``device_type``, or None. Local; may be traced.

    The part of ``supports`` that holds for this rank's part of DTensors too.
    """
    for what, t in (("input", x), ("weight", w)):
        if type(t) not in _PLAIN:
            # Subclasses (quantised weights, DTensors, ...) mean something that a product of their numbers is not.
            return f"the {what} is a {type(t).__name__}"
        if t.layout is not torch.strided or t.is_quantized or t.is_nested:
            return f"the {what} has layout {t.layout}"
        if t.device.type != device_type:
            return f"the {what} is on {t.device.type}"
    cast = torch.is_autocast_enabled(device_type) and x.is_floating_point() and w.is_floating_point()
    if x.dtype not in _PRODUCTS or w.dtype not in _PRODUCTS:
        return f"products of {x.dtype} and {w.dtype}"
    if x.dtype != w.dtype and not (cast and torch.float64 not in (x.dtype, w.dtype)):
        return f"input is {x.dtype}, weight is {w.dtype}"
    return None


def _fit(x: Tensor, w: Tensor) -> str | None:
    if x.dim() == 0 or w.dim() != 2 or x.shape[-1] != w.shape[1]:
        return "shapes of input and weight do not fit"
    return None


def refuse(comm: Communicator, op: str, reason: str, *, strict: bool = False, layer: str = "") -> None:
    """Count a call that runs stock. Local.

    Args:
        op: The operation it would have been, a name of ``commbackend.ops``.
        reason: One line without numbers that change from call to call: it is a key of ``stats``.
        layer: Who called, for the message.

    Raises:
        Unsupported: With ``strict``, unless the reason is ``OFF``.
    """
    if strict and reason != OFF:
        who = f" of {layer}" if layer else ""
        raise Unsupported(f"rank {comm.rank}: {op}{who} cannot be fused: {reason}; with strict=False it runs stock")
    comm.count(op, False, reason)


def fused_by(
    op: str, x: Tensor, w: Tensor, group: Any, *, reason: str | None = None, strict: bool = False, layer: str = ""
) -> Communicator | None:
    """Return the communicator that is to run ``op``, or None where the caller runs its stock form, which is counted.
    Collective the first time for a group, local afterwards.

    Args:
        x, w, group: As for ``supports``.
        reason: Why the adapter itself cannot fuse this call (an option of the framework), or None.
        strict, layer: As for ``refuse``.

    Raises:
        Unsupported: With ``strict``, where the call cannot be fused.
    """
    usual = x.device.type in ("cpu", "cuda")
    comm = resolve_communicator(group, device=x.device if usual else None)
    why = OFF if comm.off else reason or supports(x, w, comm)
    if why is None:
        return comm
    refuse(comm, op, why, strict=strict, layer=layer)
    return None


@contextlib.contextmanager
def require_overlap(group: Any = None) -> Iterator[None]:
    """Check that at least one call of the body overlapped. Local, so put it around a whole step, on all ranks.

    Raises:
        Unsupported: None did, at the body's end; the message has the reasons that were counted. Not with
            ``transport="off"``.
    """
    comm = resolve_communicator(group)
    before = comm.stats()
    yield
    after = comm.stats()
    if comm.off or after["overlapped"] > before["overlapped"]:
        return
    seen = before["fallback_by_op"]
    new = [f"{key} ({n - seen.get(key, 0)})" for key, n in after["fallback_by_op"].items() if n > seen.get(key, 0)]
    reasons = "; ".join(new) or "no call came to this communicator: is the adapter installed for this group?"
    raise Unsupported(f"rank {comm.rank}: no call overlapped: {reasons}")
