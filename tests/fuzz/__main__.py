"""Feed each parser with new inputs for some time. `make fuzz` calls it.

python -m tests.fuzz [--seconds 600] [TARGET ...]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.fuzz.limits import limits
from tests.fuzz.targets import TARGETS

EXAMPLES_PER_ROUND = 200


def fuzz(name: str, seconds: float) -> int:
    """Return how many inputs a target got. Prints the seed of each failure."""
    target, num_inputs, end_s = TARGETS[name], 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        number = random.SystemRandom().getrandbits(64)

        @seed(number)
        @settings(
            max_examples=EXAMPLES_PER_ROUND,
            deadline=None,
            database=None,
            print_blob=True,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(target.inputs)
        def check(given_input: Any) -> None:
            nonlocal num_inputs
            num_inputs += 1
            with limits():
                target.check(given_input)

        try:
            check()
        except Exception:
            print(f"{name}: failed with seed {number}", flush=True)
            raise
    return num_inputs


def main() -> int:
    """Fuzz each target. Return 1 if one has a defect."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each target")
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS])
    options = parser.parse_args()
    num_failed = 0
    for name in options.targets or TARGETS:
        try:
            print(f"{name}: {fuzz(name, options.seconds)} inputs", flush=True)
        except Exception:
            traceback.print_exc()
            num_failed += 1
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
