import contextlib
import io
import re
from pathlib import Path

from kvstow.replay.config import REFERENCE_BYTES_PER_TOKEN, REFERENCE_MODEL

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_what_the_readme_says() -> None:
    text = README.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (expected,) = re.findall(r"It prints\n\n```text\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, str(README), "exec"), {})
    assert printed.getvalue() == expected


def test_capacities_have_their_size_in_the_named_model_beside_them() -> None:
    text = README.read_text()
    rows = dict(re.findall(r"^\| (capacity, blocks|GiB in [\w.-]+) \|(.*)\|$", text, re.MULTILINE))
    capacities, sizes = (
        [float(cell.replace(",", "")) for cell in rows[name].split("|")]
        for name in ("capacity, blocks", f"GiB in {REFERENCE_MODEL}")
    )
    assert sizes == [blocks * 512 * REFERENCE_BYTES_PER_TOKEN / 2**30 for blocks in capacities]
    assert f"{REFERENCE_BYTES_PER_TOKEN:,} bytes per token" in text
