"""Which of vLLM's model runners the engines of this process use; to be imported before vLLM.

`KVSTOW_MODEL_RUNNER=v2` chooses Model Runner V2 instead of the CPU's own. Its kernels are written
in Triton, whose releases have no compiler for CPUs, only an interpreter. On that a step takes ten
times as long.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

RUNNER = os.environ.setdefault("KVSTOW_MODEL_RUNNER", "v1")
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(RUNNER == "v2"))
os.environ.pop("TRITON_INTERPRET", None)
if RUNNER == "v2":
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends  # type: ignore[import-untyped] # as vLLM's

    # vLLM refuses to use Triton on a CPU without a backend of this name.
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
