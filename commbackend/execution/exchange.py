"""All-reduces by one kernel: the memory they exchange rows through, for one engine, and their launch.

The kernels are a provider's (``contract.ExchangeProvider``). What they use belongs to them alone: a buffer and words
that no plan names, so a call that only exchanges takes no half of the heap and raises no credit. Its epochs lie in
device memory and are moved on by the kernels, so eager calls, captured ones and replays of any sizes follow one another
freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..contract import DeviceSlotTable, Exchange, ExchangeKernel, ExchangeMemory, ExchangeProvider, OneSided
from ..errors import Unsupported
from ..plan import EXCHANGE_PROGRAMS, EXCHANGE_SLOT_NBYTES, Collective, Program

if TYPE_CHECKING:
    from torch import Tensor

    from ..contract import GemmProvider, SymBuffer, Transport

__all__ = ["Exchanger", "aligned", "exchanges"]


def exchanges(program: Program) -> bool:
    """Whether some step is an all-reduce by one kernel."""
    return any(isinstance(s, Collective) and s.kind == "one_shot" for s in program.steps)


class Exchanger:
    """What one engine exchanges rows through, once ``open`` has been called.

    Attributes:
        offered: Whether transport and providers can do it.
        nbytes: Symmetric memory held now.
    """

    def __init__(self, transport: Transport, providers: Sequence[GemmProvider]) -> None:
        self._transport = transport
        self._provider = next((p for p in providers if isinstance(p, ExchangeProvider)), None)
        caps = transport.caps
        reaches = caps.device_signal and caps.peer_view and caps.stream_ordered and transport.size > 1
        self.offered, self.nbytes = reaches and self._provider is not None, 0
        self._exchange: Exchange | None = None
        self._memory: SymBuffer | None = None
        self._words: DeviceSlotTable | None = None

    @property
    def ready(self) -> bool:
        """Whether ``open`` has been called."""
        return self._exchange is not None

    def open(self) -> None:
        """Allocate. Collective; once."""
        provider, transport = self._provider, self._transport
        if self.ready or provider is None or not isinstance(transport, OneSided):
            return
        nbytes, words = provider.exchange_nbytes(transport.size, EXCHANGE_PROGRAMS, EXCHANGE_SLOT_NBYTES)
        memory, table = transport.alloc(nbytes), transport.alloc_slots(words)
        ranks = range(transport.size)
        views = [memory.view(r) for r in ranks]
        if not isinstance(table, DeviceSlotTable) or any(v is None for v in views):
            raise Unsupported(f"transport {transport.name!r} gives kernels no addresses of words or of peers' memory")
        self._memory, self._words, self.nbytes = memory, table, nbytes + 8 * words * transport.size
        self._exchange = provider.exchange(
            ExchangeMemory(
                transport.rank,
                tuple(v.data_ptr() for v in views if v is not None),
                tuple(table.peer_address(r, 0) for r in ranks),
                tuple(table.address(r, 0) for r in ranks),
                EXCHANGE_PROGRAMS,
                EXCHANGE_SLOT_NBYTES,
            )
        )

    def prepare(
        self, dtype: torch.dtype, rows: int, cols: int, *, bias: bool, residual: bool, norm: bool
    ) -> ExchangeKernel:
        """The kernel for such sizes. Raises Unsupported before ``open``, or if there is none."""
        if self._exchange is None:
            raise Unsupported("rows are exchanged by kernels only after a collective step: run the op eagerly first")
        return self._exchange.prepare(dtype, rows, cols, bias=bias, residual=residual, norm=norm)

    def close(self) -> None:
        """Give the memory back. Collective when healthy."""
        if self._memory is not None and self._words is not None:
            self._memory.close()
            self._words.close()
        self._exchange, self._memory, self._words, self.nbytes = None, None, None, 0


def aligned(tensor: Tensor) -> Tensor:
    """``tensor`` (rows, n), or a copy whose rows start at multiples of 16 bytes."""
    step = 16 // tensor.element_size()
    if tensor.data_ptr() % 16 == 0 and (tensor.shape[0] <= 1 or tensor.stride(0) % step == 0):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
