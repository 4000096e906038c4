"""A vLLM plugin: row-parallel layers as one overlapped GEMM + all-reduce.

vLLM finds it by its entry point (group ``vllm.general_plugins``) wherever commbackend is installed, and it does nothing
unless ``COMMBACKEND_SERVE`` is on. Then ``RowParallelLinear`` is replaced through vLLM's registry of pluggable layers,
in every process of the server. Layers that are quantised, or whose sum is made elsewhere, keep vLLM's forward, and
``commbackend.stats`` counts them, once a layer.

Written against vLLM 0.33.0 as read (``PluggableLayer.register_oot``, ``RowParallelLinear``, ``get_tp_group``,
``get_current_vllm_config``) and tested against a stand-in of it; not run with vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from ..config import resolve
from ..errors import ConfigError

__all__ = ["register"]

log = logging.getLogger("commbackend")

_LAYER = "RowParallelLinear"


def register() -> None:
    """The entry point. Local; may be called any number of times, in any process.

    Raises:
        ConfigError: Another plugin has replaced the layer already.
    """
    if not resolve().serve:
        return
    from vllm.model_executor import custom_op

    taken = custom_op.op_registry_oot.get(_LAYER)
    if taken is None:
        custom_op.PluggableLayer.register_oot(_row_parallel_linear(), name=_LAYER)
        log.info("commbackend: vLLM's %s runs overlapped", _LAYER)
    elif taken.__module__ != __name__:
        raise ConfigError(
            f"COMMBACKEND_SERVE is on, but vLLM's {_LAYER} was replaced by {taken.__module__}.{taken.__qualname__}"
            " already: VLLM_PLUGINS chooses which plugins are loaded"
        )


def _row_parallel_linear() -> type:
    """The replacement; vLLM is imported only now that it is wanted."""
    from vllm.config import get_current_vllm_config
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers import linear

    from .serving import prepare, run, unsupported_layer

    class OverlappedRowParallelLinear(linear.RowParallelLinear):  # type: ignore[misc]
        """vLLM's ``RowParallelLinear`` with ``matmul_all_reduce``."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.commbackend_group = ""
            if self.tp_size == 1:
                return
            config = get_current_vllm_config()
            reason = unsupported_layer(
                getattr(self, "weight", None),
                unquantized=type(self.quant_method) is linear.UnquantizedLinearMethod,
                reduces=self.reduce_results,
                parallel_input=self.input_is_parallel,
            )
            self.commbackend_group = prepare(
                get_tp_group().device_group,
                next(self.parameters()),
                reason,
                tokens=config.scheduler_config.max_num_batched_tokens,
                capture=not config.model_config.enforce_eager,
            )

        def forward(self, input_: Tensor) -> Any:
            if not self.commbackend_group:
                return super().forward(input_)
            # Once, after the sum, on all ranks; vLLM has rank 0 add it before.
            bias = None if self.skip_bias_add else self.bias
            output = run(input_, self.weight, bias, self.commbackend_group)
            if not self.return_bias:
                return output
            return output, self.bias if self.skip_bias_add else None

    OverlappedRowParallelLinear.__module__ = __name__
    return OverlappedRowParallelLinear
