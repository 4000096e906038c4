"""dgrad_reduce_scatter and dgrad_all_reduce: the backward of gather-side and column-parallel products.

dx = reduce(sum_i dy_i @ w_i), and with flag ``wgrad`` dw_i = dy_i.T @ gathered(x). The gather of x flies while the
dgrad products run; the partial sums of dx fly while the wgrad products run.
"""

from __future__ import annotations

from collections.abc import Callable

from . import all_reduce, gather_side, reduce_side, two_level
from .draft import Draft
from .reduce_side import Partial

__all__ = ["ALL_REDUCE", "REDUCE_SCATTER"]


def _declare(d: Draft, dx_rows: int) -> Partial | None:
    """Declare gradients and weights; return the partial of dx, or None with flag ``no_dgrad``."""
    p, rows = d.problem, d.shards.gathered_rows
    for i, n in enumerate(p.n):
        d.inputs((f"dy{i}", rows, n))
        if "wgrad" in p.flags:
            d.outputs((f"dw{i}", n, p.k))
    if "no_dgrad" in p.flags:
        return None
    for i, n in enumerate(p.n):
        d.inputs((f"w{i}", n, p.k))
    d.outputs(("dx", dx_rows, p.k))
    return Partial(p.k, tuple((f"dy{i}", f"w{i}") for i in range(len(p.n))), "nn")


def _wgrad(d: Draft, gathered: str, after: tuple[int | None, ...] = ()) -> None:
    for i in range(len(d.problem.n)):
        d.weight_product(f"dy{i}", gathered, f"dw{i}", after)


def _gather_by_puts(d: Draft) -> Callable[[], None]:
    """Send the own shard on its way; return what waits for all shards and multiplies."""
    heap = d.buffer("gathered.heap", "heap", d.shards.gathered_rows, d.problem.k)
    stored = gather_side.move_shards(d, heap, phase=1)
    if stored is None:
        stored = gather_side.store_own(d, heap)

    def finish() -> None:
        gather_side.await_shards(d, heap, phase=1)
        _wgrad(d, heap, (stored,))

    return finish


def _gather_by_collective(d: Draft) -> Callable[[], None]:
    scratch = d.buffer("gathered.scratch", "scratch", d.shards.gathered_rows, d.problem.k)
    rounds = [gather_side.collective_round(d, scratch, chunk) for chunk in range(d.shards.rounds)]
    return lambda: _wgrad(d, scratch, tuple(rounds))


def _gather_in_two_levels(d: Draft) -> Callable[[], None]:
    heap = d.buffer("gathered.heap", "heap", d.shards.gathered_rows, d.problem.k)
    arrive, brought = two_level.gather_for_wgrad(d, heap)

    def finish() -> None:
        arrive()
        _wgrad(d, heap, brought)

    return finish


def _reduce_scatter(build: Callable[..., None]) -> Callable[[Draft], None]:
    def planner(d: Draft) -> None:
        flags = d.problem.flags
        partial = _declare(d, d.shards.held(d.rank))
        finish = reduce_side.nothing
        if "wgrad" in flags and "saved" in flags:
            d.inputs(("gathered", d.shards.gathered_rows, d.problem.k))
            finish = lambda: _wgrad(d, "gathered")  # noqa: E731
        elif "wgrad" in flags:
            d.inputs(("x", d.shards.held(d.rank), d.problem.k))
            finish = lambda: _wgrad(d, "x")  # noqa: E731 - one rank's x is the gathered one
        if "wgrad" in flags and "saved" not in flags and d.size > 1:
            by_collective = build is reduce_side.collective or not d.caps.one_sided
            if build is two_level.reduce:
                finish = _gather_in_two_levels(d)
            else:
                finish = _gather_by_collective(d) if by_collective else _gather_by_puts(d)
        if partial is None:
            finish()
        elif d.size == 1:
            reduce_side.alone(d, partial, "dx", finish)
        else:
            build(d, partial, d.shards.packed("dx", d.rank), finish)

    return planner


def _all_reduce(build: Callable[..., None]) -> Callable[[Draft], None]:
    def planner(d: Draft) -> None:
        partial = _declare(d, d.problem.total)
        finish = reduce_side.nothing
        if "wgrad" in d.problem.flags:
            d.inputs(("x", d.problem.total, d.problem.k))
            finish = lambda: _wgrad(d, "x")  # noqa: E731
        if partial is None:
            finish()
        else:
            build(d, partial, "dx", finish)

    return planner


REDUCE_SCATTER = {
    "push": _reduce_scatter(reduce_side.push),
    "direct": _reduce_scatter(reduce_side.direct),
    "pull": _reduce_scatter(reduce_side.pull),
    "collective": _reduce_scatter(reduce_side.collective),
    "sequence": _reduce_scatter(reduce_side.sequence),
    "two_level": _reduce_scatter(two_level.reduce),
}
ALL_REDUCE = {name: _all_reduce(build) for name, build in all_reduce.BUILDERS.items()}
