"""Tiers below the host: a disk or a shared store keeps blocks of the host arena.

`tier` has the interface that all tiers share. A tier moves whole slots between the host arena and
its own medium, and proves what it returns. The accounting lies elsewhere, in the Rust core.

May import: kvstow._core, kvstow.arguments, kvstow.closing, kvstow.output, kvstow.sizes,
kvstow.texts, kvstow.transfer.
"""

from kvstow.tiers.both import BothTier
from kvstow.tiers.frame import Fingerprint
from kvstow.tiers.shared import SharedStore
from kvstow.tiers.slot_file import SlotFile, SlotTier
from kvstow.tiers.slot_index import SlotFileMismatch, SlotRecords
from kvstow.tiers.ticket import TierTicket
from kvstow.tiers.tier import SharedTier, Tier, TierBlocks, TierStats

__all__ = [
    "BothTier",
    "Fingerprint",
    "SharedStore",
    "SharedTier",
    "SlotFile",
    "SlotFileMismatch",
    "SlotRecords",
    "SlotTier",
    "Tier",
    "TierBlocks",
    "TierStats",
    "TierTicket",
]
