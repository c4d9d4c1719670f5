"""Fixtures that several files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tests.vllm.runner  # noqa: F401 - before anything imports vLLM

if TYPE_CHECKING:
    from tests.vllm.engine import Engine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one group of full attention."""
    from tests.vllm import models  # noqa: PLC0415 - takes seconds

    return models.make_model(models.LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The module's engine (`shared`), with empty tiers; afterwards nothing may be left in it."""
    shared.start_over()
    yield shared
    shared.settle()
    shared.check_idle()
