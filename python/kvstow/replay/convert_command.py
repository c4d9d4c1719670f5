"""The command `kvstow trace`: make a trace that `kvstow replay` takes."""

from pathlib import Path
from typing import Literal

import click

from kvstow.output import print_text
from kvstow.replay.convert import TokenReader, VllmLogReader, trace_lines

__all__ = ["trace"]


@click.group()
def trace() -> None:
    """Make traces for `kvstow replay`."""


@trace.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "form",
    type=click.Choice(["tokens", "vllm-log"]),
    default="tokens",
    show_default=True,
    help="What FILE holds: JSON lines with token ids, or vLLM's log with --enable-log-requests and "
    "VLLM_LOGGING_LEVEL=DEBUG.",
)
@click.option(
    "--block-size", type=int, default=16, show_default=True, help="Tokens of a block of the trace."
)
@click.option(
    "--output-tokens",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Output length of the requests whose output a log does not have.",
)
def convert(
    file: Path, form: Literal["tokens", "vllm-log"], block_size: int, output_tokens: int
) -> int:
    """Print FILE (- for standard input) as a trace, one request a line.

    The trace holds lengths and numbers of blocks, but no token and no hash. Replay it with the same
    --block-size.

    Exits with 0 if all is well, 2 for bad usage or input, 74 if input or output fails.
    """
    reader = (
        TokenReader(file, block_size)
        if form == "tokens"
        else VllmLogReader(file, block_size, output_tokens)
    )
    print_text("".join(trace_lines(reader.read())))
    return 0
