"""Weights that change at random in place: no request may read KV that other weights computed.

vLLM pauses in each of its modes, or resets its caches while requests run, until a reset succeeds.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.vllm.halves import FULL, WINDOW
from tests.vllm.simulated import Simulated, WrongKV
from tests.vllm.test_simulated import Life
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvstow.vllm import KVStowConnector

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


class WeightsLife(Life):
    """Also pauses, sleeps and changes the weights."""

    def __init__(self, engine: Simulated, seed: int, version: Path | None) -> None:
        """With `version`, that file names the weights, and the tier may outlive a reset."""
        super().__init__(engine, seed)
        self.version = version
        self.counts: Counter[str] = Counter()

    def go_on(self, num_happenings: int) -> None:
        """Let things happen, and ask for all that is stored."""
        kinds = ["add"] * 6 + ["step"] * 14 + ["copy"] * 8 + ["abort", "reset"] * 2
        kinds += ["pause", "swap"]
        kinds += [] if self.engine.drafts else ["session", "chunk"] * 2
        for _ in range(num_happenings):
            kind = self.dice.choice(kinds)
            self.happened.append(kind)
            getattr(self, kind)()
        self.go(0)

    def pause(self) -> None:
        """Pause as before a sleep or an update of the weights, and resume."""
        mode = self.dice.choice(["abort", "wait", "keep"])
        scheduler = self.engine.scheduler
        if mode == "abort":
            for name in self.engine.requests:
                self.asked.pop(name, None)
            scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self._close_sessions()
        scheduler.set_pause_state(
            PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        )
        while scheduler.has_requests() or self.engine.steps:
            if self.dice.random() < 0.1:
                self.add()
            self._turn()
        assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if self.version is None or self.dice.random() < 0.5:
            self._change()
        self.counts["paused"] += 1
        for _ in range(self.dice.randrange(3)):
            self.add()
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def swap(self) -> None:
        """Change the weights while requests run, and ask for resets until one succeeds."""
        preempts = self.dice.random() < 0.7
        self._close_sessions()
        self._change()
        self.engine.is_checked = is_reset = is_told = False
        while not is_reset:
            try:
                is_reset = self.engine.scheduler.reset_prefix_cache(
                    reset_running_requests=preempts,
                    # The file or the first call that does not raise is enough.
                    reset_connector=self.dice.random() < 0.3
                    or (self.version is None and not is_told),
                )
                is_told = True
            except RuntimeError:  # loads, stores or steps under way hold blocks
                self.counts["raised"] += 1
            if is_reset:
                break
            if self.dice.random() < 0.1:
                self.engine.settle()
            for _ in range(self.dice.randrange(1, 6)):
                self._turn()
            self.add()
        self.engine.is_checked = True
        self._forget()
        self.counts["swapped"] += 1

    def _turn(self) -> None:
        if self.dice.random() < 0.7:
            self.copy()
        self.engine.step()

    def _change(self) -> None:
        self.engine.weights += 1
        if self.version is not None:
            self.version.write_text(str(self.engine.weights))
        self._forget()

    def _forget(self) -> None:
        """Expect no certain answer of requests that begin before this moment."""
        self.asked.clear()
        self.engine.hashed.clear()

    def _close_sessions(self) -> None:
        """Close sessions, because those between chunks hold blocks, and vLLM then refuses."""
        for name in self.sessions:
            if name in self.engine.requests:
                self.engine.add(name, [], resumable=False)
        self.sessions.clear()


def live(
    folder: Path,
    seed: int,
    *,
    version: Path | None,
    num_in_flight: int = 2,
    lazy: bool = False,
    drafts: bool = False,
) -> Counter[str]:
    options: dict[str, object] = {"num_cpu_blocks": 400, "lazy_offload": lazy}
    if version is not None:
        version.write_text("0")
        options |= {"preserve_on_sleep": True, "weights_version_path": str(version)}
    is_hybrid = seed % 2 == 0
    engine = Simulated(
        folder,
        options,
        specs=(FULL, WINDOW) if is_hybrid else (FULL,),
        num_blocks=80 if is_hybrid else 50,
        num_in_flight=num_in_flight,
        drafts=drafts,
        seed=seed,
        settings={"scheduling_policy": "priority", "long_prefill_token_threshold": 32},
    )
    life = WeightsLife(engine, seed, version)
    life.go_on(400)
    engine.close()
    return life.counts


@pytest.mark.parametrize("has_version", [False, True], ids=["no version", "version"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("num_in_flight", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(2))
def test_requests_read_no_kv_of_other_weights(
    folder: Path, tmp_path: Path, seed: int, num_in_flight: int, *, lazy: bool, has_version: bool
) -> None:
    version = tmp_path / "version" if has_version else None
    counts = live(folder, seed, version=version, num_in_flight=num_in_flight, lazy=lazy)
    assert min(counts["paused"], counts["swapped"], counts["raised"]) > 0, counts


def test_requests_with_drafts_read_no_kv_of_other_weights(folder: Path) -> None:
    assert live(folder, 1, version=None, drafts=True)["swapped"] > 0


@pytest.mark.parametrize("has_version", [False, True], ids=["no version", "version"])
def test_without_resets_requests_read_kv_of_other_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_version: bool
) -> None:
    """The negative control: kvstow ignores resets, or the file does not change."""
    if not has_version:
        monkeypatch.setattr(KVStowConnector, "reset_cache", lambda _: True)
    else:
        monkeypatch.setattr(Path, "write_text", lambda *_: None)
        (tmp_path / "version").write_bytes(b"0")
    with pytest.raises(WrongKV):
        live(folder, 1, version=tmp_path / "version" if has_version else None)
