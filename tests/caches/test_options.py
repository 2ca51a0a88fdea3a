"""Options beyond the papers: values rotated, values clipped, keys normed."""

import pytest
import torch

from hfkvq import get_scheme
from hfkvq.caches.store import KVStore, clipped


def test_clipped_by_hand():
    """Rank floor(0.75 * 4) = 3 of the magnitudes 1, 2, 3, 8 is 3."""
    source = torch.tensor([[[[9.0, 9.0, 9.0, 9.0], [1.0, -8.0, 3.0, -2.0]]]])
    index = torch.tensor([[1, 1, 0]], dtype=torch.int32)
    got = clipped(source, index, 0.75)
    assert got.tolist() == [[[[1, -3, 3, -2], [1, -3, 3, -2], [9, 9, 9, 9]]]]
    assert source[0, 0, 1, 1] == -8


def test_clipped_keeps_everything_at_one():
    source = torch.randn(2, 3, 5, 8)
    index = torch.arange(5, dtype=torch.int32).expand(2, -1)
    assert torch.equal(clipped(source, index, 1.0), source)


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


def test_clipped_values_are_clipped_only_when_sealed():
    values, got = stored_values(128 + 7, clip_values=0.95)
    assert torch.equal(got[:, :, 128:], values[:, :, 128:])
    # Rank floor(0.95 * 64) = 60: four of 64 channels are clipped, the huge one always.
    limit = values[:, :, :128].abs().kthvalue(60, -1).values
    assert (got[:, :, :128].abs().amax(-1) <= limit * 1.01).all()
    assert (values[:, :, :128].abs().amax(-1) > limit * 1.01).all()


@pytest.mark.parametrize("share", [0.4, 1.1, float("nan")])
def test_clip_out_of_range(share):
    with pytest.raises(ValueError, match="clip_values: got"):
        get_scheme("kitty", clip_values=share)


@pytest.mark.parametrize("name", ["kitty", "mixkvq-error-only", "kivi"])
def test_keys_of_unlike_size_lose_less_normed(name):
    """A few keys ten times the others, as where no norm precedes attention."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 1, 256, 64, generator=generator)
    keys[:, :, 5::16] *= 10.0
    error = []
    for normed in (False, True):
        scheme = get_scheme(name, sink_length=0, token_norm=normed)
        store = KVStore(scheme.layout(64, 64), scheme, keys, values)
        store.extend(keys, values)
        others = torch.arange(256) % 16 != 5
        error.append((store.dense("keys", 256) - keys)[:, :, others].square().mean())
    assert error[1] < 0.2 * error[0]
