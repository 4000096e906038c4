"""Every wait ends: a static look at all loops and all blocking calls of the package, on the host and on the device.

A loop passes if what ends it is bounded: its condition or body looks at a deadline, or it consumes something finite. A
call that can block passes if it gets a time limit. Everything else must be named below with the reason why it ends.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "commbackend"

#: Names that say a loop looks at the time.
TIME = re.compile(
    r"deadline|until\b|\bleft\b|left_s|timeout|limit_s|monotonic|perf_counter|expire|patience|budget|soon\b"
)
#: What a condition consumes: it shrinks at every turn.
CONSUMES = re.compile(r"\.(pop|popleft|popitem|removeprefix)\(|\bnext\(|readline\(|\.recv\(4096\)")
#: Blocking calls -> the position of their time limit among the positional arguments (-1: only a keyword).
BLOCKING = {
    "join": 0, "wait": 0, "acquire": 0, "result": 0, "communicate": 1, "wait_for": 1,
    "run": -1, "check_call": -1, "check_output": -1, "waitpid": -1, "recv_bytes": -1,
}  # fmt: skip
_FINITE = "it goes through something finite"
_KILLED = "the process has just been killed"
_GLOO = "work of torch.distributed, which ends by the timeout of its process group"
#: (module, function) -> why what was found there ends.
ALLOWED = {
    ("bench/__init__.py", "_end"): _KILLED,
    ("bench/cases.py", "_collectives"): "sizes double",
    ("check/__init__.py", "_Order._gemm"): _FINITE,
    ("check/symmetric.py", "_Proof._gemm"): _FINITE,
    ("tuning/cost.py", "Timeline.critical_path"): _FINITE,
    ("tuning/cost.py", "_Run.run"): "every event is taken off the heap once",
    ("gpu/watch.py", "Watch.prove"): "the timer has been cancelled",
    ("gpu/watch.py", "Watch.read_bytes"): _FINITE,
    ("gpu/watch.py", "Watch._run"): "a daemon thread that sleeps on its bell, until its owner stops or is gone",
    ("demo/launch.py", "launch"): _KILLED,
    ("host/link.py", "HostLink._watch"): "a daemon thread that sleeps in a selector, until close says so",
    ("host/link.py", "HostLink._hear"): "it reads what has arrived, without blocking",
    ("host/memory.py", "_limit"): "the folder gets shorter",
    ("integrations/c10d.py", "CommProcessGroup._submit"): _GLOO,
    ("integrations/c10d.py", "_CollectiveWork.synchronize"): _GLOO,
    ("integrations/c10d.py", "_wait"): _GLOO,
    ("integrations/c10d.py", "_join"): "jobs of a worker that ends by the deadlines of their calls",
    ("integrations/dtensor.py", "_Arrived.forward"): _GLOO,
    ("execution/lanes.py", "HostLanes.run"): "a lock that was made in the line before",
    ("execution/lanes.py", "HostLanes._queue"): _FINITE,
    ("execution/lanes.py", "_work"): "a daemon thread that sleeps until its communicator closes or gives it a job",
    ("host/mpilink.py", "MpiLink._serve"): "a daemon thread that sleeps until close says so",
    ("host/mpilink.py", "MpiLink._arrived"): "it reads what has arrived, without blocking",
    ("names.py", "register"): "it looks for a free number in a finite table",
    ("host/netlink.py", "NetControl._watch"): "a daemon thread that sleeps until close says so",
    ("execution/streams.py", "StreamLanes._lanes"): _FINITE,
    ("testing/gemm_suite.py", "GemmSuite._rises"): "a test of the caller's, ended by its runner",
    ("testing/promises_faults.py", "a_late_peer_is_named_early"): "a timer of 0.6 s",
    ("testing/promises_faults.py", "abort_does_not_block"): "abort does not block; the runner ends what hangs",
    ("testing/promises_moving.py", "lanes_do_not_disturb_each_other"): "its waits have deadlines",
    ("testing/ranks.py", "run_ranks"): _KILLED,
    ("testing/soak/__init__.py", "_at_once"): "worlds that end by their own deadlines",
    ("transports/local.py", "LocalTransport._flush"): "every turn delivers one piece of mail",
    ("transports/mpi.py", "MpiTransport._note"): _FINITE,
    ("transports/torch_dist.py", "NcclTransport._enqueue"): "it waits on a stream, not on the host",
    ("tuning/tune.py", "_start"): "the command itself, in the foreground",
}
#: Loops of kernels, in CUDA C and PTX: each polls a word and must look at the clock.
DEVICE_LOOP, DEVICE_CLOCK = re.compile(r"while \(true\)|bra POLL"), re.compile(r"globaltimer|now_ns\(\)|clock64")


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every statement's function: (qualified name, node) for all nodes."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{node.name}" if prefix else node.name
        yield name, node
        yield from _functions(node, name)


def _bounded_loop(loop: ast.While) -> bool:
    condition, body = ast.unparse(loop.test), "\n".join(ast.unparse(s) for s in loop.body)
    if TIME.search(condition) or CONSUMES.search(condition) or CONSUMES.search(body):
        return True
    calls = any(isinstance(n, ast.Call) for n in ast.walk(loop.test))
    if not isinstance(loop.test, ast.Constant) and not calls:
        changed = set()
        for n in ast.walk(loop):
            if isinstance(n, ast.Assign):
                changed |= {ast.unparse(t) for t in n.targets}
            elif isinstance(n, ast.AugAssign | ast.NamedExpr):
                changed.add(ast.unparse(n.target))
        if changed & {ast.unparse(n) for n in ast.walk(loop.test) if isinstance(n, ast.Name | ast.Attribute)}:
            return True  # a counter
    leaves = any(isinstance(n, ast.Raise | ast.Return | ast.Break) for n in ast.walk(loop))
    return leaves and bool(TIME.search(body))


def _blocks(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("flock", "lockf"):
        return "LOCK_NB" not in ast.unparse(call)
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in BLOCKING:
        return False
    name, owner, place = call.func.attr, ast.unparse(call.func.value), BLOCKING[call.func.attr]
    if name in ("run", "check_call", "check_output") and owner != "subprocess":
        return False
    if (name == "join" and isinstance(call.func.value, ast.Constant)) or owner.endswith("path"):
        return False  # of strings
    given = {k.arg for k in call.keywords}
    return not given & {"timeout", "timeout_s", "blocking", "deadline"} and not 0 <= place < len(call.args)


def _found(text: str) -> Iterator[tuple[str, str]]:
    """(function, code) of every loop and call that nothing bounds."""
    for where, node in _functions(ast.parse(text)):
        if isinstance(node, ast.While) and not _bounded_loop(node):
            yield where, f"while {ast.unparse(node.test)}"
        elif isinstance(node, ast.Call) and _blocks(node):
            yield where, ast.unparse(node)[:90]
        elif isinstance(node, ast.Assign | ast.Return | ast.Expr):
            texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            for code in re.split(r"\n(?=extern )", "".join(texts)):
                if DEVICE_LOOP.search(code) and not DEVICE_CLOCK.search(code):
                    yield where, f"device loop: {code.strip().splitlines()[0]}"


MODULES = sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_no_wait_without_a_deadline(module: str) -> None:
    """F079."""
    found = [(f, code) for f, code in _found((PACKAGE / module).read_text()) if (module, f) not in ALLOWED]
    assert not found, f"{module}: nothing says when these end: {found}"


def test_exceptions_name_what_exists() -> None:
    assert {module for module, _ in ALLOWED} <= set(MODULES)


PLANTED = [
    "while True:\n    time.sleep(1)",
    "while not done():\n    pass",
    "while flag.value == 0:\n    os.sched_yield()",
    "thread.join()",
    "event.wait()",
    "lock.acquire()",
    "queue_.get()\nfuture.result()",
    "subprocess.run(['x'])",
    "process.communicate(b'')",
    "fcntl.flock(fd, fcntl.LOCK_EX)",
    "K = '''extern \"C\" void f() { while (true) { if (*slot) break; } }'''",
    "K = '''POLL: ld.acquire x; @p bra POLL;'''",
]
HARMLESS = [
    "while time.monotonic() < deadline:\n    pass",
    "while todo:\n    todo.pop()",
    "while i < n:\n    i += 1",
    "while True:\n    if time.monotonic() > deadline:\n        raise TimeoutError\n    poll()",
    "thread.join(5.0)\nevent.wait(timeout=1)\nlock.acquire(timeout=2)\nlock.acquire(blocking=False)",
    "fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "', '.join(names)\nos.path.join(a, b)\nsubprocess.run(['x'], timeout=3)",
    "K = '''while (true) { if (now_ns() > end) break; }'''",
]


@pytest.mark.parametrize("code", PLANTED)
def test_planted_waits_are_found(code: str) -> None:
    assert list(_found(code)), code


@pytest.mark.parametrize("code", HARMLESS)
def test_bounded_waits_pass(code: str) -> None:
    assert not list(_found(code)), code
