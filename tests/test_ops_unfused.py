"""Products that no schedule serves run as plain collectives and local products: same results, counted as fallbacks."""

from __future__ import annotations

import pytest
import test_ops_gather
import test_ops_reduce
import test_ops_scatter
import torch
from ops_world import spmd

from commbackend import ops
from commbackend.errors import Unsupported

PLAIN = ("all_gather", "reduce_scatter", "all_reduce")
CASES = [
    test_ops_gather.every_case,
    test_ops_scatter.every_case,
    test_ops_reduce.all_reduce_cases,
    test_ops_reduce.column_cases,
]


@pytest.mark.parametrize("case", CASES)
def test_products_without_schedules(case, monkeypatch):
    def body(comm):
        monkeypatch.setattr(comm, "supports", lambda problem: None if problem.op in PLAIN else "none for products")
        case(comm)
        stats = comm.stats()
        assert not any(op.startswith(("all_gather_matmul", "matmul", "dgrad")) for op in stats["overlapped_by_op"])
        return sum(n for op, n in stats["fallback_by_op"].items() if op.endswith("/none for products"))

    assert min(spmd(body, 3)) > 0


def test_collectives_without_schedules(monkeypatch):
    """There is nothing to fall back to: the error says which call on which transport, and why."""

    def body(comm):
        monkeypatch.setattr(comm, "supports", lambda problem: "not today")
        with pytest.raises(Unsupported, match="all_reduce of float32 over local: not today"):
            ops.all_reduce(torch.ones(2), comm)

    spmd(body, 2)


@pytest.fixture
def canary():
    """torch.empty gives NaN, so that a result that is not wholly written cannot equal anything."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_every_element_is_written(case, fused, canary, monkeypatch):
    """F013: no op, forward or backward, leaves part of an output as it was allocated."""
    assert torch.empty(3).isnan().all()

    def body(comm):
        if not fused:
            monkeypatch.setattr(comm, "supports", lambda problem: None if problem.op in PLAIN else "none")
        case(comm)

    spmd(body, 2)
