"""The command `kvstow trace`."""

from pathlib import Path
from typing import Literal

import click

from kvstow._core import ConfigError
from kvstow.output import Output, with_output
from kvstow.replay.convert import TokenReader, VllmLogReader, trace_json, trace_lines
from kvstow.replay.source import Source
from kvstow.replay.times import warn_of_times
from kvstow.replay.trace import MAX_OUTPUT_TOKENS


@click.group()
def trace() -> None:
    """Make traces for `kvstow replay`."""


@trace.command(
    epilog="Pass the same --block-size to kvstow plan and kvstow replay, which take 512 without it."
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "form",
    type=click.Choice(["tokens", "vllm-log"]),
    default="tokens",
    show_default=True,
    help="What FILE is: JSON lines with token ids, or the log of a vLLM server that ran with "
    "--enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG.",
)
@click.option(
    "--block-size",
    default=16,
    show_default=True,
    help="Number of tokens in a block of the trace.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(0, MAX_OUTPUT_TOKENS),
    default=0,
    show_default=True,
    help="With --from vllm-log: number of output tokens of each request whose output is not in "
    "the log.",
)
@with_output
def convert(
    output: Output,
    file: Path,
    form: Literal["tokens", "vllm-log"],
    block_size: int,
    output_tokens: int,
) -> int:
    """Convert FILE to a trace, and print one request a line.

    FILE may be - for standard input. The trace holds lengths and block numbers, but no token and
    no hash.

    The exit status is 0 for success, 2 for bad usage or input, and 74 if input or output fails.
    """
    if output_tokens and form == "tokens":
        raise ConfigError(
            f"--output-tokens is {output_tokens}, and token ids have an output_length on each "
            "line: leave it out, or pass --from vllm-log"
        )
    Source(file).check()
    if form == "tokens":
        converted = TokenReader(file, block_size).read()
    else:
        log = VllmLogReader(file, block_size, output_tokens)
        converted = log.read()
        _warn_of_the_log(log, len(converted.requests), output_tokens)
    warn_of_times(converted.requests)
    output.write(trace_json(converted), lambda: "".join(trace_lines(converted)))
    return 0


def _warn_of_the_log(log: VllmLogReader, num_requests: int, output_tokens: int) -> None:
    if log.unread:
        click.echo(
            f"kvstow: requests left out because their token ids cannot be read: "
            f"{len(log.unread)}, the first in line {log.unread[0]}: the line is cut, or the "
            "request has embeddings",
            err=True,
        )
    if log.num_without_output:
        way_out = "" if output_tokens else ": pass the mean of your server as --output-tokens"
        click.echo(
            f"kvstow: the log has no output of {log.num_without_output:,} of {num_requests:,} "
            f"requests, so each of these counts with {output_tokens:,} output tokens{way_out}",
            err=True,
        )
