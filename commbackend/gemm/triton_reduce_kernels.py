# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"

"""Triton kernels that sum partial results in rank order with fp32 accumulation: alone, or as a one-shot all-reduce.

A residual is added after the partials, a bias row last; the sum is rounded once. RMSNorm is of the rounded sum.

One-shot all-reduce. A *task* is BLOCK columns of one row (with RMSNorm a whole row), dealt to the programs in turn.
Every program owns a region of the symmetric memory of all ranks: 2 halves x SIZE slots of ``slot_nbytes``. It pushes
its tasks to its slot at every rank, waits until all ranks' are in its own, and sums its slots. Epochs live in device
memory, one a program, so that replays of a graph and eager calls mix, and calls of any size. Halves alternate by epoch
and no barrier follows: who writes half e % 2 again in call e + 2 has seen call e + 1 of the same program of every rank,
which came after that program had read everything of call e.

How a rank sees that a peer's rows are there:

* ``one_shot_kernel``: by a flag, one word a writer and program, raised with release at system scope after a barrier and
  fence, and acquired at system scope before a barrier.
* ``low_latency_kernel``: the data are their own flags (after NCCL's LL protocol): each 8-byte word carries 4 bytes of
  data and the low half of the epoch, and is stored and loaded as one. Twice the bytes, but nothing to order: no fence,
  no barrier, no word that travels after the data. Words of call e - 2 hold another epoch.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["low_latency_kernel", "one_shot_kernel", "reduce_kernel"]

# Thread i < count raises the word at list[i] + $3, after everything this CTA stored before the barrier ahead of it.
_RAISE_EACH = tl.constexpr("""{
.reg .pred p;
.reg .b32 tid;
.reg .b64 t, addr;
mov.u32 $0, 0;
mov.u32 tid, %tid.x;
setp.ge.u32 p, tid, $2;
@p bra LEAVE;
mul.wide.u32 t, tid, 8;
add.s64 t, t, $1;
ld.global.b64 addr, [t];
add.s64 addr, addr, $3;
fence.acq_rel.sys;
st.release.sys.global.b64 [addr], $4;
LEAVE:
}""")

# What both waits do about poison (kind 2), a fault on record and the deadline (kind 1). Who claims the record first
# writes it: kind, writer, program, wanted, seen; on the device ($6) and in the host's mirror ($7).
_FAULT = """FAULT:
atom.relaxed.gpu.global.cas.b64 t, [$6], 0, -1;
setp.ne.s64 p, t, 0;
@p bra LEAVE;
st.relaxed.sys.global.b64 [$6+8], who;
st.relaxed.sys.global.b64 [$7+8], who;
mov.u32 pause, %ctaid.x;
cvt.u64.u32 t, pause;
st.relaxed.sys.global.b64 [$6+16], t;
st.relaxed.sys.global.b64 [$7+16], t;
st.relaxed.sys.global.b64 [$6+24], $4;
st.relaxed.sys.global.b64 [$7+24], $4;
st.relaxed.sys.global.b64 [$6+32], seen;
st.relaxed.sys.global.b64 [$7+32], seen;
st.release.sys.global.b64 [$7], kind;
st.release.gpu.global.b64 [$6], kind;
LEAVE:
}"""
_CLOCK = """ld.relaxed.gpu.global.b64 t, [$6];
setp.ne.s64 p, t, 0;
@p bra LEAVE;
mov.u64 now, %globaltimer;
sub.s64 now, now, start;
mov.b64 kind, 1;
setp.gt.s64 p, now, $5;
@p bra FAULT;
"""

# Thread i < count waits until the word at list[i] + $3 is $4 or more.
_WAIT_EACH = tl.constexpr(
    """{
.reg .pred p;
.reg .b32 tid, pause;
.reg .b64 addr, seen, start, now, kind, t, who;
mov.u32 $0, 0;
mov.u32 tid, %tid.x;
setp.ge.u32 p, tid, $2;
@p bra LEAVE;
cvt.u64.u32 who, tid;
mad.lo.s64 addr, who, 8, $1;
ld.global.b64 addr, [addr];
add.s64 addr, addr, $3;
mov.u64 start, %globaltimer;
mov.u32 pause, 16;
POLL:
ld.acquire.sys.global.b64 seen, [addr];
mov.b64 kind, 2;
setp.ge.s64 p, seen, 4611686018427387904;
@p bra FAULT;
setp.ge.s64 p, seen, $4;
@p bra LEAVE;
"""
    + _CLOCK
    + """nanosleep.u32 pause;
shl.b32 pause, pause, 1;
min.u32 pause, pause, 256;
bra POLL;
"""
    + _FAULT
)

# Every thread stores words of its own: $2 to [$1], where $3 is not 0.
_STORE_WORD = tl.constexpr("""{
.reg .pred p;
mov.u32 $0, 0;
setp.ne.s32 p, $3, 0;
@p st.relaxed.sys.global.b64 [$1], $2;
}""")

# $0 = 1 if a wait must end: poison in the word at $1, a fault on record, or $5 ns after $2; else 0.
_EXPIRED = tl.constexpr(
    """{
.reg .pred p;
.reg .b32 pause;
.reg .b64 seen, start, now, kind, t, who;
mov.u32 $0, 1;
mov.u64 who, $3;
mov.u64 start, $2;
ld.relaxed.sys.global.b64 seen, [$1];
mov.b64 kind, 2;
setp.ge.s64 p, seen, 4611686018427387904;
@p bra FAULT;
"""
    + _CLOCK
    + """mov.u32 $0, 0;
bra LEAVE;
"""
    + _FAULT
)
_NOW = tl.constexpr("mov.u64 $0, %globaltimer;")


@triton.jit
def _emit(
    acc, row, cols, inside, n, out, ldo, residual, ldr, bias, normed, ldn, weight, eps,
    DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Finish and store the sum ``acc`` of columns ``cols`` of one row."""
    at = row.to(tl.int64)
    if RESIDUAL:
        acc += tl.load(residual + at * ldr + cols, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        acc += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    value = acc.to(DTYPE)
    tl.store(out + at * ldo + cols, value, mask=inside)
    if NORM:
        wide = value.to(tl.float32)
        mean = tl.sum(tl.where(inside, wide * wide, 0.0), axis=0) / n
        wide = wide * tl.rsqrt(mean + eps) * tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + at * ldn + cols, wide.to(DTYPE), mask=inside)


@triton.jit
def reduce_kernel(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15, s16,
    ld0, ld1, ld2, ld3, ld4, ld5, ld6, ld7, ld8, ld9, ld10, ld11, ld12, ld13, ld14, ld15, ld16,
    out, ldo, bias, rows, n, COUNT: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """out = s0 + s1 + ... (``COUNT`` of them) (+ bias)."""
    srcs = (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15, s16)
    lds = (ld0, ld1, ld2, ld3, ld4, ld5, ld6, ld7, ld8, ld9, ld10, ld11, ld12, ld13, ld14, ld15, ld16)
    blocks = tl.cdiv(n, BLOCK)
    for t in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = t // blocks
        cols = t % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = cols < n
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        for i in tl.static_range(COUNT):
            acc += tl.load(srcs[i] + row.to(tl.int64) * lds[i] + cols, mask=inside, other=0.0).to(tl.float32)
        _emit(acc, row, cols, inside, n, out, ldo, out, ldo, bias, out, ldo, bias, 0.0, DTYPE, BIAS, False, False)


@triton.jit
def one_shot_kernel(
    x, ldx, out, ldo, residual, ldr, bias, normed, ldn, weight, data, raised, waited, epochs, fault, fault_host,
    at, rank, programs, slot_nbytes, rows, n, eps, timeout_ns,
    SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """All-reduce x (rows, n) into out. ``data``: addresses of the ranks' memory, where the regions start at byte
    ``at``; ``raised``, ``waited``: addresses of the words of program 0; ``programs``: how many programs have regions.
    """
    pid = tl.program_id(0)
    grid = tl.num_programs(0)
    epoch = tl.load(epochs + pid) + 1
    slot = at + ((epoch % 2) * programs + pid) * SIZE * slot_nbytes
    blocks = tl.cdiv(n, BLOCK)
    tasks = rows * blocks
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    for i in range(tl.cdiv(tasks - pid, grid)):
        t = pid + i * grid
        cols = t % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = cols < n
        value = tl.load(x + (t // blocks).to(tl.int64) * ldx + cols, mask=inside, other=0.0)
        for q in tl.static_range(SIZE):
            there = tl.load(data + q) + slot + rank * slot_nbytes + i.to(tl.int64) * tl.minimum(n, BLOCK) * ITEM
            ptr = tl.multiple_of(there.to(tl.pointer_type(DTYPE)), 16) + tl.arange(0, BLOCK)
            tl.store(ptr, value, mask=inside)
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        _RAISE_EACH, "=&r,l,r,l,l,~{memory}", [raised, tl.full((), SIZE, tl.int32), pid.to(tl.int64) * 8, epoch],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.inline_asm_elementwise(
        _WAIT_EACH, "=&r,l,r,l,l,l,l,l,~{memory}",
        [waited, tl.full((), SIZE, tl.int32), pid.to(tl.int64) * 8, epoch, timeout_ns, fault, fault_host],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()
    failed = tl.load(fault, volatile=True) != 0
    here = tl.load(data + rank) + slot
    for i in range(tl.cdiv(tasks - pid, grid)):
        t = pid + i * grid
        cols = t % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = cols < n
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        for q in tl.static_range(SIZE):
            part = here + q * slot_nbytes + i.to(tl.int64) * tl.minimum(n, BLOCK) * ITEM
            ptr = tl.multiple_of(part.to(tl.pointer_type(DTYPE)), 16) + tl.arange(0, BLOCK)
            acc += tl.load(ptr, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        acc = tl.where(failed, float("nan"), acc)
        _emit(acc, t // blocks, cols, inside, n, out, ldo, residual, ldr, bias, normed, ldn, weight, eps,
              DTYPE, BIAS, RESIDUAL, NORM)  # fmt: skip
    tl.debug_barrier()
    tl.store(epochs + pid, epoch)


@triton.jit
def low_latency_kernel(
    x, ldx, out, ldo, residual, ldr, bias, data, poison, epochs, fault, fault_host,
    at, rank, programs, slot_nbytes, rows, n, timeout_ns,
    SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, WAITERS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The same with data that are their own flags. ``n`` is even.

    ``poison``: address of a word that tells of a failure; ``WAITERS``: how many threads a program has.
    """
    pid = tl.program_id(0)
    grid = tl.num_programs(0)
    epoch = tl.load(epochs + pid) + 1
    slot = at + ((epoch % 2) * programs + pid) * SIZE * slot_nbytes
    blocks = tl.cdiv(n, BLOCK)
    tasks = rows * blocks
    # Elements of a word.
    EACH: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    WORDS: tl.constexpr = BLOCK // EACH
    words = tl.arange(0, WORDS)
    for i in range(tl.cdiv(tasks - pid, grid)):
        t = pid + i * grid
        col = t % blocks * BLOCK
        inside = words * EACH + col < n
        row = (x + (t // blocks).to(tl.int64) * ldx + col).to(tl.pointer_type(tl.int32))
        value = tl.load(row + words, mask=inside, other=0)
        word = (value.to(tl.int64) & 0xFFFFFFFF) | (epoch << 32)
        offset = slot + rank * slot_nbytes + i.to(tl.int64) * WORDS * 8
        for q in tl.static_range(SIZE):
            tl.inline_asm_elementwise(
                _STORE_WORD, "=&r,l,l,r,~{memory}",
                [tl.load(data + q) + offset + words * 8, word, inside.to(tl.int32)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    here = tl.load(data + rank) + slot
    start = tl.inline_asm_elementwise(_NOW, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    for i in range(tl.cdiv(tasks - pid, grid)):
        t = pid + i * grid
        col = t % blocks * BLOCK
        inside = words * EACH + col < n
        low = tl.zeros((WORDS,), dtype=tl.float32)
        high = tl.zeros((WORDS,), dtype=tl.float32)
        for q in tl.static_range(SIZE):
            part = (here + q * slot_nbytes + i.to(tl.int64) * WORDS * 8).to(tl.pointer_type(tl.int64))
            part = tl.multiple_of(part, 16) + words
            # All words at once, again until the last one is there. The sums make every thread go the same way.
            word = tl.load(part, mask=inside, other=0, volatile=True)
            missing = tl.max((inside & ((word ^ (epoch << 32)) >> 32 != 0)).to(tl.int32), axis=0)
            while missing != 0:
                expired = tl.inline_asm_elementwise(
                    _EXPIRED, "=&r,l,l,l,l,l,l,l,~{memory}",
                    [poison + tl.zeros((WAITERS,), tl.int64), start, tl.full((), q, tl.int64), epoch, timeout_ns, fault,
                     fault_host],
                    dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip
                word = tl.load(part, mask=inside, other=0, volatile=True)
                missing = tl.max((inside & ((word ^ (epoch << 32)) >> 32 != 0)).to(tl.int32), axis=0)
                missing = tl.where(tl.max(expired, axis=0) != 0, 0, missing)
            if EACH == 2:
                low += (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
                high += ((word >> 16) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            else:
                low += word.to(tl.int32).to(tl.float32, bitcast=True)
        tl.debug_barrier()
        failed = tl.load(fault, volatile=True) != 0
        acc = tl.interleave(low, high) if EACH == 2 else low
        acc = tl.where(failed, float("nan"), acc)
        cols = col + tl.arange(0, BLOCK)
        _emit(acc, t // blocks, cols, cols < n, n, out, ldo, residual, ldr, bias, out, ldo, out, 0.0,
              DTYPE, BIAS, RESIDUAL, False)  # fmt: skip
    tl.debug_barrier()
    tl.store(epochs + pid, epoch)
