"""The shared tier without an engine: blocks of others, and values that are not the block.

Each guard has its negative control: a test that removes the guard, and then finds wrong bytes or a
foreign hit.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.tiers.resp.server import Server as Store
from tests.vllm.sharing import (
    NUM_BLOCKS,
    NUM_HIT,
    AnySum,
    Started,
    keys,
    name_of,
    refuse,
    serve,
    stat,
    value,
)
from vllm.lora.request import LoRARequest

from kvstow.tiers.namespace import HEADER_BYTES, NAMESPACE_BYTES
from kvstow.vllm.below import shared
from kvstow.vllm.below.lower_tier import LowerTier
from kvstow.vllm.below.shared import SharedTier

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

START_A, START_B = b"a" * 32, b"b" * 32

# -- foreign blocks --------------------------------------------------------------------------------


def as_another(case: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the settings of a server whose blocks are not those of a server without settings."""
    if case == "other weights":
        return {"weights": "v2"}
    if case == "another hash start":
        monkeypatch.setattr(shared, "hash_start", lambda: START_B)
    if case == "private":
        return {"is_warm": False}
    return {}


FOREIGN = ["other weights", "another hash start", "private"]


@pytest.mark.parametrize("case", FOREIGN)
def test_a_block_of_another_kind_is_not_found(
    started: Started, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(shared, "hash_start", lambda: START_A)
    assert serve(started(), "p") == 0
    server = started(**as_another(case, monkeypatch))
    assert serve(server, "p") == 0
    assert (stat(server, "asked_blocks"), stat(server, "found_blocks")) == (NUM_BLOCKS, 0)
    if case == "private":
        again = started(**as_another(case, monkeypatch))
        assert serve(again, "p") == 0, "no two private servers share"
    else:
        assert serve(started(**as_another(case, monkeypatch)), "p") == NUM_HIT


@pytest.mark.parametrize("case", FOREIGN)
def test_a_block_of_another_kind_would_be_seen(
    started: Started, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The negative control: one name for all."""
    monkeypatch.setattr(shared, "salted", lambda digest, salt: b"n" * NAMESPACE_BYTES)
    monkeypatch.setattr("kvstow.vllm.below.shared_worker.salted", lambda digest, salt: b"n" * 16)
    monkeypatch.setattr(shared, "hash_start", lambda: START_A)
    assert serve(started(), "p") == 0
    server = started(**as_another(case, monkeypatch))
    if case == "other weights":
        with pytest.raises(AssertionError, match="wrong bytes"):
            serve(server, "p")
    else:
        assert serve(server, "p") == NUM_HIT


def test_ranks_do_not_take_the_blocks_of_each_other(
    started: Started, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of a rank's block depends on the rank, so one name for both must be seen."""
    assert serve(started(num_ranks=2), "p") == 0
    assert serve(started(num_ranks=2), "p") == NUM_HIT
    store.command("FLUSHALL")
    monkeypatch.setattr("kvstow.vllm.below.shared_worker.salted", lambda digest, salt: b"n" * 16)
    monkeypatch.setattr(shared, "salted", lambda digest, salt: b"n" * NAMESPACE_BYTES)
    assert serve(started(num_ranks=2), "p") == 0
    with pytest.raises(AssertionError, match="wrong bytes"):
        serve(started(num_ranks=2), "p")


def test_a_salt_of_a_request_is_part_of_its_blocks(started: Started) -> None:
    a, b = started(), started()
    assert serve(a, "p", cache_salt="one tenant") == 0
    assert serve(b, "p", cache_salt="another") == 0
    assert serve(b, "p") == 0
    assert serve(b, "p", cache_salt="one tenant") == NUM_HIT


def test_a_request_with_an_adapter_takes_nothing_from_the_store(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hashes have the adapter's name and path, and its content may differ between servers."""
    adapter = LoRARequest("adapter", 1, "someone/adapter")
    a, b = started(), started()
    assert serve(a, "p", lora_request=adapter) == 0
    assert serve(b, "p", lora_request=adapter) == 0
    assert stat(b, "asked_blocks") == 0
    assert serve(b, "p", lora_request=adapter) == NUM_HIT, "its own host has it"
    lookup = LowerTier.lookup

    def unguarded(self: LowerTier, request: Any, *args: Any, **more: Any) -> int | None:
        request.lora_request = None
        return lookup(self, request, *args, **more)

    monkeypatch.setattr(LowerTier, "lookup", unguarded)
    assert serve(started(), "p", lora_request=adapter) == NUM_HIT, "the negative control"


# -- wrong values in the store ---------------------------------------------------------------------


def damage(store: Store, started: Started, kind: str) -> None:
    """Let each block of a prompt have another value, and only the first the right one."""
    assert serve(started(), "p") == 0
    own = keys(store)
    assert serve(started(weights="another model"), "p") == 0
    other = {name_of(key): key for key in keys(store) if key not in own}
    values = {key: value(store, key) for key in own}
    for at, key in enumerate(own):
        flipped = bytearray(values[key])
        flipped[HEADER_BYTES + 7] ^= 16
        wrong = {
            "another valid block": values[own[at - 1]],
            "a flipped bit": bytes(flipped),
            "another model's": value(store, other[name_of(key)]),
            "a torn value": values[key][:-9],
            "gone": b"",
        }[kind]
        store.command("SET", key, wrong)


DAMAGE = ["another valid block", "a flipped bit", "another model's", "a torn value", "gone"]


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_value_that_is_not_the_block_is_a_miss(started: Started, store: Store, kind: str) -> None:
    damage(store, started, kind)
    server = started()
    assert serve(server, "p") == 0
    assert (stat(server, "found_blocks"), stat(server, "promoted_blocks")) == (NUM_BLOCKS, 0)
    assert stat(server, "failed_promotes") > 0
    # Each server finds what the one before has put again, and puts the next three.
    assert [serve(started(), "p") for _ in range(2)] == [NUM_HIT // 2, NUM_HIT], "it is put again"


@pytest.mark.parametrize("kind", DAMAGE[:3])
def test_a_value_that_is_not_the_block_would_be_seen(
    started: Started, store: Store, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The negative control: the RESP tier compares neither the frame nor the sum."""
    damage(store, started, kind)

    monkeypatch.setattr("kvstow.tiers.namespace.Namespace.checksum", lambda *_: AnySum())
    with pytest.raises(AssertionError, match="wrong bytes"):
        serve(started(), "p")


def test_a_block_counts_only_if_every_rank_has_its_part(started: Started, store: Store) -> None:
    """The store is asked for the first rank's part only."""
    a = started(num_ranks=2)
    assert serve(a, "p") == 0
    assert isinstance(a.half.tier.below, SharedTier)
    second = a.half.tier.below.questions.namespaces(a.half.tier.below._ranks)[1].hex().encode()
    lost = [key for key in keys(store) if second in key]
    assert len(lost) == NUM_BLOCKS
    for key in lost:
        store.command("DEL", key)
    b = started(num_ranks=2)
    assert serve(b, "p") == 0
    assert stat(b, "found_blocks") == NUM_BLOCKS and stat(b, "promoted_blocks") == 0
    # Each server finds what the one before has put again, and puts the next three.
    found = [serve(started(num_ranks=2), "p") for _ in range(2)]
    assert found == [NUM_HIT // 2, NUM_HIT]


def test_a_claim_that_was_never_put_is_a_miss(started: Started) -> None:
    server = started()
    request = server.begin("p")
    server.step()
    assert server.half.offload is not None
    assert server.half.offload.claim(request.block_hashes, [0] * NUM_BLOCKS, None) == NUM_BLOCKS
    assert server.serve(request) == 0
    assert stat(server, "failed_promotes") > 0
    assert stat(server, "damaged_blocks") > 0
    assert serve(started(), "p") > 0, "a wrong claim that was read does not keep it from a put"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_store_to_the_host_that_fails_on_one_rank_puts_nothing(
    started: Started, store: Store, num_ranks: int
) -> None:
    """A block that no device wrote to the host was never computed, as far as servers know."""
    server = started(num_ranks=num_ranks)
    last = server.ranks[-1].worker
    for mover in last.movers:
        mover.store = refuse  # type: ignore[method-assign]
    assert serve(server, "p") == 0
    assert keys(store) == []
    assert serve(started(num_ranks=num_ranks), "p") == 0
