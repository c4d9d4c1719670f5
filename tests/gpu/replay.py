"""A replay of the bundled trace on a GPU, which compares every loaded block with its content.

python3 -m tests.gpu.replay
"""

import importlib.util
import json
import sys

from kvstow import cli
from kvstow.replay import BUNDLED_TRACE, ReplayConfig, ReplayEngine, figures_json, read_trace


def main() -> int:
    """Return 0 if no block is corrupt."""
    if importlib.util.find_spec("click") and importlib.util.find_spec("rich"):
        return cli.main(["replay", "--mover", "cuda"])
    print("click or rich is missing, so this replay uses the Python API")
    config = ReplayConfig(device_blocks=1024, host_blocks=8192, mover="cuda")
    engine = ReplayEngine(read_trace(BUNDLED_TRACE), config)
    try:
        engine.run()
        figures = figures_json(engine)
    finally:
        engine.close()
    shown = ("requests", "stored_blocks", "loaded_blocks", "verified_blocks", "corrupt_blocks")
    print(json.dumps({name: figures[name] for name in shown}))
    # Without a load the replay would show nothing.
    return 0 if figures["corrupt_blocks"] == 0 and figures["loaded_blocks"] else 1


if __name__ == "__main__":
    sys.exit(main())
