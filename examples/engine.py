"""A tiny engine on `kvstow.Engine`: the device evicts a prefix, and the host tier brings it back.

Two numpy arrays stand for the model's layers. The K and V of a token are its number. It needs no
GPU.
"""

import numpy as np

from kvstow import AdmissionState, Engine, FullAttention, hash_tokens
from kvstow.transfer import READY, BlockLayout

BLOCK = 16  # tokens in a block
CHUNK = 64  # the most tokens that a step computes of a request

prompts = {
    "asks": [*range(100), 7],
    "other": list(range(200, 305)),
    "again": [*range(100), 8, 9],  # begins like the first
}
kv = [np.zeros((9, BLOCK, 2), np.int64) for _ in range(2)]  # two layers of 9 blocks, K and V


def compute(engine: Engine, name: str, begin: int, end: int) -> None:
    """Write K and V of the tokens from `begin` to `end`, and check those of all tokens so far."""
    tokens = np.array(prompts[name][:end])
    position = np.arange(end)
    block, place = engine.tables(name)[0][position // BLOCK], position % BLOCK
    for layer in kv:
        layer[block[begin:], place[begin:]] = tokens[begin:, None]
        assert (layer[block, place, 0] == tokens).all()


def serve(engine: Engine) -> None:
    """Run every prompt to its end."""
    waiting = list(prompts)
    running: list[str] = []
    done = dict.fromkeys(prompts, 0)  # tokens whose K and V are in the cache
    for name, prompt in prompts.items():
        engine.add(name, hash_tokens(prompt, BLOCK))

    while waiting or engine.ledger.num_requests:
        # 1. Loads that have ended: their requests run, or wait again.
        landed = engine.poll()
        running += landed.loaded
        waiting = landed.failed + waiting

        # 2. Slots for the requests that run. If they do not suffice, preempt the last request.
        wanted = [min(CHUNK, len(prompts[name]) - done[name]) for name in running]
        num_granted = engine.step(running, wanted).num_granted
        new = dict(zip(running[:num_granted], wanted, strict=False))
        is_short = num_granted < len(running)
        if is_short:
            name = running.pop()
            engine.preempt(name)
            waiting.insert(0, name)

        # 3. Requests that wait, unless the device is short of blocks.
        while waiting and not is_short:
            name, size = waiting[0], len(prompts[waiting[0]])
            found = engine.admit(name, size, CHUNK, after=READY, must_fit_tokens=size)
            if found.state in {AdmissionState.NO_ROOM, AdmissionState.PENDING}:
                break
            waiting.pop(0)
            device, host = found.num_hit_tokens, found.num_external_tokens
            print(f"{name}: {device} tokens on the device, {host} on the host")
            done[name] = device + host
            if found.state is AdmissionState.RUNS:
                running.append(name)
                new[name] = found.num_new_tokens

        # 4. Compute, and report it: the engine stores the blocks that became full.
        for name, num_new in new.items():
            compute(engine, name, done[name], done[name] + num_new)
            done[name] += num_new
        engine.computed(list(new), [done[name] for name in new], after=READY)

        # 5. Requests that are done.
        for name in [name for name in running if done[name] == len(prompts[name])]:
            running.remove(name)
            engine.finish(name)


with Engine(9, 64, [FullAttention(BLOCK)], [BlockLayout.from_arrays(kv)]) as engine:
    serve(engine)
