"""What the benchmarks measure: for every case its buffers, its candidates, and what their results are compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commbackend

from ..communicator import Communicator
from ..layout import split
from ..plan import Knobs, Problem
from ..schedules import SCHEDULES, candidates, supports
from .names import FUSED, GEMM, MEMCPY, MOVE, MPI, NEW, OURS, PLAIN, SEQUENCE, SEQUENCE_NEW, widths
from .rivals import rivals
from .world import Candidate, Rounds, World

__all__ = ["Collected", "Fused", "Shape", "cases", "rounds", "stock_move"]

#: The plain collective inside each fused op.
MOVES = dict(zip(FUSED, PLAIN, strict=True))
#: Rows of a result that are compared with a product in float64.
_CHECKED_ROWS = 256
#: Elements that are compared at a time, to save memory.
_COMPARED = 1 << 22
#: What all buffer sets of a case together should exceed, so that no candidate finds its data in a cache.
_ROTATED_NBYTES = 192 << 20
_MAX_SETS = 8


def cases(world: World, kind: str) -> Iterator[dict[str, Any]]:
    """Measure all cases of ``kind`` and yield them one by one. Collective."""
    if kind == "host":
        from .host import host

        return host(world)
    run = {"collectives": _collectives, "overlap": _overlap, "memory": _memory}[kind]
    return run(world)


# -- data every rank can make again for any rank
def _random(world: World, shape: Sequence[int], dtype: torch.dtype, *seed: int) -> Tensor:
    """The same numbers for the same seed on every rank; scaled so that sums of many products stay near 1."""
    mixed = functools.reduce(lambda h, s: h * 1_000_003 + s, seed, 17) % (1 << 62)
    generator = torch.Generator(world.device).manual_seed(mixed)
    return torch.randn(tuple(shape), generator=generator, device=world.device).to(dtype)


def _relative(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest wanted value; 0 only for equal values."""
    if got.dtype == want.dtype and torch.equal(got, want):
        return 0.0
    parts = zip(got.reshape(-1).split(_COMPARED), want.reshape(-1).split(_COMPARED), strict=True)
    worst = torch.stack([(g.double() - w.double()).abs().max() for g, w in parts]).max()
    return float(worst / want.abs().max().double().clamp_min(1e-30))


def _sets(nbytes: int) -> int:
    """Buffer sets of ``nbytes`` each to rotate over."""
    return max(2, min(_MAX_SETS, -(-_ROTATED_NBYTES // max(nbytes, 1))))


def rounds(world: World) -> Rounds:
    o = world.options
    return Rounds(float(o["seconds"]), int(o["least"]), int(o["most"]), int(o["warmup"]))


def _dtypes(world: World) -> list[torch.dtype]:
    return [getattr(torch, name) for name in world.options["dtypes"]]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- torch.distributed's own
def stock_move(op: str, x: Tensor, out: Tensor, group: Any = None) -> None:
    """One collective of torch.distributed, of all ranks or of ``group``."""
    if op == "all_gather":
        dist.all_gather_into_tensor(out, x, group=group)
    elif op == "reduce_scatter":
        dist.reduce_scatter_tensor(out, x, group=group)
    else:
        dist.all_reduce(out, group=group)  # in place: the caller has put x there


# -- plain collectives
def _collectives(world: World) -> Iterator[dict[str, Any]]:
    o = world.options
    for op in o["ops"]:
        for dtype in _dtypes(world):
            nbytes = int(o["min_nbytes"])
            while nbytes <= int(o["max_nbytes"]):
                yield Collected(world, op, nbytes, dtype).measure()
                nbytes *= int(o["factor"])


class Collected:
    """One collective of one size: ``shard_nbytes`` is what one rank brings (gather) or keeps (scatter, and its share of
    an all-reduce).
    """

    def __init__(self, world: World, op: str, shard_nbytes: int, dtype: torch.dtype) -> None:
        self.world, self.op, self.dtype = world, op, dtype
        elements = max(1, shard_nbytes // dtype.itemsize)
        cols = min(1024, elements)
        self.m, self.k = elements // cols, cols
        self.shard_nbytes = self.m * self.k * dtype.itemsize
        size = world.size
        whole = (self.m * size, self.k)
        self.in_shape = (self.m, self.k) if op == "all_gather" else whole
        self.out_shape = (self.m, self.k) if op == "reduce_scatter" else whole
        count = _sets(self.shard_nbytes * (size + 1 if op != "all_reduce" else 2 * size))
        self.x = [_random(world, self.in_shape, dtype, i, world.rank) for i in range(count)]
        self.out = [torch.zeros(self.out_shape, dtype=dtype, device=world.device) for _ in range(count)]
        self.problem = Problem(op, (self.m,) * size, k=self.k, dtype=_name(dtype))
        self.notes: list[str] = []

    def measure(self) -> dict[str, Any]:
        """Compare the results, then the times."""
        world = self.world
        found = self.candidates()
        errors = world.verify(found)
        samples = world.interleave(found, len(self.x), rounds(world))
        size_nbytes = self.shard_nbytes * world.size
        about = {"op": self.op, "shard_nbytes": self.shard_nbytes, "size_nbytes": size_nbytes}
        about |= {"dtype": _name(self.dtype), "schedule": str(world.comm.knobs(self.problem))}
        return {**about, "sets": len(self.x), "samples": samples, "errors": errors, "notes": self.notes}

    def candidates(self) -> list[Candidate]:
        world, comm, x, out = self.world, self.world.comm, self.x, self.out
        function = getattr(commbackend, self.op)
        n = self.m * self.k
        found = [
            self.checked(OURS, lambda i: comm.run(self.problem, {"x": x[i], "out": out[i]})),
            self.checked(NEW, lambda i: function(x[i], group=comm), returns=True),
            Candidate(MEMCPY, lambda i: out[i].view(-1)[:n].copy_(x[i].view(-1)[:n])),
        ]
        if world.stock:
            found.append(self.checked(world.stock, lambda i: stock_move(self.op, x[i], out[i])))
        if world.mpi is not None and world.device.type == "cpu":
            call = self.mpi()
            if call is not None:
                found.append(self.checked(MPI, call))
            else:
                self.notes.append(f"MPI has no sum of {_name(self.dtype)}")
        return found

    def mpi(self) -> Callable[[int], object] | None:
        """Open MPI's own collective on the same memory, or None where MPI has no such type."""
        from mpi4py import MPI as mpi

        known = {torch.float32: mpi.FLOAT, torch.float64: mpi.DOUBLE}
        kind = mpi.BYTE if self.op == "all_gather" else known.get(self.dtype)
        if kind is None:
            return None
        sends, recvs = ([[t.view(-1).view(torch.uint8).numpy(), kind] for t in ts] for ts in (self.x, self.out))
        world: Any = self.world.mpi
        call = {"all_gather": world.Allgather, "reduce_scatter": world.Reduce_scatter_block}.get(
            self.op, world.Allreduce
        )
        return lambda i: call(sends[i], recvs[i])

    def checked(self, name: str, call: Callable[[int], Any], *, returns: bool = False) -> Candidate:
        """A candidate whose result is compared: gathers bit by bit, sums with a sum in float64."""
        in_place = self.op == "all_reduce" and name == self.world.stock

        def check(i: int) -> float:
            # What an earlier candidate left there must not pass; in place, the input stands there.
            self.out[i].copy_(self.x[i]) if in_place else self.out[i].fill_(float("nan"))
            got = call(i)
            return _relative(got if returns else self.out[i], self.wanted(i))

        allowed = 0.0 if self.op == "all_gather" else 2 * self.world.size * torch.finfo(self.dtype).eps
        return Candidate(name, call, check, allowed)

    def wanted(self, i: int) -> Tensor:
        parts = (_random(self.world, self.in_shape, self.dtype, i, r) for r in range(self.world.size))
        if self.op == "all_gather":
            return torch.cat(list(parts))
        total = torch.zeros(self.in_shape, dtype=torch.float64, device=self.world.device)
        for part in parts:
            total.add_(part)
        return total if self.op == "all_reduce" else total[self.world.rank * self.m :][: self.m]


# -- products with their communication
@dataclass(frozen=True)
class Shape:
    """A product as one rank sees it: (m, k) @ (n, k).T; ``m`` counts the gathered or not yet scattered rows."""

    op: str
    model: str
    tp: int
    m: int
    k: int
    n: int
    dtype: torch.dtype

    @property
    def gflop(self) -> float:
        """Work of the product, in GFLOP."""
        return 2e-9 * self.m * self.k * self.n

    def facts(self) -> dict[str, Any]:
        """The case's name in files."""
        names = {f: getattr(self, f) for f in ("op", "model", "tp", "m", "k", "n")}
        return {**names, "dtype": _name(self.dtype)}

    def problem(self, size: int, op: str = "") -> Problem:
        """The engine's problem for ``op``: this one's, or the plain collective inside it."""
        op, rows, dtype = op or self.op, split(self.m, size), _name(self.dtype)
        if op in FUSED:
            return Problem(op, rows, k=self.k, n=(self.n,), dtype=dtype)
        return Problem(op, rows, k=self.k if op == "all_gather" else self.n, dtype=dtype)

    @property
    def operand_nbytes(self) -> int:
        """Bytes of the tensor that is moved."""
        cols = self.k if self.op == "all_gather_matmul" else self.n
        return self.m * cols * self.dtype.itemsize


def _shapes(world: World) -> Iterator[Shape | str]:
    """The cases asked for, in order; a text says why one was left out."""
    o = world.options
    for op in o["ops"]:
        for model in o["models"]:
            hidden, up, down = widths(model)
            for tp in (t or world.size for t in o["tp"]):
                k, n = (hidden, up // tp) if op == "all_gather_matmul" else (down // tp, hidden)
                for m in o["rows"]:
                    for dtype in _dtypes(world):
                        shape = Shape(op, model, tp, m, k, n, dtype)
                        if m % world.size:
                            yield f"M {m} does not divide by {world.size} ranks"
                        elif 0 < float(o["max_gflop"]) < shape.gflop:
                            yield f"products above --max-gflop {o['max_gflop']:g} were left out ({model}, M {m})"
                        else:
                            yield shape


def _overlap(world: World) -> Iterator[dict[str, Any]]:
    for shape in _shapes(world):
        if isinstance(shape, str):
            yield {"skipped": shape}
            continue
        yield from Fused(world, shape).measure()


class Fused:
    """One product with its communication."""

    def __init__(self, world: World, shape: Shape) -> None:
        self.world, self.shape, self.comm = world, shape, world.comm
        self.gathers = shape.op == "all_gather_matmul"
        s, size = shape, world.size
        self.local = s.m // size
        in_rows = self.local if self.gathers else s.m
        out_rows = self.local if s.op == "matmul_reduce_scatter" else s.m
        moved = (s.m, s.k) if self.gathers else (s.m, s.n)
        count = _sets(s.dtype.itemsize * (in_rows * s.k + s.n * s.k + out_rows * s.n + moved[0] * moved[1]))
        self.x = [_random(world, (in_rows, s.k), s.dtype, i, world.rank, 1) for i in range(count)]
        self.w = [_random(world, (s.n, s.k), s.dtype, i, world.rank, 2) for i in range(count)]
        make = functools.partial(torch.zeros, dtype=s.dtype, device=world.device)
        self.out = [make((out_rows, s.n)) for _ in range(count)]
        #: The gathered input, or the product before its sum.
        self.moved = [make(moved) for _ in range(count)]
        self.problem, self.move_problem = shape.problem(size), shape.problem(size, MOVES[shape.op])

    def measure(self) -> Iterator[dict[str, Any]]:
        """Compare the results, then the times, in every mode asked for."""
        world, options = self.world, self.world.options
        found, notes = self.candidates()
        errors = world.verify(found)
        for i in range(len(self.x)):
            self.sequence(i)  # real data everywhere: zeros and NaN multiply at another power, so at another clock
        for mode in options["modes"]:
            burst = 1 if mode == "isolated" else int(options["burst"])
            if mode == "graph":
                samples = world.interleave(self.captured(found), 1, rounds(world), burst=burst)
            else:
                samples = world.interleave(found, len(self.x), rounds(world), burst=burst)
            about = {**self.shape.facts(), "mode": mode, "schedule": _knobs_text(self.comm.knobs(self.problem))}
            yield {**about, "sets": len(self.x), "samples": samples, "errors": errors, "notes": notes}

    def candidates(self) -> tuple[list[Candidate], list[str]]:
        found = [
            Candidate(GEMM, self.gemm),
            Candidate(MOVE, self.move),
            self.checked(SEQUENCE, self.sequence),
            self.checked(OURS, self.fused(self.comm)),
        ]
        if self.world.stock:
            found.append(self.checked(self.world.stock, self.stock_sequence))
        if self.world.options["new"]:
            found.append(self.checked(NEW, self.new_tensor, returns=True))
            found.append(self.checked(SEQUENCE_NEW, self.sequence_new_tensor, returns=True))
        others, notes = rivals(self.world, self.shape.op, self.x, self.w) if self.world.options["rivals"] else ({}, [])
        found += [self.checked(name, call, returns=True) for name, call in others.items()]
        for wanted in self.variants():
            overrides = {k: v for k, v in zip(("schedule", "chunks", "lanes"), wanted.split("/"), strict=False) if v}
            comm = self.world.communicator(f"bench {wanted}", **overrides)
            reason = supports(self.problem, comm.caps, knobs := comm.knobs(self.problem))
            if reason is None and knobs.schedule == overrides["schedule"]:
                found.append(self.checked(wanted, self.fused(comm)))
            else:
                notes.append(f"{self.shape.op} cannot run {wanted} on {comm.transport}")
        return found, notes

    def captured(self, found: Sequence[Candidate]) -> list[Candidate]:
        """The candidates of the table as CUDA graphs of one call each, on the first buffer set. Collective."""
        self.comm.prepare_capture()
        replays = []
        for c in (c for c in found if c.name in (GEMM, MOVE, SEQUENCE, OURS, self.world.stock)):
            graph = torch.cuda.CUDAGraph()
            self.world.settle()
            with torch.cuda.graph(graph):
                c.call(0)
            replays.append(Candidate(c.name, lambda i, graph=graph: graph.replay()))  # type: ignore[misc]
        return replays

    def variants(self) -> list[str]:
        """The schedules to measure beside the chosen one, as ``name[/chunks[/lanes]]``."""
        asked: list[str] = self.world.options["schedules"]
        legal = candidates(self.problem, self.comm.caps)
        if asked == ["all"]:
            return list(dict.fromkeys(k.schedule for k in legal))
        if asked == ["grid"]:
            return list(dict.fromkeys(f"{k.schedule}/{k.chunks}/{k.lanes}" for k in legal))
        return [a for a in asked if a.partition("/")[0] in SCHEDULES[self.shape.op]]

    # -- what is measured; ``i`` is the buffer set
    def gemm(self, i: int) -> None:
        if self.gathers:
            torch.mm(self.moved[i], self.w[i].t(), out=self.out[i])
        else:
            torch.mm(self.x[i], self.w[i].t(), out=self.moved[i])

    def move(self, i: int) -> None:
        source, out = (self.x, self.moved) if self.gathers else (self.moved, self.out)
        self.comm.run(self.move_problem, {"x": source[i], "out": out[i]})

    def sequence(self, i: int) -> None:
        first, second = (self.move, self.gemm) if self.gathers else (self.gemm, self.move)
        first(i)
        second(i)

    def stock_sequence(self, i: int) -> None:
        if self.gathers:
            stock_move("all_gather", self.x[i], self.moved[i])
            self.gemm(i)
        elif self.shape.op == "matmul_reduce_scatter":
            self.gemm(i)
            stock_move("reduce_scatter", self.moved[i], self.out[i])
        else:
            torch.mm(self.x[i], self.w[i].t(), out=self.out[i])
            stock_move("all_reduce", self.moved[i], self.out[i])

    def fused(self, comm: Communicator) -> Callable[[int], object]:
        return lambda i: comm.run(self.problem, {"x": self.x[i], "w0": self.w[i], "out0": self.out[i]})

    def new_tensor(self, i: int) -> Tensor:
        result: Tensor = getattr(commbackend, self.shape.op)(self.x[i], self.w[i], group=self.comm)
        return result

    def sequence_new_tensor(self, i: int) -> Tensor:
        collective: Callable[..., Tensor] = getattr(commbackend, MOVES[self.shape.op])
        if self.gathers:
            return torch.mm(collective(self.x[i], group=self.comm), self.w[i].t())
        return collective(torch.mm(self.x[i], self.w[i].t()), group=self.comm)

    # -- what is right
    def checked(self, name: str, call: Callable[[int], Any], *, returns: bool = False) -> Candidate:
        def check(i: int) -> float:
            for t in (self.out[i], self.moved[i]):
                t.fill_(float("nan"))
            got = call(i)
            rows = self.some_rows()
            return _relative((got if returns else self.out[i])[rows], self.wanted(i, rows))

        # Every rank's product is rounded once to the type, and sums over k in float32.
        allowed = 4 * self.world.size * torch.finfo(self.shape.dtype).eps + 1e-7 * self.shape.k**0.5
        return Candidate(name, call, check, allowed)

    def some_rows(self) -> Tensor:
        """Rows of ``out`` that are compared: all if few, else spread evenly from the first to the last."""
        rows = self.out[0].shape[0]
        return torch.linspace(0, rows - 1, min(rows, _CHECKED_ROWS), device=self.world.device).long()

    def wanted(self, i: int, rows: Tensor) -> Tensor:
        s, size = self.shape, self.world.size
        if self.gathers:
            shards = [_random(self.world, (self.local, s.k), s.dtype, i, r, 1) for r in range(size)]
            return torch.cat(shards)[rows].double() @ self.w[i].double().t()
        if s.op == "matmul_reduce_scatter":
            rows = rows + self.world.rank * self.local
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for r in range(size):
            x = _random(self.world, (s.m, s.k), s.dtype, i, r, 1)[rows]
            w = _random(self.world, (s.n, s.k), s.dtype, i, r, 2)
            total = total + x.double() @ w.double().t()
        return total


def _knobs_text(knobs: Knobs) -> str:
    return f"{knobs.schedule}/{knobs.chunks}/{knobs.lanes}" + ("/polls" if knobs.polls else "")


# -- symmetric memory
def _memory(world: World) -> Iterator[dict[str, Any]]:
    for number, shape in enumerate(_shapes(world)):
        if isinstance(shape, str):
            yield {"skipped": shape}
            continue
        # A communicator of its own: heaps grow and never shrink.
        comm = world.communicator(name := f"memory {number}")
        before = comm.stats()["symmetric_nbytes"]
        fused = Fused(world, shape)
        fused.fused(comm)(0)
        stats = comm.stats()
        sizes = {"operand_nbytes": shape.operand_nbytes, "symmetric_nbytes": stats["symmetric_nbytes"]}
        sizes |= {"symmetric_nbytes_before": before, "heap_growths": stats["heap_growths"]}
        knobs = _knobs_text(comm.knobs(fused.problem))
        yield {**shape.facts(), **sizes, "schedule": knobs, "samples": {}}
        world.settle()
        world.release(name)
