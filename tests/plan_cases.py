"""Problems, caps and knobs for tests of plans."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass

from commbackend.plan import Knobs, Plan, Problem
from commbackend.schedules import OPS, candidates, plan


@dataclass(frozen=True)
class FakeCaps:
    """What a planner asks of a transport."""

    one_sided: bool = True
    collective: bool = True
    peer_view: bool = True
    source: str = "any"
    numerics: str = "fixed"
    stream_ordered: bool = False
    free_queues: bool = True
    copy_lanes: int = 1
    exchanges: bool = False
    hosts: tuple[int, ...] = ()


#: Every combination of roles that changes a plan.
CAPS = {
    "everything": FakeCaps(),
    "symmetric": FakeCaps(source="symmetric", collective=False),
    "puts": FakeCaps(peer_view=False, collective=False),
    "collectives": FakeCaps(one_sided=False, peer_view=False),
    "gpu": FakeCaps(collective=False, stream_ordered=True),
    "kernels": FakeCaps(collective=False, stream_ordered=True, exchanges=True),
    "one queue": FakeCaps(collective=False, stream_ordered=True, free_queues=False),
}
#: Transports of two levels, for the number of ranks that they have.
TWO_LEVELS = {
    "by host": FakeCaps(collective=False, peer_view=False, hosts=(0, 0, 1, 1)),
    "in turn": FakeCaps(collective=False, peer_view=False, hosts=(0, 1, 0, 1)),
    "symmetric": FakeCaps(collective=False, peer_view=False, source="symmetric", hosts=(0, 1, 1, 0)),
    "three hosts": FakeCaps(collective=False, peer_view=False, hosts=(0, 1, 2, 2, 0, 1)),
    "three ranks a host": FakeCaps(collective=False, peer_view=False, hosts=(0, 0, 1, 1, 0, 1)),
}
FLAGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "matmul_all_reduce": ((), ("residual",)),
    "all_gather_matmul": ((), ("gathered",), ("wgrad",), ("gathered", "wgrad")),
    "dgrad_reduce_scatter": ((), ("wgrad",), ("saved", "wgrad"), ("no_dgrad", "wgrad")),
    "dgrad_all_reduce": ((), ("wgrad",), ("no_dgrad", "wgrad")),
}
PLAIN = ("all_gather", "reduce_scatter", "all_reduce")


def problem(
    op: str,
    rows: tuple[int, ...] = (4, 4, 4),
    *,
    blocks: int = 1,
    k: int = 3,
    n: int = 2,
    weights: int = 1,
    flags: tuple[str, ...] = (),
    bias: bool = False,
) -> Problem:
    """A problem of small integers, with the fields its op has."""
    return Problem(
        op,
        rows,
        1 if op.endswith("all_reduce") else blocks,
        k,
        () if op in PLAIN else (n,) * weights,
        "int64",
        bias and "matmul" in op,
        flags,
    )


def schedules() -> Iterator[tuple[str, tuple[str, ...], str, Knobs]]:
    """Knobs for every plan that differs by (op, flags, caps, schedule, form); two chunks and one copy lane."""
    for op in OPS:
        for flags in FLAGS.get(op, ((),)):
            made = set()
            for name, caps in CAPS.items():
                wanted = problem(op, flags=flags)
                for knobs in candidates(wanted, caps, polling=True):
                    if knobs.schedule == "sequence" or (knobs.chunks, knobs.lanes) == (2, 1):
                        key = (knobs.schedule, plan(wanted, caps, knobs).programs)
                        if key not in made:
                            made.add(key)
                            yield op, flags, name, knobs


def golden() -> Iterator[tuple[str, Problem, FakeCaps, Knobs]]:
    """Small plans whose text is kept in tests/golden: every schedule once, every op at least once."""
    every, symmetric, puts, only = (CAPS[c] for c in ("everything", "symmetric", "puts", "collectives"))
    gathered = ("gathered",)
    yield "all_gather.pull", problem("all_gather", (4, 2)), every, Knobs("pull", 2)
    yield "all_gather.push", problem("all_gather", (4, 0), blocks=2), puts, Knobs("push", 2, 0)
    yield "reduce_scatter.push", problem("reduce_scatter", (4, 2)), symmetric, Knobs("push", 2)
    yield "all_reduce.one_shot", problem("all_reduce", (2, 2)), puts, Knobs("one_shot", 1, 0)
    yield "all_gather_matmul.push", problem("all_gather_matmul", flags=gathered, bias=True), puts, Knobs("push", 2)
    yield "all_gather_matmul.push.polls", problem("all_gather_matmul", (4, 4)), puts, Knobs("push", 2, 1, True)
    blocks = problem("all_gather_matmul", (4, 4, 4))
    yield "all_gather_matmul.push.blocks", blocks, puts, Knobs("push", 2, blocks=1)
    yield "all_gather_matmul.pull", problem("all_gather_matmul", (4, 4), weights=2), every, Knobs("pull", 2)
    yield "all_gather_matmul.collective", problem("all_gather_matmul", (4, 2)), only, Knobs("collective", 2)
    yield "all_gather_matmul.sequence", problem("all_gather_matmul", (4, 2)), puts, Knobs("sequence", 1, 0)
    yield "matmul_reduce_scatter.push", problem("matmul_reduce_scatter", bias=True), puts, Knobs("push", 2, 2)
    biased = problem("matmul_reduce_scatter", (4, 4), bias=True)
    yield "matmul_reduce_scatter.push.folds", biased, puts, Knobs("push", 2, 1, True)
    yield "matmul_reduce_scatter.push.polls", biased, puts, Knobs("push", 2, 1, True, False)
    yield "matmul_reduce_scatter.push.blocks", biased, puts, Knobs("push", 2, blocks=1)
    yield "matmul_reduce_scatter.pull", problem("matmul_reduce_scatter", (4, 4)), every, Knobs("pull", 2)
    yield "matmul_reduce_scatter.direct", problem("matmul_reduce_scatter", (4, 4)), every, Knobs("direct", 2)
    yield "matmul_all_reduce.two_shot", problem("matmul_all_reduce", (4, 4)), puts, Knobs("two_shot", 2)
    yield "matmul_all_reduce.two_shot.folds", problem("matmul_all_reduce", (4, 4)), puts, Knobs("two_shot", 2, 1, True)
    yield "matmul_all_reduce.two_shot_direct", problem("matmul_all_reduce", (4, 4)), every, Knobs("two_shot_direct")
    yield "matmul_all_reduce.one_shot_pull", problem("matmul_all_reduce", (2, 2)), every, Knobs("one_shot_pull", 1, 0)
    kernel = problem("matmul_all_reduce", (2, 1), n=8, flags=("norm", "residual"), bias=True)
    kernel = dataclasses.replace(kernel, dtype="float32", eps=1e-6)
    yield "matmul_all_reduce.one_shot_kernel", kernel, CAPS["kernels"], Knobs("one_shot_kernel", 1, 0)
    yield "matmul_all_reduce.collective", problem("matmul_all_reduce", (4, 4)), only, Knobs("collective", 2)
    dgrad = problem("dgrad_reduce_scatter", (4, 4), weights=2, flags=("wgrad",))
    yield "dgrad_reduce_scatter.push", dgrad, puts, Knobs("push", 2)
    yield "dgrad_all_reduce.two_shot_pull", problem("dgrad_all_reduce", (4, 4)), every, Knobs("two_shot_pull", 2)

    level, turn = TWO_LEVELS["by host"], TWO_LEVELS["in turn"]
    gathering = problem("all_gather_matmul", (4, 2, 0, 2), flags=gathered)
    yield "all_gather_matmul.two_level", gathering, level, Knobs("two_level", 2, 1)
    yield "matmul_reduce_scatter.two_level", problem("matmul_reduce_scatter", (2,) * 4), turn, Knobs("two_level", 1, 2)
    yield "all_reduce.two_level", problem("all_reduce", (2, 1, 1, 0)), level, Knobs("two_level", 1, 0)


def golden_text(plan: Plan) -> str:
    """A plan as JSON with one buffer or step a line, so that a diff shows what a change of a planner did."""
    whole = json.loads(plan.to_json())
    programs = []
    for p in whole.pop("programs"):
        parts = [f'"rank": {p["rank"]}']
        for name in ("buffers", "steps"):
            lines = ",\n".join(f"    {json.dumps(line)}" for line in p[name])
            parts.append(f'"{name}": [\n{lines}\n  ]')
        programs.append("  {" + ",\n  ".join(parts) + "}")
    head = json.dumps(whole)[:-1]
    return f'{head}, "programs": [\n' + ",\n".join(programs) + "\n]}\n"
