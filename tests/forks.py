"""Checks in a forked child, which must not hang."""

import os
import signal
import traceback
from collections.abc import Callable

LONG_S = 60


def in_child(check: Callable[[], None]) -> None:
    """Run `check` in a forked child. Fail if it raises, hangs or crashes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LONG_S)
        try:
            check()
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        failure = pipe.read()
    _, status = os.waitpid(child, 0)
    assert not failure, failure
    assert status == 0, f"the child was ended by signal {status & 127}"
