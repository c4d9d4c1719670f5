"""Random calls to a real server, through a network that flips, loses, cuts and delays.

Whatever happens, a block that is reported as True has the bytes that were last put under its key,
and a host slot does not change after its ticket has ended. `KVSTOW_SEEDS=N` runs N seeds, and
`KVSTOW_SEED=N` repeats one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.resp.proxy import Faults, Proxy
from tests.tiers.resp.server import Server
from tests.tiers.shared_calls import NUM_SLOTS, SEEDS, SLOT_BYTES, Calls

from kvstow.tiers.breaker import Breaker
from kvstow.tiers.namespace import Namespace
from kvstow.tiers.resp import RespTier, commands
from kvstow.transfer import HostArena

NAMESPACE = b"0123456789abcdef"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(autouse=True)
def _ask_for_three_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for these small blocks as for large ones, while the answers of others arrive."""
    monkeypatch.setattr(commands, "_BYTES_AHEAD", 3 * SLOT_BYTES)


@pytest.fixture(autouse=True)
def _always_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call meet its own faults, which a breaker would keep from it."""
    monkeypatch.setattr(Breaker, "may_try", lambda _: True)


def run(seed: int, server: Server) -> tuple[int, int]:
    """Run a seed, and return how many blocks came back, and how often the network did harm."""
    draw = random.Random(f"faults {seed}")
    server.command("FLUSHALL")
    with HostArena(NUM_SLOTS, SLOT_BYTES) as arena, Proxy(server.port, seed) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        with RespTier(arena, url, NAMESPACE, timeout_s=0.4) as tier:
            calls = Calls(seed, tier)
            for _ in range(12):
                proxy.faults = Faults()
                if draw.random() < 0.7:
                    flip, cut, lose = (draw.choice([0, 0, 0.02, 0.1]) for _ in range(3))
                    proxy.faults = Faults(flip, cut, lose, draw.choice([0, 0, 0.03]))
                calls.step()
        return calls.num_hits, proxy.num_faults


@pytest.mark.parametrize("seed", SEEDS)
def test_no_wrong_block_is_served(seed: int, server: Server) -> None:
    run(seed, server)


def test_the_runs_hit_and_harm(server: Server) -> None:
    """Ensure that the runs above try what they claim."""
    num_hits, num_faults = zip(*(run(seed, server) for seed in range(4)), strict=True)
    assert sum(num_hits) > 20
    assert sum(num_faults) > 10


def test_without_its_header_a_wrong_block_is_served(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The negative control: damage is served if nothing compares."""
    monkeypatch.setattr(Namespace, "checksum", lambda *_: 0)
    monkeypatch.setattr(
        "kvstow.tiers.resp.commands.row_digests", lambda rows, ids: np.zeros(len(ids), np.uint64)
    )
    for seed in range(100, 140):
        try:
            run(seed, server)
        except AssertionError as error:
            assert "is wrong" in str(error)
            return
    pytest.fail("no damage was served in 40 seeds")
