"""Input, output and exit statuses of the commands.

A command runs in a child process only where its interpreter or the system takes part.
"""

import bz2
import errno
import gzip
import importlib.metadata
import json
import os
import pty
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import click
import numpy as np
import pytest

from kvstow import Engine, FullAttention, choices, cli
from kvstow.output import ResultFile
from kvstow.replay import command
from kvstow.replay.bundled import BUNDLED_NAME
from kvstow.transfer import READY, BlockLayout

ROW = '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}\n'
OK, FAILED, USAGE, BUG, IO_ERROR = 0, 1, 2, 70, 74


def kvstow(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE} | options
    return subprocess.run(
        [sys.executable, "-m", "kvstow", *arguments],
        stderr=subprocess.PIPE, text=True, check=False, timeout=120, **options,
    )  # fmt: skip


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what runs a command in this process."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        status = cli.main(arguments)
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run


def shell(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a bash script in which `kvstow` is the command and `$1`, ... are the arguments."""
    script = f'kvstow() {{ {sys.executable} -m kvstow "$@"; }}; {script}'
    return subprocess.run(
        ["bash", "-c", script, "-", *arguments],
        capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(ROW * 3)
    return path


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Return a snapshot whose identity looks like markup."""
    path = tmp_path / "image[bold]:smile:"
    layouts = [BlockLayout.from_arrays([np.zeros((4, 8))])]
    with Engine(4, 4, [FullAttention(8)], layouts) as engine:
        engine.sleep(
            after=READY, to=path, identity="org/[/model][bf16]:smile:", weights_version="1"
        )
    return path


@pytest.fixture(params=["replay", "snapshot"])
def arguments(request: pytest.FixtureRequest, trace: Path, image: Path) -> list[str]:
    commands = {"replay": ["replay", str(trace)], "snapshot": ["snapshot", "info", str(image)]}
    return commands[request.param]


# -- installation ------------------------------------------------------------------------------


def test_commands_load_where_a_choice_takes_no_type(monkeypatch: pytest.MonkeyPatch) -> None:
    old = type("Choice", (click.Choice,), {"__class_getitem__": None})  # as click 8.1 has it
    monkeypatch.setattr(click, "Choice", old)
    assert issubclass(runpy.run_path(choices.__file__)["OneOf"], old)


def test_a_plain_installation_has_the_command_line() -> None:
    required = importlib.metadata.requires("kvstow") or []
    base = {line.partition(">")[0] for line in required if "extra ==" not in line}
    assert base == {"numpy", "click", "packaging", "rich"}


def test_the_package_runs_as_a_module() -> None:
    done = kvstow("--version")
    assert (done.returncode, done.stdout.split()[0]) == (OK, "kvstow,")


# -- output ------------------------------------------------------------------------------------


def test_json_goes_to_standard_output_or_to_a_file(
    run: Run, arguments: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    printed, written = run(*arguments, "--json"), run(*arguments, "--json-file", str(path))
    assert (printed.returncode, printed.stderr) == (written.returncode, written.stderr) == (OK, "")
    assert json.loads(printed.stdout).keys() == json.loads(path.read_text()).keys()
    assert not written.stdout.startswith("{")
    both = run(*arguments, "--json", "--json-file", str(path))
    assert both.stdout == path.read_text()


def test_output_that_cannot_be_written_is_status_74(
    run: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "kvstow: standard output: No space left on device\n"
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        done = run(*arguments)
    assert (done.returncode, done.stderr) == (IO_ERROR, message)

    monkeypatch.setattr(sys, "stdout", None)
    done = run(*arguments)
    assert done.returncode == IO_ERROR
    assert done.stderr == "kvstow: standard output: Bad file descriptor\n"


def test_python_reports_output_that_cannot_be_written_no_second_time(trace: Path) -> None:
    with open("/dev/full", "w") as full:
        done = kvstow("replay", str(trace), stdout=full)
    message = "kvstow: standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (IO_ERROR, message)
    done = shell('kvstow replay "$1" >&-', str(trace))
    message = "kvstow: standard output: Bad file descriptor\n"
    assert (done.returncode, done.stderr) == (IO_ERROR, message)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [("replay", []), ("snapshot", ["--json"]), ("replay", ["--help"])],
    indirect=["arguments"],
)
def test_a_closed_pipe_is_status_74_without_a_message(
    arguments: list[str], option: list[str]
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = kvstow(*arguments, *option, stdout=write_end)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (IO_ERROR, "")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/nowhere/result.json", "there is no folder /nowhere"),
        ("/dev", "Is a directory"),
        ("/dev/full", "No space left on device"),
    ],
)
def test_a_json_file_that_cannot_be_written_is_status_74(
    run: Run, arguments: list[str], path: str, problem: str
) -> None:
    done = run(*arguments, "--json-file", path)
    assert (done.returncode, done.stderr) == (IO_ERROR, f"kvstow: {path}: {problem}\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder for results alone, to see what else a command leaves there."""
    path = tmp_path / "results"
    path.mkdir()
    return path


COMMANDS_WITH_FILES = [
    ("replay {trace}", "json-file"),
    ("replay {trace}", "html"),
    ("replay {trace} --servers 1", "png"),
    ("plan {trace} --bytes-per-token 4096", "json-file"),
    ("plan {trace} --bytes-per-token 4096", "html"),
    ("plan {trace} --bytes-per-token 4096", "png"),
    ("plan {trace} --bytes-per-token 4096", "csv"),
    ("trace convert {trace}", "json-file"),
    ("snapshot info {trace}", "json-file"),
    ("tier info {trace}", "json-file"),
]


@pytest.mark.parametrize(("command", "option"), COMMANDS_WITH_FILES)
def test_a_command_that_fails_changes_no_file(command: str, option: str, folder: Path) -> None:
    if option == "png":
        pytest.importorskip("matplotlib")
    old, new = folder / "old", folder / "new"
    old.write_text("good")
    for path in old, new:
        words = command.format(trace=folder / "missing").split()
        assert cli.main([*words, f"--{option}", str(path)]) in {USAGE, IO_ERROR}
    assert old.read_text() == "good"
    assert list(folder.iterdir()) == [old]


def test_a_file_is_replaced_with_its_mode_and_through_a_link(trace: Path, folder: Path) -> None:
    old, link, new = folder / "old", folder / "link", folder / "new"
    old.write_text("good" * 10_000)
    old.chmod(0o640)
    link.symlink_to(old)
    for path in link, new:
        assert cli.main(["replay", str(trace), "--json-file", str(path)]) == OK
        assert json.loads(path.read_text())["requests"] == 3
    assert link.is_symlink()
    assert old.stat().st_mode & 0o777 == 0o640
    mask = os.umask(0)
    os.umask(mask)
    assert new.stat().st_mode & 0o777 == 0o666 & ~mask
    assert set(folder.iterdir()) == {old, link, new}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    error: BaseException, step: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "old"
    path.write_text("good")

    def fail(*_: object) -> None:
        raise error

    file = ResultFile(str(path))
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)) as raised:
        file.write(b"new")
    assert getattr(raised.value, "filename", str(path)) == str(path)
    assert path.read_text() == "good"
    assert list(folder.iterdir()) == [path]


def test_a_file_that_cannot_be_replaced_is_written_in_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "mounted"
    path.write_text("a longer content")
    file = ResultFile(str(path))

    def is_mounted(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(os, "replace", is_mounted)
    file.write(b"new")
    assert path.read_text() == "new"
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("option", ["--json-file", "--html", "--csv", "--png"])
def test_dash_is_no_file_for_a_result(
    run: Run, trace: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parent)
    done = run("plan", str(trace), "--bytes-per-token", "1024", option, "-")
    assert done.returncode == USAGE
    assert done.stderr.startswith(f"kvstow: {option} is '-', which stands for standard input alone")
    assert [*trace.parent.iterdir()] == [trace]


def test_a_pipe_or_standard_output_gets_the_file(trace: Path, folder: Path) -> None:
    done = kvstow("replay", str(trace), "--json", "--json-file", "/dev/stdout")
    assert done.returncode == OK
    assert len(done.stdout) % 2 == 0
    first, second = (done.stdout[: len(done.stdout) // 2], done.stdout[len(done.stdout) // 2 :])
    assert first == second
    assert json.loads(first)["requests"] == 3

    both = folder / "both"
    with both.open("w") as file:
        kvstow("replay", str(trace), "--json", "--json-file", "/dev/stdout", stdout=file)
    assert both.read_text().count('"requests": 3') == 2

    done = shell('kvstow replay "$1" --json-file >(cat >"$2"); wait $!', str(trace), str(both))
    assert done.returncode == OK
    assert json.loads(both.read_text())["requests"] == 3
    assert list(folder.iterdir()) == [both]


@pytest.mark.parametrize("name", ["café", "caf\udce9"])
def test_any_path_can_be_printed_in_any_encoding(trace: Path, name: str) -> None:
    trace.rename(trace.parent / name)
    ascii_only = os.environ | {
        "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii",
    }  # fmt: skip
    script = """
import sys
from kvstow import cli

name, *options = sys.argv[1:]
sys.exit((cli.main(["replay", name, *options]), cli.main(["replay", name + ".not"])) != (0, 2))
"""
    to_files = ["--json", "--html", "page.html"]
    for options, environment in (([], ascii_only), (to_files, os.environ | {"LC_ALL": "C.UTF-8"})):
        done = subprocess.run(
            [sys.executable, "-c", script, name, *options],
            env=environment, cwd=trace.parent, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == OK, done.stderr
        assert done.stderr.count(b"\n") == 1
        assert b".not: cannot be read" in done.stderr


def test_control_characters_of_a_path_reach_no_terminal(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parent)
    path = "a\nb\x07\x9b2J"
    trace.rename(path)
    for arguments, status in (
        (["replay", path], 0),
        (["plan", path, "--bytes-per-token", "1024"], 0),
        (["plan", path, "--block-size", "5", "--bytes-per-token", "1024"], 2),
        (["plan", f"{path}x", "--bytes-per-token", "1024"], 2),
        (["tier", "info", path], 2),
        (["snapshot", "info", path], 1),
        (["trace", "convert", path], 2),
    ):
        assert cli.main(arguments) == status
        printed = "".join(capsys.readouterr())
        assert r"a\nb\x07\x9b2J" in printed
        assert printed.replace("\n", "").isprintable()


def test_long_path_stays_on_one_line_of_a_pipe(
    run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    path = trace.rename(trace.with_name("a" * 200))
    for options in ([], ["--servers", "1"]):
        done = run("replay", str(path), *options)
        assert done.stdout.splitlines()[0].startswith(str(path))


def test_brackets_in_a_path_are_printed_as_they_are(
    run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "[bold] :smile:"
    monkeypatch.chdir(trace.parent)
    trace.rename(name)
    done = run("replay", name)
    assert (done.returncode, done.stderr) == (OK, "")
    assert name in done.stdout


def test_brackets_in_an_identity_are_printed_as_they_are(run: Run, image: Path) -> None:
    done = run("snapshot", "info", str(image))
    assert (done.returncode, done.stderr) == (OK, "")
    assert "org/[/model][bf16]:smile:" in done.stdout


def test_a_file_that_cannot_be_read_is_status_74(run: Run) -> None:
    for name in ("replay", "snapshot info"):
        done = run(*name.split(), "/proc/self/mem")
        problem = "kvstow: /proc/self/mem: Input/output error\n"
        assert (done.returncode, done.stderr) == (IO_ERROR, problem)


def test_a_bug_in_kvstow_is_status_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "read_trace", lambda *_, **__: 1 / 0)
    assert cli.main(["replay"]) == BUG
    assert "ZeroDivisionError" in capsys.readouterr().err


# -- standard input ----------------------------------------------------------------------------


def replayed(done: subprocess.CompletedProcess[str]) -> tuple[str, int]:
    assert done.returncode == OK, done.stderr
    found = json.loads(done.stdout)
    return found["trace"], found["requests"]


@pytest.mark.parametrize("prepare", [bytes, gzip.compress, bz2.compress])
def test_a_dash_stands_for_standard_input(
    prepare: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "t"
    path.write_bytes(prepare(ROW.encode() * 3))
    assert replayed(shell('cat "$1" | kvstow replay - --json', str(path))) == ("<stdin>", 3)


def test_standard_input_may_be_a_file_and_a_trace_a_pipe(trace: Path) -> None:
    assert replayed(shell('kvstow replay - --json <"$1"', str(trace))) == ("<stdin>", 3)
    assert replayed(shell('kvstow replay <(cat "$1") --json', str(trace)))[1] == 3


def test_errors_in_standard_input_name_the_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = shell("echo nonsense | kvstow replay -")
    assert done.returncode == USAGE
    assert done.stderr.startswith("kvstow: <stdin>:1: not a JSON object")
    assert shell("kvstow replay - <&-").returncode == USAGE
    with open(os.devnull) as empty:
        monkeypatch.setattr(sys, "stdin", empty)
        assert run("replay", "-").returncode == USAGE


def test_result_over_the_file_that_is_standard_input_is_refused(trace: Path) -> None:
    done = shell('kvstow replay - --json-file "$1" <"$1"', str(trace))
    message = f"kvstow: --json-file is {str(trace)!r}, and the command reads that file"
    assert (done.returncode, done.stderr) == (USAGE, f"{message}: pass another name\n")
    assert trace.read_text() == ROW * 3


def test_piped_data_without_a_dash_is_refused(trace: Path) -> None:
    done = shell('cat "$1" | kvstow replay', str(trace))
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert done.stderr.startswith("kvstow: standard input has data")
    assert "pass - to replay the data" in done.stderr


def test_data_in_a_file_or_a_socket_without_a_dash_is_refused(
    run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs.makefile() as end, theirs, trace.open() as file:
        ours.sendall(ROW.encode())
        for stdin in file, end:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert run("replay").returncode == USAGE


BUNDLED = ["replay", "--limit", "2", "--json"]


@pytest.fixture(params=["null", "empty file", "ended pipe", "ended socket", "terminal"])
def idle(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[IO[bytes]]:
    match request.param:
        case "null":
            descriptor = os.open(os.devnull, os.O_RDONLY)
        case "empty file":
            (tmp_path / "empty").touch()
            descriptor = os.open(tmp_path / "empty", os.O_RDONLY)
        case "ended pipe":
            descriptor, other = os.pipe()
            os.close(other)
        case "ended socket":
            ours, theirs = socket.socketpair()
            ours.close()
            descriptor = theirs.detach()
        case _:
            terminal, descriptor = pty.openpty()
            request.addfinalizer(lambda: os.close(terminal))
    with open(descriptor, "rb") as file:
        yield file


def test_without_data_on_standard_input_the_bundled_trace_is_replayed(
    run: Run, idle: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", idle)
    done = run(*BUNDLED)
    assert replayed(done) == (BUNDLED_NAME, 2)
    assert done.stderr == ""


def test_without_standard_input_the_bundled_trace_is_replayed() -> None:
    done = shell('kvstow "$@" <&-', *BUNDLED)
    assert (replayed(done), done.stderr) == ((BUNDLED_NAME, 2), "")


def test_an_open_and_empty_pipe_gets_a_note(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as idle, open(write_end, "wb"):
        monkeypatch.setattr(sys, "stdin", idle)
        done = run(*BUNDLED)
    assert replayed(done) == (BUNDLED_NAME, 2)
    assert "pass - to wait for a trace" in done.stderr
