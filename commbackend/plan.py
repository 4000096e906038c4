"""Plans: what every rank does in one call, as data.

A plan says which bytes move where, which flags rise after them, and which rows of a matrix product wait for which flag.
It holds no code, no tensor and no address: the engine executes it, ``check`` proves it, the cost model runs it on
measured costs, the trace draws it, and the golden tests compare it.

Words (all integers are rows, elements or ranks; bytes are always called ``nbytes``):

* A **Region** is a rectangle of a named 2-D buffer: ``rows`` rows from ``row``, ``cols`` columns from ``col``, repeated
  ``blocks`` times every ``block_stride`` rows (a gather along dim 1 of a ``[batch, seq, hidden]`` tensor is one region
  of
  ``batch`` blocks). ``at`` is the rank whose copy of the buffer is meant; -1 is the rank that runs the step.
* A **slot** is a 64-bit word in the waiter's memory with exactly one writer. Every rank owns one block of
  ``SLOTS_PER_RANK`` words for every writer; a step names the word inside that block, so ``Put(peer=p, slot=k)`` at rank
  r
  raises word k of block r at p, and ``Wait(peer=r, slot=k)`` at p waits for it. One writer per word holds by
  construction.
* A slot is raised to, and waited for as, ``sequence number of the call + delta``. The sequence number grows by one with
  every call on a communicator that uses slots or the heap, values only grow, and a wait is satisfied by any value that
  is greater or equal.
* Heap buffers live in one **half** of the symmetric heap; calls alternate halves by their sequence number. ``CREDIT``
  (word 1) raised by a peer to s says "I have finished everything of call s, also reading what others wrote to me and
  what
  I read from others"; whoever writes into a half that call s - 2 used waits for CREDIT >= s - 2 (``delta=-2``) from the
  rank that owns the half (and, where peers read from it directly, from those readers) first.
* The order of ``steps`` is the enqueue order. ``after`` names earlier steps of the same program; steps of one lane
  run in
  their order. Lane 0 is the caller's: its thread on a CPU, its current stream on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from .errors import PlanError

__all__ = [
    "CREDIT",
    "DATA",
    "ENTERED",
    "EXCHANGE_PROGRAMS",
    "EXCHANGE_SLOT_NBYTES",
    "ITEMSIZE",
    "MAX_CHUNKS",
    "PHASES",
    "SLOTS_PER_RANK",
    "Buffer",
    "Collective",
    "Copy",
    "Gemm",
    "Get",
    "Knobs",
    "Plan",
    "PlanCaps",
    "Problem",
    "Program",
    "Put",
    "Reduce",
    "Region",
    "Segment",
    "Signal",
    "Step",
    "Wait",
    "data_slot",
    "interned_problem",
]

#: Word 0 of a writer's block: the writer has entered call ``seq`` (used as a gate by kernels that poll).
ENTERED = 0
#: Word 1: the writer has finished everything it does in call ``seq``.
CREDIT = 1
#: First of the words that say "this chunk has arrived".
DATA = 2
#: Chunks one rank may send to one peer in one phase of one call.
MAX_CHUNKS = 32
#: Phases of a call that need words of their own (an all-reduce scatters, then gathers).
PHASES = 2
#: All-reduces by one kernel: thread blocks that take part at most, and bytes of rows that each takes from one rank.
EXCHANGE_PROGRAMS, EXCHANGE_SLOT_NBYTES = 32, 40 << 10
#: Words one rank keeps for one writer.
SLOTS_PER_RANK = DATA + PHASES * MAX_CHUNKS

#: Bytes of an element, by the name torch prints without its "torch." prefix.
ITEMSIZE: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


def data_slot(chunk: int, phase: int = 0) -> int:
    """Return the word that says chunk ``chunk`` of phase ``phase`` has arrived."""
    if not (0 <= chunk < MAX_CHUNKS and 0 <= phase < PHASES):
        raise PlanError(f"chunk {chunk} of phase {phase}: a call has at most {MAX_CHUNKS} chunks in {PHASES} phases")
    return DATA + phase * MAX_CHUNKS + chunk


class PlanCaps(Protocol):
    """What a planner needs to know of a transport; ``contract.Caps`` has these fields and more."""

    @property
    def one_sided(self) -> bool: ...  # put, get, signal, wait
    @property
    def collective(self) -> bool: ...  # all_gather, all_to_all, reduce_scatter, all_reduce
    @property
    def peer_view(self) -> bool: ...  # a GEMM or a copy can read and write a peer's heap like its own memory
    @property
    def source(self) -> str: ...  # "any": puts read any memory; "symmetric": only the heap, so sources are packed first
    @property
    def numerics(
        self,
    ) -> str: ...  # "fixed": we sum, in rank order; "library": the transport's own reduction is allowed
    @property
    def stream_ordered(self) -> bool: ...  # lanes are CUDA streams; defaults are chosen for copy engines then
    @property
    def copy_lanes(self) -> int: ...  # copy lanes worth having on a CPU: 0 where all cores multiply
    @property
    def free_queues(self) -> bool: ...  # a lane that waits never holds up another lane of its rank
    @property
    def exchanges(self) -> bool: ...  # one kernel a rank can do a whole all-reduce of few rows
    @property
    def hosts(self) -> tuple[int, ...]: ...  # two levels: every rank's host, one-sided only within it; else ()


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a named buffer; see the module's head for the words."""

    buf: str
    row: int
    rows: int
    col: int = 0
    cols: int = -1
    blocks: int = 1
    block_stride: int = 0
    at: int = -1


@dataclass(frozen=True, slots=True)
class Put:
    """Copy ``src`` (own) to ``dst`` (``dst.at == peer``), then raise word ``slot`` of my block at ``peer`` to seq."""

    lane: int
    after: tuple[int, ...]
    src: Region
    dst: Region
    peer: int
    slot: int


@dataclass(frozen=True, slots=True)
class Get:
    """Copy ``src`` (``src.at == peer``, a heap region) to ``dst`` (own)."""

    lane: int
    after: tuple[int, ...]
    src: Region
    dst: Region
    peer: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Raise word ``slot`` of my block at ``peer`` to seq + ``delta``, after everything of mine that ``after`` and the
    lane order cover.
    """

    lane: int
    after: tuple[int, ...]
    peer: int
    slot: int
    delta: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold the lane until word ``slot`` of ``peer``'s block here is >= seq + ``delta``; ``covers`` may be read (or
    written) then.
    """

    lane: int
    after: tuple[int, ...]
    peer: int
    slot: int
    delta: int = 0
    covers: tuple[Region, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy ``src`` to ``dst``, both own."""

    lane: int
    after: tuple[int, ...]
    src: Region
    dst: Region


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one product. ``nt``: out = a @ b.T (+ bias) (+ addends); ``nn``: out = a @ b, likewise; ``tn``: out =
    a.T @ b.

    Attributes:
        a, b: Operands as stored: nt (rows, K) and (N, K); nn (rows, K) and (K, N); tn (M, N) and (M, K).
        out: nt, nn (rows, N); tn (N, K). ``out.at`` may be a peer where the transport gives peer views.
        bias: One row of N elements, or None.
        addends: Regions shaped like ``out``, added in this order in fp32 before rounding.
        ready: (peer, word) pairs that a polling kernel waits for before it reads ``a``; () in the gated form.
        done: (peer, word) pairs that a polling kernel raises after these rows are stored; () in the gated form.
        scale_a, scale_b: One row of fp32, with one element or one a row of ``a`` (``b``): what fp8 operands are
            multiplied by; or None.
    """

    a: Region
    b: Region
    out: Region
    bias: Region | None = None
    addends: tuple[Region, ...] = ()
    ready: tuple[tuple[int, int], ...] = ()
    done: tuple[tuple[int, int], ...] = ()
    scale_a: Region | None = None
    scale_b: Region | None = None


@dataclass(frozen=True, slots=True)
class Gemm:
    """One launch of the GEMM provider over ``segments``, in order. ``form``: "nt", "nn", "tn", see ``Segment``."""

    lane: int
    after: tuple[int, ...]
    segments: tuple[Segment, ...]
    form: str = "nt"


@dataclass(frozen=True, slots=True)
class Reduce:
    """dst = sum of ``srcs`` in their order (ranks' order), accumulated in fp32 (fp64 for fp64, exact for integers), (+
    bias).
    """

    lane: int
    after: tuple[int, ...]
    srcs: tuple[Region, ...]
    dst: Region
    bias: Region | None = None
    op: str = "sum"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of the transport; own regions only, entry i of ``srcs``/``dsts`` belongs to rank i.

    kind: "all_gather" (one src, size dsts), "all_to_all" (size srcs, size dsts), "reduce_scatter" (size srcs, one
        dst), "all_reduce" (one src, one
    dst). ``slots``: words of MY OWN block here that are raised to seq after it, for GEMMs that poll; () in the gated
    form.

    ``between``: of a transport of two levels: only the ranks that have this rank's number on their hosts take part, and
    entry i belongs to host i.

    One kind more is a kernel of ours in every rank: "one_shot", dsts[0] = sum over ranks of their srcs[0], in rank
    order, + own srcs[1] (a residual, where there is one) + ``bias``, accumulated in fp32 and rounded once; with
    ``weight`` also dsts[1] = RMSNorm of dsts[0], with ``eps``. It moves the rows through memory of its own.
    """

    lane: int
    after: tuple[int, ...]
    kind: str
    srcs: tuple[Region, ...]
    dsts: tuple[Region, ...]
    slots: tuple[int, ...] = ()
    op: str = "sum"
    bias: Region | None = None
    weight: Region | None = None
    eps: float = 0.0
    between: bool = False


Step: TypeAlias = Put | Get | Signal | Wait | Copy | Gemm | Reduce | Collective


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named 2-D buffer of a program.

    Attributes:
        space: "input" and "output" (the caller's tensors), "heap" (symmetric: same name, shape and dtype on all
            ranks), "scratch"
            (private memory of the engine, contents undefined at the start of a call).
        rows, cols: Shape in elements.
        dtype: Name as in ``ITEMSIZE``.
    """

    name: str
    space: str
    rows: int
    cols: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes, rows packed."""
        return self.rows * self.cols * ITEMSIZE[self.dtype]


class _Hashed:
    """Remembers its hash: a problem is looked up several times in every call."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True)
class Problem(_Hashed):
    """The sizes of one call, equal on all ranks except where said.

    Attributes:
        op: Name of the operation, as in ``schedules.OPS``.
        rows: Rows (of one block) that each rank holds of the gathered or scattered dimension; its length is the
            group's size.
        blocks: Product of the dimensions before that dimension; 1 where it is the first.
        k: Columns of the moved operand for gather ops; this rank's inner dimension for reduce ops (may differ
            between ranks).
        n: Output columns, one entry a weight (may differ between ranks for gather ops).
        dtype: Element type of operands and results.
        bias: Whether a bias row is added.
        flags: Further options of the op, sorted: "gathered" (the gathered operand is returned too), "wgrad",
            "saved" (the gathered operand was
            saved by forward), ...
        out_dtype: Element type of results where it is not ``dtype``: partial sums are of this type too.
        scales: What fp8 operands have a scale each of: "tensor", or "row".
        eps: Of the norm, with flag "norm".
    """

    op: str
    rows: tuple[int, ...]
    blocks: int = 1
    k: int = 0
    n: tuple[int, ...] = ()
    dtype: str = "float32"
    bias: bool = False
    flags: tuple[str, ...] = ()
    out_dtype: str = ""
    scales: str = ""
    eps: float = 0.0

    @property
    def result(self) -> str:
        """Element type of results."""
        return self.out_dtype or self.dtype

    @property
    def moved(self) -> str:
        """Element type of what travels: operands that are gathered, results that are reduced."""
        return self.dtype if self.op in ("all_gather", "all_gather_matmul") else self.result

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            found = hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))
            object.__setattr__(self, "_hash", found)
            return found

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def total(self) -> int:
        """Rows of all ranks together, one block."""
        return sum(self.rows)


@functools.lru_cache(maxsize=4096)
def interned_problem(*fields: Any, **named: Any) -> Problem:
    """The Problem of these fields: the same object for the same ones, which makes looking it up quick."""
    return Problem(*fields, **named)


@dataclass(frozen=True, slots=True)
class Knobs:
    """What may be chosen for a problem without changing its result's meaning.

    Attributes:
        schedule: Name of a schedule of the op, as in ``schedules.SCHEDULES``.
        chunks: Chunks a shard is cut into for each peer, 1...MAX_CHUNKS; shards with fewer rows get fewer.
        lanes: Copy lanes beside lane 0; 0 runs everything in the caller's lane.
        polls: True: one GEMM launch polls flags; False: row blocks gated by waits.
        folds: With ``polls``, where products are reduced: True: the launch also adds received partials to its own rows
            (needs ``free_queues``); False: a sum follows the launch.
        blocks: Without ``polls``: products that peers' rows are multiplied in, each as soon as all its chunks are
            there (gather side) or before the first of them leaves (reduce side); 0: one a chunk.
        domain: Ranks of one host or NVLink domain, which are consecutive: peers of the own domain are served first,
            then those of the next one. 0: peers in turn, whoever they are.
    """

    schedule: str
    chunks: int = 1
    lanes: int = 1
    polls: bool = False
    folds: bool = True
    blocks: int = 0
    domain: int = 0

    def __str__(self) -> str:
        """Return ``schedule/chunks/lanes``, and by name what is not the default: ``push/4/1 polls=True``."""
        named = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self)[3:] if getattr(self, f.name) != f.default
        }
        return " ".join([f"{self.schedule}/{self.chunks}/{self.lanes}", *(f"{k}={v}" for k, v in named.items())])


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does: its buffers and its steps in enqueue order."""

    rank: int
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]

    @property
    def counted(self) -> bool:
        """Whether it uses the heap or words of peers: calls are counted, and raise credits, for those that do."""
        words = any(isinstance(s, Put | Get | Signal | Wait) or getattr(s, "slots", ()) for s in self.steps)
        return words or any(b.space == "heap" for b in self.buffers)

    def heap_nbytes(self, align: int = 256) -> int:
        """Bytes of one heap half this program needs, every buffer aligned."""
        return self._nbytes("heap", align)

    def scratch_nbytes(self, align: int = 256) -> int:
        """Bytes of private scratch this program needs, every buffer aligned."""
        return self._nbytes("scratch", align)

    def _nbytes(self, space: str, align: int) -> int:
        return sum(-(-b.nbytes // align) * align for b in self.buffers if b.space == space)


@dataclass(frozen=True, slots=True)
class Plan:
    """One call of all ranks. ``meta`` is for people and files (schedule, chunks, problem...); nothing executes it.

    ``meta["queues"] == "free"`` declares that the plan ends only where every lane has a queue of its own; ``check``
    proves it in that model, and refuses it for transports without ``free_queues``. ``meta["hosts"]`` has the host of
    every rank where the plan is one of two levels: puts, words and credits stay within a host.
    """

    op: str
    size: int
    programs: tuple[Program, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the plan as JSON text; ``from_json`` gives an equal plan back."""
        programs = [
            {
                "rank": p.rank,
                "buffers": [dataclasses.asdict(b) for b in p.buffers],
                "steps": [{"step": type(s).__name__, **_compact(s)} for s in p.steps],
            }
            for p in self.programs
        ]
        return json.dumps(
            {"op": self.op, "size": self.size, "meta": dict(self.meta), "programs": programs}, indent=indent
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what ``to_json`` wrote. Raises PlanError naming what is unknown or missing; executes nothing."""
        try:
            raw = json.loads(text)
            programs = tuple(
                Program(
                    int(p["rank"]),
                    tuple(Buffer(**b) for b in p["buffers"]),
                    tuple(_step(s) for s in p["steps"]),
                )
                for p in raw["programs"]
            )
            return Plan(str(raw["op"]), int(raw["size"]), programs, dict(raw["meta"]))
        except (KeyError, TypeError, ValueError) as e:
            raise PlanError(f"not a plan: {type(e).__name__}: {e}") from e


_STEPS: dict[str, type[Any]] = {c.__name__: c for c in (Put, Get, Signal, Wait, Copy, Gemm, Reduce, Collective)}


def _compact(obj: Any) -> dict[str, Any]:
    """Fields of a dataclass that differ from their defaults, nested, so that golden files stay readable."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(obj):
        value = getattr(obj, f.name)
        if f.default is not dataclasses.MISSING and value == f.default:
            continue
        out[f.name] = _plain(value)
    return out


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return _compact(value) if dataclasses.is_dataclass(value) else value


def _region(raw: Any) -> Region:
    return Region(**raw)


def _regions(raw: Any) -> tuple[Region, ...]:
    return tuple(_region(r) for r in raw)


def _pairs(raw: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(a), int(b)) for a, b in raw)


def _segment(raw: dict[str, Any]) -> Segment:
    conv: dict[str, Any] = {
        "a": _region,
        "b": _region,
        "out": _region,
        "bias": _region,
        "addends": _regions,
        "ready": _pairs,
        "done": _pairs,
        "scale_a": _region,
        "scale_b": _region,
    }
    return Segment(**{k: conv[k](v) for k, v in raw.items()})


def _step(raw: dict[str, Any]) -> Step:
    fields = dict(raw)
    cls = _STEPS[fields.pop("step")]
    fields["after"] = tuple(fields["after"])
    for name in ("src", "dst", "bias", "weight"):
        if name in fields:
            fields[name] = _region(fields[name])
    for name in ("srcs", "dsts", "covers"):
        if name in fields:
            fields[name] = _regions(fields[name])
    if "segments" in fields:
        fields["segments"] = tuple(_segment(s) for s in fields["segments"])
    if "slots" in fields:
        fields["slots"] = tuple(fields["slots"])
    step: Step = cls(**fields)
    return step
