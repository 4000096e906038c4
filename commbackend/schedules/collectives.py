"""all_gather, reduce_scatter, all_reduce: the collectives by themselves, without a product to hide them behind."""

from __future__ import annotations

from collections.abc import Callable

from . import all_reduce, gather_side, reduce_side, two_level
from .draft import Draft
from .gather_side import Gather
from .reduce_side import Partial

__all__ = ["ALL_GATHER", "ALL_REDUCE", "REDUCE_SCATTER"]


def _all_gather(build: Callable[[Draft, Gather], None]) -> Callable[[Draft], None]:
    def planner(d: Draft) -> None:
        d.inputs(("x", d.shards.held(d.rank), d.problem.k))
        d.outputs(("out", d.shards.gathered_rows, d.problem.k))
        (build if d.size > 1 else gather_side.sequence)(d, Gather(d.problem.k, out="out"))

    return planner


def _reduce_scatter(build: Callable[..., None]) -> Callable[[Draft], None]:
    def planner(d: Draft) -> None:
        d.inputs(("x", d.shards.gathered_rows, d.problem.k))
        d.outputs(("out", d.shards.held(d.rank), d.problem.k))
        if d.size == 1:
            reduce_side.alone(d, Partial(d.problem.k), "out")
        else:
            build(d, Partial(d.problem.k), d.shards.packed("out", d.rank))

    return planner


def _all_reduce(build: Callable[..., None]) -> Callable[[Draft], None]:
    def planner(d: Draft) -> None:
        d.inputs(("x", d.problem.total, d.problem.k))
        d.outputs(("out", d.problem.total, d.problem.k))
        build(d, Partial(d.problem.k), "out")

    return planner


ALL_GATHER = {
    "push": _all_gather(gather_side.push),
    "pull": _all_gather(gather_side.pull),
    "collective": _all_gather(gather_side.collective),
    "two_level": _all_gather(two_level.gather),
}
REDUCE_SCATTER = {
    "push": _reduce_scatter(reduce_side.push),
    "pull": _reduce_scatter(reduce_side.pull),
    "collective": _reduce_scatter(reduce_side.collective),
    "two_level": _reduce_scatter(two_level.reduce),
}
ALL_REDUCE = {
    name: _all_reduce(build)
    for name, build in all_reduce.BUILDERS.items()
    if name not in ("two_shot_direct", "sequence")
}
