"""A replay of the bundled trace on a GPU, which compares every loaded block with its content.

python3 -m tests.gpu.replay
"""

import json
import sys
from collections.abc import Mapping

from kvstow.replay import BUNDLED_TRACE, ReplayConfig, ReplayEngine, figures_json, read_trace

SHOWN = ("requests", "stored_blocks", "loaded_blocks", "verified_blocks", "corrupt_blocks")


def main() -> int:
    """Return 0 if blocks were loaded, and none is corrupt."""
    config = ReplayConfig(device_blocks=1024, host_blocks=8192, mover="cuda")
    engine = ReplayEngine(read_trace(BUNDLED_TRACE), config)
    try:
        engine.run()
        figures = figures_json(engine)
    finally:
        engine.close()
    print(json.dumps({name: figures[name] for name in SHOWN}))
    if why := what_is_wrong(figures):
        print(why)
    return 1 if why else 0


def what_is_wrong(figures: Mapping[str, object]) -> str | None:
    """Return why a replay shows nothing, or shows an error; None if all is well."""
    if figures["corrupt_blocks"]:
        return f"{figures['corrupt_blocks']} blocks are corrupt"
    if not figures["loaded_blocks"]:
        return "no block was loaded, so the replay shows nothing"
    if not figures["verified_blocks"]:
        return "no block was verified, so the replay shows nothing"
    return None


if __name__ == "__main__":
    sys.exit(main())
