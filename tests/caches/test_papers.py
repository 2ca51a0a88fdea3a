"""Kitty, KIVI and ARKV at the papers' sizes, against plain reimplementations that share no code with the library."""

from __future__ import annotations

import pytest
import torch

from hfkvq import get_scheme
from tests.caches.driver import HEADS, SHARE, feed, feed_as_is, forward, join, make, row

# A page of either side fills 44 steps behind the prompt.
PROMPT, STEPS, WIDE = 500, 60, 128
TOTAL = PROMPT + STEPS


def rounded(x, axis, bits):
    """What is read of a group: scale and minimum in float16, codes against them, half up."""
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    levels = 2.0**bits - 1
    scale, low = ((high - low).float() / levels).half().double(), low.half().double()
    return torch.minimum(torch.floor((x - low) / scale + 0.5).clamp(min=0), levels) * scale + low


def by_token(x, group, bits):
    """Tokens (n, D), each ``group`` channels by themselves."""
    return rounded(x.unflatten(1, (-1, group)), 2, torch.tensor(float(bits))).flatten(1)


def by_channel(x, group, bits):
    """A page (G, D): each channel of ``group`` tokens by itself, at its own bits."""
    return rounded(x.unflatten(0, (-1, group)), 1, bits).flatten(0, 1)


def kitty(keys, values, boosted, values_bits=2, sink=32, page=128, local=128, unit=128):
    """Figure 1, token by token: what is read of (T, D) keys and values when all have come; values go by ``unit``."""
    out, done = [keys.clone(), values.clone()], [sink, sink]
    for length in range(PROMPT, TOTAL + 1):
        while length - done[0] >= page:
            own = slice(done[0], done[0] + page)
            bits = torch.full((keys.shape[1],), 2.0)
            bits[keys[own].abs().mean(0).argsort(descending=True)[:boosted]] = 4.0
            out[0][own], done[0] = by_channel(keys[own], page, bits), done[0] + page
        while length - done[1] >= local + unit:
            own = slice(done[1], done[1] + unit)
            out[1][own], done[1] = by_token(values[own], values.shape[1], values_bits), done[1] + unit
    return out


def kivi(keys, values, key_bits, value_bits, group, sink=0, residual=128):
    """Algorithm 1: keys by blocks of R tokens, values one by one as they leave the newest R."""
    out, done = [keys.clone(), values.clone()], sink
    for length in range(PROMPT, TOTAL + 1):
        while length - done >= residual:
            own = slice(done, done + residual)
            out[0][own], done = by_channel(keys[own], group, torch.tensor(float(key_bits))), done + residual
    own = slice(sink, TOTAL - residual)
    out[1][own] = by_token(values[own], min(group, values.shape[1]), value_bits)
    return out


CASES = {
    "kitty": ("kitty", {}, lambda k, v: kitty(k, v, 16)),
    "kitty-pro": ("kitty-pro", {}, lambda k, v: kitty(k, v, 32)),
    "kitty, its simulator": ("kitty", {"value_unit": 1}, lambda k, v: kitty(k, v, 16, unit=1)),
    "kivi-2": ("kivi-2", {}, lambda k, v: kivi(k, v, 2, 2, 32)),
    "kivi-K4V2*": ("kivi-2", {"sink_length": 32, "key_bits": 4}, lambda k, v: kivi(k, v, 4, 2, 32, 32)),
    "kivi-K2V4*, g = 128": (
        "kivi-2",
        {"sink_length": 32, "value_bits": 4, "group_size": 128},
        lambda k, v: kivi(k, v, 2, 4, 128, 32),
    ),
}


@pytest.mark.rounding
@pytest.mark.parametrize("name", CASES)
def test_pages_are_the_papers(name):
    """Table 2's and Table 3's caches after a prompt and steps: the same windows, and codes but for ties of float32."""
    preset, knobs, plain = CASES[name]
    layer, own = make(get_scheme(preset, **knobs)), row(1, TOTAL, dim=WIDE)
    feed_as_is(layer, [own], [PROMPT, *[1] * STEPS])
    for head in range(HEADS):
        expected = plain(own.keys[head].double(), own.values[head].double())
        for side, given, want in zip(("keys", "values"), (own.keys, own.values), expected, strict=True):
            got = layer.dense(side)[0, head].double()
            whole = (want == given[head]).all(1)
            assert torch.equal(got[whole], want[whole])
            assert (got[~whole] != given[head][~whole]).any(1).all()
            same = (got - want).abs() < 1e-5
            assert same.float().mean() > 0.9995, side


def released_scores(queries, keys, window, gamma):
    """Eq. (9) as the released code has it: (H, past), of the attention of the newest queries to older keys."""
    length = keys.shape[1]
    logits = queries[:, -window:] @ keys.repeat_interleave(SHARE, 0).mT * keys.shape[2] ** -0.5
    seen = torch.arange(length) <= torch.arange(length - queries[:, -window:].shape[1], length)[:, None]
    paid = logits.masked_fill(~seen, -torch.inf).softmax(-1)[:, :, : length - 32]
    score = paid.mean(1) + (gamma * paid.var(1) if paid.shape[1] > 1 else 0)
    score = torch.nn.functional.pad(score, (2, 2)).unfold(1, 5, 1).mean(-1)
    return score.unflatten(0, (HEADS, SHARE)).mean(1)


def test_arkv_keeps_the_papers_tokens():
    """C = 512, W = 32: a prompt keeps its best 480 and the window; the step beyond floor(.75 past) of what is left."""
    scheme, own = get_scheme("arkv-origin", budget_tokens=512), row(3, 702)
    layer = make(scheme)
    feed(layer, [own], [700])
    first = [sorted(x) for x in kept_columns(layer)]
    best = (
        released_scores(own.queries[:, :700].double(), own.keys[:, :700].double(), 32, scheme.gamma).topk(480).indices
    )
    for head in range(HEADS):
        assert first[head] == [*sorted(best[head].tolist()), *range(668, 700)]
    forward(layer, *join([own[700:701]]))
    for head, held in enumerate(kept_columns(layer)):
        columns = torch.tensor([*first[head], 700])
        keys = own.keys[:, columns].double()
        score = released_scores(own.queries[:, 700:701].double(), keys, 32, 0.0)[head]
        stays = columns[score.topk(int(0.75 * (513 - 32))).indices]
        assert sorted(held) == [*sorted(stays.tolist()), *range(669, 701)]


def kept_columns(layer):
    """Columns whose keys a head still holds: others are 0."""
    return [set(x.abs().sum(1).nonzero().flatten().tolist()) for x in layer.dense("keys")[0]]
