"""The ops as PyTorch operators, ``torch.ops.commbackend.*``: what compilers and exported programs can hold.

Inside ``torch.compile`` the functions of ``ops`` and the layers of ``nn`` come here by themselves. Importing this
module registers the operators; a program that loads a compiled graph without calling this package imports it first.

Every operator names its group by a string: ``group_name(group)``, or a ProcessGroup's own name, whose communicator is
made on first use (collective). They are functional: nothing is written in place and no result aliases an argument or
the communicator's memory. So a compiler may drop a call whose result nobody uses and merge equal ones; it does the
same on all ranks, since all ranks compile the same program. Gradients are operators too, and are not differentiable
again. Sizes may be symbolic. ``weights`` are (out features, in features); ``biases`` is empty or has one entry a
weight.

The real kernels call ``ops``, so that checks, choices, counters and results are the same compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..communicator import resolve_communicator
from ..ops.operands import lower
from . import gradients as grads
from . import kernels as kernels

__all__ = ["OPERATORS", "group_name"]

_library = torch.library.Library("commbackend", "DEF")


def group_name(group: Any = None, *, device: torch.device | None = None) -> str:
    """Return the name of ``group``'s communicator for these operators, connecting it on the first call. Collective
    then, local afterwards.

    Args:
        group: As for all ops.
        device: Where tensors live; default: cuda if torch has a device, else cpu.
    """
    return resolve_communicator(group, device=device).op_name


# -- registration -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """One operator: its arguments and results, real and fake kernel, and gradient. ``cast``: autocast applies."""

    name: str
    schema: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    setup: Callable[..., None] | None = None
    backward: Callable[..., Any] = grads.refuse
    cast: bool = False

    def register(self) -> None:
        qualified = f"commbackend::{self.name}"
        _library.define(self.name + self.schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(qualified, self.fake, lib=_library)
        torch.library.register_autograd(qualified, self.backward, setup_context=self.setup, lib=_library)
        for device_type in ("cpu", "cuda"):
            _library.impl(self.name, self.kernel, device_type.upper())
            if self.cast:
                _library.impl(self.name, self._under_autocast(device_type), f"Autocast{device_type.upper()}")

    def _under_autocast(self, device_type: str) -> Callable[..., Any]:
        """Operands become what autocast makes of those of ``linear``; results and gradients follow."""
        key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))

        def cast(arg: Any, dtype: torch.dtype) -> Any:
            if isinstance(arg, (list, tuple)):
                return [cast(a, dtype) for a in arg]
            return lower(arg, dtype) if isinstance(arg, Tensor) else arg

        def kernel(*args: Any, **where: Any) -> Any:
            dtype = torch.get_autocast_dtype(device_type)
            with torch._C._ExcludeDispatchKeyGuard(key):
                return getattr(torch.ops.commbackend, self.name)(*(cast(a, dtype) for a in args), **where)

        return kernel


_WHERE = "str group_name, *, int dim=0, SymInt[]? rows=None"

#: All operators.
OPERATORS = (
    Operator(
        "all_gather",
        f"(Tensor x, {_WHERE}) -> Tensor",
        kernels.all_gather,
        kernels.all_gather_fake,
        grads.collective_setup,
        grads.all_gather_backward,
    ),
    Operator(
        "reduce_scatter",
        f"(Tensor x, {_WHERE}) -> Tensor",
        kernels.reduce_scatter,
        kernels.reduce_scatter_fake,
        grads.collective_setup,
        grads.reduce_scatter_backward,
    ),
    Operator(
        "all_reduce",
        "(Tensor x, str group_name) -> Tensor",
        kernels.all_reduce,
        kernels.all_reduce_fake,
        None,
        grads.all_reduce_backward,
    ),
    # Products; with one of the flags, the gathered x comes last.
    Operator(
        "all_gather_matmul",
        f"(Tensor x, Tensor[] weights, Tensor[] biases, {_WHERE}, bool return_gathered=False,"
        " bool save_gathered=False) -> Tensor[]",
        kernels.all_gather_matmul,
        kernels.all_gather_matmul_fake,
        grads.all_gather_matmul_setup,
        grads.all_gather_matmul_backward,
        cast=True,
    ),
    Operator(
        "matmul_reduce_scatter",
        f"(Tensor x, Tensor weight, Tensor? bias, {_WHERE}) -> Tensor",
        kernels.matmul_reduce_scatter,
        kernels.matmul_reduce_scatter_fake,
        grads.matmul_reduce_scatter_setup,
        grads.matmul_reduce_scatter_backward,
        cast=True,
    ),
    Operator(
        "matmul_all_reduce",
        "(Tensor x, Tensor weight, Tensor? bias, str group_name, Tensor? residual=None) -> Tensor",
        kernels.matmul_all_reduce,
        kernels.matmul_all_reduce_fake,
        grads.matmul_all_reduce_setup,
        grads.matmul_all_reduce_backward,
        cast=True,
    ),
    Operator(
        "column_parallel_linear",
        "(Tensor x, Tensor[] weights, Tensor[] biases, str group_name) -> Tensor[]",
        kernels.column_parallel_linear,
        kernels.column_parallel_linear_fake,
        grads.column_parallel_linear_setup,
        grads.column_parallel_linear_backward,
        cast=True,
    ),
    # For inference: (norm of the sum, sum), and fp8 operands with scales.
    Operator(
        "matmul_all_reduce_norm",
        "(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor norm_weight, str group_name,"
        " float eps=1e-6, Tensor? scale_a=None, Tensor? scale_b=None, ScalarType? out_dtype=None) -> (Tensor, Tensor)",
        kernels.matmul_all_reduce_norm,
        kernels.matmul_all_reduce_norm_fake,
        cast=True,
    ),
    Operator(
        "all_gather_scaled_matmul",
        "(Tensor x, Tensor[] weights, Tensor scale_a, Tensor[] scale_b, Tensor[] biases, "
        f"{_WHERE}, bool return_gathered=False, ScalarType? out_dtype=None) -> Tensor[]",
        kernels.all_gather_scaled_matmul,
        kernels.all_gather_scaled_matmul_fake,
    ),
    Operator(
        "scaled_matmul_reduce_scatter",
        "(Tensor x, Tensor weight, Tensor scale_a, Tensor scale_b, Tensor? bias, "
        f"{_WHERE}, ScalarType? out_dtype=None) -> Tensor",
        kernels.scaled_matmul_reduce_scatter,
        kernels.scaled_matmul_reduce_scatter_fake,
    ),
    Operator(
        "scaled_matmul_all_reduce",
        "(Tensor x, Tensor weight, Tensor scale_a, Tensor scale_b, Tensor? bias, str group_name,"
        " Tensor? residual=None, ScalarType? out_dtype=None) -> Tensor",
        kernels.scaled_matmul_all_reduce,
        kernels.scaled_matmul_all_reduce_fake,
    ),
    # Gradients: first the input's, if the weights are given; then those of the wanted weights.
    Operator(
        "dgrad_reduce_scatter",
        "(Tensor[] grads, Tensor[] weights, Tensor? x, bool[] wanted, str group_name, int dim, SymInt[]? rows,"
        " bool gathered) -> Tensor[]",
        kernels.dgrad_reduce_scatter,
        kernels.dgrad_reduce_scatter_fake,
    ),
    Operator(
        "dgrad_all_reduce",
        "(Tensor[] grads, Tensor[] weights, Tensor? x, bool[] wanted, str group_name) -> Tensor[]",
        kernels.dgrad_all_reduce,
        kernels.dgrad_all_reduce_fake,
    ),
    # Of matmul_reduce_scatter: the input's if the weight is given, then the weight's if the input is.
    Operator(
        "gather_grads",
        "(Tensor grad, Tensor? x, Tensor? weight, str group_name, int dim, SymInt[]? rows) -> Tensor[]",
        kernels.gather_grads,
        kernels.gather_grads_fake,
    ),
)

for _operator in OPERATORS:
    _operator.register()
