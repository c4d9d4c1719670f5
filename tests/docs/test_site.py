"""The site builds without a warning, fetches nothing from elsewhere, and lacks no public name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from docs.generate.diagrams import DIAGRAMS, IMAGES
from docs.generate.reference import TABLES
from tests.docs.pages import ROOT

import kvstow
import kvstow.observability
import kvstow.transfer
from kvstow.observability.metrics import ALL_METRICS

# Attributes through which a page fetches something; `href` of `<a>` is the reader's click.
FETCHED = {"src", "srcset", "data", "poster", "background"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}(`make docs` installs mkdocs)"
    assert done.stderr == ""
    return folder


class Assets(HTMLParser):
    """The addresses that a page fetches by itself."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in FETCHED or (name == "href" and tag != "a"):
                self.addresses.append(value or "")


def is_elsewhere(address: str) -> bool:
    return re.match(r"(?:\w+:)?//", address.strip()) is not None


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    found = {
        (str(page.relative_to(site)), address)
        for page in pages
        for address in Assets(page.read_text()).addresses
        if is_elsewhere(address)
    }
    assert found == set()


def test_no_style_or_picture_fetches_anything_from_elsewhere(site: Path) -> None:
    files = [path for end in ("css", "svg") for path in site.rglob(f"*.{end}")]
    assert files
    for path in files:
        text = path.read_text()
        fetched = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')]+)", text)
        assert [address for address in fetched if is_elsewhere(address)] == [], path


def test_an_asset_from_elsewhere_is_noticed() -> None:
    page = '<a href="https://a"></a><link href="//b"><script src="https://c"></script><img src="d">'
    assert [one for one in Assets(page).addresses if is_elsewhere(one)] == ["//b", "https://c"]


def test_every_public_name_has_an_entry(site: Path) -> None:
    pages = "".join(page.read_text() for page in site.glob("reference/*.html"))
    entries = set(re.findall(r'id="([\w.]+)"', pages))
    public = {
        f"{module.__name__}.{name}"
        for module in (kvstow, kvstow.transfer)
        for name in module.__all__
        if name != "__version__"
    }
    assert public - entries == set()


def test_the_generated_tables_are_on_their_pages(site: Path) -> None:
    texts = {
        name: unescape(re.sub(r"<[^>]*>", "", (site / "reference" / f"{name}.html").read_text()))
        for name in ("cli", "connector", "metrics")
    }
    assert [each.name for each in ALL_METRICS if each.name not in texts["metrics"]] == []
    # The names in a table's first column.
    for name, page in {"command-line": "cli", "options": "connector"}.items():
        cells = re.findall(r"^\| `(.*?)` \|", TABLES[name](), re.MULTILINE)
        assert len(cells) >= 10
        assert [cell for cell in cells if cell not in texts[page]] == []
    assert "generated:" not in "".join(texts.values())


def test_the_pictures_are_those_of_their_source() -> None:
    committed = {path.stem: path.read_text() for path in IMAGES.glob("*.svg")}
    committed.pop("favicon")
    drawn = {name: diagram.svg() for name, diagram in DIAGRAMS.items()}
    assert committed == drawn, "run: python -m docs.generate.diagrams"


def strings(source: str) -> Iterator[str]:
    """Yield the texts of a program, those of f-strings with `...` for each value."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(?:\.\d)?[a-z]", "...", node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else "..." for part in node.values
            ]
            yield "".join(map(str, parts))


def test_every_message_of_the_troubleshooting_page_is_in_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = page.split("## vLLM's log\n")[1]
    lines = re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)
    assert len(lines) > 25
    product = [
        text for path in (ROOT / "python").rglob("*.py") for text in strings(path.read_text())
    ]
    missing = [line for line in lines if not any(plain(line) in plain(text) for text in product)]
    assert missing == []


def test_every_problem_that_a_server_logs_is_on_the_troubleshooting_page() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    lines = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    known = [re.escape(plain(line.replace("...", "@"))).replace("@", ".*") for line in lines]
    logged = logged_by_a_server()
    missing = [text for text in logged if not any(re.search(one, plain(text)) for one in known)]
    assert missing == []


def test_every_problem_that_a_server_logs_begins_with_the_name_of_kvstow() -> None:
    # A search for `kvstow:` in vLLM's log finds all of them.
    assert [text for text in logged_by_a_server() if not text.startswith("kvstow: ")] == []


def logged_by_a_server() -> list[str]:
    """Return the texts of the warnings and errors that kvstow may log behind vLLM."""
    parts = ("vllm", "tiers", "observability")
    files = [path for part in parts for path in (ROOT / "python/kvstow" / part).rglob("*.py")]
    trees = [ast.parse(path.read_text()) for path in files]
    named = {name: text for tree in trees for name, text in constants(tree)}
    logged = [text for tree in trees for text in problems(tree, named)]
    assert len(logged) > 40
    return logged


def constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names of a module, each with what it stands for."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def problems(tree: ast.Module, named: Mapping[str, ast.expr]) -> Iterator[str]:
    """Yield the texts that a program logs as warnings and errors."""

    def texts(node: ast.expr) -> Iterator[str]:
        if isinstance(node, ast.IfExp):
            yield from texts(node.body)
            yield from texts(node.orelse)
        else:
            text = named[node.id] if isinstance(node, ast.Name) else node
            yield from strings(ast.unparse(text))

    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("warning", "error", "exception", "critical")
            and ast.unparse(node.func.value).lower().lstrip("_") in ("log", "logger")
        ):
            yield from texts(node.args[0])


def plain(text: str) -> str:
    """A message without its values, and without the quotes around them."""
    return re.sub(r"\.\.\.|[\"']", "", " ".join(text.split())).strip()


def test_every_test_of_the_table_of_modes_exists() -> None:
    page = (ROOT / "docs" / "reference" / "status.md").read_text()
    named = re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", page)
    assert len(named) > 20
    for file, name in named:
        text = (ROOT / "tests" / "vllm" / file).read_text()
        assert f"def {name}(" in text or not name, f"{file} has no test {name}"
