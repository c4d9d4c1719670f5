"""A forked child closes its `RespTier` at once, also while a thread of the parent asks a server."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from tests.forks import in_child

from kvstow import StateError
from kvstow.tiers import TierBlocks
from kvstow.tiers.resp import RespTier
from kvstow.transfer import HostArena

# Python warns of a fork in a process with threads, which these tests need.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

LONG_S = 20.0
FORMS = ["redis+sentinel://{}/service", "redis+cluster://{}", "redis://{}"]


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield host and port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("form", FORMS)
def test_child_closes_the_tier_and_ends_its_tickets(silent: str, form: str) -> None:
    blocks = TierBlocks([bytes(32)], [0])
    with (
        HostArena(4, 4096) as arena,
        RespTier(arena, form.format(silent), bytes(16), timeout_s=2.0) as tier,
    ):
        tickets = [tier.get(blocks, [1]), tier.put(blocks, [2]), tier.contains(blocks)]
        until_s = time.monotonic() + LONG_S
        while not (tier.nodes._lock.locked() or form.startswith("redis:")):
            assert time.monotonic() < until_s, "no thread asks who has the keys"
            time.sleep(0.001)

        def check() -> None:
            for ticket in tickets:
                ticket.wait_until_ended(1.0)
                assert not ticket.ok.any() and "forked" in str(ticket.error)
            tier.close()
            with pytest.raises(StateError, match="forked"):
                tier.get(blocks, [1])

        in_child(check)
        for ticket in tickets:
            ticket.wait_until_ended(LONG_S)
            assert "forked" not in str(ticket.error)
