"""Tensor-parallel layers: linear layers over the fused ops, and the transformer blocks people build of them.

A *column* layer holds some of its out features, a *row* layer some of its in features; a column layer followed by a row
layer needs one exchange on each side. With ``sequence_parallel`` activations between such pairs are sharded along a
sequence dimension (``gather_dim``, ``scatter_dim``; 0 for [sequence, batch, hidden], 1 for [batch, sequence, hidden]):
the column layer gathers and the row layer scatters. Without it they are replicated: the row layer sums, and the column
layer sums its input's gradient.

Parameters carry what code for gradient norms, checkpoints and reductions asks for:

* ``tensor_model_parallel``: this rank holds a part; ``partition_dim`` is the dimension that is cut (-1: whole).
* ``sequence_parallel``: the parameter is whole on every rank, but its gradient is only this rank's part (norms and row
  biases between sharded activations): call ``reduce_replicated_grads`` after backward, before the optimizer's step.

Constructors are collective where the group has no communicator yet; forward and backward are collective. ``deepcopy``
shares the communicator; ``state_dict`` has the keys of ``torch.nn.Linear`` and holds this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import ops
from ..errors import ConfigError, ShapeError
from ..ops.gradients import WgradSink
from .linear import (
    ColumnParallelLinear,
    Marked,
    ParallelModule,
    RowParallelLinear,
    column_parallel,
    load_full,
    mark,
)

__all__ = [
    "Attention",
    "ColumnParallelLinear",
    "GatedMLP",
    "LayerNorm",
    "ParallelModule",
    "RMSNorm",
    "RowParallelLinear",
    "TransformerBlock",
    "column_parallel",
    "load_full",
    "mark_replicated",
    "reduce_replicated_grads",
    "rotate",
]


class RMSNorm(Marked, nn.RMSNorm):
    """``torch.nn.RMSNorm`` whose weight is marked: with ``sequence_parallel`` each rank normalises its positions
    only.
    """

    def __init__(
        self, hidden: int, eps: float | None = 1e-5, *, sequence_parallel: bool = False, **factory: Any
    ) -> None:
        super().__init__(hidden, eps, **factory)
        self.sequence_parallel = sequence_parallel
        self._mark()

    def _mark(self) -> None:
        mark(self.weight, -1, self.sequence_parallel)


class LayerNorm(Marked, nn.LayerNorm):
    """``torch.nn.LayerNorm`` with marked weight and bias, as ``RMSNorm``."""

    def __init__(self, hidden: int, eps: float = 1e-5, *, sequence_parallel: bool = False, **factory: Any) -> None:
        super().__init__(hidden, eps, **factory)
        self.sequence_parallel = sequence_parallel
        self._mark()

    def _mark(self) -> None:
        mark(self.weight, -1, self.sequence_parallel)
        mark(self.bias, -1, self.sequence_parallel)


class GatedMLP(ParallelModule):
    """norm, gate and up (one gather), activation, down: ``down(activation(gate(h)) * up(h))`` with ``h = norm(x)``.

    Args:
        hidden, intermediate: Sizes of the full block; intermediate must divide by the group's size.
        dim: The sequence dimension that is gathered and scattered with ``sequence_parallel``.
        norm: Whether the block normalises its input.
        save, wgrad: As of the linear layers.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        group: Any = None,
        sequence_parallel: bool = False,
        dim: int = 0,
        norm: bool = True,
        eps: float = 1e-5,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] = functional.silu,
        save: str = "shard",
        wgrad: WgradSink = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, device)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        common = {"group": self.comm, "sequence_parallel": sequence_parallel, "wgrad": wgrad, **factory}
        self.activation = activation
        self.norm = RMSNorm(hidden, eps, sequence_parallel=sequence_parallel, **factory) if norm else None
        self.gate_proj = ColumnParallelLinear(hidden, intermediate, bias, gather_dim=dim, save=save, **common)
        self.up_proj = ColumnParallelLinear(hidden, intermediate, bias, gather_dim=dim, save=save, **common)
        self.down_proj = RowParallelLinear(intermediate, hidden, bias, scatter_dim=dim, **common)

    def forward(self, x: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """x (..., hidden), sharded or replicated -> the same shape. ``rows`` as for the linear layers."""
        h = x if self.norm is None else self.norm(x)
        gate, up = column_parallel(h, self.gate_proj, self.up_proj, rows=rows)
        out: Tensor = self.down_proj(self.activation(gate) * up, rows)
        return out


class Attention(ParallelModule):
    """norm, q/k/v (one gather), attention over this rank's heads, o.

    Args:
        hidden, heads, kv_heads: Sizes of the full block; both numbers of heads must divide by the group's size.
            ``kv_heads`` fewer than ``heads``: grouped queries; None: as many.
        head_dim: Default: ``hidden / heads``.
        rope_base: Base of rotary positions; None: no rotation.
        dim: The sequence dimension of 3-D inputs: 0 or 1; the other one is the batch.
        norm: Whether the block normalises its input.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        group: Any = None,
        sequence_parallel: bool = False,
        dim: int = 0,
        head_dim: int | None = None,
        rope_base: float | None = None,
        causal: bool = True,
        norm: bool = True,
        eps: float = 1e-5,
        bias: bool = False,
        save: str = "shard",
        wgrad: WgradSink = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, device)
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % self.comm.size or kv_heads % self.comm.size or heads % kv_heads:
            raise ShapeError(
                f"Attention: {heads} heads and {kv_heads} key/value heads over {self.comm.size} ranks: both must divide"
                " by the ranks, and heads by key/value heads"
            )
        if dim not in (0, 1):
            raise ShapeError(f"Attention: dim={dim}: the sequence is dimension 0 or 1")
        self.dim, self.head_dim, self.rope_base, self.causal = dim, head_dim or hidden // heads, rope_base, causal
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        common = {"group": self.comm, "sequence_parallel": sequence_parallel, "wgrad": wgrad, **factory}
        column = {"gather_dim": dim, "save": save, **common}
        width, kv_width = heads * self.head_dim, kv_heads * self.head_dim
        self.norm = RMSNorm(hidden, eps, sequence_parallel=sequence_parallel, **factory) if norm else None
        self.q_proj = ColumnParallelLinear(hidden, width, bias, **column)
        self.k_proj = ColumnParallelLinear(hidden, kv_width, bias, **column)
        self.v_proj = ColumnParallelLinear(hidden, kv_width, bias, **column)
        self.o_proj = RowParallelLinear(width, hidden, bias, scatter_dim=dim, **common)

    def forward(self, x: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """x (sequence, batch, hidden) or (batch, sequence, hidden), sharded or replicated -> the same shape."""
        if x.dim() != 3:
            raise ShapeError(f"Attention: x has shape {tuple(x.shape)}: (sequence, batch, hidden) in the order of dim")
        h = x if self.norm is None else self.norm(x)
        projections = column_parallel(h, self.q_proj, self.k_proj, self.v_proj, rows=rows)
        # (batch, heads, sequence, head_dim), whichever of the first two was the sequence.
        order = (1, 2, 0, 3) if self.dim == 0 else (0, 2, 1, 3)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).permute(order) for t in projections)
        if self.rope_base is not None:
            q, k = rotate(q, self.rope_base), rotate(k, self.rope_base)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1])
        back = (2, 0, 1, 3) if self.dim == 0 else (0, 2, 1, 3)
        out: Tensor = self.o_proj(y.permute(back).flatten(2), rows)
        return out


class TransformerBlock(ParallelModule):
    """``x + attention(x)``, then ``x + mlp(x)``, each with its norm inside. Options as of ``Attention`` and
    ``GatedMLP``.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        group: Any = None,
        head_dim: int | None = None,
        rope_base: float | None = None,
        causal: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(group, options.get("device"))
        attention: dict[str, Any] = {"head_dim": head_dim, "rope_base": rope_base, "causal": causal}
        self.attention = Attention(hidden, heads, kv_heads, group=self.comm, **attention, **options)
        self.mlp = GatedMLP(hidden, intermediate, group=self.comm, **options)

    def forward(self, x: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """As ``Attention.forward``."""
        x = x + self.attention(x, rows)
        out: Tensor = x + self.mlp(x, rows)
        return out


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotate halves of the last dimension of ``x`` (..., sequence, head_dim) by the angles of their positions."""
    length, width = x.shape[-2:]
    # Angles of far positions need more bits than the activations have.
    exponents = torch.arange(0, width, 2, device=x.device, dtype=torch.float64) / width
    angles = torch.outer(torch.arange(length, device=x.device, dtype=torch.float64), base**-exponents)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@torch.no_grad()
def mark_replicated(what: nn.Parameter | nn.Module, *, recurse: bool = True) -> None:
    """Mark what every rank holds whole while its gradient is only this rank's part, such as an embedding or a norm that
    sees this rank's positions. ``reduce_replicated_grads`` then sums its gradient too. Local.

    Args:
        what: A parameter; or a module, for its parameters. A module's mark also holds for parameters that take the
            place of those: in copies, after ``to_empty``, under FSDP2.
        recurse: Modules in ``what`` too.
    """
    if isinstance(what, nn.Parameter):
        mark(what, -1, sequence_parallel=True)
        return
    for module in what.modules() if recurse else [what]:
        module._replicated = True  # type: ignore[assignment]  # declared nowhere
        for p in module.parameters(recurse=False):
            mark(p, -1, sequence_parallel=True)


@torch.no_grad()
def reduce_replicated_grads(module: nn.Module, group: Any = None) -> None:
    """Sum over ranks the gradients of parameters marked ``sequence_parallel``. Collective; one all-reduce a dtype.

    Call it after backward, once for all accumulated micro-batches. It reads ``main_grad`` where a parameter has one,
    else ``grad``; a parameter without either takes no part, which must be so on all ranks. Of gradients that FSDP2 has
    sharded, each rank's shard is summed with those of the same parameters on the other tensor-parallel ranks.

    Args:
        group: The tensor-parallel group; default: that of the parallel layers in ``module``.

    Raises:
        ConfigError: The layers in ``module`` belong to several groups, or there are none: pass ``group``.
    """
    found: dict[int, Tensor] = {}
    for m in module.modules():
        if isinstance(m, Marked):
            m.mark_again()
        for p in m.parameters(recurse=False):
            main = getattr(p, "main_grad", None)
            grad = p.grad if main is None else main
            if grad is not None and (getattr(m, "_replicated", False) or getattr(p, "sequence_parallel", False)):
                found[id(p)] = grad.to_local() if hasattr(grad, "to_local") else grad
    grads = [g for g in found.values() if g.numel()]
    if not grads:
        return
    if group is None:
        groups = {id(m.comm): m.comm for m in module.modules() if isinstance(m, ParallelModule)}
        if len(groups) != 1:
            raise ConfigError(
                f"reduce_replicated_grads: the module's layers belong to {len(groups)} groups: pass group="
            )
        (group,) = groups.values()
    for dtype in sorted({g.dtype for g in grads}, key=str):
        same = [g for g in grads if g.dtype == dtype]
        total = ops.all_reduce(torch.cat([g.reshape(-1) for g in same]), group)
        for g, part in zip(same, total.split([g.numel() for g in same]), strict=True):
            g.copy_(part.view_as(g))
