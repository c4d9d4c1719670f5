"""An option of a command whose refusal says more than which values there are."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import click


class OneOf(click.Choice[str]):
    """One of several words.

    Args:
        choices: the words.
        advice: what a user who passes several words at once should know, to end the message.
    """

    def __init__(self, choices: Sequence[str], advice: str) -> None:
        super().__init__(choices)
        self._advice = advice

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return why the value is refused, and the advice or the word that was likely meant."""
        message = super().get_invalid_choice_message(value, ctx).removesuffix(".")
        if "," in value:
            return f"{message}{self._advice}."
        near = get_close_matches(value.lower(), self.choices, n=1)
        return f"{message}; did you mean {near[0]!r}?" if near else f"{message}."
