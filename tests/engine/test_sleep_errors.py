"""Sleep and wake that are refused, fail or are interrupted."""

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.engine.sleep_world import WHO, FailingMover, World, prompt, state, world
from tests.interrupts import is_interrupted

from kvstow import (
    HOST,
    ConfigError,
    OutOfBlocks,
    SnapshotError,
    StateError,
    TransferError,
)
from kvstow.engine import snapshot_file
from kvstow.engine.sleep import _finish
from kvstow.transfer import READY, BlockLayout, HostArena, HostMover
from kvstow.transfer.ticket import HostTicket

# -- refusals ----------------------------------------------------------------------------------


def test_sleep_changes_nothing_if_the_host_is_too_small() -> None:
    with world(num_host=4) as it:
        it.run("a", prompt(1, 18))
        it.run("b", prompt(3, 18))
        it.settle()
        before = state(it.engine)
        with pytest.raises(OutOfBlocks, match="preempt requests first"):
            it.engine.sleep(after=READY)
        assert state(it.engine) == before
        it.go_on("a", 5)
        it.check()
        it.engine.preempt("b")
        del it.texts["b"]
        it.settle()
        it.engine.reset()
        with pytest.raises(OutOfBlocks):
            it.engine.sleep(after=READY)


@pytest.mark.parametrize("ranks", [1, 2])
def test_failed_copies_leave_the_engine_as_it_was(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    movers: list[FailingMover] = []

    def make(layout: BlockLayout, arena: HostArena) -> FailingMover:
        movers.append(FailingMover(layout, arena))
        return movers[-1]

    with world(ranks=ranks, mover=make) as it:
        it.run("a", prompt(1, 18))
        it.settle()
        before = state(it.engine)
        monkeypatch.setattr(FailingMover, "fails", "store")
        with pytest.raises(TransferError, match=r"could not be stored.*no store today"):
            it.engine.sleep(after=READY)
        assert state(it.engine) == before
        monkeypatch.setattr(FailingMover, "fails", "")
        it.sleep()
        monkeypatch.setattr(FailingMover, "fails", "load")
        for _ in range(2):
            with pytest.raises(TransferError, match=r"could not be loaded.*no load today"):
                it.wake()
        assert all(mover.is_closed for mover in movers), "of the sleeping engine, or of no use"
        monkeypatch.setattr(FailingMover, "fails", "")
        it.wake()
        it.check()


def test_no_copy_goes_on_after_another_has_failed() -> None:
    class Slow(HostTicket):
        def wait(self, timeout_s: float | None = None) -> None:
            self.end(None)

    failed, slow = HostTicket(), Slow()
    failed.end(TransferError("no store today"))
    with pytest.raises(TransferError, match="could not be stored: no store today"):
        _finish([[failed], [slow]], "stored")
    assert slow.poll(), "it would write into slots that are released"


def test_engine_goes_on_if_a_mover_cannot_be_closed_for_its_sleep() -> None:
    class Stuck(HostMover):
        is_stuck = False

        def close(self) -> None:
            super().close()
            if Stuck.is_stuck:
                raise TransferError("no close today")

    with world(mover=Stuck) as it:
        it.run("a", prompt(1, 18))
        it.settle()
        Stuck.is_stuck = True
        with pytest.raises(TransferError, match="no close today"):
            it.engine.sleep(after=READY)
        Stuck.is_stuck = False
        it.engine.poll()
        num_bytes = it.engine.stats()["stored_bytes"]
        it.go_on("a", 6)
        it.settle()
        assert it.engine.stats()["stored_bytes"] > num_bytes, "its movers are closed"
        it.check()


def test_engine_is_awake_without_copies_after_sleep_was_interrupted() -> None:
    class Interrupted:
        def wait(self) -> None:
            raise AssertionError("movers do not block in it")

        def add_done_callback(self, callback: Callable[[], None]) -> None:
            self.callback = callback

    event = Interrupted()
    with world() as it, pytest.MonkeyPatch.context() as patch:
        it.run("a", prompt(1, 18))
        it.settle()
        tables = it.engine.tables("a")[0].tolist()
        movers = list(it.engine.movers)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("kvstow.engine.sleep._finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            it.engine.sleep(after=event)
        it.engine.check()
        assert it.engine.tables("a")[0].tolist() == tables
        assert it.engine.scheduler.num_resident == len(it.engine.scheduler.used_slots())
        with pytest.raises(StateError, match="this HostMover is closed"):
            movers[0].load([0], [1], after=READY)
        event.callback()
        it.go_on("a", 5)
        it.check()


def test_wake_raises_unless_the_engine_sleeps() -> None:
    with world() as it:
        with pytest.raises(StateError, match="does not sleep"):
            it.wake()
        it.sleep()
        it.wake()
        with pytest.raises(StateError, match="does not sleep"):
            it.wake()
        it.sleep()
        it.engine.close()
        with pytest.raises(StateError, match="is closed"):
            it.wake()
        with pytest.raises(StateError, match="is closed"):
            it.sleep()


def test_wake_refuses_another_model_or_other_layouts() -> None:
    with world() as it:
        it.run("a", prompt(1, 18))
        it.sleep(**WHO)
        it.memory = it.new_memory(24, per_block=8)
        with pytest.raises(SnapshotError, match="give layouts of the model that slept"):
            it.engine.wake(it.layouts, after=READY, **WHO)
        with pytest.raises(ConfigError, match="groups has length 1 but layouts has length 2"):
            it.engine.wake(it.layouts * 2, after=READY, **WHO)
        with pytest.raises(SnapshotError, match="is of 'a model', not of 'b'"):
            it.wake(identity="b", weights_version="7")
        with pytest.raises(SnapshotError, match=r"weights version '7', not of '8'.*reset it"):
            it.wake(identity="a model", weights_version="8")
        with pytest.raises(ConfigError, match="expected an Event"):
            it.wake(after=None, **WHO)
        it.wake(**WHO)
        it.check()


def test_files_have_the_version_that_the_last_reset_named(tmp_path: Path) -> None:
    one: dict[str, Any] = {"identity": "a", "weights_version": "1"}
    two = one | {"weights_version": "2"}
    new, old = tmp_path / "new", tmp_path / "old"
    with world() as it:
        it.sleep(to=old, **one)
        it.wake(**one)
        it.engine.reset(weights_version="2")
        with pytest.raises(ConfigError, match="has named the weights '2'; pass that"):
            it.sleep(to=new, **one)
        assert not new.exists()
        it.sleep(to=new, **two)
        it.wake(**two)
        it.engine.reset()
        it.sleep(to=tmp_path / "without a name", **one)
    with world() as it:
        it.engine.reset(weights_version="2")
        with pytest.raises(ConfigError, match="weights_version is '1', but the last reset"):
            it.engine.restart(old, after=READY, **one)
        it.engine.restart(new, after=READY, **two)


def test_reset_that_is_interrupted_gives_old_blocks_no_new_name(tmp_path: Path) -> None:
    new: dict[str, Any] = {"identity": "a", "weights_version": "2", "to": tmp_path / "new"}
    is_cut_short, line = True, -1
    while is_cut_short:
        line += 2
        with world() as it:
            it.engine.reset(weights_version="1")
            it.run("writer", prompt(1, 9))
            it.settle()
            it.engine.finish("writer")
            is_cut_short = is_interrupted(lambda: it.engine.reset(weights_version="2"), line)
            if it.engine._state.weights_version != "2":
                with pytest.raises(
                    ConfigError, match=r"weights '1'; pass|short; call reset again$"
                ):
                    it.sleep(**new)
                it.engine.reset(weights_version="2")
            it.sleep(**new)
    assert line > 20, "the reset was interrupted at some of its lines only"


def test_blocks_keep_the_version_that_they_came_with(tmp_path: Path) -> None:
    """Without a reset, blocks of weights "1" would be served as those of weights "2"."""
    one: dict[str, Any] = {"identity": "a", "weights_version": "1"}
    two = one | {"weights_version": "2"}
    with world() as it:
        it.sleep(to=tmp_path / "old", **one)
        it.wake(**one)
        for to in HOST, tmp_path / "new":
            with pytest.raises(ConfigError, match="wake or restart has named the weights '1'"):
                it.sleep(to=to, **two)
        it.sleep()  # it names none
        it.wake()
        with pytest.raises(ConfigError, match="has named the weights '1'"):
            it.sleep(to=tmp_path / "new", **two)
    with world() as it:
        it.engine.restart(tmp_path / "old", after=READY, **one)
        with pytest.raises(ConfigError, match="or reset with that of new weights"):
            it.sleep(to=tmp_path / "new", **two)
        it.engine.reset(weights_version="2")
        it.sleep(to=tmp_path / "new", **two)


def test_close_that_is_interrupted_gives_old_blocks_no_new_name(tmp_path: Path) -> None:
    """Nothing uses an engine that slept and is not closed yet, because its memory is gone."""
    problem = r"sleeps: wake it|cut short while it slept: call close again$|is closed; build"
    is_cut_short, line, problems = True, 0, set[str]()

    def sleep_under_a_new_name(it: World) -> None:
        it.sleep(to=tmp_path / "new", identity="a", weights_version="2")

    def read(it: World) -> None:
        it.run("reader", prompt(1, 9))

    while is_cut_short:
        line += 1
        with world() as it:
            it.engine.reset(weights_version="1")
            it.run("writer", prompt(1, 9))
            it.settle()
            it.engine.finish("writer")
            it.sleep(identity="a", weights_version="1")
            is_cut_short = is_interrupted(it.engine.close, line)
            assert it.engine._state.weights_version == "1"
            for use in sleep_under_a_new_name, read:
                with pytest.raises(StateError, match=problem) as caught:
                    use(it)
                problems.add(str(caught.value))
    assert not (tmp_path / "new").exists()
    assert len(problems) == 3, "the close was interrupted at some of its lines only"


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("way", ["wake", "restart"])
def test_blocks_have_their_name_as_soon_as_they_are_back(way: str, tmp_path: Path) -> None:
    """An interrupt after them does not let another name through."""
    old, new = tmp_path / "old", tmp_path / "new"
    one: dict[str, Any] = {"identity": "a", "weights_version": "1"}
    with world() as it:
        it.run("writer", prompt(1, 9))
        it.settle()
        it.engine.finish("writer")
        it.sleep(to=old, **one)
    is_cut_short, line, num_named = True, 0, 0
    while is_cut_short:
        line += 3
        with world() as it:
            if way == "wake":
                it.run("writer", prompt(1, 9))
                it.settle()
                it.engine.finish("writer")
                it.sleep(**one)
                is_cut_short = is_interrupted(lambda: it.wake(**one), line)
            else:
                call = partial(it.engine.restart, old, after=READY, **one)
                is_cut_short = is_interrupted(call, line)
            state = it.engine._state
            if state.asleep is None and len(state.scheduler.used_slots()):
                num_named += 1
                with pytest.raises(ConfigError, match="has named the weights '1'"):
                    it.sleep(to=new, identity="a", weights_version="2")
    assert num_named > 1, "no line after the blocks was interrupted"


def test_file_needs_identity_and_weights_version(tmp_path: Path) -> None:
    with world() as it:
        halves: list[dict[str, Any]] = [{}, {"identity": "a"}, {"weights_version": "1"}]
        for options in halves:
            with pytest.raises(ConfigError, match="a file needs both"):
                it.engine.sleep(after=READY, to=tmp_path / "image", **options)
        for place in 5, None, b"image", "im\0age", "im\ud800age":
            with pytest.raises(ConfigError, match="pass HOST, or the name of a file"):
                it.engine.sleep(after=READY, to=place, **WHO)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="pass strings"):
            it.engine.sleep(after=READY, identity=b"a", weights_version="1")  # type: ignore[arg-type]
        with pytest.raises(
            SnapshotError, match=r"cannot be written: No such file.*create the folder"
        ):
            it.engine.sleep(after=READY, to=tmp_path / "no" / "image", **WHO)
        with pytest.raises(SnapshotError, match=r"name too long.*use shorter names"):
            it.engine.sleep(after=READY, to=tmp_path / ("f" * 300) / "image", **WHO)
        with pytest.raises(SnapshotError, match="is a folder; pass the path of a file in it"):
            it.engine.sleep(after=READY, to=tmp_path, **WHO)
        it.run("a", prompt(1, 9))
        it.check()


def test_file_replaces_no_pipe_and_no_socket(tmp_path: Path) -> None:
    pipe, bound, link = tmp_path / "pipe", tmp_path / "socket", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with socket.socket(socket.AF_UNIX) as server, world() as it:
        server.bind(str(bound))
        it.run("a", prompt(1, 9))
        for place in pipe, bound:
            with pytest.raises(SnapshotError, match=f"{place} is a device, a pipe or a socket"):
                it.engine.sleep(after=READY, to=place, **WHO)
        it.check()
        it.engine.sleep(after=READY, to=link, **WHO)  # the file takes the place of the link
        it.wake(**WHO)
        it.check()
    assert pipe.is_fifo() and bound.is_socket()
    assert link.is_file() and not link.is_symlink()


def test_file_does_not_replace_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def replacing(path: Path) -> None:
        raise AssertionError(f"{path} would be replaced")

    monkeypatch.setattr(snapshot_file, "replacing", replacing)
    with world() as it:
        with pytest.raises(SnapshotError, match="/dev/null is a device"):
            it.engine.sleep(after=READY, to=os.devnull, **WHO)
        it.check()
