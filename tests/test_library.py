"""torch.ops.commbackend: PyTorch's own checks of operators, and their results and gradients against the eager ops."""

from __future__ import annotations

import pytest
import torch
from ops_world import Cut, ints, leaf, same, spmd_processes
from torch.utils.checkpoint import checkpoint

from commbackend import library, ops
from commbackend.errors import ConfigError, Unsupported
from commbackend.library import OPERATORS

SIZE, K, N, N2 = 2, 6, 5, 4
LIB = torch.ops.commbackend
UTILS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def operands(comm, cut):
    """The shard, all rows of other values, weights and biases: all leaves, exact."""
    x = leaf(ints(comm.rank, *cut.local(comm.rank, K)))
    whole = leaf(ints(10 + comm.rank, *cut.full(K)))
    ws = [leaf(ints(20 + comm.rank, N, K)), leaf(ints(30 + comm.rank, N2, K))]
    return x, whole, ws, [leaf(ints(40, N)), leaf(ints(41, N2))]


def calls(comm, cut):
    """Operator -> (positional, keyword) arguments in several forms each; and what ``ops`` makes of the same."""
    name = comm.op_name
    x, whole, ws, bs = operands(comm, cut)
    where = {"dim": cut.dim, "rows": None if cut.rows is None else list(cut.rows)}
    grads = [ints(50 + i, *cut.full(n)) for i, n in enumerate((N, N2))]
    part = ints(60, *cut.local(comm.rank, N))
    # Gradients are not differentiable again: nothing may require one.
    plain, flags = [w.detach() for w in ws], [True, False]
    return [
        (LIB.all_gather, (x, name), where),
        (LIB.reduce_scatter, (whole, name), where),
        (LIB.all_reduce, (whole, name), {}),
        (LIB.all_gather_matmul, (x, ws, bs, name), where),
        (LIB.all_gather_matmul, (x, ws[:1], [], name), {**where, "return_gathered": True}),
        (LIB.all_gather_matmul, (x, ws, [], name), {**where, "save_gathered": True}),
        (LIB.all_gather_matmul, (whole, [leaf(ints(1, N, SIZE * K))], [], name), {"dim": -1}),
        (LIB.matmul_reduce_scatter, (whole, ws[0], bs[0], name), where),
        (LIB.matmul_reduce_scatter, (whole, ws[1], bs[1], name), {"dim": -1}),
        (LIB.matmul_reduce_scatter, (whole, ws[0], None, name), where),
        (LIB.matmul_all_reduce, (whole, ws[0], bs[0], name), {}),
        (LIB.column_parallel_linear, (whole, ws, bs, name), {}),
        (LIB.matmul_all_reduce, (whole, ws[0], bs[0], name, leaf(ints(61, *cut.full(N)))), {}),
        (LIB.matmul_all_reduce_norm, (whole.detach(), plain[0], None, grads[0], bs[0].detach(), name, 1e-3), {}),
        *scaled_calls(comm, where, cut),
        (LIB.dgrad_reduce_scatter, (grads, plain, x.detach(), flags, name, cut.dim, where["rows"], False), {}),
        (LIB.dgrad_all_reduce, (grads, [], whole.detach(), flags, name), {}),
        (LIB.gather_grads, (part, whole.detach(), plain[0], name, cut.dim, where["rows"]), {}),
        (LIB.gather_grads, (part, None, plain[0], name, cut.dim, where["rows"]), {}),
    ]


def scaled_calls(comm, where, cut):
    name = comm.op_name
    a, whole, w = (
        ints(i, *s, 16).to(torch.float8_e4m3fn) for i, s in ((1, cut.local(comm.rank)), (2, cut.full()), (3, (16,)))
    )
    one, by_row, f16 = torch.ones(1), torch.ones(16), {"out_dtype": torch.float16}
    residual = ints(4, *cut.full(16), dtype=torch.bfloat16)
    yield (LIB.all_gather_scaled_matmul, (a, [w, w], one, [one, by_row], [], name), {**where, **f16})
    yield (LIB.all_gather_scaled_matmul, (a, [w], one, [one], [], name), {**where, "return_gathered": True})
    yield (LIB.scaled_matmul_reduce_scatter, (whole, w, one, by_row, None, name), where)
    yield (LIB.scaled_matmul_all_reduce, (whole, w, one, by_row, None, name), {"residual": residual})
    norm = torch.ones(16, dtype=torch.bfloat16)
    yield (LIB.matmul_all_reduce_norm, (whole, w, None, residual, norm, name, 1e-6, one, one, torch.bfloat16), {})


def check(comm):
    covered = set()
    for op, args, kwargs in calls(comm, Cut((2, 0), 1, (3, 1))):
        # test_schema compares values of arguments, for which torch has no fp8 kernel.
        fp8 = args[0].__class__ is torch.Tensor and args[0].dtype == torch.float8_e4m3fn
        results = torch.library.opcheck(op.default, args, kwargs, test_utils=UTILS[1:] if fp8 else UTILS)
        assert set(results.values()) == {"SUCCESS"} and len(results) >= 3, (op, results)
        covered.add(op._qualified_op_name.split("::")[1])
    assert covered == {o.name for o in OPERATORS}
    return len(covered)


def test_opcheck_of_every_operator():
    assert spmd_processes(check, SIZE) == [14, 14]


def gradients(comm):
    """Operators and ops give the same bits, forward and backward, whichever gradients are asked for."""
    for cut in (Cut((0,), 0, (3, 3)), Cut((2, 0), 1, (3, 1)), Cut((2, 0, 3), 1, (0, 2))):
        for frozen in range(8):
            _compare(comm, cut, frozen)
    return comm.stats()["calls"]


def _compare(comm, cut, frozen):
    name, where = comm.op_name, {"dim": cut.dim, "rows": cut.rows}

    def forms(x, whole, ws, bs):
        w, b = ws[0], bs[0]
        yield (
            lambda: LIB.all_gather_matmul(x, ws, bs, name, return_gathered=True, **where),
            lambda: (lambda o: [*o[0], o[1]])(
                ops.all_gather_matmul(x, ws, comm, bias=bs, return_gathered=True, **where)
            ),
        )
        yield (
            lambda: LIB.all_gather_matmul(x, ws, [], name, save_gathered=True, **where)[:1],  # one product is not used
            lambda: [ops.all_gather_matmul(x, ws, comm, save="gathered", **where)[0]],
        )
        yield (
            lambda: LIB.all_gather_matmul(whole, [torch.cat([w, w], 1)], [], name, dim=-1),
            lambda: [ops.all_gather_matmul(whole, torch.cat([w, w], 1), comm, dim=-1)],
        )
        yield (
            lambda: [LIB.matmul_reduce_scatter(whole, w, b, name, **where)],
            lambda: [ops.matmul_reduce_scatter(whole, w, comm, bias=b, **where)],
        )
        yield (
            lambda: [LIB.matmul_reduce_scatter(whole, w, b, name, dim=-1, rows=(1, 4))],
            lambda: [ops.matmul_reduce_scatter(whole, w, comm, bias=b, dim=-1, rows=(1, 4))],
        )
        yield (
            lambda: [LIB.matmul_all_reduce(whole, w, b, name)],
            lambda: [ops.matmul_all_reduce(whole, w, comm, bias=b)],
        )
        yield (
            lambda: [LIB.matmul_all_reduce(whole, w, b, name, residual)],
            lambda: [ops.matmul_all_reduce(whole, w, comm, bias=b, residual=residual)],
        )
        yield (
            lambda: LIB.column_parallel_linear(whole, ws, bs, name),
            lambda: ops.column_parallel_linear(whole, ws, comm, bias=bs),
        )
        yield lambda: [LIB.all_gather(x, name, **where)], lambda: [ops.all_gather(x, comm, **where)]
        yield lambda: [LIB.reduce_scatter(whole, name, **where)], lambda: [ops.reduce_scatter(whole, comm, **where)]
        yield lambda: [LIB.all_reduce(whole, name)], lambda: [ops.all_reduce(whole, comm)]

    x, whole, ws, bs = operands(comm, cut)
    residual = leaf(ints(62, *cut.full(N)))
    for bit, leaves in enumerate(((x, whole), ws[:1], bs)):
        for t in leaves:
            t.requires_grad_(not frozen >> bit & 1)
    leaves = [x, whole, *ws, *bs, residual]
    for i, (operator, eager) in enumerate(forms(x, whole, ws, bs)):
        seen = []
        for call in (operator, eager):
            outs = call()
            for t in leaves:
                t.grad = None
            wanted = [o for o in outs if o.requires_grad]
            if wanted:
                torch.autograd.backward(wanted, [ints(70 + i, *o.shape) for o in wanted])
            seen.append([*outs, *(t.grad for t in leaves)])
        for got, want in zip(*seen, strict=True):
            assert (got is None) == (want is None), (i, frozen)
            if got is not None:
                same(got, want, (i, frozen, cut))


def test_operators_equal_the_ops():
    spmd_processes(gradients, SIZE)


def modes(comm):
    name, x, w, b = comm.op_name, ints(comm.rank, 4, K), ints(3, N, K), ints(4, N)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = LIB.all_gather_matmul(leaf(x), [leaf(w)], [], name)[0]
            assert not out.requires_grad
            same(LIB.matmul_reduce_scatter(out, w.t(), None, name), ops.matmul_reduce_scatter(out, w.t(), comm))
    made_inside = out
    same(LIB.all_reduce(made_inside, name), made_inside * SIZE)  # usable outside the region

    # Autocast casts as it does for linear; gradients come in the leaves' own types.
    with torch.autocast("cpu", torch.bfloat16):
        for op, args in (
            (LIB.all_gather_matmul, (leaf(x.float()), [leaf(w.float())], [leaf(b.float())], name)),
            (LIB.matmul_reduce_scatter, (leaf(x.float()), leaf(w.float()), leaf(b.float()), name)),
            (LIB.matmul_all_reduce, (leaf(x.float()), leaf(w.float()), leaf(b.float()), name)),
            (LIB.column_parallel_linear, (leaf(x.float()), [leaf(w.float())], [leaf(b.float())], name)),
        ):
            out = op(*args)
            out = out if isinstance(out, torch.Tensor) else out[0]
            assert out.dtype == torch.bfloat16
            out.sum().backward()
            assert args[0].grad.dtype == torch.float32

    # Activation checkpointing runs forward again within backward: the same gradients.
    plain, twice = leaf(x), leaf(x)
    weight = leaf(w)

    def block(t):
        return LIB.matmul_reduce_scatter(LIB.all_gather_matmul(t, [weight], [], name)[0].relu(), weight.t(), None, name)

    block(plain).square().sum().backward()
    before = comm.stats()["calls"]
    checkpoint(block, twice, use_reentrant=False).square().sum().backward()
    same(twice.grad, plain.grad)
    return comm.stats()["calls"] - before


def test_modes():
    assert spmd_processes(modes, SIZE) == [6, 6]  # two forward, two again, two backward


def refusals(comm):
    x, w = leaf(ints(0, 4, K)), leaf(ints(1, N, K))
    with pytest.raises(ConfigError, match=r"no group is called 'nobody'.*there are: group.*group_name\(group\)"):
        LIB.all_reduce(x, "nobody")
    grad = torch.autograd.grad(
        LIB.column_parallel_linear(x, [w], [], comm.op_name)[0].square().sum(), x, create_graph=True
    )[0]
    with pytest.raises(Unsupported, match="double backward"):
        grad.sum().backward()
    assert library.group_name(comm) == comm.op_name
    return comm.op_name


def test_what_is_refused():
    assert spmd_processes(refusals, SIZE) == ["group", "group"]
