"""The engine and the communicator: every op and schedule against a reference, over real transports."""

from __future__ import annotations

import itertools

import pytest
import torch

from commbackend import schedules
from commbackend.communicator import Communicator
from commbackend.config import resolve
from commbackend.plan import Problem
from commbackend.testing import run_ranks, run_threads


def communicator(group, transport, **overrides):
    config = resolve(transport=transport, timeout_s=20.0, **overrides)
    return Communicator(group, config, torch.device("cpu"))


def integers(seed, *shape, dtype=torch.float32):
    """Small integers: every sum and product of them is exact, so results can be compared bitwise."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=g).to(dtype)


def offsets(rows):
    return [sum(rows[:r]) for r in range(len(rows))]


def shard(x, rows, rank, blocks):
    """Rank's rows of a (blocks * total, cols) matrix."""
    cols = x.shape[-1]
    start = offsets(rows)[rank]
    return x.view(blocks, sum(rows), cols)[:, start : start + rows[rank]].reshape(blocks * rows[rank], cols)


def case(problem, rank, seed):
    """(inputs, expected outputs) of ``rank``."""
    rows, blocks, k, n = problem.rows, problem.blocks, problem.k, problem.n
    size, total = len(rows), sum(rows)
    m_all = blocks * total
    out, inputs = {}, {}
    if problem.op == "all_gather":
        full = integers(seed, m_all, k)
        inputs["x"], out["out"] = shard(full, rows, rank, blocks), full
    elif problem.op in ("reduce_scatter", "all_reduce"):
        parts = [integers(seed + r, m_all, k) for r in range(size)]
        total_sum = torch.stack(parts).sum(0)
        inputs["x"] = parts[rank]
        out["out"] = total_sum if problem.op == "all_reduce" else shard(total_sum, rows, rank, blocks)
    elif problem.op == "all_gather_matmul":
        full = integers(seed, m_all, k)
        inputs["x"] = shard(full, rows, rank, blocks)
        for i, ni in enumerate(n):
            w = integers(seed + 100 * (rank + 1) + i, ni, k)
            inputs[f"w{i}"] = w
            out[f"out{i}"] = full @ w.t()
            if problem.bias:
                inputs[f"bias{i}"] = integers(seed + i + 7 * rank, 1, ni)
                out[f"out{i}"] = out[f"out{i}"] + inputs[f"bias{i}"]
        if "gathered" in problem.flags:
            out["gathered"] = full
        if "wgrad" in problem.flags:
            inputs["y"] = integers(seed + 50 + rank, m_all, n[0])
            out["dw"] = full.t() @ inputs["y"]
    elif problem.op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        xs = [integers(seed + r, m_all, k) for r in range(size)]
        ws = [integers(seed + 100 + r, n[0], k) for r in range(size)]
        full = sum(x @ w.t() for x, w in zip(xs, ws))
        inputs["x"], inputs["w0"] = xs[rank], ws[rank]
        if problem.bias:
            inputs["bias0"] = integers(seed + 5, 1, n[0])
            full = full + inputs["bias0"]
        out["out0"] = full if problem.op == "matmul_all_reduce" else shard(full, rows, rank, blocks)
    else:
        dys = [[integers(seed + 10 * r + i, m_all, ni) for i, ni in enumerate(n)] for r in range(size)]
        ws = [[integers(seed + 1000 + 10 * r + i, ni, k) for i, ni in enumerate(n)] for r in range(size)]
        x = integers(seed + 77, m_all, k)
        for i in range(len(n)):
            inputs[f"dy{i}"], inputs[f"w{i}"] = dys[rank][i], ws[rank][i]
        if "no_dgrad" not in problem.flags:
            dx = sum(dy @ w for r in range(size) for dy, w in zip(dys[r], ws[r]))
            out["dx"] = shard(dx, rows, rank, blocks) if problem.op == "dgrad_reduce_scatter" else dx
        if "wgrad" in problem.flags:
            if problem.op == "dgrad_all_reduce":
                inputs["x"] = x
            elif "saved" in problem.flags:
                inputs["gathered"] = x
            else:
                inputs["x"] = shard(x, rows, rank, blocks)
            for i in range(len(n)):
                out[f"dw{i}"] = dys[rank][i].t() @ x
    return inputs, out


def run_case(comm, problem, seed):
    inputs, expected = case(problem, comm.rank, seed)
    outputs = {name: torch.full_like(t, float("nan")) for name, t in expected.items()}
    comm.run(problem, {**inputs, **outputs})
    for name, t in expected.items():
        assert torch.equal(outputs[name], t), f"{problem} {comm.knobs(problem)} {name}\n{outputs[name]}\nwanted\n{t}"


def problems(size):
    even, uneven = (5,) * size, tuple((3 * r) % 7 for r in range(size))
    for rows in (even, uneven):
        for op, n, flags, bias in (
            ("all_gather", (), (), False),
            ("reduce_scatter", (), (), False),
            ("all_reduce", (), (), False),
            ("all_gather_matmul", (6,), (), False),
            ("all_gather_matmul", (6, 3), ("gathered",), True),
            ("all_gather_matmul", (4,), ("wgrad",), False),
            ("matmul_reduce_scatter", (6,), (), True),
            ("matmul_all_reduce", (6,), (), True),
            ("dgrad_reduce_scatter", (6, 2), ("wgrad",), False),
            ("dgrad_reduce_scatter", (6,), ("saved", "wgrad"), False),
            ("dgrad_reduce_scatter", (6,), ("no_dgrad", "wgrad"), False),
            ("dgrad_reduce_scatter", (6,), (), False),
            ("dgrad_all_reduce", (6, 2), ("wgrad",), False),
        ):
            for blocks in (1,) if op.endswith("all_reduce") else (1, 3):
                yield Problem(op, rows, blocks, k=4, n=n, dtype="float32", bias=bias, flags=flags)


def every_schedule(rank, group, transport):
    """All ops by all schedules of the transport on one communicator, mixed."""
    comm = communicator(group, transport)
    seeds = itertools.count(1000)
    done = 0
    with comm:
        for problem in problems(group.size):
            for knobs in schedules.candidates(problem, comm.caps):
                if knobs.polls or knobs.chunks not in (1, 2):
                    continue
                comm.chooser.set(problem, knobs)
                run_case(comm, problem, next(seeds))
                done += 1
    return done


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_schedule_over_local(size):
    counts = run_threads(every_schedule, size, "local", timeout_s=120)
    assert len(set(counts)) == 1 and counts[0] >= (20 if size == 1 else 50)


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("shm", 4), ("gloo", 2)])
def test_every_schedule_over_processes(transport, size):
    counts = run_ranks(every_schedule, size, transport, timeout_s=120)
    assert len(set(counts)) == 1 and counts[0] > 20


def sweep_rows(rank, group):
    comm = communicator(group, "local")
    for m in (0, 1, 7, 1024, 768, 1000, 1):
        for op in ("all_gather_matmul", "matmul_reduce_scatter"):
            run_case(comm, Problem(op, (m,) * group.size, 1, k=8, n=(4,), dtype="float32"), m)
    growths = comm.stats()["heap_growths"]
    comm.close()
    return growths


def test_rows_change_at_every_call():
    assert max(run_threads(sweep_rows, 2)) < 12


def disagree(rank, group):
    from commbackend.errors import CollectiveMismatch

    comm = communicator(group, "local")
    rows = (8,) * group.size if rank != 2 else (7,) * group.size
    problem = Problem("all_gather_matmul", rows, 1, k=4, n=(4,), dtype="float32")
    tensors = {"x": torch.zeros(rows[0], 4), "w0": torch.zeros(4, 4), "out0": torch.zeros(sum(rows), 4)}
    with pytest.raises(CollectiveMismatch) as e:
        comm.run(problem, tensors)
    comm.close()
    return str(e.value)


def test_disagreement_names_ranks_and_both_values():
    for text in run_threads(disagree, 4):
        assert "rank 2 called" in text and "rows=7x4" in text and "rows=8x4" in text, text


def misspelt(rank, group):
    from commbackend.errors import ConfigError

    with pytest.raises(ConfigError, match=r"unknown schedule 'pul' \(did you mean pull\?\)"):
        communicator(group, "local", schedule="pul")
    return True


def test_a_schedule_that_no_op_has_is_refused():
    assert run_threads(misspelt, 2) == [True] * 2


def explained(rank, group):
    comm = communicator(group, "local", chunks=2)
    problem = Problem("all_gather_matmul", (4,) * group.size, 1, k=4, n=(4,), dtype="float32")
    comm.knobs(problem)
    text = comm.explain()
    comm.close()
    return text


def test_explain_says_what_was_given_and_how_calls_run():
    for rank, text in enumerate(run_threads(explained, 2)):
        assert text.startswith(f"rank {rank} of 2 on cpu: transport local\n")
        assert "  chunks = 2 (argument)\n" in text and "lanes =" not in text
        assert "other settings: defaults; waits end after 20 s" in text
        assert "all_gather_matmul rows=4x2 dtype=float32 k=4 n=4: " in text and "/2/" in text


def barriers_between_calls(rank, group):
    comm = communicator(group, "local")
    problem = Problem("all_gather_matmul", (4,) * group.size, 1, k=4, n=(4,), dtype="float32")
    for seed in range(3):
        comm.barrier()
        comm.barrier()
        comm.reserve(8 * (seed + 1), 4, torch.float32)
        run_case(comm, problem, seed)
    comm.close()


def test_barriers_and_reserves_between_calls():
    """They publish records but use no heap half, so they must not count where credits are concerned."""
    run_threads(barriers_between_calls, 3)


def reserved(rank, group, transport):
    comm = communicator(group, transport)
    comm.reserve(60, 8, torch.float32)
    growths, nbytes = comm.stats()["heap_growths"], comm.stats()["symmetric_nbytes"]
    for problem in problems(group.size):
        if sum(problem.rows) * problem.blocks <= 60:
            run_case(comm, problem, 1)
    assert (comm.stats()["heap_growths"], comm.stats()["symmetric_nbytes"]) == (growths, nbytes)
    comm.close()


def test_calls_within_a_reserve_grow_nothing():
    run_threads(reserved, 3, "local")
