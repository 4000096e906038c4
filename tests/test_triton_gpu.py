"""The flag kernels on a real GPU: the checks of ``benchmarks/gemm_checks.py`` as tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from commbackend.contract import DeviceSlotTable, SlotTable
from commbackend.errors import Unavailable
from commbackend.gemm.triton_tile import TritonTile
from commbackend.testing import GemmSuite

pytestmark = pytest.mark.gpu

try:
    TritonTile.probe(torch.device("cuda"))
except Unavailable as e:
    pytest.skip(f"triton provider: {e}", allow_module_level=True)


class HostWords(DeviceSlotTable):
    """Slots in pinned memory: the host reads and writes them while a kernel polls."""

    def __init__(self, words: int) -> None:
        self.words, self.memory = words, torch.zeros(words, dtype=torch.int64, pin_memory=True)

    def read(self, writer: int, word: int) -> int:
        return int(self.memory[word])

    def close(self) -> None:
        """The tensor goes with the object."""

    def address(self, writer: int, word: int) -> int:
        return self.memory.data_ptr() + 8 * word

    def peer_address(self, peer: int, word: int) -> int:
        return self.address(peer, word)


class TestSuite(GemmSuite):
    provider = "commbackend.gemm.triton_tile:TritonTile"
    device = "cuda"

    def slots(self, words: int) -> tuple[SlotTable, Callable[[int, int], None]]:
        table = HostWords(words)
        return table, lambda word, value: table.memory.__setitem__(word, value)


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "gemm_checks.py"
    spec = importlib.util.spec_from_file_location("gemm_checks", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gemm_checks"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def provider() -> TritonTile:
    return TritonTile(timeout_s=5.0)


@pytest.mark.parametrize("name", ["products", "fp8", "streams", "waiting", "graph"])
def test_check(checks: ModuleType, provider: TritonTile, name: str) -> None:
    if name == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs capability 8.9")
    checks.FAILED.clear()
    getattr(checks, f"check_{name}")(provider)
    provider.check()
    assert not checks.FAILED


def test_faults(checks: ModuleType) -> None:
    checks.FAILED.clear()
    checks.check_faults()
    assert not checks.FAILED


def test_one_shot_faults(checks: ModuleType) -> None:
    checks.FAILED.clear()
    checks.check_one_shot_faults()
    assert not checks.FAILED


def test_reduce(checks: ModuleType, provider: TritonTile) -> None:
    checks.FAILED.clear()
    checks.check_reduce(provider.runtime)
    assert not checks.FAILED


@pytest.mark.slow
def test_ten_thousand_calls(checks: ModuleType, provider: TritonTile) -> None:
    checks.FAILED.clear()
    checks.check_steady(provider, 10_000)
    assert not checks.FAILED
