"""The page of evidence: `python -m docs.generate.evidence` writes `docs/evidence.md` and its plots.

`evidence.toml` has the claims. All figures come from the files in `benches/results/`, line by line.
The page and the plots are committed. A test compares them with what this program makes.
"""

import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from benches.gpu.rivals import speeds
from docs.generate.plot import Bars, Draw, Lines

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "benches" / "results"
CATALOGUE: Final = Path(__file__).parent / "evidence.toml"
PAGE: Final = ROOT / "docs" / "evidence.md"
PLOTS: Final = ROOT / "docs" / "images" / "evidence"
_MACHINE: Final = re.compile(
    r"((?:one core of a shared )?\d+-core machine, (?:AMD EPYC|[^,;]{1,40}? Processor))"
)
_HEAD: Final = """\
# Evidence

What kvstow claims, the command that shows it, and what is not shown. All figures of this page are
lines of the files in `benches/results/`. `make evidence` makes the page from them, and a test
compares the two. Run the commands in a checkout, with the Python in `.venv/bin/`. Many of them need
vLLM and torch, which `make .venv/.test` installs.

Other programs on a machine change its times. So compare the columns of one table, and not the times
of two tables.
"""

_RIVALS: Final = {
    "zero-copy": "by kernel",
    "batched": "batched",
    "call-per-fragment": "by call",
}

Claim = dict[str, Any]


def catalogue() -> dict[str, list[Claim]]:
    """Return the claims, the tests and what is missing."""
    found: dict[str, list[Claim]] = tomllib.loads(CATALOGUE.read_text())
    return found


def page() -> str:
    """Return the page.

    Raises:
        ValueError: a row is not in its result, or a result has no claim.
    """
    claims = catalogue()
    results = {path.name for path in RESULTS.iterdir() if path.suffix in {".txt", ".json"}}
    if left_out := results ^ {claim["result"] for claim in claims["claim"]}:
        raise ValueError(f"{sorted(left_out)}: a claim of evidence.toml for each result, and back")
    parts = [_HEAD, "## What is measured\n", *map(_measured, claims["claim"])]
    parts += ["## What tests show\n", *_tests(claims["test"])]
    parts += ["## What is not shown\n", *_missing(claims["missing"], results)]
    return "\n".join(parts)


def _measured(claim: Claim) -> str:
    text = (RESULTS / claim["result"]).read_text()
    machine = claim.get("machine") or _machine(text)
    lines = [
        f"### {claim['title']}\n",
        f"{claim['says']}\n",
        "| shown by | beside | machine | taken |",
        "|---|---|---|---|",
        f"| {_command(claim)} | {claim['beside']} | {machine} | {claim['taken']} |\n",
    ]
    if name := claim.get("plot"):
        lines.append(f"![{DRAWN[name](text).title}](images/evidence/{name}.svg)\n")
    lines += ["```text", *_lines(text, claim), "```\n"]
    lines.append(f"All lines: `benches/results/{claim['result']}`.\n")
    return "\n".join(lines)


def _command(claim: Claim) -> str:
    return f"`{claim['command']}`" if claim["command"] else "no command"


def _machine(text: str) -> str:
    found = _MACHINE.search(" ".join(text.split()))
    return found[1] if found else "not noted in the file"


def _lines(text: str, claim: Claim) -> Iterator[str]:
    table = TABLES.get(claim["result"])
    return table(text) if table else _rows(text, claim)


def _fleet(text: str) -> Iterator[str]:
    """Yield the hit ratios of fleets, alone and with a shared store."""
    yield "routing      servers    alone   shared"
    for routing, replay in json.loads(text).items():
        for row in replay["rows"]:
            alone, shared = row["alone"]["hit_ratio"], row["shared"]["hit_ratio"]
            yield f"{routing:12} {row['servers']:>7} {alone:>8.2%} {shared:>8.2%}"


def _gpu_copies(text: str) -> Iterator[str]:
    """Yield GB/s of kvstow and its rivals, and how much copies slow the steps of a model."""
    found = json.loads(text)
    peak = found["peak"]
    yield (
        f"GB/s of shuffled blocks; the link's peak is {peak['store_gb_per_s']:.1f} for stores, "
        f"{peak['load_gb_per_s']:.1f} for loads, {peak['both_gb_per_s']:.1f} for both at once"
    )
    yield ""
    rivals = [name for name in _RIVALS if any(it["rival"] == name for it in found["rivals"])]
    heads = ("kvstow", "scattered", "host ms", *(_RIVALS[name] for name in rivals))
    yield "  KiB  way  " + "".join(f"{head:>12}" for head in heads)
    for row, scattered in _runs_and_scattered(found["moves"]):
        size, way = row["fragment_kib"], row["direction"]
        beside = [speeds(found["rivals"], name, way)[size] for name in rivals]
        figures = [row["gb_per_s"], scattered["gb_per_s"], row["submit_cpu_ms"], *beside]
        yield f"{size:>5}  {way:5}" + "".join(f"{figure:>12.1f}" for figure in figures)
    yield ""
    yield "steps of a model beside copies both ways"
    for row in found["interference"]:
        line = f"{row['loop']:17}  {row['copies']:20}{row['gb_per_s']:>6.1f} GB/s"
        for at in ("p50", "p99"):
            line += f"  {at} {row[f'{at}_ms']:>6.3f} ms"
            if slower := row.get(f"{at}_slower_percent"):
                line += f" ({slower:+.1f}%)"
        yield line


def _runs_and_scattered(moves: list[Claim]) -> Iterator[tuple[Claim, Claim]]:
    """Yield the rows of shuffled blocks whose slots are in runs, each with that of single slots."""
    chosen = [row for row in moves if row["ids"] == "shuffled"]
    key = itemgetter("fragment_kib", "direction")
    scattered = {key(row): row for row in chosen if row["slots"] == "scattered"}
    for row in chosen:
        if row["slots"] == "runs" and row["direction"] != "both":
            yield row, scattered[key(row)]


def _rows(text: str, claim: Claim) -> Iterator[str]:
    """Yield the lines of a result that begin as a claim says, with the heads of their tables."""
    lines = text.splitlines()
    chosen: set[int] = set()
    for begin in [*claim["rows"], *claim.get("first", [])]:
        found = [at for at, line in enumerate(lines) if line.lstrip().startswith(begin)]
        if not found:
            raise ValueError(f"{claim['result']} has no line that begins with {begin!r}")
        chosen.update(found if begin in claim["rows"] else found[:1])
    head = None
    for at, line in enumerate(lines):
        if not re.search(r"\d", line) and re.search(r"\S {2,}\S", line):
            head = line
        elif at in chosen:
            if head is not None:
                yield head.rstrip()
                head = None
            yield line.rstrip()


def _tests(tests: list[Claim]) -> Iterator[str]:
    yield "| claim | shown by |"
    yield "|---|---|"
    for test in tests:
        yield f"| {test['says']} | {', '.join(f'`{name}`' for name in test['by'])} |"
    yield ""


def _missing(missing: list[Claim], results: set[str]) -> Iterator[str]:
    yield "| not shown | would be shown by |"
    yield "|---|---|"
    for one in missing:
        if found := [name for name in sorted(results) if fnmatch(name, one["results"])]:
            raise ValueError(f"{found[0]} shows {one['what']!r}: make it a claim of evidence.toml")
        yield f"| {one['what']} | {_command(one)} |"
    yield ""


# The results whose lines are made of their figures.
TABLES: Final[dict[str, Callable[[str], Iterator[str]]]] = {
    "fleet-conversation.json": _fleet,
    "gpu-copy-nvidia-h100-80gb-hbm3.json": _gpu_copies,
}

# -- plots -------------------------------------------------------------------------------------


def _accounting(text: str) -> Bars:
    names = {
        "lookup of 8,192 blocks, pool of 8,200": "look up 8,192 blocks",
        "allocate + publish 8,192 blocks, pool of 8,200": "allocate and publish them",
        "free of 8,192 blocks, pool of 8,200": "free them",
        "a step of 256 decoding requests": "a step of 256 decoding requests",
        "store and load 8,192 blocks, host of 8,192": "store and load 8,192 blocks",
    }
    rows = []
    for begin, name in names.items():
        [ratio] = re.findall(rf"^{re.escape(begin)} +\S+ +\S+ ms +(\d+)x", text, re.MULTILINE)
        rows.append((name, float(ratio), f"{ratio} times"))
    return Bars("CPU time of vLLM's accounting, as a multiple of kvstow's", rows)


def _policies(text: str) -> Lines:
    series = []
    for name in ("conversation", "synthetic"):
        table = text.partition(f"mooncake_{name}_trace")[2].partition("\n\n")[0]
        rows = re.findall(r"^ *([\d,]+) +([\d.]+)% +([\d.]+)%", table, re.MULTILINE)
        points = [(float(size.replace(",", "")), float(lru), float(hd)) for size, lru, hd in rows]
        series.append((f"{name}, lru", [(size, lru) for size, lru, _ in points]))
        series.append((f"{name}, hit-density", [(size, hd) for size, _, hd in points]))
    return Lines(
        "Blocks of a Mooncake trace that a host tier serves", "slots of 512 tokens", series
    )


def _gpu_loads(text: str) -> Lines:
    found = json.loads(text)
    # Powers of two only: 18 KiB, the fragment of an MLA model, has no place beside 16.
    rows = [
        row
        for row, _ in _runs_and_scattered(found["moves"])
        if row["direction"] == "load" and row["fragment_kib"].bit_count() == 1
    ]
    sizes = [float(row["fragment_kib"]) for row in rows]
    series = [("kvstow", [(float(row["fragment_kib"]), row["gb_per_s"]) for row in rows])]
    rivals = {"batched": "the driver's batched copies", "call-per-fragment": "a call for each"}
    for rival, name in rivals.items():
        by_size = speeds(found["rivals"], rival, "load")
        series.append((name, [(size, by_size[int(size)]) for size in sizes]))
    peak = found["peak"]["load_gb_per_s"]
    series.append(("peak of the link", [(size, peak) for size in (sizes[0], sizes[-1])]))
    return Lines("Loads to an H100, GB/s", "KiB of a fragment", series, unit="")


DRAWN: Final[dict[str, Draw]] = {
    "accounting": _accounting,
    "gpu-loads": _gpu_loads,
    "policies": _policies,
}


def plots() -> dict[str, str]:
    """Return each plot's text by its name."""
    results = {it["plot"]: it["result"] for it in catalogue()["claim"] if "plot" in it}
    return {
        name: DRAWN[name]((RESULTS / result).read_text()).svg() for name, result in results.items()
    }


def last_change(name: str) -> str:
    """Return the date of the last commit of a result; an empty text if there is none."""
    git = ["git", "log", "-1", "--format=%as", "--", str(RESULTS / name)]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _renew_dates() -> None:
    """Write the dates of results that are newer than their claims."""
    text = CATALOGUE.read_text()
    for claim in catalogue()["claim"]:
        old = f'result = "{claim["result"]}"\ntaken = {claim["taken"]}'
        if (date := last_change(claim["result"])) > str(claim["taken"]):
            text = text.replace(old, old.replace(str(claim["taken"]), date))
    CATALOGUE.write_text(text)


def main() -> None:
    """Write the page and its plots."""
    _renew_dates()
    PAGE.write_text(page())
    PLOTS.mkdir(exist_ok=True)
    for name, text in plots().items():
        (PLOTS / f"{name}.svg").write_text(text)


if __name__ == "__main__":
    main()
