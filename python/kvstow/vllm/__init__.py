"""kvstow behind an unchanged `vllm serve`: a connector that keeps prefixes in host memory.

```
vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStowConnector",
    "kv_connector_module_path": "kvstow.vllm", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 34359738368}}'
```

`connector` is what vLLM calls; `scheduler` and `worker` are its two halves, `messages` what they
send each other, `model` what of vLLM's configuration kvstow needs to know.
"""

from kvstow.vllm.connector import KVStowConnector

__all__ = ["KVStowConnector", "register"]


def register() -> None:
    """Make the connector known by name, for `MultiConnector`; vLLM calls this in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - vLLM's plug-in point, imported when vLLM calls
        KVConnectorFactory,
    )

    name = KVStowConnector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, KVStowConnector.__module__, name)
