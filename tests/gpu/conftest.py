"""These tests need a GPU, cupy and torch. Without them pytest skips each, with the reason."""

import os
from functools import cache

import pytest


@cache
def why_not() -> str | None:
    """Return what is missing; None if the tests can run."""
    from kvstow import ConfigError  # noqa: PLC0415 - here, so that collection stays fast
    from kvstow.transfer.cuda.runtime import import_cupy  # noqa: PLC0415

    try:
        import_cupy()
    except ConfigError as error:
        return f"this test needs a GPU: {error}"
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        return f"this test needs torch, built for CUDA: {error}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} reaches no GPU: install a build for CUDA"
    return None


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skip the test without a GPU; fail it if KVSTOW_GPU says that there is one."""
    if (reason := why_not()) is not None:
        if os.environ.get("KVSTOW_GPU") == "required":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
