"""Communicators by name: what a compiled graph holds, since it can hold a string and no object.

A process group's default communicator is found through the group's own name. All others (a second communicator of a
group, the launcher's, an MPI communicator's) are kept here until they are closed or dropped.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .communicator import Communicator

__all__ = ["find", "known", "register"]

_lock = threading.Lock()
_named: weakref.WeakValueDictionary[tuple[str, str], Communicator] = weakref.WeakValueDictionary()


def _forget_parent() -> None:
    """In a forked child: its parent's communicators are not its own, and a thread of the parent may hold the lock."""
    global _lock
    _lock = threading.Lock()
    _named.clear()


os.register_at_fork(after_in_child=_forget_parent)


def register(comm: Communicator) -> str:
    """Return the name by which custom operators find ``comm``, the same on all ranks that connect in one order. Local.

    A name that a live communicator of other ranks has gets a number; one of a process group that is gone is taken over.
    """
    name = base = comm.group.name
    of_process_group = isinstance(comm.group.key, tuple) and comm.group.key[0] == "process_group"
    if of_process_group and name.endswith(":default"):
        return name.removesuffix(":default")
    number = 1
    with _lock:
        while not of_process_group and find(name, comm.device.type) is not None:
            number += 1
            name = f"{base}#{number}"
        _named[name, comm.device.type] = comm
    return name


def find(name: str, device_type: str) -> Communicator | None:
    """Return the open communicator for tensors on ``device_type`` that was registered as ``name``, or None. Local."""
    found = _named.get((name, device_type))
    return found if found is not None and not found.closed else None


def known() -> list[str]:
    """Return the names of open registered communicators, for messages."""
    return sorted({name for (name, _), comm in _named.items() if not comm.closed})
