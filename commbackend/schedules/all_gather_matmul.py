"""all_gather_matmul: out_i = all_gather(x) @ w_i.T (+ bias_i); flags add the gathered rows and gathered.T @ y."""

from __future__ import annotations

from collections.abc import Callable

from . import gather_side, two_level
from .draft import Draft
from .gather_side import Gather, Product

__all__ = ["SCHEDULES"]


def _declare(d: Draft) -> Gather:
    p, rows = d.problem, d.shards.gathered_rows
    d.inputs(("x", d.shards.held(d.rank), p.k))
    products = []
    for i, n in enumerate(p.n):
        d.inputs((f"w{i}", n, p.k))
        if p.bias:
            d.inputs((f"bias{i}", 1, n))
        d.outputs((f"out{i}", rows, n))
        products.append(Product(f"w{i}", f"out{i}", f"bias{i}" if p.bias else None))
    if "gathered" in p.flags:
        d.outputs(("gathered", rows, p.k))
    if "wgrad" in p.flags:
        d.inputs(("y", rows, p.n[0]))
        d.outputs(("dw", p.k, p.n[0]))
    out = "gathered" if "gathered" in p.flags else None
    return Gather(p.k, tuple(products), out, ("y", "dw") if "wgrad" in p.flags else None)


def _planner(build: Callable[[Draft, Gather], None]) -> Callable[[Draft], None]:
    return lambda d: (build if d.size > 1 else gather_side.sequence)(d, _declare(d))


SCHEDULES = {
    "push": _planner(gather_side.push),
    "pull": _planner(gather_side.pull),
    "collective": _planner(gather_side.collective),
    "sequence": _planner(gather_side.sequence),
    "two_level": _planner(two_level.gather),
}
