"""Warn of a trace whose times or lengths are surely not what the commands take them for.

Its timestamps may be seconds or microseconds, its lines not in the order of arrival, and the blocks
of ids that name passages far from the lengths of the prompts. Or no id names a passage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from kvstow.replay.trace import TraceRequest

# So many prompt tokens a second are more than a server can parse. Fewer requests may be an example
# that somebody wrote by hand, with any times.
_TOO_MANY_TOKENS_PER_S: Final = 5e6
# So many may be a test of load, which has whole milliseconds. Seconds have fractions.
_TOO_MANY_WITH_FRACTIONS_PER_S: Final = 1e6
_LEAST_FRACTION: Final = 1e-3  # less may come from rounding
_LEAST_REQUESTS: Final = 100
# Seconds since 1970 have ten digits. As milliseconds they would lie in the second week of a
# recording or later, which alone is no proof.
_FIRST_SINCE_1970_MS, _LAST_SINCE_1970_MS = 1e9, 1e10
_MANY_TOKENS_PER_S: Final = 1e5
# With fractions they hardly are milliseconds. These would be one token in a second.
_FEW_TOKENS_PER_S: Final = 1e3
# As milliseconds since 1970 they would lie beyond the year 5000. Microseconds are above in 1974.
_LEAST_MICROSECONDS: Final = 1e14
# On RAGPulse, with nominal blocks of 512 tokens, the prompts count 1.8 times their lengths.
_TOO_FAR_OFF: Final = 4
# vLLM may admit a request before another that came a little earlier. A log in the order of
# completion is late by no more than an answer takes.
_TOO_LATE_S: Final = 60
_TOO_MANY_LATE: Final = 0.5  # of the lines
# Threads that write one log, or vLLM, seldom turn two requests of different seconds round.
_LATE_S: Final = 1
_MANY_LATE: Final = 0.1  # of the lines


def warn_of_times(requests: Sequence[TraceRequest]) -> None:
    """Print a warning to standard error if a plan or a replay would get the times wrong."""
    warn_of_disorder(requests)
    warn_of_seconds(requests)
    warn_of_microseconds(requests)
    warn_of_lengths(requests)
    warn_of_chained(requests)


def warn_of_disorder(requests: Sequence[TraceRequest]) -> None:
    """Print a warning to standard error if the requests are surely not in the order of arrival."""
    late = [request for request in requests if request.late_s > 0]
    if not late:
        return
    worst = max(late, key=lambda request: request.late_s)
    num_later = sum(request.late_s > _LATE_S for request in late)
    if (
        worst.late_s > _TOO_LATE_S
        or len(late) > _TOO_MANY_LATE * len(requests)
        or (len(requests) >= _LEAST_REQUESTS and num_later > _MANY_LATE * len(requests))
    ):
        click.echo(
            f"kvstow: {len(late):,} of {len(requests):,} requests have an earlier timestamp than "
            f"one before them, that of line {worst.line} by {worst.late_s:,.1f} s, so their order "
            "and arrivals are wrong: give all timestamps one unit, and sort the lines by timestamp",
            err=True,
        )


def warn_of_seconds(requests: Sequence[TraceRequest]) -> None:
    """Print a warning to standard error if the timestamps are very likely seconds."""
    first_s, span_s = requests[0].arrival_s, requests[-1].arrival_s - requests[0].arrival_s
    if len(requests) < _LEAST_REQUESTS or span_s <= 0:
        return
    tokens_per_s = sum(request.prompt_tokens for request in requests) / span_s
    times_ms = [request.arrival_s * 1000 for request in requests]
    num_fractions = sum(abs(time_ms - round(time_ms)) > _LEAST_FRACTION for time_ms in times_ms)
    has_fractions = num_fractions > len(requests) / 2
    if _FIRST_SINCE_1970_MS <= first_s * 1000 < _LAST_SINCE_1970_MS:
        most_tokens_per_s = _FEW_TOKENS_PER_S if has_fractions else _MANY_TOKENS_PER_S
    else:
        most_tokens_per_s = (
            _TOO_MANY_WITH_FRACTIONS_PER_S if has_fractions else _TOO_MANY_TOKENS_PER_S
        )
    if tokens_per_s > most_tokens_per_s:
        click.echo(
            "kvstow: are the timestamps seconds? kvstow expects milliseconds, and takes this trace "
            f"for {tokens_per_s:,.0f} prompt tokens a second: multiply seconds by 1000",
            err=True,
        )


def warn_of_microseconds(requests: Sequence[TraceRequest]) -> None:
    """Print a warning to standard error if the timestamps are microseconds since 1970."""
    if requests[0].arrival_s * 1000 >= _LEAST_MICROSECONDS:
        click.echo(
            "kvstow: are the timestamps microseconds? kvstow expects milliseconds: divide "
            "microseconds by 1000",
            err=True,
        )


def warn_of_lengths(requests: Sequence[TraceRequest]) -> None:
    """Print a warning to standard error if ids of passages count far more or fewer tokens."""
    nominal = [request for request in requests if request.input_length is not None]
    counted = sum(request.prompt_tokens for request in nominal)
    lengths = sum(request.input_length or 0 for request in nominal)
    if counted > _TOO_FAR_OFF * lengths or lengths > _TOO_FAR_OFF * counted:
        each = max(1, round(lengths / sum(len(request.trace_ids) for request in nominal)))
        click.echo(
            f"kvstow: with --chain each id counts as a whole block, so the prompts have "
            f"{counted:,} tokens, and {lengths:,} by their input_length: pass --block-size {each}, "
            "the tokens of an id on average, or leave out --chain if the ids do not name passages",
            err=True,
        )


def warn_of_chained(requests: Sequence[TraceRequest]) -> None:
    """Print a warning to standard error if ids that were to name passages name chained blocks.

    Such ids need no chaining, and a partly filled last block would count as a whole one.
    """
    if len(requests) < _LEAST_REQUESTS or any(one.input_length is None for one in requests):
        return
    before: dict[int, int | None] = {}
    repeats = 0
    for request in requests:
        block_size = request.prompt_tokens // len(request.trace_ids)
        if len(request.trace_ids) != -(-(request.input_length or 0) // block_size):
            return
        last: int | None = None
        for one in request.trace_ids:
            repeats += one in before
            if before.setdefault(one, last) != last:
                return
            last = one
    if repeats:
        click.echo(
            "kvstow: the ids are chained already, because each always has the same id before it: "
            "leave out --chain, which counts the last block of each prompt as a whole one",
            err=True,
        )
