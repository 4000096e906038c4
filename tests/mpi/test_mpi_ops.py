"""Under mpirun: the launcher's ranks and mpi4py's communicators as groups, and the ops over them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import commbackend
from commbackend.communicator import Communicator
from commbackend.demo.model import LanguageModel, ModelConfig, batch
from commbackend.demo.parallel import parallelize

MPI = pytest.importorskip("mpi4py.MPI", reason="mpi4py is not installed")
pytestmark = pytest.mark.mpi(min_size=2)
WORLD = MPI.COMM_WORLD


@pytest.fixture(params=("launcher", "mpi4py"))
def comm(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    group = WORLD if request.param == "mpi4py" else None
    with commbackend.init(group, device="cpu", timeout_s=60.0) as found:
        yield found


def numbers(rank: int, *shape: int) -> torch.Tensor:
    """Small integers, another set for every rank: their sums and products are exact."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(rank)).float()


def test_ranks_are_those_of_mpi(comm: Communicator) -> None:
    assert (comm.rank, comm.size) == (WORLD.rank, WORLD.size)
    assert comm.transport == "shm"
    assert "shm" in comm.explain()


def test_all_gather_matmul_with_uneven_rows(comm: Communicator) -> None:
    rows = [3 * r % 5 for r in range(comm.size)]  # rank 0 has none
    parts = [numbers(r, rows[r], 16) for r in range(comm.size)]
    w = numbers(100 + comm.rank, 8, 16)
    found = commbackend.all_gather_matmul(parts[comm.rank], w, comm, rows=rows)
    assert torch.equal(found, torch.cat(parts) @ w.t())


def test_reductions_give_known_sums_with_the_same_bits_everywhere(comm: Communicator) -> None:
    xs = [numbers(r, 4 * comm.size, 6) for r in range(comm.size)]
    ws = [numbers(50 + r, 5, 6) for r in range(comm.size)]
    total = sum(x @ w.t() for x, w in zip(xs, ws, strict=True))
    x, w = xs[comm.rank], ws[comm.rank]
    mine = slice(4 * comm.rank, 4 * comm.rank + 4)
    assert torch.equal(commbackend.matmul_reduce_scatter(x, w, comm), total[mine])
    assert torch.equal(commbackend.matmul_all_reduce(x, w, comm), total)
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank))
    summed = commbackend.all_reduce(noise, comm)
    assert all(bits == summed.numpy().tobytes() for bits in WORLD.allgather(summed.numpy().tobytes()))


def test_two_halves_of_the_world_at_once() -> None:
    half = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    with commbackend.init(half, device="cpu", timeout_s=60.0) as comm:
        found = commbackend.all_reduce(torch.full((3,), float(WORLD.rank)), comm)
        assert (comm.rank, comm.size) == (half.rank, half.size)
        assert torch.equal(found, torch.full((3,), float(sum(range(WORLD.rank % 2, WORLD.size, 2)))))
    half.Free()


def test_training_step_equals_one_process(comm: Communicator) -> None:
    config = ModelConfig(hidden=64, ffn=96, layers=2, heads=4, kv_heads=4, sequence=32, batch=2)
    if config.kv_heads % comm.size:
        pytest.skip(f"{comm.size} ranks do not divide {config.kv_heads} heads")
    whole, spread = LanguageModel(config, 0), LanguageModel(config, 0)
    parallelize(spread, comm)
    tokens, _ = batch(config, 0, 0)
    expected = whole(tokens).tensor_split(comm.size)[comm.rank]
    torch.testing.assert_close(spread(tokens.tensor_split(comm.size)[comm.rank]), expected, rtol=1e-4, atol=1e-5)


def test_ranks_that_disagree_all_raise() -> None:
    comm = commbackend.init(device="cpu", timeout_s=60.0, name="disagree")
    rows = 4 if comm.rank == comm.size - 1 else 2
    with pytest.raises(commbackend.CollectiveMismatch, match=f"rank {comm.size - 1}"):
        commbackend.all_gather_matmul(torch.ones(rows, 4), torch.ones(2, 4), comm)
    comm.close()
    WORLD.Barrier()


def test_mpi_is_left_as_it_was() -> None:
    commbackend.init(WORLD, device="cpu", timeout_s=60.0).close()
    assert MPI.Is_initialized() and not MPI.Is_finalized()
    assert WORLD.allreduce(1) == WORLD.size
