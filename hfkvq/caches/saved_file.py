"""Files of caches: safetensors, with a description in JSON and a checksum over both. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hfkvq.bounded import DAMAGE, parse_json

KIND, VERSION = "hfkvq cache", 1
"""What the description begins with. A file of a later version is refused: it may hold what is unknown here."""

FIELD = "hfkvq"
"""Of safetensors' metadata: where the description is."""

PART = ".part"
"""How names of files end that are being written."""

_THREADS = 8


def write_file(path: str | Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Writes a file whole, or leaves what was there.

    Several processes and threads may write the same file: each has a part of its own, and the last one stays.

    Args:
        path: of the file; another file of this name is replaced.
        description: plain data.
        tensors: on any device.

    Returns:
        Its bytes.

    Raises:
        OSError: there is no room for it, or no such folder.
    """
    path = Path(path)
    held = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    text = json.dumps(description)
    head = {"kind": KIND, "version": VERSION, "hfkvq": version("hfkvq"), "sha256": checksum(text, held)}
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}{PART}")
    try:
        save_file(held, part, metadata={FIELD: json.dumps(head), "description": text})
        size = part.stat().st_size
        os.replace(part, path)
    except SafetensorError as error:
        # So it tells of a full disk.
        raise OSError(f"path: {path} could not be written ({error}).") from error
    finally:
        part.unlink(missing_ok=True)
    return size


def read_file(path: str | Path) -> tuple[Any, dict[str, Tensor]]:
    """Description and tensors, on the CPU, of a file that `write_file` wrote.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is another kind of file, of a later version, cut off or changed.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path: there is no file {path}.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if FIELD not in metadata:
                raise ValueError(f"path: {path} is no saved cache; cache.save(path) writes one.")
            head = parse_json(metadata[FIELD])
            _check_head(path, head)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = metadata["description"]
        damaged = checksum(text, tensors) != head["sha256"]
        description = None if damaged else parse_json(text)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"path: {path} is no saved cache, or was cut off ({error}); save it again.") from None
    except KeyError as error:
        raise ValueError(f"path: {path} is damaged (it lacks {error}); save it again.") from None
    if damaged:
        raise ValueError(f"path: {path} is damaged (its checksum is another); save it again.")
    return description, tensors


def _check_head(path: Path, head: Any) -> None:
    try:
        kind, number = head["kind"], int(head["version"])
    except DAMAGE:
        kind, number = None, 0
    if kind != KIND or number < 1:
        raise ValueError(f"path: {path} is no saved cache; cache.save(path) writes one.")
    if number > VERSION:
        raise ValueError(
            f"path: {path} is of version {number}, and this hfkvq ({version('hfkvq')}) reads up to {VERSION}; install "
            f"hfkvq {head.get('hfkvq')} or newer, or save it again."
        )


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Of description, names, shapes, dtypes and bytes. Side by side: one thread hashes slower than a disk reads."""

    def digest(name: str) -> bytes:
        tensor = tensors[name]
        found = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return found.digest()

    whole = hashlib.sha256(text.encode())
    with ThreadPoolExecutor(_THREADS) as pool:
        for part in pool.map(digest, sorted(tensors)):
            whole.update(part)
    return whole.hexdigest()
