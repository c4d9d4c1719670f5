"""Requests that come again: documents with questions, and chats that go on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Prompts that share their beginnings, with popular and rare ones.

    Attributes:
        num_tokens: tokens of a document, at most.
        num_documents: documents, of which the first are the most popular.
        chats: the share of requests that go on with an earlier one: its prompt, its answer, and a
            new question.
        num_prompts: prompts in all.
    """

    vocabulary: int
    num_tokens: int
    num_documents: int
    chats: float
    num_prompts: int
    seed: int
    _dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._documents = [
            self._tokens(self._dice.randrange(self.num_tokens // 2, self.num_tokens + 1))
            for _ in range(self.num_documents)
        ]

    def _tokens(self, num: int) -> list[int]:
        return [self._dice.randrange(3, self.vocabulary) for _ in range(num)]

    def run(
        self, answer: Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]], at_once: int
    ) -> Iterator[list[int]]:
        """Give prompts to `answer`, some at once, and yield each prompt."""
        chats: list[list[int]] = []
        for _ in range(self.num_prompts // at_once):
            prompts = []
            for _ in range(at_once):
                if chats and self._dice.random() < self.chats:
                    before = chats.pop(self._dice.randrange(max(0, len(chats) - 20), len(chats)))
                else:
                    rank = int(self.num_documents * self._dice.random() ** 2)
                    before = self._documents[rank]
                prompts.append(before + self._tokens(self._dice.randrange(1, 20)))
            answers = answer(prompts)
            for prompt, tokens in zip(prompts, answers, strict=True):
                yield prompt
                if len(prompt) < 2 * self.num_tokens:
                    chats.append([*prompt, *tokens])
