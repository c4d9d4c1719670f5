"""Unpacks the Python files of a source distribution into FOLDER. Reads its lock file (PEP 751).

`make drift` uses it for a version of vLLM that has no build for this machine.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
import tomllib
import urllib.request
from pathlib import Path


def main(folder: Path) -> None:
    (package,) = tomllib.load(sys.stdin.buffer)["packages"]
    with urllib.request.urlopen(package["sdist"]["url"]) as response:
        archive = response.read()
    if hashlib.sha256(archive).hexdigest() != package["sdist"]["hashes"]["sha256"]:
        sys.exit(
            f"{package['name']}: the archive's SHA-256 differs from the lock file: resolve it again"
        )
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for file in files:
            # The archive has one folder NAME-VERSION, which is left out.
            _, _, file.name = file.name.partition("/")
            if file.isfile() and file.name.startswith("vllm/") and file.name.endswith(".py"):
                files.extract(file, folder, filter="data")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
