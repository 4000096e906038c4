"""What keeps the package taken apart: who imports whom, who reads the environment, what is never done with bytes."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "commbackend"
#: Packages that files may import when they are loaded, beside the standard library, torch and numpy.
OWN_LIBRARY = {
    "gemm/triton_*": {"triton"},
    "testing/*": {"pytest"},
    # An integration is imported by those who use its framework.
    "integrations/megatron*": {"megatron"},
    "integrations/transformers": {"transformers"},
    "integrations/deepspeed_": {"deepspeed"},
}


def _modules() -> dict[str, ast.Module]:
    """Module name with slashes -> its syntax tree."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {f.relative_to(PACKAGE).with_suffix("").as_posix(): ast.parse(f.read_text(), str(f)) for f in files}


MODULES = _modules()


def _runtime_nodes(tree: ast.AST, *, top_only: bool = False) -> Iterator[ast.AST]:
    """Walk ``tree`` without what runs for type checkers alone, and (``top_only``) without function bodies."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from _runtime_nodes(other, top_only=top_only)
            continue
        if top_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield node
        yield from _runtime_nodes(node, top_only=top_only)


def _resolve(name: str) -> str | None:
    """Return the module that a dotted path below the package names: itself, or the one it is an attribute of."""
    for candidate in (name, f"{name}/__init__" if name else "__init__"):
        if candidate in MODULES:
            return candidate
    parent = name.rpartition("/")[0]
    return _resolve(parent) if name else None


def _imports(module: str, tree: ast.AST, *, top_only: bool = False) -> tuple[set[str], set[str]]:
    """Return (modules of the package, top-level names of other packages) that ``module`` imports when it runs."""
    package = module.split("/")[:-1]
    inside, outside = set(), set()
    for node in _runtime_nodes(tree, top_only=top_only):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)] + (node.module.split(".") if node.module else [])
            names = ["commbackend." + ".".join([*base, a.name]) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            if top == "commbackend":
                found = _resolve(rest.replace(".", "/"))
                inside |= {found} if found not in (None, module, "__init__") else set()
            elif top not in sys.stdlib_module_names:
                outside.add(top)
    return inside, outside


def _table() -> list[tuple[list[str], list[str]]]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"## Who may import whom.*?```\n(.*?)```", text, re.S)
    assert block is not None, "docs/architecture.md has lost its table"
    rules = []
    for line in block.group(1).strip().splitlines():
        left, right = line.split("->")
        rules.append(([p.strip() for p in left.split(",")], [p.strip() for p in right.split(",")]))
    return rules


RULES = _table()


def _matches(module: str, patterns: list[str]) -> bool:
    names = {module, module.removesuffix("/__init__")}
    return any(fnmatchcase(n, p) for n in names for p in patterns) or any(
        p.endswith("/*") and p[:-2] in names for p in patterns
    )


def _allowed(module: str) -> list[str]:
    for left, right in RULES:
        if _matches(module, left):
            return right
    return RULES[-1][1]


def test_the_table_names_what_exists() -> None:
    assert RULES[-1] == (["everything else"], ["everything"])
    planned = {"cost"}
    for left, right in RULES[:-1]:
        for pattern in left + right:
            known = pattern in planned | {"stdlib"} or any(_matches(m, [pattern]) for m in MODULES)
            assert known, f"docs/architecture.md names {pattern}, which matches no module"


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_table(module: str) -> None:
    inside, outside = _imports(module, MODULES[module])
    right = _allowed(module)
    if right != ["everything"]:
        wrong = [m for m in inside if not _matches(m, right)]
        assert not wrong, f"{module} imports {wrong}; docs/architecture.md allows {right}"
    folder = module.split("/")[0] if "/" in module else ""
    for other in inside:
        home = other.split("/")[0]
        if home in ("transports", "gemm") and not other.endswith("__init__"):
            assert home == folder, f"{module} imports {other}: only registry names implementations"
            assert home != "transports", f"{module} imports {other}: transports never import each other"
    _, at_load = _imports(module, MODULES[module], top_only=True)
    extra = at_load - {"torch", "numpy"} - set().union(*(v for k, v in OWN_LIBRARY.items() if fnmatchcase(module, k)))
    assert not extra, f"{module} imports {extra} when it is loaded; import it where it is used"
    stem = module.rsplit("/", 1)[-1]
    # Nobody's working folder is integrations/, and users look for an adapter under its framework's name.
    assert stem not in outside or folder == "integrations", f"{module} bears the name of a package that it imports"


@pytest.mark.parametrize("module", [m for m in MODULES if m != "config"])
def test_only_config_reads_the_environment(module: str) -> None:
    for node in ast.walk(MODULES[module]):
        used = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv")
        imported = isinstance(node, ast.ImportFrom) and node.module == "os" and any("env" in a.name for a in node.names)
        assert not used and not imported, f"{module}:{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]


def test_nobody_writes_the_environment() -> None:
    for node in ast.walk(MODULES["config"]):
        target = ast.unparse(node) if isinstance(node, (ast.Subscript, ast.Attribute)) else ""
        if target.startswith(
            ("os.environ[", "os.putenv", "os.environ.update", "os.environ.setdefault", "os.environ.pop")
        ):
            assert isinstance(getattr(node, "ctx", None), ast.Load), target
            assert not target.startswith(("os.putenv", "os.environ.u", "os.environ.s", "os.environ.p")), target


@pytest.mark.parametrize("module", MODULES)
def test_received_bytes_are_never_executed(module: str) -> None:
    """F102: nothing in the package can turn bytes into code or objects."""
    for node in ast.walk(MODULES[module]):
        where = f"{module}:{getattr(node, 'lineno', 0)}"
        names = {a.name.split(".")[0] for a in node.names} if isinstance(node, (ast.Import, ast.ImportFrom)) else set()
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).split(".")[0])
        assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, f"{where}: {ast.unparse(node)}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "compile", "__import__", "torch.load"), f"{where}: {called}"
            assert not re.search(r"\b(all_gather|broadcast|gather|scatter|send|recv)_object", called), (
                f"{where}: {called}"
            )


# -- importing
# --------------------------------------------------------------------------------------------------------------


def _python(code: str, *flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=120, check=False
    )


def test_import_is_light() -> None:
    """Under 50 ms (median of five), neither torch nor CUDA, from a bare checkout: the working directory is enough."""
    code = (
        "import time; start = time.perf_counter(); import commbackend; took = time.perf_counter() - start\n"
        "import sys; heavy = {'torch', 'numpy', 'cuda', 'cupy', 'triton', 'mpi4py'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert commbackend.ConfigError and 'torch' not in sys.modules\n"
        "print(took)"
    )
    runs = [_python(code) for _ in range(5)]
    assert all(r.returncode == 0 for r in runs), runs[0].stderr
    took_s = statistics.median(float(r.stdout) for r in runs)
    assert took_s < 0.05, f"import commbackend takes {1000 * took_s:.0f} ms"


@pytest.mark.parametrize("name", ["transports", "gemm"])
def test_root_links_refuse_to_be_imported(name: str) -> None:
    assert (ROOT / name).is_symlink() and (ROOT / name).resolve() == PACKAGE / name
    found = _python(f"import {name}")
    assert found.returncode != 0 and f"import commbackend.{name}" in found.stderr, found.stderr
    assert _python(f"import commbackend.{name}").returncode == 0


def test_every_public_name_loads() -> None:
    found = _python("import commbackend\nfor n in commbackend.__all__: getattr(commbackend, n)")
    assert found.returncode == 0, found.stderr
