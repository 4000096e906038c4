"""Every exception commbackend raises on purpose: one root, few children.

Each child also derives from the built-in exception a caller would expect, so that ``except TimeoutError`` or
``except ValueError`` keep working. Native errors (OSError, driver codes, MPI errors) are mapped to these in one place
a transport and chained with ``raise ... from``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = [
    "FAULT_NBYTES",
    "CollectiveMismatch",
    "CommAborted",
    "CommBackendError",
    "CommTimeout",
    "ConcurrentUse",
    "ConfigError",
    "HeapExhausted",
    "PeerDied",
    "PlanError",
    "ShapeError",
    "Unavailable",
    "Unsupported",
    "UnsupportedDtype",
    "pack_fault",
    "unpack_fault",
]


class CommBackendError(Exception):
    """Root of all errors raised by commbackend."""


class Unavailable(CommBackendError):
    """A transport or GEMM provider cannot be used here.

    Attributes:
        reason: What is missing, with the value found and the value needed.
        hint: What would make it usable, or "".
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(f"{reason} ({hint})" if hint else reason)
        self.reason = reason
        self.hint = hint


class ConfigError(CommBackendError, ValueError):
    """An argument or environment variable has a value that cannot be honoured."""


class Unsupported(CommBackendError, NotImplementedError):
    """The request is well formed, but no implementation here can serve it; the message says what to use instead."""


class UnsupportedDtype(Unsupported, TypeError):
    """The element type cannot be summed or multiplied here; raised before a byte moves."""


class ShapeError(CommBackendError, ValueError):
    """A tensor's shape, layout or dtype does not fit the call; raised before a byte moves."""


class PlanError(CommBackendError):
    """A plan breaks one of the rules of ``check``; always a bug of a planner, never of the user's data."""


class ConcurrentUse(CommBackendError, RuntimeError):
    """Two threads or streams used one communicator at the same time, so that its issue order is not defined."""


class HeapExhausted(CommBackendError, MemoryError):
    """The memory a call needs cannot be had; the message names needed and available bytes."""


class _FaultError(CommBackendError):
    """What a fault during a call has in common.

    Attributes:
        rank: The peer the fault is about, or -1 when it is not about one peer.
        op: Name of the call that was running, or "".
        seq: Sequence number of that call on its communicator, or -1.
        explained: Whether the message says already what the flight record knows, here or at the rank it came from.
    """

    def __init__(self, message: str, *, rank: int = -1, op: str = "", seq: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
        self.op = op
        self.seq = seq
        self.explained = False


class CommTimeout(_FaultError, TimeoutError):
    """A wait reached its deadline.

    Attributes:
        waiting_for: The ranks that had not done what was waited for.
        wanted: The slot value waited for, or -1.
        seen: The slot value found at the deadline, or -1.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        op: str = "",
        seq: int = -1,
        waiting_for: Sequence[int] = (),
        wanted: int = -1,
        seen: int = -1,
    ) -> None:
        super().__init__(message, rank=rank, op=op, seq=seq)
        self.waiting_for = tuple(waiting_for) or ((rank,) if rank >= 0 else ())
        self.wanted = wanted
        self.seen = seen


class CollectiveMismatch(_FaultError, ValueError):
    """Ranks of one communicator disagree on what the call is; raised on every rank, naming both values."""


class PeerDied(_FaultError, ConnectionError):
    """A peer's process ended while this rank was using the communicator."""


class CommAborted(_FaultError):
    """The communicator was aborted, here or by a peer; the message carries the first cause."""


# The wire form of a fault: a fixed struct, the late ranks, and text that is only shown. Kinds are numbered for good.
_KINDS: tuple[type[_FaultError], ...] = (CommAborted, CommTimeout, PeerDied, CollectiveMismatch)
_FAULT = struct.Struct("<4sBxHiqqqH")
_RANK = struct.Struct("<i")
_MAGIC = b"cbF2"
_MOST_LATE = 64
#: Bytes of a packed fault, always.
FAULT_NBYTES = 2048


def pack_fault(fault: CommBackendError) -> bytes:
    """Return ``fault`` as FAULT_NBYTES bytes. Errors of other kinds travel as CommAborted with their text."""
    kind = next((i for i, c in enumerate(_KINDS) if type(fault) is c), 0)
    rank, seq = int(getattr(fault, "rank", -1)), int(getattr(fault, "seq", -1))
    wanted, seen = int(getattr(fault, "wanted", -1)), int(getattr(fault, "seen", -1))
    late = b"".join(_RANK.pack(r) for r in getattr(fault, "waiting_for", ())[:_MOST_LATE])
    text = str(fault) if kind or isinstance(fault, CommAborted) else f"{type(fault).__name__}: {fault}"
    raw = text.encode("utf-8", "replace")[: FAULT_NBYTES - _FAULT.size - len(late)]
    head = _FAULT.pack(_MAGIC, kind, len(late) // _RANK.size, rank, seq, wanted, seen, len(raw))
    return (head + late + raw).ljust(FAULT_NBYTES, b"\0")


def unpack_fault(raw: bytes, *, op: str = "") -> CommBackendError | None:
    """Return the fault that ``pack_fault`` packed, or None if ``raw`` is not one (empty, torn or hostile bytes)."""
    if len(raw) < FAULT_NBYTES or raw[:4] != _MAGIC:
        return None
    _, kind, count, rank, seq, wanted, seen, length = _FAULT.unpack_from(raw)
    start = _FAULT.size + count * _RANK.size
    if kind >= len(_KINDS) or count > _MOST_LATE or start + length > FAULT_NBYTES:
        return None
    text = raw[start : start + length].decode("utf-8", "replace")
    late = [r for (r,) in _RANK.iter_unpack(raw[_FAULT.size : start])]
    fault: _FaultError
    if _KINDS[kind] is CommTimeout:
        fault = CommTimeout(text, rank=rank, op=op, seq=seq, waiting_for=late, wanted=wanted, seen=seen)
    else:
        fault = _KINDS[kind](text, rank=rank, op=op, seq=seq)
    fault.explained = True
    return fault
