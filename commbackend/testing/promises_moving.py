"""Promises about bytes and slots."""

from __future__ import annotations

import random
import struct
import threading
import time

import torch

from ..contract import RECORD_NBYTES, OneSided, Slot, SlotTable, Transport
from ..errors import CollectiveMismatch, CommBackendError, HeapExhausted, ShapeError
from .harness import DTYPES, Harness, keep, same_bytes


@keep(OneSided)
def put_arrives_before_its_slot(h: Harness) -> None:
    """A put's slot rises only after its bytes are visible, again and again."""
    buffer, slots = h.one.alloc(1 << 18), h.one.alloc_slots(2)
    window = buffer.window(0, (1 << 16,), torch.int32)
    for epoch in range(1, 31):
        source = torch.full((1 << 16,), epoch * h.size + h.rank, dtype=torch.int32, device=h.device)
        h.put(window, source, h.next, Slot(slots, 0, epoch))
        h.wait(h.prev, Slot(slots, 0, epoch))
        assert bool((window.local == epoch * h.size + h.prev).all()), f"epoch {epoch}: bytes came after the slot"
        h.signal(h.prev, Slot(slots, 1, epoch))
        h.wait(h.next, Slot(slots, 1, epoch))


@keep(OneSided)
def signal_follows_earlier_puts(h: Harness) -> None:
    """A signal is ordered after every earlier put of the stream to that peer, also after puts without a slot."""
    buffer, slots = h.one.alloc(1 << 22), h.one.alloc_slots(1)
    half = 1 << 19
    for peer in h.peers:
        h.put(buffer.window(0, (half,), torch.int32), torch.full((half,), 7, dtype=torch.int32, device=h.device), peer)
        h.signal(peer, Slot(slots, 0, 1))
    for peer in h.peers:
        h.wait(peer, Slot(slots, 0, 1))
    assert bool((buffer.window(0, (half,), torch.int32).local == 7).all())
    assert bool((buffer.local[half * 4 :] == 0).all()), "a put wrote past its window"


@keep(OneSided)
def a_rank_can_put_to_itself(h: Harness) -> None:
    """Peer may be the own rank, for put, get, signal and wait."""
    buffer, slots = h.one.alloc(64), h.one.alloc_slots(1)
    window, back = buffer.window(0, (8,), torch.float32), h.tensor([0.0] * 8)
    h.put(window, h.tensor(range(8)), h.rank, Slot(slots, 0, 3))
    h.wait(h.rank, Slot(slots, 0, 3))
    h.get(back, window, h.rank)
    assert back.tolist() == list(range(8)) == window.local.tolist()


@keep(OneSided)
def get_reads_the_peer(h: Harness) -> None:
    """Get copies what the peer has made ready into any strides."""
    buffer, slots = h.one.alloc(96), h.one.alloc_slots(1)
    window = buffer.window(0, (4, 6), torch.float32)
    window.local.copy_(h.tensor(range(24)).view(4, 6) + 100 * h.rank)
    h.sync()
    for peer in h.peers:
        h.signal(peer, Slot(slots, 0, 1))
    h.wait(h.next, Slot(slots, 0, 1))
    found = torch.zeros(6, 4, device=h.device)
    h.get(found.t(), window, h.next)
    assert found.t().flatten().tolist() == [100 * h.next + i for i in range(24)]
    h.barrier()


@keep(OneSided)
def strided_windows_and_sources(h: Harness) -> None:
    """A put reads any strides and writes exactly the window's elements, nothing between them."""
    buffer, slots = h.one.alloc(4 * 200), h.one.alloc_slots(1)
    window = buffer.window(8, (5, 6), torch.float32, (20, 3))
    buffer.local.fill_(0xA5)
    h.barrier()
    source = (h.tensor(range(60)).view(6, 10) + 1000 * h.rank).t()[::2]
    h.put(window, source, h.next, Slot(slots, 0, 1))
    h.wait(h.prev, Slot(slots, 0, 1))
    wanted = h.tensor(range(60)).view(6, 10).t()[::2] + 1000 * h.prev
    assert torch.equal(window.local, wanted), window.local
    window.local.view(torch.int32).fill_(-0x5A5A5A5B)
    assert bool((buffer.local == 0xA5).all()), "bytes between the window's elements were touched"
    h.barrier()


@keep(OneSided)
def every_dtype_moves_as_it_is(h: Harness) -> None:
    """Every dtype, bit for bit, contiguous and transposed."""
    buffer, slots = h.one.alloc(4096), h.one.alloc_slots(2)
    for i, dtype in enumerate(DTYPES):
        window = buffer.window(0, (7, 9), dtype)
        for j in range(2):
            sent = [h.random((7, 9) if j else (9, 7), dtype, 1000 * i + r) for r in range(h.size)]
            sent = sent if j else [s.t() for s in sent]
            h.put(window, sent[h.rank], h.next, Slot(slots, 0, 2 * i + j + 1))
            h.wait(h.prev, Slot(slots, 0, 2 * i + j + 1))
            assert same_bytes(window.local, sent[h.prev]), f"{dtype} arrived changed"
            back = torch.empty_like(sent[h.rank])
            h.signal(h.prev, Slot(slots, 1, 2 * i + j + 1))
            h.wait(h.next, Slot(slots, 1, 2 * i + j + 1))
            h.get(back, window, h.next)
            assert same_bytes(back, sent[h.rank]), f"get of {dtype} came back changed"
            h.barrier()


@keep(OneSided)
def zero_elements_raise_the_slot(h: Harness) -> None:
    """A put of nothing moves nothing and raises its slot; a get of nothing is fine."""
    buffer, slots = h.one.alloc(64), h.one.alloc_slots(1)
    for value, shape in enumerate([(0,), (0, 5), (5, 0)], 1):
        empty = torch.empty(shape, device=h.device)
        h.put(buffer.window(0, shape, torch.float32), empty, h.next, Slot(slots, 0, value))
        h.wait(h.prev, Slot(slots, 0, value))
        h.get(empty, buffer.window(64, shape, torch.float32), h.next)
    assert bool((buffer.local == 0).all())


@keep(OneSided)
def a_wait_accepts_greater_values(h: Harness) -> None:
    """Waiting means greater or equal, and values beyond 32 bits are values."""
    slots = h.one.alloc_slots(2)
    big = (1 << 40) + 5
    h.signal(h.next, Slot(slots, 1, big))
    for wanted in (1, 5, 1 << 40, big):
        h.wait(h.prev, Slot(slots, 1, wanted))
    assert slots.read(h.prev, 1) == big and slots.read(h.prev, 0) == 0


@keep(OneSided)
def a_wait_of_the_host_holds(h: Harness) -> None:
    """Without a stream it is the host that waits, also where lanes are streams."""
    slots = h.one.alloc_slots(1)
    h.barrier()
    time.sleep(0.1 * h.rank)
    h.signal(h.next, Slot(slots, 0, 1))
    h.one.wait(h.prev, Slot(slots, 0, 1), deadline=h.soon())
    assert slots.read(h.prev, 0) == 1
    h.barrier()


@keep(OneSided)
def every_writer_has_its_own_words(h: Harness) -> None:
    """A raised word changes nothing but itself: not another writer's, not another word, not another table or buffer."""
    tables = [h.one.alloc_slots(5), h.one.alloc_slots(5)]
    buffers = [h.one.alloc(256), h.one.alloc(256)]
    for peer in range(h.size):
        h.signal(peer, Slot(tables[0], 2, 10 + h.rank))
        h.put(buffers[1].window(8 * h.rank, (8,), torch.uint8), h.tensor([1 + h.rank] * 8, torch.uint8), peer)
    h.barrier()
    assert [_read(tables[0], w) for w in range(h.size)] == [[0, 0, 10 + w, 0, 0] for w in range(h.size)]
    assert [_read(tables[1], w) for w in range(h.size)] == [[0] * 5] * h.size
    h.sync()
    assert buffers[1].local[: 8 * h.size].view(-1, 8).tolist() == [[1 + w] * 8 for w in range(h.size)]
    assert not buffers[0].local.any() and not buffers[1].local[8 * h.size :].any()
    h.barrier()


def _read(table: SlotTable, writer: int) -> list[int]:
    return [table.read(writer, word) for word in range(table.words)]


@keep(OneSided)
def fresh_memory_is_zero(h: Harness) -> None:
    """Buffers and slots start as zeros, also where earlier ones were dirty."""
    for _ in range(3):
        buffer, slots = h.one.alloc(100_000), h.one.alloc_slots(70)
        assert buffer.nbytes == 100_000 == buffer.local.numel() and buffer.local.dtype is torch.uint8
        assert not buffer.local.any() and not any(_read(slots, h.prev))
        h.barrier()
        buffer.local.fill_(255)
        h.signal(h.next, Slot(slots, 69, 1 << 50))
        h.barrier()
        for held in (buffer, slots):
            held.close()
            held.close()


@keep(OneSided)
def views_are_the_memory_itself(h: Harness) -> None:
    """``at`` and ``view`` give the peer's memory where ``caps.peer_view`` says so, else None."""
    buffer, slots = h.one.alloc(64), h.one.alloc_slots(1)
    window = buffer.window(16, (4,), torch.int32)
    there = window.at(h.next)
    if not h.t.caps.peer_view:
        assert there is None and buffer.view(h.next) is None
        return
    assert there is not None
    there.fill_(40 + h.rank)
    h.signal(h.next, Slot(slots, 0, 1))
    h.wait(h.prev, Slot(slots, 0, 1))
    assert window.local.tolist() == [40 + h.prev] * 4
    h.barrier()


@keep(OneSided)
def bad_arguments_move_nothing(h: Harness) -> None:
    """Wrong shape, dtype, peer or size raise ShapeError before a byte moves, and break nothing."""
    buffer, slots = h.one.alloc(64), h.one.alloc_slots(1)
    window = buffer.window(0, (4,), torch.float32)
    good, slot = h.source(h.tensor([1.0] * 4)), Slot(slots, 0, 1)
    for src, peer in ((good[:3], 0), (good.double(), 0), (good.view(2, 2), 0), (good, h.size), (good, -1)):
        h.raises(ShapeError, h.one.put, window, src, peer, slot=slot, stream=h.stream)
    h.raises(ShapeError, h.one.get, good.double(), window, 0, stream=h.stream)
    h.raises(ShapeError, h.one.signal, h.size, slot, stream=h.stream)
    h.raises(ShapeError, h.one.alloc, 0)
    h.raises(ShapeError, h.one.alloc_slots, -1)
    h.raises(ShapeError, buffer.window, 61, (1,), torch.float32)
    h.raises(ShapeError, buffer.window, 0, (4, 5), torch.float32)
    h.barrier()
    assert not buffer.local.any() and slots.read(h.prev, 0) == 0
    h.barrier()
    h.put(window, good, h.next, slot)
    h.wait(h.prev, slot)


@keep(OneSided)
def sizes_are_agreed(h: Harness) -> None:
    """Ranks that ask for different sizes all get CollectiveMismatch naming both, and can go on."""
    error = h.raises(CollectiveMismatch, h.one.alloc, 4096 if h.rank else 8192)
    assert "4096" in str(error) and "8192" in str(error)
    h.raises(CollectiveMismatch, h.one.alloc_slots, 8 if h.rank else 800)
    assert not h.one.alloc(64).local.any() and h.t.fault is None


@keep(OneSided)
def memory_that_is_not_there(h: Harness) -> None:
    """What no machine has raises HeapExhausted with the numbers on every rank, and leaves a working communicator."""
    error = h.raises(HeapExhausted, h.one.alloc, 1 << 50)
    assert str(1 << 50) in str(error) or str((1 << 50) * h.size) in str(error), error
    slots = h.one.alloc_slots(1)
    h.signal(h.next, Slot(slots, 0, 1))
    h.wait(h.prev, Slot(slots, 0, 1))


@keep(Transport)
def records_can_be_read(h: Harness) -> None:
    """A record stays readable until two calls later; each rank reads all; peek never waits nor invents one."""
    h.raises(ShapeError, h.t.post, 0, b"x" * (RECORD_NBYTES + 1))
    for seq in range(12):
        mine = bytes([h.rank, seq]) * (seq * 20) + b"x" * (RECORD_NBYTES - 480)
        assert h.t.peek(h.next, seq) is None, f"record {seq} is not posted yet"
        h.barrier()
        h.t.post(seq, mine)
        for peer in range(h.size):
            wanted = bytes([peer, seq]) * (seq * 20) + b"x" * (RECORD_NBYTES - 480)
            assert h.t.record(peer, seq, h.soon()) == wanted, f"record {seq} of {peer}"
            assert h.t.peek(peer, seq) in (None, wanted)
            if seq:
                assert len(h.t.record(peer, seq - 1, h.soon())) == (seq - 1) * 40 + RECORD_NBYTES - 480
        h.barrier()
    h.t.post(12, b"")
    assert h.t.record(h.prev, 12, h.soon()) == b""


@keep(OneSided)
def lanes_do_not_disturb_each_other(h: Harness) -> None:
    """Several threads of a rank put and wait at the same time."""
    buffer, slots = h.one.alloc(4 * 4096), h.one.alloc_slots(8)
    sources = h.source(h.tensor(range(4 * 1024), torch.int32)).view(4, 1024)
    errors: list[BaseException] = []

    def lane(k: int) -> None:
        try:
            window = buffer.window(k * 4096, (1024,), torch.int32)
            for value in range(1, 21):
                h.one.put(window, sources[k], h.next, slot=Slot(slots, k, value), stream=h.stream)
                h.one.wait(h.prev, Slot(slots, k, value), deadline=h.soon(), stream=h.stream)
                h.one.signal(h.prev, Slot(slots, 4 + k, value), stream=h.stream)
                h.one.wait(h.next, Slot(slots, 4 + k, value), deadline=h.soon(), stream=h.stream)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=lane, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    h.sync()
    assert buffer.local.view(torch.int32).tolist() == list(range(4 * 1024))
    h.barrier()


@keep(OneSided)
def soak_of_random_interleavings(h: Harness) -> None:
    """1000 random puts among all ranks with credits and random pauses: every byte is the one that was sent."""
    plan, mine, chunks, n = random.Random(11), random.Random(100 + h.rank), 3, 512
    buffer, slots = h.one.alloc(h.size * chunks * n * 4), h.one.alloc_slots(2 * chunks)
    used: dict[tuple[int, int, int], int] = {}
    for _ in range(1000):
        src, dst = plan.randrange(h.size), plan.randrange(h.size)
        chunk, rows = plan.randrange(chunks), plan.randrange(n)
        value = used[src, dst, chunk] = used.get((src, dst, chunk), 0) + 1
        window = buffer.window((src * chunks + chunk) * n * 4, (rows,), torch.int32)
        if mine.random() < 0.05:
            time.sleep(mine.random() * 0.002)
        if h.rank == src:
            h.wait(dst, Slot(slots, chunks + chunk, value - 1))
            source = torch.full((rows,), value, dtype=torch.int32, device=h.device)
            h.put(window, source, dst, Slot(slots, chunk, value))
        if h.rank == dst:
            h.wait(src, Slot(slots, chunk, value))
            assert bool((window.local == value).all()), f"chunk {chunk} of {src} -> {dst}, use {value}"
            h.sync()
            window.local.fill_(-1)
            h.signal(src, Slot(slots, chunks + chunk, value))
    h.barrier()


@keep(Transport)
def barrier_holds_everybody(h: Harness) -> None:
    """Nobody leaves a barrier before the last has come."""
    for late in range(h.size):
        time.sleep(0.02 if h.rank == late else 0.0)
        came = time.monotonic()
        h.barrier()
        times = struct.pack("<dd", came, time.monotonic())
        both = [struct.unpack("<dd", raw) for raw in h.group.exchange(times)]
        assert max(c for c, _ in both) <= min(left for _, left in both), f"a rank left before rank {late} came"


@keep(Transport)
def communicators_live_side_by_side(h: Harness) -> None:
    """A second communicator of the same ranks works beside the first, and its end does not touch it."""
    other = h.connect()
    try:
        other.barrier(h.soon())
        h.barrier()
    except CommBackendError as e:
        other.abort(str(e))
        raise
    finally:
        other.close()
    h.barrier()
