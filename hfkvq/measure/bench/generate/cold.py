"""First calls of ``generate`` in a new process, before which no kernel was compiled.

`Children` starts the processes; run as a module, this file is one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hfkvq

from .cases import Case, Settings
from .engines import STOCK, Engine, parse_engines
from .models import build, get_config
from .run import Bench, attempt, start_row
from .search import Row
from .whole import calls, describe_tokens

FIRST_CALLS, LATER_CALLS = 3, 2
"""Calls at the first size, and at each further one."""

CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda"}
"""Where compiled code would be found again: environment variables, and the folders that they name here."""


@dataclasses.dataclass(frozen=True)
class ColdCalls:
    """What a process is to do, as plain values that JSON takes.

    Attributes:
        engine: by name.
        model: by name, as typed.
        layers: kept, or None.
        device: as text.
        dtype: of the weights.
        seed: of the weights and prompts.
        experts: see `build`.
        cases: rows and tokens of each size, in the order in which they are called.
        tokens: new tokens of a call.
        compile: arguments of `torch.compile`.
    """

    engine: str
    model: str
    layers: int | None
    device: str
    dtype: str
    seed: int
    experts: str
    cases: Sequence[Sequence[int]]
    tokens: int
    compile: dict[str, Any]


def measure_cold(model: Any, engine: Engine, cases: Sequence[Case], tokens: int, settings: Settings) -> Iterator[Row]:
    """Rows of first calls, one for each size.

    Args:
        model: the model, which nothing has called yet.
        engine: which cache.
        cases: in this order, all in this process.
        tokens: new tokens of each call.
        settings: how the model is compiled, and the seed.

    Yields:
        ``calls_s``, seconds of the calls at this size; ``first_token_s``, until their first tokens; ``after``, the
        sizes that came before; what `describe_tokens` says; and bytes.
    """
    bench = Bench(model, settings)
    for i, case in enumerate(cases):

        def run(case: Case = case, count: int = LATER_CALLS if i else FIRST_CALLS) -> Row:
            with calls(model, engine, case, tokens, settings) as call:
                done = [call(tokens) for _ in range(count)]
            return {
                "calls_s": [each.seconds for each in done],
                "first_token_s": [each.first for each in done],
                **describe_tokens(done[-1].tokens),
            }

        after = [other.title for other in cases[:i]]
        yield bench.row("cold", engine, case, run, clean=False, new_tokens=tokens, after=after)


def engine_of(name: str) -> Engine:
    """An engine by its name, stock or ours."""
    return parse_engines(*([name], []) if name in STOCK else ([], [name]))[0]


def _measure_all(order: ColdCalls) -> list[Row]:
    """In the process: makes the model and calls it."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    start = time.perf_counter()
    config = get_config(order.model, order.layers)
    device = torch.device(order.device)
    model = build(config, device, getattr(torch, order.dtype), order.seed, order.experts)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    made = time.perf_counter() - start
    settings = Settings(compile=order.compile, seed=order.seed)
    cases = [Case(*case) for case in order.cases]
    rows = measure_cold(model, engine_of(order.engine), cases, order.tokens, settings)
    return [{**row, "build_s": made} for row in rows]


class ColdProcess:
    """A process that has imported everything, and waits.

    Args:
        order: what it is to do.
        folder: an empty one, for compiled code and answers.
    """

    def __init__(self, order: ColdCalls, folder: Path) -> None:
        self.order, self.folder = order, folder
        (folder / "order.json").write_text(json.dumps(dataclasses.asdict(order)), encoding="utf-8")
        root = str(Path(hfkvq.__file__).parents[1])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
        environment = {**os.environ, "PYTHONPATH": path, **{name: str(folder / own) for name, own in CACHES.items()}}
        with (folder / "errors").open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hfkvq.measure.bench.generate.cold", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )

    def wait(self) -> None:
        """Returns once it is ready, or has failed."""
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def rows(self) -> list[Row]:
        """Lets it go, and waits for its rows; if it fails as a whole, each of them says why."""
        # Ended already, it reads nothing; its answer is missing then, and says so.
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate("go\n")
        answer = self.folder / "rows.json"
        if self.process.returncode == 0 and answer.exists():
            return json.loads(answer.read_text(encoding="utf-8"))
        lines = (self.folder / "errors").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        found = {"error": f"the process ended with {self.process.returncode}: {lines[-1] if lines else ''}"[:300]}
        if "out of memory" in found["error"]:
            found["oom"] = True  # type: ignore[assignment]
        engine = engine_of(self.order.engine)
        more = {"new_tokens": self.order.tokens}
        return [start_row("cold", engine, Case(*case), **more) | found for case in self.order.cases]

    def stop(self) -> None:
        """Ends it, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def measure_processes(orders: Sequence[ColdCalls]) -> Iterator[list[Row]]:
    """Rows of each order, every one in a process of its own; one at a time, but they import together and before."""
    with tempfile.TemporaryDirectory(prefix="hfkvq-cold-") as folder, contextlib.ExitStack() as stack:
        children = []
        for i, order in enumerate(orders):
            own = Path(folder) / str(i)
            own.mkdir()
            children.append(ColdProcess(order, own))
            stack.callback(children[-1].stop)
        for child in children:
            child.wait()
        for child in children:
            yield child.rows()


def main(folder: str) -> None:
    """The process: waits to be told, does what the folder's order says, and leaves its rows there."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        return
    order = ColdCalls(**json.loads((Path(folder) / "order.json").read_text(encoding="utf-8")))
    found = attempt(lambda: {"rows": _measure_all(order)})
    if "error" in found:
        engine = engine_of(order.engine)
        rows = [start_row("cold", engine, Case(*case), new_tokens=order.tokens) | found for case in order.cases]
    else:
        rows = found["rows"]
    (Path(folder) / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
