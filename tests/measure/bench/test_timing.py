"""What timing decides without a GPU, and one timing with one."""

from __future__ import annotations

import pytest
import torch

from hfkvq.measure.bench.timing import copies_for, quantiles, time_calls


@pytest.mark.parametrize(("nbytes", "copies"), [(1000, 1), (400, 1), (399, 2), (100, 4), (1, 400), (0, 400)])
def test_copies_make_four_caches(nbytes, copies):
    assert copies_for(nbytes, 100) == copies


def test_quantiles():
    assert quantiles([float(x) for x in range(11)]) == pytest.approx((2.0, 5.0, 8.0))
    assert quantiles([3.0]) == (3.0, 3.0, 3.0)


@pytest.mark.gpu
def test_a_call_of_twice_the_size_takes_twice_the_time():
    x = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    small, large = (time_calls([lambda part=x[:size]: part.add_(1)], 20) for size in (2**27, 2**28))
    assert small.p20 <= small.p50 <= small.p80
    # Wide bounds: others may use the GPU at the same time.
    assert 1.3 < large.p50 / small.p50 < 3.0
    assert small.calls > large.calls >= 1
