"""Leave one wait, pin or fence out of a copy of the scheduler at a time. The model must find each.

`rust/core/offload/protocol_tests/` searches every interleaving of four small worlds. A search that
finds nothing is worth as much as what it can find. So this program makes the bugs below in a copy
of the core, one at a time, and runs the same search. It fails unless the search finds every one.

    python -m tests.model.seeded_bugs [NAME ...]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OFFLOAD = Path("rust/core/offload")
COPY = ROOT / "target" / "model" / "copy"
FOUND = re.compile(r"^\w+: (.+) after (\d+) steps: ", flags=re.MULTILINE)


@dataclass(frozen=True)
class Bug:
    """Texts of one file, each with what takes its place, and the world that finds it."""

    world: str
    what: str
    file: str
    edits: tuple[tuple[str, str], ...]

    def apply(self, folder: Path) -> None:
        """Make the bug in a copy of the core.

        Raises:
            ValueError: A text does not stand in the file exactly once.
        """
        path = folder / OFFLOAD / self.file
        text = path.read_text()
        for old, new in self.edits:
            if (count := text.count(old)) != 1:
                raise ValueError(f"{self.file} has {old!r} {count} times, not once: adapt the bug")
            text = text.replace(old, new)
        path.write_text(text)


BUGS = {
    "first_rank": Bug(
        "ranks",
        "A job ends when its first rank has reported",
        "job.rs",
        (("let is_ended = !job.reported.contains(&false);", "let is_ended = true;"),),
    ),
    "failed_rank": Bug(
        "ranks",
        "A store counts although a rank has failed",
        "job.rs",
        (("let is_ok = !job.has_failed && !job.is_fenced", "let is_ok = !job.is_fenced"),),
    ),
    "late_store": Bug(
        "ranks",
        "The slots of a late store are free before its copies have ended",
        "job.rs",
        (
            (
                "Kind::Store { .. } => self.host.fence(&job.slots)?,",
                "Kind::Store { .. } => {\n"
                "    self.host.fence(&job.slots)?;\n"
                "    self.host.slots.pool.free(&std::mem::take(&mut job.slots))?;\n"
                "}",
            ),
        ),
    ),
    "late_load": Bug(
        "ranks",
        "The slots of a late load lose their pins before its copies have ended",
        "job.rs",
        (
            (
                "Kind::Load { .. } => self.host.slots.end_loads(&job.slots),",
                "Kind::Load { .. } => {\n"
                "    self.host.slots.end_loads(&job.slots);\n"
                "    self.host.unpin(&std::mem::take(&mut job.slots))?;\n"
                "}",
            ),
        ),
    ),
    "damaged_slot": Bug(
        "disk",
        "A slot that a load has found damaged stays in the tier",
        "job.rs",
        (("        self.drop_damaged(&damaged)?;\n", "        let _ = damaged;\n"),),
    ),
    "fence_of_loads": Bug(
        "ranks",
        "A load counts although the tier was reset since",
        "mod.rs",
        (
            (
                "        for job in self.jobs.values_mut() {\n"
                "            job.is_fenced = true;\n"
                "        }\n",
                "",
            ),
        ),
    ),
    "fence_of_promotes": Bug(
        "sharing",
        "A demote or a promote counts although the tiers were reset since",
        "disk/mod.rs",
        (
            (
                "        for job in self.jobs.values_mut() {\n"
                "            job.is_fenced = true;\n"
                "        }\n",
                "",
            ),
        ),
    ),
    "pins_of_lookups": Bug(
        "ranks",
        "A lookup does not pin what it has found",
        "load.rs",
        (
            (
                "            self.host.pin(&slots)?;\n        }\n        self.host.unpin(",
                "        }\n        self.host.unpin(",
            ),
        ),
    ),
    "pins_of_demotes": Bug(
        "disk",
        "A demote does not pin the host slots that it reads",
        "disk/demote.rs",
        (("        host.pin(&host_slots)?;\n", ""),),
    ),
    "pins_of_promotes": Bug(
        "disk",
        "A promote does not pin the disk slots that it reads",
        "disk/promote.rs",
        (("        disk.tier.pin(&disk_slots)?;\n", ""),),
    ),
    "eviction_of_pinned": Bug(
        "ranks",
        "A pinned slot may be evicted",
        "tier/room.rs",
        (("chains.is_leaf(slot) && slots.pool.num_pins(slot) == 0", "chains.is_leaf(slot)"),),
    ),
    "late_promote": Bug(
        "disk",
        "The blocks of a late promote are not withdrawn from the host",
        "disk/job.rs",
        (("                    host.discard(&job.host_slots);\n", ""),),
    ),
    "failed_block": Bug(
        "disk",
        "A demote or a promote counts whole although a block of it has failed",
        "disk/job.rs",
        (
            (
                "job.are_ok.iter_mut().zip(are_ok).for_each(|(all, is_ok)| *all &= is_ok);",
                "",
            ),
        ),
    ),
    "stopped_movers": Bug(
        "disk",
        "A demote or a promote counts although the movers have stopped",
        "disk/job.rs",
        (("!job.is_late && !job.is_fenced && !has_stopped;", "!job.is_late && !job.is_fenced;"),),
    ),
    "damaged_source": Bug(
        "disk",
        "A demote counts although a load has found its source damaged",
        "job.rs",
        (("            disk.fail_sources(slots);\n", "            let _ = disk;\n"),),
    ),
    "pins_of_images": Bug(
        "sleeping",
        "A sleep image does not pin the slots that it shares with the tier",
        "image.rs",
        (("        self.host.pin(&shared)?;\n        let own", "        let own"),),
    ),
}


def copy_core() -> None:
    """Copy what cargo needs to build the core and its model."""
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir(parents=True)
    for name in ("Cargo.toml", "Cargo.lock"):
        shutil.copy(ROOT / name, COPY)
    for name in ("rust", "benches", "tests"):
        shutil.copytree(
            ROOT / name,
            COPY / name,
            ignore=shutil.ignore_patterns("*.py", "__pycache__", "results"),
        )


def search(world: str) -> tuple[str, int] | None:
    """Search a world of the copy. Return the violation and its steps, if any.

    Raises:
        RuntimeError: The search does not end as one that finds a violation or none.
    """
    command = ["cargo", "test", "--quiet", "--package", "kvstow-core", "--lib"]
    done = subprocess.run(
        [*command, f"protocol_tests::{world}", "--target-dir", str(COPY.parent / "build")],
        cwd=COPY,
        env=os.environ | {"CARGO_PROFILE_TEST_DEBUG": "0", "CARGO_PROFILE_TEST_OPT_LEVEL": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    found = FOUND.search(done.stdout + done.stderr)
    if not found:
        raise RuntimeError(f"cargo failed without a violation:\n{done.stdout}{done.stderr}")
    return found[1], int(found[2])


def main(names: list[str]) -> int:
    """Search with each bug. Return 1 if one was not found."""
    num_missed = 0
    for name in names or BUGS:
        bug = BUGS[name]
        copy_core()
        bug.apply(COPY)
        found = search(bug.world)
        num_missed += found is None
        num_steps, why = (str(found[1]), found[0]) if found else ("-", "NOT FOUND")
        print(f"{bug.world:9} {num_steps:>5}  {bug.what}\n{'':17}{why[:100]}", flush=True)
    return min(num_missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
