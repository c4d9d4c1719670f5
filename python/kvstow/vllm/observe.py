"""Watches the requests of vLLM's scheduler: for the shadow tier's ratios, and for a trace.

Neither may disturb serving. What a part raises ends that part, with one line in the log.

May be on beside the host tier, or without one (`observe`): see `idle`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from kvstow.vllm.model import Model
from kvstow.vllm.options import Options, path_of_engine
from kvstow.vllm.record import TraceRecorder
from kvstow.vllm.shadow import ShadowTier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm." + __name__)

# A report takes 0.2 ms. A server that becomes idle reports nothing more, so seldom reports would
# leave out its last requests.
REPORT_S: Final = 1.0


class Part(Protocol):
    """What watches requests."""

    def admitted(self, request: Request, num_local_tokens: int, num_external_tokens: int) -> None:
        """Take a request that vLLM admits for the first time."""

    def finished(self, request: Request) -> None:
        """Take the end of an admitted request."""

    def emptied(self) -> None:
        """Take a reset that empties the tier."""


@dataclass(slots=True)
class _Seen:
    """A request since its first lookup."""

    num_local_tokens: int
    is_admitted: bool = False


@dataclass
class Observer:
    """Passes each event of a request to its parts, once.

    Attributes:
        shadow: the shadow tier; None if its statistics are off.
        recorder: the recorder; None without `record_trace`.
        clock: seconds, monotonic.
        has_news: whether a request was admitted since the last statistics.
    """

    shadow: ShadowTier | None
    recorder: TraceRecorder | None
    clock: Callable[[], float] = time.monotonic
    has_news: bool = False
    _parts: list[Part] = field(init=False)
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _report_at: float = 0.0

    @classmethod
    def of(
        cls, config: VllmConfig, cache: KVCacheConfig, model: Model, options: Options
    ) -> Observer:
        """Return the observer of vLLM's configuration.

        Raises:
            ConfigError: the trace cannot be opened.
        """
        parallel, recorder = config.parallel_config, None
        if options.record_trace is not None:
            path = path_of_engine(options.record_trace, parallel)
            recorder = TraceRecorder(path, model, max_bytes=options.record_trace_bytes)
        shadow = ShadowTier(
            model,
            options,
            world_size=parallel.world_size,
            retention_interval=getattr(cache, "prefix_cache_retention_interval", None),
            has_all_states=config.cache_config.mamba_cache_mode == "all",
        )
        return cls(shadow, recorder)

    def __post_init__(self) -> None:
        self._parts = [part for part in (self.shadow, self.recorder) if part is not None]

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's accounting, which says where hits of a model with drafts end."""
        if self.shadow is not None:
            self._try(self.shadow, partial(self.shadow.bind, manager))

    def looked_up(self, request: Request, num_local_tokens: int) -> None:
        """Take a lookup, which may not be the last one before vLLM admits the request."""
        seen = self._seen.get(request.request_id)
        if seen is None:
            self._seen[request.request_id] = _Seen(num_local_tokens)
        else:
            seen.num_local_tokens = num_local_tokens

    def admitted(self, request: Request, num_external_tokens: int) -> None:
        """Take an admission. A request that vLLM admits again counts once."""
        seen = self._seen.get(request.request_id)
        if seen is None or seen.is_admitted:
            return
        seen.is_admitted = self.has_news = True
        self._each(lambda part: part.admitted(request, seen.num_local_tokens, num_external_tokens))

    def stepped(self, num_slots: int, scheduled: Collection[str]) -> None:
        """Take the end of scheduling a step.

        Args:
            num_slots: host slots of a tier as large as the options say; 0 if not known yet.
            scheduled: the ids of the requests of the step.
        """
        if (shadow := self.shadow) is None:
            return
        # A tier that an error has turned off has none, and the ratios go on.
        if num_slots not in {0, shadow.num_slots}:
            self._try(shadow, lambda: shadow.resize(num_slots))
        if shadow.is_computing:
            self._try(shadow, partial(shadow.stepped, scheduled))

    def finished(self, request: Request) -> None:
        """Take the end of a request."""
        seen = self._seen.pop(request.request_id, None)
        if seen is not None and seen.is_admitted:
            self._each(lambda part: part.finished(request))

    def emptied(self) -> None:
        """Take a reset that empties the tier."""
        self._each(lambda part: part.emptied())

    def gauges(self, num_slots: int) -> Mapping[str, float]:
        """Return the statistics, at most once a second and after news; else nothing.

        Args:
            num_slots: host slots of a tier as large as the options say; 0 if not known yet.
        """
        if (shadow := self.shadow) is None:
            return {}
        num_slots = num_slots or shadow.num_slots
        if not (self.has_news and num_slots and self.clock() >= self._report_at):
            return {}
        self.has_news, self._report_at = False, self.clock() + REPORT_S
        found: dict[str, float] = {}

        def report() -> None:
            shadow.resize(num_slots)
            found.update(shadow.gauges())

        self._try(shadow, report)
        return found

    def close(self) -> None:
        """End the recording."""
        if self.recorder is not None:
            self.recorder.close()

    def _each(self, call: Callable[[Part], None]) -> None:
        for part in list(self._parts):
            self._try(part, partial(call, part))

    def _try(self, part: Part, call: Callable[[], None]) -> None:
        """Call a part, and end it if it raises."""
        if part not in self._parts:
            return
        try:
            call()
        except Exception:
            self._parts.remove(part)
            self.shadow = None if part is self.shadow else self.shadow
            logger.exception(
                "kvstow: %s is off because of the internal error below, and requests go on as "
                "before. Please report the traceback",
                type(part).__name__,
            )
