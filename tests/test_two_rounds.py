"""The script of the tutorial, run against a stand-in for vLLM's server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "two_rounds.py"
BLOCK = 32
seen: Counter[tuple[int, ...]] = Counter()


class StandIn(BaseHTTPRequestHandler):
    """It answers at once, and has each prompt on the host from its second time on."""

    def do_GET(self) -> None:
        hits = sum((count - 1) * (len(prompt) // BLOCK * BLOCK) for prompt, count in seen.items())
        metric = f'kvstow_prefix_hit_tokens_total{{engine="0",tier="host"}} {float(hits)}\n'
        if not self.server.has_kvstow:  # type: ignore[attr-defined]
            metric = 'vllm:prefix_cache_hits_total{engine="0"} 0.0\n'
        models = json.dumps({"data": [{"id": "model"}]})
        self.answer(metric if self.path == "/metrics" else models)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "model"
        seen[tuple(asked["prompt"])] += 1
        self.answer("{}")

    def answer(self, text: str) -> None:
        key = self.server.key  # type: ignore[attr-defined]
        is_known = self.path == "/metrics" or key in ("", self.headers["Authorization"])
        # `path` begins with one slash, also if the client asked for two.
        is_there = not self.requestline.split()[1].startswith("//")
        self.send_response((200 if is_known else 401) if is_there else 404)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing on the tests' output."""


def run(
    script: Path, *, wanted: str = "", given: str = "", has_kvstow: bool = True, behind: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a script on a server that wants an API key, unless that is empty."""
    seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as server:
        server.key = wanted and f"Bearer {wanted}"  # type: ignore[attr-defined]
        server.has_kvstow = has_kvstow  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            return subprocess.run(
                [sys.executable, script, f"http://127.0.0.1:{server.server_port}{behind}"],
                capture_output=True,
                check=False,
                text=True,
                timeout=60,
                env=os.environ | {"VLLM_API_KEY": given},
            )
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("key", ["", "sesame"])
def test_the_script_shows_the_tokens_of_each_round(key: str) -> None:
    done = run(SCRIPT, wanted=key, given=key)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [re.sub(r"[\d.]+ s", "T", line) for line in done.stdout.splitlines()]
    assert lines == [
        "first round: T, 0 of 3200 prompt tokens came from host memory",
        "second round: T, 3072 of 3200 prompt tokens came from host memory",
    ]


@pytest.mark.parametrize("name", ["two_rounds.py", "documents.py"])
def test_an_address_may_end_with_a_slash(name: str) -> None:
    done = run(SCRIPT.with_name(name), behind="/")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_rounds_end_at_a_server_without_kvstow() -> None:
    done = run(SCRIPT, has_kvstow=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert " has no metrics of kvstow: start it with --kv-transfer-config, " in done.stderr


def test_the_documents_say_that_a_server_has_no_kvstow() -> None:
    script = SCRIPT.with_name("documents.py")
    without, beside = run(script, has_kvstow=False), run(script)
    assert (without.returncode, beside.returncode, beside.stderr) == (0, 0, "")
    assert "found on the device: 0.0%, in host memory: 0.0%" in without.stdout
    assert " has no metrics of kvstow. To use kvstow, start it with " in without.stderr


@pytest.mark.parametrize("given", ["", "barley"])
@pytest.mark.parametrize("name", ["two_rounds.py", "documents.py"])
def test_a_script_says_that_the_server_asks_for_an_api_key(name: str, given: str) -> None:
    done = run(SCRIPT.with_name(name), wanted="sesame", given=given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(" asks for an API key: set VLLM_API_KEY to it\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["two_rounds.py", "documents.py"])
def test_a_script_without_a_server_names_the_address(name: str) -> None:
    for address in ("http://127.0.0.1:1", "localhost:1"):
        done = subprocess.run(
            [sys.executable, SCRIPT.with_name(name), address],
            capture_output=True,
            check=False,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"no vLLM server answers at {address} (")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["two_rounds.py", "documents.py"])
def test_help_asks_no_server(name: str) -> None:
    command = [sys.executable, str(SCRIPT.with_name(name)), "--help"]
    asked = subprocess.run(command, capture_output=True, check=True, text=True)
    assert asked.stdout.startswith("Ask a vLLM server")
