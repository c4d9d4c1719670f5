"""Checks of what the user of an `Engine` passes. A wrong type raises `ConfigError`."""

import inspect
import operator
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from numbers import Real
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import ChunkedLocal, ConfigError, FullAttention, SlidingWindow, StateSpace
from kvstow.arguments import checked_int, is_path
from kvstow.transfer.layout import MAX_BLOCKS

_MAX_SIZE = 1 << 40

Group = FullAttention | SlidingWindow | ChunkedLocal | StateSpace
Policy: TypeAlias = Literal["lru", "hit-density"]


def checked_groups(groups: Sequence[Group]) -> list[Group]:
    """Return the groups as a list."""
    given: object = groups
    if isinstance(given, Sequence) and all(isinstance(group, Group) for group in given):
        return list(groups)
    raise ConfigError(
        f"groups is {groups!r}, expected a list of groups: pass one for each block table, "
        "[FullAttention(16)] for a model with full attention only"
    )


def checked_limit_s(name: str, timeout_s: float | None) -> float | None:
    """Return a time limit in seconds, above 0, or None."""
    if timeout_s is None:
        return None
    if isinstance(timeout_s, Real) and 0 < timeout_s < float("inf"):
        with suppress(OverflowError):  # of a whole number that no float can hold
            return float(timeout_s)
    raise ConfigError(
        f"{name} is {timeout_s!r}, expected seconds above 0: pass a number, or None to wait for "
        "every copy"
    )


def checked_counts(
    name: str, counts: Sequence[int] | npt.NDArray[np.integer], num_expected: int
) -> list[int]:
    """Return `num_expected` counts as a list of ints. Refuse a set, because it has no order."""
    given: object = counts
    if isinstance(given, set | frozenset | dict):
        raise ConfigError(
            f"{name} is of type {type(given).__name__}, expected a sequence of integers: pass a "
            "list, in the order of request_ids"
        )
    try:
        numbers = list(map(operator.index, counts))  # int() would also take 63.7 and "64"
    except TypeError as error:
        raise ConfigError(
            f"{name} is {counts!r}, expected a sequence of integers ({error}): pass one for each "
            "request"
        ) from error
    if len(numbers) != num_expected:
        raise ConfigError(
            f"{num_expected} request_ids but {len(numbers)} {name}: pass one for each request"
        )
    return numbers


def checked_names(request_ids: Sequence[str]) -> Sequence[str]:
    """Return the request ids. Refuse a single string, because each letter would be an id."""
    given: object = request_ids
    if isinstance(given, list | tuple):
        return request_ids
    has_order = isinstance(given, Collection) and not isinstance(given, set | frozenset)
    if not has_order or getattr(given, "ndim", 1) != 1:
        raise ConfigError(
            f"request_ids is of type {type(given).__name__}, expected a list of request ids: pass "
            "them in the order of their numbers"
        )
    if isinstance(request_ids, str):
        raise ConfigError(
            f"request_ids is {request_ids!r}, expected a list of request ids: pass "
            f"[{request_ids!r}]"
        )
    return request_ids


def refuse_repeated(request_ids: Sequence[str]) -> None:
    """Raise the error for a request that is named more than once."""
    [(repeated, num_times)] = Counter(request_ids).most_common(1)
    raise ConfigError(
        f"request_ids names {repeated!r} {num_times} times: name each request once, with all "
        "of its tokens"
    )


def checked_num_device_blocks(num_blocks: object) -> int:
    """Return the blocks of a device that has a usable one."""
    fix = "pass the blocks of the device's memory, the null block included"
    return checked_int("num_device_blocks", num_blocks, 2, MAX_BLOCKS, fix)


def checked_num_host_blocks(num_blocks: object) -> int:
    """Return the slots of a host tier that has one or more."""
    fix = "pass how many slots the host tier has, not its bytes"
    return checked_int("num_host_blocks", num_blocks, 1, MAX_BLOCKS - 1, fix)


def checked_world_size(num_ranks: object) -> int:
    """Return the ranks of an engine that has one or more."""
    return checked_int("world_size", num_ranks, 1, MAX_BLOCKS, "pass the number of ranks")


def check_max_in_flight_tokens(num_tokens: object) -> None:
    """Refuse a bound of tokens in flight with which no request could compute."""
    if num_tokens is not None:
        fix = "pass the most tokens that one request has in unfinished steps, or None"
        checked_int("max_in_flight_tokens", num_tokens, 1, _MAX_SIZE, fix)


def checked_size(name: str, size: object) -> int:
    """Return a number of blocks or tokens as an int of 0 or more."""
    return checked_int(name, size, 0, _MAX_SIZE, "pass a whole number")


def check_names(**names: object) -> None:
    """Refuse a name that is no string. What builds the parts knows the names."""
    for argument, name in names.items():
        if not isinstance(name, str):
            raise ConfigError(f"{argument} is {name!r}, expected a str: pass its name")


def check_path(argument: str, path: object) -> None:
    """Refuse what cannot name a file."""
    if not is_path(path):
        raise ConfigError(f"{argument} is {path!r}, expected a str or a Path: name a file")


def check_flag(argument: str, flag: object, fix: str) -> None:
    """Refuse a flag that is neither True nor False."""
    if not isinstance(flag, bool):
        raise ConfigError(f"{argument} is {flag!r}, expected True or False: {fix}")


def check_callables(**given: object) -> None:
    """Refuse an argument that is not callable."""
    for name, function in given.items():
        if not callable(function):
            raise ConfigError(f"{name} is {function!r}, expected a callable: pass a function")


def check_mover(mover: object) -> None:
    """Refuse what makes no mover of a layout and an arena, such as a class that wraps movers."""
    check_callables(mover=mover)
    assert callable(mover)
    try:
        inspect.signature(mover).bind("layout", "arena")
    except ValueError:  # it has no signature that Python can read
        return
    except TypeError as error:
        raise ConfigError(
            f"mover is {mover!r}, which the engine cannot call with a layout and an arena "
            f"({error}): pass mover_for, or partial(mover_for, verify=True) for a VerifiedMover"
        ) from None
