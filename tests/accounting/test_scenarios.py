"""`BlockLedger` and `OffloadScheduler` together, one scenario a test, over memories of names.

A prompt is a string, one letter a block, and a token is a letter too. The content of a block is
its group and the text up to the last token written: whatever is lost, stale, swapped, or copied
before it was computed shows. What is expected is derived from the configuration.

    step:  grant -------> compute ------> tell ------------> end
           the ledger's   names into the  the scheduler's    a job's copies happen,
           blocks         device memory   job; blocks pinned and its pins go
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
import pytest

from kvstow import (
    BlockLedger,
    BlockRemoved,
    BlockStored,
    FullAttention,
    Job,
    OffloadScheduler,
    SlidingWindow,
    StateSpace,
    hash_tokens,
)

Group: TypeAlias = FullAttention | SlidingWindow | StateSpace
Name: TypeAlias = tuple[int, str]
"""A group, and the text up to the last token of a block."""

UNWRITTEN: Name = (-1, "unwritten")
TORN: Name = (-1, "torn")
ALL = 2**40


def full(block_size: int) -> list[Group]:
    return [FullAttention(block_size)]


def window(block_size: int) -> list[Group]:
    """With a window that reaches into the second block back."""
    return [FullAttention(block_size), SlidingWindow(block_size, block_size + 2)]


def state(block_size: int) -> list[Group]:
    return [FullAttention(block_size), StateSpace(block_size)]


BLOCK_SIZES = (1, 4, 16)
MODELS = [
    pytest.param(make(size), id=f"{make.__name__}-{size}")
    for make in (full, window, state)
    for size in BLOCK_SIZES
]
every_model = pytest.mark.parametrize("groups", MODELS)
HYBRIDS = [param for param in MODELS if not str(param.id).startswith("full")]


def num_skipped(group: Group, num_tokens: int) -> int:
    """Blocks that a hit of that many tokens does without."""
    tokens = 0
    if isinstance(group, SlidingWindow):
        tokens = max(0, num_tokens - group.window + 1)
    elif isinstance(group, StateSpace):
        tokens = max(0, num_tokens - 1)
    return tokens // group.block_size


@dataclass
class Request:
    """Attributes: the text it ends with, how much of it is known, granted and computed (tokens)."""

    text: str
    num_known: int
    num_granted: int = 0
    num_computed: int = 0
    num_told: list[int] = field(default_factory=list)


class Rig:
    """Ledger, scheduler, the two memories, and the copies under way."""

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        num_device: int = 300,
        num_host: int = 300,
        mode: Literal["eager", "lazy"] = "eager",
        blocks_per_slot: int = 1,
    ) -> None:
        self.groups, self.size = groups, groups[0].block_size
        self.num_device, self.mode, self.blocks_per_slot = num_device, mode, blocks_per_slot
        self.ledger = BlockLedger(num_device + 1, groups)
        self.scheduler = OffloadScheduler(
            num_host,
            groups,
            mode=mode,
            blocks_per_slot=blocks_per_slot,
            num_device_blocks=num_device + 1,
            events=True,
        )
        self.device: dict[int, Name] = dict.fromkeys(range(1, num_device + 1), UNWRITTEN)
        self.host: dict[int, Name] = {}
        self.requests: dict[str, Request] = {}
        self.text_of: dict[bytes, str] = {}
        self.on_host: set[Name] = set()
        """What lookups can find, as events tell it: of each slot its last block."""
        self.jobs: dict[int, Job] = {}
        self.storing: dict[int, list[Name]] = {}
        self.loading: dict[int, tuple[str, Request, list[Name]]] = {}
        self.num_probes = 0

    # -- names -------------------------------------------------------------------------------

    def text(self, prompt: str) -> str:
        return "".join(letter * self.size for letter in prompt)

    def name(self, group: int, text: str, index: int) -> Name:
        return group, text[: (index + 1) * self.size]

    def names(self, prompt: str, start: int = 0, *, hit: bool = False) -> set[Name]:
        """All full blocks from `start` on, or those of them that a hit of the prompt reads."""
        text, end = self.text(prompt), len(prompt)
        return {
            self.name(at, text, index)
            for at, group in enumerate(self.groups)
            for index in range(max(start, num_skipped(group, len(text)) if hit else 0), end)
        }

    def hashes(self, text: str) -> list[bytes]:
        hashes = hash_tokens([ord(token) for token in text], self.size)
        for index, hash in enumerate(hashes):
            self.text_of[hash] = self.name(0, text, index)[1]
        return hashes

    # -- requests ----------------------------------------------------------------------------

    def add(self, id: str, prompt: str, num_known: int | None = None) -> None:
        """With `num_known`, only that many tokens are its prompt; it generates the rest."""
        self._add(id, Request(self.text(prompt), num_known or len(self.text(prompt))))

    def _add(self, id: str, request: Request) -> None:
        hashes = self.hashes(request.text[: request.num_known])
        self.ledger.add(id, hashes)
        self.scheduler.add(id, hashes)
        request.num_told = [0 for _ in self.groups]
        self.requests[id] = request
        self.check()

    def generate(self, id: str) -> None:
        """One more token is known; if it is a block's last, the block's hash is."""
        request = self.requests[id]
        request.num_known += 1
        if request.num_known % self.size == 0:
            hashes = self.hashes(request.text[: request.num_known])[-1:]
            self.ledger.extend(id, hashes)
            self.scheduler.extend(id, hashes)
        self.check()

    def admit(self, id: str, *, host: bool = True, num_accepted: int | None = None) -> Job | None:
        """Takes what the device has and loads what the host has, at most `num_accepted` blocks."""
        request = self.requests[id]
        hit = self.ledger.lookup(id, request.num_known - 1)
        num_external = 0
        if host:
            found = self.scheduler.lookup(id, hit.num_tokens, request.num_known - 1)
            assert found is not None, "pending"
            num_external = found if num_accepted is None else num_accepted * self.size
            assert num_external <= found
        if not hit.num_tokens + num_external:
            return None
        taken = self.ledger.allocate(
            id, 0, hit=hit, num_external_tokens=num_external, delay_caching=num_external > 0
        )
        assert taken is not None
        self._taken(np.concatenate(taken).tolist())
        request.num_granted = request.num_computed = hit.num_tokens + num_external
        job = None
        if num_external:
            job = self.scheduler.load(id, num_external, taken)
            assert job.block_ids.tolist() == np.concatenate(taken).tolist()
            start, end = hit.num_tokens // self.size, request.num_computed // self.size
            wanted = [
                self.name(at, request.text, index)
                for at, group in enumerate(self.groups)
                for index in range(max(start, num_skipped(group, request.num_computed)), end)
            ]
            self.loading[job.job_id] = id, request, wanted
            self._start(job)
        self.check()
        return job

    def grant(self, tokens: dict[str, int]) -> None:
        """Blocks for so many more tokens each; their content is not there yet."""
        step = self.ledger.allocate_step(list(tokens), list(tokens.values()))
        assert step.num_granted == len(tokens)
        self._taken(step.ids.tolist())
        for id, num_tokens in tokens.items():
            self.requests[id].num_granted += num_tokens
        self.check()

    def compute(self, ids: Iterable[str]) -> None:
        """Reads what the granted tokens attend to, and writes them."""
        for id in ids:
            request = self.requests[id]
            start, stop = request.num_computed, request.num_granted
            assert stop <= request.num_known
            for at, group in enumerate(self.groups):
                table = self.ledger.block_table(id, at).tolist()
                for index in range(num_skipped(group, start), start // self.size):
                    assert self.device[table[index]] == self.name(at, request.text, index)
                for index in range(start // self.size, -(-stop // self.size)):
                    end = min(stop, (index + 1) * self.size)
                    self.device[table[index]] = at, request.text[:end]
            request.num_computed = stop
        self.check()

    def tell(self, *ids: str) -> Job | None:
        """Names requests to the scheduler, with the blocks it does not know and what is computed.

        What its job copies must be there, under a hash that is known; nothing else is stored.
        """
        new: list[int] = []
        offsets = [0]
        for id in ids:
            request = self.requests[id]
            for at, num_told in enumerate(request.num_told):
                new += self.ledger.block_table(id, at).tolist()[num_told:]
                request.num_told[at] += len(new) - offsets[-1]
                offsets.append(len(new))
        computed = [self.requests[id].num_computed for id in ids]
        return self._store(self.scheduler.store(ids, computed, new, offsets))

    def step(self, tokens: dict[str, int]) -> Job | None:
        self.grant(tokens)
        self.compute(tokens)
        return self.tell(*tokens)

    def store_evictable(self, num_blocks: int) -> Job | None:
        order = self.ledger.pool.free_order().tolist()
        job = self._store(self.scheduler.store_evictable(self.ledger.pool, num_blocks))
        assert self.ledger.pool.free_order().tolist() == order
        return job

    def finish(self, id: str) -> None:
        del self.requests[id]
        self.scheduler.finish(id)
        self.ledger.free(id)
        self.check()

    def preempt(self, id: str) -> None:
        """Its blocks go; what is known of it stays, and it starts over."""
        request = self.requests[id]
        self.finish(id)
        self._add(id, Request(request.text, request.num_known))

    # -- copies ------------------------------------------------------------------------------

    def _taken(self, ids: list[int]) -> None:
        self.device |= dict.fromkeys(ids, UNWRITTEN)

    def _start(self, job: Job) -> None:
        assert len(job) == len(job.block_ids) == len(job.host_slots) > 0
        assert 0 not in job.block_ids
        self.jobs[job.job_id] = job
        self.ledger.pool.pin(job.block_ids)

    def _store(self, job: Job | None) -> Job | None:
        self.check()  # what was evicted for it may be stored again
        if job is not None:
            self._start(job)
            names = [self.device[id] for id in job.block_ids.tolist()]
            for at, (begin, end) in enumerate(pairwise(job.offsets.tolist())):
                for group, text in names[begin:end]:
                    assert group == at
                    assert text in self.text_of.values()
            assert len(set(names)) == len(names)
            assert self.on_host.isdisjoint(names)
            assert not set(names) & {name for job in self.storing.values() for name in job}
            self.storing[job.job_id] = names
        return job

    def end(self, job: Job, *, ok: bool = True) -> None:
        """The copies happen, or leave the half of it; then the job ends and its pins go."""
        del self.jobs[job.job_id]
        is_store = job.job_id in self.storing
        for id, place in zip(job.block_ids.tolist(), job.host_slots.tolist(), strict=True):
            if is_store:
                self.host[place] = self.device[id] if ok else TORN
            else:
                self.device[id] = self.host[place] if ok else TORN
        if is_store:
            names = self.storing.pop(job.job_id)
            assert [self.host[place] for place in job.host_slots.tolist()] == names or not ok
        else:
            id, request, names = self.loading.pop(job.job_id)
            assert [self.device[block] for block in job.block_ids.tolist()] == names or not ok
            if ok and self.requests.get(id) is request:
                self.ledger.cache(id, request.num_computed)
        end = self.scheduler.complete(job.job_id, ok=ok)
        assert end is not None
        assert end.ok == ok
        assert end.block_ids.tolist() == job.block_ids.tolist()
        self.ledger.pool.unpin(end.block_ids)
        self.check()

    def copied(self, job: Job | None) -> set[Name]:
        """What a job in flight brings."""
        if job is None:
            return set()
        stored = self.storing.get(job.job_id)
        return set(self.loading[job.job_id][2] if stored is None else stored)

    def land(self) -> None:
        for job in list(self.jobs.values()):
            self.end(job)

    # -- shorter -----------------------------------------------------------------------------

    def prefill(self, id: str, num_chunks: int = 1) -> None:
        """The rest of what is known of a request, in chunks that differ by at most a token."""
        request = self.requests[id]
        ends = np.linspace(request.num_computed, request.num_known, num_chunks + 1).astype(int)
        for begin, end in pairwise(ends.tolist()):
            if begin < end:
                self.step({id: end - begin})

    def serve(self, id: str, prompt: str, *, host: bool = True) -> None:
        """A request computes its prompt and leaves when its copies have landed."""
        self.add(id, prompt)
        self.admit(id, host=host)
        self.land()
        self.prefill(id)
        self.land()
        self.finish(id)

    def forget_device(self) -> None:
        self.ledger.pool.evict(range(1, self.num_device + 1))
        self.check()

    def found(self, prompt: str, num_local: int = 0) -> int:
        """Blocks that the host could serve after a local hit."""
        # Never finished: that would be a use.
        self.num_probes += 1
        probe = f"probe {self.num_probes}"
        self.scheduler.add(probe, self.hashes(self.text(prompt)))
        num_tokens = self.scheduler.lookup(probe, num_local * self.size, ALL)
        self.scheduler.release(probe)
        assert num_tokens is not None
        return num_tokens // self.size

    def reload(self, prompt: str) -> int:
        """How many blocks of a prompt come back, all of them with the right bytes."""
        self.forget_device()
        num_found = self.found(prompt)
        self.add("reload", prompt + "!")
        wanted = self.names(prompt[:num_found], hit=True)
        assert self.copied(self.admit("reload")) == wanted
        self.land()
        self.finish("reload")
        return num_found

    def check(self) -> None:
        self.scheduler.check()
        self.ledger.check()
        for event in self.scheduler.take_events():
            assert isinstance(event, BlockStored | BlockRemoved)
            names = {(event.group, self.text_of[hash]) for hash in event.block_hashes}
            if isinstance(event, BlockStored):
                assert self.on_host.isdisjoint(names)
                self.on_host |= names
            else:
                assert self.on_host >= names
                self.on_host -= names
        assert len(self.on_host) == self.scheduler.num_resident

    def stat(self, name: str) -> int:
        return self.scheduler.stats()[name]

    def assert_nothing_is_held(self) -> None:
        assert self.ledger.pool.num_free == self.num_device
        assert self.stat("jobs_in_flight") == self.stat("storing_blocks") == 0


@every_model
def test_eager_stores_are_loaded_again(groups: list[Group]) -> None:
    rig = Rig(groups)
    rig.serve("first", "abcde")
    assert rig.on_host == rig.names("abcde")
    rig.forget_device()
    rig.add("second", "abcdex")
    load = rig.admit("second")
    assert rig.copied(load) == rig.names("abcde", hit=True)
    rig.land()
    rig.prefill("second")
    rig.finish("second")
    rig.land()
    assert rig.on_host == rig.names("abcdex")
    assert rig.stat("stored_blocks") == len(rig.names("abcdex"))
    assert rig.stat("loaded_blocks") == len(rig.names("abcde", hit=True))
    rig.assert_nothing_is_held()


@every_model
def test_lazy_stores_are_loaded_again(groups: list[Group]) -> None:
    rig = Rig(groups, mode="lazy")
    rig.add("first", "abcde")
    rig.admit("first")
    rig.prefill("first", num_chunks=2)
    rig.finish("first")
    assert not rig.jobs
    names = rig.names("abcde")
    # What was never used goes first.
    num_unused = rig.num_device - len(names)
    assert rig.store_evictable(num_unused) is None
    assert len(rig.copied(rig.store_evictable(num_unused + 2))) == 2
    rig.store_evictable(rig.num_device)
    rig.land()
    assert rig.on_host == names
    rig.forget_device()
    rig.add("second", "abcdex")
    assert rig.copied(rig.admit("second")) == rig.names("abcde", hit=True)
    rig.land()
    rig.prefill("second")
    rig.finish("second")
    rig.store_evictable(rig.num_device)
    rig.land()
    assert rig.on_host == rig.names("abcdex")
    assert rig.stat("stored_blocks") == len(rig.names("abcdex"))
    rig.assert_nothing_is_held()


@every_model
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("is_landed", [True, False])
def test_a_key_on_the_host_or_in_flight_is_not_stored_again(
    groups: list[Group], mode: Literal["eager", "lazy"], is_landed: bool
) -> None:
    rig = Rig(groups, mode=mode)
    used: list[set[int]] = []
    for id in ("first", "second"):
        rig.add(id, "abcd")
        rig.admit(id, host=False)
        rig.prefill(id)
        used.append(
            {block for at in range(len(groups)) for block in rig.ledger.block_table(id, at)}
        )
        rig.finish(id)
        if mode == "lazy":
            rig.store_evictable(rig.num_device)
        assert len(rig.jobs) == (id == "first" or not is_landed)
        if is_landed:
            rig.land()
        rig.forget_device()
    assert used[0].isdisjoint(used[1]), "the same blocks were computed twice, in two places"
    rig.land()
    assert rig.on_host == rig.names("abcd")
    assert rig.stat("stored_blocks") == len(rig.names("abcd"))


OLD, MIDDLE, RECENT = "aaaa", "bbbb", "cccc"


def filled(groups: list[Group]) -> Rig:
    """With a host that three prompts fill."""
    rig = Rig(groups, num_host=len(OLD + MIDDLE + RECENT) * len(groups))
    for prompt in (OLD, MIDDLE, RECENT):
        rig.serve(prompt, prompt)
    assert rig.on_host == rig.names(OLD) | rig.names(MIDDLE) | rig.names(RECENT)
    return rig


@every_model
@pytest.mark.parametrize("num_new", [1, 3, 4, 5, 8, 10])
def test_eviction_takes_the_least_recent_prompt_tail_before_root(
    groups: list[Group], num_new: int
) -> None:
    rig = filled(groups)
    rig.serve("new", "z" * num_new)
    kept = ["z" * num_new]
    for at, prompt in enumerate((OLD, MIDDLE, RECENT)):
        num_lost = min(max(num_new - at * len(prompt), 0), len(prompt))
        kept.append(prompt[: len(prompt) - num_lost])
    assert rig.on_host == set().union(*map(rig.names, kept))
    assert [rig.reload(prompt) for prompt in kept] == [len(prompt) for prompt in kept]
    assert rig.stat("evicted_blocks") == num_new * len(groups)


@every_model
@pytest.mark.parametrize("use", ["loaded", "found on the device", "computed again", "looked at"])
def test_blocks_used_again_survive_eviction(groups: list[Group], use: str) -> None:
    rig = filled(groups)
    if use in ("loaded", "computed again"):
        rig.forget_device()
    if use == "computed again":
        rig.serve("user", OLD, host=False)
    elif use == "looked at":
        assert rig.found(OLD) == len(OLD)
    else:
        rig.add("user", OLD + "x")
        load = rig.admit("user")
        assert (load is not None) == (use == "loaded")
        rig.land()
        rig.finish("user")
    rig.serve("new", "zzzz")
    lost = OLD if use == "looked at" else MIDDLE
    kept = MIDDLE if use == "looked at" else OLD
    assert rig.on_host == rig.names(kept) | rig.names(RECENT) | rig.names("zzzz")
    assert [rig.reload(prompt) for prompt in (lost, kept)] == [0, len(kept)]


@every_model
@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("under_way", ["store", "load", "lookup", "nothing"])
def test_preemption_leaks_no_host_block(groups: list[Group], under_way: str, ok: bool) -> None:
    rig = Rig(groups, num_host=4 * len(groups))
    for letter in "abcde":
        prompt = letter * 4
        if under_way in ("load", "lookup"):
            rig.serve("before", prompt)
            rig.forget_device()
        rig.add("it", prompt + "x")
        if under_way == "store":
            rig.admit("it")
            rig.step({"it": 4 * rig.size})
        elif under_way == "load":
            rig.admit("it")
        elif under_way == "lookup":
            assert rig.scheduler.lookup("it", 0, ALL) == 4 * rig.size
        assert len(rig.jobs) == (under_way in ("store", "load"))
        rig.preempt("it")
        for job in list(rig.jobs.values()):
            rig.end(job, ok=ok)
        rig.assert_nothing_is_held()
        is_there = under_way in ("load", "lookup") or (under_way == "store" and ok)
        assert rig.on_host & rig.names(prompt) == (rig.names(prompt) if is_there else set())
        assert rig.reload(prompt) == (len(prompt) if is_there else 0)
        rig.finish("it")
    rig.serve("last", "zzzz")
    assert rig.on_host == rig.names("zzzz")
    rig.assert_nothing_is_held()


@every_model
def test_finish_with_a_store_in_flight_defers_the_clean_up(groups: list[Group]) -> None:
    num_host = 4 * len(groups)
    rig = Rig(groups, num_host=num_host)
    rig.add("it", "abcd")
    rig.admit("it")
    rig.prefill("it")
    rig.finish("it")
    assert rig.ledger.pool.num_free == rig.num_device - num_host
    assert (rig.stat("jobs_in_flight"), rig.stat("storing_blocks")) == (1, num_host)
    assert (rig.found("abcd"), rig.on_host) == (0, set())
    # All slots are taken, and none of them goes.
    rig.add("other", "wxyz")
    rig.admit("other")
    rig.prefill("other")
    rig.finish("other")
    assert len(rig.jobs) == 1
    assert rig.stat("dropped_blocks") == num_host
    rig.land()
    assert rig.on_host == rig.names("abcd")
    rig.assert_nothing_is_held()
    assert rig.reload("abcd") == 4


@every_model
def test_finish_with_a_load_in_flight_defers_the_clean_up(groups: list[Group]) -> None:
    num_host = 4 * len(groups)
    rig = Rig(groups, num_host=num_host)
    rig.serve("before", "abcd")
    rig.forget_device()
    rig.add("it", "abcdx")
    load = rig.admit("it")
    assert load is not None
    rig.finish("it")
    assert rig.ledger.pool.num_free == rig.num_device - len(load)
    # What the copy reads stays; the rest of the host can be had.
    rig.add("other", "wxyz")
    rig.admit("other")
    rig.prefill("other")
    rig.finish("other")
    for job in list(rig.jobs.values()):
        if job is not load:
            rig.end(job)
    assert rig.on_host >= rig.copied(load)
    assert len(rig.on_host) == num_host
    assert len(rig.on_host & rig.names("wxyz")) == num_host - len(load)
    rig.end(load)
    rig.assert_nothing_is_held()
    rig.serve("last", "mnop")
    assert rig.on_host == rig.names("mnop")
    assert rig.reload("mnop") == 4


@pytest.mark.parametrize("groups", HYBRIDS)
def test_null_blocks_are_never_stored_or_loaded(groups: list[Group]) -> None:
    prompt = "abcdefgh"
    rig = Rig(groups)
    rig.add("first", prompt)
    rig.admit("first")
    # Told late: what no token reads any more is null by then.
    for _ in prompt:
        rig.grant({"first": rig.size})
        rig.compute(["first"])
    last = (len(prompt) - 1) * rig.size
    held = {
        rig.name(at, rig.text(prompt), index)
        for at, group in enumerate(groups)
        for index in range(num_skipped(group, last), len(prompt))
    }
    num_nulls = sum(num_skipped(group, last) for group in groups)
    tables = [rig.ledger.block_table("first", at).tolist() for at in range(len(groups))]
    assert sum(table.count(0) for table in tables) == num_nulls > 0
    assert rig.copied(rig.tell("first")) == held
    rig.finish("first")
    rig.land()
    assert rig.on_host == held
    rig.forget_device()
    rig.add("second", prompt + "x")
    assert rig.copied(rig.admit("second")) == rig.names(prompt, hit=True)
    for at, group in enumerate(groups):
        table = rig.ledger.block_table("second", at).tolist()
        assert table.count(0) == num_skipped(group, len(rig.text(prompt)))
    rig.land()
    assert rig.copied(rig.step({"second": rig.size})) == rig.names(prompt + "x", len(prompt))


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
        told = [len(rig.ledger.block_table("it", at)) for at in range(len(groups))]
        assert request.num_told == told == [-(-request.num_computed // rig.size)] * len(groups)
    rig.land()
    assert rig.on_host == rig.names(prompt[: request.num_known // rig.size])


@every_model
@pytest.mark.parametrize(("num_local", "num_host"), [(0, 5), (1, 5), (2, 5), (4, 5), (2, 3)])
def test_after_a_local_prefix_exactly_the_middle_is_loaded(
    groups: list[Group], num_local: int, num_host: int
) -> None:
    prompt = "abcdefgh"
    rig = Rig(groups)
    rig.serve("host", prompt[:num_host])
    rig.forget_device()
    if num_local:
        rig.serve("local", prompt[:num_local], host=False)
    rig.add("it", prompt)
    assert rig.found(prompt, num_local) == num_host - num_local
    load = rig.admit("it")
    read = rig.names(prompt[:num_host], hit=True)
    assert rig.copied(load) == read & rig.names(prompt[:num_host], num_local)
    rig.land()
    assert rig.requests["it"].num_computed == num_host * rig.size
    store = rig.step({"it": (len(prompt) - num_host) * rig.size})
    assert rig.copied(store) == rig.names(prompt, num_host)
    rig.finish("it")
    rig.land()
    assert rig.on_host == rig.names(prompt)
    assert rig.stat("stored_blocks") == len(rig.names(prompt))
    rig.assert_nothing_is_held()


@every_model
@pytest.mark.parametrize("num_accepted", [1, 2, 3])
def test_found_blocks_that_are_not_loaded_can_be_evicted(
    groups: list[Group], num_accepted: int
) -> None:
    prompt = "abcde"
    rig = Rig(groups, num_host=len(prompt) * len(groups))
    rig.serve("before", prompt)
    rig.forget_device()
    rig.add("it", prompt + "x")
    load = rig.admit("it", num_accepted=num_accepted)
    assert load is not None
    accepted = rig.names(prompt[:num_accepted], hit=True)
    assert rig.copied(load) == accepted
    rig.add("other", "z" * 9)
    rig.admit("other")
    rig.prefill("other")
    for job in list(rig.jobs.values()):
        if job is not load:
            rig.end(job)
    assert rig.on_host & rig.names(prompt) == accepted
    assert len(rig.on_host & rig.names("z" * 9)) == len(prompt) * len(groups) - len(accepted)
    rig.end(load)
    # The request goes on from what it accepted.
    rig.prefill("it")
    for id in ("it", "other"):
        rig.finish(id)
    rig.land()
    rig.assert_nothing_is_held()


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
def test_many_requests_in_chunks_at_once(groups: list[Group]) -> None:
    """Their prefixes are shared, their chunks of unequal size, and one job stores for all."""
    prompts = {f"request {at}": "abcdef"[:at] + "uvwxyz"[at] * 3 for at in range(6)}
    rig = Rig(groups)
    for id, prompt in prompts.items():
        rig.add(id, prompt)
        rig.admit(id)
    num_steps = 0
    while rig.requests:
        left = {id: one.num_known - one.num_computed for id, one in rig.requests.items()}
        job = rig.step({id: min(num, 1 + list(prompts).index(id)) for id, num in left.items()})
        assert job is None or len(rig.copied(job)) == len(job)
        for id in [id for id, one in rig.requests.items() if one.num_computed == one.num_known]:
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
def test_blocks_that_fill_no_host_slot_are_not_stored(
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
    # A slot goes by its last block.
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
        # Its table and its bytes hold together: it reads them.
        rig.grant({id: 1})
        rig.compute([id])
        rig.finish(id)
    rig.assert_nothing_is_held()


@every_model
@pytest.mark.parametrize("num_before", [1, 2, 5])
@pytest.mark.parametrize("is_landed", [True, False])
@pytest.mark.parametrize("is_device_lost", [True, False])
def test_preempted_in_the_middle_of_a_chunked_prefill_and_resumed(
    groups: list[Group], num_before: int, is_landed: bool, is_device_lost: bool
) -> None:
    """The host ends with the keys of a request that was never preempted, each stored once."""
    prompt = "abcdefgh"
    rig = Rig(groups)
    rig.add("it", prompt)
    rig.admit("it")
    for _ in range(num_before):
        rig.step({"it": rig.size + rig.size // 3})
    num_done = rig.requests["it"].num_computed // rig.size
    if is_landed:
        rig.land()
    rig.preempt("it")
    if is_device_lost:
        rig.forget_device()
    load = rig.admit("it")
    if is_device_lost:
        loaded = rig.names(prompt[:num_done], hit=True) if is_landed else set()
        assert rig.copied(load) == loaded
        for job in list(rig.jobs.values()):
            if job is load:
                rig.end(job)
    else:
        assert load is None
    rig.prefill("it", num_chunks=3)
    rig.finish("it")
    rig.land()
    assert rig.on_host == rig.names(prompt)
    assert rig.stat("stored_blocks") == len(rig.names(prompt))
    assert rig.reload(prompt) == len(prompt)
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
    """One chunk was told of, one was computed, one was granted when the request goes.

    Flushed, it is named once more before: that stores what the second chunk has computed and is
    still held, and nothing of the third. A window's block that was told half full would have to be
    told of again before the grant that frees it: there the first chunk ends with a block.
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
        rig.tell("it")
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
    # Known tokens, and nobody has hashed them.
    request.num_known += rig.size
    assert rig.step({"it": rig.size}) is None
    assert rig.tell("it") is None
    stored = rig.names("ab")
    if path == "go on":
        hashes = rig.hashes(rig.text("abc"))[2:]
        rig.ledger.extend("it", hashes)
        rig.scheduler.extend("it", hashes)
        rig.ledger.cache("it", request.num_computed)
        stored = rig.names("abc")
        told = rig.names("abc", 2) if mode == "eager" else set()
        assert rig.copied(rig.tell("it")) == told
        rig.finish("it")
    else:
        rig.finish("it") if path == "finish" else rig.preempt("it")
    if mode == "lazy":
        rig.store_evictable(rig.num_device)
    rig.land()
    assert rig.on_host == stored
    rig.assert_nothing_is_held()
