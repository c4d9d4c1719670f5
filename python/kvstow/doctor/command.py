"""The command `kvstow doctor`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstow.doctor import Finding, diagnose

__all__ = ["doctor"]

EXIT_OK, EXIT_BROKEN = 0, 1
_STYLES = {"ok": "green", "missing": "yellow", "broken": "bold red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write the findings as JSON, and no table.")
@click.option("--anew", is_flag=True, help="Measure the link again: what is known of it is kept.")
def doctor(as_json: bool, anew: bool) -> int:
    """Tell what this machine has of what kvstow can use, and what would help.

    Nothing here needs a GPU. Of each GPU that is there, the speed of its link is measured once, in
    about a second, and then known.

    Exits with 0 if nothing is wrong, which having no GPU is not, 1 if something that is there does
    not work, 2 for bad usage.
    """
    findings = diagnose(anew=anew)
    is_ok = all(finding.status != "broken" for finding in findings)
    if as_json:
        content = {"ok": is_ok, "findings": [asdict(finding) for finding in findings]}
        json.dump(content, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        Console(highlight=False).print(_table(findings))
    return EXIT_OK if is_ok else EXIT_BROKEN


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("", "", "", box=SIMPLE_HEAD, show_header=False)
    table.columns[0].no_wrap = True
    for finding in findings:
        text = Text(finding.says)
        if finding.advice:
            text.append(f"\n{finding.advice}", style="cyan")
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(finding.name, status, text)
    return table
