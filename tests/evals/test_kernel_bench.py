"""Kernels: shapes and bytes, times, copies and quantiles, a search over invented times, and others' kernels."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from evals import kernel_bench as kernels
from evals import kernel_cases, kernel_tuning
from evals.kernel_bench import Timing, add_speedups, error_of, row_of, self_check, shape_of
from evals.kernel_cases import (
    RAW,
    Shape,
    as_dict,
    bytes_read,
    fill,
)
from evals.other_kernels import kitty, kivi, turboquant
from evals.other_kernels.split_kv import GRID, split_kv
from hfkvq.caches.store import KVStore
from hfkvq.caches.store.accounting import nbytes
from hfkvq.kernels import use_interpreter
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.triton import configs

CPU = torch.device("cpu")
SMALL = Shape(2, 517, heads=4, kv_heads=2, head_dim=64)


@pytest.mark.parametrize("name", RAW)
def test_raw_formats_attend_as_torch_does_to_what_they_hold(name):
    query, keys, values = SMALL.data(CPU)
    store = fill(name, keys, values)
    assert store.longest == SMALL.context
    got = store.attend(query, AttentionArguments(SMALL.scaling))
    held = [store.dense(side, SMALL.context).float() for side in ("keys", "values")]
    exact = torch.nn.functional.scaled_dot_product_attention(query.float(), *held, enable_gqa=True)
    assert error_of(got, exact) < 0.01
    # The pages were quantized, each element to something near.
    assert 0 < error_of(held[0], keys) < 0.6


@pytest.mark.parametrize("name", ["2-bit", "int4", "full", "triaxial-pages", "fp8+16"])
def test_bytes_are_those_of_the_tensors_where_all_of_them_is_read(name):
    shape = Shape(2, 512, heads=4, kv_heads=2, head_dim=64)
    query, keys, values = shape.data(CPU)
    store = fill(name, keys, values)
    held = nbytes(store.state)
    # Rows are alike and hold whole pages of each width, or all tokens where scales are per token; some, 16 of a sink.
    sink = store.layout.sink
    pages = (held.codes + held.metadata) * (512 - sink) // 512 + 2 * shape.batch * 2 * sink * 64 * 2
    if name == "fp8+16":
        counts = store.counters[2::2, 0].tolist()
        pages = sum(
            count * shape.batch * sum(part[0].nbytes for part in (*view.keys, *view.values)) // 128
            for count, view in zip(counts, store.runs, strict=True)
        )
        assert pages <= held.codes + held.metadata
    assert bytes_read(store, query) == pages + 2 * query.nbytes


def test_bytes_of_windows_and_of_sides_sealed_apart():
    # Sink 32; keys are sealed by the page, values stay whole for 128 tokens more.
    shape = Shape(3, 32 + 3 * 128 + 50, heads=4, kv_heads=2, head_dim=64)
    query, keys, values = shape.data(CPU)
    store = fill("kitty", keys, values)
    assert store.counters[2:, 0].tolist() == [3 * 128, 2 * 128]
    plane, scales, high, index = 128 * 64 // 4, 2 * 2 * 64, 16 * 8 * 2, 8
    key_page, value_page = plane + scales + high, plane + 2 * 2 * 128
    windows = (32 + 50 + 32 + 128 + 50) * 64 * 2
    a_row = 2 * (3 * (key_page + index) + 2 * value_page + windows)
    assert bytes_read(store, query) == 3 * a_row + 2 * query.nbytes


def test_latents():
    """16 query heads over one latent of 512 channels, and 64 of rotary parts, which other shapes do not tell of."""
    shape = Shape.of_latents(2, 200, 16)
    query, latents, rotary = shape.data(CPU)
    assert (query.shape, latents.shape, rotary.shape) == ((2, 16, 1, 576), (2, 1, 200, 512), (2, 1, 200, 64))
    assert as_dict(shape)["rope_dim"] == 64
    assert "rope_dim" not in as_dict(Shape(2, 200))
    assert shape_of(as_dict(shape)) == shape
    store = fill("latent-4", latents, rotary)
    assert store.format.latent
    # Codes, a scale and a minimum; codes and a scale; and what is kept whole.
    read = 2 * 40 * (256 + 4 + 64 + 2) + 2 * 160 * 576 * 2
    assert bytes_read(store, query) == 2 * query.nbytes + read


TINY = Shape(1, 8, heads=2, kv_heads=1, head_dim=64)

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


def test_speedup_is_against_the_fastest_unquantized_kernel():
    rows = {row["name"]: row for row in rows_of(Shape(1, 8192), _a="no", _b=30.0, _c=20.0, kitty=10.0, full="full")}
    assert (rows["kitty"]["speedup"], rows["kitty"]["against"]) == (2.0, "_c")
    assert rows["_b"]["speedup"] == pytest.approx(2 / 3)
    assert "speedup" not in rows["full"]
    peer = row_of(Shape(1, 8192), "peer", "peer", timing(8.0), 1, None) | {"quantized": False}
    both = [*rows.values(), peer, peer | {"name": "quantized", "quantized": True, "us": {"p50": 1.0}}]
    add_speedups(both)
    assert rows["kitty"]["against"] == "peer"


@needs_interpreter
def test_self_check(monkeypatch):
    # Without a GPU both sides are the reference.
    assert self_check(["kitty", "fp8+16"], [TINY], CPU) == {"kitty": 0, "fp8+16": 0}
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
        self_check(["2-bit", "kitty"], [TINY], CPU)
    assert "2-bit" not in str(caught.value)


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


KEY = "2c128/2t128,D128,N8"
START = dict(configs.DEFAULTS["decode"])


def search(model, start=START):
    """Searches where ``model(knobs)`` gives the times."""
    said = []

    timers = [lambda i=i: model(configs.lookup(CPU, "decode", KEY))[i] for i in range(len(model(start)))]
    configs.try_out("decode", KEY, start)
    found = kernel_tuning.search("decode", KEY, start, timers, lambda what, share: said.append((what, share)))
    configs.try_out("decode", KEY, None)
    assert all(0 <= share < 1 for _, share in said)
    return found, [what for what, _ in said]


def test_grid_and_knobs_are_the_same():
    assert {kernel: set(grid) for kernel, grid in kernel_tuning.GRID.items()} == {
        kernel: set(knobs) for kernel, knobs in configs.DEFAULTS.items()
    }


def test_the_best_of_each_knob_are_tried_together():
    found, said = search(lambda knobs: [100.0 + 5 * abs(knobs["stages"] - 3) + abs(knobs["programs_per_sm"] - 6)])
    assert found.after == {**START, "stages": 3, "programs_per_sm": 6}
    assert found.share == pytest.approx(100 / 112)
    assert said[-1] == f"{KEY} programs_per_sm 6, stages 3"


def test_variants_of_a_format():
    """Variants are those that a launch takes, and nothing is launched for them."""
    configs.renew()
    with use_interpreter():
        wanted = list(kernel_cases.attending("int4", Shape(1, 160, 2, 1, 32, "float16"), CPU))
    assert [kernel for _, kernel, _ in configs.ANSWERS] == ["decode"]
    assert {each.kernel.__name__ for each in wanted} == {"decode_kernel", "merge_kernel"}
    prompt = Shape(1, 160, 2, 1, 32, "float16", queries=20)
    assert not list(kernel_cases.attending("int4", prompt, CPU)), "a launch compiles what dequantizes pages"
    stored = {each.kernel.__name__ for each in kernel_cases.storing("int4", prompt, CPU)}
    assert {"seal_token_kernel", "advance_kernel"} <= stored


def test_codes_come_back_from_their_words():
    x = torch.randn(2, 64, 3).half()
    for bits, most in ((2, 0.5), (4, 0.1)):
        words, scale, least = kivi.pack(x, bits, 1)
        assert words.shape == (2, 64 * bits // 32, 3)
        assert error_of(kivi.unpacked(words, scale, least, bits, 1), x) < most
    assert kitty.two_bits(torch.tensor([0b11100100], dtype=torch.uint8)).tolist() == [0, 1, 2, 3]
    assert turboquant.unpack(torch.tensor([0b10001000, 0b11000110, 0b11111010]), 3, 8).tolist() == list(range(8))
    matrix = turboquant.rotation(8, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix, torch.eye(8))


def exact(data):
    return F.scaled_dot_product_attention(*(x.double() for x in data), enable_gqa=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter")
@pytest.mark.parametrize("context", [128, 131])
def test_plain_triton(context):
    shape = Shape(2, context, 4, 2, 32)
    data = shape.data(torch.device("cpu"))
    assert error_of(split_kv(*data, shape.scaling), exact(data)) < 0.005


@pytest.mark.gpu
def test_every_variant_of_plain_triton_gives_the_same():
    shape = Shape(2, 5000)
    data = shape.data(torch.device("cuda"))
    for tuning in GRID:
        assert error_of(split_kv(*data, shape.scaling, tuning), exact(data)) < 0.005
