"""The ops' autograd Functions. Every backward pass that communicates is a fused call of its own.

A backward pass is collective: all ranks must run it, and must agree on which of the op's inputs require gradients,
because that decides the call (a difference raises CollectiveMismatch). A rank that holds zero rows joins like any
other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function, forward_ad

from ..layout import Cut, empty, matrix, split
from ..plan import interned_problem
from ..schedules import foldable
from .gradients import (
    Call,
    Grads,
    bias_grads,
    bias_rows,
    deliver,
    dgrad,
    first_order,
    gather_grads,
    name,
    own,
    save,
    scaled,
    scattered_bias_grad,
    whole_grads,
)
from .unfused import execute

if TYPE_CHECKING:
    from torch import Tensor

    from ..communicator import Communicator

__all__ = [
    "AllGather",
    "AllGatherMatmul",
    "AllReduce",
    "ColumnParallel",
    "MatmulAllReduce",
    "MatmulReduceScatter",
    "ReduceScatter",
    "apply",
    "matmul_all_reduce",
]

# Types a plain gather moves as they are; all others travel as bytes.
_PLAIN = {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16}
_PLAIN |= {torch.int8, torch.uint8}


def apply(function: type[Function], call: Call, *tensors: Tensor | None) -> Any:
    """``function.apply``, which torch leaves untyped; where nothing can ask for a gradient, its forward alone, which
    costs the host several microseconds less.
    """
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if recorded or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return function.apply(call, *tensors)  # type: ignore[no-untyped-call]
    with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
        return function.forward(_Unrecorded(len(tensors)), call, *tensors)


class _Unrecorded:
    """The ``ctx`` of a forward that no backward follows."""

    def __init__(self, tensors: int) -> None:
        self.needs_input_grad = (False,) * (1 + tensors)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Nothing is kept."""

    def set_materialize_grads(self, value: bool) -> None:
        """There are no gradients."""


_NOTHING = nullcontext()


# -- plain collectives ------------------------------------------------------------------------------------------------


def gather(comm: Communicator, cut: Cut, x: Tensor) -> Tensor:
    """All-gather of ``x`` (*cut.local, k): (*cut.full, k). Any dtype."""
    out = empty((*cut.full, x.shape[-1]), x)
    src, dst = x, out
    if x.dtype not in _PLAIN:
        src, dst = x.resolve_conj().resolve_neg().contiguous().view(torch.uint8), out.view(torch.uint8)
    src, dst = matrix(src), matrix(dst)
    problem = interned_problem("all_gather", cut.rows, cut.blocks, src.shape[1], dtype=name(src.dtype))
    execute(comm, problem, {"x": src, "out": dst})
    return out


def scatter(comm: Communicator, cut: Cut, x: Tensor) -> Tensor:
    """Reduce-scatter of ``x`` (*cut.full, k): (*cut.local, k)."""
    out = empty((*cut.local, x.shape[-1]), x)
    problem = interned_problem("reduce_scatter", cut.rows, cut.blocks, x.shape[-1], dtype=name(x.dtype))
    execute(comm, problem, {"x": matrix(x), "out": matrix(out)})
    return out


def reduce(comm: Communicator, x: Tensor) -> Tensor:
    """All-reduce of ``x``, any shape but 0-d."""
    out = empty(x.shape, x)
    src, dst = matrix(x), matrix(out)
    problem = interned_problem("all_reduce", split(src.shape[0], comm.size), k=src.shape[1], dtype=name(x.dtype))
    if src.shape[0] < comm.size and (comm.off or not foldable(problem, comm.caps)):
        # Too few rows to share the sum row by row: share it element by element.
        src, dst = src.reshape(-1, 1), dst.view(-1, 1)
        problem = replace(problem, rows=split(src.shape[0], comm.size), k=1)
    execute(comm, problem, {"x": src, "out": dst})
    return out


class AllGather(Function):
    """x (*local, k) -> (*full, k); its gradient is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor) -> Tensor:
        ctx.call = call
        return gather(call.comm, call.cut, x)

    @staticmethod
    @first_order
    def backward(ctx: Any, saved: Sequence[Tensor], grad: Tensor) -> Grads:
        return None, scatter(ctx.call.comm, ctx.call.cut, grad)


class ReduceScatter(Function):
    """x (*full, k) -> (*local, k); its gradient is an all-gather."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor) -> Tensor:
        ctx.call = call
        return scatter(call.comm, call.cut, x)

    @staticmethod
    @first_order
    def backward(ctx: Any, saved: Sequence[Tensor], grad: Tensor) -> Grads:
        return None, gather(ctx.call.comm, ctx.call.cut, grad)


class AllReduce(Function):
    """Sum over ranks; the gradient of the replicated result is the same on all ranks, and passes through."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor) -> Tensor:
        return reduce(call.comm, x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]


# -- products ---------------------------------------------------------------------------------------------------------


class AllGatherMatmul(Function):
    """x (*local, k), weights (n_i, k) -> products (*full, n_i) [, gathered (*full, k)]."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *params: Tensor | None) -> tuple[Tensor, ...]:
        count = len(call.weights)
        weights, biases = params[:count], params[count:]
        keep = call.recording and call.save_gathered and any(ctx.needs_input_grad[2 : 2 + count])
        tensors: dict[str, Tensor] = {"x": matrix(x)}
        outs = []
        dtype = x.dtype if call.scales is None else call.scales.out_dtype
        for i, w in enumerate(weights):
            assert w is not None
            outs.append(empty((*call.cut.full, w.shape[0]), x, dtype=dtype))
            tensors |= {f"w{i}": w, f"out{i}": matrix(outs[-1])}
        tensors |= bias_rows(biases, outs)
        gathered = None
        if keep or call.return_gathered:
            gathered = empty((*call.cut.full, x.shape[-1]), x)
            tensors["gathered"] = matrix(gathered)
        flags = ("gathered",) if gathered is not None else ()
        n = tuple(o.shape[-1] for o in outs)
        if call.scales is not None:
            a = call.scales.a
            if a.numel() != 1:
                a = gather(call.comm, call.cut, a.reshape(*call.cut.local, 1))
            tensors |= call.scales.tensors(a, tensors["out0"].shape[0], n)
        problem = interned_problem(
            "all_gather_matmul",
            call.cut.rows,
            call.cut.blocks,
            x.shape[-1],
            n,
            name(x.dtype),
            "bias0" in tensors,
            flags,
            *scaled(call),
        )
        execute(call.comm, problem, tensors)
        save(ctx, call, gathered if keep and gathered is not None else x, x.shape, weights)
        return (*outs, gathered) if call.return_gathered and gathered is not None else tuple(outs)

    @staticmethod
    @first_order
    def backward(ctx: Any, saved: Sequence[Tensor], *grads: Tensor | None) -> Grads:
        call: Call = ctx.call
        comm, cut, count = call.comm, call.cut, len(call.weights)
        dx: Tensor | None = None
        dws: list[Tensor | None] = [None] * count
        dbs: list[Tensor | None] = [None] * count
        if any(g is not None for g in grads[:count]):
            dys = whole_grads(ctx, grads[:count], cut.full)
            dx, dws = dgrad(ctx, "dgrad_reduce_scatter", dys, saved, cut)
            dbs = bias_grads(ctx, dys)
        through = grads[count] if call.return_gathered and ctx.needs_input_grad[1] else None
        if through is not None:
            direct = scatter(comm, cut, through)
            dx = direct if dx is None else dx.add_(direct)
        return None, dx, *deliver(call, dws), *dbs


class MatmulReduceScatter(Function):
    """x (*full, k), w (n, k) -> (*local, n); with ``call.features`` rows of w are scattered: (*full, n of this
    rank).
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        cut, comm = call.cut, call.comm
        x2 = matrix(x)
        a, b = (w, x2) if call.features else (x2, w)
        dtype = x.dtype if call.scales is None else call.scales.out_dtype
        if call.features:
            out = empty((*x.shape[:-1], cut.local[0]), x, features_first=True, dtype=dtype)
            out2 = out.view(x2.shape[0], cut.local[0]).t()
        else:
            out = empty((*cut.local, w.shape[0]), x, dtype=dtype)
            out2 = matrix(out)
        tensors = {"x": a, "w0": b, "out0": out2}
        if bias is not None and not call.features:
            tensors["bias0"] = bias.view(1, -1)
        k, n = a.shape[1], (b.shape[0],)
        if call.scales is not None:
            found = call.scales.tensors(call.scales.a, x2.shape[0], (w.shape[0],))
            if call.features:
                found = {"scale_a": found["scale_b0"], "scale_b0": found["scale_a"]}
            tensors |= found
        has_bias = "bias0" in tensors
        problem = interned_problem(
            "matmul_reduce_scatter", cut.rows, cut.blocks, k, n, name(x.dtype), has_bias, (), *scaled(call)
        )
        execute(comm, problem, tensors)
        if bias is not None and call.features:
            out2.add_(bias[own(call)].unsqueeze(1))
        save(ctx, call, x, x.shape, (w,))
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, saved: Sequence[Tensor], grad: Tensor | None) -> Grads:
        if grad is None:
            return None, None, None, None
        call: Call = ctx.call
        x, w = saved
        dy = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])
        x2 = matrix(x) if x is not None else None
        dx = empty(ctx.x_shape, grad) if ctx.needs_input_grad[1] else None
        dw = empty((ctx.n[0], ctx.x_shape[-1]), grad) if ctx.needs_input_grad[2] else None
        dbias = scattered_bias_grad(call, dy) if ctx.needs_input_grad[3] else None
        dx2 = matrix(dx) if dx is not None else None
        if call.features:
            gather_grads(call, matrix(dy.t()), a=w, b=x2, da=dw, db=dx2)
        else:
            gather_grads(call, matrix(dy), a=x2, b=w, da=dx2, db=dw)
        return None, dx, *deliver(call, [dw]), dbias


def matmul_all_reduce(
    call: Call, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None = None
) -> tuple[Tensor | None, Tensor]:
    """x (..., k), w (n, k) -> (RMSNorm of the sum or None, sum (..., n)); by one kernel where there is one."""
    comm, x2, n = call.comm, matrix(x), w.shape[0]
    out = empty((*x.shape[:-1], n), x, dtype=x.dtype if call.scales is None else call.scales.out_dtype)
    tensors = {"x": x2, "w0": w, "out0": matrix(out)}
    if bias is not None:
        tensors["bias0"] = bias.view(1, -1)
    if residual is not None:
        tensors["residual"] = matrix(residual)
    if call.scales is not None:
        tensors |= call.scales.tensors(call.scales.a, x2.shape[0], (n,))
    flags = ("residual",) if residual is not None else ()
    rows = split(x2.shape[0], comm.size)
    problem = interned_problem(
        "matmul_all_reduce", rows, 1, x2.shape[1], (n,), name(x.dtype), bias is not None, flags, *scaled(call)
    )
    if norm_weight is None:
        execute(comm, problem, tensors)
        return None, out
    folded = replace(problem, flags=("norm", *flags), eps=call.eps)
    if not comm.off and comm.knobs(problem).schedule == "one_shot_kernel" and foldable(folded, comm.caps):
        normed = empty(out.shape, out)
        execute(comm, folded, {**tensors, "norm_weight": norm_weight.view(1, -1), "normed": matrix(normed)})
        return normed, out
    execute(comm, problem, tensors)
    return torch.nn.functional.rms_norm(out, (n,), norm_weight, call.eps), out


class MatmulAllReduce(Function):
    """x (..., k), w (n, k) -> (..., n), the same on all ranks; its backward is local."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        out = matmul_all_reduce(call, x, w, bias, residual)[1]
        save(ctx, call, x, x.shape, (w,))
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, saved: Sequence[Tensor], grad: Tensor | None) -> Grads:
        if grad is None:
            return (None,) * 5
        x, w = saved
        dy = matrix(grad)
        dx = (dy @ w).view(ctx.x_shape) if ctx.needs_input_grad[1] else None
        dw = dy.t() @ matrix(x) if ctx.needs_input_grad[2] else None
        dbias = dy.sum(0) if ctx.needs_input_grad[3] else None
        return None, dx, *deliver(ctx.call, [dw]), dbias, grad if ctx.needs_input_grad[4] else None


class ColumnParallel(Function):
    """x (..., k) the same on all ranks, weights (n_i, k) -> (..., n_i); the gradient of x is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *params: Tensor | None) -> tuple[Tensor, ...]:
        count = len(call.weights)
        weights, biases = params[:count], params[count:]
        linear = torch.nn.functional.linear
        outs = tuple(linear(x, w, b) for w, b in zip(weights, biases, strict=True) if w is not None)
        save(ctx, call, x, x.shape, weights)
        return outs

    @staticmethod
    @first_order
    def backward(ctx: Any, saved: Sequence[Tensor], *grads: Tensor | None) -> Grads:
        call: Call = ctx.call
        if all(g is None for g in grads):
            return (None,) * (2 + 2 * len(call.weights))
        lead = ctx.x_shape[:-1]
        dys = whole_grads(ctx, grads, lead)
        rows = split(dys[0].shape[0], call.comm.size)
        dx, dws = dgrad(ctx, "dgrad_all_reduce", dys, saved, Cut(lead, lead, 1, rows))
        return None, dx, *deliver(call, dws), *bias_grads(ctx, dys)
