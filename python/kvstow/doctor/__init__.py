"""What this machine has of what kvstow can use, and what would help: the command `kvstow doctor`.

`diagnose` asks without the command line's extras. Each probe answers for itself: whatever goes
wrong in one is a finding, and the others go on.
"""

from kvstow.doctor.findings import Finding, Status
from kvstow.doctor.probes import diagnose

__all__ = ["Finding", "Status", "diagnose"]
