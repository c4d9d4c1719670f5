"""Short calls of a tier with 16 small blocks: slots 0 to 15 are put, and read into 16 to 31."""

from __future__ import annotations

from typing import Any, Final

from tests.tiers.setup import LONG_S, blocks, digest_of

from kvstow.tiers import TierTicket
from kvstow.tiers.namespace import Namespace
from kvstow.tiers.resp import RespTier
from kvstow.transfer import HostArena

NUM_BLOCKS: Final = 16
NUM_SLOTS: Final = 2 * NUM_BLOCKS
SLOT_BYTES: Final = 4096
BLOCKS: Final = blocks(*range(NUM_BLOCKS))
_NAMESPACE: Final = bytes(range(16))


def patient(arena: HostArena, url: str, namespace: bytes, **options: Any) -> RespTier:
    """Return a tier whose jobs outlast some seconds in which the machine stands still."""
    return RespTier(arena, url, namespace, **{"timeout_s": LONG_S, **options})


def opened(arena: HostArena, url: str, **options: Any) -> RespTier:
    """Return such a tier with one thread for puts, and one for the rest."""
    return patient(arena, url, _NAMESPACE, num_threads=1, **options)


def key_of(number: int) -> bytes:
    """Return the server's key of a block."""
    return Namespace(_NAMESPACE).keys([0], [digest_of(number)])[0]


def ended(ticket: TierTicket) -> TierTicket:
    """Return a ticket whose job has ended."""
    ticket.wait_until_ended(LONG_S)
    return ticket


def put(tier: RespTier) -> TierTicket:
    """Put all blocks."""
    return ended(tier.put(BLOCKS, range(NUM_BLOCKS)))


def get(tier: RespTier) -> TierTicket:
    """Read all blocks."""
    return ended(tier.get(BLOCKS, range(NUM_BLOCKS, NUM_SLOTS)))
