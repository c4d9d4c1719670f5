"""The command `kvstow doctor`: check GPU, CUDA, memory, vLLM and its flag, and suggest fixes.

`diagnose` returns the findings to a program. A check that fails becomes a finding too, and the
other checks still run.

May import: kvstow._core, kvstow.build, kvstow.memory, kvstow.output, kvstow.sizes,
kvstow.tiers, kvstow.transfer, kvstow.vllm.
"""

from kvstow.doctor.checks import diagnose
from kvstow.doctor.findings import Finding, Status

__all__ = ["Finding", "Status", "diagnose"]
