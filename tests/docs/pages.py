"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

FENCE = re.compile(
    r"^(?: *<!-- parsed only: (?P<reason>.*) -->\n)?"
    r"(?P<indent> *)```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
SNIPPET = re.compile(r"^--8<--\n(.*)\n--8<--$", re.MULTILINE)
PROMISE = "It prints\n\n"


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        line: its first line in the page, for messages.
        title: of the file that it shows; empty for none.
        reason: why it is parsed and not run; empty if it is run.
        is_output: the words before it promise it as the output of the block before.
    """

    line: int
    language: str
    title: str
    text: str
    reason: str
    is_output: bool


def blocks(page: Path) -> Iterator[Block]:
    """Yield a page's blocks, with included files in place."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        code = dedent(found["text"])
        yield Block(
            text.count("\n", 0, found.start()) + 1,
            found["language"],
            found["title"] or "",
            SNIPPET.sub(lambda name: (ROOT / name[1]).read_text().rstrip("\n"), code),
            found["reason"] or "",
            text.endswith(PROMISE, 0, found.start()),
        )
