"""Fixtures that several files share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tests.vllm.runner  # noqa: F401 - before anything imports vLLM
from tests.tiers.resp.server import Server as Store

if TYPE_CHECKING:
    from tests.vllm.engine import Engine
    from tests.vllm.halves_below import Server
    from tests.vllm.secondary import World


@pytest.fixture(autouse=True)
def _began_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests write models, and versions of weights, in this process."""
    monkeypatch.setattr("kvstow.vllm.identity.process_began", lambda: float("inf"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one group of full attention."""
    from tests.vllm import models  # noqa: PLC0415 - takes seconds

    return models.make_model(models.LLAMA, tmp_path_factory.mktemp("llama"))


class _Lines(logging.Handler):
    """Collects the lines of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines that kvstow logs, from level INFO on.

    What `caplog` sees of them depends on how vLLM has configured its loggers. vLLM does so with the
    first engine, and then removes the handlers of others.
    """
    monkeypatch.setattr("vllm.logger.dictConfig", lambda _: None)
    handler, logger = _Lines(), logging.getLogger("vllm.kvstow")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler.lines
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The module's engine (`shared`), with empty tiers; afterwards nothing may be left in it."""
    shared.start_over()
    yield shared
    shared.settle()
    shared.check_idle()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store that servers share."""
    with Store(tmp_path, "--maxmemory", "500mb") as store:
        yield store


@pytest.fixture
def started(store: Store, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers on one store, without an engine. They run beside each other."""
    from tests.vllm.halves_below import Server  # noqa: PLC0415 - takes seconds
    from tests.vllm.sharing import LONG_S  # noqa: PLC0415

    servers: list[Server] = []

    def start(**settings: Any) -> Server:
        # A busy machine may take seconds to connect.
        given: dict[str, Any] = {"shared_ask_timeout_s": LONG_S, "shared_timeout_s": LONG_S}
        servers.append(Server(tmp_path, **{"shared": store.url, **given, **settings}))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Starts vLLM's CPU tier with `KVStowDisk` below it, each time on the same file."""
    from tests.vllm.secondary import World  # noqa: PLC0415 - takes seconds

    worlds: list[World] = []

    def made(**options: Any) -> World:
        worlds.append(World(tmp_path, **options))
        return worlds[-1]

    yield made
    for world in worlds:
        if not world.disk.tier._store._is_closed:
            world.close()
