"""The diagrams of the documentation: `python -m docs.generate.diagrams` writes `docs/images/`.

The files are committed, because the README shows one. A test compares them with this source.
"""

from pathlib import Path

from docs.generate.svg import Arrow, Box, Diagram, Note

IMAGES = Path(__file__).parents[1] / "images"

PARTS = Diagram(
    600,
    430,
    "The parts of kvstow: an engine or vLLM on top, the accounting in Rust below it, then the "
    "movers, and the device and host memory between which they copy blocks.",
    [
        Box(20, 112, 560, 128, kind="zone"),
        Box(20, 20, 270, 54, ["Your engine", "on kvstow.Engine"], "plain"),
        Box(310, 20, 270, 54, ["vLLM", "with the connector kvstow.vllm"], "plain"),
        Arrow([(154, 74), (154, 142)], "requests, hashes", (164, 98), "start"),
        Arrow([(446, 74), (446, 142)], "requests, hashes", (456, 98), "start"),
        Note(300, 132, "Accounting, in Rust", "middle"),
        Box(34, 144, 240, 82, ["BlockLedger", "requests, block tables,", "prefixes on the device"]),
        Box(
            326,
            144,
            240,
            82,
            ["OffloadScheduler", "keys of the host tier, eviction,", "store and load jobs"],
        ),
        Arrow([(274, 185), (326, 185)], is_double=True),
        Arrow([(446, 226), (446, 270)], "jobs: block ids, host slots", (436, 258), "end"),
        Box(34, 270, 532, 54, ["Movers", "copy blocks, report when each job has ended"]),
        Arrow([(154, 324), (154, 360)], "bytes", (164, 347), "start", is_double=True),
        Arrow([(446, 324), (446, 360)], "bytes", (456, 347), "start", is_double=True),
        Box(34, 360, 240, 54, ["Device memory", "layers of blocks"], "end"),
        Box(326, 360, 240, 54, ["Host memory", "one slot for each block"], "end"),
    ],
)

REQUEST = Diagram(
    600,
    300,
    "The life of a request in kvstow.Engine: added, loading, running, finished.",
    [
        Box(20, 30, 130, 54, ["added", "holds no blocks"], "state"),
        Box(235, 130, 130, 54, ["loading", "a load is in flight"], "state"),
        Box(450, 30, 130, 54, ["running", "has a block table"], "state"),
        Box(450, 230, 130, 54, ["finished", "known no more"], "end"),
        Arrow([(150, 45), (450, 45)], "admit: RUNS", (300, 38)),
        Arrow([(450, 70), (150, 70)], "preempt", (300, 87)),
        Arrow([(85, 84), (85, 150), (235, 150)], "admit: LOADS", (95, 143), "start"),
        Arrow(
            [(235, 170), (50, 170), (50, 84)],
            "poll: failed or late,\nor preempt",
            (60, 188),
            "start",
        ),
        Arrow([(365, 157), (500, 157), (500, 84)], "poll: loaded", (375, 150), "start"),
        Arrow([(545, 84), (545, 230)], "finish", (538, 205), "end"),
        Note(20, 250, "PENDING and NO_ROOM leave a request added."),
        Note(20, 270, "finish is legal in every state."),
    ],
)

BLOCK = Diagram(
    600,
    442,
    "The life of a block on the device, above, and of the slot that holds its copy, below.",
    [
        Box(12, 12, 576, 216, kind="zone"),
        Note(24, 32, "Device block"),
        Box(30, 44, 170, 54, ["free, no key", "head of the free queue"], "plain"),
        Box(400, 44, 170, 54, ["in use, no key", "its step computes it"], "state"),
        Box(400, 158, 170, 54, ["in use, cached", "lookup finds it"], "state"),
        Box(30, 158, 170, 54, ["free, cached", "lookup finds it"], "end"),
        Arrow([(200, 71), (400, 71)], "allocate", (300, 64)),
        Arrow([(485, 98), (485, 158)], "computed: gets its key", (477, 133), "end"),
        Arrow([(400, 175), (200, 175)], "free: to the queue's tail", (300, 168)),
        Arrow([(200, 197), (400, 197)], "prefix hit: touch", (300, 214)),
        Arrow([(105, 158), (105, 98)], "evict", (113, 133), "start"),
        Box(12, 300, 576, 130, kind="zone"),
        Note(24, 320, "Host slot"),
        Box(30, 336, 110, 54, ["free"], "plain"),
        Box(400, 336, 170, 54, ["reserved", "withheld from lookup"], "state"),
        Box(215, 336, 110, 54, ["resident", "lookup finds it"], "end"),
        Arrow([(500, 212), (500, 336)], "store job", (508, 268), "start"),
        Arrow([(400, 363), (325, 363)], "stored", (362, 356)),
        Arrow([(270, 336), (270, 268), (440, 268), (440, 212)], "load job", (350, 261)),
        Arrow([(215, 363), (140, 363)], "evict", (178, 356)),
        Arrow([(85, 390), (85, 420), (485, 420), (485, 390)], "reserve", (285, 413)),
    ],
)

JOB = Diagram(
    600,
    330,
    "The life of a job: planned, in flight, then done, failed, or late and in quarantine.",
    [
        Box(20, 24, 150, 54, ["planned", "blocks pinned"], "plain"),
        Box(225, 24, 150, 54, ["in flight", "on every rank"], "state"),
        Box(430, 24, 150, 54, ["done", "slots can be found"], "end"),
        Box(430, 130, 150, 54, ["failed", "blocks unpinned"], "end"),
        Box(225, 130, 150, 54, ["in quarantine", "blocks still pinned"], "state"),
        Box(225, 250, 150, 54, ["ended", "its result is ignored"], "end"),
        Arrow([(170, 51), (225, 51)], "submit", (198, 44)),
        Arrow([(375, 51), (430, 51)], "ok", (402, 44)),
        Arrow([(375, 65), (405, 65), (405, 157), (430, 157)], "error", (398, 120), "end"),
        Arrow(
            [(275, 78), (275, 130)],
            "deadline passes: a load's\nrequest fails once",
            (267, 101),
            "end",
        ),
        Arrow(
            [(300, 184), (300, 250)],
            "every rank confirms\nthat the copy has ended",
            (310, 212),
            "start",
        ),
    ],
)

DIAGRAMS = {"parts": PARTS, "request": REQUEST, "block": BLOCK, "job": JOB}


def main() -> None:
    """Write every diagram."""
    IMAGES.mkdir(exist_ok=True)
    for name, diagram in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(diagram.svg())


if __name__ == "__main__":
    main()
