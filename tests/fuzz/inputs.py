"""What parsers are fed: valid samples with a few changes, and values of every JSON type."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

_NUMBERS = st.one_of(
    st.integers(-2, 3),
    st.sampled_from([2**k + more for k in (7, 15, 16, 31, 32, 53, 63, 64) for more in (-1, 0)]),
    st.integers(),
    st.floats(),
)
_TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "\0", "٣", "\ud800", "9" * 5000, "-", "1e400", "full_attention"]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.lists(st.tuples(st.one_of(st.text(max_size=2), _NUMBERS), inner), max_size=3),
    ),
    max_leaves=6,
)

_PIECES = st.one_of(
    st.binary(max_size=6),
    st.sampled_from(
        [b"\0" * 8, b"\xff" * 8, b"9" * 5000, b"--1", b"\r\n", b"[" * 2000, b'"', b",", b"\x1f\x8b"]
    ),
)


@st.composite
def damaged(draw: st.DrawFn, *samples: bytes) -> bytes:
    """Return a sample with some bytes replaced, inserted, removed or repeated."""
    data = draw(st.sampled_from(samples))
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.integers(0, 12)))
        kind = draw(st.sampled_from(["replace", "insert", "repeat", "cut"]))
        if kind == "cut":
            data = data[:begin]
        elif kind == "repeat":
            data = data[:end] + data[begin:]
        else:
            rest = data[end:] if kind == "replace" else data[begin:]
            data = data[:begin] + draw(_PIECES) + rest
    return data


@st.composite
def changed(draw: st.DrawFn, *samples: Any) -> Any:
    """Return a sample in JSON's types with some values replaced, removed or added."""
    value = copy.deepcopy(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(0, 3))):
        inner = value
        while isinstance(inner, dict | list) and inner:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            key = draw(st.sampled_from(keys))
            deeper = inner[key]
            if not (isinstance(deeper, dict | list) and deeper) or draw(st.booleans()):
                if draw(st.integers(0, 3)):
                    inner[key] = draw(VALUES)
                else:
                    del inner[key]
                break
            inner = deeper
        else:
            value = draw(VALUES)
    return value
