"""Objects that are closed, and the closing of several, of which each may fail."""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NoReturn, Self


class Closing(ABC):
    """A context manager that calls `close` at its end."""

    @abstractmethod
    def close(self) -> None:
        """Release what this object holds. A second call does nothing."""

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the object."""
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse a copy, because a close of one would leave the other with what is released."""
        name = type(self).__name__
        raise TypeError(
            f"{name} objects cannot be copied or pickled, because a copy would share the memory, "
            f"files or threads of the first: pass this {name} itself, or build another one"
        )


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Call each of `calls`, even after one has raised, and then raise the first error.

    An interrupt (a `BaseException` that is no `Exception`) takes precedence over other errors. The
    raised error carries the others as notes.
    """
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:
            errors.append(error)
    if not errors:
        return
    first = next((error for error in errors if not isinstance(error, Exception)), errors[0])
    for other in errors:
        if other is not first:
            text = "".join(traceback.format_exception_only(other)).strip()  # also if its str fails
            first.add_note(f"another call raised as well: {text}")
    raise first
