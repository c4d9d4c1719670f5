"""The ranks that hold equal KV, and the one copy of it that they keep in host memory.

With tensor parallelism every rank has the whole latent KV of an MLA layer. vLLM says how many ranks
in a row hold equal KV (`KVCacheConfig.kv_tp_replicas`). The first of them, the writer, creates the
memory. All map and pin it, the writer alone stores, and each loads for itself.

```
store job    writer    copies its blocks into the slots, and reports the end of the copy
             others    report at once that they no longer need their blocks, and that they are done
load job     all       copy the slots to their own blocks
```

How a rank could load wrong bytes, and what guards:

- A slot is not written yet, or only in part. It can be found only when every rank has reported the
  store, and the writer reports when its bytes have arrived.
- The writer has failed, or is late. Its report fails the job. Without a report the slot stays in
  quarantine, where no lookup finds it and no other job gets it.
- The writer overwrites a slot that another rank still loads. A slot is given to another job only
  when every rank has reported, and each reports when its own copies are over.
- A rank has not mapped the writer's memory, and so loads from memory that nobody fills. Then no
  rank of the set shares (`Replicas.map`).
- A rank finds other memory than the writer's: it compares the file's identity.
- A rank zeroes pages that hold blocks: only the writer touches pages, before others can map them.
- The ranks' KV is not equal. vLLM says that it is, and counts 1 for kinds that it does not know.

A rank that dies ends vLLM's engine. The memory goes with the last process that maps it.

Why each rank loads for itself: from shared memory that takes as long as from a copy of its own. If
the writer loaded and sent the blocks on, it took half as long again between two processes, and all
ranks would have to meet for every load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_tp_group

from kvstow import ConfigError
from kvstow.transfer import HostArena
from kvstow.transfer.shared import SharedMemory
from kvstow.vllm.options import rank_in_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm." + __name__)


@dataclass(frozen=True)
class Replicas:
    """The ranks whose KV equals this rank's.

    Attributes:
        num: the number of them, this rank included.
        index: the position of this rank among them; 0 is the writer.
        exchange: gives an object to all of them, and returns the objects of all in their order.
            Each rank must call it as often as the others.
    """

    num: int
    index: int
    exchange: Callable[[Any], list[Any]]

    @classmethod
    def of(cls, config: VllmConfig, cache: KVCacheConfig) -> Replicas | None:
        """Return the replicas of this worker; None if it keeps a copy of its own.

        Ranks share only if they are processes of one machine, and tensor parallelism is the only
        way in which vLLM divides the model.
        """
        num = getattr(cache, "kv_tp_replicas", 1)  # vLLM before 0.31 does not say
        parallel = config.parallel_config
        if num == 1 or parallel.distributed_executor_backend != "mp":
            return None
        if parallel.world_size > parallel.tensor_parallel_size or parallel.nnodes_within_dp > 1:
            return None  # pipeline stages, or several machines
        if parallel.decode_context_parallel_size > 1:
            return None
        rank = rank_in_engine(parallel)
        first = rank // num * num

        def exchange(own: Any) -> list[Any]:
            import torch.distributed  # noqa: PLC0415 - vLLM has it

            objects: list[Any] = [None] * parallel.world_size
            torch.distributed.all_gather_object(objects, own, group=get_tp_group().cpu_group)
            return objects[first : first + num]

        return cls(num, rank - first, exchange)

    @property
    def is_writer(self) -> bool:
        """Whether this rank stores for all of them."""
        return self.index == 0

    def map(
        self, num_bytes: int, arena_in: Callable[[SharedMemory], HostArena]
    ) -> HostArena | None:
        """Return the arena that all replicas share; None if one of them cannot map it.

        Args:
            num_bytes: of the memory.
            arena_in: maps an arena, after the checks that may refuse it.

        Raises:
            ConfigError: there is too little memory, on this rank or another. Copies of their own
                would take as much.
        """
        with ExitStack() as mapped, ExitStack() as handed:
            problem: tuple[bool, str] | None = None
            arena = handle = None
            try:
                if self.is_writer:
                    memory = handed.enter_context(SharedMemory.create(num_bytes))
                    arena = mapped.enter_context(arena_in(memory))
                    handle = memory.handle
            except Exception as error:
                problem = _problem(error)
            handle = self.exchange(handle)[0]
            try:
                if handle is not None and not self.is_writer:
                    with SharedMemory.open(handle) as memory:
                        arena = mapped.enter_context(arena_in(memory))
            except Exception as error:
                problem = _problem(error)
            # An error of any rank reaches all. The writer's descriptor stays open until here.
            problems = [each for each in self.exchange(problem) if each is not None]
            for is_refusal, text in problems:
                if is_refusal:
                    raise ConfigError(text)
            if not problems:
                mapped.pop_all()
                return arena
        logger.warning(
            "kvstow: %d ranks hold equal KV and cannot share one copy in host memory (%s), so each "
            "keeps its own, and the tier holds fewer blocks",
            self.num,
            problems[0][1],
        )
        return None


def _problem(error: Exception) -> tuple[bool, str]:
    """Return whether an error is a refusal of the memory, and its text."""
    return isinstance(error, ConfigError), str(error)
