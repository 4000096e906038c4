"""What plans cost: tables, topologies, the discrete-event run, and its predictions beside what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from pathlib import Path

import pytest

from commbackend import schedules
from commbackend.bench import validate
from commbackend.bench.report import load
from commbackend.contract import Caps
from commbackend.errors import ConfigError, PlanError
from commbackend.plan import Buffer, Copy, Gemm, Knobs, Plan, Problem, Program, Put, Region, Segment, Wait, data_slot
from commbackend.schedules.symmetric import symmetric_plan
from commbackend.tuning.cost import Timeline, lower_bound_us, predict, simulate, stock_us
from commbackend.tuning.costs import CostTable, Topology, load_table, shipped, topology

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
GPU = Caps("cuda", one_sided=True, peer_view=True, stream_ordered=True, copy_engine=True)
COLLECTIVE = Caps("cuda", collective=True, stream_ordered=True)
MIB = 1 << 20


def table(**changes: object) -> CostTable:
    flat = CostTable.flat(link_gbyte_s=1.0, memory_gbyte_s=1.0, tflop_s=1.0, launch_us=0.0)
    return dataclasses.replace(flat, **changes)  # type: ignore[arg-type]


# -- tables
@pytest.mark.parametrize("name", shipped())
def test_shipped_tables_say_where_every_part_comes_from(name: str) -> None:
    found = load_table(name)
    assert CostTable.from_json(found.to_json()) == found
    for part in ("gemm", "copy.link", "copy.network"):
        assert found.sources[part].startswith(("measured: ", "published: ", "estimated: ")), part
    assert found.sources["copy.network"].startswith("published")  # nobody has measured a network


@pytest.mark.parametrize(
    "change",
    (
        {"format": "commbackend-costs-0"},
        {"gemm": {"float17": [[1, 1, 1, 1.0]]}},
        {"gemm": {"bfloat16": [[0, 1, 1, 1.0]]}},
        {"gemm": {"bfloat16": [[1, 1, 1]]}},
        {"copy": {"link": [[1.0, 1.0]]}},
        {"copy": {"link": [[1.0, 2.0], [2.0, 1.0]]}},
        {"launch_us": -1.0},
        {"launch_us": "soon"},
        {"reduce_gbyte_s": 0.0},
        {"surprise": 1},
    ),
    ids=lambda c: next(iter(c)),
)
def test_a_table_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    raw = json.loads(load_table("h200").to_json()) | change
    with pytest.raises(ConfigError, match="not a cost table"):
        CostTable.from_json(json.dumps(raw))


@pytest.mark.parametrize("raw", ("", "[]", "{}", '{"format": "commbackend-costs-1"}', "\0"))
def test_a_file_that_is_no_table_is_refused(raw: str) -> None:
    with pytest.raises(ConfigError, match="not a cost table"):
        CostTable.from_json(raw)


def test_a_table_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match="shipped are gb200-published, h200"):
        load_table("/nowhere/h100.json")


def test_products_are_exact_where_measured_and_between_their_neighbours_elsewhere() -> None:
    found = load_table("h200")
    m, n, k, us = found.gemm["bfloat16"][0]
    assert found.gemm_us(m, n, k, "bfloat16") == us
    assert found.gemm_us(0, n, k, "bfloat16") == 0.0
    low, high = (found.gemm_us(m, 7168, 8192, "bfloat16") for m in (2048, 8192))
    assert low < found.gemm_us(4096, 7168, 8192, "bfloat16") < high
    # Another type is scaled by its bytes.
    assert found.gemm_us(2048, 7168, 8192, "float32") == pytest.approx(2 * low, rel=0.01)


def test_waves_of_tiles_make_half_a_product_dearer_than_half() -> None:
    tiled = table(gemm={"bfloat16": [(1280, 1320, 1024, 100.0)]}, tile=(128, 10), units=132)
    plain = table(gemm={"bfloat16": [(1280, 1320, 1024, 100.0)]})
    # 1280 rows are ten waves of 132 tiles; 64 rows still take a whole one.
    assert tiled.gemm_us(64, 1320, 1024, "bfloat16") == pytest.approx(10.0, rel=0.05)
    assert plain.gemm_us(64, 1320, 1024, "bfloat16") == pytest.approx(5.0, rel=0.05)


def test_copies_lie_on_the_lines_between_what_was_measured() -> None:
    found = table(copy={"local": [(0.0, 1.0), (100.0, 2.0)], "link": [(0.0, 10.0), (100.0, 20.0), (300.0, 30.0)]})
    assert [sum(found.copy_us(n, "link")) for n in (0, 50, 100, 200, 500)] == [10, 15, 20, 25, 40]
    busy, latency = found.copy_us(200, "link")
    assert (busy, latency) == (10.0, 15.0)  # the way is held at the highest rate; the rest is latency
    assert sum(found.copy_us(200, "network")) == 25  # where nothing is said of the network it is like the link


@pytest.mark.parametrize(
    ("text", "size", "domain"),
    (("flat", 6, 6), ("", 6, 6), ("nvl72", 576, 72), ("2x8", 16, 8), ("8", 32, 8), ("72", 8, 8)),
)
def test_topologies(text: str, size: int, domain: int) -> None:
    assert topology(text, size) == Topology(domain)


@pytest.mark.parametrize(("text", "size"), (("2x8", 8), ("torus", 8), ("0", 8), ("x8", 8), ("2x", 8), ("-1", 8)))
def test_a_topology_that_does_not_hold_the_ranks_is_refused(text: str, size: int) -> None:
    if text == "x8":
        assert topology(text, size) == Topology(8)
        return
    with pytest.raises(ConfigError, match="topology"):
        topology(text, size)


# -- the run
def puts(lanes: tuple[int, int], nbytes: int) -> Plan:
    """Rank 0 puts ``nbytes`` to ranks 1 and 2, each of which waits for them."""
    buffers = tuple(Buffer(b, s, 1, nbytes, "uint8") for b, s in (("x", "input"), ("h", "heap")))
    whole = Region("x", 0, 1)
    sent = tuple(Put(n, (), whole, Region("h", 0, 1, at=p), p, data_slot(0)) for n, p in zip(lanes, (1, 2)))
    waits = [Program(r, buffers, (Wait(0, (), 0, data_slot(0)),)) for r in (1, 2)]
    return Plan("all_gather", 3, (Program(0, buffers, sent), *waits))


def test_puts_share_the_way_out_and_their_latencies_overlap() -> None:
    costs = table(copy={"local": [(0.0, 0.0), (1e6, 1.0)], "link": [(0.0, 5.0), (1e6, 15.0)]}, flags={"link": 2.0})
    one_lane = simulate(puts((1, 1), 10**6), costs)
    two_lanes = simulate(puts((1, 2), 10**6), costs)
    assert [one_lane.end_us(r) for r in (0, 1, 2)] == [
        30.0,
        17.0,
        32.0,
    ]  # 10 us on the way, 5 of latency, 2 for the flag
    assert [two_lanes.end_us(r) for r in (0, 1, 2)] == [25.0, 17.0, 27.0]
    # A domain of two: the second put goes over the network, which is a way of its own.
    assert simulate(puts((1, 2), 10**6), costs, Topology(2)).end_us(2) == 15.0 + costs.flag_us("network")


def test_a_product_slows_down_while_its_rank_copies() -> None:
    buffers = tuple(Buffer(b, "scratch", 1000, 1000, "float32") for b in "abcxy")
    product = Gemm(0, (), (Segment(Region("a", 0, 1000), Region("b", 0, 1000), Region("c", 0, 1000)),))
    copy = Copy(1, (), Region("x", 0, 250), Region("y", 0, 250))
    alone, beside = (
        simulate(Plan("all_gather", 1, (Program(0, buffers, steps),)), table(gemm_slowdown=1.5))
        for steps in ((product,), (product, copy))
    )
    assert alone.time_us == pytest.approx(2000)
    # The copy of 1 MB, read and written at 1 GB/s, runs during all of the 2000 us.
    assert beside.of(0)[0].end_us == pytest.approx(3000)


def test_the_critical_path_leads_from_the_start_to_the_end() -> None:
    problem = Problem("all_gather_matmul", (512,) * 4, k=4096, n=(512,), dtype="bfloat16")
    found = predict(problem, GPU, Knobs("push", 2, 1), table())
    path = found.critical_path()
    assert path[0].start_us == 0.0 and path[-1].end_us == found.time_us
    assert all(a.end_us <= b.end_us for a, b in itertools.pairwise(path))
    assert any(isinstance(t.step, Put) for t in path)  # at 1 GB/s the link decides


def test_numbers_of_a_timeline() -> None:
    problem = Problem("all_gather_matmul", (1000, 1000), k=1000, n=(1000,), dtype="float32")
    caps = Caps("any", one_sided=True)
    side_by_side = simulate(schedules.plan(problem, caps, Knobs("push", 1, 1)), table())
    in_turn = simulate(schedules.plan(problem, caps, Knobs("sequence", 1, 0)), table())
    # 4 ms on the link, the first 2 ms of it under the own shard's product.
    assert side_by_side.hidden_share(0) == pytest.approx(0.5)
    assert side_by_side.exposed_us(0) == pytest.approx(2000)
    assert in_turn.hidden_share(0) == 0.0
    assert lower_bound_us(side_by_side) == pytest.approx(4000)
    assert side_by_side.busy_us(0, Gemm) == pytest.approx(4000)


def test_a_plan_that_waits_for_nothing_it_gets_is_named() -> None:
    with pytest.raises(PlanError, match="does not end: rank 1 lane 0 at step 0"):
        simulate(
            dataclasses.replace(puts((1, 1), 8), programs=(Program(0, (), ()), *puts((1, 1), 8).programs[1:])), table()
        )


@pytest.mark.parametrize("size", (3, 4, 8))
@pytest.mark.parametrize(
    ("op", "caps", "knobs"),
    (
        ("all_gather_matmul", GPU, Knobs("push", 2, 2)),
        ("all_gather_matmul", GPU, Knobs("push", 2, 1, polls=True)),
        ("all_gather_matmul", GPU, Knobs("pull", 1, 1)),
        ("all_gather_matmul", GPU, Knobs("sequence", 1, 1)),
        ("all_gather_matmul", COLLECTIVE, Knobs("collective", 2, 1)),
        ("matmul_reduce_scatter", GPU, Knobs("push", 2, 2)),
        ("matmul_reduce_scatter", GPU, Knobs("push", 2, 2, polls=True)),
        ("matmul_reduce_scatter", COLLECTIVE, Knobs("collective", 1, 1)),
        ("matmul_all_reduce", GPU, Knobs("two_shot", 1, 1)),
        ("matmul_all_reduce", GPU, Knobs("one_shot", 1, 0)),
        ("all_gather", GPU, Knobs("push", 1, 2)),
        ("dgrad_reduce_scatter", GPU, Knobs("push", 1, 1)),
    ),
    ids=str,
)
def test_one_program_predicts_what_all_programs_do(op: str, caps: Caps, knobs: Knobs, size: int) -> None:
    n = () if op == "all_gather" else (1024,)
    problem = Problem(op, (256,) * size, k=2048, n=n, dtype="bfloat16")
    costs = load_table("h200")
    for domain in {0, 2 if size % 2 == 0 else 0}:
        chosen = dataclasses.replace(knobs, domain=domain)
        where = Topology(domain or size)
        whole = simulate(schedules.plan(problem, caps, chosen), costs, where)
        one = simulate(symmetric_plan(problem, caps, chosen), costs, where)
        middle = size // 2
        # Whose products are cut differs between ranks; where they are cut alike, so are all times.
        ends = {round(whole.end_us(r), 6) for r in range(size)}
        if len(ends) == 1:
            assert one.time_us == pytest.approx(whole.time_us)
        assert one.end_us(middle) == pytest.approx(whole.end_us(middle), rel=0.1)
        assert isinstance(one, Timeline) and one.symmetric


def test_domains_are_served_first_and_that_helps() -> None:
    """Two hosts of four: what needs the network leaves last, but while the own domain's rows are multiplied."""
    problem = Problem("all_gather_matmul", (2048,) * 8, k=8192, n=(7168,), dtype="bfloat16")
    first = schedules.program(problem, 1, GPU, Knobs("push", 1, 1, domain=4))
    served = [s.peer for s in first.steps if isinstance(s, Put)]
    assert served == [2, 3, 0, 5, 6, 7, 4]
    with pytest.raises(PlanError, match="domain=3"):
        schedules.program(problem, 1, GPU, Knobs("push", 1, 1, domain=3))


def test_the_librarys_sequence_is_the_product_and_the_collective() -> None:
    costs = load_table("h200")
    problem = Problem("all_gather_matmul", (4096, 4096), k=8192, n=(7168,), dtype="bfloat16")
    product = costs.gemm_us(8192, 7168, 8192, "bfloat16")
    assert stock_us(problem, costs) == pytest.approx(product + costs.launch_us + 308)  # 64 MiB by NCCL
    apart = stock_us(problem, costs, Topology(1))
    assert apart > product + 64 * MIB / 50e9 * 1e6  # over a network of 50 GB/s


# -- beside what was measured
@pytest.mark.parametrize(
    ("names", "copies"),
    (
        (("2026-11-30/h200x2-overlap-polling-never.json", "2026-11-30/h200x2-overlap-polling-always.json"), ""),
        (("2026-12-01/cpu2-overlap.json",), "2026-12-01/cpu2-collectives.json"),
    ),
    ids=("two H200s", "two cores"),
)
def test_predictions_are_within_a_tenth_of_what_was_measured(names: tuple[str, ...], copies: str) -> None:
    beside = load(RESULTS / copies) if copies else None
    found = []
    for name in names:
        report = load(RESULTS / name)
        found += validate.checked(report, validate.table_of(report, beside))
    assert len(found) >= 90
    errors = [abs(c.error) for c in found]
    assert statistics.median(errors) < 0.10
    ours = [abs(c.error) for c in found if c.what.startswith("commbackend")]
    assert statistics.median(ours) < 0.10 and max(ours) < 0.25
    assert any(line.startswith("everything: ") and "worst" in line for line in validate.summary(found))
