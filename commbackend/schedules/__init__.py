"""Planners: pure functions from the sizes of a call to its plan. No torch, no transport.

``program`` gives one rank's program alone (what runs); ``plan`` gives all ranks' (what ``check`` proves and pictures
show). ``candidates`` and ``default_knobs`` say what may be chosen and what is chosen when nothing better is known.
"""

from __future__ import annotations

from .catalog import KERNEL_NBYTES, OPS, SCHEDULES, foldable, malformed, needs_free_queues, plan, program, supports
from .choice import candidates, default_knobs, reserve_nbytes

__all__ = [
    "KERNEL_NBYTES",
    "OPS",
    "SCHEDULES",
    "candidates",
    "default_knobs",
    "foldable",
    "malformed",
    "needs_free_queues",
    "plan",
    "program",
    "reserve_nbytes",
    "supports",
]
