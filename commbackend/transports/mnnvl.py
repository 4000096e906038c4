"""CUDA GPUs of one NVLink domain, which may span hosts: the heap of ``userbuffers`` with fabric handles.

Memory is made by ``cuMemCreate`` with fabric handles: 64 bytes that every host of the domain can open, where an IMEX
daemon runs and lends this process a channel. Everything else is as on one host: copy engines or copy kernels move
chunks, stream memory operations raise flags, kernels reach peers by address; multicast is an option and no need.
Records, barriers and faults travel over the network. Not run on such hardware yet: tested with a replaced driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..contract import Caps, Rendezvous
from ..host.control import Control, NetPlane
from ..gpu.driver import Driver, DriverError
from ..gpu.heap import FabricWire, Heap, VmmHeap
from ..gpu.symmetric import CudaSymmetric
from ..errors import HeapExhausted, Unavailable

if TYPE_CHECKING:
    import torch

__all__ = ["MnnvlTransport"]

_IMEX = (
    "no IMEX channel: the administrator starts nvidia-imex on every host of the domain and gives this process a device"
    " /dev/nvidia-caps-imex-channels/channelN (in Kubernetes: a ComputeDomain)"
)


class MnnvlTransport(CudaSymmetric):
    """One rank of a group of GPUs in one NVLink domain. Its device must be current in threads that call verbs."""

    name: ClassVar[str] = "mnnvl"
    caps: Caps = replace(CudaSymmetric.caps, scope="nvlink")
    handles = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_FABRIC_SUPPORTED")

    @classmethod
    def probe(cls, device: torch.device) -> None:
        super().probe(device)
        cls._try_fabric(cls.open_driver(device, -1))

    @classmethod
    def _try_fabric(cls, driver: Driver) -> None:
        """Make the smallest memory with a fabric handle: the attribute alone is 1 also where it is not permitted."""
        for name in cls.handles:
            if not driver.attribute(name):
                raise Unavailable(
                    f"{name}: found 0, needed 1", "fabric handles need Hopper or newer and a driver >= 550"
                )
        driver.open()
        try:
            handle = driver.create(driver.granularity(fabric=True), fabric=True)
            try:
                driver.export(handle, fabric=True)
            finally:
                driver.release(handle)
        except DriverError as e:
            raise Unavailable(f"no memory with a fabric handle: {e}", _IMEX if _forbidden(e) else "") from e
        except HeapExhausted as e:
            raise Unavailable(f"no memory with a fabric handle: {e}") from e
        finally:
            driver.close()

    @classmethod
    def open_control(cls, group: Rendezvous, deadline: float, options: Mapping[str, Any]) -> Control:
        return NetPlane.open(group, deadline, options)

    def _new_heap(self, vmm: bool, multicast: bool, deadline: float) -> Heap:
        if not vmm:
            raise Unavailable("a rank's GPU has no virtual memory with fabric handles", _IMEX)
        self.memory = "fabric"
        va_nbytes = int(self._options["va_nbytes"])
        return VmmHeap(self._driver, self._control, FabricWire(self._control), va_nbytes, multicast, deadline)


def _forbidden(error: DriverError) -> bool:
    return error.code in ("CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED")
