"""Closing several things, of which each may fail."""

from collections.abc import Callable, Iterable

__all__ = ["call_all"]


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Call each of `calls`, even where one before it has raised; then raise the first error.

    An interrupt (whatever is no `Exception`) comes before other errors. The errors that are not
    raised stand in the notes of the one that is.
    """
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:
            errors.append(error)
    if not errors:
        return
    first = next((one for one in errors if not isinstance(one, Exception)), errors[0])
    for other in errors:
        if other is not first:
            first.add_note(f"closing went on, and met another error: {other!r}")
    raise first
