"""Tables of what steps cost, measured or published, as JSON; and which ranks share a fast link.

A table that ``commbackend tune`` measured is kept in the cache; tables of machines that most have no access to are
shipped in ``cost_tables/``. ``sources`` says of every part whether it was measured, by what, or published by whom.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from itertools import pairwise
from typing import Any

from ..errors import ConfigError
from ..plan import ITEMSIZE

__all__ = ["FORMAT", "CostTable", "Topology", "load_table", "shipped", "topology"]

#: First entry of every table; another number means that old readers would misread it.
FORMAT = "commbackend-costs-1"
#: How much farther measured shapes count than near ones, as a power of their distance in doublings.
_NEARNESS = 4


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks in domains of ``domain`` consecutive ones: inside a domain bytes take the link, between two the network."""

    domain: int

    def path(self, rank: int, peer: int) -> str:
        """Return "link" or "network"."""
        return "link" if rank // self.domain == peer // self.domain else "network"


def topology(text: str, size: int) -> Topology:
    """Read "flat", "nvl72", "2x8" (2 domains of 8) or "8" (domains of 8) for ``size`` ranks.

    Raises:
        ConfigError: It is something else, or does not hold ``size`` ranks.
    """
    word = text.strip().lower()
    if word in ("", "flat"):
        return Topology(size)
    count, _, each = word.rpartition("x")
    each = each.removeprefix("nvl")
    if not each.isdecimal() or not int(each) or (count and not count.isdecimal()):
        raise ConfigError(f"topology {text!r}: flat, nvl72, 2x8 (domains x ranks) or 8 (ranks a domain)")
    if count and int(count) * int(each) != size:
        raise ConfigError(f"topology {text!r} holds {int(count) * int(each)} ranks, not {size}")
    return Topology(min(int(each), size))


@dataclass(frozen=True)
class CostTable:
    """What steps cost on one kind of machine. Times in microseconds, sizes in bytes.

    Attributes:
        device: Name of the device, as torch gives it, or "cpu ...".
        sources: Part -> where its numbers come from.
        gemm: dtype -> measured products (m, n, k, us).
        copy: path ("local", "link", "network") -> measured copies (nbytes, us), growing; what is beyond the last one
            goes at the rate between the last two.
        collective: The library's own collectives over the link: (bytes a rank sends, us), growing.
        launch_us: Start of a kernel or copy, as the device sees it.
        signal_us, wait_us: A flag raised, a wait for one that is up, on the lane that does it.
        flags: path -> latency of a flag.
        reduce_gbyte_s: Bytes a sum reads and writes, 1e9 a second.
        gemm_slowdown: A product's time while its rank copies, over its time alone.
        polling_factor: A polling product over the library's.
        tile, units: Rows and columns of a tile, and how many are multiplied at once; () and 0: no waves.
        base_us: The shortest product.
    """

    device: str
    sources: Mapping[str, str] = field(default_factory=dict)
    gemm: Mapping[str, Sequence[tuple[int, int, int, float]]] = field(default_factory=dict)
    copy: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    collective: Sequence[tuple[float, float]] = ()
    launch_us: float = 0.0
    signal_us: float = 0.0
    wait_us: float = 0.0
    flags: Mapping[str, float] = field(default_factory=dict)
    reduce_gbyte_s: float = 1000.0
    gemm_slowdown: float = 1.0
    polling_factor: float = 1.0
    tile: Sequence[int] = ()
    units: int = 0
    base_us: float = 0.0

    @staticmethod
    def flat(
        *, link_gbyte_s: float, memory_gbyte_s: float = 2000.0, tflop_s: float = 700.0, launch_us: float = 2.0
    ) -> CostTable:
        """Return the table of a machine that always reaches these rates, for pictures."""
        moves = {
            "local": [(0.0, 0.0), (1e9, 2e6 / memory_gbyte_s)],
            "link": [(0.0, 0.0), (1e9, 1e6 / link_gbyte_s)],
            "network": [(0.0, 0.0), (1e9, 1e6 / link_gbyte_s)],
        }
        return CostTable(
            "any",
            {"all": "given rates"},
            {name: [(10000, 10000, 10000, 2e6 / tflop_s)] for name in ITEMSIZE},
            moves,
            moves["link"],
            launch_us,
            launch_us,
            reduce_gbyte_s=memory_gbyte_s,
        )

    # -- products
    def gemm_us(self, m: int, n: int, k: int, dtype: str) -> float:
        """Time of (m, k) @ (k, n), without its launch."""
        if not m * n * k:
            return 0.0
        points, scale = self._points(dtype)
        if not points:
            raise ConfigError(f"the cost table of {self.device} has no products")
        weights = total = 0.0
        for pm, pn, pk, us in points:
            if (pm, pn, pk) == (m, n, k):
                return us * scale
            apart = abs(math.log2(m / pm)) + abs(math.log2(n / pn)) + abs(math.log2(k / pk))
            weight = 1 / (0.1 + apart) ** _NEARNESS
            weights += weight
            total += weight * math.log(us / self._ideal_us(pm, pn, pk, dtype))
        return scale * math.exp(total / weights) * self._ideal_us(m, n, k, dtype)

    def _points(self, dtype: str) -> tuple[Sequence[tuple[int, int, int, float]], float]:
        """The measured products of ``dtype``, or those of another type and how much longer this one takes."""
        if dtype in self.gemm:
            return self.gemm[dtype], 1.0
        other = next(iter(self.gemm), "")
        return self.gemm.get(other, ()), ITEMSIZE[dtype] / ITEMSIZE[other] if other else 1.0

    def _ideal_us(self, m: int, n: int, k: int, dtype: str) -> float:
        flops = 2.0 * m * n * k
        if self.units:
            rows, cols = self.tile
            tiles = math.ceil(m / rows) * math.ceil(n / cols)
            flops = 2.0 * k * rows * cols * self.units * _waves(tiles / self.units)
        return self.base_us + flops / self._rate(dtype)

    def _rate(self, dtype: str) -> float:
        if dtype not in self._rates:
            self._rates[dtype] = max(2.0 * m * n * k / us for m, n, k, us in self._points(dtype)[0])
        return self._rates[dtype]

    @cached_property
    def _rates(self) -> dict[str, float]:
        return {}

    # -- bytes
    def copy_us(self, nbytes: float, path: str) -> tuple[float, float]:
        """Return (time the way is held, latency after it) of one copy."""
        points = self.copy.get(path) or self.copy.get("link") or self.copy["local"]
        total = _interpolated(points, nbytes)
        (n0, t0), (n1, t1) = points[-2:]
        busy = min(total, nbytes * (t1 - t0) / (n1 - n0))
        return busy, total - busy

    def flag_us(self, path: str) -> float:
        """Latency of a flag over ``path``."""
        return self.flags.get(path, 0.0)

    def reduce_us(self, nbytes: float) -> float:
        """Time of a sum that reads and writes ``nbytes`` together."""
        return nbytes / self.reduce_gbyte_s / 1e3

    def collective_us(self, kind: str, nbytes: float, where: Topology, size: int) -> float:
        """Time of the library's collective in which the ranks hold, gather or scatter ``nbytes`` together.

        Inside a domain by what was measured, between domains at the network's rate for what leaves a rank.
        """
        if kind == "one_shot":  # one kernel of ours: everyone's rows to everyone, two flags
            path = where.path(0, size - 1)
            return self.launch_us + 2 * self.flag_us(path) + self.copy_us(nbytes * (size - 1), path)[0]
        sent = nbytes * (size - 1) / max(size, 1) * (2 if kind == "all_reduce" else 1)
        inside = _interpolated(self.collective or self.copy["link"], sent)
        if where.domain >= size:
            return inside
        return max(inside, sum(self.copy_us(sent, "network")))

    # -- files
    def to_json(self) -> str:
        """Return the table as JSON; ``from_json`` reads it."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> CostTable:
        """Read what ``to_json`` wrote. Raises ConfigError naming what is wrong; executes nothing."""
        try:
            raw: dict[str, Any] = json.loads(text)
            if raw.pop("format") != FORMAT:
                raise ValueError(f"another format than {FORMAT}")
            gemm = {str(d): [(int(m), int(n), int(k), float(us)) for m, n, k, us in v] for d, v in raw["gemm"].items()}
            copy = {str(p): [(float(b), float(us)) for b, us in v] for p, v in raw["copy"].items()}
            collective = [(float(b), float(us)) for b, us in raw["collective"]]
            table = CostTable(**{**raw, "gemm": gemm, "copy": copy, "collective": collective})
            table.validate()
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
            raise ConfigError(f"not a cost table: {type(e).__name__}: {e}") from e
        return table

    def validate(self) -> None:
        """Raise ValueError if a number cannot be what it says."""
        if not set(self.gemm) <= set(ITEMSIZE):
            raise ValueError(f"unknown dtypes {sorted(set(self.gemm) - set(ITEMSIZE))}")
        if any(min(entry) <= 0 for entries in self.gemm.values() for entry in entries):
            raise ValueError("a product of no size or no time")
        for points in (*self.copy.values(), *([self.collective] if self.collective else [])):
            if len(points) < 2 or any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(points)):
                raise ValueError("copies must be two or more, growing in bytes and time")
        numbers = [self.launch_us, self.signal_us, self.wait_us, self.base_us, *self.flags.values()]
        if not all(isinstance(x, (int, float)) and x >= 0 for x in numbers) or self.reduce_gbyte_s <= 0:
            raise ValueError("a negative time or no rate")


def _waves(waves: float) -> float:
    """Whole waves count half: libraries take smaller tiles for the last one."""
    return max(1.0, (waves + math.ceil(waves)) / 2)


def _interpolated(points: Sequence[tuple[float, float]], nbytes: float) -> float:
    """Time for ``nbytes`` on the lines through ``points``; the last one goes on, the first is the least."""
    before, after = points[0], points[1]
    for point in points[1:]:
        after = point
        if nbytes <= point[0]:
            break
        before = point
    if before == after:
        before = points[-2]
    if nbytes <= points[0][0]:
        return points[0][1]
    slope = (after[1] - before[1]) / (after[0] - before[0])
    return before[1] + (nbytes - before[0]) * slope


def shipped() -> list[str]:
    """Names of the tables that come with the package."""
    folder = resources.files(__package__) / "cost_tables"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def load_table(name: str) -> CostTable:
    """Read a shipped table by its name, or a file by its path. Raises ConfigError naming the tables there are."""
    known = shipped()
    try:
        if name in known:
            text = (resources.files(__package__) / "cost_tables" / f"{name}.json").read_text(encoding="utf-8")
        else:
            with open(name, encoding="utf-8") as file:
                text = file.read()
    except OSError as e:
        raise ConfigError(f"no cost table {name!r}: {e}; shipped are {', '.join(known)}, or give a file") from e
    return CostTable.from_json(text)
