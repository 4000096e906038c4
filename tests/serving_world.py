"""Stand-ins of the parts of vLLM and SGLang that the plugins touch, and the layer both have: a row-parallel linear."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class QuantizedLinearMethod(UnquantizedLinearMethod):
    pass


class RowParallel(nn.Module):
    """As both frameworks have it: the bias is added by rank 0, before the sum."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        reduce_results: bool = True,
        quantized: bool = False,
        return_bias: bool = True,
        tp_size: int | None = None,
    ) -> None:
        super().__init__()
        self.tp_size = dist.get_world_size() if tp_size is None else tp_size
        self.tp_rank = dist.get_rank() if self.tp_size > 1 else 0
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.reduce_results, self.return_bias = reduce_results, return_bias
        self.quant_method = QuantizedLinearMethod() if quantized else UnquantizedLinearMethod()
        full = torch.randn(output_size, input_size, generator=torch.Generator().manual_seed(4))
        self.weight = nn.Parameter(full.chunk(self.tp_size, 1)[self.tp_rank].contiguous(), requires_grad=False)
        self.bias = nn.Parameter(torch.arange(float(output_size)), requires_grad=False) if bias else None

    def forward(self, input_: Tensor, skip_all_reduce: bool = False, **options: Any) -> Any:
        x = input_ if self.input_is_parallel else input_.chunk(self.tp_size, -1)[self.tp_rank].contiguous()
        y = self.quant_method.apply(self, x, None if self.tp_rank > 0 or self.skip_bias_add else self.bias)
        if self.reduce_results and self.tp_size > 1 and not skip_all_reduce:
            dist.all_reduce(y)
        return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y


def modules(tree: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    """Modules by dotted name, with their packages."""
    made: dict[str, ModuleType] = {}
    for name, contents in tree.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        vars(made[name]).update(contents)
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    return made


def vllm(*, enforce_eager: bool = True) -> dict[str, ModuleType]:
    """A vLLM: its registry of pluggable layers, its layer, its configuration and group."""
    registry: dict[str, type] = {}

    class PluggableLayer(nn.Module):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(registry.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, layer_cls: type, name: str) -> type:
            assert name not in registry, f"Duplicate layer name: {name}"
            registry[name] = layer_cls
            return layer_cls

    class RowParallelLinear(RowParallel, PluggableLayer):
        pass

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=4096),
        model_config=SimpleNamespace(enforce_eager=enforce_eager),
    )
    return modules(
        {
            "vllm.config": {"get_current_vllm_config": lambda: config},
            "vllm.distributed": {"get_tp_group": lambda: SimpleNamespace(device_group=dist.group.WORLD)},
            "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer, "op_registry_oot": registry},
            "vllm.model_executor.layers.linear": {
                "RowParallelLinear": RowParallelLinear,
                "UnquantizedLinearMethod": UnquantizedLinearMethod,
            },
        }
    )


class HookType(Enum):
    AROUND = "around"


def sglang(**server: Any) -> dict[str, ModuleType]:
    """An SGLang: its hooks, which ``apply_hooks`` puts in place, its layer, its arguments and group."""
    hooks: list[tuple[str, Any]] = []

    class HookRegistry:
        @classmethod
        def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
            assert hook_type is HookType.AROUND
            hooks.append((target, hook))

        @classmethod
        def apply_hooks(cls) -> None:
            for target, hook in hooks:
                owner, _, name = target.rpartition(".")
                module, _, class_name = owner.rpartition(".")
                layer = getattr(sys.modules[module], class_name)
                setattr(layer, name, _around(getattr(layer, name), hook))

    class RowParallelLinear(RowParallel):
        pass

    given = {"chunked_prefill_size": 64, "max_prefill_tokens": 64, "disable_cuda_graph": True, **server}
    group = SimpleNamespace(device_group=dist.group.WORLD, world_size=2)
    forward = SimpleNamespace(sp_active=False)
    return modules(
        {
            "sglang.srt.distributed": {"get_tp_group": lambda: group},
            "sglang.srt.layers.linear": {"RowParallelLinear": RowParallelLinear},
            "sglang.srt.layers.quantization.unquant": {"UnquantizedLinearMethod": UnquantizedLinearMethod},
            "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
            "sglang.srt.runtime_context": {"get_forward": lambda: forward},
            "sglang.srt.server_args": {"get_global_server_args": lambda: SimpleNamespace(**given)},
        }
    )


def _around(original: Any, hook: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapped
