"""Figures that ship in the package are those of the files that were measured."""

from evals import figures as script
from evals import real_docs
from hfkvq.caches import list_schemes
from hfkvq.measure.figures import PATH, figure, figures


def test_the_file_is_what_the_script_makes():
    assert PATH.read_text(encoding="utf-8") == script.text(), "run python evals/figures.py"


def test_figures_are_of_presets_as_they_are():
    found = figures()
    assert all(set(found[kind]["presets"]) <= set(list_schemes()) for kind in ("loss", "steps", "attention"))
    # The table of docs/results.md.
    for name, row in real_docs.losses(real_docs.SMOLLM2).items():
        if (own := figure("loss", name)) is not None:
            assert abs(own["kld"] - row["kld"]) < 1e-6
    assert figure("loss", "kvarn-k4v4") is None
    # Its keys were not smoothed then.
    assert figure("steps", "saw-int4") is None


def test_what_a_file_describes_is_taken_for_no_other_preset():
    assert list(script.presets_of({"scheme": "kitty", "boost_ratio": 0.25})) == ["kitty-pro"]
    assert list(script.presets_of({"scheme": "kitty", "boost_ratio": 0.26})) == []
    assert list(script.presets_of({"scheme": "kitty", "gone": 1})) == []
    assert list(script.presets_of({"scheme": "arkv", "budget_tokens": 1024})) == []
    smoothed = {"scheme": "arkv", "budget_tokens": 1024, "smooth_keys": True}
    assert list(script.presets_of(smoothed)) == ["arkv"]
