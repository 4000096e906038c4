"""An SGLang plugin: row-parallel layers as one overlapped GEMM + all-reduce.

SGLang finds it by its entry point (group ``sglang.srt.plugins``) wherever commbackend is installed, and it does nothing
unless ``COMMBACKEND_SERVE`` is on. Then ``RowParallelLinear.forward`` is wrapped through SGLang's hooks. The original
runs wherever it would do more than multiply and sum: quantised layers, sums made outside the layer
(``reduce_results=False``, ``skip_all_reduce``: many of SGLang's), a given output tensor, attention groups, sequence
parallelism, symmetric-memory and quantised communication. What a layer's construction decides is counted by
``commbackend.stats``, once a layer.

Written against SGLang 0.5.23 as read (``HookRegistry``, ``RowParallelLinear``) and tested against a stand-in of it; not
run with SGLang.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..config import resolve

__all__ = ["register"]

log = logging.getLogger("commbackend")

_LAYER = "sglang.srt.layers.linear.RowParallelLinear"
#: Options of the server under which the original does more than sum, or sums in a way of its own.
_OPTIONS = ("enable_symm_mem", "enable_dp_attention", "enable_quant_communications")
_registered = False


def register() -> None:
    """The entry point. Local; may be called any number of times, in any process."""
    global _registered
    if _registered or not resolve().serve:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_LAYER}.__init__", _made, HookType.AROUND)
    HookRegistry.register(f"{_LAYER}.forward", _forward, HookType.AROUND)
    _registered = True
    log.info("commbackend: SGLang's RowParallelLinear runs overlapped")


def _made(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``__init__``: decide for the layer, and connect."""
    original(self, *args, **kwargs)
    self._commbackend_group = ""
    if self.tp_size == 1:
        return
    from sglang.srt.distributed import get_tp_group
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.server_args import get_global_server_args

    from .serving import prepare, unsupported_layer

    server = get_global_server_args()
    reason = unsupported_layer(
        getattr(self, "weight", None),
        unquantized=type(self.quant_method) is UnquantizedLinearMethod,
        reduces=self.reduce_results,
        parallel_input=self.input_is_parallel,
    )
    group = get_tp_group()
    if self.tp_size != group.world_size or getattr(self, "use_dp_attention_reduce", False):
        reason = reason or "the layer's group is not the tensor-parallel group"
    reason = reason or next((option for option in _OPTIONS if getattr(server, option, False)), None)
    self._commbackend_group = prepare(
        group.device_group,
        next(self.parameters()),
        reason,
        tokens=server.chunked_prefill_size if server.chunked_prefill_size > 0 else server.max_prefill_tokens,
        capture=not server.disable_cuda_graph,
    )


def _forward(original: Callable[..., Any], self: Any, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Around ``forward(input_, skip_all_reduce=False, forward_batch=None, output_tensor=None)``."""
    names = ("skip_all_reduce", "forward_batch", "output_tensor")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    plain = not given.get("skip_all_reduce") and given.get("output_tensor") is None
    if not self._commbackend_group or not plain or set(given) - set(names) or _sequence_parallel():
        return original(self, input_, *args, **kwargs)
    from .serving import run

    # Once, after the sum, on all ranks; SGLang has rank 0 add it before.
    bias = None if self.skip_bias_add else self.bias
    return run(input_, self.weight, bias, self._commbackend_group), self.bias if self.skip_bias_add else None


def _sequence_parallel() -> bool:
    """Whether the running forward has activations sharded along tokens: the original then scatters."""
    try:
        from sglang.srt.runtime_context import get_forward
    except ImportError:
        return False  # releases before that have no such branch
    return bool(getattr(get_forward(), "sp_active", False))
