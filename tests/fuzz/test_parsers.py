"""Every parser accepts its input, or refuses it with an error of its own. `make fuzz` runs long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.fuzz.limits import limits
from tests.fuzz.targets import _CONFIGS, _FIELDS, _LOG, TARGETS, _page

SLOW = {"snapshot_file", "slot_header", "slot_index", "slot_frames"}


@pytest.mark.parametrize("name", TARGETS)
def test_parser_accepts_its_input_or_refuses_it(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=40 if name in SLOW else 300, suppress_health_check=list(HealthCheck))
    @given(target.inputs)
    def check(given_input: Any) -> None:
        with limits():
            target.check(given_input)

    check()


@pytest.mark.parametrize(
    ("parse", "error"),
    [
        (lambda data: data[100], IndexError),
        (lambda data: bytearray(1 << 32), MemoryError),
    ],
    ids=["another exception", "a huge allocation"],
)
def test_defects_are_found(parse: Any, error: type[Exception]) -> None:
    with limits(), pytest.raises(error):
        replace(TARGETS["trace"], parse=parse).check(b"")


@pytest.mark.parametrize("name", TARGETS)
def test_parser_accepts_its_sample(name: str) -> None:
    TARGETS[name].parse(TARGETS[name].sample())


FOUND = [
    ("vllm_log", _LOG.replace(b"[1, 2, 3]", b"[1, , 3]")),
    ("config", _CONFIGS[0] | {"num_hidden_layers": 2**31 - 1}),
    ("config", {"text_config": _CONFIGS[1]["text_config"] | {"num_attention_heads": 64}}),
    ("slot_header", _page(_FIELDS | {"fingerprint": [["a", 0], [1, 0]]})),
    ("slot_header", _page(_FIELDS | {"generation": -1})),
    ("slot_header", _page(_FIELDS | {"generation": 2**64})),
    ("answer", (b"$--1\r\n", 0)),
    ("answer", (b"$" + b"9" * 5000 + b"\r\n", 0)),
    ("block_header", b""),
    ("address", "redis://a/" + "9" * 5000),
]


@pytest.mark.parametrize(("name", "given_input"), FOUND)
def test_found_defect_stays_mended(name: str, given_input: Any) -> None:
    with limits():
        TARGETS[name].check(given_input)
