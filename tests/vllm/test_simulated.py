"""Random operations on vLLM's scheduler with the connector: no request may read wrong KV."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.halves import FULL, STATE, WINDOW
from tests.vllm.simulated import Simulated, WrongKV, tokens
from tests.vllm.versions import skip_without_all_states
from vllm import version as vllm_version
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from kvstow.vllm.connector import _hashes_sessions_correctly
from kvstow.vllm.loads import Loads

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


TRUNKS = [tokens(150, seed) for seed in range(3)]


class Life:
    """Random operations on an engine."""

    def __init__(self, engine: Simulated, seed: int, *, with_hints: bool = False) -> None:
        self.engine = engine
        self.dice = random.Random(seed)
        self.with_hints = with_hints
        self.names = itertools.count()
        self.asked: dict[str, tuple[list[int], int, str | None]] = {}
        self.sessions: list[str] = []
        self.happened: list[str] = []

    def go(self, num_happenings: int, *without: str) -> None:
        kinds = ["add"] * 6 + ["step"] * 14 + ["copy"] * 8 + ["session", "chunk"] * 3
        kinds += ["abort", "reset"]
        self.live(num_happenings, [kind for kind in kinds if kind not in without])
        for name, (prompt, num_tokens, salt) in self.asked.items():
            right = self.engine.right_answer(prompt, num_tokens, salt)
            assert self.engine.answers[name] == right, name
        self.num_host_tokens = self.engine.ask_for_all()
        self.engine.check_at_rest()

    def live(self, num_happenings: int, kinds: Sequence[str]) -> None:
        """Let as many things of these kinds happen, and then let the engine come to rest."""
        for _ in range(num_happenings):
            kind = self.dice.choice(kinds)
            self.happened.append(kind)
            getattr(self, kind)()
        for name in self.sessions:
            if name in self.engine.requests:
                self.engine.add(name, [], resumable=False)
        self.engine.settle()
        self.engine.check_at_rest()

    def _prompt(self) -> list[int]:
        trunk = self.dice.choice(TRUNKS)[: self.dice.randrange(20, 150)]
        if self.dice.random() < 0.5:
            trunk = trunk + tokens(self.dice.randrange(1, 40), self.dice.randrange(4))
        return trunk

    def add(self) -> None:
        if len(self.engine.requests) > 8:
            return
        name, prompt = f"r{next(self.names)}", self._prompt()
        if self.dice.random() < 0.3:
            # An earlier prompt with its answer becomes a prompt.
            known = [name for name in self.asked if name in self.engine.answers]
            if known:
                earlier = self.dice.choice(known)
                prompt = self.asked[earlier][0] + self.engine.answers[earlier]
        num_tokens = self.dice.choice([1, 2, 5, 20])
        salt = self.dice.choice([None, None, None, "pepper"])
        self.asked[name] = (prompt, num_tokens, salt)
        self.engine.add(
            name,
            prompt,
            max_tokens=num_tokens,
            salt=salt,
            priority=self.dice.randrange(3),
            reads_cache=self.dice.random() > 0.05,
            hints=self._hints() if self.with_hints else {},
        )

    def _hints(self) -> dict[str, object]:
        given = {
            "store": self.dice.random() > 0.2,
            "max_load_tokens": self.dice.choice([0, 16, 50]),
            "priority": self.dice.choice(["low", "normal"]),
        }
        return {name: hint for name, hint in given.items() if self.dice.random() < 0.4}

    def session(self) -> None:
        # Sessions that wait for a chunk hold blocks that vLLM cannot take back.
        if sum(request.resumable for request in self.engine.requests.values()) >= 2:
            return
        name, prompt = f"s{next(self.names)}", self._prompt()
        self.sessions.append(name)
        # The answer often ends a block, so vLLM hashes the token that it drops.
        prompt += tokens((15 - len(prompt)) % 16, self.dice.randrange(50))
        self.engine.add(name, prompt, max_tokens=self.dice.choice([1, 2]), resumable=True)

    def chunk(self) -> None:
        alive = [name for name in self.sessions if name in self.engine.requests]
        if not alive:
            return
        name = self.dice.choice(alive)
        if self.dice.random() < 0.3 or self.engine.requests[name].num_tokens > 250:
            self.sessions.remove(name)
            self.engine.add(name, [], resumable=False)
        else:
            num_tokens = self.dice.choice([16, 32, self.dice.randrange(1, 40)])
            chunk = tokens(num_tokens, self.dice.randrange(50))
            self.engine.add(name, chunk, max_tokens=self.dice.choice([1, 2]), resumable=True)

    def step(self) -> None:
        self.engine.step()

    def copy(self) -> None:
        self.engine.copy(self.dice.choice([0.3, 1.0]), failing=self.dice.choice([0, 0, 0.2]))

    def abort(self) -> None:
        names = [*self.engine.requests, "unknown"]
        name = self.dice.choice(names)
        self.asked.pop(name, None)
        if name in self.sessions:
            self.sessions.remove(name)
        self.engine.abort(name)

    def reset(self) -> None:
        """Reset like `/reset_prefix_cache`, with the host tier or without it."""
        if self.dice.random() < 0.3:  # rarely, because wrong KV on the host must last to be found
            preempts = self.dice.random() < 0.5
            with contextlib.suppress(RuntimeError) if preempts else contextlib.nullcontext():
                # It raises while loads, stores or waiting sessions hold blocks.
                self.engine.scheduler.reset_prefix_cache(
                    reset_running_requests=preempts, reset_connector=self.dice.random() < 0.3
                )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("num_in_flight", [1, 2], ids=["sync", "async"])
def test_requests_read_their_own_kv(
    folder: Path, num_in_flight: int, lazy: bool, seed: int
) -> None:
    is_hybrid = seed % 2 == 0
    engine = Simulated(
        folder,
        {"num_cpu_blocks": 400, "lazy_offload": lazy},
        specs=(FULL, WINDOW) if is_hybrid else (FULL,),
        num_blocks=70 if is_hybrid else 40,
        num_in_flight=num_in_flight,
        seed=seed,
    )
    life = Life(engine, seed)
    life.go(500)
    assert life.num_host_tokens > 500, "too few hits to prove anything"
    engine.close()


class HarshLife(Life):
    """Also makes jobs late, damages host slots, and asks whether vLLM may rest."""

    def __init__(self, engine: Simulated, seed: int) -> None:
        super().__init__(engine, seed)
        self.now_s = 0.0
        engine.half.tier.clock = lambda: self.now_s

    def step(self) -> None:
        if self.dice.random() < 0.1:
            self.now_s += 15.0
        if self.dice.random() < 0.05:
            self.engine.half.may_rest()
        super().step()

    def copy(self) -> None:
        arena = self.engine.worker.arena
        if arena is not None and self.dice.random() < 0.15:
            arena.slots[self.dice.randrange(len(arena.slots)), 7] ^= 1
        super().copy()


@pytest.mark.parametrize("num_in_flight", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_requests_read_their_own_kv_after_loads_that_fail_or_are_late(
    folder: Path, num_groups: int, num_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads report their blocks when they begin."""
    num_reported, local_ids = 0, Loads._local_ids

    def counted(loads: Loads, *args: Any) -> list[list[int]] | None:
        nonlocal num_reported
        ids = local_ids(loads, *args)
        num_reported += ids is not None
        return ids

    monkeypatch.setattr(Loads, "_local_ids", counted)
    engine = Simulated(
        folder,
        {"num_cpu_blocks": 60 * num_groups, "verify": "checksum", "load_timeout_s": 10.0},
        specs=(FULL,) * num_groups,
        num_blocks=40 * num_groups,
        num_in_flight=num_in_flight,
        settings={"scheduling_policy": "priority", "long_prefill_token_threshold": 32},
    )
    life = HarshLife(engine, num_groups)
    life.go(600)
    assert engine.half.offload is not None
    stats = engine.half.offload.stats()
    assert num_reported > 30
    assert min(stats["failed_loads"], stats["late_jobs"], stats["damaged_blocks"]) > 0
    engine.close()


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("num_in_flight", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("mode", ["align", "all"])
def test_requests_read_their_own_states(
    folder: Path, mode: str, num_in_flight: int, lazy: bool
) -> None:
    """Without sessions, which are not stored for models with states."""
    if mode == "all":
        skip_without_all_states()
    engine = Simulated(
        folder,
        {"num_cpu_blocks": 400, "lazy_offload": lazy},
        specs=(FULL, WINDOW, replace(STATE, mamba_cache_mode=mode)),
        num_blocks=90,
        num_in_flight=num_in_flight,
    )
    life = Life(engine, 0)
    life.go(400, "session", "chunk")
    assert life.num_host_tokens > 500, "too few hits to prove anything"
    engine.close()


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize(
    "limits",
    [
        {"store_threshold": 2},
        {"max_store_blocks_in_flight": 3},
        {"store_threshold": 2, "max_store_blocks_in_flight": 1, "offload_prompt_only": True},
        {"num_cpu_blocks": 30, "eviction_policy": "lru"},
        {"num_cpu_blocks": 30, "eviction_policy": "hit-density"},
    ],
    ids="-".join,
)
def test_requests_read_their_own_kv_if_blocks_are_left_out(
    folder: Path, limits: dict[str, Any], lazy: bool
) -> None:
    """Options and hints that limit what is stored leave gaps in the chains on the host."""
    options = {"num_cpu_blocks": 120, "lazy_offload": lazy} | limits
    engine = Simulated(folder, options, specs=(FULL, WINDOW), num_blocks=70, num_in_flight=2)
    life = Life(engine, 1, with_hints=True)
    life.go(400)
    assert life.num_host_tokens > 100, "too few hits to prove anything"
    engine.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_in_flight", [1, 2], ids=["sync", "async"])
def test_requests_with_drafts_read_their_own_kv(
    folder: Path, num_in_flight: int, seed: int
) -> None:
    engine = Simulated(
        folder,
        {"num_cpu_blocks": 400},
        specs=(FULL, WINDOW) if seed % 2 else (FULL,),
        num_blocks=60,
        num_in_flight=num_in_flight,
        drafts=True,
        seed=seed,
    )
    # Without sessions, because vLLM 0.32 itself serves wrong KV to sessions with drafts.
    life = Life(engine, seed)
    life.go(400, "session", "chunk")
    assert life.num_host_tokens > 500, "too few hits to prove anything"
    engine.close()


@pytest.mark.skipif(
    not _hashes_sessions_correctly(
        vllm_version.__version_tuple__[:2], has_drafts=False, has_states=False
    ),
    reason="of this vLLM no session is stored",
)
@pytest.mark.parametrize("num_in_flight", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a_session_stores_nothing_under_the_hash_of_a_dropped_token(
    folder: Path, lazy: bool, num_in_flight: int
) -> None:
    """The first answer ends a block. vLLM drops it, and other tokens take its place."""
    options = {"num_cpu_blocks": 60, "lazy_offload": lazy}
    engine = Simulated(folder, options, num_in_flight=num_in_flight)
    engine.add("session", tokens(63, 1), max_tokens=1, resumable=True)
    engine.settle()
    engine.add("session", tokens(40, 2), max_tokens=1, resumable=True)
    engine.settle()
    engine.add("session", [], resumable=False)
    engine.settle()
    engine.check_at_rest()
    dropped = [*tokens(63, 1), *engine.right_answer(tokens(63, 1), 1, None)]
    assert dropped in [hashed for hashed, _ in engine.hashed.values()]
    # The dropped chain has 48 tokens on the host, and the session has 96.
    assert engine.ask_for_all() == 48 + 96
    engine.close()


def test_sessions_are_not_stored_if_vllm_keeps_hashes_of_dropped_tokens(
    folder: Path,
) -> None:
    for version, right in (((0, 31), ()), ((0, 32), (False,)), ((0, 33), (False, True))):
        for has_drafts in (False, True):
            assert _hashes_sessions_correctly(version, has_drafts=has_drafts, has_states=False) == (
                has_drafts in right
            )
            assert not _hashes_sessions_correctly(version, has_drafts=has_drafts, has_states=True)
    engine = Simulated(folder, {"num_cpu_blocks": 60})
    engine.half.requests.stores_sessions = False
    engine.add("session", tokens(63, 1), max_tokens=1, resumable=True)
    engine.settle()
    engine.add("session", [], resumable=False)
    engine.settle()
    engine.check_at_rest()
    assert engine.ask_for_all() == 0
    engine.close()


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a_damaged_slot_fails_one_load_and_is_stored_again(folder: Path, lazy: bool) -> None:
    options = {"num_cpu_blocks": 60, "lazy_offload": lazy, "verify": "checksum"}
    engine = Simulated(folder, options)
    engine.add("first", tokens(100, 1))
    engine.settle()
    assert engine.scheduler.reset_prefix_cache()
    offload, arena = engine.half.offload, engine.worker.arena
    assert offload is not None and arena is not None
    assert offload.num_resident == 6
    arena.slots[:, 5] ^= 1
    right = engine.right_answer(tokens(100, 1), 4, None)
    # The first load fails. Its request recomputes, and its blocks are stored again.
    for number, (num_failed, num_loaded) in enumerate([(1, 0), (1, 6), (1, 12)]):
        engine.add(f"later-{number}", tokens(100, 1))
        engine.settle()
        assert engine.answers[f"later-{number}"] == right
        stats = offload.stats()
        assert (stats["failed_loads"], stats["loaded_blocks"]) == (num_failed, num_loaded)
        assert engine.scheduler.reset_prefix_cache()
        assert offload.num_resident == 6
    engine.check_at_rest()
    engine.close()


def test_a_load_that_fails_for_other_reasons_drops_no_slot(folder: Path) -> None:
    engine = Simulated(folder, {"num_cpu_blocks": 60, "verify": "checksum"})
    engine.add("first", tokens(100, 1))
    engine.settle()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.half.offload is not None
    num_stored = engine.half.offload.stats()["stored_blocks"]
    engine.add("later", tokens(100, 1))
    engine.step()
    engine.copy(failing=1.0)
    engine.settle()
    stats = engine.half.offload.stats()
    assert (stats["failed_loads"], stats["stored_blocks"]) == (1, num_stored)
    assert engine.answers["later"] == engine.right_answer(tokens(100, 1), 4, None)
    engine.close()


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "unguarded"])
def test_blocks_that_a_preempted_step_never_wrote_lose_their_keys(
    folder: Path, is_guarded: bool, lazy: bool
) -> None:
    """vLLM grants a chunk's blocks to a request, and preempts it for another in the same step.

    With overlapping steps this cannot happen: vLLM preempts no request whose last step runs.
    """
    engine = Simulated(
        folder,
        {"num_cpu_blocks": 60, "lazy_offload": lazy},
        num_blocks=16,
        settings={"scheduling_policy": "priority", "long_prefill_token_threshold": 32},
    )
    if not is_guarded:
        engine.half.steps.evict_unwritten = lambda *_: None  # type: ignore[method-assign]
    engine.add("patient", tokens(200, 1), priority=1)
    while engine.requests["patient"].num_computed_tokens < 64:
        engine.step()
    engine.add("urgent", tokens(47, 2), max_tokens=6, priority=0)
    if is_guarded:
        engine.settle()
        assert engine.answers["patient"] == engine.right_answer(tokens(200, 1), 4, None)
        engine.check_at_rest()
        engine.ask_for_all()
    else:
        with pytest.raises(WrongKV, match="patient"):
            engine.settle()
    engine.close()


@pytest.mark.parametrize("num_in_flight", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("is_asleep", [False, True], ids=["ended", "asleep"])
def test_the_last_chunk_before_an_end_or_a_sleep_is_stored(
    folder: Path, is_asleep: bool, num_in_flight: int
) -> None:
    """The chunk before it is under way when vLLM schedules it, and no step follows.

    It is longer than the window, and when a request ends vLLM has dropped the block that a hit
    needs first.
    """
    options = {"num_cpu_blocks": 60, "preserve_on_sleep": True}
    specs = (FULL, WINDOW)
    engine = Simulated(folder, options, specs=specs, num_blocks=70, num_in_flight=num_in_flight)
    prompt = tokens(191, 1)
    engine.add("first", prompt, max_tokens=4 if is_asleep else 1)
    if is_asleep:
        while not engine.requests or engine.requests["first"].num_computed_tokens < 191:
            engine.step()
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.settle()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    if not is_asleep:
        engine.add("again", prompt, max_tokens=1)
    engine.settle()
    assert engine.half.offload is not None
    assert engine.half.offload.stats()["hit_tokens"] == 176
    for name, answer in engine.answers.items():
        assert answer == engine.right_answer(prompt, len(answer), None), name
    engine.check_at_rest()
    engine.close()


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a_request_that_waits_for_stores_loads_its_hit(folder: Path, lazy: bool) -> None:
    """No other request runs, and the last one's stores hold most of the device."""
    engine = Simulated(folder, {"num_cpu_blocks": 400, "lazy_offload": lazy}, num_blocks=42)
    engine.half.tier.gathered_tokens = 0
    prompt = tokens(320, 1)
    engine.add("first", prompt, max_tokens=1)
    engine.settle()
    engine.add("other", tokens(470, 3), max_tokens=1)  # lazy stores come with the next requests
    engine.settle()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("large", tokens(470, 2), max_tokens=1)
    while "large" in engine.requests:
        engine.step()
    engine.add("again", prompt, max_tokens=1)
    assert engine.half.offload is not None
    before = engine.half.offload.stats()["hit_tokens"]
    for _ in range(3):
        engine.step()
    assert engine.requests["again"].num_computed_tokens == 0, "vLLM lacks the blocks"
    engine.settle()
    assert engine.half.offload.stats()["hit_tokens"] - before == 304
    assert engine.answers["again"] == engine.right_answer(prompt, 1, None)
    engine.check_at_rest()
    engine.close()


def test_hashes_that_vllm_has_replaced_are_reported_again(folder: Path) -> None:
    """The tier must follow if vLLM changes the tokens of a request for any reason."""
    engine = Simulated(folder, {"num_cpu_blocks": 60})
    engine.add("stored", tokens(160, 2), max_tokens=1)
    engine.settle()
    engine.add("old", tokens(80, 1), max_tokens=40)
    while not engine.requests or engine.requests["old"].num_computed_tokens < 80:
        engine.step()
    half, request = engine.half, engine.requests["old"]
    tracked = half.requests.tracked["old"]
    engine.step()
    assert tracked.num_hashes == 5
    other = Request(
        request_id="other",
        prompt_token_ids=tokens(160, 2),
        sampling_params=request.sampling_params,
        pooling_params=None,
        block_hasher=engine._hasher,
    )
    request.block_hashes[:] = other.block_hashes
    assert half.offload is not None
    half.offload.extend("old", tracked.new_hashes(half.offload, 160))
    half.offload.check()
    assert tracked.num_hashes == 10 and tracked.last_hash == other.block_hashes[-1]
    assert half.offload.lookup("old", 0, 240) == 160, "the old hashes are dropped"
    engine.close()
