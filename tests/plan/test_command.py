"""`kvstow plan` and `kvstow replay --html`, as a user calls them."""

from __future__ import annotations

import csv
import importlib.util
import json
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstow import HitCurve, cli
from kvstow.plan import Curves
from kvstow.plan.page import DENSITY_LINE
from kvstow.replay import BUNDLED_TRACE, ReplayConfig
from kvstow.report import Chart, Series, Table, Text, html_page
from kvstow.report.picture import draw_png

MOST_RANKS = ReplayConfig.options()["world_size"].at_most
SMALL = [str(BUNDLED_TRACE), "--limit", "200", "--model", "llama-3.1-8b"]


def plan(*arguments: str) -> int:
    return cli.main(["plan", *SMALL, *arguments])


@pytest.mark.parametrize(
    ("model", "is_noted"), [("granite-4.0-h-small", True), ("gpt-oss-20b", False)]
)
def test_a_plan_with_recurrent_states_names_what_a_replay_keeps(
    model: str, is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = [str(BUNDLED_TRACE), "--limit", "20"]
    assert cli.main(["plan", *trace, "--model", model, "--host-gib", "4"]) == 0
    assert ("kvstow replay keeps one after every block" in capsys.readouterr().out) == is_noted


def test_table_sketch_sentence_and_flag_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--device-gib", "24", "--host-gib", "64", "--host-gib", "256") == 0
    text = capsys.readouterr().out
    assert "32 layers of full attention x 8 KV heads x 128 values x 2 (K and V)" in text
    assert re.search(r"^ *device +host +hits +on +on +saved +saved +loads +stores$", text, re.M)
    assert re.search(r"^[> ] +24 +64 +\d+\.\d% ", text, re.M)
    assert text.count("\n> ") == 1
    assert "^ recommended" in text
    assert "Give the host tier " in text
    assert re.search(r"^--kv-transfer-config '\{.*\}'$", text, re.M)


def test_size_may_be_in_mib_as_small_ones_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--device-gib", "24", "--host-gib", "0.5,64") == 0
    in_gib = capsys.readouterr().out
    assert plan("--device-gib", "24GiB", "--host-gib", "512 MiB,65536mib") == 0
    assert capsys.readouterr().out == in_gib


def test_curve_says_that_it_leaves_the_disk_out(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--device-gib", "24", "--host-gib", "64"]
    for disk, is_said in ([], False), (["--disk-gib", "512"], True):
        assert plan(*sizes, *disk) == 0
        text = capsys.readouterr().out
        assert ("The curve is that of the host tier without the disk." in text) is is_said


def test_tutorial_shows_the_table_and_the_sentence_of_its_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[2] / "docs/tutorials/memory.md").read_text()
    [command] = re.findall(r"^kvstow (plan .*)$", page, re.MULTILINE)
    assert cli.main([*command.split(), str(BUNDLED_TRACE)]) == 0
    printed = capsys.readouterr().out
    [table] = re.findall(r"^```text\n( +device.*?)```", page, re.MULTILINE | re.DOTALL)
    [recommended] = re.findall(r"^(Give the host tier .*\n)```", page, re.MULTILINE)
    assert f"\n{table}\n" in printed
    assert f"\n{recommended}--kv-transfer-config " in printed


def test_last_block_of_a_repeated_prompt_is_a_hit_where_the_page_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt of two full blocks comes twice. The page of the JSON has each way of counting it."""
    path = tmp_path / "two.jsonl"
    row = {"timestamp": 0, "input_length": 32, "output_length": 1, "hash_ids": [1, 2]}
    rows = [row, row | {"timestamp": 60_000}]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))

    def figures(*arguments: str) -> Any:
        assert cli.main([*arguments, str(path), "--block-size", "16", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    curve = HitCurve()
    for _ in rows:
        curve.add([1, 2])
    assert curve.hits([2]).tolist() == [2]
    made = figures("plan", "--bytes-per-token", "4KiB", "--capacity", "2")
    assert (made["infinite_hit_blocks"], made["curve"][0]["hit_blocks"]) == (2, 2)
    assert made["sizes"][-1]["hit_ratio"] == made["curves"][0]["infinite_hit_ratio"] == 16 / 64
    made = figures("plan", "--model", "gemma-3-27b", "--capacity", "100")
    assert (made["infinite_hit_blocks"], made["curve"][0]["hit_blocks"]) == (2, 1)
    assert figures("replay", "--device-blocks", "64")["hit_blocks"]["device"] == 1
    assert figures("replay", "--servers", "1")["rows"][0]["shared"]["host_hits"] == 1


def test_json_and_csv_have_the_same_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sizes.csv"
    assert plan("--json", "--csv", str(path), "--disk-gib", "900") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["model"]["bytes_per_token"] == 131_072
    (curve,) = made["curves"]
    assert curve["is_exact"]
    assert curve["tier"]["hit_ratio"][-1] == curve["infinite_hit_ratio"]
    assert curve["clairvoyant"]["hit_ratio"][-1] == curve["infinite_hit_ratio"]
    assert len(curve["hit_density"]["gib"]) > 5
    with path.open() as file:
        rows = [
            {name: float(value) if value else None for name, value in row.items()}
            for row in csv.DictReader(file)
        ]
    assert rows == made["sizes"]
    assert made["recommendations"][0]["host_gib"] in {row["host_gib"] for row in rows}


def test_png_has_a_chart_for_each_device(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    for devices in (["24"], ["24", "48"]):
        options = [option for gib in devices for option in ("--device-gib", gib)]
        assert plan(*options, "--png", str(path)) == 0
        picture = path.read_bytes()
        assert picture.startswith(b"\x89PNG\r\n")
        assert int.from_bytes(picture[16:20], "big") == 1200
        assert int.from_bytes(picture[20:24], "big") == 675 * len(devices)


def test_png_without_matplotlib_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    path = tmp_path / "plan.png"
    assert plan("--png", str(path)) == 2
    assert "pip install 'kvstow[plot]'" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("name", ["plan.svg", "plan.PDF"])
def test_picture_that_is_no_png_by_its_name_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    assert plan("--png", str(path)) == 2
    assert capsys.readouterr().err == (
        f"kvstow: --png is {str(path)!r}, and kvstow writes no {path.suffix[1:].upper()}: pass a "
        "name that ends in .png, or save a picture from the page of --html\n"
    )
    assert not path.exists()


def test_png_shows_what_the_charts_have() -> None:
    def chart(*hits: float) -> Chart:
        series = [Series("hits", [0, 1, 2], hits)]
        return Chart("", "", series, "gib", "percent", "x", "y", [(1.0, "knee")])

    picture = draw_png([chart(0, 0.5, 1)])
    assert picture == draw_png([chart(0, 0.5, 1)])
    assert picture != draw_png([chart(0, 0.6, 1)])


def test_trace_of_a_moment_has_no_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t"
    row = {"timestamp": 5, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    path.write_text(2 * (json.dumps(row) + "\n"))
    arguments = ["plan", str(path), "--model", "qwen3-8b"]
    assert cli.main([*arguments, "--json", "--html", str(tmp_path / "page.html")]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert {row["saved_tokens_per_hour"] for row in sizes} == {None}
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert " - " in printed
    assert "2 requests in 0.0 seconds, 2,048 prompt tokens\n" in printed


def test_one_of_a_thing_is_named_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t"
    row = {"timestamp": 0, "prompt_token_ids": [7], "output_length": 1}
    path.write_text(json.dumps(row))
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "dtype": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", str(path), "--block-size", "1", "--model", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert ": 1 request in 0.0 seconds, 1 prompt token\n" in printed
    assert ": 1 layer of full attention x 1 KV head x 8 values x 2 (K and V) x 1 byte (" in printed
    assert "\na block of 1 token takes " in printed


def test_summary_shows_the_span_and_the_rate_of_the_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan() == 0
    shown = "200 requests in 1.2 minutes, 2,782,179 prompt tokens (38,641 a second)"
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ["plan"],
        ["plan", "--bytes-per-token", "0"],
        ["replay", "--device-blocks", "1"],
        ["replay", "--servers", "none"],
        ["trace", "convert", "--block-size", "0"],
    ],
)
@pytest.mark.parametrize(
    ("name", "why"), [("none", "No such file or directory"), ("", "Is a directory")]
)
def test_trace_that_cannot_be_read_is_the_first_error(
    name: str, why: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    assert cli.main([*command, str(path)]) == 2
    assert capsys.readouterr().err == f"kvstow: {path}: cannot be read: {why}\n"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["--json", "no/plan.json"], ": --json takes no file, so pass --json-file no/plan.json"),
        (["--json-file", "/dev/null", "no/plan.json"], ""),
        (["--host-gib", "4", "8"], ": separate sizes by commas, such as --host-gib 4,8"),
        (["--host-gib", "4GiB", "8MiB"], ": separate sizes by commas, such as --host-gib 4,8"),
    ],
)
def test_value_that_was_taken_for_a_trace_is_recognised(
    given: list[str],
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "--bytes-per-token", "4096", *given]) == 2
    why = "cannot be read: No such file or directory"
    assert capsys.readouterr().err == f"kvstow: {given[-1]}: {why}{hint}\n"


@pytest.mark.parametrize(
    ("command", "option", "other"),
    [
        (["plan", "--bytes-per-token", "1"], "--html", "the command reads"),
        (["plan", "--bytes-per-token", "1"], "--json-file", "the command reads"),
        (["plan", "--bytes-per-token", "1", "--html", "x"], "--csv", "--html writes"),
        (["replay"], "--html", "the command reads"),
        (["replay"], "--events", "the command reads"),
        (["trace", "convert"], "--json-file", "the command reads"),
        (["tier", "info"], "--json-file", "the command reads"),
    ],
)
def test_result_over_a_file_that_is_in_use_is_refused(
    command: list[str],
    option: str,
    other: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace"
    path.write_text("lines")
    name = "x" if other.startswith("-") else "./trace"
    assert cli.main([*command, "trace", option, name]) == 2
    assert capsys.readouterr().err == (
        f"kvstow: {option} is {name!r}, and {other} that file: pass another name\n"
    )
    assert path.read_text() == "lines"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("command", "result"),
    [
        ("plan --model ./config.json --json-file", "config.json"),
        ("plan --model model --html", "model/config.json"),
        ("plan --model link --html", "model/config.json"),
        ("replay --model config.json --html", "./config.json"),
        ("replay --disk disk --disk-blocks 9 --json-file", "disk"),
        ("replay --disk disk --disk-blocks 9 --events", "disk.index"),
        ("replay --disk disk --disk-blocks 9 --world-size 2 --html", "disk.0"),
        ("replay --disk disk --disk-blocks 9 --world-size 2 --json-file", "disk.1.index"),
        ("replay --disk disk --disk-blocks 9 --world-size 64 --html", f"disk.{MOST_RANKS - 1}"),
        ("tier info disk --json-file", "disk.index"),
        ("tier verify disk --json-file", "disk.index"),
    ],
)
def test_result_over_a_file_behind_an_option_is_refused(
    command: str,
    result: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    names = "config.json", "model/config.json", "disk", "disk.index", "disk.0", "disk.1.index"
    for name in names:
        (tmp_path / name).write_text("old")
    [*arguments, option] = command.split()
    trace = [] if arguments[0] == "tier" else [str(BUNDLED_TRACE)]
    assert cli.main([*arguments, *trace, option, result]) == 2
    assert capsys.readouterr().err == (
        f"kvstow: {option} is {result!r}, and the command reads that file: pass another name\n"
    )
    assert {(tmp_path / name).read_text() for name in names} == {"old"}


def test_result_beside_the_model_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan("--csv", "config.json") == 0
    assert (tmp_path / "config.json").read_text().startswith("device_gib,")


def test_both_results_may_go_to_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--csv", "/dev/null", "--json-file", "/dev/null") == 0
    assert capsys.readouterr().err == ""


def test_small_host_above_a_large_disk_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    compared = "For comparison, a host tier of "
    assert plan("--host-gib", "64,512", "--disk-gib", "256,1024", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    row = made["sizes"][1]
    assert (row["host_gib"], row["disk_gib"]) == (64, 1024)
    alone = row["hit_ratio"] - row["disk_hit_ratio"]
    assert (
        f"{compared}64 GiB hits {alone:.1%} of the prompt tokens, and {row['hit_ratio']:.1%} with "
        "a disk of 1,024 GiB."
    ) in made["recommendations"][0]["sentence"]
    assert plan("--host-gib", "64,512", "--disk-gib", "256,1024,8192") == 0
    assert "with a disk of 1,024 GiB" in " ".join(capsys.readouterr().out.split())
    for sizes in (["64,512"], ["512", "--disk-gib", "64"], ["64", "--disk-gib", "1024"]):
        assert plan("--host-gib", *sizes) == 0
        assert "For comparison" not in capsys.readouterr().out, sizes


def test_comparison_with_a_small_host_names_the_device_whose_hits_it_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--device-gib", "64", "--host-gib", "32,512", "--disk-gib", "1024", "--json"]
    assert plan(*arguments) == 0
    made = json.loads(capsys.readouterr().out)
    row = made["sizes"][0]
    assert (row["host_hit_ratio"], row["device_hit_ratio"] > 0) == (0, True)
    assert (
        f"the device and a host tier of 32 GiB hit {row['device_hit_ratio']:.1%} of the prompt "
        f"tokens, and {row['hit_ratio']:.1%} with a disk of 1,024 GiB."
    ) in made["recommendations"][0]["sentence"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-2"], "model is 'gpt-2'; it must be the path of a config.json or one of"),
        (["--host-gib", "nan"], "host-gib is nan; it must be a size: pass a number of GiB"),
        (["--host-gib", "2e9"], "host-gib is 2e+09; it must be at most 1073741824: pass fewer"),
        (
            ["--host-gib", "4TB"],
            "'4TB' is not a number of GiB, such as 4 or 4,8,16 or 4GiB or 48MiB.",
        ),
        (["--host-gib", "4,"], "'4,' is not a number of GiB"),
        (["--capacity", "5"], "--capacity has no effect on the table: pass --json"),
        (["--capacity", "5,x"], "'5,x' is not a number of blocks, such as 1000 or 1000,4000."),
        (["--host-gib", "0.01"], "host-gib is 0.01 GiB; it must hold 1 block of 512 tokens"),
        (["--block-size", "16"], "pass --block-size if your blocks have another size"),
        (["--tp", "3"], "tensor-parallel-size is 3; it must divide the 8 KV heads"),
        (["--limit", "0"], "limit is 0; it must be at least 1 request"),
    ],
)
def test_bad_input_ends_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*arguments) == 2
    assert message in capsys.readouterr().err


def test_page_that_cannot_be_written_fails_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none" / "page.html"
    assert plan("--html", str(missing)) == 74
    assert f"kvstow: {missing}: there is no folder {missing.parent}\n" in capsys.readouterr().err
    assert plan("--html", "/dev/full") == 74
    assert "kvstow: /dev/full: No space left on device" in capsys.readouterr().err


# -- pages -------------------------------------------------------------------------------------

REPLAY = ["--limit", "60", "--device-blocks", "350", "--host-blocks", "1500", "--verify", "off"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: folder / f"{name}.html" for name in ("plan", "hybrid", "replay")}
    hybrid = ["plan", *SMALL[:3], "--model", "gpt-oss-20b", "--disk-gib", "500"]
    for arguments in (
        ["plan", *SMALL, "--device-gib", "24", "--html", str(paths["plan"])],
        [*hybrid, "--html", str(paths["hybrid"])],
        ["replay", str(BUNDLED_TRACE), *REPLAY, "--html", str(paths["replay"])],
    ):
        assert cli.main(arguments) == 0
    return paths


class Fetches(HTMLParser):
    """The elements of a page that fetch something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {name for name, _ in attrs}
        if tag in {"link", "img", "iframe", "object"} or names & {"src", "href", "srcset"}:
            self.found.append(tag)


@pytest.mark.parametrize("name", ["plan", "hybrid", "replay"])
def test_page_needs_no_network(name: str, pages: dict[str, Path]) -> None:
    text = pages[name].read_text()
    assert Fetches(text).found == []
    assert re.findall(r"https?://[^\s\"']+", text) == ["http://www.w3.org/2000/svg"]
    assert "url(" not in text
    assert "default-src 'none'" in text


def charts_of(page: Path) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" id="charts">(.*?)</script>', page.read_text()
    )
    assert found is not None
    return {chart["title"]: chart for chart in json.loads(found[1])}


def test_chart_and_sketch_show_what_the_table_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host tier that is smaller than the device's cache lowers no hits."""
    trace, page = tmp_path / "trace", tmp_path / "page.html"
    with trace.open("w") as file:  # ten prompts of four blocks, three times
        for at in range(30):
            ids = [4 * (at % 10) + block for block in range(4)]
            row = {"timestamp": 1000 * at, "input_length": 63, "output_length": 1, "hash_ids": ids}
            print(json.dumps(row), file=file)
    sizes = [option for gib in (0.01, 0.2) for option in ("--host-gib", str(gib))]
    given = ["plan", str(trace), "--block-size", "16", "--model", "llama-3.1-8b"]
    given += ["--device-blocks", "64", *sizes, "--html", str(page)]
    assert cli.main([*given, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["sizes"]
    [curve] = [series for chart in charts_of(page).values() for series in chart["series"]][:1]
    for row in rows:
        drawn = np.interp(row["host_gib"], curve["x"], curve["y"])
        assert drawn == pytest.approx(row["hit_ratio"], rel=0.01)
    assert rows[0]["host_hit_ratio"] == 0 < rows[0]["device_hit_ratio"]
    assert cli.main(given) == 0
    lines = re.findall(r"^ *[\d.]+% \|(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert lines and " " not in lines[-1], "the device alone hits something"


def series_of(page: Path) -> dict[str, Any]:
    """Return the lines of the chart of hits."""
    [chart] = [one for title, one in charts_of(page).items() if title.startswith("Hits")]
    return {series["name"]: series for series in chart["series"]}


def test_line_of_hit_density_has_the_hits_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device is in front of the host tier in both, so the picture agrees with the table."""
    page = tmp_path / "page.html"
    sizes = ["--device-gib", "24", "--host-gib", "16,64,256", "--html", str(page), "--json"]
    assert plan(*sizes, "--policy", "hit-density") == 0
    made = json.loads(capsys.readouterr().out)
    line = series_of(page)[DENSITY_LINE]
    drawn = dict(zip(line["x"], line["y"], strict=True))
    for row in made["sizes"]:
        assert drawn[row["host_gib"]] == pytest.approx(row["hit_ratio"], abs=1e-6)
    # Each point is what the table says of its size.
    [curve] = made["curves"]
    for gib, hits in list(zip(*curve["hit_density"].values(), strict=True))[::4]:
        given = ["--device-gib", "24", "--host-gib", str(gib), "--policy", "hit-density"]
        assert plan(*given, "--json") == 0
        assert json.loads(capsys.readouterr().out)["sizes"][0]["hit_ratio"] == hits


def test_table_alone_needs_no_curve_of_hit_density(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only pictures and the JSON have it, and it takes longer than the rest."""
    made: list[Curves] = []

    def without(exact: Curves, *_: object) -> Curves:
        made.append(exact)
        return exact

    monkeypatch.setattr("kvstow.plan.tiers.with_density", without)
    sizes = ["--device-gib", "24", "--host-gib", "64,256"]
    assert plan(*sizes) == 0
    table = capsys.readouterr().out
    assert not made
    outputs = (["--json"], ["--json-file", str(tmp_path / "a")], ["--html", str(tmp_path / "b")])
    for output in outputs:
        assert plan(*sizes, *output) == 0
        assert len(made) == 1 + outputs.index(output)
    assert capsys.readouterr().out.endswith(table)


def test_simulated_curve_goes_through_the_sizes_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, gibs = tmp_path / "page.html", (20, 70)
    given = ["plan", "--model", "gpt-oss-20b", "--device-gib", "24", "--limit", "200"]
    given += ["--host-gib", ",".join(map(str, gibs)), "--html", str(page), "--json"]
    assert cli.main(given) == 0
    found = json.loads(capsys.readouterr().out)
    line = series_of(page)["LRU, simulated"]
    assert line["x"] == sorted(line["x"])
    drawn = {round(x, 1): y for x, y in zip(line["x"], line["y"], strict=True)}
    assert not {*gibs} & {round(gib, 1) for gib in found["curves"][0]["tier"]["gib"]}
    for row in found["sizes"]:
        assert drawn[row["host_gib"]] == pytest.approx(row["hit_ratio"], abs=1e-6)


def test_lazy_sizes_of_the_table_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    given = ["--device-gib", "24", "--host-gib", "64,256", "--html", str(page), "--mode", "lazy"]
    assert plan(*given, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["sizes"]
    line = series_of(page)["lru, lazy, as in the table"]
    assert line["x"] == [64, 256]
    assert line["y"] == pytest.approx([row["hit_ratio"] for row in rows], abs=1e-6)
    assert plan(*given) == 0
    text = capsys.readouterr().out
    assert "The curve is that of lru, the table that of lru with lazy stores." in text


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ([], []),
        (["--policy", "hit-density"], ["--policy hit-density"]),
        (["--mode", "lazy"], ["--mode lazy"]),
        (["--policy", "hit-density", "--mode", "lazy"], ["--policy hit-density", "--mode lazy"]),
    ],
)
def test_table_that_overlapping_requests_do_not_reach_has_a_note(
    given: list[str], options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert plan("--device-gib", "24", "--host-gib", "64", "--html", str(page), *given) == 0
    for text in capsys.readouterr().out, page.read_text():
        assert re.findall(r"check a size with kvstow replay (.*?)\.", text) == options


@pytest.mark.parametrize(
    ("given", "has_note"),
    [
        (["--model", "gpt-oss-20b", "--device-gib", "24"], True),
        (["--model", "gpt-oss-20b"], False),
        (["--model", "llama-3.1-8b", "--device-gib", "24"], False),
    ],
)
def test_windows_behind_a_device_have_a_note_on_requests_that_overlap(
    given: list[str], has_note: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *given, "--host-gib", "64", "--limit", "40"]) == 0
    assert ("the host tier less" in capsys.readouterr().out) is has_note


def test_device_too_small_for_a_request_has_no_line_of_hit_density(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert plan("--device-blocks", "8", "--host-gib", "64", "--html", str(page), "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["curves"][0]["hit_density"]["gib"] == []
    assert DENSITY_LINE not in series_of(page)
    [warning] = printed.err.splitlines()
    assert warning.startswith("kvstow: the KV cache on the device holds 7 blocks, and the ")
    passed = r"pass --device-blocks (\d+) or --device-gib ([\d.]+) or more\. vLLM cannot serve"
    [(blocks, gib)] = re.findall(passed, warning)
    for option, size in ("--device-blocks", blocks), ("--device-gib", gib):
        assert plan(option, size, "--host-gib", "64") == 0
        assert not capsys.readouterr().err
    assert plan("--device-blocks", str(int(blocks) - 1), "--host-gib", "64") == 0
    assert "needs" in capsys.readouterr().err


def test_bound_beside_a_device_is_that_of_one_cache_alone(pages: dict[str, Path]) -> None:
    text = pages["plan"].read_text()
    assert "No single cache of that size can hit more than the best possible one" in text
    assert "No policy can hit more" not in text
    assert "best possible, one cache alone" in series_of(pages["plan"])


def test_the_page_of_a_lazy_plan_leaves_room_for_what_a_small_host_adds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    given = ["--model", "llama-3.1-8b", "--device-gib", "64", "--host-gib", "63", "--mode", "lazy"]
    assert cli.main(["plan", str(BUNDLED_TRACE), *given, "--html", str(page), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["sizes"]
    assert row["hit_ratio"] > row["device_alone_hit_ratio"]
    text = page.read_text()
    assert "With LRU and eager stores, a host tier no larger" in text
    assert "With LRU, a host tier no larger" not in text


@pytest.mark.parametrize("device", [[], ["--device-blocks", "9"]])
def test_knee_follows_from_its_definition(
    device: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    chances = random.Random(0)
    with trace.open("w") as file:
        for at in range(300):
            number = int(chances.expovariate(0.15))
            ids = [4 * number + block for block in range(4)]
            row = {"timestamp": 1000 * at, "input_length": 63, "output_length": 1, "hash_ids": ids}
            print(json.dumps(row), file=file)
    given = ["plan", str(trace), "--block-size", "16", "--model", "llama-3.1-8b", *device]
    assert cli.main([*given, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    for words in ("the size of the device's cache (0 without one)", "where its hits end"):
        assert words in made["knee_method"]
    [curve] = made["curves"]
    x, y = np.array(curve["tier"]["gib"]), np.array(curve["tier"]["hit_ratio"])
    first = 8 if device else 0  # vLLM keeps one block
    x, y = x[first:], y[first:]
    bend = (y - y[0]) / (y[-1] - y[0]) - (x - x[0]) / (x[-1] - x[0])
    assert bend.max() >= 0.1
    assert curve["knee_gib"] == x[bend.argmax()]


def test_sentence_names_the_curve_of_the_knee(capsys: pytest.CaptureFixture[str]) -> None:
    of = "the knee of the LRU curve"
    assert plan("--policy", "hit-density", "--host-gib", "64,256,512") == 0
    assert f", the smallest size here that reaches {of}: it saves" in capsys.readouterr().out
    assert plan("--policy", "hit-density", "--device-gib", "24", "--host-gib", "128") == 0
    assert f"{of} is at " in capsys.readouterr().out
    assert plan("--host-gib", "512") == 0
    assert "LRU curve" not in capsys.readouterr().out
    hybrid = ["plan", *SMALL[:3], "--model", "gpt-oss-20b", "--policy", "hit-density"]
    assert cli.main(hybrid) == 0
    text = capsys.readouterr().out
    assert "LRU curve" not in text and "The curve is that of lru" not in text


def test_plan_of_hit_density_says_that_overlaps_lower_its_hits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, note = tmp_path / "page.html", "check a size with kvstow replay --policy hit-density."
    for policy in ("hit-density", "lru"):
        assert plan("--policy", policy, "--host-gib", "64", "--html", str(page)) == 0
        for text in (capsys.readouterr().out, page.read_text()):
            assert (note in text) is (policy == "hit-density")


def test_plan_of_two_policies_says_where_the_second_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    note = (
        "The table is that of lru. With --json, `curve` has the hits of one cache with hit-density"
    )
    assert plan("--policy", "lru", "--policy", "hit-density", "--host-gib", "64") == 0
    assert note in capsys.readouterr().out
    assert plan("--policy", "lru", "--host-gib", "64") == 0
    assert "The table is that of" not in capsys.readouterr().out


@pytest.mark.parametrize("asked", [[], ["--capacity", "100"]])
def test_plan_of_two_policies_says_what_fills_the_curve_of_several_groups(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    two = ["--policy", "lru", "--policy", "hit-density", "--host-gib", "64", *asked]
    hybrid = ["plan", *SMALL[:3], "--model", "gpt-oss-20b", *two, "--json-file", str(file)]
    assert cli.main(hybrid) == 0
    says_capacity = "With --json and --capacity, `curve` has" in capsys.readouterr().out
    has_points = bool(json.loads(file.read_text())["curve"])
    assert has_points is bool(asked)
    assert says_capacity is not has_points


def test_sizes_take_commas_and_the_unit(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*arguments: str) -> Any:
        assert plan("--json", *arguments) == 0
        return json.loads(capsys.readouterr().out)["sizes"]

    plain = rows("--device-gib", "24", "--host-gib", "64", "--host-gib", "256")
    assert rows("--device-gib", "24GiB", "--host-gib", "64, 256 gib") == plain
    assert rows("--device-blocks", "300,400", "--host-gib", "64") == rows(
        "--device-blocks", "300", "--device-blocks", "400", "--host-gib", "64"
    )


def test_axis_of_the_sketch_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan() == 0
    axis = r"^ +0 +size of the host tier +[\d.]+ GiB$"
    assert re.search(axis, capsys.readouterr().out, re.MULTILINE)


def test_axis_of_the_sketch_ends_at_the_size_that_the_hits_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    request = {"timestamp": 0, "input_length": 56, "output_length": 0, "hash_ids": [0, 1, 2, 3]}
    path.write_text(f"{json.dumps(request)}\n" * 2)
    plan_of_it = ["plan", str(path), "--block-size", "16", "--model", "llama-3.1-8b"]
    assert cli.main(plan_of_it) == 0
    assert re.search("host tier +6 MiB\n", capsys.readouterr().out)  # three blocks of 2 MiB


def test_token_ids_without_a_time_get_no_hint_to_convert_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokens"
    path.write_text('{"prompt_token_ids": [1, 2], "output_length": 1}\n')
    assert cli.main(["plan", str(path), "--model", "llama-3.1-8b"]) == 2
    error = capsys.readouterr().err
    assert "no 'timestamp'" in error
    assert "convert" not in error


def test_pages_have_the_charts_that_they_promise(pages: dict[str, Path]) -> None:
    assert list(charts_of(pages["plan"])) == [
        "Hits against memory, beside 24 GiB on each device",
        "Bytes to carry",
    ]
    assert list(charts_of(pages["hybrid"])) == [
        "Hits against memory, without the disk",
        "Bytes to carry",
    ]
    replay = charts_of(pages["replay"])
    assert {"Hits by tier", "Requests", "Bytes on the link", "Accounting per step"} <= {*replay}


def test_chart_of_a_replay_adds_up_to_its_figures(
    pages: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(BUNDLED_TRACE), *REPLAY, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    charts = charts_of(pages["replay"])
    rates: list[dict[str, list[float]]] = charts["Bytes on the link"]["series"]
    for series, name in zip(rates, ("stored_blocks", "loaded_blocks"), strict=True):
        span_s = series["x"][0] * 3600
        num_bytes = sum(rate * span_s for rate in series["y"])
        assert num_bytes == pytest.approx(figures[name] * 512 * 131_072)


def test_text_of_a_page_is_escaped() -> None:
    name = "</script><b>&"
    chart = Chart(name, name, [Series(name, [0, 1], [1, None])], "number", "number", name, name)
    page = html_page(name, name, [chart, Table(name, [name], [[name]]), Text(name, [name], name)])
    assert "<b>" not in page
    assert page.count("</script>") == 2


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to draw the page")
@pytest.mark.parametrize("name", ["plan", "hybrid", "replay"])
@pytest.mark.parametrize("width", [400, 1280])
def test_browser_draws_every_line_of_a_page(
    name: str, width: int, pages: dict[str, Path], tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=3000",
            f"--user-data-dir={tmp_path}",
            f"--window-size={width},900",
            "--dump-dom",
            f"file://{pages[name]}",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    charts = charts_of(pages[name])
    num_lines = sum(len(chart["series"]) for chart in charts.values())
    assert len(re.findall(r'class="curve" d="M', done.stdout)) >= num_lines
    assert done.stdout.count('role="img"') == len(charts)
    assert "NaN" not in re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
