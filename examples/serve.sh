#!/bin/sh
# Start vLLM's server with 32 GiB of host memory for prefixes: examples/serve.sh MODEL [vLLM's flags]
set -eu
: "${1:?name a model: examples/serve.sh MODEL}"
exec vllm serve "$@" --kv-transfer-config '{
    "kv_connector": "KVStowConnector",
    "kv_connector_module_path": "kvstow.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu_bytes_to_use": "32GiB"}
}'
