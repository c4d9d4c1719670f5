"""What a forked child must not use: its parent's threads, locks, host memory and devices.

A child has none of its parent's threads, and may find their locks held for ever. So everything
that has some registers here and is closed in the child, before any other code of the child runs.
"""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

__all__ = ["FORKED", "close_in_children"]

FORKED: Final = "belongs to the process that this one was forked from"


class _Closes(Protocol):
    def close_in_child(self) -> None:
        """Become unusable. Takes no lock, waits for nothing, and raises nothing."""


_registered: weakref.WeakSet[_Closes] = weakref.WeakSet()


def close_in_children(owner: _Closes) -> None:
    """Have `owner.close_in_child` called in each process that is forked from this one."""
    _registered.add(owner)


def _close_all() -> None:
    for owner in list(_registered):
        owner.close_in_child()


os.register_at_fork(after_in_child=_close_all)
