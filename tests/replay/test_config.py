import math

import numpy as np
import pytest

from kvstow import ConfigError
from kvstow.replay.config import ReplayConfig, link_bytes_per_s

NAN = math.nan


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("device_blocks", 1, "device-blocks is 1; it must be 2 to 2147483647"),
        ("device_blocks", 2**31, "device-blocks is 2147483648"),
        (
            "host_blocks",
            0,
            "host-blocks is 0; it must be 1 to 2147483647: pass 1 for as good as none",
        ),
        ("host_blocks", -5, "host-blocks is -5"),
        ("host_blocks", np.int64(-5), "host-blocks is -5"),
        ("max_step_tokens", 0, "max-step-tokens is 0"),
        ("max_requests", -1, "max-requests is -1"),
        ("max_requests", 10**30, "max-requests is 10000"),
        ("num_layers", 0, "layers is 0; it must be 1 to 10000"),
        ("num_layers", 10_001, "layers is 10001"),
        ("bytes_per_token", 0, "bytes-per-token is 0"),
        ("step_ms", -0.1, "step-ms is -0.1; it must be 0 to 1000000 ms"),
        ("step_ms", NAN, "step-ms is nan"),
        ("prefill_token_ms", math.inf, "prefill-token-ms is inf"),
        ("decode_request_ms", 1e7, "decode-request-ms is 10000000.0"),
        ("bandwidth_bytes_per_s", 0.0, "bandwidth is 0.0; it must be 1 to inf bytes/s"),
        ("bandwidth_bytes_per_s", NAN, "bandwidth is nan"),
        ("policy", "arc", "policy is 'arc'; it must be one of lru, hit-density"),
        ("mode", "lazi", "mode is 'lazi'; it must be one of eager, lazy"),
        ("model", "gpt-2", "model is 'gpt-2'; it must be the path of a config.json or one of"),
        ("mover", "gpu", "mover is 'gpu'; it must be one of auto, host, cuda"),
        ("verify", "some", "verify is 'some'; it must be one of all, sample, off"),
        (
            "disk_admit",
            "returned",
            "disk-admit is returned, and there is no disk tier: pass --disk",
        ),
    ],
)
def test_the_error_for_a_bad_option_names_value_and_bounds(
    option: str, value: object, problem: str
) -> None:
    options: dict[str, object] = {"device_blocks": 8, "host_blocks": 8, option: value}

    with pytest.raises(ConfigError) as caught:
        ReplayConfig(**options)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"--{problem}")


def test_pools_larger_than_the_free_memory_are_refused() -> None:
    config = ReplayConfig(device_blocks=8, host_blocks=2**31 - 1)

    with pytest.raises(
        ConfigError,
        match=r"2147483647 host blocks of 4096 bytes need 8\d+\.\d GiB.* are free: lower",
    ):
        config.check_memory(config.build_model(512))
    ReplayConfig(device_blocks=8, host_blocks=8).check_memory(config.build_model(512))


def test_the_link_slows_down_with_the_size_of_a_token() -> None:
    """A block of an 8B-class model takes 512 * 128 KiB / 50 GB/s; so does one of any size here."""
    block_s = 512 * 131_072 / 50e9

    assert 512 * 8 / link_bytes_per_s(8) == pytest.approx(block_s)
    config = ReplayConfig(device_blocks=8, host_blocks=8, bytes_per_token=64)
    assert 512 * 64 / config.bytes_per_s(config.build_model(512)) == pytest.approx(block_s)


def test_the_link_slows_down_with_the_size_of_a_token_of_the_named_model() -> None:
    config = ReplayConfig(device_blocks=8, host_blocks=8, model="qwen3-8b")

    assert 8 / config.bytes_per_s(config.build_model(512)) == pytest.approx(147_456 / 50e9)
