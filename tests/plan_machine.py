"""A machine that runs plans on small integer matrices, with lanes and ranks interleaved at random; for tests alone.

Every step takes two moves: it starts (and may read), then it ends (reads if it has not, writes, raises its slots), so
that what is not ordered by the plan happens in every order. Heap halves persist between calls and start as garbage.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from commbackend.plan import Collective, Copy, Gemm, Get, Plan, Problem, Put, Reduce, Region, Signal, Step, Wait

Array = np.ndarray[Any, Any]
GARBAGE = 10**12


class Stuck(AssertionError):
    """No lane of any rank can move."""


@dataclass
class Frame:
    """One call of one rank."""

    call: int
    seq: int
    plan: Plan
    tensors: dict[str, Array]
    done: list[bool] = field(default_factory=list)
    started: dict[int, Any] = field(default_factory=dict)
    polled: dict[int, int] = field(default_factory=dict)
    met: int = 0


class Machine:
    def __init__(self, plans: Sequence[Plan], inputs: Sequence[Sequence[Mapping[str, Array]]], seed: int) -> None:
        self.rng = random.Random(seed)
        self.size = plans[0].size
        need = max(sum(b.rows * b.cols for b in p.programs[0].buffers if b.space == "heap") for p in plans)
        self.heap = [[np.full(need, GARBAGE + r) for _ in range(2)] for r in range(self.size)]
        self.words: dict[tuple[int, int, int], int] = {}
        #: (call, number of the collective, ranks that take part) -> what they bring.
        self.meetings: dict[tuple[int, int, tuple[int, ...]], dict[int, tuple[Collective, list[Array]]]] = {}
        # Calls that share nothing with their peers are not counted.
        seqs = list(itertools.accumulate(any(one.counted for one in p.programs) for p in plans))
        calls = list(enumerate(zip(plans, seqs, inputs)))
        self.frames = [[self._frame(p, i, seq, r, given[r]) for i, (p, seq, given) in calls] for r in range(self.size)]
        self.now = [0] * self.size

    def _frame(self, plan: Plan, call: int, seq: int, rank: int, inputs: Mapping[str, Array]) -> Frame:
        tensors = {}
        for b in plan.programs[rank].buffers:
            if b.space == "input":
                assert inputs[b.name].shape == (b.rows, b.cols), (b, inputs[b.name].shape)
                tensors[b.name] = inputs[b.name]
            elif b.space != "heap":
                tensors[b.name] = np.full((b.rows, b.cols), GARBAGE * 3)
        return Frame(call, seq, plan, tensors, [False] * len(plan.programs[rank].steps))

    # -- memory
    def view(self, rank: int, f: Frame, region: Region) -> Array:
        buffers = f.plan.programs[rank].buffers
        b = next(b for b in buffers if b.name == region.buf)
        if b.space == "heap":
            start = 0
            for other in buffers:
                if other.name == b.name:
                    break
                start += other.rows * other.cols if other.space == "heap" else 0
            owner = region.at if region.at >= 0 else rank
            whole = self.heap[owner][f.seq % 2][start : start + b.rows * b.cols].reshape(b.rows, b.cols)
        else:
            assert region.at in (-1, rank), region
            whole = f.tensors[b.name]
        cols = region.cols if region.cols >= 0 else b.cols - region.col
        assert 0 <= region.row and region.row + (region.blocks - 1) * region.block_stride + region.rows <= b.rows
        parts = [
            whole[region.row + i * region.block_stride :][: region.rows, region.col : region.col + cols]
            for i in range(region.blocks)
        ]
        if region.blocks == 1:
            return parts[0]
        rows = [region.row + i * region.block_stride + j for i in range(region.blocks) for j in range(region.rows)]
        return _Rows(whole, rows, region.col, cols)  # type: ignore[return-value]

    def read(self, rank: int, f: Frame, region: Region) -> Array:
        v = self.view(rank, f, region)
        return v.get() if isinstance(v, _Rows) else v.copy()

    def write(self, rank: int, f: Frame, region: Region, value: Array) -> None:
        v = self.view(rank, f, region)
        if isinstance(v, _Rows):
            v.set(value)
        else:
            assert v.shape == value.shape, (region, v.shape, value.shape)
            v[:] = value

    def word(self, at: int, writer: int, slot: int) -> int:
        return self.words.get((at, writer, slot), 0)

    def raise_word(self, at: int, writer: int, slot: int, value: int) -> None:
        self.words[at, writer, slot] = max(value, self.word(at, writer, slot))

    # -- running
    def run(self, *, one_queue: bool = False) -> None:
        weights = [self.rng.choice((1, 1, 5, 50)) for _ in range(self.size)]
        while True:
            for r in range(self.size):
                while self.now[r] < len(self.frames[r]) and all(self.frames[r][self.now[r]].done):
                    self.now[r] += 1
            if all(self.now[r] == len(self.frames[r]) for r in range(self.size)):
                return
            moves = [m for r in range(self.size) for m in self._moves(r, one_queue)]
            if not moves:
                raise Stuck(f"ranks stand in calls {self.now}")
            rank, i = self.rng.choices(moves, [weights[r] for r, _ in moves])[0]
            self._move(rank, i)

    def _moves(self, rank: int, one_queue: bool) -> list[tuple[int, int]]:
        if self.now[rank] == len(self.frames[rank]):
            return []
        f = self.frames[rank][self.now[rank]]
        steps = f.plan.programs[rank].steps
        lanes: set[int] = set()
        moves = []
        for i, s in enumerate(steps):
            if f.done[i]:
                continue
            lane = 0 if one_queue else s.lane
            if lane not in lanes and all(f.done[j] for j in s.after) and self._can(rank, f, i, s):
                moves.append((rank, i))
            lanes.add(lane)
        return moves

    def _can(self, rank: int, f: Frame, i: int, s: Step) -> bool:
        if isinstance(s, Wait):
            return self.word(rank, s.peer, s.slot) >= f.seq + s.delta
        if isinstance(s, Gemm):
            segment = s.segments[f.polled.get(i, 0)]
            return all(self.word(rank, w, k) >= f.seq for w, k in segment.ready)
        if isinstance(s, Collective) and i in f.started:
            members = self.members(rank, f, s)
            return len(self.meetings[f.call, f.started[i], members]) == len(members)
        return True

    def _move(self, rank: int, i: int) -> None:
        f = self.frames[rank][self.now[rank]]
        s = f.plan.programs[rank].steps[i]
        if self._step(rank, f, i, s):
            f.done[i] = True

    def _step(self, rank: int, f: Frame, i: int, s: Step) -> bool:
        """Make one move of a step; True when it has ended."""
        if isinstance(s, Signal):
            self.raise_word(s.peer, rank, s.slot, f.seq + s.delta)
            return True
        if isinstance(s, Wait):
            return True
        if isinstance(s, Collective):
            return self._collective(rank, f, i, s)
        if i not in f.started:
            f.started[i] = self._result(rank, f, i, s) if self.rng.random() < 0.5 else None
            return False
        value = f.started.pop(i)
        if value is None:
            value = self._result(rank, f, i, s)
        if isinstance(s, Gemm):
            segment = s.segments[f.polled.get(i, 0)]
            self.write(rank, f, segment.out, value)
            for peer, slot in segment.done:
                self.raise_word(peer, rank, slot, f.seq)
            f.polled[i] = f.polled.get(i, 0) + 1
            return f.polled[i] == len(s.segments)
        self.write(rank, f, s.dst, value)
        if isinstance(s, Put):
            self.raise_word(s.peer, rank, s.slot, f.seq)
        return True

    def _result(self, rank: int, f: Frame, i: int, s: Step) -> Array:
        if isinstance(s, Gemm):
            g = s.segments[f.polled.get(i, 0)]
            a, b = self.read(rank, f, g.a), self.read(rank, f, g.b)
            out = a @ b.T if s.form == "nt" else a @ b if s.form == "nn" else a.T @ b
            for region in (*g.addends, *((g.bias,) if g.bias else ())):
                out = out + self.read(rank, f, region)
            return out
        if isinstance(s, Reduce):
            total = sum(self.read(rank, f, r) for r in s.srcs)
            return total + self.read(rank, f, s.bias) if s.bias else total
        assert isinstance(s, Put | Get | Copy)
        return self.read(rank, f, s.src)

    def members(self, rank: int, f: Frame, s: Collective) -> tuple[int, ...]:
        """Who takes part in ``s``, in the order of its regions: all, or those of ``rank``'s number on their hosts."""
        if not s.between:
            return tuple(range(self.size))
        hosts = f.plan.meta["hosts"]
        by_host = [[r for r in range(self.size) if hosts[r] == h] for h in sorted(set(hosts))]
        return next(twins for twins in zip(*by_host) if rank in twins)

    def _collective(self, rank: int, f: Frame, i: int, s: Collective) -> bool:
        members = self.members(rank, f, s)
        if i not in f.started:
            f.started[i], f.met = f.met, f.met + 1
            meeting = self.meetings.setdefault((f.call, f.started[i], members), {})
            meeting[rank] = (s, [self.read(rank, f, r) for r in s.srcs])
            return False
        meeting = self.meetings[f.call, f.started[i], members]
        if s.kind == "one_shot":
            total = sum(data[0] for _, data in meeting.values())
            for mine in (*s.srcs[1:], *((s.bias,) if s.bias else ())):
                total = total + self.read(rank, f, mine)
            self.write(rank, f, s.dsts[0], total)
            return True
        for at, r in enumerate(members):
            theirs, data = meeting[r]
            value, target = data[members.index(rank)] if s.kind == "all_to_all" else data[0], s.dsts[at]
            assert theirs.kind == s.kind
            assert value.shape[0] == target.rows * target.blocks, (s.kind, r, rank)
            self.write(rank, f, target, value)
        for slot in s.slots:
            self.raise_word(rank, rank, slot, f.seq)
        return True

    def outputs(self, call: int, rank: int) -> dict[str, Array]:
        f = self.frames[rank][call]
        names = {b.name for b in f.plan.programs[rank].buffers if b.space == "output"}
        return {n: f.tensors[n] for n in names}


class _Rows:
    """Rows of a matrix that are not consecutive."""

    def __init__(self, whole: Array, rows: list[int], col: int, cols: int) -> None:
        self._whole, self._rows, self._cols = whole, rows, slice(col, col + cols)

    def get(self) -> Array:
        return self._whole[self._rows, self._cols].copy()

    def set(self, value: Array) -> None:
        self._whole[self._rows, self._cols] = value


def make_inputs(problem: Problem, rank: int, seed: int) -> dict[str, Array]:
    """Random inputs of one rank, named as docs/architecture.md says."""
    rng = np.random.default_rng((seed, rank))
    m, total, k = problem.blocks * problem.rows[rank], problem.blocks * problem.total, problem.k

    def some(rows: int, cols: int) -> Array:
        return rng.integers(-9, 9, (rows, cols))

    flags, op = problem.flags, problem.op
    if op == "all_gather":
        return {"x": some(m, k)}
    if op in ("reduce_scatter", "all_reduce"):
        return {"x": some(total, k)}
    if op.startswith("dgrad"):
        t = {f"dy{i}": some(total, n) for i, n in enumerate(problem.n)}
        t |= {f"w{i}": some(n, k) for i, n in enumerate(problem.n)}
        t["x"] = some(total if op == "dgrad_all_reduce" else m, k)
        return t
    t = {f"w{i}": some(n, k) for i, n in enumerate(problem.n)}
    if problem.bias:  # replicated: the owner of a row adds it
        same = np.random.default_rng(seed)
        t |= {f"bias{i}": same.integers(-9, 9, (1, n)) for i, n in enumerate(problem.n)}
    if "residual" in flags:
        t["residual"] = np.random.default_rng(seed + 1).integers(-9, 9, (total, problem.n[0]))
    t["x"] = some(m if op == "all_gather_matmul" else total, k)
    if "wgrad" in flags:
        t["y"] = some(total, problem.n[0])
    return t


def share_gathered(problem: Problem, inputs: Sequence[dict[str, Array]]) -> None:
    """Give every rank the gathered ``x`` that flag "saved" passes in."""
    if "saved" in problem.flags:
        whole = gather(problem, [t["x"] for t in inputs])
        for t in inputs:
            t["gathered"] = whole


def gather(problem: Problem, shards: Sequence[Array]) -> Array:
    blocks = [s.reshape(problem.blocks, rows, problem.k) for s, rows in zip(shards, problem.rows)]
    return np.concatenate(blocks, 1).reshape(problem.blocks * problem.total, problem.k)


def shard(problem: Problem, whole: Array, rank: int) -> Array:
    first = sum(problem.rows[:rank])
    rows = problem.rows[rank]
    cols = whole.shape[1]
    return whole.reshape(problem.blocks, problem.total, cols)[:, first : first + rows].reshape(
        problem.blocks * rows, cols
    )


def reference(problem: Problem, inputs: Sequence[Mapping[str, Array]], rank: int) -> dict[str, Array]:
    """What ``rank`` must get."""
    op, flags, mine = problem.op, problem.flags, inputs[rank]
    count = range(len(problem.n))
    if op in ("all_gather", "all_gather_matmul"):
        whole = gather(problem, [t["x"] for t in inputs])
        if op == "all_gather":
            return {"out": whole}
        out = {f"out{i}": whole @ mine[f"w{i}"].T + (mine[f"bias{i}"] if problem.bias else 0) for i in count}
        out |= {"gathered": whole} if "gathered" in flags else {}
        return out | ({"dw": whole.T @ mine["y"]} if "wgrad" in flags else {})
    if op in ("reduce_scatter", "all_reduce"):
        total = sum(t["x"] for t in inputs)
        return {"out": shard(problem, total, rank) if op == "reduce_scatter" else total}
    if op.startswith("matmul"):
        total = sum(t["x"] @ t["w0"].T for t in inputs)
        if op == "matmul_reduce_scatter":
            total = shard(problem, total, rank)
        total = total + (mine["residual"] if "residual" in flags else 0)
        return {"out0": total + (mine["bias0"] if problem.bias else 0)}
    out = {}
    if "no_dgrad" not in flags:
        dx = sum(t[f"dy{i}"] @ t[f"w{i}"] for t in inputs for i in count)
        out["dx"] = shard(problem, dx, rank) if op == "dgrad_reduce_scatter" else dx
    if "wgrad" in flags:
        whole = mine["x"] if op == "dgrad_all_reduce" else gather(problem, [t["x"] for t in inputs])
        out |= {f"dw{i}": mine[f"dy{i}"].T @ whole for i in count}
    return out


def run_calls(plans: Sequence[Plan], problems: Sequence[Problem], seed: int, *, one_queue: bool = False) -> None:
    """Run the calls one after another on one heap and compare every output of every rank with the reference."""
    inputs = [[make_inputs(p, r, seed + i) for r in range(p.size)] for i, p in enumerate(problems)]
    for problem, tensors in zip(problems, inputs):
        share_gathered(problem, tensors)
    machine = Machine(plans, inputs, seed)
    machine.run(one_queue=one_queue)
    for call, problem in enumerate(problems):
        for rank in range(problem.size):
            wanted, got = reference(problem, inputs[call], rank), machine.outputs(call, rank)
            assert wanted.keys() == got.keys(), (problem, wanted.keys(), got.keys())
            for name, value in wanted.items():
                assert np.array_equal(got[name], value), f"call {call} rank {rank}: {name} is wrong"
