"""evals/soak.py in small, without a GPU: both parts run, and say what they have found."""

import pytest

from evals import soak


@pytest.mark.slow
def test_a_short_soak(monkeypatch):
    # Each block collects garbage, of the whole test process.
    monkeypatch.setattr(soak, "BLOCKS", 5)
    found = soak.soak(24, 150)
    assert [block["at"] for block in found["resets"]] == [6, 12, 18, 24]
    assert found["growth"][-1]["at"] == 64 + 150
    assert found["verdict"].keys() == {"resets_memory", "resets_speed", "growth_beyond", "growth_off_line"}
    assert found["versions"]["torch"]
