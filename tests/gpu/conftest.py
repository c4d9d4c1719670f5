"""These tests need a GPU, cupy and torch; without them each is skipped, and says why."""

import os
from functools import cache

import pytest


@cache
def why_not() -> str | None:
    """What is missing; None where the tests can run."""
    from kvstow import ConfigError  # noqa: PLC0415 - here, for collecting must not cost anything
    from kvstow.transfer.cuda.runtime import import_cupy  # noqa: PLC0415

    try:
        import_cupy()
    except ConfigError as error:
        return f"there is no GPU here: {error}"
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        return f"these tests need torch, built for CUDA: {error}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} reaches no GPU: install one built for CUDA"
    return None


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skip, with the one reason there is; where a GPU was promised, that is a failure."""
    if (reason := why_not()) is not None:
        if os.environ.get("KVSTOW_GPU") == "required":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
