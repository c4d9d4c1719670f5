"""Ask a vLLM server questions about documents, and show how many prompt tokens it found.

    python documents.py [ADDRESS]

ADDRESS is http://localhost:8000 unless given. If the server asks for an API key, set VLLM_API_KEY
to it.

Each prompt is a document and a question. Some documents are popular, others are rare. Each run asks
the same questions, so two servers get equal prompts. Start the server anew for each run, because a
run before it would fill the caches.
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
NUM_DOCUMENTS, NUM_QUESTIONS = 24, 150
DOCUMENT_TOKENS, QUESTION_TOKENS = (128, 384), (8, 40)


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


def metric(name: str) -> float:
    """Return the sum of a metric's samples, for example those of several engines."""
    found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", fetch("/metrics"), re.MULTILINE)
    return sum(map(float, found))


def prompts() -> list[list[int]]:
    """Return the prompts as token ids."""
    numbers = random.Random(20)

    def tokens(least: int, most: int) -> list[int]:
        return [numbers.randrange(10, 200) for _ in range(numbers.randint(least, most))]

    documents = [tokens(*DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
    # The square makes the first documents popular.
    places = [int(NUM_DOCUMENTS * numbers.random() ** 2) for _ in range(NUM_QUESTIONS)]
    return [documents[place] + tokens(*QUESTION_TOKENS) for place in places]


def main() -> None:
    """Ask all questions, one after the other, and print the shares of the tokens."""
    model = served_model()
    names = "vllm:prefix_cache_hits_total", "kvstow_prefix_hit_tokens_total"
    before = [metric(name) for name in names]
    num_tokens = 0
    for prompt in prompts():
        fetch("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 4})
        num_tokens += len(prompt)
    time.sleep(1)  # the server reports its counters with a later step
    device, host = (
        (metric(name) - hits) / num_tokens for name, hits in zip(names, before, strict=True)
    )
    print(f"{NUM_QUESTIONS} questions, {num_tokens:,} prompt tokens")
    found = f"on the device: {device:.1%}, in host memory: {host:.1%}, in all {device + host:.1%}"
    print(f"found {found}")
    if not re.search("^kvstow_", fetch("/metrics"), re.MULTILINE):
        print(
            f"The server at {ADDRESS} has no metrics of kvstow. To use kvstow, start it with "
            "--kv-transfer-config, and without --disable-log-stats.",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
