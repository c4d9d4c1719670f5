"""`kvstow trace convert --from vllm-log` reads what vLLM's own logger writes."""

import logging
from pathlib import Path

import pytest
from vllm.entrypoints.serve.utils import request_logger
from vllm.logger import _DATE_FORMAT, _FORMAT
from vllm.logging_utils import NewLineFormatter
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from kvstow.replay.convert import VllmLogReader


def named(record: logging.LogRecord) -> bool:
    """Add the attribute that vLLM's server adds to every record."""
    record.vllm_process_name = "APIServer"
    return True


def test_vllms_log_of_requests_becomes_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "vllm.log"
    handler = logging.FileHandler(path)
    handler.addFilter(named)
    handler.setFormatter(NewLineFormatter(_FORMAT, datefmt=_DATE_FORMAT))
    monkeypatch.setattr(request_logger.logger, "handlers", [handler])
    monkeypatch.setattr(request_logger.logger, "propagate", False)
    monkeypatch.setattr(request_logger.logger, "level", logging.DEBUG)
    request_logger.logger.manager._clear_cache()

    log = request_logger.RequestLogger(max_log_len=None)
    tokens = list(range(40))
    lora = LoRARequest("a poet", 1, "nowhere")
    for name, prompt, adapter in (
        ("x", tokens, None),
        ("y", tokens[:35], None),
        ("z", tokens, lora),
    ):
        log.log_inputs(name, "one\ntwo, [3]", prompt, None, SamplingParams(), adapter)
    log.log_outputs("x", "a\nb", [5, 6, 7])
    for part in ([1, 2], [3]):
        log.log_outputs("z", "a", part, is_streaming=True, delta=True)
    log.log_outputs("z", "ab", None, "stop", is_streaming=True)
    handler.close()

    requests = VllmLogReader(path, 16, output_tokens=9).read().requests
    assert [(request.prompt_tokens, request.output_tokens) for request in requests] == [
        (40, 3),
        (35, 9),
        (40, 3),
    ]
    assert [request.trace_ids for request in requests] == [(0, 1, 2), (0, 1, 3), (4, 5, 6)]
