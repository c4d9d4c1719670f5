"""The machine code of the kernels: wide accesses, no stack, and the cache hints that are meant."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from tests.transfer.cuda.kernels.test_nvrtc import KERNELS, compiled

from kvstow.transfer.cuda.kernels import SOURCE


@pytest.fixture(scope="module")
def nvdisasm() -> Path:
    """Return the disassembler, which triton's wheel has."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        pytest.skip("there is no triton, whose wheel has the disassembler nvdisasm")
    return Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


# Name of the mistake: (text, replacement).
MUTATIONS = {
    "a load without a hint": ("= __ldcs(from + k * LANES)", "= from[k * LANES]"),
    "a load that stays in L2": ("__ldcs(", "__ldcg("),
    "a load that stays in L1": ("__ldcs(", "__ldg("),
    "a store that is evicted first": ("__stcg(", "__stcs("),
    "a store that goes through the caches": ("__stcg(", "__stwt("),
    "a store that is not known to be in L2": ("__stcg(", "__stwb("),
    "a store that stays in L1": ("__stcg(to + k * LANES, units[k])", "to[k * LANES] = units[k]"),
    "units on the stack": ("#pragma unroll", "#pragma unroll 1"),
    "byte by byte": ("num_wide = aligned ? num_bytes / 16 : 0", "num_wide = 0"),
}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_machine_code_moves_16_bytes_at_once(
    architecture: str, nvdisasm: Path, tmp_path: Path
) -> None:
    check(compiled(architecture)[1], nvdisasm, tmp_path)


@pytest.mark.parametrize("name", MUTATIONS)
def test_wrong_hint_or_width_is_caught(name: str, nvdisasm: Path, tmp_path: Path) -> None:
    text, wrong = MUTATIONS[name]
    assert text in SOURCE
    with pytest.raises(AssertionError):
        check(compiled("sm_90", SOURCE.replace(text, wrong))[1], nvdisasm, tmp_path)


def check(code: bytes, nvdisasm: Path, folder: Path) -> None:
    """Assert that compiled kernels access memory as they are meant to."""
    cubin = folder / "pack.cubin"
    cubin.write_bytes(code)
    command = [str(nvdisasm), "-c", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = re.findall(r"\.section\s+\.text\.(\w+),(.*?)(?=\.section\s|\Z)", text, re.DOTALL)
    assert {name for name, _ in parts} == KERNELS
    for _, part in parts:
        names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", part)
        accesses = Counter(name for name in names if name.startswith(("LDG", "LDL", "STG", "STL")))
        assert names, "no instruction was understood"
        assert not [name for name in accesses if name.startswith(("LDL", "STL"))], "uses the stack"
        # A block is read once, so it is evicted first. The copy engine, or compute, reads next what
        # the kernels write. Eight bytes at a time are the table of chunks.
        table = {name for name in accesses if re.fullmatch(r"LDG\.E\.64(\.CONSTANT)?", name)}
        loads = {name for name in accesses if name.startswith("LDG")} - table
        stores = {name for name in accesses if name.startswith("STG")}
        assert loads == {"LDG.E.EF.128", "LDG.E.EF.U8"}
        assert stores == {"STG.E.128.STRONG.GPU", "STG.E.U8.STRONG.GPU"}
        wide_loads, wide_stores = (
            sum(num for name, num in accesses.items() if name.startswith(kind) and ".128" in name)
            for kind in ("LDG", "STG")
        )
        assert wide_loads == wide_stores >= 4
