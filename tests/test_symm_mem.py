"""torch.ops.symm_mem.fused_* for groups of ours: eager, as frameworks call them, and from a compiled model."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as torch_symm_mem
from ops_world import ints, leaf, near, normal, same

import commbackend
from commbackend.errors import Unsupported
from commbackend.testing import run_ranks

SIZE, K, N = 2, 12, 10
OPS = torch.ops.symm_mem
CXX = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler: none is on PATH"
)


def join(rank, folder):
    store = dist.FileStore(str(Path(folder) / "gloo"), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=60))
    from commbackend.integrations import symm_mem

    world = dist.group.WORLD
    symm_mem.install(world, transport="shm", device="cpu", timeout_s=60.0)
    return symm_mem, commbackend.init(world, device="cpu"), world.group_name


def leave(symm_mem, comm):
    symm_mem.uninstall()
    comm.close()
    dist.destroy_process_group()


def made(comm):
    """Calls of each operation so far, however they were scheduled."""
    stats, found = comm.stats(), {}
    for key, n in (stats["overlapped_by_op"] | stats["fallback_by_op"]).items():
        op = key.partition("/")[0]
        found[op] = found.get(op, 0) + n
    return found


def eager(rank, group, folder):
    symm_mem, comm, name = join(rank, folder)
    fallback = torch_symm_mem._fused_all_gather_matmul_fallback
    for dtype in (torch.float64, torch.bfloat16):
        for shape, dims in (((4, K), (0,)), ((2, 4, K), (0, 1)), ((2, 3, 4, K), (0, 1, 2))):
            a = ints(rank, *shape, dtype=dtype)
            bs = [ints(10 + rank, n, K, dtype=dtype).t() for n in (N, 4)]
            for dim in dims:
                # Natural strides, and those that torch's pass asks for.
                for x in (a, torch_symm_mem.restride_A_shard_for_fused_all_gather_matmul(a, dim)):
                    for return_a in (True, False):
                        whole, outs = OPS.fused_all_gather_matmul(x, bs, dim, name, return_A=return_a)
                        want_whole, want = fallback(x, bs, dim, name, return_A=return_a)
                        for got, expected in zip([*outs, *[whole] * return_a], [*want, *[want_whole] * return_a]):
                            same(got, expected, (shape, dim))
                            assert got.stride() == expected.stride()
                        assert return_a or whole is None
            b = bs[0]
            for dim in range(len(shape)):
                whole = ints(20 + rank, *shape, dtype=dtype)
                for op in ("sum", "avg") if whole.shape[dim] % SIZE == 0 else ():
                    x = torch_symm_mem.restride_A_for_fused_matmul_reduce_scatter(whole, dim)
                    want = _scattered(whole @ b, op, dim)
                    for form in (whole, x):
                        got = OPS.fused_matmul_reduce_scatter(form, b, op, dim, name)
                        same(got, want, (shape, dim, op))
                        assert got.is_contiguous()
    counted = made(comm)
    assert counted["all_gather_matmul"] == 2 * 2 * 2 * 6 and set(counted) == {
        "all_gather_matmul",
        "matmul_reduce_scatter",
    }
    leave(symm_mem, comm)


def _scattered(product, op, dim):
    total = product.double()
    dist.all_reduce(total)
    total = total / SIZE if op == "avg" else total
    return total.chunk(SIZE, dim)[dist.get_rank()].to(product.dtype)


def test_eager_is_exact(tmp_path):
    run_ranks(eager, SIZE, str(tmp_path), timeout_s=60.0)


def quantised(seed, *shape, by_row):
    """fp8 values of shape (..., k) and their scales."""
    t = normal(seed, *shape, dtype=torch.float32)
    scale = (t.abs().amax(-1, keepdim=True) if by_row else t.abs().max()) / 448.0
    return (t / scale).to(torch.float8_e4m3fn), scale


def scaled(rank, group, folder):
    symm_mem, comm, name = join(rank, folder)
    bf16 = torch.bfloat16
    for by_row in (True, False):
        for dim in (0, 1):
            a, a_scale = quantised(rank if by_row else 0, 2, 4, 32, by_row=by_row)
            b, b_scale = quantised(9 + rank, 16, 32, by_row=by_row)
            b, b_scale = b.t(), b_scale.t()
            bias = normal(4, 16, dtype=bf16)
            tail = ([bias], [None], [bf16], [False])
            got = OPS.fused_all_gather_scaled_matmul(a, [b], a_scale, [b_scale], dim, name, *tail)
            shards = [quantised(r if by_row else 0, 2, 4, 32, by_row=by_row) for r in range(SIZE)]
            whole = torch.cat([x for x, _ in shards], dim)
            all_scales = torch.cat([s for _, s in shards], dim) if by_row else a_scale
            flat_scales = all_scales.flatten(0, 1) if by_row else a_scale
            want = torch._scaled_mm(whole.flatten(0, 1), b, flat_scales, b_scale, bias, out_dtype=bf16)
            want = want.view(*whole.shape[:-1], 16)
            same(got[0].view(torch.uint8), whole.view(torch.uint8))
            near(got[1][0], want, 1e-2, (by_row, dim))
            assert got[1][0].dtype == bf16 and got[1][0].movedim(dim, 0).is_contiguous()
            if by_row:  # scales of all rows on every rank
                again = OPS.fused_all_gather_scaled_matmul(a, [b], all_scales, [b_scale], dim, name, *tail)
                same(again[1][0], got[1][0])
            for op in ("sum", "avg"):
                shape = [2, 4, 16]
                flat, flat_scale = a.flatten(0, 1), a_scale.flatten(0, 1) if by_row else a_scale
                args = (flat, b, flat_scale, b_scale, op, dim, 0, name, shape)
                got_rs = OPS.fused_scaled_matmul_reduce_scatter(*args, None, None, bf16)
                product = torch._scaled_mm(flat, b, flat_scale, b_scale, out_dtype=torch.float32).view(shape)
                near(got_rs, _scattered(product, op, dim).to(bf16), 2e-2, (by_row, dim, op))
    stats = comm.stats()
    assert all(key.endswith("/sequence") for key in stats["fallback_by_op"]), stats
    # A bias inside every rank's product, results in fp8: as torch does it, and counted.
    args = (flat, b, flat_scale, b_scale, "sum", 0, 0, name, shape)
    with_bias = OPS.fused_scaled_matmul_reduce_scatter(*args, bias, None, bf16)
    near(with_bias, _scattered(product + bias.float(), "sum", 0).to(bf16), 3e-2)
    reasons = {"matmul_reduce_scatter/bias of every rank's partial product": 1}
    assert reasons.items() <= comm.stats()["fallback_by_op"].items()
    leave(symm_mem, comm)


def test_scaled(tmp_path):
    run_ranks(scaled, SIZE, str(tmp_path), timeout_s=60.0)


def routing(rank, group, folder):
    """Who is served, what runs as torch does it, and what is left after uninstall."""
    symm_mem, comm, name = join(rank, folder)
    other = dist.new_group()
    a, b = ints(rank, 4, K), ints(3, N, K).t()
    want = torch.cat([ints(r, 4, K) for r in range(SIZE)]) @ b

    def product(x, y, group_name, dim=0):
        return OPS.fused_all_gather_matmul(x, [y], dim, group_name, return_A=False)[1][0]

    # Not ours: torch's own form, uncounted.
    same(product(a, b, other.group_name), want)
    assert comm.stats()["calls"] == 0 and symm_mem.managed() == [name]
    # Ours, but nothing to overlap: torch's form, counted with the reason.
    wide = ints(4, SIZE * K, N)
    same(product(a, wide, name, 1), torch.cat([ints(r, 4, K) for r in range(SIZE)], 1) @ wide)
    same(product(a.to(torch.int32), b.to(torch.int32), name), want.to(torch.int32))
    fallback = comm.stats()["fallback_by_op"]
    assert fallback == {
        "all_gather_matmul/gathered along the last dimension": 1,
        "all_gather_matmul/products of torch.int32": 1,
    }
    symm_mem.install(name, strict=True)
    with pytest.raises(
        Unsupported,
        match=r"all_gather_matmul of torch\.ops\.symm_mem\.\w+ cannot be fused: gathered along the last",
    ):
        product(a, wide, name, 1)
    with torch.autocast("cpu", torch.bfloat16):  # regions do not cast what torch's kernels would not
        same(product(a.float(), b.float(), name), want.float())
    with torch.inference_mode():
        same(product(a, b, name), want)
    symm_mem.install([other], transport="shm", device="cpu")
    assert symm_mem.managed() == sorted([name, other.group_name])
    symm_mem.uninstall([other])
    assert symm_mem.managed() == [name]
    # A closed communicator serves nobody: torch's form again.
    calls = comm.stats()["calls"]
    commbackend.init(other, device="cpu").close()
    comm.close()
    same(product(a, b, name), want)
    assert comm.stats()["calls"] == calls
    symm_mem.uninstall()
    assert symm_mem.managed() == [] and not torch_symm_mem.is_symm_mem_enabled_for_group(name)
    with pytest.raises(NotImplementedError):
        product(a, b, name)
    dist.destroy_process_group()


def test_routing(tmp_path):
    run_ranks(routing, SIZE, str(tmp_path), timeout_s=60.0)


class GatherLinear(torch.autograd.Function):
    """The pattern of torchtitan's eager layers: forward keeps a slice of the gathered input's features, so that the
    weight's gradient is an all-gather and a product again, of a transposed operand.
    """

    @staticmethod
    def forward(ctx, x, w, name):
        whole, (out,) = OPS.fused_all_gather_matmul(x, [w.t()], 0, name, return_A=True)
        part = whole.shape[1] // SIZE
        slice_k = whole.narrow(1, dist.get_rank() * part, part)
        ctx.save_for_backward(slice_k.clone(), w)
        ctx.name = name
        return out

    @staticmethod
    def backward(ctx, dy):
        x_shard_k, w = ctx.saved_tensors
        dx = OPS.fused_matmul_reduce_scatter(dy, w, "sum", 0, ctx.name)
        _, (dwt,) = OPS.fused_all_gather_matmul(x_shard_k.T, [dy], 0, ctx.name, return_A=False)
        return dx, dwt.T, None


class LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, name):
        ctx.save_for_backward(x, w)
        ctx.name = name
        return OPS.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, name)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        whole, (dx,) = OPS.fused_all_gather_matmul(dy, [w], 0, ctx.name, return_A=True)
        return dx, whole.t() @ x, None


def framework(rank, group, folder):
    symm_mem, comm, name = join(rank, folder)
    x, w1, w2 = leaf(ints(rank, 4, K)), leaf(ints(5 + rank, N, K)), leaf(ints(7 + rank, K, N))
    y = LinearScatter.apply(GatherLinear.apply(x, w1, name).relu(), w2, name)
    grads = torch.autograd.grad(y.sum(), (x, w1, w2))
    assert made(comm) == {"all_gather_matmul": 3, "matmul_reduce_scatter": 2}
    from commbackend import ops

    z = ops.matmul_reduce_scatter(ops.all_gather_matmul(x, w1, comm).relu(), w2, comm)
    same(y, z)
    for got, want in zip(grads, torch.autograd.grad(z.sum(), (x, w1, w2)), strict=True):
        same(got, want)
    leave(symm_mem, comm)


def test_call_patterns_of_eager_frameworks(tmp_path):
    run_ranks(framework, SIZE, str(tmp_path), timeout_s=60.0)


def compiled(rank, group, folder):
    """A sequence-parallel MLP over functional collectives, as torch.compile sees DTensor models."""
    symm_mem, comm, _ = join(rank, folder)
    dtype = torch.float32
    # Rows of (batch, sequence shard, hidden); torch's pass wants full products of decent size no more than we do.
    x, w1, w2 = (
        normal(rank, 2, 8, 32, dtype=dtype),
        normal(5 + rank, 48, 32, dtype=dtype),
        normal(7 + rank, 32, 48, dtype=dtype),
    )

    def mlp(x, w1, w2):
        gathered = funcol.all_gather_tensor_autograd(x, 1, dist.group.WORLD)
        hidden = torch.relu(gathered @ w1.t())
        return funcol.reduce_scatter_tensor_autograd(hidden @ w2.t(), "sum", 1, dist.group.WORLD)

    model = torch.compile(
        mlp, fullgraph=True, options={"post_grad_custom_post_pass": symm_mem.graph_pass(), "fx_graph_cache": False}
    )
    seen = []
    for f in (model, mlp):
        leaves = [leaf(t) for t in (x, w1, w2)]
        out = f(*leaves)
        out.square().sum().backward()
        seen.append([out, *(t.grad for t in leaves)])
        if f is model:
            counted = made(comm)
    for got, want in zip(*seen, strict=True):
        near(got, want, 1e-5)
    # Forward and backward: a gather and a scatter each.
    assert counted == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}, counted
    leave(symm_mem, comm)


@CXX
def test_a_compiled_model_goes_through_us(tmp_path):
    run_ranks(compiled, SIZE, str(tmp_path), timeout_s=110.0)
