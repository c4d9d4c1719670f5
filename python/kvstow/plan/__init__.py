"""Say how much memory a trace is worth: hits at every capacity, the knee, and a size to set.

Here lie the reading of several traces as one, the curves, the simulation of what no curve can give,
and the command with its reports.

May import: kvstow._core, kvstow.choices, kvstow.engine, kvstow.geometry, kvstow.output,
kvstow.replay, kvstow.report, kvstow.sizes, kvstow.texts, kvstow.transfer.
"""

from kvstow.plan.curves import Curves, knee
from kvstow.plan.simulate import Served, Server
from kvstow.plan.tiers import Choice, Plan, PlanOptions, Tiers, build_plan
from kvstow.plan.traces import PlanTrace, read_traces
from kvstow.plan.workload import Workload, build_workload

__all__ = [
    "Choice",
    "Curves",
    "Plan",
    "PlanOptions",
    "PlanTrace",
    "Served",
    "Server",
    "Tiers",
    "Workload",
    "build_plan",
    "build_workload",
    "knee",
    "read_traces",
]
