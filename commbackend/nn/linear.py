"""The linear layers of ``nn``, and how full weights get into them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, overload

import torch
from torch import Tensor, nn

from .. import ops
from ..communicator import Communicator, resolve_communicator
from ..errors import ConfigError, ShapeError
from ..ops.gradients import WgradSink

__all__ = [
    "ColumnParallelLinear",
    "Marked",
    "ParallelModule",
    "RowParallelLinear",
    "Shared",
    "column_parallel",
    "load_full",
    "mark",
]


class Shared:
    """Holds the communicator of a module: copies of the module share it."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


class Marked(nn.Module):
    """A module whose own parameters carry attributes, also after ``deepcopy`` and ``to_empty``, which make new ones."""

    def _mark(self) -> None:
        raise AssertionError(f"{type(self).__name__} says how its parameters are marked")

    def mark_again(self) -> None:
        """Mark parameters that a wrapper such as FSDP2 has put in the place of those that were marked. Local."""
        if any(not hasattr(p, "partition_dim") for p in self.parameters(recurse=False)):
            self._mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()
        return self


def mark(parameter: nn.Parameter | None, partition_dim: int, sequence_parallel: bool = False) -> None:
    if parameter is not None:
        marks = {"tensor_model_parallel": partition_dim >= 0, "partition_dim": partition_dim, "partition_stride": 1}
        for name, value in {**marks, "sequence_parallel": sequence_parallel}.items():
            setattr(parameter, name, value)


class ParallelModule(nn.Module):
    """What all modules here offer: their communicator, and loading from full weights."""

    def __init__(self, group: Any, device: torch.device | str | None = None) -> None:
        super().__init__()
        # On the meta device a module is made for some other one, as it is without a device.
        where = torch.device(device) if device is not None else None
        self._shared = Shared(resolve_communicator(group, device=where if where and where.type != "meta" else None))

    @property
    def comm(self) -> Communicator:
        """The communicator of the tensor-parallel group."""
        return self._shared.comm

    def load_full(self, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Copy this rank's part of full (unsharded) weights; as the function ``load_full``."""
        load_full(self, state_dict, strict=strict)


class _ParallelLinear(Marked, ParallelModule):
    """A linear layer of which this rank holds a part. ``cut`` is the weight's dimension that is cut."""

    cut: int
    bias_cut: bool
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: Any,
        sequence_parallel: bool,
        wgrad: WgradSink,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(group, device)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.wgrad = sequence_parallel, wgrad
        size = self.comm.size
        shape = [out_features, in_features]
        if shape[self.cut] % size:
            name = ("out_features", "in_features")[self.cut]
            raise ShapeError(f"{type(self).__name__}: {name}={shape[self.cut]} does not divide by the {size} ranks")
        shape[self.cut] //= size
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        held = shape[0] if self.bias_cut else out_features
        self.register_parameter("bias", nn.Parameter(torch.empty(held, device=device, dtype=dtype)) if bias else None)
        self._mark()
        self.reset_parameters()

    def _mark(self) -> None:
        mark(self.weight, self.cut)
        mark(self.bias, 0 if self.bias_cut else -1, self.sequence_parallel and not self.bias_cut)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """Return the parallel form of ``linear``, with its weights, dtype and device. Takes the constructor's
        options.
        """
        options = {"device": linear.weight.device, "dtype": linear.weight.dtype, **options}
        make: Any = cls
        made: Self = make(linear.in_features, linear.out_features, linear.bias is not None, **options)
        made.load_full(linear.state_dict())
        return made

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights of ``torch.nn.Linear``: the full weight from the default generator, of which a part is kept.

        So ranks seeded alike hold the parts of the layer that one process with that seed holds, at any number of ranks.
        """
        if self.weight.is_meta:
            return
        full = torch.empty(self.out_features, self.in_features, dtype=self.weight.dtype, device=self.weight.device)
        nn.init.kaiming_uniform_(full, a=math.sqrt(5))
        self.weight.copy_(_part(full, self.weight, self.comm))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            full = full.new_empty(self.out_features).uniform_(-bound, bound)
            self.bias.copy_(_part(full, self.bias, self.comm))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" rank {self.comm.rank} of {self.comm.size}, sequence_parallel={self.sequence_parallel}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """``torch.nn.Linear`` whose out features are spread over ranks. Its output is this rank's features.

    Args:
        in_features, out_features, bias: As of the full layer; out_features must divide by the group's size.
        group: As for all ops.
        sequence_parallel: The input is this rank's shard along ``gather_dim`` and is gathered; else it is replicated.
        save: What is kept for the weight's gradient, "shard" or "gathered".
        wgrad: Where the weight's gradient goes, as for all ops.
    """

    cut, bias_cut = 0, True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Any = None,
        sequence_parallel: bool = False,
        gather_dim: int = 0,
        save: str = "shard",
        wgrad: WgradSink = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, group, sequence_parallel, wgrad, device, dtype)
        self.gather_dim, self.save = gather_dim, save

    def forward(self, x: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """x (..., in_features) -> (..., out_features / size), with the whole extent along ``gather_dim``.

        ``rows`` is each rank's extent there, where they differ.
        """
        return column_parallel(x, self, rows=rows)[0]


class RowParallelLinear(_ParallelLinear):
    """``torch.nn.Linear`` whose in features are spread over ranks. Its input is this rank's features.

    Args:
        in_features, out_features, bias: As of the full layer; in_features must divide by the group's size. The bias is
            whole on every rank and added once, after the sum.
        group: As for all ops.
        sequence_parallel: The output is scattered along ``scatter_dim``; else it is replicated.
        wgrad: Where the weight's gradient goes, as for all ops.
    """

    cut, bias_cut = 1, False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Any = None,
        sequence_parallel: bool = False,
        scatter_dim: int = 0,
        wgrad: WgradSink = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, group, sequence_parallel, wgrad, device, dtype)
        self.scatter_dim = scatter_dim

    @overload
    def forward(
        self, x: Tensor, rows: Sequence[int] | None = None, *, residual: Tensor | None = None, eps: float = 1e-6
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        rows: Sequence[int] | None = None,
        *,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float = 1e-6,
    ) -> tuple[Tensor, Tensor]: ...
    def forward(
        self,
        x: Tensor,
        rows: Sequence[int] | None = None,
        *,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (..., in_features / size) -> (..., out_features), with this rank's extent along ``scatter_dim``.

        ``rows`` is each rank's extent there, where they differ. ``residual``, ``norm_weight`` and ``eps`` as of
        ``ops.matmul_all_reduce``: with ``norm_weight`` (normed, sum) is returned; not with ``sequence_parallel``
        (ConfigError), whose ranks add and normalise their own rows.
        """
        if not self.sequence_parallel:
            more: dict[str, Any] = {"residual": residual, "norm_weight": norm_weight, "eps": eps}
            found: Tensor | tuple[Tensor, Tensor] = ops.matmul_all_reduce(
                x, self.weight, self.comm, bias=self.bias, wgrad=self.wgrad, **more
            )
            return found
        if residual is not None or norm_weight is not None:
            raise ConfigError("RowParallelLinear: residual and norm_weight are for layers without sequence_parallel")
        dim = self.scatter_dim
        return ops.matmul_reduce_scatter(
            x, self.weight, self.comm, dim=dim, rows=rows, bias=self.bias, wgrad=self.wgrad
        )


def column_parallel(x: Tensor, *layers: ColumnParallelLinear, rows: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Apply several column layers to one input: they share one gather, and one exchange in backward. Collective.

    Raises:
        ConfigError: The layers differ in group, ``sequence_parallel``, ``gather_dim``, ``save`` or ``wgrad``.
    """
    first = layers[0]
    for name in ("comm", "sequence_parallel", "gather_dim", "save", "wgrad"):
        if any(getattr(layer, name) != getattr(first, name) for layer in layers):
            values = [getattr(layer, name) for layer in layers]
            raise ConfigError(f"layers that share an input must agree on {name}, not {values}")
    weights = tuple(layer.weight for layer in layers)
    biases = tuple(layer.bias for layer in layers)
    if not first.sequence_parallel:
        return ops.column_parallel_linear(x, weights, first.comm, bias=biases, wgrad=first.wgrad)
    outs: tuple[Tensor, ...] = ops.all_gather_matmul(
        x, weights, first.comm, dim=first.gather_dim, rows=rows, bias=biases, save=first.save, wgrad=first.wgrad
    )
    return outs


def _part(full: Tensor, parameter: Tensor, comm: Communicator) -> Tensor:
    """This rank's part of a full weight."""
    dim = getattr(parameter, "partition_dim", -1)
    return full if dim < 0 else full.narrow(dim, comm.rank * parameter.shape[dim], parameter.shape[dim])


@torch.no_grad()
def load_full(module: nn.Module, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Copy full (unsharded) weights into a module that holds parallel layers: of each, this rank's part. Local.

    Args:
        module: Any module; what is not parallel in it is copied whole, buffers too.
        state_dict: Full tensors by the names of ``module.state_dict()``.
        strict: Every name of the module must be there, and no other.

    Raises:
        ConfigError: A name is missing or unknown, or the module is on the meta device still or sharded already.
        ShapeError: A tensor is not of the full shape.
    """
    own = module.state_dict(keep_vars=True)
    if strict and own.keys() != state_dict.keys():
        missing, unknown = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
        raise ConfigError(f"load_full: missing {missing}, unknown {unknown}")
    owners = dict(module.named_modules())
    parts: list[tuple[Tensor, Tensor]] = []
    for name in [n for n in own if n in state_dict]:
        target, full = own[name], state_dict[name]
        if target.is_meta:
            raise ConfigError(f"load_full: {name} is on the meta device: call to_empty(device=...) first")
        if hasattr(target, "full_tensor"):
            raise ConfigError(f"load_full: {name} is sharded by FSDP2 or the like: load before it is")
        owner, dim, shape = owners[name.rpartition(".")[0]], getattr(target, "partition_dim", -1), list(target.shape)
        cut = dim >= 0 and isinstance(owner, ParallelModule)
        if cut:
            shape[dim] *= owner.comm.size
        if list(full.shape) != shape:
            raise ShapeError(f"load_full: {name} has shape {tuple(full.shape)}, the full shape is {tuple(shape)}")
        parts.append((target, _part(full, target, owner.comm) if cut else full))
    # Nothing is changed unless everything fits.
    for target, part in parts:
        target.copy_(part)
