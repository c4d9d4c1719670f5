"""The command `kvstow doctor`: check GPU, CUDA, memory limits and vLLM, and suggest fixes.

`diagnose` returns the findings to a program. A probe that fails is a finding too, and the others
still run.
"""

from kvstow.doctor.findings import Finding, Status
from kvstow.doctor.probes import diagnose

__all__ = ["Finding", "Status", "diagnose"]
