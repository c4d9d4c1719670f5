"""Runs vLLM's server. `vllm serve` does the same, but only if the package has the name `vllm`.

The processes of the server may import the main module again, and so this one imports little.
"""

import runpy

from tests.vllm.forking import fork_processes

if __name__ == "__main__":
    fork_processes()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
