"""Files of caches: safetensors, with a description in JSON and a checksum over both. Nothing is unpickled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hfkvq.bounded import DAMAGE, parse_json
from hfkvq.version import __version__

from .lasting import lasting
from .transfer import Reader, side_by_side

KIND, VERSION = "hfkvq cache", 4
"""What the head begins with. A file of a later version is refused: it may hold what is unknown here."""

NEEDS = {"states": 2, "window": 3, "smoothing": 4}
"""The first version that can hold a layer with recurrent states, a sliding window in pages, or smoothed keys.

Files say the least version that holds what they have, so that older releases read what they can, and say of the rest
that it is newer.
"""

FIELD = "hfkvq"
"""Of safetensors' metadata: where the description is."""

PART = ".part"
"""How names of files end that are being written."""

CPU = torch.device("cpu")

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Of tensors, by safetensors' names."""

Digests = Mapping[str, bytes]
"""sha256 of each tensor with its name, dtype and shape."""


def write_file(
    path: str | Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor], digests: Digests | None = None
) -> int:
    """Writes a file whole, or leaves what was there.

    Several processes and threads may write the same file: each has a part of its own, and the last one stays.

    Args:
        path: of the file; another file of this name is replaced.
        description: plain data.
        tensors: on one device; contiguous and on the CPU where ``digests`` are given.
        digests: by `digest_of`, if they are known.

    Returns:
        Its bytes.

    Raises:
        OSError: there is no room for it, or no such folder.
    """
    path, held = Path(path), dict(tensors)
    if digests is None:
        held, digests = _on_host(tensors)
    text = json.dumps(description)
    head = {"kind": KIND, "version": version_of(description), "hfkvq": __version__, "sha256": checksum(text, digests)}
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}{PART}")
    try:
        write_safetensors(part, held, {FIELD: json.dumps(head), "description": text})
        size = part.stat().st_size
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return size


def version_of(description: Mapping[str, Any]) -> int:
    """The least version that can hold a cache, or the end of one in a prefix store."""
    layers = description.get("cache", description).get("layers", ())
    return max((number for key, number in NEEDS.items() if any(key in layer for layer in layers)), default=1)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes contiguous tensors of the CPU. Safetensors' own writer has metadata in another order every time."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    kinds = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        end = at + tensors[name].nbytes
        header[name] = {
            "dtype": kinds[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [at, end],
        }  # fmt: skip
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_bytes_of(tensors[name]))


def _on_host(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Digests]:
    """Tensors on the CPU, and their digests: one is hashed while another comes from the device."""

    def one(name: str) -> tuple[Tensor, bytes]:
        held = tensors[name].detach().contiguous().cpu()
        return held, digest_of(name, held)

    device = next((x.device for x in tensors.values() if not x.is_cpu), CPU)
    found = dict(zip(tensors, side_by_side(one, tensors, device), strict=True))
    return {name: x for name, (x, _) in found.items()}, {name: digest for name, (_, digest) in found.items()}


class Place(NamedTuple):
    """Where a tensor is in a file, and what it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class SavedFile:
    """A file that is open: its header has been read.

    Attributes:
        path: of the file.
        descriptor: to read from.
        sha256: that it should have, by its header.
        written: its version, and the release that wrote it.
        text: description.
        places: by name.
    """

    path: Path
    descriptor: int
    sha256: str
    written: tuple[int, str]
    text: str
    places: dict[str, Place]

    def read(self, name: str, reader: Reader, out: Tensor | None = None) -> tuple[Tensor, bytes]:
        """A tensor, in memory of its own or in what is given, and its digest."""
        dtype, shape, start = self.places[name]
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=reader.device)
        if (out.dtype, out.shape) != (dtype, shape):
            raise ValueError(f"path: {self.path} has {name} of {dtype} and {shape}, not {out.dtype} and {out.shape}.")
        digest = _begun(name, dtype, shape)
        reader.fill(out, self.descriptor, start, digest)
        return out, digest.digest()

    def description(self, digests: Digests) -> Any:
        """The description, with "written" beside, if all tensors are what was written; ValueError if not."""
        if checksum(self.text, digests) != self.sha256:
            raise ValueError(f"path: {self.path} is damaged (its checksum differs); save it again.")
        return {**parse_json(self.text), "written": self.written}


@lasting
def read_file(path: str | Path, device: torch.device = CPU) -> tuple[Any, dict[str, Tensor]]:
    """Description and tensors, each in memory of its own, of a file that `write_file` wrote.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is another kind of file, of a later version, cut off or changed.
    """
    with opened(path) as file:
        reader = Reader(device)
        # The largest first, so that no thread is left with one at the end.
        names = sorted(file.places, key=lambda name: -_nbytes(file.places[name]))
        # By one thread: what a thread that ends has freed, others find again only by chance.
        room = {name: torch.empty(x.shape, dtype=x.dtype, device=device) for name, x in file.places.items()}
        read = side_by_side(lambda name: file.read(name, reader, room[name]), names, device)
        found = dict(zip(names, read, strict=True))
        description = file.description({name: digest for name, (_, digest) in found.items()})
    return description, {name: x for name, (x, _) in found.items()}


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[SavedFile]:
    """A file that `write_file` wrote; raises what `read_file` does, also for what is read from it within."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path: there is no file {path}.")
    try:
        while True:
            with path.open("rb", buffering=0) as file, safe_open(path, framework="pt") as header:
                # Or another process has replaced it between the two.
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    yield _header(path, file.fileno(), header)
                    return
    except (SafetensorError, OSError) as error:
        if getattr(error, "errno", None):
            # The system's word, not the file's: nobody has to save it again.
            raise ValueError(f"path: {path} cannot be read ({error}); see to it, and load it again.") from None
        raise ValueError(f"path: {path} is not a saved cache, or is truncated ({error}); save it again.") from None
    except KeyError as error:
        raise ValueError(f"path: {path} is damaged (it lacks {error}); save it again.") from None


def _header(path: Path, descriptor: int, header: Any) -> SavedFile:
    metadata = header.metadata() or {}
    if FIELD not in metadata:
        raise ValueError(f"path: {path} is not a saved cache; cache.save(path) writes one.")
    head = parse_json(metadata[FIELD])
    number = _check_head(path, head)
    # Safetensors has checked that tensors follow each other without gaps, up to the end of the file.
    at, places = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little"), {}
    for name in header.offset_keys():
        found = header.get_slice(name)
        places[name] = Place(_DTYPES[found.get_dtype()], tuple(found.get_shape()), at)
        at += _nbytes(places[name])
    written = number, str(head.get("hfkvq"))
    return SavedFile(path, descriptor, head["sha256"], written, metadata["description"], places)


def _nbytes(place: Place) -> int:
    return math.prod(place.shape) * place.dtype.itemsize


def _check_head(path: Path, head: Any) -> int:
    """Its version."""
    try:
        kind, number = head["kind"], int(head["version"])
    except DAMAGE:
        kind, number = None, 0
    if kind != KIND or number < 1:
        raise ValueError(f"path: {path} is not a saved cache; cache.save(path) writes one.")
    if number > VERSION:
        raise ValueError(
            f"path: {path} is of version {number}, and this hfkvq ({__version__}) reads up to {VERSION}; install "
            f"hfkvq {head.get('hfkvq')} or newer, or save it again."
        )
    return number


def checksum(text: str, digests: Digests) -> str:
    """Of a description and tensors, from what `digest_of` gave for each: many threads hash faster than one."""
    whole = hashlib.sha256(text.encode())
    for name in sorted(digests):
        whole.update(digests[name])
    return whole.hexdigest()


def digest_of(name: str, tensor: Tensor) -> bytes:
    """Of a tensor's name, dtype, shape and bytes, on the CPU."""
    found = _begun(name, tensor.dtype, tensor.shape)
    found.update(_bytes_of(tensor))
    return found.digest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _begun(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Any:
    return hashlib.sha256(f"{name} {dtype} {tuple(shape)}".encode())
