import gc
from typing import Any

import pytest
from hypothesis import settings

# An example has no deadline, because other work on the cores would make it fail. A failure prints
# the blob for `@reproduce_failure`, because CI does not keep the example database.
settings.register_profile("kvstow", deadline=None, print_blob=True)
settings.load_profile("kvstow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # Imported here, because some environments run tests without pytest-xdist.
    from tests.workers import SharingScheduling  # noqa: PLC0415

    return SharingScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.has_plugin("xdist"):
        from tests.workers import longest_first  # noqa: PLC0415 - as above

        longest_first(items)


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Let collections skip what lives already: after an import of vLLM each takes half a second."""
    gc.collect()
    gc.freeze()
