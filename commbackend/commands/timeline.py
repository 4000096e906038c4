"""A simulated call in text: one line a rank and lane, time from left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..tuning.cost import Timed

__all__ = ["MARKS", "draw"]

#: One letter a kind of step in the picture.
MARKS: Mapping[str, str] = {
    "Gemm": "#",
    "Put": ">",
    "Get": "<",
    "Collective": "=",
    "Reduce": "+",
    "Copy": "c",
    "Wait": ".",
    "Signal": "!",
}


def draw(timed: Sequence[Timed], *, width: int = 100) -> str:
    """Return one line a rank and lane, time from left to right in ``width`` columns, ``MARKS`` for the steps."""
    total = max((t.end_us for t in timed), default=0.0) or 1.0
    lines = []
    for rank, lane in sorted({(t.rank, t.step.lane) for t in timed}):
        cells = [" "] * width
        for t in timed:
            if (t.rank, t.step.lane) == (rank, lane) and t.end_us > t.start_us:
                first = min(int(t.start_us / total * width), width - 1)
                last = min(max(round(t.end_us / total * width), first + 1), width)
                # Whatever takes time hides what takes none.
                for column in range(first, last):
                    if cells[column] in " .!" or t.end_us - t.start_us > total / width:
                        cells[column] = MARKS[type(t.step).__name__]
        lines.append(f"rank {rank} lane {lane} |{''.join(cells)}|")
    legend = "  ".join(f"{mark} {name.lower()}" for name, mark in MARKS.items())
    scale = f"0 us{f'{total:,.0f} us':>{width + 12}}"
    return "\n".join([*lines, scale, legend])
