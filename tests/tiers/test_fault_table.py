"""The table of faults: kvstow returns no wrong block, leaks nothing, and each control fails."""

from __future__ import annotations

from benches.disk_faults import FAULTS, NO_DAMAGE, table
from benches.disk_kills import SCENES


def test_no_fault_gives_a_wrong_block_and_each_control_does() -> None:
    rows, is_bad = table(has_vllm=False)
    print(*rows, sep="\n")
    assert not is_bad
    assert [row[0] for row in rows] == [*FAULTS, *SCENES]
    assert FAULTS.keys() >= NO_DAMAGE
    for name, _, wrong, leaks, recover, control, *_ in rows:
        assert (wrong, leaks) == ("0", "0"), name
        assert recover != "-", f"{name}: it does not recover"
        assert (control == "-") == (name in NO_DAMAGE), name
