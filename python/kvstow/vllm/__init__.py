"""A connector for an unchanged `vllm serve`, which keeps prefixes in host memory.

```
vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStowConnector",
    "kv_connector_module_path": "kvstow.vllm", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu_bytes_to_use": "32GiB"}}'
```

vLLM calls `connector`, and `settings` checks its configuration. The connector's halves are
`scheduler` and `worker`, which exchange `messages`. The scheduler half has parts: `loads`,
`stores`, `steps`, `sleep`, `requests`, `tracked`, `transfers`, `tier`, `lazy_queue`. `media`
says of which media they keep nothing. `observe` watches the requests for the statistics of `shadow`
and the trace of `record`.
The folder `below` has both halves of the tiers below the host, and `identity` says whose blocks
such a tier holds. `secondary_tier` is a disk tier for vLLM's own `OffloadingConnector`, and
`accelerate` replaces functions of vLLM by faster ones. This is the only folder that imports vLLM.

May import: kvstow, kvstow._core, kvstow.arguments, kvstow.build, kvstow.memory,
kvstow.observability, kvstow.sizes, kvstow.tiers, kvstow.transfer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstow.vllm.connector import KVStowConnector

__all__ = ["KVStowConnector", "register"]


def __getattr__(name: str) -> type[KVStowConnector]:
    """Import the connector on first use, because vLLM loads this module in every process."""
    if name != "KVStowConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()  # a `MultiConnector` looks for the class of statistics by name alone
    from kvstow.vllm.connector import KVStowConnector  # noqa: PLC0415

    return KVStowConnector


def register() -> None:
    """Register the connector by name, for `MultiConnector`.

    vLLM calls this in every process, unless `VLLM_PLUGINS` leaves kvstow out.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    name = "KVStowConnector"
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "kvstow.vllm.connector", name)
