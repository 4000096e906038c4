"""``commbackend plan``: print a plan, prove it, and draw when its steps would run. Needs no torch, GPU or peer."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from .. import schedules
from ..bench.names import widths
from ..contract import Caps
from ..errors import CommBackendError, ConfigError, PlanError
from ..plan import Collective, Copy, Gemm, Get, Knobs, Plan, Problem, Put, Reduce, Region, Signal, Step, Wait
from ..tuning.cost import simulate
from ..tuning.costs import CostTable, load_table, topology
from . import timeline as plan_timeline

__all__ = ["main"]

#: Kinds of transports, by what a planner may use.
ROLES = {
    "views": Caps("any", one_sided=True, peer_view=True),
    "puts": Caps("any", one_sided=True),
    "registered": Caps("any", one_sided=True, source="symmetric"),
    "collective": Caps("any", collective=True),
    "gpu": Caps("cuda", one_sided=True, peer_view=True, stream_ordered=True, copy_engine=True, device_signal=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, 1 if ``--check`` refuses the plan, 2 if there is no such plan."""
    options = _parser().parse_args(argv)
    try:
        problem, caps = _problem(options), ROLES[options.role]
        knobs = _knobs(options, problem, caps)
        if options.simulate:
            return _simulate(options, problem, caps, knobs)
        plan = schedules.plan(problem, caps, knobs)
    except CommBackendError as e:
        print(f"commbackend plan: {e}", file=sys.stderr)
        return 2
    if options.check:
        from ..check import check

        try:
            check([plan] * 3)  # three calls: what one leaves behind, the next ones meet
        except CommBackendError as e:
            print(f"commbackend plan: {e}", file=sys.stderr)
            return 1
    print(plan.to_json(indent=1) if options.json else _text(plan, options))
    return 0


def _simulate(options: argparse.Namespace, problem: Problem, caps: Caps, knobs: Knobs) -> int:
    """Predict the call from a cost table, and prove its plan."""
    from ..tuning.what_if import WhatIf

    found = WhatIf(problem, caps, knobs, load_table(options.costs), topology(options.topology, problem.size))
    try:
        proved = found.prove()
    except PlanError as e:
        print(f"commbackend plan: {e}", file=sys.stderr)
        return 1
    if options.png:
        from . import plots

        plots.timeline(found.traces(), options.png, title=found.title())
    print(found.to_json() if options.json else f"{found.text()}\n{proved}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="commbackend plan", description=__doc__)
    parser.add_argument("op", choices=schedules.OPS, help="the operation")
    parser.add_argument("--size", "--world", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--rows", default="1024", help="rows of every rank, or one number a rank: 3,0,5 (default 1024)")
    parser.add_argument("--blocks", type=int, default=1, help="blocks of such rows (default 1)")
    parser.add_argument("--k", type=int, default=4096, help="inner dimension, or columns (default 4096)")
    parser.add_argument("--n", default="", help="output features, one number a weight: 3584,3584 (default 4096)")
    parser.add_argument("--model", default="", help="instead of --k and --n: widths of an MLP, 8B, 70B, 175B or hN")
    parser.add_argument("--tp", type=int, default=8, help="with --model: cut over this many ranks (default 8)")
    parser.add_argument("--dtype", default="bfloat16", help="element type (default bfloat16)")
    parser.add_argument("--bias", action="store_true", help="with a bias")
    parser.add_argument("--flags", default="", help="further options of the operation, e.g. gathered,wgrad")
    parser.add_argument("--role", choices=ROLES, help="kind of transport (default views; with --simulate gpu)")
    parser.add_argument("--schedule", default="", help="default: what commbackend would choose")
    parser.add_argument("--chunks", type=int, help="chunks a shard is cut into (default: what it would choose)")
    parser.add_argument("--lanes", type=int, help="copy lanes beside the caller's (default: what it would choose)")
    parser.add_argument("--polls", action="store_true", help="one polling kernel instead of gated row blocks")
    parser.add_argument(
        "--domain", type=int, default=-1, help="ranks of a domain that are served first (default: none)"
    )
    parser.add_argument("--link", type=float, default=300.0, help="for the picture: link, GB/s (default 300)")
    parser.add_argument("--tflops", type=float, default=700.0, help="for the picture: products, TFLOP/s (default 700)")
    parser.add_argument("--rank", type=int, default=-1, help="list the steps of this rank alone (default: all)")
    parser.add_argument("--check", action="store_true", help="prove the plan over three calls")
    parser.add_argument("--simulate", action="store_true", help="predict from a cost table, for any number of ranks")
    parser.add_argument("--costs", default="h200", help="with --simulate: a shipped table or a file (default h200)")
    parser.add_argument("--topology", default="flat", help="with --simulate: flat, nvl72, 2x8 (domains x ranks) or 8")
    parser.add_argument("--png", metavar="FILE", help="with --simulate: draw the timeline (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print the plan, or the prediction, as JSON instead")
    return parser


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--{name} {text!r}: must be integers separated by commas") from None


def _problem(options: argparse.Namespace) -> Problem:
    rows = _numbers("rows", options.rows)
    if len(rows) == 1:
        rows *= options.size
    elif options.size not in (2, len(rows)):  # 2 is the default: the rows say how many ranks there are
        raise ConfigError(f"--rows names {len(rows)} ranks, --size {options.size}")
    if options.link <= 0 or options.tflops <= 0 or options.tp < 1 or options.size < 1:
        raise ConfigError("--size, --tp, --link and --tflops must be positive")
    options.role = options.role or ("gpu" if options.simulate else "views")
    if options.model:
        _widths(options)
    plain = options.op in ("all_gather", "reduce_scatter", "all_reduce")
    n = () if plain else _numbers("n", options.n or "4096")
    flags = tuple(sorted(f for f in options.flags.split(",") if f))
    return Problem(options.op, rows, options.blocks, options.k, n, options.dtype, options.bias, flags)


def _widths(options: argparse.Namespace) -> None:
    """Set k and n as in a layer of the model: the first product gathers, the second one reduces."""
    try:
        hidden, up, down = widths(options.model)
    except ValueError as e:
        raise ConfigError(f"--model {e}") from None
    if options.op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        options.k, options.n = down // options.tp, str(hidden)
    else:
        options.k, options.n = hidden, str(up // options.tp)


def _knobs(options: argparse.Namespace, problem: Problem, caps: Caps) -> Knobs:
    """What was asked for, and for the rest what commbackend would choose."""
    reason = schedules.supports(problem, caps, Knobs(options.schedule)) if options.schedule else None
    if reason:
        raise ConfigError(reason)
    chosen = schedules.default_knobs(problem, caps)
    domain = topology(options.topology, problem.size).domain if options.simulate else 0
    if domain == problem.size or problem.size % domain if domain else True:
        domain = 0
    return dataclasses.replace(
        chosen,
        schedule=options.schedule or chosen.schedule,
        chunks=chosen.chunks if options.chunks is None else options.chunks,
        lanes=chosen.lanes if options.lanes is None else options.lanes,
        polls=options.polls,
        domain=domain if options.domain < 0 else options.domain,
    )


def _text(plan: Plan, options: argparse.Namespace) -> str:
    lines = [f"{plan.op} over {plan.size} ranks: {Knobs(**plan.meta['knobs'])} (schedule/chunks/lanes)"]
    for program in plan.programs:
        if options.rank not in (-1, program.rank):
            continue
        heap = program.heap_nbytes()
        lines += ["", f"rank {program.rank}: {len(program.steps)} steps, {heap:,} bytes of symmetric memory a half"]
        lines += [f"  {b.space:<8}{b.name:<18}{b.rows} x {b.cols} {b.dtype}" for b in program.buffers]
        for index, step in enumerate(program.steps):
            after = f" after {', '.join(map(str, step.after))}" if step.after else ""
            lines.append(f"  {index:>3}  lane {step.lane}  {_say(step)}{after}")
    timed = simulate(plan, CostTable.flat(link_gbyte_s=options.link, tflop_s=options.tflops)).steps
    head = f"One call at {options.link:g} GB/s and {options.tflops:g} TFLOP/s, were those rates always reached:"
    proved = "Proved over three calls: no race, no deadlock, every wait has its signal, every output is written."
    return "\n".join([*lines, "", *([proved, ""] if options.check else []), head, plan_timeline.draw(timed)])


def _say(step: Step) -> str:
    match step:
        case Put():
            return f"put {_area(step.src)} -> rank {step.peer} {_area(step.dst)}, raise word {step.slot}"
        case Get():
            return f"get rank {step.peer} {_area(step.src)} -> {_area(step.dst)}"
        case Signal():
            return f"signal rank {step.peer}, word {step.slot}{_delta(step.delta)}"
        case Wait():
            covers = f", covers {', '.join(_area(r) for r in step.covers)}" if step.covers else ""
            return f"wait for rank {step.peer}, word {step.slot}{_delta(step.delta)}{covers}"
        case Copy():
            return f"copy {_area(step.src)} -> {_area(step.dst)}"
        case Gemm():
            parts = [f"{_area(s.out)} = {_area(s.a)} x {_area(s.b)}" for s in step.segments]
            return f"gemm ({step.form}) " + "; ".join(parts)
        case Reduce():
            return f"reduce {_area(step.dst)} = {' + '.join(_area(r) for r in step.srcs)}"
        case Collective():
            srcs, dsts = ", ".join(_area(r) for r in step.srcs), ", ".join(_area(r) for r in step.dsts)
            return f"{step.kind} {srcs} -> {dsts}"


def _delta(delta: int) -> str:
    return f" of call seq{delta:+d}" if delta else ""


def _area(region: Region) -> str:
    cols = "" if region.col == 0 and region.cols == -1 else f", {region.col}:{region.col + region.cols}"
    blocks = f" x{region.blocks}" if region.blocks != 1 else ""
    where = f"@{region.at}" if region.at >= 0 else ""
    return f"{region.buf}{where}[{region.row}:{region.row + region.rows}{cols}]{blocks}"
