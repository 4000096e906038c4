"""The soak: every promise about faults, kept again and again for as long as it may run.

``scripts/soak --seconds N`` runs faults, delays and random shapes over every transport of this machine and prints one
row a promise, with what was measured. docs/reliability.md explains the promises.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from . import calls, canary, lost, starting
from .traffic import names, transports

__all__ = ["ROWS", "Row", "main", "percentile"]

_ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Row:
    """What one promise's experiments have shown.

    Attributes:
        count: Things tried. bad: What broke the promise; must be empty.
        figures: What was measured, by name.
    """

    number: int
    promise: str
    count: int = 0
    bad: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def sample(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def expect(self, good: bool, what: str) -> None:
        self.count += 1
        if not good:
            self.bad.append(what[:400])

    def measured(self) -> str:
        """Return the row's last column."""
        parts = [f"{len(self.bad)} of {self.count} broken"]
        parts += [f"{name} {value:g}" for name, value in self.figures.items()]
        for name, values in self.samples.items():
            worst = f"p50 {percentile(values, 50):.3g}, p99 {percentile(values, 99):.3g}, max {max(values):.3g}"
            parts.append(f"{name}: {worst} ({len(values)})")
        return "; ".join(parts)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` percent of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))]


Until = Callable[[], bool]


def _kills(row: Row, more: Row, kept: Row, lies: Row, dice: random.Random, left: Until) -> None:
    """Rows 1, 4, 6 and 11: what follows a SIGKILL."""
    before = names()
    while left():
        for transport in transports():
            for seen in lost.kills(dice, transport, 16):
                row.expect(bool(seen["named"]), f"{transport}: {seen['said']}")
                row.sample(f"{transport} s to PeerDied", seen["late_s"])
                more.expect(seen["resumed_s"] < 2.0, f"{transport}: went on after {seen['resumed_s']:.1f} s")
                more.sample(f"{transport} s until the rest goes on", seen["resumed_s"])
                kept.expect(seen["left"] == [[], [], []], f"{transport}: {seen['left']}")
                lies.count += 1  # every result before was compared to the bit, and a call after it raised
    kept.expect(names() == before, f"/dev/shm has other names than before: {names()}")


def _at_once(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all of ``jobs``, which mostly wait, at the same time; what each returned."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [f.result() for f in [pool.submit(job) for job in jobs]]


def _drawn(dice: random.Random) -> random.Random:
    return random.Random(dice.randrange(1 << 30))


def _stops(row: Row, lies: Row, dice: random.Random, left: Until) -> None:
    worlds, timeout_s = 6, 1.0
    while left():
        chosen = [dice.choice(transports()) for _ in range(worlds)]
        found = _at_once([partial(lost.stops, _drawn(dice), t, 5, timeout_s) for t in chosen])
        for transport, of_world in zip(chosen, found, strict=True):
            for seen in of_world:
                row.expect(bool(seen["named"]), f"{transport}: {seen['said']}")
                over = seen["took_s"] / timeout_s - 1
                row.sample(f"{transport} overrun of the deadline (share)", over)
                row.figures["later than a tenth:"] = row.figures.get("later than a tenth:", 0) + (over > 0.1)
                row.expect(seen["left"] == [], f"{transport}: threads left {seen['left']}")
                lies.count += 1
        transport = dice.choice(transports())
        for seen in lost.pauses(dice, transport):
            row.expect(seen["calls"] == 20, f"{transport}: paused for 90 %: {seen}")
            row.expect(seen["warned"] or seen["victim"], f"{transport}: no warning: {seen}")


def _disagreements(row: Row, dice: random.Random, left: Until) -> None:
    batch = 100
    while left():
        transport = dice.choice(("local", "local", "local", *transports()))
        found = calls.disagreements(dice, transport, batch)
        row.count += batch
        row.bad += [text[:400] for text in found]


def _faults(row: Row, dice: random.Random, left: Until) -> None:
    batch = 100
    while left():
        transport = dice.choice(("local", "local", "local", *transports()))
        kinds, wrong = canary.faults(dice, transport, batch)
        row.count += kinds.total()
        row.bad += [text[:400] for text in wrong]
        for kind, count in kinds.items():
            row.figures[f"{kind}:"] = row.figures.get(f"{kind}:", 0) + count


def _leaving(row: Row, dice: random.Random, left: Until) -> None:
    while True:
        for transport in transports():
            for before, after in calls.cycles(transport, 200):
                row.expect(before == after, f"{transport}: {before} before, {after} after 200 cycles")
        if not left():
            return


def _steps(row: Row, dice: random.Random, left: Until) -> None:
    cases = []
    for transport in transports():
        steps = starting.count_steps(transport)
        row.figures[f"steps of init over {transport}:"] = len(steps)
        cases += [(transport, step, how) for step in range(len(steps)) for how in ("raise", "exit", "stop")]
    dice.shuffle(cases)
    while cases and left():
        now, cases = cases[:4], cases[4:]
        found = _at_once([partial(starting.failed_step, t, dice.randrange(3), step, how) for t, step, how in now])
        for (transport, step, how), saw in zip(now, found, strict=True):
            for seen in saw:
                text = f"{transport} step {step} {how}: {seen['outcome']}, left {seen['left']}"
                row.expect(bool(seen["named"]) and seen["left"][0] == [], text)
                row.sample("s until all know", seen["took_s"])
    row.figures["cases not reached in the time given:"] = len(cases)


def _fallback(row: Row, dice: random.Random, left: Until) -> None:
    while True:
        for victim in range(3):
            for where in ("probe", "crash", "connect"):
                found = starting.failed_probe(victim, where)
                good = all(f["transport"] == "gloo" for f in found) and [f["said"] for f in found] == [1, 0, 0]
                row.expect(good, f"rank {victim} {where}: {found}")
        if not left():
            return


def _bits(row: Row, dice: random.Random, left: Until) -> None:
    while True:
        for transport in transports():
            differing = calls.same_bits(dice, transport, 100)
            row.count += 300
            row.bad += [f"{transport}: a result differs"] * differing
        compared, texts = calls.invariant_rows(dice, dice.choice(("local", "shm")), 50)
        row.bad += texts[:20]
        row.figures["rows compared of other heights, chunks and schedules:"] = compared + row.figures.get(
            "rows compared of other heights, chunks and schedules:", 0
        )
        if not left():
            return


def _hostile(row: Row, dice: random.Random, left: Until) -> None:
    while True:
        came, inits, failed = starting.strangers(dice, 10.0 if left() else 2.0)
        row.count += came
        row.bad += failed
        row.figures["inits meanwhile"] = row.figures.get("inits meanwhile", 0) + inits
        row.bad += starting.broken_frames(dice, 20_000)
        row.count += 3 * 20_000
        if not left():
            return


def _listeners(row: Row, dice: random.Random, left: Until) -> None:
    for transport in transports():
        found = starting.listeners(transport)
        row.expect(not found, f"{transport}: listens on {found}")


#: The suites of transports whose hardware or launcher is not here: on fake drivers, and under mpirun.
_OTHERS = ("test_userbuffers_fake.py", "test_mnnvl_fake.py", "test_nvshmem_fake.py", "test_mpi_transport.py")


def _checkout(row: Row, *tests: str) -> None:
    """Promises that tests of the repository keep: run them."""
    if not (_ROOT / "tests").is_dir():
        row.figures["not run: no checkout of the repository here"] = 0
        return
    paths = [str(_ROOT / "tests" / t) for t in tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths],
        cwd=_ROOT, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    numbers = {word: int(n) for n, word in (p.split()[-2:] for p in last.split(" in ")[0].split(", ") if " " in p)}
    row.count += numbers.get("passed", 0) + numbers.get("failed", 0)
    if done.returncode:
        row.bad.append(last)


#: Number -> promise.
ROWS = {
    1: "a peer dies: every survivor raises PeerDied(rank, op, seq)",
    2: "a peer stops or stays away: CommTimeout in time, naming it; 90 % of the deadline is no fault",
    3: "no unbounded wait on host or device (static check)",
    4: "a fault never yields a tensor: every result before a fault is right, none comes after",
    5: "ranks that disagree: all raise, both values named",
    6: "nothing is left: names, descriptors, threads, mappings, children",
    7: "a failure at any step of init reaches all ranks",
    8: "falling back is agreed by all and said once",
    9: "every primitive made a no-op is noticed",
    10: "the same bits on all ranks and from run to run; batch_invariant: of every row",
    11: "survivors go on with a communicator of their own within 2 s",
    12: "hostile connections and frames: no crash, no failed init",
    13: "nothing received is executed (static check)",
    14: "no listener beyond loopback",
}
#: Share of the time of each experiment; faults and disagreements run side by side.
_SHARES = {"kills": 0.3, "stops": 0.2, "wrongs": 0.3, "steps": 0.05, "hostile": 0.04, "bits": 0.05, "cycles": 0.06}


def soak(seconds: float, seed: int, say: Callable[[str], None] = lambda text: None, checkout: bool = True) -> list[Row]:
    """Run everything within about ``seconds``; each experiment at least once. Returns one row a promise."""
    dice, rows = random.Random(seed), {n: Row(n, promise) for n, promise in ROWS.items()}

    def until(share: str) -> Until:
        end = time.monotonic() + seconds * _SHARES.get(share, 0.0)
        first = [True]

        def left() -> bool:
            if first[0]:
                first[0] = False
                return True
            return time.monotonic() < end

        return left

    def wrongs(left: Until) -> None:
        _at_once(
            [
                partial(_disagreements, rows[5], _drawn(dice), until("wrongs")),
                partial(_faults, rows[4], _drawn(dice), left),
            ]
        )

    experiments: list[tuple[str, Callable[[Until], None]]] = [
        ("kills", lambda left: _kills(rows[1], rows[11], rows[6], rows[4], dice, left)),
        ("stops", lambda left: _stops(rows[2], rows[4], dice, left)),
        ("wrongs", wrongs),
        ("steps", lambda left: _steps(rows[7], dice, left)),
        ("fallback", lambda left: _fallback(rows[8], dice, left)),
        ("bits", lambda left: _bits(rows[10], dice, left)),
        ("hostile", lambda left: _hostile(rows[12], dice, left)),
        ("listeners", lambda left: _listeners(rows[14], dice, left)),
        ("cycles", lambda left: _leaving(rows[6], dice, left)),
    ]
    if checkout:
        experiments += [
            ("mutants", lambda left: _checkout(rows[9], "test_transport_mutants.py", *_OTHERS)),
            ("deadlines", lambda left: _checkout(rows[3], "test_static_deadlines.py")),
            ("execution", lambda left: _checkout(rows[13], "test_static_security.py")),
        ]
    for name, run in experiments:
        start = time.monotonic()
        try:
            run(until(name))
        except Exception as e:  # an experiment that breaks counts against its promise, and the others still run
            broken = {"kills": 1, "stops": 2, "wrongs": 4, "steps": 7, "fallback": 8, "bits": 10, "hostile": 12,
                      "listeners": 14, "cycles": 6, "mutants": 9, "deadlines": 3, "execution": 13}[name]  # fmt: skip
            rows[broken].bad.append(f"{type(e).__name__}: {e}"[-1500:])
        say(f"{name}: {time.monotonic() - start:.0f} s")
    return list(rows.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of promises with what was measured; return 0 if none was broken."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="about how long (default 600)")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices (default: the time)")
    parser.add_argument("--json", metavar="FILE", help="write the rows, the samples and the machine to FILE")
    parser.add_argument("--no-checkout", action="store_true", help="leave out what the repository's tests keep")
    args = parser.parse_args(argv)
    seed = args.seed or int(time.time())
    print(f"soak of {args.seconds:g} s, seed {seed}, transports {', '.join(transports())}", flush=True)
    start = time.monotonic()
    rows = soak(args.seconds, seed, lambda text: print(f"  {text}", flush=True), not args.no_checkout)
    for row in rows:
        print(f"{row.number:>3}  {'BROKEN' if row.bad else 'kept  '}  {row.promise}\n             {row.measured()}")
        for text in row.bad[:5]:
            print(f"             ! {text}")
    if args.json:
        Path(args.json).write_text(json.dumps(_document(rows, seed, time.monotonic() - start), indent=1) + "\n")
    return 1 if any(row.bad for row in rows) else 0


def _document(rows: Sequence[Row], seed: int, seconds: float) -> dict[str, Any]:
    from ...commands.doctor import versions

    return {
        "command": "scripts/soak " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": seed,
        "seconds": round(seconds, 1),
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "load": os.getloadavg()},
        "versions": {name: v for name, v in versions().items() if v},
        "rows": [
            {
                "number": r.number,
                "promise": r.promise,
                "count": r.count,
                "broken": r.bad,
                "measured": r.measured(),
                "figures": r.figures,
                "samples": {name: [round(v, 5) for v in values] for name, values in r.samples.items()},
            }
            for r in rows
        ],
    }
