"""`Asker` on a real server: another namespace, a server that stops, and one that is not there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.tiers.resp.server import Server, free_port
from tests.tiers.resp.small import patient
from tests.tiers.setup import LONG_S, digest_of

from kvstow.tiers import SharedTier, TierBlocks
from kvstow.tiers.asking import Answer, Asker, Key, ask_tier
from kvstow.transfer import HostArena

OWN, OTHER = bytes(range(16)), bytes(range(1, 17))
KEYS: list[Key] = [(digest_of(number // 2), number % 2) for number in range(20)]


@dataclass
class Owned:
    """A store that is a tier of its own, as the scheduler process has one."""

    tier: SharedTier

    def found(self, keys: Sequence[Key], limit_s: float) -> Answer:
        return ask_tier(self.tier, keys, limit_s)

    def close(self) -> None:
        self.tier.close()


@contextmanager
def opened(
    url: str,
    namespace: bytes = OWN,
    *,
    wait_s: float = LONG_S,
    call_s: float = LONG_S,
    keep_s: float = 0.001,
) -> Iterator[Asker]:
    """Yield an asker of a server."""
    with HostArena(1, 4096) as arena:

        def connect() -> Owned:
            return Owned(patient(arena, url, namespace))

        with Asker(connect, wait_s=wait_s, call_s=call_s, keep_s=keep_s) as asker:
            yield asker


def put(url: str, keys: list[Key], namespace: bytes = OWN) -> None:
    blocks = TierBlocks([digest for digest, _ in keys], [group for _, group in keys])
    with HostArena(len(keys), 4096) as arena, patient(arena, url, namespace) as tier:
        ticket = tier.put(blocks, range(len(keys)))
        ticket.wait(LONG_S)
        assert ticket.ok.all()


def answer(asker: Asker, keys: list[Key]) -> list[bool]:
    question, until_s = asker.ask(keys), time.monotonic() + LONG_S
    while not question.poll():
        assert time.monotonic() < until_s, "no answer"
        time.sleep(0.001)
    return question.found


def test_only_the_own_namespace_is_found(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        put(server.url, KEYS[:9])
        put(server.url, KEYS[5:], OTHER)
        with opened(server.url) as asker:
            assert answer(asker, KEYS) == [True] * 9 + [False] * 11
        with opened(server.url, OTHER) as asker:
            assert answer(asker, KEYS) == [False] * 5 + [True] * 15


def test_a_stopped_server_costs_the_deadline_and_then_nothing(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        put(server.url, KEYS)
        with opened(server.url, wait_s=0.05, call_s=0.2) as asker:
            while not all(answer(asker, KEYS)):
                time.sleep(0.01)
            server.pause()
            time.sleep(0.01)  # what is cached is older then
            until_s = time.monotonic() + LONG_S
            while not asker.breaker.is_open:
                assert time.monotonic() < until_s, "the breaker does not open"
                assert answer(asker, KEYS) == [False] * len(KEYS)
            assert asker.ask(KEYS).poll(), "nobody waits any more"
            server.resume()
            while not all(answer(asker, KEYS)):
                assert time.monotonic() < until_s, "it does not recover"
                time.sleep(0.05)


def test_one_of_two_servers_that_is_gone_counts_as_failed(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        url = f"{server.url},redis://127.0.0.1:{free_port()}"
        put(server.url, KEYS)
        with opened(url) as asker:
            found = answer(asker, KEYS)
            assert 0 < sum(found) < len(KEYS)
            assert asker.stats.failed_questions == 1


def test_a_server_that_comes_later_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    with opened(f"redis://127.0.0.1:{port}") as asker:
        for _ in range(6):
            assert answer(asker, KEYS) == [False] * len(KEYS)
            time.sleep(0.01)  # what is cached is older then
        assert asker.stats.failed_questions == 6
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        with Server(tmp_path, port=port) as server:
            put(server.url, KEYS)
            until_s = time.monotonic() + LONG_S
            while not all(answer(asker, KEYS)):
                assert time.monotonic() < until_s, "it does not recover"
                time.sleep(0.05)
