"""docs/write-a-transport.md: the very text of its example passes the suite."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commbackend.testing import TransportSuite

PAGE = Path(__file__).parent.parent / "docs" / "write-a-transport.md"


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Write the page's first Python block to file_transport.py, importable here and in fresh ranks."""
    folder = tmp_path_factory.mktemp("docs")
    block = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    (folder / "file_transport.py").write_text(block)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("file_transport", None)


class TestFile(TransportSuite):
    transport = "file_transport:FileTransport"


def test_the_page_shows_the_suite() -> None:
    """Its second block subclasses the suite and names the example."""
    block = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    scope: dict[str, object] = {}
    exec(compile(block, "page", "exec"), scope)
    assert scope["TestFile"].transport == TestFile.transport  # type: ignore[attr-defined]
