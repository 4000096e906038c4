"""What the ops check about their operands: all of it local, and before a byte moves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..communicator import resolve_communicator
from ..errors import ConfigError, ShapeError, Unsupported, UnsupportedDtype
from ..execution.reduction import reducible
from .gradients import Scales, WgradSink, main_grad, name

if TYPE_CHECKING:
    from ..communicator import Communicator

__all__ = ["Bias", "communicator", "dense", "lower", "normed", "operands", "same_k", "several", "summable"]

_PRODUCTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALED = (torch.bfloat16, torch.float16, torch.float32)
_USUAL = (Tensor, torch.nn.Parameter)
Bias = Tensor | Sequence[Tensor | None] | None


def communicator(group: Any, x: Any) -> Communicator:
    """The communicator of ``group`` for tensors that live where ``x`` does."""
    usual = isinstance(x, Tensor) and x.device.type in ("cpu", "cuda")
    return resolve_communicator(group, device=x.device if usual else None)


def several(op: str, w: Tensor | Sequence[Tensor], bias: Bias) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Weights and biases as tuples of one length; what is neither tensor nor sequence is refused as a tensor later."""
    weights = (w,) if isinstance(w, Tensor) or not isinstance(w, Iterable) else tuple(w)
    if not weights:
        raise ShapeError(f"{op}: no weights")
    if bias is None:
        biases: tuple[Tensor | None, ...] = (None,) * len(weights)
    else:
        biases = (bias,) if isinstance(bias, Tensor) or not isinstance(bias, Iterable) else tuple(bias)
    if len(biases) != len(weights) or (isinstance(bias, Tensor) and not isinstance(w, Tensor)):
        raise ShapeError(f"{op}: {len(biases)} biases for {len(weights)} weights: one entry each, or None, is needed")
    return weights, biases


def operands(
    op: str,
    comm: Communicator,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    wgrad: WgradSink,
    scale_a: Tensor | None = None,
    scale_b: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, list[Tensor], tuple[Tensor | None, ...], Scales | None]:
    """Check everything about the operands but the inner dimension; cast them as autocast would."""
    if not (wgrad is None or wgrad == "main_grad" or callable(wgrad)):
        raise ConfigError(f"{op}: wgrad={wgrad!r}: None, 'main_grad' or a callable (weight, gradient) is needed")
    dense(op, comm, "x", x)
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        dense(op, comm, f"weight {i}", w)
        if w.dim() != 2:
            raise ShapeError(f"{op}: weight {i} has shape {tuple(w.shape)}: (out features, in features) is needed")
        if b is not None:
            dense(op, comm, f"bias {i}", b)
            if b.shape != w.shape[:1]:
                raise ShapeError(f"{op}: bias {i} has shape {tuple(b.shape)}, weight {i} has {w.shape[0]} out features")
        if wgrad == "main_grad" and w.requires_grad and torch.is_grad_enabled():
            main_grad(op, w)
    if x.dim() == 0:
        raise ShapeError(f"{op}: x is a scalar: 1 or more dimensions are needed")
    kind = comm.device.type
    scales = _scales(op, comm, x, weights, scale_a, scale_b, out_dtype)
    if torch.is_autocast_enabled(kind) and scales is None:
        dtype = torch.get_autocast_dtype(kind)
        x, cast = lower(x, dtype), [lower(w, dtype) for w in weights]
        biases = tuple(b if b is None else lower(b, dtype) for b in biases)
    else:
        cast = list(weights)
    result = x.dtype if scales is None else scales.out_dtype
    for w in cast:
        if w.dtype != x.dtype:
            raise ShapeError(f"{op}: x is {x.dtype} and a weight is {w.dtype}: operands must be of one type")
    for b in biases:
        if b is not None and b.dtype != result:
            raise ShapeError(f"{op}: x is {x.dtype}, results are {result}, and a bias is {b.dtype}: {result} is needed")
    if x.dtype not in _PRODUCTS and scales is None:
        offered = ", ".join(name(d) for d in _PRODUCTS)
        raise UnsupportedDtype(f"{op}: matrix products of {x.dtype} are not offered: use one of {offered}")
    return x, cast, tuple(biases), scales


def _scales(
    op: str,
    comm: Communicator,
    x: Tensor,
    weights: Sequence[Tensor],
    scale_a: Tensor | None,
    scale_b: Tensor | Sequence[Tensor] | None,
    out_dtype: torch.dtype | None,
) -> Scales | None:
    """What fp8 operands come with, checked; None for other operands."""
    if x.dtype not in _FP8:
        if scale_a is not None or scale_b is not None:
            raise ShapeError(f"{op}: scale_a and scale_b are for fp8 operands: x is {x.dtype}")
        if out_dtype not in (None, x.dtype):
            raise UnsupportedDtype(f"{op}: out_dtype={out_dtype} of {x.dtype} operands: only fp8 operands have another")
        return None
    if scale_a is None or scale_b is None:
        raise UnsupportedDtype(f"{op}: matrix products of {x.dtype} are not offered without both scale_a and scale_b")
    if any(t.requires_grad for t in (x, *weights)) and torch.is_grad_enabled():
        raise Unsupported(f"{op}: fp8 operands have no gradients: cast in your own autograd function, or use no_grad")
    result = torch.bfloat16 if out_dtype is None else out_dtype
    if result not in _SCALED:
        raise UnsupportedDtype(f"{op}: out_dtype={result}: fp8 products come as {', '.join(map(name, _SCALED))}")
    by_weight = (scale_b,) if isinstance(scale_b, Tensor) or not isinstance(scale_b, Iterable) else tuple(scale_b)
    if len(by_weight) != len(weights):
        raise ShapeError(f"{op}: {len(by_weight)} entries of scale_b for {len(weights)} weights")
    wanted = [("scale_a", scale_a, math.prod(x.shape[:-1]))]
    wanted += [(f"scale_b {i}", s, w.shape[0]) for i, (s, w) in enumerate(zip(by_weight, weights, strict=True))]
    for what, scale, rows in wanted:
        dense(op, comm, what, scale)
        if scale.dtype != torch.float32 or scale.numel() not in (1, rows):
            raise ShapeError(
                f"{op}: {what} has shape {tuple(scale.shape)} of {scale.dtype}: 1 or {rows} elements of float32 are"
                " needed"
            )
    for w in weights if comm.device.type == "cuda" else ():
        if x.shape[-1] % 16 or w.shape[0] % 16:
            raise ShapeError(f"{op}: fp8 weight of shape {tuple(w.shape)}: multiples of 16 are needed on GPUs")
    return Scales(scale_a, by_weight, result)


def normed(
    op: str,
    comm: Communicator,
    x: Tensor,
    w: Tensor,
    scales: Scales | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Check the residual and the norm's weight; cast them as autocast would."""
    if residual is None:
        if norm_weight is not None:
            raise ConfigError(f"{op}: norm_weight needs residual")
        return None, None
    result = x.dtype if scales is None else scales.out_dtype
    shapes = {"residual": (*x.shape[:-1], w.shape[0]), "norm_weight": (w.shape[0],)}
    found = []
    for (what, shape), t in zip(shapes.items(), (residual, norm_weight), strict=True):
        if t is not None:
            dense(op, comm, what, t)
            if torch.is_autocast_enabled(comm.device.type) and scales is None:
                t = lower(t, result)
            if tuple(t.shape) != shape or t.dtype != result:
                raise ShapeError(f"{op}: {what} has shape {tuple(t.shape)} of {t.dtype}: {shape} of {result} is needed")
        found.append(t)
    return found[0], found[1]


def lower(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t


def same_k(op: str, comm: Communicator, k: int, weights: Sequence[Tensor], what: Tensor | str) -> None:
    for i, w in enumerate(weights):
        if w.shape[1] != k:
            what = f"x of shape {tuple(what.shape)}" if isinstance(what, Tensor) else what
            raise ShapeError(
                f"{op}: rank {comm.rank}: weight {i} of shape {tuple(w.shape)} has {w.shape[1]} in features;"
                f" {what} has {k}"
            )


def summable(op: str, comm: Communicator, x: Tensor) -> None:
    reason = reducible(x.dtype)
    if reason is not None:
        raise UnsupportedDtype(f"{op}: rank {comm.rank}: {reason}")


def dense(op: str, comm: Communicator, what: str, t: Any) -> None:
    """Refuse what is not a dense tensor on the communicator's device."""
    if (
        type(t) in _USUAL
        and t.device == comm.device
        and t.layout is torch.strided
        and not (t.is_quantized or t.is_nested)
    ):
        return
    if not isinstance(t, Tensor):
        raise ShapeError(f"{op}: {what} is {type(t).__name__}: a torch.Tensor is needed")
    if hasattr(t, "to_local"):
        raise Unsupported(f"{op}: {what} is a {type(t).__name__}: pass its to_local()")
    if t.layout != torch.strided or t.is_quantized or t.is_nested:
        raise Unsupported(f"{op}: {what} has layout {t.layout}: a dense tensor is needed")
    here, there = t.device, comm.device
    if here.type != there.type or (here.index or 0) != (there.index if there.index is not None else here.index or 0):
        raise ShapeError(f"{op}: rank {comm.rank}: {what} is on {here}, the communicator on {there}")
