"""Comparison of page formats for prompts: divergence behind prefixes that are rounded by the library's own formats.

    PYTHONPATH=. python evals/prefixes.py LINES OUT.json --text FILE [--text FILE ...] [--prefix 7232] [--windows 2]

One prefill of a model (`--model`, SmolLM2 unless told otherwise) for all lines; for each line, keys and values of the
prefix are quantized at once, as its scheme's pages hold them, and the scored tokens are one chunk behind it. So a line
takes about a second on a GPU, where `hfkvq kld` takes ten, and a format can be tried that no scheme has yet. A line of
LINES is a preset with its knobs, and after " @ " what differs, in Python: an expression that makes a layout of the
layout ``L`` of layer ``i`` of ``NL``, for heads of ``d``. ``K(L, ...)`` and ``V(L, ...)`` change options of one side or
of its format:

    best-4.3 @ K(L, group_size=64, fit=4) if i < 10 else L
    best-4.3 @ V(L, **WHOLE)

Only presets whose pages are of one width a side. The newest tokens that fill no page stay whole, as in a cache.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import DynamicCache

from evals.capture import capture
from hfkvq.caches import Scheme
from hfkvq.caches.schemes.base import Layout, SideLayout
from hfkvq.caches.schemes.preset import get_preset
from hfkvq.kernels import hadamard
from hfkvq.kernels.dispatch import reference
from hfkvq.kernels.pages import Side
from hfkvq.kernels.quantize import dequantize_pages, quantize_pages
from hfkvq.kernels.seal import channel_widths
from hfkvq.measure.models import find_model, load_model, load_tokenizer
from hfkvq.measure.presets import page_bits

OF_SIDES = {"local", "unit", "rotate", "balance"}
WHOLE = {"bits": 16, "axis": "token", "raised": (), "normed": False, "fit": 0, "group_size": 1}


def altered(side: SideLayout, options: dict[str, Any]) -> SideLayout:
    """A side with other options; those that are no option of sides are its format's."""
    of_format = {name: value for name, value in options.items() if name not in OF_SIDES}
    side = replace(side, formats=(replace(side.formats[0], **of_format),))
    side = replace(side, **{name: value for name, value in options.items() if name in OF_SIDES})
    return replace(side, unit=side.formats[0].page_size) if side.formats[0].whole else side


def keys_of(layout: Layout, **options: Any) -> Layout:
    """A layout with other keys."""
    return replace(layout, keys=altered(layout.keys, options))


def values_of(layout: Layout, **options: Any) -> Layout:
    """A layout with other values."""
    return replace(layout, values=altered(layout.values, options))


def rounded(x: Tensor, layout: Layout, which: Side, scheme: Scheme, queries: tuple[Tensor, Tensor]) -> Tensor:
    """Keys or values (B, H, T, D) as a cache would hold them.

    Args:
        x: of a prompt.
        layout: of the layer.
        which: keys or values.
        scheme: of the layer.
        queries: (B, H, D) each, the means of their magnitudes and of themselves.
    """
    side = layout.keys if which == "keys" else layout.values
    fmt = side.formats[0]
    if fmt.bits == 16:
        return x
    count = (x.shape[2] - layout.sink - side.local) // fmt.page_size * fmt.page_size
    own = hadamard(x[:, :, layout.sink : layout.sink + count].float().contiguous(), side.rotate)
    pages, widths, norm = own.unflatten(2, (-1, fmt.page_size)), None, None

    def flat(each: Tensor) -> Tensor:
        return each.transpose(1, 2).flatten(0, 1).contiguous()

    if fmt.raised:
        seen = queries[0] if "query" in scheme.needs else None
        widths = flat(channel_widths(pages, fmt, scheme.channel_rule or "error", seen))
    if fmt.normed:
        index = torch.arange(count, dtype=torch.int32, device=x.device)[None].expand(len(x), -1)
        norm = flat(reference("page_norms")(own, index, fmt.axis, fmt.page_size, side.balance))
    parts = quantize_pages(flat(pages), fmt, which, widths, norm)
    back = dequantize_pages(parts, fmt, which, x.shape[-1])
    back = back.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2, 3)
    out = x.clone()
    out[:, :, layout.sink : layout.sink + count] = hadamard(back, side.rotate).to(x.dtype)
    return out


class Prefixes:
    """A model's keys and values of some prompts, and its predictions behind them."""

    def __init__(self, model: Any, tokens: Tensor, prefix: int) -> None:
        """Args: the model, windows (B, T), and how many tokens of each are the prompt."""
        self.model, self.tokens, self.prefix = model, tokens, prefix
        self.depth = model.config.num_hidden_layers
        # A row at a time: layers, each (keys, values, mean |q|, mean q).
        rows = [capture(model, row[:prefix].tolist(), range(self.depth)) for row in tokens]
        self.layers = []
        for found in zip(*rows, strict=True):
            queries = torch.stack([each.query.unflatten(0, (each.keys.shape[0], -1)).float() for each in found])
            means = queries.abs().mean((2, 3)), queries.mean((2, 3))
            kept = (torch.stack([getattr(each, name) for each in found]) for name in ("keys", "values"))
            self.layers.append((*kept, means))
        self.expected = self.predictions([layer[:2] for layer in self.layers])

    @torch.no_grad()
    def predictions(self, held: list[Any]) -> Tensor:
        """Log-probabilities behind these keys and values: f32 (B, n, V)."""
        found = []
        for row, tokens in enumerate(self.tokens):
            cache = DynamicCache(config=self.model.config)
            for layer, (keys, values) in enumerate(held):
                cache.update(keys[row : row + 1], values[row : row + 1], layer)
            logits = self.model(tokens[None, self.prefix :], past_key_values=cache).logits
            found.append(logits.float().log_softmax(-1))
        return torch.cat(found)

    def measure(self, line: str) -> dict[str, Any]:
        """Bits at heads of 128, and divergence in nats, of a line."""
        name, _, change = (part.strip() for part in line.partition("@"))
        scheme, held, bits = get_preset(name).scheme, [], []
        for layer, (keys, values, queries) in enumerate(self.layers):
            own = scheme.in_layer(layer, self.depth)
            layouts = {dim: own.layout(dim, dim) for dim in (keys.shape[-1], 128)}
            if change:
                names = {"K": keys_of, "V": values_of, "WHOLE": WHOLE, "i": layer, "NL": self.depth}
                layouts = {dim: eval(change, names | {"L": each, "d": dim}) for dim, each in layouts.items()}
            here, wide = layouts[keys.shape[-1]], layouts[128]
            pair = zip((keys, values), ("keys", "values"), strict=True)
            held.append([rounded(x, here, which, own, queries) for x, which in pair])
            sides = (wide.keys, "keys"), (wide.values, "values")
            bits += [page_bits(side.formats[0], which, 128) for side, which in sides]
        found = self.predictions(held)
        kld = (self.expected.exp() * (self.expected - found)).sum(-1)
        labels = self.tokens[:, self.prefix + 1 :, None]
        loss = (self.expected - found)[:, :-1].gather(-1, labels).mean()
        return {
            "name": line,
            "long_context_bits": sum(bits) / len(bits),
            "kld": kld.mean().item(),
            "windows": kld.mean(1).tolist(),
            "top1": (self.expected.argmax(-1) == found.argmax(-1)).float().mean().item(),
            "perplexity_ratio": loss.exp().item(),
        }


def main(
    lines: Path,
    out: Path,
    text: Annotated[list[Path], typer.Option(help="UTF-8 text; each gives as many windows.")],
    model: str = "smollm2",
    prefix: int = 7232,
    scored: int = 512,
    windows: int = 2,
) -> None:
    """Measures every line, and saves what was found after each."""
    source = find_model(model)
    tokenizer, device = load_tokenizer(source), "cuda" if torch.cuda.is_available() else "cpu"
    size, rows = prefix + scored, []
    for path in text:
        ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
        rows += list(ids[: min(windows, len(ids) // size) * size].view(-1, size))
    measured = Prefixes(load_model(source, device), torch.stack(rows).to(device), prefix)
    found = []
    for line in lines.read_text(encoding="utf-8").splitlines():
        found.append(measured.measure(line))
        typer.echo(json.dumps(found[-1]))
        record = {"model": source.name, "prefix": prefix, "scored": scored, "windows": len(rows), "rows": found}
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    app()
