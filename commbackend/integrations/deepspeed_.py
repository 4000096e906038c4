"""DeepSpeed AutoTP: its row layers' GEMM + all-reduce, and its column layers' backward, overlapped.

    from commbackend.integrations.deepspeed_ import overlapped

    with overlapped():
        engine, *_ = deepspeed.initialize(model=model, config={"tensor_parallel": {"autotp_size": 2}, ...})

AutoTP has no registry for the layers it builds, so ``overlapped`` rebinds, while its body runs, the layer classes that
``deepspeed.module_inject.auto_tp`` names: to subclasses, which keep partitioning, checkpoints and ``isinstance``.
Layers built within stay overlapped afterwards. Only classes whose forward is DeepSpeed's plain one are exchanged;
others (output heads, convolutions, ...) are left alone. Tried with the versions in ``VERSIONS``; others are refused.

Activations are replicated in AutoTP, so row layers are ``matmul_all_reduce`` and column layers
``column_parallel_linear``, whose backward sums the input's gradient while it computes the weight's (``tp_overlap_comm``
is not needed for it). ZeRO owns the gradients, as always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .. import ops
from ..communicator import Communicator
from ..errors import Unavailable
from .fallback import fused_by

__all__ = ["VERSIONS", "overlapped"]

#: Versions of DeepSpeed whose layers were tried.
VERSIONS = ("0.19.8",)


class _Overlapped:
    """What the exchanged layers share."""

    strict = False

    def _refusal(self) -> str | None:
        layer: Any = self
        return "DeepCompile places the collectives" if layer.defer_collectives_to_compiler else None

    def _fused_by(self, op: str, x: Tensor) -> Communicator | None:
        layer: Any = self
        if layer.mp_group is None or layer.mp_group.size() == 1:
            return None
        return fused_by(
            op, x, layer.weight, layer.mp_group, reason=self._refusal(), strict=self.strict, layer=layer.name or ""
        )


class _Row(_Overlapped):
    """Before ``LinearAllreduce`` in the bases of a class."""

    def forward(self, input: Tensor) -> Any:
        layer: Any = self
        comm = self._fused_by("matmul_all_reduce", input)
        if comm is None:
            return super().forward(input)  # type: ignore[misc]
        return ops.matmul_all_reduce(input, layer.weight, comm, bias=layer.bias)


class _Column(_Overlapped):
    """Before ``LinearLayer`` in the bases of a class; ``gather`` is DeepSpeed's gather of outputs."""

    gather: Any

    def forward(self, input: Tensor) -> Any:
        layer: Any = self
        comm = self._fused_by("column_parallel_linear", input)
        if comm is None:
            return super().forward(input)  # type: ignore[misc]
        out = ops.column_parallel_linear(input, layer.weight, comm, bias=layer.bias)
        return self.gather(layer.mp_group, out, layer._partition_sizes) if layer.gather_output else out


@contextlib.contextmanager
def overlapped(*, strict: bool = False) -> Iterator[tuple[str, ...]]:
    """AutoTP builds overlapped layers within. Local; yields the names of the classes that are exchanged.

    Args:
        strict: The layers raise Unsupported where a call cannot be fused.

    Raises:
        Unavailable: DeepSpeed is not installed, or of a version that was not tried.
    """
    try:
        import deepspeed
        from deepspeed.module_inject import auto_tp, layers
    except ImportError as e:
        raise Unavailable(f"commbackend.integrations.deepspeed_ needs DeepSpeed: {e}", "pip install deepspeed") from e
    version = str(deepspeed.__version__).partition("+")[0]
    if version not in VERSIONS:
        raise Unavailable(
            f"DeepSpeed {version}: its layers were not tried here, only those of {', '.join(VERSIONS)}",
            f"pip install deepspeed=={VERSIONS[-1]}",
        )
    shared = {"strict": strict, "__module__": __name__}
    gather = {"gather": staticmethod(layers.GatherFromTensorParallelRegion.apply)}
    before: dict[str, tuple[type, type]] = {}
    for name, cls in vars(auto_tp).items():
        for base, mixin, more in ((layers.LinearAllreduce, _Row, {}), (layers.LinearLayer, _Column, gather)):
            if (
                isinstance(cls, type)
                and issubclass(cls, base)
                and vars(cls).get("forward", base.forward) is base.forward
            ):
                before[name] = (cls, type(cls.__name__, (mixin, cls), {**shared, **more}))
    try:
        for name, (_, ours) in before.items():
            setattr(auto_tp, name, ours)
        yield tuple(before)
    finally:
        for name, (stock, _) in before.items():
            setattr(auto_tp, name, stock)
