"""vLLM's server with a disk below the host, whose processes end and start again.

After SIGTERM, and after SIGKILL, the first request of the next server hits the disk, and its
answer is that of a server that computes everything. SIGTERM saves what only the host has, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.full import full
from tests.vllm.halves_below import folder_on_disk
from tests.vllm.servers import BLOCK_SIZE, NUM_HIT, check, prompts, server

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

ONLY_FULL = full("starts more servers")
NUM_RANKS = [1, pytest.param(2, marks=ONLY_FULL)]


def options_of(disk: Path, **more: Any) -> dict[str, Any]:
    return {
        "num_cpu_blocks": 24,
        "disk_path": str(disk),
        "disk_bytes_to_use": "200MiB",
        "min_promote_tokens": 0,
        "promote_timeout_s": 60,
        **more,
    }


@pytest.mark.parametrize(
    "ways",
    [("SIGKILL", "SIGTERM"), pytest.param(("SIGTERM", "SIGKILL"), marks=ONLY_FULL)],
    ids="-".join,
)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_restarted_server_hits_the_disk_with_its_first_requests(
    folder: Path, tmp_path: Path, num_ranks: int, ways: tuple[str, str]
) -> None:
    """Neither end loses what is on the disk. An orderly one saves what only the host has, too."""
    flags = ("--tensor-parallel-size", str(num_ranks))
    asked = prompts(9)
    old, new = asked[:6], asked[6:]
    with folder_on_disk() as disk:
        options = options_of(disk)
        with server(folder, tmp_path / "first", options, *flags) as first:
            # Computed: each prompt is new.
            expected = [first.answer(prompt) for prompt in old]
            num_blocks = len(old) * NUM_HIT // BLOCK_SIZE
            first.wait_for("kvstow_disk_cached_blocks", num_blocks)
            assert first.metric("kvstow_disk_hit_tokens_total") == 0
            first.end(ways[0])
        # The host has room for everything, and what was not hit is not demoted.
        options = options_of(disk, num_cpu_blocks=90, disk_admit="returned")
        with server(folder, tmp_path / "second", options, *flags) as second:
            for at in range(4):
                check(second.answer(old[at]), expected[at])
                second.wait_for("kvstow_disk_hit_tokens_total", (at + 1) * NUM_HIT)
            assert second.metric("kvstow_disk_mode") == 2
            expected = [second.answer(prompt) for prompt in new]
            second.wait_for("kvstow_cached_blocks", (4 + len(new)) * NUM_HIT // BLOCK_SIZE)
            assert second.metric("kvstow_disk_cached_blocks") == num_blocks
            assert second.metric("kvstow_disk_hit_tokens_total") == 4 * NUM_HIT
            second.end(ways[1])
        with server(folder, tmp_path / "third", options, *flags) as third:
            for prompt, known in zip(new, expected, strict=True):
                check(third.answer(prompt), known)
            if ways[1] == "SIGTERM":
                third.wait_for("kvstow_disk_hit_tokens_total", len(new) * NUM_HIT)
            else:
                assert third.metric("kvstow_disk_hit_tokens_total") == 0, "the negative control"
        slot_files = [f"rank{rank}-of-{num_ranks}" for rank in range(num_ranks)]
        names = {*slot_files, *(f"{name}.index" for name in slot_files), "weights.json"}
        assert {path.name for path in disk.iterdir()} <= names
        size = sum((disk / name).stat().st_size for name in names - {"weights.json"})
        assert size <= 200 << 20, "never more than disk_bytes_to_use"


def damage(file: Path) -> None:
    """Change a byte in each page of a slot file."""
    content = bytearray(file.read_bytes())
    content[3::64] = bytes(byte ^ 0x7F for byte in content[3::64])
    file.write_bytes(content)


@ONLY_FULL
def test_blocks_that_one_of_two_ranks_has_damaged_are_computed(
    folder: Path, tmp_path: Path
) -> None:
    """The negative control proves nothing, and serves the damage."""
    flags = ("--tensor-parallel-size", "2")
    asked = prompts(3)
    with folder_on_disk() as disk:
        options = options_of(disk)
        with server(folder, tmp_path / "first", options, *flags) as first:
            expected = [first.answer(prompt) for prompt in asked]
            first.wait_for("kvstow_disk_cached_blocks", len(asked) * NUM_HIT // BLOCK_SIZE)
            first.end("SIGKILL")
        damage(disk / "rank1-of-2")
        # A control keeps what it has read on the host, and writes none of it to the disk again.
        control = server(
            folder, tmp_path / "control", options, *flags, module="tests.vllm.unproven_connector"
        )
        with control as trusting:
            for prompt, known in zip(asked, expected, strict=True):
                found = trusting.answer(prompt)
                assert found[2] == NUM_HIT
                with pytest.raises(AssertionError):
                    check(found, known)
            trusting.end("SIGKILL")
        with server(folder, tmp_path / "again", options, *flags) as again:
            for prompt, known in zip(asked, expected, strict=True):
                found = again.answer(prompt)
                assert found[2] == 0
                check(found, known)
            assert again.metric("kvstow_disk_mismatched_blocks_total") > 0
        # Rank 0 is intact, and its blocks alone are worth nothing.
        (disk / "rank1-of-2").unlink()
        (disk / "rank1-of-2.index").unlink()
        with server(folder, tmp_path / "one", options, *flags) as one:
            check(one.answer(asked[0]), expected[0])
            assert one.metric("kvstow_disk_hit_tokens_total") == 0
