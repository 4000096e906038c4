"""Slots in device memory: 64-bit words of every writer at every rank, packed into pages that all ranks have mapped."""

from __future__ import annotations

from collections.abc import Callable

from ..contract import DeviceSlotTable
from .heap import MappedBuffer

__all__ = ["DeviceSlots", "SlotPages"]

#: Reads words at an address: (address, count) -> values.
Reader = Callable[[int, int], list[int]]
_ALIGN = 128


class DeviceSlots(DeviceSlotTable):
    """Slots that stream memory operations and kernels raise and wait for by address.

    Attributes:
        raise_at: Address here of this rank's words at every peer (word 0; 8 bytes each).
        wait_at: Address here of every writer's words at this rank.
        index: Number of the table in its transport, the same on all ranks.
    """

    def __init__(self, page: MappedBuffer, offset: int, rank: int, words: int, index: int, read: Reader) -> None:
        bases, block = page.bases, 8 * words
        self.words, self.rank, self.size, self.offset, self.index = words, rank, len(bases), offset, index
        self.page, self.nbytes = page, block * len(bases)
        self.local = bases[rank] + offset
        self.raise_at = [base + offset + rank * block for base in bases]
        self.wait_at = [self.local + writer * block for writer in range(self.size)]
        self.release: Callable[[DeviceSlots], None] | None = None
        self._read = read

    def read(self, writer: int, word: int) -> int:
        if not (0 <= writer < self.size and 0 <= word < self.words):
            raise IndexError(
                f"word {word} of writer {writer}: the table has {self.words} words for {self.size} writers"
            )
        return self._read(self.wait_at[writer] + 8 * word, 1)[0]

    def address(self, writer: int, word: int) -> int:
        return self.wait_at[writer] + 8 * word

    def peer_address(self, peer: int, word: int) -> int:
        return self.raise_at[peer] + 8 * word

    def tag(self, writer: int, word: int) -> int:
        """A number that names a word in the report of a wait kernel."""
        return self.index << 48 | writer << 32 | word

    def close(self) -> None:
        if self.release is not None:
            release, self.release = self.release, None
            release(self)


class SlotPages:
    """Where tables are. All ranks open and close tables in the same order, so each finds the same places alone.

    Attributes:
        tables: Open tables by their index.
    """

    def __init__(self, rank: int, first: MappedBuffer, reserved: int) -> None:
        self._rank, self._reserved = rank, reserved
        self._pages = [first]
        self.tables: dict[int, DeviceSlots] = {}

    def open(self, words: int, read: Reader, more: Callable[[int], MappedBuffer]) -> DeviceSlots:
        """Place a table of ``words`` words a writer; ``more(nbytes)`` gives another page where none has room."""
        nbytes = 8 * words * len(self._pages[0].bases)
        place = self._find(nbytes)
        if place is None:
            self._pages.append(more(nbytes))
            place = self._pages[-1], 0
        index = next(i for i in range(1 << 15) if i not in self.tables)
        table = self.tables[index] = DeviceSlots(*place, self._rank, words, index, read)
        return table

    def _find(self, nbytes: int) -> tuple[MappedBuffer, int] | None:
        for number, page in enumerate(self._pages):
            at = 0 if number else self._reserved
            for start, stop in sorted((t.offset, t.offset + t.nbytes) for t in self.tables.values() if t.page is page):
                if start - at >= nbytes:
                    break
                at = max(at, -(-stop // _ALIGN) * _ALIGN)
            if at + nbytes <= page.nbytes:
                return page, at
        return None

    def forget(self, table: DeviceSlots) -> None:
        self.tables.pop(table.index, None)
