"""The plot and the table of a fleet are made from the committed result."""

from __future__ import annotations

import re

from docs.generate import fleet
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "how-to" / "shared.md").read_text()
MIB_PER_BLOCK, TOKENS_PER_BLOCK = 64, 512


def test_the_plot_and_the_table_are_those_of_the_result() -> None:
    assert fleet.PLOT.read_text() == fleet.plot(), "run: python -m docs.generate.fleet"
    assert fleet.table() in PAGE, "put the output of docs.generate.fleet.table() into the page"


def test_the_estimate_follows_from_the_result() -> None:
    cost = fleet.per_request()
    named = tuple(f"{cost[name]:.1f}" for name in ("asked_keys", "puts", "shared_hits"))
    text = " ".join(PAGE.split())
    assert f"asks for {named[0]} blocks of 512 tokens, puts {named[1]} and reads {named[2]}" in text
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d,]+) \| ([\d.]+) GiB/s \| ([\d.]+) GiB/s \|$", PAGE, re.M
    )
    assert len(rows) == 3
    for row in rows:
        num, keys, put, read = (float(cell.replace(",", "")) for cell in row)
        assert keys == round(num * cost["asked_keys"] * TOKENS_PER_BLOCK / 16)
        gib = num * MIB_PER_BLOCK / 1024
        for shown, blocks in ((put, cost["puts"]), (read, cost["shared_hits"])):
            assert abs(shown - gib * blocks) < 0.6 if num > 1 else abs(shown - gib * blocks) < 0.06
