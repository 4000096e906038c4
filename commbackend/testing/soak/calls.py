"""Calls that must agree, that must give the same bits, and communicators that come and go."""

from __future__ import annotations

import gc
import os
import random
import threading
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...communicator import Communicator
from ...errors import CollectiveMismatch, CommBackendError, ConfigError
from ...group import Group
from ..ranks import run_ranks
from .traffic import connect, one_call, run_world

__all__ = ["cycles", "disagreements", "invariant_rows", "same_bits"]

_PATIENCE_S = 120.0
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def _draw(dice: random.Random) -> dict[str, Any]:
    """A random call: everything that ranks can disagree on."""
    return {
        "op": dice.choice(("all_gather", "reduce_scatter", "all_reduce", "agm", "mrs", "mar", "reserve", "barrier")),
        "rows": dice.choice((2, 4, 8)),
        "k": dice.choice((3, 4)),
        "n": dice.choice((2, 5)),
        "dtype": dice.choice(_DTYPES),
        "dim": dice.choice((0, 1)),
        "uneven": dice.random() < 0.2,
    }


def _meaning(call: dict[str, Any], size: int) -> tuple[Any, ...]:
    """What ranks must have in common: two calls of one meaning are one call."""
    op, rows = call["op"], call["rows"] * size
    if op == "barrier":
        return (op,)
    if op == "reserve":
        return op, rows, call["k"], call["dtype"]
    sizes = (op, rows, call["k"], call["dtype"])
    if op in ("all_gather", "reduce_scatter"):
        # Along dim 1 of [1, rows, k] is the same as along dim 0 of [rows, k].
        return *sizes, call["uneven"]
    if op == "mrs":  # the inner features may differ between ranks
        return op, rows, call["dtype"], call["n"], call["uneven"]
    # So may they here, and the output features of a gather.
    return (op, rows, call["dtype"], call["n"]) if op == "mar" else sizes


def _make(call: dict[str, Any], comm: Communicator) -> Any:
    op, size, k = call["op"], comm.size, call["k"]
    if op == "barrier":
        return comm.barrier()
    if op == "reserve":
        return comm.reserve(call["rows"] * size, k, call["dtype"])
    gathers = op in ("all_gather", "agm")
    counts = [call["rows"]] * size
    if call["uneven"] and op in ("all_gather", "reduce_scatter", "mrs"):
        counts[0], counts[-1] = counts[0] - 1, counts[-1] + 1
        rows: tuple[int, ...] | None = tuple(counts)
    else:
        rows = None
    extent = counts[comm.rank] if gathers else sum(counts)
    lead = (1, extent) if call["dim"] == 1 and op in ("all_gather", "reduce_scatter") else (extent,)
    x, w = torch.ones(*lead, k, dtype=call["dtype"]), torch.ones(call["n"], k, dtype=call["dtype"])
    dim = len(lead) - 1
    match op:
        case "all_gather":
            return ops.all_gather(x, comm, dim=dim, rows=rows)
        case "reduce_scatter":
            return ops.reduce_scatter(x, comm, dim=dim, rows=rows)
        case "all_reduce":
            return ops.all_reduce(x, comm)
        case "agm":
            return ops.all_gather_matmul(x, w, comm)
        case "mrs":
            return ops.matmul_reduce_scatter(x, w, comm, rows=rows)
        case _:
            return ops.matmul_all_reduce(x, w, comm)


def _apart(rank: int, group: Group, transport: str, seed: int, count: int) -> list[str]:
    """``count`` cases: one rank makes another call than the others, or has other settings. Returns what went wrong."""
    wrong = []
    for case in range(count):
        dice = random.Random(seed * 1_000_003 + case)
        usual, other, odd = _draw(dice), _draw(dice), dice.randrange(group.size)
        settings = {"chunks": 1 + (rank == odd)} if dice.random() < 0.1 else {}
        told = f"case {case} of seed {seed} ({transport}): rank {rank}"
        try:
            comm = connect(group, transport, name=f"{seed}.{case}", timeout_s=20.0, init_s=20.0, **settings)
        except ConfigError as e:
            if not settings or "chunks" not in str(e):
                wrong.append(f"{told}: {e}")
            continue
        if settings:
            wrong.append(f"{told}: other settings were accepted")
        mine = other if rank == odd else usual
        agree = _meaning(usual, group.size) == _meaning(other, group.size)
        try:
            _make(mine, comm)
            comm.barrier()  # what a call on its own cannot show (different orders), the next one does
            if not agree:
                wrong.append(f"{told}: {usual} and {other} passed for one call")
        except CollectiveMismatch as e:
            if agree or "called" not in str(e) or "; rank" not in str(e):
                wrong.append(f"{told}: {usual}, {other}: {e}")
        except CommBackendError as e:
            wrong.append(f"{told}: {usual}, {other}: {type(e).__name__}: {e}")
        comm.close()
    return wrong


def disagreements(dice: random.Random, transport: str, count: int) -> list[str]:
    """Return what went wrong in ``count`` random disagreements (and some agreements) of three ranks."""
    found = run_world(_apart, 3, transport, dice.randrange(1 << 30), count, timeout_s=_PATIENCE_S + count)
    return [text for of_rank in found for text in of_rank]


def _bits(rank: int, group: Group, transport: str, seed: int, count: int) -> list[bytes]:
    """The bits of results that must be the same on all ranks, of ``count`` random shapes, all summed up."""
    import hashlib

    seen, dice = [], random.Random(seed)
    with connect(group, transport, timeout_s=30.0, name=str(seed)) as comm:
        for _ in range(count):
            rows, k, n = dice.choice((1, 2, 7, 33, 128)), dice.randrange(1, 90), dice.randrange(1, 70)
            dtype = dice.choice(_DTYPES)
            generator = torch.Generator().manual_seed(dice.randrange(1 << 30) + rank)
            x = torch.randn(rows * comm.size, k, generator=generator).to(dtype)
            w = torch.randn(n, k, generator=generator).to(dtype)
            results = (
                ops.all_reduce(x, comm),
                ops.matmul_all_reduce(x, w, comm),
                ops.all_gather(ops.reduce_scatter(x, comm), comm),
            )
            seen += [hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).digest()[:8] for t in results]
    return seen


def same_bits(dice: random.Random, transport: str, count: int) -> int:
    """Return how many of three results of ``count`` random shapes differ between ranks or between two runs."""
    seed = dice.randrange(1 << 30)
    runs = [run_ranks(_bits, 3, transport, seed, count, timeout_s=_PATIENCE_S + count) for _ in range(2)]
    every = [bits for run in runs for bits in run]
    return sum(len(set(column)) > 1 for column in zip(*every))


def _rows(rank: int, group: Group, transport: str, seed: int, count: int) -> tuple[int, list[str]]:
    """Compare rows of products of ``count`` random shapes, by several schedules and chunks, of all rows and of some.

    Returns how many rows were compared, and what differed.
    """
    every = ("auto", "push", "pull", "direct", "sequence", "one_shot", "two_shot", "collective")
    comms = {
        (schedule, chunks): connect(group, transport, f"{seed} {schedule} {chunks}", timeout_s=60.0, init_s=60.0,
                                    batch_invariant=True, schedule=schedule, chunks=chunks, choices="off")
        for schedule in every for chunks in (0, 1, 3)
    }  # fmt: skip
    dice, compared, differing = random.Random(seed), 0, []
    for shape in range(count):
        k, n, dtype = dice.randrange(1, 300), dice.randrange(1, 150), dice.choice(_DTYPES)
        total, mine = dice.choice((2, 8, 33, 70, 150)) * group.size, torch.Generator().manual_seed(shape + seed + rank)
        ours = torch.Generator().manual_seed(shape + seed)
        whole, bias = torch.randn(total, k, generator=ours).to(dtype), torch.randn(n, generator=ours).to(dtype)
        x, w = torch.randn(total, k, generator=mine).to(dtype), torch.randn(n, k, generator=mine).to(dtype)
        seen: dict[tuple[bool, int], Tensor] = {}
        for _ in range(4):
            how = dice.choice(list(comms))
            each = dice.choice((total // group.size, 1, dice.randrange(1, total // group.size + 1)))
            comm, first = comms[how], dice.randrange(total - each * group.size + 1)
            rows = slice(first, first + each * group.size)
            here = slice(first + rank * each, first + (rank + 1) * each)
            found = (
                (True, rows, ops.all_gather_matmul(whole[here], w, comm, bias=bias)),
                (False, here, ops.matmul_reduce_scatter(x[rows], w, comm, bias=bias)),
                (False, rows, ops.matmul_all_reduce(x[rows], w, comm, bias=bias)),
            )
            for gathered, where, out in found:
                for row, bits in zip(range(where.start, where.stop), out, strict=True):
                    compared += 1
                    if not torch.equal(seen.setdefault((gathered, row), bits), bits):
                        differing.append(f"row {row} of {total}, k={k}, n={n}, {dtype}, by {how}, rows {where}")
    for comm in comms.values():
        comm.close()
    return compared, differing


def invariant_rows(dice: random.Random, transport: str, count: int) -> tuple[int, list[str]]:
    """Return how many rows of ``count`` random shapes were compared, and what differed, with ``batch_invariant``."""
    found = run_world(_rows, 2, transport, dice.randrange(1 << 30), count, timeout_s=_PATIENCE_S + count)
    return sum(n for n, _ in found), [text for _, texts in found for text in texts]


def _comes_and_goes(rank: int, group: Group, transport: str, count: int) -> tuple[list[int], list[int]]:
    def held() -> list[int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd" in line for line in maps)
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            born = len(children.read().split())
        return [len(os.listdir("/proc/self/fd")), threading.active_count(), mapped, born]

    before: list[int] = []
    for i in range(count + 3):
        if i == 3:
            group.barrier()
            before = held()
        comm = connect(group, transport, name=f"cycle {i}", timeout_s=20.0)
        one_call(comm, random.Random(i))
        if i % 5 == 4:
            group.barrier()
            comm.abort("every fifth ends with a fault")
        comm.close()
        del comm
    group.barrier()
    return before, held()


def cycles(transport: str, count: int) -> list[tuple[list[int], list[int]]]:
    """Return, for every rank, (descriptors, threads, mappings, children) before and after ``count`` cycles."""
    return run_ranks(_comes_and_goes, 2, transport, count, timeout_s=_PATIENCE_S + count)
