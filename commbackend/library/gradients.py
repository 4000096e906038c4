"""The gradients of ``library``'s operators: what forward keeps, and backward as calls of operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from .kernels import place


def collective_setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.name, ctx.where = inputs[1], keyword_only_inputs


def all_gather_backward(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.commbackend.reduce_scatter(grad, ctx.name, **ctx.where), None


def reduce_scatter_backward(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.commbackend.all_gather(grad, ctx.name, **ctx.where), None


def all_reduce_backward(ctx: Any, grad: Tensor) -> Any:
    return grad, None


def _products_setup(ctx: Any, x: Tensor, moved: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
    """Keep what the gradients that are asked for need, and no more."""
    needs, count = ctx.needs_input_grad, len(weights)
    ctx.count, ctx.n = count, [w.shape[0] for w in weights]
    ctx.wanted, ctx.wanted_biases = needs[1 : 1 + count], needs[1 + count : 1 + count + len(biases)]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(moved if any(ctx.wanted) else None, *(weights if needs[0] else ()))


def _products_backward(ctx: Any, grads: Sequence[Tensor | None], dgrad: Callable[..., Any]) -> Any:
    """(dx, dws, dbiases) from ``dgrad(grads, weights, x, wanted)``; None for the former where nothing is asked."""
    dx: Tensor | None = None
    dws: list[Tensor | None] = [None] * ctx.count
    some = next((g for g in grads if g is not None), None)
    if some is None:
        return dx, dws, [None] * len(ctx.wanted_biases)
    dys = [g if g is not None else some.new_zeros((*some.shape[:-1], n)) for g, n in zip(grads, ctx.n, strict=True)]
    x, *weights = ctx.saved_tensors
    if weights or any(ctx.wanted):
        found = list(dgrad(dys, weights, x, list(ctx.wanted)))
        dx = found.pop(0) if weights else None
        dws = [found.pop(0) if want else None for want in ctx.wanted]
    # Without biases there are no entries to be wanted.
    dbs = [_rows_sum(dy) if want else None for dy, want in zip(dys, ctx.wanted_biases, strict=False)]
    return dx, dws, dbs


def _rows_sum(dy: Tensor) -> Tensor:
    return dy.reshape(-1, dy.shape[-1]).sum(0)


def all_gather_matmul_setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: list[Tensor]
) -> None:
    x, weights, biases, ctx.name = inputs
    dim, ctx.rows, ctx.gathered = (keyword_only_inputs[key] for key in ("dim", "rows", "save_gathered"))
    ctx.dim, ctx.last = dim % x.dim(), dim % x.dim() == x.dim() - 1
    _products_setup(ctx, x, output[-1] if ctx.gathered else x, weights, biases)


def all_gather_matmul_backward(ctx: Any, grads: list[Tensor | None]) -> Any:
    products, through = grads[: ctx.count], (grads[ctx.count] if len(grads) > ctx.count else None)
    library, where = torch.ops.commbackend, {"dim": ctx.dim, "rows": ctx.rows}

    def overlapped(dys: Any, weights: Any, x: Tensor | None, wanted: list[bool]) -> Any:
        return library.dgrad_reduce_scatter(dys, weights, x, wanted, ctx.name, ctx.dim, ctx.rows, ctx.gathered)

    def along_features(dys: Any, weights: Any, x: Tensor | None, wanted: list[bool]) -> Any:
        # Every product needs the whole gather: nothing overlaps.
        whole = library.all_gather(x, ctx.name, **where) if x is not None and not ctx.gathered else x
        partial: Any = sum(dy @ w for dy, w in zip(dys, weights, strict=True)) if weights else None
        dx = [library.reduce_scatter(partial, ctx.name, **where)] if weights else []
        return dx + [_matrix(dy).t() @ _matrix(whole) for dy, want in zip(dys, wanted, strict=True) if want]

    dx, dws, dbs = _products_backward(ctx, products, along_features if ctx.last else overlapped)
    if through is not None and ctx.needs_input_grad[0]:
        direct = library.reduce_scatter(through, ctx.name, **where)
        dx = direct if dx is None else dx + direct
    return dx, dws, dbs, None


def _matrix(t: Any) -> Tensor:
    out: Tensor = t.reshape(-1, t.shape[-1])
    return out


def column_parallel_linear_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, ctx.name = inputs
    _products_setup(ctx, x, x, weights, biases)


def column_parallel_linear_backward(ctx: Any, grads: list[Tensor | None]) -> Any:
    def dgrad(dys: Any, weights: Any, x: Tensor | None, wanted: list[bool]) -> Any:
        if weights:
            return torch.ops.commbackend.dgrad_all_reduce(dys, weights, x, wanted, ctx.name)
        return [_matrix(dy).t() @ _matrix(x) for dy, want in zip(dys, wanted, strict=True) if want]

    return *_products_backward(ctx, grads, dgrad), None


def matmul_reduce_scatter_setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.name, ctx.dim, ctx.rows = inputs[3], keyword_only_inputs["dim"], keyword_only_inputs["rows"]
    matmul_all_reduce_setup(ctx, inputs, output)


def matmul_all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, needs = *inputs[:2], ctx.needs_input_grad
    ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None)


def matmul_reduce_scatter_backward(ctx: Any, grad: Tensor) -> Any:
    (x, weight), name, dim, rows = ctx.saved_tensors, ctx.name, ctx.dim % grad.dim(), ctx.rows
    asked = x is not None or weight is not None
    found = list(torch.ops.commbackend.gather_grads(grad, x, weight, name, dim, rows)) if asked else []
    dx = found.pop(0) if weight is not None else None
    dw = found.pop(0) if x is not None else None
    dbias = None
    if ctx.needs_input_grad[2]:
        dbias = _rows_sum(grad)
        if dim == grad.dim() - 1:  # of its own features, zero elsewhere
            rank, size = place(name, grad.device)
            counts = rows if rows is not None else [grad.shape[dim]] * size
            dbias = torch.nn.functional.pad(dbias, (sum(counts[:rank]), sum(counts[rank + 1 :])))
    return dx, dw, dbias, None


def matmul_all_reduce_backward(ctx: Any, grad: Tensor) -> Any:
    (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
    dx = grad @ weight if weight is not None else None
    dw = _matrix(grad).t() @ _matrix(x) if x is not None else None
    # A residual that was left out is no input to autograd.
    return dx, dw, _rows_sum(grad) if needs[2] else None, None, grad if len(needs) > 4 and needs[4] else None


def refuse(ctx: Any, *grads: Any) -> Any:
    raise Unsupported(
        "no gradient of this operator: double backward is not offered (use unfused products), nor are gradients of"
        " fp8 operands and of the norm in matmul_all_reduce_norm (call it under no_grad, or add the norm yourself)"
    )
