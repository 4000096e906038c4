"""The tp-comm-overlap YAML of TransformerEngine and Megatron: every key is honoured, met, or refused with advice."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import commbackend
from commbackend import schedules
from commbackend.errors import ConfigError
from commbackend.integrations import te_config
from commbackend.integrations.te_config import GEMMS, Wish, load, parse
from commbackend.plan import Problem
from commbackend.testing import run_ranks


def wish(section: str, **knobs: Any) -> Wish:
    layer, phase, op, _ = GEMMS[section]
    return Wish(layer, phase, op, tuple(sorted(knobs.items())))


def test_sections_are_buffers_times_passes() -> None:
    assert set(GEMMS) == {f"{b}_{p}" for b in ("qkv", "proj", "fc1", "fc2") for p in ("fprop", "dgrad", "wgrad")}
    for name, (layer, phase, op, methods) in GEMMS.items():
        assert layer == name.partition("_")[0] and phase == ("forward" if name.endswith("fprop") else "backward")
        assert op in schedules.OPS and set(methods) <= set(te_config.METHODS)


# What a file may say, and what becomes of it: section, its keys, knobs, keys that are met, text of what is refused.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], set[str], str]] = [
    ("qkv_fprop", {"method": "ring_exchange"}, {"schedule": "push"}, set(), ""),
    ("fc1_fprop", {"method": "ring_exchange", "num_splits": 4}, {"schedule": "push"}, {"num_splits"}, ""),
    ("proj_fprop", {"method": "pipeline", "num_splits": 4}, {"schedule": "push", "chunks": 4}, set(), ""),
    ("proj_fprop", {"num_splits": 8}, {"chunks": 8}, set(), ""),  # pipeline is what the section does unless told
    ("fc2_fprop", {"method": "ring_exchange"}, {"schedule": "push"}, set(), ""),
    ("qkv_dgrad", {"method": "bulk"}, {}, {"method"}, ""),
    ("fc1_dgrad", {"method": "pipeline", "num_splits": 2}, {"schedule": "push", "chunks": 2}, set(), ""),
    ("fc1_dgrad", {"method": "ring_exchange"}, {"schedule": "push"}, set(), ""),
    ("fc1_wgrad", {"method": "bulk", "num_sm": 16, "cga_size": 2}, {}, {"method", "num_sm", "cga_size"}, ""),
    ("proj_dgrad", {"method": "ring_exchange"}, {"schedule": "push"}, set(), ""),
    ("proj_wgrad", {"method": "external"}, {}, {"method"}, ""),
    ("fc1_fprop", {"atomic_gemm": 1}, {"polls": True}, set(), ""),
    ("fc1_fprop", {"atomic_gemm": False}, {"polls": False}, set(), ""),
    ("qkv_wgrad", {"atomic_gemm": 1}, {}, {"atomic_gemm"}, ""),
    ("fc1_fprop", {"num_sm": 1, "set_sm_margin": 0, "use_ce": 1}, {}, {"num_sm", "set_sm_margin", "use_ce"}, ""),
    ("fc1_fprop", {"use_ce": 0}, {}, set(), "leave use_ce out, or write 1"),
    ("fc1_fprop", {"fp8_buf": 0}, {}, {"fp8_buf"}, ""),
    ("fc1_fprop", {"fp8_buf": True}, {}, set(), "leave fp8_buf out, or write 0"),
    ("fc1_fprop", {"comm_priority": 0, "gemm_priority": 0}, {}, {"comm_priority", "gemm_priority"}, ""),
    ("fc1_fprop", {"comm_priority": -1}, {}, set(), "leave comm_priority out"),
    ("fc1_fprop", {"gemm_priority": 1}, {}, set(), "leave gemm_priority out"),
    ("proj_fprop", {"pipeline_rs_overlap_first_gemm": 1}, {}, {"pipeline_rs_overlap_first_gemm"}, ""),
    ("proj_fprop", {"is_reduce_scatter": 1}, {}, {"is_reduce_scatter"}, ""),
    ("qkv_fprop", {"is_reduce_scatter": 1}, {}, set(), "leave is_reduce_scatter out"),
    ("fc1_fprop", {"aggregate": 0}, {}, {"aggregate"}, ""),
    ("qkv_fprop", {"method": "pipeline"}, {}, set(), "write method: ring_exchange"),
    ("qkv_wgrad", {"method": "ring_exchange"}, {}, set(), "write method: bulk"),
    ("proj_fprop", {"method": "bulk"}, {}, set(), "write method: pipeline or ring_exchange"),
    ("proj_wgrad", {"method": "bulk"}, {}, set(), "write method: external"),
]


@pytest.mark.parametrize(("section", "keys", "knobs", "met", "refused"), CASES)
def test_every_key_is_honoured_met_or_refused(
    section: str, keys: dict[str, Any], knobs: dict[str, Any], met: set[str], refused: str
) -> None:
    if refused:
        with pytest.raises(ConfigError, match=refused) as e:
            parse({section: keys})
        assert f"{section}." in str(e.value)
    read = parse({section: keys}, refused="warn")
    assert read.wishes == ((wish(section, **knobs),) if knobs else ())
    assert {m.partition(" = ")[0] for m in read.met} == {f"{section}.{key}" for key in met}
    assert len(read.refused) == bool(refused) and all(refused in r for r in read.refused)


def test_every_key_has_a_case() -> None:
    assert {key for _, keys, *_ in CASES for key in keys} == set(te_config._KEYS)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"qkv_fpropp": {}}, r"unknown section 'qkv_fpropp' \(did you mean qkv_fprop\?\)"),
        ({"qkv_fprop": {"num_sms": 4}}, r"num_sms: unknown key \(did you mean num_sm\?\)"),
        ({"qkv_fprop": {"method": "ring"}}, "one of ring_exchange, pipeline, bulk, external"),
        ({"proj_fprop": {"num_splits": 0}}, "an integer 1...32"),
        ({"proj_fprop": {"num_splits": "4"}}, "an integer 1...32"),
        ({"proj_fprop": {"num_splits": True}}, "an integer 1...32"),
        ({"proj_fprop": {"aggregate": 2}}, "0, 1, true or false"),
        ({"proj_fprop": 3}, "keys such as"),
        (["qkv_fprop"], "sections such as"),
    ],
)
def test_what_means_nothing_is_an_error(sections: Any, text: str) -> None:
    for refused in ("raise", "warn"):
        with pytest.raises(ConfigError, match=text):
            parse(sections, refused=refused)


def test_all_refused_keys_are_listed_at_once_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    sections = {"fc1_fprop": {"use_ce": 0, "method": "ring_exchange"}, "fc2_fprop": {"gemm_priority": 3}}
    with pytest.raises(ConfigError) as e:
        parse(sections, where="tuned.yaml")
    assert "tuned.yaml" in str(e.value) and "fc1_fprop.use_ce" in str(e.value) and "fc2_fprop.gemm" in str(e.value)
    with caplog.at_level(logging.WARNING, "commbackend"):
        read = parse(sections, refused="warn")
    assert "fc2_fprop.gemm_priority = 3" in caplog.text
    assert read.wishes == (wish("fc1_fprop", schedule="push"),)
    with pytest.raises(ConfigError, match="'raise' or 'warn'"):
        parse({}, refused="no")


def test_a_file_is_read_and_never_makes_objects(tmp_path: Path) -> None:
    good = tmp_path / "tuned.yaml"
    good.write_text("proj_fprop:\n  method: pipeline\n  num_splits: 4\nqkv_wgrad: {method: bulk}\nfc1_fprop:\n")
    assert load(good).wishes == (wish("proj_fprop", schedule="push", chunks=4),)
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert load(empty) == te_config.OverlapConfig()
    evil = tmp_path / "evil.yaml"
    evil.write_text(f"qkv_fprop: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'made'}]\n")
    for bad in (evil, tmp_path / "missing.yaml"):
        with pytest.raises(ConfigError, match=bad.name):
            load(bad)
    assert not (tmp_path / "made").exists()


def _applied(rank: int, group: Any) -> dict[str, str]:
    """What calls of the layers get, by section, on each of two transports."""
    found = {}
    cfg = parse(
        {
            "fc1_fprop": {"method": "ring_exchange", "aggregate": 1},
            "proj_fprop": {"method": "pipeline", "num_splits": 4},
            "qkv_dgrad": {"method": "pipeline", "num_splits": 2},
        }
    )
    with commbackend.init(group, device="cpu", transport="shm") as comm:
        cfg.apply(comm)
        for section in ("fc1_fprop", "fc2_fprop", "proj_fprop", "qkv_dgrad", "fc1_dgrad"):
            layer, phase, op, _ = GEMMS[section]
            flags = ("wgrad",) if op.startswith("dgrad") else ()
            with comm.layer(layer, phase):
                found[section] = str(comm.knobs(Problem(op, (8, 8), 1, 16, (16,), flags=flags)))
    return found


def test_wishes_reach_the_calls_of_their_layer_and_pass() -> None:
    for found in run_ranks(_applied, 2):
        assert found["fc1_fprop"].startswith("push/1/") and "blocks=1" in found["fc1_fprop"]
        assert found["proj_fprop"].startswith("push/4/")
        assert found["qkv_dgrad"].startswith("push/2/")
        assert found["fc2_fprop"].startswith("sequence/") and found["fc1_dgrad"].startswith("sequence/")
