"""Which knobs a call gets: rules and their order, buckets of rows, layers and phases, wishes that are refused."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from commbackend import ops, schedules
from commbackend.communicator import Communicator
from commbackend.config import Config, resolve
from commbackend.contract import Caps
from commbackend.errors import ConfigError, Unsupported
from commbackend.plan import Knobs, Problem
from commbackend.testing import run_threads
from commbackend.tuning import choices
from commbackend.tuning.choices import Choices, Entry
from commbackend.tuning.chooser import Chooser
from commbackend.tuning.costs import load_table
from commbackend.tuning.explaining import topology_of
from commbackend.tuning.keys import Key, bucket, key_of, typical

VIEWS = Caps("cpu", one_sided=True, peer_view=True, copy_lanes=0)
GPU = Caps("cuda", one_sided=True, stream_ordered=True, copy_engine=True)
CPU = torch.device("cpu")


def chooser(caps: Caps = VIEWS, made: Choices | None = None, *, polls: bool = False, **settings: object) -> Chooser:
    return Chooser(resolve(**settings), lambda: caps, lambda dtype: polls, "shm", made)


def product(rows: int = 512, size: int = 2, k: int = 1024, n: int = 1024, **more: object) -> Problem:
    return Problem("all_gather_matmul", (rows,) * size, k=k, n=(n,), **more)  # type: ignore[arg-type]


def entry(problem: Problem, knobs: Knobs, **more: object) -> Entry:
    return Entry(key_of(problem).text, knobs, **more)  # type: ignore[arg-type]


# -- buckets
def test_buckets_are_four_to_a_factor_of_two_and_reached() -> None:
    found = sorted({bucket(rows) for rows in range(1, 65)})
    assert found == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert bucket(0) == 0 and all(bucket(r) <= r < 1.25 * bucket(r) + 1 for r in range(1, 5000))


def test_a_key_holds_what_ranks_share() -> None:
    """Uneven output features of a gather, uneven inner features of a reduction: the same key on all ranks."""
    assert key_of(product(n=7)) == key_of(product(n=8))
    scatter = Problem("matmul_reduce_scatter", (4, 4), k=7, n=(16,))
    assert key_of(scatter) == key_of(dataclasses.replace(scatter, k=9))
    differing = [
        product(k=2048),
        product(dtype="bfloat16"),
        product(blocks=2),
        product(flags=("gathered",)),
        product(size=4),
        product(rows=1024),
        dataclasses.replace(product(), n=(1024, 1024)),
        scatter,
    ]
    assert len({key_of(p) for p in [product(), *differing]}) == len(differing) + 1
    assert Key.parse(key_of(product()).text) == key_of(product())


def test_token_counts_that_change_meet_choices_that_were_made() -> None:
    """F001, dynamic batches: of all M below 4096 only a few dozen are thought about."""
    chosen = chooser()
    made: list[Problem] = []
    think = chosen._choose
    chosen._choose = lambda p, **how: (made.append(p), think(p, **how))[1]  # type: ignore[method-assign]
    for rows in range(1, 2049):
        knobs = chosen.knobs(product(rows))
        assert schedules.supports(product(rows), VIEWS, knobs) is None
        assert knobs == schedules.default_knobs(typical(product(rows)), VIEWS)
    assert len(made) == len({bucket(r) for r in range(1, 2049)})


def test_choices_do_not_depend_on_what_came_before() -> None:
    """A resumed run meets other token counts first, and must choose alike."""
    forth, back = chooser(GPU), chooser(GPU)
    problems = [product(rows, dtype="bfloat16") for rows in range(1, 3000, 37)]
    # Both are of the bucket of 3072 rows, but only the second reaches 32 MiB, where two chunks begin.
    edge = [Problem("matmul_reduce_scatter", (rows,) * 2, k=64, n=(5000,), dtype="bfloat16") for rows in (3100, 3500)]
    assert len({schedules.default_knobs(p, GPU) for p in edge}) == 2 and len({key_of(p) for p in edge}) == 1
    problems += edge
    assert {p: forth.knobs(p) for p in problems} == {p: back.knobs(p) for p in reversed(problems)}


def test_what_was_measured_but_does_not_fit_is_refused_with_its_reason() -> None:
    """Polling needs a word for every part, and four ranks have too many in 32 chunks."""
    wanted = Knobs("push", 32, 1, True, True)
    even = Problem("matmul_reduce_scatter", (64,) * 4, k=64, n=(64,), dtype="bfloat16")
    made = Choices((entry(even, wanted, source="file x"),))
    chosen = chooser(GPU, made, polls=True).chosen(even)
    assert chosen.knobs != wanted and chosen.refused and "words" in chosen.refused[0]


# -- rules
def test_rules_in_their_order() -> None:
    p = product()
    by_rule = schedules.default_knobs(typical(p), VIEWS)
    measured = Knobs("push", 2, 1)
    made = Choices((entry(p, measured, source="cache of commbackend tune"),))
    assert chooser().chosen(p).knobs == by_rule and chooser().chosen(p).rule == "rule by bytes"
    assert chooser(made=made).chosen(p).knobs == measured
    set_too = chooser(made=made, chunks=4)
    assert set_too.chosen(p).knobs == dataclasses.replace(measured, chunks=4)
    assert set_too.chosen(p).rule == "settings"
    set_too.configure("*", chunks=8)
    assert set_too.chosen(p).knobs == dataclasses.replace(measured, chunks=8)
    assert set_too.chosen(p).rule == "configure('*', chunks=8)"


def test_wishes_are_by_layer_phase_and_operation() -> None:
    c, p = chooser(), product()
    usual = c.knobs(p)
    c.configure("decoder.*.fc1", schedule="push", chunks=2, lanes=1)
    c.configure("decoder.*.fc1", phase="backward", schedule="sequence", op="all_gather_matmul")
    assert c.knobs(p) == usual
    with c.within("decoder.3.fc1"):
        assert c.knobs(p) == dataclasses.replace(usual, schedule="push", chunks=2, lanes=1)
        with c.within("decoder.3.fc2"):
            assert c.knobs(p) == usual
    with c.within("decoder.3.fc1", "backward"):
        assert c.knobs(p).schedule == "sequence"
    assert c.layer == ""


def test_a_wish_that_cannot_be_met_is_refused_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    c = chooser(log_level="info")
    c.configure("fc1", schedule="collective")
    with c.within("fc1"), caplog.at_level(logging.INFO, "commbackend"):
        chosen = c.chosen(product())
    assert chosen.knobs == schedules.default_knobs(product(), VIEWS)
    assert chosen.refused == ("configure('fc1', schedule='collective'): the transport has no collectives",)
    assert any("refused configure('fc1'" in r.message for r in caplog.records)
    strict = chooser(strict=True)
    strict.configure("*", polls=True)
    with pytest.raises(Unsupported, match="no GEMM provider here polls flags"):
        strict.knobs(product())


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"chunk": 2}, "unknown knob 'chunk' .did you mean chunks"),
        ({"schedule": "psh"}, "unknown schedule 'psh'"),
        ({"schedule": "two_shot", "op": "all_gather_matmul"}, "unknown schedule 'two_shot'"),
        ({"phase": "wgrad"}, "a phase is one of forward, backward"),
        ({"op": "matmul"}, "an op one of"),
        ({"chunks": "2"}, "int or None is needed"),
        ({"chunks": True}, "int or None is needed"),
        ({"polls": 1}, "bool or None is needed"),
    ),
)
def test_slips_in_wishes_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chooser().configure("fc1", **arguments)  # type: ignore[arg-type]


def test_below_the_crossover_the_sequence_runs_and_explain_says_so() -> None:
    """F096 on a CPU: few rows."""

    def say(rank: int, group: object) -> str:
        with Communicator(group, resolve(transport="local", timeout_s=20.0, choices="off"), CPU) as comm:  # type: ignore[arg-type]
            ops.all_gather_matmul(torch.ones(8, 64), torch.ones(32, 64), comm)
            return comm.explain() + comm.explain("all_gather_matmul", (16, 64, 32), dtype="float32")

    for said in run_threads(say, 2):
        assert "sequence/1/0, by rule by bytes" in said
        assert "one after the other: overlap would not win here" in said
        assert "no costs known: run commbackend tune" in said


# -- files
def test_entries_hold_for_the_nearest_bucket_within_a_factor_of_two() -> None:
    here, other = Knobs("push", 2, 1), Knobs("push", 8, 1)
    made = Choices((entry(product(256), here), entry(product(1024), other), entry(product(512), other, layer="fc1")))
    assert [made.find(product(r)).knobs for r in (128, 256, 400, 900, 2048)] == [here, here, here, other, other]  # type: ignore[union-attr]
    assert made.find(product(100)) is None and made.find(product(4096)) is None
    assert made.find(product(512), "fc1").knobs == other  # type: ignore[union-attr]
    assert made.find(product(512), "fc2").knobs in (here, other)  # type: ignore[union-attr]
    assert made.find(product(256, k=8)) is None


def test_files_round_trip_and_replace_each_other_whole(tmp_path: Path) -> None:
    made = Choices(
        (entry(product(), Knobs("push", 2, 1), us=3.5, others=(("pull/1/0", 4.0),)),), {"a": "b"}, load_table("h200")
    )
    choices.save(made, tmp_path / "deep/choices.json")
    again = choices.load(tmp_path / "deep/choices.json", source=made.entries[0].source)
    assert again == made
    writer = textwrap.dedent(
        """
        import sys
        from commbackend.tuning import choices
        made = choices.load(sys.argv[1], source="x")
        for _ in range(40):
            choices.save(made, sys.argv[1])
        """
    )
    path = str(tmp_path / "deep/choices.json")
    jobs = [subprocess.Popen([sys.executable, "-c", writer, path]) for _ in range(3)]
    while any(job.poll() is None for job in jobs):
        assert len(choices.load(path).entries) == 1
    assert [job.wait() for job in jobs] == [0, 0, 0]
    assert os.listdir(tmp_path / "deep") == ["choices.json"]


@pytest.mark.parametrize(
    "raw",
    (
        b"",
        b"{}",
        b"\xff\xfe",
        b'{"format": "commbackend-choices-0"}',
        b'{"format": "commbackend-choices-1", "machine": {}, "costs": null, "entries": [{"key": "x"}]}',
        b'{"format": "commbackend-choices-1", "machine": {}, "costs": {}, "entries": []}',
        b"[" * 100_000,
    ),
)
def test_damaged_files_are_ignored_in_the_cache_with_one_line(
    raw: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = {"device": "x"}
    choices.cache_path(tmp_path, machine).write_bytes(raw)
    assert choices.read_cache(tmp_path, machine) is None
    assert len(caplog.records) == 1 and "it is ignored" in caplog.records[0].message
    with pytest.raises(ConfigError, match="choices"):
        choices.load(choices.cache_path(tmp_path, machine))


@pytest.mark.parametrize("field", ("schedule", "chunks", "polls"))
def test_knobs_of_another_type_are_refused(field: str) -> None:
    made = Choices((entry(product(), Knobs("push", 2, 1)),))
    text = made.to_json()
    old = {"schedule": '"schedule": "push"', "chunks": '"chunks": 2', "polls": '"polls": false'}[field]
    with pytest.raises(ConfigError, match=field):
        Choices.from_json(text.replace(old, f'"{field}": [1]'))


def test_a_foreign_file_is_ignored_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = {"device": "mine", "torch": "2"}
    choices.save(Choices((), {"device": "theirs", "torch": "2"}), choices.cache_path(tmp_path, mine))
    assert choices.read_cache(tmp_path, mine) is None
    assert "made for another device" in caplog.text
    assert choices.read_cache(tmp_path, {"device": "unknown"}) is None and len(caplog.records) == 1


def test_deterministic_algorithms_ignore_what_other_runs_measured_but_not_a_file() -> None:
    p = product()
    cached = Choices((entry(p, Knobs("push", 2, 1), source="cache of commbackend tune"),))
    given = Choices((entry(p, Knobs("push", 2, 1), source="file choices.json"),))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert chooser(made=cached).chosen(p).rule == "rule by bytes"
        assert chooser(made=given).chosen(p).knobs == Knobs("push", 2, 1)
    finally:
        torch.use_deterministic_algorithms(before)
    assert chooser(made=cached).chosen(p).knobs == Knobs("push", 2, 1)


def test_settings_name_what_they_are() -> None:
    assert isinstance(resolve(choices="off"), Config)
    with pytest.raises(ConfigError):
        resolve(tune="perhaps")


# -- sizes and hosts
def test_sizes_of_the_largest_calls_are_exact() -> None:
    """F017: 2^20 rows of 2^14 columns; nothing overflows and nothing is rounded."""
    rows, k = (1 << 17,) * 8, 1 << 14
    knobs = schedules.default_knobs(big := Problem("all_gather_matmul", rows, k=k, n=(64,), dtype="bfloat16"), GPU)
    assert schedules.program(big, 0, GPU, knobs).heap_nbytes() == (1 << 20) * k * 2
    scatter = Problem("matmul_reduce_scatter", rows, k=64, n=(k,), dtype="bfloat16")
    knobs = schedules.default_knobs(scatter, GPU)
    made = schedules.program(scatter, 0, GPU, knobs)
    assert (
        made.heap_nbytes() == 7 * (1 << 17) * k * 2 and made.scratch_nbytes() == (1 << 20) * k * 2 + (1 << 17) * k * 2
    )


def test_symmetric_memory_follows_the_largest_call_and_no_maximum() -> None:
    def run(rank: int, group: object) -> list[int]:
        with Communicator(group, resolve(transport="local", timeout_s=20.0, choices="off"), CPU) as comm:  # type: ignore[arg-type]
            found = []
            for rows in (512, 4096, 1, 100, 4000):
                out = ops.all_gather_matmul(torch.ones(rows, 64), torch.ones(8, 64), comm)
                assert out.shape == (2 * rows, 8) and bool((out == 64).all())
                found.append(comm.stats()["symmetric_nbytes"])
            return found

    for small, large, *rest in run_threads(run, 2):
        assert small < large and set(rest) == {large}
        assert large < 4 * (2 * 4096 * 64 * 4) + (1 << 20)  # two halves of the gathered operand, and slots


@pytest.mark.parametrize(
    ("hosts", "domain"),
    (((), 4), ((0, 0, 0, 0), 4), ((0, 0, 1, 1), 2), ((0, 1, 0, 1), 4), ((0, 0, 0, 1), 4), ((0, 1, 2, 3), 1)),
)
def test_hosts_of_equally_many_consecutive_ranks_are_domains(hosts: tuple[int, ...], domain: int) -> None:
    assert topology_of(hosts, 4).domain == domain


def test_the_own_host_is_served_first_by_default() -> None:
    c = Chooser(resolve(), lambda: GPU, lambda dtype: False, "nvshmem", domain=2)
    assert c.knobs(product(size=4, dtype="bfloat16")).domain == 2
    assert c.knobs(product(size=3, dtype="bfloat16")).domain == 0
    c.configure("*", domain=0)
    assert c.knobs(product(size=4, dtype="bfloat16")).domain == 0


def test_choices_are_printed_with_what_they_are_predicted_to_take(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "commbackend"):
        chooser(GPU, Choices((), {}, load_table("h200"))).knobs(product(size=4, dtype="bfloat16"))
    assert "(rule by bytes, predicted " in caplog.text and " us)" in caplog.text
