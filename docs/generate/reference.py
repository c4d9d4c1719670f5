"""Tables of the command line, the connector's options and the metrics, read from the code.

`python -m docs.generate.reference` writes each table into its page. A test compares them.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path

import click
from docs.generate import compatibility

from kvstow.cli import _commands
from kvstow.observability.metrics import ALL_METRICS
from kvstow.vllm.hints import Hints
from kvstow.vllm.options import DEFAULT_BYTES, Options

DEFAULT = re.compile(r"\s*\[default: (.*)\]$")
DOCS = Path(__file__).parents[1]
# How the names of each kind of options begin. The page has the kinds in this order.
KINDS = (
    (r"(?!observe|record|disk|shared|min_promote|promote|skip)", "The host tier"),
    (r"observe|record", "Observe and record"),
    (r"min_promote|promote|skip", "Any tier below the host"),
    (r"disk", "A disk below the host"),
    (r"shared", "A shared store below the host"),
)
PLACE = re.compile(r"(?ms)^(<!-- generated: ([\w-]+) -->)\n.*?\n(<!-- end -->)$")


def command_line() -> str:
    """Return a section for each command, with a table of its options."""
    group = _commands()
    sections = _sections(group, click.Context(group, info_name="kvstow"))
    return "\n\n".join(sections)


def options() -> str:
    """Return a table for each kind of the connector's options."""
    rows = _fields(Options, cpu_bytes_to_use=DEFAULT_BYTES)
    kinds: dict[str, list[tuple[str, str, str]]] = {kind: [] for _, kind in KINDS}
    for row in rows:
        (kind, *_) = (kind for form, kind in KINDS if re.match(form, row[0].strip("`")))
        kinds[kind].append(row)
    head = ("option", "default", "what it is")
    return "\n\n".join(f"### {kind}\n\n{table(head, rows)}" for kind, rows in kinds.items())


def hints() -> str:
    """Return the table of the hints that a request may give to the connector."""
    return table(("hint", "default", "what it is"), _fields(Hints))


def metrics() -> str:
    """Return the table of the metrics."""
    rows = []
    for metric in ALL_METRICS:
        label = f"`{metric.label}`: {', '.join(metric.keys)}" if metric.label else ""
        rows.append((f"`{metric.name}`", label, metric.text))
    return table(("metric", "labels", "what it counts"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, without columns that are empty."""
    rows = list(rows)
    used = [any(row[column] for row in rows) for column in range(len(head))]
    lines = [list(compress(line, used)) for line in (head, ["---"] * len(head), *rows)]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def compatible() -> str:
    """Return the table of the versions that kvstow works with."""
    return table(("needs", "versions", "tested"), compatibility.rows())


TABLES: dict[str, Callable[[], str]] = {
    "command-line": command_line,
    "compatibility": compatible,
    "hints": hints,
    "metrics": metrics,
    "options": options,
}


def with_tables(page: str) -> str:
    """Return a page's text with each table as the code makes it now."""
    return PLACE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", page)


def _fields(cls: type, **defaults: object) -> list[tuple[str, str, str]]:
    """Return name, default and text of a dataclass's fields; `defaults` replaces some defaults."""
    defaults = {known.name: known.default for known in dataclasses.fields(cls)} | defaults
    texts = dict(_attributes(cls.__doc__ or ""))
    assert texts.keys() == defaults.keys(), "each field has an entry in the docstring"
    return [
        (f"`{name}`", "" if value is None else f"`{json.dumps(value)}`", texts[name])
        for name, value in defaults.items()
    ]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None, f"{name} is listed"
            yield from _sections(child, click.Context(child, parent=context, info_name=name))
        return
    # click's mark for a paragraph that is not rewrapped, and its end of the help text.
    text = (command.help or "").split("\f")[0].replace("\b\n", "")
    yield f"## {context.command_path}"
    yield f"```text\n{command.get_usage(context)}\n```"
    yield re.sub(r"(?m)^[ \t]+", "", text)
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    rows = []
    for option, meaning in filter(None, records):
        if not meaning or option == "--help":
            continue
        default = DEFAULT.search(meaning)
        value = f"`{default[1]}`" if default and len(default[1].split()) == 1 else ""
        rows.append((f"`{option}`", value, DEFAULT.sub("", meaning) if value else meaning))
    yield table(("option", "default", "what it does"), rows)
    if command.epilog:
        yield command.epilog


def _attributes(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of a docstring's section `Attributes:`."""
    section = docstring.split("Attributes:\n")[1]
    for name, text in re.findall(r"^ {8}(\w+): (.*(?:\n {9,}.*)*)", section, re.MULTILINE):
        words = " ".join(text.split())
        yield name, words[:1].upper() + words[1:]


if __name__ == "__main__":
    for path in DOCS.rglob("*.md"):
        text = path.read_text()
        if (written := with_tables(text)) != text:
            path.write_text(written)
            print(path.relative_to(DOCS))
