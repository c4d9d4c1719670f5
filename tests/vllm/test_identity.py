"""What makes a model's blocks private: weights that the digest of its files does not cover."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import huggingface_hub
import pytest
from vllm.config import VllmConfig

from kvstow.vllm.identity import Identity
from kvstow.vllm.options import Options

REPOSITORY = "someone/something"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the hub's cache, which has the configuration of a model."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    found = str(folder / "config.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: found)
    return folder


def identity(model: str, **more: Any) -> Identity:
    load: dict[str, Any] = {
        "load_format": "auto",
        "model_loader_extra_config": {},
        "download_dir": None,
    }
    hf_config = SimpleNamespace(**more.pop("hf_config", {}))
    config: dict[str, Any] = {
        "cache_config": SimpleNamespace(prefix_caching_hash_algo="sha256"),
        "load_config": SimpleNamespace(**load | more.pop("load", {})),
        "model_config": SimpleNamespace(model=model, revision=None, hf_config=hf_config),
        "speculative_config": None,
    } | more
    options = Options(cpu_bytes_to_use=1 << 20, disk_path="/disk", disk_bytes_to_use=1 << 20)
    return Identity(cast(VllmConfig, SimpleNamespace(**config)), options, 0)


def test_a_model_in_the_cache_of_the_hub_is_not_private(cached: Path) -> None:
    assert not identity(REPOSITORY).why_private


def test_weights_in_a_folder_of_their_own_are_private(cached: Path) -> None:
    """The hub's cache has only the configuration then, which a new version need not change."""
    assert identity(REPOSITORY, load={"download_dir": "/downloads"}).why_private
    assert not identity(str(cached), load={"download_dir": "/downloads"}).why_private, (
        "nothing is loaded"
    )


@pytest.mark.parametrize("value", ["1", "True"])
def test_a_model_of_another_hub_is_private(
    cached: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", value)
    assert identity(REPOSITORY).why_private


def test_weights_that_a_trainer_sends_are_private(cached: Path) -> None:
    assert identity(str(cached), weight_transfer_config=object()).why_private


def test_a_model_with_parts_from_other_repositories_is_private(cached: Path) -> None:
    """As Ultravox, whose language model has a name only."""
    assert not identity(str(cached), hf_config={"text_model_id": None}).why_private
    assert identity(str(cached), hf_config={"text_model_id": "someone/else"}).why_private
