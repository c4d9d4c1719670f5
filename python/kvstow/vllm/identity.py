"""Whose KV a lower tier holds: everything that shapes the bytes of a block, as a fingerprint.

A server reads blocks of an earlier server, or of another one. Its block hashes cover tokens,
adapters' names, images and salts, and nothing else. How a block of something else could be served,
and what prevents it:

- Other weights under the same path or name: the digest of the content of all files of the model.
- Other weights that are not in these files (a loader that fetches them, a remote store, a folder of
  their own for downloads, another repository for a part of the model or for its code, a trainer
  that sends them, or another server that encodes the images): the blocks are private, so the server
  begins with an empty disk, and shares nothing (`Identity.why_private`).
- Files that were replaced while vLLM loaded them, so that the digest is not that of what it loaded,
  or a file of the version that was written meanwhile: private, if anything changed since the
  process began (`last_change`). What prepares images, a process above has read (`processes`).
- Weights that changed in place: a reset, which draws a new generation (`below.disk`) or new
  names (`below.shared`).
- Another adapter under the same name: requests with adapters take nothing from below
  (`LowerTier.lookup`).
- Other shapes of the same numbers (dtype, attention backend, parallel ranks, block sizes, another
  version of vLLM): the fields below, and the shapes of vLLM's tensors.
- Other rounding, or random experts, by kernels that the user names, or by what experts must be able
  to do: those that `shaping` lists. By variables of vLLM's and of libraries below it: all that are
  set and not known to shape no block (`variables`).
- Other tokens of a block on a rank, of which the shapes are the same: how many tokens in a row
  context parallelism gives to one rank.
- Other numbers for the same image, or code of the model that vLLM takes from Transformers: its
  version, because its processors turn images into the model's input, and those of the packages that
  decode, resize and encode images, audio and video.
- Code of the model from a plugin of vLLM: the names and versions of the packages. From a class of
  workers: its name.
- Other content of a file that a setting or a variable names: the content.
- Another order of the layers in a slot, by another version of kvstow: its version.
- Another order of the numbers in tensors of one shape, as vLLM's CPU kernels have it for each
  instruction set: the kernels' names.
- KV scales that vLLM computes from the first request: private.
- Hashes from a random start: no lookup finds them, so they are private, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from vllm import version as vllm_version

from kvstow import ConfigError, __version__
from kvstow._core import row_digests
from kvstow.tiers import Fingerprint
from kvstow.vllm.digest import digest_of, weights_named
from kvstow.vllm.model import Model
from kvstow.vllm.options import WHERE, Options, path_of_engine, rank_in_engine
from kvstow.vllm.processes import parents_began, process_began
from kvstow.vllm.shaping import (
    has_code_elsewhere,
    loads_of,
    models_of,
    shaping,
    takes_media,
    why_weights_are_unknown,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm." + __name__)

_MEMORY: Final = "weights.json"
_OTHER_HUB: Final = "VLLM_USE_MODELSCOPE"
_PIECE_BYTES: Final = 64 << 20
# The sum of `_content_digest`. What an older kvstow has remembered, by another sum, does not count.
_CONTENT_DIGEST: Final = "xxh3"
# A file that has just changed may change again without another time.
_FRESH_S: Final = 2.0


@dataclass(frozen=True)
class Identity:
    """What is known of the model when a worker is built; `fingerprint` adds what it allocates.

    Attributes:
        config: vLLM's configuration.
        options: the user's options.
    """

    config: VllmConfig
    options: Options

    @classmethod
    def of(cls, config: VllmConfig, options: Options) -> Identity | None:
        """Return the identity of a worker of this configuration; None without a lower tier."""
        has_lower = options.disk_path is not None or options.shared is not None
        return cls(config, options) if has_lower else None

    @property
    def path(self) -> str:
        """The slot file of this rank: one for each rank of each data-parallel engine."""
        parallel = self.config.parallel_config
        name = f"rank{rank_in_engine(parallel)}-of-{parallel.world_size}"
        return path_of_engine(os.path.join(str(self.options.disk_path), name), parallel)

    @property
    def why_private(self) -> str:
        """Why no other server may read this one's blocks; empty if one of the same identity may."""
        return why_private(self.config, self.options.weights_version_path)

    def fingerprint(self, model: Model, kv_caches: Mapping[str, torch.Tensor]) -> Fingerprint:
        """Return the fingerprint of this rank's blocks. Reads all files of the model.

        Raises:
            ConfigError: a file cannot be read.
        """
        config = self.config
        cache, parallel = config.cache_config, config.parallel_config
        fields: dict[str, str | int] = {
            "vllm": vllm_version.__version__,
            "kvstow": __version__,
            "device": _device(kv_caches),
            "kernels": digest_of(_kernels(config, kv_caches)),
            **shaping(config),
            "groups": digest_of(model.groups),
            "layout": digest_of(_shapes(model, kv_caches)),
            "rank": rank_in_engine(parallel),
            "world_size": parallel.world_size,
            "tensor_parallel": parallel.tensor_parallel_size,
            "pipeline_parallel": parallel.pipeline_parallel_size,
            "hash": cache.prefix_caching_hash_algo,
            "hash_block": getattr(cache, "hash_block_size", None) or 0,
            "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        }
        memory = self._memory
        for name, folder in folders_of(self.config).items():
            fields[name] = "unknown" if folder is None else content_of(folder, memory)
        version = self.options.weights_version_path
        if version is not None:
            fields["weights_version"] = digest_of(weights_named(version, f"{WHERE}."))
        return Fingerprint(fields)

    @property
    def _memory(self) -> Path | None:
        """The file that keeps the digests of files; None without a place for it."""
        if self.options.disk_path is not None:
            return Path(self.options.disk_path) / _MEMORY
        try:
            cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            folder = Path(cache) / "kvstow"
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # no home folder, or one that nobody may write
            return None
        return folder / _MEMORY


def why_private(config: VllmConfig, version: str | None, *, is_version_enough: bool = False) -> str:
    """Return why no other server may read a server's blocks; empty if one of the same identity may.

    Args:
        config: vLLM's configuration.
        version: the file that names the weights; None for none.
        is_version_enough: whether the weights that it names may come from anywhere.
    """
    cache, folders = config.cache_config, folders_of(config)
    hashing = cache.prefix_caching_hash_algo
    has_seed = os.environ.get("PYTHONHASHSEED") is not None
    is_named = is_version_enough and version is not None
    elsewhere = "" if is_named else why_weights_are_unknown(config)
    reasons = {
        elsewhere: elsewhere,
        "it computes the scales of its KV from its first request": getattr(
            cache, "calculate_kv_scales", False
        ),
        f"its {hashing} chains start at random: set PYTHONHASHSEED to one value everywhere": (
            not has_seed and not hashing.startswith("sha256")
        ),
        "the files of its weights are not known": not is_named and None in folders.values(),
        "the files of its weights have changed since this process began": any(
            may_have_changed(str(model.model), folders[name], takes_media=takes_media(model))
            for name, model in models_of(config).items()
        ),
        "a part of its code comes from another repository": has_code_elsewhere(config, folders),
        "the file of weights_version_path has changed since this process began": (
            version is not None and version_may_be_newer(version)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def folders_of(config: VllmConfig) -> dict[str, Path | None]:
    """Return the files of each model; None if they are not on this machine."""
    loads = loads_of(config)
    return {
        name: local_model(model, loads[name].download_dir)
        for name, model in models_of(config).items()
    }


def local_model(model: Any, download_dir: str | None) -> Path | None:
    """Return the folder or the file of a model on this machine; None if it is not known."""
    path = Path(model.model)
    if path.exists():
        return path
    # The hub's folder has a model's configuration then, but not its weights, or old ones.
    if download_dir is not None or os.environ.get(_OTHER_HUB, "").lower() in ("1", "true"):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - vLLM has it
    except ImportError:
        return None
    with suppress(ValueError):  # no name of a repository
        found = try_to_load_from_cache(str(model.model), "config.json", revision=model.revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def may_have_changed(name: str, folder: Path | None, *, takes_media: bool) -> bool:
    """Whether a file of a model has changed since the process began, with a warning.

    vLLM builds connectors when the weights are loaded. So nobody knows whether the change came
    before, and of which files the digest is.

    Args:
        name: the path of the model, or the name of a repository.
        folder: its files; None if they are not known.
        takes_media: whether the server's first process has read files that shape blocks.
    """
    began = min(process_began(), parents_began() if takes_media else math.inf)
    if folder is None or not _is_newer_than(began, name, folder):
        return False
    logger.warning(
        "kvstow: the files in %s have changed since this process began, perhaps while vLLM loaded "
        "them. So below the host, this server finds no blocks of other servers or of an earlier "
        "start, and leaves none for them. Start it again to end that; with Ray, "
        "restart Ray first",
        folder,
    )
    return True


def version_may_be_newer(path: str) -> bool:
    """Whether the file of `weights_version_path` may name other weights than vLLM has loaded.

    So it is if the file has changed since the process began: vLLM loads the weights first.
    """
    return _is_newer_than(process_began(), path, Path(path))


def _is_newer_than(began: float, name: str, folder: Path) -> bool:
    try:
        changed = last_change(name, folder)
    except OSError:  # a file goes while this looks
        changed = math.inf
    return changed > began - _FRESH_S


def last_change(name: str, folder: Path) -> float:
    """Return when the files of a model last changed, or the names on the way to them.

    In the cache of a hub no file changes under its name, so only the names of revisions count, and
    those on the way to the cache.
    """
    path = Path(name)
    if not path.exists():
        times = [os.lstat(it).st_ctime for it in folder.parent.parent.glob("refs/**/*")]
        return max(times + [_renamed(os.lstat(each)) for each in _names_to([folder])])
    folders = (Path(folder) for folder, _, _ in os.walk(path, followlinks=True))
    seen = [each for each in folders if not each.relative_to(path).as_posix().startswith(".")]
    found = {path, *seen, *(file for _, file in _files(path))}
    times = [call(file).st_ctime for file in found for call in (os.stat, os.lstat)]
    return max(times + [_renamed(os.lstat(each)) for each in _names_to(found)])


def _names_to(paths: Iterable[Path]) -> set[Path]:
    """Return the links on the way to paths, and the folders above all of these."""
    names: set[Path] = set()
    left = [path.absolute() for path in paths]
    while left:
        path = left.pop()
        above = [each for each in path.parents if each not in names]
        names.update(above)
        for each in (path, *above):
            # A link may name a link.
            if each.is_symlink() and (target := each.parent / os.readlink(each)) not in names:
                names.add(target)
                left.append(target)
    return names


def _renamed(found: os.stat_result) -> float:
    """Return when a link was made, or when a folder was renamed, as far as that is known.

    A new entry changes both times of a folder.
    """
    is_new_entry = stat.S_ISDIR(found.st_mode) and found.st_ctime_ns == found.st_mtime_ns
    return 0.0 if is_new_entry else found.st_ctime


def content_of(path: Path, memory: Path | None) -> str:
    """Return the digest of a model's files.

    Args:
        path: its folder, or its file.
        memory: the file that keeps the digests of files that do not change; None for none.

    Raises:
        ConfigError: a file cannot be read.
    """
    known: dict[str, list[Any]] = {}
    if memory is not None:
        with suppress(OSError, RecursionError, TypeError, ValueError):  # missing, or damaged
            known = dict(json.loads(memory.read_text()))
    found: dict[str, list[Any]] = {}
    lines = []
    for name, file in _files(path):
        try:
            now = os.stat(file)
            place = [_CONTENT_DIGEST, now.st_dev, now.st_ino]
            state = [*place, now.st_size, now.st_mtime_ns, now.st_ctime_ns]
            kept = known.get(str(file))
            is_kept = isinstance(kept, list) and kept[:-1] == state and _shows_changes(now)
            digest = str(kept[-1]) if kept is not None and is_kept else _content_digest(file)
            is_old = time.time() - now.st_ctime > _FRESH_S and _shows_changes(now)
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read ({error.strerror}), and the tier below the host "
                "needs the content of all files of the model: make it readable, or remove the tier"
            ) from error
        if is_old:
            found[str(file)] = [*state, digest]
        lines.append((name, now.st_size, digest))
    if memory is not None and any(known.get(name) != state for name, state in found.items()):
        _remember(memory, known | found)
    return digest_of(lines)


def _shows_changes(file: os.stat_result) -> bool:
    """Whether a file that gets other content also gets another time of its last change.

    In an image of a file system (squashfs, EROFS) or a mounted bucket, its maker has chosen the
    time, in whole seconds. Two versions of a file may have one time, one inode and one size.
    """
    return file.st_ctime_ns != file.st_mtime_ns or file.st_ctime_ns % 10**9 != 0


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each file of a model, in one fixed order."""
    if path.is_file():
        yield path.name, path
        return
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for name in sorted(names):
            file = Path(folder) / name
            if not name.startswith(".") and file.is_file():
                yield str(file.relative_to(path)), file


def _content_digest(file: Path) -> str:
    """Return a digest of a file's content: the SHA-256 of the XXH3 of its pieces."""
    whole = hashlib.sha256()
    buffer = bytearray(_PIECE_BYTES)
    row = np.frombuffer(buffer, np.uint8)[None, :]
    with open(file, "rb", buffering=0) as source:
        while num_bytes := source.readinto(buffer):
            whole.update(row_digests(row[:, :num_bytes], [0]).tobytes())
    return whole.hexdigest()[:32]


def _remember(memory: Path, content: Mapping[str, list[Any]]) -> None:
    """Write the digests of files for the next start; without them it reads the files again."""
    new = memory.with_name(f"{memory.name}.{os.getpid()}")
    try:
        new.write_text(json.dumps(content))
        os.replace(new, memory)
    except OSError:
        with suppress(OSError):
            new.unlink()


def _device(kv_caches: Mapping[str, torch.Tensor]) -> str:
    """Return the kind of the device, on which the choice of vLLM's kernels depends."""
    import torch  # noqa: PLC0415 - vLLM has it

    device = next(iter(kv_caches.values())).device
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    able = torch.cpu.get_capabilities()
    abilities = sorted(name for name, value in able.items() if value is True)
    return f"{device.type} {able.get('architecture')} {digest_of(abilities)}"


def _kernels(config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]) -> list[Any]:
    """Return the attention backend of each layer. vLLM chooses it by what is installed."""
    layers: Mapping[str, Any] = config.compilation_config.static_forward_context
    return [
        (name, layers[name].get_attn_backend().full_cls_name())
        for name in sorted(kv_caches)
        if name in layers
    ]


def _shapes(model: Model, kv_caches: Mapping[str, torch.Tensor]) -> list[Any]:
    """Return what lies where in a block: the layers in their order, and their tensors' shapes.

    The number of blocks may differ between two starts. It shapes no block. A kernel may see each
    block as several smaller ones, whose size shapes it.
    """
    shapes = []
    for layers in model.layers:
        for layer in layers:
            tensor = kv_caches[layer.name]
            strides = [stride * tensor.element_size() for stride in tensor.stride()]
            all_bytes = model.num_blocks * layer.block_stride
            inner = [
                (0 if size * stride == all_bytes else size, stride)
                for size, stride in zip(tensor.shape, strides, strict=True)
                if size != model.num_blocks and stride < layer.block_stride
            ]
            shapes.append((layer.name, layer.block_bytes, str(tensor.dtype), inner))
    return shapes
