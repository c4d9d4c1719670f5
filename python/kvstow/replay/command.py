"""The command `kvstow replay`."""

import os
import select
import stat
import sys
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from fcntl import ioctl
from pathlib import Path
from typing import Literal, TypedDict, TypeVar, Unpack, get_args

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvstow._core import ConfigError
from kvstow.engine import Policy
from kvstow.output import Output, with_output
from kvstow.replay import BUNDLED_TRACE
from kvstow.replay.config import ReplayConfig, Verify
from kvstow.replay.device import MoverKind
from kvstow.replay.engine import ReplayEngine
from kvstow.replay.model import MODELS
from kvstow.replay.observer import Observer
from kvstow.replay.report import figures_json, figures_table
from kvstow.replay.state import ReplayState
from kvstow.replay.trace import DEFAULT_BLOCK_SIZE, read_trace
from kvstow.sizes import parse_bytes

__all__ = ["replay"]

EXIT_OK, EXIT_CORRUPT, EXIT_INTERRUPTED = 0, 1, 130
_REFRESH_S = 0.1
_PIPE_PATIENCE_MS = 200
_Command = TypeVar("_Command", bound=Callable[..., int])


class _Options(TypedDict):
    """The options that make a `ReplayConfig`, under its names."""

    device_blocks: int
    host_blocks: int
    policy: Policy
    mode: Literal["eager", "lazy"]
    mover: MoverKind
    verify: Verify
    step_ms: float
    prefill_token_ms: float
    decode_request_ms: float
    max_step_tokens: int
    max_requests: int
    bandwidth_bytes_per_s: float | None
    model: str
    num_layers: int | None
    bytes_per_token: int | None
    faults: int | None
    world_size: int
    blocks_per_slot: int
    events_path: str | None
    lookahead_tokens: int
    sleep_at: tuple[int, ...]


def _choice(name: str, choices: Sequence[str], text: str) -> Callable[[_Command], _Command]:
    return click.option(
        name, type=click.Choice(choices), default=choices[0], show_default=True, help=text
    )


class _Size(click.ParamType[float]):
    """A size such as `32GiB`, or a speed such as `50GB/s`, `5e9` or `inf`."""

    def __init__(self, name: Literal["bytes", "bytes/s"]) -> None:
        self.name = name

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number of bytes."""
        text = str(value)
        if self.name == "bytes/s":
            with suppress(ValueError):
                return float(text)
            text = text.removesuffix("/s")
        try:
            return parse_bytes(text)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def _number(
    name: str, default: float, text: str, to: str | None = None
) -> Callable[[_Command], _Command]:
    names = [name] if to is None else [name, to]
    return click.option(*names, type=type(default), default=default, show_default=True, help=text)


@click.command()
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@_number("--device-blocks", 1024, "Blocks of the device pool, the null block included.")
@_number("--host-blocks", 8192, "Slots of the host tier; each group's block takes one.")
@_choice(
    "--policy",
    get_args(Policy),
    "What the host tier evicts first: lru, the least recently used block; hit-density, the block "
    "with the fewest expected hits per unit of time, learned from earlier hits and evictions.",
)
@_choice(
    "--mode",
    ["eager", "lazy"],
    "When blocks are stored: eager, as soon as they are computed; lazy, when the device is about "
    "to evict them.",
)
@_choice(
    "--mover",
    get_args(MoverKind),
    "Where blocks live and what copies them: cuda, on a GPU; host, in this machine's memory; auto, "
    "on a GPU if there is one.",
)
@click.option("--limit", type=int, help="Replay only the first requests of the trace.")
@_choice("--verify", ["all", "sample", "off"], "Which blocks are checked: all, 1 in 16, or none.")
@_number("--block-size", DEFAULT_BLOCK_SIZE, "Tokens that an id of the trace stands for.")
@click.option(
    "--chain",
    is_flag=True,
    help="Ids name content wherever it stands (RAGPulse): chain them by path.",
)
@_number("--step-ms", 5.0, "Virtual time of each step.")
@_number("--prefill-token-ms", 0.1, "Virtual time added for each token of a prefill.")
@_number("--decode-request-ms", 0.05, "Virtual time added for each request that decodes.")
@_number("--max-step-tokens", 8192, "Most tokens that a step computes.")
@_number("--max-requests", 256, "Most requests that run or load at a time.")
@click.option(
    "--bandwidth",
    "bandwidth_bytes_per_s",
    type=_Size("bytes/s"),
    help="Speed of each direction of the link. [default: 50 GB/s (PCIe 5), slowed down as much as "
    "a token is smaller than the 128 KiB of Llama-3.1-8B]",
)
@_choice("--model", MODELS, "Model whose layers to replay: full attention only, or a hybrid.")
@click.option("--layers", "num_layers", type=int, help="Layers of the full model. [default: 2]")
@click.option(
    "--bytes-per-token",
    type=_Size("bytes"),
    help="Bytes of KV per token of the full model, all layers. [default: 8]",
)
@click.option(
    "--faults",
    type=int,
    metavar="SEED",
    help="Make some copies late, let some fail, and lose some loads: those fail after 5 s of "
    "virtual time, and land later. The same seed makes the same faults.",
)
@_number("--world-size", 1, "Ranks, each with a shard of every block, on the device and the host.")
@_number(
    "--blocks-per-slot",
    1,
    "Consecutive blocks that a host slot holds; more than 1 needs eager mode and the full model.",
)
@click.option(
    "--events",
    "events_path",
    metavar="FILE",
    help="Append the events of blocks and transfers, as JSON lines in virtual time.",
)
@_number("--lookahead-tokens", 0, "Slots for draft tokens that each step grants to each request.")
@click.option(
    "--sleep-at",
    metavar="STEP[,STEP...]",
    default="",
    callback=lambda _context, _option, given: _steps(given),
    help="After so many steps, put the engine to sleep, overwrite its device memory, and wake it "
    "with its blocks under other ids.",
)
@with_output
def replay(
    output: Output,
    trace: Path | None,
    limit: int | None,
    block_size: int,
    chain: bool,
    **options: Unpack[_Options],
) -> int:
    """Replay a request trace through ledger, scheduler and mover.

    TRACE is a file of JSON lines in the Mooncake form, or - for standard input; it may be
    compressed with gzip, bzip2 or xz. Without it, the command replays the first 1,000 requests of a
    public trace that comes with kvstow. The blocks hold made-up bytes that only they can hold, and
    the command compares every block when its load lands and when its request ends.

    Exits with 0 if all is well, 1 if a block is corrupt, 2 for bad usage or input, 74 if input or
    output fails, 130 on Ctrl-C, after the figures so far.
    """
    config = ReplayConfig(**options)
    if trace is None:
        _refuse_ignored_input()
    requests = read_trace(trace or BUNDLED_TRACE, chain=chain, limit=limit, block_size=block_size)
    title = f"{BUNDLED_TRACE.name} (bundled)" if trace is None else requests.path
    with ExitStack() as stack:
        progress = stack.enter_context(_ProgressBar(len(requests.requests)))
        engine = ReplayEngine(requests, config, observer=progress)
        stack.callback(engine.close)
        interrupted = False
        try:
            engine.run()
        except KeyboardInterrupt:
            interrupted = True
        progress.close()
        _report_corruption(engine)
        output.write(
            figures_json(engine, interrupted=interrupted),
            lambda: figures_table(engine, title, interrupted=interrupted),
        )
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_CORRUPT if engine.verifier.num_corrupt else EXIT_OK


def _refuse_ignored_input() -> None:
    """Raise `ConfigError` if somebody pipes a trace in without asking for it with `-`.

    Where nobody does, standard input is a terminal, closed, /dev/null, at its end, or (under ssh
    and some CI systems) a pipe that stays open and empty.
    """
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by an object without one
        return
    if stat.S_ISREG(mode):
        num_bytes = os.fstat(descriptor).st_size - os.lseek(descriptor, 0, os.SEEK_CUR)
    elif stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(_PIPE_PATIENCE_MS):
            click.echo(
                "kvstow: standard input is open and empty, so this replays the bundled trace; "
                "pass - to wait for a trace",
                err=True,
            )
            return
        available = ioctl(descriptor, termios.FIONREAD, bytes(4))
        num_bytes = int.from_bytes(available, sys.byteorder)
    else:
        return
    if num_bytes > 0:
        raise ConfigError(
            "standard input has data, and without TRACE it would be ignored: pass - to replay it, "
            "or </dev/null to replay the bundled trace"
        )


def _steps(given: str) -> tuple[int, ...]:
    try:
        return tuple(int(step) for step in given.split(",") if given)
    except ValueError:
        raise ConfigError(
            f"--sleep-at is {given!r}; pass numbers of steps separated by commas, such as 10,20"
        ) from None


def _report_corruption(engine: ReplayEngine) -> None:
    for corruption in engine.verifier.reports:
        click.echo(f"corrupt: {corruption}", err=True)
    num_more = engine.verifier.num_corrupt - len(engine.verifier.reports)
    if num_more:
        click.echo(f"corrupt: and {num_more} more", err=True)


class _ProgressBar(Observer):
    """Shows the number of finished requests on standard error, if that is a terminal."""

    def __init__(self, num_requests: int) -> None:
        console = Console(stderr=True)
        self._next_s = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            auto_refresh=False,  # its thread would slow the engine's down
            transient=True,
        )
        self._task = self._bar.add_task("requests", total=num_requests)

    def __enter__(self) -> "_ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar from the screen."""
        self._bar.stop()

    def stepped(self, replay: ReplayState) -> None:
        """Redraw the bar a few times a second."""
        if (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + _REFRESH_S
            self._bar.update(self._task, completed=replay.figures.finished, refresh=True)
