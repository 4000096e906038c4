"""One rank of a benchmark, started by ``bench``: measures what ``cases`` lists, writes JSON lines."""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CommBackendError
from .cases import cases
from .world import World

__all__ = ["main"]


def _head(world: World) -> dict[str, Any]:
    """What only a rank knows about the run."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if world.stock != "gloo" else []
    return {
        "event": "head",
        "ranks": world.size,
        "threads": world.threads,
        "transport": world.comm.transport,
        "device": world.device.type,
        "gpus": gpus,
        "mpi": _mpi_version() if world.mpi is not None else "",
        "choice": world.comm.explain(),
    }


def _mpi_version() -> str:
    from mpi4py import MPI

    return str(MPI.Get_library_version()).split("\0")[0].partition(",")[0].strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, as one rank. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m commbackend.bench.worker", description=__doc__)
    parser.add_argument("spec", help="JSON file that the launcher wrote")
    parser.add_argument("--rank", type=int, default=-1, help="rank of this process; default: MPI's")
    options = parser.parse_args(argv)
    spec = json.loads(Path(options.spec).read_text(encoding="utf-8"))
    # Shortly before the launcher ends this process for being late, say where it stands.
    faulthandler.dump_traceback_later(0.95 * float(spec["options"]["timeout_s"]))
    try:
        world = World(spec, options.rank)
        world.write(**_head(world))
        for case in cases(world, spec["kind"]):
            world.write(event="case", **case)
        world.close()
    except CommBackendError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
