"""Add up what scripts/test ran and print, as the last line, how many passed, failed and were skipped."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

# A test that every rank runs counts once: as failed if any rank failed, as skipped if any rank skipped it.
ORDER = ("passed", "skipped", "failed")


def outcomes(path: Path) -> dict[str, str]:
    """Return the outcome of every test in a JUnit file."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        found[name] = max(found.get(name, "passed"), outcome, key=ORDER.index)
    return found


def main(folder: Path) -> int:
    """Print the count. Returns 1 if anything failed or a part did not report."""
    counts = dict.fromkeys(ORDER, 0)
    for line in (folder / "checks").read_text().splitlines():
        counts[line.rsplit(" ", 1)[1]] += 1
    for part in ("pytest", "mpi", "hosts-2", "hosts-3,1"):
        pattern = "pytest.xml" if part == "pytest" else f"{part}-*.xml"
        merged: dict[str, str] = {}
        for path in sorted(folder.glob(pattern)):
            for name, outcome in outcomes(path).items():
                merged[name] = max(merged.get(name, "passed"), outcome, key=ORDER.index)
        for outcome in merged.values():
            counts[outcome] += 1
        status = [line.split()[1] for line in (folder / "status").read_text().splitlines() if line.split()[0] == part]
        if status and (status[0] != "0" or not merged) and "failed" not in merged.values():
            # Killed, crashed, no test collected: no test says so, but the part has failed.
            print(f"{part} ended with status {status[0]} and {len(merged)} tests reported")
            counts["failed"] += 1
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
