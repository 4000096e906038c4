# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"

"""Triton kernels that sum partial results in rank order with fp32 accumulation: alone, or as a one-shot all-reduce.

Both may add a bias row and a residual and apply RMSNorm on the way out. With a residual the sum is rounded once, stored
as the new residual, and that stored value is what is normalised.

One-shot all-reduce. Every program owns a region of the symmetric memory of all ranks: ``2`` halves x ``SIZE`` slots of
``slot_nbytes``, and one flag word a writer. A program pushes its rows to its slot at every rank, raises its flag there
to its epoch, waits for all flags of its own and sums its slots. Epochs live in device memory, one a program, so that
replays of a graph and eager calls mix. Halves alternate by epoch, no barrier follows: who writes half e % 2 again in
call e + 2 has seen flag e + 1 of every rank, which that rank raised after it had read everything of call e.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["one_shot_kernel", "reduce_kernel"]

# Thread i < count raises word $3 of rank i's memory, after everything this CTA stored before the barrier ahead of it.
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

# Thread i < count waits for word i of the list at $1 (one writer every $3 bytes). Faults as in triton_kernels.
_WAIT_EACH = tl.constexpr("""{
.reg .pred p;
.reg .b32 tid, pause;
.reg .b64 addr, seen, start, now, kind, t;
mov.u32 $0, 0;
mov.u32 tid, %tid.x;
setp.ge.u32 p, tid, $2;
@p bra LEAVE;
cvt.u64.u32 t, tid;
mad.lo.s64 addr, t, $3, $1;
mov.u64 start, %globaltimer;
mov.u32 pause, 16;
POLL:
ld.acquire.sys.global.b64 seen, [addr];
mov.b64 kind, 2;
setp.ge.s64 p, seen, 4611686018427387904;
@p bra FAULT;
setp.ge.s64 p, seen, $4;
@p bra LEAVE;
ld.relaxed.gpu.global.b64 t, [$6];
setp.ne.s64 p, t, 0;
@p bra LEAVE;
mov.u64 now, %globaltimer;
sub.s64 now, now, start;
mov.b64 kind, 1;
setp.gt.s64 p, now, $5;
@p bra FAULT;
nanosleep.u32 pause;
shl.b32 pause, pause, 1;
min.u32 pause, pause, 256;
bra POLL;
FAULT:
atom.relaxed.gpu.global.cas.b64 t, [$6], 0, -1;
setp.ne.s64 p, t, 0;
@p bra LEAVE;
cvt.u64.u32 t, tid;
st.relaxed.sys.global.b64 [$6+8], t;
st.relaxed.sys.global.b64 [$7+8], t;
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
}""")


@triton.jit
def _emit(
    acc, row, cols, inside, n, out, ldo, residual, ldr, bias, weight, eps,
    DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Finish and store one row's sum ``acc``."""
    if BIAS:
        acc += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        at = residual + row.to(tl.int64) * ldr + cols
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, acc.to(DTYPE), mask=inside)
        acc = acc.to(DTYPE).to(tl.float32)
    if NORM:
        mean = tl.sum(tl.where(inside, acc * acc, 0.0), axis=0) / n
        acc = acc * tl.rsqrt(mean + eps) * tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * ldo + cols, acc.to(DTYPE), mask=inside)


@triton.jit
def reduce_kernel(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15,
    ld0, ld1, ld2, ld3, ld4, ld5, ld6, ld7, ld8, ld9, ld10, ld11, ld12, ld13, ld14, ld15,
    out, ldo, residual, ldr, bias, weight, rows, n, eps,
    COUNT: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """out = s0 + s1 + ... (``COUNT`` of them) (+ bias) (+ residual), then RMSNorm. With ``NORM`` one block is one
    row."""
    srcs = (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)
    lds = (ld0, ld1, ld2, ld3, ld4, ld5, ld6, ld7, ld8, ld9, ld10, ld11, ld12, ld13, ld14, ld15)
    blocks = tl.cdiv(n, BLOCK)
    for t in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = t // blocks
        cols = t % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = cols < n
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        for i in tl.static_range(COUNT):
            acc += tl.load(srcs[i] + row.to(tl.int64) * lds[i] + cols, mask=inside, other=0.0).to(tl.float32)
        _emit(acc, row, cols, inside, n, out, ldo, residual, ldr, bias, weight, eps, DTYPE, BIAS, RESIDUAL, NORM)


@triton.jit
def one_shot_kernel(
    x, ldx, out, ldo, residual, ldr, bias, weight, bases, epochs, fault, fault_host,
    own, rank, programs, slot_nbytes, rows, n, eps, timeout_ns,
    SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """All-reduce x (rows, n) into out. Program p takes rows p, p + grid, ...; ``bases``: the ranks' memory, as mapped
    here; ``own``: this rank's, ``programs``: how many programs that memory has regions for.
    """
    pid = tl.program_id(0)
    grid = tl.num_programs(0)
    epoch = tl.load(epochs + pid) + 1
    # Words for the flags of every writer and program, then the regions.
    slot = SIZE * programs * 8 + ((epoch % 2) * programs + pid) * SIZE * slot_nbytes
    cols = tl.arange(0, BLOCK)
    inside = cols < n
    for i in range(tl.cdiv(rows - pid, grid)):
        value = tl.load(x + (pid + i * grid).to(tl.int64) * ldx + cols, mask=inside, other=0.0)
        for q in tl.static_range(SIZE):
            there = (
                tl.load(bases + q) + slot + rank * slot_nbytes + i.to(tl.int64) * n * (DTYPE.primitive_bitwidth // 8)
            )
            tl.store(tl.multiple_of(there.to(tl.pointer_type(DTYPE)), 16) + cols, value, mask=inside)
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        _RAISE_EACH,
        "=r,l,r,l,l,~{memory}",
        [bases, tl.full((), SIZE, tl.int32), (rank.to(tl.int64) * programs + pid) * 8, epoch],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.inline_asm_elementwise(
        _WAIT_EACH,
        "=r,l,r,l,l,l,l,l,~{memory}",
        [own + pid * 8, tl.full((), SIZE, tl.int32), programs.to(tl.int64) * 8, epoch, timeout_ns, fault, fault_host],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
    failed = tl.load(fault, volatile=True) != 0
    for i in range(tl.cdiv(rows - pid, grid)):
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        for q in tl.static_range(SIZE):
            here = own + slot + q * slot_nbytes + i.to(tl.int64) * n * (DTYPE.primitive_bitwidth // 8)
            part = tl.multiple_of(here.to(tl.pointer_type(DTYPE)), 16) + cols
            acc += tl.load(part, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        acc = tl.where(failed, float("nan"), acc)
        _emit(
            acc, pid + i * grid, cols, inside, n, out, ldo, residual, ldr, bias, weight, eps, DTYPE, BIAS, RESIDUAL,
            NORM
        )  # fmt: skip
    tl.debug_barrier()
    tl.store(epochs + pid, epoch)
