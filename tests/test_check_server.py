"""Run `examples/check_server.py` against a pretended server that is wrong in each way."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from examples import check_server

GOOD_EVENTS = [
    {"event": "TransferInitiated", "job_id": 0, "direction": "store", "num_blocks": 3},
    {"event": "TransferInitiated", "job_id": 1, "direction": "load", "num_blocks": 3},
    {"event": "CacheStoreCommitted", "job_id": 0, "num_blocks": 3},
    {"event": "TransferCompleted", "job_id": 0, "direction": "store", "ok": True},
    {"event": "TransferCompleted", "job_id": 1, "direction": "load", "ok": False},
]
COMMITTED_1 = {"event": "CacheStoreCommitted", "job_id": 1, "num_blocks": 3}


class Pretender:
    """A server whose answers depend on the prompt only, with the metrics of a connector.

    Attributes:
        wrong: what the server does wrong; empty for a correct server.
    """

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.seen: set[tuple[int, ...]] = set()
        self.num_hits = 0
        self.num_running = 0
        self.num_preemptions = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/v1/models", self.models),
                web.post("/v1/completions", self.complete),
            ]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.wrong == "sick" else 200)

    async def models(self, request: web.Request) -> web.Response:
        if self.wrong == "key" and request.headers.get("Authorization") != "Bearer sesame":
            raise web.HTTPUnauthorized
        return web.json_response({"data": [{"id": "pretender", "max_model_len": 512}]})

    async def metrics(self, request: web.Request) -> web.Response:
        blocks = 10**6 if self.wrong == "large pool" else 64
        is_old = self.wrong == "old gauges" and not any(len(prompt) == 1 for prompt in self.seen)
        held = 0.25 if is_old or (self.wrong == "leak" and self.num_hits) else 0
        counted = self.num_hits // 32 if self.wrong != "no loads" else 0
        return web.Response(
            text="# HELP vllm:cache_config_info what the\n"
            f'vllm:cache_config_info{{block_size="32",engine="0",num_gpu_blocks="{blocks}"}} 1.0\n'
            f'vllm:num_requests_running{{engine="0"}} {self.num_running}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {held}\n'
            f'vllm:external_prefix_cache_hits_total{{engine="0"}} {self.num_hits}\n'
            f'vllm:num_preemptions_total{{engine="0"}} {self.num_preemptions}\n'
            'vllm:external_prefix_cache_queries_total{engine="0"} '
            f"{0 if self.wrong == 'no connector' else len(self.seen)}\n"
            'kvstow_capacity_blocks{engine="0",tier="host"} 1000.0\n'
            'kvstow_transfer_blocks_total{engine="0",direction="store"} '
            f"{9 * len(self.seen)}\n"
            f'kvstow_transfer_blocks_total{{engine="0",direction="load"}} {counted}\n'
        )

    async def complete(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.num_running += 1
        await asyncio.sleep(3600 if self.wrong == "hang" else 0.001)
        is_busy = self.num_running > 10
        self.num_running -= 1
        if self.wrong == "error":
            raise web.HTTPInternalServerError(text="EngineDeadError")
        if is_busy and self.wrong != "no preemption":
            self.num_preemptions += 1
        prompt = tuple(asked["prompt"])
        is_known = prompt in self.seen
        if is_known and self.wrong not in ("no hits", "no connector"):
            self.num_hits += len(prompt) // 32 * 32
        self.seen.add(prompt)
        return web.json_response({"choices": [self.answer(asked, is_known, is_busy)]})

    def answer(self, asked: dict[str, Any], is_known: bool, is_busy: bool) -> dict[str, Any]:
        draw = random.Random(str(asked["prompt"]))
        num_tokens = asked["max_tokens"] - (self.wrong == "short" and is_busy)
        tokens = [f"token_id:{draw.randrange(1000)}" for _ in range(num_tokens)]
        lead = 0.0 if self.wrong == "all ties" else 1e-4
        top = [{token: -1.0, "token_id:x": -1.5} for token in tokens]
        top[5] = {tokens[5]: -1.0, "token_id:x": -1.0 - lead}
        if self.wrong == "all ties":
            top = [top[5]] * len(top)
        logprobs = [-1.0] * len(tokens)
        if self.wrong == "tie broken otherwise":
            tokens[5:] = ["token_id:x"] * len(tokens[5:]) if is_known else tokens[5:]
        if (self.wrong == "garbled" and is_known) or (self.wrong == "garbled load" and is_busy):
            tokens[4] = "token_id:x"
        if self.wrong == "not a number" and is_known:
            logprobs[2] = float("nan")
        if self.wrong == "another distribution" and is_known:
            logprobs[2] -= 0.5
        return {
            "finish_reason": "length" if num_tokens == asked["max_tokens"] else "stop",
            "logprobs": {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top},
        }


def check(pretender: Pretender, *arguments: str) -> int:
    async def ask() -> int:
        runner = web.AppRunner(pretender.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = runner.addresses[0][1]
            return await check_server.check(
                check_server.parse(
                    [
                        f"http://127.0.0.1:{port}",
                        *("--max-num-batched-tokens", "128", "--tc5", "30"),
                        *("--timeout", "1", "--rest", "0.2", *arguments),
                    ]
                )
            )
        finally:
            await runner.cleanup()

    return asyncio.run(ask())


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return write(tmp_path / "events.jsonl", GOOD_EVENTS)


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"time_s": 1.0} | event) + "\n" for event in events))
    return path


@pytest.mark.parametrize("wrong", ["", "tie broken otherwise", "old gauges"])
def test_a_correct_server_passes_every_case(
    wrong: str, events: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(Pretender(wrong), "--events", str(events)) == 0
    printed = capsys.readouterr().out
    assert [line[:10] for line in printed.splitlines()[1:]] == [
        f"{case} passed" for case in ("TC1", "TC2", "TC3", "TC4", "TC5")
    ]
    assert "100% from the host" in printed and "30 at once" in printed


@pytest.mark.parametrize(
    ("wrong", "case", "why"),
    [
        (
            "garbled",
            "TC1",
            "1 of 1 answers differ by more than a tie (--tie 0.25), the first",
        ),
        ("garbled", "TC1", "answer 0 has token_id:x at position 4"),
        ("garbled", "TC2", "10 of 10 answers differ"),
        ("garbled", "TC3", "100 of 100 answers differ"),
        ("garbled load", "TC5", "answers differ by more"),
        ("not a number", "TC1", "log-probabilities nan apart"),
        ("another distribution", "TC1", "log-probabilities 0.5 apart"),
        ("all ties", "TC1", "no answer could be compared"),
        ("short", "TC5", "an answer ends after 31 of 32 tokens (stop)"),
        ("error", "TC1", "1 of 1 requests failed, the first: HTTP 500: EngineDeadError"),
        ("hang", "TC2", "10 of 10 requests failed, the first: no answer within 1 s"),
        ("sick", "TC1", "503"),
        ("leak", "TC3", "not idle after 0.2 s: vllm:kv_cache_usage_perc is 0.25"),
        ("no hits", "TC3", "no token came from the host: the prompts are 32,000 tokens"),
        ("no hits", "TC3", "larger than that, or lower --tc3, to 7 at least"),
        ("no loads", "TC3", "900 blocks stored and 0 loaded: if the server knew these prompts"),
        ("large pool", "TC3", "100 prompts are 32,000 tokens, and the KV cache holds 32,000,000"),
        ("no preemption", "TC5", "no request was preempted"),
    ],
)
def test_a_wrong_server_fails_the_case(
    wrong: str, case: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(Pretender(wrong), "--case", case, "--tolerance", "0.01") == 1
    printed = capsys.readouterr().out
    assert f"{case} FAILED" in printed and why in printed


@pytest.mark.parametrize("direction", ["demote", "promote"])
def test_a_tier_below_the_host_commits_blocks_too(direction: str, tmp_path: Path) -> None:
    more = [
        {"event": "TransferInitiated", "job_id": 1, "direction": direction, "num_blocks": 3},
        COMMITTED_1,
        {"event": "TransferCompleted", "job_id": 1, "direction": direction, "ok": True},
    ]
    path = write(tmp_path / "events.jsonl", [GOOD_EVENTS[0], *GOOD_EVENTS[2:4], *more])
    assert "3 blocks committed" in check_server.check_events(path)
    with pytest.raises(check_server.Failure, match="no store was committed"):
        check_server.check_events(write(path, more))


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (GOOD_EVENTS[:4], "1 transfers have no end: [1]"),
        ([*GOOD_EVENTS, GOOD_EVENTS[3]], "transfer 0 is completed again"),
        ([*GOOD_EVENTS, GOOD_EVENTS[0]], "transfer 0 is initiated twice"),
        ([GOOD_EVENTS[0], GOOD_EVENTS[0]], "transfer 0 is initiated twice"),
        ([GOOD_EVENTS[1], COMMITTED_1], "1 is committed, which is no store in flight"),
        (GOOD_EVENTS[1:], "0 is committed, which is no store in flight"),
        ([GOOD_EVENTS[1], GOOD_EVENTS[3]], "transfer 0 is completed and was not initiated"),
        ([GOOD_EVENTS[1], GOOD_EVENTS[4]], "no store was committed"),
        ([], "no store was committed"),
    ],
)
def test_a_wrong_events_file_is_reported(
    events: list[dict[str, Any]], why: str, tmp_path: Path
) -> None:
    with pytest.raises(check_server.Failure) as failure:
        check_server.check_events(write(tmp_path / "events.jsonl", events))
    assert why in str(failure.value)


def test_a_server_without_a_connector_is_compared_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check(Pretender("no connector"), "--case", "TC3") == 0
    assert "no connector; 500 of 3,200 tokens compared" in capsys.readouterr().out


def test_prompts_that_are_not_chunked_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(Pretender(), "--prompt-tokens", "128", "--case", "TC1") == 1
    assert "must have more than one chunk of 128" in capsys.readouterr().out


def test_a_missing_server_or_events_file_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_server.main(["http://127.0.0.1:9", "--case", "TC1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("no vLLM server answers at http://127.0.0.1:9 (")
    assert error.endswith(
        "): wait until it logs `Application startup complete`, or pass its own "
        "address, such as http://HOST:PORT\n"
    )
    assert "ssl:" not in error
    with pytest.raises(SystemExit, match="2"):
        check_server.main(["http://127.0.0.1:9", "--case", "TC4"])
    missing = "/nowhere/events.jsonl"
    assert check(Pretender(), "--case", "TC4", "--events", missing) == 1
    assert missing in capsys.readouterr().out


def test_without_aiohttp_no_case_counts_as_failed() -> None:
    command = [sys.executable, "-S", check_server.__file__]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 2 and done.stderr.startswith("check_server.py needs aiohttp")


def test_a_server_that_asks_for_an_api_key_gets_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert check(Pretender("key"), "--case", "TC1") == 2
    assert (
        " asks for an API key: set VLLM_API_KEY to it, or pass --api-key" in capsys.readouterr().err
    )
    assert check(Pretender("key"), "--case", "TC1", "--api-key", "sesame") == 0
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert check(Pretender("key"), "--case", "TC1") == 0
