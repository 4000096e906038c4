"""What users call: collectives fused with matrix products, and plain collectives, all differentiable.

Said once for all ops here:

* **Collective.** All ranks of the group call the same op with agreeing sizes, in the same order. Undeclared
  differences raise CollectiveMismatch on all ranks. Backward passes are collective too: the ranks' ``requires_grad``
  must agree, and every rank runs its backward, also one that holds zero rows.
* **Group.** ``group`` is a Communicator, a torch ProcessGroup, a DeviceMesh, a group name, an mpi4py communicator, or
  None for the default; its communicator is made on first use (collective).
* **Shapes.** ``x`` has 1 or more dimensions; products act on its last one, as ``torch.nn.functional.linear`` does.
  ``dim`` may be any dimension, counted from the back if negative. ``w`` is (out features, in features), of any
  strides, and is never copied. ``rows`` gives one extent along ``dim`` for each rank, zeros allowed; without it all
  ranks' extents are equal. Extents may change from call to call.
* **Types.** Products take float64, float32, bfloat16 and float16, operands alike; sums accumulate in float32 (float64
  for float64) in rank order, so that results have the same bits on all ranks and in all runs. Autocast regions cast
  as they do for ``linear``.
* **fp8.** Products also take float8_e4m3fn and float8_e5m2, operands alike, with float32 scales as
  ``torch._scaled_mm`` has them: value = operand * scale. ``scale_a`` belongs to ``x``: one element, the same on all
  ranks where ``x`` is gathered, or one a row of ``x`` (shape (..., 1), or (...) of the rows alone; this rank's rows).
  ``scale_b`` belongs to ``w``: one element, or one a row of ``w`` (n elements, any shape); for several weights a
  sequence. ``out_dtype`` is bfloat16 (default), float16 or float32, and the type of ``bias``. What is gathered travels
  as fp8; partial sums travel as ``out_dtype``. Accumulation is in float32: by cuBLAS or a Triton kernel on GPUs (k and
  n must be multiples of 16 there), of the operands cast to float32 on CPUs. fp8 operands have no gradients.
* **Results** are fresh tensors; neither they nor what is saved for backward alias the communicator's memory.
* **wgrad** says where a weight's gradient goes. None: to autograd (``.grad``). ``"main_grad"``: it is added to
  ``weight.main_grad`` with Megatron-Core's flags (``grad_added_to_main_grad`` is set and autograd gets a dummy, zeros
  if ``zero_out_wgrad``; where the weight has no such flag autograd gets nothing), or put in its place with
  ``overwrite_main_grad``, Megatron-FSDP's. A callable: ``f(weight, gradient)`` is called in backward and autograd gets
  nothing.
* **Errors**, raised before a byte moves: ShapeError (a shape, device or dtype does not fit), Unsupported and
  UnsupportedDtype (also a TypeError: no sums or products of this type), ConfigError (``save``, ``wgrad``). Double
  backward raises Unsupported. While moving: CollectiveMismatch, ConcurrentUse, CommTimeout, PeerDied, CommAborted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from .. import layout
from ..communicator import resolve_communicator
from ..errors import ConfigError, ShapeError, Unsupported
from ..library import traced
from . import autograd
from . import operands as checks
from .gradients import Call, WgradSink

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "barrier",
    "column_parallel_linear",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
]


# -- products ---------------------------------------------------------------------------------------------------------
def all_gather_matmul(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    group: Any = None,
    *,
    dim: int = 0,
    rows: Sequence[int] | None = None,
    bias: checks.Bias = None,
    return_gathered: bool = False,
    save: str = "shard",
    wgrad: WgradSink = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Gather ``x`` along ``dim`` and multiply: ``linear(all_gather(x), w, bias)``, overlapped. Collective.

    Its backward scatters the input's gradient and gathers ``x`` again while it multiplies. Along the last dimension
    (in features) every product needs the whole gather, so nothing overlaps there: the gathered copy is saved and
    ``stats`` counts a fallback.

    Args:
        x: (..., k): this rank's shard along ``dim``.
        w: (n, k), or several weights (n_i, k) that share one gather; n_i may differ between ranks, as in column
            parallelism.
        rows: Extent of each rank's shard along ``dim``; its own must be ``x.shape[dim]``.
        bias: (n,), or for several weights one entry each, None for those without. Added to every row.
        return_gathered: Also return the gathered ``x``. A gradient that reaches it costs one more reduce-scatter, on
            all ranks.
        save: What is kept for the weights' gradients: "shard" (``x`` itself; backward gathers again) or "gathered" (a
            copy of the whole).
        scale_a, scale_b, out_dtype: For fp8 operands, as said above; scales of rows are gathered first, four bytes a
            row. Not with ``dim`` the last one.

    Returns:
        (..., n) with the whole extent along ``dim``; a tuple of them for several weights; with ``return_gathered``
        the pair (product or tuple, gathered ``x``).
    """
    if torch.compiler.is_compiling():
        return traced.all_gather_matmul(
            x, w, group, dim, rows, bias, return_gathered, save, wgrad, scale_a, scale_b, out_dtype
        )
    op = "all_gather_matmul"
    if save not in ("shard", "gathered"):
        raise ConfigError(f"{op}: save={save!r}: 'shard' or 'gathered' is needed")
    comm = checks.communicator(group, x)
    weights, biases = checks.several(op, w, bias)
    x, cast, biases, scales = checks.operands(op, comm, x, weights, biases, wgrad, scale_a, scale_b, out_dtype)
    dim = layout.dimension(op, x, dim)
    counts = layout.gather_counts(op, x.shape[dim], dim, rows, comm.rank, comm.size)
    recording = torch.is_grad_enabled()
    if dim == x.dim() - 1:
        if scales is not None:
            raise Unsupported(f"{op}: rank {comm.rank}: fp8 is not gathered along the last dimension (in features)")
        checks.same_k(op, comm, sum(counts), cast, f"{counts} gathered along the last dim")
        gathered = all_gather(x, comm, dim=dim, rows=counts)
        comm.count(op, False, "gathered along the last dimension")
        call = Call(op, comm, layout.cut((), 0, (0,), 0), weights, wgrad, reduce=False, recording=recording)
        outs = autograd.apply(autograd.ColumnParallel, call, gathered, *cast, *biases)
    else:
        checks.same_k(op, comm, x.shape[-1], cast, x)
        cut = layout.cut(x.shape[:-1], dim, counts, comm.rank)
        call = Call(
            op,
            comm,
            cut,
            weights,
            wgrad,
            save_gathered=save == "gathered",
            return_gathered=return_gathered,
            recording=recording,
            scales=scales,
        )
        outs = autograd.apply(autograd.AllGatherMatmul, call, x, *cast, *biases)
        gathered = outs[-1]
    products = outs[: len(weights)] if not isinstance(w, Tensor) else outs[0]
    return (products, gathered) if return_gathered else products


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    group: Any = None,
    *,
    dim: int = 0,
    rows: Sequence[int] | None = None,
    bias: Tensor | None = None,
    wgrad: WgradSink = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply, sum over ranks and keep one part along ``dim``: ``reduce_scatter(linear(x, w)) + bias``, overlapped.
    Collective.

    Its backward gathers the output's gradient while it multiplies.

    Args:
        x: (..., k): all rows; k, the in features of this rank, may differ between ranks.
        w: (n, k).
        dim: Dimension of the output (..., n) that is scattered; the last one scatters out features.
        rows: Extent of each rank's part along ``dim``; without it ``dim`` must divide by the group's size.
        bias: (n,), the same on all ranks; added once, after the sum. Its gradient is this rank's part: sum it over
            ranks where ranks hold copies (see ``nn.reduce_replicated_grads``).
        scale_a, scale_b, out_dtype: For fp8 operands, as said above.

    Returns:
        (..., n) with this rank's extent along ``dim``.
    """
    if torch.compiler.is_compiling():
        return traced.matmul_reduce_scatter(x, w, group, dim, rows, bias, wgrad, scale_a, scale_b, out_dtype)
    op = "matmul_reduce_scatter"
    comm = checks.communicator(group, x)
    weights, biases = checks.several(op, (w,), (bias,))
    x, cast, biases, scales = checks.operands(op, comm, x, weights, biases, wgrad, scale_a, scale_b, out_dtype)
    checks.same_k(op, comm, x.shape[-1], cast, x)
    dim = layout.dimension(op, x, dim)
    features = dim == x.dim() - 1
    extent = cast[0].shape[0] if features else x.shape[dim]
    counts = layout.scatter_counts(op, extent, dim, rows, comm.size)
    if features and scales is not None and comm.device.type == "cuda" and math.prod(x.shape[:-1]) % 16:
        raise ShapeError(f"{op}: fp8 x of shape {tuple(x.shape)}, dim={dim}: a multiple of 16 rows is needed on GPUs")
    lead, at = ((extent,), 0) if features else (x.shape[:-1], dim)
    cut = layout.cut(lead, at, counts, comm.rank)
    recording = torch.is_grad_enabled()
    call = Call(op, comm, cut, weights, wgrad, features=features, recording=recording, scales=scales)
    out: Tensor = autograd.apply(autograd.MatmulReduceScatter, call, x, cast[0], biases[0])
    return out


@overload
def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    group: Any = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: None = None,
    eps: float = 1e-6,
    wgrad: WgradSink = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor: ...
@overload
def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    group: Any = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-6,
    wgrad: WgradSink = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    group: Any = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    wgrad: WgradSink = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multiply and sum over ranks: ``all_reduce(linear(x, w)) + residual + bias``, overlapped, and RMSNorm of it on
    request. Collective.

    The result is replicated, and so must its gradient be: backward takes it as it is, the same on all ranks, and is
    local.

    Args:
        x: (..., k): k, the in features of this rank, may differ between ranks.
        w: (n, k).
        bias: (n,), the same on all ranks; added once, after the sum. Its gradient is whole on every rank.
        residual: (..., n), the same on all ranks; added once, to the sum before it is rounded. It is not written to.
        norm_weight: (n,), the same on all ranks: also return ``rms_norm(sum, norm_weight, eps)`` of the rounded sum.
            Needs ``residual``.
        eps: Added to the mean square.
        scale_a, scale_b, out_dtype: For fp8 operands, as said above.

    Returns:
        (..., n), the same bits on all ranks; with ``norm_weight`` the pair (normed, sum): the sum is the residual of
        the next layer.

    Raises:
        ConfigError: ``norm_weight`` without ``residual``.
    """
    if torch.compiler.is_compiling():
        traced_out: Tensor | tuple[Tensor, Tensor] = traced.matmul_all_reduce(
            x, w, group, bias, residual, norm_weight, eps, wgrad, scale_a, scale_b, out_dtype
        )
        return traced_out
    op = "matmul_all_reduce"
    comm = checks.communicator(group, x)
    weights, biases = checks.several(op, (w,), (bias,))
    x, cast, biases, scales = checks.operands(op, comm, x, weights, biases, wgrad, scale_a, scale_b, out_dtype)
    checks.same_k(op, comm, x.shape[-1], cast, x)
    residual, norm_weight = checks.normed(op, comm, x, cast[0], scales, residual, norm_weight)
    recording = torch.is_grad_enabled()
    call = Call(op, comm, layout.cut((), 0, (0,), 0), weights, wgrad, recording=recording, scales=scales, eps=eps)
    if norm_weight is None:
        out: Tensor = autograd.apply(autograd.MatmulAllReduce, call, x, cast[0], biases[0], residual)
        return out
    given = (x, cast[0], biases[0], residual, norm_weight)
    if recording and any(t is not None and t.requires_grad for t in given):
        out = autograd.apply(autograd.MatmulAllReduce, call, *given[:4])
        return torch.nn.functional.rms_norm(out, out.shape[-1:], norm_weight, eps), out
    normed, out = autograd.matmul_all_reduce(call, *given)
    assert normed is not None
    return normed, out


@overload
def column_parallel_linear(
    x: Tensor, w: Tensor, group: Any = None, *, bias: Tensor | None = None, wgrad: WgradSink = None
) -> Tensor: ...
@overload
def column_parallel_linear(
    x: Tensor,
    w: Sequence[Tensor],
    group: Any = None,
    *,
    bias: Sequence[Tensor | None] | None = None,
    wgrad: WgradSink = None,
) -> tuple[Tensor, ...]: ...
def column_parallel_linear(
    x: Tensor, w: Tensor | Sequence[Tensor], group: Any = None, *, bias: checks.Bias = None, wgrad: WgradSink = None
) -> Tensor | tuple[Tensor, ...]:
    """Multiply a replicated ``x``: ``linear(x, w, bias)``; local forward, collective backward.

    Backward sums the input's gradient over ranks while it computes the weights'. Several weights share one sum.

    Args:
        x: (..., k), the same on all ranks.
        w: (n, k), or several weights (n_i, k); n_i may differ between ranks.
        bias: (n,), or for several weights one entry each, None for those without.

    Returns:
        (..., n); a tuple of them for several weights.
    """
    if torch.compiler.is_compiling():
        return traced.column_parallel_linear(x, w, group, bias, wgrad)  # type: ignore[no-any-return]
    op = "column_parallel_linear"
    comm = checks.communicator(group, x)
    weights, biases = checks.several(op, w, bias)
    x, cast, biases, _ = checks.operands(op, comm, x, weights, biases, wgrad)
    checks.same_k(op, comm, x.shape[-1], cast, x)
    call = Call(op, comm, layout.cut((), 0, (0,), 0), weights, wgrad, recording=torch.is_grad_enabled())
    outs: tuple[Tensor, ...] = autograd.apply(autograd.ColumnParallel, call, x, *cast, *biases)
    return outs[0] if isinstance(w, Tensor) else outs


# -- plain collectives ------------------------------------------------------------------------------------------------
def all_gather(x: Tensor, group: Any = None, *, dim: int = 0, rows: Sequence[int] | None = None) -> Tensor:
    """Concatenate every rank's ``x`` along ``dim``, in rank order. Collective. Backward is ``reduce_scatter``.

    So gradients add up over ranks, as they must where each computes its own part of the loss from the result. Where all
    compute the same loss from it, divide that loss by the number of ranks, or its gradient arrives as many times.

    Args:
        x: 1 or more dimensions, any dtype; it may require gradients where its dtype can be summed.
        rows: Extent of each rank's ``x`` along ``dim``; its own must be ``x.shape[dim]``.
    """
    if torch.compiler.is_compiling():
        return traced.all_gather(x, group, dim, rows)
    op = "all_gather"
    comm = checks.communicator(group, x)
    checks.dense(op, comm, "x", x)
    if x.requires_grad and torch.is_grad_enabled():
        checks.summable(f"gradient of {op}", comm, x)
    dim = layout.dimension(op, x, dim)
    counts = layout.gather_counts(op, x.shape[dim], dim, rows, comm.rank, comm.size)
    x2 = layout.columns(x, dim)
    out: Tensor = autograd.apply(
        autograd.AllGather, Call(op, comm, layout.cut(x2.shape[:-1], dim, counts, comm.rank)), x2
    )
    return out.squeeze(-1) if x2 is not x else out


def reduce_scatter(x: Tensor, group: Any = None, *, dim: int = 0, rows: Sequence[int] | None = None) -> Tensor:
    """Sum ``x`` over ranks and keep this rank's part along ``dim``. Collective. Backward is ``all_gather``.

    Args:
        x: 1 or more dimensions, the same shape on all ranks.
        rows: Extent of each rank's part along ``dim``; without it ``dim`` must divide by the group's size.
    """
    if torch.compiler.is_compiling():
        return traced.reduce_scatter(x, group, dim, rows)
    op = "reduce_scatter"
    comm = checks.communicator(group, x)
    checks.dense(op, comm, "x", x)
    checks.summable(op, comm, x)
    dim = layout.dimension(op, x, dim)
    counts = layout.scatter_counts(op, x.shape[dim], dim, rows, comm.size)
    x2 = layout.columns(x, dim)
    out: Tensor = autograd.apply(
        autograd.ReduceScatter, Call(op, comm, layout.cut(x2.shape[:-1], dim, counts, comm.rank)), x2
    )
    return out.squeeze(-1) if x2 is not x else out


def all_reduce(x: Tensor, group: Any = None) -> Tensor:
    """Sum ``x`` over ranks: a new tensor, the same bits on all ranks. Collective.

    The result is replicated, and so must its gradient be: backward passes it through as it is, without communication.
    (Where the gradient differs between ranks, ``reduce_scatter`` and ``all_gather`` are what is meant.)

    Args:
        x: Any shape, the same on all ranks.
    """
    if torch.compiler.is_compiling():
        return traced.all_reduce(x, group)
    op = "all_reduce"
    comm = checks.communicator(group, x)
    checks.dense(op, comm, "x", x)
    checks.summable(op, comm, x)
    call = Call(op, comm, layout.cut((), 0, (0,), 0))
    out: Tensor = autograd.apply(autograd.AllReduce, call, x if x.dim() else x.view(1))
    return out.view(x.shape)


def barrier(group: Any = None) -> None:
    """Return when all ranks of the group have called it. Collective."""
    resolve_communicator(group).barrier()
