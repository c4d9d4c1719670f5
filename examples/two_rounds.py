"""Ask a vLLM server eight prompts twice, and show what came back from kvstow's host memory.

    python two_rounds.py [ADDRESS]

ADDRESS is http://localhost:8000 unless given. If the server asks for an API key, set VLLM_API_KEY
to it.

Start the server with a KV cache that holds fewer tokens than the eight prompts have.
"""

import json
import os
import random
import re
import sys
import time
import urllib.request
from http import HTTPStatus

if {"-h", "--help"} & set(sys.argv[1:]):
    print(__doc__.strip())
    sys.exit()
ADDRESS = (sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000").rstrip("/")
KEY = os.environ.get("VLLM_API_KEY", "")
HEADERS = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})
NUM_PROMPTS, NUM_TOKENS = 8, 400


def fetch(path: str, body: object = None) -> str:
    """Return the answer to a GET, or to a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(ADDRESS + path, data, HEADERS)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return str(answer.read().decode())


def served_model() -> str:
    """Return the name of the model, or end the script if no server answers."""
    try:
        return str(json.loads(fetch("/v1/models"))["data"][0]["id"])
    except (OSError, ValueError) as error:
        why = (
            f"no vLLM server answers at {ADDRESS} ({error}): wait until it logs `Application "
            "startup complete`, or pass its own address, such as http://HOST:PORT"
        )
        if getattr(error, "code", 0) == HTTPStatus.UNAUTHORIZED:
            why = f"the server at {ADDRESS} asks for an API key: set VLLM_API_KEY to it"
        print(why, file=sys.stderr)
        sys.exit(2)


def host_tokens() -> int:
    """Return the prompt tokens that the server has loaded from host memory so far."""
    pattern = r'^kvstow_prefix_hit_tokens_total\{.*tier="host".*\} (\S+)$'
    return int(sum(map(float, re.findall(pattern, fetch("/metrics"), re.MULTILINE))))


model = served_model()
if not re.search("^kvstow_", fetch("/metrics"), re.MULTILINE):
    sys.exit(
        f"the server at {ADDRESS} has no metrics of kvstow: start it with --kv-transfer-config, "
        "and without --disable-log-stats"
    )
numbers = random.Random(time.time())  # new prompts in each run
prompts = [[numbers.randrange(10, 200) for _ in range(NUM_TOKENS)] for _ in range(NUM_PROMPTS)]
for name in "first", "second":
    before, start_s = host_tokens(), time.perf_counter()
    for prompt in prompts:
        fetch("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 1})
    spent_s = time.perf_counter() - start_s
    time.sleep(1)  # the server reports its counters with a later step
    print(
        f"{name} round: {spent_s:.2f} s, {host_tokens() - before} of "
        f"{NUM_PROMPTS * NUM_TOKENS} prompt tokens came from host memory"
    )
