"""``bench host``: what a call costs the host, where that time goes, and what others take in the same run.

Calls move a few hundred bytes, so that only the host's work is seen. On a GPU nothing waits for the GPU: a call is
enqueued. Where ranks share a GPU, NCCL refuses a group of them; then NCCL's calls are made in a group of one rank each
(its collective becomes a copy, so this is less than what two ranks on two GPUs pay).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import commbackend

from .cases import Collected, Fused, Shape, rounds, stock_move
from .names import LONE, NEW, OURS, PLAIN, REPLAY
from .world import Candidate, World

__all__ = ["host"]

#: Calls that phases are averaged over, and how many of them are enqueued before the GPU is waited for.
_CALLS, _AT_ONCE = 200, 20
_PHASES = {"put": "put", "get": "get", "wait": "wait", "signal": "signal", "copy": "copy", "gemm": "product"}
_PHASES |= {"reduce": "sum", "fork": "fork and join", "join": "fork and join", "enter": "agreement", "guard": "guard"}


def host(world: World) -> Iterator[dict[str, Any]]:
    """Measure every op asked for. Collective."""
    burst = int(world.options["burst"])
    alone = _groups_of_one(world) if world.device.type == "cuda" and not world.stock else None
    for op in world.options["ops"]:
        found, call = _candidates(world, op, alone)
        errors = world.verify(found)
        samples = world.interleave(found, 1, rounds(world), burst=burst, host=True)
        case = {"op": op, "samples": samples, "errors": errors}
        yield {**case, "phases": _phases(world, call)} if call is not None else case


def _groups_of_one(world: World) -> Any:
    """NCCL on this rank alone. Collective."""
    groups = [dist.new_group([rank], backend="nccl") for rank in range(world.size)]
    return groups[world.rank]


def _candidates(world: World, op: str, alone: Any) -> tuple[list[Candidate], Callable[[], object] | None]:
    """What is measured, and the call whose phases are."""
    if op == "barrier":
        found = [Candidate(NEW, lambda i: commbackend.barrier(world.comm))]
        return found + ([Candidate(world.stock, lambda i: dist.barrier())] if world.stock else []), None
    if op in PLAIN:
        plain = Collected(world, op, 8 * 64 * 4, torch.float32)
        found = [c for c in plain.candidates() if c.name in (NEW, OURS, *((world.stock,) if world.stock else ()))]
        call: Callable[[], object] = partial(world.comm.run, plain.problem, {"x": plain.x[0], "out": plain.out[0]})
        if alone is not None:
            x = plain.x[0]
            out = torch.empty_like(x)
            found.append(Candidate(LONE, lambda i: stock_move(op, x, out, alone)))
    else:
        fused = Fused(world, Shape(op, "tiny", world.size, 8 * world.size, 64, 64, torch.float32))
        found = [fused.checked(NEW, fused.new_tensor, returns=True), fused.checked(OURS, fused.fused(world.comm))]
        call = partial(fused.fused(world.comm), 0)
        if world.stock:
            found.append(fused.checked(world.stock, fused.stock_sequence))
        if alone is not None:
            found.append(Candidate(LONE, _sequence_alone(fused, op, alone)))
    if world.comm.caps.graph_capture:
        found.append(Candidate(REPLAY, _replay(world, call)))
    return found, call


def _sequence_alone(fused: Fused, op: str, alone: Any) -> Callable[[int], object]:
    """The collective in a group of one rank and the product of all rows, one after the other."""
    moved, x, w, out = fused.moved[0], fused.x[0], fused.w[0], fused.out[0]
    landed = torch.empty_like(moved)
    if op == "all_gather_matmul":

        def gather_first(i: int) -> None:
            stock_move("all_gather", moved, landed, alone)
            torch.mm(landed, w.t(), out=out)

        return gather_first

    def multiply_first(i: int) -> None:
        torch.mm(x, w.t(), out=moved)
        stock_move(op.removeprefix("matmul_"), moved, landed, alone)

    return multiply_first


def _replay(world: World, call: Callable[[], object]) -> Callable[[int], object]:
    """Replays of the captured call."""
    call()
    world.comm.prepare_capture()
    world.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    world.settle()
    return lambda i: graph.replay()


def _phases(world: World, call: Callable[[], object]) -> dict[str, float]:
    """Microseconds of a call by phase, on this rank. The recorder itself adds about a microsecond a step."""
    spent: defaultdict[str, float] = defaultdict(float)
    comm = world.comm

    def record(label: str, lane: int, start_ns: int, end_ns: int) -> None:
        spent[label.partition(" ")[0]] += (end_ns - start_ns) / 1e3

    before = comm.recorder
    comm.recorder = record
    try:
        for i in range(_CALLS):
            call()
            if i % _AT_ONCE == _AT_ONCE - 1:
                world.settle()
    finally:
        comm.recorder = before
    whole = spent.pop("call", 0.0)
    found: defaultdict[str, float] = defaultdict(float)
    for kind, us in spent.items():
        found[_PHASES.get(kind, kind)] += us / _CALLS
    rest = whole / _CALLS - sum(found.values())
    return {**found, **({"lookup and the rest": rest} if whole else {})}
