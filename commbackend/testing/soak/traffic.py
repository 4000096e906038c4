"""What ranks do while something goes wrong: random operations on exact data, every result compared to the bit.

Operands are small integers, so that every sum and product is exact and any order of summation gives the same bits.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...communicator import Communicator
from ...config import resolve
from ...errors import CommBackendError
from ...group import Group
from ...plan import Problem
from ..ranks import run_ranks, run_threads

__all__ = ["CPU", "WrongResult", "canary_call", "connect", "leftovers", "names", "one_call", "run_world", "transports"]

CPU = torch.device("cpu")
#: What outputs are full of before a call: no result has it.
CANARY = -77777.0
_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


class WrongResult(AssertionError):
    """An operation returned something else than the right tensor: the one thing that must never happen."""


def transports() -> list[str]:
    """The transports of this machine that join CPU processes."""
    from ... import registry

    found = []
    for name in ("shm", "gloo"):
        try:
            registry.transport(name).probe(CPU)
            found.append(name)
        except CommBackendError:
            continue
    return found


def connect(group: Group, transport: str, name: str = "soak", **settings: Any) -> Communicator:
    """Return a communicator of its own group over the store of ``group``. Collective."""
    own = Group.from_store(group.store, group.rank, group.size, timeout_s=settings.pop("init_s", 10.0), name=name)
    return Communicator(own, resolve(transport=transport, **settings), CPU)


def run_world(fn: Callable[..., Any], size: int, transport: str, *args: Any, timeout_s: float) -> list[Any]:
    """``fn(rank, group, transport, *args)`` on ranks of a kind that ``transport`` joins, in processes of their own."""
    if transport != "local":
        return run_ranks(fn, size, transport, *args, timeout_s=timeout_s)
    found: list[Any] = run_ranks(_threads, 1, fn, size, timeout_s - 5.0, (transport, *args), timeout_s=timeout_s)[0]
    return found


def _threads(rank: int, group: Group, fn: Callable[..., Any], size: int, timeout_s: float, args: Any) -> list[Any]:
    return run_threads(fn, size, *args, timeout_s=timeout_s)


def _ints(seed: int, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def one_call(comm: Communicator, dice: random.Random) -> str:
    """Make one random call, the same on all ranks that share ``dice``; return its name. Collective.

    Raises:
        WrongResult: Some element is not what it must be.
    """
    call = _Drawn(comm, dice)
    match call.op:
        case "all_gather":
            got = ops.all_gather(call.x, comm)
        case "reduce_scatter":
            got = ops.reduce_scatter(call.x, comm)
        case "all_reduce":
            got = ops.all_reduce(call.x, comm)
        case "all_gather_matmul":
            got = ops.all_gather_matmul(call.x, call.w, comm)
        case "matmul_reduce_scatter":
            got = ops.matmul_reduce_scatter(call.x, call.w, comm)
        case _:
            got = ops.matmul_all_reduce(call.x, call.w, comm)
    call.compare(got)
    return call.op


def canary_call(comm: Communicator, dice: random.Random, failed: bool = False) -> None:
    """As ``one_call``, into an output that is full of a number which no result has; with ``failed`` after a fault, when
    the call must raise and leave the output as it is.

    Raises:
        WrongResult: The call returned and the output is not the result, to the last element; or it wrote after a fault.
    """
    call = _Drawn(comm, dice)
    products = "matmul" in call.op
    split = call.rows if call.op != "matmul_all_reduce" and call.op != "all_reduce" else call.x.shape[0] // comm.size
    problem = Problem(call.op, (split,) * comm.size, k=call.x.shape[1], n=(call.w.shape[0],) if products else ())
    out = torch.full(call.want.shape, CANARY)
    tensors = {"x": call.x, "w0": call.w, "out0": out} if products else {"x": call.x, "out": out}
    try:
        comm.run(problem, tensors)
    except CommBackendError:
        if failed and not bool((out == CANARY).all()):
            raise WrongResult(f"rank {comm.rank}: {call.op} wrote to its output after a fault") from None
        raise
    call.compare(out)


class _Drawn:
    """A random call, its operands and what must come of it."""

    def __init__(self, comm: Communicator, dice: random.Random) -> None:
        self.rank, size = comm.rank, comm.size
        self.op, seed = dice.choice(_OPS), dice.randrange(1 << 30)
        self.rows, k, n = dice.choice((0, 1, 3, 16, 64)), dice.choice((1, 5, 32)), dice.choice((1, 4, 24))
        self.text = f"{self.op} of {self.rows} rows, k={k}, n={n}, seed {seed}"
        gathers = "all_gather" in self.op
        x = [_ints(seed + r, self.rows if gathers else self.rows * size, k) for r in range(size)]
        w = [_ints(seed - 1 - r, n, k) for r in range(size)]
        self.x, self.w = x[self.rank], w[self.rank]
        here = slice(self.rank * self.rows, (self.rank + 1) * self.rows)
        if gathers:
            self.want = torch.cat(x) if self.op == "all_gather" else torch.cat(x) @ self.w.t()
        else:
            parts = [a @ b.t() for a, b in zip(x, w, strict=True)] if "matmul" in self.op else x
            total = torch.stack(parts).sum(0)
            self.want = total if "all_reduce" in self.op else total[here]

    def compare(self, got: object) -> None:
        if not isinstance(got, Tensor) or not torch.equal(got, self.want):
            raise WrongResult(f"rank {self.rank}: {self.text} returned a wrong tensor")


def names() -> list[str]:
    """The names in /dev/shm but those that Open MPI and multiprocessing make, whose jobs may run beside this one."""
    return sorted(n for n in os.listdir("/dev/shm") if not n.startswith(("sm_segment.", "vader_segment.", "sem.mp-")))


def leftovers() -> tuple[list[str], list[str], list[int]]:
    """What this process holds of the package: threads, mappings of its segments, descriptors of them."""
    gc.collect()
    threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("commbackend"))
    with open("/proc/self/maps") as maps:
        mapped = [line[line.index("/memfd") :].strip() for line in maps if "memfd:commbackend" in line]
    held = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the descriptor of the listing itself
        if "memfd:commbackend" in target:
            held.append(int(fd))
    return threads, mapped, held
