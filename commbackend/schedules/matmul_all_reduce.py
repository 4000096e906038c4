"""matmul_all_reduce: out = all_reduce(x @ w.T) (+ bias); ``rows`` says how the sum is split over ranks."""

from __future__ import annotations

from collections.abc import Callable

from . import all_reduce
from .draft import Draft
from .reduce_side import Partial

__all__ = ["SCHEDULES"]


def _planner(build: Callable[..., None]) -> Callable[[Draft], None]:
    def planner(d: Draft) -> None:
        p, n = d.problem, d.problem.n[0]
        d.inputs(("x", p.total, p.k), ("w0", n, p.k))
        if p.bias:
            d.inputs(("bias0", 1, n))
        d.outputs(("out0", p.total, n))
        build(d, Partial(n, (("x", "w0"),), bias="bias0" if p.bias else None), "out0")

    return planner


SCHEDULES = {name: _planner(build) for name, build in all_reduce.BUILDERS.items()}
