"""The demo's record as a table."""

from __future__ import annotations

from rich.table import Table

from ..records import BASELINE
from ..tables import NOTHING, narrow_table, number, small_number
from .run import Record


def _percent(share: float | None) -> str:
    """Rounded, but 100.0 only for everything."""
    return NOTHING if share is None else f"{100 if share == 1 else min(100 * share, 99.9):.1f}"


def table(record: Record, wide: bool = True) -> Table:
    """A line for each cache, the baseline first; ``wide`` takes up to 120 columns, otherwise 100."""
    view = narrow_table(show_edge=False)
    tasks = [task.replace("arithmetic", "arith.").replace("-", "\n") for task in record["rows"][0]["tasks"]]
    titles = ["total\nbits", "code\nbits", "held\nMiB", *(["bf16\nMiB"] if wide else []), "bf16 /\nheld", *tasks]
    titles += ["agree\n%", "KLD\nmean", "KLD\n99.9%", *(["tok/s\nprompt"] if wide else []), "tok/s\ndecode"]
    view.add_column("cache", no_wrap=True, vertical="bottom")
    for title in titles:
        view.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    for row in record["rows"]:
        klds = [NOTHING if row[name] is None else small_number(row[name]) for name in ("kl_mean", "kl_999")]
        compared = [_percent(row["agreement"]), *klds]
        view.add_row(
            row["name"],
            number(row["total_bits"], 2),
            number(row["code_bits"], 2),
            f"{row['held_bytes'] / 2**20:.2f}",
            *([f"{row['bf16_bytes'] / 2**20:.2f}"] if wide else []),
            f"{row['ratio']:.2f}",
            *(f"{task['right']}/{task['total']}" for task in row["tasks"].values()),
            *(compared if row["scheme"] else [""] * 3),
            *([number(row["prompt_tokens_per_second"], 0)] if wide else []),
            number(row["decode_tokens_per_second"], 0),
        )
    return view


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def notes(record: Record) -> list[str]:
    """Legend of the table, a sentence or two each."""
    base, settings = record["rows"][0], record["settings"]
    said = [
        f"{record['model']}, {record['dtype']}, on {record['device_type']}: {_counted(settings['samples'], 'example')} "
        f"per task, greedy, seed {settings['seed']}, {record['seconds']:.0f} s.",
        f"held is the size of the cache after {_counted(record['memory']['rows'], 'answer')} to "
        f"{record['memory']['task']}, with {base['context_tokens']:,} tokens each: codes, scales, windows and tables. "
        f"bf16 is the size of the same tokens without padding, {base['bf16_bytes'] / 2**20:.2f} MiB; {BASELINE} stores "
        "padding too. Windows stay in full precision, so longer contexts take fewer bits: `hfkvq schemes` shows the "
        "limit.",
        f"agree and KLD compare with {BASELINE} from the second token of each answer on; the first one comes from "
        f"the prompt, before any cache is read. KLD is in nats, over {base['kl_positions']:,} positions of "
        f"{BASELINE}'s answers.",
    ]
    if record["device_type"] == "cpu":
        said.append("On the CPU, tokens/s are those of the PyTorch reference. They say nothing about the GPU kernels.")
    if record["dtype"] == "float32":
        said.append("The windows of a float32 model are float32 too, so total bits are higher than in bf16.")
    return said


def next_steps(record: Record) -> list[tuple[str, str]]:
    """Commands to go on with, and the use of each."""
    samples = f"every preset; --samples {8 * record['settings']['samples']} gives more precise figures"
    return [
        ("hfkvq demo --model NAME", "the same with your own model"),
        *([] if record["settings"]["schemes"] else [("hfkvq demo --schemes all", samples)]),
        ("hfkvq schemes", "all presets, with bits, loss and speed"),
        ("hfkvq recommend --model NAME --gpu-memory 24GiB --context 32k", "the preset that fits your GPU"),
    ]
