"""How far is a plan from a replay of the same sizes, and how long does it take?

    .venv/bin/python -m benches.plan [TRACE...]        (a name with "ragpulse": the content form)

Without a trace the bench takes the bundled one. The plan is pure accounting, one request after the
other. The replay runs an engine in virtual time: requests overlap, are preempted, and wait for
loads. Points are the difference of the hit ratios, device and host together, over all blocks of the
trace.
"""

import sys
import time
from pathlib import Path

import kvstow.geometry
import kvstow.plan
from kvstow.replay import BUNDLED_TRACE, ReplayConfig, ReplayEngine, read_trace

MODEL = "llama-3.1-8b"
# Blocks of the device, the null block included, and of the host.
SIZES = ((1024, 4096), (1024, 8192), (1024, 32768), (4096, 32768))


def main(names: list[str]) -> int:
    for name in names or [str(BUNDLED_TRACE)]:
        chain = "ragpulse" in name
        begin_s = time.process_time()
        trace = kvstow.plan.read_traces([name], chain=chain)
        geometry = kvstow.geometry.lay_out(kvstow.geometry.find_model(MODEL), trace.block_size)
        workload = kvstow.plan.build_workload(trace, geometry.block_tokens)
        plan = kvstow.plan.build_plan(geometry, workload, kvstow.plan.PlanOptions())
        seconds = time.process_time() - begin_s
        print(f"\n{Path(name).name}: planned in {seconds:.1f} s of processor time")
        print(f"{'device':>8}{'host':>8}{'plan':>9}{'replay':>9}{'points':>8}{'preemptions':>13}")
        curves = plan.choices[0].curves
        requests = read_trace(name, chain=chain)
        for device, host in SIZES:
            planned = curves.at(max(device - 1, host)) / requests.num_blocks * 100
            config = ReplayConfig(device_blocks=device, host_blocks=host, verify="off")
            with ReplayEngine(requests, config) as engine:
                engine.run()
                figures = engine.figures
            replayed = (figures.device_hits + figures.host_hits) / requests.num_blocks * 100
            print(
                f"{device:8,}{host:8,}{planned:8.2f}%{replayed:8.2f}%{planned - replayed:+8.2f}"
                f"{figures.preemptions:13,}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
