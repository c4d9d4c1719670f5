"""A pipeline stage before the last, with drafts: vLLM's older runner asks it for no stores.

With drafts, this runner calls `wait_for_save` after the draft model, which only the last stage has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.vllm.simulated import Simulated, tokens
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

NUM_TOKENS = 100


class EarlyStage(Simulated):
    """Runs each step in vLLM's own frame, as a stage before the last does."""

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        meta = output.kv_connector_metadata
        assert meta is not None
        self.worker_connector.handle_preemptions(meta)
        with self._frame(output) as reported:
            sampled = [self._compute(name, num, output) for name, num in self._scheduled(output)]
        return self._output(output, sampled, reported)

    @contextmanager
    def _frame(self, output: SchedulerOutput) -> Iterator[KVConnectorOutput]:
        runs = output.total_num_scheduled_tokens > 0
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(mixin, "has_kv_transfer_group", lambda: True)
            patched.setattr(mixin, "get_kv_transfer_group", lambda: self.worker_connector)
            with (
                set_forward_context(None, self.scheduler.vllm_config),
                mixin.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
                    output, defer_finalize=runs
                ) as reported,
            ):
                assert reported is not None
                yield reported


@pytest.mark.parametrize("num_in_flight", [1, 2], ids=["sync", "async"])
def test_what_a_stage_before_the_last_computes_is_stored(folder: Path, num_in_flight: int) -> None:
    stage = EarlyStage(
        folder, {"num_cpu_blocks": 60}, drafts=True, num_blocks=40, num_in_flight=num_in_flight
    )
    stage.half.tier.gathered_tokens = 0  # so that each step has stores
    for at in range(5):
        stage.add(f"first-{at}", tokens(NUM_TOKENS, at), max_tokens=20)
        while f"first-{at}" in stage.requests:
            stage.copy()
            stage.step()
    stage.settle()
    assert stage.half.offload is not None
    stats = stage.half.offload.stats()
    assert (stats["failed_stores"], stats["stored_blocks"] > 30) == (0, True)
    assert stage.scheduler.reset_prefix_cache()
    for at in range(5):
        stage.add(f"again-{at}", tokens(NUM_TOKENS, at))
        stage.settle()
    assert stage.half.offload.stats()["hit_tokens"] >= 5 * (NUM_TOKENS - 16)
    stage.close()
