"""One call as plain collectives and local products: what ``transport="off"`` does, and what serves a problem that no
schedule takes.

It reads and writes the same named tensors as ``Communicator.run`` (docs/architecture.md), so the ops above do not
know the difference; ``stats`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from .. import registry
from ..contract import GemmProblem, GemmSegment
from ..errors import Unsupported
from ..plan import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from ..communicator import Communicator

__all__ = ["execute", "product", "unfused"]

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def execute(comm: Communicator, problem: Problem, tensors: Mapping[str, Tensor]) -> None:
    """Run ``problem`` on the engine, or unfused where the engine is off or has no schedule for it. Collective.

    Raises:
        Unsupported: A plain collective has no schedule on this transport; there is nothing left to fall back to.
    """
    if comm.stock_wins(problem) and not comm.config.batch_invariant:
        comm.count(problem.op, False, "torch.distributed was measured to be faster")
        unfused(comm, problem, tensors, stock=True)
        return
    reason = "transport is off" if comm.off else comm.supports(problem)
    if reason is None:
        comm.run(problem, tensors)
        return
    if (problem.op in _COLLECTIVES or comm.config.batch_invariant) and not comm.off:
        raise Unsupported(f"rank {comm.rank}: {problem.op} of {problem.dtype} over {comm.transport}: {reason}")
    comm.count(problem.op, False, reason)
    unfused(comm, problem, tensors)


def unfused(comm: Communicator, problem: Problem, tensors: Mapping[str, Tensor], *, stock: bool = False) -> None:
    """Run ``problem`` as collectives and products, one after the other; ``stock``: torch.distributed's. Collective."""
    _Unfused(comm, problem, tensors, stock).run()


def product(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ w.T (+ bias row): the bits of ``torch.nn.functional.linear``."""
    if bias is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(bias, x, w.t(), out=out)


class _Unfused:
    """One call on one rank."""

    def __init__(self, comm: Communicator, problem: Problem, tensors: Mapping[str, Tensor], stock: bool) -> None:
        self.comm, self.p, self.t = comm, problem, tensors
        self.stock = stock or comm.off
        self.weights = [tensors[f"w{i}"] for i in range(len(problem.n)) if f"w{i}" in tensors]

    def run(self) -> None:
        p, t = self.p, self.t
        match p.op:
            case "all_gather":
                t["out"].copy_(self.gather(t["x"]))
            case "reduce_scatter":
                t["out"].copy_(self.scatter(t["x"]))
            case "all_reduce":
                t["out"].copy_(self.reduce(t["x"]))
            case "all_gather_matmul":
                self.all_gather_matmul()
            case "matmul_reduce_scatter":
                self.add_bias(self.scatter(self.partial()))
            case "matmul_all_reduce":
                total = self.reduce(self.partial())
                self.add_bias(total.add_(t["residual"]) if "residual" in p.flags else total)
            case "dgrad_reduce_scatter" | "dgrad_all_reduce":
                self.dgrad()
            case _:
                raise Unsupported(f"no unfused form of {p.op!r}")

    def all_gather_matmul(self) -> None:
        p, t = self.p, self.t
        gathered = self.gather(t["x"])
        for i, w in enumerate(self.weights):
            bias = t[f"bias{i}"][0] if p.bias else None
            if p.scales:
                self.scaled_product(gathered, i, bias, t[f"out{i}"])
            else:
                product(gathered, w, bias, t[f"out{i}"])
        if "gathered" in p.flags:
            t["gathered"].copy_(gathered)
        if "wgrad" in p.flags:
            torch.mm(gathered.t(), t["y"], out=t["dw"])

    def partial(self) -> Tensor:
        """This rank's product of all rows."""
        x, w = self.t["x"], self.t["w0"]
        if not self.p.scales:
            return x @ w.t()
        out = torch.empty(x.shape[0], w.shape[0], dtype=getattr(torch, self.p.result), device=x.device)
        self.scaled_product(x, 0, None, out)
        return out

    def scaled_product(self, x: Tensor, i: int, bias: Tensor | None, out: Tensor) -> None:
        """out = x @ weight i, fp8 with scales (+ bias row)."""
        w, p = self.weights[i], self.p
        (m, k), n = x.shape, w.shape[0]
        problem = GemmProblem(m, n, k, p.dtype, p.result, x.device.type, bias=bias is not None, scales=True)
        scale_a, scale_b = self.t["scale_a"][0], self.t[f"scale_b{i}"][0]
        registry.gemm("torch")().prepare(problem)([GemmSegment(x, w, out, bias, scale_a=scale_a, scale_b=scale_b)])

    def add_bias(self, total: Tensor) -> None:
        if self.p.bias:
            torch.add(total, self.t["bias0"], out=self.t["out0"])
        else:
            self.t["out0"].copy_(total)

    def dgrad(self) -> None:
        p, t = self.p, self.t
        grads = [t[f"dy{i}"] for i in range(len(p.n))]
        if "no_dgrad" not in p.flags:
            partial = grads[0] @ self.weights[0]
            for dy, w in zip(grads[1:], self.weights[1:], strict=True):
                partial.addmm_(dy, w)
            t["dx"].copy_(self.scatter(partial) if p.op == "dgrad_reduce_scatter" else self.reduce(partial))
        if "wgrad" in p.flags:
            x = t["gathered"] if "saved" in p.flags else t["x"]
            if p.op == "dgrad_reduce_scatter" and "saved" not in p.flags:
                x = self.gather(x)
            for i, dy in enumerate(grads):
                torch.mm(dy.t(), x, out=t[f"dw{i}"])

    # -- the three collectives, of 2-D tensors laid out as the problem says -------------------------------------------
    def gather(self, x: Tensor) -> Tensor:
        p, comm, cols = self.p, self.comm, x.shape[1]
        if self.stock:
            blocks = x.reshape(p.blocks, p.rows[comm.rank], cols)
            return comm.stock.all_gather(blocks, dim=1, rows=self.uneven()).reshape(p.blocks * p.total, cols)
        out = x.new_empty((p.blocks * p.total, cols))
        execute(comm, Problem("all_gather", p.rows, p.blocks, cols, dtype=p.dtype), {"x": x, "out": out})
        return out

    def scatter(self, x: Tensor) -> Tensor:
        p, comm, cols = self.p, self.comm, x.shape[1]
        mine = p.rows[comm.rank]
        if self.stock:
            blocks = x.reshape(p.blocks, p.total, cols)
            return comm.stock.reduce_scatter(blocks, dim=1, rows=self.uneven()).reshape(p.blocks * mine, cols)
        out = x.new_empty((p.blocks * mine, cols))
        execute(comm, Problem("reduce_scatter", p.rows, p.blocks, cols, dtype=p.result), {"x": x, "out": out})
        return out

    def reduce(self, x: Tensor) -> Tensor:
        if self.stock:
            return self.comm.stock.all_reduce(x)
        out = torch.empty_like(x)
        execute(self.comm, Problem("all_reduce", self.p.rows, k=x.shape[1], dtype=self.p.result), {"x": x, "out": out})
        return out

    def uneven(self) -> tuple[int, ...] | None:
        return self.p.rows if len(set(self.p.rows)) > 1 else None
