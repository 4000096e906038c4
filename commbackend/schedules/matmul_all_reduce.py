"""matmul_all_reduce: out = all_reduce(x @ w.T) (+ residual) (+ bias); ``rows`` says how the sum is split over ranks.

Flag "norm": normed = RMSNorm(out), which only a kernel that sums whole rows folds in (``one_shot_kernel``).
"""

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
        residual = "residual" if "residual" in p.flags else None
        if residual:
            d.inputs((residual, p.total, n))
        d.outputs(("out0", p.total, n))
        if "norm" in p.flags:
            d.inputs(("norm_weight", 1, n))
            d.outputs(("normed", p.total, n))
        build(d, Partial(n, (("x", "w0"),), bias="bias0" if p.bias else None, residual=residual), "out0")

    return planner


SCHEDULES = {name: _planner(build) for name, build in all_reduce.BUILDERS.items()}
