"""Makes the four texts of `hfkvq.measure.texts`: ``python evals/texts.py DATA_FOLDER``.

The folder is laid out as `evals/tasks/README.md` says. Read are ``agent_traces/tau_bench_gpt-4o-airline.json.gz``
(sierra-research/tau-bench 59a200c, historical_trajectories, MIT), ``math/math_test.jsonl.gz`` (the test set of MATH,
MIT) and ``long_texts/tinyshakespeare.txt`` (karpathy/char-rnn 6f9487a; public domain). The code is this library's own,
so that there is one text that no model has learnt by heart.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

CHARACTERS = 160_000
"""Least length of each text: at least four windows of 7,680 tokens."""

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "hfkvq" / "measure" / "texts"


def agent(folder: Path) -> Iterator[str]:
    """Conversations with tool calls; the policy that all begin with stands in the first alone."""
    path = folder / "agent_traces" / "tau_bench_gpt-4o-airline.json.gz"
    for number, one in enumerate(json.loads(gzip.decompress(path.read_bytes()))):
        for message in one["traj"][bool(number) :]:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            said = [message.get("content") or "", *(f"{call['name']}({call['arguments']})" for call in calls)]
            yield f"{message['role']}: {' '.join(filter(None, said))}\n\n"


def mathematics(folder: Path) -> Iterator[str]:
    """Problems and their solutions."""
    for line in gzip.decompress((folder / "math" / "math_test.jsonl.gz").read_bytes()).decode().splitlines():
        row = json.loads(line)
        yield f"Problem: {row['problem']}\n\nSolution: {row['solution']}\n\n\n"


def code(_: Path) -> Iterator[str]:
    """Modules of this library, as they stand when this is run."""
    for path in sorted((ROOT / "hfkvq" / "caches").rglob("*.py")):
        yield f"# {path.relative_to(ROOT)}\n{path.read_text(encoding='utf-8')}\n\n"


def play(folder: Path) -> Iterator[str]:
    """Shakespeare."""
    yield (folder / "long_texts" / "tinyshakespeare.txt").read_text(encoding="utf-8")


def main(folder: Path) -> None:
    """Writes the four files, the same bytes every time."""
    for make in (agent, mathematics, code, play):
        text = "".join(make(folder))[:CHARACTERS]
        (OUT / f"{make.__name__}.txt.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
