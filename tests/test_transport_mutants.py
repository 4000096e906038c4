"""The suite's own proof: every hook of a transport, replaced by a no-op, breaks a promise that is named here."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from commbackend.contract import Collective, OneSided, SymBuffer, Transport
from commbackend.testing import RankError, TransportSuite, run_threads
from commbackend.testing.harness import promises
from commbackend.transports.local import LocalTransport
from commbackend.transports.shm import ShmTransport

# Hook -> the promise that its absence breaks.
ONE_SIDED = {
    "_put": "put_arrives_before_its_slot",
    "_get": "get_reads_the_peer",
    "_signal": "a_wait_accepts_greater_values",
    "_wait": "soak_of_random_interleavings",
    "_barrier": "barrier_holds_everybody",
    "_post": "records_can_be_read",
    "_record": "records_can_be_read",
    "_tell": "abort_ends_a_wait",
    "_release": "abort_ends_the_own_allocation",
    "_close": "close_is_collective_and_idempotent",
    "_alloc": "put_arrives_before_its_slot",
    "_alloc_slots": "put_arrives_before_its_slot",
    "_same": "bad_arguments_move_nothing",
    "_peer": "bad_arguments_move_nothing",
    "_ready": "a_wait_ends_by_its_deadline",
}
COLLECTIVE = {
    "_all_gather": "all_gather_of_uneven_counts",
    "_all_to_all": "all_to_all_of_uneven_counts",
    "_reduce_scatter": "reductions_sum",
    "_all_reduce": "reductions_sum",
    "_counts": "lists_have_one_tensor_a_rank",
}
#: Hooks that only stream-ordered transports have; their no-op is the base class's refusal.
STREAMS = {"_enqueue_wait"}


def _nothing(*_args: Any, **_kw: Any) -> None:
    return None


def _true(*_args: Any, **_kw: Any) -> bool:
    return True


def _dirty(self: Any, nbytes: int) -> SymBuffer:
    buffer = super(type(self), self)._alloc(nbytes)
    buffer.local.fill_(0xFF)
    return buffer


def _late_bytes(self: Any, dst: Any, src: torch.Tensor, peer: int, slot: Any, stream: Any) -> None:
    """A put whose slot rises before its bytes are there."""
    if slot is not None:
        self._signal(peer, slot, stream)
        time.sleep(0.01)
    super(type(self), self)._put(dst, src, peer, None, stream)


def _mutants(base: type[Transport], hooks: dict[str, str]) -> dict[str, str]:
    """Make a class a hook, importable from this module; return class name -> promise."""
    found = {}
    for hook, promise in hooks.items():
        name = f"{base.__name__}Without{hook}"
        globals()[name] = type(name, (base,), {hook: _true if hook == "_wait" else _nothing})
        found[name] = promise
    for label, hook, fn, promise in (
        ("Dirty", "_alloc", _dirty, "fresh_memory_is_zero"),
        ("Hasty", "_put", _late_bytes, "put_arrives_before_its_slot"),
    ):
        name = f"{base.__name__}{label}"
        globals()[name] = type(name, (base,), {hook: fn})
        found[name] = promise
    return found


SHM = _mutants(ShmTransport, ONE_SIDED)
SHM["ShmTransportDeaf"] = "a_death_is_noticed"
LOCAL = _mutants(LocalTransport, {**ONE_SIDED, **COLLECTIVE})


class ShmTransportDeaf(ShmTransport):
    """Hears of no death and no fault of its peers."""

    _hear = _nothing


def test_every_hook_has_a_mutant() -> None:
    hooks = {n for role in (Transport, OneSided, Collective) for n in vars(role) if n[0] == "_" and n[1] != "_"}
    assert hooks - {"_abc_impl"} == set(ONE_SIDED) | set(COLLECTIVE) | STREAMS


def _breaks(suite: type[TransportSuite], promise: str) -> None:
    with pytest.raises(RankError):
        suite().keep(next(p for p in promises() if p.name == promise))


@pytest.mark.parametrize("mutant", SHM)
def test_shm_mutant_is_caught(mutant: str) -> None:
    class Suite(TransportSuite):
        transport = f"{__name__}:{mutant}"
        patience_s = 1.0

    _breaks(Suite, SHM[mutant])


@pytest.mark.parametrize("mutant", LOCAL)
def test_local_mutant_is_caught(mutant: str) -> None:
    class Suite(TransportSuite):
        transport = f"{__name__}:{mutant}"
        runner = staticmethod(run_threads)
        patience_s = 1.0

    _breaks(Suite, LOCAL[mutant])
