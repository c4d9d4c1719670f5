"""What makes a model's blocks private: weights that the digest of its files does not cover."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import huggingface_hub
import pytest
import torch
from tests.vllm.halves import FULL, NUM_BLOCKS, PAGE_BYTES, cache_config
from tests.vllm.halves_below import folder_on_disk
from vllm.config import ECTransferConfig, VllmConfig

from kvstow.tiers import Fingerprint, SlotFile, SlotFileMismatch, TierBlocks
from kvstow.transfer import HostArena
from kvstow.vllm import identity as identity_module
from kvstow.vllm.identity import Identity
from kvstow.vllm.model import Model
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
    given = more.pop("options", {})
    own = {"multimodal_config": None} | more.pop("trust", {})
    config: dict[str, Any] = {
        "cache_config": SimpleNamespace(prefix_caching_hash_algo="sha256"),
        "load_config": SimpleNamespace(**load | more.pop("load", {})),
        "model_config": SimpleNamespace(model=model, revision=None, hf_config=hf_config, **own),
        "speculative_config": None,
        "parallel_config": SimpleNamespace(worker_extension_cls=""),
    } | more
    options = Options(
        cpu_bytes_to_use=1 << 20,
        disk_path="/disk",
        disk_bytes_to_use=1 << 20,
        **given,
    )
    return Identity(cast(VllmConfig, SimpleNamespace(**config)), options)


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


@pytest.mark.parametrize(
    "load",
    [
        {"load_format": "instanttensor"},
        {"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 8}},
    ],
)
def test_weights_that_are_read_in_another_way_are_not_private(
    cached: Path, load: dict[str, Any]
) -> None:
    assert not identity(str(cached), load=load).why_private


def test_weights_that_a_trainer_may_send_are_private(cached: Path) -> None:
    assert identity(str(cached), weight_transfer_config=object()).why_private
    extended = SimpleNamespace(worker_extension_cls="acme.TakesWeights")
    assert identity(str(cached), parallel_config=extended).why_private
    assert not identity(str(cached)).why_private


TOKENIZERS = pytest.mark.parametrize(
    ("tokenizer", "is_private"),
    [({}, False), ({"tokenizer": "someone/else"}, True), ({"tokenizer_revision": "v2"}, True)],
)


@pytest.mark.parametrize("layers", [[], [1]])
@TOKENIZERS
def test_a_model_that_reads_another_tokenizer_is_private(
    cached: Path, layers: list[int], tokenizer: dict[str, str], *, is_private: bool
) -> None:
    """DeepSeek V4.1 embeds n-grams of the texts of its tokens."""
    trust = {"tokenizer": str(cached), "tokenizer_revision": None} | tokenizer
    own = identity(str(cached), hf_config={"engram_layer_ids": layers}, trust=trust)
    assert bool(own.why_private) is (bool(layers) and is_private)


@TOKENIZERS
@pytest.mark.parametrize("media", [None, SimpleNamespace()], ids=["text", "images"])
@pytest.mark.parametrize("architecture", ["Llava", "Pixtral", "Voxtral"])
def test_a_model_whose_media_another_tokenizer_prepares_is_private(
    cached: Path, architecture: str, media: Any, tokenizer: dict[str, str], *, is_private: bool
) -> None:
    """The tokenizer of Mistral says how large an image may be, and vLLM's hashes do not."""
    name = f"{architecture}ForConditionalGeneration"
    trust = {"architecture": name, "multimodal_config": media}
    trust |= {"tokenizer": str(cached), "tokenizer_revision": None} | tokenizer
    own = identity(str(cached), trust=trust)
    is_prepared = media is not None and architecture != "Llava"
    assert bool(own.why_private) is (is_private and is_prepared)


@pytest.mark.parametrize("role", ["ec_producer", "ec_consumer", "ec_both"])
@pytest.mark.parametrize("takes_media", [True, False])
def test_media_that_another_server_encodes_are_private(
    cached: Path, role: Any, takes_media: bool
) -> None:
    """Its encoder may have other weights. vLLM asks by the name of the model and the content."""
    own = identity(
        str(cached),
        trust={"multimodal_config": SimpleNamespace() if takes_media else None},
        ec_transfer_config=ECTransferConfig(ec_connector="ECExampleConnector", ec_role=role),
    )
    assert bool(own.why_private) is (takes_media and role != "ec_producer")


def test_a_model_with_parts_from_other_repositories_is_private(cached: Path) -> None:
    """As Ultravox, whose language model has a name only."""
    assert not identity(str(cached), hf_config={"text_model_id": None}).why_private
    assert identity(str(cached), hf_config={"text_model_id": "someone/else"}).why_private


@pytest.mark.parametrize(
    "map_",
    [
        {"AutoProcessor": "x.Y"},
        {"AutoProcessor": "someone/else--x.Y"},
        {"AutoTokenizer": ["someone/else--x.Y", None]},  # the hash of a block has the tokens
    ],
    ids=["own", "other", "other tokenizer"],
)
@pytest.mark.parametrize(
    ("file", "path"),
    [
        (None, ()),
        ("preprocessor_config.json", ()),
        ("processor_config.json", ("image_processor",)),  # as Transformers 5 writes it
        ("tokenizer_config.json", ()),
    ],
)
@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_model_whose_code_is_in_another_repository_is_private(
    cached: Path, map_: dict[str, Any], file: str | None, path: Sequence[str], is_trusted: bool
) -> None:
    """The code may change there, and no file of the model shows it."""
    if file is not None:
        content: dict[str, Any] = {"auto_map": map_}
        for part in path:
            content = {part: content}
        (cached / file).write_text(json.dumps(content))
    found = identity(
        str(cached),
        hf_config={"auto_map": map_ if file is None else None},
        trust={"trust_remote_code": is_trusted},
    )
    is_elsewhere = "--" in map_.get("AutoProcessor", "")
    assert bool(found.why_private) == (is_trusted and is_elsewhere)


def test_a_model_with_code_of_another_revision_is_private(cached: Path) -> None:
    trusted = {"trust_remote_code": True}
    assert not identity(str(cached), trust=trusted | {"code_revision": None}).why_private
    assert identity(str(cached), trust=trusted | {"code_revision": "main"}).why_private


@pytest.mark.parametrize("own", [{"load_format": "tensorizer"}, {"download_dir": "/downloads"}])
def test_drafts_from_more_than_their_files_are_private(cached: Path, own: dict[str, str]) -> None:
    load: dict[str, Any] = {
        "load_format": "auto",
        "model_loader_extra_config": {},
        "download_dir": None,
    }
    draft = SimpleNamespace(
        model=REPOSITORY, revision=None, hf_config=SimpleNamespace(), multimodal_config=None
    )

    def speculative(load_config: object) -> SimpleNamespace:
        return SimpleNamespace(draft_model_config=draft, draft_load_config=load_config)

    same = speculative(SimpleNamespace(**load))
    assert not identity(str(cached), speculative_config=speculative(None)).why_private
    assert not identity(str(cached), speculative_config=same).why_private
    other = speculative(SimpleNamespace(**load | own))
    assert identity(str(cached), speculative_config=other).why_private
    elsewhere = {"model_loader_extra_config": {"path": "/elsewhere"}}
    assert identity(str(cached), load=elsewhere, speculative_config=same).why_private


# -- files that change while vLLM loads them -------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "model"
    (folder / "part").mkdir(parents=True)
    for name in ("config.json", "part/weights.safetensors"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets the process begin now. Files and folders that exist are older than the margin."""

    def begin() -> None:
        time.sleep(0.02)  # the clock of a file system is coarse
        now = time.time() + identity_module._FRESH_S
        monkeypatch.setattr(identity_module, "process_began", lambda: now)
        time.sleep(0.02)

    return begin


def replace_file(model: Path) -> None:
    new = model / "new"
    new.write_text("other weights")
    new.rename(model / "part/weights.safetensors")


def rewrite_file(model: Path) -> None:
    file = model / "part/weights.safetensors"
    times = file.stat()
    file.write_text("other weights")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def remove_file(model: Path) -> None:
    (model / "part/weights.safetensors").unlink()


def rename_folder(model: Path) -> None:
    model.rename(model.with_name("old"))
    model.with_name("other").rename(model)


def rename_folder_above(model: Path) -> None:
    above = model.parent
    above.rename(above.with_name("old"))
    (above.with_name("old-models")).rename(above)


CHANGES = [replace_file, rewrite_file, remove_file, rename_folder, rename_folder_above]


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_changed_since_the_process_began_are_private(
    model: Path, began: Callable[[], None], change: Callable[[Path], None], log: list[str]
) -> None:
    shutil.copytree(model, model.with_name("other"))
    shutil.copytree(model.parent, model.parent.with_name("old-models"))
    began()
    (model.parent.with_name("logs")).write_text("a folder above gets a new file")
    assert not identity(str(model)).why_private
    change(model)
    assert identity(str(model)).why_private
    assert any("have changed since this process began" in line for line in log)


def test_a_link_to_other_files_is_a_change(model: Path, began: Callable[[], None]) -> None:
    link = model.with_name("current")
    shutil.copytree(model, model.with_name("other"))
    link.symlink_to(model)
    began()
    assert not identity(str(link)).why_private
    link.unlink()
    link.symlink_to(model.with_name("other"))
    assert identity(str(link)).why_private


@pytest.mark.parametrize("of", ["the folder", "a file"])
def test_a_link_on_the_way_to_other_files_is_a_change(
    model: Path, began: Callable[[], None], of: str
) -> None:
    """A link names a link, and only the second one changes. All files are old."""
    shutil.copytree(model, model.with_name("other"))
    served, current = model.with_name("served"), model.with_name("current")
    part = "" if of == "the folder" else "part/weights.safetensors"
    current.symlink_to(model / part)
    if of == "the folder":
        served.symlink_to(current)
    else:
        (served / "part").mkdir(parents=True)
        (served / part).symlink_to(current)
    began()
    assert not identity(str(served)).why_private
    current.unlink()
    current.symlink_to(model.with_name("other") / part)
    assert identity(str(served)).why_private


def test_a_version_that_was_written_since_the_process_began_is_private(
    model: Path, began: Callable[[], None]
) -> None:
    version = model.with_name("version")
    version.write_text("1")
    began()
    options = {"preserve_on_sleep": True, "weights_version_path": str(version)}
    assert not identity(str(model), options=options).why_private
    version.write_text("2")
    assert "weights_version_path" in identity(str(model), options=options).why_private


def test_a_revision_that_moved_is_a_change(cached: Path, began: Callable[[], None]) -> None:
    refs = cached.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    began()
    (cached / "model.safetensors").write_text("downloaded by this process")
    assert not identity(REPOSITORY).why_private, (
        "a file of the cache does not change under its name"
    )
    (refs / "main").write_text("4567")
    assert identity(REPOSITORY).why_private


def test_a_link_to_another_cache_of_the_hub_is_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: Callable[[], None]
) -> None:
    hub, other, link = (tmp_path / name for name in ("hub", "other", "link"))
    snapshot = "models--someone--something/snapshots/0123"
    for cache in (hub, other):
        (cache / snapshot).mkdir(parents=True)
        (cache / snapshot / "config.json").write_text("{}")
    link.symlink_to(hub)
    found = str(link / snapshot / "config.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: found)
    began()
    (hub / "models--another").mkdir()
    assert not identity(REPOSITORY).why_private, "the cache gets another model"
    link.unlink()
    link.symlink_to(other)
    assert identity(REPOSITORY).why_private


def test_files_that_changed_since_the_server_began_are_private_if_it_takes_images(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reads how to prepare them before it starts the worker's process."""
    images = {"multimodal_config": SimpleNamespace()}
    none = {"multimodal_config": SimpleNamespace(language_model_only=True)}
    monkeypatch.setattr(identity_module, "parents_began", lambda: time.time() - 60)
    assert "files of its weights" in identity(str(model), trust=images).why_private
    assert not identity(str(model), trust=none).why_private
    assert not identity(str(model)).why_private
    monkeypatch.setattr(identity_module, "parents_began", lambda: time.time() + 60)
    assert not identity(str(model), trust=images).why_private


_PROGRAM = """
import multiprocessing, sys, time
from kvstow.vllm.processes import parents_began, process_began

def run(titles):
    print(process_began(), parents_began(), flush=True)
    time.sleep(0.05)
    if titles:
        if titles[0]:
            __import__("setproctitle").setproctitle(titles[0])
        child = multiprocessing.get_context("spawn").Process(target=run, args=[titles[1:]])
        child.start()
        child.join()

if __name__ == "__main__":
    run(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("titles", "first"),
    [
        (["", "VLLM::EngineCore"], 0),
        (["", "own::EngineCore_DP0"], 0),
        # A user's process has vLLM's engine in it, and another one may have started it.
        (["", "python"], 1),
    ],
)
def test_a_process_knows_when_the_server_above_it_began(
    titles: list[str], first: int, tmp_path: Path
) -> None:
    if "EngineCore" in titles[1]:
        pytest.importorskip("setproctitle")
    (tmp_path / "program.py").write_text(_PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), *titles]
    before = time.time()
    ran = subprocess.run(command, capture_output=True, check=True, text=True)
    lines = [[float(word) for word in line.split()] for line in ran.stdout.splitlines()]
    began, above = zip(*lines, strict=True)
    assert before - 0.05 < began[0] < began[1] < began[2] < time.time()
    assert above == pytest.approx((math.inf, began[0], began[first]), abs=0.03)


# -- hashes ----------------------------------------------------------------------------------------


def fingerprint(model: Path, algorithm: str = "sha256") -> Fingerprint:
    known = SimpleNamespace(
        model=str(model),
        revision=None,
        dtype="float32",
        compute_hash=lambda: "hash",
        multimodal_config=None,
        hf_config=SimpleNamespace(),
    )
    ranks = {"rank": 0, "world_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    whose = identity(
        str(model),
        model_config=known,
        parallel_config=SimpleNamespace(**ranks),
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm, cache_dtype="auto"),
    )
    groups = Model.of(cache_config(FULL))
    return whose.fingerprint(groups, {"0": torch.zeros(NUM_BLOCKS * PAGE_BYTES, dtype=torch.uint8)})


@pytest.mark.parametrize(
    ("seed", "algorithm"), [("1", "sha256"), (None, "sha256"), ("0", "sha256_cbor")]
)
def test_a_file_of_other_hashes_is_refused_or_emptied(
    model: Path, monkeypatch: pytest.MonkeyPatch, seed: str | None, algorithm: str
) -> None:
    """vLLM's chains start from NONE_HASH, which follows from the algorithm and the seed."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    first = fingerprint(model)
    assert fingerprint(model).digest == first.digest
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED")
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    other = fingerprint(model, algorithm)
    with folder_on_disk() as disk, HostArena(2, 4096) as arena:
        file = SlotFile(disk / "rank0", 1 << 20)
        with file.open(arena, first) as tier:
            tier.put(TierBlocks([b"k" * 32], [0], None, [0]), [0]).wait()
        with file.open(arena, first) as tier:
            assert len(tier.records()) == 1
        with pytest.raises(SlotFileMismatch, match="hash"):
            file.open(arena, other)
        with replace(file, on_mismatch="reset").open(arena, other) as tier:
            assert len(tier.records()) == 0
