"""Bytes of a model's KV, from its `config.json`: per token, per block, and per group as in vLLM.

May import: kvstow._core, kvstow.texts, kvstow.transfer.
"""

from kvstow.geometry.config import ModelConfig, read_config
from kvstow.geometry.layout import Geometry, KvGroup, lay_out
from kvstow.geometry.presets import PRESETS, find_model

__all__ = [
    "PRESETS",
    "Geometry",
    "KvGroup",
    "ModelConfig",
    "find_model",
    "lay_out",
    "read_config",
]
