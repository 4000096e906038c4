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
* **Results** are fresh tensors; neither they nor what is saved for backward alias the communicator's memory.
* **wgrad** says where a weight's gradient goes. None: to autograd (``.grad``). ``"main_grad"``: it is added to
  ``weight.main_grad`` with Megatron-Core's flags (``grad_added_to_main_grad`` is set and autograd gets a dummy, zeros
  if ``zero_out_wgrad``; where the weight has no such flag autograd gets nothing). A callable: ``f(weight, gradient)``
  is called in backward and autograd gets nothing.
* **Errors**, raised before a byte moves: ShapeError (a shape, device or dtype does not fit), Unsupported and
  UnsupportedDtype (also a TypeError: no sums or products of this type), ConfigError (``save``, ``wgrad``). Double
  backward raises Unsupported. While moving: CollectiveMismatch, ConcurrentUse, CommTimeout, PeerDied, CommAborted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from . import autograd, layout
from .communicator import resolve_communicator
from .errors import ConfigError, ShapeError, Unsupported, UnsupportedDtype
from .gradients import Call, WgradSink, main_grad, name
from .reduction import reducible

if TYPE_CHECKING:
    from .communicator import Communicator

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

_PRODUCTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_USUAL = (Tensor, torch.nn.Parameter)
Bias = Tensor | Sequence[Tensor | None] | None


# -- products ---------------------------------------------------------------------------------------------------------
def all_gather_matmul(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    group: Any = None,
    *,
    dim: int = 0,
    rows: Sequence[int] | None = None,
    bias: Bias = None,
    return_gathered: bool = False,
    save: str = "shard",
    wgrad: WgradSink = None,
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

    Returns:
        (..., n) with the whole extent along ``dim``; a tuple of them for several weights; with ``return_gathered``
        the pair (product or tuple, gathered ``x``).
    """
    op = "all_gather_matmul"
    if save not in ("shard", "gathered"):
        raise ConfigError(f"{op}: save={save!r}: 'shard' or 'gathered' is needed")
    comm = _communicator(group, x)
    weights, biases = _several(op, w, bias)
    x, cast, biases = _operands(op, comm, x, weights, biases, wgrad)
    dim = layout.dimension(op, x, dim)
    counts = layout.gather_counts(op, x.shape[dim], dim, rows, comm.rank, comm.size)
    recording = torch.is_grad_enabled()
    if dim == x.dim() - 1:
        _same_k(op, comm, sum(counts), cast, f"{counts} gathered along the last dim")
        gathered = all_gather(x, comm, dim=dim, rows=counts)
        comm.count(op, False, "gathered along the last dimension")
        call = Call(op, comm, layout.cut((), 0, (0,), 0), weights, wgrad, reduce=False, recording=recording)
        outs = autograd.apply(autograd.ColumnParallel, call, gathered, *cast, *biases)
    else:
        _same_k(op, comm, x.shape[-1], cast, f"x of shape {tuple(x.shape)}")
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

    Returns:
        (..., n) with this rank's extent along ``dim``.
    """
    op = "matmul_reduce_scatter"
    comm = _communicator(group, x)
    weights, biases = _several(op, (w,), (bias,))
    x, cast, biases = _operands(op, comm, x, weights, biases, wgrad)
    _same_k(op, comm, x.shape[-1], cast, f"x of shape {tuple(x.shape)}")
    dim = layout.dimension(op, x, dim)
    features = dim == x.dim() - 1
    extent = cast[0].shape[0] if features else x.shape[dim]
    counts = layout.scatter_counts(op, extent, dim, rows, comm.size)
    lead, at = ((extent,), 0) if features else (x.shape[:-1], dim)
    cut = layout.cut(lead, at, counts, comm.rank)
    call = Call(op, comm, cut, weights, wgrad, features=features, recording=torch.is_grad_enabled())
    out: Tensor = autograd.apply(autograd.MatmulReduceScatter, call, x, cast[0], biases[0])
    return out


def matmul_all_reduce(
    x: Tensor, w: Tensor, group: Any = None, *, bias: Tensor | None = None, wgrad: WgradSink = None
) -> Tensor:
    """Multiply and sum over ranks: ``all_reduce(linear(x, w)) + bias``, overlapped. Collective.

    The result is replicated, and so must its gradient be: backward takes it as it is, the same on all ranks, and is
    local.

    Args:
        x: (..., k): k, the in features of this rank, may differ between ranks.
        w: (n, k).
        bias: (n,), the same on all ranks; added once, after the sum. Its gradient is whole on every rank.

    Returns:
        (..., n), the same bits on all ranks.
    """
    op = "matmul_all_reduce"
    comm = _communicator(group, x)
    weights, biases = _several(op, (w,), (bias,))
    x, cast, biases = _operands(op, comm, x, weights, biases, wgrad)
    _same_k(op, comm, x.shape[-1], cast, f"x of shape {tuple(x.shape)}")
    call = Call(op, comm, layout.cut((), 0, (0,), 0), weights, wgrad, recording=torch.is_grad_enabled())
    out: Tensor = autograd.apply(autograd.MatmulAllReduce, call, x, cast[0], biases[0])
    return out


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
    x: Tensor, w: Tensor | Sequence[Tensor], group: Any = None, *, bias: Bias = None, wgrad: WgradSink = None
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
    op = "column_parallel_linear"
    comm = _communicator(group, x)
    weights, biases = _several(op, w, bias)
    x, cast, biases = _operands(op, comm, x, weights, biases, wgrad)
    _same_k(op, comm, x.shape[-1], cast, f"x of shape {tuple(x.shape)}")
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
    op = "all_gather"
    comm = _communicator(group, x)
    _tensor(op, comm, "x", x)
    if x.requires_grad and torch.is_grad_enabled():
        _summable(f"gradient of {op}", comm, x)
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
    op = "reduce_scatter"
    comm = _communicator(group, x)
    _tensor(op, comm, "x", x)
    _summable(op, comm, x)
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
    op = "all_reduce"
    comm = _communicator(group, x)
    _tensor(op, comm, "x", x)
    _summable(op, comm, x)
    call = Call(op, comm, layout.cut((), 0, (0,), 0))
    out: Tensor = autograd.apply(autograd.AllReduce, call, x if x.dim() else x.view(1))
    return out.view(x.shape)


def barrier(group: Any = None) -> None:
    """Return when all ranks of the group have called it. Collective."""
    resolve_communicator(group).barrier()


# -- checks, all local and before a byte moves ------------------------------------------------------------------------
def _communicator(group: Any, x: Any) -> Communicator:
    """The communicator of ``group`` for tensors that live where ``x`` does."""
    usual = isinstance(x, Tensor) and x.device.type in ("cpu", "cuda")
    return resolve_communicator(group, device=x.device if usual else None)


def _several(op: str, w: Tensor | Sequence[Tensor], bias: Bias) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
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


def _operands(
    op: str,
    comm: Communicator,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    wgrad: WgradSink,
) -> tuple[Tensor, list[Tensor], tuple[Tensor | None, ...]]:
    """Check everything about the operands but the inner dimension; cast them as autocast would."""
    if not (wgrad is None or wgrad == "main_grad" or callable(wgrad)):
        raise ConfigError(f"{op}: wgrad={wgrad!r}: None, 'main_grad' or a callable (weight, gradient) is needed")
    _tensor(op, comm, "x", x)
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        _tensor(op, comm, f"weight {i}", w)
        if w.dim() != 2:
            raise ShapeError(f"{op}: weight {i} has shape {tuple(w.shape)}: (out features, in features) is needed")
        if b is not None:
            _tensor(op, comm, f"bias {i}", b)
            if b.shape != w.shape[:1]:
                raise ShapeError(f"{op}: bias {i} has shape {tuple(b.shape)}, weight {i} has {w.shape[0]} out features")
        if wgrad == "main_grad" and w.requires_grad and torch.is_grad_enabled():
            main_grad(op, w)
    if x.dim() == 0:
        raise ShapeError(f"{op}: x is a scalar: 1 or more dimensions are needed")
    kind = comm.device.type
    if torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        x, cast = _lower(x, lower), [_lower(w, lower) for w in weights]
        biases = tuple(b if b is None else _lower(b, lower) for b in biases)
    else:
        cast = list(weights)
    for what, t in [("weight", w) for w in cast] + [("bias", b) for b in biases if b is not None]:
        if t.dtype != x.dtype:
            raise ShapeError(f"{op}: x is {x.dtype} and a {what} is {t.dtype}: operands must be of one type")
    if x.dtype not in _PRODUCTS:
        offered = ", ".join(name(d) for d in _PRODUCTS)
        raise UnsupportedDtype(f"{op}: matrix products of {x.dtype} are not offered: use one of {offered}")
    return x, cast, tuple(biases)


def _lower(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t


def _same_k(op: str, comm: Communicator, k: int, weights: Sequence[Tensor], what: str) -> None:
    for i, w in enumerate(weights):
        if w.shape[1] != k:
            raise ShapeError(
                f"{op}: rank {comm.rank}: weight {i} of shape {tuple(w.shape)} has {w.shape[1]} in features;"
                f" {what} has {k}"
            )


def _summable(op: str, comm: Communicator, x: Tensor) -> None:
    reason = reducible(x.dtype)
    if reason is not None:
        raise UnsupportedDtype(f"{op}: rank {comm.rank}: {reason}")


def _tensor(op: str, comm: Communicator, what: str, t: Any) -> None:
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
