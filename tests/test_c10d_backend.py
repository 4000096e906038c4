"""torch.distributed's backend "commbackend": every collective against gloo, and what is built on them."""

from __future__ import annotations

import copy
import gc
import logging
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ops_world import ints, near, normal, same
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import commbackend
from commbackend.errors import ConfigError, Unsupported
from commbackend.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # the older names are used on purpose
SIZE = 2


def join(rank, folder, backend="commbackend", size=SIZE, **overrides):
    from commbackend.integrations import c10d

    c10d.register(**{"transport": "shm", **overrides})
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    return dist.group.WORLD


def tensors(seed, *shape):
    """Values that add up exactly, of every type that a sum or a move may be of."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.int32):
        yield ints(seed, *shape).abs().to(dtype)
    yield ints(seed, *shape) > 0
    yield torch.complex(ints(seed, *shape, dtype=torch.float32), ints(seed + 1, *shape, dtype=torch.float32))


def everything(x, group, root):
    """Results of all collectives on ``x`` (dim 0 divides by the ranks), in one order on all ranks."""
    size, kinds = dist.get_world_size(group), dist.ReduceOp
    whole = torch.empty(size * x.shape[0], *x.shape[1:], dtype=x.dtype)
    dist.all_gather_into_tensor(whole, x, group=group)
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x, group=group)
    sent = x.clone()
    dist.broadcast(sent, dist.get_global_rank(group, root), group=group)
    yield from (whole, *parts, sent)
    swapped = torch.empty_like(x)
    dist.all_to_all_single(swapped, x, group=group)
    yield swapped
    if x.dtype == torch.bool:
        return
    for op in (kinds.SUM,) if x.is_complex() else (kinds.SUM, kinds.MAX, kinds.PRODUCT):
        total = x.clone()
        dist.all_reduce(total, op, group=group)
        yield total
    if not x.is_complex():  # gloo has no such sums
        part = torch.empty(x.shape[0] // size, *x.shape[1:], dtype=x.dtype)
        dist.reduce_scatter_tensor(part, x, group=group)
        yield part
        several = torch.empty_like(part)
        dist.reduce_scatter(several, list(x.chunk(size)), group=group)
        yield several
    dist.barrier(group)


def collectives(rank, group, folder):
    world = join(rank, folder)
    stock = dist.new_group(backend="gloo")
    assert dist.get_backend() == "commbackend" and world.name() == "commbackend"
    for i, shape in enumerate(((4, 5), (6,), (2, 3, 7), (4, 2048), (2, 0))):
        for x in tensors(10 * i + rank, *shape):
            ours = list(everything(x, world, i % 2))
            theirs = list(everything(x, stock, i % 2))
            for j, (got, want) in enumerate(zip(ours, theirs, strict=True)):
                same(got, want, (x.dtype, shape, j))
    counted = world.stats()["cpu"]
    assert counted["transport"] == "shm" and counted["calls"] > 200
    reasons = {key for key in counted["fallback_by_op"] if "reduction" in key}
    assert reasons == {"all_reduce/reduction MAX", "all_reduce/reduction PRODUCT"}

    # Averages; a parameter in place; what is not contiguous goes elsewhere; messages do too.
    mean = torch.full((3,), float(rank))
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    same(mean, torch.full((3,), 0.5))
    weight = nn.Parameter(torch.full((4,), float(rank + 1)))
    dist.all_reduce(weight)
    same(weight.detach(), torch.full((4,), 3.0))
    with torch.inference_mode():
        made_inside = torch.ones(3)
        dist.all_reduce(made_inside)
        same(made_inside, torch.full((3,), 2.0))
    message = torch.full((3,), float(rank))
    if rank == 0:
        dist.send(message, 1)
    else:
        dist.recv(message, 0)
    same(message, torch.zeros(3))
    gathered = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": r} for r in range(SIZE)]
    dist.destroy_process_group()


def test_collectives_equal_gloo(tmp_path):
    run_ranks(collectives, SIZE, str(tmp_path), timeout_s=90.0)


def asynchronous(rank, group, folder):
    """Works, futures, coalescing, groups within groups, functional collectives, one thread a group and none after."""
    before = threading.active_count()
    world = join(rank, folder, "cpu:commbackend")
    x = torch.full((4,), float(rank + 1))
    # Rank 0 starts a collective, then sends what rank 1 wants before it joins.
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.empty(2), 0)
        work = dist.all_reduce(x, async_op=True)
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    same(x, torch.full((4,), 3.0))
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    same(future.wait(), torch.full((4,), 12.0))

    outs, ins = [torch.empty(SIZE * 3), torch.empty(SIZE * 2)], [torch.full((3,), 1.0), torch.full((2,), float(rank))]
    with dist._coalescing_manager(async_ops=True) as together:
        for out, part in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, part)
    together.wait()
    same(outs[1], torch.tensor([0.0, 0.0, 1.0, 1.0]))
    with dist._coalescing_manager():
        for part in ins:
            dist.all_reduce(part)
    same(ins[0], torch.full((3,), 2.0))
    sums = [torch.empty(2), torch.empty(1)]
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(sums[0], torch.arange(4.0))
        dist.reduce_scatter_tensor(sums[1], torch.arange(2.0))
    same(sums[1], torch.tensor([2.0 * rank]))

    mine = dist.new_group([rank])
    pair = dist.new_group([1, 0])
    dist.all_reduce(x, group=mine)
    y = torch.ones(2)
    dist.all_reduce(y, group=pair)
    same(y, torch.full((2,), 2.0))
    assert pair.name() == "commbackend" == mine.name()

    same(funcol.all_reduce(x, "sum", world), x * 2)
    same(funcol.all_gather_tensor(x, 0, world), torch.cat([x, x]))
    same(funcol.reduce_scatter_tensor(x, "sum", 0, world), x.chunk(2)[rank] * 2)
    same(funcol.all_reduce_coalesced([x, y], "sum", world)[1], y * 2)
    same(funcol.all_gather_into_tensor_coalesced([x, y], world)[1], torch.cat([y, y]))
    same(funcol.reduce_scatter_tensor_coalesced([x, y], "sum", [0, 0], world)[1], y.chunk(2)[rank] * 2)
    same(torch.compile(lambda t: funcol.all_reduce(t, "sum", world) + 1, backend="aot_eager")(x), x * 2 + 1)

    comm = commbackend.init(world, device="cpu", transport="shm")  # layers' own communicator, on the same group
    same(commbackend.all_reduce(x, comm), x * 2)
    comm.close()
    dist.destroy_process_group()
    assert commbackend.stats() == {}
    left = [t.name for t in threading.enumerate() if "commbackend" in t.name]
    assert not left and threading.active_count() <= before + 1, threading.enumerate()
    del comm
    gc.collect()  # bound programs and their memory refer to each other
    return [link for fd in os.listdir("/proc/self/fd") if "memfd:commbackend" in (link := _link(fd))]


def _link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_asynchronous_calls_and_leaving(tmp_path):
    assert run_ranks(asynchronous, SIZE, str(tmp_path), timeout_s=90.0) == [[], []]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def trained(model, rank, dtype=torch.float32):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(3):
        optimizer.zero_grad()
        model(normal(100 * step + rank, 6, 12, dtype=dtype)).square().mean().backward()
        optimizer.step()
    whole = {}
    for name, p in model.named_parameters():
        whole[name.removeprefix("module.")] = (p.full_tensor() if isinstance(p, DTensor) else p).detach()
    return whole


def frameworks(rank, group, folder):
    """DDP, FSDP2 and DTensor tensor parallelism train as they do over gloo."""
    world = join(rank, folder)
    stock = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    model = Model()
    meshes = [dist.init_device_mesh("cpu", (SIZE,)), dist.DeviceMesh.from_group(stock, "cpu")]

    def over(make):
        ours, theirs = (trained(make(copy.deepcopy(model), i), rank) for i in range(2))
        for name in theirs:
            near(ours[name], theirs[name], 1e-6, name)

    def tensor_parallel(m, i):
        return parallelize_module(m, meshes[i], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    over(lambda m, i: DistributedDataParallel(m, process_group=(world, stock)[i], bucket_cap_mb=1))
    over(lambda m, i: fully_shard(m, mesh=meshes[i]))
    x = normal(7, 6, 12, dtype=torch.float32)
    outs = [tensor_parallel(copy.deepcopy(model), i)(x) for i in range(2)]
    near(outs[0], outs[1], 1e-6)
    whole = distribute_tensor(x, meshes[0], [Shard(0)]).redistribute(meshes[0], [Replicate()]).to_local()
    same(whole, x)
    counted = world.stats()["cpu"]
    assert any(k.startswith("all_gather/") for k in counted["overlapped_by_op"]), counted
    assert not any("layout" in k or "types" in k for k in counted["fallback_by_op"]), counted
    dist.destroy_process_group()


def test_ddp_fsdp2_and_dtensor_equal_gloo(tmp_path):
    run_ranks(frameworks, SIZE, str(tmp_path), timeout_s=90.0)


def refusals(rank, group, folder):
    join(rank, folder, strict=True)
    with pytest.raises(Unsupported, match=r"all_reduce: rank \d: reduction MAX: .*strict=True"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX)
    with pytest.raises(Unsupported, match="layout"):
        dist.all_reduce(torch.ones(2, 3).t())
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    from commbackend.integrations import c10d

    with pytest.raises(ConfigError):
        c10d.register(transport=3)


def test_strict(tmp_path):
    run_ranks(refusals, SIZE, str(tmp_path), timeout_s=60.0)


def switched_off(rank, group, folder):
    world = join(rank, folder, transport="off")
    x = torch.full((4,), float(rank + 1))
    dist.all_reduce(x)
    dist.barrier()
    same(x, torch.full((4,), 3.0))
    assert world.stats() == {}
    dist.destroy_process_group()


def test_off_is_gloo(tmp_path):
    run_ranks(switched_off, SIZE, str(tmp_path), timeout_s=60.0)


def left_alone(rank, group, folder):
    """A rank that leaves without the others warns, and comes home."""
    join(rank, folder)
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        os._exit(3)
    said = []
    logging.getLogger("commbackend").addHandler(type("H", (logging.Handler,), {"emit": lambda s, r: said.append(r)})())
    dist.destroy_process_group()
    assert any("leaving group" in r.getMessage() for r in said)
    return threading.active_count()


def test_leaving_after_a_death(tmp_path):
    assert run_ranks(left_alone, SIZE, str(tmp_path), timeout_s=60.0, expect_death=[1])[0] >= 1


def test_nothing_happens_at_import():
    code = (
        "import torch, torch.distributed as d, commbackend, sys\n"
        "assert 'commbackend' not in d.Backend.backend_list and 'commbackend.integrations.c10d' not in sys.modules\n"
        "from commbackend.integrations import c10d\n"
        "assert 'commbackend' not in d.Backend.backend_list\n"
        "c10d.register(); c10d.register()\n"
        "assert d.Backend.backend_list.count('commbackend') == 1\n"
        "assert d.Backend.default_device_backend_map['cpu'] == 'gloo'\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=100)
