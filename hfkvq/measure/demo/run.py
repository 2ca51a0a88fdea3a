"""The demo's run and table: every cache answers the same prompts, and is compared with the stock one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from hfkvq.caches.compile import compile_ahead
from hfkvq.caches.schemes.base import Scheme, get_scheme, list_schemes, listed
from hfkvq.caches.schemes.preset import get_preset

from ..divergence.measurement import compare_logits, read_memory
from ..records import BASELINE, device_name, finite, versions
from ..tables import NOTHING, aligned, narrow_table, number, small_number
from .answers import Written, answer, make_cache, predictions, texts
from .prompts import CHAT_TASKS, SIZES, Batch, Subject, full_name, is_right, make_batches

Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Sizes and choices of a demo.

    Attributes:
        tasks: names, see `hfkvq.measure.demo.prompts.full_name`.
        schemes: preset names, "all", or none for those of a quick look.
        batch_size: most prompts run together.
        max_new_tokens: most tokens of an answer; None depends on the task, see `make_batches`.
        kl_tokens: positions of each task over which the KL divergence is measured, about: as many whole rows as it
            would take if all answers were as long as they may be.
        seed: another one gives other examples.
    """

    tasks: tuple[str, ...] = CHAT_TASKS
    schemes: tuple[str, ...] = ()
    samples: int = 2
    batch_size: int = 8
    max_new_tokens: int | None = None
    kl_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks names, before a model is loaded; numbers are the caller's."""
        if not self.tasks:
            raise ValueError(f"tasks: got none, allowed {', '.join(SIZES)}.")
        for task in self.tasks:
            full_name(task)
        choose_schemes(self.schemes)


def choose_schemes(names: Sequence[str] = ()) -> dict[str, Scheme]:
    """Schemes by preset name.

    Without names a few of each kind; of "all" every distinct one for keys and values, under the last name it has. Those
    for latents alone have to be named.
    """
    if tuple(names) != ("all",):
        return {name: get_scheme(name) for name in names or listed("demo")}
    # The last name says most: "kivi" is an alias of "kivi-2".
    distinct = {scheme: name for name, scheme in list_schemes().items() if not scheme.latents}
    return {name: scheme for scheme, name in distinct.items()}


def run_demo(
    subject: Subject,
    settings: Settings,
    on_progress: Callable[[str, str, float], Any] = lambda cache, task, share: None,
    schemes: Mapping[str, Scheme] | None = None,
) -> Record:
    """Runs every cache on every task, one cache after the other.

    Args:
        on_progress: called before each batch with the cache's name, the task and the share of the work done, and while
            kernels are compiled.
        schemes: by name, in place of the settings' presets.

    Returns:
        A record that JSON takes: model, settings, and in ``rows`` for each cache, the baseline first, bits and bytes,
        ``accuracy``, ``agreement`` with the baseline's tokens, KL divergence, speeds, and scores by task.

    Raises:
        ValueError: the model cannot hold a task's prompts, or a scheme cannot hold its heads.
    """
    begin = time.perf_counter()
    model, device = subject.model, subject.model.device
    sizes = (settings.samples, settings.batch_size, settings.seed, settings.max_new_tokens)
    tasks = dict.fromkeys(map(full_name, settings.tasks))
    batches = [batch for task in tasks for batch in make_batches(subject, task, *sizes)]
    longest = max(batches, key=lambda batch: batch.ids.shape[1]).task
    # The first batch of that task, which is a full one.
    measured = next(batch for batch in batches if batch.task == longest)
    own = choose_schemes(settings.schemes) if schemes is None else schemes
    caches: dict[str, Scheme | None] = {BASELINE: None, **own}
    for scheme in caches.values():
        # Refused heads are told before the first batch is run.
        make_cache(subject, scheme)
    work = [batch.ids.numel() + 8 * batch.ids.shape[0] * batch.limit for batch in batches]
    total, done = sum(work) * len(caches), 0

    def tell(name: str, task: str = "") -> None:
        on_progress(name, task, done / total)

    # Rows of each batch whose divergence is measured: until each task has so many positions, about.
    left, counts = dict.fromkeys(tasks, settings.kl_tokens), list[int]()
    for batch in batches:
        counts.append(min(len(batch.ids), -(-max(left[batch.task], 0) // batch.limit)))
        left[batch.task] -= counts[-1] * batch.limit
    compile_ahead(model, map(get_preset, own.values()), tell=tell)
    expected: list[tuple[Written, torch.Tensor | None]] = []
    rows: list[Record] = []
    for name, scheme in caches.items():
        scores: dict[str, _Score] = {batch.task: _Score() for batch in batches}
        spent = torch.zeros(4, dtype=torch.float64, device="cpu")
        memory, tokens = None, 0
        for index, (batch, count) in enumerate(zip(batches, counts, strict=True)):
            tell(name, batch.task)
            if index == 0 and device.type == "cuda":
                # Kernels are loaded before the clock runs.
                answer(subject, dataclasses.replace(batch, limit=3), make_cache(subject, scheme))
            mine = answer(subject, batch, make_cache(subject, scheme), count)
            base = mine if scheme is None else expected[index][0]
            logits = predictions(subject, batch, mine, base) if count else None
            if scheme is None:
                # Logits on the host: all tasks' of a large vocabulary would be a burden to the device.
                expected.append((Written(mine.ids, mine.lengths), None if logits is None else logits.cpu()))
            scores[batch.task].add(subject, batch, mine, base)
            if logits is not None and (stock := expected[index][1]) is not None:
                scores[batch.task].kl.append(compare_logits(stock, logits, stock.argmax(-1))[0])
            answered = sum(mine.lengths) - len(mine.lengths)
            spent += torch.tensor(
                [int(batch.mask.sum()), mine.prompt_seconds, answered, mine.decode_seconds],
                dtype=torch.float64,
                device="cpu",
            )
            if batch is measured:
                memory, tokens = read_memory(mine.cache, batch.mask), mine.cache.get_seq_length()
            done += work[index]
        assert memory is not None
        prompt_tokens, prompt_seconds, decode_tokens, decode_seconds = spent.tolist()
        compared = sum(score.compared for score in scores.values())
        kl = torch.cat([part for score in scores.values() for part in score.kl])
        rows.append(
            {
                "name": name,
                "scheme": scheme.to_dict() if scheme else None,
                "total_bits": memory.total_bits,
                "code_bits": finite(memory.code_bits),
                "held_bytes": memory.held_bytes,
                "bf16_bytes": memory.bf16_bytes,
                "ratio": memory.bf16_bytes / memory.held_bytes,
                "context_tokens": tokens,
                "accuracy": sum(x.right for x in scores.values()) / sum(x.total for x in scores.values()),
                "agreement": sum(x.agreeing for x in scores.values()) / compared if compared else None,
                "kl_mean": float(kl.mean()) if len(kl) else None,
                "kl_999": float(kl.quantile(0.999)) if len(kl) else None,
                "kl_positions": len(kl),
                "prompt_tokens_per_second": prompt_tokens / prompt_seconds,
                "decode_tokens_per_second": decode_tokens / decode_seconds if decode_tokens else None,
                "tasks": {task: score.described() for task, score in scores.items()},
            }
        )
    return {
        "model": subject.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(device),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "settings": dataclasses.asdict(settings),
        "memory": {"task": longest, "rows": measured.ids.shape[0]},
        "seconds": time.perf_counter() - begin,
        "versions": versions("torch", "transformers"),
        "rows": rows,
    }


class _Score:
    """Right answers of a cache on a task, and tokens that are the baseline's, from the second of each answer."""

    def __init__(self) -> None:
        self.right = self.total = self.agreeing = self.compared = 0
        self.kl = [torch.empty(0, dtype=torch.float32, device="cpu")]

    def add(self, subject: Subject, batch: Batch, mine: Written, baseline: Written) -> None:
        written = texts(subject, mine)
        self.right += sum(is_right(subject, x, text) for x, text in zip(batch.examples, written, strict=True))
        self.total += len(batch.examples)
        for got, want, length in zip(mine.ids.tolist(), baseline.ids.tolist(), baseline.lengths, strict=True):
            # An answer may have ended early; missing tokens do not agree.
            self.agreeing += sum(a == b for a, b in zip(got[1:length], want[1:length], strict=False))
            self.compared += length - 1

    def described(self) -> Record:
        kl = torch.cat(self.kl)
        return {
            "right": self.right,
            "total": self.total,
            "agreeing_tokens": self.agreeing,
            "compared_tokens": self.compared,
            "kl_mean": float(kl.mean()) if len(kl) else None,
            "kl_positions": len(kl),
        }


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


def next_steps(record: Record) -> list[str]:
    """Commands to go on with, and the use of each."""
    samples = f"every preset; --samples {8 * record['settings']['samples']} gives more precise figures"
    steps = [
        ("hfkvq demo --model NAME", "the same with your own model"),
        *([] if record["settings"]["schemes"] else [("hfkvq demo --schemes all", samples)]),
        ("hfkvq schemes", "all presets, with bits, loss and speed"),
        ("hfkvq recommend --model NAME --gpu-memory 24GiB --context 32k", "the preset that fits your GPU"),
    ]
    return aligned(steps)
