"""The command line of benches that take traces."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import kvstow
from kvstow.cli import EXIT_IO
from kvstow.output import discard_standard_output
from kvstow.replay.trace import DEFAULT_BLOCK_SIZE

BAD_INPUT = 2


def parser(doc: str, *, traces: str = "+") -> argparse.ArgumentParser:
    """Return the parser of a bench whose docstring is `doc`, for one trace or more."""
    made = argparse.ArgumentParser(description=doc.partition("\n")[0])
    made.add_argument("traces", metavar="TRACE", nargs=traces, help="a trace in the Mooncake form")
    return made


def add_form(made: argparse.ArgumentParser) -> None:
    """Add the options that say what the ids of the traces name, as those of `kvstow replay` do."""
    made.add_argument("--block-size", type=int, default=DEFAULT_BLOCK_SIZE, help="tokens per id")
    made.add_argument("--chain", action="store_true", help="the ids name passages, as in RAGPulse")


def names_passages(path: str | Path, chain: bool) -> bool:
    """Whether to chain the ids of this trace; RAGPulse needs no option."""
    return chain or "ragpulse" in Path(path).name


def run(main: Callable[[], int]) -> None:
    """Exit with the status of `main`; a trace that it cannot read is one line, as in kvstow."""
    try:
        sys.exit(main())
    except kvstow.ConfigError as error:
        print(f"kvstow: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except BrokenPipeError:  # who reads the output has enough
        discard_standard_output()
        sys.exit(EXIT_IO)
