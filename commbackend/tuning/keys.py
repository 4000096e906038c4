"""Under which name choices for a call are kept: equal on all ranks, and equal for calls of nearly as many rows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..plan import Problem

__all__ = ["Key", "bucket", "key_of", "typical"]

#: Operations whose output features may differ between ranks, and those whose inner dimension may.
_LOCAL_N = ("all_gather_matmul", "dgrad_reduce_scatter", "dgrad_all_reduce")
_LOCAL_K = ("matmul_reduce_scatter", "matmul_all_reduce")


@dataclass(frozen=True, slots=True)
class Key:
    """``stem`` says which calls; ``rows`` is the bucket of rows of the longest shard."""

    stem: str
    rows: int

    @property
    def text(self) -> str:
        """The key as it stands in files."""
        return f"{self.stem} rows={self.rows}"

    @staticmethod
    def parse(text: str) -> Key:
        """Read ``text``. Raises ValueError if it is none."""
        stem, found, rows = str(text).rpartition(" rows=")
        if not found or not rows.isdecimal():
            raise ValueError(f"key {text!r}")
        return Key(stem, int(rows))


def bucket(rows: int) -> int:
    """Return the largest of 1, 2, ... 8, 10, 12, 14, 16, 20, ... (four to a factor of two) that ``rows`` reaches."""
    shift = max(rows.bit_length() - 3, 0)
    return rows >> shift << shift


def key_of(problem: Problem) -> Key:
    """Return the key of ``problem``: what may differ between ranks takes no part in it."""
    p = problem
    cols = ",".join(map(str, p.n)) if p.op in _LOCAL_K else str(p.k)
    parts = [p.op, f"ranks={p.size}", f"cols={cols}", f"dtype={p.dtype}"]
    if p.out_dtype or p.scales:
        parts.append(f"out={p.out_dtype} scales={p.scales}")
    if p.blocks != 1:
        parts.append(f"blocks={p.blocks}")
    if p.op in _LOCAL_N:
        parts.append(f"weights={len(p.n)}")
    return Key(" ".join([*parts, *p.flags]), bucket(max(p.rows, default=0)))


def typical(problem: Problem) -> Problem:
    """Return the problem that stands for all of its bucket: equal shards of the bucket's rows."""
    rows = (bucket(max(problem.rows, default=0)),) * problem.size
    return problem if rows == problem.rows else dataclasses.replace(problem, rows=rows)
