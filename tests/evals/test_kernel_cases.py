"""Shapes, formats and their bytes."""

from __future__ import annotations

import pytest
import torch

from evals.kernel_bench import error_of, shape_of
from evals.kernel_cases import (
    RAW,
    Shape,
    as_dict,
    bytes_read,
    fill,
)
from hfkvq.kernels.arguments import AttentionArguments

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
    held = store.nbytes()
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
