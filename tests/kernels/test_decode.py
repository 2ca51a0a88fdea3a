"""Decode attention on every backend, against dense float64 attention over what the store is known to hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hfkvq.kernels import decode_attention, gather_rows, use_interpreter
from hfkvq.kernels.decode import _decode_attention

from tests.kernels.stores import Case, assert_as_good_as_torch, attend, build

CASES = {
    "2c-2t": Case(),
    "2c-2t-raised-4": Case(runs="2c32p32+4x9/2t64p32"),
    "2c-2t-raised-4-16": Case(runs="2c32p32+4x16+16x5/2t64p32", dtype=torch.bfloat16),
    "4c-2t-raised-16": Case(runs="4c32p32+16x8/2t16p32"),
    "2c-groups": Case(runs="2c8p32+4x8/2t32p32"),
    "4t-4t": Case(runs="4t64p32/4t64p32", keys=[[70], [33]], values=[[70], [33]], tail=(20, 20)),
    "4t-4t-groups": Case(runs="4t16p32/4t8p32", keys=[[69], [30]], values=[[70], [33]]),
    "2t-4t": Case(runs="2t32p32/4t32p32", keys=[[64], [32]], values=[[64], [32]]),
    "16-16": Case(runs="16t64p32/16t64p32", dtype=torch.bfloat16),
    "8-8": Case(runs="8t64p32/8t64p32", dtype=torch.bfloat16),
    "16-4": Case(runs="16c64p32/4t64p32", dtype=torch.float16),
    "page-128": Case(
        runs="2c128p128+4x16/2t128p128", head_dim=128, value_dim=128, heads=1, pages=3, tail=(150, 130), sink=32,
        lengths=[32 + 256 + 100], starts=[5], keys=[[256]], values=[[356 - 90]], dtype=torch.bfloat16,
    ),  # fmt: skip
    "page-24": Case(runs="2c12p24+4x8/4t16p24", keys=[[72], [24]], values=[[70], [30]], pages=5),
    "page-8": Case(runs="2c8p8/2t64p8", keys=[[64], [32]], values=[[60], [33]], pages=9),
    "r1": Case(share=1),
    "r5": Case(share=5),
    "r7-q3": Case(share=7, queries=3),
    "q16": Case(queries=16, share=2, lengths=[85, 40]),
    "q16-r16": Case(queries=16, share=16, heads=1, lengths=[85, 40]),
    "keys-lag": Case(keys=[[32], [0]], values=[[70], [33]], tail=(64, 40)),
    "values-lag": Case(keys=[[64], [32]], values=[[30], [0]], tail=(40, 64)),
    "values-all-in-tail": Case(keys=[[64], [32]], values=[[0], [0]], tail=(40, 96)),
    "empty-tail": Case(lengths=[4 + 64, 4 + 32], values=[[64], [32]]),
    "no-sink": Case(sink=0, lengths=[81, 35], values=[[70], [32]]),
    "only-sink": Case(lengths=[4, 2], keys=[[0], [0]], values=[[0], [0]]),
    "no-pages": Case(lengths=[30, 7], keys=[[0], [0]], values=[[0], [0]]),
    "one-empty-row": Case(lengths=[85, 0]),
    "dim-80": Case(runs="2c32p32+4x10/2t16p32", head_dim=80, value_dim=80),
    "dim-96": Case(runs="4c16p32/2t96p32", head_dim=96, value_dim=96, dtype=torch.float16),
    "dim-256": Case(runs="2c32p32/2t256p32", head_dim=256, value_dim=256, heads=1, dtype=torch.bfloat16),
    "dim-72-48": Case(runs="2c16p32+16x3/4t24p32", head_dim=72, value_dim=48),
    "rotated": Case(runs="4t64p32/4t64p32", rotate_keys=64, rotate_values=64, dtype=torch.bfloat16),
    "rotated-blocks": Case(runs="2c32p32/2t80p32", head_dim=96, value_dim=80, rotate_keys=32, rotate_values=16),
    "two-runs": Case(
        runs="2c32p32+4x8/2t64p32|4c32p32/4t64p32", tail=(40, 64), lengths=[4 + 128 + 20, 4 + 64 + 3],
        keys=[[64, 64], [32, 32]], values=[[50, 64], [32, 20]],
    ),  # fmt: skip
    "two-runs-token": Case(
        runs="2t64p32/2t64p32|4t64p32/4t32p32", tail=(40, 40), lengths=[4 + 110 + 20, 4 + 30 + 3],
        keys=[[60, 50], [30, 0]], values=[[61, 50], [30, 3]], dtype=torch.bfloat16,
    ),  # fmt: skip
}  # fmt: skip
CASES["one-empty-row"] = replace(CASES["one-empty-row"], keys=[[64], [0]], values=[[70], [0]])


def decode(layer, device, scaling, mask=None, sinks=None, softcap=0.0):
    """The operation under test, by the layer's own store."""
    mask = None if mask is None else mask.to(device)
    sinks = None if sinks is None else sinks.to(device)
    return decode_attention(*layer.to(device), mask, sinks, scaling, softcap, layer.case.store)


@pytest.mark.parametrize("name", CASES)
def test_decode(backend, name):
    layer = build(CASES[name])
    scaling = layer.case.head_dim**-0.5
    got = decode(layer, backend, scaling)
    assert got.dtype == layer.case.dtype
    exact, plain = attend(layer, torch.float64, scaling), attend(layer, layer.case.dtype, scaling)
    assert_as_good_as_torch(got, exact, plain)
