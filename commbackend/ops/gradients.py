"""What an op's forward leaves for its backward, and the pieces backward passes are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd import Function

from ..errors import ConfigError, Unsupported
from ..layout import Cut, empty, matrix
from ..plan import interned_problem
from .unfused import execute

if TYPE_CHECKING:
    from torch import Tensor

    from ..communicator import Communicator

__all__ = [
    "Call",
    "Grads",
    "Scales",
    "WgradSink",
    "bias_grads",
    "bias_rows",
    "deliver",
    "dgrad",
    "first_order",
    "gather_grads",
    "main_grad",
    "name",
    "own",
    "save",
    "scaled",
    "scattered_bias_grad",
    "whole_grads",
    "without_autocast",
]

WgradSink: TypeAlias = "Callable[[Tensor, Tensor], None] | str | None"
Grads: TypeAlias = "tuple[Tensor | None, ...]"


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """Scales of fp8 operands, in float32: one element, or one a row of ``x`` (of each weight)."""

    a: Tensor
    b: tuple[Tensor, ...]
    out_dtype: torch.dtype

    def by_row(self) -> bool:
        """Whether some operand has a scale a row: then all are given one, as cuBLAS wants it."""
        return any(s.numel() != 1 for s in (self.a, *self.b))

    def tensors(self, a: Tensor, rows: int, features: Sequence[int]) -> dict[str, Tensor]:
        """The scale buffers of a call whose ``rows`` rows have the scales ``a``."""
        if not self.by_row():
            return {"scale_a": a.view(1, 1), **{f"scale_b{i}": s.view(1, 1) for i, s in enumerate(self.b)}}
        found = {"scale_a": a.reshape(1, -1).expand(1, rows).contiguous()}
        for i, (s, n) in enumerate(zip(self.b, features, strict=True)):
            found[f"scale_b{i}"] = s.reshape(1, -1).expand(1, n).contiguous()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What an op knows beside its tensors.

    Attributes:
        op: Its public name, for messages.
        cut: How rows are spread over ranks.
        weights: The caller's weights, before autocast: what ``wgrad`` is about.
        wgrad: Where weight gradients go, as the op's argument.
        features: The cut dimension is the last one of the output: rows of the weight are scattered.
        save_gathered, return_gathered: As the op's arguments.
        reduce: The gradient of a replicated input is summed over ranks.
        recording: Autograd was on when the op was called.
        scales: Of fp8 operands.
        eps: Of the norm that follows.
    """

    op: str
    comm: Communicator
    cut: Cut
    weights: tuple[Tensor, ...] = ()
    wgrad: WgradSink = None
    features: bool = False
    save_gathered: bool = False
    return_gathered: bool = False
    reduce: bool = True
    recording: bool = True
    scales: Scales | None = None
    eps: float = 0.0
    #: The layer whose forward made the call: its backward runs under the same name.
    layer: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", self.comm.layer_name)


@functools.cache
def name(dtype: torch.dtype) -> str:
    """The dtype's name in a Problem."""
    return str(dtype).removeprefix("torch.")


def scaled(call: Call) -> tuple[str, str]:
    """The fields of a Problem that say what fp8 operands become: type of the results, and what has a scale."""
    if call.scales is None:
        return "", ""
    return name(call.scales.out_dtype), "row" if call.scales.by_row() else "tensor"


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Products inside an op are of the types the op decided on, also where a caller's autocast region is active."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class _Refuse(Function):
    """Gradients that are not differentiable again: passes them on, and says so when someone tries."""

    @staticmethod
    def forward(ctx: Any, op: str, grad: Tensor, *deps: Tensor) -> Tensor:
        ctx.op = op
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise Unsupported(f"{ctx.op}: double backward is not offered; for second derivatives use unfused products")


def first_order(backward: Callable[..., Grads]) -> Callable[..., Grads]:
    """Run ``backward(ctx, saved, *grads)`` without recording it, so that only an attempt to differentiate it again
    raises.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Grads:
        # Read once: a checkpoint's hooks recompute saved tensors for one read only.
        saved = ctx.saved_tensors
        comm = ctx.call.comm
        with torch.no_grad(), without_autocast(comm.device), comm.layer(ctx.call.layer, "backward"):
            out = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():
            return out
        deps = [t for t in (*grads, *saved) if t is not None and t.requires_grad]
        refuse: Any = _Refuse
        return tuple(g if g is None or not deps else refuse.apply(ctx.call.op, g, *deps) for g in out)

    return run


# -- pieces of forward and backward -----------------------------------------------------------------------------------


def save(ctx: Any, call: Call, x: Tensor, shape: torch.Size, weights: Sequence[Tensor | None]) -> None:
    """Keep what backward needs: the moved operand for weight gradients, the weights for the input's gradient."""
    # Shapes of the op's input and outputs, which backward needs where it does not need the tensors.
    ctx.call, ctx.x_shape, ctx.n = call, shape, tuple(w.shape[0] for w in weights if w is not None)
    ctx.set_materialize_grads(False)
    if call.recording:
        needs_x, needs_w = ctx.needs_input_grad[1], any(ctx.needs_input_grad[2 : 2 + len(weights)])
        ctx.save_for_backward(x if needs_w else None, *(w if needs_x else None for w in weights))


def bias_rows(biases: Sequence[Tensor | None], outs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The bias buffers of a call: none, or one for every output (a weight without bias gets zeros)."""
    if all(b is None for b in biases):
        return {}
    rows = [b if b is not None else o.new_zeros(o.shape[-1]) for b, o in zip(biases, outs, strict=True)]
    return {f"bias{i}": row.view(1, -1) for i, row in enumerate(rows)}


def whole_grads(ctx: Any, grads: Sequence[Tensor | None], lead: Sequence[int]) -> list[Tensor]:
    """The outputs' gradients as matrices; zeros for outputs that were not used, so that every rank makes the same
    call.
    """
    some = next(g for g in grads if g is not None)
    return [matrix(g if g is not None else some.new_zeros((*lead, n))) for g, n in zip(grads, ctx.n, strict=True)]


def bias_grads(ctx: Any, dys: Sequence[Tensor]) -> list[Tensor | None]:
    needs = ctx.needs_input_grad[2 + len(dys) :]
    return [dy.sum(0) if need else None for dy, need in zip(dys, needs, strict=True)]


def dgrad(
    ctx: Any, op: str, dys: Sequence[Tensor], saved: Sequence[Tensor], cut: Cut
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the input and the weights of products whose input was gathered or replicated, as autograd asks for
    them.

    One call where all are wanted; where some are frozen, one for the input's and one for the weights' gradients.
    """
    call: Call = ctx.call
    moved, weights = saved[0], saved[1:]
    every, wanted = range(len(dys)), [i for i in range(len(dys)) if ctx.needs_input_grad[2 + i]]
    dx = empty(ctx.x_shape, dys[0]) if ctx.needs_input_grad[1] else None
    dws = [empty((dy.shape[1], ctx.x_shape[-1]), dy) if i in wanted else None for i, dy in enumerate(dys)]
    parts = [(every, dx, moved)] if len(wanted) == len(dys) else [(every, dx, None), (wanted, None, moved)]
    for which, part_dx, part_x in parts:
        if part_dx is None and (part_x is None or not wanted):
            continue
        tensors = {f"dy{j}": dys[i] for j, i in enumerate(which)}
        if part_dx is not None:
            tensors |= {f"w{j}": weights[i] for j, i in enumerate(which)} | {"dx": matrix(part_dx)}
        if part_x is not None:
            gathered = op == "dgrad_reduce_scatter" and call.save_gathered
            tensors["gathered" if gathered else "x"] = matrix(part_x)
            tensors |= {f"dw{j}": dw for j, i in enumerate(which) if (dw := dws[i]) is not None}
        _dgrad_call(call, op, cut, tensors, len(which))
    return dx, dws


def _dgrad_call(call: Call, op: str, cut: Cut, tensors: dict[str, Tensor], count: int) -> None:
    """Compute ``dx`` and ``dw0``..., whichever ``tensors`` holds; local where nothing has to move."""
    dys = [tensors[f"dy{i}"] for i in range(count)]
    moves = ("dx" in tensors and call.reduce) or (op == "dgrad_reduce_scatter" and "x" in tensors)
    if moves:
        present = {"no_dgrad": "dx" not in tensors, "saved": "gathered" in tensors, "wgrad": "dw0" in tensors}
        flags = tuple(flag for flag, here in present.items() if here)
        k = tensors["dx" if "dx" in tensors else "x"].shape[1]
        n = tuple(dy.shape[1] for dy in dys)
        execute(call.comm, interned_problem(op, cut.rows, cut.blocks, k, n, name(dys[0].dtype), False, flags), tensors)
        return
    if "dx" in tensors:
        torch.mm(dys[0], tensors["w0"], out=tensors["dx"])
        for i in range(1, count):
            tensors["dx"].addmm_(dys[i], tensors[f"w{i}"])
    if "dw0" in tensors:
        x = tensors["gathered" if "gathered" in tensors else "x"]
        for i, dy in enumerate(dys):
            torch.mm(dy.t(), x, out=tensors[f"dw{i}"])


def gather_grads(
    call: Call, dy: Tensor, *, a: Tensor | None, b: Tensor | None, da: Tensor | None, db: Tensor | None
) -> None:
    """Backward of out = reduce_scatter(a @ b.T): da = gathered dy @ b, db = gathered dy.T @ a; None is not asked
    for.
    """
    cut, dtype = call.cut, name(dy.dtype)
    if da is not None and b is not None:
        tensors = {"x": dy, "w0": b.t(), "out0": da}
        flags: tuple[str, ...] = ()
        if db is not None and a is not None:
            tensors |= {"y": a, "dw": db}
            flags = ("wgrad",)
        n = (b.shape[1],)
        execute(
            call.comm,
            interned_problem("all_gather_matmul", cut.rows, cut.blocks, dy.shape[1], n, dtype, False, flags),
            tensors,
        )
    elif db is not None and a is not None:
        gathered = empty((a.shape[0], dy.shape[1]), dy)
        problem = interned_problem("all_gather", cut.rows, cut.blocks, dy.shape[1], dtype=dtype)
        execute(call.comm, problem, {"x": dy, "out": gathered})
        torch.mm(gathered.t(), a, out=db)


def own(call: Call) -> slice:
    """This rank's part of the scattered output features."""
    rows, rank = call.cut.rows, call.comm.rank
    return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


def scattered_bias_grad(call: Call, dy: Tensor) -> Tensor:
    """This rank's part of the bias' gradient: of its rows, or of its features (zero elsewhere)."""
    if not call.features:
        return dy.sum(0)
    grad = dy.new_zeros(sum(call.cut.rows))
    grad[own(call)] = dy.sum(0)
    return grad


def deliver(call: Call, dws: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Hand weight gradients to the op's ``wgrad`` sink; return what autograd gets for each weight."""
    return [dw if dw is None else _sink(call, w, dw) for w, dw in zip(call.weights, dws, strict=True)]


def _sink(call: Call, weight: Tensor, dw: Tensor) -> Tensor | None:
    if call.wgrad is None:
        return dw
    if callable(call.wgrad):
        call.wgrad(weight, dw)
        return None
    home, added = main_grad(call.op, weight), getattr(weight, "grad_added_to_main_grad", False)
    if getattr(weight, "overwrite_main_grad", False) and not added:
        home.copy_(dw)  # what the buffer holds is no gradient; the second use of a weight in one backward adds
    else:
        home.add_(dw)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    # A framework's hook on the parameter runs only if autograd delivers something; the flag tells it to ignore the
    # values.
    setattr(weight, "grad_added_to_main_grad", True)  # noqa: B010 - a Tensor has no such declared attribute
    return torch.zeros_like(dw) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(dw)


def main_grad(op: str, weight: Tensor) -> Tensor:
    """The buffer that ``wgrad="main_grad"`` accumulates into. Raises ConfigError if the weight has none."""
    sharded = getattr(weight, "get_main_grad", None) if hasattr(weight, "__fsdp_param__") else None
    found = sharded() if sharded is not None else getattr(weight, "main_grad", None)
    if not isinstance(found, torch.Tensor) or found.shape != weight.shape:
        raise ConfigError(
            f"{op}: wgrad='main_grad' needs weight.main_grad, a tensor of shape {tuple(weight.shape)};"
            f" found {tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__}"
        )
    return found
