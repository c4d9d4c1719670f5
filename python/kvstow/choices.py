"""An option of a command whose refusal says more than which values there are."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import click


class OneOf(click.Choice):  # type: ignore[type-arg]  # it takes no type before click 8.2
    """One of several words.

    Args:
        choices: the words.
        advice: what a user who passes several words at once should know, to end the message.
    """

    def __init__(self, choices: Sequence[str], advice: str) -> None:
        super().__init__(choices)
        self._advice = advice

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the word, or raise an error with the advice or the word that was likely meant."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(self._explained(error.message.removesuffix("."), value), param, ctx)

    def _explained(self, message: str, value: str) -> str:
        if "," in value:
            return f"{message}{self._advice}."
        near = get_close_matches(value.lower(), self.choices, n=1)
        return f"{message}; did you mean {near[0]!r}?" if near else f"{message}."
