"""Layers that their parent calls with one and the same tensor, such as q, k and v: one gather, one exchange in
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["Member", "SharedInput", "begin_sharing", "share"]

M = TypeVar("M", bound="Member")


class Member(Protocol):
    """A layer that can compute for others."""

    shared: SharedInput | None

    def alike(self) -> tuple[Any, ...]:
        """What must be equal for one layer to compute for another."""
        ...


class SharedInput:
    """The first layer called computes for all, and the others hand out their part.

    Nothing is assumed about the parent: a layer that gets another tensor, in another grad or autocast mode, outside its
    parent's forward, or within a checkpoint of its own (which is recomputed later, without the others), works alone.
    """

    _x: Tensor | None
    _mode: tuple[Any, ...]
    _outs: dict[int, Tensor]

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self.end()

    def begin(self) -> None:
        """The parent's forward begins."""
        self.end()
        self._open, self._hooks = True, _saving()

    def end(self) -> None:
        """The parent's forward has ended: what nobody asked for is dropped."""
        self._open, self._hooks = False, None
        self._x, self._mode, self._outs = None, (), {}

    def product(
        self, caller: M, x: Tensor, compute: Callable[[list[M]], Sequence[Tensor]], how: Hashable = ()
    ) -> Tensor:
        """Return ``caller``'s product of ``x``: what an earlier member computed for it, once, or what it computes now,
        for others too. Collective where ``compute`` is.

        Args:
            compute: The products of ``x`` and the given members, in their order.
            how: What a product depends on besides ``x`` and the members, such as uneven rows.
        """
        mode = (how, *_mode(x))
        if self._x is x and self._mode == mode:
            kept = self._outs.pop(self.members.index(caller), None)
            if kept is not None:
                return kept
        members = self._members_for(caller)
        outs = compute(members)
        if len(members) > 1:
            self._x, self._mode = x, mode
            self._outs = {self.members.index(m): y for m, y in zip(members, outs, strict=True) if m is not caller}
        return outs[members.index(caller)]

    def _members_for(self, caller: M) -> list[M]:
        """``caller`` and those for which it may compute now."""
        if not self._open or self._hooks != _saving():
            return [caller]
        like = caller.alike()
        members: list[Any] = [m for m in self.members if m is caller or m.alike() == like]
        return members

    def __getstate__(self) -> dict[str, Any]:
        return {"members": self.members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.members = state["members"]
        self.end()


def share(parent: nn.Module, members: Sequence[Member]) -> None:
    """Let ``members``, layers of ``parent``, share their input. Local."""
    shared = SharedInput(members)
    for member in members:
        member.shared = shared
    known: list[SharedInput] | None = getattr(parent, "_shared_inputs", None)
    if known is None:
        known = []
        setattr(parent, "_shared_inputs", known)  # noqa: B010 - declared nowhere
        # Functions of this module, which copies and pickles of the parent keep.
        parent.register_forward_pre_hook(begin_sharing)
        parent.register_forward_hook(_end, always_call=True)
    known.append(shared)


def begin_sharing(parent: Any, args: Any = ()) -> None:
    """What runs before a parent's forward."""
    for shared in parent._shared_inputs:
        shared.begin()


def _end(parent: Any, args: Any, output: Any) -> None:
    for shared in parent._shared_inputs:
        shared.end()


def _mode(x: Tensor) -> tuple[Any, ...]:
    """What must be equal for a product computed earlier to be the one that is wanted now."""
    if torch.compiler.is_compiling():  # one trace has one mode, and its tensors are not changed in place
        return ()
    kind = x.device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    version = 0 if x.is_inference() else x._version
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, version, _saving()


def _saving() -> Any:
    """Tells in which checkpoint, if any, tensors are saved now."""
    return None if torch.compiler.is_compiling() else torch._C._autograd._top_saved_tensors_default_hooks(False)
