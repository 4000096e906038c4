"""Promises about collectives."""

from __future__ import annotations

import random

import torch

from ..contract import Collective
from ..errors import ShapeError
from .harness import DTYPES, Harness, keep, same_bytes


@keep(Collective)
def all_gather_of_uneven_counts(h: Harness) -> None:
    """Counts may differ and be zero; destinations may be strided; what lies between them stays."""
    for counts in ([3, 0, 5, 1, 2, 0, 7, 4][: h.size], [0] * h.size, [4] * h.size):
        sent = [h.random((c, 6), torch.float32, 50 + r) for r, c in enumerate(counts)]
        room = torch.full((sum(counts), 10), 9.0, device=h.device)
        parts = [room[sum(counts[:r]) : sum(counts[: r + 1]), 2:8] for r in range(h.size)]
        h.many.all_gather(parts, sent[h.rank].t().contiguous().t(), stream=h.stream)
        h.sync()
        for part, wanted in zip(parts, sent):
            assert same_bytes(part, wanted)
        assert bool((room[:, :2] == 9).all() and (room[:, 8:] == 9).all())


@keep(Collective)
def all_to_all_of_uneven_counts(h: Harness) -> None:
    """Every pair has its own count, zeros among them."""
    counts = [[(3 * src + 2 * dst) % 5 for dst in range(h.size)] for src in range(h.size)]
    counts[0][h.size - 1] = 0

    def sent(src: int, dst: int) -> torch.Tensor:
        return h.random((counts[src][dst], 3), torch.int64, 100 * src + dst)

    dsts = [torch.empty(counts[src][h.rank], 3, dtype=torch.int64, device=h.device) for src in range(h.size)]
    h.many.all_to_all(dsts, [sent(h.rank, dst) for dst in range(h.size)], stream=h.stream)
    h.sync()
    for src, dst in enumerate(dsts):
        assert torch.equal(dst, sent(src, h.rank)), f"from {src}"


@keep(Collective)
def collectives_move_every_dtype(h: Harness) -> None:
    """all_gather and all_to_all move any dtype as bytes."""
    for i, dtype in enumerate(DTYPES):
        sent = [h.random((5, 4), dtype, 10 * i + r) for r in range(h.size)]
        found = [torch.empty_like(s) for s in sent]
        h.many.all_gather(found, sent[h.rank], stream=h.stream)
        h.sync()
        assert all(same_bytes(f, s) for f, s in zip(found, sent)), f"all_gather of {dtype}"
        found = [torch.empty_like(s) for s in sent]
        h.many.all_to_all(found, [sent[(h.rank + dst) % h.size] for dst in range(h.size)], stream=h.stream)
        h.sync()
        wanted = [sent[(src + h.rank) % h.size] for src in range(h.size)]
        assert all(same_bytes(f, w) for f, w in zip(found, wanted)), f"all_to_all of {dtype}"


@keep(Collective)
def reductions_sum(h: Harness) -> None:
    """reduce_scatter and all_reduce sum over all ranks, in place too; small integers are exact in every float type."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        mine = [torch.full((r + 1, 4), float(h.rank + 1 + 2 * r), dtype=dtype, device=h.device) for r in range(h.size)]
        total = h.size * (h.size + 1) // 2
        found = torch.empty(h.rank + 1, 4, dtype=dtype, device=h.device)
        h.many.reduce_scatter(found, mine, stream=h.stream)
        h.sync()
        assert bool((found == total + 2 * h.rank * h.size).all()), f"reduce_scatter of {dtype}: {found}"
        value = torch.full((3, 5), float(h.rank + 1), dtype=dtype, device=h.device)
        out = torch.empty_like(value)
        h.many.all_reduce(out, value, stream=h.stream)
        h.many.all_reduce(value, value, stream=h.stream)
        h.sync()
        assert bool((out == total).all() and (value == total).all()), f"all_reduce of {dtype}"


@keep(Collective)
def lists_have_one_tensor_a_rank(h: Harness) -> None:
    """A list of the wrong length raises ShapeError and breaks nothing."""
    x = h.tensor([1.0, 2.0])
    h.raises(ShapeError, h.many.all_gather, [x] * (h.size + 1), x, stream=h.stream)
    h.raises(ShapeError, h.many.all_to_all, [x] * h.size, [x] * (h.size - 1), stream=h.stream)
    h.raises(ShapeError, h.many.reduce_scatter, x, [], stream=h.stream)
    h.barrier()


@keep(Collective)
def soak_of_collectives(h: Harness) -> None:
    """200 random collectives in one order on all ranks."""
    plan = random.Random(5)
    for step in range(200):
        counts = [plan.randrange(40) for _ in range(h.size)]
        if plan.random() < 0.5:
            sent = [torch.full((c,), 1000 * step + r, dtype=torch.int32, device=h.device) for r, c in enumerate(counts)]
            found = [torch.empty_like(s) for s in sent]
            h.many.all_gather(found, sent[h.rank], stream=h.stream)
            wanted = sent
        else:
            found = [torch.empty(counts[h.rank], dtype=torch.int32, device=h.device) for _ in range(h.size)]
            mine = [torch.full((c,), 1000 * step + h.rank, dtype=torch.int32, device=h.device) for c in counts]
            h.many.all_to_all(found, mine, stream=h.stream)
            wanted = [torch.full_like(f, 1000 * step + r) for r, f in enumerate(found)]
        h.sync()
        assert all(torch.equal(f, w) for f, w in zip(found, wanted)), f"step {step}"
