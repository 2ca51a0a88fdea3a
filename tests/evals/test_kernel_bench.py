"""Times of kernels: nothing wrong is timed, copies and quantiles, and what is saved and shown."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from evals import kernel_bench as kernels
from evals import kernel_tuning
from evals.kernel_bench import METHOD, Timing, add_speedups, row_of, self_check
from evals.kernel_cases import Shape
from hfkvq.caches.store import KVStore
from hfkvq.kernels.triton import configs
from tests.command import printed

CPU = torch.device("cpu")
SMALL = Shape(1, 8, heads=2, kv_heads=1, head_dim=64)

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")


def timing(us: float) -> Timing:
    return Timing(0.9 * us, us, 1.2 * us, 100, 4, 30)


def rows_of(shape: Shape, **times: float | str) -> list[dict]:
    """Invented lines: names with an underscore are baselines."""
    rows = []
    for name, time in times.items():
        measured = timing(time) if isinstance(time, float) else time
        rows.append(
            row_of(shape, name, "baseline" if name.startswith("_") else "format", measured, 2_000_000, 4e12, spec="s0")
        )
    add_speedups(rows)
    return rows


def record_of(rows: list[dict]) -> kernels.Record:
    return {
        "kind": kernels.KIND,
        "gpu": "Synthetic 9000",
        "versions": {"torch": "0.0", "triton": "0.0"},
        "commit": "0000000",
        "date": "2000-01-01T00:00:00+00:00",
        "method": METHOD,
        "copy": {"tb_per_s": 4.0},
        "rows": rows,
    }


def test_speedup_is_against_the_fastest_unquantized_kernel():
    rows = {row["name"]: row for row in rows_of(Shape(1, 8192), _a="no", _b=30.0, _c=20.0, kitty=10.0, full="full")}
    assert (rows["kitty"]["speedup"], rows["kitty"]["against"]) == (2.0, "_c")
    assert rows["_b"]["speedup"] == pytest.approx(2 / 3)
    assert "speedup" not in rows["full"]
    peer = row_of(Shape(1, 8192), "peer", "peer", timing(8.0), 1, None) | {"quantized": False}
    both = [*rows.values(), peer, peer | {"name": "quantized", "quantized": True, "us": {"p50": 1.0}}]
    add_speedups(both)
    assert rows["kitty"]["against"] == "peer"


def test_table_and_comparison():
    rows = rows_of(Shape(32, 32768), _plain=940.0, kitty=200.0, full="OutOfMemoryError: no room")
    text = printed(kernels.table(rows), width=100)
    assert "32 x 32k tokens, 32/8 heads of 128, bfloat16" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "180.0 to 240.0" in lines["kitty"]
    assert "4.70x" in lines["kitty"]
    assert "OutOfMemoryError: no room" in lines["full"]
    before = record_of(rows_of(Shape(1, 8192), _plain=20.0, a=10.0, b=10.0, gone=1.0, broken="x"))
    after = record_of(rows_of(Shape(1, 8192), _plain=20.0, a=10.49, b=10.51, new=1.0, broken=1.0))
    text = printed(kernels.compare_table(before, after))
    lines = {line.split()[3]: line for line in text.splitlines() if "1 x 8k" in line}
    assert set(lines) == {"_plain", "a", "b"}
    assert "slower" not in lines["a"]
    assert "+5.1 %" in lines["b"]
    assert "slower" in lines["b"]


# The self-check.


@needs_interpreter
def test_self_check(monkeypatch):
    # Without a GPU both sides are the reference.
    assert self_check(["kitty", "fp8+16"], [SMALL], CPU) == {"kitty": 0, "fp8+16": 0}
    attend, in_reference = KVStore.attend, []

    @contextlib.contextmanager
    def reference():
        in_reference.append(True)
        yield
        in_reference.pop()

    def wrong(store, query, arguments):
        out = attend(store, query, arguments)
        return out if in_reference or not store.format.sink else out * 1.05

    monkeypatch.setattr(kernels, "use_reference", reference)
    monkeypatch.setattr(KVStore, "attend", wrong)
    with pytest.raises(ValueError, match=r"kitty by 0\.0") as caught:
        self_check(["2-bit", "kitty"], [SMALL], CPU)
    assert "2-bit" not in str(caught.value)


# Whole runs.


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Runs on the CPU, with invented times: 5 us for each call."""
    properties = SimpleNamespace(
        name="Synthetic 9000", major=9, minor=0, multi_processor_count=2, L2_cache_size=10**5, total_memory=10**9
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(kernels, "bench_device", lambda: CPU)
    monkeypatch.setattr(kernel_tuning, "bench_device", lambda: CPU)
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda device: (10**6, Timing(1, 1, 1, 1, 1, 1)))
    configs.renew()

    def invented(calls, replays):
        calls[0]()
        return Timing(5.0, 5.0, 5.0, len(calls), len(calls), replays)

    monkeypatch.setattr(kernels, "time_calls", invented)
    monkeypatch.setattr(kernels, "_baselines", lambda shape: {"dense": kernels.F.scaled_dot_product_attention})
    yield
    configs.renew()


SAME = ["--heads", "2", "--kv-heads", "2", "--head-dim", "64"]
"""Heads that plain attention takes without grouping."""


@needs_interpreter
def test_a_whole_run(pretended_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels, "self_check", lambda *rest: {"kitty": 0.0})
    arguments = [*SAME, "--sizes", "1x200,1x1k", "--formats", "kitty,fp8+16"]
    kernels.main([*arguments, "--json", str(tmp_path)])
    record = kernels.load(tmp_path / "kernels-synthetic-9000.json")
    assert [(row["context"], row["name"]) for row in record["rows"]] == [
        (context, name) for context in (200, 1024) for name in ("dense", "kitty", "fp8+16")
    ]
    assert all(row["speedup"] == 1 and row["bytes"] > 0 for row in record["rows"])
    assert record["rows"][1]["spec"].startswith("s32;k0;v0;2c")
    capsys.readouterr()
    again = kernels.main([*arguments, "--compare", str(tmp_path / "kernels-synthetic-9000.json"), "--minutes", "0"])
    assert len(again["rows"]) == 1
    said = capsys.readouterr().out
    assert "+0.0 %" in said
    assert "slower" not in said
    assert "Stopped after 0 minutes" in said


# Times.
