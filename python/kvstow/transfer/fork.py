"""What a forked child must not use: the threads, locks, host memory and devices of its parent.

A child has none of its parent's threads, and another thread of the parent may hold a lock at the
fork. So each object that has such things registers here. The child closes all of them before any
other code of it runs.
"""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

FORKED: Final = "belongs to the process that this one was forked from"
FORKED_TRANSFER: Final = f"the transfer {FORKED}; only that process learns its end"


class _Closes(Protocol):
    def close_in_child(self) -> None:
        """Become unusable. Takes no lock, waits for nothing, and raises nothing."""


_registered: weakref.WeakSet[_Closes] = weakref.WeakSet()


def close_in_children(owner: _Closes) -> None:
    """Call `owner.close_in_child` in each process that is forked from this one."""
    _registered.add(owner)


def _close_all() -> None:
    for owner in list(_registered):
        owner.close_in_child()


os.register_at_fork(after_in_child=_close_all)
