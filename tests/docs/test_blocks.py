"""What the pages show runs, prints what they promise, or at least parses."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from tests.docs.pages import PAGES, ROOT, Block, blocks

from kvstow import cli

GOES_ON = "# goes on from the code above\n"
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_blocks_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python code runs alone, as a reader pastes it, unless its first line says that it goes on."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    printed = ""
    for block in blocks(page):
        where = f"{page}, line {block.line}"
        if block.title:
            Path(block.title).write_text(block.text)
        if block.is_output:
            assert printed == block.text, where
        elif block.language == "python":
            code = compile("\n" * block.line + block.text, str(page), "exec")
            if not block.reason:
                if not block.text.startswith(GOES_ON):
                    names = {"__name__": "page"}
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    exec(code, names)
                printed = output.getvalue()
        elif block.language == "sh":
            run_commands(block, where)
        else:
            parse(block, where)


def run_commands(block: Block, where: str) -> None:
    """Run the lines that begin with `kvstow`, and let bash parse the others."""
    parsed = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, check=False, text=True
    )
    assert (parsed.returncode, parsed.stderr) == (0, ""), where
    if block.text.startswith("# needs: "):
        return
    for command in re.findall(r"^kvstow .*(?:\\\n.*)*", block.text, re.MULTILINE):
        run_command(shlex.split(command, comments=True), f"{where}: {command}")


def run_command(words: list[str], where: str) -> None:
    """Run a command in this process. The only operator of the shell may be `> FILE` at its end."""
    file = os.devnull
    if words[-2:-1] == [">"]:
        *words, _, file = words
    assert not {"|", "<", ">", "&&", ";"} & set(words), where
    with (
        open(file, "w") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        status = cli.main(words[1:])
    assert status == 0, f"{where}\n{errors.getvalue()}"


def parse(block: Block, where: str) -> None:
    """Parse a block of data."""
    if block.language == "json":
        lines = block.text.splitlines() if "\n{" in block.text else [block.text]
        assert all(isinstance(json.loads(line), dict) for line in lines), where
    elif block.language == "yaml":
        assert all(isinstance(part, dict) for part in yaml.safe_load_all(block.text)), where
    elif block.language == "docker":
        assert block.text.rstrip("\n") in (ROOT / "examples" / "Dockerfile").read_text(), where
    else:
        assert block.language == "text", f"{where}: a block needs a language that a test knows"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_flag_is_one_that_the_connector_takes(page: Path) -> None:
    from kvstow.vllm.options import Options  # noqa: PLC0415 - vLLM may be slow to import

    for text in re.findall(r"--kv-transfer-config '(\{.*?\})'", page.read_text(), re.DOTALL):
        flag = json.loads(text)
        options = flag["kv_connector_extra_config"]
        if flag["kv_connector"] == "OffloadingConnector":  # vLLM's own, above a tier of kvstow
            check_tiers(options["secondary_tiers"])
            continue
        assert flag["kv_load_failure_policy"] == "recompute"
        Options.parse(options)


def check_tiers(tiers: list[dict[str, object]]) -> None:
    # An import of vLLM takes seconds.
    source = ast.parse((ROOT / "python/kvstow/vllm/secondary_tier.py").read_text())
    [taken] = [
        {argument.arg for argument in one.args.kwonlyargs}
        for node in source.body
        if isinstance(node, ast.ClassDef) and node.name == "KVStowDisk"
        for one in node.body
        if isinstance(one, ast.FunctionDef) and one.name == "__init__"
    ]
    for tier in tiers:
        named = tier.pop("type"), tier.pop("module_path")
        assert named == ("KVStowDisk", "kvstow.vllm.secondary_tier")
        assert tier.keys() <= taken


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_path_on_a_page_exists(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = re.findall(r"`((?:benches|docs|examples|python|rust|tests)/[\w./-]+)`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []
