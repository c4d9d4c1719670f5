import contextlib
import io
import re
from pathlib import Path

from kvstow.replay.model import REFERENCE_BYTES_PER_TOKEN, REFERENCE_MODEL

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "reference" / "benchmarks.md"


def test_the_example_prints_what_the_readme_says() -> None:
    text = README.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (expected,) = re.findall(r"It prints\n\n```text\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, str(README), "exec"), {})
    assert printed.getvalue() == expected


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_capacities_have_their_size_in_the_named_model_beside_them() -> None:
    text = BENCHMARKS.read_text()
    rows = re.findall(r"^\| (host memory, GiB in|the same in blocks) (.*?) \|(.*)\|$", text, re.M)
    (_, model, gib), (_, unit, blocks) = rows
    sizes, capacities = (
        [float(cell.replace(",", "")) for cell in cells.split("|")] for cells in (gib, blocks)
    )
    assert (model, unit) == (REFERENCE_MODEL, "of 512 tokens")
    assert sizes == [count * 512 * REFERENCE_BYTES_PER_TOKEN / 2**30 for count in capacities]
    assert f"{REFERENCE_BYTES_PER_TOKEN:,} bytes" in text
