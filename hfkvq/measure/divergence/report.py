"""A measurement as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..records import BASELINE, commit, finite, now, versions
from ..tables import NOTHING, narrow_table, number, small_number
from .intervals import CONFIDENCE, RESAMPLES, Interval, mean_interval
from .measurement import Bill, Divergence, Measured
from .naming import OtherCache

KIND = "hfkvq kld"

Record = dict[str, Any]


def _bill(bill: Bill) -> Record:
    return {
        "code_bits": finite(bill.code_bits),
        "total_bits": finite(bill.total_bits),
        "held_bytes": None if math.isnan(bill.held_bytes) else round(bill.held_bytes),
        "bf16_bytes": round(bill.bf16_bytes),
        "key_bits": finite(bill.key_bits),
    }


def _row(one: Divergence, measured: Measured, seed: int, names: Sequence[str]) -> Record:
    kld, agrees = one.kld.double().mean(1), one.agrees.double().mean(1)
    # Windows score equally many tokens, so a window's mean weighs what any other's does.
    change = (one.nll.double() - measured.baseline.nll.double()).mean(1)
    worse = mean_interval(change.tolist(), seed)
    return {
        "name": one.name,
        "scheme": one.preset.to_dict(),
        "simulated": isinstance(one.preset, OtherCache) and one.preset.simulated,
        "about": (one.preset.about or None) if isinstance(one.preset, OtherCache) else None,
        "kld": {
            "mean": one.mean,
            "interval": mean_interval(kld.tolist(), seed),
            "median": one.quantile(0.5),
            "p99": one.quantile(0.99),
            "p999": one.quantile(0.999),
            "max": float(one.kld.max()),
        },
        "top1": {"share": one.top1, "interval": mean_interval(agrees.tolist(), seed)},
        "perplexity": one.perplexity,
        "perplexity_ratio": {
            "value": math.exp(float(change.mean())),
            "interval": worse and tuple(math.exp(end) for end in worse),
        },
        "texts": {
            name: {
                "kld": _mean(kld, of := [each == name for each in names]),
                "top1": _mean(agrees, of),
                "perplexity_ratio": math.exp(_mean(change, of)),
            }
            for name in dict.fromkeys(names)
        },
        **_bill(one.bill),
    }


def _mean(values: Tensor, chosen: Sequence[bool]) -> float:
    return float(values[torch.tensor(chosen, dtype=torch.bool, device="cpu")].mean())


def as_record(measured: Measured, seed: int, about: Record, names: Sequence[str]) -> Record:
    """Everything in the table, and what it takes to repeat it.

    Args:
        seed: of the bootstrap.
        about: model, dtype, device, text and settings.
        names: of the texts, one a window.
    """
    return {
        "kind": KIND,
        "date": now(),
        **about,
        "versions": versions("torch", "transformers", "scipy"),
        "commit": commit(),
        "windows": measured.windows,
        "tokens": measured.windows * measured.scored,
        "bootstrap": {"unit": "window", "confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": seed},
        "baseline": {"name": BASELINE, "perplexity": measured.baseline.perplexity, **_bill(measured.baseline.bill)},
        "rows": [_row(one, measured, seed, names) for one in measured.schemes],
    }


# The table.


def _range(interval: Interval | None, show: Callable[[float], str]) -> str:
    return NOTHING if interval is None else f"{show(interval[0])}–{show(interval[1])}"


def table(record: Record, wide: bool = True) -> Table:
    """One row per scheme, the baseline first; 95 % intervals under the figures they belong to.

    ``wide`` takes up to 120 columns, otherwise 100.
    """
    view = narrow_table(show_edge=wide)
    view.add_column("cache", vertical="top", overflow="fold")
    titles = ["code\nbits", "total\nbits", *(["held\nMiB"] if wide else []), "KLD\nmean", "KLD\nmedian", "KLD\n99%"]
    for title in [*titles, "KLD\n99.9%", "top-1\n%", "perp-\nlexity", "ratio\nto bf16"]:
        view.add_column(title, justify="right", no_wrap=True)

    def memory(row: Record) -> list[str]:
        simulated = row.get("simulated", False)
        held = [NOTHING if simulated else f"{row['held_bytes'] / 2**20:.2f}"] if wide else []
        total = number(row["total_bits"], 2)
        return [number(row["code_bits"], 2), f"{total}\ncomputed" if simulated else total, *held]

    base = record["baseline"]
    view.add_row(base["name"], *memory(base), *[""] * 5, f"{base['perplexity']:.3f}", "", end_section=True)
    for row in record["rows"]:
        kld, top1, ratio = row["kld"], row["top1"], row["perplexity_ratio"]
        view.add_row(
            # Where a long name may be folded.
            row["name"].replace(":", "\n"),
            *memory(row),
            f"{small_number(kld['mean'])}\n{_range(kld['interval'], small_number)}",
            *(small_number(kld[name]) for name in ("median", "p99", "p999")),
            f"{100 * top1['share']:.2f}\n{_range(top1['interval'], lambda share: f'{100 * share:.1f}')}",
            f"{row['perplexity']:.3f}",
            f"{ratio['value']:.4f}\n{_range(ratio['interval'], lambda value: f'{value:.3f}')}",
        )
    return view


def notes(record: Record) -> list[str]:
    """Legend of the table, a sentence or two each."""
    settings, text = record["settings"], record["text"]
    has_floor = any(row["name"] == "full" for row in record["rows"])
    count = f"{record['windows']} window{'s' if record['windows'] > 1 else ''}"
    said = [
        f"{record['model']}, {record['dtype']}, on {record['device_type']}: {record['tokens']:,} scored tokens in "
        f"{count} of {settings['context']:,} of {text['source']}, after prompts of {settings['prefill']:,}; "
        f"{settings['chunk']} tokens fed at a time"
        + (", as generate does." if settings["chunk"] == 1 else ", which attend to each other unquantized."),
        f"KLD is the divergence, in nats, from {BASELINE}'s predictions on the same chunks."
        + (" `full` holds 16 bits, so its row shows what rounding alone does." if has_floor else ""),
    ]
    if record["windows"] > 1:
        said.append(
            f"The second line of a row has {100 * CONFIDENCE:.0f} % intervals, bootstrapped over windows; with few "
            "windows they are too narrow."
        )
    else:
        said.append("One window has no confidence intervals; use --windows.")
    said.append("Bits and MiB are those of one window's cache at its end, with every window, scale and table.")
    if any(row.get("simulated") for row in record["rows"]):
        said.append(
            "Simulated rows are not usable caches: they hold everything in full precision and round it as a method "
            "would. Their bits are computed from the method's format, not from bytes held."
        )
    said += dict.fromkeys(row["about"] for row in record["rows"] if row.get("about"))
    if record["dtype"] == "float32":
        said.append("A float32 model's windows are float32 too, so total bits are higher than they are in bf16.")
    return said
