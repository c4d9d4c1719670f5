"""The kernels compiled by CUDA's own compiler, which needs neither a driver nor a GPU."""

from __future__ import annotations

import re

import pytest
from cuda.bindings import nvrtc

from kvstow.transfer.cuda.kernels import SOURCE

KERNELS = {"gather", "scatter"}
# What the kernels need today, so that a change that needs more is seen. With 64, 2 thread blocks of
# 512 threads fit on a multiprocessor, which has 65,536 registers.
MAX_REGISTERS = 48
ELF_MACHINE_CUDA = 190


def compiled(architecture: str, source: str = SOURCE) -> tuple[str, bytes]:
    """Return the log, and the cubin for sm_NN or the PTX for compute_NN."""
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"pack.cu", 0, [], [])
    assert status.value == 0, status
    options = [f"--gpu-architecture={architecture}".encode(), b"--ptxas-options=-v"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    # Not bytes, because the compiler writes into it, and the interpreter shares bytes of length 1.
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status.value == 0, log.decode()
    is_cubin = architecture.startswith("sm_")
    size, get = (
        (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        if is_cubin
        else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    )
    code = bytearray(size(program)[1])
    get(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return log.decode(), bytes(code)


def test_compiler_makes_code_for_a_cuda_13_0_driver() -> None:
    assert nvrtc.nvrtcVersion()[1:] == (13, 0)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_cubin_needs_few_registers_and_no_stack(architecture: str) -> None:
    log, cubin = compiled(architecture)
    assert cubin[:4] == b"\x7fELF"
    assert int.from_bytes(cubin[18:20], "little") == ELF_MACHINE_CUDA
    assert "warning" not in log
    properties = re.findall(
        r"Function properties for (\w+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\n.*?Used (\d+) registers, used (\d+) barriers",
        log,
    )
    assert {name for name, *_ in properties} == KERNELS, log
    for name, *numbers in properties:
        stack, stores, loads, registers, barriers = map(int, numbers)
        assert (name, stack, stores, loads, barriers) == (name, 0, 0, 0, 0)
        assert registers <= MAX_REGISTERS, f"{name} uses {registers} registers"


def test_a_round_is_four_wide_loads_and_then_four_wide_stores() -> None:
    _, ptx = compiled("compute_90")
    kernels = ptx.decode().split(".visible .entry")[1:]
    assert len(kernels) == len(KERNELS)
    for text in kernels:
        accesses = re.findall(r"(ld|st)\.global\.(\w+)\.v4\.u32", text)
        assert accesses == [("ld", "cs")] * 4 + [("st", "cg")] * 4


def test_no_constant_of_the_interpreter_is_written_into() -> None:
    """An empty log has one byte, and the interpreter shares each `bytes` of length 1."""
    compiled("compute_90")
    spaces = b"  "
    assert [spaces[at : at + 1][0] for at in range(2)] == [ord(" ")] * 2
