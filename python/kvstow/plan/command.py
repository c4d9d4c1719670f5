"""The command `kvstow plan`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvstow._core import ConfigError
from kvstow.choices import OneOf
from kvstow.engine import Policy
from kvstow.geometry import PRESETS, Geometry, find_model, lay_out
from kvstow.geometry.layout import AUTO, DTYPE_BYTES, lay_out_evenly
from kvstow.output import Output, check_can_draw, with_output, written_file
from kvstow.plan.curves import NUM_REFINED, NUM_SIMULATED
from kvstow.plan.page import hits_charts, plan_page
from kvstow.plan.report import plan_csv, plan_json, plan_text
from kvstow.plan.simulate import Mode
from kvstow.plan.tiers import MIB_PER_GIB, Plan, PlanOptions, build_plan
from kvstow.plan.traces import read_traces
from kvstow.plan.workload import build_workload
from kvstow.replay import BUNDLED_TRACE
from kvstow.replay.bundled import BUNDLED_NAME, refuse_ignored_input
from kvstow.replay.source import Source
from kvstow.replay.times import warn_of_times
from kvstow.report.picture import draw_png
from kvstow.sizes import parse_bytes
from kvstow.texts import on_one_line


def _gib_of(text: str) -> float:
    # The table has small sizes in MiB.
    in_mib = re.sub(r"\s*mib\s*$", "", text, flags=re.IGNORECASE)
    if in_mib != text:
        return float(in_mib) / MIB_PER_GIB
    return float(re.sub(r"\s*gib\s*$", "", text, flags=re.IGNORECASE))


def _listed(
    name: str, number: Callable[[str], float], what: str, metavar: str, text: str
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return an option of several numbers: with commas between them, or given several times.

    Args:
        name: the option.
        number: reads a number.
        what: what the numbers count, with examples, for the error message.
        metavar: stands for a number in the help.
        text: the help text.
    """

    def numbers(context: click.Context, own: click.Parameter, given: tuple[str, ...]) -> object:
        found: list[float] = []
        for part in given:
            try:
                found += map(number, part.split(","))
            except ValueError:
                message = f"{part!r} is not a number of {what}."
                raise click.BadParameter(message, context, own) from None
        return tuple(found)

    return click.option(
        name,
        multiple=True,
        metavar=f"{metavar}[,{metavar}...]",
        callback=numbers,
        help=text,
    )


def _gib(name: str, text: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    return _listed(name, _gib_of, "GiB, such as 4 or 4,8,16 or 4GiB or 48MiB", "GIB", text)


def _blocks(
    name: str, metavar: str, text: str
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    return _listed(name, int, "blocks, such as 1000 or 1000,4000", metavar, text)


@click.command()
@click.argument("traces", metavar="[TRACE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--model",
    metavar="MODEL",
    help=f"Path of a Hugging Face config.json, or one of {', '.join(PRESETS)}.",
)
@click.option(
    "--bytes-per-token",
    metavar="BYTES",
    help="Instead of --model: bytes of KV per token on all GPUs, such as 131072 or 128KiB, with "
    "full attention only.",
)
@click.option(
    "--dtype",
    type=click.Choice([AUTO, *DTYPE_BYTES]),
    default=AUTO,
    show_default=True,
    help="Data type of the KV cache: vLLM's --kv-cache-dtype if it is set, else its --dtype. auto "
    "takes what config.json declares, as vLLM does.",
)
@click.option(
    "--tensor-parallel-size",
    "--tp",
    "num_ranks",
    default=1,
    show_default=True,
    help="Number of GPUs that share the model, as for vLLM.",
)
@_gib("--device-gib", "Size of the KV cache on each GPU; vLLM logs it at its start.")
@_blocks(
    "--device-blocks",
    "N",
    "The same in blocks, as vLLM's --num-gpu-blocks-override, the null block included. Beside "
    "--device-gib, the plan has the sizes of both.",
)
@_gib(
    "--host-gib",
    "Size of the host tier of an engine, for all its GPUs. [default: sizes around the knee]",
)
@_gib("--disk-gib", "Size of a disk below the host tier, to see what it would add.")
@click.option(
    "--policy",
    type=OneOf(get_args(Policy), "; for both, give the option twice"),
    multiple=True,
    default=("lru",),
    show_default=True,
    help="Which block the host tier evicts first. hit-density is simulated for each size. Repeat "
    "the option to add points of other policies to `curve` in the JSON. The first sets table and "
    "flag.",
)
@_blocks(
    "--capacity",
    "BLOCKS",
    "Size at which --json gives the hits of one cache, for each policy. [default: some sizes; none "
    "for a model with several groups of layers]",
)
@click.option(
    "--mode",
    type=click.Choice(get_args(Mode)),
    default="eager",
    show_default=True,
    help="When the host tier stores a block. lazy is simulated for each size.",
)
@click.option(
    "--prefill-tokens-per-s",
    type=float,
    default=10_000.0,
    show_default=True,
    help="Prompt tokens that the server computes in a second.",
)
@click.option(
    "--block-size",
    type=int,
    help="Number of tokens per id of the trace. [default: 512 for ids, 16 for token ids]",
)
@click.option(
    "--chain",
    is_flag=True,
    help="For traces whose ids name passages, as in RAGPulse: two blocks are equal if all ids up "
    "to theirs are equal.",
)
@click.option(
    "--separate-files",
    is_flag=True,
    help="Files share no block. By default an id names the same block in all files, and so do "
    "equal token ids.",
)
@click.option("--limit", type=int, metavar="N", help="Read only the first N requests of a file.")
@click.option("--html", metavar="FILE", help="Write a page with interactive charts to FILE.")
@click.option(
    "--png", metavar="FILE", help="Draw the hits into FILE. Needs matplotlib (kvstow[plot])."
)
@click.option("--csv", "csv_file", metavar="FILE", help="Write the table of sizes to FILE.")
@with_output
def plan(  # noqa: PLR0913, PLR0917 - one parameter per option
    output: Output,
    traces: tuple[Path, ...],
    model: str | None,
    bytes_per_token: str | None,
    dtype: str,
    num_ranks: int,
    device_gib: tuple[float, ...],
    device_blocks: tuple[int, ...],
    host_gib: tuple[float, ...],
    disk_gib: tuple[float, ...],
    policy: tuple[Policy, ...],
    capacity: tuple[int, ...],
    mode: Mode,
    prefill_tokens_per_s: float,
    block_size: int | None,
    chain: bool,
    separate_files: bool,
    limit: int | None,
    html: str | None,
    png: str | None,
    csv_file: str | None,
) -> int:
    """Find the size of host memory that is worth it for a trace.

    TRACE is a file that kvstow replay reads, one of JSON lines with token ids, or - for standard
    input. Several files count as one trace, in the order of the arrivals. Without TRACE, the
    command plans for the first 1,000 requests of a public trace that comes with kvstow.

    The command prints what each size hits, saves and carries, the curve of the hits, and a
    recommended size with the option of vllm serve that sets it.

    The exit status is 0 for success, 2 for bad usage or input, and 74 if input or output fails.
    """
    _check_traces(traces, output)
    options = PlanOptions(
        device_gib, host_gib, disk_gib, policy, mode, prefill_tokens_per_s, device_blocks, capacity
    )
    layout = _layout(model, bytes_per_token, dtype, num_ranks)
    layout(block_size or 1)  # refuses bad options
    _check_effect(output, capacity)
    check_can_draw(png, otherwise=", or save a picture from the page of --html")
    if not traces:
        refuse_ignored_input("plan for")
    with (
        written_file(html) as write_html,
        written_file(png) as write_png,
        written_file(csv_file) as write_csv,
    ):
        trace = read_traces(
            traces or [BUNDLED_TRACE],
            chain=chain,
            block_size=block_size,
            separate=separate_files,
            limit=limit,
        )
        warn_of_times([one.request for one in trace.requests])
        if not traces:
            trace = replace(trace, names=(BUNDLED_NAME,))
        geometry = layout(trace.block_size)
        workload = build_workload(trace, geometry.block_tokens)
        draws = bool(html or png or output.wants_json)
        with _progress(NUM_SIMULATED + (NUM_REFINED if draws else 0) + 1) as tick:
            made = build_plan(geometry, workload, options, tick, draws=draws)
        _warn_of_misfits(made)
        write_html(lambda: plan_page(made, trace))
        write_png(lambda: draw_png(hits_charts(made)))
        write_csv(lambda: plan_csv(made))
        output.write(plan_json(made, trace), lambda: plan_text(made, trace))
    return 0


def _check_traces(traces: tuple[Path, ...], output: Output) -> None:
    """Refuse a trace that cannot be read. Name the option whose value it surely should be."""
    for path in traces:
        try:
            Source(path).check()
        except ConfigError as error:
            hint = ""
            if path.suffix.lower() == ".json" and output.as_json:
                hint = f": --json takes no file, so pass --json-file {path}"
            elif re.fullmatch(r"[0-9.]+([gm]ib)?", path.name, re.IGNORECASE):
                hint = ": separate sizes by commas, such as --host-gib 4,8"
            raise ConfigError(f"{error}{hint}") from None


def _check_effect(output: Output, capacity: tuple[int, ...]) -> None:
    """Refuse an option that would change nothing."""
    if capacity and not output.wants_json:
        raise ConfigError(
            "--capacity has no effect on the table: pass --json or --json-file too, or leave it out"
        )


def _warn_of_misfits(made: Plan) -> None:
    """Print a warning to standard error for each device on which the longest request cannot run.

    A curve does not need the room. A simulation does, and has raised an error before.
    """
    for choice in made.choices:
        if choice.misfit:
            click.echo(
                f"kvstow: {on_one_line(choice.misfit)}. vLLM cannot serve this request, but the "
                "plan counts it",
                err=True,
            )


def _layout(
    model: str | None, bytes_per_token: str | None, dtype: str, num_ranks: int
) -> Callable[[int], Geometry]:
    """Return what lays the model out in blocks of a number of tokens."""
    if (model is None) == (bytes_per_token is None):
        both = "" if model is None else f"--model is {model}, --bytes-per-token {bytes_per_token}; "
        raise ConfigError(
            f"{both}a plan needs the bytes of a token: pass --model or --bytes-per-token, and not "
            "both"
        )
    if model is not None:
        return partial(lay_out, find_model(model), dtype=dtype, num_ranks=num_ranks)
    if dtype != AUTO:
        raise ConfigError(
            f"--dtype is {dtype}, but --bytes-per-token names the bytes already: leave --dtype out"
        )
    assert bytes_per_token is not None, "one of the two is given"
    num_bytes = parse_bytes(bytes_per_token, name="--bytes-per-token")
    return partial(lay_out_evenly, num_bytes, num_ranks=num_ranks)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a bar of about `total` parts on standard error, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    with bar:
        task = bar.add_task("curves", total=total)
        yield lambda: bar.update(task, advance=1, refresh=True)
