"""What every engine of the tests is started with: the connector's flag, and the environment."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONNECTOR = {
    "kv_connector": "KVStowConnector",
    "kv_connector_module_path": "kvstow.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    # One thread: these models gain nothing from more. On a busy machine threads wait for each
    # other at every operation, and a second becomes a minute.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # On a GPU Triton's products would round float32 to 10 bits, and answers would differ by more.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
# A server, whose process has little else of this one. Engines in this process have other values.
SERVED = ENVIRONMENT | {
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    # Above END_S, so that what does not end still lives when `end` asks where it is.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "180",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")]),
}
