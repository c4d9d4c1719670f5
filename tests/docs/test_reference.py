"""What the reference names exists, and what exists is in the reference."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from docs.generate.reference import PLACE, TABLES, with_tables
from tests.docs.pages import FENCE, ROOT

import kvstow
from kvstow import KvstowError
from kvstow.cli import _commands
from kvstow.observability.metrics import ALL_METRICS
from kvstow.vllm.options import Options

DOCS = ROOT / "docs"
PAGES = {
    path: path.read_text()
    for path in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]
}
GUIDE = {ROOT / "CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text()}
REFERENCE = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
ENTRIES = set(re.findall(r"^::: ([\w.]+)$", REFERENCE, re.MULTILINE))
# Packages whose `__all__` is for users of the library.
PUBLIC = ("kvstow", "kvstow.transfer", "kvstow.tiers", "kvstow.observability")
SAMPLES = ("_total", "_bucket", "_sum", "_count", "_created")


def found(name: str) -> object:
    """Return what a dotted name of an entry is."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_every_entry_exists(name: str) -> None:
    assert found(name) is not None


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_has_an_entry(package: str) -> None:
    names = set(importlib.import_module(package).__all__) - {"__version__"}
    entries = [found(entry) for entry in ENTRIES]
    missing = {
        name
        for name in names
        if f"{package}.{name}" not in ENTRIES
        and not any(getattr(importlib.import_module(package), name) is entry for entry in entries)
    }
    assert missing == set()


# -- errors ------------------------------------------------------------------------------------


def errors() -> Iterator[type[KvstowError]]:
    """Yield every error of kvstow that a module defines."""
    for module in pkgutil.walk_packages(kvstow.__path__, "kvstow."):
        if ".vllm" in module.name or module.name.endswith("__main__"):
            continue
        for _, each in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(each, KvstowError):
                yield each


def test_every_error_is_in_the_reference() -> None:
    known = {each.__name__ for each in errors()}
    assert known >= {"ConfigError", "TransferTimeout", "SlotFileMismatch"}
    listed = {entry.rpartition(".")[2] for entry in ENTRIES}
    assert known - listed == set()


# -- metrics -----------------------------------------------------------------------------------


def test_every_metric_that_a_page_names_exists() -> None:
    known = {metric.name for metric in ALL_METRICS}
    known |= {metric.name.removesuffix("_total") for metric in ALL_METRICS}
    for path, text in PAGES.items():
        for name in re.findall(r"\bkvstow_[a-z_]*[a-z]\b", text):
            bare = next((name.removesuffix(end) for end in SAMPLES if name.endswith(end)), name)
            is_rule = f"{name}:" in text or f":{name}" in text
            assert name in known or bare in known or is_rule or name in OTHER_NAMES, (path, name)


# No metrics: the crates, and a folder that a page makes.
OTHER_NAMES = {"kvstow_core"}

# -- options -----------------------------------------------------------------------------------


def test_every_option_that_a_page_passes_to_the_connector_exists() -> None:
    known = {field.name for field in dataclasses.fields(Options)}
    num_found = 0
    for path, text in PAGES.items():
        for given in re.findall(r'"kv_connector_extra_config"\s*:\s*\{([^{}]*)\}', text):
            for name in re.findall(r'"(\w+)"\s*:', given):
                num_found += 1
                assert name in known, (path, name)
    assert num_found > 5


def test_every_generated_table_is_on_one_page() -> None:
    placed = [found[2] for text in PAGES.values() for found in PLACE.finditer(text)]
    assert sorted(placed) == sorted(TABLES)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_of_the_code(path: Path) -> None:
    assert with_tables(PAGES[path]) == PAGES[path], "run: python -m docs.generate.reference"


# -- commands ----------------------------------------------------------------------------------


def commands() -> Iterator[tuple[Path, str]]:
    """Yield each line of a page that calls kvstow, in a block or within a sentence."""
    for path, text in PAGES.items():
        if path.name == "troubleshooting.md":  # it quotes messages, which begin alike
            continue
        blocks = "\n".join(re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        joined = blocks.replace("\\\n", " ")
        yield from ((path, line) for line in re.findall(r"^(?:\$ )?(kvstow .*)$", joined, re.M))
        yield from ((path, line) for line in re.findall(r"`(kvstow [a-z][^`]*)`", text))


def test_every_command_and_its_options_exist() -> None:
    lines = list(commands())
    assert len(lines) > 40
    for path, line in lines:
        command: click.Command = _commands()
        words = re.split(r"[|;&>#]", line)[0].split()[1:]
        while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z-]+", words[0]):
            child = command.commands.get(words[0]) or command.get_command(
                click.Context(command), words[0]
            )
            assert child is not None, (path, line)
            command, words = child, words[1:]
        known = {one for parameter in command.params for one in parameter.opts} | {"--help"}
        known |= {one for parameter in command.params for one in parameter.secondary_opts}
        for word in words:
            option = word.split("=")[0].rstrip(".,:")
            if re.fullmatch(r"--[a-z-]+", option) and option != "--version":
                assert option in known, (path, line)


def test_every_option_on_the_page_of_the_command_line_exists() -> None:
    page = (DOCS / "reference" / "cli.md").read_text()
    named = re.findall(r"`(--[a-z-]+)", page)
    assert len(named) > 20
    known = set(re.findall(r"--[a-z-]+", TABLES["command-line"]()))
    assert [name for name in named if name not in known] == []


def test_every_program_that_a_page_names_exists() -> None:
    num_found = 0
    for path, text in (PAGES | GUIDE).items():
        joined = " ".join(text.replace("\\\n", " ").split())
        for module in re.findall(r"python3? -m ((?:benches|docs|tests)[.\w]*\w)", joined):
            num_found += 1
            file = ROOT / module.replace(".", "/")
            assert file.with_suffix(".py").exists() or (file / "__main__.py").exists(), (
                path,
                module,
            )
        for name, arguments in re.findall(r"(?:python3? )(examples/\w+\.py)([^`]*)", joined):
            num_found += 1
            options = re.findall(r" (--[a-z][a-z0-9-]*)", arguments)
            source = (ROOT / name).read_text()
            assert [one for one in options if f'"{one}"' not in source] == [], (path, name)
    assert num_found > 20


def test_pages_name_the_targets_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):.*## ", makefile, re.MULTILINE))
    named: set[str] = set()
    for path, text in (PAGES | GUIDE).items():
        code = "".join(block["text"] for block in FENCE.finditer(text))
        found = set(re.findall(r"^ *make ([a-z][a-z-]*)", code, re.MULTILINE))
        found |= set(re.findall(r"`make\s([a-z][a-z-]*)", text))
        assert found <= targets, (path, found - targets)
        named |= found
    assert targets - named == {"help"}
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == targets


# -- the environment ---------------------------------------------------------------------------

TEXTS = {".py", ".md", ".rs", ".yaml", ".service", ""}
VARIABLE = re.compile(r"\bKVSTOW_[A-Z_]+\b")


def variables(*folders: str) -> set[str]:
    """Return the variables of the environment that the files of folders name."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = (path.read_text(errors="ignore") for path in files if path.suffix in TEXTS)
    return {name for text in texts for name in VARIABLE.findall(text)}


def test_every_variable_of_the_environment_is_documented() -> None:
    assert variables("python") - variables("docs") == set()


def test_every_documented_variable_of_the_environment_is_read() -> None:
    pages = {name for text in PAGES.values() for name in VARIABLE.findall(text)}
    pages |= {name for text in GUIDE.values() for name in VARIABLE.findall(text)}
    read = variables("python", "tests", "rust", "benches", "examples")
    read |= set(VARIABLE.findall((ROOT / "Makefile").read_text()))
    assert pages - read == set()


def test_names_of_the_guide_exist() -> None:
    """A name in code style is somewhere in the code, perhaps after its class or module."""
    code = (ROOT / "Makefile").read_text()
    for folder in ("python", "rust", "tests"):
        code += "\n".join(
            path.read_text()
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {".py", ".pyi", ".rs"}
        )
    known = set(re.findall(r"\w+", code))
    for path, text in GUIDE.items():
        named = set(re.findall(r"`(?:\w+\.)*(\w*(?:_|[a-z][A-Z])\w*)`", text))
        assert named - known == set(), path
        assert len(named) > 20
