"""Which adapters (LoRA) changed under their name, so that blocks of before are of other weights.

A block's hash has the name of the adapter, and from vLLM 0.31 on its path. vLLM loads an adapter
again if an operator asks for it, in place or after unloading it, or if it fell out of its memory
for adapters. How old KV could be served then, and what prevents it:

- The files of a local adapter were replaced: each lookup compares them with those of the first.
- The path names a repository of the hub. Each load takes its newest revision, and the hub's cache
  on this machine says which one that is. A lookup may come before vLLM has loaded the first one.
  Lookups also come before vLLM loads another one, so their requests may take older blocks.
- An adapter of which this machine has no files was loaded again: vLLM's server gives it another
  number, unless it was loaded in place, which the request says. In place it may happen again, and
  no request shows it, so such an adapter is never trusted. Nor is one in a folder of another
  machine or from another hub, because vLLM loads it again under its number if it fell out of that
  memory.
- Another path was loaded in place: the requests that run keep the name and the path of before, and
  go on with the new weights. If the first path comes back, its blocks may be of those. So an
  adapter is not trusted any more once its number comes with another path. Its first load in place
  counts as well, because no request may have asked for what was loaded in between.
- A path was loaded in place of another, and requests of both run. Whenever one of them joins vLLM's
  batch, after a load, a preemption or a step without it, vLLM may load its path again, and the
  others go on with these weights. It does so if that path was loaded in place too, or if the
  adapter has fallen out of its memory. So an adapter that comes while requests of another path
  live is not trusted, and the adapter before it is not trusted any more.
- An adapter was removed, and another path got its number: requests of the first that run go on with
  the weights of the second. So neither is trusted any more.
- The files were replaced after vLLM loaded them, and before the first request: then nobody
  notices. So a changed adapter should have a new path.

The blocks of vLLM's own pool are vLLM's: a reset of its prefix cache drops them. Tiers below the
host serve no request with an adapter (`LowerTier.lookup`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm import envs
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys
from vllm.v1.request import Request

from kvstow.vllm.tracked import TrackedRequest

logger = logging.getLogger("vllm." + __name__)

_Stamp: TypeAlias = tuple[object, ...] | None


@dataclass
class Adapters:
    """The adapters of requests since the host tier was last empty, by what hashes have of each."""

    _stamps: dict[tuple[object, ...], _Stamp] = field(default_factory=dict)
    _changed: set[tuple[object, ...]] = field(default_factory=set)
    # By the number of an adapter, what hashes had last, and whether it was loaded in place.
    _latest: dict[int, tuple[tuple[object, ...], bool]] = field(default_factory=dict)

    def has_changed(self, request: Request, live: Iterable[TrackedRequest]) -> bool:
        """Whether the blocks that the host has for a request may be of other adapter weights.

        Args:
            request: the request.
            live: the requests that are not over.
        """
        adapter = request.lora_request
        if adapter is None:
            return False
        hashed = tuple(_gen_lora_extra_hash_keys(request))
        self._compare_with_latest(adapter, hashed, live)
        if hashed not in self._changed:
            stamp = _stamp(adapter)
            known = self._stamps.get(hashed, stamp)
            if stamp is not None and known in (stamp, (*stamp[:-1], None)):
                self._stamps[hashed] = stamp
                return False
            self._changed.add(hashed)
            logger.warning(
                "kvstow: the adapter %s of %s may have changed since its first request, so its "
                "requests take nothing from the host tier until that is reset. Give a changed "
                "adapter a new path, and a new name if requests run",
                adapter.lora_name,
                adapter.lora_path,
            )
        return True

    def _compare_with_latest(
        self, adapter: LoRARequest, hashed: tuple[object, ...], live: Iterable[TrackedRequest]
    ) -> None:
        """Distrust an adapter of which requests may have run with the weights of another."""
        now, latest = (hashed, adapter.load_inplace), self._latest.get(adapter.lora_int_id)
        if latest == now:
            return
        if latest is None or adapter.load_inplace:
            self._latest[adapter.lora_int_id] = now
            if latest is not None:
                self._stamps[latest[0]] = None
            if _is_among_others(adapter, live):
                self._stamps[hashed] = None
        elif latest[0] != hashed:  # it waited while the other was loaded, or took its number
            self._stamps[hashed] = None
            if not latest[1] or _is_among_others(adapter, live):
                self._stamps[latest[0]] = None

    def forget(self) -> None:
        """Trust all adapters as they are now, because the host tier is empty."""
        self._stamps.clear()
        self._changed.clear()
        self._latest.clear()


def _is_among_others(adapter: LoRARequest, live: Iterable[TrackedRequest]) -> bool:
    """Whether requests of another path live that vLLM may load in place of this adapter's."""
    others = (tracked.request.lora_request for tracked in live)
    return any(
        other is not None
        and other.lora_int_id == adapter.lora_int_id
        and other.lora_path != adapter.lora_path
        for other in others
    )


def _stamp(adapter: LoRARequest) -> _Stamp:
    """Return what changes with the weights of an adapter; None if nothing shows it."""
    path = adapter.lora_path
    try:
        with os.scandir(os.path.expanduser(path)) as entries:  # as vLLM looks for it
            states = [(entry.name, _state(entry)) for entry in entries]
    except OSError:
        if adapter.load_inplace or not _is_on_hub(path):
            return None
        return (path, adapter.lora_int_id, _revision(path))
    files = (
        (name, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        for name, state in states
    )
    return (path, *sorted(files))


def _state(entry: os.DirEntry[str]) -> os.stat_result:
    """Return the state of what an entry of a folder names, or of a link that names nothing."""
    try:
        return entry.stat()
    except OSError:
        return entry.stat(follow_symlinks=False)


def _is_on_hub(path: str) -> bool:
    """Whether the path of an adapter that no folder has may name a repository of the hub."""
    return not (os.path.isabs(os.path.expanduser(path)) or envs.VLLM_USE_MODELSCOPE)


def _revision(repository: str) -> str | None:
    """Return where the hub's cache has the newest revision of an adapter; None if it has none."""
    with suppress(ImportError, OSError, ValueError):  # it names no repository that can be read
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - vLLM has it

        found = try_to_load_from_cache(repository, "adapter_config.json")
        return found if isinstance(found, str) else None
    return None
