"""kvstow beside another connector in vLLM's `MultiConnector`."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.engine import TOLERANCE, Engine, difference, poison, prompts
from tests.vllm.failing_connector import FailingConnector
from tests.vllm.full import full
from tests.vllm.halves import FULL, Step, cache_config, engine_config
from tests.vllm.handshake_connector import Hand, HandshakeConnector
from tests.vllm.setting import CONNECTOR
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import (
    NixlBaseConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.v1.outputs import KVConnectorOutput

from kvstow import ConfigError
from kvstow.vllm import KVStowConnector

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

OWN = CONNECTOR | {"kv_connector_extra_config": {"num_cpu_blocks": 400}}
OTHER = {
    "kv_connector": "HandshakeConnector",
    "kv_connector_module_path": "tests.vllm.handshake_connector",
    "kv_role": "kv_both",
}
ORDERS = pytest.mark.parametrize("own_at", [0, 1], ids=["kvstow first", "kvstow second"])


class Nixl(NixlBaseConnector):
    """NIXL's connector without the parts in which its two kinds differ."""


Nixl.__abstractmethods__ = frozenset()


def multi(own_at: int) -> dict[str, Any]:
    connectors = [OWN, OTHER] if own_at == 0 else [OTHER, OWN]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }


@ORDERS
def test_both_connectors_of_a_multi_connector_start(folder: Path, own_at: int) -> None:
    """vLLM passes the handshake of one child on to all children."""
    config = engine_config(folder, {}, kv_transfer_config=multi(own_at))
    worker, scheduler = (
        MultiConnector(config, role, cache_config(FULL))
        for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER)
    )
    meta = worker.get_handshake_metadata()
    assert meta is not None
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): meta})
    own, other = (scheduler.sub_connectors[at] for at in (own_at, 1 - own_at))
    assert isinstance(other, HandshakeConnector) and other.shaken == {0: Hand(0)}
    assert isinstance(own, KVStowConnector)
    assert scheduler.has_pending_push_work()
    worker.bind_connector_metadata(scheduler.build_connector_meta(Step()))
    reports = worker.build_connector_worker_meta()
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=reports))
    assert own._scheduler.offload is not None
    assert own._scheduler.offload.num_host_blocks == 400
    assert not scheduler.has_pending_push_work()


@pytest.mark.parametrize("is_inside", [False, True], ids=["alone", "inside"])
@pytest.mark.parametrize("is_right", [False, True])
def test_the_settings_that_the_scheduler_reads_are_warned_of(
    folder: Path, log: list[str], is_inside: bool, is_right: bool
) -> None:
    """vLLM's scheduler reads the outer part of the flag. The inner parts have the opposite."""
    right = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    wrong = {"kv_role": "kv_producer", "kv_load_failure_policy": "fail"}
    flag: dict[str, Any] = OWN | (right if is_right else wrong)
    if is_inside:
        inner = [part | (wrong if is_right else right) for part in (OWN, OTHER)]
        extra = {"connectors": inner}
        flag = {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
        flag |= right if is_right else wrong
    config = engine_config(folder, {}, kv_transfer_config=flag)
    made = MultiConnector if is_inside else KVStowConnector
    with set_current_vllm_config(config):  # as vLLM's worker does
        made(config, KVConnectorRole.WORKER, cache_config(FULL))
    made(config, KVConnectorRole.SCHEDULER, cache_config(FULL))
    where = ' beside "kv_connector": "MultiConnector"' if is_inside else ""
    found = [line for line in log if "kv_role" in line or "failure_policy" in line]
    assert [line.split(". Set it")[0].split(", so a")[0] for line in found] == (
        []
        if is_right
        else [
            f"kvstow: kv_role is 'kv_producer'{where}",
            f"kvstow: kv_load_failure_policy is 'fail'{where}",
        ]
    )


def test_a_second_connector_of_kvstow_is_refused(folder: Path) -> None:
    """Each would keep the same blocks, and both would hold vLLM's."""
    flag = multi(0)
    flag["kv_connector_extra_config"]["connectors"].append(OWN)
    config = engine_config(folder, {}, kv_transfer_config=flag)
    with set_current_vllm_config(config), pytest.raises(ConfigError, match="name it once"):
        MultiConnector(config, KVConnectorRole.WORKER, cache_config(FULL))


def test_statistics_find_a_connector_that_no_plugin_has_registered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `VLLM_PLUGINS`, or in an environment that knows kvstow's folder only."""
    config = engine_config(folder, {}, kv_transfer_config=multi(0))
    registry = dict(KVConnectorFactory._registry)
    registry.pop("KVStowConnector", None)
    monkeypatch.setattr(KVConnectorFactory, "_registry", registry)
    MultiConnector._get_connector_classes_and_configs(config)  # as vLLM's front end does first
    stats = MultiConnector.build_kv_connector_stats({"KVStowConnector": {"stored_blocks": 2}})
    assert stats is not None
    assert stats.reduce() == {"KVStowConnector": {"stored_blocks": 2}}


@ORDERS
def test_nixl_gets_its_own_handshake(folder: Path, own_at: int) -> None:
    """The test uses NIXL's own classes without its library, and two pipeline stages."""
    config = engine_config(folder, {"num_cpu_blocks": 9})

    def multi_connector(role: KVConnectorRole, nixl: NixlBaseConnector) -> MultiConnector:
        own = KVStowConnector(config, role, cache_config(FULL))
        connector: MultiConnector = object.__new__(MultiConnector)
        connector._connectors = [own, nixl] if own_at == 0 else [nixl, own]
        return connector

    payload = NixlHandshakePayload("hash", b"agent")
    worker = object.__new__(Nixl)
    worker.kv_transfer_config = config.kv_transfer_config
    worker.connector_worker = SimpleNamespace(xfer_handshake_metadata=payload)
    scheduler = object.__new__(Nixl)
    scheduler.connector_scheduler = object.__new__(NixlBaseConnectorScheduler)
    scheduler.connector_scheduler._handshake_data = {}
    scheduler.connector_scheduler._registration_generation = 0
    # It listens on no socket. It checks the handshake before.
    scheduler.connector_scheduler._nixl_handshake_listener_t = threading.current_thread()
    meta = multi_connector(KVConnectorRole.WORKER, worker).get_handshake_metadata()
    assert meta is payload
    side = multi_connector(KVConnectorRole.SCHEDULER, scheduler)
    side.set_xfer_handshake_metadata_pp_aware({(stage, 0): meta for stage in range(2)})
    with pytest.raises(ValueError, match="NixlConnectorScheduler expects"):
        side.set_xfer_handshake_metadata_pp_aware({(0, 0): Hand(0)})


@full("starts two more engines")
@ORDERS
def test_an_engine_serves_both_connectors(folder: Path, own_at: int) -> None:
    """Prompts come back from the host, and the other connector has its handshake."""
    engine = Engine(folder, num_blocks=40, kv_transfer_config=multi(own_at))
    try:
        asked = prompts(6, 300)
        expected = engine.generate(asked)
        engine.settle()
        answers = engine.generate(asked)
        assert [answer.num_cached for answer in answers] == [288] * len(asked)
        assert difference(answers, expected) < TOLERANCE
        both = engine.core.scheduler.connector.sub_connectors
        assert both[1 - own_at].shaken == {0: Hand(0)}
        engine.settle()
    finally:
        engine.close()


@full("starts one more engine")
def test_a_block_that_another_connector_did_not_load_is_not_stored(folder: Path) -> None:
    """A second request hits that block in the same step, and then waits until it is computed."""
    other = OTHER | {
        "kv_connector": "FailingConnector",
        "kv_connector_module_path": "tests.vllm.failing_connector",
    }
    own = CONNECTOR | {"kv_connector_extra_config": {"num_cpu_blocks": 400}}
    settings = multi(0) | {"kv_connector_extra_config": {"connectors": [own, other]}}
    engine = Engine(folder, num_blocks=100, kv_transfer_config=settings)
    try:
        [common, *tails] = prompts(3, 900)
        asked = [common[:868] + tail[:20] for tail in tails]
        expected = engine.generate(asked)
        engine.settle()
        assert engine.llm.reset_prefix_cache(False, True)
        poison(get_kv_transfer_group().sub_connectors[0]._worker)
        FailingConnector.offered = 864
        assert difference(engine.generate(asked), expected) < TOLERANCE
        engine.settle()
        assert engine.llm.reset_prefix_cache(False, False)
        answers = engine.generate(asked)
        assert sum(answer.num_cached for answer in answers) > 0
        assert difference(answers, expected) < TOLERANCE
    finally:
        engine.close()
