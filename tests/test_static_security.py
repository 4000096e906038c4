"""Nothing that was received is ever executed: a static look at the whole package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "commbackend"
MODULES = sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py"))

#: Modules that turn bytes into objects or code.
BANNED_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "xmlrpc"}
BANNED_CALLS = re.compile(
    r"^(eval|exec|compile|__import__|yaml\.load|yaml\.unsafe_load|torch\.load|numpy\.load|np\.load|os\.system|os\.popen"
    r"|builtins\.(eval|exec|compile))$"
)
#: Collectives of torch.distributed and methods of mpi4py that pickle.
OBJECTS = re.compile(r"(all_gather|broadcast|gather|scatter|send|recv|reduce)_object|object_(list|collective)")
MPI_OBJECTS = {"send", "recv", "isend", "irecv", "bcast", "gather", "scatter", "allgather", "alltoall", "reduce",
               "allreduce", "sendrecv", "ssend", "bsend", "mrecv", "improbe", "mprobe"}  # fmt: skip
#: multiprocessing pickles between a process and its own children, over pipes that nobody else has.
OWN_PIPES = {"testing/ranks.py", "gemm/triton_ahead.py"}


def _found(text: str, module: str = "") -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {a.name.split(".")[0] for a in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.add(str(node.module).split(".")[0])
            if names & BANNED_MODULES or ("multiprocessing" in names and module not in OWN_PIPES):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            owner, _, name = called.rpartition(".")
            mpi = name in MPI_OBJECTS and re.search(r"(^|\.)(_?comm|_?world|COMM_WORLD)$", owner)
            shell = any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords)
            if BANNED_CALLS.match(called) or OBJECTS.search(called) or (mpi and _is_mpi(text)) or shell:
                yield f"line {node.lineno}: {ast.unparse(node)[:90]}"


def _is_mpi(text: str) -> bool:
    return "mpi4py" in text


@pytest.mark.parametrize("module", MODULES)
def test_nothing_received_is_executed(module: str) -> None:
    """F102."""
    found = list(_found((PACKAGE / module).read_text(), module))
    assert not found, f"{module}: {found}"


PLANTED = [
    "import pickle",
    "from marshal import loads",
    "import multiprocessing.connection",
    "eval(raw)",
    "exec(raw.decode())",
    "torch.load(path)",
    "dist.all_gather_object(out, x)",
    "torch.distributed.broadcast_object_list(x)",
    "from mpi4py import MPI\nself.comm.bcast(x)",
    "subprocess.run(raw, shell=True)",
    "yaml.load(raw)",
]


@pytest.mark.parametrize("code", PLANTED)
def test_planted_executions_are_found(code: str) -> None:
    assert list(_found(code)), code


def test_fixed_structs_pass() -> None:
    assert not list(_found("struct.unpack('<4sII', raw)\nself.comm.Iallgather(a, b)\nyaml.safe_load(x)\njson.loads(x)"))
