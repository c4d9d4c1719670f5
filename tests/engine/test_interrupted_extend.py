"""`Engine.extend` is interrupted, and so is the recovery after it: no request or hash is lost.

The engine keeps only the number of a request's hashes and tokens. So recovery must take the hashes
from the ledger, and must find them again if it is interrupted itself.
"""

import pytest
from tests.engine.world import BLOCK, DOCUMENT, World
from tests.interrupts import is_interrupted

from kvstow import Engine, StateError, UnknownRequest, hash_tokens
from kvstow.engine.state import State
from kvstow.transfer import READY

NAME = "request"
TEXT = [*DOCUMENT, *range(50, 58)]  # 6 blocks, of which the extension brings 2
HASHES = hash_tokens(TEXT, BLOCK)
KEYS = [(f"key {at}",) for at in range(len(HASHES))]
NUM_FIRST = len(DOCUMENT) // BLOCK


def known(engine: Engine) -> tuple[int, int, int]:
    """Return how many hashes, tokens and keys the request has. All of them must be its own."""
    hashes, tokens, keys = engine.ledger.known(NAME)
    assert tokens is not None
    assert keys is not None
    assert hashes == HASHES[: len(hashes)]
    assert tokens == TEXT[: len(tokens)]
    assert keys == KEYS[: len(keys)]
    return len(hashes), len(tokens), len(keys)


def extended(extension: int, recovery: int) -> tuple[bool, bool]:
    """Return which of the two was interrupted, for these lines of theirs."""
    world = World(12, 12, events=True)
    with world.engine as engine:
        engine.add(NAME, HASHES[:NUM_FIRST], tokens=DOCUMENT, extra_keys=KEYS[:NUM_FIRST])
        engine.admit(NAME, len(DOCUMENT), 100, after=READY)
        engine.computed([NAME], [len(DOCUMENT)], after=READY)
        engine.step([NAME], [len(TEXT) - len(DOCUMENT)])

        def extend() -> None:
            engine.extend(
                NAME,
                HASHES[NUM_FIRST:],
                tokens=TEXT[len(DOCUMENT) :],
                extra_keys=KEYS[NUM_FIRST:],
            )

        is_cut_short = is_interrupted(extend, extension)
        is_cut_again = is_interrupted(engine.check, recovery)
        engine.check()
        num_hashes = known(engine)[0]
        assert num_hashes in {NUM_FIRST, len(HASHES)}
        assert known(engine) == (num_hashes, num_hashes * BLOCK, num_hashes)
        if num_hashes == NUM_FIRST:
            extend()
        while engine.transfers:
            engine.poll()
        engine.preempt(NAME)
        found = engine.admit(NAME, len(TEXT), 100, after=READY)
        assert found.num_hit_tokens + found.num_external_tokens <= len(DOCUMENT)
        engine.finish(NAME)
        engine.check()
    assert engine.ledger.pool.num_free == 11
    return is_cut_short, is_cut_again


def extend_with_every_pair_of_interrupts() -> int:
    """Return the number of pairs."""
    num_pairs = extension = 0
    is_cut_short = True
    while is_cut_short:
        extension, recovery, is_cut_again = extension + 1, 0, True
        while is_cut_again:
            recovery += 1
            is_cut_short, is_cut_again = extended(extension, recovery)
            num_pairs += 1
    return num_pairs


def test_request_survives_an_interrupt_of_extend_and_of_its_recovery() -> None:
    assert extend_with_every_pair_of_interrupts() > 500


def test_request_is_lost_if_its_record_does_not_keep_what_recovery_adds_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget = State.forget_blocks

    def forget_all(state: State, name: str, *, recompute: bool, **_: object) -> None:
        forget(state, name, recompute=recompute)

    monkeypatch.setattr(State, "forget_blocks", forget_all)
    with pytest.raises((AssertionError, StateError, UnknownRequest)):
        extend_with_every_pair_of_interrupts()
