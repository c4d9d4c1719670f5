"""vLLM's engine in a process of its own, put to sleep in the middle of its work.

    python -m tests.vllm.sleeper MODEL EVENTS eager|lazy

Prints JSON: the answers without and with sleeps, and the number of loads after the sleeps.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from tests.vllm.forking import fork_processes
from tests.vllm.setting import CONNECTOR, ENVIRONMENT

os.environ |= ENVIRONMENT | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the worker gets `poison` as a function
    "VLLM_LOGGING_LEVEL": "ERROR",
}

NUM_TOKENS = 120


def poison(_: Any) -> None:
    """Overwrite the device's whole cache, in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

    for layout in get_kv_transfer_group()._worker._layouts:
        for tensor in layout.owners:
            tensor.fill_(1e4)


def main(model: str, events: str, mode: str) -> None:
    fork_processes()
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    options = {
        "num_cpu_blocks": 400,
        "preserve_on_sleep": True,
        "events_path": events,
        "lazy_offload": mode == "lazy",
    }
    llm: Any = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=100,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        disable_log_stats=True,
        seed=0,
        kv_transfer_config=CONNECTOR | {"kv_connector_extra_config": options},
    )
    engine, core = llm.llm_engine, llm.llm_engine.engine_core
    choose = random.Random(7)
    prompts = [[choose.randrange(3, 250) for _ in range(200)] for _ in range(3)]
    sampling = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=1
    )

    def answers(name: str, num_asleep: int) -> list[Any]:
        outputs: dict[str, Any] = {}
        for at, tokens in enumerate(prompts):
            engine.add_request(f"{name}{at}", {"prompt_token_ids": tokens}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output.outputs[0]
            # Sleep when one answer has at least so many tokens.
            longest = max((len(found.token_ids) for found in outputs.values()), default=0)
            if num_asleep and longest > 20 * num_asleep:
                num_asleep -= 1
                core.call_utility("pause_scheduler", "keep", True)
                llm.collective_rpc(poison)
                core.call_utility("resume_scheduler")
        return [
            (
                list(found.token_ids),
                [step[t].logprob for step, t in zip(found.logprobs, found.token_ids, strict=True)],
            )
            for _, found in sorted(outputs.items())
        ]

    def num_loads() -> int:
        lines = map(json.loads, Path(events).read_text().splitlines())
        return sum(
            line["event"] == "TransferInitiated" and line["direction"] == "load" for line in lines
        )

    expected = answers("plain", 0)
    llm.reset_prefix_cache()
    before = num_loads()
    found = answers("sleep", 2)
    print(json.dumps({"expected": expected, "found": found, "loads": num_loads() - before}))
    core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
