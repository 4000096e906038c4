"""Hugging Face transformers: tensor-parallel models whose products overlap with their communication.

    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from commbackend.integrations.transformers import tp_plan

    config = DistributedConfig(tp_size=2, tp_plan=tp_plan("path/of/the/model"))
    model = AutoModelForCausalLM.from_pretrained("path/of/the/model", distributed_config=config)

``tp_plan`` is the model's own plan with "colwise" and "rowwise" styles exchanged for those registered here. Parameters
are sharded, loaded and saved by transformers as before. A row layer's product is fused with its all-reduce, and a
column layer's backward sums the input's gradient while it computes the weight's; q, k and v, and gate and up, share one
such sum. What cannot be fused (quantised layers, experts, packed weights, ``transport="off"``) runs as in transformers
and is counted in ``stats``.

Needs transformers 5.24 or newer: older ones have another interface for styles.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..communicator import resolve_communicator
from ..errors import ConfigError, Unavailable
from .dtensor import ColwiseLinear, RowwiseLinear, adopt, boundary_of, cannot_adopt, share_input
from .fallback import refuse
from .sharing import begin_sharing

#: The first release with the styles this module derives from.
NEEDED = (5, 24)


def _version() -> str:
    """The version that is installed. Raises Unavailable if it is none that is supported."""
    hint = f"pip install 'transformers>={NEEDED[0]}.{NEEDED[1]}' accelerate"
    try:
        found = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise Unavailable("transformers is not installed", hint) from None
    if tuple(int(part) for part in found.split(".")[:2]) < NEEDED:
        raise Unavailable(f"transformers {found} has another interface for tensor-parallel styles", hint)
    return found


_version()

import transformers  # noqa: E402 - not before its version is known
from transformers.distributed import tensor_parallel as stock  # noqa: E402
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard  # noqa: E402

__all__ = ["Block", "Colwise", "Rowwise", "tp_plan"]

_PREFIX = "commbackend_"
#: Layers of one parent that models call with the same tensor.
_SHARING = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))
#: Plans of models that come without one.
PLANS = {
    "bert": {
        "encoder.layer.*.attention.self.query": "colwise",
        "encoder.layer.*.attention.self.key": "colwise",
        "encoder.layer.*.attention.self.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    }
}


class _Fused(stock.TensorParallelLayer):  # type: ignore[misc]
    """What the styles here add to those of transformers, before which they stand in the bases of a class."""

    _into: ClassVar[type[ColwiseLinear] | type[RowwiseLinear]]

    def __init__(self, of: Any, strict: bool = False) -> None:
        layouts = {"input_layouts": of.input_layouts, "output_layouts": of.output_layouts}
        super().__init__(use_local_output=of.use_local_output, **layouts)  # type: ignore[call-arg]  # of its style
        self.strict = strict

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Exchange the module's class. Collective the first time for a group."""
        if not _takes(module, mesh, self.strict):
            return super().install_forward(module, mesh)  # type: ignore[no-any-return, no-untyped-call]
        return adopt(module, self._into, boundary_of(self))

    def stock(self, module: nn.Linear, x: Tensor) -> Any:
        """What transformers does in forward. It communicates where transformers does."""
        return _stock(self, module, x)


class Colwise(_Fused, stock.ColwiseParallel):  # type: ignore[misc]
    """The style "colwise", fused.

    Args:
        of: The style of transformers whose layouts it has.
        strict: Raise Unsupported where a layer or a call cannot be fused.
    """

    _into = ColwiseLinear


class Rowwise(_Fused, stock.RowwiseParallel):  # type: ignore[misc]
    """The style "rowwise", fused. Arguments as of ``Colwise``."""

    _into = RowwiseLinear


class Block(stock.TensorParallelLayer):  # type: ignore[misc]
    """The style of a whole decoder or encoder layer: column layers in it share their input where models do that."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Have the layers share before the first forward, when all of them have their classes."""
        module.register_forward_pre_hook(_share)
        return module


def _share(block: Any, args: Any) -> None:
    if getattr(block, "_commbackend_shares", False):
        return
    block._commbackend_shares = True
    for parent in block.modules():
        children = dict(parent.named_children())
        for names in _SHARING:
            if all(name in children for name in names) and share_input(parent, names) and parent is block:
                begin_sharing(block)  # its forward has begun


def tp_plan(model: Any, *, strict: bool = False, model_class: Any = None) -> dict[str, str]:
    """Return the overlapping form of a model's tensor-parallel plan, for ``DistributedConfig(tp_plan=...)``. Local.

    Args:
        model: A path or name as for ``from_pretrained``, a config, or a model (also one on the meta device).
        strict: Raise Unsupported, when the model is loaded or runs, where something in the plan cannot be fused.
        model_class: The class you will load, where ``model`` is a path or a config; unset: the one that the config
            names. Plans of ``LlamaModel`` and ``LlamaForCausalLM`` differ.

    Raises:
        ConfigError: There is no plan for such a model: write one with transformers' styles, as ``PLANS`` does.
    """
    whole = model if isinstance(model, nn.Module) else _empty(model, model_class)
    plan = dict(getattr(whole, "tp_plan", None) or {}) or _known(whole)
    found: dict[str, str] = {}
    for key, style in plan.items():
        name = style.stands_for if isinstance(style, StyleName) else style
        if type(ALL_PARALLEL_STYLES[name]) in (stock.ColwiseParallel, stock.RowwiseParallel):
            found[key] = _registered(name, strict)
    modules = {replace_layer_number_by_wildcard(name) for name, _ in whole.named_modules()}
    for parent, child in [key.rpartition(".")[::2] for key in found]:
        layer = parent[: parent.rfind("*") + 1]
        if layer in modules and layer not in plan and any(child in names for names in _SHARING):
            found[layer] = _registered_block()
    if not found:
        raise ConfigError(f"{type(whole).__name__}: nothing in its tensor-parallel plan {plan} can be fused")
    return found


class StyleName(str):
    """A registered style's name that equals the name it stands for too: transformers compares names, for example to
    know whether a static cache holds some of the heads or all.
    """

    stands_for: str

    def __new__(cls, name: str, stands_for: str = "") -> StyleName:
        made = super().__new__(cls, name)
        made.stands_for = stands_for
        return made

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or (isinstance(other, str) and str.__eq__(other, self.stands_for))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _registered(name: str, strict: bool) -> StyleName:
    own = f"{_PREFIX}{name}{'_strict' if strict else ''}"
    if own not in ALL_PARALLEL_STYLES:
        of = ALL_PARALLEL_STYLES[name]
        made = (Colwise if isinstance(of, stock.ColwiseParallel) else Rowwise)(of, strict)
        _register(own, made)
    return StyleName(own, name)


def _register(name: str, style: Any) -> None:
    ALL_PARALLEL_STYLES.register(name, style)


def _registered_block() -> str:
    name = f"{_PREFIX}block"
    if name not in ALL_PARALLEL_STYLES:
        _register(name, Block())
    return name


def _known(model: nn.Module) -> dict[str, str]:
    """The plan in ``PLANS`` for a model without one of its own."""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    prefix = getattr(model, "base_model_prefix", "")
    inner = f"{prefix}." if prefix and prefix in dict(model.named_children()) else ""
    return {inner + key: style for key, style in PLANS.get(kind, {}).items()}


def _empty(source: Any, model_class: Any) -> nn.Module:
    """The model of a path or config on the meta device: its plan and its modules' names."""
    config = source if hasattr(source, "model_type") else transformers.AutoConfig.from_pretrained(source)
    if model_class is None:
        names = getattr(config, "architectures", None) or []
        model_class = next((c for n in names if (c := getattr(transformers, n, None)) is not None), None)
        if model_class is None:
            raise ConfigError(f"the config names no model class that transformers has ({names}): pass model_class=")
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        made: nn.Module = build(config)
    return made


def _stock(of: Any, module: nn.Linear, x: Tensor) -> Any:
    mesh = module.weight.device_mesh  # type: ignore[attr-defined]  # a DTensor
    args, _ = of.transform_inputs_pre_forward(module, (x,), {}, mesh)
    with of.context_around_forward(module, mesh):
        y = nn.Linear.forward(module, *args)
    return of.transform_output_post_forward(module, y, mesh)


def _takes(module: nn.Module, mesh: DeviceMesh, strict: bool) -> bool:
    """Whether ``module`` is fused; counts it, or raises, if not."""
    reason = cannot_adopt(module)
    if reason is None and getattr(module, "_hf_quantized_needs_local_tp", False):
        reason = "the layer is quantised"
    if reason is not None:
        comm = resolve_communicator(mesh.get_group(), device=torch.device(mesh.device_type))
        refuse(comm, "linear", reason, strict=strict)
    return reason is None
