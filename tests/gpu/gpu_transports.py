"""Transports that only the checks on a GPU use, by the name of this module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from commbackend.contract import Caps, Rendezvous
from commbackend.gpu.symmetric import CudaSymmetric
from commbackend.transports.nvshmem_ import NvshmemTransport


class FarNvshmem(NvshmemTransport):
    """``nvshmem`` that reaches its peers by puts and gets of the library only, as across a network."""

    caps: Caps = replace(
        NvshmemTransport.caps, peer_view=False, device_signal=False, graph_capture=False, copy_engine=False,
        source="symmetric",
    )  # fmt: skip

    @classmethod
    def connect(cls, group: Rendezvous, device: torch.device, options: Mapping[str, Any]) -> CudaSymmetric:
        return super().connect(group, device, {**options, "peer_views": False})
