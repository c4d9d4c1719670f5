"""A shared tier on a RESP server: Redis or Valkey, one, several, a cluster, or behind Sentinel.

`address` reads URLs, `login` bounds what redis-py does when it connects, `nodes` knows which server
has a key, `wire` speaks to one server, `commands` says what is asked of it, and `health` which
servers are left alone. `tier` has the queues and the threads. redis-py connects, and then the bytes
go between the socket and the host slots without a copy.

May import: kvstow._core, kvstow.arguments, kvstow.texts, kvstow.tiers, kvstow.transfer.
"""

from kvstow.tiers.resp.address import Address, Credentials, Security
from kvstow.tiers.resp.tier import RespTier, checked_expiry

__all__ = ["Address", "Credentials", "RespTier", "Security", "checked_expiry"]
