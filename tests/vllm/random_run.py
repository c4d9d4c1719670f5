"""Random operations on vLLM's engine: one seed makes one run.

Requests and streaming sessions share prefixes, in a pool that is too small for them. The run aborts
them, lets vLLM preempt them, puts the engine to sleep and wakes it, resets it, and pauses and
resumes it at once. Copies are late, fail, or find damaged memory. A late copy really overwrites
whatever is in its blocks by then. Half of the runs have a disk below a small host, whose jobs are
late, fail, or find damaged slots.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.vllm.engine import (
    BLOCK_SIZE,
    TOLERANCE,
    Answer,
    Engine,
    answer,
    greedy,
    poison,
    prompts,
)
from tests.vllm.movers import Unsteady
from tests.vllm.reference import Reference
from tests.vllm.unsteady_disk import damage_file
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvstow.vllm.below.disk import DiskTier

NUM_TOKENS = 24
MAX_REQUESTS = 6
MAX_SESSIONS = 3
# The limit of a sequence, so that a run takes seconds.
MAX_LENGTH = 400
# What requests ask of the host tier.
HINTS: list[dict[str, Any]] = [
    {"store": False},
    {"max_load_tokens": 0},
    {"max_load_tokens": 70},
    {"priority": "low"},
    {"store": False, "max_load_tokens": 70},
]
_numbers = itertools.count()


def _prompts() -> list[list[int]]:
    """Return four trunks, each continued in two ways and cut off in two more."""
    trunks, tails = prompts(4, 260, seed=11), prompts(8, 90, seed=12)
    long = [trunks[at // 2][: 140 + 60 * (at % 3)] + tail for at, tail in enumerate(tails)]
    return long + [trunk[:length] for trunk in trunks for length in (96, 193)]


PROMPTS = _prompts()


class Different(AssertionError):
    """An answer differs from the reference."""


@dataclass
class Asked:
    """A request, or the chunk of a session that the engine is answering."""

    prompt: list[int]
    num_tokens: int
    expected: Future[Answer]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Session:
    """A resumable request, which gets its prompt in chunks and answers each."""

    chunk: Asked | None
    waiting: deque[tuple[list[int], int]] = field(default_factory=deque)
    # The tokens that vLLM keeps of answered chunks.
    kept: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    is_closed: bool = False

    def length(self) -> int:
        """Return the tokens that vLLM keeps of the session when the next chunk comes."""
        chunk = self.chunk
        length = len(self.kept) if chunk is None else len(chunk.prompt) + chunk.num_tokens - 1
        return length + sum(len(tokens) + num - 1 for tokens, num in self.waiting)


class Run:
    """Random operations on one engine."""

    def __init__(
        self,
        engine: Engine,
        reference: Reference,
        seed: int,
        embeddings: torch.Tensor | None = None,
    ) -> None:
        """With `embeddings`, one for each token, prompts are embeddings, too."""
        self.engine = engine
        self.embeddings = embeddings
        self.llm = engine.llm.llm_engine
        self.reference = reference
        self.seed = seed
        self.dice = random.Random(f"{seed}")
        self.priorities = self.dice.choice([[0], [0, 0, 1, 5]])
        # By vLLM's id of the request.
        self.asked: dict[str, Asked] = {}
        self.sessions: dict[str, Session] = {}
        # Prompts with their answers, which later prompts continue.
        self.heard: deque[list[int]] = deque(maxlen=12)
        # Sequences of sessions whose last token vLLM dropped before it was computed.
        self.dropped: deque[list[int]] = deque(maxlen=4)
        self.num_steps = 0
        self.counts: Counter[str] = Counter()
        self._num_outputs: dict[str, int] = {}

    # Without sessions where vLLM drafts: it may count a draft as computed that it accepted beyond
    # the last token of a chunk. Without sessions where a model has recurrent states: if a session
    # loses its blocks between chunks, vLLM's worker copies a state from where it was before.
    @property
    def kinds(self) -> dict[str, float]:
        kinds: dict[str, float] = {
            "add": 6,
            "step": 9,
            "abort": 1,
            "sleep": 1,
            "reset": 1,
            "again": 1,
        }
        kinds |= {"shake": 2, "damage": 1}
        has_states = self.engine.half.tier.model.has_states
        if not self.engine.core.scheduler.num_spec_tokens and not has_states:
            kinds |= {"begin": 2, "chunk": 5, "close": 0.5, "ask": 4}
        return kinds

    def operations(self, num_operations: int) -> list[tuple[str, int]]:
        """Return the operations of this seed, each with the number that seeds its own dice."""
        kinds = self.kinds
        chosen = self.dice.choices(list(kinds), list(kinds.values()), k=num_operations)
        return [(kind, at) for at, kind in enumerate(chosen)]

    def perform(self, kind: str, at: int) -> None:
        self.dice = Unsteady.dice = random.Random(f"{self.seed}/{at}")
        self.counts[kind] += 1
        getattr(self, kind)()

    def end(self) -> None:
        """Finish every request, and check that nothing is left."""
        self.dice = Unsteady.dice = random.Random(f"{self.seed}/end")
        Unsteady.slow = Unsteady.failing = 0.0
        half = self.engine.half
        for name in list(self.sessions):
            self._close(name)
        self._answer_all()
        # Late copies end in the steps of other requests.
        for _ in range(200):
            stats = half.stats()
            of_disk = stats.get("demoting_blocks", 0) + stats.get("promoting_blocks", 0)
            if not (half.transfers.in_flight or of_disk):
                break
            self.add()
            self._answer_all()
        self.engine.check_idle()
        scheduler = self.engine.core.scheduler
        assert not scheduler.requests and not scheduler.deferred_frees
        assert not scheduler.finished_recving_kv_req_ids
        assert not scheduler.failed_recving_kv_req_ids

    def _answer_all(self) -> None:
        for _ in range(3_000):
            if not self.asked and not self.sessions:
                break
            self.step_once()
        assert not self.asked and not self.sessions, f"hung: {self._describe_live()}"
        self.engine.settle()

    def _describe_live(self) -> str:
        requests = self.engine.core.scheduler.requests
        return ", ".join(
            f"{name}: {found.status.name}, {found.num_computed_tokens} of {found.num_tokens} tokens"
            if (found := requests.get(name)) is not None
            else f"{name}: vLLM has ended it, {self.sessions.get(name, self.asked.get(name))}"
            for name in [*self.asked, *self.sessions]
        )

    # -- requests -------------------------------------------------------------------------------

    def _ask(self, prompt: list[int], num_tokens: int) -> Asked:
        return Asked(prompt, num_tokens, self.reference.ask(prompt))

    def _continued(self) -> list[int]:
        """Return a prompt that may begin with an earlier sequence."""
        way = self.dice.random()
        tail = self.dice.choice(PROMPTS)[: self.dice.choice([1, 7, BLOCK_SIZE, 45])]
        if way < 0.4 and self.heard:
            prompt = self.dice.choice(self.heard)
            return (prompt[: self.dice.randrange(len(prompt))] + tail)[:MAX_LENGTH]
        return self.dice.choice(PROMPTS)

    def add(self) -> None:
        if len(self.asked) >= MAX_REQUESTS:
            return
        prompt, num_tokens = self._continued(), self.dice.choice([1, 4, NUM_TOKENS])
        self._add(prompt, num_tokens)

    def ask(self) -> None:
        """Ask for a sequence whose last token a session dropped: its block must not be served."""
        if self.dropped:
            prompt = self.dice.choice([*self.dropped, self.dropped[-1]])
            self._add(prompt + self.dice.choice(PROMPTS)[:20], 4)

    def _add(self, prompt: list[int], num_tokens: int) -> None:
        settings: list[dict[str, Any]] = [{}] * 18
        settings += [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}]
        more = dict(self.dice.choice(settings))
        salt = self.dice.choice([{}] * 5 + [{"cache_salt": "one"}, {"cache_salt": "two"}])
        if self.dice.random() < 0.3:
            hint = self.dice.choice(HINTS)
            more["extra_args"] = {"kv_transfer_params": {"kvstow": hint}}
        name = self.llm.add_request(
            f"{self.seed}-{next(_numbers)}",
            {**self._given(prompt), **salt},
            greedy(num_tokens, **more),
            priority=self.dice.choice(self.priorities),
        )
        self.asked[name] = self._ask(prompt, num_tokens)

    def _given(self, prompt: list[int]) -> dict[str, Any]:
        """Return a prompt as tokens, as their embeddings, or as both by turns."""
        kind = self.dice.choice(["tokens", "tokens", "embeddings", "both"])
        if self.embeddings is None or kind == "tokens":
            return {"prompt_token_ids": prompt}
        self.counts[kind] += 1
        embeddings = self.embeddings[torch.tensor(prompt)]
        if kind == "embeddings":
            return {"prompt_embeds": embeddings}
        is_token = [at % 3 == 0 for at in range(len(prompt))]
        embeddings[::3] = 0.0  # as vLLM's server gives them
        return {
            "prompt_embeds": embeddings,
            "prompt_token_ids": [
                token if is_it else 7 for token, is_it in zip(prompt, is_token, strict=True)
            ],
            "prompt_is_token_ids": is_token,
        }

    def begin(self) -> None:
        """Begin a session with its first chunk."""
        if len(self.sessions) >= MAX_SESSIONS:
            return
        prompt, num_tokens = self._chunk(0)
        name = f"{self.seed}-session-{next(_numbers)}"
        self._send(name, prompt, num_tokens)
        self.sessions[name] = Session(self._ask(prompt, num_tokens))

    def chunk(self) -> None:
        """Send another chunk, often before the last chunk is answered."""
        open_names = [name for name, each in self.sessions.items() if not each.is_closed]
        if not open_names:
            return self.begin()
        name = self.dice.choice(open_names)
        session = self.sessions[name]
        length = session.length()
        chunk, num_tokens = self._chunk(length)
        if length + len(chunk) > MAX_LENGTH:
            return self._close(name)
        session.waiting.append((chunk, num_tokens))
        self._send(name, chunk, num_tokens)
        if session.chunk is None:
            self._next_chunk(session)
        return None

    def _chunk(self, length: int) -> tuple[list[int], int]:
        """Return tokens and the length of their answer, which often ends where a block ends."""
        num_tokens = self.dice.choice([1, 1, 1, 1, 2, 9])
        tokens = self._continued()
        if length:
            start = self.dice.randrange(60)
            tokens = tokens[start : start + self.dice.choice([1, 20, 60])] or tokens[:20]
        excess = (length + len(tokens) + num_tokens) % BLOCK_SIZE
        if self.dice.random() < 0.9 and len(tokens) > excess:
            tokens = tokens[: len(tokens) - excess]
        return tokens, num_tokens

    def close(self) -> None:
        if self.sessions:
            self._close(self.dice.choice(list(self.sessions)))

    def _close(self, name: str) -> None:
        session = self.sessions[name]
        if not session.is_closed:
            session.is_closed = True
            self._send(name, [3], 1, resumable=False)
            if session.chunk is None:
                del self.sessions[name]

    def _send(
        self, name: str, tokens: list[int], num_tokens: int, *, resumable: bool = True
    ) -> None:
        """Do what `AsyncLLM.generate` does for a streamed input."""
        request = self.llm.input_processor.process_inputs(
            name,
            {"prompt_token_ids": list(tokens)},
            greedy(num_tokens, output_kind=RequestOutputKind.DELTA),
            supported_tasks=("generate",),
            resumable=resumable,
            priority=self.dice.choice(self.priorities),
        )
        request.external_req_id = name
        self.llm.output_processor.add_request(request, None, None, 0)
        # With its own lists, as in two processes, because both sides append to the prompt.
        self.llm.engine_core.add_request(deepcopy(request))

    def _next_chunk(self, session: Session) -> None:
        session.chunk = None
        if session.waiting:
            tokens, num_tokens = session.waiting.popleft()
            session.chunk = self._ask(session.kept + tokens, num_tokens)

    # -- steps ----------------------------------------------------------------------------------

    def step(self) -> None:
        for _ in range(self.dice.choice([1, 1, 2, 5, 12])):
            self.step_once()
            has_landed = bool(self.engine.core.scheduler.finished_recving_kv_req_ids)
            if has_landed and self.dice.random() < 0.15:
                # A load that has landed waits for at most one step, so random operations seldom
                # meet it. Most requests must go on, because only the answer shows the loaded KV.
                self.dice.choice([self.step_once, self.abort, self.again, self.sleep])()

    def step_once(self) -> None:
        self.num_steps += 1
        for output in self.llm.step():
            if output.request_id in self.sessions:
                self._answered(output.request_id, output.outputs[0])
            elif output.finished:
                prefix = f"{output.request_id}-"
                [name] = [name for name in self.asked if name.startswith(prefix)]
                asked, found = self.asked.pop(name), answer(output)
                asked.tokens, asked.logprobs = list(found.tokens), list(found.logprobs)
                self.counts["cached"] += found.num_cached
                self._compare(name, asked)
        self.check()

    def _answered(self, name: str, part: Any) -> None:
        """Take a part of the answer to a session's chunk."""
        session = self.sessions[name]
        asked = session.chunk
        assert asked is not None, f"{name} got an answer without a chunk"
        asked.tokens += part.token_ids
        asked.logprobs += [
            step[token].logprob for step, token in zip(part.logprobs, part.token_ids, strict=True)
        ]
        if len(asked.tokens) >= asked.num_tokens:
            self._compare(name, asked)
            self.counts["chunks"] += 1
            # vLLM drops the last token, which it has not computed.
            session.kept = asked.prompt + asked.tokens[:-1]
            if session.answered and len(session.answered) % BLOCK_SIZE == 0:
                self.dropped.append(session.answered)
            session.answered = asked.prompt + asked.tokens
            self._next_chunk(session)
            if session.chunk is None and session.is_closed:
                del self.sessions[name]

    def _compare(self, name: str, asked: Asked) -> None:
        expected = asked.expected.result()
        tokens = list(expected.tokens[: asked.num_tokens])
        if asked.tokens != tokens:
            raise Different(f"{name}: {asked.tokens} after {asked.prompt}, not {tokens}")
        pairs = zip(asked.logprobs, expected.logprobs, strict=False)
        worst = max(abs(a - b) for a, b in pairs)
        if worst > TOLERANCE:
            raise Different(f"{name}: differs by {worst} after {asked.prompt}")
        self.counts["answers"] += 1
        self.heard.append(asked.prompt + asked.tokens)

    def check(self) -> None:
        half, scheduler = self.engine.half, self.engine.core.scheduler
        assert half.offload is not None and not half.tier.is_off
        half.offload.check()
        # The blocks of a load are held by its request, or by kvstow if the load is late.
        for transfer in half.transfers.in_flight.values():
            if transfer.direction != "load":
                continue
            assert all(block.ref_cnt > 0 for block in transfer.blocks)
            if not transfer.held:
                tables = scheduler.kv_cache_manager.get_blocks(transfer.request_id).blocks
                own = {block.block_id for table in tables for block in table}
                assert {block.block_id for block in transfer.blocks} <= own
        for name, request in scheduler.requests.items():
            session = self.sessions.get(name)
            if session is not None and session.chunk is not None:
                held = request._all_token_ids[: len(session.chunk.prompt)]
                assert held == session.chunk.prompt, (
                    f"{name} does not have the tokens of its session"
                )
            grown = request.num_output_tokens - self._num_outputs.get(name, 0)
            self.counts["accepted drafts"] += max(grown - 1, 0)
            self._num_outputs[name] = request.num_output_tokens
            self.counts["preempted"] = max(self.counts["preempted"], request.num_preemptions)

    # -- operations -----------------------------------------------------------------------------

    def abort(self) -> None:
        scheduler = self.engine.core.scheduler
        names = [*self.asked, *self.sessions]
        loading = [
            name
            for name in names
            if name in scheduler.requests
            and scheduler.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS
        ]
        self.dice.shuffle(names)
        gone = (loading or names)[:1] if self.dice.random() < 0.6 else names[:3]
        self.llm.abort_request(gone, internal=True)
        for name in gone:
            self.asked.pop(name, None)
            self.sessions.pop(name, None)

    def again(self) -> None:
        """Pause, and resume before the pause is complete."""
        core = self.engine.core
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(self.dice.choice([0, 0, 1, 2, 5])):
            core.scheduler.has_requests()
            self.step_once()
        core.scheduler.has_requests()
        if self.dice.random() < 0.5:
            self.abort()
        core.resume_scheduler()

    def sleep(self) -> None:
        core, half = self.engine.core, self.engine.half
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for num_steps in range(3_000):
            if not self.engine.has_work():
                break
            self.step_once()
            if num_steps == 2 and self.dice.random() < 0.2:
                self.abort()
        else:
            raise AssertionError("the engine does not come to rest")
        # vLLM refuses to sleep while a late copy or a session between chunks holds blocks.
        is_held = any(transfer.held for transfer in half.transfers.in_flight.values()) or any(
            request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
            for request in core.scheduler.requests.values()
        )
        try:
            core.pause_scheduler("keep", clear_cache=True)
        except RuntimeError as error:
            assert is_held and "Failed to reset KV cache" in str(error)
            self.counts["refused"] += 1
        else:
            assert not is_held
            poison(self.engine.worker)
            self.counts["asleep"] += 1
        for _ in range(self.dice.choice([0, 0, 1, 3])):
            self.dice.choice([self.add, self.abort, self.step_once])()
        core.resume_scheduler()

    def reset(self) -> None:
        running, connector = self.dice.random() < 0.5, self.dice.random() < 0.5
        try:
            self.llm.reset_prefix_cache(running, connector)
        except RuntimeError as error:
            assert "Failed to reset KV cache" in str(error)

    def shake(self) -> None:
        Unsteady.slow = self.dice.choice([0.0, 0.5, 1.0])
        Unsteady.failing = self.dice.choice([0.0, 0.0, 0.15])
        half = self.engine.half
        half.tier.options = replace(half.tier.options, load_timeout_s=self.dice.choice([2.5, 1e4]))
        if half.tier.below is not None:
            half.tier.below.options = replace(
                half.tier.options, promote_timeout_s=self.dice.choice([3, 50])
            )

    def damage(self) -> None:
        """Flip bits in some host blocks."""
        arena = self.engine.worker.arena
        assert arena is not None
        for slot in self.dice.sample(range(arena.num_slots), arena.num_slots // 10):
            arena.slots[slot, self.dice.randrange(arena.slots.shape[1])] ^= 0x10
        disk = self.engine.half.tier.below
        if isinstance(disk, DiskTier):
            damage_file(self.engine, disk.num_slots)

    def rot(self) -> None:
        """Flip a bit in each slot of the file: the tests of the tests only."""
        disk = self.engine.half.tier.below
        assert isinstance(disk, DiskTier)
        damage_file(self.engine, disk.num_slots, 1.0)


def describe(operations: Sequence[tuple[str, int]]) -> str:
    return " ".join(f"{kind}:{at}" for kind, at in operations)
