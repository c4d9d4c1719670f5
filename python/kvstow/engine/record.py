"""What a snapshot says of the engine itself: its requests, and what `poll` has yet to report."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from kvstow._core import BlockLedger, OffloadScheduler, SnapshotError, UnknownRequest
from kvstow.engine.answers import Landed
from kvstow.engine.request import Request
from kvstow.engine.snapshot_file import Image, Model
from kvstow.engine.state import State
from kvstow.transfer import BlockLayout


@dataclass(frozen=True, slots=True)
class Record:
    """The engine's own part of an image.

    Attributes:
        sleep_id: id of the sleep that wrote it. Empty in files of before kvstow had such ids.
        preserved: whether the image has the blocks of the requests that ran.
        block_bytes: bytes of a block, per rank and group.
        requests: per request its id, whether it ran, whether it recomputes, and its computed
            tokens.
        unreported: what the next `poll` reports.
        stale: ids of the requests that hold blocks of before a reset.
    """

    sleep_id: str
    preserved: bool
    block_bytes: list[list[int]]
    requests: list[tuple[str, bool, bool, int]]
    unreported: Landed
    stale: frozenset[str] = frozenset()

    @classmethod
    def read(cls, text: bytes) -> Self:
        """Read a record.

        Raises:
            SnapshotError: it is none.
        """
        try:
            fields = json.loads(text)
            loaded, failed, num_stored, num_failed = fields["landed"]
            requests = [
                (name, bool(ran), bool(recompute), int(num_computed))
                for name, ran, recompute, num_computed in fields["requests"]
            ]
            names = [*(name for name, *_ in requests), *loaded, *failed]
            if not all(isinstance(name, str) for name in names):
                raise TypeError("a request's name is no string")
            landed = Landed(list(loaded), list(failed), int(num_stored), int(num_failed))
            if len({name for name, *_ in requests}) < len(requests):
                raise ValueError("it names a request twice")
            sleep_id, stale = str(fields.get("sleep_id", "")), frozenset(fields.get("stale", ()))
            preserved, sizes = bool(fields["preserved"]), fields["block_bytes"]
            return cls(sleep_id, preserved, sizes, requests, landed, stale)
        except (
            ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
        ) as error:  # fmt: skip
            raise damaged(f"its requests make no sense ({error!r})") from error

    def written(self) -> bytes:
        """Return the record as `read` takes it."""
        landed = self.unreported
        fields = {
            "sleep_id": self.sleep_id,
            "preserved": self.preserved,
            "block_bytes": self.block_bytes,
            "requests": self.requests,
            "stale": [name for name, *_ in self.requests if name in self.stale],
            "landed": [
                landed.loaded, landed.failed, landed.num_stored_blocks, landed.num_failed_stores
            ],
        }  # fmt: skip
        return json.dumps(fields).encode()

    def restored_requests(
        self, ledger: BlockLedger, scheduler: OffloadScheduler
    ) -> dict[str, Request]:
        """Return the requests of a restored ledger and scheduler, as the engine knows them.

        Without preserved blocks, requests that ran restart in the scheduler.

        Raises:
            SnapshotError: ledger or scheduler have other requests, or fewer tokens of one.
        """
        if {name for name, *_ in self.requests} != set(ledger.request_ids()):
            raise damaged("its ledger has other requests")
        known = {}
        for name, was_running, recompute, num_computed in self.requests:
            request = Request(ledger.num_hashes(name), recompute=recompute)
            known[name] = request
            if was_running and self.preserved:
                num_granted = ledger.num_granted_tokens(name)
                if not 0 <= num_computed <= num_granted:
                    raise damaged(f"{name!r} has computed {num_computed} of {num_granted} tokens")
                request.state, request.num_computed = "running", num_computed
                request.is_stale = name in self.stale
            elif was_running:
                _change(scheduler.restart, name)
        return known

    def finish_requests(self, scheduler: OffloadScheduler) -> None:
        """Let a restored scheduler forget the requests.

        Raises:
            SnapshotError: the scheduler has other requests.
        """
        for name, *_ in self.requests:
            _change(scheduler.finish, name)


def _change(call: Callable[[str], None], name: str) -> None:
    try:
        call(name)
    except UnknownRequest as error:
        raise damaged("its scheduler has other requests") from error


def damaged(what: str) -> SnapshotError:
    """Return the error of a snapshot that contradicts itself."""
    return SnapshotError(f"the snapshot is damaged: {what}. Start without it")


def block_bytes(layouts: Sequence[Sequence[BlockLayout]]) -> list[list[int]]:
    """Return the bytes of a block, per rank and group."""
    return [[layout.slot_bytes for layout in own] for own in layouts]


def image_of(state: State, model: Model, sleep_id: str, *, preserve: bool) -> Image:
    """Return the accounting of an engine, as it is now."""
    ledger, scheduler, landed = state.ledger, state.scheduler, state.unreported
    if not preserve:
        # A request that has just loaded will not run: report it as one whose load failed.
        landed = replace(landed, loaded=[], failed=landed.failed + landed.loaded)
    requests = state.requests
    record = Record(
        sleep_id,
        preserve,
        block_bytes(state.ranks.layouts),
        [
            (name, request.state == "running", request.recompute, request.num_computed)
            for name, request in requests.items()
        ],
        landed,
        frozenset(name for name, request in requests.items() if request.is_stale),
    )
    return Image(
        model,
        ledger.snapshot(blocks=preserve),
        scheduler.snapshot(),
        record.written(),
        num_requests=len(requests),
        num_tokens=sum(map(ledger.num_granted_tokens, requests)) if preserve else 0,
        num_blocks=scheduler.num_resident * state.blueprint.blocks_per_slot,
    )
