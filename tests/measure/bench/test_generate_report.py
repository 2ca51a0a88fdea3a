"""The command, its records, tables and pictures: from invented figures, and from a tiny model on the CPU."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from pathlib import Path

import pytest
import torch

from hfkvq.measure.bench.generate import record as records
from hfkvq.measure.bench.generate import report
from hfkvq.measure.bench.generate.meeting import Meeting
from tests.command import printed

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[3] / "evals" / "results"


def row(engine: str, batch: int, context: int, ms: float, kind: str = "decode", **more) -> dict:
    found = {"kind": kind, "engine": engine, "batch": batch, "context": context}
    figures = {"ms": {"p20": 0.9 * ms, "p50": ms, "p80": 1.2 * ms}, "tokens_per_s": 1e3 * batch / ms}
    return {**found, **figures, "cache_bytes": 10**9, "peak_bytes": 2 * 10**10, **more}


def failed(engine: str, batch: int, context: int, **more) -> dict:
    return {"kind": "decode", "engine": engine, "batch": batch, "context": context, "error": "OutOfMemoryError", **more}


def record_of(rows: list[dict]) -> dict:
    records.add_speedups(rows)
    return {
        "kind": records.KIND,
        "gpu": "Synthetic 9000",
        "versions": {"torch": "0.0", "triton": "0.0", "transformers": "0.0"},
        "commit": "0000000",
        "date": "2000-01-01T00:00:00+00:00",
        "method": records.METHOD,
        "model": {"name": "tiny", "weight_bytes": 10**10, "weight_ms_of_a_step": 3.7},
        "settings": {"steps": 1},
        "modes": {},
        "schemes": {},
        "rows": rows,
    }


ROWS = [
    row("dynamic", 1, 1024, 40.0),
    row("dynamic-nocudnn", 1, 1024, 20.0),
    row("static-compiled", 1, 1024, 6.0),
    row("kitty", 1, 1024, 5.0),
    row("dynamic", 64, 8192, 80.0),
    failed("static-compiled", 64, 8192, oom=True),
    row("kitty", 64, 8192, 16.0, graphs=2, cudagraph_skips=1),
    failed("int4", 64, 8192),
]


def lines_of(text: str) -> dict[str, str]:
    return {line.split()[0]: line for line in text.splitlines() if line.strip()}


# Figures.


def test_speedups_are_against_the_better_of_the_baselines_at_the_same_size():
    rows = copy.deepcopy(ROWS)
    records.add_speedups(rows)
    assert (rows[3]["speedup_eager"], rows[3]["against_eager"]) == (4.0, "dynamic-nocudnn")
    assert (rows[3]["speedup_compiled"], rows[3]["against_compiled"]) == (1.2, "static-compiled")
    assert rows[0]["speedup_eager"] == 0.5
    assert rows[6]["speedup_eager"] == 5.0
    # The only compiled baseline of this size did not fit.
    assert "speedup_compiled" not in rows[6]
    assert "speedup_eager" not in rows[7]


def test_kinds_are_not_held_against_each_other():
    rows = [row("dynamic", 1, 1024, 40.0, "prefill"), row("kitty", 1, 1024, 5.0)]
    records.add_speedups(rows)
    assert "speedup_eager" not in rows[1]


@pytest.mark.parametrize("width", [120, 140])
def test_a_table_of_one_size(width):
    rows = record_of(copy.deepcopy(ROWS))["rows"]
    text = printed(report.table(rows[4:]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "decode, 64 x 8k tokens" in text
    lines = lines_of(text)
    assert "4,000" in lines["kitty"]
    assert "5.00x" in lines["kitty"]
    assert "14.40 to 19.20" in lines["kitty"]
    assert "OutOfMemoryError" in lines["static-compiled"]
    flat = " ".join(text.split())
    assert "2 graphs" in flat
    assert "skipped 1" in flat


def test_a_table_of_several_sizes_names_them():
    lines = printed(report.table([row("kitty", 32, 8192, 5.0), row("kitty", 64, 8192, 9.0)]))
    assert "kitty, 32 x 8k" in lines
    assert "kitty, 64 x 8k" in lines


def test_a_whole_row_tells_prefill_and_steps_apart():
    ms = {"p20": 100.0, "p50": 100.0, "p80": 100.0}
    more = {"ms_prefill": ms, "ms_step": 1.5, "above_bytes": 3 * 10**9}
    text = printed(report.table([row("kitty", 1, 1024, 200.0, "whole", **more)]))
    assert "added GB" in text
    assert "3.0" in text
    assert "generate, prefill included" in text
    assert "prefill 100 ms, then 1.50 ms a step" in " ".join(text.split())


LARGEST = [
    {"kind": "largest", "engine": "kitty", "context": 8192, "batch": 480, "largest": 480, "best_batch": 448}
    | {"tokens_per_s": 6000.0, "full": True},
    {"kind": "largest", "engine": "kivi-2", "context": 8192, "batch": 512, "largest": 512, "best_batch": 512}
    | {"tokens_per_s": 7000.0, "full": False},
    {"kind": "largest", "engine": "full", "context": 8192, "batch": 0, "error": "OutOfMemoryError"},
]


def test_a_table_of_what_fits():
    lines = lines_of(printed(report.largest_table(LARGEST)))
    assert "480" in lines["kitty"]
    assert "448" in lines["kitty"]
    assert "512 or more" in lines["kivi-2"]
    assert "OutOfMemoryError" in lines["full"]


def test_markdown_has_a_line_a_cache_and_a_column_a_size():
    text = report.markdown(record_of(copy.deepcopy([*ROWS, *LARGEST])))
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert lines["decode"] == "| decode | 1 x 1k | 64 x 8k |"
    assert lines["`static-compiled`"] == "| `static-compiled` | 6.00 (167) | out of memory |"
    assert lines["`int4`"] == "| `int4` |  | failed |"
    # The last table's line takes the place of the first's.
    assert lines["`kitty`"] == "| `kitty` | 8k | 480 | 6,000 | 448 |"
    assert "prefill" not in text


def test_notes_name_the_floor():
    text = " ".join(report.notes(record_of([])))
    assert "3.70 ms" in text
    assert "10.0 GB" in text
    silent = record_of([])
    silent["model"]["weight_ms_of_a_step"] = None
    assert "speed of a copy" not in " ".join(report.notes(silent))


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    more = [row(f"e{i}", batch, 8192, 5.0 + i + batch) for i in range(12) for batch in (1, 32, 64)]
    path = tmp_path / "all.png"
    assert report.save_plot(record_of(copy.deepcopy([*ROWS, *LARGEST, *more])), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    # There is nothing to compare with.
    for rows in (ROWS[:1], []):
        assert not report.save_plot(record_of(copy.deepcopy(rows)), tmp_path / "none.png")


COLD = [
    {"kind": "cold", "engine": "dynamic", "batch": 1, "context": 6, "new_tokens": 64, "after": [], "above_bytes": 10**9}
    | {"calls_s": [5.0, 2.0, 2.5], "first_token_s": [3.0, 0.1, 0.1], "tokens": "1 2", "digest": "a"},
    {"kind": "cold", "engine": "kitty", "batch": 4, "context": 300, "new_tokens": 64, "after": ["1 x 6"]}
    | {"calls_s": [7.25, 0.5], "first_token_s": [6.5, 0.1], "tokens": "1 2", "digest": "a", "above_bytes": None},
    {"kind": "cold", "engine": "int4", "batch": 1, "context": 6, "new_tokens": 64, "error": "RuntimeError: no"},
]


def test_a_table_and_lines_of_first_calls():
    lines = lines_of(printed(report.view(COLD)))
    assert all(part in lines["dynamic"] for part in ("1 x 6", "5.00", "2.00", "2.50", "3.00", "1.0"))
    assert all(part in lines["kitty"] for part in ("4 x 300", "7.25", "0.50", "6.50", "after 1 x 6"))
    assert "RuntimeError: no" in lines["int4"]
    text = report.markdown(record_of(copy.deepcopy(COLD)))
    assert "| first calls of generate, s | 1 x 6 | 4 x 300 |" in text
    assert "| `dynamic` | 5.00, 2.00, 2.50 |  |" in text
    assert "| `int4` | failed |  |" in text


def answered(engine: str, tokens: str, digest: str, ms: float = 1.0, new_tokens: int = 3) -> dict:
    return row(engine, 1, 1024, ms, "whole", tokens=tokens, digest=digest, new_tokens=new_tokens)


def test_tokens_are_held_against_those_of_eager_steps():
    rows = [
        answered("dynamic", "1 2 3", "a"),
        answered("dynamic-nocudnn", "1 2 4", "b"),
        answered("kitty", "1 5 3", "c"),
        answered("kitty:eager", "1 5 3", "c"),
        answered("int4", "7 2 3", "d"),
        answered("kitty", "1 5 3 6", "e", new_tokens=4),
        row("full", 1, 1024, 1.0, "whole", new_tokens=3),
    ]
    records.add_agreement(rows)
    assert [each.get("agrees") for each in rows] == [
        None,
        {"with": "dynamic", "tokens": 2, "all": False},
        {"with": "kitty:eager", "tokens": 3, "all": True},
        {"with": "dynamic", "tokens": 1, "all": False},
        {"with": "dynamic", "tokens": 0, "all": False},
        # The only one of its length, and one without tokens.
        None,
        None,
    ]
    text = " ".join(printed(report.table(rows), 200).split())
    assert "tokens of kitty:eager" in text
    assert "2 tokens as dynamic" in text


def test_generate_of_another_length_is_another_row():
    rows = [answered("dynamic", "1", "a", 40.0, 64), answered("kitty", "1", "a", 5.0, 256)]
    records.add_speedups(rows)
    assert "speedup_eager" not in rows[1]
    assert records.key_of(rows[0]) != records.key_of({**rows[0], "new_tokens": 256})
    text = report.markdown(record_of(rows))
    assert "| generate, prefill included, 64 tokens | 1 x 1k |" in text
    assert "| generate, prefill included, 256 tokens | 1 x 1k |" in text


def test_a_draft_s_row_says_what_was_taken():
    ms = {"p20": 100.0, "p50": 100.0, "p80": 100.0}
    more = {"forwards": 16, "accepted": 3.0, "draft_tokens": 5, "ms_prefill": ms, "ms_step": 1.5}
    text = " ".join(printed(report.table([row("kitty", 1, 1024, 200.0, "assisted", **more)]), 200).split())
    assert "generate, a model guessing" in text
    assert "16 forwards, 3.00 guesses of 5 taken" in text


# Files.


def test_names_from_before_graphs_are_read_as_they_are_now(tmp_path):
    old = record_of([row(name, 1, 1024, 5.0) for name in ("kitty", "kitty:eager", "kitty:grow", "dynamic")])
    old["rows"] += [row("arkv:budget_tokens=96", 1, 1024, 5.0), row("int4:grow", 1, 1024, 5.0, "turns", than="dynamic")]
    old["schemes"] = {"kitty": {"scheme": "kitty"}, "kitty:grow": {"scheme": "kitty"}}
    del old["modes"]
    records.save_record(old, tmp_path / "a.json")
    new = records.load(tmp_path / "a.json")
    names = ["kitty:compiled", "kitty:fixed-eager", "kitty:eager", "dynamic", "arkv:budget_tokens=96:compiled"]
    assert [each["engine"] for each in new["rows"]] == [*names, "int4:eager"]
    assert new["rows"][-1]["than"] == "dynamic"
    assert list(new["schemes"]) == ["kitty:compiled", "kitty:eager"]
    # Once is enough.
    records.save_record(new, tmp_path / "a.json")
    assert records.load(tmp_path / "a.json") == new


@pytest.mark.parametrize("path", sorted(RESULTS.glob("generate-*.json")), ids=lambda path: path.stem)
def test_figures_that_are_kept_can_be_gone_on_with(path):
    before = records.load(path)
    after = {**copy.deepcopy(before), "rows": []}
    records.resume(after, before)
    assert len(after["rows"]) == len([each for each in before["rows"] if "error" not in each or each.get("oom")])
    for kind in {each["kind"] for each in before["rows"]}:
        printed(report.view([each for each in before["rows"] if each["kind"] == kind]))
    assert report.markdown(after)


def test_a_record_survives_the_file(tmp_path):
    record = record_of(copy.deepcopy(ROWS))
    records.save_record(record, tmp_path / "a.json")
    assert records.load(tmp_path / "a.json") == record
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"kind": "hfkvq bench kernels", "rows": []}), None])
def test_a_file_that_is_no_record(tmp_path, content):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="resume: "):
        records.load(path)


def test_going_on_keeps_what_ran_and_what_did_not_fit():
    before, after = record_of(copy.deepcopy(ROWS)), record_of([])
    records.resume(after, before)
    assert [each["engine"] for each in after["rows"]] == [each["engine"] for each in ROWS[:-1]]
    assert after["resumed"] == [{"commit": "0000000", "date": before["date"], "settings": {"steps": 1}}]
    assert {each["commit"] for each in after["rows"]} == {"0000000"}
    # The bandwidth is measured each time; another value is no other model.
    faster = record_of([])
    faster["model"] = {**faster["model"], "weight_ms_of_a_step": 1.0}
    records.resume(faster, before)
    assert len(faster["rows"]) == len(ROWS) - 1
    for name, other in (
        ("gpu", {"gpu": "Synthetic 9001"}),
        ("compile", {"settings": {"compile": {"mode": "default"}}}),
    ):
        with pytest.raises(ValueError, match=f"another {name}"):
            records.resume(record_of([]) | other, before)


def test_files_in_a_folder_are_named_after_model_and_gpu(tmp_path):
    assert records.file_name(tmp_path / "a.json", "qwen3-8b", "NVIDIA H200", ".json") == tmp_path / "a.json"
    found = records.file_name(tmp_path, "Qwen/Qwen3-8B", "NVIDIA H200", ".png")
    assert found == tmp_path / "generate-qwen3-8b-h200.png"


# Runs that meet.


def test_runs_that_meet_take_turns(tmp_path):
    """None times before all are ready, no two at a time, and none prepares its next line before all have.

    A line that fails, and a run that has no more of them, keep nobody waiting.
    """
    events, start = [], time.monotonic()

    def run(name, lines):
        meeting = Meeting(tmp_path / "meet", 3, patience=60, name=name)
        for i in range(lines):
            with meeting.line(), contextlib.suppress(RuntimeError):
                events.append(("prepares", i))
                if (name, i) == ("b", 1):
                    raise RuntimeError("no memory")
                with meeting.turn():
                    events.append(("in", i))
                    time.sleep(0.05)
                    events.append(("out", i))
        meeting.leave()

    threads = [threading.Thread(target=run, args=own) for own in (("a", 3), ("b", 3), ("c", 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 30
    took = [3, 1, 2]
    assert [what for what, _ in events] == [
        what for i in range(3) for what in ("prepares",) * (3, 2, 2)[i] + ("in", "out") * took[i]
    ]
    with Meeting(tmp_path / "alone", 2, patience=0.0).turn():
        pass
    with pytest.raises(ValueError, match="of: got 0, allowed 1 or more runs"):
        Meeting(tmp_path, 0)
