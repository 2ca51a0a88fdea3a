"""A worker process of `evals/real.py`: it loads the model once and does one job after another."""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from evals.compare import main_metrics
from evals.real_report import STOCK, Job, Record, pack
from hfkvq.caches.preset import get_preset
from hfkvq.caches.switched import restore
from hfkvq.measure.models import Source, load_tokenizer
from hfkvq.measure.records import commit, device_name, now, versions

MANY = 8
"""Tokens of a window that are fed at a time behind its prompt."""


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


def write(path: Path, content: Any) -> None:
    """Writes JSON, whole or not at all."""
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def job_file(out: Path, job: Job) -> Path:
    """Where a job's figures are."""
    preset = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in Path(job[1]).name)
    return out / f"{job[0]}-{preset}.json"


def text_files(data: str | None) -> list[Path] | None:
    """Texts of a data folder; None where it has none."""
    return sorted((Path(data) / "texts").glob("*.*")) or None if data else None


class Bench:
    """One process's model, and what it does with it."""

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
        """What all figures of this process depend on."""
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
        from hfkvq.measure.divergence import measure, report
        from hfkvq.measure.divergence.windows import cut, find_texts

        tokenizer = load_tokenizer(self.source)
        texts = find_texts(text_files(self.data), None, "", "text", self.source.reference, 0)
        given = cut(texts, tokenizer, part.prompt + part.scored, part.limit or 16)
        chosen = {} if preset is None else {name: preset}
        options = {"prefill": part.prompt, "chunk": MANY, "batch_size": part.batch, "tokenizer": tokenizer}
        record = report.as_record(measure(self.lm.model, given.tokens, chosen, **options), 0, {}, given.names)
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
        self.lm.compile_ahead([] if preset is None else [preset], print)
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
    # What libraries print is for the log.
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        # Whoever gave the jobs is gone, or done.
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
