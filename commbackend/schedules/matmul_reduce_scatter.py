"""matmul_reduce_scatter: out = reduce_scatter(x @ w.T) (+ bias)."""

from __future__ import annotations

from collections.abc import Callable

from . import reduce_side, two_level
from .draft import Draft
from .reduce_side import Partial

__all__ = ["SCHEDULES"]


def _planner(build: Callable[..., None]) -> Callable[[Draft], None]:
    def planner(d: Draft) -> None:
        p, rows, n = d.problem, d.shards.gathered_rows, d.problem.n[0]
        d.inputs(("x", rows, p.k), ("w0", n, p.k))
        if p.bias:
            d.inputs(("bias0", 1, n))
        d.outputs(("out0", d.shards.held(d.rank), n))
        partial = Partial(n, (("x", "w0"),), bias="bias0" if p.bias else None)
        if d.size == 1:
            reduce_side.alone(d, partial, "out0")
        else:
            build(d, partial, d.shards.packed("out0", d.rank))

    return planner


SCHEDULES = {
    "push": _planner(reduce_side.push),
    "direct": _planner(reduce_side.direct),
    "pull": _planner(reduce_side.pull),
    "collective": _planner(reduce_side.collective),
    "sequence": _planner(reduce_side.sequence),
    "two_level": _planner(two_level.reduce),
}
