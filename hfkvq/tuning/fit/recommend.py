"""Choice of a preset: rows of caches with their bytes and losses, and the rule that chooses among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from hfkvq.caches.layers.memory import format_bytes
from hfkvq.caches.schemes.base import entry_of, get_scheme, presets
from hfkvq.caches.schemes.preset import Preset, get_preset
from hfkvq.measure.doctor import UNSAFE, judge, python_line
from hfkvq.measure.presets import bits_words, figure, figures, long_context_bits, steps_note, widest_first
from hfkvq.measure.tables import NOTHING, new_table, number, small_number

from .compute import Computed
from .model import Plan

Record = dict[str, Any]

KLD = 2.0
"""Largest divergence beside a growth of perplexity: 0.02 nats for 1 %, somewhat more than was measured together.
Perplexity of text that a model does not know may fall, though its predictions have changed."""


def candidates() -> list[str]:
    """Default candidates that are measured, or that `hfkvq fit` shows; each scheme once, the widest first."""
    found: dict[Any, str] = {}
    for name in presets():
        entry = entry_of(name)[1]
        shown = "fit" in entry.lists or figure("loss", name) is not None
        scheme = get_scheme(name)
        # Presets that keep every token, and read no tags.
        if shown and entry.group == "scheme" and not scheme.evicts and "tags" not in scheme.needs:
            # The first of a model's names are the short ones.
            found.setdefault(scheme, name)
    return widest_first(found.values())


@dataclass(frozen=True)
class Loss:
    """Loss of a cache's predictions.

    Attributes:
        perplexity: beside `DynamicCache`'s, as a ratio.
        interval: of it, 95 %; None where one window tells none, and of the figures that the package brings along.
        kld: mean divergence from `DynamicCache`, nats.
        verdict: safe, lossy or unsafe (`hfkvq.measure.doctor`), by divergence on the model itself; None of the figures
            that the package brings along.
        against: reasons against it.
    """

    perplexity: float
    interval: tuple[float, float] | None
    kld: float
    kld_interval: tuple[float, float] | None
    verdict: str | None = None
    against: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A cache to choose among.

    Attributes:
        plan: its bytes, largest batch and context.
        preset: None for Transformers' own cache.
        bits: least and most of a token that is kept, in a long context.
        loss: None if it was not measured.
        step_ms: of a step on an H200, see `hfkvq.measure.presets`; None if it was not measured.
    """

    plan: Plan
    preset: Preset | None
    bits: tuple[float, float]
    loss: Loss | None
    step_ms: float | None


@dataclass(frozen=True)
class Choice:
    """Recommended cache."""

    row: Row
    reason: str


def measured_losses(record: Record) -> dict[str, Loss]:
    """Losses in a record of `hfkvq kld`, by name."""
    found = {}
    for row in record["rows"]:
        ratio, kld = row["perplexity_ratio"], row["kld"]
        evicts = any(scheme.evicts for scheme in get_preset(row["name"]).schemes)
        verdict, against = judge(kld["mean"], kld["p999"], row["top1"]["share"], {}, evicts)
        found[row["name"]] = Loss(
            ratio["value"], ratio["interval"], kld["mean"], kld["interval"], verdict, tuple(against)
        )
    return found


def make_rows(done: Computed, measured: dict[str, Loss] | None = None) -> list[Row]:
    """A row for each cache that was computed.

    Args:
        measured: losses of this model, by name; None takes those of SmolLM2, of which latents tell nothing.
    """
    rows = []
    for plan in done.plans:
        preset = done.presets[plan.name]
        bits = (16.0, 16.0) if preset is None else tuple(long_context_bits(preset.scheme))
        if preset is None:
            loss: Loss | None = Loss(1.0, None, 0.0, None)
        elif measured is not None:
            loss = measured.get(plan.name)
        elif (known := figure("loss", plan.name)) is None or done.latents:
            loss = None
        else:
            loss = Loss(known["perplexity_ratio"], None, known["kld"], tuple(known["kld_interval"]))
        found = None if done.latents else figure("steps", plan.name)
        rows.append(Row(plan, preset, bits, loss, found and found["ms"]))  # type: ignore[arg-type]
    return rows


def is_unsafe(row: Row) -> bool:
    """True if the cache was measured on the model and is unsafe."""
    return row.loss is not None and row.loss.verdict == UNSAFE


def choose(rows: Sequence[Row], users: int | None, most_loss: float) -> Choice | None:
    """Chooses one of the caches that fit; None if none does, or all that do are unsafe on the model.

    Args:
        users: rows that must fit at the context asked for. Then the one that loses least; without it, the one that
            holds most of those that lose little enough.
        most_loss: perplexity may grow by this share.
    """
    fitting = [row for row in rows if row.preset is not None and row.plan.batch >= (users or 1) and not is_unsafe(row)]
    if not fitting:
        return None
    known = [(row, row.loss) for row in fitting if row.loss is not None]
    if not known:
        best = max(fitting, key=lambda row: sum(row.bits))
        return Choice(
            best, f"{'it has the most bits of those that fit' if fitting[1:] else 'it fits'}; losses are not measured"
        )
    if users is not None:
        best, _ = min(known, key=lambda pair: pair[1].kld)
        return Choice(best, f"it has the least loss of those that hold {users} user{'s' * (users > 1)}")
    good = [(row, loss) for row, loss in known if loss.perplexity - 1 <= most_loss and loss.kld <= KLD * most_loss]
    limit = f"{100 * most_loss:g} %"
    if not good:
        best, _ = min(known, key=lambda pair: pair[1].kld)
        return Choice(best, f"it has the least loss of those that fit; none stays within {limit} (--max-loss)")
    best, loss = min(good, key=lambda pair: (pair[0].plan.cache, pair[1].kld))
    words = f"it is the smallest of those that lose at most {limit}"
    if loss.interval is not None and loss.interval[1] - 1 > most_loss:
        words += (
            f"; its interval reaches to {100 * (loss.interval[1] - 1):+.1f} %, so these windows are too few to be "
            "sure: give more with --windows"
        )
    return Choice(best, words)


def command_line(model: str | None, row: Row, done: Computed) -> str:
    """Command to copy: a server, or a demo if the server does not take the model, the scheme or this Transformers."""
    own = "" if model is None else f" --model {model}"
    look = f"hfkvq demo{own} --schemes {row.plan.name}"
    if model is None or row.preset is None or row.preset.layers:
        return look
    try:
        # Serving needs Transformers 5.19, else this raises ImportError.
        from hfkvq.serving.engine import check

        check(done.found.config, row.preset.scheme)
    except (ImportError, ValueError):
        return look
    return f"hfkvq serve{own} --scheme {row.plan.name}"


def _loss_words(row: Row) -> tuple[str, str]:
    if row.loss is None:
        return NOTHING, NOTHING
    if row.preset is None:
        return "", ""
    perplexity, kld = f"{100 * (row.loss.perplexity - 1):+.2f} %", small_number(row.loss.kld)
    if row.loss.interval is not None:
        low, high = (100 * (end - 1) for end in row.loss.interval)
        perplexity += f" ({low:+.2f} to {high:+.2f})"
    if row.loss.kld_interval is not None:
        low, high = row.loss.kld_interval
        kld += f" ({small_number(low)} to {small_number(high)})"
    return perplexity, kld


def table(done: Computed, rows: list[Row], users: int | None, choice: Choice | None, wide: bool) -> Table:
    """A line for each cache; ``wide`` takes up to 120 columns, otherwise 100."""
    about = done.about
    title = (
        f"{escape(about['model'])} on {format_bytes(about['gpu_memory'])}: weights {format_bytes(done.weights.total)}, "
        f"{format_bytes(about['overhead'])} of overhead"
    )
    view = new_table(title)
    view.add_column("cache", no_wrap=True)
    for name in ("bits", "per user", "users", "longest", "perplexity", *(["KLD"] if wide else []), "ms"):
        view.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        fits = row.plan.batch >= (users or 1)
        end = about["positions"]
        longest = f"{row.plan.context:,}" + ("*" if end and row.plan.context == end else "")
        view.add_row(
            row.plan.name,
            bits_words(list(row.bits)),
            format_bytes(row.plan.cache / about["batch"]),
            f"{row.plan.batch:,}" if row.plan.batch else "none",
            longest if row.plan.context else "none",
            *_loss_words(row)[: 1 + wide],
            number(row.step_ms, 1),
            style="bold" if choice is not None and row is choice.row else "" if fits else "dim",
        )
    return view


def notes(done: Computed, record: Record | None) -> list[str]:
    """Legend of the table, a sentence or two each."""
    about, loss = done.about, figures()["loss"]
    said = [
        f"per user: cache of {about['context']:,} tokens. users: how many such caches fit. longest: most tokens of one "
        "user; * is the model's own limit. `hfkvq fit` explains how this is computed.",
    ]
    if record is not None:
        settings = record["settings"]
        said.append(
            f"Perplexity and KLD are measured on the model itself, against DynamicCache: {record['text']['source']}, "
            + ("1 window" if record["windows"] == 1 else f"{record['windows']} windows")
            + f" of {settings['context']:,} tokens"
            + (", with 95 % intervals" if record["windows"] > 1 else "")
            + ". Few or short windows say little about long contexts; `hfkvq kld` measures more."
        )
    elif done.latents:
        said.append("The loss on latents has not been measured; --text measures it on the model itself.")
    else:
        said.append(
            f"Perplexity and KLD (with 95 % interval) were measured on {loss['model']} at {loss['context']:,} tokens. "
            "Large models have not been measured; --text measures the loss on the model itself."
        )
    if not done.latents:
        said.append(steps_note())
    return said


def nothing_fits(rows: list[Row], users: int | None) -> str:
    """Error where no cache fits: the memory it lacks, and what would help."""
    best = max(rows, key=lambda row: (row.plan.batch, row.plan.left))
    many = f"the most users at this context are {best.plan.batch:,} ({best.plan.name})"
    long = max(rows, key=lambda row: row.plan.context)
    one = f"the longest context of one user is {long.plan.context:,} tokens ({long.plan.name})"
    return (
        f"gpu-memory: nothing holds {users or 1} of this context, {best.plan.name} lacks "
        f"{format_bytes(-best.plan.left)}; {many if best.plan.batch else one}. Give more memory, or a scheme "
        "that evicts: --schemes snapkv+kitty-pro,arkv."
    )


def answer(model: str | None, done: Computed, rows: list[Row], choice: Choice) -> list[str]:
    """Lines about the recommended cache, the last two to copy."""
    plan, context = choice.row.plan, done.about["context"]
    stock = next((row.plan.batch for row in rows if row.preset is None), None)
    beside = "" if stock is None else f"; bf16 holds {f'{stock:,}' if stock else 'none'}"
    users = f"{plan.batch:,} user{'s' * (plan.batch != 1)} of {context:,} tokens{beside}"
    verdict = []
    if (loss := choice.row.loss) is not None and loss.verdict is not None:
        look = f"hfkvq doctor{'' if model is None else f' --model {model}'} --presets {plan.name}"
        verdict = [f"Verdict: {'; '.join([loss.verdict, *loss.against])} (by divergence; `{look}` also asks it)."]
    return [
        f"{plan.name}: {choice.reason}. It holds {users}.",
        *verdict,
        f"Python:  cache = {python_line(plan.name)}",
        f"Command: {command_line(model, choice.row, done)}",
    ]


def as_json(
    model: str | None, done: Computed, rows: list[Row], choice: Choice | None, record: Record | None
) -> dict[str, Any]:
    """The answer as JSON has it."""
    caches = [
        {
            **asdict(row.plan),
            "users": row.plan.batch,
            "bits": list(row.bits),
            "loss": None if row.loss is None else asdict(row.loss),
            "step_ms": row.step_ms,
        }
        for row in rows
    ]
    found = None
    if choice is not None:
        found = {
            "cache": choice.row.plan.name,
            "reason": choice.reason,
            "python": f"cache = {python_line(choice.row.plan.name)}",
            "command": command_line(model, choice.row, done),
        }
    return {**done.about, "caches": caches, "measured": record, "recommended": found}
