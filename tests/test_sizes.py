import math

import numpy as np
import pytest

from kvstow import ConfigError
from kvstow.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        ("32GiB", 32 << 30), ("512MB", 512_000_000), ("1kB", 1000), ("1KB", 1000), ("1KiB", 1024),
        ("2TiB", 2 << 40), ("1PB", 10**15), ("7B", 7), ("34359738368", 1 << 35),
        ("32 gib", 32 << 30), (" 1.5GiB ", 3 << 29), ("0.1GiB", 107_374_182), ("2.0", 2),
        (1, 1), (1 << 40, 1 << 40), (1e9, 10**9), (2.0, 2), (np.int64(5), 5), (np.float64(6), 6),
        (2**63 - 1, 2**63 - 1),
    ],
)  # fmt: skip
def test_sizes_with_and_without_unit(value: object, num_bytes: int) -> None:
    found = parse_bytes(value)
    assert (found, type(found)) == (num_bytes, int)


@pytest.mark.parametrize(
    "value",
    [
        "", "GiB", "32 Gigs", "32XiB", "32iB", "32G", "32Gi", "-1GiB", "+1", "1,5GiB", "1.GiB",
        ".5GiB", "1e9", "1_000", "0x10", "\u0663GiB", "1.5", "inf", "nan", "9" * 50, 1.5, math.inf,
        math.nan, True, None, b"32GiB", [32],
    ],
)  # fmt: skip
def test_the_error_for_a_bad_size_lists_the_units(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^room is .* not a size: .* KiB, MiB, GiB") as caught:
        parse_bytes(value, name="room")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [0, "0", "0GiB", "0.5B", -1, -1e9, 2**63, "9999999PiB", 1e300])
def test_sizes_out_of_bounds_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"it must be 1 to 2\^63 - 1 bytes"):
        parse_bytes(value)


def test_an_integer_too_long_to_print_is_refused() -> None:
    with pytest.raises(ConfigError, match="is an integer of thousands of digits; it must be 1 to"):
        parse_bytes(10**5000)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.00 MiB"), (96 << 20, "96.00 MiB"), (1 << 30, "1.00 GiB"), (3 << 40, "3,072.00 GiB")],
)
def test_size_is_written_in_the_unit_that_it_is_given_in(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
