"""What differs between the versions of vLLM that the tests run."""

from __future__ import annotations

import pytest
import vllm
from packaging.version import Version

try:  # vLLM 0.33
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

__all__ = ["HASHES_ADAPTER_PATH", "LOOKS_ABOVE_HIT", "planning", "skip_without_all_states"]

# Whether the hash of a block has the path of its adapter beside the name.
HASHES_ADAPTER_PATH = Version(vllm.__version__) >= Version("0.31")
# With several groups, whether a draft model's hit may be proven by the last block of a prompt.
LOOKS_ABOVE_HIT = Version(vllm.__version__) >= Version("0.32")


def skip_without_all_states() -> None:
    """Skip a test of a cache that keeps a recurrent state after every block, which 0.33 has not."""
    if Version(vllm.__version__) >= Version("0.33"):
        pytest.skip(f"vLLM {vllm.__version__} caches states in the mode 'align' only")
