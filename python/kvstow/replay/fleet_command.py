"""`kvstow replay --servers`: the hits of a fleet, without and with a tier that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from kvstow._core import ConfigError
from kvstow.output import Output, check_can_draw, written_file
from kvstow.replay.fleet import ROUTINGS, Fleet, Row, serve_all
from kvstow.replay.model import REFERENCE_BYTES_PER_TOKEN, REFERENCE_MODEL
from kvstow.replay.trace import Trace
from kvstow.report import Chart, Series
from kvstow.report.picture import draw_png
from kvstow.texts import counted

if TYPE_CHECKING:
    from rich.table import Table

_Command = TypeVar("_Command", bound=Callable[..., int])

# Options of the replay that a fleet takes too.
_TAKEN: Final = frozenset(
    {"trace", "limit", "block_size", "chain", "host_blocks", "policy", "as_json", "json_file"}
)
_MOST_DIGITS: Final = 20  # Python turns no text of thousands of digits into a number
FLEET_OPTIONS: Final = ("servers", "routing", "shared_blocks", "png")


def fleet_options(command: _Command) -> _Command:
    """Give a command the options of a fleet."""
    for option in (
        click.option(
            "--png",
            metavar="FILE",
            help="With --servers: draw the hits into FILE. Needs matplotlib (kvstow[plot]).",
        ),
        click.option(
            "--shared-blocks",
            type=int,
            metavar="N",
            help="With --servers: blocks of the shared store, which drops the block that was "
            "written or read longest ago. Without it, the store keeps all.",
        ),
        click.option(
            "--routing",
            type=click.Choice(ROUTINGS),
            default=ROUTINGS[0],
            show_default=True,
            help="With --servers: who serves a request. prefix: the server that last got the "
            "longest prefix of it, unless it has got over 1.25 times its share.",
        ),
        click.option(
            "--servers",
            metavar="N[,N...]",
            help="Serve the trace by fleets of these many servers, without and with a tier that "
            "they share, and report the hits. By the accounting alone: no bytes are copied.",
        ),
    ):
        command = option(command)
    return command


def run_fleet(
    output: Output,
    trace: Callable[[], Trace],
    given: dict[str, Any],
    served: Callable[[int], Callable[[], object]],
    *,
    title: str,
) -> None:
    """Serve a trace by fleets, and report.

    Args:
        output: where the figures go.
        trace: reads the trace.
        given: the options of the command.
        served: takes the number of requests of all fleets, and returns what each calls.
        title: name of the trace in the table.

    Raises:
        ConfigError: an option that a fleet does not take, or a wrong value.
    """
    _refuse_others()
    check_can_draw(given["png"])
    numbers = _numbers(given["servers"])
    fleet = Fleet(given["host_blocks"], given["policy"], given["routing"], given["shared_blocks"])
    for number in numbers:
        fleet.check(number)
    with written_file(given["png"]) as write_png:
        requests = trace()
        called = served(2 * len(numbers) * len(requests.requests))
        rows = serve_all(fleet, requests, numbers, called)
        write_png(lambda: draw_png([fleet_chart(fleet, rows)]))
        output.write(
            {
                "trace": requests.path,
                **requests.as_json(),
                "requests": len(requests.requests),
                "host_blocks": fleet.host_blocks,
                "policy": fleet.policy,
                "routing": fleet.routing,
                "shared_blocks": fleet.shared_blocks,
                "rows": [row.as_json() for row in rows],
            },
            lambda: _table(fleet, requests, rows, title),
        )


def fleet_chart(fleet: Fleet, rows: Iterable[Row]) -> Chart:
    """Return the hits against the number of servers."""
    rows = list(rows)
    x = [float(row.num_servers) for row in rows]
    return Chart(
        title=f"Prompt blocks that were not computed, {fleet.routing} routing",
        text=f"Each server keeps {fleet.host_blocks:,} blocks on its host.",
        series=[
            Series("with a shared tier", x, [row.shared.hit_ratio for row in rows], dots=True),
            Series("without", x, [row.alone.hit_ratio for row in rows], dots=True),
        ],
        x_format="number",
        y_format="percent",
        x_label="servers",
        y_label="hit ratio",
    )


def _refuse_others() -> None:
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in _TAKEN and name not in FLEET_OPTIONS:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect on a fleet, which copies no bytes: "
                "leave it out, or leave out --servers"
            )


def refuse_without_servers() -> None:
    """Raise `ConfigError` if an option of a fleet is given without `--servers`."""
    context = click.get_current_context()
    for name in FLEET_OPTIONS[1:]:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for a fleet: pass --servers too, or leave it out"
            )


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS for part in parts):
        raise ConfigError(f"--servers is {text[:40]!r}: pass numbers such as 1,2,4,8")
    return [int(part) for part in parts]


def _table(fleet: Fleet, trace: Trace, rows: Iterable[Row], title: str) -> Table:
    # Imported here because only the command needs rich.
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    def gib(number: int) -> str:
        return f"{number * trace.block_size * REFERENCE_BYTES_PER_TOKEN / 2**30:,.1f}"

    def size(number: int) -> str:
        return f"{counted(number, 'block')} ({gib(number)} GiB)"

    bound = "unbounded" if fleet.shared_blocks is None else size(fleet.shared_blocks)
    table = Table(
        *(
            "servers",
            "alone",
            "shared",
            "from the store\nblocks (GiB)",
            "put\nblocks (GiB)",
            "share of\nbusiest",
        ),
        title=f"{title}: {counted(len(trace.requests), 'request')}, {size(fleet.host_blocks)} on "
        f"each host, {fleet.routing}, store {bound}; GiB as in {REFERENCE_MODEL}",
        box=SIMPLE_HEAD,
        title_justify="left",
    )
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        shared = row.shared
        table.add_row(
            str(row.num_servers),
            f"{row.alone.hit_ratio:.1%}",
            f"{shared.hit_ratio:.1%}",
            f"{shared.shared_hits:,} ({gib(shared.shared_hits)})",
            f"{shared.puts:,} ({gib(shared.puts)})",
            f"{shared.busiest / max(shared.asked, 1):.0%}",
        )
    return table
