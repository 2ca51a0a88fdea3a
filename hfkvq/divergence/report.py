"""A measurement as a table and as JSON."""

from __future__ import annotations

import math
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import torch
from rich import box
from rich.table import Table

import hfkvq

from .intervals import CONFIDENCE, RESAMPLES, Interval, mean_interval
from .measurement import BASELINE
from .values import Bill, Divergence, Measured

KIND = "hfkvq kld"

Record = dict[str, Any]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bill(bill: Bill) -> Record:
    return {
        "code_bits": _finite(bill.code_bits),
        "total_bits": _finite(bill.total_bits),
        "held_bytes": round(bill.held_bytes),
        "bf16_bytes": round(bill.bf16_bytes),
    }


def _row(one: Divergence, measured: Measured, seed: int) -> Record:
    kld, agrees = one.kld.double().mean(1), one.agrees.double().mean(1)
    # Windows score equally many tokens, so a window's mean weighs what any other's does.
    change = (one.nll.double() - measured.baseline.nll.double()).mean(1)
    worse = mean_interval(change.tolist(), seed)
    return {
        "name": one.name,
        "scheme": one.scheme.to_dict(),
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
        **_bill(one.bill),
    }


def as_record(measured: Measured, seed: int, about: Record) -> Record:
    """Everything in the table, and what it takes to repeat it.

    Args:
        measured: the measurement.
        seed: of the bootstrap.
        about: model, dtype, device, text and settings.
    """
    return {
        "kind": KIND,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **about,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "scipy")},
            "hfkvq": hfkvq.__version__,
        },
        "windows": measured.windows,
        "tokens": measured.windows * measured.scored,
        "bootstrap": {"unit": "window", "confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": seed},
        "baseline": {"name": BASELINE, "perplexity": measured.baseline.perplexity, **_bill(measured.baseline.bill)},
        "rows": [_row(one, measured, seed) for one in measured.schemes],
    }


def device_name(device: torch.device) -> str:
    """What the hardware calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


# The table.


def _small(value: float) -> str:
    """Four digits behind the point, for the table's width; what rounds to nothing is said to be less than that."""
    return "<0.0001" if 0 < value < 5e-5 else f"{value:.4f}"


def _range(interval: Interval | None, digits: int, scale: float = 1.0) -> str:
    return "–" if interval is None else f"{scale * interval[0]:.{digits}f}–{scale * interval[1]:.{digits}f}"


def _optional(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def table(record: Record) -> Table:
    """One row per scheme, the baseline first; 95 % intervals under the figures they belong to."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    view.add_column("cache", vertical="top")
    titles = ["code\nbits", "total\nbits", "held\nMiB", "KLD\nmean", "KLD\nmedian", "KLD\n99%", "KLD\n99.9%"]
    for title in [*titles, "top-1\n%", "perplexity\n", "ratio\nto bf16"]:
        view.add_column(title, justify="right", no_wrap=True)
    base = record["baseline"]
    cells = [_optional(base["code_bits"]), _optional(base["total_bits"]), f"{base['held_bytes'] / 2**20:.2f}"]
    view.add_row(base["name"], *cells, *[""] * 5, f"{base['perplexity']:.4f}", "", end_section=True)
    for row in record["rows"]:
        kld, top1, ratio = row["kld"], row["top1"], row["perplexity_ratio"]
        view.add_row(
            # Colons are where a long name may be folded.
            row["name"].replace(":", "\n"),
            _optional(row["code_bits"]),
            _optional(row["total_bits"]),
            f"{row['held_bytes'] / 2**20:.2f}",
            f"{_small(kld['mean'])}\n{_range(kld['interval'], 4)}",
            *(_small(kld[name]) for name in ("median", "p99", "p999")),
            f"{100 * top1['share']:.2f}\n{_range(top1['interval'], 2, 100)}",
            f"{row['perplexity']:.4f}",
            f"{ratio['value']:.4f}\n{_range(ratio['interval'], 4)}",
        )
    return view


def notes(record: Record) -> list[str]:
    """How to read the table, a sentence or two each."""
    settings, text = record["settings"], record["text"]
    count = f"{record['windows']} window{'s' if record['windows'] > 1 else ''}"
    said = [
        f"{record['model']}, {record['dtype']}, on {record['device_type']}: {record['tokens']:,} scored tokens in "
        f"{count} of {settings['context']:,} of {text['source']}, behind prompts of {settings['prefill']:,}; "
        f"{settings['chunk']} tokens fed at a time"
        + (", as generate does." if settings["chunk"] == 1 else ", which see each other unquantized."),
        f"KLD is in nats, of the scheme's predictions from {BASELINE}'s, which is fed the same chunks. The row of "
        "`full`, which holds 16 bits, is what rounding alone does.",
    ]
    if record["windows"] > 1:
        said.append(
            f"Second lines are {100 * CONFIDENCE:.0f} % intervals, bootstrapped over windows; with few windows they "
            "are too narrow."
        )
    else:
        said.append("One window has no confidence intervals; use --windows.")
    said.append("Bits and MiB are those of one window's cache at its end, with every window, scale and table.")
    if record["dtype"] == "float32":
        said.append("A float32 model's windows are float32 too, so total bits are higher than they are in bf16.")
    return said
