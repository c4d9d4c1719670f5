"""A tiny engine on `kvstow.Engine`: the device evicts a prefix, and the host tier brings it back.

Two numpy arrays stand for the model's layers. The K and V of a token are its number. It needs no
GPU.
"""

import numpy as np

from kvstow import AdmissionState, Engine, FullAttention, hash_tokens
from kvstow.transfer import READY, BlockLayout

BLOCK, CHUNK = 16, 64  # tokens in a block, and tokens that a step computes per request
kv = [np.zeros((9, BLOCK, 2), np.int64) for _ in range(2)]  # two layers of 9 blocks, K and V
prompts = {"asks": [*range(100), 7], "other": list(range(200, 305)), "again": [*range(100), 8, 9]}


def compute(name: str, begin: int, end: int) -> None:
    """Write the cache of the new tokens, and check the cache of all tokens so far."""
    block = engine.tables(name)[0][np.arange(end) // BLOCK]
    for layer in kv:
        layer[block[begin:], np.arange(begin, end) % BLOCK, :] = np.c_[prompts[name][begin:end]]
        assert layer[block, np.arange(end) % BLOCK, 0].tolist() == prompts[name][:end]


with Engine(9, 64, [FullAttention(BLOCK)], [BlockLayout.from_arrays(kv)]) as engine:
    for name, prompt in prompts.items():
        engine.add(name, hash_tokens(prompt, BLOCK))
    waiting, running = list(prompts), list[str]()
    done = dict.fromkeys(prompts, 0)  # tokens in the cache
    while waiting or engine.ledger.num_requests:
        landed = engine.poll()
        running, waiting = running + landed.loaded, landed.failed + waiting
        wanted = {name: min(CHUNK, len(prompts[name]) - done[name]) for name in running}
        num_granted = engine.step(running, [*wanted.values()]).num_granted
        new = dict([*wanted.items()][:num_granted])
        if is_short := num_granted < len(running):  # the last one gives its blocks to the others
            waiting.insert(0, running.pop())
            engine.preempt(waiting[0])
        while waiting and not is_short:
            name, num_tokens = waiting[0], len(prompts[waiting[0]])
            found = engine.admit(name, num_tokens, CHUNK, after=READY, must_fit_tokens=num_tokens)
            if found.state in {AdmissionState.NO_ROOM, AdmissionState.PENDING}:
                break
            device, host = found.num_hit_tokens, found.num_external_tokens
            print(f"{waiting.pop(0)}: {device} tokens on the device, {host} on the host")
            done[name] = device + host
            if found.state is AdmissionState.RUNS:
                running.append(name)
                new[name] = found.num_new_tokens
        for name, num_new in new.items():
            compute(name, done[name], done[name] + num_new)
            done[name] += num_new
        engine.computed([*new], [done[name] for name in new], after=READY)
        for name in [name for name in running if done[name] == len(prompts[name])]:
            running.remove(name)
            engine.finish(name)
