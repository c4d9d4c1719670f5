"""The command line of benches that take traces."""

import argparse
import sys
from collections.abc import Callable

import kvstow

BAD_INPUT = 2


def parser(doc: str, *, traces: str = "+") -> argparse.ArgumentParser:
    """Return the parser of a bench whose docstring is `doc`, for one trace or more."""
    made = argparse.ArgumentParser(description=doc.partition("\n")[0])
    made.add_argument("traces", metavar="TRACE", nargs=traces, help="a trace in the Mooncake form")
    return made


def run(main: Callable[[], int]) -> None:
    """Exit with the status of `main`; a trace that it cannot read is one line, as in kvstow."""
    try:
        sys.exit(main())
    except kvstow.ConfigError as error:
        print(f"kvstow: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
