"""torch.compile of ops and layers: one graph, the results and gradients of eager, the calls of eager."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from ops_world import ints, leaf, near, normal, same, spmd_processes
from torch.utils.checkpoint import checkpoint

import commbackend
from commbackend import nn, ops
from commbackend.testing import run_ranks

SIZE, HIDDEN, WIDE = 2, 16, 24
CXX = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler: none is on PATH"
)


class MLP(torch.nn.Module):
    """Two tensor-parallel layers pairs, as people write them."""

    def __init__(self, comm, sequence_parallel, **options):
        super().__init__()
        self.first = nn.GatedMLP(HIDDEN, WIDE, group=comm, sequence_parallel=sequence_parallel, bias=True, **options)
        self.second = nn.GatedMLP(HIDDEN, WIDE, group=comm, sequence_parallel=sequence_parallel, **options)

    def forward(self, x, rows=None):
        return self.second(self.first(x, rows), rows)


def step(model, module, x, *args):
    """Result, the gradients of the input and of all parameters."""
    module.zero_grad()
    x = leaf(x)
    out = model(x, *args)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def calls(comm, run):
    """What ``run`` returns and how many calls of each operation it made."""
    before = comm.stats()
    result = run()
    made = {}
    for which in ("overlapped_by_op", "fallback_by_op"):
        for key, n in comm.stats()[which].items():
            made[key] = n - before[which].get(key, 0)
    return result, {k: n for k, n in made.items() if n}


def compiled(comm, backend):
    for sequence_parallel in (True, False):
        torch.manual_seed(3)
        module = MLP(comm, sequence_parallel)
        # Shards of other values; replicated inputs are alike.
        x = normal(comm.rank if sequence_parallel else 0, 6, 3, HIDDEN, dtype=torch.float32)
        model = torch.compile(module, fullgraph=True, backend=backend)
        want, eager_calls = calls(comm, lambda m=module, x=x: step(m, m, x))
        got, compiled_calls = calls(comm, lambda m=module, x=x, c=model: step(c, m, x))
        assert compiled_calls == eager_calls and sum(eager_calls.values()) == (8 if sequence_parallel else 4)
        for g, w in zip(got, want, strict=True):
            near(g, w, 2e-6, sequence_parallel)
        with torch.no_grad():
            near(model(x), module(x), 2e-6)


@CXX
def test_inductor_equals_eager():
    spmd_processes(compiled, SIZE, "inductor")


def variants(comm):
    """Whatever a region is in, the compiled model does what the eager one does."""
    dtype = torch.float32

    def both(module, x, *args, region=lambda f: f()):
        model = torch.compile(module, fullgraph=True, backend="aot_eager")
        got = region(lambda: step(model, module, x, *args))
        want = region(lambda: step(module, module, x, *args))
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype
            near(g, w, 1e-5)

    torch.manual_seed(4)
    module = MLP(comm, True, dim=1)
    shard = normal(comm.rank, 2, 4, HIDDEN, dtype=dtype)
    both(module, shard)
    rows = (5, 3)
    both(module, normal(comm.rank, 2, rows[comm.rank], HIDDEN, dtype=dtype), rows)
    both(MLP(comm, True, save="gathered"), shard)

    def autocast(run):
        with torch.autocast("cpu", torch.bfloat16):
            return run()

    both(module, shard, region=autocast)

    class Checkpointed(MLP):
        def forward(self, x, rows=None):
            return self.second(checkpoint(self.first, x, rows, use_reentrant=False), rows)

    both(Checkpointed(comm, True), shard)
    for p in module.first.parameters():
        p.requires_grad_(False)
    with torch.inference_mode():
        near(torch.compile(module, fullgraph=True, backend="aot_eager")(shard), module(shard), 1e-5)

    # One graph for many lengths.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dynamic = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (4, 7, 9):
        shard = normal(comm.rank, 2, length, HIDDEN, dtype=dtype)
        near(dynamic(shard), module(shard), 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_variants():
    spmd_processes(variants, SIZE)


def plain(comm):
    x, w = leaf(ints(comm.rank, 4, 6)), leaf(ints(1, 5, 6))

    def function(x, w):
        gathered = ops.all_gather(x, comm)
        (first, second), again = ops.all_gather_matmul(x, (w, w), comm, bias=(None, w[:, 0]), return_gathered=True)
        summed = ops.all_reduce(gathered + again, comm)
        return ops.reduce_scatter(summed, comm) @ w.t() + ops.reduce_scatter(first + second, comm)

    got, want = [], []
    for seen, f in ((got, torch.compile(function, fullgraph=True, backend="aot_eager")), (want, function)):
        x.grad = w.grad = None
        out = f(x, w)
        out.square().sum().backward()
        seen += [out, x.grad, w.grad]
    for g, e in zip(got, want, strict=True):
        same(g, e)

    # A sink for weight gradients is no part of a graph: refused in one graph, eager otherwise.
    weight = leaf(w)
    taken = []

    def sink(x, weight):
        return ops.matmul_all_reduce(x, weight, comm, wgrad=lambda w, g: taken.append(g))

    with pytest.raises(Exception, match=r"cannot be compiled"):
        torch.compile(sink, fullgraph=True, backend="aot_eager")(x, weight)
    torch.compile(sink, backend="aot_eager")(x, weight).sum().backward()
    assert weight.grad is None and taken[0].shape == weight.shape


def test_plain_collectives_and_sinks():
    spmd_processes(plain, SIZE)


def serving(comm):
    """Residual, norm and fp8 operands: what serving adds to the ops compiles too."""
    x, w, residual, norm = ints(comm.rank, 4, 16), ints(1 + comm.rank, 32, 16), ints(3, 4, 32), ints(4, 32) + 3
    fp8, one = torch.float8_e4m3fn, torch.ones(1)
    cases = (
        lambda: ops.matmul_all_reduce(x, w, comm, residual=residual),
        lambda: ops.matmul_all_reduce(x, w, comm, residual=residual, norm_weight=norm, eps=1e-3),
        lambda: ops.matmul_all_reduce(x.to(fp8), w.to(fp8), comm, scale_a=one, scale_b=one),
        lambda: ops.all_gather_matmul(
            x.to(fp8), (w.to(fp8),) * 2, comm, bias=(None, norm.half()), scale_a=one, scale_b=(one, one),
            out_dtype=torch.float16, return_gathered=True,
        )[0],
        lambda: ops.matmul_reduce_scatter(x.to(fp8), w.to(fp8), comm, scale_a=one, scale_b=torch.ones(32)),
    )  # fmt: skip
    for i, function in enumerate(cases):
        model = torch.compile(function, fullgraph=True, backend="aot_eager")
        for got, want in zip(_tuple(model()), _tuple(function()), strict=True):
            same(got, want, i)
    for t in (x, w, residual, norm):
        t.requires_grad_()
    grads = []
    for function in (torch.compile(cases[1], fullgraph=True, backend="aot_eager"), cases[1]):
        normed, total = function()
        grads.append(torch.autograd.grad((normed * 2 + total).sum(), (x, w, residual, norm)))
    for got, want in zip(*grads, strict=True):
        near(got, want, 1e-12)


def _tuple(out):
    return (out,) if isinstance(out, torch.Tensor) else out


def test_what_serving_adds():
    spmd_processes(serving, SIZE)


def join(rank, folder, number):
    store = dist.FileStore(str(Path(folder) / f"gloo{number}"), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=60))


def names(rank, group, folder):
    """Every form of the group argument compiles; a graph outlives the group it was made for."""
    join(rank, folder, 0)
    comm = commbackend.init(transport="shm", device="cpu")
    second = commbackend.init(transport="shm", device="cpu", name="second")
    world = dist.group.WORLD
    assert comm.op_name == world.group_name and second.op_name == f"{world.group_name}:second"
    x = torch.full((2, 3), float(rank + 1))
    with torch.inference_mode():  # the first call of all: what it keeps must serve training too
        commbackend.all_reduce(x, comm)
    mesh = dist.init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))
    commbackend.init(mesh, transport="shm", device="cpu")
    for form in (comm, second, None, world, world.group_name, mesh, mesh["tp"]):
        torch._dynamo.reset()
        model = torch.compile(lambda x, g=form: ops.all_reduce(x, g) * 2, fullgraph=True, backend="aot_eager")
        same(model(x), torch.full((2, 3), 6.0), form)
    assert second.stats()["calls"] == 1

    name = comm.op_name
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.compile(lambda x: torch.ops.commbackend.all_reduce(x, name), fullgraph=True, backend="aot_eager")
    same(model(x), torch.full((2, 3), 3.0))
    second.close()
    dist.destroy_process_group()
    join(rank, folder, 1)
    # The old communicator was not closed: the name means the new group all the same.
    fresh = commbackend.init(transport="shm", device="cpu", timeout_s=30.0)
    assert fresh.op_name == name and fresh is not comm
    same(model(x), torch.full((2, 3), 3.0))
    assert fresh.stats()["calls"] == 1 and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    comm.close()
    fresh.close()
    dist.destroy_process_group()


def test_names_of_groups(tmp_path):
    run_ranks(names, SIZE, str(tmp_path), timeout_s=100.0)


def exported(comm):
    module = MLP(comm, True)
    x = normal(comm.rank, 4, 3, HIDDEN, dtype=torch.float32)
    program = torch.export.export(module, (x,))
    targets = {str(n.target) for n in program.graph.nodes if "commbackend" in str(n.target)}
    assert targets == {"commbackend.all_gather_matmul.default", "commbackend.matmul_reduce_scatter.default"}
    same(program.module()(x), module(x))


def test_export():
    spmd_processes(exported, SIZE)
