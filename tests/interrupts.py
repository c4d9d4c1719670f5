"""Interrupts a call before any of its lines, as Ctrl-C may."""

from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kvstow.engine

ENGINE = str(Path(kvstow.engine.__file__).parent)


def is_interrupted(
    call: Callable[[], object],
    line: int,
    sources: str | tuple[str, ...] = ENGINE,
    *,
    skipped: tuple[str, ...] = (),
) -> bool:
    """Interrupt `call` before it carries out line number `line` of the sources, counted from 1.

    Args:
        call: what to interrupt.
        line: number of the line, in the order in which lines are carried out.
        sources: files or folders; only their lines count.
        skipped: how lines begin that do not count.

    Returns:
        Whether the call has so many lines.
    """
    num_lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_lines
        name = frame.f_code.co_filename
        if not name.startswith(sources):
            return None
        if event == "line" and not _begins(name, frame.f_lineno, skipped):
            num_lines += 1
            if num_lines == line:
                raise KeyboardInterrupt
        return trace

    try:
        _traced(call, trace)
    except KeyboardInterrupt:
        return True
    return False


def is_interrupted_behind(call: Callable[[], object], number: int, sources: str) -> bool:
    """Interrupt `call` when its functions that are written in C have returned that many times.

    Only calls from the sources, a file or a folder, count. Returns whether there are so many.
    """
    num_returns = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_returns
        if event == "c_return" and frame.f_code.co_filename.startswith(sources):
            num_returns += 1
            if num_returns == number:
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


def lines_of(call: Callable[[], object], sources: str | tuple[str, ...]) -> list[tuple[str, int]]:
    """Return the file and the number of each line of the sources that `call` carries out."""
    lines: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(sources):
            return None
        if event == "line":
            lines.append((name, frame.f_lineno))
        return trace

    _traced(call, trace)
    return lines


def _traced(call: Callable[[], object], trace: Callable[[FrameType, str, object], Any]) -> None:
    """Trace a call, and nothing else in this thread.

    A collection within the call would end what other tests have dropped, whose lines would count.
    """
    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()


def _begins(name: str, number: int, with_what: tuple[str, ...]) -> bool:
    return bool(with_what) and linecache.getline(name, number).strip().startswith(with_what)
