"""What `import kvstow` costs and provides. Each test starts a new interpreter."""

import importlib.metadata
import os
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest

import kvstow
from kvstow import _core

PACKAGE = Path(kvstow.__file__).parent
ROOT = Path(__file__).parents[1]


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def printed(code: str) -> str:
    completed = python(code)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_import_needs_only_numpy() -> None:
    # torch and vLLM are installed where the tests run, so an optional import would show here.
    loaded = printed(
        """
        import sys
        before = set(sys.modules)
        import kvstow
        roots = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*sorted(roots - sys.stdlib_module_names))
        """
    )
    assert set(loaded.split()) <= {"kvstow", "numpy"}


def test_import_adds_under_20_ms_to_numpys_own() -> None:
    timed = """
        import time
        import numpy
        start = time.perf_counter()
        import kvstow
        print(1e3 * (time.perf_counter() - start))
        """
    assert min(float(printed(timed)) for _ in range(5)) < 20


def test_import_of_a_debug_build_warns() -> None:
    # The binary under test is a release build: a debug build could not be imported here, because
    # warnings are errors. So the loader sets the flag of a debug build.
    completed = python(
        """
        import sys
        from importlib.machinery import PathFinder

        class DebugBuild:
            @staticmethod
            def find_spec(name, path=None, target=None):
                spec = PathFinder.find_spec(name, path, target)
                if name == "kvstow._core":
                    exec_module = spec.loader.exec_module

                    def exec_and_flag(module):
                        exec_module(module)
                        module.debug_build = True

                    spec.loader.exec_module = exec_and_flag
                return spec

        sys.meta_path.insert(0, DebugBuild)
        import kvstow
        """
    )
    assert completed.returncode == 1
    raised = completed.stderr.splitlines()[-1]
    assert raised.startswith("RuntimeWarning: kvstow was built without optimisation")


def test_version_is_that_of_the_distribution() -> None:
    assert kvstow.__version__ == importlib.metadata.version("kvstow")


def test_core_names_are_public() -> None:
    assert set(_core.__all__) - {
        "BlockCopier",
        "debug_build",
        "row_checksums",
        "row_digests",
    } <= set(kvstow.__all__)
    assert all(hasattr(kvstow, name) for name in kvstow.__all__)


def test_type_checkers_find_the_types() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert (PACKAGE / "_core.pyi").exists()


def test_package_stays_small() -> None:
    # A wheel has these files, each deflated. The extension of an editable install is up to a third
    # larger; `make test-wheels` holds the wheels themselves to 2 MB.
    files = [f for f in PACKAGE.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert any(f.suffix == ".so" for f in files)
    assert sum(len(zlib.compress(f.read_bytes())) for f in files) < 2_400_000


@pytest.mark.parametrize("package", ["tests", "benches"])
def test_folders_of_the_repository_win_over_installed_packages_of_their_names(
    package: str, tmp_path: Path
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}; print({package}.__file__)"],
        capture_output=True, text=True, timeout=60, check=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert Path(done.stdout.strip()) == ROOT / package / "__init__.py"


def test_interrupt_of_the_first_call_with_an_array_does_not_panic() -> None:
    # The call may import modules at first use, and an interrupt can hit such an import.
    printed(
        """
        import builtins
        import numpy as np
        import kvstow

        def interrupt(*_, **__):
            raise KeyboardInterrupt

        tokens, own = np.arange(8, dtype=np.int32), builtins.__import__
        builtins.__import__ = interrupt
        try:
            kvstow.hash_tokens(tokens, 4)
            pool = kvstow.BlockPool(4)
            pool.pin(np.array([1], dtype=np.int32))
            pool.pin_counts(np.array([1], dtype=np.int32))
        finally:
            builtins.__import__ = own
        """
    )
