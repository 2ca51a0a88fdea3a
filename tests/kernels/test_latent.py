"""Attention to latents on every backend, against dense float64 attention over what the store is known to hold."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hfkvq.kernels import decode_attention
from hfkvq.kernels.pages import StoreFormat
from tests.kernels.stores import Case, assert_as_good_as_torch, attend, build, launch_parameters

WINDOWS = {"tail": (40, 40), "lengths": [4 + 150 + 17, 4 + 32 + 3], "keys": [[150], [32]], "values": [[150], [32]]}

CASES = {
    name: Case(
        runs=runs, heads=1, share=share, head_dim=dim, value_dim=rope, pages=pages, dtype=dtype, **WINDOWS | more
    )
    for name, runs, share, dim, rope, pages, dtype, more in (
        ("4-8", "4t512p128/8t64p128", 16, 512, 64, 2, torch.bfloat16, {"rotate_keys": 512}),
        ("4-16", "4t128p128/16t1p128", 16, 512, 64, 2, torch.float16, {"rotate_keys": 128}),
        ("4-8, small", "4t32p64/8t32p64", 5, 64, 32, 3, torch.bfloat16, {"rotate_keys": 16}),
        ("8-16", "8t512p128/16t1p128", 16, 512, 64, 2, torch.bfloat16, {}),
        ("8-16, rotated", "8t256p64/16t1p64", 3, 256, 32, 3, torch.float16, {"rotate_keys": 256}),
        ("16-16", "16t1p128/16t1p128", 16, 512, 64, 2, torch.bfloat16, {"sink": 70, "lengths": [230, 110]}),
        ("16-16, 40 heads", "16t1p64/16t1p64", 40, 64, 16, 3, torch.float16, {}),
        ("4-8, several", "4t128p128/8t32p128", 4, 128, 32, 2, torch.bfloat16, {"queries": 5, "rotate_keys": 128}),
        ("4-8, one block", "4t256p64/8t64p64", 16, 256, 64, 3, torch.bfloat16, {"rotate_keys": 256}),
        ("no kernel", "4t24p64/16t1p64", 4, 48, 12, 3, torch.float32, {"rotate_keys": 16}),
    )
}


def latents(case: Case, seed: int = 0, change=None):
    """A layer of a case, with queries of both parts, and the same as keys and values for plain attention."""
    layer = build(case, seed, change)
    width = case.head_dim + case.value_dim
    q = torch.randn(len(case.lengths), case.queries, case.share, width).to(case.dtype).transpose(1, 2)
    plain = dataclasses.replace(
        layer, q=q, dense_keys=torch.cat([layer.dense_keys, layer.dense_values], -1), dense_values=layer.dense_keys
    )
    form = case.store
    return plain, StoreFormat(form.runs, form.sink, form.rotate_keys, form.rotate_values, latent=True)


def checked(case, device, mask=None, sinks=None, softcap=0.0, change=None):
    """`decode_attention` is as good as plain attention."""
    layer, form = latents(case, change=change)
    q, counters, windows, runs = layer.to(device)
    placed = [None if x is None else x.to(device) for x in (mask, sinks)]
    got = decode_attention(q, counters, windows, runs, *placed, 0.07, softcap, form)
    exact, plain = (attend(layer, dtype, 0.07, mask, sinks, softcap) for dtype in (torch.float64, case.dtype))
    assert got.dtype == case.dtype
    assert_as_good_as_torch(got, exact, plain)


@pytest.mark.interpreted(*(name for name in CASES if name not in ("4-16", "8-16", "16-16, 40 heads")))
@pytest.mark.parametrize("name", CASES)
def test_latents_are_attended_to(backend, name):
    checked(CASES[name], backend)


@pytest.mark.parametrize("kind", ["bool", "float", "by head", "sinks", "softcap"])
def test_masks_sinks_and_softcap(backend, kind):
    case = CASES["4-8, small"]
    mask = None
    longest = max(start + length for start, length in zip(case.starts, case.lengths, strict=True))
    if kind in ("bool", "float"):
        mask = torch.rand(2, 1, 1, longest) > 0.3
        mask = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -1e4)
    if kind == "by head":
        mask = torch.randn(1, case.share, 1, longest)
    checked(case, backend, mask, torch.randn(case.share) if kind == "sinks" else None, 3.0 * (kind == "softcap"))


@pytest.mark.interpreted(turns=3, over=("name", "grow"))
@pytest.mark.parametrize("name", ["4-8", "8-16", "16-16"])
@pytest.mark.parametrize("grow", [0.3, 1.0, 30.0])
def test_maxima_that_move_from_step_to_step(triton_backend, name, grow):
    """Sums are rescaled in some steps and not in others, or in every one: by little, and by more than f16 holds."""

    def change(side, x):
        return x * torch.linspace(0.1, grow, x.shape[2])[:, None]

    with launch_parameters("latent", step=32, programs_per_sm=1):
        checked(CASES[name], triton_backend, change=change)


def test_rows_without_tokens(backend):
    """A row that holds nothing gives 0, and does not disturb the others."""
    case = dataclasses.replace(
        CASES["4-8, small"], lengths=[0, 40], keys=[[0], [20]], values=[[0], [20]], starts=[3, 0]
    )
    layer, form = latents(case)
    q, counters, windows, runs = layer.to(backend)
    got = decode_attention(q, counters, windows, runs, None, None, 0.07, 0.0, form)
    assert (got[0] == 0).all()
    assert torch.isfinite(got).all()


def test_several_queries_see_no_later_token(backend):
    """Of several new tokens each sees those up to itself: as if the later ones had not come."""
    case = dataclasses.replace(
        CASES["4-8, several"], lengths=[90], keys=[[60]], values=[[60]], starts=[0], dtype=torch.float16
    )
    layer, form = latents(case)
    q, counters, windows, runs = layer.to(backend)
    several = decode_attention(q, counters, windows, runs, None, None, 0.07, 0.0, form)
    counters[1] -= 3
    one = decode_attention(q[:, :, 1:2], counters, windows, runs, None, None, 0.07, 0.0, form)
    torch.testing.assert_close(several[:, :, 1:2], one, atol=2e-3, rtol=2e-3)


def test_a_latent_format_has_a_name_of_its_own():
    form = StoreFormat.parse("ls4;k512;v0;4t512p128/8t64p128")
    assert form.latent
    assert StoreFormat.parse(form.spec) == form
    assert not StoreFormat.parse(form.spec[1:]).latent


@pytest.mark.parametrize("runs", ["4c32p128/8t64p128", "4t64p64/4t32p64|8t64p64/8t32p64"])
def test_what_cannot_be_attended_to_as_latents(runs):
    with pytest.raises(ValueError, match="latent"):
        StoreFormat.parse(f"ls0;k0;v0;{runs}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["4-8", "8-16", "16-16"])
def test_kernel_is_captured(name):
    """Nothing is asked of the host: a graph replays a step after tokens have come."""
    layer, form = latents(CASES[name])
    q, counters, windows, runs = layer.to(torch.device("cuda"))

    def attended():
        return decode_attention(q, counters, windows, runs, None, None, 0.07, 0.0, form)

    attended()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attended()
    counters[1] -= 1
    graph.replay()
    torch.testing.assert_close(out, attended(), atol=0, rtol=0)
