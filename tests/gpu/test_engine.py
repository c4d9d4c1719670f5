"""An engine on tensors of the device: evicted prefixes return unchanged."""

import numpy as np
import pytest

from kvstow import AdmissionState, Engine, FullAttention, hash_tokens
from kvstow.transfer import BlockLayout, CudaEvent, CudaMover

BLOCK, NUM_BLOCKS, NUM_LAYERS, NUM_PROMPTS, PROMPT_BLOCKS = 16, 17, 4, 12, 6


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_loaded_prefixes_are_unchanged(mode: str) -> None:
    import torch  # noqa: PLC0415 - missing where these tests are only collected

    kv = torch.zeros(NUM_LAYERS, NUM_BLOCKS, BLOCK, 64, dtype=torch.int32, device="cuda:0")
    layout = BlockLayout.from_tensors(list(kv))
    horizon = {"horizon_blocks": 8} if mode == "lazy" else {}
    prompts = {
        f"{turn}-{i}": list(range(1000 * i, 1000 * i + PROMPT_BLOCKS * BLOCK + 1))
        for turn in range(3)
        for i in range(NUM_PROMPTS)
    }
    compute = torch.cuda.Stream()
    num_loaded = 0
    with Engine(
        NUM_BLOCKS,
        128,
        [FullAttention(BLOCK)],
        [layout],
        mode=mode,  # type: ignore[arg-type]
        **horizon,  # type: ignore[arg-type]
    ) as engine:
        assert all(isinstance(mover, CudaMover) for mover in engine.movers)
        for name, prompt in prompts.items():
            engine.add(name, hash_tokens(prompt, BLOCK))
            while True:
                engine.poll()
                found = engine.admit(name, len(prompt), 1000, after=CudaEvent.record(compute))
                if found.state in {AdmissionState.RUNS, AdmissionState.LOADS}:
                    break
            if found.state is AdmissionState.LOADS:
                while name not in (landed := engine.poll()).loaded:
                    assert name not in landed.failed
                assert (
                    engine.step(
                        [name], [len(prompt) - found.num_hit_tokens - found.num_external_tokens]
                    ).num_granted
                    == 1
                )
            num_known = found.num_hit_tokens + found.num_external_tokens
            num_loaded += found.num_external_tokens
            blocks = torch.from_numpy(np.array(engine.tables(name)[0], dtype=np.int64)).cuda()
            at = torch.arange(len(prompt), device="cuda:0")
            tokens = torch.tensor(prompt, dtype=torch.int32, device="cuda:0")
            torch.cuda.current_stream().synchronize()
            with torch.cuda.stream(compute):
                new = slice(num_known, None)
                for layer in range(NUM_LAYERS):
                    kv[layer][blocks[at[new] // BLOCK], at[new] % BLOCK] = tokens[new, None] + layer
                seen = kv[:, blocks[at // BLOCK], at % BLOCK]
            engine.computed([name], [len(prompt)], after=CudaEvent.record(compute))
            engine.finish(name)
            torch.cuda.synchronize()
            for layer in range(NUM_LAYERS):
                assert (seen[layer] == tokens[:, None] + layer).all(), f"{name}, layer {layer}"
        engine.check()
    assert num_loaded > NUM_PROMPTS * BLOCK, "no prefix was evicted from the device"
