"""One call of any number of ranks, predicted: its time, its critical path, what was hidden, and what else one could do.

What ``commbackend plan --simulate`` prints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from .. import schedules
from ..check.symmetric import check_symmetric
from ..commands.record import sizes
from ..commands.timeline import draw
from ..commands.trace import Span, Trace
from ..contract import Caps
from ..plan import Gemm, Knobs, Problem
from ..schedules.symmetric import symmetric_plan
from .cost import Timed, Timeline, lower_bound_us, predict, simulate, stock_us
from .costs import CostTable, Topology

__all__ = ["WhatIf"]

#: Ranks that are drawn.
_DRAWN = 8


class WhatIf:
    """``problem`` with ``knobs`` on a transport with ``caps``, on machines that ``table`` and ``where`` describe.

    Raises:
        PlanError: There is no such plan.
    """

    def __init__(self, problem: Problem, caps: Caps, knobs: Knobs, table: CostTable, where: Topology) -> None:
        self.problem, self.caps, self.knobs, self.table, self.where = problem, caps, knobs, table, where
        self._symmetric = symmetric_plan(problem, caps, knobs) if len(set(problem.rows)) == 1 else None
        self._plan = self._symmetric or schedules.plan(problem, caps, knobs)
        self.timeline: Timeline = simulate(self._plan, table, where)

    def prove(self) -> str:
        """Prove the plan and return a line that says how. Raises PlanError for what it breaks."""
        p, caps, knobs = self.problem, self.caps, self.knobs
        if self._symmetric is not None and not _reads_peers(knobs):
            check_symmetric(self._symmetric, lambda rank: schedules.program(p, rank, caps, knobs), caps=caps)
            return f"Proved by one program for all {p.size} ranks: no race, no deadlock, every wait has its signal."
        from ..check import check

        check([schedules.plan(p, caps, knobs)] * 3, caps=caps)
        return "Proved over three calls: no race, no deadlock, every wait has its signal, every output is written."

    def facts(self) -> dict[str, Any]:
        """The prediction in numbers."""
        t, rank = self.timeline, self.slowest()
        found = {
            "time_us": t.time_us,
            "slowest_rank": rank,
            "gemm_us": t.busy_us(rank, Gemm),
            "exposed_us": t.exposed_us(rank),
            "hidden_share": t.hidden_share(rank),
            "lower_bound_us": lower_bound_us(t),
            "sequence_us": self._sequence_us(),
            "stock_us": stock_us(self.problem, self.table, self.where),
        }
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items() if v is not None}

    def slowest(self) -> int:
        """The rank that ends last."""
        return max(self.timeline.ranks, key=self.timeline.end_us)

    def to_json(self) -> str:
        """The prediction as JSON: what was asked, the numbers, and the critical path."""
        path = [
            {"rank": t.rank, "step": t.index, "kind": type(t.step).__name__, "start_us": t.start_us, "end_us": t.end_us}
            for t in self.timeline.critical_path()
        ]
        head = {"call": sizes(self.problem), "knobs": str(self.knobs), "domain": self.where.domain}
        return json.dumps({**head, "costs": self.table.device, **self.facts(), "critical_path": path}, indent=1)

    def title(self) -> str:
        """One line that says what was predicted."""
        return f"{sizes(self.problem)} by {self.knobs}, {self.table.device}, domains of {self.where.domain}"

    def text(self) -> str:
        """The prediction for people."""
        f = self.facts()
        best = "" if "sequence_us" not in f else f", the same transport in sequence {f['sequence_us']:,.0f} us"
        ours = "" if self._symmetric is None else f" (all {self.problem.size} ranks alike)"
        lines = [
            self.title(),
            f"predicted: {f['time_us']:,.1f} us{ours}; products {f['gemm_us']:,.1f} us, exposed"
            f" {f['exposed_us']:,.1f} us, {f['hidden_share']:.0%} of the moving is hidden",
            f"besides: library product then library collective {f['stock_us']:,.0f} us{best}; no schedule below"
            f" {f['lower_bound_us']:,.0f} us",
            "critical path: " + "; ".join(_grouped(self.timeline.critical_path())),
            "costs: " + "; ".join(f"{part} {source}" for part, source in self.table.sources.items()),
            "",
            draw([t for t in self.timeline.steps if t.rank in list(self.timeline.ranks)[:_DRAWN]]),
        ]
        return "\n".join(lines)

    def traces(self) -> list[Trace]:
        """The timeline as traces, one a drawn rank, for pictures and Perfetto."""
        found = []
        for rank in list(self.timeline.ranks)[:_DRAWN]:
            trace = Trace(rank)
            for t in self.timeline.of(rank):
                name = type(t.step).__name__.lower()
                trace.spans.append(Span(name, t.step.lane, round(t.start_us * 1e3), round(t.end_us * 1e3)))
            found.append(trace)
        return found

    def _sequence_us(self) -> float | None:
        knobs = Knobs("sequence", 1, self.knobs.lanes, domain=self.knobs.domain)
        if schedules.supports(self.problem, self.caps, knobs) is not None:
            return None
        return predict(self.problem, self.caps, knobs, self.table, self.where).time_us


def _reads_peers(knobs: Knobs) -> bool:
    return any(word in knobs.schedule for word in ("pull", "direct"))


def _grouped(path: Sequence[Timed]) -> list[str]:
    """The steps of a path, like ones in a row together: what each added to the time."""
    at, found = 0.0, []
    for kind, group in groupby(path, key=lambda t: type(t.step).__name__.lower()):
        steps = list(group)
        end = max(t.end_us for t in steps)
        if end - at > 0:
            found.append(f"{kind}{f' x{len(steps)}' if len(steps) > 1 else ''} {end - at:,.1f} us")
        at = max(at, end)
    return found or ["nothing takes time"]
