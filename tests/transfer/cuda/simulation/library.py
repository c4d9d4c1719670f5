"""Builds the simulated GPU, and puts it below the real cupy of this process.

cupy looks up the driver by its name, `libcuda.so.1`. So a library of that name that is loaded first
takes its place. The runtime is inside cupy's binary. So `install` overwrites the first bytes of
each of its functions with a jump to the function of the same name here. All that cupy does above
them is unchanged: types, errors, launch arguments, and the compiler of the kernels.

The simulation stays to the end of a process, and most tests must see the machine as it is. So tests
use `run`, which starts a process.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
KERNELS = ROOT / "python" / "kvstow" / "transfer" / "cuda" / "kernels" / "pack.cu"
# Compiled as one, because half the time of each alone is that of the standard headers.
SOURCES = ("cuda.cpp", "device.cpp", "kernels.cpp")
# CUDA keeps one copy of such an argument for all threads. A CPU would copy its 4 KB for each.
SHARED_ARGUMENT, BY_REFERENCE = "const __grid_constant__ Ids ids", "const Ids& ids"
# `#pragma unroll` is for CUDA's compiler.
FLAGS = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror")
LIBRARY, SEED = "KVSTOW_SIMULATED_CUDA", "KVSTOW_SIMULATION_SEED"


@cache
def why_not() -> str | None:
    """Return why the simulation cannot run here; None if it can."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "the simulated CUDA needs Linux on x86-64"
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            return f"the simulated CUDA needs {tool}, which is not installed"
    if importlib.util.find_spec("cupy_backends") is None:
        return "the simulated CUDA needs cupy, which is not installed"
    return None


def build(folder: Path, kernels: Path = KERNELS) -> Path:
    """Compile the library, unless the folder has it for these sources; return its path."""
    texts = [path.read_bytes() for path in (*sorted(HERE.glob("*.[ch]*")), kernels)]
    name = hashlib.sha256(b"".join(texts) + " ".join(FLAGS).encode()).hexdigest()[:16]
    library = folder / name / "libcuda.so.1"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        unfinished = Path(made) / library.name
        text = kernels.read_text()
        assert SHARED_ARGUMENT in text
        edited = Path(made) / kernels.name
        edited.write_text(text.replace(SHARED_ARGUMENT, BY_REFERENCE))
        command = ["g++", *FLAGS, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        command += [f'-DKERNELS="{edited}"', "-o", str(unfinished), "-x", "c++", "-"]
        whole = "".join(f'#include "{HERE / source}"\n' for source in SOURCES)
        subprocess.run(command, input=whole, text=True, check=True)
        unfinished.replace(library)  # whole, or not at all
    return library


def environment(folder: Path, *, seed: int = 0, kernels: Path = KERNELS) -> dict[str, str]:
    """Return the environment of a process that `install`s the library as it starts."""
    paths = [str(HERE / "start"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        LIBRARY: str(build(folder, kernels)),
        SEED: str(seed),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # Compiled kernels and the speed of the link are not those of a GPU of this machine.
        "CUPY_CACHE_DIR": str(folder / "cupy"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }


def run(
    arguments: Sequence[str],
    folder: Path,
    *,
    seed: int = 0,
    kernels: Path = KERNELS,
    timeout_s: float = 900,
) -> subprocess.CompletedProcess[str]:
    """Run this Python with the simulated GPU."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(folder, seed=seed, kernels=kernels),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


# -- in the process that uses it -----------------------------------------------------------------

JUMP_BYTES = 13
READ_WRITE_EXECUTE = 7


def install() -> None:
    """Put the library below cupy, which must not be in use yet."""
    library = ctypes.CDLL(os.environ[LIBRARY], mode=ctypes.RTLD_GLOBAL)
    from cupy_backends.cuda.api import runtime  # noqa: PLC0415 - after the driver

    libc = ctypes.CDLL(None)
    base = _loaded_at(runtime.__file__)
    for name, offset in _functions(runtime.__file__):
        if not hasattr(library, name):
            continue
        target = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert target is not None
        address = base + offset
        page = address & ~0xFFF
        length = ctypes.c_size_t(address + JUMP_BYTES - page)
        if libc.mprotect(ctypes.c_void_p(page), length, READ_WRITE_EXECUTE):
            raise OSError(f"cannot write to {runtime.__file__} at {address:#x}")
        # movabs r11, target; jmp r11
        code = b"\x49\xbb" + target.to_bytes(8, "little") + b"\x41\xff\xe3"
        ctypes.memmove(address, code, len(code))


def _loaded_at(path: str) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(path):
            return int(line.split("-")[0], 16)
    raise OSError(f"{path} is not loaded")


def _functions(path: str) -> list[tuple[str, int]]:
    """Return the functions of CUDA's runtime in a binary, and where they begin."""
    listed = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [
        (row[2], int(row[0], 16))
        for row in rows
        if len(row) == 3 and row[1] in "tT" and row[2].startswith("cuda")
    ]


@cache
def library() -> ctypes.CDLL:
    """Return the library that this process has installed."""
    return ctypes.CDLL("libcuda.so.1")


def calls() -> dict[str, int]:
    """Return the calls of CUDA since the last such question, by name."""
    rows = (line.split() for line in _text("simulation_calls"))
    return {name: int(number) for name, number in rows}


def violations() -> list[str]:
    """Return the accesses without an order, since the last such question."""
    return _text("simulation_violations")


def has_context(device: int) -> bool:
    """Return whether this process has initialised a device."""
    return bool(library().simulation_has_context(ctypes.c_int(device)))


def waits() -> set[tuple[int, int]]:
    """Return the waits since the last such question: (waiting stream, stream waited for)."""
    rows = (line.split() for line in _text("simulation_waits"))
    return {(int(stream), int(awaited)) for stream, awaited in rows}


def drop(pair: tuple[int, int] | None) -> None:
    """Leave out the waits of one stream for another from now on; None leaves out none."""
    stream, awaited = (-1, -1) if pair is None else pair
    library().simulation_drop(ctypes.c_int(stream), ctypes.c_int(awaited))


def number_of(stream: int) -> int:
    """Return the number by which `waits` and `violations` name a stream."""
    return int(library().simulation_stream(ctypes.c_void_p(stream)))


def by_hand(by_hand: bool = True) -> None:
    """Let the device go on only in `step`, and in calls that wait for it."""
    library().simulation_by_hand(ctypes.c_int(by_hand))


def step() -> bool:
    """Let the device do its next work; return False if there is none that can go on."""
    return bool(library().simulation_step())


def fail(name: str, status: int) -> None:
    """Let the next call of a function of CUDA fail. Status 700 loses the device."""
    library().simulation_fail(name.encode(), ctypes.c_int(status))


def forget_failures() -> None:
    """Let no function of CUDA fail that `fail` has named and that was not called since."""
    library().simulation_forget_failures()


def machine(*, driver: int = 13000, runtime: int = 13020, num_devices: int = 2) -> None:
    """Change what the machine reports of itself."""
    library().simulation_machine(*map(ctypes.c_int, (driver, runtime, num_devices)))


def forget_contexts() -> None:
    """Forget which devices this process has initialised, and the context of this thread."""
    library().simulation_forget_contexts()


def allocated_bytes() -> int:
    """Return the memory that is allocated on the devices, or pinned."""
    function = library().simulation_allocated
    function.restype = ctypes.c_uint64
    return int(function())


def _text(function: str) -> list[str]:
    buffer = ctypes.create_string_buffer(1 << 20)
    library()[function](buffer, ctypes.c_size_t(len(buffer)))
    return buffer.value.decode().splitlines()
