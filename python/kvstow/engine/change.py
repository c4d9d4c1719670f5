"""Whether an operation of an engine is under way, in which thread, and whether it was cut short.

An engine has one caller at a time. A second thread would take an operation of the first for one
that was cut short, and repair what is not broken.
"""

import threading

from kvstow._core import KvstowError, StateError


class Change:
    """Knows whether an operation was cut short. Enter it around what must happen as a whole.

    Attributes:
        is_torn: whether an operation has begun and has not ended well.
    """

    def __init__(self) -> None:
        self.is_torn = False
        self._is_committed = False
        self._thread: int | None = None  # in which an operation is under way

    def __enter__(self) -> None:
        """Begin an operation that may still be refused."""
        if self.is_torn:
            self.refuse_other_thread()
        self._thread = threading.get_ident()
        self._is_committed = False
        self.is_torn = True

    def commit(self) -> None:
        """From here on any exception leaves the engine torn."""
        self._is_committed = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End it. A `KvstowError` before `commit` is a refusal that has changed nothing."""
        if kind is None or (issubclass(kind, KvstowError) and not self._is_committed):
            self.is_torn = False
        self._thread = None

    def refuse_other_thread(self) -> None:
        """Refuse to go on while an operation is under way in another thread.

        A thread that has ended, or that a forked child does not have, is in no operation any more.
        """
        ident = self._thread
        if ident in {None, threading.get_ident()}:
            return
        if any(thread.ident == ident for thread in threading.enumerate()):
            raise StateError(
                "another thread is inside a method of this Engine: call all of them but stats from "
                "one thread, and let other threads hand it their requests and aborts in a queue"
            )
