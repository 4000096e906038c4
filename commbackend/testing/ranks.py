"""Ranks to run tests on: fresh processes forked by a server that has torch loaded, or threads of this process."""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from ..group import Group

__all__ = ["RankError", "run_ranks", "run_threads"]

# After one rank has failed, the others get this long to report what they saw.
_GRACE_S = 5.0


class RankError(AssertionError):
    """Some rank failed, hung or died.

    Attributes:
        errors: Per failed rank its traceback, or how it ended.
    """

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"--- rank {r}\n{e}" for r, e in sorted(errors.items())))
        self.errors = errors


@functools.cache
def _server() -> Any:
    """The context whose server forks ranks; it has the slow imports behind it, and ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch.distributed",
            "pytest",
            "commbackend.ops",
            "commbackend.nn",
            "commbackend.testing.harness",
            "commbackend.transports.shm",
            "commbackend.transports.torch_dist",
            "commbackend.gemm.torch_mm",
        ]
    )
    return context


def run_ranks(
    fn: Callable[..., Any], size: int, *args: Any, timeout_s: float = 30.0, expect_death: Sequence[int] = ()
) -> list[Any]:
    """Run ``fn(rank, group, *args)`` in ``size`` fresh processes and return its results by rank.

    Args:
        fn: A function at the top level of an importable module. ``group`` is a ``Group`` of these processes.
        timeout_s: Deadline of everything together, and of the group's steps. No process outlives the call.
        expect_death: Ranks that must end without a result; theirs is None.
    Raises:
        RankError: With all tracebacks; with the stacks of all threads for ranks that hung.
    """
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="commbackend-ranks-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(size):
                ours, theirs = connection.Pipe(duplex=False)
                pipes.append(ours)
                command = (theirs, fn, rank, size, folder, timeout_s, args)
                process = _server().Process(target=_child, args=command, daemon=True, name=f"rank-{rank}")
                process.start()
                theirs.close()
                processes.append(process)
            outcomes = _collect(pipes, deadline)
            for process in processes:
                process.join(max(deadline - time.monotonic(), 0.2) if len(outcomes) == size else 0)
            return _judge(outcomes, processes, folder, expect_death)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Any], deadline: float) -> dict[int, tuple[bool, Any] | None]:
    """What every rank sent: (succeeded, result or traceback), or None if it ended without a word."""
    outcomes: dict[int, tuple[bool, Any] | None] = {}
    while len(outcomes) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        for ready in connection.wait([p for r, p in enumerate(pipes) if r not in outcomes], left):
            rank = pipes.index(ready)
            try:
                outcomes[rank] = pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                outcomes[rank] = None
                continue
            if not outcomes[rank][0]:  # type: ignore[index]
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return outcomes


def _judge(outcomes: dict[int, Any], processes: list[Any], folder: str, expect_death: Sequence[int]) -> list[Any]:
    errors: dict[int, str] = {}
    for rank, process in enumerate(processes):
        outcome = outcomes.get(rank, "hung")
        if outcome == "hung":
            errors[rank] = "did not end in time\n" + _read(os.path.join(folder, f"stack-{rank}"))
        elif outcome is None and rank not in expect_death:
            errors[rank] = f"ended without a result, exit code {process.exitcode}"
        elif outcome is not None and rank in expect_death:
            errors[rank] = f"was to die, but returned {outcome[1]!r}"
        elif outcome is not None and not outcome[0]:
            errors[rank] = outcome[1]
    if errors:
        raise RankError(errors)
    return [outcome[1] if outcome else None for _, outcome in sorted(outcomes.items())]


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return "(it had not started)"


def _child(pipe: Any, fn: Callable[..., Any], rank: int, size: int, folder: str, timeout_s: float, args: Any) -> None:
    from torch import set_num_threads
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    set_num_threads(1)
    with open(os.path.join(folder, f"stack-{rank}"), "w") as stacks:
        # A little before the parent's deadline, so that the parent finds the stacks of what hangs.
        faulthandler.dump_traceback_later(max(timeout_s - 1.0, timeout_s * 0.8), file=stacks)
        try:
            group = Group.from_store(FileStore(os.path.join(folder, "store")), rank, size, timeout_s=timeout_s)
            outcome = True, fn(rank, group, *args)
        except BaseException:
            outcome = False, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        try:
            pipe.send(outcome)
        except Exception:
            pipe.send((False, traceback.format_exc()))


def run_threads(fn: Callable[..., Any], size: int, *args: Any, timeout_s: float = 30.0) -> list[Any]:
    """As ``run_ranks``, in threads of this process: for transports of scope "process".

    A thread that hangs cannot be killed: it is reported with its stack and left behind.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    store, results, errors = HashStore(), [None] * size, {}

    def run(rank: int) -> None:
        try:
            results[rank] = fn(rank, Group.from_store(store, rank, size, timeout_s=timeout_s), *args)
        except BaseException:
            errors[rank] = traceback.format_exc()

    threads = [threading.Thread(target=run, args=(r,), name=f"rank-{r}", daemon=True) for r in range(size)]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(min(deadline, time.monotonic() + _GRACE_S if errors else deadline) - time.monotonic(), 0.0))
    frames = sys._current_frames()
    for rank, thread in enumerate(threads):
        if thread.is_alive() and thread.ident in frames:
            errors[rank] = "did not end in time\n" + "".join(traceback.format_stack(frames[thread.ident]))
    if errors:
        raise RankError(errors)
    return results
