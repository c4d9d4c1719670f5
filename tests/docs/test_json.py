"""The page of the JSON has each field that a command prints, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import ROOT

from kvstow.cli import main
from kvstow.replay import BUNDLED_TRACE

PAGE = (ROOT / "docs/reference/json.md").read_text()


def paths(value: Any, name: str = "") -> Iterator[str]:
    """Yield the name of each field, as the page writes it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        if not value:
            yield f"{name}[]"
        for inner in value:
            yield from paths(inner, f"{name}[]")
    else:
        yield name


def documented(section: str) -> set[str]:
    """Return the fields in the tables of a section."""
    [text] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall("`([^`]+)`", cell)}


Fields = Callable[..., set[str]]


@pytest.fixture
def printed(tmp_path: Path) -> Fields:
    """Return the fields that a command prints."""

    def fields(*arguments: str) -> set[str]:
        file = tmp_path / "figures.json"
        assert (
            main([*arguments, str(BUNDLED_TRACE), "--limit", "30", "--json-file", str(file)]) == 0
        )
        return summed_up(set(paths(json.loads(file.read_text()))))

    return fields


def summed_up(found: set[str]) -> set[str]:
    """Return the fields with a `.*` for each group that the page sums up."""
    whole = ("options", "rows[].alone")
    return {next((f"{it}.*" for it in whole if name.startswith(f"{it}.")), name) for name in found}


def test_a_plan(printed: Fields) -> None:
    found = printed("plan", "--bytes-per-token", "131072", "--device-blocks", "64")
    assert found == documented("A plan")


def test_a_fleet(printed: Fields) -> None:
    assert printed("replay", "--servers", "1,2") == documented("A fleet")


def test_a_replay(printed: Fields, tmp_path: Path) -> None:
    plain = printed("replay")
    disk = printed("replay", "--disk", str(tmp_path / "disk"), "--disk-blocks", "1000")
    assert plain < disk <= documented("A replay")
    of_a_store = {name for name in documented("A replay") if "shared" in name}
    assert documented("A replay") - of_a_store == disk


@pytest.mark.parametrize("name", sorted(n for n in documented("A replay") if "shared" in n))
def test_fields_of_a_store_exist(name: str) -> None:
    source = (ROOT / "python/kvstow/replay/report.py").read_text()
    last = name.rpartition(".")[2]
    assert last in source or re.fullmatch("(failed_)?(disk_and_)?shared(_blocks)?", last)


@pytest.mark.parametrize("command", [["replay"], ["replay", "--servers", "1"], ["plan"]])
def test_figures_say_how_the_trace_was_read(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--bytes-per-token", "131072"] if command == ["plan"] else []
    for given, expected in ([], False), (["--chain"], True):
        assert main([*command, *model, str(BUNDLED_TRACE), "--limit", "20", *given, "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert (figures["limit"], figures["chain"], figures["block_size"]) == (20, expected, 512)
