"""One life of an engine with a disk tier, which ends when the process is killed.

    python -m tests.engine.disk_life FOLDER SEED

It prints a line after its warm start and after each request. The numbers are the blocks that the
disk holds, and the tokens that the request had and loaded.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tests.engine.disk_world import options, serve, slot_file, world
from tests.tiers.setup import Here

from kvstow.tiers import slot_file as module

NUM_DISK_BLOCKS = 400
NUM_DOCUMENTS = 100
LEAST_BLOCKS = 4
MOST_BLOCKS = 8


def document(number: int) -> list[int]:
    """Return the tokens of a document, none of which another one has."""
    num_blocks = LEAST_BLOCKS + number % (1 + MOST_BLOCKS - LEAST_BLOCKS)
    return [1000 * number + at for at in range(4 * num_blocks)]


def live(folder: Path, seed: int) -> None:
    """Serve requests for ever."""
    setattr(module, "Files", Here)  # noqa: B010 - the module does not export it
    chances = random.Random(seed)
    options_ = options(max_blocks_in_flight=chances.choice([4, 16]))
    disk = slot_file(folder / "disk", NUM_DISK_BLOCKS)
    with world(folder / "disk", disk=disk, disk_options=options_) as it:
        report("warm", it.engine.stats()["disk_resident_blocks"])
        number = 0
        while True:
            number += 1
            tokens = document(min(int(chances.expovariate(0.04)), NUM_DOCUMENTS - 1))
            num_loaded = serve(it, str(number), tokens, settles=chances.random() < 0.1)
            resident = it.engine.stats()["disk_resident_blocks"]
            report("served", len(tokens), num_loaded, resident)


def report(*words: object) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    live(Path(sys.argv[1]), int(sys.argv[2]))
