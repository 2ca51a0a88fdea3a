"""A folder of results of one model under one setting, which its manifest says."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hfkvq.bounded import DAMAGE, load_json
from hfkvq.caches import Preset
from hfkvq.measure.models import Source, read_config
from hfkvq.measure.records import now, versions
from hfkvq.measure.report.results import BOARD

MANIFEST = "manifest.json"

ASKED = "asked_tasks"
"""Entry of lm-eval's config: tasks as they were asked for, where a group's name stands for its tasks."""

_BLOCK, _BLOCKS = 4096, 64
_FILES = ("*.json", "*.safetensors", "*.bin", "*.jinja", "*.model")


def fingerprint(source: Source) -> str:
    """What tells a model from others of its name: the commit of the Hub, or 64 hex digits of a folder's files.

    Of large files a few blocks are read; training changes them all.

    Raises:
        ValueError: there is no such model.
    """
    folder = Path(source.path)
    if not folder.is_dir():
        return str(getattr(read_config(source), "_commit_hash", None))
    whole = hashlib.sha256()
    for file in sorted({file for pattern in _FILES for file in folder.glob(pattern)}):
        size = file.stat().st_size
        whole.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for start in range(0, size, max(_BLOCK, -(-size // _BLOCKS))):
                content.seek(start)
                whole.update(content.read(_BLOCK))
    return whole.hexdigest()


def texts_hash(files: Iterable[Path] | None) -> str | None:
    """64 hex digits of text files; None where the package's own texts are taken. Raises OSError."""
    if not files:
        return None
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def folder_name(name: str) -> str:
    """A scheme's typed form as a folder: ``kitty:boost_ratio=0.2`` is ``kitty-boost_ratio-0.2``."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in Path(name).name)


class Board:
    """What is there already, and whether it belongs to what is asked for.

    Args:
        out: folder, which is made if its parent is there.
        settings: whatever results depend on but tasks and schemes, as JSON has it.

    Raises:
        ValueError: the folder's results are of other settings or versions, or nobody knows of which.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        self.out = out
        used = versions("torch", "transformers", "lm_eval")
        own = {**settings, "versions": {name: used[name] for name in used if name != "python"}}
        out.mkdir(exist_ok=True)
        manifest = out / MANIFEST
        if manifest.exists():
            self._compare(manifest, json.loads(json.dumps(own)))
        elif any(True for pattern in ("results_*.json", "kld*.json") for _ in out.rglob(pattern)):
            raise ValueError(
                f"out: {out} holds results, but no {MANIFEST} that says of which model and settings; choose another "
                "folder. `hfkvq report` still reads it."
            )
        else:
            part = manifest.with_suffix(".part")
            part.write_text(json.dumps({"kind": BOARD, "date": now(), "settings": own}, indent=2) + "\n", "utf-8")
            os.replace(part, manifest)

    @staticmethod
    def _compare(manifest: Path, own: Mapping[str, Any]) -> None:
        try:
            there = load_json(manifest)["settings"]
            names = dict.fromkeys([*there, *own])
        except (OSError, *DAMAGE) as error:
            raise ValueError(f"out: {manifest} cannot be read ({error}); choose another folder.") from None
        other = [f"{name} (there {there.get(name)}, here {own.get(name)})" for name in names]
        other = [words for name, words in zip(names, other, strict=True) if there.get(name) != own.get(name)]
        if other:
            raise ValueError(
                f"out: {manifest.parent} holds results with other settings: {'; '.join(other)}. Choose another folder, "
                "or the settings that are there: only tasks and schemes can be added."
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs away.

        Raises:
            ValueError: one is at work.
        """
        lock = FileLock(self.out / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"out: another run is writing to {self.out}; wait for it, or choose another.") from None
        try:
            yield
        finally:
            lock.release()

    def folder(self, name: str) -> Path:
        """Of a scheme's results."""
        return self.out / folder_name(name)

    def missing(self, name: str, preset: Preset | None, tasks: Iterable[str]) -> list[str]:
        """Tasks that a scheme has no results of.

        Raises:
            ValueError: what is there is of another scheme with this name, or damaged.
        """
        done: set[str] = set()
        for file in self.folder(name).rglob("results_*.json"):
            try:
                config = load_json(file)["config"]
                scheme, asked = config["kvq"]["scheme"], config[ASKED]
            except (OSError, *DAMAGE) as error:
                raise ValueError(f"out: {file} cannot be read ({error!r}); move it away.") from None
            self._check_scheme(file, name, scheme, preset)
            done |= set(asked)
        return [task for task in tasks if task not in done]

    def unmeasured(self, presets: Mapping[str, Preset]) -> tuple[list[str], Path]:
        """Schemes whose divergence was not measured, and a file that is free for it.

        Raises:
            ValueError: see `missing`.
        """
        done: set[str] = set()
        files = sorted(self.out.glob("kld*.json"))
        for file in files:
            try:
                rows = {row["name"]: row["scheme"] for row in load_json(file)["rows"]}
            except (OSError, *DAMAGE) as error:
                raise ValueError(f"out: {file} cannot be read ({error!r}); move it away.") from None
            for name in rows.keys() & presets.keys():
                self._check_scheme(file, name, rows[name], presets[name])
            done |= rows.keys()
        free = (self.out / (f"kld-{number}.json" if number > 1 else "kld.json") for number in itertools.count(1))
        return [name for name in presets if name not in done], next(path for path in free if not path.exists())

    @staticmethod
    def _check_scheme(file: Path, name: str, there: Any, preset: Preset | None) -> None:
        here = None if preset is None else json.loads(json.dumps(preset.to_dict()))
        if there != here:
            raise ValueError(f"out: {file} is of another scheme than {name!r} is now; choose another folder.")
