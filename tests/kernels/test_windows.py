"""The rule of what is due: numbers, tensors and kernels find the same, and what they find is what the rule says."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfkvq.kernels.windows import most_due, tokens_due, tokens_due_by_row

ROWS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=1, max_size=8)
LOCAL, UNIT = st.integers(0, 600), st.integers(1, 300)


@given(st.integers(0, 5000), st.integers(0, 5000), LOCAL, UNIT)
def test_what_is_due(rest, sealed, local, unit):
    """Whole units; after them the newest ``local`` are left, and less than a unit of others."""
    due = tokens_due(rest, sealed, local, unit)
    assert due >= 0
    assert tokens_due(rest, sealed + due, local, unit) == 0
    if due:
        assert (sealed + due) % unit == 0
        assert rest - local - unit < sealed + due <= rest - local


@given(st.integers(0, 5000), LOCAL, UNIT, st.integers(0, 40))
def test_most_that_a_step_makes_due(rest, local, unit, tokens):
    sealed = tokens_due(rest, 0, local, unit)
    assert tokens_due(rest + tokens, sealed, local, unit) <= most_due(tokens, unit)


@given(ROWS, LOCAL, UNIT)
def test_tensors_as_numbers(rows, local, unit):
    rest, sealed = torch.tensor(rows, dtype=torch.int32).T
    found = tokens_due_by_row(rest, sealed, local, unit)
    assert found.dtype == torch.int32
    assert found.tolist() == [tokens_due(*row, local, unit) for row in rows]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@settings(max_examples=30, deadline=None)
@given(ROWS, LOCAL, UNIT)
def test_kernels_as_numbers(rows, local, unit):
    from tests.kernels.windows_kernel import due_by_kernel

    assert due_by_kernel(rows, local, unit) == [tokens_due(*row, local, unit) for row in rows]
