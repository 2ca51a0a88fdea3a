"""Every family of models against Transformers' own cache: what is right, compressed, or refused, and why.

Each family is built tiny from its config class (`evals/families.py`). In each mode of `generate`, growing and with a
fixed capacity, the scheme ``full`` has to give the tokens of `DynamicCache`; presets have to give the logits that they
give where every step dequantizes them. Nothing is downloaded, and no GPU is used. Run from the repository's root:

    PYTHONPATH=. python evals/matrix.py --json evals/results/models.json --markdown docs/models.md

A run that was stopped goes on where it was. Half of the families in a process of its own: ``--part 1/2``, then
``--part 2/2`` with another file, then both files and no part. Another version of Transformers, on ``PYTHONPATH``, takes
a file of its own; ``--others evals/results/models-5.17.json`` says in the table what has come of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

sys.path.insert(0, str(Path(__file__).parents[1]))

from evals.families import KINDS, VOCABULARY, build, families
from evals.matrix_report import NOT_OURS, markdown
from hfkvq import MixedKVCache, Scheme, get_scheme
from hfkvq.caches.base.model_config import latent_dims
from hfkvq.caches.layers import KVLayer

PROMPT, NEW, CAPACITY = 40, 12, 192
PRESETS = ("kitty-pro", "saw-int4-kv", "kvarn-k4v2", "mixkvq", "arkv", "snapkv")
LIMIT_S = 400
SMALL = {"page_size": 16, "local_length": 16, "sink_length": 4, "group_size": 8, "seal_unit": 8, "window": 16}

Make = Callable[[], Any]


def small(name: str) -> Scheme:
    """A preset with pages and windows so small that a short prompt fills them."""
    scheme = get_scheme(name)
    own = {field.name for field in fields(scheme)}
    changes: dict[str, Any] = {key: value for key, value in SMALL.items() if key in own}
    if "pages" in own:
        changes |= {"pages": small(scheme.pages), "budget_tokens": 28}  # type: ignore[attr-defined]
    return get_scheme(scheme, **changes)


# Modes of `generate`: (model, what makes a cache) -> tokens, or logits.


def _ids(rows: int, tokens: int, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, min(VOCABULARY, 100), (rows, tokens), generator=generator)


def _generate(model: Any, make: Make, ids: Tensor, **options: Any) -> Tensor:
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "num_beams": 1} | options
    cache = make() if callable(make) else make
    if _crosses(model) and model.main_input_name != "input_ids":
        options.pop("attention_mask", None)
        return model.generate(past_key_values=cache, **_encoded(model, ids), **options)
    return model.generate(ids, past_key_values=cache, **options)


def _encoded(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Inputs of an encoder: text, sound or samples."""
    name, generator = model.main_input_name, torch.Generator().manual_seed(3)
    if name == "input_ids":
        return {"input_ids": ids[:, :PROMPT]}
    config = model.config
    shape: tuple[int, ...] = (2080,)
    if config.model_type == "whisper":
        shape = config.num_mel_bins, 2 * config.max_source_positions
    elif name == "pixel_values":
        shape = 3, 28, 28
    elif name == "input_features":
        shape = 64, getattr(config, "input_feat_per_channel", 16)
    return {name: torch.randn(ids.shape[0], *shape, generator=generator)}


@torch.no_grad()
def _forward(model: Any, cache: Any, ids: Tensor, encoder_ids: Tensor) -> Tensor:
    """Logits of tokens, which are the decoder's if there is an encoder: f32 (B, t, vocabulary)."""
    if _crosses(model):
        return model(past_key_values=cache, decoder_input_ids=ids, **_encoded(model, encoder_ids)).logits
    return model(past_key_values=cache, input_ids=ids).logits


def _padded(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    ids = _ids(rows, tokens)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 7 * row + 2] = 0
    return ids.masked_fill(mask == 0, 0), mask


def greedy(model: Any, make: Make) -> Tensor:
    """Two rows of one length."""
    return _generate(model, make, _ids(2, PROMPT))


def sampling(model: Any, make: Make) -> Tensor:
    """The same random numbers."""
    torch.manual_seed(5)
    return _generate(model, make, _ids(2, PROMPT), do_sample=True, top_k=20)


def several(model: Any, make: Make) -> Tensor:
    """Several sequences returned of each prompt."""
    torch.manual_seed(5)
    return _generate(model, make, _ids(1, PROMPT), do_sample=True, top_k=20, num_return_sequences=3)


def padding(model: Any, make: Make) -> Tensor:
    """Three rows with left padding."""
    ids, mask = _padded(3, PROMPT)
    return _generate(model, make, ids, attention_mask=mask)


def beams(model: Any, make: Make) -> Tensor:
    """Three beams over two rows, one of them padded."""
    ids, mask = _padded(2, PROMPT)
    return _generate(model, make, ids, attention_mask=mask, num_beams=3, num_return_sequences=2)


def turns(model: Any, make: Make) -> Tensor:
    """A second prompt on a used cache."""
    cache, (ids, mask) = make(), _padded(2, PROMPT // 2)
    for turn in range(2):
        ids = _generate(model, cache, ids, attention_mask=mask)
        more = _ids(2, 9, turn)
        mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1] + 9)], 1)
        ids = torch.cat([ids, more], 1)
    return ids


def chunks(model: Any, make: Make) -> Tensor:
    """The prompt in chunks."""
    ids, mask = _padded(2, PROMPT)
    return _generate(model, make, ids, attention_mask=mask, prefill_chunk_size=13)


def assisted(model: Any, make: Make) -> Tensor:
    """A small model drafts."""
    draft = build("llama", seed=1)
    return _generate(model, make, _ids(1, PROMPT), assistant_model=draft)


def lookup(model: Any, make: Make) -> Tensor:
    """Tokens are looked up in the prompt, which repeats itself."""
    return _generate(model, make, _ids(1, PROMPT // 4).repeat(1, 4), prompt_lookup_num_tokens=4)


def crop(model: Any, make: Make) -> Tensor:
    """Tokens are taken back by hand, and others come: logits."""
    cache, ids = make(), _ids(1, PROMPT + NEW)
    cache.activate_past_recording()
    _forward(model, cache, ids[:, :PROMPT], ids)
    for i in range(4):
        _forward(model, cache, ids[:, PROMPT + i : PROMPT + i + 1], ids)
    # Transformers' wrapper refuses to crop what is no `DynamicCache`.
    (cache.self_attention_cache if _crosses(model) else cache).crop(-3)
    return _forward(model, cache, ids[:, PROMPT + 1 : PROMPT + 6], ids)


MODES = {f.__name__: f for f in (greedy, sampling, several, padding, beams, turns, chunks, assisted, lookup, crop)}
ENCODER_MODES = ("greedy", "sampling", "several", "padding", "beams", "crop")


# A family.


def _crosses(model: Any) -> bool:
    return bool(model.config.is_encoder_decoder)


def _wrapped(model: Any, cache: Any) -> Any:
    return EncoderDecoderCache(cache, DynamicCache()) if _crosses(model) else cache


def _why(error: BaseException) -> str:
    """An exception in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:220]}"


def _outcome(run: Callable[[], Tensor], expected: Tensor, tolerance: float = 1e-3) -> str:
    try:
        found = run()
    except (ValueError, NotImplementedError) as error:
        return f"refused: {error}" if _is_ours(error) else f"error: {_why(error)}"
    except Exception as error:
        return f"error: {_why(error)}"
    if found.shape != expected.shape:
        return "differs"
    if found.is_floating_point():
        size = expected.abs().max().clamp(min=1e-3)
        return "equal" if bool((found - expected).abs().max() <= tolerance * size) else "differs"
    return "equal" if torch.equal(found, expected) else "differs"


def _is_ours(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "hfkvq" in trace.tb_frame.f_globals.get("__name__", "")


def _mode_cells(model: Any, modes: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    text = model.config.get_text_config(decoder=True)
    for mode in modes:
        run = MODES[mode]
        try:
            expected = run(model, lambda: _wrapped(model, DynamicCache(config=text)))
        except Exception as error:
            found[mode] = f"{NOT_OURS}: {_why(error)}"
            continue
        for label, capacity in (("growing", None), ("fixed", CAPACITY)):

            def make(capacity: int | None = capacity) -> Any:
                return _wrapped(model, MixedKVCache(model, "full", max_cache_len=capacity))

            said = _outcome(lambda run=run, make=make: run(model, make), expected)
            if capacity is not None and said.startswith("error") and said == f"error: {_static_error(model, run)}":
                said = f"{NOT_OURS}: {said.removeprefix('error: ')}"
            found[f"{mode}, {label}"] = said
    return found


def _static_error(model: Any, run: Callable[..., Tensor]) -> str | None:
    """Why a mode fails with Transformers' own cache of fixed capacity, if it does."""
    text = model.config.get_text_config(decoder=True)
    try:
        run(model, lambda: _wrapped(model, StaticCache(config=text, max_cache_len=CAPACITY)))
    except Exception as error:
        return _why(error)
    return None


def _steps(model: Any, cache: Any) -> Tensor:
    """Logits of a prompt and some steps: f32 (2, t, vocabulary)."""
    ids = _ids(2, 80)
    return torch.cat([_forward(model, cache, ids[:, a:b], ids) for a, b in ((0, 60), (60, 61), (61, 62), (62, 63))], 1)


def _preset_cells(model: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    before = model.config._attn_implementation
    try:
        plain = [_steps(model, _wrapped(model, DynamicCache(config=model.config.get_text_config(decoder=True))))]
        model.set_attn_implementation("eager")
        plain.append(_steps(model, _wrapped(model, DynamicCache(config=model.config.get_text_config(decoder=True)))))
        fails = None if torch.allclose(*plain, rtol=1e-2, atol=1e-2) else "its attention implementations differ"
    except Exception as error:
        fails = _why(error)
    finally:
        model.set_attn_implementation(before)
    if fails is not None:
        return dict.fromkeys(PRESETS, f"{NOT_OURS}: {fails}")
    for name in PRESETS:
        try:
            scheme = small(name)
            ours = _steps(model, _wrapped(model, MixedKVCache(model, scheme)))
        except (ValueError, NotImplementedError) as error:
            found[name] = f"refused: {error}" if _is_ours(error) else f"error: {_why(error)}"
            continue
        except Exception as error:
            found[name] = f"error: {_why(error)}"
            continue
        if not ours.isfinite().all():
            found[name] = "differs"
        elif scheme.evicts or scheme.needs:
            # Others are not shown the queries by which these choose, or cannot do without what they evict.
            found[name] = "runs"
        else:
            try:
                model.set_attn_implementation("eager")
                # A code may be rounded otherwise, where sums were taken in another order.
                found[name] = _outcome(
                    lambda scheme=scheme: _steps(model, _wrapped(model, MixedKVCache(model, scheme, attach=False))),
                    ours,
                    3e-2,
                )
            finally:
                model.set_attn_implementation(before)
    return found


@contextlib.contextmanager
def _dense_calls() -> Iterator[list[int]]:
    """Counts the tokens of layers that are dequantized."""
    calls, dense = [], KVLayer.dense

    def counted(layer: KVLayer, side: Any) -> Tensor:
        calls.append(1)
        return dense(layer, side)

    KVLayer.dense = counted  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        KVLayer.dense = dense  # type: ignore[method-assign]


def _described(model: Any) -> dict[str, Any]:
    """Kinds of layers that a cache makes of a model's, and whether a step dequantizes them."""
    latents = latent_dims(model.config.get_text_config(decoder=True)) is not None
    cache = MixedKVCache(model, small("latent-4" if latents else "kitty-pro"))
    others = sorted({type(x).__name__ for i, x in enumerate(cache.layers) if i not in cache._compressed})
    why = None if cache.graphs is not None else cache._why_not_captured
    found = {
        "layers": len(cache.layers),
        "compressed": len(cache.compressed_layers),
        "others": others,
        "attached": cache.attached,
        "captured": cache.graphs is not None,
        "why_not_captured": why,
    }
    wrapped, ids = _wrapped(model, cache), _ids(2, 60)
    _forward(model, wrapped, ids, ids)
    with _dense_calls() as calls:
        _forward(model, wrapped, ids[:, :1], ids)
    used = [layer for layer in cache.compressed_layers if layer.store is not None]
    return found | {"used": len(used), "dequantized": len(calls) > 0}


def examine(name: str, modes: tuple[str, ...] | None = None, presets: bool = True) -> dict[str, Any]:
    """Findings about a family; errors of a family's own code are findings, too.

    Args:
        name: ``model_type``.
        modes: of `generate`; None is all that fit the family.
        presets: whether presets are tried, too.
    """
    row: dict[str, Any] = {"family": name, "kind": families()[name]}
    try:
        model = build(name)
    except Exception as error:
        return row | {"not_built": _why(error)}
    row["class"] = type(model).__name__
    text = model.config.get_text_config(decoder=True)
    try:
        plain = DynamicCache(config=text)
        greedy(model, lambda: _wrapped(model, plain))
        if not any(getattr(layer, "is_initialized", False) for layer in plain.layers):
            return row | {"no_cache": "nothing is cached"}
    except Exception as error:
        return row | {"no_cache": _why(error)}
    try:
        row["what"] = _described(model)
    except (ValueError, NotImplementedError) as error:
        if _is_ours(error):
            return row | {"refused": str(error)}
        row["what"] = {"error": _why(error)}
    except Exception as error:
        row["what"] = {"error": _why(error)}
    row["modes"] = _mode_cells(model, modes or (ENCODER_MODES if _crosses(model) else tuple(MODES)))
    if presets:
        row["presets"] = _preset_cells(model)
    return row


# Families, all of them.


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s of a processor")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def read_rows(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Rows of files by family; those of other versions of Transformers are left out."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        if path.exists():
            held = _read(path)
            if held["transformers"] == transformers.__version__:
                found |= {row["family"]: row for row in held["rows"]}
    return found


def main() -> None:
    """Examines families and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="model types; all if none is given")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--part", help="i/n: the i-th of n parts")
    parser.add_argument("--json", type=Path, nargs="+", help="results; the first is written, the others only read")
    parser.add_argument("--markdown", type=Path, help="table to write")
    parser.add_argument("--others", type=Path, nargs="*", default=[], help="results of other versions, for the table")
    given = parser.parse_args()
    logging.getLogger("hfkvq").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    rows = read_rows(given.json or [])
    chosen = given.families or [name for name, kind in families().items() if given.kind in (None, kind)]
    if given.part:
        part, parts = map(int, given.part.split("/"))
        chosen = chosen[part - 1 :: parts]
    for name in chosen:
        if name in rows and not given.families:
            continue
        try:
            with _limit(LIMIT_S):
                rows[name] = examine(name)
        except TimeoutError as error:
            rows[name] = {"family": name, "kind": families()[name], "not_built": _why(error)}
        cells = rows[name].get("modes", {}) | rows[name].get("presets", {})
        bad = {cell: found for cell, found in cells.items() if found == "differs" or found.startswith("error")}
        print(name, rows[name].get("not_built") or rows[name].get("no_cache") or f"{len(cells)} cells", bad, flush=True)
        if given.json:
            head = json.dumps({"transformers": transformers.__version__, "torch": torch.__version__})[1:-1]
            lines = ",\n".join(json.dumps(rows[name]) for name in sorted(rows))
            given.json[0].write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    if given.markdown:
        others = {held["transformers"]: held["rows"] for held in map(_read, given.others)}
        text = markdown(rows, transformers.__version__, others, set(families()) - set(rows))
        given.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
