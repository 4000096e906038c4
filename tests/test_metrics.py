"""Numbers for loggers: flat, by name, without waiting; and how much of calls had no product to hide behind."""

from __future__ import annotations

import time

import pytest
import torch

from commbackend import nn, ops
from commbackend.commands.trace import Span, Trace, call_name, chrome, exposed, load, one_call, recording
from commbackend.communicator import Communicator
from commbackend.config import resolve
from commbackend.errors import ShapeError
from commbackend.metrics import PREFIX, SAMPLED, Meter
from commbackend.plan import Knobs, Problem
from commbackend.testing import run_ranks, run_threads
from commbackend.tuning.layer_names import name_layers

CPU = torch.device("cpu")
PROBLEM, KNOBS = Problem("all_gather_matmul", (8, 8), k=8, n=(8,)), Knobs("push")


def communicator(group: object) -> Communicator:
    return Communicator(group, resolve(transport="local", timeout_s=30.0, choices="off"), CPU)  # type: ignore[arg-type]


def test_names_are_flat_and_values_floats() -> None:
    def run(rank: int, group: object) -> dict[str, float]:
        with communicator(group) as comm:
            for _ in range(3):
                ops.all_gather_matmul(torch.ones(512, 64), torch.ones(32, 64), comm)
            ops.all_gather_matmul(torch.ones(8, 64), torch.ones(32, 64), comm)
            return comm.metrics()

    for found in run_threads(run, 2):
        assert all(name.startswith(PREFIX) and type(value) is float for name, value in found.items())
        plain = {name.removeprefix(PREFIX): value for name, value in found.items()}
        assert (plain["calls"], plain["overlapped_calls"], plain["fallback_calls"]) == (4.0, 3.0, 1.0)
        assert plain["fallback_calls/sequence"] == 1.0
        assert plain["symmetric_nbytes"] > 512 * 64 * 4
        assert 0 < plain["gemm_ms"] <= plain["call_ms"]
        assert plain["exposed_ms"] == pytest.approx(plain["call_ms"] - plain["gemm_ms"])


def test_the_peer_that_is_late_is_named() -> None:
    def run(rank: int, group: object) -> dict[str, float]:
        with communicator(group) as comm:
            ops.all_reduce(torch.ones(4096, 64), comm)
            if rank == 2:
                time.sleep(0.2)
            ops.all_reduce(torch.ones(4096, 64), comm)
            return comm.metrics()

    found = run_threads(run, 3)
    waits = {peer: found[0][f"{PREFIX}worst_wait_ms/peer{peer}"] for peer in (1, 2)}
    assert max(waits.values()) >= 100.0 and f"{PREFIX}worst_wait_ms/peer0" not in found[0]
    assert found[0][f"{PREFIX}worst_wait_ms"] == max(waits.values())
    assert found[2][f"{PREFIX}worst_wait_ms"] < found[0][f"{PREFIX}worst_wait_ms"]


class Event:
    """An event of a GPU that has passed when ``now`` is told so. Waiting for it is an error."""

    passed = False

    def __init__(self) -> None:
        self.records = 0

    def record(self) -> None:
        self.records += 1

    def query(self) -> bool:
        return Event.passed

    def synchronize(self) -> None:
        raise AssertionError("metrics never wait")

    def elapsed_time(self, other: Event) -> float:
        return 0.25


def test_on_gpus_one_call_of_many_is_timed_by_events_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "passed", False)
    meter = Meter(2, Event)
    timed = 0
    for _ in range(2 * SAMPLED):
        token = meter.begin(PROBLEM, KNOBS)
        timed += token is not None
        meter.end(token)
    assert timed == 2 and meter.mean_us(PROBLEM, KNOBS) == 0.0 and meter.call_ms() == 0.0
    monkeypatch.setattr(Event, "passed", True)
    assert meter.mean_us(PROBLEM, KNOBS) == 250.0
    assert meter.call_ms() == pytest.approx(2 * SAMPLED * 0.25)  # calls that were not timed count at the mean
    assert meter.waits(1, print) is print and meter.products(print) is print


def test_calls_that_a_graph_captures_are_not_timed() -> None:
    meter = Meter(2, Event, lambda: True)
    assert all(meter.begin(PROBLEM, KNOBS) is None for _ in range(2 * SAMPLED))


# -- exposed communication by layer
def spans(*made: tuple[str, int, int, int]) -> list[Span]:
    return [Span(name, lane, start * 1_000_000, end * 1_000_000) for name, lane, start, end in made]


def test_what_runs_without_a_product_is_exposed_by_layer() -> None:
    found = exposed(
        spans(
            (call_name("all_gather_matmul", "fc1", "forward"), -1, 0, 10),
            ("gemm out0", 0, 2, 5),
            ("put x to 1 slot 2", 1, 0, 6),
            ("gemm out0", 0, 4, 8),
            (call_name("all_gather_matmul", "fc1", "backward"), -1, 10, 14),
            ("gemm dx", 0, 13, 20),
            (call_name("all_reduce", "", "forward"), -1, 20, 25),
            (call_name("all_reduce", "", "forward"), -1, 30, 31),
        )
    )
    assert {name: (e.calls, e.call_ms, e.exposed_ms) for name, e in found.items()} == {
        "fc1": (1, 10.0, 4.0),
        "fc1, backward": (1, 4.0, 3.0),
        "all_reduce": (2, 6.0, 6.0),
    }


def test_a_call_of_the_layer_that_exposes_most_is_cut_out() -> None:
    traces = [Trace(rank) for rank in range(2)]
    for t in traces:
        for i, name in enumerate(("fc1", "fc2", "fc1", "fc2")):
            t.spans += spans(
                (call_name("all_reduce", name, "forward"), -1, 10 * i, 10 * i + (8 if name == "fc1" else 2))
            )
            t.spans += spans((f"reduce {i}", 0, 10 * i, 10 * i + 1))
    name, part = one_call(traces)
    assert name == "call all_reduce in fc1"
    assert [[s.name for s in t.spans] for t in part] == [["call all_reduce in fc1", "reduce 2"]] * 2
    assert one_call([]) == ("", []) and one_call([Trace(0)]) == ("", [])


def test_recording_sees_layers_forward_and_backward(tmp_path) -> None:  # type: ignore[no-untyped-def]
    def run(rank: int, group: object) -> None:
        with communicator(group) as comm:
            trace = comm.recorder = Trace(rank)
            x = torch.ones(512, 64, requires_grad=True)
            with comm.layer("decoder.0.fc1"):
                y = ops.all_gather_matmul(x, torch.ones(32, 64, requires_grad=True), comm)
            y.sum().backward()
            comm.recorder = None
            trace.save(tmp_path / f"rank{rank}.json")

    run_threads(run, 2)
    traces = [load(tmp_path / f"rank{rank}.json")[0] for rank in range(2)]
    for t in traces:
        assert {"decoder.0.fc1", "decoder.0.fc1, backward"} <= exposed(t.spans).keys()
    names = {e["name"] for e in chrome(traces)["traceEvents"] if e["ph"] == "s"}
    assert names == {"put to wait", "wait to GEMM"}


def test_recording_is_a_context(tmp_path) -> None:  # type: ignore[no-untyped-def]
    before = Communicator.default_recorder
    with recording(tmp_path / "rank0.json") as trace:
        assert Communicator.default_recorder is trace

        def run(rank: int, group: object) -> bool:
            with communicator(group) as comm:
                ops.all_gather_matmul(torch.ones(512, 64), torch.ones(32, 64), comm)
                return comm.recorder is trace

        assert run_threads(run, 1) == [True]
    assert Communicator.default_recorder is before
    (found,) = load(tmp_path / "rank0.json")
    assert any(s.name == "call all_gather_matmul" for s in found.spans)


def named(rank: int, group: object) -> list[tuple[str, ...]]:
    said: list[tuple[str, ...]] = []
    torch.cuda.nvtx.range_push = lambda label: said.append(("push", label))  # type: ignore[assignment]
    torch.cuda.nvtx.range_pop = lambda: said.append(("pop",))  # type: ignore[assignment, return-value]
    settings = resolve(transport="shm", timeout_s=30.0, choices="off", nvtx=True)
    with Communicator(group, settings, CPU) as comm:  # type: ignore[arg-type]
        model = torch.nn.ModuleDict({"fc1": nn.ColumnParallelLinear(8, 8, group=comm)})
        assert name_layers(model) == name_layers(model) == ["fc1"]
        trace = comm.recorder = Trace(rank)
        comm.microbatch = 3
        model["fc1"](torch.ones(4, 8, requires_grad=True)).sum().backward()
        with pytest.raises(ShapeError):
            model["fc1"](torch.ones(4, 9))
        assert comm.layer_name == ""  # also after an error
        assert "fc1, backward" in exposed(trace.spans)
        comm.recorder = None
    return said


def test_models_name_their_layers_and_nvtx_ranges_carry_names_and_micro_batches() -> None:
    for said in run_ranks(named, 2):
        labels = [label for what, *rest in said for label in rest]
        assert labels == ["fc1 micro-batch 3", "fc1 micro-batch 3, backward", "fc1 micro-batch 3"]
        assert sum(what == ("pop",) for what in said) == 3
