"""Check a vLLM server that offloads its KV cache: five cases over HTTP, against any address.

    python examples/check_server.py http://localhost:8000 --events /var/log/kvstow.jsonl

    TC1  one prompt that is computed in chunks
    TC2  ten of them at once
    TC3  a hundred requests that exceed the device's KV cache: asked again, they come from the host
    TC4  the events file: stores were committed, every transfer that began has ended exactly once
    TC5  three hundred requests at once, with preemptions: every answer is complete and is the
         one that the server gives when it has nothing else to do

Prompts are random token ids, new ones in each run, so nothing of them is cached before. Answers
are taken at temperature 0 and compared up to the first position whose two best log-probabilities
are nearly equal: from there on two right answers may differ. Nobody else should use the server
meanwhile. It needs aiohttp, which is installed wherever vLLM is.

The exit status is 0 if every case passed, 1 if one failed, 2 if the server cannot be asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

Prompt = list[int]

# Ids that every vocabulary has and that are seldom special.
TOKENS = range(10, 1000)
# What a server at rest shows as 0; gauges that it does not have count as 0.
AT_REST = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "kvstow_transfers_in_flight",
    "kvstow_blocks_in_quarantine",
)


class Failure(Exception):
    """Why a case failed."""


@dataclass(frozen=True)
class Answer:
    """What the server said.

    Attributes:
        tokens: as `token_id:N`.
        logprobs: of these tokens.
        leads: by how much the best log-probability of each position exceeds the second best.
    """

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    leads: tuple[float, ...]


class Server:
    """A vLLM server at an address."""

    def __init__(self, session: aiohttp.ClientSession, asked: argparse.Namespace) -> None:
        self._session = session
        self._asked = asked
        self._choose = random.Random(asked.seed)
        self.model = ""
        self.max_model_len = 0
        self.pool_tokens = 0
        self.prompt_tokens = 0

    async def greet(self) -> None:
        """Ask for the model's name and for sizes."""
        asked = self._asked
        (model,) = json.loads(await self._get("/v1/models"))["data"][:1]
        self.model, self.max_model_len = model["id"], model["max_model_len"]
        self.pool_tokens = _pool_tokens(await self._get("/metrics"))
        room = self.max_model_len - asked.answer_tokens
        self.prompt_tokens = min(asked.prompt_tokens or 5 * asked.max_num_batched_tokens // 2, room)

    def prompts(self, num_prompts: int) -> list[Prompt]:
        """New prompts, each computed in several chunks."""
        if self.prompt_tokens <= self._asked.max_num_batched_tokens:
            raise Failure(
                f"a prompt of {self.prompt_tokens} tokens is computed in one chunk of "
                f"{self._asked.max_num_batched_tokens}: start the server with a smaller "
                "--max-num-batched-tokens, and say so here"
            )
        return [self._choose.choices(TOKENS, k=self.prompt_tokens) for _ in range(num_prompts)]

    async def answers(self, prompts: Sequence[Prompt], at_once: int) -> list[Answer]:
        """Ask for all of them, so many at a time.

        Raises:
            Failure: some got no answer, or one that is not whole.
        """
        gate = asyncio.Semaphore(at_once)

        async def answer(prompt: Prompt) -> Answer | str:
            async with gate:
                try:
                    return await self._ask(prompt)
                except Failure as why:
                    return str(why)
                except TimeoutError:
                    return f"no answer within {self._asked.timeout:g} s"
                except aiohttp.ClientError as error:
                    return f"{type(error).__name__}: {error}"

        got = await asyncio.gather(*map(answer, prompts))
        wrong = [answer for answer in got if isinstance(answer, str)]
        if wrong:
            raise Failure(f"{len(wrong)} of {len(got)} requests failed, the first: {wrong[0]}")
        return [answer for answer in got if isinstance(answer, Answer)]

    async def counters(self) -> Counters:
        """The numbers at /metrics, summed up over engines, as `NAME` or `NAME DIRECTION`."""
        values = Counters()
        for line in (await self._get("/metrics")).splitlines():
            if not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                if direction := re.search(r'[{,]direction="(\w+)"', line):
                    name = f"{name} {direction[1]}"
                values[name] = values[name] + float(line.rpartition(" ")[2])
        return values

    async def rest(self) -> None:
        """Wait until nothing runs, nothing is copied and no block is held.

        Raises:
            Failure: that does not come to pass: something hangs, or was leaked.
        """
        end = time.monotonic() + self._asked.rest
        while True:
            counters = await self.counters()
            busy = [f"{name} is {counters[name]:g}" for name in AT_REST if counters[name]]
            if not busy:
                break
            if time.monotonic() > end:
                raise Failure(f"the server does not come to rest: {', '.join(busy)}")
            await asyncio.sleep(0.2)
        await self._get("/health")

    async def _ask(self, prompt: Prompt) -> Answer:
        num_tokens = self._asked.answer_tokens
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
        }
        async with self._session.post(f"{self._asked.address}/v1/completions", json=body) as reply:
            if not reply.ok:
                raise Failure(f"HTTP {reply.status}: {(await reply.text())[:300]}")
            (choice,) = (await reply.json())["choices"]
        said = choice["logprobs"]
        best = [sorted(top.values(), reverse=True) for top in said["top_logprobs"]]
        answer = Answer(
            tuple(said["tokens"]),
            tuple(said["token_logprobs"]),
            tuple(first - second for first, second, *_ in best),
        )
        if choice["finish_reason"] != "length" or len(answer.tokens) != num_tokens:
            raise Failure(
                f"an answer ends after {len(answer.tokens)} of {num_tokens} tokens "
                f"({choice['finish_reason']})"
            )
        return answer

    async def _get(self, path: str) -> str:
        async with self._session.get(f"{self._asked.address}{path}") as reply:
            reply.raise_for_status()
            return await reply.text()


class Counters(dict[str, float]):
    """Metrics by name; what the server does not have is 0."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def since(self, before: Counters, name: str) -> int:
        """By how much one has grown."""
        return round(self[name] - before[name])


def _pool_tokens(metrics: str) -> int:
    """Tokens that the device's KV cache has room for, of all engines."""
    total = 0
    for labels in re.findall(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE):
        config = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        size = config.get("kv_cache_size_tokens", "")
        # Without it, as if one group had all the blocks: at most too large.
        blocks = int(config["num_gpu_blocks"]) * int(config["block_size"])
        total += int(size) if size.isdigit() else blocks
    return total


@dataclass(frozen=True)
class Comparison:
    """How answers are compared."""

    tie: float
    tolerance: float

    def __call__(self, references: Sequence[Answer], answers: Sequence[Answer]) -> str:
        """Compare answers with those that were expected, and say how much of them.

        Raises:
            Failure: some differ, or there was nothing that could be compared.
        """
        num_compared, wrong = 0, []
        for number, (reference, answer) in enumerate(zip(references, answers, strict=True)):
            for at, (lead, expected, got) in enumerate(
                zip(reference.leads, reference.tokens, answer.tokens, strict=True)
            ):
                if lead <= self.tie:
                    break  # from here on two right answers may differ
                num_compared += 1
                off = abs(reference.logprobs[at] - answer.logprobs[at])
                # Not the negation: a log-probability that is no number is wrong, too.
                if expected == got and off <= self.tolerance:
                    continue
                wrong.append(
                    f"answer {number} has {got} at position {at}, where {expected} was expected; "
                    f"log-probabilities {off:.3g} apart, the expected token leads by {lead:.3g}"
                )
                break
        num_tokens = sum(len(reference.tokens) for reference in references)
        if wrong:
            raise Failure(f"{len(wrong)} of {len(answers)} answers are garbled: {wrong[0]}")
        if num_compared == 0:
            raise Failure("no answer could be compared: every first position is a tie")
        return f"{num_compared:,} of {num_tokens:,} tokens compared"


async def one_chunked_prompt(server: Server, asked: argparse.Namespace) -> str:
    """TC1."""
    prompts = server.prompts(1)
    first = await server.answers(prompts, 1)
    compared = asked.compare(first, await server.answers(prompts, 1))
    return f"{server.prompt_tokens:,} tokens, asked twice; {compared}"


async def concurrent_chunked_prompts(server: Server, asked: argparse.Namespace) -> str:
    """TC2."""
    prompts = server.prompts(asked.tc2)
    together = await server.answers(prompts, len(prompts))
    compared = asked.compare(await server.answers(prompts, 1), together)
    return f"{len(prompts)} of {server.prompt_tokens:,} tokens, then one by one; {compared}"


async def more_than_the_pool(server: Server, asked: argparse.Namespace) -> str:
    """TC3."""
    prompts = server.prompts(asked.tc3)
    num_tokens = len(prompts) * server.prompt_tokens
    if num_tokens <= server.pool_tokens:
        raise Failure(
            f"{len(prompts)} prompts are {num_tokens:,} tokens, and the KV cache holds "
            f"{server.pool_tokens:,}: raise --prompt-tokens or --tc3, or start the server with "
            "a smaller --num-gpu-blocks-override"
        )
    before = await server.counters()
    first = await server.answers(prompts, asked.tc2)
    await server.rest()
    between = await server.counters()
    again = await server.answers(prompts, asked.tc2)
    await server.rest()
    after = await server.counters()
    compared = asked.compare(first, again)
    hits = after.since(between, "vllm:external_prefix_cache_hits_total")
    stored = between.since(before, "kvstow_transfer_blocks_total store")
    loaded = after.since(between, "kvstow_transfer_blocks_total load")
    if not hits:
        raise Failure(
            "asked again, no token came from the host: is there a connector, and is the host tier "
            f"larger than {num_tokens:,} tokens?"
        )
    if after["kvstow_capacity_blocks"] and not (stored and loaded):
        raise Failure(f"{stored} blocks stored, {loaded} loaded, yet {hits:,} tokens hit")
    return (
        f"{len(prompts)} of {server.prompt_tokens:,} tokens, {stored:,} blocks stored; again: "
        f"{hits / num_tokens:.0%} from the host, {loaded:,} blocks loaded; {compared}"
    )


async def events_file(server: Server, asked: argparse.Namespace) -> str:
    """TC4."""
    await server.answers(server.prompts(asked.tc2), asked.tc2)
    await server.rest()
    return check_events(asked.events)


def check_events(path: Path) -> str:
    """Check a file that the server has begun, with the server at rest.

    Raises:
        Failure: it lacks something, or has it twice.
    """
    under_way: dict[int, str] = {}
    ended: set[int] = set()
    num_committed = num_failed = 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        event = json.loads(line)
        kind, job = event["event"], event.get("job_id")
        if kind == "TransferInitiated":
            if job in under_way or job in ended:
                raise Failure(f"{path}:{number}: transfer {job} is initiated twice")
            under_way[job] = event["direction"]
        elif kind == "CacheStoreCommitted":
            if under_way.get(job) != "store":
                raise Failure(f"{path}:{number}: {job} is committed, which is no store under way")
            num_committed += event["num_blocks"]
        elif kind == "TransferCompleted":
            if under_way.pop(job, None) != event["direction"]:
                again = "again" if job in ended else "and was not initiated"
                raise Failure(f"{path}:{number}: transfer {job} is completed {again}")
            ended.add(job)
            num_failed += not event["ok"]
    if under_way:
        raise Failure(f"{path}: {len(under_way)} transfers have no end: {sorted(under_way)[:10]}")
    if not num_committed:
        raise Failure(f"{path}: no store was committed")
    return (
        f"{len(ended):,} transfers, each completed once, {num_failed:,} of them failed; "
        f"{num_committed:,} blocks committed"
    )


async def load_with_preemptions(server: Server, asked: argparse.Namespace) -> str:
    """TC5."""
    prompts = server.prompts(asked.tc5)
    # Half of the prompts are known to the server when the load begins: those are loaded under
    # load, and the others computed.
    references = await server.answers(prompts[::2], 1)
    before = await server.counters()
    begun = time.monotonic()
    answers = await server.answers(prompts, len(prompts))
    seconds = time.monotonic() - begun
    await server.rest()
    after = await server.counters()
    preempted = after.since(before, "vllm:num_preemptions_total")
    if not preempted:
        raise Failure(
            "no request was preempted, so this shows nothing: raise --tc5 or --answer-tokens, or "
            "start the server with a smaller --num-gpu-blocks-override"
        )
    references += await server.answers(prompts[1::2], 1)
    compared = asked.compare(references, answers[::2] + answers[1::2])
    hits = after.since(before, "vllm:external_prefix_cache_hits_total")
    return (
        f"{len(prompts)} at once in {seconds:.1f} s, {preempted:,} preemptions, {hits:,} tokens "
        f"from the host; {compared}"
    )


CASES: dict[str, Callable[[Server, argparse.Namespace], Awaitable[str]]] = {
    "TC1": one_chunked_prompt,
    "TC2": concurrent_chunked_prompts,
    "TC3": more_than_the_pool,
    "TC4": events_file,
    "TC5": load_with_preemptions,
}


async def check(asked: argparse.Namespace) -> int:
    """Run the cases, and print what they find."""
    headers = {"Authorization": f"Bearer {asked.api_key}"} if asked.api_key else {}
    async with aiohttp.ClientSession(
        headers=headers,
        # A connection each: the server closes idle ones, maybe just when they are used again.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=asked.timeout),
    ) as session:
        server = Server(session, asked)
        try:
            await server.greet()
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            print(f"{asked.address} cannot be asked: {error!r}", file=sys.stderr)
            return 2
        print(
            f"{server.model} at {asked.address}: {server.max_model_len:,} tokens at most, "
            f"{server.pool_tokens:,} in the KV cache; seed {asked.seed}"
        )
        num_failed = 0
        for case in asked.case:
            begun = time.monotonic()
            try:
                found = await CASES[case](server, asked)
                await server.rest()
                verdict = "passed"
            except (Failure, aiohttp.ClientError, TimeoutError, OSError, ValueError) as why:
                verdict, found = "FAILED", str(why) or repr(why)
                num_failed += 1
            print(f"{case} {verdict} {time.monotonic() - begun:6.1f} s  {found}", flush=True)
    return 1 if num_failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option: Callable[..., Any] = parser.add_argument
    option("address", help="of the server, as http://localhost:8000")
    option(
        "--case",
        action="append",
        choices=CASES,
        help="only this one; may be repeated (all, TC4 if there is an events file)",
    )
    option("--events", type=Path, metavar="FILE", help="the server's events_path, begun by it")
    option(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="as the server was started with: longer prompts are chunked (%(default)s)",
    )
    option(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="of each prompt (two and a half chunks, or what the model takes)",
    )
    option("--answer-tokens", type=int, default=32, metavar="N", help="(%(default)s)")
    option("--tc2", type=int, default=10, metavar="N", help="requests of TC2 (%(default)s)")
    option("--tc3", type=int, default=100, metavar="N", help="requests of TC3 (%(default)s)")
    option("--tc5", type=int, default=300, metavar="N", help="requests of TC5 (%(default)s)")
    option(
        "--tie",
        type=float,
        default=1e-3,
        metavar="X",
        help="two log-probabilities this close are a tie (%(default)s)",
    )
    option(
        "--tolerance",
        type=float,
        default=math.inf,
        metavar="X",
        help="how far log-probabilities of equal tokens may be apart (no limit)",
    )
    option("--seed", type=int, default=time.time_ns() % 10**9, help="of the prompts (the time)")
    option("--timeout", type=float, default=600, metavar="S", help="per request (%(default)s)")
    option(
        "--rest",
        type=float,
        default=30,
        metavar="S",
        help="how long transfers may go on after the last answer (%(default)s)",
    )
    option("--api-key", metavar="KEY", help="if the server asks for one")
    asked = parser.parse_args(arguments)
    asked.address = asked.address.rstrip("/")
    asked.case = asked.case or [case for case in CASES if case != "TC4" or asked.events]
    if "TC4" in asked.case and asked.events is None:
        parser.error("TC4 reads the events file: name it with --events")
    asked.compare = Comparison(asked.tie, asked.tolerance)
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a server, as the command line says."""
    return asyncio.run(check(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
