"""Append: the windows hold what rotating and placing each token by hand puts there, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, StoreFormat, append, hadamard
from tests.kernels.stores import poison

LENGTH = 1


def store_of(sink=0, rotate_keys=0, rotate_values=0):
    side = PageFormat(16, "token", 1, 16)
    return StoreFormat(((side, side),), sink, rotate_keys, rotate_values)


def arguments(tokens, sink, dims=(64, 48), lengths=(0, 3, 45), tails=(17, 20), heads=2, dtype=torch.float32):
    """New keys and values as attention hands them over, rows of these lengths, and windows of NaN."""
    torch.manual_seed(1)
    batch = len(lengths)
    new = [torch.randn(batch, tokens, heads, dim).mul(3).to(dtype).transpose(1, 2) for dim in dims]
    counters = torch.tensor([[5] * batch, lengths, [7] * batch, [9] * batch], dtype=torch.int32)
    windows = [
        poison(torch.empty(batch, heads, size, dim, dtype=dtype))
        for size, dim in zip((sink, sink, *tails), (*dims, *dims), strict=True)
    ]
    return new, counters, windows


def run(device, new, counters, windows, store):
    """The operation on a device: counters and windows after it, on the CPU."""
    new, counters, windows = ([x.to(device) for x in new], counters.to(device), [x.to(device) for x in windows])
    counters, windows = counters.clone(), [x.clone() for x in windows]
    append(*new, counters, windows, store)
    return counters.cpu(), [x.cpu() for x in windows]


def by_hand(new, counters, windows, store):
    """One token at a time."""
    counters, windows = counters.clone(), [x.clone() for x in windows]
    for side, (x, block) in enumerate(zip(new, (store.rotate_keys, store.rotate_values), strict=True)):
        x = hadamard(x, block)
        for row, length in enumerate(counters[LENGTH].tolist()):
            for token in range(x.shape[2]):
                at = length + token
                if at < store.sink:
                    windows[side][row, :, at] = x[row, :, token]
                else:
                    tail = windows[2 + side]
                    tail[row, :, (at - store.sink) % tail.shape[2]] = x[row, :, token]
    counters[LENGTH] += new[0].shape[2]
    return counters, windows


def bits(x):
    return x.contiguous().view(torch.uint8)


CASES = {
    "step": {"tokens": 1, "sink": 4},
    "few": {"tokens": 5, "sink": 4},
    "no-sink": {"tokens": 3, "sink": 0},
    "into-sink": {"tokens": 16, "sink": 40},
    "rotated": {"tokens": 5, "sink": 4, "rotate_keys": 64, "rotate_values": 16},
    "keys-rotated": {"tokens": 2, "sink": 4, "rotate_keys": 2},
    "odd-dims": {"tokens": 4, "sink": 4, "dims": (80, 33), "rotate_keys": 16},
    "wide": {"tokens": 16, "sink": 8, "dims": (256, 192), "heads": 5, "rotate_keys": 256, "rotate_values": 64},
    "one-row": {"tokens": 1, "sink": 32, "lengths": (31,), "dims": (128, 128), "heads": 8, "rotate_keys": 128},
    "half": {"tokens": 2, "sink": 4, "dtype": torch.float16, "rotate_keys": 32},
    "bfloat": {"tokens": 3, "sink": 4, "dtype": torch.bfloat16},
    "bfloat-rotated": {"tokens": 3, "sink": 4, "dtype": torch.bfloat16, "rotate_keys": 64, "rotate_values": 16},
}


@pytest.mark.parametrize("case", CASES)
def test_every_token_in_its_place(backend, case):
    knobs = dict(CASES[case])
    rotate = {name: knobs.pop(name) for name in ("rotate_keys", "rotate_values") if name in knobs}
    store = store_of(knobs["sink"], **rotate)
    new, counters, windows = arguments(**knobs)
    got_counters, got = run(backend, new, counters, windows, store)
    expected_counters, expected = by_hand(new, counters, windows, store)
    assert torch.equal(got_counters, expected_counters)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(bits(a), bits(b))


def test_more_tokens_than_slots():
    new, counters, windows = arguments(18, 4)
    with pytest.raises(ValueError, match="allowed at most 17"):
        append(*new, counters, windows, store_of(4))
