"""Compile many kernels at once: Triton's cache on disk is filled by processes side by side, so that ``prepare`` then
only loads.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from .triton_launch import compile_offline
from .triton_tile import Variant, specify

__all__ = ["compile_ahead"]


def compile_ahead(variants: Sequence[Variant], capability: int, *, processes: int = 0) -> int:
    """Compile ``variants`` for ``capability`` (90 for Hopper) into Triton's cache. Returns how many there were.

    Args:
        processes: How many at a time; 0: one a core, at most 16.
    """
    workers = min(len(variants), processes or min(len(os.sched_getaffinity(0)), 16))
    if workers:
        # Not forked: the caller may have started CUDA.
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_compile, variants, [capability] * len(variants)))
    return len(variants)


def _compile(v: Variant, capability: int) -> None:
    kernel, types, constants, aligned = specify(v)
    compile_offline(kernel, types, constants, aligned, capability, warps=v.config.warps, stages=v.config.stages)
