"""Chooses the model runner of vLLM's engines in this process. Import this module before vLLM.

`KVSTOW_MODEL_RUNNER=v2` chooses Model Runner V2 instead of the first one. Its kernels are written
in Triton, whose releases have no compiler for CPUs, only an interpreter. With it a step takes ten
times as long as on the CPU's own runner.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

RUNNER = os.environ.setdefault("KVSTOW_MODEL_RUNNER", "v1")
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(RUNNER == "v2"))
os.environ.pop("TRITON_INTERPRET", None)
if RUNNER == "v2" and not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends  # type: ignore[import-untyped] # as vLLM's

    class _Driver:
        """What vLLM asks Triton's driver of this machine."""

        @staticmethod
        def is_active() -> bool:
            return True

        @staticmethod
        def get_current_target() -> SimpleNamespace:
            return SimpleNamespace(backend="cpu")

    # On a CPU vLLM uses Triton only if it has a backend of this name.
    backends["cpu"] = SimpleNamespace(driver=_Driver)
