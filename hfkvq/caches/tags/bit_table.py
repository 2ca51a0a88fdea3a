"""`BitTable`: how many bits tokens of each tag get (TriAxialKV), as a JSON file that names its calibration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfkvq.bounded import DAMAGE, load_json

KIND = "hfkvq.bit_table"

# Says nothing about what the keys and values of a model are.
_INCIDENTAL = ("name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "attn_implementation")


def _digest(thing: Any) -> str:
    text = json.dumps(thing, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _essential(thing: Any) -> Any:
    if isinstance(thing, Mapping):
        kept = {str(key): value for key, value in thing.items() if not any(word in str(key) for word in _INCIDENTAL)}
        return {key: _essential(value) for key, value in kept.items()}
    return thing


def config_hash(config: Any) -> str:
    """Sixteen hex digits of a model config: the same for the same architecture, whatever its path or dtype."""
    return _digest(_essential(config.to_dict()))


def config_fields(config: Any) -> dict[str, str]:
    """Fields that `config_hash` is of, as text by name (``rope_parameters.rope_theta``)."""
    found: dict[str, str] = {}

    def walk(prefix: str, thing: Any) -> None:
        if isinstance(thing, Mapping):
            for key, value in thing.items():
                walk(f"{prefix}.{key}" if prefix else key, value)
        else:
            found[prefix] = json.dumps(thing, default=str)

    walk("", _essential(config.to_dict()))
    return found


def differing(theirs: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Says in which fields two configs differ, three of them by their values: ``rms_norm_eps (1e-06, here 1e-05)``."""
    names = sorted(name for name in theirs.keys() | own.keys() if theirs.get(name) != own.get(name))
    shown = [f"{name} ({theirs.get(name, 'absent')[:40]}, here {own.get(name, 'absent')[:40]})" for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def template_hash(tokenizer: Any) -> str:
    """Sixteen hex digits of a tokenizer's chat template."""
    return _digest(getattr(tokenizer, "chat_template", None))


@dataclass(frozen=True)
class BitTable:
    """Bits of tokens by tag, such as ``{"older|text|obs": 2}``, and the calibration that they follow from.

    Attributes:
        bits: 2 or 4 by tag.
        origin: of the calibration: name of the "model", its "config" (`config_hash`), the "template" of its tokenizer
            (`template_hash`), and whatever else is to be known.
        made: how the bits were chosen, for the record.
    """

    bits: Mapping[str, int]
    origin: Mapping[str, Any]
    made: Mapping[str, Any] = field(default_factory=dict)

    def check(self, config: Any, tokenizer: Any = None) -> None:
        """Raises ValueError if the table is for another model; or, with a tokenizer, for another chat template."""
        differs = "model" if self.origin["config"] != config_hash(config) else ""
        if tokenizer is not None and not differs and self.origin["template"] != template_hash(tokenizer):
            differs = "chat template"
        if differs:
            raise ValueError(
                f"table: it was calibrated for another {differs} ({self.origin['model'] or 'unnamed'}, its tags "
                f"{', '.join(self.bits)}) than this one ({getattr(config, 'model_type', '') or 'unnamed'}); calibrate "
                "again with `evals.triaxial calibrate`, or pass the plain table.bits if you know that it fits."
            )

    def save(self, path: str | Path) -> None:
        text = json.dumps({"kind": KIND, "bits": self.bits, "origin": self.origin, **self.made}, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> BitTable:
        """Reads what `save` wrote, or raises ValueError."""
        values = read_json(path, KIND, "table", "python -m evals.triaxial allocate")
        try:
            bits = {str(tag): int(bits) for tag, bits in values["bits"].items()}
            origin = {name: str(values["origin"][name]) for name in ("model", "config", "template")}
            made = {name: x for name, x in values.items() if name not in ("kind", "bits", "origin")}
            return BitTable(bits, {**values["origin"], **origin}, made)
        except DAMAGE as error:
            raise ValueError(
                f"table: {path} is damaged ({error}); make it again with `evals.triaxial allocate`."
            ) from None


def read_json(path: str | Path, kind: str, name: str, maker: str) -> dict[str, Any]:
    """A JSON object whose "kind" is ``kind``; else a ValueError, which names the argument and the command ``maker``."""
    try:
        values = load_json(path)
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be read ({error.strerror}); make it with `{maker}`.") from None
    except ValueError as error:
        raise ValueError(f"{name}: {path} is not JSON ({error}).") from None
    if not isinstance(values, dict) or values.get("kind") != kind:
        found = values.get("kind") if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{name}: {path} holds {found!r}, expected {kind!r} as `{maker}` writes it.")
    return values
