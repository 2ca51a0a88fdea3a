"""Figures that ship in the package are of presets as they are."""

from hfkvq.caches import list_schemes
from hfkvq.measure.presets import figure, figures


def test_figures_are_of_presets_as_they_are():
    found = figures()
    assert all(set(found[kind]["presets"]) <= set(list_schemes()) for kind in ("loss", "steps", "attention"))
    assert figure("loss", "kvarn-k4v4") is None
    # Its keys were not smoothed then.
    assert figure("steps", "saw-int4") is None
