"""Check a vLLM server that offloads its KV cache, with five cases over HTTP.

    python examples/check_server.py http://localhost:8000 --events /var/log/kvstow.jsonl

    TC1  one prompt that the server computes in chunks
    TC2  ten such prompts at once
    TC3  a hundred requests that exceed the device's KV cache; asked again, they come from the host
    TC4  the events file: stores were committed, and every transfer has ended exactly once
    TC5  three hundred requests at once, with preemptions: every answer is complete and equals the
         answer of the idle server

Prompts are random token ids, new in each run, so the server has no cached blocks of them. The
script asks at temperature 0. It compares answers up to the first position whose two best
log-probabilities are nearly equal, because two right answers may differ from there on: batches of
different sizes round differently, and in bfloat16 the numbers from 16 to 32 are an eighth apart.
Use the server for nothing else meanwhile. The script needs aiohttp, which vLLM installs.

This is one file, so that you can copy it to any machine.

The exit status is 0 if every case passed, 1 if a case failed, 2 if the server does not answer or
aiohttp is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

try:
    import aiohttp
except ImportError:
    print("check_server.py needs aiohttp: run it with the Python that has vLLM", file=sys.stderr)
    sys.exit(2)

Prompt = list[int]

# Ids that every vocabulary has, and that are seldom special tokens.
TOKENS = range(10, 1000)
# Gauges that are 0 on an idle server. A gauge that is missing counts as 0.
AT_REST = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "kvstow_transfers_in_flight",
    "kvstow_blocks_in_quarantine",
)


class Failure(Exception):
    """A case failed, for the reason in the message."""


@dataclass(frozen=True)
class Answer:
    """An answer of the server.

    Attributes:
        tokens: the tokens, as `token_id:N`.
        logprobs: the log-probabilities of these tokens.
        leads: per position, the best log-probability minus the second best.
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

    async def read_sizes(self) -> None:
        """Ask for the model's name and for sizes."""
        asked = self._asked
        (model,) = json.loads(await self._get("/v1/models"))["data"][:1]
        self.model, self.max_model_len = model["id"], model["max_model_len"]
        self.pool_tokens = _pool_tokens(await self._get("/metrics"))
        room = self.max_model_len - asked.answer_tokens
        self.prompt_tokens = min(asked.prompt_tokens or 5 * asked.max_num_batched_tokens // 2, room)

    def prompts(self, num_prompts: int) -> list[Prompt]:
        """Return new prompts, each long enough for several chunks."""
        if self.prompt_tokens <= self._asked.max_num_batched_tokens:
            raise Failure(
                f"a prompt has {self.prompt_tokens} tokens, and must have more than one chunk of "
                f"{self._asked.max_num_batched_tokens}: start the server with a smaller "
                "--max-num-batched-tokens, and pass the same number here"
            )
        return [self._choose.choices(TOKENS, k=self.prompt_tokens) for _ in range(num_prompts)]

    async def answers(self, prompts: Sequence[Prompt], at_once: int) -> list[Answer]:
        """Return the answers to all prompts, with `at_once` requests at a time.

        Raises:
            Failure: an answer is missing or incomplete.
        """
        slots = asyncio.Semaphore(at_once)

        async def answer(prompt: Prompt) -> Answer | str:
            async with slots:
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
        """Return the numbers at /metrics, summed over engines, as `NAME` or `NAME DIRECTION`."""
        values = Counters()
        for line in (await self._get("/metrics")).splitlines():
            if not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                if direction := re.search(r'[{,]direction="(\w+)"', line):
                    name = f"{name} {direction[1]}"
                values[name] = values[name] + float(line.rpartition(" ")[2])
        return values

    async def rest(self) -> None:
        """Wait until no request runs, no copy runs and no block is held.

        Raises:
            Failure: the server is not idle in time, because it hangs or has leaked a block.
        """
        now = time.monotonic()
        renew_at, end = now + self._asked.rest / 2, now + self._asked.rest
        while True:
            counters = await self.counters()
            busy = [f"{name} is {counters[name]:g}" for name in AT_REST if counters[name]]
            if not busy:
                break
            if time.monotonic() > renew_at:
                # Of several API servers, a slow one may export old values until the next step.
                renew_at = float("inf")
                await self.answers([[TOKENS[0]]] * 8, 8)
            elif time.monotonic() > end:
                raise Failure(
                    f"the server is not idle after {self._asked.rest:g} s: {', '.join(busy)}"
                )
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
    """Metrics by name. A metric that the server does not have is 0."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def since(self, before: Counters, name: str) -> int:
        """Return the growth of a counter."""
        return round(self[name] - before[name])


def _pool_tokens(metrics: str) -> int:
    """Return the tokens that fit into the KV caches of all engines."""
    total = 0
    for labels in re.findall(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE):
        config = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        size = config.get("kv_cache_size_tokens", "")
        # Without this size, count as if one group had all blocks, which is too large at worst.
        blocks = int(config["num_gpu_blocks"]) * int(config["block_size"])
        total += int(size) if size.isdigit() else blocks
    return total


@dataclass(frozen=True)
class Comparison:
    """The tolerances of a comparison of answers."""

    tie: float
    tolerance: float

    def __call__(self, references: Sequence[Answer], answers: Sequence[Answer]) -> str:
        """Compare answers with references, and return a text about the compared tokens.

        Raises:
            Failure: answers differ, or no token could be compared.
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
                # Written so that NaN is wrong, too.
                if expected == got and off <= self.tolerance:
                    continue
                wrong.append(
                    f"answer {number} has {got} at position {at}, where {expected} was expected; "
                    f"log-probabilities {off:.3g} apart, the expected token leads by {lead:.3g}"
                )
                break
        num_tokens = sum(len(reference.tokens) for reference in references)
        if wrong:
            raise Failure(
                f"{len(wrong)} of {len(answers)} answers differ by more than a tie (--tie "
                f"{self.tie:g}), the first: {wrong[0]}"
            )
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
    if not after["vllm:external_prefix_cache_queries_total"]:
        return f"{len(prompts)} of {server.prompt_tokens:,} tokens, no connector; {compared}"
    if not hits:
        least = server.pool_tokens // server.prompt_tokens + 1  # prompts that exceed the KV cache
        fewer = f", or lower --tc3, to {least} at least" if least < len(prompts) else ""
        raise Failure(
            f"asked again, no token came from the host: the prompts are {num_tokens:,} tokens, so "
            f"give it a host tier larger than that{fewer}"
        )
    if after["kvstow_capacity_blocks"] and not (stored and loaded):
        raise Failure(
            f"{hits:,} tokens hit, with {stored} blocks stored and {loaded} loaded: if the server "
            "knew these prompts, pass another --seed"
        )
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
    """Check an events file of an idle server.

    Raises:
        Failure: an event is missing or repeated.
    """
    in_flight: dict[int, str] = {}
    ended: set[int] = set()
    num_committed = num_failed = 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        event = json.loads(line)
        kind, job = event["event"], event.get("job_id")
        if kind == "TransferInitiated":
            if job in in_flight or job in ended:
                raise Failure(f"{path}:{number}: transfer {job} is initiated twice")
            in_flight[job] = event["direction"]
        elif kind == "CacheStoreCommitted":
            # Tiers below the host commit what they demote and promote.
            if in_flight.get(job, "load") == "load":
                raise Failure(f"{path}:{number}: {job} is committed, which is no store in flight")
            num_committed += event["num_blocks"] * (in_flight[job] == "store")
        elif kind == "TransferCompleted":
            if in_flight.pop(job, None) != event["direction"]:
                again = "again" if job in ended else "and was not initiated"
                raise Failure(f"{path}:{number}: transfer {job} is completed {again}")
            ended.add(job)
            num_failed += not event["ok"]
    if in_flight:
        raise Failure(f"{path}: {len(in_flight)} transfers have no end: {sorted(in_flight)[:10]}")
    if not num_committed:
        raise Failure(f"{path}: no store was committed")
    return (
        f"{len(ended):,} transfers, each completed once, {num_failed:,} of them failed; "
        f"{num_committed:,} blocks committed"
    )


async def load_with_preemptions(server: Server, asked: argparse.Namespace) -> str:
    """TC5."""
    prompts = server.prompts(asked.tc5)
    # The server knows half of the prompts before the load begins. Under load it loads these from
    # the host, and computes the others.
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
            "no request was preempted, and this case needs preemptions: raise --tc5 or "
            "--answer-tokens, or start the server with a smaller --num-gpu-blocks-override"
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
    """Run the cases, and print their results."""
    headers = {"Authorization": f"Bearer {asked.api_key}"} if asked.api_key else {}
    async with aiohttp.ClientSession(
        headers=headers,
        # One connection per request, because the server may close an idle one just before its use.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=asked.timeout),
    ) as session:
        server = Server(session, asked)
        try:
            await server.read_sizes()
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            # aiohttp's own text of a connection that failed also has its settings of TLS.
            cause = str(getattr(error, "os_error", error)) or type(error).__name__
            why = (
                f"no vLLM server answers at {asked.address} ({cause}): wait until it logs "
                "`Application startup complete`, or pass its own address, such as http://HOST:PORT"
            )
            if getattr(error, "status", 0) == HTTPStatus.UNAUTHORIZED:
                why = (
                    f"the server at {asked.address} asks for an API key: set VLLM_API_KEY to it, "
                    "or pass --api-key"
                )
            print(why, file=sys.stderr)
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


# Flag, type, default, placeholder and help.
OPTIONS = (
    (
        "--max-num-batched-tokens",
        int,
        2048,
        "N",
        "the server's own setting: it computes longer prompts in chunks (%(default)s)",
    ),
    (
        "--prompt-tokens",
        int,
        None,
        "N",
        "tokens per prompt (two and a half chunks, or the model's maximum)",
    ),
    ("--answer-tokens", int, 32, "N", "tokens per answer (%(default)s)"),
    ("--tc2", int, 10, "N", "requests of TC2 (%(default)s)"),
    ("--tc3", int, 100, "N", "requests of TC3 (%(default)s)"),
    ("--tc5", int, 300, "N", "requests of TC5 (%(default)s)"),
    ("--tie", float, 0.25, "X", "log-probabilities closer than this are a tie (%(default)s)"),
    (
        "--tolerance",
        float,
        math.inf,
        "X",
        "largest difference of log-probabilities of equal tokens (no limit)",
    ),
    ("--seed", int, time.time_ns() % 10**9, "N", "seed of the prompts (the time)"),
    ("--timeout", float, 600, "S", "seconds per request (%(default)s)"),
    ("--rest", float, 30, "S", "seconds until the server must be idle (%(default)s)"),
    ("--events", Path, None, "FILE", "the file of the server's option events_path"),
    ("--api-key", str, None, "KEY", "the server's API key (VLLM_API_KEY of the environment)"),
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option: Callable[..., Any] = parser.add_argument
    option("address", help="address of the server, such as http://localhost:8000")
    option(
        "--case",
        action="append",
        choices=CASES,
        help="run only this case; may be repeated (default: all, TC4 only with --events)",
    )
    for flag, kind, default, metavar, text in OPTIONS:
        option(flag, type=kind, default=default, metavar=metavar, help=text)
    asked = parser.parse_args(arguments)
    asked.address = asked.address.rstrip("/")
    asked.api_key = asked.api_key or os.environ.get("VLLM_API_KEY")
    asked.case = asked.case or [case for case in CASES if case != "TC4" or asked.events]
    if "TC4" in asked.case and asked.events is None:
        parser.error("TC4 reads the events file: pass --events FILE")
    asked.compare = Comparison(asked.tie, asked.tolerance)
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a server with the options of the command line."""
    return asyncio.run(check(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
