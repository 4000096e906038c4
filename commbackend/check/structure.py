"""What a plan may consist of: buffers, regions, shapes, dtypes, lanes, words, values, and the roles steps need.

The part of ``check`` that looks at steps one by one.
"""

from __future__ import annotations

from typing import NoReturn

from ..errors import PlanError
from ..plan import (
    CREDIT,
    DATA,
    ITEMSIZE,
    SLOTS_PER_RANK,
    Buffer,
    Collective,
    Copy,
    Gemm,
    Get,
    Plan,
    PlanCaps,
    Program,
    Put,
    Reduce,
    Region,
    Segment,
    Signal,
    Step,
    Wait,
)

__all__ = ["Structure"]

_SPACES = ("input", "output", "heap", "scratch")
#: Blocks, rows, columns.
Shape = tuple[int, int, int]


class Structure:
    """The rules that can be checked step by step.

    Args:
        caps: The transport's facts; None: any role may be used.
    """

    def __init__(self, plan: Plan, caps: PlanCaps | None) -> None:
        self._plan, self._caps = plan, caps
        self._where = ""
        self._rank = 0
        self._buffers: dict[str, Buffer] = {}

    def check(self) -> None:
        """Raise PlanError for the first rule that is broken."""
        plan = self._plan
        self._where = plan.op
        if len(plan.programs) != plan.size or [p.rank for p in plan.programs] != list(range(plan.size)):
            self._fail(f"a plan of {plan.size} ranks has programs for ranks {[p.rank for p in plan.programs]}")
        heap = [b for b in plan.programs[0].buffers if b.space == "heap"] if plan.programs else []
        for program in plan.programs:
            self.check_program(program)
            if [b for b in program.buffers if b.space == "heap"] != heap:
                self._where = f"{plan.op}: rank {program.rank}"
                self._fail("its heap buffers differ from rank 0's in name, shape, dtype or order")

    def check_program(self, program: Program) -> None:
        """Raise PlanError for the first rule that one rank's program breaks."""
        op = self._plan.op
        self._rank, self._where = program.rank, f"{op}: rank {program.rank}"
        self._declared(program)
        for i, step in enumerate(program.steps):
            self._where = f"{op}: rank {program.rank}, step {i} ({type(step).__name__})"
            if step.lane < 0:
                self._fail(f"lane {step.lane}")
            if step.after and not 0 <= min(step.after) <= max(step.after) < i:
                self._fail(f"after {step.after}: only earlier steps can be named")
            self._step(step)

    def _fail(self, text: str) -> NoReturn:
        raise PlanError(f"{self._where}: {text}")

    def _declared(self, program: Program) -> None:
        self._buffers = {b.name: b for b in program.buffers}
        if len(self._buffers) != len(program.buffers):
            self._fail("two buffers have one name")
        for b in program.buffers:
            if b.space not in _SPACES or b.dtype not in ITEMSIZE or min(b.rows, b.cols) < 0:
                self._fail(f"{b} is no buffer")

    def _step(self, step: Step) -> None:
        match step:
            case Put():
                self._one_sided(step.peer, step.slot, 0, 0)
                if step.slot < DATA or step.dst.at != step.peer or self._space(step.dst) != "heap":
                    self._fail(f"puts to {step.dst}: a put raises a data word and writes to the heap of its peer")
                if self._caps and self._caps.source != "any" and self._space(step.src) != "heap":
                    self._fail(f"puts {step.src}, but this transport's puts read only the heap")
                self._same(self._own(step.src), self._shape(step.dst), step.src, step.dst)
            case Get():
                self._one_sided(step.peer, DATA, 0, 0)
                if step.src.at != step.peer or self._space(step.src) != "heap":
                    self._fail(f"gets {step.src}: a get reads from the heap of its peer")
                self._same(self._shape(step.src), self._writable(step.dst, own=True), step.src, step.dst)
            case Signal():
                self._one_sided(step.peer, step.slot, step.delta, 0)
            case Wait():
                self._one_sided(step.peer, step.slot, step.delta, -2 if step.slot == CREDIT else 0, self_too=True)
                for region in step.covers:
                    self._shape(region)
            case Copy():
                self._same(self._own(step.src), self._writable(step.dst, own=True), step.src, step.dst)
            case Gemm():
                if not step.segments or step.form not in ("nt", "nn", "tn"):
                    self._fail(f"form {step.form!r} with {len(step.segments)} segments")
                for segment in step.segments:
                    self._segment(segment, step.form)
            case Reduce():
                shape = self._writable(step.dst, own=True)
                if not step.srcs or step.op != "sum":
                    self._fail(f"op {step.op!r} of {len(step.srcs)} regions")
                for src in step.srcs:
                    self._same(self._reach(src), shape, src, step.dst)
                if step.bias and self._own(step.bias) != (1, 1, shape[2]):
                    self._fail(f"bias {step.bias} is not one row of {shape[2]}")
            case Collective():
                self._collective(step)

    def _segment(self, s: Segment, form: str) -> None:
        a, b, out = self._reach(s.a), self._reach(s.b), self._writable(s.out)
        if a[0] != 1 or b[0] != 1 or out[0] != 1:
            self._fail("the regions of a segment are one block each")
        (_, ar, ac), (_, br, bc) = a, b
        m, inner, inner_b, n = {"nt": (ar, ac, bc, br), "nn": (ar, ac, br, bc), "tn": (ac, ar, br, bc)}[form]
        if inner != inner_b or out != (1, m, n):
            self._fail(f"{form} product of {s.a} ({ar}, {ac}) and {s.b} ({br}, {bc}) into {s.out} {out[1:]}")
        for region in s.addends:
            self._same(self._reach(region), out, region, s.out)
        if s.bias and self._own(s.bias) != (1, 1, n):
            self._fail(f"bias {s.bias} is not one row of {n}")
        for scale, rows in ((s.scale_a, a[1]), (s.scale_b, b[1])):
            if scale and self._own(scale) not in ((1, 1, 1), (1, 1, rows)):
                self._fail(f"scales {scale} are not one row of 1 or {rows}")
        for peer, word in (*s.ready, *s.done):
            self._word(peer, word, self_too=True)
            if word == CREDIT:
                self._fail("kernels poll and raise data words, not credits")

    def _one_shot(self, s: Collective) -> None:
        if self._caps and not self._caps.exchanges:
            self._fail("no kernel here exchanges rows with peers")
        if not (1 <= len(s.srcs) <= 2 and len(s.dsts) == 1 + (s.weight is not None)) or s.slots:
            self._fail(f"one_shot of {len(s.srcs)} and {len(s.dsts)} regions")
        shape = self._writable(s.dsts[0], own=True)
        for region in (*s.srcs, *s.dsts[1:]):
            self._same(self._own(region), shape, region, s.dsts[0])
        self._writable(s.dsts[-1], own=True)
        for row in (s.bias, s.weight):
            if row and self._own(row) != (1, 1, shape[2]):
                self._fail(f"{row} is not one row of {shape[2]}")

    def _collective(self, s: Collective) -> None:
        if s.kind == "one_shot":
            self._one_shot(s)
            return
        if self._caps and not (self._caps.hosts if s.between else self._caps.collective):
            self._fail("this transport has no collectives")
        size = self._plan.size
        if s.between:
            hosts = self._plan.meta.get("hosts", ())
            if len(hosts) != size or s.kind in ("reduce_scatter", "all_reduce") or s.slots:
                self._fail("between hosts nothing is summed or polled, and the plan's meta names every rank's host")
            size = len(set(hosts))
        counts = {
            "all_gather": (1, size),
            "all_to_all": (size, size),
            "reduce_scatter": (size, 1),
            "all_reduce": (1, 1),
        }
        if counts.get(s.kind) != (len(s.srcs), len(s.dsts)):
            self._fail(f"{s.kind!r} of {len(s.srcs)} and {len(s.dsts)} regions")
        if s.kind in ("reduce_scatter", "all_reduce") and self._caps and self._caps.numerics != "library":
            self._fail(f"{s.kind} sums in the library's own order, which this transport does not allow")
        for src in s.srcs:
            self._own(src)
        for dst in s.dsts:
            self._writable(dst, own=True)
        for word in s.slots:
            self._word(self._rank, word, self_too=True)

    # -- words and regions
    def _one_sided(self, peer: int, word: int, delta: int, wanted: int, *, self_too: bool = False) -> None:
        if self._caps and not self._caps.one_sided and peer != self._rank:
            self._fail("this transport is not one-sided")
        self._word(peer, word, self_too=self_too)
        hosts = self._plan.meta.get("hosts")
        if hosts and hosts[peer] != hosts[self._rank]:
            self._fail(f"rank {peer} is on another host, which only collectives reach")
        if delta != wanted:
            self._fail(f"delta {delta} for word {word}: it must be {wanted}")

    def _word(self, peer: int, word: int, *, self_too: bool) -> None:
        if not 0 <= peer < self._plan.size or (peer == self._rank and not self_too):
            self._fail(f"peer {peer} of {self._plan.size} ranks")
        if not 0 <= word < SLOTS_PER_RANK:
            self._fail(f"word {word}: a rank has {SLOTS_PER_RANK} for every writer")

    def _space(self, region: Region) -> str:
        return self._buffers[region.buf].space if region.buf in self._buffers else ""

    def _shape(self, r: Region) -> Shape:
        """(blocks, rows, cols) of a region that lies inside its buffer."""
        b = self._buffers.get(r.buf)
        if b is None:
            self._fail(f"{r} names no buffer")
        cols = b.cols - r.col if r.cols < 0 else r.cols
        if r.blocks != 1 and (r.blocks < 1 or r.block_stride < r.rows):
            self._fail(f"{r}: its blocks overlap")
        if min(r.row, r.rows, r.col, cols) < 0 or r.row + (r.blocks - 1) * r.block_stride + r.rows > b.rows:
            self._fail(f"{r} lies outside of {b}")
        if r.col + cols > b.cols:
            self._fail(f"{r} lies outside of {b}")
        if not -1 <= r.at < self._plan.size or (r.at >= 0 and b.space != "heap"):
            self._fail(f"{r}: only heap buffers can be reached at a peer, of which there are {self._plan.size}")
        return r.blocks, r.rows, cols

    def _own(self, r: Region) -> Shape:
        if r.at not in (-1, self._rank):
            self._fail(f"{r} is not this rank's own")
        return self._shape(r)

    def _reach(self, r: Region) -> Shape:
        """Shape of a region that a product or a sum touches like own memory."""
        if r.at not in (-1, self._rank) and self._caps and not self._caps.peer_view:
            self._fail(f"{r}: this transport gives no view of a peer's memory")
        return self._shape(r)

    def _writable(self, r: Region, *, own: bool = False) -> Shape:
        if self._space(r) == "input":
            self._fail(f"writes to the input {r.buf!r}")
        return self._own(r) if own else self._reach(r)

    def _same(self, a: Shape, b: Shape, ra: Region, rb: Region) -> None:
        if a != b:
            self._fail(f"{ra} has shape {a}, but {rb} has {b}")
        if self._buffers[ra.buf].dtype != self._buffers[rb.buf].dtype:
            self._fail(f"{ra} and {rb} differ in dtype")
