"""How far is a plan from a replay of the same sizes, and how long does it take?

    .venv/bin/python -m benches.plan [--policy POLICY] [--mode MODE] [--model MODEL]
        [--block-size TOKENS] [--chain] [TRACE...]

`--chain` is for traces whose ids name passages. A name with "ragpulse" needs no option.

Without a trace the bench takes the bundled one. The plan is pure accounting, one request after the
other. The replay runs an engine in virtual time: requests overlap, are preempted, and wait for
loads. Points are the difference of the hit ratios, device and host together, over all blocks of the
trace. A hybrid has as many times the blocks as it has groups of layers.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from benches.traces import add_form, names_passages, parser, run

import kvstow.plan
from kvstow.engine import Policy
from kvstow.geometry import Geometry, KvGroup
from kvstow.plan.simulate import Mode
from kvstow.replay import BUNDLED_TRACE, ReplayConfig, ReplayEngine, read_trace
from kvstow.replay.model import build_model

# A plan has fewer states than the replay of a model with recurrent states.
MODELS = ("full", "gpt-oss", "gemma-3")
# Blocks of the device, the null block included, and of the host, for each group of layers.
SIZES = ((1024, 2048), (1024, 4096), (1024, 8192), (1024, 32768), (4096, 32768))


def planned_hits(
    geometry: Geometry, workload: kvstow.plan.Workload, policy: Policy, mode: Mode
) -> Callable[[int, int], int]:
    """Return what tells the planned hits of a device and a host."""
    if geometry.is_one_full_group and policy == "lru" and mode == "eager":
        options = kvstow.plan.PlanOptions()
        plan = kvstow.plan.build_plan(geometry, workload, options, draws=False)
        curves = plan.choices[0].curves
        return lambda device, host: curves.at(max(device - 1, host))

    def simulated(device: int, host: int) -> int:
        server = kvstow.plan.Server(geometry, workload, device - 1, policy, mode)
        return server.serve(host).served.num_hits

    return simulated


def lay_out(model: str, block_size: int) -> Geometry:
    """Return the groups that the replay has. Hits are in blocks, so the bytes do not matter."""
    groups = tuple(KvGroup(one.attention, 1, 1) for one in build_model(model, block_size).groups)
    return Geometry(model, "", groups, block_size, 1, 1, 1, ())


def compare(
    name: str, policy: Policy, mode: Mode, model: str, block_size: int, *, chain: bool
) -> None:
    """Print a line for each pair of sizes."""
    begin_s = time.process_time()
    trace = kvstow.plan.read_traces([name], chain=chain, block_size=block_size)
    geometry = lay_out(model, trace.block_size)
    workload = kvstow.plan.build_workload(trace, geometry.block_tokens)
    hits = planned_hits(geometry, workload, policy, mode)
    all_sizes = [
        (device * len(geometry.groups), host * len(geometry.groups)) for device, host in SIZES
    ]
    planned = {sizes: hits(*sizes) for sizes in all_sizes}
    seconds = time.process_time() - begin_s
    what = f"{Path(name).name}, {model}, {policy}, {mode}"
    print(f"\n{what}: planned in {seconds:.1f} s of processor time")
    print(f"{'device':>8}{'host':>8}{'plan':>9}{'replay':>9}{'points':>8}{'preemptions':>13}")
    requests = read_trace(name, chain=chain, block_size=block_size)
    for (device, host), num_hits in planned.items():
        config = ReplayConfig(
            device_blocks=device,
            host_blocks=host,
            policy=policy,
            mode=mode,
            model=model,
            verify="off",
        )
        with ReplayEngine(requests, config) as engine:
            engine.run()
            figures = engine.figures
        expected = num_hits / requests.num_blocks * 100
        replayed = (figures.device_hits + figures.host_hits) / requests.num_blocks * 100
        print(
            f"{device:8,}{host:8,}{expected:8.2f}%{replayed:8.2f}%{expected - replayed:+8.2f}"
            f"{figures.preemptions:13,}",
            flush=True,
        )


def main() -> int:
    options = parser(__doc__, traces="*")
    options.add_argument("--policy", choices=get_args(Policy), default="lru")
    options.add_argument("--mode", choices=get_args(Mode), default="eager")
    options.add_argument("--model", choices=MODELS, default="full")
    add_form(options)
    given = options.parse_args()
    for name in given.traces or [str(BUNDLED_TRACE)]:
        chain = names_passages(name, given.chain)
        compare(name, given.policy, given.mode, given.model, given.block_size, chain=chain)
    return 0


if __name__ == "__main__":
    run(main)
