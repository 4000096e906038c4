"""Styles for ``torch.distributed.tensor.parallel.parallelize_module`` whose products overlap with their communication.

    from commbackend.integrations.dtensor import ColwiseParallel, RowwiseParallel, SharedColwiseParallel

    parallelize_module(model, mesh["tp"], {
        "layers.*.attention": SharedColwiseParallel("wq", "wk", "wv", input_layouts=Shard(1)),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        ...
    })

They take the arguments of torch's styles of the same names, do the same, and mix with them. Parameters are the same
DTensors, so FSDP2, distributed checkpoints and optimizers do not notice. A layer's class is exchanged for one of those
below, which work on local tensors: copies and pickles of the module are as independent as those of any other.

What is fused, by what a layer's input and output are:

* column, input ``Shard(d)``: ``all_gather_matmul``; input ``Replicate``: ``column_parallel_linear``, whose backward
  sums the input's gradient while it computes the weight's;
* row, output ``Shard(d)``: ``matmul_reduce_scatter``; output ``Replicate``: ``matmul_all_reduce``.

Everything else (inputs that are ``Partial`` or sharded along the features, row outputs that are ``Partial``, types that
cannot be multiplied here, subclasses of ``nn.Linear``, ``transport="off"``) runs as in torch's style, and ``stats``
counts it with the reason; with ``strict=True`` it raises Unsupported instead (except for ``off``, which was asked for).
Embeddings are torch's.

The bias of a row layer with a sharded output is added to this rank's rows, so its gradient is a DTensor with the
placement ``Partial``: optimizers, FSDP2 and ``full_tensor()`` sum it; only ``grad.to_local()`` is this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import style as torch_style

from .. import ops
from ..communicator import Communicator, resolve_communicator
from ..errors import ConfigError, Unsupported
from .fallback import OFF, operands, refuse
from .sharing import SharedInput, share

__all__ = [
    "Boundary",
    "ColwiseLinear",
    "ColwiseParallel",
    "RowwiseLinear",
    "RowwiseParallel",
    "SharedColwiseParallel",
    "adopt",
    "boundary_of",
    "cannot_adopt",
    "share_input",
]

M = TypeVar("M", bound="_ParallelLinear")

_REPLICATED = "replicated"


@dataclass(frozen=True)
class Boundary:
    """How a layer meets its neighbours.

    Attributes:
        input: Placement of the input where it is a plain tensor; a DTensor knows its own.
        output: Placement of the output.
        local_output: The output is a plain tensor, this rank's part.
        strict: Raise Unsupported rather than run ``stock``.
        stock: ``f(module, x)``: what the layer would have done without commbackend. It can be pickled.
    """

    input: Placement
    output: Placement
    local_output: bool
    strict: bool
    stock: Callable[[nn.Linear, Tensor], Any]


# -- layers -----------------------------------------------------------------------------------------------------------


class _ParallelLinear(nn.Linear):
    """A linear layer whose parameters are DTensors over one mesh dimension. Made by ``adopt``, never constructed."""

    boundary: Boundary
    shared: SharedInput | None = None

    def forward(self, x: Tensor) -> Any:
        mesh = self._mesh()
        if mesh is None:
            raise Unsupported(
                f"{type(self).__name__}: the weight is not a DTensor over one mesh dimension: under FSDP2, call the"
                " module that was wrapped, which gathers it"
            )
        reason = OFF if _off(mesh) else self._reason(x, mesh)
        if reason is not None:
            return self._stock(x, mesh, reason)
        return self._fused(x, mesh)

    # A compiled graph has a break here, so that every call is counted.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _stock(self, x: Tensor, mesh: DeviceMesh, reason: str) -> Any:
        refuse(_communicator(mesh), self._op(), reason, strict=self.boundary.strict, layer=repr(self))
        return self.boundary.stock(self, x)

    def _mesh(self) -> DeviceMesh | None:
        """The mesh of the ranks that hold parts of the weight now: under FSDP2, of the gathered weight."""
        w = self.weight
        return w.device_mesh if isinstance(w, DTensor) and w.device_mesh.ndim == 1 else None

    def alike(self) -> tuple[Any, ...]:
        """What layers that share an input have in common: where their weights are, their type, and how x comes."""
        return self._mesh(), self.weight.dtype, self.boundary.input

    def _given(self, x: Tensor) -> int | str:
        """The dimension along which the input is sharded, or what else it is."""
        found: int | str = _dim(x.placements[0] if isinstance(x, DTensor) else self.boundary.input, x.dim())
        return found

    def _reason(self, x: Tensor, mesh: DeviceMesh) -> str | None:
        """Why this call cannot be fused, or None. Local, and the same on all ranks."""
        if isinstance(x, DTensor) and x.device_mesh != mesh:
            return "the input is a DTensor over another mesh"
        return operands(_held(x), _held(self.weight), mesh.device_type)

    def _op(self) -> str:
        raise NotImplementedError

    def _fused(self, x: Tensor, mesh: DeviceMesh) -> Any:
        raise NotImplementedError


class ColwiseLinear(_ParallelLinear):
    """Weight and bias ``Shard(0)``: each rank computes some of the out features."""

    def _op(self) -> str:
        return "column_parallel_linear" if self.boundary.input.is_replicate() else "all_gather_matmul"

    def _reason(self, x: Tensor, mesh: DeviceMesh) -> str | None:
        given = self._given(x)
        if given == x.dim() - 1:
            return "the input is sharded along its last dimension"
        if given != _REPLICATED and isinstance(given, str):
            return f"the input is {given}"
        return super()._reason(x, mesh)

    def _fused(self, x: Tensor, mesh: DeviceMesh) -> Any:
        given = self._given(x)
        if self.shared is None:
            return self._finish(_column(x, given, [self], mesh)[0], mesh)
        return self._finish(self.shared.product(self, x, lambda members: _column(x, given, members, mesh)), mesh)

    def _finish(self, y: Tensor, mesh: DeviceMesh) -> Any:
        last = y.dim() - 1
        wanted = _dim(self.boundary.output, y.dim())
        if self.boundary.local_output and wanted == last:
            return y
        out = _global(y, mesh, Shard(last), (*y.shape[:-1], self.weight.shape[0]))
        if wanted != last:
            out = out.redistribute(placements=[self.boundary.output])
        return out.to_local() if self.boundary.local_output else out


class RowwiseLinear(_ParallelLinear):
    """Weight ``Shard(1)``, bias ``Replicate``: each rank multiplies some of the in features; products are summed."""

    def _op(self) -> str:
        return "matmul_all_reduce" if self.boundary.output.is_replicate() else "matmul_reduce_scatter"

    def _reason(self, x: Tensor, mesh: DeviceMesh) -> str | None:
        wanted = _dim(self.boundary.output, x.dim())
        if wanted != _REPLICATED and isinstance(wanted, str):
            return f"the output is {wanted}"
        return super()._reason(x, mesh)

    def _fused(self, x: Tensor, mesh: DeviceMesh) -> Any:
        last = x.dim() - 1
        if self._given(x) != last:
            given = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [self.boundary.input], run_check=False)
            x = given.redistribute(placements=[Shard(last)])
        local, w, dim = _local(x), _local(self.weight), _dim(self.boundary.output, x.dim())
        full = (*local.shape[:-1], self.weight.shape[0])
        if isinstance(dim, str):
            bias = _local(self.bias) if self.bias is not None else None
            y = ops.matmul_all_reduce(local, w, mesh.get_group(), bias=bias)
        else:
            bias = _local(self.bias, [Partial()]) if self.bias is not None else None
            rows = _chunks(full[dim], mesh.size())
            y = ops.matmul_reduce_scatter(local, w, mesh.get_group(), dim=dim, rows=rows, bias=bias)
        if self.boundary.local_output:
            return y
        return _global(y, mesh, Shard(dim) if isinstance(dim, int) else Replicate(), full)


def cannot_adopt(module: nn.Module) -> str | None:
    """Why ``module`` keeps its class, or None. Local."""
    if type(module) is nn.Linear:
        return None
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return f"{kind} is not torch.nn.Linear itself: its forward stays"


def adopt(module: nn.Module, into: type[M], boundary: Boundary) -> M:
    """Give a ``torch.nn.Linear`` whose parameters are DTensors the class ``into``. Local; returns ``module``."""
    reason = cannot_adopt(module)
    if reason is not None:
        raise ConfigError(reason)
    module.__class__ = into
    assert isinstance(module, into)
    module.boundary = boundary
    return module


def _column(x: Tensor, given: int | str, members: Sequence[ColwiseLinear], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    """The products of the members, which share ``x``: sharded along dimension ``given``, or replicated."""
    local = _local(x)
    weights = tuple(_local(m.weight) for m in members)
    bias = tuple(_local(m.bias) if m.bias is not None else None for m in members)
    if isinstance(given, str):
        return ops.column_parallel_linear(local, weights, mesh.get_group(), bias=bias)
    rows = _chunks(x.shape[given], mesh.size()) if isinstance(x, DTensor) else None
    outs: tuple[Tensor, ...] = ops.all_gather_matmul(local, weights, mesh.get_group(), dim=given, rows=rows, bias=bias)
    return outs


def _communicator(mesh: DeviceMesh) -> Communicator:
    return resolve_communicator(mesh.get_group(), device=torch.device(mesh.device_type))


# What a compiler cannot look into, and what does not change from call to call.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _off(mesh: DeviceMesh) -> bool:
    return _communicator(mesh).off


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _dim(placement: Placement, dims: int) -> int | str:
    """The dimension that is sharded, counted from the front, or what the placement is called."""
    if type(placement) is Shard:
        return placement.dim % dims
    return _REPLICATED if type(placement) is Replicate else f"{type(placement).__name__.strip('_')}"


class _Arrived(torch.autograd.Function):
    """The tensor of a collective of torch that may still run: waits for it."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        arrived: Tensor = x.wait()
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _held(x: Tensor) -> Tensor:
    """This rank's part of ``x``, to look at: without gradients, and perhaps not arrived yet."""
    held: Tensor = x._local_tensor if isinstance(x, DTensor) else x
    return held.elem if isinstance(held, AsyncCollectiveTensor) else held


def _local(x: Tensor, grad_placements: Sequence[Placement] | None = None) -> Tensor:
    """This rank's part of ``x``, complete. Its gradient is placed like ``x``, or as given."""
    local: Tensor = x.to_local(grad_placements=grad_placements) if isinstance(x, DTensor) else x
    if isinstance(local, AsyncCollectiveTensor):
        local = _Arrived.apply(local)  # type: ignore[no-untyped-call]
    return local


def _global(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: Sequence[int]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)


def _chunks(extent: int, size: int) -> tuple[int, ...] | None:
    """How DTensor cuts ``extent`` (as ``torch.chunk``), or None where all parts are equal."""
    if extent % size == 0:
        return None
    longest = -(-extent // size)
    return tuple(max(0, min(longest, extent - r * longest)) for r in range(size))


def share_input(parent: nn.Module, names: Sequence[str]) -> bool:
    """Let the column layers ``names`` of ``parent`` share their input (``SharedInput``). Local.

    Returns:
        False where fewer than two of them are ColwiseLinear: nothing is changed.
    """
    found = [m for m in (parent.get_submodule(n) for n in names) if isinstance(m, ColwiseLinear)]
    if len(found) < 2:
        return False
    share(parent, found)
    return True


# -- styles -----------------------------------------------------------------------------------------------------------


class _Fused(torch_style.ParallelStyle):
    """What the styles here add to torch's, before which they stand in the bases of a class."""

    _into: ClassVar[type[_ParallelLinear]]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        strict: bool = False,
    ) -> None:
        layouts: dict[str, Any] = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        super().__init__(use_local_output=use_local_output, **layouts)  # type: ignore[call-arg]  # of torch's style
        self.strict = strict

    def stock(self, module: nn.Linear, x: Tensor) -> Any:
        """What torch's style does in forward. It communicates where torch's does."""
        return _stock(self, module, x)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not _takes(module, device_mesh, self.strict):
            return super()._apply(module, device_mesh)  # type: ignore[safe-super]
        style: Any = self
        if self._into is RowwiseLinear:
            style.desired_input_layouts = (Shard(-1),)
        distribute_module(module, device_mesh, style._partition_linear_fn)
        return adopt(module, self._into, boundary_of(style))


class ColwiseParallel(_Fused, torch_style.ColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel``, fused. Applying it is collective.

    Args:
        input_layouts, output_layouts, use_local_output: As of torch's style.
        strict: Raise Unsupported where a layer or a call cannot be fused.
    """

    _into = ColwiseLinear


class RowwiseParallel(_Fused, torch_style.RowwiseParallel):
    """``torch.distributed.tensor.parallel.RowwiseParallel``, fused. Applying it is collective. Arguments as of
    ``ColwiseParallel``.
    """

    _into = RowwiseLinear


class SharedColwiseParallel(torch_style.ParallelStyle):
    """``ColwiseParallel`` for several layers of one parent that are called with the same tensor: one gather for all.

    Apply it to the parent: ``{"attention": SharedColwiseParallel("wq", "wk", "wv", input_layouts=Shard(1))}``. A layer
    that a forward of the parent leaves out is computed all the same, and gets a gradient of zeros instead of none.

    Args:
        *names: Of the layers, below the parent.
        **options: Of ``ColwiseParallel``, for all of them.
    """

    def __init__(self, *names: str, **options: Any) -> None:
        super().__init__()
        if len(names) < 2:
            raise ConfigError(f"SharedColwiseParallel{names}: name two or more layers that get the same input")
        self.names, self.style = names, ColwiseParallel(**options)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.style.src_data_rank = self.src_data_rank
        for name in self.names:
            self.style._apply(module.get_submodule(name), device_mesh)
        share_input(module, self.names)
        return module


def boundary_of(style: Any) -> Boundary:
    """What a style, of torch's kind or of transformers', says of its layers; its ``stock`` is theirs. Local."""
    given, wanted = (x[0] if isinstance(x, tuple) else x for x in (style.input_layouts, style.output_layouts))
    return Boundary(given, wanted, style.use_local_output, style.strict, style.stock)


def _stock(of: Any, module: nn.Linear, x: Tensor) -> Any:
    mesh = module.weight.device_mesh  # type: ignore[attr-defined]  # a DTensor
    ready = of._prepare_input_fn(of.input_layouts, of.desired_input_layouts, module, (x,), mesh)
    y = nn.functional.linear(ready, module.weight, module.bias)
    return of._prepare_output_fn(of.output_layouts, of.use_local_output, module, y, mesh)


def _takes(module: nn.Module, mesh: DeviceMesh, strict: bool) -> bool:
    """Whether ``module`` is fused; counts it, or raises, if it is a linear layer that is not."""
    reason = cannot_adopt(module)
    if reason is not None and isinstance(module, nn.Linear):
        refuse(_communicator(mesh), "linear", reason, strict=strict)
    return reason is None
