"""Arguments of the cache in ``--model_args``, apart from the model's; checked before the model is loaded."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hfkvq.caches import Preset, get_preset, list_schemes
from hfkvq.caches.tags.bit_table import BitTable

Truncation = Literal["left", "middle", "refuse"]

STOCK = ("none", "bf16")
"""Names of Transformers' own cache, which holds what the model computes: the baseline, through the same code."""

# Options of ``from_pretrained`` that its signature does not name.
_LOADING = frozenset(
    "attn_implementation code_revision device_map distributed_config dtype experts_implementation key_mapping "
    "load_in_4bit load_in_8bit low_cpu_mem_usage max_memory offload_buffers offload_folder offload_state_dict "
    "output_loading_info quantization_config resume_download subfolder torch_dtype tp_plan tp_size trust_remote_code "
    "use_kernels variant".split()
)


@dataclass(frozen=True)
class CacheArguments:
    """Options of answering requests.

    Attributes:
        preset: of the cache; None is Transformers' own.
        asked: the name that it was asked for by; None if it was described otherwise or changed by knobs.
        table: TriAxialKV's table of bits, from a file, which knows the model it was made for.
        chunk: tokens fed at once behind a prompt whose log-likelihood is asked for.
        truncate: what becomes of a prompt that is too long.
    """

    preset: Preset | None
    asked: str | None
    table: BitTable | None
    chunk: int
    truncate: Truncation


def take_arguments(
    scheme: Any,
    layers: Any,
    ll_chunk: Any,
    truncate: Any,
    others: dict[str, Any],
    model_options: Iterable[str],
) -> CacheArguments:
    """Reads the arguments of the cache, and takes its knobs out of ``others``.

    Args:
        scheme: a preset's name or file, ``none`` or ``bf16``, a `Scheme`, or a description (``to_dict``).
        layers: schemes of single layers, see `MixedKVCache`.
        others: all further arguments; knobs of the scheme are removed.
        model_options: names of arguments that are the model's.

    Raises:
        ValueError: unknown scheme or truncation; a knob of another scheme, or one out of range; a chunk that is no
            positive number.
    """
    if truncate not in get_args(Truncation):
        raise ValueError(f"truncate: got {truncate!r}, allowed {', '.join(get_args(Truncation))}.")
    if isinstance(ll_chunk, bool) or not isinstance(ll_chunk, int) or ll_chunk < 1:
        raise ValueError(f"ll_chunk: got {ll_chunk!r}, allowed a positive number of tokens, e.g. 16.")
    if isinstance(scheme, str) and scheme in STOCK:
        scheme = None
    chosen = None if scheme is None else get_preset(scheme)
    if chosen is None and layers:
        raise ValueError(f"layers: got {layers!r} with scheme=none; Transformers' own cache has no schemes of layers.")
    own = set() if chosen is None else {field.name for field in dataclasses.fields(chosen.scheme)}
    owners: dict[str, list[str]] = {}
    for other in {type(found): found for found in list_schemes().values()}.values():
        for field in dataclasses.fields(other):
            owners.setdefault(field.name, []).append(other.name)
    known, knobs = frozenset(model_options), {}
    for name in list(others):
        if name in own:
            value = others.pop(name)
            # The command line knows lists but no tuples.
            knobs[name] = tuple(value) if isinstance(value, list) else value
        elif name in owners and name not in known:
            which = "Transformers' own cache has no knobs" if chosen is None else f"not of {chosen.scheme.name!r}"
            raise ValueError(
                f"model_args: {name!r} is a knob of {', '.join(map(repr, owners[name]))}, {which}; "
                "leave it out or choose another scheme."
            )
    table = None
    if isinstance(knobs.get("table"), str):
        table = BitTable.load(knobs["table"])
        knobs["table"] = table.bits
    asked = scheme if isinstance(scheme, str) and chosen is not None else None
    if chosen is not None and (knobs or layers is not None):
        changed = get_preset(chosen, layers, **knobs)
        asked = asked if changed == chosen else None
        chosen = changed
    return CacheArguments(chosen, asked, table, ll_chunk, truncate)


_DEVICES = re.compile(r"(cpu|mps|npu|xpu|hpu)(:\d+)?|cuda(:(?P<number>\d+))?")
_BATCH_SIZE = re.compile(r"auto(:\d+(\.\d+)?)?|[1-9]\d*")


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float) and isinstance(value, bool):
        return False
    kind = get_origin(kind) or kind
    return isinstance(value, kind) if isinstance(kind, type) else True


def check_options(others: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Refuses values of lm-eval's own options that it would stumble over late, or take for something else.

    Args:
        hints: types of the options that lm-eval has.

    Raises:
        ValueError: a value of a wrong type, a dtype or a device that there is not, or a number below 1.
    """
    for name, value in others.items():
        hint = hints.get(name, object)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not any(_is_a(value, kind) for kind in kinds):
            words = ", ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
            raise ValueError(f"{name}: got {value!r}, allowed {words}.".replace("NoneType", "None"))
        if name == "batch_size" and not _BATCH_SIZE.fullmatch(str(value)):
            raise ValueError(f"{name}: got {value!r}, allowed 1 or more, auto or auto:N.")
        if name in ("max_batch_size", "max_length") and value is not None and value < 1:
            raise ValueError(f"{name}: got {value!r}, allowed 1 or more.")
        known = value == "auto" or not isinstance(value, str) or isinstance(getattr(torch, value, None), torch.dtype)
        if name.endswith("dtype") and not known:
            raise ValueError(f"{name}: got {value!r}, allowed auto or the name of a dtype of PyTorch, e.g. bfloat16.")
        if name == "device" and value is not None:
            match = _DEVICES.fullmatch(value)
            if match is None or int(match["number"] or 0) >= max(torch.cuda.device_count(), 1):
                count = torch.cuda.device_count()
                raise ValueError(
                    f"{name}: got {value!r}, allowed cpu, cuda or cuda:N; PyTorch sees {count} CUDA devices."
                )


def check_loading(others: Mapping[str, Any], config: PreTrainedConfig, preset: Preset | None) -> None:
    """Refuses arguments that nobody knows, before the model is loaded.

    Args:
        others: arguments on their way to ``from_pretrained``.
        config: of the model; its attributes are legal.
        preset: its scheme's knobs are suggested where a name is close to one.

    Raises:
        ValueError: neither a knob, an option of lm-eval's, one of ``from_pretrained`` nor an attribute of the config.
    """
    scheme = None if preset is None else preset.scheme
    known = {*inspect.signature(PreTrainedModel.from_pretrained).parameters, *_LOADING}
    for name in others:
        if name in known or hasattr(config, name):
            continue
        knobs = [] if scheme is None else [field.name for field in dataclasses.fields(scheme)]
        words = [*knobs, "scheme", "layers", "ll_chunk", "truncate", *known]
        close = difflib.get_close_matches(name, words, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        mine = "" if scheme is None else f" Knobs of {scheme.name!r}: {', '.join(knobs) or 'none'}."
        raise ValueError(
            f"model_args: {name!r} is unknown; {hint}It is neither an option of the scheme, of lm-eval's hf model or "
            f"of from_pretrained, nor an attribute of the model's config.{mine}"
        )
