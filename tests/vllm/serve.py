"""What `vllm serve` runs. That command needs a package named `vllm`, and the CPU build has another.

    python -m tests.vllm.serve --model FOLDER ...

Unlike the module that `tests.vllm.server` starts, it has several API servers with data parallelism.
Each of its processes would import vLLM anew, so they are forks. Set `PROMETHEUS_MULTIPROC_DIR`: it
counts only if it is there before the import.
"""

from __future__ import annotations

import importlib
import sys

from tests.vllm import forking
from tests.vllm.template import LATER
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    for name in LATER:
        importlib.import_module(name)
    forking.IS_FULL = False
    forking.fork_processes()
    forking.inspect_here()
    command, parser = ServeSubcommand(), FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers())
    at = sys.argv.index("--model")
    words = [sys.argv[at + 1], *sys.argv[1:at], *sys.argv[at + 2 :]]
    arguments = parser.parse_args(["serve", *words])
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main()
