"""Benches, which a program runs as `python -m benches.NAME`."""

import sys
from types import TracebackType

_OF_THE_TESTS = ("vllm", "torch", "transformers", "hypothesis")


def _name_the_way_out(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if isinstance(error, ModuleNotFoundError) and error.name in _OF_THE_TESTS:
        print(f"{error}: this bench needs what `make .venv/.test` installs", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# Only in a bench's own process: while Python looks for the module of `-m`, this is its argument 0.
if sys.argv[:1] == ["-m"]:
    sys.excepthook = _name_the_way_out
