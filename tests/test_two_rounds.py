"""The script of the tutorial, run against a stand-in for vLLM's server."""

from __future__ import annotations

import json
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
seen: Counter[str] = Counter()


class StandIn(BaseHTTPRequestHandler):
    """It answers at once, and has each prompt on the host from its second time on."""

    def do_GET(self) -> None:
        hits = sum((count - 1) * (400 // BLOCK * BLOCK) for count in seen.values())
        metric = f'kvstow_prefix_hit_tokens_total{{engine="0",tier="host"}} {float(hits)}\n'
        models = json.dumps({"data": [{"id": "model"}]})
        self.answer(metric if self.path == "/metrics" else models)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["model"], len(asked["prompt"])) == ("model", 400)
        seen[str(asked["prompt"])] += 1
        self.answer("{}")

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing on the tests' output."""


def test_the_script_shows_the_tokens_of_each_round() -> None:
    seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            done = subprocess.run(
                [sys.executable, SCRIPT, address],
                capture_output=True,
                check=False,
                text=True,
                timeout=60,
            )
        finally:
            server.shutdown()
            thread.join()
    assert (done.returncode, done.stderr) == (0, "")
    lines = [re.sub(r"[\d.]+ s", "T", line) for line in done.stdout.splitlines()]
    assert lines == [
        "first round: T, 0 of 3200 prompt tokens came from host memory",
        "second round: T, 3072 of 3200 prompt tokens came from host memory",
    ]


@pytest.mark.parametrize("name", ["two_rounds.py", "documents.py"])
def test_a_script_without_a_server_names_the_address(name: str) -> None:
    for address in ("http://127.0.0.1:1", "localhost:1", "--help"):
        done = subprocess.run(
            [sys.executable, SCRIPT.with_name(name), address],
            capture_output=True,
            check=False,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"no vLLM server answers at {address} (")
        assert done.stderr.count("\n") == 1
