"""The words of benchmark files: kinds, ops, names of what is measured, models. Standard library only."""

from __future__ import annotations

__all__ = [
    "CUBLAS",
    "FILES",
    "FORMAT",
    "FUSED",
    "GEMM",
    "KINDS",
    "LONE",
    "MEMCPY",
    "MODELS",
    "MODES",
    "MOVE",
    "MPI",
    "NEW",
    "OPS",
    "OURS",
    "PLAIN",
    "REPLAY",
    "RIVALS",
    "SCALED",
    "SEQUENCE",
    "SEQUENCE_NEW",
    "STOCKS",
    "widths",
]

#: First entry of every file; another number means that old readers would misread it.
FORMAT = "commbackend-bench-1"
KINDS = ("collectives", "overlap", "host", "memory")
#: Kinds of files with samples; a rank is started for those of ``KINDS`` alone.
FILES = (*KINDS, "gemm")
#: ``graph``: replays of captured calls, on GPUs.
MODES = ("isolated", "back-to-back", "graph")

PLAIN = ("all_gather", "reduce_scatter", "all_reduce")
FUSED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
#: What every kind can measure.
OPS = {"collectives": PLAIN, "overlap": FUSED, "host": ("barrier", *PLAIN, *FUSED), "memory": FUSED}

#: Ours into a given tensor, and the functions that return a new one; the same for one after the other.
OURS, NEW = "commbackend", "commbackend, new tensor"
SEQUENCE, SEQUENCE_NEW = "sequence", "sequence, new tensor"
ASYNC_TP, ASYNC_TP_NATIVE, CUBLASMP = "async-TP", "async-TP native", "cuBLASMp"
RIVALS = (ASYNC_TP, ASYNC_TP_NATIVE, CUBLASMP)
GEMM, MOVE, MEMCPY, MPI = "GEMM", "communication", "memcpy", "Open MPI"
#: Whose products those of ``bench gemm`` are compared with.
CUBLAS, SCALED = "cuBLAS", "scaled_mm"
#: torch.distributed's own collectives, by their backend.
STOCKS = ("gloo", "nccl")
#: NCCL where it refuses the ranks (they share a GPU): each rank in a group of its own. And replays of a captured call.
LONE, REPLAY = "nccl, one rank", "commbackend, replayed"

#: Hidden size, features of the first product (gate and up together) and of the second, for the whole model.
MODELS = {"8B": (4096, 28672, 14336), "70B": (8192, 57344, 28672), "175B": (12288, 98304, 49152)}


def widths(model: str) -> tuple[int, int, int]:
    """Return (hidden, first product's features, second product's features); "h1024" is hidden 1024 with 4096 features.

    Raises ValueError if the model is unknown.
    """
    if model in MODELS:
        return MODELS[model]
    if model[:1] == "h" and model[1:].isdecimal() and int(model[1:]) > 0:
        hidden = int(model[1:])
        return hidden, 4 * hidden, 4 * hidden
    raise ValueError(f"{model!r}: one of {', '.join(MODELS)}, or hN for hidden size N")
