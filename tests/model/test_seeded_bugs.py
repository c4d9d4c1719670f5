"""The bugs that the model must find fit the scheduler as it is now. `make model` searches them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.model.seeded_bugs import BUGS, OFFLOAD, ROOT


@pytest.mark.parametrize("name", BUGS)
def test_each_bug_applies_to_the_scheduler(name: str, tmp_path: Path) -> None:
    path = OFFLOAD / BUGS[name].file
    (tmp_path / path).parent.mkdir(parents=True)
    shutil.copy(ROOT / path, tmp_path / path)
    BUGS[name].apply(tmp_path)
    assert (tmp_path / path).read_text() != (ROOT / path).read_text()
