"""Streams given as numbers: 0 is the default stream, for transports and GEMM providers alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import commbackend
from commbackend.contract import GemmProblem, GemmSegment, torch_stream
from commbackend.gemm.torch_mm import TorchMM
from commbackend.gemm.triton_launch import CudaDriver
from commbackend.gpu.driver import Driver
from commbackend.transports.torch_dist import NcclTransport

FRESH = -1


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the streams that torch is made to use. As on torch 2.11, ``ExternalStream(0)`` is a fresh one."""
    entered: list[int] = []

    @contextlib.contextmanager
    def enter(stream: Any) -> Iterator[None]:
        entered.append(stream.cuda_stream)
        yield

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda n, device=None: SimpleNamespace(cuda_stream=n or FRESH))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: SimpleNamespace(cuda_stream=0, device=device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(torch.cuda, "stream", enter)
    return entered


def test_zero_is_the_default_stream_of_the_device(used: list[int]) -> None:
    found: Any = torch_stream(0, 3)
    assert (found.cuda_stream, found.device) == (0, 3)
    assert torch_stream(7).cuda_stream == 7


def test_everything_that_torch_does_on_a_numbered_stream(used: list[int]) -> None:
    a, out = torch.ones(2, 2), torch.zeros(2, 2)
    kernel = TorchMM().prepare(GemmProblem(2, 2, 2, "float32", "float32", "cuda"))
    driver, nccl = Driver.__new__(Driver), NcclTransport.__new__(NcclTransport)
    driver.ordinal, nccl._device = 1, torch.device("cuda", 1)
    for stream in (0, 9):
        used.clear()
        kernel([GemmSegment(a, a, out)], stream=stream)
        driver.strided_copy(out, a, stream)
        with nccl._on(stream):
            pass
        assert used == [stream] * 3
    assert torch.equal(out, a)


def test_one_stream_follows_another_by_number(used: list[int]) -> None:
    driver, seen = CudaDriver.__new__(CudaDriver), []
    driver.device = torch.device("cuda", 0)
    driver._event = SimpleNamespace(  # type: ignore[assignment]
        record=lambda s: seen.append(("record", s.cuda_stream)), wait=lambda s: seen.append(("wait", s.cuda_stream))
    )
    driver.follow(9, 0)
    driver.follow(0, 9)
    assert seen == [("record", 0), ("wait", 9), ("record", 9), ("wait", 0)]


def test_no_other_code_makes_streams_from_numbers() -> None:
    folder = Path(commbackend.__file__).parent
    assert [p.name for p in folder.rglob("*.py") if "ExternalStream" in p.read_text()] == ["contract.py"]
