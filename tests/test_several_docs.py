"""Tables of several queries: the newest figures, and what a prompt of a length that comes again is held against."""

from __future__ import annotations

from evals import several
from evals.several import AGAIN, AS_OURS
from hfkvq.measure.bench import kernels

PAGE = several.DOCS / "speed.md"


def test_documents_have_the_tables():
    text = PAGE.read_text(encoding="utf-8")
    assert several.text_of(text, kernels.load(several.RESULTS / f"{several.RUN}.json")) == text, "run evals/several.py"


def row(name, us, kind="baseline", queries=1024, remark=""):
    shape = {"batch": 1, "context": 32768, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    found = {"us": {"p50": us}, "replays": 20} if us else {"error": "none"}
    return {**shape, "queries": queries, "name": name, "kind": kind, "remark": remark, **found}


def test_prompts_are_held_against_right_kernels_of_pytorch():
    """Not against what shows later tokens; dense and compressed lines of a length that comes again stand together."""
    peak = "peak 150 MiB with the output, which has 8; dense keys and values 1,132"
    rows = [
        row("flash SDPA", 1600.0),
        row("cuDNN SDPA", 800.0, "bound"),
        row(AS_OURS, 1610.0),
        row(AGAIN.format(AS_OURS), 850.0),
        row("cuDNN SDPA, mask", None),
        row("2-bit", 1650.0, "format", remark=peak),
        row(AGAIN.format("2-bit"), 900.0, "format", remark=peak.replace("150", "1,200")),
        row("flash SDPA", 400.0, queries=4),
        row("vllm-fa3", 90.0, "peer", queries=4) | {"quantized": False},
        row("flash SDPA, packed", 70.0, "bound", queries=4),
        row("2-bit", 45.0, "format", queries=4),
        # The run has ended here.
        row("flash SDPA", 3000.0, queries=2048),
    ]
    record = {"gpu": "Synthetic", "commit": "abc", "rows": rows}
    lines = [*several.prompts(record)]
    assert lines[4] == "| 1k behind 32k | 1,600 |  |  | 800 | 1,610 | 1,650 | 1.03 |"
    assert lines[5] == "| 1k behind 32k, length again | 1,600 |  |  | 800 | 850 | 900 | 0.56 |"
    assert lines[7].endswith("takes 1,200 MiB, of which the output has 8; dense keys and values have 1,132.")
    assert len(lines) == 8
    assert [*several.steps(record)][2:] == ["| 4 at 32k | 400 | 90.0 | 70.0 |  | 45.0 | 0.50 |"]
