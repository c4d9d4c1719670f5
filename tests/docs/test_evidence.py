"""The page of evidence is what `make evidence` makes of the results, and names what exists."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from docs.generate import evidence
from docs.generate.plot import Bars, Lines
from tests.docs.pages import ROOT

CLAIMS = evidence.catalogue()


def test_the_page_is_made_from_the_committed_results() -> None:
    assert evidence.page() == evidence.PAGE.read_text(), "run: make evidence"


def test_the_plots_are_made_from_the_committed_results() -> None:
    committed = {path.stem: path.read_text() for path in evidence.PLOTS.iterdir()}
    assert committed == evidence.plots(), "run: make evidence"


def test_every_command_names_a_program_that_exists() -> None:
    commands = [it["command"] for it in CLAIMS["claim"] + CLAIMS["missing"] if it["command"]]
    makefile = (ROOT / "Makefile").read_text()
    for command in commands:
        if module := re.match(r"python -m ([\w.]+)", command):
            assert (ROOT / (module[1].replace(".", "/") + ".py")).exists(), command
        elif target := re.match(r"make ([\w-]+)", command):
            assert re.search(rf"^{target[1]}:", makefile, re.MULTILINE), command
        else:
            assert command.split()[0] in {"cargo", "kvstow", "valgrind"}, command


def test_every_named_test_exists() -> None:
    for test in CLAIMS["test"]:
        for name in test["by"]:
            file, _, function = name.partition("::")
            assert f"def {function}(" in (ROOT / file).read_text() or not function, name


def test_no_result_is_newer_than_its_claim() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the dates of commits need a git checkout")
    for claim in CLAIMS["claim"]:
        changed = evidence.last_change(claim["result"])
        assert changed <= str(claim["taken"]), f"{claim['result']}: run make evidence"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(evidence.RESULTS, tmp_path / "results")
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    assert evidence.page() == evidence.PAGE.read_text()
    return tmp_path / "results"


def test_a_result_without_a_claim_is_refused(results: Path) -> None:
    (results / "new.txt").write_text("1")
    with pytest.raises(ValueError, match=r"new\.txt"):
        evidence.page()


def test_a_changed_figure_changes_the_page(results: Path) -> None:
    path = results / "pool-instructions.txt"
    path.write_text(path.read_text().replace("34.1", "34.2"))
    assert evidence.page() != evidence.PAGE.read_text()


def test_a_row_that_is_gone_is_refused(results: Path) -> None:
    path = results / "hash-instructions.txt"
    path.write_text(path.read_text().replace("\nxxhash", "\nanother"))
    with pytest.raises(ValueError, match="no line that begins with 'xxhash'"):
        evidence.page()


@pytest.mark.parametrize(
    "plot",
    [
        Bars("bars", [("a & b", 2.0, "2 times"), ("c", 200.0, "200 times")]),
        Lines("lines", "x", [("a", [(1e3, 5.0), (1e4, 36.5)]), ("b", [(1e3, 0.5)])]),
    ],
    ids=["bars", "lines"],
)
def test_a_plot_has_a_light_and_a_dark_form(plot: Bars | Lines) -> None:
    text = plot.svg()
    assert "prefers-color-scheme: dark" in text
    assert "nan" not in text
    assert "&" not in text.replace("&amp;", "")
