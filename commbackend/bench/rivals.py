"""Other overlapped products, measured in the same turns as ours where they are installed: torch's async-TP, cuBLASMp.

Both need GPUs. What cannot run here leaves a note that says why; a candidate is measured on all ranks or on none.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .names import ASYNC_TP, ASYNC_TP_NATIVE, CUBLASMP
from .world import World

__all__ = ["rivals"]

#: name -> call of buffer set i that returns its result.
Calls = dict[str, Callable[[int], Tensor]]


def rivals(world: World, op: str, x: Sequence[Tensor], w: Sequence[Tensor]) -> tuple[Calls, list[str]]:
    """Return what else multiplies ``x`` by ``w`` with ``op``'s communication, and why the others do not. Collective."""
    if world.device.type != "cuda":
        return {}, ["async-TP and cuBLASMp are measured on GPUs only"]
    if world.shared:
        return {}, ["async-TP and cuBLASMp refuse two ranks on one GPU"]
    found: Calls = {}
    notes = []
    makers: dict[str, Callable[..., Callable[[int], Tensor]]] = {
        ASYNC_TP: _async_tp,
        ASYNC_TP_NATIVE: _async_tp_native,
        CUBLASMP: _cublasmp,
    }
    for name, make in makers.items():
        reason = ""
        try:
            call = make(world, op, x, w)
            call(0)
            torch.cuda.synchronize()
        except Exception as e:  # somebody else's code: whatever it raises is why it is not measured
            reason = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        failed = world.slowest(torch.tensor([float(bool(reason))], dtype=torch.float64))
        if float(failed):
            notes.append(f"{name} of {op}: {reason or 'it failed on another rank'}")
        else:
            found[name] = call
    return found, notes


def _group_name() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def _async_tp(world: World, op: str, x: Sequence[Tensor], w: Sequence[Tensor]) -> Callable[[int], Tensor]:
    """The form that is decomposed into chunks, whatever the size."""
    importlib.import_module("torch.distributed._symmetric_memory")  # it defines the operators

    ops, group = torch.ops.symm_mem, _group_name()
    if op == "all_gather_matmul":
        return lambda i: ops.fused_all_gather_matmul(x[i], [w[i].t()], 0, group)[1][0]  # type: ignore[no-any-return]
    if op == "matmul_reduce_scatter":
        return lambda i: ops.fused_matmul_reduce_scatter(x[i], w[i].t(), "sum", 0, group)  # type: ignore[no-any-return]
    raise NotImplementedError("async-TP has no such operation")


def _async_tp_native(world: World, op: str, x: Sequence[Tensor], w: Sequence[Tensor]) -> Callable[[int], Tensor]:
    """The form whose one kernel consumes shards as they arrive; torch itself takes it where a variable asks for it."""
    from torch.distributed import _symmetric_memory as symmetric

    if op != "all_gather_matmul":
        raise NotImplementedError("async-TP's native form is of all_gather_matmul only")
    native: Any = symmetric._fused_all_gather_matmul_native
    group = _group_name()
    return lambda i: native(x[i], w[i].t(), group)[1]  # type: ignore[no-any-return]


def _cublasmp(world: World, op: str, x: Sequence[Tensor], w: Sequence[Tensor]) -> Callable[[int], Tensor]:
    """cuBLASMp by nvmath: it stores columns first, so it is given transposed views and multiplies w by x.T.

    One planned product on the first buffer set: its operands do not rotate.
    """
    if importlib.util.find_spec("nvmath") is None:
        raise NotImplementedError("nvmath-python is not installed")
    import numpy as np

    nvmath: Any = importlib.import_module("nvmath.distributed")
    grids: Any = importlib.import_module("nvmath.distributed.distribution")
    advanced: Any = importlib.import_module("nvmath.distributed.linalg.advanced")
    groups: Any = importlib.import_module("nvmath.distributed.process_group")
    if op == "matmul_all_reduce":
        raise NotImplementedError("not measured")
    if nvmath.get_context() is None:
        nvmath.initialize(world.device.index, groups.TorchProcessGroup(), backends=["nccl"])
    by_rows, by_cols = (grids.BlockNonCyclic(grids.ProcessGrid(shape=s)) for s in ((world.size, 1), (1, world.size)))
    gathers = op == "all_gather_matmul"
    qualifiers = np.zeros((3,), dtype=advanced.matrix_qualifiers_dtype)
    qualifiers[0]["is_transpose"] = True
    where = [by_cols, by_cols, by_rows] if gathers else [by_rows, by_rows, by_cols]
    product = advanced.Matmul(w[0].t(), x[0].t(), distributions=where, qualifiers=qualifiers)
    product.plan()
    return lambda i: product.execute().t()  # type: ignore[no-any-return]
