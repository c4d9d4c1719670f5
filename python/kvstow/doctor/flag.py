"""The check of vLLM's flag: what a server refuses, some of it only after it has loaded weights."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstow._core import ConfigError
from kvstow.doctor.findings import Finding, Status
from kvstow.memory import free_memory
from kvstow.sizes import format_bytes, parse_bytes
from kvstow.tiers.files import Files
from kvstow.tiers.opening import check_kind
from kvstow.transfer.arena import SLOT_ALIGNMENT_BYTES
from kvstow.vllm.option_readers import hint_at
from kvstow.vllm.options import WHERE, Options
from kvstow.vllm.secondary_file import DISK_KEYS, secondary_file

_OWN: Final = "KVStowConnector"
_DISK: Final = "KVStowDisk"
_DISK_MODULE: Final = "kvstow.vllm.secondary_tier"
_FACTORY_KEYS: Final = ("type", "module_path", "backpressure")  # vLLM's, for each tier
_SPEC: Final = "TieringOffloadingSpec"
_MODULES: Final = ("kvstow.vllm", "kvstow.vllm.connector")
_ENDS: Final = "so a server that runs here stops after it has loaded its weights."
_FLAGS: Final = {"true", "t", "yes", "y", "on", "1", "false", "f", "no", "n", "off", "0"}


class _Problem(NamedTuple):
    status: Status
    says: str
    advice: str


class _Key(NamedTuple):
    """A key of the flag, or of a connector's part of it.

    Attributes:
        takes: whether vLLM takes a value.
        advice: what vLLM takes.
        is_needed: whether vLLM refuses a part without the key.
    """

    takes: Callable[[object], bool]
    advice: str
    is_needed: bool = False


def _is_whole(value: Any) -> bool:
    try:
        return int(value) == float(value)
    except (TypeError, ValueError, OverflowError):
        return False


_KEYS: Final = {
    "kv_connector": _Key(lambda it: isinstance(it, str), "pass a connector's name", is_needed=True),
    "kv_role": _Key(
        lambda it: it in ("kv_both", "kv_consumer", "kv_producer"),
        'set "kv_role": "kv_both"',
        is_needed=True,
    ),
    "engine_id": _Key(lambda it: it is None or isinstance(it, str), "pass text"),
    "kv_buffer_device": _Key(lambda it: isinstance(it, str), 'pass text, such as "cuda"'),
    "kv_port": _Key(_is_whole, "pass a whole number"),
    "kv_connector_module_path": _Key(lambda it: it is None or isinstance(it, str), "pass text"),
    WHERE: _Key(lambda it: isinstance(it, Mapping), "pass an object"),
    "enable_permute_local_kv": _Key(lambda it: str(it).lower() in _FLAGS, "pass true or false"),
    "kv_load_failure_policy": _Key(
        lambda it: it in ("fail", "recompute"), 'set "kv_load_failure_policy": "recompute"'
    ),
}


def flag_findings(text: str) -> Iterator[Finding]:
    """Check the text behind `--kv-transfer-config`. Opens no slot file, and asks no store."""
    problems = list(_problems(text))
    if not problems:
        says = "It names kvstow, whose options are right. No disk or store was asked."
        yield Finding("flag", "ok", says)
    for problem in problems:
        yield Finding("flag", *problem)


def _problems(text: str) -> Iterator[_Problem]:
    try:
        flag = json.loads(text)
    except (RecursionError, ValueError) as error:
        advice = "write the object between single quotes, so that the shell leaves it as it is"
        yield _Problem("broken", f"It is no JSON: {error}.", advice)
        return
    parts = _parts(flag)
    own = [part for part in parts.values() if part.get("kv_connector") == _OWN]
    has_disk = any(map(_disks, parts.values()))
    if len(own) > 1 or not (own or has_disk):
        advice = f'name it once: "kv_connector": "{_OWN}"'
        yield _Problem("broken", f"It names {_OWN} {len(own)} times.", advice)
        return
    for where, part in ({"": flag} | parts).items():
        yield from _wrong_keys(part)
        yield from _wrong_values(part, where)
    for where, part in parts.items():
        yield from _wrong_disks(part, where)
    if own:
        yield from _wrong_connector(flag, own[0])


def _wrong_connector(flag: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[_Problem]:
    """Find what is wrong with the connector `own`, which is the flag or a part of it."""
    if (role := flag.get("kv_role")) in ("kv_consumer", "kv_producer"):
        says = f"kv_role is {role!r}, and the connector both stores and loads."
        yield _Problem("broken", says, 'set "kv_role": "kv_both"')
    if flag.get("kv_load_failure_policy", "fail") == "fail":
        says = "A request whose load fails will end with an error instead of being recomputed."
        yield _Problem("missing", says, 'set "kv_load_failure_policy": "recompute"')
    module = own.get("kv_connector_module_path")
    if isinstance(module, str) and module not in _MODULES:
        says = f"kv_connector_module_path is {module!r}, and the connector is in kvstow.vllm."
        yield _Problem("broken", says, 'set "kv_connector_module_path": "kvstow.vllm"')
    options = own.get(WHERE, {})
    try:
        if isinstance(options, Mapping):
            read = Options.parse(options)
            yield from _wrong_size(read)
            yield from _not_here(read)
    except ConfigError as error:
        yield _broken(error, f'correct the object "{WHERE}"')


def _wrong_disks(part: Mapping[str, Any], where: str) -> Iterator[_Problem]:
    """Find what is wrong with each `KVStowDisk` below vLLM's own connector."""
    disks = _disks(part)
    extra = part[WHERE] if disks else {}
    spec, is_own_spec = extra.get("spec_name"), extra.get("spec_module_path") is not None
    if disks and spec != _SPEC and not is_own_spec:
        says = f"spec_name{where} is {spec!r}, and vLLM has secondary tiers with {_SPEC} only."
        yield _Problem("broken", says, f'set "spec_name": "{_SPEC}" in {WHERE}')
    for at, disk in disks:
        name = f"secondary_tiers[{at}]{where}"
        if (module := disk.get("module_path")) != _DISK_MODULE:
            says = f"module_path of {name} is {module!r}, and {_DISK} is in {_DISK_MODULE}."
            yield _Problem("broken", says, f'set "module_path": "{_DISK_MODULE}"')
        try:
            file = secondary_file(_DISK, **disk)
        except ConfigError as error:
            yield _broken(error, f"correct {name}")
        else:
            names = f"the folder of path of {name}", f"max_bytes of {name}"
            folder = os.path.dirname(file.path) or "."
            yield from _wrong_folder(names, folder, parse_bytes(file.max_bytes))
        known = [*DISK_KEYS, *_FACTORY_KEYS]
        for key in disk:
            if key not in known:
                yield _Problem("broken", f"{name} ignores {key!r}.", hint_at(key, known))


def _broken(error: ConfigError, advice: str) -> _Problem:
    says = str(error)  # undivided, because a value or a name in it may have a colon too
    return _Problem("broken", says if says.endswith("?") else f"{says}.", advice)


def _wrong_size(options: Options) -> Iterator[_Problem]:
    """Find a tier without room for a block, and one that this machine has no memory for."""
    if options.observe or options.num_cpu_blocks is not None:
        return
    num_bytes, free = options.total_bytes(slot_stride_bytes=0, world_size=1), free_memory()
    of_rank = options.cpu_bytes_to_use_per_rank is not None
    name = "cpu_bytes_to_use_per_rank" if of_rank else "cpu_bytes_to_use"
    if num_bytes < SLOT_ALIGNMENT_BYTES:
        says = f"{name} is {num_bytes} bytes, and a block takes {SLOT_ALIGNMENT_BYTES:,} or more."
        yield _Problem("broken", says, f'write the unit: "{name}": "{num_bytes}GiB"')
    elif free is not None and num_bytes > free:
        says = (
            f"{name} is {format_bytes(num_bytes)}, and {format_bytes(free)} of memory are free "
            "here, so a server that runs here alone stops after it has loaded its weights."
        )
        yield _Problem("missing", says, f"lower {name}, or end what takes the memory now")


def _not_here(options: Options) -> Iterator[_Problem]:
    """Find folders and files that a server needs and this machine lacks. Opens none."""
    folder, version = options.disk_path, options.weights_version_path
    if folder is not None:
        names = "disk_path", "disk_bytes_to_use"
        yield from _wrong_folder(names, folder, options.disk_bytes_to_use)
    if version is not None and not os.path.isfile(version):
        says = (
            f"weights_version_path is {version!r}, and this user finds no such file here, {_ENDS}"
        )
        yield _Problem("missing", says, "write a line that names the weights to this file")


def _wrong_folder(names: tuple[str, str], folder: str, num_bytes: int | None) -> Iterator[_Problem]:
    """Find why this machine cannot have a slot file of so many bytes in a folder.

    Args:
        names: the keys of the folder and of the bytes.
        folder: the folder.
        num_bytes: the bytes; None if they are not known yet.
    """
    of_folder, of_bytes = names
    if not os.path.isdir(folder):
        says = f"{of_folder} is {folder!r}, and this user finds no such folder here, {_ENDS}"
        yield _Problem("missing", says, "create the folder, or name another one")
        return
    try:
        check_kind(Files(), folder)
    except ConfigError as error:
        why, _, advice = str(error).partition("; ")
        yield _Problem("missing", f"{of_folder}: {why}, {_ENDS}", advice)
    if num_bytes is not None and num_bytes > (there := shutil.disk_usage(folder).total):
        says = (
            f"{of_bytes} is {format_bytes(num_bytes)}, and the file system of {folder} has "
            f"{format_bytes(there)}, {_ENDS}"
        )
        yield _Problem("missing", says, f"lower {of_bytes}, or name another disk")


def _wrong_keys(part: Mapping[str, Any]) -> Iterator[_Problem]:
    """Find the keys that end vLLM's start."""
    known = vllm_keys()
    options = {option.name for option in fields(Options)}
    for name in part:
        if name in known:
            continue
        if name in options:
            says = f"{name} is an option of kvstow, and it is outside of {WHERE}."
            yield _Problem("broken", says, f'move it into the object "{WHERE}"')
        elif known:
            yield _Problem(
                "broken", f"vLLM has no key {name!r} in this flag.", hint_at(name, known)
            )


def _wrong_values(part: Mapping[str, Any], where: str) -> Iterator[_Problem]:
    """Find the values that end vLLM's start."""
    for name, key in _KEYS.items():
        value = part.get(name)
        if (name in part or key.is_needed) and not key.takes(value):
            yield _Problem(
                "broken", f"{name}{where} is {value!r}, and vLLM refuses it.", key.advice
            )


def vllm_keys() -> list[str]:
    """Return the keys of the flag that the installed vLLM knows, none if they cannot be found.

    Reads its source, because an import of vLLM takes many seconds.
    """
    try:
        spec = find_spec("vllm")
        if not spec or not spec.submodule_search_locations:
            return []
        source = Path(spec.submodule_search_locations[0], "config", "kv_transfer.py")
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (ImportError, ValueError, SyntaxError, OSError):
        return []
    return [
        line.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "KVTransferConfig"
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]


def _parts(flag: object) -> dict[str, Mapping[str, Any]]:
    """Return the flag itself, or the connectors of its `MultiConnector`, by where they are."""
    if not isinstance(flag, Mapping):
        return {}
    if flag.get("kv_connector") != "MultiConnector":
        return {"": flag}
    extra = flag.get(WHERE)
    parts = extra.get("connectors") if isinstance(extra, Mapping) else None
    named = enumerate(parts if isinstance(parts, list) else [])
    return {f" of connectors[{at}]": it if isinstance(it, Mapping) else {} for at, it in named}


def _disks(part: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return each `KVStowDisk` that a connector names, and its place in `secondary_tiers`."""
    extra = part.get(WHERE)
    if part.get("kv_connector") == _OWN or not isinstance(extra, Mapping):
        return []
    tiers = extra.get("secondary_tiers")
    return [
        (at, tier)
        for at, tier in enumerate(tiers if isinstance(tiers, list) else [])
        if isinstance(tier, Mapping) and tier.get("type") == _DISK
    ]
