"""Which tests of vLLM need `KVSTOW_VLLM=full` (`make test-vllm-full`), because they take long."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest
from tests.vllm.forking import IS_FULL

# The engines that CI has time for, where a file starts few. vLLM schedules asynchronously by
# default.
_IN_CI = (("llama", "sync"), ("llama", "async"), ("gemma", "async"), ("granite", "async"))


def full(why: str) -> pytest.MarkDecorator:
    """Return the mark of a test that CI skips, and why it does."""
    return pytest.mark.skipif(not IS_FULL, reason=f"{why}: make test-vllm-full")


def skip_unless_in_ci(kind: tuple[str, ...], in_ci: Collection[tuple[str, ...]] = _IN_CI) -> None:
    """Skip an engine that CI has no time for."""
    if kind not in in_ci and not IS_FULL:
        pytest.skip(f"{'-'.join(kind)} runs in make test-vllm-full")


def kinds(names: Iterable[str], in_ci: Collection[tuple[str, ...]] = _IN_CI) -> Any:
    """Return a fixture of models with these names, each with both ways of scheduling."""
    params = itertools.product(names, ["sync", "async"])

    @pytest.fixture(scope="module", params=params, ids="-".join)
    def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
        kind: tuple[str, str] = request.param
        skip_unless_in_ci(kind, in_ci)
        return kind

    return kind
