"""The command `kvstow bench`: time this machine's block accounting and copies.

Each target has a file, which measures and returns rows. `command` has the options and the tables.

May import: kvstow._core, kvstow.memory, kvstow.output, kvstow.sizes, kvstow.tiers,
kvstow.transfer, kvstow.vllm.
"""

from kvstow.bench.clock import Clock, machine, take_turns

__all__ = ["Clock", "machine", "take_turns"]
