"""transport="off": stock torch.distributed and linear, bit for bit, with nothing of ours allocated."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ops_world import leaf, normal, same
from torch.nn.functional import linear

import commbackend
from commbackend import ops
from commbackend.communicator import Communicator
from commbackend.config import resolve
from commbackend.errors import Unsupported
from commbackend.testing import run_ranks

SIZE, HIDDEN, WIDE = 2, 48, 40


class Gather(torch.autograd.Function):
    """What a user of torch.distributed alone would write."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty(SIZE * x.shape[0], *x.shape[1:], dtype=x.dtype)
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty(grad.shape[0] // SIZE, *grad.shape[1:], dtype=grad.dtype)
        dist.reduce_scatter_tensor(out, grad.contiguous())
        return out


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Gather.backward(None, x)

    @staticmethod
    def backward(ctx, grad):
        return Gather.forward(None, grad)


class Reduce(torch.autograd.Function):
    """Sum forward, identity backward."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad


class Copy(torch.autograd.Function):
    """Identity forward, sum backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return Reduce.forward(None, grad)


STOCK = {
    "all_gather_matmul": lambda x, w, b: linear(Gather.apply(x), w, b),
    "matmul_reduce_scatter": lambda x, w, b: Scatter.apply(linear(x, w)) + b,
    "matmul_all_reduce": lambda x, w, b: Reduce.apply(linear(x, w)) + b,
    "column_parallel_linear": lambda x, w, b: linear(Copy.apply(x), w, b),
}


def join(rank, folder):
    store = dist.FileStore(str(Path(folder) / "gloo"), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=30))


def bitwise(rank, group, folder, dtype):
    join(rank, folder)
    comm = commbackend.init(transport="off", device="cpu")
    assert comm.off
    for name, stock in STOCK.items():
        # Replicated inputs are the same on all ranks; shards and partial products are not.
        seed = 0 if name == "column_parallel_linear" else rank
        x, w = normal(seed, 6, 5, HIDDEN, dtype=dtype), normal(10 + rank, WIDE, HIDDEN, dtype=dtype)
        b = normal(3, WIDE, dtype=dtype)
        ours, theirs = [leaf(t) for t in (x, w, b)], [leaf(t) for t in (x, w, b)]
        got = getattr(ops, name)(ours[0], ours[1], comm, bias=ours[2])
        want = stock(*theirs)
        same(got, want, name)
        grad = normal(40, *want.shape, dtype=dtype)
        got.backward(grad)
        want.backward(grad)
        for mine, other in zip(ours, theirs, strict=True):
            same(mine.grad, other.grad, name)
    x = normal(rank, 6, 4, dtype=dtype)
    same(ops.all_gather(x, comm), Gather.apply(x))
    same(ops.reduce_scatter(x, comm), Scatter.apply(x))
    same(ops.all_reduce(x, comm), Reduce.apply(x))
    # Other dimensions, uneven rows and other types, where no one-line stock form exists.
    rows = (2, 4)
    mine = normal(rank, 3, rows[rank], HIDDEN, dtype=dtype)
    whole = torch.cat([normal(r, 3, rows[r], HIDDEN, dtype=dtype) for r in range(SIZE)], 1)
    product, gathered = ops.all_gather_matmul(leaf(mine), leaf(w), comm, dim=1, rows=rows, return_gathered=True)
    same(gathered, whole)
    same(product, linear(whole, w))
    product.sum().backward()
    flags = torch.tensor([True, False, rank == 1])
    assert ops.all_gather(flags, comm).tolist() == [True, False, False, True, False, True]
    ops.barrier(comm)
    stats = comm.stats()
    assert stats["transport"] == "off" and stats["overlapped"] == 0 and stats["symmetric_nbytes"] == 0
    assert stats["fallback"] == stats["calls"] > 0
    comm.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_equal_to_stock(tmp_path, dtype):
    run_ranks(bitwise, SIZE, str(tmp_path), dtype)


def without_torch_distributed(rank, group):
    with pytest.raises(Unsupported, match=r"call torch\.distributed\.init_process_group before"):
        Communicator(group, resolve(transport="off"), torch.device("cpu"))
    return True


def test_refused_at_once_where_torch_distributed_connects_nobody():
    assert run_ranks(without_torch_distributed, SIZE) == [True] * SIZE


def groups(rank, group, folder):
    """Every form of the group argument reaches the same communicator."""
    join(rank, folder)
    comm = commbackend.init(transport="shm", device="cpu")
    mesh = dist.init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))
    world = dist.group.WORLD
    x = torch.full((2, 3), float(rank + 1))
    for form in (comm, world, world.group_name, None):
        same(ops.all_reduce(x, form), torch.full((2, 3), 3.0), form)
    assert comm.stats()["calls"] == 4
    same(ops.all_reduce(x, mesh), torch.full((2, 3), 3.0))
    same(ops.all_reduce(x, mesh["tp"]), torch.full((2, 3), 3.0))
    comm.close()
    dist.destroy_process_group()


def test_forms_of_group(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMBACKEND_TRANSPORT", "shm")
    run_ranks(groups, SIZE, str(tmp_path))
