"""How N-d tensors become the 2-D operands of a call. No ranks needed."""

from __future__ import annotations

import pytest
import torch
from plan_cases import CAPS

from commbackend.errors import ShapeError
from commbackend.layout import columns, cut, empty, gather_counts, matrix, scatter_counts, split
from commbackend.ops import autograd


def test_matrix_is_a_view_where_strides_allow():
    wide = torch.arange(60.0).view(6, 10)
    for view in (
        wide,
        wide[:, 2:7],
        wide[1::2],
        wide.view(2, 3, 10),
        wide[:, 9:],
        wide[:1],
        wide.view(2, 3, 10)[:, :, 1:],
    ):
        flat = matrix(view)
        assert flat.data_ptr() == view.data_ptr() and flat.shape == (view.numel() // view.shape[-1], view.shape[-1])
        assert torch.equal(flat, view.reshape(flat.shape))


def test_matrix_copies_what_cannot_be_moved_row_by_row():
    wide = torch.arange(60.0).view(6, 10)
    z = torch.complex(wide, wide)
    for view in (wide.t(), wide[:, ::2], wide[:1].expand(6, 10), wide[:, :1].expand(6, 10), z.conj(), z.conj().imag):
        flat = matrix(view)
        assert flat.stride(1) == 1 and flat.stride(0) >= flat.shape[1]
        assert not flat.is_conj() and not flat.is_neg()
        assert torch.equal(flat, view)
    flat = matrix(torch.zeros(2, 5, 4)[:, :3])
    assert flat.shape == (6, 4) and flat.is_contiguous()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 4), (0, 0), (4,), (2, 3, 1)], ids=str)
def test_matrix_of_any_extents(shape):
    flat = matrix(torch.zeros(shape))
    assert flat.dim() == 2 and flat.shape[1] == shape[-1] and flat.numel() == torch.zeros(shape).numel()


def test_cut():
    c = cut((2, 99, 3), 1, (4, 0, 1), 0)
    assert (c.full, c.local, c.blocks, c.rows) == ((2, 5, 3), (2, 4, 3), 2, (12, 0, 3))
    assert cut((2, 99, 3), 1, (4, 0, 1), 1).local == (2, 0, 3)


def test_columns():
    x = torch.zeros(2, 3)
    assert columns(x, 0) is x and columns(x, 1).shape == (2, 3, 1)


@pytest.mark.parametrize("total", [0, 1, 7, 12])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_split(total, size):
    counts = split(total, size)
    assert sum(counts) == total and len(counts) == size and max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts, reverse=True)


def test_empty_is_like_its_pattern():
    like = torch.zeros(1, dtype=torch.float16)
    plain, swapped = empty((2, 3, 4), like), empty((2, 3, 4), like, features_first=True)
    assert plain.is_contiguous() and plain.dtype == swapped.dtype == torch.float16
    assert swapped.shape == (2, 3, 4) and swapped.view(6, 4).t().is_contiguous()
    with torch.inference_mode():
        assert not empty((2,), like).is_inference()


def test_counts():
    assert gather_counts("op", 3, 0, None, 1, 4) == (3, 3, 3, 3)
    assert gather_counts("op", 3, 0, torch.tensor([1, 3]), 1, 2) == (1, 3)
    assert scatter_counts("op", 6, 0, None, 3) == (2, 2, 2)
    assert scatter_counts("op", 6, 0, [6, 0, 0], 3) == (6, 0, 0)
    with pytest.raises(ShapeError, match="rank 1 of 2 holds 3 along dim 0, but rows=\\(3, 1\\) says 1"):
        gather_counts("op", 3, 0, (3, 1), 1, 2)


def test_sums_of_few_rows_are_shared_by_element(monkeypatch):
    """One row on four ranks: every rank sums a quarter of it, none sums it all."""
    problems = []
    monkeypatch.setattr(autograd, "execute", lambda comm, problem, tensors: problems.append(problem))

    class Four:
        size, off, caps = 4, False, CAPS["everything"]

    autograd.reduce(Four(), torch.zeros(1, 64))
    autograd.reduce(Four(), torch.zeros(8, 64))
    Four.caps = CAPS["kernels"]  # every rank sums all of it there, in one kernel
    autograd.reduce(Four(), torch.zeros(1, 64))
    assert [(p.rows, p.k) for p in problems] == [((16,) * 4, 1), ((2,) * 4, 64), ((1, 0, 0, 0), 64)]
