"""Each chunk of a prefill and each step of a decode stores only the blocks that it completes.

See `scenario_rig` for the rig.
"""

from __future__ import annotations

from typing import Literal

import pytest
from tests.accounting.scenario_rig import BLOCK_SIZES, Group, Rig, every_model, full, num_skipped

from kvstow import FullAttention


@every_model
@pytest.mark.parametrize("num_more", [-1, 0, 1, 7], ids="a block and {} tokens".format)
def test_chunks_append_block_ids_and_only_new_blocks_are_stored(
    groups: list[Group], num_more: int
) -> None:
    prompt = "abcdefg"
    rig = Rig(groups)
    rig.add("it", prompt, len(rig.text(prompt)) - rig.size // 2)
    rig.admit("it")
    request, chunk = rig.requests["it"], max(1, rig.size + num_more)
    while left := request.num_known - request.num_computed:
        before = request.num_computed // rig.size
        job = rig.step({"it": min(chunk, left)})
        after = request.num_computed // rig.size
        assert rig.copied(job) == rig.names(prompt[:after], before)
        lengths = [len(rig.ledger.block_table("it", at)) for at in range(len(groups))]
        assert (
            request.num_reported == lengths == [-(-request.num_computed // rig.size)] * len(groups)
        )
    rig.land()
    assert rig.on_host == rig.names(prompt[: request.num_known // rig.size])


@every_model
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 10, 13])
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_prefill_in_any_number_of_chunks_ends_with_the_same_host_keys(
    groups: list[Group], num_chunks: int, mode: Literal["eager", "lazy"]
) -> None:
    prompt = "abcdefghijkl"
    rig = Rig(groups, mode=mode)
    rig.add("it", prompt + "m", len(rig.text(prompt)) + rig.size // 2)
    rig.admit("it")
    rig.prefill("it", num_chunks)
    rig.finish("it")
    if mode == "lazy":
        rig.store_evictable(rig.num_device)
    rig.land()
    assert rig.on_host == rig.names(prompt)
    assert rig.stat("stored_blocks") == len(rig.names(prompt))
    assert rig.reload(prompt) == len(prompt)


@every_model
def test_requests_with_a_common_prefix_store_each_block_once(groups: list[Group]) -> None:
    """Their chunks have different sizes, and one job stores the blocks of all requests."""
    prompts = {f"request {at}": "abcdef"[:at] + "uvwxyz"[at] * 3 for at in range(6)}
    rig = Rig(groups)
    for id, prompt in prompts.items():
        rig.add(id, prompt)
        rig.admit(id)
    num_steps = 0
    while rig.requests:
        left = {id: it.num_known - it.num_computed for id, it in rig.requests.items()}
        job = rig.step({id: min(num, 1 + list(prompts).index(id)) for id, num in left.items()})
        assert job is None or len(rig.copied(job)) == len(job)
        for id in [id for id, it in rig.requests.items() if it.num_computed == it.num_known]:
            rig.finish(id)
        num_steps += 1
        if num_steps % 3 == 0:
            rig.land()
    rig.land()
    names = set().union(*(rig.names(prompt) for prompt in prompts.values()))
    assert rig.on_host == names
    assert rig.stat("stored_blocks") == len(names)
    assert [rig.reload(prompt) for prompt in prompts.values()] == list(map(len, prompts.values()))
    rig.assert_nothing_is_held()


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("blocks_per_slot", [2, 3])
@pytest.mark.parametrize("num_blocks", range(1, 8))
@pytest.mark.parametrize("num_chunks", [1, 4])
def test_only_blocks_that_fill_a_whole_slot_are_stored(
    size: int, blocks_per_slot: int, num_blocks: int, num_chunks: int
) -> None:
    prompt = "abcdefg"[:num_blocks]
    num_whole = num_blocks // blocks_per_slot * blocks_per_slot
    rig = Rig(full(size), blocks_per_slot=blocks_per_slot)
    rig.add("first", prompt)
    rig.admit("first")
    rig.prefill("first", num_chunks)
    rig.finish("first")
    rig.land()
    # The key of a slot is the key of its last block.
    lasts = range(blocks_per_slot - 1, num_whole, blocks_per_slot)
    assert rig.on_host == {rig.name(0, rig.text(prompt), last) for last in lasts}
    assert rig.stat("stored_blocks") == num_whole
    for num_local in range(num_whole + 1):
        rig.forget_device()
        if num_local:
            rig.serve(f"local {num_local}", prompt[:num_local], host=False)
        id = f"after {num_local}"
        rig.add(id, prompt + "x")
        assert rig.copied(rig.admit(id)) == rig.names(prompt[:num_whole], num_local)
        rig.land()
        # This checks the content of all blocks that the request reads.
        rig.grant({id: 1})
        rig.compute([id])
        rig.finish(id)
    rig.assert_nothing_is_held()


@every_model
@pytest.mark.parametrize("is_half", [False, True], ids=["from a full block", "from half a block"])
def test_only_a_decode_step_that_fills_a_block_stores(groups: list[Group], is_half: bool) -> None:
    prompt, size = "abcdef", groups[0].block_size
    rig = Rig(groups)
    rig.add("it", prompt, 2 * size + (size // 2 if is_half else 0))
    rig.admit("it")
    rig.prefill("it")
    rig.land()
    request = rig.requests["it"]
    while request.num_known < len(request.text):
        rig.generate("it")
        job = rig.step({"it": 1})
        num_full, rest = divmod(request.num_computed, size)
        assert rig.copied(job) == (set() if rest else rig.names(prompt[:num_full], num_full - 1))
        rig.land()
    assert rig.on_host == rig.names(prompt)
    rig.finish("it")
    assert rig.reload(prompt) == len(prompt)


@every_model
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("is_flushed", [True, False])
@pytest.mark.parametrize("path", ["finish", "preempt"])
def test_only_tokens_of_earlier_steps_are_stored(
    groups: list[Group], mode: Literal["eager", "lazy"], is_flushed: bool, path: str
) -> None:
    """A request leaves with one chunk reported, one computed and one granted.

    If it is flushed, the test reports the request once more before it leaves. This stores the
    blocks of the second chunk that the request still holds, and none of the third. With a window,
    a block that is reported half full needs a second report before the grant that frees it. So
    there the first chunk ends at the end of a block.
    """
    prompt, size = "abcdefgh", groups[0].block_size
    chunks = [2 * size + (size // 2 if len(groups) == 1 else 0), 2 * size + size // 2, 3 * size]
    rig = Rig(groups, mode=mode)
    rig.add("it", prompt)
    rig.admit("it")
    rig.step({"it": chunks[0]})
    rig.land()
    rig.grant({"it": chunks[1]})
    rig.compute(["it"])
    rig.grant({"it": chunks[2]})
    stored = rig.names(prompt[: chunks[0] // size])
    if is_flushed:
        num_tokens = chunks[0] + chunks[1]
        stored |= {
            rig.name(at, rig.text(prompt), index)
            for at, group in enumerate(groups)
            for index in range(num_skipped(group, num_tokens), num_tokens // size)
        }
        rig.report("it")
    getattr(rig, path)("it")
    if mode == "lazy":
        rig.store_evictable(rig.num_device)
    rig.land()
    assert rig.on_host == stored
    hits = [end for end in range(9) if rig.names(prompt[:end], hit=True) <= stored]
    assert rig.reload(prompt) == max(hits)
    rig.assert_nothing_is_held()


@every_model
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("path", ["go on", "finish", "preempt"])
def test_a_block_is_not_stored_before_its_hash_is_known(
    groups: list[Group], mode: Literal["eager", "lazy"], path: str
) -> None:
    rig = Rig(groups, mode=mode)
    rig.add("it", "abc", 2 * rig.size)
    rig.admit("it")
    rig.prefill("it")
    rig.land()
    request = rig.requests["it"]
    # These tokens are known, but not yet hashed.
    request.num_known += rig.size
    assert rig.step({"it": rig.size}) is None
    assert rig.report("it") is None
    stored = rig.names("ab")
    if path == "go on":
        hashes = rig.hashes(rig.text("abc"))[2:]
        rig.ledger.extend("it", hashes)
        rig.scheduler.extend("it", hashes)
        rig.ledger.cache("it", request.num_computed)
        # A window's or a state's block may have another owner when its hash comes late.
        late = {
            (at, text) for at, text in rig.names("abc", 2) if isinstance(groups[at], FullAttention)
        }
        stored |= late
        assert rig.copied(rig.report("it")) == (late if mode == "eager" else set())
        rig.finish("it")
    else:
        rig.finish("it") if path == "finish" else rig.preempt("it")
    if mode == "lazy":
        rig.store_evictable(rig.num_device)
    rig.land()
    assert rig.on_host == stored
    rig.assert_nothing_is_held()
