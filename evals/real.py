"""A real model's whole set of rows: distance from `DynamicCache` on texts, and tasks, for every cache.

    python evals/real.py --model FILE.gguf --data DIR --out DIR
    python evals/real.py --out DIR --report

A job is one part with one cache, and leaves one small JSON file in the folder. What is there is not run again: a run
that was killed loses the running jobs alone. Jobs are shared out among processes, several a GPU (``--workers``), each
of which loads the model once. The data folder is the one of evals/tasks/README.md; all files of its folder ``texts``
are the texts for KL divergence, which are the bundled ones otherwise. ``humaneval`` runs the programs that the model
writes: better in a container. Where the code has no repository, the environment variable HFKVQ_COMMIT names its commit.

The report counts, question by question, what each cache lost and gained against ``none``, which is `DynamicCache`.
"""

from __future__ import annotations

import argparse
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
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from filelock import FileLock, Timeout

from evals.real_bench import Part, job_file, serve, text_files, write
from evals.real_report import STOCK, Job, Record, read_jobs, summary, tables
from hfkvq.caches.preset import get_preset
from hfkvq.measure.models import Source, find_model, read_config
from hfkvq.measure.models.gguf_files import file_sha256

PRESETS = """none full best-4.3 best-3.4 best-2.8 best-2.5 mixkvq kvarn-k4v2 kitty-pro kitty kivi-2 kvarn-k2v2 arkv int4
saw-int4 saw-int4-kv triaxial""".split()

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
                # After some errors a GPU can no longer be used by a process.
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


def report(out: Path) -> None:
    """Prints tables of what is there, and writes ``summary.json``."""
    record = summary(read_jobs(out, list(PARTS), PRESETS))
    write(out / "summary.json", record)
    print(tables(record))


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


def places(given: argparse.Namespace) -> list[dict[str, str]]:
    """The environment of each process: the GPUs in turns, and its share of the cores."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = [name for name in (seen if given.gpus is None else given.gpus).split(",") if name]
    count = given.workers or (4 if gpus else 1)
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (count * max(1, len(gpus)))))}
    return [{**threads, "CUDA_VISIBLE_DEVICES": gpu} for _ in range(count) for gpu in gpus or [""]]


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
        # Also unpacks a GGUF file, once for all processes.
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
