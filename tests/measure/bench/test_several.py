"""Several queries of each row: what they are held against, and that a prompt's time is that of right attention."""

from __future__ import annotations

import pytest
import torch

from hfkvq.caches import behind
from hfkvq.measure.bench import run, several
from hfkvq.measure.bench.cases import Shape, as_dict
from hfkvq.measure.bench.report import shape_of
from hfkvq.measure.bench.rows import add_speedups, row_of
from hfkvq.measure.bench.timing import Timing
from tests.caches.driver import attention, with_sums

CPU = torch.device("cpu")
SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": "float16"}


def data_of(shape):
    """Random tensors on the CPU: the generator of `Shape.data` is a GPU's."""
    columns = shape.context + (shape.queries if shape.is_prompt else 0)
    sizes = ((shape.heads, shape.queries), (shape.kv_heads, columns), (shape.kv_heads, columns))
    return tuple(torch.randn(shape.batch, heads, tokens, shape.head_dim).half() for heads, tokens in sizes)


def test_a_prompt_stands_behind_its_context():
    step, prompt = Shape(1, 300, queries=16), Shape(1, 300, queries=17)
    assert (step.is_prompt, prompt.is_prompt) == (False, True)
    assert "300 tokens, 16 queries, 32/8" in step.title
    assert "300 tokens, 17 queries behind them, 32/8" in prompt.title
    # The same fields as ever where there is one query, so that earlier files can be compared with.
    assert "queries" not in as_dict(Shape(1, 300))
    row = row_of(prompt, "x", "format", "failed", 0, None)
    assert (row["queries"], shape_of(row)) == (17, prompt)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"queries": 0}, "queries: got 0, allowed 1 or more"),
        ({"queries": 12, "context": 8}, "no more than the context's tokens"),
        ({"queries": 2, "rope_dim": 64}, "allowed 1 of latents"),
    ],
)
def test_queries_that_make_no_sense(given, message):
    with pytest.raises(ValueError, match=message):
        Shape(**{"batch": 1, "context": 300, **given})


def test_bounds_are_no_baselines(monkeypatch):
    """What shows later tokens is told, and no speed-up is against it."""
    shape = Shape(1, 60, queries=5, **SMALL)
    shown = [("right", Timing(3, 3, 3, 1, 1, 1), ""), ("open", Timing(1, 1, 1, 1, 1, 1), several.OPEN)]
    monkeypatch.setattr(Shape, "data", lambda self, device: data_of(self))
    monkeypatch.setattr(run, "cache_size", lambda device: 1)
    monkeypatch.setattr(run, "measure_baselines", lambda *rest: iter(shown))
    rows = list(run.measure_shape(shape, [], CPU, None, 3))
    add_speedups(rows)
    assert [(row["kind"], row["speedup"], row["against"]) for row in rows] == [
        ("baseline", 1.0, "right"),
        ("bound", 3.0, "right"),
    ]


def test_what_prompts_and_steps_are_held_against(monkeypatch):
    """The right ones agree with plain attention; what this machine lacks is noted."""
    shape, outs = Shape(1, 60, queries=5, **SMALL), {}
    query, keys, values = (x.float() for x in data_of(shape))

    def time_calls(calls, replays):
        outs[len(outs)] = calls[0]()
        return Timing(1, 1, 1, 1, len(calls), replays)

    monkeypatch.setattr(several, "time_calls", time_calls)
    found = list(several.measure_several(shape, query, [(keys, values)], 3))
    packed = ["flash SDPA, packed", "cuDNN SDPA, packed"]
    assert [name for name, *_ in found] == ["flash SDPA", "cuDNN SDPA", *packed, "cuDNN SDPA, mask"]
    assert all(isinstance(measured, str) for name, measured, _ in found if name.startswith("cuDNN"))
    assert torch.allclose(outs[0], attention(query, keys, values, None, shape.scaling), atol=1e-4)
    monkeypatch.setattr(several, "MOST_MASK", 10)
    assert len(list(several.measure_several(shape, query, [(keys, values)], 3))) == 4
    monkeypatch.setattr(behind, "flash", with_sums)
    prompt = Shape(1, 60, queries=20, **SMALL)
    names = ["flash SDPA", "cuDNN SDPA", "SDPA, as we ask for it"]
    assert [name for name, *_ in several.measure_several(prompt, query, [(keys, values)], 3)] == names
    # Dense keys and values go the other way as soon as a format's do.
    monkeypatch.setattr(behind, "LOST", 3 * 4 * 20 * 60)
    own = data_of(prompt)[0].float(), *(x.float() for x in data_of(prompt)[1:])
    asked = []
    monkeypatch.setattr(behind, "pays", lambda *rest: asked.append(rest))
    found = list(several.measure_several(prompt, own[0], [own[1:]], 3))
    assert [name for name, *_ in found] == [*names, "SDPA, as we ask for it, length again"]
    assert len(asked) == 1 + 4 + 1


def test_lengths_that_come_again():
    """1k behind 32k do, longer prompts take the other way at once, and short ones would need more calls than come."""
    calls = [several.calls_until_again(Shape(1, *size, queries=1024)) for size in ((32768,), (131072,), (1024,))]
    assert calls == [65, 0, 0]
    assert several.calls_until_again(Shape(1, 8192, queries=1024)) == 257


@pytest.mark.parametrize("name", ["int4", "saw-int4-kv"])
def test_a_prompts_time_is_of_attention_over_all(monkeypatch, name):
    shape, outs = Shape(1, 300, queries=20, **SMALL), []
    query, keys, values = data_of(shape)
    monkeypatch.setattr(several, "peak_of", lambda call: 3 << 20)
    monkeypatch.setattr(behind, "flash", with_sums)

    def time_calls(calls, replays):
        outs.append(calls[0]())
        return Timing(1, 1, 1, 1, 1, replays)

    monkeypatch.setattr(several, "time_calls", time_calls)
    monkeypatch.setattr(behind, "likes_cudnn", lambda *rest: False)
    monkeypatch.setattr(behind, "LOST", 3 * query.shape[:3].numel() * 300)
    (title, _, nbytes, spec, remark), again = several.measure_prompt(shape, name, (query, keys, values), 3)
    assert (title, again[0]) == (name, f"{name}, length again")
    assert 0 < nbytes < keys.nbytes + values.nbytes
    assert spec
    assert remark.startswith("peak 3 MiB with the output, which has 0; dense keys and values 0")
    exact = attention(query, keys, values, None, shape.scaling).float()
    # Coarse pages, whole new tokens: like, and not the same.
    error = (outs[0].float() - exact).norm() / exact.norm()
    assert 0 < error < 0.5
