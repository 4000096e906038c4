"""What a launch of the persistent kernel is told about its segments: which share a launch, and the table it reads.

The layout of a table stands at the head of ``triton_kernels``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..contract import DeviceSlotTable, GemmSegment, Slot
from ..errors import ShapeError, Unsupported
from .triton_launch import Runtime

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Frame", "Launch", "Partials", "Table", "Tables", "grouped", "identity", "tabulate"]

LAUNCH_WORDS, SEGMENT_WORDS = 2, 13
# Size of one table, and how many launches of different layout are remembered.
_TABLE_WORDS, _TABLES = 2048, 128
# In the place of a stream: tables of captured launches.
_GRAPHS = -1


class Frame:
    """Consecutive segments whose rows of a, and of out, lie a whole number of rows apart in one piece of memory.

    Attributes:
        a, out, scale: Lowest addresses of the rows of a, out and scale_a; 0 while there is no row.
        lda, ldc: Row strides in elements; -1 while there is at most one row.
    """

    __slots__ = ("_key", "a", "lda", "ldc", "out", "scale", "segments")

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self.a = self.out = self.scale = 0
        self.lda = self.ldc = -1
        self.segments: list[GemmSegment] = []

    def take(self, s: GemmSegment) -> bool:
        """Add ``s`` if it fits in here; return whether it does."""
        a, out, scale = s.a, s.out, s.scale_a
        rows = a.shape[0]
        if rows:
            # One storage each: a tile that is read past the end of a segment must find readable memory there.
            pieces = (a.untyped_storage(), out.untyped_storage(), None if scale is None else scale.untyped_storage())
            key = tuple(0 if p is None else p.data_ptr() for p in pieces)
            at = (a.data_ptr(), out.data_ptr(), 0 if scale is None else scale.data_ptr())
            if not self._key:
                self._key, (self.a, self.out, self.scale) = key, at
                if rows > 1:
                    self.lda, self.ldc = a.stride(0), out.stride(0)
            elif key != self._key or not self._in_step(s, at):
                return False
            else:
                self.a, self.out, self.scale = min(self.a, at[0]), min(self.out, at[1]), min(self.scale, at[2])
        self.segments.append(s)
        return True

    def _in_step(self, s: GemmSegment, at: tuple[int, int, int]) -> bool:
        if self.lda <= 0 or self.ldc <= 0:
            return False
        if s.a.shape[0] > 1 and (s.a.stride(0) != self.lda or s.out.stride(0) != self.ldc):
            return False
        apart = (at[0] - self.a) % (self.lda * s.a.itemsize), (at[1] - self.out) % (self.ldc * s.out.itemsize)
        return apart == (0, 0)

    def row(self, s: GemmSegment) -> tuple[int, int, int]:
        """First row of ``s`` in a, out and scale_a."""
        if not s.a.shape[0]:
            return 0, 0, 0
        a = (s.a.data_ptr() - self.a) // (self.lda * s.a.itemsize) if self.lda > 0 else 0
        out = (s.out.data_ptr() - self.out) // (self.ldc * s.out.itemsize) if self.ldc > 0 else 0
        per_row = s.scale_a is not None and s.scale_a.numel() > 1
        return a, out, (s.scale_a.data_ptr() - self.scale) // 4 if per_row and s.scale_a is not None else 0

    def rows(self) -> tuple[int, int]:
        """Rows of a and of out from the lowest address to the end of the last segment; at least 1."""
        ends = [(*self.row(s)[:2], s.a.shape[0]) for s in self.segments]
        return max(1, *(a + n for a, _, n in ends)), max(1, *(out + n for _, out, n in ends))


class Partials:
    """Addends of a launch that lie a whole number of rows apart in one piece of memory, as the first one does."""

    __slots__ = ("_at", "_end", "_key", "_ld", "_size")

    def __init__(self) -> None:
        self._key: tuple[int, int] | None = None
        self._at = self._end = self._ld = self._size = 0

    def take(self, add: Tensor) -> None:
        """Count ``add`` in if it lies in that memory."""
        if not add.shape[0] or not add.shape[1]:
            return
        at, ld = add.data_ptr(), add.stride(0) if add.shape[0] > 1 else max(add.stride(0), add.shape[1])
        end = at + add.shape[0] * ld * add.itemsize
        if self._key is None:
            self._key, self._size = (add.untyped_storage().data_ptr(), ld), add.itemsize
            self._at, self._end, self._ld = at, end, ld
        elif self.row(add) is not None:
            self._at, self._end = min(self._at, at), max(self._end, end)

    def row(self, add: Tensor) -> int | None:
        """First row of ``add`` in that memory, or None if it is elsewhere."""
        ld = add.stride(0) if add.shape[0] > 1 else self._ld
        if self._key != (add.untyped_storage().data_ptr(), ld):
            return None
        row, rest = divmod(add.data_ptr() - self._at, ld * self._size)
        return None if rest else row

    def place(self) -> tuple[int, int, int] | None:
        """Address, rows and row stride in elements of that memory; None without addends."""
        return (self._at, (self._end - self._at) // (self._ld * self._size), self._ld) if self._key else None


class Launch:
    """Segments that one launch serves: one b, scale_b and column stride of a, and at most two frames.

    Attributes:
        bias: The one bias of those segments that have one; None while none has.
        partials: Where addends lie, once all segments are there.
    """

    __slots__ = ("bias", "frames", "key", "partials")

    def __init__(self, key: tuple[Any, ...]) -> None:
        self.key = key
        self.bias: Tensor | None = None
        self.frames: list[Frame] = []
        self.partials = Partials()

    def admits(self, bias: Tensor | None) -> bool:
        """Whether a segment with ``bias`` may join."""
        return self.bias is None or bias is None or bias.data_ptr() == self.bias.data_ptr()

    @property
    def segments(self) -> list[GemmSegment]:
        return [s for f in self.frames for s in f.segments]


def grouped(segments: Sequence[GemmSegment]) -> list[Launch]:
    """Split ``segments``, in their order, into as few launches as their memory allows. One for the plans of this
    package."""
    launches: list[Launch] = []
    words = 0
    for s in segments:
        key = (
            s.a.stride(1), s.b.data_ptr(), s.b.shape, s.b.stride(),
            None if s.scale_b is None else s.scale_b.data_ptr(), s.scale_a is not None and s.scale_a.numel() != 1,
        )  # fmt: skip
        need = SEGMENT_WORDS + 1 + 4 * len(s.ready) + 2 * len(s.done) + 3 * len(s.addends)
        words += need
        launch = launches[-1] if launches and launches[-1].key == key and launches[-1].admits(s.bias) else None
        fits = launch is not None and words + LAUNCH_WORDS <= _TABLE_WORDS
        if launch is None or not fits or not launch.frames[-1].take(s):
            if launch is None or not fits or len(launch.frames) == 2:
                launch, words = Launch(key), need
                launches.append(launch)
            launch.frames.append(Frame())
            launch.frames[-1].take(s)
        launch.bias = s.bias if launch.bias is None else launch.bias
        for add in s.addends:
            launch.partials.take(add)
    return launches


def identity(s: GemmSegment, base: int) -> tuple[Any, ...]:
    """All that binding a launch to ``s`` looks at."""
    key: list[Any] = []
    for t in (s.a, s.b, s.out):
        key += (t.data_ptr(), t.shape, t.stride(), t.dtype)
    key += (s.a.untyped_storage().data_ptr(), s.out.untyped_storage().data_ptr())
    key += [add.untyped_storage().data_ptr() for add in s.addends]
    for row in (s.bias, s.scale_a, s.scale_b, *s.addends):
        key.append(None if row is None else (row.data_ptr(), row.shape, row.stride(), row.dtype))
    if s.scale_a is not None:
        key.append(s.scale_a.untyped_storage().data_ptr())
    for rank, slot in s.ready:
        key += (rank, slot.table, slot.word, slot.value - base)
    key.append(len(s.ready))
    for rank, slot in s.done:
        key += (rank, slot.table, slot.word, slot.value - base)
    return tuple(key)


class Table(NamedTuple):
    """``words`` of a launch's table; those before ``lists`` hold offsets into the table as negative numbers.

    Attributes:
        tiles: How many tiles the launch has.
        slots, waits: Whether it touches slots at all; whether it waits for any.
    """

    words: tuple[int, ...]
    lists: int
    tiles: int
    slots: bool
    waits: bool


def tabulate(launch: Launch, bm: int, n_tiles: int, base: int) -> Table:
    """Return the table of ``launch`` for tiles of ``bm`` rows and ``n_tiles`` tiles a row block.

    Slot values are kept relative to ``base``, so that the next call of a program has the same table.
    """
    segments = launch.segments
    lists = LAUNCH_WORDS + SEGMENT_WORDS * len(segments)
    # One counter of finished tiles a segment, then the entries.
    head, tail = [0] * LAUNCH_WORDS, [0] * len(segments)
    tiles = number = 0
    for frame in launch.frames:
        for s in frame.segments:
            a_row, out_row, scale_row = frame.row(s)
            rows = s.a.shape[0]
            head += [rows, a_row, out_row, tiles]
            ready = [(_here(slot, w), slot.value - base, w, slot.word) for w, slot in s.ready]
            done = [(_there(slot, p), slot.value - base) for p, slot in s.done]
            found = [(add, launch.partials.row(add)) for add in s.addends] if rows else []
            addends = [(add.data_ptr(), add.stride(0), -1 if at is None else at) for add, at in found]
            for entries in (ready, done, addends):
                head += [len(entries), -(lists + len(tail))]
                tail += [word for entry in entries for word in entry]
            head += [scale_row, -(lists + number), int(s.bias is not None)]
            tiles += -(-rows // bm) * n_tiles
            number += 1
    slots, waits = any(s.ready or s.done for s in segments), any(s.ready for s in segments)
    return Table((*head, *tail), lists, tiles, slots, waits)


def _device(slot: Slot) -> DeviceSlotTable:
    if not isinstance(slot.table, DeviceSlotTable):
        raise ShapeError(
            f"slots of {type(slot.table).__name__} have no device address: use a transport with caps.device_signal"
        )
    return slot.table


def _here(slot: Slot, writer: int) -> int:
    return _device(slot).address(writer, slot.word)


def _there(slot: Slot, peer: int) -> int:
    return _device(slot).peer_address(peer, slot.word)


class Tables:
    """Tables in device memory, by content and stream. A launch changes its counters, so streams share none.

    ``zero``: a word that is always 0, the epoch of calls that give none.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._driver = runtime.driver
        self._memory = torch.zeros((_TABLES, _TABLE_WORDS), dtype=torch.int64, device=runtime.device)
        self._free = list(range(_TABLES))
        self._bound: OrderedDict[tuple[int, tuple[int, ...]], int] = OrderedDict()
        self.zero = torch.zeros(1, dtype=torch.int64, device=runtime.device)

    def address(self, table: Table, stream: int) -> int:
        """Return the device address of ``table`` for launches on ``stream``; uploads it when it is new there.

        A graph's launches have tables that nothing else uses, since it may be replayed on any stream.
        """
        capturing = self._driver.capturing(stream)
        key = (_GRAPHS if capturing else stream, table.words)
        place = self._bound.get(key)
        if place is not None:
            self._bound.move_to_end(key)
            return self._at(place)
        place = self._take(stream, capturing)
        at = self._at(place)
        words = [at - 8 * w if i < table.lists and w < 0 else w for i, w in enumerate(table.words)]
        raw = torch.tensor(words, dtype=torch.int64, device="cpu").numpy().tobytes()
        if capturing:
            self._driver.upload_now(at, raw)
        else:
            self._driver.upload(at, raw, stream)
        self._bound[key] = place
        return at

    def _at(self, place: int) -> int:
        return self._memory.data_ptr() + 8 * _TABLE_WORDS * place

    def _take(self, stream: int, capturing: bool) -> int:
        if self._free:
            return self._free.pop()
        usable = [key for key in self._bound if key[0] != _GRAPHS]
        if capturing or not usable:
            raise Unsupported(
                f"all {_TABLES} launch tables are in use, {len(self._bound) - len(usable)} of them by captured graphs:"
                " capture before that many products of other sizes or addresses have run"
            )
        # Stream order protects launches that still read the oldest table; another stream's launches are waited for.
        victim = usable[0]
        if victim[0] != stream:
            self._driver.follow(stream, victim[0])
        return self._bound.pop(victim)
