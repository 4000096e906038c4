"""Megatron-Core's TransformerEngine projections, overlapped: what ``layer_spec(base="te")`` builds layers of.

They are subclasses, so that whatever is not fused is TransformerEngine's own: recipes of fp8 and fp4 above all, which a
layer runs stock, counted, with its quantisers and amax histories. Parameters, ``_extra_state`` and checkpoints are
inherited. Written against the interface that TransformerEngine documents for ``Linear`` and ``LayerNormLinear``
(``weight``, ``bias``, ``use_bias``, ``layer_norm_weight``, ``layer_norm_bias``, ``eps``, ``normalization``,
``zero_centered_gamma``); tested against a stand-in of it, on CPUs.

A fused ``LayerNormLinear`` normalises with torch and then gathers and multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from torch import Tensor

from .. import ops
from ..communicator import Communicator
from .fallback import fused_by
from .megatron import Overlapped, wgrad_sink

__all__ = ["EXCHANGES", "ColumnParallelLinear", "LayerNormColumnParallelLinear", "RowParallelLinear"]


class _TEOverlapped(Overlapped):
    """What the projections over TransformerEngine share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.layer_name = kwargs.get("tp_comm_buffer_name") or ""
        super().__init__(*args, **kwargs)

    def refusal(self) -> str | None:
        """As ``Overlapped.refusal``, with what TransformerEngine alone offers."""
        layer: Any = self
        config = layer.config
        if layer.will_execute_quantized(te.FP8GlobalStateManager.is_fp8_enabled()):
            return "fp8 or fp4 recipe"
        if layer.parallel_mode is None:
            return "expert layers communicate in the token dispatcher"
        for option in ("tp_comm_overlap", "delay_wgrad_compute", "symmetric_ar_type"):
            if getattr(config, option, None):
                return option
        return super().refusal()

    def fused_by(self, op: str, x: Tensor) -> Communicator | None:
        """As the function of that name."""
        layer: Any = self
        reason, strict = self.refusal(), self.strict
        return fused_by(op, x, layer.weight, layer._tp_group, reason=reason, strict=strict, layer=self.layer_name)

    def own_bias(self) -> Tensor | None:
        """The bias, None where TransformerEngine has an empty tensor."""
        layer: Any = self
        bias: Tensor | None = layer.bias if layer.use_bias else None
        return bias

    def sink(self) -> str | None:
        """Where the weight's gradient goes."""
        layer: Any = self
        return wgrad_sink(layer.config.gradient_accumulation_fusion, layer.weight)


class ColumnParallelLinear(_TEOverlapped, te.TEColumnParallelLinear):  # type: ignore[misc]
    """``TEColumnParallelLinear``, fused."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[sequence, batch, hidden] -> output, and the bias with ``skip_bias_add``."""
        found = _column(self, x)
        return super().forward(x) if found is None else found  # type: ignore[no-any-return]


class LayerNormColumnParallelLinear(_TEOverlapped, te.TELayerNormColumnParallelLinear):  # type: ignore[misc]
    """``TELayerNormColumnParallelLinear``, fused after the norm."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[sequence, batch, hidden] -> output, and the bias with ``skip_bias_add``."""
        found = _column(self, x, self._normed)
        return super().forward(x) if found is None else found  # type: ignore[no-any-return]

    def _normed(self, x: Tensor) -> Tensor:
        weight = self.layer_norm_weight
        if self.zero_centered_gamma:
            weight = weight + 1
        if self.normalization == "RMSNorm":
            return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, self.eps)
        return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, self.layer_norm_bias, self.eps)


class RowParallelLinear(_TEOverlapped, te.TERowParallelLinear):  # type: ignore[misc]
    """``TERowParallelLinear``, fused."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[sequence, batch, this rank's features] -> output, and the bias with ``skip_bias_add``."""
        if self._tp_group.size() == 1:
            return super().forward(x)  # type: ignore[no-any-return]
        op = "matmul_reduce_scatter" if self.sequence_parallel else "matmul_all_reduce"
        comm = self.fused_by(op, x)
        if comm is None:
            return super().forward(x)  # type: ignore[no-any-return]
        bias = self.own_bias()
        added = None if self.te_return_bias else bias
        with self.calling(comm):
            product = ops.matmul_reduce_scatter if self.sequence_parallel else ops.matmul_all_reduce
            y = product(x, self.weight, comm, bias=added, wgrad=self.sink())
        return y, bias if self.te_return_bias else None


def _column(layer: Any, x: Tensor, normed: Any = None) -> tuple[Tensor, Tensor | None] | None:
    """The fused forward of a column projection, or None."""
    if layer._tp_group.size() == 1:
        return None
    op = "all_gather_matmul" if layer.sequence_parallel else "column_parallel_linear"
    comm = layer.fused_by(op, x)
    if comm is None:
        return None
    bias = layer.own_bias()
    added = None if layer.te_return_bias else bias
    h = x if normed is None else normed(x)
    product: Any = ops.all_gather_matmul if layer.sequence_parallel else ops.column_parallel_linear
    with layer.calling(comm):
        y = product(h, layer.weight, comm, bias=added, wgrad=layer.sink())
    return y, bias if layer.te_return_bias else None


#: Class of Megatron -> ours.
EXCHANGES: dict[type, type] = {
    te.TEColumnParallelLinear: ColumnParallelLinear,
    te.TELayerNormColumnParallelLinear: LayerNormColumnParallelLinear,
    te.TERowParallelLinear: RowParallelLinear,
}
