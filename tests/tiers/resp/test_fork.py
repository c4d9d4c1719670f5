"""A forked child closes its `RespTier` at once, also while a thread of the parent asks a server."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from tests.forks import in_child
from tests.tiers.resp.small import patient
from tests.tiers.setup import LONG_S

from kvstow import StateError
from kvstow.tiers import TierBlocks
from kvstow.transfer import HostArena

# Python warns of a fork in a process with threads, which these tests need.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

FORMS = ["redis+sentinel://{}/service", "redis+cluster://{}", "redis://{}"]


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Yield a server whose connections get no answer. They end when it closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.parametrize("form", FORMS)
def test_child_closes_the_tier_and_ends_its_tickets(silent: socket.socket, form: str) -> None:
    blocks = TierBlocks([bytes(32)], [0])
    url = form.format(f"127.0.0.1:{silent.getsockname()[1]}")
    with HostArena(4, 4096) as arena, patient(arena, url, bytes(16)) as tier:
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
        silent.close()
        for ticket in tickets:
            ticket.wait_until_ended(LONG_S)
            assert "forked" not in str(ticket.error)
