"""Which knobs a call gets, by which rule, and what was refused: one lookup a call once its sizes are known.

The rules, the first that applies decides, and later ones only fill what it leaves open:

1. ``Communicator.configure`` for the layer that makes the call;
2. ``schedule=``, ``chunks=``, ``lanes=`` of ``init``, or their variables;
3. a file of choices that was loaded, then what ``commbackend tune`` measured (``tune``);
4. the rule by bytes of ``schedules.default_knobs``.

Rows are counted in buckets (``keys``: four to a factor of two), so that a token count that changes with every call
meets a choice that was made before, and a resumed run makes the choices of the run it continues. Everything here is a
function of what all ranks have in common: features that may differ between ranks (``n`` of a gather, ``k`` of a
reduction) take no part, and tables of measurements are rank 0's.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from .. import schedules
from ..commands.record import sizes
from ..errors import ConfigError, Unsupported
from ..plan import Knobs, PlanCaps, Problem
from .choices import Choices, Entry
from .cost import predict
from .costs import Topology
from .keys import key_of, typical

if TYPE_CHECKING:
    from ..config import Config

__all__ = ["PHASES", "Chooser", "Chosen", "Manual"]

log = logging.getLogger("commbackend")

#: Which calls of a layer ``configure`` speaks of: those of its forward, or of its backward pass.
PHASES = ("forward", "backward")
#: Choices that are remembered; a run whose shapes differ at every call forgets the oldest and makes them again.
_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Manual:
    """What ``Communicator.configure`` was told; None leaves a knob to the automatic choice.

    Attributes:
        layer: Pattern of layer names (``fnmatch``: ``decoder.*.fc1``); "" are calls outside any layer.
        phase: "forward", "backward", or "" for both.
        op: Name of the operation (``schedules.OPS``), or "" for all that the layer calls.
        schedule, chunks, lanes, polls, folds, blocks, domain: As in ``plan.Knobs``.
    """

    layer: str
    phase: str = ""
    op: str = ""
    schedule: str | None = None
    chunks: int | None = None
    lanes: int | None = None
    polls: bool | None = None
    folds: bool | None = None
    blocks: int | None = None
    domain: int | None = None

    def matches(self, layer: str, phase: str, op: str) -> bool:
        """Whether a call of ``op`` in this phase of ``layer`` is meant."""
        return fnmatchcase(layer, self.layer) and self.phase in ("", phase) and self.op in ("", op)

    def wanted(self) -> dict[str, Any]:
        """The knobs that are given."""
        names = [f.name for f in dataclasses.fields(Knobs)]
        return {name: value for name in names if (value := getattr(self, name, None)) is not None}

    def __str__(self) -> str:
        where = f"configure({self.layer!r}" + f", phase={self.phase!r}" * bool(self.phase)
        where += f", op={self.op!r}" * bool(self.op)
        return where + "".join(f", {k}={v!r}" for k, v in self.wanted().items()) + ")"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The knobs of a call, the rule that chose them, and the wishes that could not be met, each with its reason.

    ``stock``: torch.distributed's collective and the product were measured to be faster than all of it, in sequence.
    """

    knobs: Knobs
    rule: str
    refused: tuple[str, ...] = ()
    stock: bool = False


class Chooser:
    """The choices of one communicator. Local; all ranks make the same calls and get the same answers.

    Args:
        caps: Says what planners may use, when it is asked.
        polls: dtype -> whether a GEMM provider polls flags.
        choices: What was measured or loaded (``tune``), the same on all ranks.
        domain: Ranks of one host, where there are several of as many consecutive ones: they are served first.
    """

    def __init__(
        self,
        config: Config,
        caps: Callable[[], PlanCaps],
        polls: Callable[[str], bool],
        transport: str,
        choices: Choices | None = None,
        domain: int = 0,
    ) -> None:
        self._config, self.polls, self._transport = config, polls, transport
        self._caps, self._domain = caps, domain
        self.choices, self.any_stock = choices, False
        self._manual: list[Manual] = []
        #: The layer whose calls run now, and the phase they are in.
        self.layer, self.phase = "", "forward"
        self._known: dict[tuple[Problem, str, str], Chosen] = {}
        self._buckets: dict[tuple[str, str, str], Chosen] = {}
        #: Of every bucket that was met the first problem.
        self._seen: dict[tuple[str, str, str], Problem] = {}
        self._asked: set[tuple[str, str, str]] = set()

    # -- on the path of every call
    def knobs(self, problem: Problem) -> Knobs:
        """The knobs for ``problem`` in the present layer: a lookup, unless its sizes are new."""
        found = self._known.get((problem, self.layer, self.phase))
        return (found or self._first(problem)).knobs

    def chosen(self, problem: Problem) -> Chosen:
        """The same, with the rule and what was refused."""
        return self._known.get((problem, self.layer, self.phase)) or self._first(problem)

    @contextmanager
    def within(self, layer: str, phase: str = "forward") -> Iterator[None]:
        """Calls in the body are those of ``layer``."""
        before = self.layer, self.phase
        self.layer, self.phase = layer, phase
        try:
            yield
        finally:
            self.layer, self.phase = before

    def problems(self) -> list[Problem]:
        """The problems that were chosen for, one for every layer, phase and bucket."""
        return list(dict.fromkeys(self._seen.values()))

    def calls(self) -> list[tuple[str, str, Problem]]:
        """The calls that were chosen for so far, as ``tune`` takes them: one for every layer, phase and bucket."""
        return [(layer, phase, p) for (_, layer, phase), p in self._seen.items()]

    def tuned(self, problem: Problem) -> bool:
        """Whether the present layer's calls of this bucket were measured in this run, or need not be."""
        key = (key_of(problem).text, self.layer, self.phase)
        if key in self._asked or problem.size == 1:
            return True
        self._asked.add(key)
        return False

    # -- wishes
    def configure(self, layer: str, *, phase: str = "", op: str = "", **knobs: Any) -> None:
        """As ``Communicator.configure``."""
        known = [f.name for f in dataclasses.fields(Manual)][3:]
        if unknown := next((name for name in knobs if name not in known), None):
            close = difflib.get_close_matches(unknown, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigError(f"configure: unknown knob {unknown!r}{hint}; the knobs are {', '.join(known)}")
        if phase not in ("", *PHASES) or op not in ("", *schedules.OPS):
            raise ConfigError(
                f"configure: phase={phase!r}, op={op!r}: a phase is one of {', '.join(PHASES)}, an op one of"
                f" {', '.join(schedules.OPS)}"
            )
        for name, value in knobs.items():
            wanted = {"schedule": str, "polls": bool, "folds": bool}.get(name, int)
            if value is not None and (not isinstance(value, wanted) or (wanted is int and isinstance(value, bool))):
                raise ConfigError(f"configure: {name}={value!r}: {wanted.__name__} or None is needed")
        if (schedule := knobs.get("schedule")) is not None:
            of_op = {op: schedules.SCHEDULES[op]} if op else schedules.SCHEDULES
            names = sorted({name for found in of_op.values() for name in found})
            if schedule not in names:
                raise ConfigError(f"configure: unknown schedule {schedule!r}: one of {', '.join(names)}")
        self._manual.append(Manual(layer, phase, op, **knobs))
        self.forget()

    def exported(self, machine: Mapping[str, str]) -> Choices:
        """Every choice made so far, as a file that makes another run choose alike."""
        entries = [
            Entry(key, found.knobs, layer, phase, source=found.rule, stock=found.stock)
            for (key, layer, phase), found in self._buckets.items()
        ]
        return Choices(tuple(entries), machine, None if self.choices is None else self.choices.costs)

    def use(self, choices: Choices | None) -> None:
        """Choose by ``choices`` from now on. All ranks pass the same ones."""
        self.choices = choices
        #: Whether torch.distributed's own collectives were fastest anywhere.
        self.any_stock = choices is not None and any(e.stock for e in choices.entries)
        self.forget()

    def forget(self) -> None:
        """Make every choice anew: something they depend on has changed."""
        self._known.clear()
        self._buckets.clear()

    def set(self, problem: Problem, knobs: Knobs | None) -> None:
        """Use ``knobs`` for exactly ``problem`` while candidates are compared; None ends that."""
        key = (problem, self.layer, self.phase)
        if knobs is None:
            self._known.pop(key, None)
        else:
            self._known[key] = Chosen(knobs, "being measured")

    # -- the first call of a shape
    def _first(self, problem: Problem) -> Chosen:
        by_bucket = (key_of(problem).text, self.layer, self.phase)
        found = self._buckets.get(by_bucket)
        if found is None:
            found = _keep(self._buckets, by_bucket, self._choose(problem))
            self._seen.setdefault(by_bucket, problem)
            self._say(problem, found)
        if schedules.supports(problem, self._caps(), found.knobs) is not None:
            found = self._choose(problem, exact=True)  # what fits the bucket's typical shards does not fit these
        return _keep(self._known, (problem, self.layer, self.phase), found)

    def _say(self, problem: Problem, found: Chosen) -> None:
        where = f" in {self.layer}" if self.layer else ""
        if not log.isEnabledFor(logging.INFO):
            return
        rule, costs = found.rule, None if self.choices is None else self.choices.costs
        if costs is not None:
            topology = Topology(self._domain or problem.size)
            rule += f", predicted {predict(problem, self._caps(), found.knobs, costs, topology).time_us:,.1f} us"
        log.info("commbackend: %s%s over %s: %s (%s)", sizes(problem), where, self._transport, found.knobs, rule)
        for refused in found.refused:
            log.info("commbackend: %s: refused %s", problem.op, refused)

    def _choose(self, problem: Problem, *, exact: bool = False) -> Chosen:
        config, caps = self._config, self._caps()
        one = problem if exact else typical(problem)
        polling = config.polling != "never" and bool(self.polls(problem.dtype))
        knobs = schedules.default_knobs(one, caps, polling, always=config.polling == "always")
        if self._domain and problem.size % self._domain == 0:
            knobs = dataclasses.replace(knobs, domain=self._domain)
        rule, refused, stock = "rule by bytes", list[str](), False
        if (entry := self._entry(problem)) is not None:
            reason = schedules.supports(problem, caps, entry.knobs)
            if reason is None and entry.knobs.polls and not polling:
                reason = "no GEMM provider here polls flags"
            if reason is None:
                knobs, rule, stock = entry.knobs, entry.source, entry.stock
            else:
                refused.append(f"{entry.knobs} of {entry.source}: {reason}")
        given = (("schedule", config.schedule, "auto"), ("chunks", config.chunks, 0), ("lanes", config.lanes, -1))
        settings: dict[str, Any] = {name: value for name, value, automatic in given if value != automatic}
        wishes = [("settings", settings)] if settings else []
        wishes += [(str(m), m.wanted()) for m in self._manual if m.matches(self.layer, self.phase, problem.op)]
        for source, wanted in wishes:
            fitted, reason = self._fitted(problem, knobs, wanted)
            if reason:
                refused.append(f"{source}: {reason}")
                if config.strict:
                    raise Unsupported(f"{problem.op} with {dataclasses.replace(knobs, **wanted)}: {reason}")
            elif fitted != knobs:
                knobs, rule, stock = fitted, source, False
        return Chosen(knobs, rule, tuple(refused), stock)

    def _entry(self, problem: Problem) -> Entry | None:
        """What was measured or loaded for ``problem``, if it may be used."""
        found = None if self.choices is None else self.choices.find(problem, self.layer, self.phase)
        if found is not None and found.source.startswith("cache") and _deterministic():
            return None  # what another run measured must not decide the bits of this one; a file that was asked for may
        return found

    def _fitted(self, problem: Problem, knobs: Knobs, wanted: Mapping[str, Any]) -> tuple[Knobs, str]:
        """``knobs`` with what is wanted, or why not."""
        asked = dataclasses.replace(knobs, **wanted)
        if asked == knobs:
            return knobs, ""
        if "polls" not in wanted and schedules.supports(problem, self._caps(), asked) is not None:
            asked = dataclasses.replace(asked, polls=False)  # a schedule that was asked for may have no polling form
        if wanted.get("polls") and not self.polls(problem.dtype):
            return knobs, f"no GEMM provider here polls flags for {problem.dtype}"
        return asked, schedules.supports(problem, self._caps(), asked) or ""


def _deterministic() -> bool:
    import torch

    return bool(torch.are_deterministic_algorithms_enabled())


def _keep(cache: dict[Any, Chosen], key: Any, value: Chosen) -> Chosen:
    while len(cache) >= _KEPT:
        cache.pop(next(iter(cache)), None)
    cache[key] = value
    return value
