"""Decode attention on every backend, against dense float64 attention over what the store is known to hold."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hfkvq.kernels import decode_attention
from tests.kernels.stores import Case, assert_as_good_as_torch, attend, build, launch_parameters

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
    ),
    **{
        f"tiles-{name}": Case(
            runs=runs, heads=1, pages=4, head_dim=dim, value_dim=dim, dtype=dtype, tail=(140, 200), sink=5,
            lengths=[5 + 256 + 60, 5 + 70, 5 + 128 + 128], starts=[0, 11, 3],
            keys=[[256], [0], [128]] if "c" in runs else [[201], [0], [128]],
            values=[[128], [0], [128]]
            if runs.endswith(("n", "t"))
            else [[190], [1], [128]] if "c" in runs else [[201], [0], [128]],
            rotate_keys=rotate, rotate_values=rotate, share=share,
        )
        for name, runs, dim, dtype, rotate, share in (
            ("2c", "2c128p128/2t128p128", 128, torch.float16, 0, 4),
            ("2c-raised-4", "2c128p128+4x20/2t128p128", 128, torch.bfloat16, 0, 7),
            ("2c-share-3", "2c128p128/2t128p128", 128, torch.bfloat16, 128, 3),
            ("4t-share-1", "4t64p128/4t64p128", 64, torch.float16, 0, 1),
            ("2c-groups", "2c32p128/2t32p128", 128, torch.float16, 0, 4),
            ("2c-groups-dim-96", "2c64p128/2t96p128", 96, torch.bfloat16, 0, 16),
            ("2c-raised-4-16", "2c32p128+4x16+16x5/2t32p128", 128, torch.bfloat16, 0, 1),
            ("2c-raised-16", "2c64p128+16x5/4t64p128", 128, torch.float16, 0, 5),
            ("4c", "4c32p128/4t32p128", 64, torch.float16, 0, 4),
            ("4t", "4t128p128/4t128p128", 128, torch.bfloat16, 128, 4),
            ("4t-blocks", "4t128p128/4t128p128", 128, torch.float16, 16, 4),
            ("4t-groups", "4t32p128/4t64p128", 128, torch.float16, 0, 6),
            ("4t-dim-80", "4t80p128/4t80p128", 80, torch.bfloat16, 16, 4),
            ("2t-dim-256", "2t256p128/2t64p128", 256, torch.bfloat16, 256, 4),
            ("8t", "8t128p128/8t128p128", 128, torch.bfloat16, 0, 4),
            ("8t-dim-96", "8t96p128/8t96p128", 96, torch.float16, 32, 8),
            ("16", "16t128p128/16t128p128", 128, torch.bfloat16, 0, 4),
            ("16-dim-80", "16t80p128/16t80p128", 80, torch.float16, 16, 3),
            ("2cn-groups", "2c32p128n/2t32p128", 128, torch.bfloat16, 0, 4),
            ("4cn-rotated", "4c128p128n/2t128p128n", 128, torch.bfloat16, 128, 7),
            ("4cn-dim-96", "4c64p128n/4t96p128n", 96, torch.float16, 32, 9),
            ("trellis", "2c128p128+4x20/2t128p128t", 128, torch.bfloat16, 0, 4),
            ("trellis-4c-dim-96", "4c64p128n/2t96p128t", 96, torch.float16, 32, 9),
            ("trellis-page-64", "2c64p64/2t64p64t", 64, torch.bfloat16, 64, 1),
            ("trellis-keys", "1c128p128t+3x64/1t128p128t", 128, torch.bfloat16, 0, 4),
            ("trellis-keys-dim-64", "1c128p128t+3x24/2t64p128t", 64, torch.float16, 0, 7),
            ("trellis-keys-dim-96", "1c128p128t/1t96p128t", 96, torch.bfloat16, 32, 1),
            ("trellis-1-bit-values", "2c128p128+4x32/1t128p128t", 128, torch.bfloat16, 0, 4),
            ("trellis-1-bit-values-dim-64", "2c128p128+4x16/1t64p128t", 64, torch.float16, 0, 3),
            ("trellis-1-bit-values-page-64", "2c64p64/1t64p64t", 64, torch.bfloat16, 0, 4),
            ("page-64", "2c64p64/2t64p64", 64, torch.bfloat16, 0, 4),
            ("page-256", "2c64p256/2t64p256", 64, torch.float16, 0, 4),
        )
    },
    "tiles-group-256": Case(
        runs="4c256p256n/4t64p256n", heads=1, head_dim=64, value_dim=64, dtype=torch.bfloat16, tail=(100, 100),
        lengths=[4 + 512 + 20, 4 + 30], keys=[[512], [0]], values=[[512], [0]],
    ),
    **{
        f"tiles-q{queries}-r{share}": Case(
            runs=runs, heads=1, head_dim=128, value_dim=128, dtype=torch.float16, queries=queries, share=share,
            tail=(140, 140), lengths=[4 + 128 + 2, 4 + 130], keys=[[128], [128]], values=[[128], [128]],
        )
        for queries, share, runs in (
            (2, 4, "2c128p128/2t128p128"),
            (5, 4, "2c128p128/2t128p128"),
            (3, 7, "4t128p128/4t128p128"),
            (16, 4, "2c32p128/2t32p128"),
            (3, 4, "2c128p128/2t128p128t"),
            (3, 4, "2c128p128+4x32/1t128p128t"),
            (3, 4, "1c128p128t+3x32/1t128p128t"),
        )
    },
    "tiles-192-128": Case(
        runs="2c128p128+4x24/2t128p128", heads=1, head_dim=192, value_dim=128, dtype=torch.bfloat16, tail=(140, 140),
        lengths=[4 + 256 + 20, 4 + 128 + 9], keys=[[256], [128]], values=[[180], [130]],
    ),
    "tiles-two-runs": Case(
        runs="2c32p128/2t32p128|4c32p128/4t32p128", heads=1, head_dim=128, value_dim=128, dtype=torch.bfloat16,
        tail=(40, 40), lengths=[4 + 256 + 20, 4 + 128 + 3], keys=[[128, 128], [0, 128]],
        values=[[128, 128], [0, 128]],
    ),
    "tiles-two-runs-q2": Case(
        runs="8t128p128/8t128p128|16t128p128/16t128p128", heads=1, head_dim=128, value_dim=128, dtype=torch.bfloat16,
        queries=2, tail=(20, 20), lengths=[4 + 330, 4 + 150], keys=[[200, 130], [19, 130]],
        values=[[200, 130], [19, 130]],
    ),
    "tiles-three-runs": Case(
        runs="2t128p128/2t128p128|4t128p128/4t128p128|16t128p128/16t128p128", heads=1, head_dim=128, value_dim=128,
        dtype=torch.bfloat16, tail=(20, 20), lengths=[4 + 330, 4 + 150], keys=[[150, 50, 129], [19, 0, 131]],
        values=[[150, 50, 129], [19, 0, 131]],
    ),
    "trellis-keys-lag": Case(
        runs="2c32p32/2t40p32t", keys=[[32], [0]], values=[[64], [32]], tail=(64, 40), value_dim=40
    ),
    "trellis-both": Case(runs="1c32p32t+3x8/1t64p32t", values=[[64], [32]]),
    "page-8": Case(runs="2c8p8/2t64p8", keys=[[64], [32]], values=[[60], [33]], pages=9),
    "8t-groups": Case(runs="8t32p32/8t16p32", dtype=torch.bfloat16),
    "2cn-2tn": Case(runs="2c32p32n/2t32p32n", values=[[64], [32]]),
    "4tn-4tn": Case(runs="4t16p32n/4t16p32n", values=[[64], [32]], dtype=torch.bfloat16),
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
    "one-empty-row": Case(lengths=[85, 0], keys=[[64], [0]], values=[[70], [0]]),
    "dim-80": Case(runs="2c32p32+4x10/2t16p32", head_dim=80, value_dim=80),
    "dim-96": Case(runs="4c16p32/2t96p32", head_dim=96, value_dim=96, dtype=torch.float16),
    "dim-256": Case(runs="2c32p32/2t256p32", head_dim=256, value_dim=256, heads=1, dtype=torch.bfloat16),
    "dim-72-48": Case(runs="2c16p32+16x3/4t24p32", head_dim=72, value_dim=48),
    "rotated": Case(runs="4t64p32/4t64p32", rotate_keys=64, rotate_values=64, dtype=torch.bfloat16),
    "rotated-blocks": Case(
        runs="2c32p32/2t80p32", head_dim=96, value_dim=80, rotate_keys=32, rotate_values=16
    ),
    "two-runs": Case(
        runs="2c32p32+4x8/2t64p32|4c32p32/4t64p32", tail=(64, 64), lengths=[4 + 128 + 20, 4 + 64 + 3],
        keys=[[64, 64], [32, 32]], values=[[64, 64], [32, 32]],
    ),
    "two-runs-token": Case(
        runs="2t64p32/2t64p32|4t64p32/4t32p32", tail=(40, 40), lengths=[4 + 110 + 20, 4 + 30 + 3],
        keys=[[60, 50], [30, 0]], values=[[60, 50], [30, 0]], dtype=torch.bfloat16,
    ),
}  # fmt: skip


WINDOWS = {
    "2c-2t": dataclasses.replace(CASES["2c-2t-raised-4-16"], window=41),
    "16-16": dataclasses.replace(CASES["16-16"], window=20, queries=3),
    "16-16-page": dataclasses.replace(CASES["16-16"], window=1),
    "tiles-2c": dataclasses.replace(CASES["tiles-2c-raised-4"], window=150),
    "tiles-4t-rotated": dataclasses.replace(CASES["tiles-4t"], window=100, queries=2),
    "tiles-16": dataclasses.replace(CASES["tiles-16"], window=130, queries=5, share=8),
    "tiles-q16": dataclasses.replace(CASES["tiles-q16-r4"], window=33),
    "tiles-all": dataclasses.replace(CASES["tiles-2c"], window=400),
    "float32": dataclasses.replace(CASES["values-lag"], window=60, queries=2),
    "float32-page-8": dataclasses.replace(CASES["page-8"], window=30),
}
WINDOWS = {name: dataclasses.replace(case, sink=0) for name, case in WINDOWS.items()}


def decode(layer, device, scaling, mask=None, sinks=None, softcap=0.0):
    """The operation under test, by the layer's own store."""
    mask = None if mask is None else mask.to(device)
    sinks = None if sinks is None else sinks.to(device)
    return decode_attention(*layer.to(device), mask, sinks, scaling, softcap, layer.case.store)


# The interpreter runs these formats in `test_pages_by_the_page`, with more pages to a program.
BY_THE_PAGE = (
    *("tiles-2c", "tiles-4t-share-1", "tiles-2c-raised-4-16", "tiles-4t-groups", "tiles-8t", "tiles-16-dim-80"),
    *("tiles-4cn-dim-96", "tiles-page-64", "tiles-q2-r4", "tiles-three-runs", "tiles-two-runs-q2"),
)
# Formats that share what they are read with, and queries by the dozen, which take long.
ALIKE = (
    *("tiles-2c-share-3", "tiles-2c-raised-16", "tiles-2cn-groups", "tiles-2c-groups", "tiles-4t", "tiles-4c"),
    *("tiles-8t-dim-96", "tiles-16", "tiles-q16-r4", "tiles-q3-r7", "q16-r16", "dim-256", "dim-96", "4t-4t"),
    *(
        "tiles-trellis",
        "tiles-2c-groups-dim-96",
        "tiles-q5-r4",
        "tiles-4t-dim-80",
        "tiles-page-256",
        "tiles-2t-dim-256",
    ),
)


@pytest.mark.interpreted(*(name for name in CASES if name not in BY_THE_PAGE + ALIKE))
@pytest.mark.parametrize("name", CASES)
def test_decode(backend, name):
    layer = build(CASES[name])
    scaling = layer.case.head_dim**-0.5
    got = decode(layer, backend, scaling)
    assert got.dtype == layer.case.dtype
    exact, plain = attend(layer, torch.float64, scaling), attend(layer, layer.case.dtype, scaling)
    assert_as_good_as_torch(got, exact, plain)


@pytest.mark.interpreted("2c-2t", "16-16-page", "float32", "tiles-4t-rotated")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "none") for name in WINDOWS),
        *((name, kind) for name in ("16-16", "tiles-2c", "float32") for kind in ("causal", "short", "softcap-sinks")),
        ("2c-2t", "bool"),
        ("tiles-16", "bool"),
    ],
)
def test_window(backend, name, kind):
    """A query sees the newest tokens up to its own; what has fallen out of sight is not read, whatever is there now."""
    layer = build(WINDOWS[name])
    case, scaling = layer.case, layer.case.head_dim**-0.5
    mask = shown = sinks = None
    if kind in ("causal", "bool", "short"):
        shown = torch.rand(len(case.lengths), 1, case.queries, columns_of(layer)) > (0.0 if kind == "causal" else 0.4)
        ends = [a + b for a, b in zip(case.starts, case.lengths, strict=True)]
        newest = torch.tensor(ends)[:, None] - case.queries + torch.arange(case.queries)
        shown &= (torch.arange(shown.shape[-1]) <= newest[..., None])[:, None]
        mask = shown
    if kind == "short":
        # As many columns as the row that sees most has, the last of which is every row's newest.
        case = dataclasses.replace(case, starts=[max(ends) - length for length in case.lengths])
        layer = build(case)
        newest = max(ends) - case.queries + torch.arange(case.queries)
        shown &= torch.arange(shown.shape[-1]) <= newest[:, None]
        mask = shown[..., : max(ends)][..., -(case.window + case.queries - 1) :]
    if kind == "softcap-sinks":
        sinks = torch.randn(layer.q.shape[1]).to(case.dtype)
    softcap = 0.0 if sinks is None else 5.0
    got = decode(layer, backend, scaling, mask, sinks, softcap)
    exact, plain = (attend(layer, dtype, scaling, shown, sinks, softcap) for dtype in (torch.float64, case.dtype))
    assert_as_good_as_torch(got, exact, plain)


def columns_of(layer):
    """Logical columns of a mask: the longest padded row, and a few more as static masks have."""
    return max(a + b for a, b in zip(layer.case.starts, layer.case.lengths, strict=True)) + 3


FEATURES = {
    "plain": Case(queries=3),
    "raised-bf16": Case(runs="2c32p32+4x16+16x5/2t64p32", dtype=torch.bfloat16, share=5),
    "rotated": Case(runs="4t64p32/4t64p32", rotate_keys=64, rotate_values=64, queries=2),
    "two-runs": CASES["two-runs"],
    "tiles": dataclasses.replace(CASES["tiles-2c-raised-4"], queries=2, share=4),
    "tiles-rotated": CASES["tiles-4t"],
    "tiles-normed": Case(
        runs="4c32p32n/2t64p32n", values=[[64], [32]], rotate_keys=64, rotate_values=64, dtype=torch.bfloat16
    ),
    "tiles-two-runs": CASES["tiles-two-runs-q2"],
}


MASKS = ["bool", "float", "int", "bfloat16", "heads", "row", "queries"]


# Every kind for loose tokens, for full pages and for several runs; the two that differ in arithmetic for all.
@pytest.mark.interpreted("plain", "tiles-two-runs")
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in FEATURES for kind in (MASKS if name in ("plain", "tiles", "two-runs") else MASKS[:2])],
)
def test_masks(backend, name, kind):
    """Masks select logical columns; every axis but the last may be broadcast."""
    layer = build(FEATURES[name])
    case, scaling = layer.case, 0.3
    shape = {
        "heads": (len(case.lengths), case.heads * case.share, case.queries),
        "row": (1, 1, 1),
        "queries": (1, 1, case.queries),
    }.get(kind, (len(case.lengths), 1, case.queries))
    mask = torch.rand(*shape, columns_of(layer)) > 0.4
    if kind == "int":
        mask = mask.long() * 3
    elif kind in ("float", "bfloat16"):
        mask = torch.randn(mask.shape).masked_fill(~mask, -torch.inf).to(getattr(torch, kind))
    elif kind == "heads":
        # As models hand it over: a view that is expanded and sliced.
        mask = torch.cat([mask, mask], -1)[..., : mask.shape[-1]]
    got = decode(layer, backend, scaling, mask)
    exact = attend(layer, torch.float64, scaling, mask)
    assert_as_good_as_torch(got, exact, attend(layer, case.dtype, scaling, mask))


def test_a_query_that_sees_nothing_is_zero(backend):
    layer = build(Case(queries=2))
    mask = torch.ones(2, 1, 2, columns_of(layer), dtype=torch.bool)
    mask[0, :, 1] = False
    got = decode(layer, backend, 0.3, mask).cpu()
    assert not got[0, :, 1].any()
    assert got[0, :, 0].any()
    sinks = torch.zeros(layer.q.shape[1])
    assert not decode(layer, backend, 0.3, mask, sinks).cpu()[0, :, 1].any()


@pytest.mark.interpreted("raised-bf16", "tiles-normed", "two-runs")
@pytest.mark.parametrize("name", FEATURES)
def test_sinks(backend, name):
    layer = build(FEATURES[name])
    sinks = torch.randn(layer.q.shape[1]).mul(4).to(layer.case.dtype)
    got = decode(layer, backend, 0.2, None, sinks)
    # A part of something larger is as good.
    assert torch.equal(decode(layer, backend, 0.2, None, torch.stack([sinks, -sinks], 1).to(backend)[:, 0]), got)
    exact = attend(layer, torch.float64, 0.2, None, sinks)
    assert_as_good_as_torch(got, exact, attend(layer, layer.case.dtype, 0.2, None, sinks))
    assert (exact - attend(layer, torch.float64, 0.2)).abs().max() > 1e-4


@pytest.mark.interpreted("plain")
@pytest.mark.parametrize("name", ["plain", "tiles"])
def test_rows_take_turns_with_sinks(backend, name):
    """As many lists of sinks as rows: each row has its own."""
    layer = build(FEATURES[name])
    batch, heads = layer.q.shape[:2]
    sinks = torch.linspace(-3.0, 3.0, batch * heads).to(layer.case.dtype)
    got = decode(layer, backend, 0.2, None, sinks).cpu()
    alone = [decode(layer, backend, 0.2, None, own).cpu() for own in sinks.view(batch, heads)]
    for row in range(batch):
        assert torch.equal(got[row], alone[row][row])
        assert not torch.equal(got[row], alone[row - 1][row])


@pytest.mark.interpreted("plain", "tiles-normed")
@pytest.mark.parametrize(("name", "softcap"), [*((name, 0.5) for name in FEATURES), ("plain", 20.0), ("tiles", 20.0)])
def test_softcap(backend, name, softcap):
    layer = build(FEATURES[name])
    mask = torch.rand(1, 1, layer.case.queries, columns_of(layer)) > 0.2
    got = decode(layer, backend, 0.2, mask, None, softcap)
    exact = attend(layer, torch.float64, 0.2, mask, None, softcap)
    assert_as_good_as_torch(got, exact, attend(layer, layer.case.dtype, 0.2, mask, None, softcap))


def test_small_values_of_small_probability(triton_backend):
    """Where one token has most of the weight, the many others still add up: nothing of fp8 values is lost."""
    case = Case(
        runs="16t64p128/8t64p128", heads=1, head_dim=64, value_dim=64, dtype=torch.float16, sink=0, tail=(16, 16),
        lengths=[512], starts=[0], keys=[[512]], values=[[512]],
    )  # fmt: skip
    layer = build(case)
    layer.q = torch.zeros_like(layer.q)
    layer.q[..., 0] = 1.0
    keys, scale = layer.runs[1], layer.runs[-1]
    keys.masked_fill_(keys.isnan(), 0.0)[..., 0] = 0.0
    keys[layer.runs[0][0, 1].long(), :, 7, 0] = 8.0
    layer.dense_keys[..., 0] = 0.0
    layer.dense_keys[:, :, 128 + 7, 0] = 8.0
    # As stored: the scale that is left has rounded.
    small = (scale.double() / 512).half()
    factor = small.double() / scale.double()
    scale.copy_(small)
    layer.dense_values *= factor[layer.runs[0][0].long()].transpose(0, 1).reshape(1, 1, 512, 1)
    exact, plain = attend(layer, torch.float64, 1.0), attend(layer, torch.float16, 1.0)
    assert_as_good_as_torch(decode(layer, triton_backend, 1.0), exact, plain)


@pytest.mark.parametrize("name", ["2c-2t-raised-4-16", "values-lag", "two-runs", "rotated-blocks"])
def test_a_row_is_the_same_alone(backend, name):
    """What the batch mates of a row hold changes nothing, not even which splits add up to it."""
    case = CASES[name]
    layer, other = build(case), build(case, seed=1)
    for own, foreign in ((layer.q, other.q), *zip(layer.windows, other.windows, strict=True)):
        own[1] = foreign[1]
    layer.counters[1, 1] -= 5
    expected = decode(build(case), backend, 0.2).cpu()
    assert torch.equal(decode(layer, backend, 0.2).cpu()[0], expected[0])


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("tiles")])
def test_tiles_take_the_main_kernel(name):
    """The cases above would pass without it as well."""
    from hfkvq.kernels.triton.decode_formats import is_served

    case = CASES[name]
    assert is_served(case.store.spec, case.head_dim, case.value_dim, case.dtype)


@pytest.mark.parametrize("backend", ["interpret"], indirect=True)
def test_short_rows_have_parts_of_pages_as_programs(monkeypatch, backend):
    """Of as many programs as only a GPU runs at a time."""
    runs, step = "8t128p128/8t128p128", 64
    pair_format = pytest.importorskip("hfkvq.kernels.triton.pair_format")
    from hfkvq.kernels.triton import decode as launcher
    from hfkvq.kernels.triton import decode_plan as planner

    # Pages that are full, that are not, and that are none; what is not in pages; and one row without any.
    layer = build(
        Case(
            runs=runs, heads=1, head_dim=128, value_dim=128, dtype=torch.bfloat16, sink=0, tail=(150, 150),
            lengths=[256 + 20, 40], starts=[0, 0], keys=[[256], [0]], values=[[256], [0]],
        )
    )  # fmt: skip
    made, plan = [], planner.plan_of.__wrapped__

    def noted(*args):
        made.append(plan(*args))
        return made[-1]

    monkeypatch.setattr(launcher, "plan_of", noted)
    monkeypatch.setattr(planner, "multiprocessors", lambda device: 132)
    got = decode(layer, backend, 0.1)
    (launch,) = made[0].launches
    assert launch.constants["SHAPE"].FORMATS[0].step == step
    assert (launch.numbers["MODE"] & pair_format.FINE, launch.numbers["PAGES0"]) == (1, layer.case.pages * 128 // step)
    exact = attend(layer, torch.float64, 0.1)
    assert_as_good_as_torch(got, exact, attend(layer, torch.bfloat16, 0.1))
    # Long rows have steps that suit the format, in the same program.
    scoring = planner.Scoring(None, None, 0.1, 0.0)
    query = planner.Queries((1, 4, 1, 128), (512, 128, 512, 1), torch.bfloat16)
    long = plan(layer.case.store.spec, query, (1, 128, 32, 32), (4096,), scoring, torch.device("cpu"), 0, False)
    assert long.launches[0].numbers["MODE"] & pair_format.FINE == 0
    assert long.launches[0].constants["SHAPE"].FORMATS[0].step == step


# Formats that the loop over pages takes in ways of their own.
@pytest.mark.interpreted(*BY_THE_PAGE)
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "none") for name in CASES if name.startswith("tiles")]
    + [
        (name, kind)
        for name in ("tiles-2c-raised-4", "tiles-4t", "tiles-2c-groups", "tiles-two-runs-q2", "tiles-q3-r7")
        for kind in ("bool", "queries")
    ],
)
def test_pages_by_the_page(triton_backend, name, kind):
    """Splits of several pages each, where a GPU has room for many."""
    layer = build(CASES[name], seed=1)
    case, scaling = layer.case, layer.case.head_dim**-0.5
    mask = None
    if kind != "none":
        mask = torch.rand(len(case.lengths), 1, case.queries if kind == "queries" else 1, columns_of(layer)) > 0.4
        # Nothing of the first page can be seen.
        mask[0, ..., : case.sink + case.store.runs[0][0].page_size] = False
    exact = attend(layer, torch.float64, scaling, mask)
    plain = attend(layer, case.dtype, scaling, mask)
    for programs in (1, 4) if triton_backend.type == "cuda" else (1,):
        with launch_parameters("decode", programs_per_sm=programs):
            assert_as_good_as_torch(decode(layer, triton_backend, scaling, mask), exact, plain)


def outliers(side, x):
    """Some key channels, and some values' channels, are a thousand times the others."""
    x[..., 5::37] *= 1000.0
    return x


def constant(side, x):
    """Groups of tokens, and whole tokens, without any range."""
    x[:, :, 32:64] = 0.75
    x[:, :, 70] = -2.0
    return x


def huge_token(side, x):
    """One token among the sealed ones is huge."""
    x[:, :, 40] *= 2000.0
    return x


def tiny(side, x):
    """Key scales of subnormal f16, and values whose products with probabilities come near to that."""
    return x * 1e-3 if side == "values" else x * 1e-5


def equal_keys(side, x):
    """Every token weighs the same."""
    return x[:, :, :1].expand_as(x).clone() if side == "keys" else x


@pytest.mark.interpreted("tiles-2c-groups", turns=2, over=("change",))
@pytest.mark.parametrize("change", [outliers, constant, huge_token, tiny, equal_keys])
@pytest.mark.parametrize("name", ["tiles-2c-raised-4", "tiles-2c-groups", "tiles-4t-blocks", "tiles-8t"])
def test_adverse_data(triton_backend, name, change):
    layer = build(CASES[name], change=change)
    scaling = layer.case.head_dim**-0.5
    exact, plain = attend(layer, torch.float64, scaling), attend(layer, layer.case.dtype, scaling)
    assert_as_good_as_torch(decode(layer, triton_backend, scaling), exact, plain)


def test_hidden_tokens_may_be_no_numbers(triton_backend):
    """Two tokens share a row of 16-bit channels, so one that a mask hides must not reach the other."""
    case = Case(
        runs="2c32p128+16x5/2t64p128", heads=1, dtype=torch.bfloat16, tail=(140, 140), lengths=[4 + 128 + 9],
        starts=[0], keys=[[128]], values=[[128]], pages=2,
    )  # fmt: skip
    q, counters, windows, runs = build(case).to(triton_backend)
    mask = torch.ones(1, 1, 1, 141, dtype=torch.bool, device=triton_backend)
    mask[..., 4 + 3] = False
    asked = (counters, windows, runs, mask, None, 0.125, 0.0, case.store)
    expected = decode_attention(q, *asked)
    full = next(x for x in runs if x.dtype == torch.bfloat16 and x.shape[-1] == 8)
    full[:, :, 3] = torch.inf
    torch.testing.assert_close(decode_attention(q, *asked), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["2c-2t-raised-4-16", "values-lag", "two-runs"])
def test_loose_tokens_in_smaller_blocks(triton_backend, name):
    """As where a multiprocessor has little shared memory."""
    case = CASES[name]
    layer = build(case)
    with launch_parameters("decode", loose=16):
        got = decode(layer, triton_backend, 0.2)
    assert_as_good_as_torch(got, attend(layer, torch.float64, 0.2), attend(layer, case.dtype, 0.2))
