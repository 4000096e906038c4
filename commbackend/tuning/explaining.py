"""What ``explain`` says of one call: what was chosen and by which rule, what it takes, what came next, what was out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import schedules
from ..commands.record import sizes
from ..errors import ConfigError
from ..layout import split
from ..plan import Knobs, Problem
from .cost import predict
from .costs import CostTable, Topology, load_table, shipped

if TYPE_CHECKING:
    from ..communicator import Communicator

__all__ = ["costs_of", "explain_call", "problem_of", "topology_of"]

#: Runners-up that are named.
_NAMED = 3


def problem_of(comm: Communicator, op: str, shape: tuple[int, ...], dtype: str) -> Problem:
    """The call of ``op`` with M rows of all ranks together: (M, K, N...) for products, (M, K) for collectives.

    Raises:
        ConfigError: No such operation, or not that many sizes.
    """
    plain = op in ("all_gather", "reduce_scatter", "all_reduce")
    if op not in schedules.OPS or (len(shape) != 2 if plain else len(shape) < 3):
        wanted = "(M, K)" if plain else "(M, K, N)"
        raise ConfigError(f"explain: {op!r} with {shape}: an operation of {', '.join(schedules.OPS)} and {wanted}")
    problem = Problem(op, split(shape[0], comm.size), k=shape[1], n=tuple(shape[2:]), dtype=dtype)
    if (reason := schedules.malformed(problem)) is not None:
        raise ConfigError(f"explain: {reason}")
    return problem


def costs_of(comm: Communicator) -> CostTable | None:
    """The costs measured here, else a shipped table of this very device, else None."""
    chosen = comm.chooser.choices
    if chosen is not None and chosen.costs is not None:
        return chosen.costs
    if comm.device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(comm.device)
    return next((t for t in map(load_table, shipped()) if t.device == name), None)


def topology_of(hosts: Sequence[int], size: int) -> Topology:
    """The domains of ranks on ``hosts``: each host, where all hold equally many consecutive ones; else one."""
    first = list(hosts).count(hosts[0]) if hosts else size
    even = size % first == 0 and all(len(set(hosts[i : i + first])) == 1 for i in range(0, len(hosts), first))
    return Topology(first if hosts and even else size)


def explain_call(comm: Communicator, problem: Problem) -> list[str]:
    """Lines about one call."""
    from .tune import ranked

    chosen, caps = comm.chooser.chosen(problem), comm.caps
    what = "torch.distributed's collective and the product in sequence" if chosen.stock else str(chosen.knobs)
    lines = [f"    {sizes(problem)}: {what}, by {chosen.rule}"]
    costs, where = costs_of(comm), topology_of(comm.choice.hosts if comm.choice else (), comm.size)
    times = []
    if costs is not None:
        times.append(f"predicted {predict(problem, caps, chosen.knobs, costs, where).time_us:,.1f} us")
    mean_us = comm.meter.mean_us(problem, chosen.knobs) if comm.meter is not None else 0.0
    if mean_us:
        times.append(f"measured {mean_us:,.1f} us (mean of its calls here)")
    if times:
        lines.append("      " + ", ".join(times))
    entry = None if comm.chooser.choices is None else comm.chooser.choices.find(problem, comm.layer_name)
    if entry is not None and entry.us:
        after = ", ".join(f"{name} {us:,.1f} us" for name, us in entry.others[:_NAMED])
        best = "stock" if entry.stock else str(entry.knobs)
        lines.append(f"      tuning measured {best} {entry.us:,.1f} us; next: {after or 'nothing else fits'}")
    elif costs is not None:
        others = [k for k in ranked(comm, problem, costs, _NAMED + 1) if k != chosen.knobs]
        ordered = sorted((predict(problem, caps, k, costs, where).time_us, str(k)) for k in others)
        after = ", ".join(f"{name} {us:,.1f} us" for us, name in ordered[:_NAMED])
        lines.append(f"      predicted of others: {after or 'nothing else fits'}")
    else:
        names = sorted({k.schedule for k in schedules.candidates(problem, caps)} - {chosen.knobs.schedule})
        lines.append(f"      other schedules: {', '.join(names) or 'none'}; no costs known: run commbackend tune")
    if chosen.knobs.schedule == "sequence" or chosen.stock:
        lines.append("      the product and its communication run one after the other: overlap would not win here")
    every = schedules.SCHEDULES[problem.op]
    reasons = {name: schedules.supports(problem, caps, Knobs(name, lanes=0)) for name in every}
    lines += [f"      out: {name}: {reason}" for name, reason in reasons.items() if reason is not None]
    return lines + [f"      refused: {text}" for text in chosen.refused]
