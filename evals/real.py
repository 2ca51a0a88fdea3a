"""A real model's whole set of rows: distance from `DynamicCache` on texts, and tasks, for every cache.

    python evals/real.py --model FILE.gguf --data DIR --out DIR
    python evals/real.py --out DIR --report

A job is one part with one cache, and leaves one small JSON file in the folder. Jobs whose file is there are not run
again: a run that was killed loses the running jobs alone. Jobs are shared out among processes, several a GPU
(``--workers``), each of which loads the model once. The data folder is the one of evals/tasks/README.md; all files of
its folder ``texts`` are the texts for KL divergence, which are the bundled ones otherwise. ``humaneval`` runs the
programs that the model writes: better in a container. Where the code has no repository, the environment variable
HFKVQ_COMMIT names its commit.

The report counts, question by question, what each cache lost and gained against ``none``, which is `DynamicCache`.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from filelock import FileLock, Timeout

from evals.compare import judge, main_metrics
from hfkvq.caches.base.config_switch import restore
from hfkvq.caches.compile import compile_ahead
from hfkvq.caches.schemes.preset import get_preset
from hfkvq.measure.models import Source, find_model, load_tokenizer, read_config
from hfkvq.measure.models.names import file_sha256
from hfkvq.measure.records import commit, device_name, now, versions
from hfkvq.measure.tables import NOTHING, markdown_table, number, small_number

Record = dict[str, Any]
Job = tuple[str, str]
"""Part and preset."""

STOCK = "none"
"""Transformers' own cache, `DynamicCache`, which all others are compared with."""


MAIN = {"kvq_gsm8k_cot": "exact_match,strict-match"}
"""Metric by which a task is judged, where it is not the first: behind "The answer is 18." models go on with questions
of their own, and `flexible-extract` takes the last number of all."""


@dataclass(frozen=True)
class Part:
    """A part of the set; those without tasks are KL divergence.

    Attributes:
        batch: prompts, or windows, run together: for 1.5 billion parameters, 80 GB and four processes a GPU.
        limit: questions of each task, or windows; None is all.
        tasks: lm-eval's names.
        prompt: tokens of a window's prompt; of tasks those that the model must have room for.
        scored: tokens of a window that are scored.
    """

    batch: int
    limit: int | None
    tasks: tuple[str, ...] = ()
    prompt: int = 0
    scored: int = 0


MANY = 8
"""Tokens of a window that are fed at a time behind its prompt."""

PRESETS = """none full best-4.3 best-3.4 best-2.8 best-2.5 trellis-2.5 best-2.0 best-1.5 mixkvq kvarn-k4v2 kitty-pro
kitty kivi-2 kvarn-k2v2 arkv int4 saw-int4 saw-int4-kv triaxial""".split()

PARTS = {
    "kld8k": Part(4, 16, prompt=7168, scored=512),
    "gsm8k": Part(128, None, ("kvq_gsm8k_cot",)),
    "ruler4k": Part(30, 60, ("kvq_ruler_niah_multikey_3_file",), prompt=4096),
    "ruler16k": Part(8, 60, ("kvq_ruler_niah_multikey_3_file_16k",), prompt=16384),
    "kld24k": Part(1, 4, prompt=24064, scored=512),
    "humaneval": Part(164, None, ("kvq_humaneval",)),
    "math500": Part(125, None, ("kvq_math500",)),
    "longbench": Part(8, 50, ("kvq_longbench_",), prompt=16384),
}
"""The most important first."""

DATA = {
    "gsm8k": ("gsm8k/train.jsonl", "gsm8k/test.jsonl"),
    "ruler4k": ("ruler/niah_multikey_3_4096.jsonl",),
    "ruler16k": ("ruler/niah_multikey_3_16384.jsonl",),
    "humaneval": ("humaneval/HumanEval.jsonl",),
    "math500": ("math/math500.jsonl",),
}
"""Files of the data folder that a part's tasks read, compressed or not. LongBench takes those that are there."""

LATER = ("humaneval", "math500", "longbench")
"""Tasks whose ``best-...`` presets run first; their other presets run after everything else."""


def plan(asked: Sequence[str], presets: Sequence[str]) -> list[Job]:
    """Jobs in the order in which they are begun: the most important parts first, in each the baseline.

    Args:
        asked: parts, each alone or with presets of its own: ``gsm8k=best-3.4,int4``.
        presets: of the parts that name none.

    Raises:
        ValueError: an unknown part or preset.
    """
    jobs: list[Job] = []
    for text in asked:
        part, _, own = text.partition("=")
        if part not in PARTS:
            raise ValueError(f"parts: got {part!r}, allowed {', '.join(PARTS)}.")
        jobs += [(part, preset) for preset in (STOCK, *(own.split(",") if own else presets))]
    for preset in {preset for _, preset in jobs} - {STOCK}:
        get_preset(preset)

    def rank(job: Job) -> tuple[bool, int, bool]:
        part, preset = job
        late = part in LATER and preset != STOCK and not preset.startswith("best-")
        return late, list(PARTS).index(part), preset != STOCK

    return sorted(dict.fromkeys(jobs), key=rank)


def by_part(given: Sequence[str] | None) -> dict[str, int]:
    """Numbers by part, of arguments ``PART=N``, or ``N`` for all parts. Raises ValueError."""
    found = {}
    for text in given or ():
        part, _, value = text.rpartition("=")
        if (part and part not in PARTS) or not value.isdecimal() or not int(value):
            raise ValueError(f"got {text!r}, allowed N or PART=N, with one of {', '.join(PARTS)}.")
        found |= dict.fromkeys([part] if part else PARTS, int(value))
    return found


def fingerprint(source: Source) -> str:
    """Tells a model from others of its name: the commit of the Hub, or a hash of a folder's files."""
    folder = Path(source.path)
    if not folder.is_dir():
        return str(getattr(read_config(source), "_commit_hash", None))
    files = sorted(path for end in ("json", "safetensors", "jinja") for path in folder.glob(f"*.{end}"))
    return hashlib.sha256("".join(path.name + file_sha256(path) for path in files).encode()).hexdigest()


def is_done(out: Path, job: Job, settings: Record) -> bool:
    """A job's figures exist already. Raises ValueError if they were made with other settings."""
    path = job_file(out, job)
    if not path.exists():
        return False
    held = json.loads(path.read_text(encoding="utf-8"))
    if (held["preset"], held["settings"]) != (job[1], settings):
        raise ValueError(f"{path} is of {held['preset']} and {held['settings']}, not {settings}; choose another --out.")
    return True


def shapes(given: argparse.Namespace, room: int | None) -> dict[str, Part]:
    """The parts as they are asked for: with limits and sizes, and without those that the model has no room for."""
    limits, batches = by_part(given.limit), by_part(given.batch_size)
    found = {}
    for name, part in PARTS.items():
        if name == "longbench":
            files = (Path(given.data) / "longbench").glob("*.jsonl*") if given.data else ()
            part = replace(part, tasks=tuple(sorted(part.tasks[0] + path.name.split(".")[0] for path in files)))
            if not part.tasks:
                continue
        if part.scored:
            part = replace(part, prompt=part.prompt // given.shrink, scored=part.scored // given.shrink)
        if not room or part.prompt + part.scored <= room:
            found[name] = replace(part, limit=limits.get(name, part.limit), batch=batches.get(name, part.batch))
    return found


def check_data(parts: Iterable[str], data: str | None) -> None:
    """Raises ValueError for files that these parts need and lack; without a folder the Hub has all but RULER's."""
    named = data or os.environ.get("HFKVQ_DATA")
    lacking = []
    for part in dict.fromkeys(parts):
        files = DATA.get(part, ()) if named or part.startswith("ruler") else ()
        found = [any(Path(named or "", name + end).is_file() for end in ("", ".gz")) for name in files]
        lacking += [f"{name} ({part})" for name, there in zip(files, found, strict=True) if not (named and there)]
    if lacking:
        raise ValueError(
            f"data: {named or 'no folder is named, which'} must have {', '.join(lacking)}; evals/tasks/README.md says "
            "where they come from. Add them, or name other parts by --parts."
        )


# A process: it loads the model once and does one job after another.


def write(path: Path, content: Any) -> None:
    """Writes JSON, whole or not at all."""
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def job_file(out: Path, job: Job) -> Path:
    """File of a job's figures."""
    preset = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in Path(job[1]).name)
    return out / f"{job[0]}-{preset}.json"


def text_files(data: str | None) -> list[Path] | None:
    """Texts of a data folder; None where it has none."""
    return sorted((Path(data) / "texts").glob("*.*")) or None if data else None


class Bench:
    """A process's model and its jobs."""

    def __init__(self, setup: Record) -> None:
        from transformers.utils import logging

        from hfkvq.lm_eval.model import HFKVQ

        logging.disable_progress_bar()
        self.source, self.data = Source(**setup["source"]), setup["data"]
        options = {"device": setup["device"], "dtype": setup["dtype"], "batch_size": 1, "truncate": "middle"}
        # Tasks generate token by token: kernels for chunks of tokens need not be compiled.
        self.lm: Any = HFKVQ(pretrained=self.source.path, scheme=STOCK, ll_chunk=1, **options)
        self.manager: Any = None

    def about(self) -> Record:
        """Settings that all figures of this process depend on."""
        packages = versions("torch", "triton", "transformers", "lm_eval")
        about = {"model": self.source.name, "model_file": self.source.origin or None, "versions": packages}
        return {**about, "commit": os.environ.get("HFKVQ_COMMIT") or commit(), "device": device_name(self.lm.device)}

    def do(self, job: Job, part: Part, settings: Record, out: Path) -> None:
        """Does a job, with half the batch where memory runs out, and writes its file."""
        preset = None if job[1] == STOCK else get_preset(job[1])
        start = time.perf_counter()
        while True:
            try:
                found = self.answers(job, part, preset, out) if part.tasks else self.divergence(part, preset, job[1])
                break
            except torch.OutOfMemoryError:
                if part.batch == 1:
                    raise
                part = replace(part, batch=-(-part.batch // 2))
            finally:
                # The next job begins as the first did.
                restore(self.lm.model.config)
                gc.collect()
                torch.cuda.empty_cache()
        cost = {"seconds": round(time.perf_counter() - start, 1), "batch_size": part.batch, "date": now()}
        head = {"part": job[0], "preset": job[1], "settings": settings, "about": self.about(), **cost}
        write(job_file(out, job), {**head, **found})

    def divergence(self, part: Part, preset: Any, name: str) -> Record:
        """Distance from `DynamicCache`; of the baseline itself its perplexity."""
        from hfkvq.measure.divergence import measure
        from hfkvq.measure.divergence.run import as_record
        from hfkvq.measure.divergence.windows import cut, find_texts

        tokenizer = load_tokenizer(self.source)
        texts = find_texts(text_files(self.data), None, "", "text", self.source.reference, 0)
        given = cut(texts, tokenizer, part.prompt + part.scored, part.limit or 16)
        chosen = {} if preset is None else {name: preset}
        options = {"prefill": part.prompt, "chunk": MANY, "batch_size": part.batch, "tokenizer": tokenizer}
        record = as_record(measure(self.lm.model, given.tokens, chosen, **options), 0, {}, given.names)
        kept = {key: record[key] for key in ("windows", "tokens", "bootstrap", "baseline")}
        return {**kept, "tokens_sha256": given.sha256, **dict(zip(("row",), record["rows"], strict=False))}

    def answers(self, job: Job, part: Part, preset: Any, out: Path) -> Record:
        """A part's tasks: which questions are right, and what the cache held."""
        import lm_eval
        from lm_eval.tasks import TaskManager

        if self.manager is None:
            # Reads thousands of files.
            known = {"pretrained": self.source.path, "data_dir": str(Path(self.data).resolve())}
            self.manager = TaskManager(
                include_path=str(Path(__file__).parent / "tasks"), metadata=known if self.data else {}
            )
        self.lm.use(preset)
        self.lm.batch_size_per_gpu = part.batch
        # Tasks generate token by token.
        compile_ahead(self.lm.model, [] if preset is None else [preset], tell=print)
        evaluate: Any = lm_eval.simple_evaluate
        options = {"limit": part.limit, "bootstrap_iters": 0, "confirm_run_unsafe_code": True}
        arguments = {"pretrained": self.source.name, "scheme": job[1]}
        found = evaluate(self.lm, model_args=arguments, tasks=list(part.tasks), task_manager=self.manager, **options)
        folder = out / "samples"
        folder.mkdir(exist_ok=True)
        with gzip.open(folder / f"{job_file(out, job).stem}.jsonl.gz", "wt", encoding="utf-8") as file:
            for task, rows in found["samples"].items():
                said = {row["doc_id"]: row["resps"][0][0] for row in rows}
                file.writelines(json.dumps({"task": task, "doc_id": at, "answer": said[at]}) + "\n" for at in said)
        bill = found["config"]["kvq"]
        names = ("total_bits", "code_bits", "peak_cache_bytes", "tokens_per_second", "context_tokens")
        tasks = {task: task_record(rows) for task, rows in found["samples"].items()}
        return {"tasks": tasks, "bill": {name: bill.get(name) for name in names}}


def task_record(rows: Iterable[Record]) -> Record:
    """Right and wrong of lm-eval's samples, by metric, the main one first, and a hash of what was asked."""
    ordered = sorted(rows, key=lambda row: row["doc_id"])
    asked = dict.fromkeys((row["doc_hash"], row["prompt_hash"]) for row in ordered)
    values: dict[str, list[float]] = {}
    for row in ordered:
        for metric in row["metrics"]:
            # Scores from 0 to 100 are those of LongBench and RULER.
            share = float(row[metric]) / (100 if metric == "score" else 1)
            values.setdefault(f"{metric},{row['filter']}", []).append(share)
    digest = hashlib.sha256(json.dumps(list(asked)).encode()).hexdigest()
    return {"asked_sha256": digest, "values": {key: pack(values[key]) for key in main_metrics(values)}}


def serve(setup: Record) -> None:
    """Does jobs as they come on standard input, one JSON line each, and answers each with a line."""
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Output of libraries goes to the log.
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        # The parent process is gone, or done.
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    bench = Bench(setup)
    while True:
        told = json.loads(lines.get())
        part = Part(**{**told["shape"], "tasks": tuple(told["shape"]["tasks"])})
        error = None
        try:
            bench.do(tuple(told["job"]), part, told["settings"], Path(setup["out"]))
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            sys.excepthook(type(failure), failure, failure.__traceback__)
        print(json.dumps({"error": error}), file=reply, flush=True)


class Crew:
    """Processes that take jobs from one queue; one that dies is replaced.

    Args:
        places: environment of each process.
        command: of a process.
        logs: folder of what they print.
        fresh: whether each job gets a process of its own.
    """

    def __init__(self, places: Sequence[Mapping[str, str]], command: Sequence[str], logs: Path, fresh: bool) -> None:
        self.places, self.command, self.logs, self.fresh = places, command, logs, fresh
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.stopped = False
        self.todo: queue.SimpleQueue[Record] = queue.SimpleQueue()

    def run(self, jobs: Iterable[Record], tell: Callable[[Record, float, str | None], object]) -> None:
        """Has all jobs done; tells of each with its seconds and its error."""
        for job in jobs:
            self.todo.put(job)
        threads = [threading.Thread(target=self._work, args=(n, tell), daemon=True) for n in range(len(self.places))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)
        finally:
            self.stopped = True
            for process in self.processes.values():
                process.kill()

    def _work(self, number: int, tell: Callable[[Record, float, str | None], object]) -> None:
        while not self.stopped:
            try:
                job = self.todo.get_nowait()
            except queue.Empty:
                return
            start = time.perf_counter()
            process = self.processes.get(number)
            if process is None or process.poll() is not None:
                process = self.processes[number] = self._start(number)
            assert process.stdin
            assert process.stdout
            try:
                print(json.dumps(job), file=process.stdin, flush=True)
                line = process.stdout.readline()
            except OSError:
                line = ""
            error = json.loads(line)["error"] if line else f"its process ended; {self.logs}/{number}.log says why"
            if self.fresh or error:
                # A GPU that had some kinds of errors is lost to its process.
                process.kill()
                process.wait()
            if not self.stopped:
                tell(job, time.perf_counter() - start, error)

    def _start(self, number: int) -> subprocess.Popen[str]:
        self.logs.mkdir(exist_ok=True)
        with (self.logs / f"{number}.log").open("a") as log:
            pipes: Record = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            environment = {**os.environ, **self.places[number]}
            # Ctrl-C is for the parent alone, which ends them.
            return subprocess.Popen(self.command, env=environment, start_new_session=True, **pipes)


def places(given: argparse.Namespace) -> list[dict[str, str]]:
    """The environment of each process: the GPUs in turns, and its share of the cores."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = [name for name in (seen if given.gpus is None else given.gpus).split(",") if name]
    count = given.workers or (4 if gpus else 1)
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (count * max(1, len(gpus)))))}
    return [{**threads, "CUDA_VISIBLE_DEVICES": gpu} for _ in range(count) for gpu in gpus or [""]]


# The report.


def main_values(name: str, task: Record) -> list[float]:
    """A task's values by question, by its main metric."""
    return unpack(task["values"].get(MAIN.get(name, ""), next(iter(task["values"].values()))))


def pack(values: Sequence[float]) -> str | list[float]:
    """Values of questions, in little room: right and wrong as ``0110``, shares as they are."""
    return "".join(f"{x:.0f}" for x in values) if set(values) <= {0.0, 1.0} else [round(x, 4) for x in values]


def unpack(values: str | Sequence[float]) -> list[float]:
    """Inverse of `pack`."""
    return [float(x) for x in values]


def read_jobs(out: Path, parts: Sequence[str], presets: Sequence[str]) -> dict[Job, Record]:
    """The jobs that are there, in the order of these parts and presets, and others behind them."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in out.glob("*-*.json")]
    jobs = {(job["part"], job["preset"]): job for job in found}

    def rank(job: Job) -> tuple[int, int, str]:
        part, preset = job
        return parts.index(part), presets.index(preset) if preset in presets else len(presets), preset

    return {job: jobs[job] for job in sorted(jobs, key=rank)}


def compare(base: Record, other: Record) -> Record:
    """Questions that a cache lost and gained in a part, question by question, its main metric alone."""
    first: list[float] = []
    second: list[float] = []
    for task, one in base["tasks"].items():
        same = other["tasks"][task]
        if one["asked_sha256"] != same["asked_sha256"]:
            raise ValueError(f"{task}: {other['preset']} was asked other questions than {base['preset']}.")
        first += main_values(task, one)
        second += main_values(task, same)
    found = judge(first, second)
    return {name: found[name] for name in ("lost", "gained", "p", "interval")}


def score(job: Record) -> float:
    """Mean of a part's tasks, each by its main metric, of 100."""
    means = [sum(x := main_values(name, task)) / len(x) for name, task in job["tasks"].items()]
    return 100 * sum(means) / len(means)


def summary(jobs: Mapping[Job, Record]) -> Record:
    """Jobs in one record; what they share is said once."""
    rows: dict[str, Record] = {}
    for (part, preset), job in jobs.items():
        row = {key: value for key, value in job.items() if key not in ("part", "preset", "about", "settings")}
        if "tasks" in job:
            row["score"] = score(job)
            if preset != STOCK and (part, STOCK) in jobs:
                row["against_none"] = compare(jobs[part, STOCK], job)
        rows.setdefault(preset, {})[part] = row
    about, settings = (
        [json.loads(x) for x in dict.fromkeys(json.dumps(job[key]) for job in jobs.values())]
        for key in ("about", "settings")
    )
    return {"kind": "hfkvq real", "date": now(), "about": about, "settings": settings, "rows": rows}


def tables(record: Record) -> str:
    """The summary for a reader: divergence, then tasks."""
    rows, found = record["rows"], []
    # A part's rows are all of divergence, or all of tasks.
    shown = {part: "tasks" in one for row in rows.values() for part, one in row.items()}
    for part in (part for part, asks in shown.items() if not asks):
        lines = []
        for preset, row in rows.items():
            if part not in row:
                continue
            base, own = row[part]["baseline"], row[part].get("row")
            if own is None:
                lines.append((preset, number(16.0, 2), *[NOTHING] * 5, f"{base['perplexity']:.3f}"))
                continue
            kld, interval = own["kld"], own["kld"]["interval"] or (None, None)
            change = 100 * (own["perplexity_ratio"]["value"] - 1)
            ends = " to ".join(number(end, 4) for end in interval)
            figures = (number(own["total_bits"], 2), small_number(kld["mean"]), ends, small_number(kld["median"]))
            lines.append((preset, *figures, f"{kld['p999']:.3f}", f"{own['top1']['share']:.3f}", f"{change:+.2f} %"))
        head = ("cache", "total bits", "KLD", "95 %", "median", "99.9 %", "top-1", "perplexity")
        found.append(f"## {part}\n\n{markdown_table(head, lines)}")
    tasks = [part for part, asks in shown.items() if asks]
    if tasks:
        lines = []
        for preset, row in rows.items():
            cells = []
            for part in tasks:
                one = row.get(part)
                against = (one or {}).get("against_none")
                pairs = f" ({against['lost']}/{against['gained']})" if against else ""
                cells.append(f"{one['score']:.1f}{pairs}" if one else "")
            if any(cells):
                lines.append((preset, *cells))
        found.append(f"## tasks: score (lost/gained)\n\n{markdown_table(('cache', *tasks), lines)}")
    return "\n\n".join(found)


def report(out: Path) -> None:
    """Prints tables of what is there, and writes ``summary.json``."""
    record = summary(read_jobs(out, list(PARTS), PRESETS))
    write(out / "summary.json", record)
    print(tables(record))


# The command.


def arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="reference, smollm2, FILE.gguf, a folder, or a name on the Hub")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--data", help="folder of the data, see evals/tasks/README.md")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), help="PART, or PART=PRESET,PRESET")
    parser.add_argument("--presets", default=",".join(PRESETS), help="comma-separated, also with options")
    parser.add_argument("--limit", nargs="+", help="questions of a task, or windows: N for all parts, or PART=N")
    parser.add_argument("--batch-size", nargs="+", help="N for all parts, or PART=N")
    parser.add_argument("--shrink", type=int, default=1, help="windows of KL divergence are so many times shorter")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--gpus", help="comma-separated; all, by default")
    parser.add_argument("--workers", type=int, help="processes a GPU (default 4), or on the CPU (default 1)")
    parser.add_argument("--fresh", action="store_true", help="a process of its own for each job: slower")
    parser.add_argument("--report", action="store_true", help="only report what is there")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is None and (given.out is None or not (given.report or given.model)):
        parser.error("--out is needed, and --model or --report")
    return given


def main() -> None:
    """Does what is missing, then reports."""
    given = arguments()
    if given.serve is not None:
        return serve(json.loads(given.serve))
    out: Path = given.out
    if given.report:
        return report(out)
    out.mkdir(parents=True, exist_ok=True)
    # SIGTERM acts as Ctrl-C: worker processes end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        # A GGUF file is unpacked here, once for all processes.
        source = find_model(given.model)
        room = getattr(read_config(source).get_text_config(decoder=True), "max_position_embeddings", None)
        parts = shapes(given, room)
        jobs = [job for job in plan(given.parts, given.presets.split(",")) if job[0] in parts]
        shared = {"model": source.origin.get("sha256") or fingerprint(source), "dtype": given.dtype}
        texts = {path.name: file_sha256(path) for path in text_files(given.data) or ()}
        settings = {}
        for name, part in parts.items():
            own = {"limit": part.limit, "prompt": part.prompt, "scored": part.scored, "texts": texts}
            settings[name] = {**shared, "part": name, **(own if part.scored else {"limit": part.limit})}
        todo = [job for job in jobs if not is_done(out, job, settings[job[0]])]
        check_data((part for part, _ in todo), given.data)
    except ValueError as error:
        sys.exit(str(error))
    for name in {text.partition("=")[0] for text in given.parts} - parts.keys():
        print(f"{name}: left out, since the model has too few positions, or the data are not there")
    crew = places(given)
    on = "cuda" if crew[0]["CUDA_VISIBLE_DEVICES"] else "cpu"
    setup = {"source": vars(source), "data": given.data, "dtype": given.dtype, "device": on, "out": str(out)}
    failed: list[Job] = []
    done = len(jobs) - len(todo)

    def tell(job: Record, seconds: float, error: str | None) -> None:
        nonlocal done
        done += 1
        if error:
            failed.append(job["job"])
        print(f"{done}/{len(jobs)} {' '.join(job['job'])}: {error or f'{seconds:.0f} s'}", flush=True)

    try:
        with FileLock(out / ".lock", timeout=0):
            command = [sys.executable, __file__, "--serve", json.dumps(setup)]
            asked = [{"job": job, "shape": vars(parts[job[0]]), "settings": settings[job[0]]} for job in todo]
            Crew(crew[: len(todo)], command, out / "logs", given.fresh).run(asked, tell)
    except Timeout:
        sys.exit(f"out: another run is at work in {out}.")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on with the jobs that are missing.")
    report(out)
    if failed:
        sys.exit(f"failed: {', '.join(' '.join(job) for job in failed)}; {out}/logs says why.")


if __name__ == "__main__":
    main()
