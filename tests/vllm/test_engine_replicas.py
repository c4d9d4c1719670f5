"""An MLA model on two ranks of vLLM's CPU engine, which share one copy of its KV on the host.

vLLM caches prefixes of MLA models on the CPU only with AMX, whose kernels do not take float32. Its
reference kernels are not checked for it. These tests choose them, switch the cache on, and check
that answers from vLLM's own hits are right. vLLM's CPU kernel of rotary embeddings gives other
answers in other batches, so PyTorch's operations take its place.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.vllm import models
from tests.vllm.engine import DAMAGE, TOLERANCE, Answer, Engine, difference, prompts
from tests.vllm.full import full
from vllm.platforms.cpu import CpuPlatform

from kvstow.vllm import KVStowConnector

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, and those of what it imports
    full("starts three engines"),
]

PROMPTS = prompts(6, 300)
BLOCK_SIZE = 16  # the only one of vLLM's CPU kernel for MLA
NUM_HIT = (300 - 1) // BLOCK_SIZE * BLOCK_SIZE
NUM_HOST_BLOCKS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_model(models.DEEPSEEK, tmp_path_factory.mktemp("deepseek"))


@contextmanager
def running(folder: Path, num_blocks: int = 60, **settings: Any) -> Iterator[Engine]:
    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: type, config: Any) -> None:
        check(cls, config)
        if config.model_config is not None:
            config.cache_config.enable_prefix_caching = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))
        # By default vLLM wants a memory node for each rank.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        engine = Engine(
            folder,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=512,
            attention_backend="CPU_MLA",
            compilation_config={"custom_ops": ["none"]},
            **settings,
        )
        try:
            yield engine
        finally:
            engine.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Answer]:
    """Answers on one rank without kvstow, which vLLM's own hits do not change."""
    with running(folder, num_blocks=400) as engine:
        answers = engine.generate(PROMPTS)
        again = engine.generate(PROMPTS)
        assert [answer.num_cached for answer in again] == [NUM_HIT] * len(PROMPTS)
        assert difference(again, answers) < TOLERANCE
    return answers


def shared_files() -> dict[int, Path]:
    """Return the shared memory of the ranks, by inode, and how to open it."""
    found = {}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "kvstow-host-tier" in os.readlink(descriptor):
                found[descriptor.stat().st_ino] = descriptor
        except OSError:
            continue
    return found


def num_mapping(inode: int) -> int:
    """Return the number of processes that map the memory."""
    num = 0
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            num += f" {inode} " in maps.read_text()
        except OSError:
            continue
    return num


def test_two_ranks_serve_hits_from_one_copy(folder: Path, expected: list[Answer]) -> None:
    options = {"num_cpu_blocks": NUM_HOST_BLOCKS}
    before = shared_files()
    with running(folder, tensor_parallel_size=2, options=options) as engine:
        assert isinstance(engine.connector, KVStowConnector)
        for hits in ([0] * len(PROMPTS), [NUM_HIT] * len(PROMPTS)):
            answers = engine.generate(PROMPTS)
            assert [answer.num_cached for answer in answers] == hits
            assert difference(answers, expected) < TOLERANCE
            engine.settle()
        engine.check_idle()
        assert engine.half.offload is not None
        assert engine.half.offload.num_host_blocks == NUM_HOST_BLOCKS
        ((inode, path),) = shared_files().items() - before.items()
        assert num_mapping(inode) == 2, "one memory on both ranks"
        # The negative control: the hits come from this memory, on both ranks.
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[:] = bytes(len(memory))
        answers = engine.generate(PROMPTS)
        assert [answer.num_cached for answer in answers] == [NUM_HIT] * len(PROMPTS)
        assert difference(answers, expected) > DAMAGE
        engine.settle()
    assert not shared_files().keys() - before.keys(), "the memory goes with the ranks"


def test_damage_in_the_copy_is_found_on_every_rank(folder: Path, expected: list[Answer]) -> None:
    """With `verify` each rank compares with the checksums that the writer has recorded."""
    options = {"num_cpu_blocks": NUM_HOST_BLOCKS, "verify": "checksum"}
    before = shared_files()
    with running(folder, tensor_parallel_size=2, options=options) as engine:
        for hits in ([0] * len(PROMPTS), [NUM_HIT] * len(PROMPTS)):
            answers = engine.generate(PROMPTS)
            assert [answer.num_cached for answer in answers] == hits
            assert difference(answers, expected) < TOLERANCE
            engine.settle()
        ((_, path),) = shared_files().items() - before.items()
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            stride = len(memory) // NUM_HOST_BLOCKS // 4096 * 4096
            for slot in range(NUM_HOST_BLOCKS):
                memory[slot * stride + 5] ^= 1
        answers = engine.generate(PROMPTS)
        assert difference(answers, expected) < TOLERANCE
        assert engine.stats()["damaged_blocks"] > 0
        engine.settle()
