"""Options beyond the papers: values rotated."""

import torch

from hfkvq import get_scheme
from hfkvq.caches.store import KVStore


def stored_values(tokens, **knobs):
    """Values (1, 1, tokens, 64) with one huge channel, and what a store makes of them."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 1, tokens, 64, generator=generator)
    values[..., 5] *= 40.0
    scheme = get_scheme("kitty", sink_length=0, local_length=0, **knobs)
    store = KVStore(scheme.layout(64, 64), scheme, keys, values)
    store.extend(keys, values)
    return values, store.dense("values", tokens)


def test_rotated_values_come_back_and_lose_less():
    values, plain = stored_values(256)
    _, rotated = stored_values(256, rotate_values=True)
    others = torch.arange(64) != 5
    error = [(x - values)[..., others].square().mean() for x in (plain, rotated)]
    assert error[1] < 0.5 * error[0]
    assert (rotated - values).abs().max() < (plain - values).abs().max() * 40
