"""Records, tables, pictures and comparisons, from invented figures."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hfkvq.measure.bench import report
from hfkvq.measure.bench.cases import Shape
from hfkvq.measure.bench.rows import add_speedups, row_of
from hfkvq.measure.bench.timing import METHOD, Timing
from tests.command import printed


def timing(us: float) -> Timing:
    return Timing(0.9 * us, us, 1.2 * us, 100, 4, 30)


def rows_of(shape: Shape, **times: float | str) -> list[dict]:
    """Invented lines: names with an underscore are baselines."""
    rows = [
        row_of(
            shape,
            name,
            "baseline" if name.startswith("_") else "format",
            timing(time) if isinstance(time, float) else time,
            2_000_000,
            4e12,
        )
        for name, time in times.items()
    ]
    add_speedups(rows)
    return rows


def record_of(rows: list[dict], gpu: str = "Synthetic 9000") -> report.Record:
    return {
        "kind": report.KIND,
        "gpu": gpu,
        "versions": {"torch": "0.0", "triton": "0.0"},
        "commit": "0000000",
        "date": "2000-01-01T00:00:00+00:00",
        "method": METHOD,
        "copy": report.describe_copy(4_000_000, timing(1.0)),
        "rows": rows,
    }


def test_a_line_has_rate_and_share_of_the_copy():
    row = row_of(Shape(1, 8192), "kitty", "format", timing(2.0), 2_000_000, 4e12, spec="s0")
    assert row["us"] == pytest.approx({"p20": 1.8, "p50": 2.0, "p80": 2.4})
    assert row["tb_per_s"] == pytest.approx(1.0)
    assert row["share_of_copy"] == pytest.approx(0.25)
    assert (row["batch"], row["context"], row["spec"], row["calls"], row["copies"]) == (1, 8192, "s0", 100, 4)
    assert report.shape_of(row) == Shape(1, 8192)


def test_speedup_is_against_the_fastest_baseline_that_ran():
    rows = {row["name"]: row for row in rows_of(Shape(1, 8192), _a="no", _b=30.0, _c=20.0, kitty=10.0, full="full")}
    assert (rows["kitty"]["speedup"], rows["kitty"]["against"]) == (2.0, "_c")
    assert rows["_c"]["speedup"] == 1.0
    assert rows["_b"]["speedup"] == pytest.approx(2 / 3)
    assert rows["full"]["error"] == "full"
    assert "speedup" not in rows["full"]
    assert "speedup" not in rows_of(Shape(1, 8192), _a="no", kitty=10.0)[1]


def test_copy_bandwidth():
    assert report.describe_copy(4_000_000, timing(1.0))["tb_per_s"] == pytest.approx(4.0)


@pytest.mark.parametrize("width", [100, 120])
def test_table(width):
    rows = rows_of(Shape(32, 32768), _plain=940.0, kitty=200.0, full="OutOfMemoryError: no room")
    rows[0]["remark"] = "4 programs"
    text = printed(report.table(rows), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "32 x 32k tokens, 32/8 heads of 128, bfloat16" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "4 programs" in lines["_plain"]
    assert "180.0 to 240.0" in lines["kitty"]
    assert "4.70x" in lines["kitty"]
    assert "OutOfMemoryError: no room" in lines["full"]


def test_a_table_without_a_baseline_or_copy():
    rows = [row_of(Shape(1, 8192), "kitty", "format", timing(2.0), 2_000_000, None)]
    assert "–" in printed(report.table(rows))


def test_a_record_survives_the_file(tmp_path: Path):
    record = record_of(rows_of(Shape(1, 8192), _plain=20.0, kitty=10.0, full="full"))
    report.save(record, tmp_path / "a.json")
    assert report.load(tmp_path / "a.json") == record


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"kind": "something else", "rows": []}), None])
def test_a_file_that_is_no_record(tmp_path: Path, content):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="compare: "):
        report.load(path)


def test_compare_flags_what_became_slower_by_more_than_five_per_cent():
    shape, other = Shape(1, 8192), Shape(32, 8192)
    before = record_of(rows_of(shape, _plain=20.0, a=10.0, b=10.0, c=10.0, gone=1.0, broken="x"))
    after = record_of(
        [*rows_of(shape, _plain=20.0, a=10.49, b=10.51, c=5.0, broken=1.0), *rows_of(other, a=10.0, new=1.0)]
    )
    changes = {line["name"]: line for line in report.compare(before, after)}
    assert set(changes) == {"_plain", "a", "b", "c"}
    assert [round(changes[name]["change"], 1) for name in ("_plain", "a", "b", "c")] == [0.0, 4.9, 5.1, -50.0]
    assert [name for name, line in changes.items() if line["regression"]] == ["b"]
    assert changes["a"]["shape"] == shape
    text = printed(report.compare_table(before, after))
    assert "0000000 of 2000-01-01 on Synthetic 9000" in text
    slower = [line for line in text.splitlines() if "slower" in line]
    assert len(slower) == 1
    assert "+5.1 %" in slower[0]
    assert "1 x 8k" in slower[0]


def test_dtype_and_heads_are_part_of_the_shape():
    before = record_of(rows_of(Shape(1, 8192, dtype="float16"), a=1.0) + rows_of(Shape(1, 8192, heads=8), a=1.0))
    assert report.compare(before, record_of(rows_of(Shape(1, 8192), a=9.0))) == []


def test_notes_say_how_it_was_measured():
    text = " ".join(report.notes(record_of(rows_of(Shape(1, 8192), a=1.0))))
    assert "4.00 TB/s" in text
    assert "CUDA graph" in text
    assert "cold" in text


def test_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [
        row
        for batch in (1, 32)
        for context in (1024, 8192, 32768)
        for row in rows_of(Shape(batch, context), _p=20.0, a=10.0 + batch, b="x", **{f"f{i}": 9.0 for i in range(11)})
    ]
    assert report.save_plot(record_of(rows), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert not report.save_plot(record_of([]), tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()


def test_files_in_a_folder_are_named_after_the_gpu(tmp_path: Path):
    assert report.file_name(tmp_path / "a.json", "NVIDIA H200", ".json") == tmp_path / "a.json"
    assert report.file_name(tmp_path, "NVIDIA H200", ".json") == tmp_path / "kernels-h200.json"
    assert report.file_name(tmp_path, "NVIDIA GeForce RTX 4090", ".png") == tmp_path / "kernels-rtx-4090.png"


def test_the_commit_is_what_git_says(tmp_path: Path):
    assert report.commit_of(None) == ""
    assert report.commit_of(tmp_path) == ""
    (tmp_path / ".git").mkdir()
    assert report.commit_of(tmp_path) == ""
    (tmp_path / ".git").rmdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    try:
        subprocess.run([*git, "init", "-q"], check=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "m"], check=True)
    assert len(report.commit_of(tmp_path)) >= 7
