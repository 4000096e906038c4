"""The operators of ``library``: real kernels, which call ``ops``, and fake ones, which only know shapes and strides."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import layout, names, ops
from ..communicator import Communicator, resolve_communicator
from ..errors import ConfigError
from ..group import process_group_of
from ..ops import autograd, gradients
from ..ops.gradients import Call


def communicator(name: str, device: torch.device) -> Communicator:
    """The communicator called ``name``. Collective where it is a process group's and does not exist yet."""
    found = names.find(name, device.type)
    if found is None:
        _process_group(name)
        found = resolve_communicator(name, device=device)
    return found


def place(name: str, device: torch.device) -> tuple[int, int]:
    """Rank and size in the group called ``name``. Local."""
    found = names.find(name, device.type)
    if found is not None:
        return found.rank, found.size
    pg = _process_group(name)
    return pg.rank(), pg.size()


def _process_group(name: str) -> Any:
    try:
        return process_group_of(name)
    except ConfigError as e:
        there = ", ".join(names.known()) or "none"
        raise ConfigError(
            f"no group is called {name!r}: neither a process group nor an open communicator (there are: {there}); take"
            " the name from commbackend.library.group_name(group), on all ranks, before the call"
        ) from e


# -- real kernels: the ops themselves ---------------------------------------------------------------------------------


def all_gather(x: Tensor, name: str, *, dim: int = 0, rows: Sequence[int] | None = None) -> Tensor:
    return ops.all_gather(x, communicator(name, x.device), dim=dim, rows=rows)


def reduce_scatter(x: Tensor, name: str, *, dim: int = 0, rows: Sequence[int] | None = None) -> Tensor:
    return ops.reduce_scatter(x, communicator(name, x.device), dim=dim, rows=rows)


def all_reduce(x: Tensor, name: str) -> Tensor:
    return ops.all_reduce(x, communicator(name, x.device))


def all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    name: str,
    *,
    dim: int = 0,
    rows: Sequence[int] | None = None,
    return_gathered: bool = False,
    save_gathered: bool = False,
) -> list[Tensor]:
    comm, both = communicator(name, x.device), return_gathered or save_gathered
    out = ops.all_gather_matmul(
        x, tuple(weights), comm, dim=dim, rows=rows, bias=tuple(biases) or None, return_gathered=both
    )
    return [*out[0], out[1]] if both else list(out)


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, *, dim: int = 0, rows: Sequence[int] | None = None
) -> Tensor:
    return ops.matmul_reduce_scatter(x, weight, communicator(name, x.device), dim=dim, rows=rows, bias=bias)


def matmul_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, residual: Tensor | None = None
) -> Tensor:
    return ops.matmul_all_reduce(x, weight, communicator(name, x.device), bias=bias, residual=residual)


def matmul_all_reduce_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    name: str,
    eps: float = 1e-6,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    scaled: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": out_dtype}
    comm, norm = communicator(name, x.device), {"norm_weight": norm_weight, "eps": eps}
    with torch.no_grad():
        pair: tuple[Tensor, Tensor]
        pair = ops.matmul_all_reduce(x, weight, comm, bias=bias, residual=residual, **norm, **scaled)  # type: ignore[call-overload]
    return pair


def column_parallel_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], name: str) -> list[Tensor]:
    comm = communicator(name, x.device)
    return list(ops.column_parallel_linear(x, tuple(weights), comm, bias=tuple(biases) or None))


def all_gather_scaled_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    scale_a: Tensor,
    scale_b: Sequence[Tensor],
    biases: Sequence[Tensor],
    name: str,
    *,
    dim: int = 0,
    rows: Sequence[int] | None = None,
    return_gathered: bool = False,
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    scaled: dict[str, Any] = {"scale_a": scale_a, "scale_b": tuple(scale_b), "out_dtype": out_dtype}
    where: dict[str, Any] = {"dim": dim, "rows": rows, "bias": tuple(biases) or None}
    comm = communicator(name, x.device)
    out = ops.all_gather_matmul(x, tuple(weights), comm, return_gathered=return_gathered, **where, **scaled)
    return [*out[0], out[1]] if return_gathered else list(out)


def scaled_matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    name: str,
    *,
    dim: int = 0,
    rows: Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    scaled: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": out_dtype}
    comm = communicator(name, x.device)
    return ops.matmul_reduce_scatter(x, weight, comm, dim=dim, rows=rows, bias=bias, **scaled)


def scaled_matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    name: str,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    scaled: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": out_dtype}
    comm = communicator(name, x.device)
    out: Tensor = ops.matmul_all_reduce(x, weight, comm, bias=bias, residual=residual, **scaled)
    return out


def dgrad_reduce_scatter(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    x: Tensor | None,
    wanted: Sequence[bool],
    name: str,
    dim: int,
    rows: Sequence[int] | None,
    gathered: bool,
) -> list[Tensor]:
    op, comm, lead = "dgrad_reduce_scatter", communicator(name, grads[0].device), grads[0].shape[:-1]
    cut = layout.cut(lead, dim, layout.scatter_counts(op, lead[dim], dim, rows, comm.size), comm.rank)
    return _dgrad(op, Call(op, comm, cut, save_gathered=gathered), cut.local, grads, weights, x, wanted)


def dgrad_all_reduce(
    grads: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor | None, wanted: Sequence[bool], name: str
) -> list[Tensor]:
    op, comm, lead = "dgrad_all_reduce", communicator(name, grads[0].device), grads[0].shape[:-1]
    cut = layout.Cut(lead, lead, 1, layout.split(lead.numel(), comm.size))
    return _dgrad(op, Call(op, comm, cut), lead, grads, weights, x, wanted)


def _dgrad(
    op: str,
    call: Call,
    lead: Sequence[int],
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    x: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor]:
    k = weights[0].shape[1] if weights else x.shape[-1]  # type: ignore[union-attr]  # one of them is given
    ctx = SimpleNamespace(call=call, x_shape=(*lead, k), needs_input_grad=(False, bool(weights), *wanted))
    dys = [layout.matrix(g) for g in grads]
    dx, dws = gradients.dgrad(ctx, op, dys, (x, *weights), call.cut)  # type: ignore[arg-type]
    return [g for g in (dx, *dws) if g is not None]


def gather_grads(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, name: str, dim: int, rows: Sequence[int] | None
) -> list[Tensor]:
    op, comm = "gather_grads", communicator(name, grad.device)
    features = dim == grad.dim() - 1
    counts = layout.gather_counts(op, grad.shape[dim], dim, rows, comm.rank, comm.size)
    cut = layout.cut((0,), 0, counts, comm.rank) if features else layout.cut(grad.shape[:-1], dim, counts, comm.rank)
    lead, n = (grad.shape[:-1], sum(counts)) if features else (cut.full, grad.shape[-1])
    k = weight.shape[1] if weight is not None else x.shape[-1]  # type: ignore[union-attr]  # one of them is given
    ctx = SimpleNamespace(
        call=Call(op, comm, cut, (None,), features=features),  # type: ignore[arg-type]  # no sink asks for the weight
        saved_tensors=(x, weight),
        needs_input_grad=(False, weight is not None, x is not None, False),
        x_shape=torch.Size((*lead, k)),
        n=(n,),
    )
    _, dx, dw, _ = autograd.MatmulReduceScatter.backward(ctx, grad)
    return [g for g in (dx, dw) if g is not None]


# -- fake kernels: shapes and strides of the results ------------------------------------------------------------------


def _full(x: Tensor, dim: int, rows: Sequence[int] | None, size: int) -> list[Any]:
    shape = list(x.shape)
    shape[dim] = shape[dim] * size if rows is None else sum(rows)
    return shape


def _local(shape: Sequence[int], dim: int, rows: Sequence[int] | None, rank: int, size: int) -> list[Any]:
    local = list(shape)
    if rows is None:
        torch._check(local[dim] % size == 0, lambda: f"dim {dim} of {tuple(shape)} does not divide by {size} ranks")
    local[dim] = local[dim] // size if rows is None else rows[rank]
    return local


def _fits(x: Tensor, k: Any, *weights: Tensor) -> None:
    for w in weights:
        torch._check(w.shape[1] == k, lambda: f"weight of shape {tuple(w.shape)}, x has {k} in features")  # noqa: B023
        torch._check(w.dtype == x.dtype, lambda: f"x is {x.dtype} and a weight is {w.dtype}")  # noqa: B023


def all_gather_fake(x: Tensor, name: str, *, dim: int = 0, rows: Sequence[int] | None = None) -> Tensor:
    return layout.empty(_full(x, dim, rows, place(name, x.device)[1]), x)


def reduce_scatter_fake(x: Tensor, name: str, *, dim: int = 0, rows: Sequence[int] | None = None) -> Tensor:
    return layout.empty(_local(x.shape, dim, rows, *place(name, x.device)), x)


def all_reduce_fake(x: Tensor, name: str) -> Tensor:
    place(name, x.device)
    return layout.empty(x.shape, x)


def all_gather_matmul_fake(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    name: str,
    *,
    dim: int = 0,
    rows: Sequence[int] | None = None,
    return_gathered: bool = False,
    save_gathered: bool = False,
) -> list[Tensor]:
    full = _full(x, dim, rows, place(name, x.device)[1])
    _fits(x, full[-1], *weights)
    outs = [layout.empty((*full[:-1], w.shape[0]), x) for w in weights]
    return [*outs, layout.empty(full, x)] if return_gathered or save_gathered else outs


def matmul_reduce_scatter_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, *, dim: int = 0, rows: Sequence[int] | None = None
) -> Tensor:
    _fits(x, x.shape[-1], weight)
    shape = _local((*x.shape[:-1], weight.shape[0]), dim, rows, *place(name, x.device))
    return layout.empty(shape, x, features_first=dim % x.dim() == x.dim() - 1)


def matmul_all_reduce_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, residual: Tensor | None = None
) -> Tensor:
    place(name, x.device)
    _fits(x, x.shape[-1], weight)
    return layout.empty((*x.shape[:-1], weight.shape[0]), x)


def matmul_all_reduce_norm_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    name: str,
    eps: float = 1e-6,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    out = matmul_all_reduce_fake(x, weight, bias, name)
    out = out if scale_a is None else layout.empty(out.shape, out, dtype=out_dtype or torch.bfloat16)
    return torch.empty_like(out), out


def all_gather_scaled_matmul_fake(
    x: Tensor,
    weights: Sequence[Tensor],
    scale_a: Tensor,
    scale_b: Sequence[Tensor],
    biases: Sequence[Tensor],
    name: str,
    *,
    dim: int = 0,
    rows: Sequence[int] | None = None,
    return_gathered: bool = False,
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    outs = all_gather_matmul_fake(x, weights, biases, name, dim=dim, rows=rows, return_gathered=return_gathered)
    products = [layout.empty(o.shape, o, dtype=out_dtype or torch.bfloat16) for o in outs[: len(weights)]]
    return products + outs[len(weights) :]


def scaled_matmul_reduce_scatter_fake(
    x: Tensor,
    weight: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    name: str,
    *,
    dim: int = 0,
    rows: Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    out = matmul_reduce_scatter_fake(x, weight, bias, name, dim=dim, rows=rows)
    return torch.empty_strided(out.shape, out.stride(), dtype=out_dtype or torch.bfloat16, device=out.device)


def scaled_matmul_all_reduce_fake(
    x: Tensor,
    weight: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    name: str,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    out = matmul_all_reduce_fake(x, weight, bias, name)
    return layout.empty(out.shape, out, dtype=out_dtype or torch.bfloat16)


def column_parallel_linear_fake(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], name: str
) -> list[Tensor]:
    place(name, x.device)
    _fits(x, x.shape[-1], *weights)
    return [layout.empty((*x.shape[:-1], w.shape[0]), x) for w in weights]


def dgrad_reduce_scatter_fake(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    x: Tensor | None,
    wanted: Sequence[bool],
    name: str,
    dim: int,
    rows: Sequence[int] | None,
    gathered: bool,
) -> list[Tensor]:
    lead = _local(grads[0].shape[:-1], dim, rows, *place(name, grads[0].device))
    return _dgrad_fake(lead, grads, weights, x, wanted)


def dgrad_all_reduce_fake(
    grads: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor | None, wanted: Sequence[bool], name: str
) -> list[Tensor]:
    return _dgrad_fake(grads[0].shape[:-1], grads, weights, x, wanted)


def _dgrad_fake(
    lead: Sequence[Any], grads: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor | None, wanted: Sequence[bool]
) -> list[Tensor]:
    k = weights[0].shape[1] if weights else x.shape[-1]  # type: ignore[union-attr]  # one of them is given
    dx = [layout.empty((*lead, k), grads[0])] if weights else []
    return dx + [layout.empty((g.shape[-1], k), g) for g, want in zip(grads, wanted, strict=True) if want]


def gather_grads_fake(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, name: str, dim: int, rows: Sequence[int] | None
) -> list[Tensor]:
    full = _full(grad, dim, rows, place(name, grad.device)[1])
    k = weight.shape[1] if weight is not None else x.shape[-1]  # type: ignore[union-attr]  # one of them is given
    dx = [layout.empty((*full[:-1], k), grad)] if weight is not None else []
    return dx + ([layout.empty((full[-1], k), grad)] if x is not None else [])
