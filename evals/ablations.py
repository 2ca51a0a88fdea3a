"""Claims of the papers on their own parts, tried on the reference model: JSON and a picture.

    PYTHONPATH=. python evals/ablations.py [measure | table] [--samples 12] [--parts mixkvq,arkv,triaxial]

"measure" takes about eight minutes on a CPU core; it writes results/ablations.json and its picture.
"table" prints the tables of README.md, which `evals/docs.py --write` puts there.
"""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from torch import Tensor, nn

import hfkvq
from evals.charts import BLUE, KLD, ORANGE, new_figure
from evals.reference.outliers import with_outliers
from evals.triaxial.allocation import Sensitivity, allocate, make_table
from evals.triaxial.calibration import calibrate
from evals.triaxial.conversations import Conversation
from hfkvq.caches import Scheme, get_scheme
from hfkvq.caches.tags import PAD, TAGS
from hfkvq.measure.demo.answers import answer, make_cache, predictions, texts
from hfkvq.measure.demo.prompts import Subject, is_right, make_batches
from hfkvq.measure.divergence.intervals import CONFIDENCE, RESAMPLES, mean_interval
from hfkvq.measure.divergence.measurement import compare_logits, measure, read_memory
from hfkvq.measure.reference import load_reference, recall, tools

RESULTS = Path(__file__).parent / "results"

PARTS = ("mixkvq", "arkv", "triaxial")

ENTRIES, PROMPT, CONTEXT, CHUNK = 76, 1120, 1536, 32
"""MixKVQ: a list of records is the prompt of a window, questions about it and their answers are the rest."""

FACTOR = 8.0
"""Factor of outlier channels of keys; a power of two, so that nothing is rounded."""

ROOMS = (16, 32, 64)
"""Channels of 128 that MixKVQ may raise to 4 bits."""

EQUAL = {16: "kivi-2, g = 64", 32: "kivi-2, g = 32", 64: "kivi-2, g = 32"}
"""KIVI by room: the one that takes as many bits or more."""

BUDGETS = (128, 256)
"""ARKV: KiB of a KV head."""

BUDGET = 2.7
"""TriAxialKV: mean code bits a token, the paper's."""

VALUE_FACTOR, EVERY = 16.0, 8
"""Factor of outlier channels of values, and their distance: four in every group that shares a scale."""

Row = dict[str, Any]
AXES = {"semantic": 2, "temporal": 0}
"""Axes of tags, each left out once; there are no images here."""

ModelT = TypeVar("ModelT", bound=nn.Module)

app = typer.Typer(add_completion=False)


# Models that compute what the reference model does.


def with_unseen_outliers(model: ModelT, factor: float, pairs: int) -> ModelT:
    """A copy with outlier key channels where queries see least, which computes the same.

    As `with_outliers`, but for which pairs: those whose norm weights, of query times key, are
    smallest, so that no logit owes them much. Large error and small query is what MixKVQ is made for.

    Args:
        model: a Qwen3 model.
        factor: growth of the channels of keys.
        pairs: rotary pairs of each layer, two channels each.
    """
    changed = copy.deepcopy(model)
    weights = dict(changed.named_parameters())
    with torch.no_grad():
        for name in [name for name in weights if name.endswith("k_norm.weight")]:
            key, query = weights[name], weights[name.replace("k_norm", "q_norm")]
            half = len(key) // 2
            least = (key * query).float().abs().view(2, half).sum(0).argsort(stable=True)[:pairs]
            channels = torch.cat([least, least + half])
            key[channels] *= factor
            query[channels] /= factor
    return changed


def with_value_outliers(model: ModelT, factor: float, every: int) -> ModelT:
    """A copy that computes the same, and of whose value channels one in ``every`` is ``factor`` times as large.

    Rows of `v_proj` are multiplied, and the columns of `o_proj` that read them divided. The reference model's values
    survive 2 bits; these share a scale with a channel that takes nearly all of it.
    """
    changed: Any = copy.deepcopy(model)
    with torch.no_grad():
        for layer in changed.model.layers:
            attention = layer.self_attn
            value, output = attention.v_proj.weight, attention.o_proj.weight
            # Rows are (KV head, channel), columns (query head, channel), and both head counts are whole.
            value[::every] *= factor
            output[:, ::every] /= factor
    return changed


# Questions.


def recall_windows(tokenizer: Any, count: int, entries: int = ENTRIES, context: int = CONTEXT) -> Tensor:
    """Windows i64 (count, context): a list of records, and questions about it with the right answers."""
    rows = []
    for seed in range(count):
        text = recall(entries, seed=seed, split="eval", questions=min(entries, 32)).text
        rows.append(tokenizer(text, add_special_tokens=False).input_ids[:context])
    return torch.tensor(rows)


def mixkvq_schemes(room: int) -> dict[str, Scheme]:
    """MixKVQ with room for so many channels of 128 in 4 bits and none in 16, by its product and by the error alone."""
    knobs = {"group_size": 128, "most_bf16": 0.0, "most_int4": room / 128}
    return {
        f"mixkvq, {room}": get_scheme("mixkvq", **knobs),
        f"error only, {room}": get_scheme("mixkvq", salience="error_only", **knobs),
    }


def kivi_schemes() -> dict[str, Scheme]:
    """KIVI in 2 bits with MixKVQ's sink."""
    return {f"kivi-2, g = {g}": get_scheme("kivi-2", group_size=g, sink_length=32) for g in (32, 64, 128)}


def arkv_schemes(kib: int) -> dict[str, Scheme]:
    """ARKV's tiers within a budget of bytes."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "arkv-origin": ("arkv-origin", {}),
        "arkv": ("arkv", {}),
        "arkv-quant": ("arkv-quant", {}),
        "arkv-quant, INT4": ("arkv-quant", {"low_bits": 4}),
    }
    return {
        f"{name}, {kib} KiB": get_scheme(preset, budget_bytes=kib * 1024, **knobs)
        for name, (preset, knobs) in kinds.items()
    }


def without_axis(found: Sensitivity, budget: float, at: int) -> dict[str, int]:
    """Bits by tag under a budget, one width for tags that differ on one axis alone (the paper's Table 4).

    Their distortions are added up, as eq. (2) adds those of tags.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for tag in found.counts:
        axes = tag.split("|")
        groups.setdefault((*axes[:at], *axes[at + 1 :]), []).append(tag)
    named = {"|".join(rest): tags for rest, tags in groups.items()}
    distortion = {
        name: (sum(found.distortion[tag][0] for tag in tags), sum(found.distortion[tag][1] for tag in tags))
        for name, tags in named.items()
    }
    bits = allocate(distortion, {name: sum(found.counts[tag] for tag in tags) for name, tags in named.items()}, budget)
    return {tag: width for name, width in bits.items() for tag in named[name]}


def triaxial_schemes(found: Sensitivity, unshared: Sensitivity) -> dict[str, Scheme]:
    """TriAxialKV's tables: uniform, calibrated, and calibrated without an axis.

    Args:
        found: instructions counted once for all requests, as the paper does.
        unshared: counted in each request.
    """
    uniform = {f"uniform {bits} bits": {tag: bits for tag in TAGS if tag != TAGS[PAD]} for bits in (2, 4)}
    tables: dict[str, Mapping[str, int]] = {
        **uniform,
        "calibrated": make_table(found, BUDGET).bits,
        **{f"no {axis} axis": without_axis(found, BUDGET, at) for axis, at in AXES.items()},
        "calibrated, unshared": make_table(unshared, BUDGET).bits,
    }
    # The paper's pages: conversations of a few hundred tokens have too few of a kind for 128.
    return {name: get_scheme("triaxial", table=table, page_size=32) for name, table in tables.items()}


def conversations(count: int) -> list[Conversation]:
    """Tool conversations of the training split, answers included."""
    examples = [tools(seed=seed) for seed in range(count)]
    return [
        Conversation((*x.messages, {"role": "assistant", "content": x.answer}), tuple(x.tools) or None)
        for x in examples
    ]


# Measuring.


def _short(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _bill(code: float, total: float, held: float) -> Row:
    return {"code_bits": round(code, 3), "total_bits": round(total, 3), "held_bytes": round(held)}


def measure_windows(model: Any, title: str, tokens: Tensor, schemes: Mapping[str, Scheme], prefill: int) -> list[Row]:
    """A row for each scheme, with each window's mean KLD to `DynamicCache`."""
    found = measure(model, tokens, schemes, prefill=prefill, chunk=CHUNK, batch_size=6)
    return [
        {
            "name": x.name,
            "model": title,
            "scheme": x.preset.to_dict(),
            **_bill(x.bill.code_bits, x.bill.total_bits, x.bill.held_bytes),
            "kld": _short(x.kld.double().mean(1).tolist()),
        }
        for x in found.schemes
    ]


def measure_answers(
    model: Any, title: str, tokenizer: Any, task: str, samples: int, schemes: Mapping[str, Scheme]
) -> list[Row]:
    """A row for each scheme: each example's mean KLD over the baseline's answer, and which answers are right."""
    subject = Subject(title, model, tokenizer, True)
    (batch,) = make_batches(subject, task, samples, samples, 0, None)
    baseline = answer(subject, batch, make_cache(subject, None), samples)
    expected = predictions(subject, batch, baseline, baseline)
    lengths = [length - 1 for length in baseline.lengths]
    rows = []
    for name, scheme in ({"DynamicCache": None} | dict(schemes)).items():
        mine = baseline if scheme is None else answer(subject, batch, make_cache(subject, scheme), samples)
        written = texts(subject, mine)
        right = [is_right(subject, x, text) for x, text in zip(batch.examples, written, strict=True)]
        memory = read_memory(mine.cache, batch.mask)
        logits = expected if mine is baseline else predictions(subject, batch, mine, baseline)
        parts = compare_logits(expected, logits, expected.argmax(-1))[0].split(lengths)
        rows.append(
            {
                "name": name,
                "model": title,
                "scheme": None if scheme is None else scheme.to_dict(),
                **_bill(memory.code_bits, memory.total_bits, memory.held_bytes),
                "kld": _short(float(part.mean()) for part in parts),
                "right": right,
            }
        )
    return rows


def difference(first: Row, second: Row) -> Row:
    """Paired: the first row's KLD less the second's, window by window, with the bootstrap interval of its mean."""
    values = [a - b for a, b in zip(first["kld"], second["kld"], strict=True)]
    named = {key: [row[key] for row in (first, second)] for key in ("name", "model")}
    return {**named, "mean": _mean(values), "interval": mean_interval(values)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _row(rows: list[Row], name: str, model: str) -> Row:
    return next(row for row in rows if (row["name"], row["model"]) == (name, model))


def measure_mixkvq(model: Any, tokenizer: Any, samples: int) -> Row:
    """MixKVQ, its ranking by error alone, and KIVI: plain and with outlier channels of keys."""
    tokens = recall_windows(tokenizer, samples)
    pairs = [mixkvq_schemes(room) for room in ROOMS]
    everything = {name: scheme for pair in pairs for name, scheme in pair.items()}
    rows = measure_windows(model, "plain", tokens, everything | kivi_schemes(), PROMPT)
    # Scales and minima of a channel grow with it, queries shrink: only the ranking by error sees these outliers. A test
    # compares the rest bit by bit.
    errors = {name: scheme for name, scheme in everything.items() if name.startswith("error only")}
    hard = {
        "outliers, lowest frequencies": with_outliers(model, FACTOR, 16),
        "outliers, least seen": with_unseen_outliers(model, FACTOR, 32),
    }
    for title, other in hard.items():
        rows += measure_windows(other, title, tokens, errors, PROMPT)
    differences = []
    for room in ROOMS:
        mine = _row(rows, f"mixkvq, {room}", "plain")
        others = [_row(rows, f"error only, {room}", title) for title in ("plain", *hard)]
        others.append(_row(rows, EQUAL[room], "plain"))
        differences += [difference(mine, other) for other in others]
    about = {"context": CONTEXT, "prefill": PROMPT, "chunk": CHUNK, "entries": ENTRIES, "factor": FACTOR}
    return {"settings": about | {"pairs": [16, 32]}, "rows": rows, "differences": differences}


def measure_arkv(model: Any, tokenizer: Any, samples: int) -> Row:
    """ARKV's tiers at equal bytes."""
    schemes = {name: scheme for kib in BUDGETS for name, scheme in arkv_schemes(kib).items()}
    task = "recall-60"
    rows = measure_answers(model, "plain", tokenizer, task, samples, schemes)
    differences = [
        difference(_row(rows, f"{kind}, {kib} KiB", "plain"), _row(rows, f"arkv-origin, {kib} KiB", "plain"))
        for kib in BUDGETS
        for kind in ("arkv", "arkv-quant", "arkv-quant, INT4")
    ]
    return {"settings": {"task": task, "kib": list(BUDGETS)}, "rows": rows, "differences": differences}


def measure_triaxial(model: Any, tokenizer: Any, samples: int) -> Row:
    """TriAxialKV's tables on tool calls, plain and where values have outlier channels."""
    rows, differences, tokens = [], [], {}
    requests = 8
    models = {"plain": model, "value outliers": with_value_outliers(model, VALUE_FACTOR, EVERY)}
    for title, one in models.items():
        found = calibrate(one, tokenizer, conversations(requests), layers=4)
        # The same distortions; only how instructions are counted differs.
        unshared = calibrate(one, tokenizer, conversations(requests), layers=4, shared_inst=False)
        rows += measure_answers(one, title, tokenizer, "tools", samples, triaxial_schemes(found, unshared))
        tokens[title] = unshared.counts
        pairs = [("calibrated", f"uniform {width} bits") for width in (2, 4)]
        pairs += [(f"no {axis} axis", "calibrated") for axis in AXES]
        pairs.append(("no semantic axis", "no temporal axis"))
        differences += [difference(_row(rows, a, title), _row(rows, b, title)) for a, b in pairs]
    about = {"task": "tools", "budget": BUDGET, "calibrated_on": requests, "layers": 4}
    about |= {"factor": VALUE_FACTOR, "every": EVERY, "tokens": tokens["plain"]}
    return {"settings": about, "rows": rows, "differences": differences}


def measure_parts(parts: Iterable[str], samples: int) -> Row:
    """Parts of the ablations, in bf16 on the CPU, and what they were measured with."""
    model, tokenizer = load_reference()
    made = {"mixkvq": measure_mixkvq, "arkv": measure_arkv, "triaxial": measure_triaxial}
    measured = {part: made[part](model, tokenizer, samples) for part in parts}
    return {
        "kind": "hfkvq ablations",
        "model": "reference model",
        "dtype": "bfloat16",
        "device": "cpu",
        "samples": samples,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "scipy")},
            "hfkvq": hfkvq.__version__,
        },
        "bootstrap": {"unit": "window", "confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": 0},
        **measured,
    }


# Showing.


def _number(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-4 else "<1e-4"


def _signed(value: float) -> str:
    return f"{value:+.2g}"


def _lines(part: Row) -> Iterator[str]:
    answers = "right" in part["rows"][0]
    yield f"| cache | model | code bits | total bits | KLD |{' right |' if answers else ''}"
    yield "|" + "---|" * (6 if answers else 5)
    for row in part["rows"]:
        cells = [row["name"], row["model"], f"{row['code_bits']:.2f}", f"{row['total_bits']:.2f}"]
        cells.append("" if row["scheme"] is None else _number(_mean(row["kld"])))
        if answers:
            cells.append(f"{sum(row['right'])}/{len(row['right'])}")
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield "| KLD of | less that of | model of the second | difference | 95 % |"
    yield "|" + "---|" * 5
    for pair in part["differences"]:
        ends = "–" if pair["interval"] is None else " to ".join(map(_signed, pair["interval"]))
        first, second = pair["name"]
        yield f"| {first} | {second} | {pair['model'][1]} | {_signed(pair['mean'])} | {ends} |"


TITLES = {
    "mixkvq": "MixKVQ: channels raised by query times error",
    "arkv": "ARKV: tiers at equal bytes",
    "triaxial": "TriAxialKV: axes of the tags",
}

LEAST = 1e-5
"""KLD, in nats, below which the picture does not tell values apart."""


def markdown(measured: Row) -> str:
    """The tables of README."""
    sections = (f"### {TITLES[part]}\n\n" + "\n".join(_lines(measured[part])) for part in PARTS)
    return "\n\n".join(sections)


def save_picture(measured: Row, path: Path) -> None:
    """Mean KLD and its 95 % interval of each cache, a panel a part."""
    figure, grid = new_figure(15, 6, len(PARTS))
    for axes, part in zip(grid[0], PARTS, strict=True):
        rows = [row for row in measured[part]["rows"] if row["scheme"] is not None][::-1]
        for at, row in enumerate(rows):
            mean, ends = _mean(row["kld"]), mean_interval(row["kld"])
            color = BLUE if row["model"] == "plain" else ORANGE
            # Smaller ones tell nothing: they stand at the edge as "less than".
            axes.plot(max(mean, LEAST), at, "o" if mean >= LEAST else "<", color=color)
            if ends is not None and ends[1] > LEAST:
                axes.plot((max(ends[0], LEAST), ends[1]), (at, at), color=color)
            words = f"{mean:.2g}" if mean >= LEAST else f"<{LEAST:g}"
            axes.text(1.02, at, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color="0.3")
        names = [row["name"] + ("" if row["model"] == "plain" else f"\n{row['model']}") for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize=8)
        axes.set_xscale("log")
        axes.set_xlabel(KLD)
        axes.set_title(TITLES[part], fontsize=10)
        axes.grid(axis="x", alpha=0.25)
    figure.suptitle("Ablations on the reference model: mean KLD with 95 % intervals; orange: with outlier channels")
    figure.savefig(path, dpi=90)


@app.command()
def main(
    what: Annotated[str, typer.Argument(help="measure or table.")] = "measure",
    samples: Annotated[int, typer.Option(min=2, help="Windows, prompts and conversations of each part.")] = 12,
    parts: Annotated[str, typer.Option(help="What to measure; other parts stay as they are on file.")] = ",".join(
        PARTS
    ),
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = RESULTS,
) -> None:
    """Measures, writes figures and picture, and prints the tables."""
    if what not in ("measure", "table"):
        raise typer.BadParameter(f"got {what!r}, allowed measure or table.")
    chosen = parts.split(",")
    if not set(chosen) <= set(PARTS):
        raise typer.BadParameter(f"parts: got {parts!r}, allowed {', '.join(PARTS)}, separated by commas.")
    if what == "measure":
        path = out / "ablations.json"
        before = {} if set(chosen) == set(PARTS) else json.loads(path.read_text(encoding="utf-8"))
        measured = measure_parts(chosen, samples)
        if before and any(before[key] != measured[key] for key in ("samples", "versions", "dtype")):
            raise typer.BadParameter("parts: those on file have other samples or versions; measure all.")
        measured = {key: measured.get(key, before.get(key)) for key in {**before, **measured}}
        (out / "ablations.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    measured = json.loads((out / "ablations.json").read_text(encoding="utf-8"))
    save_picture(measured, out / "ablations.png")
    typer.echo(markdown(measured))


if __name__ == "__main__":
    app()
