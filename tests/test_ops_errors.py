"""What the ops refuse, and that they refuse it before a byte moves: the communicator goes on afterwards."""

from __future__ import annotations

import pytest
import torch
from ops_world import ints, leaf, spmd

from commbackend import ops
from commbackend.errors import CollectiveMismatch, CommAborted, ConfigError, ShapeError, Unsupported, UnsupportedDtype
from commbackend.testing import RankError

X, W = (4, 6), (3, 6)
PRODUCTS = [ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce, ops.column_parallel_linear]
PLAIN = [ops.all_gather, ops.reduce_scatter, ops.all_reduce]


def refused(call, error, *words):
    """``call(comm)`` raises ``error`` naming ``words`` on every rank, moves nothing and breaks nothing."""

    def body(comm):
        with pytest.raises(error) as caught:
            call(comm)
        for word in words:
            assert str(word) in str(caught.value), (word, caught.value)
        assert comm.stats()["calls"] == 0
        assert ops.all_reduce(torch.ones(3), comm).tolist() == [2.0] * 3

    spmd(body, 2)


@pytest.mark.parametrize("op", PRODUCTS)
class TestProducts:
    def test_wrong_inner_size(self, op):
        refused(lambda c: op(ints(1, 4, 5), ints(2, *W), c), ShapeError, op.__name__, 5, 6, W)

    def test_wrong_inner_size_along_the_last_dimension(self, op):
        if op is ops.all_gather_matmul:
            refused(lambda c: op(ints(1, 4, 5), ints(2, *W), c, dim=-1), ShapeError, op.__name__, 5, 6)

    def test_mixed_types(self, op):
        bf16 = torch.bfloat16
        refused(lambda c: op(ints(1, *X, dtype=bf16), ints(2, *W).float(), c), ShapeError, "bfloat16", "float32")
        refused(lambda c: op(ints(1, *X), ints(2, *W), c, bias=ints(3, 3).float()), ShapeError, "float64", "float32")

    @pytest.mark.parametrize(
        "dtype", [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
    )
    def test_types_without_products(self, op, dtype):
        refused(lambda c: op(ints(1, *X).to(dtype), ints(2, *W).to(dtype), c), UnsupportedDtype, op.__name__, dtype)

    def test_weight_is_not_a_matrix(self, op):
        refused(lambda c: op(ints(1, *X), ints(2, 6), c), ShapeError, "weight 0", (6,))

    def test_bias_shape(self, op):
        refused(lambda c: op(ints(1, *X), ints(2, *W), c, bias=ints(2, 4)), ShapeError, "bias 0", (4,), 3)

    def test_scalar(self, op):
        refused(lambda c: op(ints(1), ints(2, *W), c), ShapeError, "scalar")

    def test_other_device(self, op):
        refused(lambda c: op(ints(1, *X).to("meta"), ints(2, *W), c), ShapeError, "meta", "cpu")
        refused(lambda c: op(ints(1, *X), ints(2, *W).to("meta"), c), ShapeError, "weight 0", "meta")

    def test_not_dense(self, op):
        refused(lambda c: op(ints(1, *X).to_sparse(), ints(2, *W), c), Unsupported, "sparse")

    def test_not_a_tensor(self, op):
        refused(lambda c: op([1.0], ints(2, *W), c), ShapeError, "list")

    def test_sink(self, op):
        refused(lambda c: op(ints(1, *X), ints(2, *W), c, wgrad=3), ConfigError, "wgrad=3")


@pytest.mark.parametrize("op", [ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.all_gather, ops.reduce_scatter])
class TestDimensions:
    @staticmethod
    def call(op, comm, x, **options):
        weight = () if op in PLAIN else (ints(2, 6, x.shape[-1]),)
        return op(x, *weight, comm, **options)

    @pytest.mark.parametrize("dim", [2, -3])
    def test_no_such_dimension(self, op, dim):
        refused(lambda c: self.call(op, c, ints(1, *X), dim=dim), ShapeError, op.__name__, dim, X)

    @pytest.mark.parametrize("rows", [(4,), (4, 0, 0), (5, -1)], ids=str)
    def test_rows_malformed(self, op, rows):
        refused(lambda c: self.call(op, c, ints(1, *X), rows=rows), ShapeError, rows, 2)

    def test_rows_of_another_size(self, op):
        refused(lambda c: self.call(op, c, ints(1, *X), rows=(5, 5)), ShapeError, 4, (5, 5))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("op", [ops.matmul_reduce_scatter, ops.reduce_scatter])
def test_extent_does_not_divide(op, dim):
    """F001: names dim, size and world."""
    x = ints(1, 3, 5, 7)
    weight = () if op is ops.reduce_scatter else (ints(2, 7, 7),)
    extent = x.shape[dim]
    refused(lambda c: op(x, *weight, c, dim=dim), ShapeError, f"dim {dim % 3}", extent, "2 ranks")


def test_weights_and_biases_differ_in_number():
    w = [ints(2, *W), ints(3, *W)]
    refused(lambda c: ops.all_gather_matmul(ints(1, *X), w, c, bias=(None,)), ShapeError, "1 biases", "2 weights")
    refused(lambda c: ops.all_gather_matmul(ints(1, *X), w, c, bias=ints(1, 3)), ShapeError, "2 weights")
    refused(lambda c: ops.column_parallel_linear(ints(1, *X), [], c), ShapeError, "no weights")


@pytest.mark.parametrize("op", [ops.matmul_reduce_scatter, ops.matmul_all_reduce])
def test_one_weight_only(op):
    refused(lambda c: op(ints(1, *X), (ints(2, *W), ints(3, *W)), c), ShapeError, "weight 0 is tuple")


def test_unknown_save():
    refused(lambda c: ops.all_gather_matmul(ints(1, *X), ints(2, *W), c, save="all"), ConfigError, "'all'")


@pytest.mark.parametrize("op", PLAIN)
def test_plain_refusals(op):
    refused(lambda c: op(ints(1, *X).to("meta"), c), ShapeError, "meta")
    refused(lambda c: op(ints(1, *X).to_sparse(), c), Unsupported, "sparse")
    refused(lambda c: op(3.0, c), ShapeError, "float")


MISMATCHES = {
    "rows": lambda c: ops.all_gather(ints(1, 4 + (c.rank == 1), 6), c),
    "columns": lambda c: ops.all_gather(ints(1, 4, 6 + (c.rank == 1)), c),
    "dtype": lambda c: ops.all_reduce(ints(1, 4, 6, dtype=[torch.float32, torch.float64][c.rank == 1]), c),
    "op": lambda c: [ops.all_gather, ops.reduce_scatter][c.rank == 1](ints(1, 6, 6), c),
    "uneven": lambda c: ops.all_gather_matmul(
        ints(1, 4, 6), ints(2, *W), c, rows=(4, 4, 4) if c.rank != 1 else (3, 4, 5)
    ),
    "gathered": lambda c: ops.all_gather_matmul(ints(1, 4, 6), ints(2, *W), c, return_gathered=c.rank == 1),
    "dim": lambda c: ops.matmul_reduce_scatter(ints(1, 3, 6, 6), ints(2, *W), c, dim=int(c.rank == 1)),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_disagree(name):
    """F008: undeclared differences raise on every rank and name who differs."""

    def body(comm):
        with pytest.raises((CollectiveMismatch, CommAborted)) as caught:
            MISMATCHES[name](comm)
        return type(caught.value), str(caught.value)

    results = spmd(body, 3)
    assert any(kind is CollectiveMismatch for kind, _ in results)
    assert all("rank 1 called" in text for _, text in results), results
    # What helps where only the rows differ, and only there.
    assert all(("need rows=" in text) == (name in ("rows", "uneven")) for _, text in results), results


def test_ranks_disagree_on_requires_grad():
    """The same forward, but one rank's weight is frozen: the backward calls differ, and say so."""

    def body(comm):
        x, w = leaf(ints(1, *X)), ints(2, *W).requires_grad_(comm.rank != 1)
        out = ops.all_gather_matmul(x, w, comm)
        with pytest.raises((CollectiveMismatch, CommAborted), match="rank 1 called dgrad_reduce_scatter"):
            out.sum().backward()

    spmd(body, 3)


def test_a_refusal_on_one_rank_does_not_hang_the_others():
    """The rank that raised leaves its ``with`` block, which aborts the communicator: the others raise too."""

    def body(comm):
        ops.all_gather_matmul(ints(1, 4, 5 if comm.rank == 1 else 6), ints(2, *W), comm)

    with pytest.raises(RankError) as caught:
        spmd(body, 3)
    assert set(caught.value.errors) == {0, 1, 2}
    assert "ShapeError" in caught.value.errors[1]
    assert all("ShapeError" in e or "CommAborted" in e for e in caught.value.errors.values())


def test_closed_communicator():
    def body(comm):
        comm.close()
        for call in (lambda: ops.all_reduce(torch.ones(2), comm), lambda: ops.barrier(comm)):
            with pytest.raises(CommAborted, match="closed"):
                call()

    spmd(body, 2)
