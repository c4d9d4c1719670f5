"""An option of a command whose refusal says more than which values there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click


class OneOf(click.Choice[str]):
    """One of several words.

    Args:
        choices: the words.
        advice: what a user of another word should know, for the end of the message.
    """

    def __init__(self, choices: Sequence[str], advice: str) -> None:
        super().__init__(choices)
        self._advice = advice

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return why the value is refused, and the advice."""
        message = super().get_invalid_choice_message(value, ctx)
        return f"{message.removesuffix('.')}{self._advice}." if self._advice else message
