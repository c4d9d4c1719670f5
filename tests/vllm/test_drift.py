"""The installed vLLM has what kvstow relies on."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.vllm.drift import (
    Definition,
    Function,
    Sources,
    compare,
    drift,
    has,
    is_optional,
    listed,
    members,
    parameters,
    parse,
)
from tests.vllm.relied_on import RELIED_ON

import kvstow

OURS = sorted((Path(kvstow.__file__).parent / "vllm").rglob("*.py"))


def root() -> Path:
    """Return the folder of vLLM's package without importing it."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).parent


@pytest.fixture
def vllm() -> Sources:
    return Sources(root())


def test_vllm_has_all_that_kvstow_relies_on(vllm: Sources) -> None:
    drifted = drift(vllm)
    assert not drifted, f"{len(drifted)} changes of vLLM in {root()}:\n" + "\n".join(drifted)


# -- the list equals what kvstow uses --------------------------------------------------------------


def imports() -> Iterator[tuple[str, str]]:
    for file in OURS:
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module[:4] == "vllm":
                for alias in node.names:
                    yield node.module, alias.name


def test_every_import_from_vllm_is_listed() -> None:
    names = {(module, definition.name) for module, definition in listed()}
    missing = {
        f"{module}.{name}"
        for module, name in imports()
        if (module, name) not in names and f"{module}.{name}" not in RELIED_ON
    }
    assert not missing


def test_every_listed_name_is_used() -> None:
    used = set(re.findall(r"\w+", "\n".join(file.read_text() for file in OURS)))
    unused = {
        f"{module}.{definition.name}.{name}"
        for module, definition in listed()
        if isinstance(definition, ast.ClassDef)
        for name in members(definition)
        if name not in used
    }
    assert not unused


def test_overrides_are_listed_with_vllms_parameters(vllm: Sources) -> None:
    """A method that the base class has is an override, intended or not."""
    bases = {
        definition.name: (module, definition)
        for module, definition in listed()
        if isinstance(definition, ast.ClassDef)
    }
    ours = [node for file in OURS for node in parse(file).body if isinstance(node, ast.ClassDef)]
    num_overrides = 0
    for cls in ours:
        for base in cls.bases:
            if not isinstance(base, ast.Name) or base.id not in bases:
                continue
            module, stub = bases[base.id]
            expected = members(stub)
            actual = vllm.find(module, base.id)
            assert actual is not None and isinstance(actual.node, ast.ClassDef)
            for name, method in members(cls).items():
                is_later = name in expected and is_optional(expected[name])
                if vllm.member(actual.module, actual.node, name) is None and not is_later:
                    continue
                assert name in expected, f"{module}.{base.id}.{name} is not listed"
                if isinstance(method, Function) and has(expected[name], "override"):
                    num_overrides += 1
                    theirs = expected[name]
                    assert isinstance(theirs, Function)
                    assert parameters(method) == parameters(theirs), name
    stubs = [node for _, stub in bases.values() for node in members(stub).values()]
    assert num_overrides == sum(has(node, "override") for node in stubs)


# -- the test can fail -----------------------------------------------------------------------------


def changed(vllm: Sources, folder: Path, module: str, change: Callable[[str], str]) -> Sources:
    """Return the sources with one file changed."""
    file = vllm.file(module)
    assert file is not None
    source = file.read_text()
    copy = folder / file.relative_to(vllm.roots[0])
    copy.parent.mkdir(parents=True)
    copy.write_text(change(source))
    assert copy.read_text() != source, "the change no longer applies to this version"
    return Sources(folder, *vllm.roots)


@pytest.mark.parametrize(
    ("module", "definition"), [pytest.param(m, d, id=f"{m}.{d.name}") for m, d in listed()]
)
def test_a_renamed_definition_is_reported(
    vllm: Sources, tmp_path: Path, module: str, definition: Definition
) -> None:
    own = vllm.find(module, definition.name)
    if own is None:
        pytest.skip("this version does not have it")
    names = {definition.name: definition} | (
        members(definition) if isinstance(definition, ast.ClassDef) else {}
    )
    for number, (name, node) in enumerate(names.items()):
        if is_optional(node) or name == "__init__":
            continue
        where = own.module
        if node is not definition:
            assert isinstance(own.node, ast.ClassDef)
            member = vllm.member(own.module, own.node, name)
            assert member is not None
            where = member.module
        renamed = changed(
            vllm,
            tmp_path / str(number),
            where,
            partial(re.compile(rf"\b{name}\b").sub, f"{name}_2"),
        )
        path = definition.name if node is definition else f"{definition.name}.{name}"
        assert f"{module}.{path} is gone" in list(compare(renamed, module, definition))


BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
SCHEDULER = "vllm.v1.core.sched.scheduler"
XFER_FINISHED = "def _update_from_kv_xfer_finished(self, kv_connector_output: KVConnectorOutput):\n"
CHANGES = {
    "a parameter renamed": (
        "vllm.v1.core.block_pool",
        "def touch(self, blocks:",
        "def touch(self, items:",
        "BlockPool.touch takes (self, items), not (self, blocks)",
    ),
    "a parameter that kvstow does not give": (
        "vllm.v1.core.block_pool",
        "def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock])",
        "def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock], why: str)",
        "BlockPool.free_blocks takes (self, ordered_blocks, why)",
    ),
    "a parameter that an override does not take": (
        BASE,
        "def wait_for_layer_load(self, layer_name: str)",
        "def wait_for_layer_load(self, layer_name: str, timeout: float = 1)",
        "KVConnectorBase_V1.wait_for_layer_load takes (self, layer_name, timeout)",
    ),
    "a new abstract method": (
        BASE,
        "    @abstractmethod\n    def wait_for_save(self)",
        "    @abstractmethod\n    def sing(self): ...\n"
        "    @abstractmethod\n    def wait_for_save(self)",
        "KVConnectorBase_V1.sing is abstract",
    ),
    "an order": (
        SCHEDULER,
        XFER_FINISHED,
        XFER_FINISHED + "        landed = kv_connector_output.finished_recving\n",
        "_update_from_kv_xfer_finished has kv_connector_output.finished_recving too early",
    ),
    "a call that is left out": (
        SCHEDULER,
        "self.connector.update_connector_output(",
        "self.connector.update_output(",
        "_update_from_kv_xfer_finished has no connector.update_connector_output",
    ),
    "a byte order": (
        "vllm.v1.core.kv_cache_utils",
        'to_bytes(4, "big"',
        'to_bytes(4, "little"',
        "make_block_hash_with_group_id makes",
    ),
}


@pytest.mark.parametrize(("module", "old", "new", "message"), CHANGES.values(), ids=list(CHANGES))
def test_other_changes_are_reported(
    vllm: Sources, tmp_path: Path, module: str, old: str, new: str, message: str
) -> None:
    drifted = drift(changed(vllm, tmp_path, module, lambda source: source.replace(old, new)))
    assert len(drifted) == 1 and message in drifted[0]


def test_every_change_is_reported(vllm: Sources, tmp_path: Path) -> None:
    fields = ("num_scheduled_tokens", "preempted_req_ids", "total_num_scheduled_tokens")
    drifted = drift(
        changed(
            vllm,
            tmp_path,
            "vllm.v1.core.sched.output",
            lambda source: re.sub(rf"\b({'|'.join(fields)})\b", "renamed", source),
        )
    )
    assert drifted == [f"vllm.v1.core.sched.output.SchedulerOutput.{f} is gone" for f in fields]
