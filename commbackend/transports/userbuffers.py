"""CUDA GPUs of one host: CUDA virtual memory whose file descriptors travel over Unix sockets, or CUDA IPC where virtual
memory is missing. What runs on the GPUs is in ``gpu.symmetric``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..contract import Rendezvous
from ..host.control import Control, HostControl
from ..gpu.heap import FdWire, Heap, IpcHeap, VmmHeap
from ..gpu.symmetric import CudaSymmetric

__all__ = ["UserbuffersTransport"]


class UserbuffersTransport(CudaSymmetric):
    """One rank of a group of GPUs on one host. Its device must be current in threads that call verbs."""

    name: ClassVar[str] = "userbuffers"
    handles = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")

    @classmethod
    def open_control(cls, group: Rendezvous, deadline: float, options: Mapping[str, Any]) -> Control:
        return HostControl.open(group, deadline)

    def _new_heap(self, vmm: bool, multicast: bool, deadline: float) -> Heap:
        control, self.memory = self._control, "vmm" if vmm else "ipc"
        assert isinstance(control, HostControl)
        if not vmm:
            return IpcHeap(self._driver, control)
        va_nbytes = int(self._options["va_nbytes"])
        return VmmHeap(self._driver, control, FdWire(control.link), va_nbytes, multicast, deadline)
