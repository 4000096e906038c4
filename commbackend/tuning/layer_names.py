"""Names of a model's layers on the calls they make: for choices by layer, traces, and NVTX ranges."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..communicator import Communicator

if TYPE_CHECKING:
    from torch import nn

__all__ = ["name_layers"]


def name_layers(model: nn.Module) -> list[str]:
    """Give the calls of every module with a communicator the module's qualified name, from its next forward on. Local.

    Backward passes carry the names of their forward. Names are those of ``model.named_modules()``, so
    ``comm.configure("decoder.*.fc1", ...)`` speaks of them. Returns the names; naming twice changes nothing.
    """
    found = []
    for name, module in model.named_modules():
        comm = getattr(module, "comm", None)
        if not name or not isinstance(comm, Communicator):
            continue
        found.append(name)
        if not any(isinstance(hook, _Enter) for hook in module._forward_pre_hooks.values()):
            open_ones: list[ExitStack] = []
            module.register_forward_pre_hook(_Enter(comm, name, open_ones))
            module.register_forward_hook(_Leave(open_ones), always_call=True)
    return found


class _Enter:
    def __init__(self, comm: Communicator, name: str, open_ones: list[ExitStack]) -> None:
        self._comm, self._name, self._open = comm, name, open_ones

    def __call__(self, module: Any, inputs: Any) -> None:
        within = ExitStack()
        within.enter_context(self._comm.layer(self._name))
        self._open.append(within)


class _Leave:
    def __init__(self, open_ones: list[ExitStack]) -> None:
        self._open = open_ones

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        if self._open:  # a pre-hook of somebody else's may have raised before ours ran
            self._open.pop().close()
