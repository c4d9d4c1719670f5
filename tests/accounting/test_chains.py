"""Hashes know which block they continue, so a forgotten parent gives no block another's key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from kvstow import (
    BlockLedger,
    ConfigError,
    FullAttention,
    Hashes,
    OffloadScheduler,
    hash_tokens,
)

BLOCK = 4
PROMPT = list(range(8))
NEW = list(range(8, 12))
KNOWN = hash_tokens(PROMPT, BLOCK)
WHOLE = hash_tokens([*PROMPT, *NEW], BLOCK)
NEXT = hash_tokens(NEW, BLOCK, parent=KNOWN[-1])

Accounting: TypeAlias = BlockLedger | OffloadScheduler


def ledger() -> BlockLedger:
    return BlockLedger(9, [FullAttention(BLOCK)])


def scheduler() -> OffloadScheduler:
    return OffloadScheduler(8, [FullAttention(BLOCK)])


@pytest.fixture(params=[ledger, scheduler])
def accounting(request: pytest.FixtureRequest) -> Accounting:
    make: Callable[[], Accounting] = request.param
    return make()


@pytest.mark.parametrize(
    ("hashes", "problem"),
    [
        pytest.param(hash_tokens(NEW, BLOCK), "begin a prompt, and the request has 2", id="none"),
        pytest.param(WHOLE, "begin a prompt, and the request has 2", id="all again"),
        pytest.param(
            hash_tokens(NEW, BLOCK, algorithm="sha256"), "begin a prompt", id="from Python's pickle"
        ),
        pytest.param(
            hash_tokens(NEW, BLOCK, parent=KNOWN[0]), "continue another block", id="another"
        ),
        pytest.param(WHOLE[1:], "continue another block", id="too early"),
        pytest.param(Hashes(WHOLE[1:]), "continue another block", id="a copy"),
        pytest.param(WHOLE[1:2] + WHOLE[2:], "continue another block", id="a sum"),
    ],
)
def test_extend_refuses_hashes_that_do_not_continue_the_request(
    accounting: Accounting, hashes: Hashes, problem: str
) -> None:
    accounting.add("one", KNOWN)
    with pytest.raises(ConfigError, match=f"the hashes {problem}.*only the tokens after"):
        accounting.extend("one", hashes)
    accounting.extend("one", NEXT)
    accounting.check()
    if isinstance(accounting, BlockLedger):
        assert accounting.known("one")[0] == WHOLE


@pytest.mark.parametrize("hashes", [NEXT, WHOLE[1:], WHOLE[-1:]])
def test_add_refuses_hashes_that_continue_a_block(accounting: Accounting, hashes: Hashes) -> None:
    with pytest.raises(ConfigError, match="the request has no hashes yet: hash its tokens from"):
        accounting.add("one", hashes)
    accounting.add("one", KNOWN)


@pytest.mark.parametrize(
    "hashes",
    [
        pytest.param(NEXT, id="with the parent"),
        pytest.param(WHOLE[2:], id="a slice"),
        pytest.param(NEXT[:0] + NEXT, id="a sum"),
        pytest.param(list(NEXT), id="a list"),
        pytest.param(WHOLE[::-1][:1], id="of unknown parent"),
        pytest.param(hash_tokens([], BLOCK), id="no hashes"),
    ],
)
def test_extend_takes_hashes_that_may_continue_the_request(
    accounting: Accounting, hashes: Hashes
) -> None:
    accounting.add("one", KNOWN)
    accounting.extend("one", hashes)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        pytest.param(hash_tokens(NEW, BLOCK), "begin a prompt", id="no parent"),
        pytest.param(
            hash_tokens(NEW, BLOCK, parent=KNOWN[0]), "continue another block", id="another parent"
        ),
        pytest.param(WHOLE, "begin a prompt", id="all again"),
    ],
)
def test_sum_refuses_hashes_that_do_not_continue_its_first_part(
    wrong: Hashes, problem: str
) -> None:
    """A slice of the sum would claim to continue the block before it."""
    for known in KNOWN, list(KNOWN):
        with pytest.raises(ConfigError, match=f"{problem}, and stand behind 2 others: pass the"):
            Hashes(known) + wrong
    assert KNOWN + NEXT == WHOLE
    assert KNOWN + wrong[:0] == KNOWN
    assert KNOWN[:0] + wrong == wrong
    assert KNOWN + list(wrong) == [*KNOWN, *wrong], "a list does not know what it continues"


def test_a_sum_begins_where_its_first_part_does() -> None:
    at = ledger()
    at.add("one", KNOWN + NEXT)
    with pytest.raises(ConfigError, match="begin a prompt"):
        at.extend("one", KNOWN + NEXT)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_hash_without_its_parent_would_hit_another_prompt(*, is_known: bool) -> None:
    """A list of hashes does not know its parent: then the other prompt finds these blocks."""
    at = ledger()
    at.add("one", KNOWN)
    wrong = hash_tokens(NEW, BLOCK)
    if is_known:
        with pytest.raises(ConfigError):
            at.extend("one", wrong)
        at.extend("one", NEXT)
    else:
        at.extend("one", list(wrong))
    at.allocate("one", 12)
    at.add("other", hash_tokens(NEW, BLOCK))
    assert at.lookup("other", 100).num_tokens == (0 if is_known else BLOCK)


def test_a_store_with_new_hashes_takes_each_request_once() -> None:
    tier = scheduler()
    tier.add("one", KNOWN)
    wrong = hash_tokens(NEW, BLOCK, parent=KNOWN[-1])
    with pytest.raises(ConfigError, match='"one" is named twice'):
        tier.store(["one", "one"], [8, 12], [1, 2, 3], [0, 2, 3], new_hashes=[NEXT, wrong])
    tier.check()
    job = tier.store(["one"], [12], [1, 2, 3], [0, 3], new_hashes=[NEXT])
    assert job is not None
    assert len(job) == 3
