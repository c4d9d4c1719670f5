"""Stress an `Engine` with Ctrl-C at random moments, forks, and a thread that reads `stats`.

    python -m tests.stress --seconds 600 [--seed 7]

It compares every token that a request reads, and calls `check` after each interrupt. The exit
status is 1 after a wrong token, a failed check, or a hang.
"""

import argparse
import faulthandler
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.engine_loop import SHAPES, Loop

from kvstow import StateError
from kvstow.transfer import READY

_HANG_S = 20.0
_FORK_S = 20.0


class Stress:
    """One engine's life after another, until the time is over."""

    def __init__(self, seed: int) -> None:
        self.chances = random.Random(seed)
        self.counts = dict.fromkeys(["lives", "turns", "interrupts", "forks", "stats"], 0)
        self.loop: Loop | None = None
        self.is_over = False

    def run(self, seconds: float) -> None:
        """Live until the time is over. Raise the first error."""
        end_s = time.monotonic() + seconds
        reader = threading.Thread(target=self.read_stats, daemon=True)
        reader.start()
        before = signal.signal(signal.SIGALRM, self.interrupt)
        try:
            while time.monotonic() < end_s:
                with tempfile.TemporaryDirectory() as folder:
                    self.live(Path(folder), min(end_s, time.monotonic() + 5))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            self.is_over = True
            faulthandler.cancel_dump_traceback_later()
        reader.join(10)
        assert not reader.is_alive(), "the thread that reads stats hangs"

    def interrupt(self, *_: object) -> None:
        """Raise what Ctrl-C raises, but not while the device computes."""
        if self.loop is not None and self.loop.is_device_busy:
            signal.setitimer(signal.ITIMER_REAL, 0.0002)
            return
        raise KeyboardInterrupt

    def live(self, folder: Path, end_s: float) -> None:
        shape = self.chances.choice(list(SHAPES))
        loop = Loop(self.chances.randrange(2**32), folder=folder, **SHAPES[shape])
        self.loop = loop
        self.counts["lives"] += 1
        while time.monotonic() < end_s:
            faulthandler.dump_traceback_later(_HANG_S, exit=True)
            self.counts["turns"] += 1
            try:
                # The timer interrupts one of the turns that follow.
                signal.setitimer(signal.ITIMER_REAL, self.chances.uniform(0.00001, 0.02))
                for _ in range(self.chances.randrange(1, 100)):
                    loop.turn()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except BaseException as error:
                signal.setitimer(signal.ITIMER_REAL, 0)
                if not _is_of_interrupt(error):
                    raise
                self.counts["interrupts"] += 1
                self.go_on(loop)
            if self.chances.random() < 0.01:
                self.fork(loop)
        loop.serve_all()
        self.loop = None
        loop.close()

    def go_on(self, loop: Loop) -> None:
        """Go on after an interrupt at any place."""
        loop.engine.check()
        if loop.engine._state.asleep is not None:
            loop.wake({"identity": "a model", "weights_version": "1"})
            loop.engine.check()
        loop.adopt()
        if loop.must_reset:
            loop.reset()
        while loop.launched:  # a compute that the interrupt hit runs again
            loop.run_one()
        loop.engine.check()

    def fork(self, loop: Loop) -> None:
        """Fork a child that exits at once, or that uses the engine first."""
        self.counts["forks"] += 1
        touches = self.chances.random() < 0.5
        child = os.fork()
        if child == 0:
            status = 1
            with suppress(BaseException):
                if touches:
                    with suppress(Exception):
                        loop.engine.add("child", [])
                        loop.engine.admit("child", 5, 5, after=READY)
                    with suppress(Exception):
                        loop.engine.close()
                status = 0
            os._exit(status)
        limit_s = time.monotonic() + _FORK_S
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > limit_s:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError("a forked child hangs")
            time.sleep(0.001)
        assert ended[1] == 0, f"a forked child ended with {ended[1]}"

    def read_stats(self) -> None:
        evicted, engine = 0.0, None
        while not self.is_over:
            loop = self.loop
            if loop is not None:
                stats: dict[str, Any] = loop.engine.stats()
                if loop.engine is engine:
                    assert stats["device_evicted_blocks"] >= evicted, "the count went down"
                evicted, engine = stats["device_evicted_blocks"], loop.engine
                self.counts["stats"] += 1
            time.sleep(0.0005)


def _is_of_interrupt(error: BaseException | None) -> bool:
    """Return whether an interrupt caused an error. After one, conditions may raise RuntimeError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def main() -> int:
    """Run, and print what was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    stress = Stress(options.seed)
    try:
        stress.run(options.seconds)
    except (AssertionError, StateError):
        if stress.loop is not None:
            print(f"the engine's seed {stress.loop.seed}", file=sys.stderr)
        raise
    finally:
        print(", ".join(f"{count:,} {name}" for name, count in stress.counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
