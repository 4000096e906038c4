"""torch's own operators for asynchronous tensor parallelism, ``torch.ops.symm_mem.fused_*``, served by commbackend.

``torch.compile``'s async-TP pass rewrites an all-gather before, or a reduce-scatter after, a matrix product into these
operators, and torchtitan calls them directly. torch implements them for CUDA symmetric memory only. ``install`` serves
them for the groups it is given, on CPUs and GPUs, over whatever transport connects the ranks; other groups keep torch's
implementation. What cannot be overlapped for a group of ours runs torch's implementation too (on CPUs: its unfused
form) and is counted in ``stats`` of the communicator, by reason, or raises with ``strict=True``.

To compile with the pass, on any build of torch::

    symm_mem.install(tp_group)
    model = torch.compile(model, options={"post_grad_custom_post_pass": symm_mem.graph_pass()})

(``torch._inductor.config._micro_pipeline_tp`` alone does the same where torch has NCCL.) The operators have no
gradients, as torch's have none: compiled backward passes call them, and so do autograd functions of frameworks.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Loaded before anything is registered here: its own kernels would take the place of ours.
import torch.distributed._symmetric_memory as torch_symm_mem
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass

from .. import ops
from ..communicator import Communicator, init, resolve_communicator
from ..errors import Unsupported
from ..group import process_group_of
from ..ops.gradients import without_autocast
from .fallback import OFF, refuse

__all__ = ["graph_pass", "install", "managed", "uninstall"]

_PRODUCTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_GATHER, _SCATTER = "all_gather_matmul", "matmul_reduce_scatter"

_lock = threading.RLock()
# Group name -> its communicators by device type, and whether a call that is not overlapped is an error.
_managed: dict[str, tuple[dict[str, Communicator], bool]] = {}
# Groups that were made known to torch's pass here, and are forgotten again by ``uninstall``.
_announced: set[str] = set()
_library: torch.library.Library | None = None


def install(groups: Any, *, strict: bool = False, **overrides: Any) -> None:
    """Serve torch's fused operators for ``groups``. Collective: connects each group's communicator, in order.

    Args:
        groups: A ProcessGroup, DeviceMesh, ``(mesh, "dim")`` or group name, or a list of them.
        strict: Raise Unsupported for a call that cannot be overlapped, instead of running it as torch does.
        **overrides: Of ``commbackend.init``; ``device`` defaults to cuda if torch has a device, else cpu.

    Raises:
        ConfigError: A group is no process group; or as ``init``.
    """
    for group in groups if isinstance(groups, list) else [groups]:
        pg = process_group_of(group)
        if pg is None:
            raise Unsupported(f"symm_mem.install: {group!r} has no process group: torch finds groups by their names")
        comm = init(pg, **overrides) if overrides else resolve_communicator(pg)
        with _lock:
            known, _ = _managed.get(pg.group_name, ({}, False))
            _managed[pg.group_name] = ({**known, comm.device.type: comm}, strict)
            _announce(pg.group_name)
            _register()


def uninstall(groups: Any = None) -> None:
    """Give ``groups`` (as for ``install``; None: all) back to torch. Local; communicators stay open."""
    given = groups if isinstance(groups, list) else [groups]
    with _lock:
        names = list(_managed) if groups is None else [_name(g) for g in given]
        for name in names:
            _managed.pop(name, None)
            if name in _announced:
                _announced.discard(name)
                torch_symm_mem._group_name_to_store.pop(name, None)
        if not _managed:
            _unregister()


def managed() -> list[str]:
    """Return the names of the groups that are served here. Local."""
    return sorted(_managed)


def _name(group: Any) -> str:
    pg = process_group_of(group)
    return "" if pg is None else str(pg.group_name)


def _announce(name: str) -> None:
    """Let torch's pass rewrite collectives of this group."""
    if not torch_symm_mem.is_symm_mem_enabled_for_group(name):  # type: ignore[arg-type]
        with warnings.catch_warnings():
            # Newer versions enable every group; those of today still ask whether this was called.
            warnings.simplefilter("ignore", FutureWarning)
            torch_symm_mem.enable_symm_mem_for_group(name)  # type: ignore[arg-type]
        _announced.add(name)


def _register() -> None:
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # replacing torch's CUDA kernels is what is meant
        for key in ("CPU", "CUDA"):
            for name, kernel in _KERNELS.items():
                _library.impl(name, kernel, key)


def _unregister() -> None:
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


# -- the operators ----------------------------------------------------------------------------------------------------


def _ours(op: str, layer: str, name: str, x: Tensor, reason: str | None) -> Communicator | None:
    """The communicator that serves this call, or None where torch does."""
    comms, strict = _managed.get(name, ({}, False))
    comm = comms.get(x.device.type)
    if comm is None or comm.closed:
        return None
    why = OFF if comm.off else reason
    if why is None:
        return comm
    refuse(comm, op, why, strict=strict, layer=f"torch.ops.symm_mem.{layer}")
    return None


def _torch(name: str, x: Tensor) -> Callable[..., Any]:
    """torch's kernel, or on CPUs, where it has none, what it runs in its test mode: collective, then product."""
    found: Callable[..., Any] = getattr(torch_symm_mem, f"_{name}" if x.is_cuda else f"_{name}_fallback")
    return found


def _types(a: Tensor, others: Sequence[Tensor]) -> str | None:
    if a.dtype not in _PRODUCTS:
        return f"products of {a.dtype}"
    return None if all(b.dtype == a.dtype for b in others) else "operands of several types"


def fused_all_gather_matmul(
    a: Tensor, bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """``all_gather(a) @ b`` for every b (k, n)."""
    op, last = "fused_all_gather_matmul", gather_dim % a.dim() == a.dim() - 1
    comm = _ours(_GATHER, op, group_name, a, "gathered along the last dimension" if last else _types(a, bs))
    if comm is None:
        gathered: tuple[Tensor | None, list[Tensor]]
        gathered = _torch(op, a)(a, bs, gather_dim, group_name, return_A=return_A)
        return gathered
    flat = _Front(a, gather_dim)
    out = ops.all_gather_matmul(flat.matrix, [b.t() for b in bs], comm, return_gathered=return_A)
    products, whole = out if return_A else (out, None)
    return None if whole is None else flat.back(whole), [flat.back(p) for p in products]


def fused_matmul_reduce_scatter(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """``reduce_scatter(a @ b)``, "sum" or "avg"."""
    op, last = "fused_matmul_reduce_scatter", scatter_dim % a.dim() == a.dim() - 1
    comm = _ours(_SCATTER, op, group_name, a, _operation(reduce_op) or _types(a, [b]))
    if comm is None:
        scattered: Tensor = _torch(op, a)(a, b, reduce_op, scatter_dim, group_name)
        return scattered
    flat = _Front(a, scatter_dim)
    if flat.free and not last:
        out = flat.back(ops.matmul_reduce_scatter(flat.matrix, b.t(), comm))
    else:
        out = ops.matmul_reduce_scatter(a, b.t(), comm, dim=scatter_dim)
    return _finish(out, reduce_op, comm)


def fused_all_gather_scaled_matmul(
    a: Tensor,
    bs: Sequence[Tensor],
    a_scale: Tensor,
    b_scales: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[Any],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    """As ``fused_all_gather_matmul`` of fp8 operands with scales: one, or one a row of ``a`` (its shard or its whole)
    and a column of ``b``.
    """
    op, last = "fused_all_gather_scaled_matmul", gather_dim % a.dim() == a.dim() - 1
    wanted = torch_symm_mem._maybe_convert_scalar_types_to_dtypes(list(out_dtypes))
    reason = _scaled([a, *bs], [a_scale, *b_scales], result_scales, wanted)
    if reason is None and len({str(d) for d in wanted}) != 1:
        reason = "results of several types"
    elif any(bias is not None and bias.dtype != wanted[0] for bias in biases):
        reason = "bias of another type than the results"
    elif a.shape[:-1].numel() == 1:
        reason = "one row a rank: a scale of it looks like one of all"
    comm = _ours(_GATHER, op, group_name, a, "gathered along the last dimension" if last else reason)
    if comm is None:
        gathered: tuple[Tensor, list[Tensor]]
        gathered = _torch(op, a)(
            a, bs, a_scale, b_scales, gather_dim, group_name, biases, result_scales, out_dtypes, use_fast_accum
        )
        return gathered
    flat = _Front(a, gather_dim)
    if a_scale.numel() > 1:
        if a_scale.shape[:-1] != a.shape[:-1]:  # of all rows: this rank's are needed
            extent = a.shape[gather_dim]
            a_scale = a_scale.narrow(gather_dim, comm.rank * extent, extent)
        a_scale = _Front(a_scale, gather_dim).matrix
    products, whole = ops.all_gather_matmul(
        flat.matrix,
        [b.t() for b in bs],
        comm,
        bias=list(biases) if any(b is not None for b in biases) else None,
        return_gathered=True,
        scale_a=a_scale,
        scale_b=list(b_scales),
        out_dtype=wanted[0],
    )
    return flat.back(whole), [flat.back(p) for p in products]


def fused_scaled_matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """As ``fused_matmul_reduce_scatter`` of fp8 operands with scales; the product has ``output_shape`` before it is
    scattered along ``orig_scatter_dim``.
    """
    op = "fused_scaled_matmul_reduce_scatter"
    shape = list(output_shape) if output_shape is not None else [*a.shape[:-1], b.shape[1]]
    reason = _operation(reduce_op) or _scaled([a, b], [a_scale, b_scale], [result_scale], [out_dtype])
    if bias is not None:
        reason = "bias of every rank's partial product"
    elif orig_scatter_dim % len(shape) == len(shape) - 1:
        reason = "fp8 scattered along the last dimension"
    comm = _ours(_SCATTER, op, group_name, a, reason)
    if comm is None:
        quantised = (a, b, a_scale, b_scale, reduce_op, orig_scatter_dim, scatter_dim_after_maybe_reshape, group_name)
        scattered: Tensor = _torch(op, a)(*quantised, shape, bias, result_scale, out_dtype, use_fast_accum)
        return scattered
    rows = a.reshape(*shape[:-1], a.shape[-1])
    scale = a_scale.reshape(*shape[:-1], 1) if a_scale.numel() > 1 else a_scale
    out = ops.matmul_reduce_scatter(
        rows, b.t(), comm, dim=orig_scatter_dim, scale_a=scale, scale_b=b_scale, out_dtype=out_dtype
    )
    return _finish(out, reduce_op, comm)


class _Front:
    """``t`` (..., k) as a matrix whose rows are ordered by ``dim`` first, and results brought back: torch's layout of
    these operators, which compiled code relies on.

    Attributes:
        free: The matrix is a view.
    """

    def __init__(self, t: Tensor, dim: int) -> None:
        moved = t.movedim(dim, 0)
        self.dim, self.lead, self.free = dim, moved.shape[1:-1], moved.is_contiguous()
        self.matrix = moved.reshape(-1, t.shape[-1]) if t.dim() > 2 else moved

    def back(self, out: Tensor) -> Tensor:
        return out.unflatten(0, (-1, *self.lead)).movedim(0, self.dim) if self.lead else out.movedim(0, self.dim)


def _operation(reduce_op: str) -> str | None:
    return None if reduce_op in ("sum", "avg") else f"reduction {reduce_op!r}"


def _finish(total: Tensor, reduce_op: str, comm: Communicator) -> Tensor:
    return (total.div_(comm.size) if reduce_op == "avg" else total).contiguous()


def _scaled(
    operands: Sequence[Tensor], scales: Sequence[Tensor], result_scales: Sequence[Any], out_dtypes: Sequence[Any]
) -> str | None:
    if operands[0].dtype not in _FP8 or any(t.dtype != operands[0].dtype for t in operands):
        return f"scaled products of {', '.join(sorted({str(t.dtype) for t in operands}))}"
    if any(s is not None for s in result_scales):
        return "scaled results"
    if any(d not in (torch.bfloat16, torch.float16, torch.float32) for d in out_dtypes):
        return "fp8 results"
    blocks = any(s.dtype != torch.float32 or (s.dim() > 1 and min(s.shape[-2:]) > 1) for s in scales)
    return "scales of blocks" if blocks else None


def _kernel(operator: Callable[..., Any]) -> Callable[..., Any]:
    """``operator`` with neither gradients nor casts of a region around it: as torch's kernels are."""

    @functools.wraps(operator)
    def run(a: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), without_autocast(a.device):
            return operator(a, *args, **kwargs)

    return run


_KERNELS: dict[str, Callable[..., Any]] = {
    f.__name__: _kernel(f)
    for f in (
        fused_all_gather_matmul,
        fused_matmul_reduce_scatter,
        fused_all_gather_scaled_matmul,
        fused_scaled_matmul_reduce_scatter,
    )
}


# -- torch.compile ----------------------------------------------------------------------------------------------------


class _AsyncTensorParallel(CustomGraphPass):
    """torch's micro_pipeline_tp pass for the groups that are managed when a graph is compiled."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass

        with _lock:
            # The pass asks for NCCL because torch's own kernels need its GPUs; ours need no NCCL.
            found, dist.is_nccl_available = dist.is_nccl_available, lambda: True
            try:
                micro_pipeline_tp_pass(graph)
            finally:
                dist.is_nccl_available = found

    def uuid(self) -> Any:
        # Graphs in inductor's cache hold the rewritten operators: they must not serve a process that manages others.
        return hashlib.sha256(f"commbackend async TP 1 {torch.__version__} {managed()}".encode()).hexdigest()


def graph_pass() -> CustomGraphPass:
    """Return the pass for ``torch.compile(..., options={"post_grad_custom_post_pass": graph_pass()})``. Local."""
    return _AsyncTensorParallel()
