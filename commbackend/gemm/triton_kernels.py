# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# ruff: noqa: SIM102, SIM108 - compile-time conditions stand alone, and Triton has no conditional of tensor types
"""The Triton kernel behind ``triton_tile``: one persistent GEMM that waits for flags and raises flags.

A launch walks *segments* (rows of one product) in list order; tiles never straddle two segments. What a segment needs
stands in a table of int64 words in device memory (``LAUNCH_WORDS`` for the launch, then ``SEGMENT_WORDS`` a segment,
then lists that those point to):

    launch   0 CTAs that have left (0 between launches)
    segment  0 rows           1 row in the phase's a        2 row in the phase's out    3 tiles of earlier segments
             4 ready entries  5 address of the first        6 done entries              7 address of the first
             8 addends        9 address of the first       10 row in the phase's scale_a
            11 address of the counter of finished tiles (0 between launches)               12 1 if bias is added
    ready    address, delta, writer, word                    done    address, delta
    addend   address, row stride in elements, row in d or -1

A launch has two *phases*: segments 0...split-1 read ``a0`` and write ``o0``, the others ``a1`` and ``o1``. Two bases
cover own rows plus gathered rows, and send buffer plus output, without a branch in the inner loop: that would stop the
pipelining of its loads.

A slot is waited for as, and raised to, ``base + *epoch + delta``. None of these is ever specialised: ``triton_launch``
compiles ahead of time.

Memory order. Waiting: thread 0 acquires at system scope, CTA barrier, ``fence.proxy.async`` in every thread, since one
of them will issue the TMA loads, which a plain acquire does not order. Raising: every thread waits until its bulk
stores are performed (``cp.async.bulk.wait_group 0``, not ``.read``), ``fence.proxy.async``, CTA barrier; then thread 0
adds to the segment's counter with acquire-release, and the last CTA stores the slots with release at system scope, so
that they cover the stores of all CTAs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_segments import LAUNCH_WORDS, SEGMENT_WORDS

__all__ = ["gemm_kernel"]

_LAUNCH = tl.constexpr(LAUNCH_WORDS)
_SEGMENT = tl.constexpr(SEGMENT_WORDS)

# One thread polls all entries of a list; the others leave at once and meet it at the barrier that follows. A fault of
# any CTA or earlier launch ends every wait. Who claims the record first writes it, on the device and in the host's
# mirror. 4611686018427387904 is POISON (1 << 62).
_WAIT = tl.constexpr("""{
.reg .pred p;
.reg .b32 tid, left, pause;
.reg .b64 entry, addr, want, seen, start, now, kind, t;
mov.u32 $0, 0;
mov.u32 tid, %tid.x;
setp.ne.u32 p, tid, 0;
@p bra LEAVE;
mov.u64 entry, $1;
mov.u32 left, $2;
mov.u64 start, %globaltimer;
NEXT:
setp.eq.u32 p, left, 0;
@p bra LEAVE;
ld.global.b64 addr, [entry];
ld.global.b64 want, [entry+8];
add.s64 want, want, $3;
mov.u32 pause, 32;
POLL:
ld.acquire.sys.global.b64 seen, [addr];
mov.b64 kind, 2;
setp.ge.s64 p, seen, 4611686018427387904;
@p bra FAULT;
setp.ge.s64 p, seen, want;
@p bra ARRIVED;
ld.relaxed.gpu.global.b64 t, [$5];
setp.ne.s64 p, t, 0;
@p bra LEAVE;
mov.u64 now, %globaltimer;
sub.s64 now, now, start;
mov.b64 kind, 1;
setp.gt.s64 p, now, $4;
@p bra FAULT;
nanosleep.u32 pause;
shl.b32 pause, pause, 1;
min.u32 pause, pause, 512;
bra POLL;
ARRIVED:
add.s64 entry, entry, 32;
sub.u32 left, left, 1;
bra NEXT;
FAULT:
atom.relaxed.gpu.global.cas.b64 t, [$5], 0, -1;
setp.ne.s64 p, t, 0;
@p bra LEAVE;
ld.global.b64 t, [entry+16];
st.relaxed.sys.global.b64 [$5+8], t;
st.relaxed.sys.global.b64 [$6+8], t;
ld.global.b64 t, [entry+24];
st.relaxed.sys.global.b64 [$5+16], t;
st.relaxed.sys.global.b64 [$6+16], t;
st.relaxed.sys.global.b64 [$5+24], want;
st.relaxed.sys.global.b64 [$6+24], want;
st.relaxed.sys.global.b64 [$5+32], seen;
st.relaxed.sys.global.b64 [$6+32], seen;
st.release.sys.global.b64 [$6], kind;
st.release.gpu.global.b64 [$5], kind;
LEAVE:
}""")

# Thread 0 counts the tiles this CTA has finished; who completes ``total`` resets the counter and raises the slots (to
# POISON after a fault, so that peers stop too).
_RAISE = tl.constexpr("""{
.reg .pred p;
.reg .b32 tid, left, old;
.reg .b64 entry, addr, want, t;
mov.u32 $0, 0;
mov.u32 tid, %tid.x;
setp.ne.u32 p, tid, 0;
@p bra LEAVE;
atom.acq_rel.gpu.global.add.u32 old, [$1], $2;
add.u32 old, old, $2;
setp.ne.u32 p, old, $3;
@p bra LEAVE;
st.relaxed.gpu.global.b32 [$1], 0;
mov.u64 entry, $4;
mov.u32 left, $5;
ld.relaxed.gpu.global.b64 t, [$7];
NEXT:
setp.eq.u32 p, left, 0;
@p bra LEAVE;
ld.global.b64 addr, [entry];
ld.global.b64 want, [entry+8];
add.s64 want, want, $6;
setp.ne.s64 p, t, 0;
@p mov.b64 want, 4611686018427387904;
st.release.sys.global.b64 [addr], want;
add.s64 entry, entry, 16;
sub.u32 left, left, 1;
bra NEXT;
LEAVE:
}""")


@triton.jit
def _wait(entries, count, base, timeout_ns, fault, fault_host, BULK: tl.constexpr):
    """Return when every slot of the list has its value, or a fault is on record."""
    tl.inline_asm_elementwise(
        _WAIT,
        "=r,l,r,l,l,l,l,~{memory}",
        [entries, count, base, timeout_ns, fault, fault_host],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
    if BULK:
        tl.inline_asm_elementwise(
            "{ mov.u32 $0, 0; fence.proxy.async; }", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _stored(BULK: tl.constexpr):
    """Return when every store this CTA has issued is performed, also those of the bulk copy engine."""
    if BULK:
        tl.inline_asm_elementwise(
            "{ mov.u32 $0, 0; cp.async.bulk.wait_group 0; fence.proxy.async; }",
            "=r,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def _raise(counter, mine, total, entries, count, base, fault, BULK: tl.constexpr):
    """Count the ``mine`` tiles of this CTA; when ``total`` are counted, raise the slots."""
    _stored(BULK)
    tl.inline_asm_elementwise(
        _RAISE,
        "=r,l,r,r,l,r,l,l,~{memory}",
        [counter, mine, total, entries, count, base, fault],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _prefetch(seg, row, col, rows, n_cols, OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Bring this tile of every addend into L2 while the products run."""
    LINE: tl.constexpr = 128 // (OUT.primitive_bitwidth // 8)
    i = tl.arange(0, BM * (BN // LINE))
    r = row + i // (BN // LINE)
    c = col + i % (BN // LINE) * LINE
    for j in range(tl.load(seg + 8).to(tl.int32)):
        entry = (tl.load(seg + 9) + 24 * j).to(tl.pointer_type(tl.int64))
        where = tl.load(entry) + (r.to(tl.int64) * tl.load(entry + 1) + c) * (OUT.primitive_bitwidth // 8)
        # Past the last row or column any address of the tensor will do.
        where = tl.where((r < rows) & (c < n_cols), where, tl.load(entry))
        tl.inline_asm_elementwise(
            "{ mov.u32 $0, 0; prefetch.global.L2 [$1]; }", "=r,l", [where], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _add(
    acc, seg, row, col, rows, n, d, OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ALIGNED: tl.constexpr,
    MAPPED: tl.constexpr,
):  # fmt: skip
    """Return ``acc`` plus this tile of every addend, in their order."""
    offs_m = row + tl.arange(0, BM)
    offs_n = col + tl.arange(0, BN)
    inside = (offs_m < rows)[:, None] & (offs_n < n)[None, :]
    for j in range(tl.load(seg + 8).to(tl.int32)):
        entry = (tl.load(seg + 9) + 24 * j).to(tl.pointer_type(tl.int64))
        add = tl.load(entry).to(tl.pointer_type(OUT))
        stride = tl.load(entry + 1)
        if ALIGNED:
            add = tl.multiple_of(add, 16)
            stride = tl.multiple_of(stride, 8)
        where = add + offs_m.to(tl.int64)[:, None] * stride + offs_n[None, :]
        if MAPPED:
            # Through shared memory, from where the layout of the products is read directly.
            first = tl.load(entry + 2).to(tl.int32)
            if first >= 0:
                acc += d.load([first + row, col]).to(tl.float32)
            else:
                acc += tl.load(where, mask=inside, other=0.0).to(tl.float32)
        else:
            acc += tl.load(where, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _finish(
    acc, seg, row, col, n, o, c, ldc, d, bias, scale_a, scale_a_rows, scale_b, scale_b_rows,
    OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BULK: tl.constexpr, ALIGNED: tl.constexpr,
    BIAS: tl.constexpr, ADDENDS: tl.constexpr, SCALES: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Scale, add, round and store ``acc``: rows from ``row`` of the segment, columns from ``col``."""
    rows = tl.load(seg).to(tl.int32)
    offs_m = row + tl.arange(0, BM)
    offs_n = col + tl.arange(0, BN)
    inside_n = offs_n < n
    inside = (offs_m < rows)[:, None] & inside_n[None, :]
    if SCALES:
        first_a = tl.load(seg + 10).to(tl.int32)
        sa = tl.load(scale_a + (first_a + offs_m) * scale_a_rows, mask=offs_m < rows, other=0.0)
        sb = tl.load(scale_b + offs_n * scale_b_rows, mask=inside_n, other=0.0)
        acc = acc * sa[:, None] * sb[None, :]
    if BIAS:
        # A mask and no branch: rows of peers have no bias, since their sum gets it once.
        biased_n = n * tl.load(seg + 12).to(tl.int32)
        acc += tl.load(bias + offs_n, mask=offs_n < biased_n, other=0.0).to(tl.float32)[None, :]
    if ADDENDS:
        acc = _add(acc, seg, row, col, rows, n, d, OUT, BM, BN, ALIGNED, MAPPED)
    value = acc.to(OUT)
    out_row = tl.load(seg + 2).to(tl.int32)
    if BULK:
        # A bulk store clips at the end of the buffer, not at the end of the segment.
        if row + BM <= rows:
            o.store([out_row + row, col], value)
        else:
            tl.store(c + (out_row + offs_m).to(tl.int64)[:, None] * ldc + offs_n[None, :], value, mask=inside)
    else:
        tl.store(c + (out_row + offs_m).to(tl.int64)[:, None] * ldc + offs_n[None, :], value, mask=inside)


@triton.jit
def _products(
    a, b, a_row, row, rows, col, n, k, lda, ldb, a_step, b_step,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BULK: tl.constexpr, ALIGNED: tl.constexpr,
    B_COLS: tl.constexpr, EVEN_K: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return the fp32 products of one tile. ``B_COLS``: b's unit stride is along n instead of k."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if BULK:
        at = a_row + row
        for i in range(tl.cdiv(k, BK)):
            x = a.load([at, i * BK])
            if B_COLS:
                y = b.load([i * BK, col])
            else:
                y = b.load([col, i * BK]).T
            if EXACT:
                acc = tl.dot(x, y, acc, max_num_imprecise_acc=BK)
            else:
                acc = tl.dot(x, y, acc)
    else:
        # Rows and columns past the end repeat the first one: never stored, always readable.
        offs_m = row + tl.arange(0, BM)
        offs_n = col + tl.arange(0, BN)
        offs_k = tl.arange(0, BK)
        offs_m = a_row + tl.where(offs_m < rows, offs_m, 0)
        offs_n = tl.where(offs_n < n, offs_n, 0)
        if ALIGNED and B_COLS:
            # n is a multiple of 8 then: the choice above keeps groups of 8 together.
            offs_n = tl.max_contiguous(tl.multiple_of(offs_n, 8), 8)
        x_ptr = a + offs_m.to(tl.int64)[:, None] * lda + offs_k[None, :] * a_step
        y_ptr = b + offs_n.to(tl.int64)[None, :] * ldb + offs_k[:, None] * b_step
        for i in range(tl.cdiv(k, BK)):
            if EVEN_K:
                x = tl.load(x_ptr)
                y = tl.load(y_ptr)
            else:
                x = tl.load(x_ptr, mask=offs_k[None, :] < k - i * BK, other=0.0)
                y = tl.load(y_ptr, mask=offs_k[:, None] < k - i * BK, other=0.0)
            acc = tl.dot(x, y, acc)
            x_ptr += BK * a_step
            y_ptr += BK * b_step
    return acc


@triton.jit
def _phase(
    first, last, a, b, o, c, d, bias, scale_a, scale_b, table, fault, fault_host,
    n, k, lda, ldb, ldc, a_step, b_step, scale_a_rows, scale_b_rows, base, timeout_ns,
    OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    BULK: tl.constexpr, ALIGNED: tl.constexpr, B_COLS: tl.constexpr, EVEN_K: tl.constexpr, EXACT: tl.constexpr,
    POLLS: tl.constexpr, BIAS: tl.constexpr, ADDENDS: tl.constexpr, SCALES: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Segments ``first``...``last`` - 1."""
    pid = tl.program_id(0)
    ctas = tl.num_programs(0)
    n_tiles = tl.cdiv(n, BN)
    for s in range(first, last):
        seg = table + _LAUNCH + s * _SEGMENT
        rows = tl.load(seg).to(tl.int32)
        a_row = tl.load(seg + 1).to(tl.int32)
        m_tiles = tl.cdiv(rows, BM)
        tiles = m_tiles * n_tiles
        # Tiles are dealt to the CTAs in turn, across the borders of segments.
        begin = (pid + ctas - (tl.load(seg + 3) % ctas).to(tl.int32)) % ctas
        # A segment of no rows still waits and raises: CTA 0 sees to that.
        serves = (begin < tiles) | ((tiles == 0) & (pid == 0))
        if POLLS:
            if serves & (tl.load(seg + 4) > 0):
                _wait(tl.load(seg + 5), tl.load(seg + 4).to(tl.int32), base, timeout_ns, fault, fault_host, BULK)
        for t in range(begin, tiles, ctas):
            # Groups of GROUP row blocks share columns of b while they are in L2.
            group = t // (GROUP * n_tiles)
            high = tl.minimum(m_tiles - group * GROUP, GROUP)
            inner = t % (GROUP * n_tiles)
            row = (group * GROUP + inner % high) * BM
            col = (inner // high) * BN
            if ADDENDS and POLLS:
                _prefetch(seg, row, col, rows, n, OUT, BM, BN)
            acc = _products(a, b, a_row, row, rows, col, n, k, lda, ldb, a_step, b_step,
                            BM, BN, BK, BULK, ALIGNED, B_COLS, EVEN_K, EXACT)  # fmt: skip
            if SPLIT:
                left, right = acc.reshape((BM, 2, BN // 2)).permute(0, 2, 1).split()
                _finish(left, seg, row, col, n, o, c, ldc, d, bias, scale_a, scale_a_rows,
                        scale_b, scale_b_rows, OUT, BM, BN // 2, BULK, ALIGNED, BIAS,
                        ADDENDS, SCALES, MAPPED)  # fmt: skip
                _finish(right, seg, row, col + BN // 2, n, o, c, ldc, d, bias, scale_a, scale_a_rows,
                        scale_b, scale_b_rows, OUT, BM, BN // 2, BULK, ALIGNED, BIAS,
                        ADDENDS, SCALES, MAPPED)  # fmt: skip
            else:
                _finish(acc, seg, row, col, n, o, c, ldc, d, bias, scale_a, scale_a_rows, scale_b, scale_b_rows,
                        OUT, BM, BN, BULK, ALIGNED, BIAS, ADDENDS, SCALES, MAPPED)  # fmt: skip
        if POLLS:
            # Once a CTA, not once a tile: the slots rise only when all tiles are stored anyway.
            if serves & (tl.load(seg + 6) > 0):
                mine = tl.maximum(tl.cdiv(tiles - begin, ctas), 1)
                count = tl.load(seg + 6).to(tl.int32)
                _raise(tl.load(seg + 11), mine, tl.maximum(tiles, 1), tl.load(seg + 7), count, base, fault, BULK)


@triton.jit
def _spoil(first, last, c, ldc, table, n, OUT: tl.constexpr):
    """Fill the outputs of segments ``first``...``last`` - 1 with NaN."""
    offs = tl.arange(0, 1024)
    for s in range(first, last):
        seg = table + _LAUNCH + s * _SEGMENT
        for row in range(tl.load(seg).to(tl.int32)):
            for col in range(0, n, 1024):
                where = c + (tl.load(seg + 2) + row) * ldc + col + offs
                tl.store(where, tl.full((1024,), float("nan"), tl.float32).to(OUT), mask=col + offs < n)


@triton.jit
def gemm_kernel(
    a0, a1, b, o0, o1, d, c0, c1, bias, scale_a0, scale_a1, scale_b, table, fault, fault_host, epoch,
    a0_rows, a1_rows, o0_rows, o1_rows, n, k, lda0, lda1, ldb, ldc0, ldc1, a_step, b_step,
    scale_a_rows, scale_b_rows, split, segments, seals, base, timeout_ns,
    OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    BULK: tl.constexpr, MAPS: tl.constexpr, ALIGNED: tl.constexpr, B_COLS: tl.constexpr, EVEN_K: tl.constexpr,
    EXACT: tl.constexpr, POLLS: tl.constexpr, BIAS: tl.constexpr, ADDENDS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """out = a @ b.T (+ bias) (+ addends) over segments; see the module's head.

    ``BULK`` reads and writes through tensor maps: made by the host and passed as a0...o1 (d: one of addends), or
    (``MAPS``) made here from pointers. Else a0, a1, b are pointers with strides lda (along rows), ldb (along n) and
    a_step, b_step (along k).
    ``ALIGNED``: addends start at multiples of 16 bytes, with row strides of multiples of 8 elements; the other
    addresses and strides carry such promises in the types they are compiled for.
    ``seals``: 1 when the launch may fail: the last CTA to leave looks for a fault and spoils every output.
    """
    BN_STORE: tl.constexpr = BN // 2 if SPLIT else BN
    MAPPED: tl.constexpr = BULK and ADDENDS and not MAPS
    if MAPS:
        da0 = tl.make_tensor_descriptor(a0, [a0_rows, k], [lda0, 1], [BM, BK])
        da1 = tl.make_tensor_descriptor(a1, [a1_rows, k], [lda1, 1], [BM, BK])
        do0 = tl.make_tensor_descriptor(o0, [o0_rows, n], [ldc0, 1], [BM, BN_STORE])
        do1 = tl.make_tensor_descriptor(o1, [o1_rows, n], [ldc1, 1], [BM, BN_STORE])
        if B_COLS:
            db = tl.make_tensor_descriptor(b, [k, n], [ldb, 1], [BK, BN])
        else:
            db = tl.make_tensor_descriptor(b, [n, k], [ldb, 1], [BN, BK])
    else:
        da0, da1, db, do0, do1 = a0, a1, b, o0, o1
    if POLLS:
        base += tl.load(epoch)
    _phase(0, split, da0, db, do0, c0, d, bias, scale_a0, scale_b, table, fault, fault_host,
           n, k, lda0, ldb, ldc0, a_step, b_step, scale_a_rows, scale_b_rows, base, timeout_ns,
           OUT, BM, BN, BK, GROUP, SPLIT, BULK, ALIGNED, B_COLS, EVEN_K, EXACT,
           POLLS, BIAS, ADDENDS, SCALES, MAPPED)  # fmt: skip
    _phase(split, segments, da1, db, do1, c1, d, bias, scale_a1, scale_b, table, fault, fault_host,
           n, k, lda1, ldb, ldc1, a_step, b_step, scale_a_rows, scale_b_rows, base, timeout_ns,
           OUT, BM, BN, BK, GROUP, SPLIT, BULK, ALIGNED, B_COLS, EVEN_K, EXACT,
           POLLS, BIAS, ADDENDS, SCALES, MAPPED)  # fmt: skip
    if POLLS:
        if seals != 0:
            _stored(BULK)
            if tl.atomic_add(table, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
                tl.store(table, 0)
                if tl.load(fault, volatile=True) != 0:
                    _spoil(0, split, c0, ldc0, table, n, OUT)
                    _spoil(split, segments, c1, ldc1, table, n, OUT)
