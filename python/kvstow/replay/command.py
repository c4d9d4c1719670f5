"""The command `kvstow replay`."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvstow.choices import OneOf
from kvstow.closing import Closing
from kvstow.output import Output, with_output, written_file
from kvstow.replay import BUNDLED_TRACE
from kvstow.replay.bundled import BUNDLED_NAME, refuse_ignored_input
from kvstow.replay.config import Option, ReplayConfig
from kvstow.replay.engine import ReplayEngine
from kvstow.replay.fleet_command import (
    FLEET_OPTIONS,
    fleet_options,
    refuse_without_servers,
    run_fleet,
)
from kvstow.replay.observer import Observer, Observers
from kvstow.replay.page import replay_page
from kvstow.replay.report import figures_json, figures_table
from kvstow.replay.source import Source
from kvstow.replay.state import ReplayState
from kvstow.replay.timeline import Timeline
from kvstow.replay.times import warn_of_times
from kvstow.replay.trace import DEFAULT_BLOCK_SIZE, Trace, read_trace
from kvstow.texts import on_one_line

EXIT_OK, EXIT_CORRUPT, EXIT_INTERRUPTED = 0, 1, 130
_REFRESH_S = 0.1


def _default(option: Option) -> object:
    if option.of_choice:
        return [option.default]
    return None if option.default == () else option.default


def _parse(option: Option, _context: click.Context, _own: click.Parameter, given: Any) -> object:
    """Return the value of what the user typed, which must be one if the option says so."""
    if option.of_choice:
        if len(given) > 1:
            raise click.BadParameter(f"given {len(given)} times{option.of_choice}.")
        (given,) = given
    return None if given is None else option.parse(given)


def _config_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options of `ReplayConfig`, under the names of its fields."""
    for name, option in reversed(ReplayConfig.options().items()):
        kind = str if option.parse not in (int, float) else option.parse
        command = click.option(
            f"--{option.name}",
            name,
            type=OneOf(option.choices, option.of_choice) if option.choices else kind,
            default=_default(option),
            # `kvstow plan` takes several policies. Here the last one alone would count, unseen.
            multiple=bool(option.of_choice),
            callback=partial(_parse, option),
            show_default=True,
            metavar=option.metavar,
            help=option.text,
        )(command)
    return command


@click.command()
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option(
    "--limit", type=int, metavar="N", help="Replay only the first N requests of the trace."
)
@click.option(
    "--block-size",
    default=DEFAULT_BLOCK_SIZE,
    show_default=True,
    help="Number of tokens that an id of the trace stands for.",
)
@click.option(
    "--chain",
    is_flag=True,
    help="For traces whose ids name passages, as in RAGPulse: two blocks are equal if all ids up "
    "to theirs are equal.",
)
@_config_options
@click.option("--html", metavar="FILE", help="Write a page with charts over time to FILE.")
@fleet_options
@with_output
def replay(  # noqa: PLR0913, PLR0917 - one parameter per option
    output: Output,
    trace: Path | None,
    limit: int | None,
    block_size: int,
    chain: bool,
    html: str | None,
    **options: Any,
) -> int:
    """Replay a request trace and report hits and corrupt blocks.

    TRACE is a file of JSON lines in the Mooncake form, or - for standard input. It may be
    compressed with gzip, bzip2 or xz. Without TRACE, the command replays the first 1,000 requests
    of a public trace that comes with kvstow.

    The replay schedules the requests in virtual time, as an engine with continuous batching does,
    and copies real bytes between device and host. The bytes of a block follow from its key. The
    command compares each block when its load lands and when its request ends.

    The exit status is 0 if no block is corrupt, 1 if one is, 2 for bad usage or input, 74 if input
    or output fails, and 130 after Ctrl-C. Ctrl-C reports the figures so far.
    """

    def read() -> Trace:
        if trace is None:
            refuse_ignored_input("replay")
        found = read_trace(trace or BUNDLED_TRACE, chain=chain, limit=limit, block_size=block_size)
        warn_of_times(found.requests)
        return replace(found, path=BUNDLED_NAME) if trace is None else found

    title = BUNDLED_NAME if trace is None else on_one_line(Source(trace).name)
    if trace is not None:
        Source(trace).check()
    if options["servers"] is not None:
        with ExitStack() as stack:

            def served(num_requests: int) -> Callable[[], object]:
                bar, number = stack.enter_context(_ProgressBar(num_requests)), count(1)
                return lambda: bar.show(next(number))

            run_fleet(output, read, options, served, title=title)
        return EXIT_OK
    refuse_without_servers()
    given = {name: value for name, value in options.items() if value is not None}
    config = ReplayConfig(**{name: given[name] for name in given if name not in FLEET_OPTIONS})
    requests = read()
    with ExitStack() as stack:
        write_html = stack.enter_context(written_file(html))
        progress = stack.enter_context(_ProgressBar(len(requests.requests)))
        timeline = Timeline()
        observer = progress if html is None else Observers(progress, timeline)
        engine = stack.enter_context(ReplayEngine(requests, config, observer=observer))
        interrupted = False
        try:
            engine.run()
        except KeyboardInterrupt:
            interrupted = True
        progress.close()
        _report_corruption(engine)
        write_html(lambda: replay_page(engine, timeline, title, interrupted=interrupted))
        output.write(
            figures_json(engine, interrupted=interrupted),
            lambda: figures_table(engine, title, interrupted=interrupted),
        )
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_CORRUPT if engine.verifier.num_corrupt else EXIT_OK


def _report_corruption(engine: ReplayEngine) -> None:
    for corruption in engine.verifier.reports:
        click.echo(f"corrupt: {corruption}", err=True)
    num_more = engine.verifier.num_corrupt - len(engine.verifier.reports)
    if num_more:
        click.echo(f"corrupt: and {num_more} more", err=True)


class _ProgressBar(Observer, Closing):
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
            auto_refresh=False,  # a thread would slow the engine down
            transient=True,
        )
        self._task = self._bar.add_task("requests", total=num_requests)
        self._bar.start()

    def close(self) -> None:
        """Remove the bar from the screen."""
        if not self._bar.disable:  # `stop` of an older rich prints an empty line even then
            self._bar.stop()

    def stepped(self, replay: ReplayState) -> None:
        """Redraw the bar a few times a second."""
        self.show(replay.figures.finished_requests)

    def show(self, num_finished: int) -> None:
        """Redraw the bar a few times a second."""
        if (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + _REFRESH_S
            self._bar.update(self._task, completed=num_finished, refresh=True)
