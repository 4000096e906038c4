"""What one rank of a benchmark measures with: its group, its clocks, and the protocol of measuring.

The protocol, the same for every kind: candidates take turns call by call in one loop, in an order shuffled anew every
round (the same on all ranks); every call of any candidate takes the next set of buffers; a round counts with the time
of its slowest rank; what is compared is the median of rounds.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import commbackend

from ..communicator import Communicator
from ..errors import CommAborted, CommBackendError, CommTimeout
from .report import summary

__all__ = ["Candidate", "Rounds", "SpinBarrier", "World"]

#: GPU cycles of the sleep that hides the host's launch time of one call: about 0.3 ms.
_SLEEP_CYCLES = 500_000
#: Words of one cache line: ranks must not share one.
_LINE_WORDS = 16


class SpinBarrier:
    """A barrier of the ranks of one host over a mapped file: microseconds, and independent of all that is measured."""

    def __init__(self, path: str, rank: int, size: int, timeout_s: float) -> None:
        self._words = np.memmap(path, np.int64, "r+", shape=(size, _LINE_WORDS))[:, 0]
        self._rank, self._round, self._timeout_s = rank, 0, timeout_s

    def __call__(self) -> None:
        """Return when all ranks have called it. Collective. Raises CommTimeout naming the ranks that have not come."""
        self._round += 1
        self._words[self._rank] = self._round
        deadline = time.monotonic() + self._timeout_s
        while int(self._words.min()) < self._round:
            os.sched_yield()  # there may be more ranks than cores
            if time.monotonic() > deadline:
                late = [r for r, word in enumerate(self._words) if word < self._round]
                raise CommTimeout(f"ranks {late} did not come to the benchmark's barrier", waiting_for=late)


@dataclass(frozen=True)
class Candidate:
    """Something to measure: ``call(i)`` does it once on buffer set ``i``; ``check(i)`` returns its relative error.

    ``allowed`` is the largest error that rounding explains; 0 demands equal values. Without ``check``, none is.
    """

    name: str
    call: Callable[[int], object]
    check: Callable[[int], float] | None = None
    allowed: float = 0.0


@dataclass(frozen=True)
class Rounds:
    """How long to measure: ``seconds`` for all candidates of a case together, ``least``...``most`` rounds."""

    seconds: float
    least: int
    most: int
    warmup: int


class World:
    """This rank: its group, its communicators, its clocks.

    Attributes:
        stock: Backend name of torch.distributed's collectives on ``device``, or "" where it has none.
        mpi: mpi4py's COMM_WORLD, or None unless started by mpirun.
    """

    def __init__(self, spec: Mapping[str, Any], rank: int) -> None:
        self.options: Mapping[str, Any] = spec["options"]
        self.size, timeout_s = int(spec["ranks"]), float(spec["options"]["timeout_s"])
        self.mpi = _mpi_world() if rank < 0 else None
        self.rank = rank if self.mpi is None else int(self.mpi.Get_rank())
        if not 0 <= self.rank < self.size:
            raise CommBackendError(
                f"rank {self.rank} of {self.size}: is this mpirun that of another MPI than mpi4py's?"
            )
        self.threads = int(self.options["threads"]) or max(1, len(os.sched_getaffinity(0)) // self.size)
        torch.set_num_threads(self.threads)
        self.barrier = SpinBarrier(spec["barrier"], self.rank, self.size, timeout_s)
        self.device, backend = self._device(str(self.options["device"]))
        store = dist.FileStore(spec["store"], self.size)  # type: ignore[attr-defined]
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=timeout_s)
        )
        self._launcher = int(spec["launcher"])
        self._comms: dict[str, Communicator] = {}
        self.comm = self.communicator("bench")
        self._sink = open(spec["out"], "a", encoding="utf-8") if self.rank == 0 else None  # noqa: SIM115 - see close

    def _device(self, kind: str) -> tuple[torch.device, str]:
        """Where tensors live, and the backends of torch.distributed that serve it; gloo always carries the samples."""
        if kind == "cpu":
            self.stock, self.shared = "gloo", False
            return torch.device("cpu"), "gloo"
        count = torch.cuda.device_count()
        device = torch.device("cuda", self.rank % count)
        torch.cuda.set_device(device)
        self.shared = count < self.size  # NCCL refuses two ranks on one GPU
        self.stock = "" if self.shared else "nccl"
        return device, "gloo" if self.shared else "cpu:gloo,cuda:nccl"

    def communicator(self, name: str, **overrides: Any) -> Communicator:
        """Return the communicator ``name`` on the group of all ranks, made on first use. Collective."""
        if name not in self._comms:
            if self.options["transport"]:
                overrides["transport"] = self.options["transport"]
            if self.shared:
                overrides["allow_shared_device"] = True
            self._comms[name] = commbackend.init(dist.group.WORLD, device=self.device, name=name, **overrides)
        return self._comms[name]

    def release(self, name: str) -> None:
        """Close the communicator ``name``. Collective."""
        self._comms.pop(name).close()

    def write(self, **line: Any) -> None:
        """Write one JSON line; rank 0's counts."""
        if self._sink is not None:
            self._sink.write(json.dumps(line) + "\n")
            self._sink.flush()

    def close(self) -> None:
        """Leave. Collective."""
        for name in list(self._comms):
            self.release(name)
        if self._sink is not None:
            self._sink.close()
        dist.destroy_process_group()

    # -- clocks
    def settle(self) -> None:
        """Let the GPU finish, and all ranks come. Collective. Raises CommAborted if the launcher has been killed."""
        try:
            os.kill(self._launcher, 0)  # only asks; under mpirun it is not the parent
        except ProcessLookupError:
            raise CommAborted(f"rank {self.rank}: the launcher of this benchmark has ended") from None
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.barrier()

    def wall_us(self, call: Callable[[int], object], sets: Sequence[int]) -> float:
        """Time of one call, of ``len(sets)`` of them back to back, on this rank.

        On a GPU by events, behind a sleep that hides the launches.
        """
        if self.device.type != "cuda":
            return self.host_us(call, sets)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.settle()
        torch.cuda._sleep(_SLEEP_CYCLES * len(sets))
        begin.record()
        for i in sets:
            call(i)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / len(sets)

    def host_us(self, call: Callable[[int], object], sets: Sequence[int]) -> float:
        """Time the host spends in one call, of ``len(sets)`` of them back to back, on this rank."""
        self.settle()
        start = time.perf_counter_ns()
        for i in sets:
            call(i)
        return (time.perf_counter_ns() - start) / 1e3 / len(sets)

    def slowest(self, own: torch.Tensor) -> torch.Tensor:
        """Return the largest value over ranks, element by element. Collective."""
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        return own

    # -- measuring
    def verify(self, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return the largest error of every candidate over ranks. Collective.

        Raises:
            CommBackendError: A result is wrong, on all ranks.
        """
        errors: dict[str, float] = {}
        for c in candidates:
            if c.check is None:
                continue
            self.settle()
            error = torch.tensor([c.check(0)], dtype=torch.float64).nan_to_num(nan=torch.inf)
            errors[c.name] = found = float(self.slowest(error))
            if not found <= c.allowed:
                raise CommBackendError(f"{c.name} is wrong: error {found:.3g}, at most {c.allowed:.3g} is rounding")
        return errors

    def interleave(
        self, candidates: Sequence[Candidate], sets: int, rounds: Rounds, *, burst: int = 1, host: bool = False
    ) -> dict[str, dict[str, float]]:
        """Measure ``candidates`` in turns and return their summaries. Collective.

        Args:
            sets: Number of buffer sets to rotate over.
            burst: Calls of one candidate in its turn, back to back; 1 measures isolated calls.
            host: Measure the host's time also where calls run on a GPU.
        """
        clock = self.host_us if host else self.wall_us
        turn = 0

        def take(c: Candidate) -> float:
            nonlocal turn
            turn += burst
            return clock(c.call, [(turn + i) % sets for i in range(burst)])

        for c in candidates:
            for _ in range(rounds.warmup):
                take(c)
        start = time.perf_counter()
        for c in candidates:
            take(c)
        round_s = float(self.slowest(torch.tensor([time.perf_counter() - start], dtype=torch.float64)))
        count = min(max(int(rounds.seconds / max(round_s, 1e-9)), rounds.least), rounds.most)
        own = torch.zeros(len(candidates), count, dtype=torch.float64)
        order = list(range(len(candidates)))
        shuffle = random.Random(count).shuffle
        for r in range(count):
            shuffle(order)
            for j in order:
                own[j, r] = take(candidates[j])
        slowest = self.slowest(own)
        return {c.name: summary(row.tolist()) for c, row in zip(candidates, slowest, strict=True)}


def _mpi_world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD
