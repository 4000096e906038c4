"""Whole calls on fake GPUs: every schedule in stream order by any number of queues, and what a call costs the host."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
from fake_cuda import CUresult, FakeCuda
from fake_gpu import FakeKernels, fake_gpus, spmd_fakes, use_fake
from test_engine import case, problems

import commbackend
from commbackend import schedules
from commbackend.contract import Caps, Collective
from commbackend.errors import CommBackendError, CommTimeout, ShapeError
from commbackend.execution.engine import Engine
from commbackend.plan import Knobs, Problem
from commbackend.tuning.chooser import Chosen


def by_schedule(comm: Any, fake: FakeCuda, polling: bool) -> int:
    """All ops by all schedules on one communicator, mixed."""
    done, seeds = 0, itertools.count(1000)
    for problem in problems(comm.size):
        for knobs in schedules.candidates(problem, comm.caps, polling):
            if knobs.chunks > 2 or (knobs.lanes > 1 and knobs.chunks == 1):
                continue
            comm.chooser._known[problem, "", "forward"] = Chosen(knobs, "test")
            inputs, expected = case(problem, comm.rank, next(seeds))
            outputs = {name: torch.full_like(t, float("nan")) for name, t in expected.items()}
            comm.run(problem, {**inputs, **outputs})
            fake.synchronize(30.0)
            for name, t in expected.items():
                assert torch.equal(outputs[name], t), f"{problem} {knobs} {name}\n{outputs[name]}\nwanted\n{t}"
            done += 1
    return done


@pytest.mark.parametrize(
    ("connections", "blocking"),
    [
        (8, False),
        (1, False),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(32, False, marks=pytest.mark.slow),
        (8, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_every_schedule_ends_by_any_number_of_queues(
    connections: int, blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS and CUDA_LAUNCH_BLOCKING, on two ranks."""
    with fake_gpus(2, monkeypatch, connections=connections, blocking=blocking) as fakes:
        counts = spmd_fakes(fakes, by_schedule, connections > 1 and not blocking, timeout_s=100.0)
    assert len(set(counts)) == 1 and counts[0] > 30, counts


def tiny(comm: Any, op: str = "all_gather_matmul", k: int = 16, n: int = 8) -> tuple[Problem, dict[str, torch.Tensor]]:
    m, size = 4, comm.size
    x = torch.randn(m if op.startswith("all_gather") else m * size, k)
    tensors = {"x": x, "w0": torch.randn(n, k), "out0": torch.zeros(m if op.endswith("scatter") else m * size, n)}
    return Problem(op, (m,) * size, k=k, n=(n,), dtype="float32"), tensors


def driver_calls(comm: Any, fake: FakeCuda, op: str) -> dict[str, int]:
    problem, tensors = tiny(comm, op)
    for _ in range(3):
        comm.run(problem, tensors)
    comm.barrier()
    fake.synchronize()
    before, events = Counter(fake.calls), fake.calls["cuEventCreate"]
    comm.run(problem, tensors)
    enqueued = Counter(fake.calls) - before
    fake.synchronize()
    assert fake.calls["cuEventCreate"] == events, "a call made events"
    comm.barrier()
    return {name: n for name, n in enqueued.items() if name not in ("cuStreamQuery", "cuCtxSetCurrent")}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("op", "batches", "kernels", "others"),
    [
        # Waits for the credits, for each chunk (two products at most), the credits raised; puts and the guard.
        ("all_gather_matmul", 3, 2, {"gemm": 2, "cuEventRecord": 1}),
        ("matmul_reduce_scatter", 3, 2, {"gemm": 2, "sum": 1, "cuEventRecord": 1}),
        ("matmul_all_reduce", 3, 2, {"gemm": 1, "sum": 1, "cuEventRecord": 1}),
    ],
)
def test_driver_calls_of_a_tiny_call(
    op: str, batches: int, kernels: int, others: dict[str, int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No allocation, no event made, and as many calls as there are things to do: they grow with the peers only."""
    wanted = {"cuStreamBatchMemOp": batches, "cuLaunchKernel": kernels + size - 2, **others}
    with fake_gpus(size, monkeypatch) as fakes:
        for found in spmd_fakes(fakes, driver_calls, op):
            assert found == wanted, found


def wrong_tensors(comm: Any, fake: FakeCuda, bad: torch.Tensor) -> bool:
    problem, tensors = tiny(comm)
    comm.run(problem, tensors)
    with pytest.raises(CommBackendError, match=r"ShapeError: .*rank \d: x is |rank \d: x is ") as e:
        comm.run(problem, {**tensors, "x": bad})
    return isinstance(e.value, ShapeError)


@pytest.mark.parametrize("bad", [torch.zeros(3, 16), torch.zeros(4, 16, dtype=torch.float64)])
def test_a_tensor_of_another_shape_is_refused(bad: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are copied by address, so nobody else would notice."""
    with fake_gpus(2, monkeypatch) as fakes:
        assert any(spmd_fakes(fakes, wrong_tensors, bad))  # the other may hear of it first


def layouts(comm: Any, fake: FakeCuda) -> None:
    """Strided, transposed, negated and shifted operands, each at another address in each call."""
    problem, tensors = tiny(comm)
    for turn in range(8):
        wide = torch.randn(4 + turn, 16 + 2 * turn)
        x = [
            wide[turn:, turn : 16 + turn],
            torch.randn(16, 4).t(),
            torch.randn(4, 16).conj(),
            torch.randn(4, 16, dtype=torch.complex64).conj().imag,
        ][turn % 4]
        out = torch.full((4 * comm.size, 8 + turn), float("nan"))[:, :8]
        gathered = commbackend.all_gather(x, comm)
        comm.run(problem, {**tensors, "x": x, "out0": out})
        fake.synchronize()
        assert torch.equal(gathered[4 * comm.rank : 4 * comm.rank + 4], x), turn
        torch.testing.assert_close(out, gathered @ tensors["w0"].t())


def test_operands_of_any_layout_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpus(2, monkeypatch) as fakes:
        spmd_fakes(fakes, layouts)


def stalled(comm: Any, fake: FakeCuda) -> Exception | None:
    """Rank 1 never makes the second call."""
    problem, tensors = tiny(comm)
    comm.run(problem, tensors)
    fake.synchronize()
    assert not tensors["out0"].isnan().any()
    if comm.rank:
        while comm._engine.transport.fault is None:
            fake.synchronize()
        return None
    comm.run(problem, tensors)
    fake.synchronize(20.0)
    assert tensors["out0"].isnan().all(), "data of a call that timed out"
    with pytest.raises(CommBackendError) as e:
        comm.run(problem, tensors)
    assert isinstance(e.value, CommTimeout) and e.value.rank == 1 and e.value.op == "all_gather_matmul", e.value
    return e.value


@pytest.mark.parametrize("connections", [8, 1])
def test_a_peer_that_does_not_come_leaves_nan_and_a_fault(connections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream waits that the watch ends, and with one queue wait kernels that end by themselves."""
    with fake_gpus(2, monkeypatch, connections=connections) as fakes:
        assert spmd_fakes(fakes, stalled, deadline_s=1.0)[0] is not None


def disagreeing(comm: Any, fake: FakeCuda) -> str:
    problem, tensors = tiny(comm)
    if comm.rank:
        tensors["x"], problem = torch.zeros(4, 20), Problem(problem.op, problem.rows, k=20, n=(8,), dtype="float32")
        tensors["w0"] = torch.zeros(8, 20)
    with pytest.raises(CommBackendError, match="ranks disagree on call") as e:
        for _ in range(4):
            comm.run(problem, tensors)
    return str(e.value)


def test_a_disagreement_is_found_within_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpus(2, monkeypatch) as fakes:
        for text in spmd_fakes(fakes, disagreeing):
            assert "k=16" in text and "k=20" in text, text


def failing(comm: Any, fake: FakeCuda) -> str:
    problem, tensors = tiny(comm)
    comm.run(problem, tensors)
    comm.barrier()
    if comm.rank == 0:
        fake.fail("cuStreamBatchMemOp", CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(CommBackendError) as e:
        for _ in range(4):
            comm.run(problem, tensors)
    return str(e.value)


def test_a_failing_driver_call_fails_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpus(2, monkeypatch) as fakes:
        for text in spmd_fakes(fakes, failing):
            assert "cuStreamBatchMemOp" in text and "CUDA_ERROR_ILLEGAL_ADDRESS" in text, text


class _Gathers(Collective):
    """A stream-ordered transport that notes the streams of its collectives."""

    name = "gathers"
    caps = Caps(device="cpu", collective=True, stream_ordered=True)

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.streams: list[int | None] = []

    @classmethod
    def probe(cls, device: torch.device) -> None:
        return

    @classmethod
    def connect(cls, group: Any, device: torch.device, options: Any) -> _Gathers:
        return cls(group)

    def _barrier(self, deadline: float) -> None:
        return

    def _close(self, timeout_s: float) -> None:
        return

    def _post(self, seq: int, record: bytes) -> None:
        self.posted = record

    def peek(self, peer: int, seq: int) -> bytes:
        return self.posted

    def _all_gather(self, dsts: Any, src: torch.Tensor, stream: int | None) -> None:
        self.streams.append(stream)

    _all_to_all = _reduce_scatter = _all_reduce = _all_gather  # type: ignore[assignment]


def test_collectives_run_in_their_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the caller's stream they would hold up the products that they are to overlap with."""
    with fake_gpus(1, monkeypatch) as fakes:
        use_fake(fakes[0])
        transport = _Gathers(SimpleNamespace(rank=0, size=2, timeout_s=5.0))
        engine = Engine(transport, [FakeKernels()], torch.device("cpu"), "test")
        problem = Problem("all_gather_matmul", (4, 4), k=16, n=(8,), dtype="float32")
        bound = engine.bind(schedules.program(problem, 0, transport.caps, Knobs("collective", 2, 1)))
        engine.enter(problem.op, b"record")
        tensors = {"x": torch.zeros(4, 16), "w0": torch.zeros(8, 16), "out0": torch.zeros(8, 8)}
        engine.run(bound, tensors, b"record", 5.0)
        lanes = {s.cuda_stream for s in engine.lanes._streams}
        assert transport.streams and set(transport.streams) == lanes and 0 not in lanes, transport.streams
        fakes[0].synchronize()
        engine.close(healthy=True)


def ranges_of_a_call(comm: Any, fake: FakeCuda) -> list[str]:
    problem, tensors = tiny(comm)
    names: list[str] = []
    comm._engine.lanes.ranges = SimpleNamespace(range_push=names.append, range_pop=lambda: names.append("pop"))
    comm.run(problem, tensors)
    comm._engine.lanes.ranges = None
    comm.run(problem, tensors)
    fake.synchronize()
    return names


def test_steps_are_nvtx_ranges_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpus(2, monkeypatch) as fakes:
        for names in spmd_fakes(fakes, ranges_of_a_call):
            assert names[1::2] == ["pop"] * (len(names) // 2)
            assert [n.split()[0] for n in names[::2]] == ["wait", "put", "gemm", "wait", "gemm", "signal"], names
        on = spmd_fakes(fakes, lambda comm, fake: comm._engine.lanes.ranges is torch.cuda.nvtx, nvtx=True)
        off = spmd_fakes(fakes, lambda comm, fake: comm._engine.lanes.ranges is None)
    assert on == off == [True, True]


def on_changing_streams(comm: Any, fake: FakeCuda) -> None:
    """Every call on another current stream: its inputs come from there, the heap is still that of the call before."""
    streams = [fake_gpu.FakeStreams(torch.device("cpu")).new() for _ in range(3)]
    problem, tensors = tiny(comm)
    outs, before = [], fake.calls["cuStreamWaitEvent"]
    for turn in range(30):
        fake_gpu._here.stream = streams[turn % 3]
        x = torch.full((4, 16), float(comm.rank + 10 * turn))
        out = torch.zeros(4 * comm.size, 8)
        comm.run(problem, {**tensors, "x": x, "w0": torch.ones(8, 16), "out0": out})
        outs.append((turn, x, out))
    assert fake.calls["cuStreamWaitEvent"] - before == 29, "a call that does not wait for the one before it"
    fake.synchronize(30.0)
    for turn, _, out in outs:
        wanted = torch.arange(comm.size).repeat_interleave(4)[:, None] + 10 * turn
        assert torch.equal(out, (16.0 * wanted).expand(-1, 8)), turn


@pytest.mark.parametrize("connections", [8, 1])
def test_the_callers_stream_may_change(connections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpus(2, monkeypatch, connections=connections) as fakes:
        spmd_fakes(fakes, on_changing_streams)
