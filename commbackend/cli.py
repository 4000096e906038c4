"""The command ``commbackend``: finds the subcommand's module and hands it the rest of the line."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import CommBackendError

__all__ = ["commands", "main"]

# Subcommand -> (module here that has ``main(argv) -> int``, one line of help).
_COMMANDS = {
    "bench": ("bench", "measure collectives, GEMMs and overlap, with raw data"),
    "demo": ("demo", "train a small language model tensor-parallel and show what overlapped"),
    "doctor": (
        "commands.doctor",
        "say which transports and GEMM providers work here, and what the others lack",
    ),
    "plan": ("commands.plan", "print, check and draw the plan of an operation"),
    "trace": ("commands.trace", "record what overlapped in one call"),
    "tune": ("tuning.tune", "measure the candidates for a shape and keep the best"),
}


def commands() -> dict[str, tuple[str, str]]:
    """Return the subcommands of this installation: those whose module is there and has a ``main``. Imports none."""
    found = {}
    for name, (module, doc) in _COMMANDS.items():
        spec = importlib.util.find_spec(f".{module}", __package__)
        if spec is not None and spec.origin and "\ndef main(" in Path(spec.origin).read_text("utf-8"):
            found[name] = (module, doc)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; 2 for a request that cannot be honoured here."""
    args = list(sys.argv[1:] if argv is None else argv)
    known = commands()
    if not args or args[0] not in known:
        return _usage(args, known)
    try:
        module = importlib.import_module(f".{known[args[0]][0]}", __package__)
        return int(module.main(args[1:]) or 0)
    except CommBackendError as e:
        print(f"commbackend {args[0]}: {type(e).__name__}: {e}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as e:
        if e.name not in ("torch", "numpy"):
            raise
        print(f"commbackend {args[0]}: {e.name} is not installed (pip install {e.name})", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        sys.stderr.close()
        return 0


def _usage(args: list[str], known: dict[str, tuple[str, str]]) -> int:
    lines = [f"  {name:<8} {doc}" for name, (_, doc) in known.items()]
    parser = argparse.ArgumentParser(
        prog="commbackend",
        usage="commbackend [--help] [--version] COMMAND ...",
        description="Tensor-parallel matrix products that overlap with their communication.",
        epilog="commands:\n" + "\n".join(lines) + "\n\ncommbackend COMMAND --help says more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"commbackend {__version__}")
    if args and not args[0].startswith("-"):
        close = difflib.get_close_matches(args[0], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(known)}"
        parser.error(f"unknown command {args[0]!r}: {hint}")
    parser.parse_args(args)
    parser.print_help()
    return 0
