"""The record of a call: the text that all ranks must agree on, compared before a call returns."""

from __future__ import annotations

import hashlib

from ..plan import Knobs, Problem

__all__ = ["describe", "sizes"]


def describe(problem: Problem, knobs: Knobs) -> bytes:
    """The record of a call that all ranks must agree on: only what must be equal, in at most 480 bytes of text."""
    text = f"{sizes(problem, local=False)} by {knobs}"
    raw = text.encode()
    if len(raw) > 440:
        raw = raw[:400] + b"... #" + hashlib.blake2b(raw, digest_size=16).hexdigest().encode()
    return raw


# Dimensions that may differ between ranks: output features of gather ops, inner features of reduce ops.
_LOCAL_N = {"all_gather_matmul", "dgrad_reduce_scatter", "dgrad_all_reduce"}
_LOCAL_K = {"matmul_reduce_scatter", "matmul_all_reduce"}


def sizes(problem: Problem, *, local: bool = True) -> str:
    rows = f"{problem.rows[0]}x{problem.size}" if len(set(problem.rows)) == 1 else ",".join(map(str, problem.rows))
    dtype = problem.dtype + (f"->{problem.out_dtype} scales={problem.scales}" if problem.scales else "")
    parts = [problem.op, f"rows={rows}", f"dtype={dtype}"]
    if problem.blocks != 1:
        parts.append(f"blocks={problem.blocks}")
    if local or problem.op not in _LOCAL_K:
        parts.append(f"k={problem.k}")
    if problem.n:
        parts.append(
            f"n={','.join(map(str, problem.n))}" if local or problem.op not in _LOCAL_N else f"weights={len(problem.n)}"
        )
    if problem.bias and (local or problem.op not in _LOCAL_N):
        parts.append("bias")
    if problem.eps:
        parts.append(f"eps={problem.eps!r}")
    return " ".join([*parts, *problem.flags])
