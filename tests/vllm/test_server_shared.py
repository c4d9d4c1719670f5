"""Two of vLLM's servers on one store: what the first computed, the second loads.

Their answers are compared with those of a server that computes everything. The store then has wrong
values, and goes away in several ways. `test_engine_shared` has the controls that switch checks off.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from tests.tiers.mooncake_master import Master, missing
from tests.tiers.mooncake_owner import Owner
from tests.tiers.resp.server import Server as Store
from tests.vllm.forking import IS_FULL
from tests.vllm.full import full
from tests.vllm.server import END_S
from tests.vllm.servers import BLOCK_SIZE, NUM_HIT, NUM_TOKENS, Server, check, prompts, server
from tests.vllm.sharing import redis_of

from kvstow._core import row_digests
from kvstow.tiers.mooncake import connect
from kvstow.tiers.namespace import HEADER_BYTES, NAMESPACE_BYTES, Namespace

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

NUM_BLOCKS = NUM_HIT // BLOCK_SIZE
ASK_S, PROMOTE_S = 0.5, 2.0
# Where no store fails, a request of a busy machine may wait long for blocks that must come.
PATIENT = {"shared_ask_timeout_s": 20, "promote_timeout_s": 60, "shared_timeout_s": 60}
# A request that waits for a store that is gone may take this much longer than without a store.
PATIENCE_S = 20.0
# Room on the host for two prompts, so that a server reads the others from the store again.
NUM_FEW = 24
# The breakers try a store again after 30 s at most.
SOON_S = 120.0
HITS = "kvstow_shared_hit_tokens_total"
PUTS = ("kvstow_shared_blocks_total", 'direction="demote"')


def options(url: str, **more: Any) -> dict[str, Any]:
    return {
        "num_cpu_blocks": 200,
        "shared": url,
        "min_promote_tokens": 0,
        "shared_ask_timeout_s": ASK_S,
        "promote_timeout_s": PROMOTE_S,
        "shared_timeout_s": PROMOTE_S,
        **more,
    }


@dataclass
class Fleet:
    """Servers of one model on one store.

    Attributes:
        servers: those that run.
        num_put: blocks that the first has put so far.
    """

    folder: Path
    logs: Path
    url: str
    servers: list[Server] = field(default_factory=list)
    num_put: int = 0

    def compute(self, prompt: list[int]) -> Any:
        """Let the first server compute a prompt, and wait until its blocks are in the store."""
        answer = self.servers[0].answer(prompt)
        assert answer[2] == 0, "the prompt is not new"
        self.num_put += NUM_BLOCKS
        self.servers[0].wait_for(PUTS[0], self.num_put, PUTS[1])
        return answer

    def hits(self, at: int, prompt: list[int], expected: Any) -> int:
        """Let a server answer a new prompt, compare, and return the tokens that it has loaded."""
        found = self.servers[at].answer(prompt)
        check(found, expected)
        return found[2]


@contextmanager
def fleet(folder: Path, logs: Path, url: str, num: int, **more: Any) -> Iterator[Fleet]:
    """Start servers beside each other, and kill those that the fleet has at the end."""
    with ThreadPoolExecutor(num) as starting:
        made = [
            starting.submit(Server, folder, logs / f"server{at}", options(url, **more))
            for at in range(num)
        ]
    fleet = Fleet(folder, logs, url, [it.result() for it in made if it.exception() is None])
    try:
        for each in made:
            each.result()  # raises what has kept one from its start
        yield fleet
    finally:
        for server in fleet.servers:
            server.kill()


def damaged(key: bytes, values: dict[bytes, bytes], kind: str) -> bytes:
    """Return what lies under the key of a block instead of the block."""
    right = values[key]
    if kind == "another valid block":
        return next(each for other, each in values.items() if other != key)
    if kind == "a flipped bit":
        return right[:-5] + bytes([right[-5] ^ 4]) + right[-4:]
    # What the server of another model would put: a whole frame of its own.
    payload = bytes(byte ^ 0x55 for byte in right[HEADER_BYTES:])
    _, _, _, group, digest = key.split(b":", 4)
    namespace = Namespace(b"m" * NAMESPACE_BYTES)
    checksum = int(row_digests(np.frombuffer(payload, np.uint8)[None], [0])[0])
    return namespace.header(int(group), digest, len(payload), checksum) + payload


DAMAGE = ["another valid block", "a flipped bit", "another model's"]


def test_what_one_server_computed_the_others_load(
    folder: Path, tmp_path: Path, store: Store
) -> None:
    """The last server joins when all is computed. In CI it is the second."""
    asked = prompts(2 + len(DAMAGE))
    with fleet(folder, tmp_path, store.url, 2 if IS_FULL else 1, **PATIENT) as servers:
        redis = redis_of(store)
        expected, known, written = [], set[bytes](), []
        for prompt in asked:
            expected.append(servers.compute(prompt))
            own = {*redis.keys("kvstow:*")} - known
            known |= own
            written.append({key: redis.get(key) for key in own})
        if IS_FULL:
            assert servers.hits(1, asked[-1], expected[-1]) == NUM_HIT
            servers.servers.pop().kill()
        with server(folder, tmp_path / "later", options(store.url, **PATIENT)) as later:
            servers.servers.append(later)
            assert servers.hits(1, asked[0], expected[0]) == NUM_HIT
            later.wait_for(HITS, NUM_HIT)
            bad = dict[bytes, bytes]()
            for at, kind in enumerate(DAMAGE, 1):
                bad = {key: damaged(key, written[at], kind) for key in written[at]} | bad
                for key in written[at]:
                    redis.set(key, bad[key])
                assert servers.hits(1, asked[at], expected[at]) == 0, kind
            assert later.metric("kvstow_shared_mismatched_blocks_total") >= len(DAMAGE)
            end_s = time.monotonic() + END_S
            while any(redis.get(key) in (None, value) for key, value in bad.items()):
                assert time.monotonic() < end_s, "the damaged blocks were not put again"
                time.sleep(0.1)
            assert servers.hits(1, asked[-1], expected[-1]) == NUM_HIT


class Asking:
    """Asks a server for new prompts all the time, and keeps what takes long or fails."""

    def __init__(self, running: Server, asked: list[list[int]], expected: list[Any]) -> None:
        self._running, self._asked, self._expected = running, asked, expected
        self._must_end = threading.Event()
        self.seconds: list[float] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        try:
            while not self._must_end.is_set():
                for prompt, expected in zip(self._asked, self._expected, strict=True):
                    begin = time.monotonic()
                    check(self._running.answer(prompt), expected)
                    self.seconds.append(time.monotonic() - begin)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._must_end.set()
        self._thread.join()
        if self.error is not None:
            raise self.error


class Sleeping:
    """Tells how long a thread waits for a processor, because the engines of two servers spin."""

    def __init__(self) -> None:
        self.late_s = 0.0
        self._must_end = threading.Event()
        self._thread = threading.Thread(target=self._sleep, daemon=True)

    def _sleep(self) -> None:
        begin = time.monotonic()
        while not self._must_end.wait(0.05):
            now = time.monotonic()
            self.late_s = max(self.late_s, now - begin - 0.05)
            begin = now

    def __enter__(self) -> Sleeping:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._must_end.set()
        self._thread.join()


def stop_for(seconds: float) -> Callable[[Store], None]:
    def fault(store: Store) -> None:
        store.pause()
        time.sleep(seconds)
        store.resume()

    return fault


def kill(store: Store) -> None:
    store.kill()
    time.sleep(5)
    store.start()


def fill(store: Store) -> None:
    """Let the store refuse all puts for a while."""
    redis = redis_of(store)
    redis.config_set("maxmemory-policy", "noeviction")
    redis.config_set("maxmemory", 1)
    time.sleep(5)
    redis.config_set("maxmemory", "500mb")


FAULTS: dict[str, Callable[[Store], None]] = {
    "pause of 5 s": stop_for(5),
    "SIGSTOP, longer than all deadlines": stop_for(12),
    "SIGKILL, and empty when it is back": kill,
    "full": fill,
}


@full("starts more servers")
def test_no_request_waits_longer_for_a_store_that_fails(
    folder: Path, tmp_path: Path, store: Store
) -> None:
    with fleet(folder, tmp_path, store.url, 2, num_cpu_blocks=NUM_FEW) as two:
        withstand(two, {name: partial(fault, store) for name, fault in FAULTS.items()})


def withstand(two: Fleet, faults: Mapping[str, Callable[[], None]]) -> None:
    """Ask both servers for prompts during each fault, and share new ones after it."""
    asked = prompts(8)
    # A busy machine may evict blocks from the small host before they are put.
    expected = [two.servers[0].answer(prompt) for prompt in asked]
    for name, fault in {"no fault": lambda: time.sleep(5), **faults}.items():
        with ExitStack() as running:
            sleeping = running.enter_context(Sleeping())
            asking = [running.enter_context(Asking(each, asked, expected)) for each in two.servers]
            fault()
            time.sleep(5)
        seconds = [each for one in asking for each in one.seconds]
        busy = f"a thread that sleeps wakes up to {sleeping.late_s:.2f} s late"
        # On a busy machine each of the two waits may be as late.
        assert max(seconds) < ASK_S + PROMOTE_S + PATIENCE_S + 2 * sleeping.late_s, (
            f"{name}; {busy}"
        )
        back_s = wait_until_shared(two, f"after {name}")
        print(
            f"{name}: {len(seconds)} requests, {median(seconds):.2f} s each, {max(seconds):.2f} s "
            f"at most; {busy}; blocks are shared again {back_s:.1f} s after it"
        )


def wait_until_shared(two: Fleet, when: str) -> float:
    """Return after how many seconds the second server loads what the first computes.

    No server starts again for it.
    """
    begin = time.monotonic()
    dice = random.Random(when)
    while time.monotonic() < begin + SOON_S:
        prompt = [dice.randrange(3, 1000) for _ in range(NUM_TOKENS)]
        answer = two.servers[0].answer(prompt)
        time.sleep(1)
        if two.hits(1, prompt, answer) == NUM_HIT:
            return time.monotonic() - begin
    raise AssertionError(f"the servers share nothing {when}")


NEEDS_MOONCAKE = pytest.mark.skipif(bool(missing()), reason=missing() or "Mooncake runs here")
MIB = 1 << 20
NO_SPACE = -200  # what a full store answers


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    # A block may leave while a server reads it, once its lease is over. Busy machines read slowly.
    # An owner that is killed has ended soon.
    master = Master(tmp_path, lease_ms=5000, client_ttl_s=2)
    yield master
    master.kill()


@NEEDS_MOONCAKE
@full("starts more servers")
def test_servers_share_their_memory_in_mooncake_until_one_is_killed(
    folder: Path, tmp_path: Path, master: Master
) -> None:
    asked = prompts(6)
    with fleet(folder, tmp_path, master.url, 2, shared_segment_bytes="256MiB") as two:
        expected = [two.compute(prompt) for prompt in asked]
        for prompt, known in zip(asked[:2], expected[:2], strict=True):
            assert two.hits(1, prompt, known) == NUM_HIT
        two.servers[0].kill()
        seconds = []
        for prompt, known in zip(asked[2:], expected[2:], strict=True):
            begin = time.monotonic()
            check(two.servers[1].answer(prompt), known)
            seconds.append(time.monotonic() - begin)
        print(f"SIGKILL of a server that owns memory: {max(seconds):.2f} s at most")
        assert max(seconds) < ASK_S + PROMOTE_S + PATIENCE_S
        two.servers[0] = Server(folder, tmp_path / "again", options(master.url))
        wait_until_shared(two, "after a server has ended")


def pause(process: Master | Owner, seconds: float) -> None:
    process.pause()
    time.sleep(seconds)
    process.resume()


def restart(process: Master | Owner) -> None:
    """End a process by SIGKILL. The next one begins empty."""
    process.kill()
    time.sleep(5)
    process.start()


def fill_mooncake(master: Master) -> None:
    """Let the store throw blocks away for other values, and refuse some."""
    begin, codes = time.monotonic(), set()
    with connect(master.url) as client:
        for at in itertools.count():
            codes.add(client.put(f"other {at}", bytes(4 * MIB)))
            seconds = time.monotonic() - begin
            if seconds > 5 and NO_SPACE in codes:
                return
            assert seconds < SOON_S, "the store takes everything"


@NEEDS_MOONCAKE
@full("starts more servers")
def test_no_request_waits_longer_for_a_mooncake_store_that_fails(
    folder: Path, tmp_path: Path, master: Master
) -> None:
    """The servers own no memory of the store, so that its owner can end apart from them."""
    owner = Owner(master, 64 * MIB)
    faults = {
        "network pause of 5 s": partial(pause, owner, 5),
        "SIGSTOP of the owner, longer than all deadlines": partial(pause, owner, 12),
        "SIGKILL of the owner": partial(restart, owner),
        "SIGSTOP of the master, longer than all deadlines": partial(pause, master, 12),
        "SIGKILL of the master": partial(restart, master),
        "full": partial(fill_mooncake, master),
    }
    try:
        with fleet(folder, tmp_path, master.url, 2, num_cpu_blocks=NUM_FEW) as two:
            withstand(two, faults)
    finally:
        owner.kill()
