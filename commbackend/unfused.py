"""One call as plain collectives and local products: what ``transport="off"`` does, and what serves a problem that no
schedule takes.

It reads and writes the same named tensors as ``Communicator.run`` (docs/architecture.md), so the ops above do not
know the difference; ``stats`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from .errors import Unsupported
from .plan import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from .communicator import Communicator

__all__ = ["execute", "product"]

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def execute(comm: Communicator, problem: Problem, tensors: Mapping[str, Tensor]) -> None:
    """Run ``problem`` on the engine, or unfused where the engine is off or has no schedule for it. Collective.

    Raises:
        Unsupported: A plain collective has no schedule on this transport; there is nothing left to fall back to.
    """
    reason = "transport is off" if comm.off else comm.supports(problem)
    if reason is None:
        comm.run(problem, tensors)
        return
    if problem.op in _COLLECTIVES and not comm.off:
        raise Unsupported(f"rank {comm.rank}: {problem.op} of {problem.dtype} over {comm.transport}: {reason}")
    comm.count(problem.op, False, reason)
    _Unfused(comm, problem, tensors).run()


def product(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ w.T (+ bias row): the bits of ``torch.nn.functional.linear``."""
    if bias is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(bias, x, w.t(), out=out)


class _Unfused:
    """One call on one rank."""

    def __init__(self, comm: Communicator, problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        self.comm, self.p, self.t = comm, problem, tensors
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
                self.add_bias(self.scatter(t["x"] @ t["w0"].t()))
            case "matmul_all_reduce":
                self.add_bias(self.reduce(t["x"] @ t["w0"].t()))
            case "dgrad_reduce_scatter" | "dgrad_all_reduce":
                self.dgrad()
            case _:
                raise Unsupported(f"no unfused form of {p.op!r}")

    def all_gather_matmul(self) -> None:
        p, t = self.p, self.t
        gathered = self.gather(t["x"])
        for i, w in enumerate(self.weights):
            product(gathered, w, t[f"bias{i}"][0] if p.bias else None, t[f"out{i}"])
        if "gathered" in p.flags:
            t["gathered"].copy_(gathered)
        if "wgrad" in p.flags:
            torch.mm(gathered.t(), t["y"], out=t["dw"])

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
        if comm.off:
            blocks = x.reshape(p.blocks, p.rows[comm.rank], cols)
            return comm.stock.all_gather(blocks, dim=1, rows=self.uneven()).reshape(p.blocks * p.total, cols)
        out = x.new_empty((p.blocks * p.total, cols))
        execute(comm, Problem("all_gather", p.rows, p.blocks, cols, dtype=p.dtype), {"x": x, "out": out})
        return out

    def scatter(self, x: Tensor) -> Tensor:
        p, comm, cols = self.p, self.comm, x.shape[1]
        mine = p.rows[comm.rank]
        if comm.off:
            blocks = x.reshape(p.blocks, p.total, cols)
            return comm.stock.reduce_scatter(blocks, dim=1, rows=self.uneven()).reshape(p.blocks * mine, cols)
        out = x.new_empty((p.blocks * mine, cols))
        execute(comm, Problem("reduce_scatter", p.rows, p.blocks, cols, dtype=p.dtype), {"x": x, "out": out})
        return out

    def reduce(self, x: Tensor) -> Tensor:
        if self.comm.off:
            return self.comm.stock.all_reduce(x)
        out = torch.empty_like(x)
        execute(self.comm, Problem("all_reduce", self.p.rows, k=x.shape[1], dtype=self.p.dtype), {"x": x, "out": out})
        return out

    def uneven(self) -> tuple[int, ...] | None:
        return self.p.rows if len(set(self.p.rows)) > 1 else None
