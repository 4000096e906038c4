"""What only a GPU shows of transport userbuffers. Every check runs on all ranks, in processes of their own, and returns
figures for the table or None. Names with "queues" are repeated under other numbers of hardware queues.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from commbackend.contract import POISON, Slot
from commbackend.errors import CommBackendError, CommTimeout, HeapExhausted
from commbackend.transports.userbuffers import UserbuffersTransport


@contextlib.contextmanager
def connected(rank: int, group: Any, options: dict[str, Any], timeout_s: float = 20.0) -> Iterator[Any]:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group.timeout_s = timeout_s
    transport = UserbuffersTransport.connect(group, device, options)
    try:
        yield transport
    except BaseException as e:
        transport.abort(f"the check failed: {e!r}")
        raise
    finally:
        with contextlib.suppress(CommBackendError):
            transport.close()


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def current() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def finish(t: Any) -> None:
    torch.cuda.synchronize()
    if t.fault is not None:
        raise t.fault


def how_it_connects(rank: int, group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds to connect, and what was found."""
    torch.zeros(1, device=f"cuda:{rank % torch.cuda.device_count()}")
    start = time.monotonic()
    with connected(rank, group, options) as t:
        return {"connect_s": time.monotonic() - start, "memory": t.memory, "waits": t.waits}


def layouts(rank: int, group: Any, options: dict[str, Any]) -> None:
    """Puts and gets of rows, batches, transposed and fp8 tensors, by copy engines and by the kernel."""
    for ctas in (0, 1, 16):
        with connected(rank, group, {**options, "comm_ctas": ctas}) as t:
            buffer, slots, value = t.alloc(8 << 20), t.alloc_slots(2), 0
            after, before = (rank + 1) % t.size, (rank - 1) % t.size
            for make, shape, stride in (
                (lambda g: torch.randn(512, 1024, generator=g), (512, 1024), None),
                (lambda g: torch.randn(512, 1031, generator=g)[:, 5:1029], (512, 1024), (1040, 1)),
                (lambda g: torch.randn(3, 99, 640, generator=g)[:, :77], (3, 77, 640), (70000, 700, 1)),
                (lambda g: torch.randn(1024, 512, generator=g).t(), (512, 1024), None),
                (lambda g: torch.randn(1, 333, generator=g).expand(64, 333), (64, 333), None),
            ):
                for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
                    value += 1
                    window = buffer.window(256, shape, dtype, stride)
                    sent = [make(torch.Generator().manual_seed(9 * value + r)) for r in range(t.size)]
                    own = _strided_like(sent[rank], dtype)
                    t.put(window, own, after, slot=Slot(slots, 0, value), stream=current())
                    t.wait(before, Slot(slots, 0, value), deadline=soon(), stream=current())
                    finish(t)
                    wanted = sent[before].to(dtype)
                    assert torch.equal(window.local.cpu().float(), wanted.float()), (ctas, shape, dtype)
                    back = torch.empty_like(own)
                    t.get(back, window, after, stream=current())
                    finish(t)
                    assert torch.equal(back.cpu().float(), sent[rank].to(dtype).float()), (ctas, shape, dtype, "get")
                    t.barrier(soon())


def _strided_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` on the GPU with its strides."""
    base = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="cuda") if 0 not in x.stride() else None
    if base is None:
        return x[:1].to(dtype).cuda().expand(x.shape)
    base.view(torch.uint8 if dtype.itemsize == 1 else dtype).copy_(
        x.to(dtype).view(torch.uint8 if dtype.itemsize == 1 else dtype)
    )
    return base


def growth(rank: int, group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Addresses stay, bytes stay, and what no GPU holds is refused on all ranks."""
    with connected(rank, group, options) as t:
        buffer = t.alloc(3 << 20)
        bases, peer = list(buffer.bases), (rank + 1) % t.size
        buffer.local.fill_(rank + 1)
        start = time.monotonic()
        t.grow(buffer, 512 << 20)
        grow_s = time.monotonic() - start
        finish(t)
        t.barrier(soon())
        assert list(buffer.bases) == bases, (bases, buffer.bases)
        kept = buffer.view(peer)[: 3 << 20]
        assert bool((kept == peer + 1).all()), f"bytes of rank {peer}: {kept.unique().tolist()}, wanted {peer + 1}"
        assert bool((buffer.local[3 << 20 :] == 0).all()), "new bytes are not zero"
        t.barrier(soon())  # else a faster peer's put below is among the bytes looked at above
        x = torch.ones(1 << 20, device="cuda")
        t.put(buffer.window(500 << 20, (1 << 20,), torch.float32), x, peer, stream=current())
        finish(t)
        t.barrier(soon())
        assert bool((buffer.window(500 << 20, (1 << 20,), torch.float32).local == 1).all()), "a put into new bytes"
        t.barrier(soon())
        try:
            t.alloc(1 << 44)
        except HeapExhausted as e:
            assert "rank" in str(e) or "addresses" in str(e), str(e)
        else:
            raise AssertionError("2^44 bytes were allocated")
        t.alloc(1 << 20).close()
        return {"grow_s": grow_s}


def nothing_is_left(rank: int, group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Device memory after cycles of connecting, allocating and closing."""
    free = []
    for _ in range(6):
        with connected(rank, group, options) as t:
            buffer = t.alloc(64 << 20)
            buffer.local.fill_(1)
            t.barrier(soon())
        group.barrier()
        free.append(torch.cuda.mem_get_info()[0])
        group.barrier()
    assert abs(free[-1] - free[1]) <= 4 << 20, free
    return {"free_bytes_lost": free[1] - free[-1]}


def queues_exchange(rank: int, group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Producers before waiters, over three streams, 300 calls: ends with any number of queues."""
    with connected(rank, group, options) as t:
        buffer, slots, n = t.alloc(t.size << 20), t.alloc_slots(2), 1 << 16
        streams = [torch.cuda.Stream() for _ in range(3)]
        after, before = (rank + 1) % t.size, (rank - 1) % t.size
        window, check = buffer.window(0, (n,), torch.int32), torch.zeros((), dtype=torch.int64, device="cuda")
        sources = [torch.full((n,), 1000 * r, dtype=torch.int32, device="cuda") for r in range(t.size)]
        for call in range(1, 301):
            s = streams[call % 3]
            last = streams[(call - 1) % 3]
            s.wait_stream(last)
            with torch.cuda.stream(s):
                x = sources[rank] + call
                if call > 1:
                    t.wait(after, Slot(slots, 1, call - 1), deadline=soon(), stream=s.cuda_stream)
                t.put(window, x, after, slot=Slot(slots, 0, call), stream=s.cuda_stream)
                x.record_stream(s)
                t.wait(before, Slot(slots, 0, call), deadline=soon(), stream=s.cuda_stream)
                check += (window.local != sources[before] + call).sum()
                t.signal(before, Slot(slots, 1, call), stream=s.cuda_stream)
        finish(t)
        assert check.item() == 0, f"{check.item()} wrong elements"
        return {"waits": t.waits}


def queues_deadline(rank: int, group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A wait that nobody satisfies ends by its deadline on three streams, outputs are NaN, the fault says who."""
    with connected(rank, group, options) as t:
        slots, out = t.alloc_slots(1), torch.zeros(64, 100, dtype=torch.bfloat16, device="cuda")
        streams = [torch.cuda.Stream() for _ in range(3)]
        t.op, t.seq = "all_gather", 7
        finish(t)
        t.barrier(soon())
        if rank:
            start = time.monotonic()
            while t.fault is None and time.monotonic() - start < 15:
                time.sleep(0.01)
            assert isinstance(t.fault, CommTimeout), t.fault
            return {}
        start = time.monotonic()
        for s in streams:
            t.wait(1, Slot(slots, 0, 5), deadline=start + 1.0, stream=s.cuda_stream)
        t.guard(out, streams[0].cuda_stream)
        torch.cuda.synchronize()
        took = time.monotonic() - start
        assert bool(out.isnan().all()), "outputs of a call that timed out are not NaN"
        error = t.fault
        assert isinstance(error, CommTimeout) and (error.rank, error.wanted) == (1, 5), repr(error)
        assert 0.9 < took < 8.0, took
        return {"took_s": took, "seen": error.seen, "waits": t.waits}


def queues_poison_under_load(rank: int, group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """An abort releases a blocked stream while another stream computes. Kernels were loaded before: what CUDA loads at
    a first launch waits for the blocked stream, with the lock that the poison needs (docs/gpu.md, Deadlines).
    """
    with connected(rank, group, options) as t:
        slots, s = t.alloc_slots(1), torch.cuda.Stream()
        a = torch.randn(2048, 2048, device="cuda")
        a = a @ a / 2048
        finish(t)
        t.barrier(soon())
        t.wait((rank + 1) % t.size, Slot(slots, 0, 1), deadline=soon(60), stream=s.cuda_stream)
        for _ in range(20):
            a = a @ a / 2048
        time.sleep(0.2)
        start = time.monotonic()
        if rank == t.size - 1:
            t.abort("the last rank gives up")
        s.synchronize()
        took = time.monotonic() - start
        assert t.fault is not None and "gives up" in str(t.fault), t.fault
        assert slots.read((rank + 1) % t.size, 0) >= POISON
        assert took < 5.0, took
        return {"release_s": took}


def graph(rank: int, group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A captured exchange, replayed 300 times with new inputs, mixed with eager calls of the same transport."""
    with connected(rank, group, options) as t:
        buffer, slots, eager, word = t.alloc(8 << 20), t.alloc_slots(2), t.alloc_slots(1), t.alloc_slots(1)
        after, before, n = (rank + 1) % t.size, (rank - 1) % t.size, 1 << 18
        window = buffer.window(0, (n,), torch.int32)
        x, out = torch.zeros(n, dtype=torch.int32, device="cuda"), torch.zeros(n, dtype=torch.int32, device="cuda")
        epoch, captured = word.address(0, 0), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(captured), t.epochs(epoch):
            s = current()
            t.advance(epoch, s)
            t.wait(after, Slot(slots, 1, -1), deadline=soon(), stream=s)  # it has read what came before
            t.put(window, x, after, slot=Slot(slots, 0, 0), stream=s)
            t.wait(before, Slot(slots, 0, 0), deadline=soon(), stream=s)
            out.copy_(window.local)
            t.signal(before, Slot(slots, 1, 0), stream=s)
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        start = time.monotonic()
        for i in range(1, 301):
            x.fill_(10000 * rank + i)
            captured.replay()
            bad += (out != 10000 * before + i).sum()
            if i % 7 == 0:
                t.signal(after, Slot(eager, 0, i), stream=current())
                t.wait(before, Slot(eager, 0, i), deadline=soon(), stream=current())
        finish(t)
        assert bad.item() == 0, f"{bad.item()} wrong elements"
        return {"replay_us": (time.monotonic() - start) / 300 * 1e6}


def soak(rank: int, group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """3000 puts of random sizes among all ranks with credits, random GPU delays, no host synchronisation between."""
    with connected(rank, group, options, 60.0) as t:
        plan, mine, n = random.Random(3), random.Random(rank), 1 << 15
        buffer, slots = t.alloc(t.size * n * 4), t.alloc_slots(2)
        streams = [torch.cuda.Stream() for _ in range(t.size)]
        value, bad = [0] * t.size * t.size, torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for _ in range(3000):
            src, dst, rows = plan.randrange(t.size), plan.randrange(t.size), plan.randrange(1, n)
            value[src * t.size + dst] += 1
            v = value[src * t.size + dst]
            window = buffer.window(src * n * 4, (rows,), torch.int32)
            if rank == src:
                with torch.cuda.stream(streams[dst]):
                    s = streams[dst].cuda_stream
                    if mine.random() < 0.2:
                        torch.cuda._sleep(mine.randrange(200000))
                    if v > 1:
                        t.wait(dst, Slot(slots, 1, v - 1), deadline=soon(60), stream=s)
                    x = torch.full((rows,), v * 7 + src, dtype=torch.int32, device="cuda")
                    t.put(window, x, dst, slot=Slot(slots, 0, v), stream=s)
            if rank == dst:
                with torch.cuda.stream(streams[src]):
                    s = streams[src].cuda_stream
                    t.wait(src, Slot(slots, 0, v), deadline=soon(60), stream=s)
                    bad.add_((window.local != v * 7 + src).sum())
                    t.signal(src, Slot(slots, 1, v), stream=s)
        finish(t)
        assert bad.item() == 0, f"{bad.item()} wrong elements"
        return {"puts": 3000}


def host_time(rank: int, group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Host microseconds a verb, 300 of each, enqueued behind a GPU sleep."""
    with connected(rank, group, options) as t:
        buffer, slots = t.alloc(4 << 20), t.alloc_slots(3)
        window, x = buffer.window(0, (64, 64), torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda")
        rows = torch.zeros(64, 128, dtype=torch.bfloat16, device="cuda")[:, :64]
        after, out, s = (rank + 1) % t.size, torch.zeros(64, 64, device="cuda"), current()
        figures = {}
        for name, verb in {
            "put_us": lambda i: t.put(window, x, after, stream=s),
            "put_slot_us": lambda i: t.put(window, x, after, slot=Slot(slots, 0, i), stream=s),
            "put_rows_us": lambda i: t.put(window, rows, after, stream=s),
            "signal_us": lambda i: t.signal(rank, Slot(slots, 1, i), stream=s),
            "wait_us": lambda i: t.wait(rank, Slot(slots, 1, 0), deadline=soon(), stream=s),
            "guard_us": lambda i: t.guard(out, s),
        }.items():
            for i in range(20):
                verb(i)
            finish(t)
            start = time.perf_counter()
            for i in range(20, 320):
                verb(i)
            figures[name] = (time.perf_counter() - start) / 300 * 1e6
            finish(t)
        t.barrier(soon())
        return figures


def bandwidth(rank: int, group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """GiB/s of puts from rank 0 to rank 1 (a copy inside one GPU where they share it)."""
    figures = {}
    for ctas in (0, 8, 32):
        with connected(rank, group, {**options, "comm_ctas": ctas}) as t:
            buffer = t.alloc(64 << 20)
            for mib in (1, 16, 64):
                x = torch.zeros(mib << 20, dtype=torch.uint8, device="cuda")
                window = buffer.window(0, (mib << 20,), torch.uint8)
                t.barrier(soon())
                if rank == 0:
                    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    for i in range(12):
                        if i == 2:
                            a.record()
                        t.put(window, x, 1, stream=current())
                    b.record()
                    finish(t)
                    figures[f"ctas{ctas}_{mib}MiB"] = 10 * mib / 1024 / (a.elapsed_time(b) / 1e3)
                t.barrier(soon())
    return figures


CHECKS: list[Callable[..., Any]] = [
    how_it_connects, layouts, growth, nothing_is_left, queues_exchange, queues_deadline, queues_poison_under_load,
    graph, soak, host_time, bandwidth,
]  # fmt: skip
