"""Megatron-Core: transformer layers whose projections overlap with their tensor-parallel communication.

    pretrain_gpt.py ... --spec commbackend.integrations.megatron local_spec          # or te_spec

or in a program, for any model that takes a spec:

    from commbackend.integrations.megatron import layer_spec, overlapped
    GPTModel(config, transformer_layer_spec=layer_spec("local", qk_layernorm=True), ...)
    overlapped(my_own_spec)                                   # any spec: exchanges the projections' classes

Tried with megatron-core 0.16.1. Qkv, attention output, fc1 and fc2 become subclasses of the projections they replace:
constructors, parameters, their attributes, ``state_dict`` keys and ``sharded_state_dict`` are inherited, so checkpoints
go back and forth. Fused are, with sequence parallelism, gather + GEMM and GEMM + scatter, and without it GEMM +
all-reduce; backward passes too. Whatever cannot be fused runs as in Megatron, and ``commbackend.stats`` counts it with
the reason (``fallback``); a tensor-parallel group of one rank has nothing to fuse and is not counted.

* Weight gradients go where Megatron wants them: into ``main_grad``, with its flags, under
  ``gradient_accumulation_fusion`` (rounded to the weight's type before they are added, which APEX's kernel does not
  do), else to autograd.
* Row biases are added after the reduction, or handed back with ``skip_bias_add``. Their gradients are not reduced here:
  ``finalize_model_grads`` does it.
* A tp-comm-overlap YAML is read with ``layer_spec(..., overlap_cfg=path)`` or ``COMMBACKEND_TP_COMM_OVERLAP_CFG``; see
  ``te_config``. Leave ``--tp-comm-overlap`` itself out, which starts TransformerEngine's own overlap.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..communicator import Communicator
from ..errors import ConfigError, Unavailable
from . import te_config
from .fallback import fused_by

try:
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import layers as stock
except ImportError as e:
    raise Unavailable(f"commbackend.integrations.megatron needs megatron-core: {e}", "pip install megatron-core") from e

__all__ = [
    "ColumnParallelLinear",
    "OverlapSpecProvider",
    "RowParallelLinear",
    "layer_spec",
    "local_rmsnorm_spec",
    "local_spec",
    "overlap_model",
    "overlapped",
]

# Communicator -> the overlap configurations it was told.
_told: weakref.WeakKeyDictionary[Communicator, set[te_config.OverlapConfig]] = weakref.WeakKeyDictionary()
_files: dict[str, te_config.OverlapConfig] = {}


class Overlapped:
    """What the projections here add to Megatron's.

    Attributes:
        strict: Raise Unsupported where a call cannot be fused.
        overlap_config: Wishes by layer name, or None: those of ``COMMBACKEND_TP_COMM_OVERLAP_CFG``.
        layer_name: Under which its calls are configured and traced: Megatron's buffer name (qkv, proj, fc1, fc2).
    """

    strict = False
    overlap_config: te_config.OverlapConfig | None = None
    layer_name = ""

    def refusal(self) -> str | None:
        """Why Megatron's options keep this layer stock, or None. Local, equal on all ranks."""
        config: Any = self.config  # type: ignore[attr-defined]
        if getattr(config, "deterministic_mode", False):
            return "deterministic_mode"
        if getattr(config, "batch_invariant_mode", False):
            return "batch_invariant_mode"
        offloading = getattr(config, "_cpu_offloading_context", None)
        if offloading is not None and offloading.inside_context:
            return "cpu_offloading"
        return None

    def calling(self, comm: Communicator) -> AbstractContextManager[None]:
        """Around a fused call: it has this layer's name, and the communicator knows the wishes for it."""
        config = self.overlap_config
        if config is None and comm.config.tp_comm_overlap_cfg:
            config = _read(comm.config.tp_comm_overlap_cfg)
        if config is not None and config not in (told := _told.setdefault(comm, set())):
            config.apply(comm)
            told.add(config)
        return comm.layer(self.layer_name)


class ColumnParallelLinear(Overlapped, stock.ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's ``ColumnParallelLinear``, fused: ``all_gather_matmul`` with sequence parallelism, else
    ``column_parallel_linear``, whose backward sums the input's gradient.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.layer_name = kwargs.get("tp_comm_buffer_name") or ""
        super().__init__(*args, **kwargs)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Megatron passes everything by keyword; what is new in a later release is passed on, or refused.
        if args or self.tp_group.size() == 1:
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[no-any-return]
        gathers, sums = kwargs["sequence_parallel"], kwargs["allreduce_dgrad"]
        op = "all_gather_matmul" if gathers else "column_parallel_linear"
        reason = self._refusal_of(input, kwargs) or (None if gathers or sums else "no communication in this layer")
        comm = fused_by(op, input, weight, self.tp_group, reason=reason, strict=self.strict, layer=self.layer_name)
        if comm is None:
            return super()._forward_impl(input, weight, **kwargs)  # type: ignore[no-any-return]
        bias, wgrad = kwargs["bias"], wgrad_sink(kwargs["gradient_accumulation_fusion"], weight)
        with self.calling(comm):
            if gathers:
                gathered: Tensor = ops.all_gather_matmul(input, weight, comm, bias=bias, wgrad=wgrad)
                return gathered
            return ops.column_parallel_linear(input, weight, comm, bias=bias, wgrad=wgrad)

    def _refusal_of(self, input: Tensor, kwargs: Mapping[str, Any]) -> str | None:
        if self.explicit_expert_comm:
            return "expert layers communicate in the token dispatcher"
        if kwargs.get("grad_output_buffer") is not None:
            return "defer_embedding_wgrad_compute"
        if (kwargs.get("gtp_remat_size") or 1) > 1:
            return "gtp_remat_size"
        if kwargs.get("output_dtype") not in (None, input.dtype):
            return "output_dtype"
        if self.gather_output:
            return "gather_output"
        return self.refusal() or _recipe(self.config)


class RowParallelLinear(Overlapped, stock.RowParallelLinear):  # type: ignore[misc]
    """Megatron's ``RowParallelLinear``, fused: ``matmul_reduce_scatter`` with sequence parallelism, else
    ``matmul_all_reduce``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.layer_name = kwargs.get("tp_comm_buffer_name") or ""
        super().__init__(*args, **kwargs)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[sequence, batch, this rank's features] -> output, and the bias with ``skip_bias_add``."""
        stock_forward = super().forward
        if self.tp_group.size() == 1:
            return stock_forward(input_)  # type: ignore[no-any-return]
        op = "matmul_reduce_scatter" if self.sequence_parallel else "matmul_all_reduce"
        reason = "expert layers communicate in the token dispatcher" if self.explicit_expert_comm else self.refusal()
        if not self.input_is_parallel:
            reason = reason or "input_is_parallel=False"
        reason = reason or _recipe(self.config)
        comm = fused_by(
            op, input_, self.weight, self.tp_group, reason=reason, strict=self.strict, layer=self.layer_name
        )
        if comm is None:
            return stock_forward(input_)  # type: ignore[no-any-return]
        bias = None if self.skip_bias_add else self.bias
        wgrad = wgrad_sink(self.gradient_accumulation_fusion, self.weight)
        with self.calling(comm):
            if self.sequence_parallel:
                y = ops.matmul_reduce_scatter(input_, self.weight, comm, bias=bias, wgrad=wgrad)
            else:
                y = ops.matmul_all_reduce(input_, self.weight, comm, bias=bias, wgrad=wgrad)
        return y, self.bias if self.skip_bias_add else None


class OverlapSpecProvider(LocalSpecProvider):  # type: ignore[misc]
    """Megatron's local ``BackendSpecProvider`` with the projections of this module, for builders that take one, such
    as ``get_mlp_module_spec_for_backend(backend=OverlapSpecProvider())``.
    """

    def column_parallel_linear(self) -> type:
        """Megatron's."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Megatron's."""
        return RowParallelLinear


# -- specs ------------------------------------------------------------------------------------------------------------
def layer_spec(
    base: str = "local",
    *,
    strict: bool = False,
    overlap_cfg: str | Path | te_config.OverlapConfig | None = None,
    **options: Any,
) -> Any:
    """Return a ``ModuleSpec`` of a GPT layer whose projections overlap. Local.

    Args:
        base: "local": ``get_gpt_layer_local_spec``; "te": ``get_gpt_layer_with_transformer_engine_spec``, whose layers
            stay TransformerEngine's under fp8 and fp4 recipes.
        strict: The layers raise Unsupported where a call cannot be fused.
        overlap_cfg: A tp-comm-overlap YAML file, or one that was read.
        **options: Of Megatron's function: num_experts, qk_layernorm, normalization, ...

    Raises:
        ConfigError: ``base`` is unknown, or the file cannot be honoured.
        Unavailable: ``base="te"`` without TransformerEngine.
    """
    if base == "local":
        return overlapped(gpt_layer_specs.get_gpt_layer_local_spec(**options), strict=strict, overlap_cfg=overlap_cfg)
    if base != "te":
        raise ConfigError(f"layer_spec: base={base!r}: 'local' or 'te' is needed")
    if not HAVE_TE:
        raise Unavailable("layer_spec(base='te') needs TransformerEngine", "use base='local'")
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**options)
    return overlapped(spec, strict=strict, overlap_cfg=overlap_cfg)


def overlapped(
    spec: Any, *, strict: bool = False, overlap_cfg: str | Path | te_config.OverlapConfig | None = None
) -> Any:
    """Return a copy of ``spec`` in which Megatron's own projections are those of this module. Local.

    Subclasses of them, and everything else, stay.

    Args:
        spec: A ModuleSpec, a dataclass of submodules (``TransformerBlockSubmodules``), or a list of such.
        strict, overlap_cfg: As for ``layer_spec``.
    """
    config = _read(overlap_cfg) if isinstance(overlap_cfg, (str, Path)) else overlap_cfg
    classes = {old: _with(new, strict, config) for old, new in _exchanges().items()}
    return _exchange(spec, classes)


def overlap_model(
    model: torch.nn.Module,
    *,
    strict: bool = False,
    overlap_cfg: str | Path | te_config.OverlapConfig | None = None,
) -> int:
    """Exchange the classes of Megatron's own projections in a model that is built, output layer included. Local.

    For models whose spec is out of reach. Modules stay the objects they are, with their parameters and hooks.

    Returns:
        How many were exchanged.
    """
    config = _read(overlap_cfg) if isinstance(overlap_cfg, (str, Path)) else overlap_cfg
    classes = {old: _with(new, strict, config) for old, new in _exchanges().items()}
    count = 0
    for path, module in model.named_modules():
        into = classes.get(type(module))
        if into is not None:
            module.__class__ = into
            module.layer_name = path.rpartition(".")[2].removeprefix("linear_")
            count += 1
    return count


def _exchanges() -> dict[type, type]:
    """Stock class -> ours."""
    found: dict[type, type] = {
        stock.ColumnParallelLinear: ColumnParallelLinear,
        stock.RowParallelLinear: RowParallelLinear,
    }
    if HAVE_TE:
        from .megatron_te import EXCHANGES

        found |= EXCHANGES
    return found


def _with(cls: type, strict: bool, config: te_config.OverlapConfig | None) -> type:
    if not strict and config is None:
        return cls
    # A class, since builders of specs take no arguments for a projection.
    return type(cls.__name__, (cls,), {"strict": strict, "overlap_config": config, "__module__": cls.__module__})


def _exchange(spec: Any, classes: Mapping[type, type]) -> Any:
    if isinstance(spec, type):
        return classes.get(spec, spec)
    if isinstance(spec, (list, tuple)):
        return type(spec)(_exchange(s, classes) for s in spec)
    if dataclasses.is_dataclass(spec):
        made = copy.copy(spec)
        for f in dataclasses.fields(spec):
            object.__setattr__(made, f.name, _exchange(getattr(spec, f.name), classes))
        return made
    if hasattr(spec, "func") and hasattr(spec, "keywords"):  # functools.partial, which later releases build specs of
        keywords = {name: _exchange(value, classes) for name, value in spec.keywords.items()}
        return type(spec)(_exchange(spec.func, classes), *(_exchange(a, classes) for a in spec.args), **keywords)
    return spec


def _read(path: str | Path) -> te_config.OverlapConfig:
    key = str(path)
    if key not in _files:
        _files[key] = te_config.load(path)
    return _files[key]


# -- Megatron's options -----------------------------------------------------------------------------------------------
def wgrad_sink(fusion: bool, weight: Tensor) -> str | None:
    """Where the weight's gradient goes under ``gradient_accumulation_fusion``, as the argument ``wgrad`` of the ops.

    To autograd before a wrapper has given the weight a ``main_grad``, and under Megatron-FSDP, whose buffer is to be
    overwritten: its hook copies the gradient there.
    """
    fsdp = getattr(weight, "__fsdp_param__", False)
    return "main_grad" if fusion and weight.requires_grad and hasattr(weight, "main_grad") and not fsdp else None


def _recipe(config: Any) -> str | None:
    """Local projections know no recipe: Megatron runs them unquantised, and so do we, counted."""
    for name in ("fp8", "fp4"):
        if getattr(config, name, None):
            return f"{name} recipe (local projections do not quantise)"
    return None


#: For ``--spec commbackend.integrations.megatron NAME``: Megatron looks NAME up among this module's globals.
local_spec = layer_spec("local")
local_rmsnorm_spec = layer_spec("local", normalization="RMSNorm")
if HAVE_TE:
    te_spec = layer_spec("te")
    te_qk_layernorm_spec = layer_spec("te", qk_layernorm=True)
