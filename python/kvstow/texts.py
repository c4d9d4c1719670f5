"""Text from a file or another program, as lines of a log and a terminal may show it."""

from typing import Final

MOST_OF_AN_ERROR: Final = 300
"""Letters of an error that another program has worded."""


def counted(number: int, noun: str) -> str:
    """Return a number and what it counts, such as "1 request" or "1,000 requests"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def on_one_line(text: str, most: int | None = None) -> str:
    """Return text with escapes for what ends a line or steers a terminal.

    Args:
        text: what somebody else has written.
        most: letters to keep; None for all.
    """
    kept = text if most is None or len(text) <= most else f"{text[:most]}..."
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in kept)
