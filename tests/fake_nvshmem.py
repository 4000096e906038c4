"""A small NVSHMEM in the place of ``nvshmem4py``: processing elements that share files of one directory.

Everything that the library does collectively waits for all PEs, and a test sees it as an error when they do not come.
Enqueued work runs on the streams of a ``fake_cuda.FakeCuda``.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from fake_cuda import FakeCuda, _InProcess, _OnFake, _word

from commbackend.contract import Caps
from commbackend.gpu.nvshmem_library import Nvshmem
from commbackend.transports.nvshmem_ import NvshmemTransport

_PATIENCE_S = 20.0


class _Status(enum.IntEnum):
    STATUS_NOT_INITIALIZED, STATUS_IS_BOOTSTRAPPED, STATUS_IS_INITIALIZED = 0, 1, 2
    STATUS_LIMITED_MPG, STATUS_FULL_MPG, STATUS_INVALID = 3, 4, 5


class FakeNvshmem:
    """One PE, as both ``nvshmem.core`` and ``nvshmem.bindings``."""

    Init_status = _Status
    Signal_op = SimpleNamespace(SIGNAL_SET=9)
    Cmp_type = SimpleNamespace(CMP_GE=5)
    uniqueid_dtype = SimpleNamespace(itemsize=128)

    def __init__(self, fake: FakeCuda) -> None:
        self.fake, self.status = fake, _Status.STATUS_NOT_INITIALIZED
        self.directory, self.pe, self.size, self.rounds = "", -1, 0, 0
        self.calls: Counter[str] = Counter()
        self.unreachable = False
        self.ready = int(_Status.STATUS_IS_INITIALIZED)
        self.full = False
        self._heap: dict[int, tuple[str, dict[int, tuple[int, mmap.mmap]]]] = {}

    # -- the instance
    def get_version(self) -> str:
        return "fake"

    def get_unique_id(self, empty: bool = False) -> Any:
        raw = ctypes.create_string_buffer(128)
        if not empty:
            raw.value = tempfile.mkdtemp(prefix="fake-nvshmem-").encode()
        return SimpleNamespace(ptr=ctypes.addressof(raw), raw=raw)

    def join(self, raw: bytes, rank: int, size: int) -> None:
        self.directory, self.pe, self.size = raw.rstrip(b"\0").decode(), rank, size
        self.rounds = 0
        self._meet("init")
        self.status = _Status(self.ready)

    def finalize(self) -> None:
        assert not self._heap, "finalised with memory allocated"
        self._meet("finalize")
        self.status = _Status.STATUS_NOT_INITIALIZED

    def init_status(self) -> int:
        return int(self.status)

    def my_pe(self) -> int:
        return self.pe

    def n_pes(self) -> int:
        return self.size

    def _meet(self, what: str) -> None:
        """Collective, and without a deadline in the library."""
        self.calls[what] += 1
        self.rounds += 1
        open(f"{self.directory}/{what}-{self.rounds}-{self.pe}", "w").close()
        end = time.monotonic() + _PATIENCE_S
        while not all(os.path.exists(f"{self.directory}/{what}-{self.rounds}-{p}") for p in range(self.size)):
            assert time.monotonic() < end, f"nvshmem {what} hangs: not all PEs have come"
            time.sleep(0.001)

    # -- memory
    def align(self, alignment: int, nbytes: int) -> int:
        if self.full:
            self._meet("malloc")
            return 0
        name = f"{self.directory}/heap-{self.rounds + 1}"
        with open(f"{name}-{self.pe}", "wb") as f:
            f.truncate(nbytes)
            f.write(b"\xcd" * min(nbytes, 4096))
        self._meet("malloc")
        maps: dict[int, tuple[int, mmap.mmap]] = {}
        for pe in range(self.size):
            if os.path.exists(f"{name}-{pe}"):
                with open(f"{name}-{pe}", "r+b") as f:
                    view = mmap.mmap(f.fileno(), nbytes)
                maps[pe] = ctypes.addressof(ctypes.c_char.from_buffer(view)), view
        self._heap[maps[self.pe][0]] = name, maps
        return maps[self.pe][0]

    def free(self, address: int) -> None:
        del self._heap[address]
        self._meet("free")

    def ptr(self, address: int, pe: int) -> int:
        return 0 if self.unreachable and pe != self.pe else self._at(address, pe)

    def _at(self, address: int, pe: int) -> int:
        for start, (_, maps) in self._heap.items():
            if start <= address < start + len(maps[self.pe][1]):
                return maps[pe][0] + address - start
        raise AssertionError(f"{address:#x} is not in the symmetric heap")

    # -- enqueued work
    def _enqueue(self, name: str, stream: int, step: Callable[[], Any]) -> None:
        self.calls[name] += 1
        self.fake._add(name, stream, lambda: step() is not False)

    def putmem_on_stream(self, dst: int, src: int, nbytes: int, pe: int, stream: int) -> None:
        self._at(src, self.pe)  # over a network only symmetric memory is registered
        target = self._at(dst, pe)
        self._enqueue("put", stream, lambda: ctypes.memmove(target, src, nbytes))

    def getmem_on_stream(self, dst: int, src: int, nbytes: int, pe: int, stream: int) -> None:
        self._at(dst, self.pe)
        source = self._at(src, pe)
        self._enqueue("get", stream, lambda: ctypes.memmove(dst, source, nbytes))

    def putmem_signal_on_stream(
        self, dst: int, src: int, nbytes: int, word: int, value: int, op: int, pe: int, stream: int
    ) -> None:
        self.putmem_on_stream(dst, src, nbytes, pe, stream)
        self.calls["put_signal"] += 1
        self._store(self._at(word, pe), value, stream)

    def signal_op_on_stream(self, word: int, value: int, op: int, pe: int, stream: int) -> None:
        assert op == 9
        self._store(self._at(word, pe), value, stream)

    def _store(self, address: int, value: int, stream: int) -> None:
        def step() -> None:
            _word(address).value = value

        self._enqueue("signal", stream, step)

    def quiet_on_stream(self, stream: int) -> None:
        self._enqueue("quiet", stream, lambda: None)

    def signal_wait_until_on_stream(self, word: int, cmp: int, value: int, stream: int) -> None:
        self._at(word, self.pe)
        assert cmp == 5
        self._enqueue("wait", stream, lambda: _word(word).value >= value)


class _Table(Nvshmem):
    def init(self, ordinal: int, raw: bytes, rank: int, size: int) -> None:
        self.call("init", self._core.join, raw, rank, size)


class FakeNvshmemTransport(_OnFake, NvshmemTransport):
    """``nvshmem`` on fakes: ``pes[rank]`` is the library of that rank."""

    pes: ClassVar[dict[int, FakeNvshmem]] = {}

    @classmethod
    def open_library(cls, device: torch.device, rank: int) -> Nvshmem:
        return _Table(cls.pes[rank], cls.pes[rank])


class ProcessNvshmem(_InProcess, FakeNvshmemTransport):
    """For suites that run ranks as processes."""

    caps: Caps = replace(NvshmemTransport.caps, device="cpu")

    @classmethod
    def open_library(cls, device: torch.device, rank: int) -> Nvshmem:
        if rank not in cls.pes:
            cls.pes[rank] = FakeNvshmem(cls.fakes[rank])
            cls.pes[rank].unreachable = cls.far
        return super().open_library(device, rank)

    far: ClassVar[bool] = False


class FarNvshmem(ProcessNvshmem):
    """No PE maps another's memory, as across a network."""

    far = True
    caps: Caps = replace(
        ProcessNvshmem.caps, peer_view=False, device_signal=False, graph_capture=False, copy_engine=False,
        source="symmetric",
    )  # fmt: skip


__all__ = ["FakeNvshmem", "FakeNvshmemTransport", "FarNvshmem", "Mapping", "ProcessNvshmem"]
