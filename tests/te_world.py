"""A stand-in of TransformerEngine: the classes, arguments and attributes that it documents and Megatron-Core uses, over
Megatron's own products and collectives. It knows recipes only so far as to say that it ran under one.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from serving_world import modules
from torch import Tensor, nn


class FP8GlobalStateManager:
    enabled = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype = torch.float32,
        **others: Any,
    ) -> None:
        super().__init__()
        self.sequence_parallel, self.parallel_mode = sequence_parallel and tp_size > 1, parallel_mode
        self.tp_group, self.tp_size = tp_group, tp_size
        self.use_bias, self.return_bias = bias, return_bias
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=params_dtype))
        init_method(self.weight)
        # Without a bias the attribute is an empty tensor.
        self.bias: Any = nn.Parameter(torch.zeros(self.out_features)) if bias else torch.empty(0)
        if bias and parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        self.quantised_calls, self.amax = 0, 0.0

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.amax])

    def set_extra_state(self, state: Tensor) -> None:
        self.amax = float(state[0]) if state is not None else 0.0

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core.tensor_parallel import layers, mappings

        if FP8GlobalStateManager.enabled:
            self.quantised_calls += 1
            self.amax = max(self.amax, float(x.abs().max()))
        column = self.parallel_mode == "column"
        y = layers.linear_with_grad_accumulation_and_async_allreduce(
            x,
            self.weight,
            None,
            False,
            allreduce_dgrad=column and not self.sequence_parallel and self.tp_size > 1,
            sequence_parallel=column and self.sequence_parallel,
            tp_group=self.tp_group,
        )
        if self.parallel_mode == "row" and self.sequence_parallel:
            y = mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        elif self.parallel_mode == "row":
            y = mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)
        if self.use_bias and not self.return_bias:
            y = y + self.bias
        return (y, self.bias) if self.return_bias else y


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = nn.Parameter(fill(in_features))
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features)) if normalization == "LayerNorm" else None
        for p in (self.layer_norm_weight, self.layer_norm_bias):
            if p is not None:
                p.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        weight = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        if self.normalization == "RMSNorm":
            h = nn.functional.rms_norm(x, (x.shape[-1],), weight, self.eps)
        else:
            h = nn.functional.layer_norm(x, (x.shape[-1],), weight, self.layer_norm_bias, self.eps)
        return super().forward(h, is_first_microbatch)


class _Unused(nn.Module):
    """What Megatron derives classes from that are not built here."""


def install(version: str = "1.12.0") -> None:
    """Put the stand-in among the modules: before Megatron is imported."""
    pytorch = {"Linear": Linear, "LayerNormLinear": LayerNormLinear, "LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
    pytorch |= {"DotProductAttention": _Unused, "GroupedLinear": _Unused}
    scaling = {"DelayedScaling": object, "Format": SimpleNamespace()}
    sys.modules.update(
        modules(
            {
                "transformer_engine": {"__version__": version},
                "transformer_engine.common.recipe": scaling,
                "transformer_engine.pytorch": pytorch,
                "transformer_engine.pytorch.distributed": {
                    "CudaRNGStatesTracker": object,
                    "activation_recompute_forward": None,
                },
                "transformer_engine.pytorch.cpp_extensions": {"cast_to_fp8": None},
                "transformer_engine.pytorch.fp8": {
                    "FP8GlobalStateManager": FP8GlobalStateManager,
                    "fp8_autocast": None,
                },
                "transformer_engine.pytorch.float8_tensor": {"Float8Tensor": type("Float8Tensor", (), {})},
            }
        )
    )
