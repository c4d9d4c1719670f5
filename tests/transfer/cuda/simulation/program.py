"""Runs a module on the simulated GPU, with the speeds of an H100's link.

python3 -m tests.transfer.cuda.simulation.program MODULE ARGUMENTS...
"""

from __future__ import annotations

import runpy
import sys

from tests.transfer.cuda.simulation.library import violations

from kvstow.doctor import checks
from kvstow.transfer.cuda import link_speed

PCIE_5 = link_speed.LinkSpeed(
    store_bytes_per_s=5.4e10,
    load_bytes_per_s=5.4e10,
    copy_seconds=2.8e-6,
    gather_bytes_per_s=4.5e11,
    submit_seconds=1.7e-6,
)


def fix_link_speed() -> None:
    """Let every process choose the same paths. To measure would take seconds, and say nothing."""
    link_speed.measure = lambda *_: PCIE_5


def show_driver() -> None:
    """Let `kvstow doctor` find the driver. With a `cuInit` the compiler would ask it for more."""
    checks.Driver.found = lambda: checks.Driver(13000, num_devices=2)  # type: ignore[method-assign]


def main() -> None:
    fix_link_speed()
    show_driver()
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        if found := violations():
            sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
