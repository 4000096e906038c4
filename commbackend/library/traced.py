"""What the functions of ``ops`` are while ``torch.compile`` or ``torch.export`` traces them: calls of the operators of
``library``, which a graph can hold. Arguments as of ``ops``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import library  # noqa: F401 - registers the operators
from ..communicator import Communicator, resolve_communicator
from ..errors import ConfigError, ShapeError, Unsupported

if TYPE_CHECKING:
    from ..ops.gradients import WgradSink

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "column_parallel_linear",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
]

_OPS = torch.ops.commbackend


def all_gather_matmul(
    x: Tensor,
    w: Any,
    group: Any,
    dim: int,
    rows: Sequence[int] | None,
    bias: Any,
    return_gathered: bool,
    save: str,
    wgrad: WgradSink,
    scale_a: Tensor | None,
    scale_b: Any,
    out_dtype: torch.dtype | None,
) -> Any:
    _plain("all_gather_matmul", wgrad)
    if save not in ("shard", "gathered"):
        raise ConfigError(f"all_gather_matmul: save={save!r}: 'shard' or 'gathered' is needed")
    weights, biases = _several("all_gather_matmul", w, bias, None if scale_a is None else out_dtype or torch.bfloat16)
    where = {"dim": dim, "rows": _counts(rows), "return_gathered": return_gathered}
    name = _name(group, x)
    if scale_a is not None:
        scales = [scale_b] if isinstance(scale_b, Tensor) else list(scale_b)
        outs = _OPS.all_gather_scaled_matmul(x, weights, scale_a, scales, biases, name, **where, out_dtype=out_dtype)
    else:
        # Along the last dimension nothing overlaps, and gathering once is enough.
        keep = save == "gathered" or dim % x.dim() == x.dim() - 1
        outs = _OPS.all_gather_matmul(x, weights, biases, name, **where, save_gathered=keep)
    products = outs[0] if isinstance(w, Tensor) else tuple(outs[: len(weights)])
    return (products, outs[-1]) if return_gathered else products


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    group: Any,
    dim: int,
    rows: Sequence[int] | None,
    bias: Tensor | None,
    wgrad: WgradSink,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    _plain("matmul_reduce_scatter", wgrad)
    name, where = _name(group, x), {"dim": dim, "rows": _counts(rows)}
    out: Tensor
    if scale_a is not None:
        out = _OPS.scaled_matmul_reduce_scatter(x, w, scale_a, scale_b, bias, name, **where, out_dtype=out_dtype)
    else:
        out = _OPS.matmul_reduce_scatter(x, w, bias, name, **where)
    return out


def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    group: Any,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    wgrad: WgradSink,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Any:
    _plain("matmul_all_reduce", wgrad)
    name = _name(group, x)
    if norm_weight is not None:
        if residual is None:
            raise ConfigError("matmul_all_reduce: norm_weight needs residual")
        given = (x, w, bias, residual, norm_weight)
        if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)):
            return _OPS.matmul_all_reduce_norm(*given, name, eps, scale_a, scale_b, out_dtype)
        total = _OPS.matmul_all_reduce(x, w, bias, name, residual)
        return torch.nn.functional.rms_norm(total, total.shape[-1:], norm_weight, eps), total
    if scale_a is not None:
        return _OPS.scaled_matmul_all_reduce(x, w, scale_a, scale_b, bias, name, residual, out_dtype)
    return _OPS.matmul_all_reduce(x, w, bias, name, residual)


def column_parallel_linear(x: Tensor, w: Any, group: Any, bias: Any, wgrad: WgradSink) -> Any:
    _plain("column_parallel_linear", wgrad)
    weights, biases = _several("column_parallel_linear", w, bias)
    outs = _OPS.column_parallel_linear(x, weights, biases, _name(group, x))
    return outs[0] if isinstance(w, Tensor) else tuple(outs)


def all_gather(x: Tensor, group: Any, dim: int, rows: Sequence[int] | None) -> Tensor:
    out: Tensor = _OPS.all_gather(x, _name(group, x), dim=dim, rows=_counts(rows))
    return out


def reduce_scatter(x: Tensor, group: Any, dim: int, rows: Sequence[int] | None) -> Tensor:
    out: Tensor = _OPS.reduce_scatter(x, _name(group, x), dim=dim, rows=_counts(rows))
    return out


def all_reduce(x: Tensor, group: Any) -> Tensor:
    out: Tensor = _OPS.all_reduce(x, _name(group, x))
    return out


def _plain(op: str, wgrad: WgradSink) -> None:
    if wgrad is not None:
        raise Unsupported(f"{op}: wgrad={wgrad!r} cannot be compiled: a graph cannot write into a parameter's buffer")


def _several(op: str, w: Any, bias: Any, dtype: torch.dtype | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Weights, and no biases or one each: zeros for weights without."""
    weights = [w] if isinstance(w, Tensor) else list(w)
    biases = [None] * len(weights) if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    if len(biases) != len(weights):
        raise ShapeError(f"{op}: {len(biases)} biases for {len(weights)} weights: one entry each, or None, is needed")
    if all(b is None for b in biases):
        return weights, []
    return weights, [
        b if b is not None else w.new_zeros(w.shape[0], dtype=dtype) for w, b in zip(weights, biases, strict=True)
    ]


def _counts(rows: Sequence[int] | None) -> list[int] | None:
    return None if rows is None else list(rows)


def _name(group: Any, x: Tensor) -> str:
    if isinstance(group, Communicator):
        return group.op_name
    return group if isinstance(group, str) else _resolved(group, x.device.type)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _resolved(group: Any, device_type: str) -> str:
    """The name for what the tracer cannot look into. Collective where the communicator does not exist yet."""
    return resolve_communicator(group, device=torch.device(device_type)).op_name
