"""The command `kvstow doctor`: its options and its table."""

from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.table import Table
from rich.text import Text

from kvstow.doctor import Finding, diagnose
from kvstow.output import Output, with_output

EXIT_OK, EXIT_BROKEN = 0, 1
_STYLES = {"ok": "green", "missing": "yellow", "broken": "bold red"}


@click.command()
@click.option("--anew", is_flag=True, help="Measure the link again instead of reading the cache.")
@click.option(
    "--kv-transfer-config",
    metavar="JSON",
    help="Also check this flag of vllm serve, before a server has loaded its weights.",
)
@with_output
def doctor(output: Output, anew: bool, kv_transfer_config: str | None) -> int:
    """Check GPU, CUDA, memory limits and vLLM, and suggest fixes.

    It works without a GPU. It measures the speed of each GPU's link once, in about a second, and
    caches the result.

    The exit status is 0 if nothing is broken, 1 if something is, 2 for bad usage, and 74 if the
    output cannot be written. A missing GPU is not broken.
    """
    findings = diagnose(anew=anew, flag=kv_transfer_config)
    is_ok = all(finding.status != "broken" for finding in findings)
    result = {"ok": is_ok, "findings": [asdict(finding) for finding in findings]}
    output.write(result, lambda: _table(findings))
    return EXIT_OK if is_ok else EXIT_BROKEN


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("", "", "", box=None, show_header=False, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for finding in findings:
        text = Text(finding.says)
        if finding.advice:
            label = "Fix" if finding.status == "broken" else "Optional"
            text.append(f"\n{label}: {finding.advice}", style="cyan")
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(finding.name, status, text)
    return table
