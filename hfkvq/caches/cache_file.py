"""Layers for a file, and files of caches: safetensors with a description in JSON and a checksum; nothing is unpickled.

Files of a prefix store are written whole, read whole or not at all, the least recently used removed first. Nothing
refers to a file that is older than itself: whoever uses a prompt's files touches its end with the oldest time, then its
pages from last to first. So the least recently used file is always one that no other needs, of whatever prompts share
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hfkvq.bounded import DAMAGE, parse_json
from hfkvq.version import __version__

from .base import outside_inference_mode
from .layer_state.smoothing import KeySmoothing
from .layers.layer import KVLayer
from .layers.recurrent import RecurrentLayer
from .store.packing import Packed, packed, unpacked

Tensors = Mapping[str, Tensor]

_STOCK = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Layers of Transformers that can be saved: their state is keys, values, and how many tokens came."""

STATES = "states"
"""Prefix of the names of a layer's recurrent states, among its numbers and tensors."""


def packed_layer(i: int, layer: Any, seen: int) -> Packed:
    """Contents of the cache's layer ``i``, which has seen so many tokens; a ValueError if it cannot be saved."""
    numbers, tensors = _packed_pages(layer) if isinstance(layer, KVLayer) else _packed_stock(i, layer)
    states = _states_of(layer)
    if states is not None:
        if seen and states.rows is None:
            raise ValueError(
                f"path: the model keeps the recurrent states of layer {i} in its own modules, so no file can hold "
                "them; compute the prompt again."
            )
        own, held = states.pack()
        numbers, tensors = numbers | {STATES: own}, tensors | {f"{STATES}.{name}": x for name, x in held.items()}
    return numbers | {"record_past": getattr(layer, "record_past", False)}, tensors


def unpack_layer(i: int, layer: Any, numbers: Mapping[str, Any], tensors: Tensors, device: torch.device) -> None:
    """Gives an empty layer what another one has packed, taking its tensors over; a ValueError if it does not fit."""
    # This comes first: tails are longer, so that tokens can be taken back.
    layer.record_past = numbers["record_past"] is True
    states = _states_of(layer)
    if (states is None) == (STATES in numbers):
        raise ValueError(f"layer {i}: recurrent states in the file or in the model, not in both")
    if states is not None:
        states.record_past = layer.record_past
        states.unpack(numbers[STATES], below(STATES, tensors), device)
        tensors = {name: x for name, x in tensors.items() if not name.startswith(f"{STATES}.")}
    unpack = _unpack_pages if isinstance(layer, KVLayer) else _unpack_stock
    unpack(layer, numbers, tensors, device)


def below(name: str, tensors: Tensors) -> dict[str, Tensor]:
    """Tensors whose names begin with ``name`` and a dot, by the rest of their names."""
    return {key.removeprefix(f"{name}."): x for key, x in tensors.items() if key.startswith(f"{name}.")}


def _packed_pages(layer: KVLayer) -> Packed:
    """Contents of a settled layer; an empty one has none."""
    if layer.store is None:
        return {}, {}
    layer.settle()
    store = layer.store
    numbers, tensors = packed(store.state)
    found = {
        "seen": layer.seen,
        "shape": [layer.batch_size, layer.heads, *(store.dims[side] for side in ("keys", "values"))],
        "dtype": str(layer.dtype).removeprefix("torch."),
        "evicted": layer.evicted,
        "gone": layer.gone,
        "store": numbers,
    }
    if store.format.window:
        found["window"] = store.format.window
    own = {f"store.{name}": tensor for name, tensor in tensors.items()}
    if layer.smoothing is not None:
        found["smoothing"], own["smoothing"] = True, layer.smoothing.vectors
    for name, part in (("queries", layer.queries), ("eviction", layer.eviction)):
        if part is not None:
            found[name], held = part.pack()
            own |= {f"{name}.{key}": tensor for key, tensor in held.items()}
    return found, own


def _unpack_pages(layer: KVLayer, found: Mapping[str, Any], tensors: Tensors, device: torch.device) -> None:
    if "came" in found:
        raise ValueError("a layer that is held in pages here was not in the file")
    if "store" not in found:
        return
    rows, heads, *dims = map(int, found["shape"])
    dtype = getattr(torch, found["dtype"])
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or min(rows, heads, *dims) < 1:
        raise ValueError(f"a layer of {found['dtype']} and shape {found['shape']}")
    # Meta tensors suffice: only shapes are read.
    keys, values = (torch.empty(1, 1, 1, 1, dtype=dtype, device=device).expand(rows, heads, 1, dim) for dim in dims)
    layer.lazy_initialization(keys, values)
    store = layer.held()
    store.adopt(unpacked(store.state, found["store"], below("store", tensors)))
    layer.seen, layer.evicted, layer.gone = int(found["seen"]), found["evicted"] is True, int(found.get("gone", 0))
    vectors = tensors["smoothing"] if "smoothing" in found else None
    if vectors is not None and (vectors.dtype != torch.float32 or vectors.shape != (3, heads, dims[0])):
        raise ValueError(f"smoothing vectors of {vectors.dtype} and shape {tuple(vectors.shape)}")
    layer.smoothing = None if vectors is None else KeySmoothing(vectors.to(device).contiguous())
    for name, part in (("queries", layer.queries), ("eviction", layer.eviction)):
        if part is not None:
            part.unpack(found.get(name, {}), {key: x.to(device) for key, x in below(name, tensors).items()})
    layer.edition += 1


def _states_of(layer: Any) -> RecurrentLayer | None:
    """A layer's recurrent states, or None: it is nothing else, or has attention beside."""
    states = getattr(layer, "states", layer)
    return states if isinstance(states, RecurrentLayer) else None


def _packed_stock(i: int, layer: Any) -> Packed:
    if isinstance(layer, RecurrentLayer) or type(layer).__name__ == "DummyLayer":
        return {}, {}
    if type(layer).__name__ not in _STOCK:
        raise ValueError(
            f"path: layer {i} is a {type(layer).__name__}, which cannot be saved; allowed are pages and layers that "
            "grow. Make the cache without max_cache_len, or compute the prompt again."
        )
    if not layer.is_initialized:
        return {}, {}
    count = getattr(layer, "cumulative_length", None)
    return {"came": None if count is None else int(count)}, {"keys": layer.keys, "values": layer.values}


def _unpack_stock(layer: Any, numbers: Mapping[str, Any], tensors: Tensors, device: torch.device) -> None:
    if isinstance(layer, RecurrentLayer) or type(layer).__name__ == "DummyLayer":
        return
    if type(layer).__name__ not in _STOCK:
        raise ValueError(f"a layer is a {type(layer).__name__} here, which cannot be loaded")
    if "came" in numbers:
        keys, values = (tensors[side].to(device) for side in ("keys", "values"))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if numbers["came"] is not None:
            layer.cumulative_length = int(numbers["came"])


KIND, VERSION = "hfkvq cache", 5
"""Kind and format version of a file; a file of another version is refused."""

FIELD = "hfkvq"
"""The one field of safetensors' metadata, as JSON: several fields are written in another order each time."""

PART = ".part"
"""Suffix of files that are being written."""

CPU = torch.device("cpu")

THREADS = min(os.cpu_count() or 1, 8)
"""Threads that hash tensors or read files; more of them wait for each other's calls."""

_SMALL = 2**24
"""Bytes that one thread hashes sooner than many can begin."""

Digests = Mapping[str, bytes]
"""sha256 of each tensor with its name, dtype and shape."""


def write_file(
    path: str | Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor], digests: Digests | None = None
) -> int:
    """Writes a file whole; after an error the file that was there is unchanged. Equal contents give equal bytes.

    Several processes and threads may write the same file: each has a part of its own, and the last one stays.
    ``digests`` are `digest_of`'s, if they are known.

    Returns:
        Its bytes.

    Raises:
        OSError: there is no room for it, or no such folder.
    """
    path, text = Path(path), json.dumps(description)
    # Copies: safetensors refuses tensors that share memory.
    held = {name: tensors[name].detach().contiguous().to(CPU, copy=True) for name in sorted(tensors)}
    whole = checksum(text, _digests_of(held) if digests is None else digests)
    head = {"kind": KIND, "version": VERSION, "hfkvq": __version__, "sha256": whole, "description": text}
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}{PART}")
    try:
        part.touch()
        mode = part.stat().st_mode
        save_file(held, part, metadata={FIELD: json.dumps(head)})
        # Safetensors makes files that other users cannot read.
        part.chmod(mode)
        size = part.stat().st_size
        os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"path: {path} cannot be written: {error}") from None
    finally:
        part.unlink(missing_ok=True)
    return size


@outside_inference_mode
def read_file(path: str | Path, device: torch.device = CPU) -> tuple[Any, dict[str, Tensor]]:
    """Description and tensors, each in memory of its own, of a file that `write_file` wrote.

    "written" in the description is the hfkvq release that wrote the file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is another kind of file, of another version, cut off or changed.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            head = _head(path, (file.metadata() or {}).get(FIELD, "{}"))
            mapped = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it has no other iterator
            if checksum(head["description"], _digests_of(mapped)) != head["sha256"]:
                raise ValueError(f"path: {path} is damaged (its checksum differs); save it again.")
            found = {name: x.to(device, copy=True) for name, x in mapped.items()}
    except FileNotFoundError:
        raise FileNotFoundError(f"path: there is no file {path}.") from None
    except PermissionError as error:
        # Saving it again would not help.
        raise ValueError(f"path: {path} cannot be read ({error}); see to it, and load it again.") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"path: {path} is not a saved cache, or is truncated ({error}); save it again.") from None
    return {**parse_json(head["description"]), "written": head["hfkvq"]}, found


def _head(path: Path, text: str) -> dict[str, Any]:
    """Reads the field of metadata, and checks it."""
    try:
        head = parse_json(text)
        kind, version, release = head.get("kind"), int(head.get("version", 0)), str(head.get("hfkvq"))
    except DAMAGE as error:
        raise ValueError(f"path: {path} is damaged ({error}); save it again.") from None
    if kind != KIND:
        raise ValueError(f"path: {path} is not a saved cache; cache.save(path) writes one.")
    if version != VERSION:
        raise ValueError(
            f"path: {path} is of version {version}, of hfkvq {release}; hfkvq {__version__} reads {VERSION}; "
            "load it with that release, or save it again."
        )
    if not all(isinstance(head.get(name), str) for name in ("sha256", "description")):
        raise ValueError(f"path: {path} is damaged (it lacks a description or a checksum); save it again.")
    return {**head, "hfkvq": release}


def checksum(text: str, digests: Digests) -> str:
    """Checksum of a description and of tensors, from the digests of `digest_of`: many threads hash faster than one."""
    whole = hashlib.sha256(text.encode())
    for name in sorted(digests):
        whole.update(digests[name])
    return whole.hexdigest()


def digest_of(name: str, tensor: Tensor) -> bytes:
    """Digest of the name, dtype, shape and bytes of a contiguous tensor on the CPU."""
    found = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def _digests_of(tensors: Mapping[str, Tensor]) -> Digests:
    if sum(x.nbytes for x in tensors.values()) < _SMALL:
        return {name: digest_of(name, x) for name, x in tensors.items()}
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(tensors, pool.map(digest_of, tensors, tensors.values()), strict=True))


logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_TICK = 1000
"""Nanoseconds between the times of two files of a prompt."""

_LEFT_BEHIND = 24 * 3600
"""Seconds after which a file that is still being written has no writer any more."""


class Missing(Exception):
    """A file is not there, or is no longer good."""


def names_in(folder: Path) -> list[str]:
    """The names of a folder's files, without their suffix; none of one that does not exist."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
        return [x.name.removesuffix(SUFFIX) for x in found if x.name.endswith(SUFFIX)]
    return []


def path_of(folder: Path, name: str) -> Path:
    """Path of a file."""
    return folder / f"{name}{SUFFIX}"


def write(
    path: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor], digests: Digests | None = None
) -> int:
    """`write_file` of a file whose description then says its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_file(path, {**description, "name": path.name}, tensors, digests)


def read(path: Path, device: torch.device = CPU) -> tuple[Any, dict[str, Tensor]]:
    """Description and tensors of a file.

    Raises:
        Missing: it is not there, or was damaged; then it is removed, and a warning says so.
    """
    try:
        description, tensors = read_file(path, device)
        if description.get("name") != path.name:
            raise ValueError(f"path: {path} was another file ({description.get('name')}).")
    except FileNotFoundError:
        raise Missing from None
    except ValueError as error:
        if isinstance(error.__context__, OSError):
            # Another process has removed it in between, or it cannot be read now, which does not make it bad.
            logger.info("a file of the prefix store cannot be read: %s", error)
        else:
            discard(path, error)
        raise Missing from None
    return description, tensors


def discard(path: Path, why: Exception | str) -> None:
    """Removes a file that is no good, and warns of it."""
    logger.warning("a prefix store's file was unusable and has been removed; its tokens are computed again: %s", why)
    with contextlib.suppress(OSError):
        path.unlink()


def touch(paths: Iterable[Path]) -> None:
    """Files are in use, those that others need first in the list; what is not there, or not ours, stays so."""
    now = time.time_ns()
    for i, path in enumerate(paths):
        with contextlib.suppress(OSError):
            used = now - i * _TICK
            os.utime(path, ns=(used, used))


def shrink(root: Path, max_bytes: int) -> None:
    """Removes the least recently used files until those of all models and schemes take ``max_bytes`` at the most."""
    # One process at a time, or each removes as much as one should.
    with FileLock(root / ".lock"):
        found = sorted(files_in(root))
        total = sum(size for _, size, _ in found)
        for used, size, path in found:
            left_behind = path.name.endswith(PART)
            if total <= max_bytes and not left_behind:
                continue
            if left_behind and used > time.time_ns() - _LEFT_BEHIND * 10**9:
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime_ns != used:
                    continue
                path.unlink()
            total -= size


def files_in(root: Path) -> Iterator[tuple[int, int, Path]]:
    """Time of last use, bytes and path of each file."""
    for path in root.glob("*/*/*"):
        with contextlib.suppress(FileNotFoundError):
            state = path.stat()
            yield state.st_mtime_ns, state.st_size, path
