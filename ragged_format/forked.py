"""What a forked child must not touch: files and locks that its parent is writing."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Owned", "disown_in_children"]


class Owned(Protocol):
    """Something that belongs to the process that made it."""

    def disown(self) -> None:
        """Become harmless, in a forked child: change nothing that the parent still uses."""
        ...


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def disown_in_children(thing: Owned) -> None:
    """Have ``thing.disown()`` called in every process that is forked from this one."""
    _owned.add(thing)


def _in_child() -> None:
    for thing in list(_owned):
        thing.disown()
    _owned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
