"""Several communicators at once: subgroups of every kind, two on one group, two models, and who may call when."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ops_world import ints, leaf, same, spmd

import commbackend
from commbackend import nn, ops
from commbackend.errors import ConcurrentUse
from commbackend.testing import run_ranks

WORLD = 4
#: Contiguous, strided, permuted and overlapping subgroups, and the whole.
GROUPS = [(0, 1), (2, 3), (0, 2), (3, 1), (1, 2, 3), (0, 1, 2, 3)]


def interleaved(rank, group, folder):
    store = dist.FileStore(str(Path(folder) / "gloo"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    comms = {}
    for ranks in GROUPS:
        pg = dist.new_group(list(ranks))
        if rank in ranks:
            comms[ranks] = commbackend.init(pg, transport="shm", device="cpu")
    comms["again"] = commbackend.init(transport="shm", device="cpu", name="again")
    # All ranks call in one order; which groups take part changes from call to call.
    order = random.Random(5).choices([*GROUPS, "again"], k=60)
    for seed, ranks in enumerate(order):
        if ranks not in comms:
            continue
        comm, members = comms[ranks], sorted(ranks) if ranks != "again" else range(WORLD)
        xs = [ints(seed + r, 3, 6) for r in members]
        w = ints(90 + seed, 5, 6)
        x = leaf(xs[comm.rank])
        out = ops.all_gather_matmul(x, w, comm)
        same(out, torch.cat(xs) @ w.t(), (seed, ranks))
        out.backward(torch.ones_like(out))
        same(x.grad, comm.size * w.sum(0).expand(3, 6), (seed, ranks))
        same(ops.all_reduce(xs[comm.rank], comm), sum(xs), (seed, ranks))
    sizes = {str(k): c.size for k, c in comms.items()}
    for comm in comms.values():
        comm.close()
    dist.destroy_process_group()
    return sizes


def test_overlapping_subgroups_at_once(tmp_path):
    """F023, F068."""
    sizes = run_ranks(interleaved, WORLD, str(tmp_path), timeout_s=100.0)
    assert [len(s) for s in sizes] == [1 + 1 + sum(r in g for g in GROUPS[:-1]) for r in range(WORLD)]


def test_two_models_on_one_group():
    """Their calls mix in the order in which autograd runs them, the same on all ranks."""

    def body(comm):
        def run(*models):
            x = [leaf(ints(7 + i, 4, 16, dtype=torch.float32) / 4) for i in range(len(models))]
            outs = [m(t) for m, t in zip(models, x, strict=True)]
            torch.autograd.backward([o.square().sum() for o in outs])
            return [
                (o.detach(), t.grad, [p.grad for p in m.parameters()]) for o, t, m in zip(outs, x, models, strict=True)
            ]

        def model(seed):
            made = nn.GatedMLP(16, 8, group=comm, sequence_parallel=True)
            with torch.no_grad():
                for i, p in enumerate(made.parameters()):
                    p.copy_(ints(seed + i + 10 * comm.rank, *p.shape) / 4)
            return made

        together = run(model(1), model(2))
        x = leaf(ints(8, 4, 16, dtype=torch.float32) / 4)
        second = model(2)
        out = second(x)
        out.square().sum().backward()
        same(together[1][0], out.detach())
        same(together[1][1], x.grad)
        for got, p in zip(together[1][2], second.parameters(), strict=True):
            same(got, p.grad)

    spmd(body, 2)


def test_two_threads_on_one_communicator():
    """F070: the second caller is refused at once, the first one's call ends well, and so do later ones."""
    entered, refused = threading.Event(), threading.Event()

    def body(comm):
        x = torch.full((4,), comm.rank + 1.0)
        if comm.rank == 1:
            assert refused.wait(20)
            return [ops.all_reduce(x, comm), ops.all_reduce(x, comm)]
        results = []

        def first():
            entered.set()
            results.append(ops.all_reduce(x, comm))

        caller = threading.Thread(target=first)
        caller.start()
        assert entered.wait(20)
        try:
            with pytest.raises(ConcurrentUse, match="all_reduce"):
                # The other thread has said that it will call, not that it has.
                time.sleep(0.2)
                ops.all_reduce(x, comm)
        finally:
            refused.set()
        caller.join()
        return [*results, ops.all_reduce(x, comm)]

    for results in spmd(body, 2):
        assert [r.tolist() for r in results] == [[3.0] * 4] * 2


def test_backward_in_another_thread():
    def body(comm):
        x, w = leaf(ints(comm.rank, 4, 6)), leaf(ints(9, 4, 6))
        out = ops.all_gather_matmul(x, w, comm)
        other = threading.Thread(target=lambda: out.sum().backward())
        other.start()
        other.join()
        same(x.grad, comm.size * w.detach().sum(0).expand(4, 6))
        same(w.grad, sum(ints(r, 4, 6) for r in range(comm.size)).sum(0).expand(4, 6))

    spmd(body, 3)
