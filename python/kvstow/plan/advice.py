"""What a plan recommends: a sentence for people, and the flag that sets it."""

from __future__ import annotations

import json
import math
from typing import Final

from kvstow.plan.tiers import GIB, LEAST_GAIN, MIB_PER_GIB, Choice, Plan

DISK_PATH: Final = "/FOLDER/ON/A/LOCAL/DISK"
"""What the flag has in place of a folder that only the user knows."""
_LEAST_SHOWN: Final = 0.05  # points; less rounds to 0.0
_ROUNDS_TO_ALL: Final = 0.995  # of the hits: 100% are all of them
_FAR_MORE: Final = 2  # times what the recommended size saves: the curve bends a second time


def sentence(plan: Plan, choice: Choice) -> str:
    """Return the recommendation for one device."""
    row = choice.judged
    beside = (
        "" if choice.device_gib is None else f" beside {size(choice.device_gib)} on each device"
    )
    # The policy of the table need not be that of the curve.
    of = " of the LRU curve" if choice.curves.is_exact and plan.options.policy != "lru" else ""
    knee = f"the knee{of} is at {knee_size(plan, choice)}"
    if not choice.is_worth_it:
        larger = "" if choice.reaches_knee else f", and {knee}"
        return (
            f"Set no host tier{beside}: {size(row.host_gib)} saves less than 1 % of the prompt "
            f"tokens{larger}."
        ) + (_largest_sentence(plan, choice) + _small_host_sentence(plan, choice))
    if not choice.reaches_knee:
        why = f", the largest size you gave ({knee})"
    elif of:
        why = f", the smallest size here that reaches the knee{of}"
    else:
        why = ""
    share = (row.num_hits - row.disk_hits) / choice.curves.infinite
    reached = "over 99%" if _ROUNDS_TO_ALL <= share < 1 else f"{share:.0%}"
    more = 100 * plan.hit_ratio(choice.doubled_hits)
    return (
        (
            f"Give the host tier {size(row.host_gib)}{beside}{why}: it saves "
            f"{plan.hit_ratio(row.saved_by_host):.1%} of the prompt tokens, "
            f"{'all hits reach' if row.device_hits else 'which is'} {reached} of what unlimited "
            f"memory hits, and twice the size adds "
            f"{f'{more:.1f} points' if more >= _LEAST_SHOWN else 'nothing'}."
        )
        + _largest_sentence(plan, choice)
        + _disk_sentence(plan, choice)
        + _small_host_sentence(plan, choice)
    )


def _largest_sentence(plan: Plan, choice: Choice) -> str:
    """Return what the largest host tier saves, if that is worth it and the knee comes too early.

    Chats that pause for minutes bend the curve early. If they come back after hours, most hits need
    far more memory, and twice the recommended size shows nothing of them.
    """
    row = max(plan.rows_of(choice), key=lambda one: one.host_gib)
    saved = plan.hit_ratio(row.saved_by_host)
    least = _FAR_MORE * plan.hit_ratio(choice.judged.saved_by_host) if choice.is_worth_it else 0.0
    if saved < LEAST_GAIN or saved < least:
        return ""
    return f" For comparison, {size(row.host_gib)} saves {saved:.1%}."


def _disk_sentence(plan: Plan, choice: Choice) -> str:
    row = choice.judged
    if row.disk_gib is None:
        return ""
    more = 100 * plan.hit_ratio(row.disk_hits)
    adds = f" A disk of {size(row.disk_gib)} adds {more:.1f} points"
    if not choice.takes_disk:
        return f"{adds}, so the flag leaves it out."
    return f"{adds}. Replace {DISK_PATH} in the flag with a folder on a local disk."


def _small_host_sentence(plan: Plan, choice: Choice) -> str:
    """Return what the best disk adds below the smallest host tier, if that is another row.

    Of disks with equal hits, it is the smallest. The recommendation is about the host tier, and a
    small one above a large disk may do as well.
    """
    own = plan.rows_of(choice)
    row = min(own, key=lambda one: (one.host_gib, -one.num_hits, one.disk_gib or 0))
    if row.disk_gib is None or row == choice.judged or plan.hit_ratio(row.disk_hits) < LEAST_GAIN:
        return ""
    alone = plan.hit_ratio(row.num_hits - row.disk_hits)
    tier = f"a host tier of {size(row.host_gib)}"
    hits = f"{tier} hits" if choice.device_gib is None else f"the device and {tier} hit"
    return (
        f" For comparison, {hits} {alone:.1%} of the prompt tokens, and "
        f"{plan.hit_ratio(row.num_hits):.1%} with a disk of {size(row.disk_gib)}."
    )


def flag(plan: Plan, choice: Choice) -> str | None:
    """Return the option of `vllm serve` that sets what was planned, at the recommended size."""
    if choice.host_gib is None:
        return None
    extra: dict[str, object] = {"cpu_bytes_to_use": _num_bytes(choice.host_gib)}
    if plan.options.policy != "lru":
        extra["eviction_policy"] = plan.options.policy
    if plan.options.mode == "lazy":
        extra["lazy_offload"] = True
    if choice.disk_gib is not None:
        extra |= {"disk_path": DISK_PATH, "disk_bytes_to_use": _num_bytes(choice.disk_gib)}
    config = {
        "kv_connector": "KVStowConnector",
        "kv_connector_module_path": "kvstow.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return f"--kv-transfer-config '{json.dumps(config, separators=(',', ':'))}'"


def _num_bytes(gib: float) -> str | int:
    """Return a size as an option of the connector: in GiB or MiB if that is short and exact."""
    for unit, number in ("GiB", gib), ("MiB", gib * MIB_PER_GIB):
        text = f"{number:g}"
        if number >= 1 and "e" not in text and float(text) == number:
            return f"{text}{unit}"
    return int(gib * GIB)


def size(gib: float) -> str:
    """Return a size as people write it."""
    return f"{gib:,g} GiB" if gib >= 1 else f"{gib * MIB_PER_GIB:,.4g} MiB"


def _unit(gib: float) -> int:
    return 1 if gib >= 1 else MIB_PER_GIB


def rounded_size(gib: float) -> str:
    """Return a size in three digits."""
    unit = _unit(gib)
    return size(float(f"{gib * unit:.3g}") / unit)


def knee_size(plan: Plan, choice: Choice) -> str:
    """Return the knee in three digits, rounded up so that a tier of this size reaches it."""
    gib = plan.gib(choice.knee)
    unit = _unit(gib)
    last = 10 ** (math.floor(math.log10(gib * unit)) - 2) if gib else 1
    # The product of a quotient may exceed a whole number by a rounding error.
    return size(math.ceil(round(gib * unit / last, 6)) * last / unit)


def marks(plan: Plan, choice: Choice) -> list[tuple[float, str]]:
    """Return what to point out on the axis of sizes: GiB, and a name.

    The knee is left out where it would look like a recommendation that the plan does not make.
    """
    found = []
    if choice.is_worth_it or not choice.reaches_knee:
        found.append((plan.gib(choice.knee), "knee"))
    if choice.host_gib is not None:
        found.append((choice.host_gib, "recommended"))
    return found
