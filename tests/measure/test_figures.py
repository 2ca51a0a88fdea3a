"""Figures that ship in the package are those of the files that were measured."""

from evals import figures as script
from evals import frontier
from hfkvq.caches import list_schemes
from hfkvq.measure.figures import PATH, figure, figures


def test_the_file_is_what_the_script_makes():
    assert PATH.read_text(encoding="utf-8") == script.text(), "run python evals/figures.py"


def test_figures_are_of_presets_as_they_are():
    found = figures()
    assert all(set(found[kind]["presets"]) <= set(list_schemes()) for kind in ("loss", "steps", "attention"))
    # The table of docs/results.md.
    for row in frontier.rows():
        if (own := figure("loss", row["name"])) is not None:
            assert abs(own["kld"] - row["kld"]["mean"]) < 2e-4
    assert figure("loss", "kvarn-k2v2") is None
    # Its pages were others then, so another file counts.
    assert figure("steps", "triaxial")["file"] == "generate-triaxial-pages-qwen3-8b-h200.json"


def test_what_a_file_describes_is_taken_for_no_other_preset():
    assert list(script.presets_of({"scheme": "kitty", "boost_ratio": 0.25})) == ["kitty-pro"]
    assert list(script.presets_of({"scheme": "kitty", "boost_ratio": 0.26})) == []
    assert list(script.presets_of({"scheme": "kitty", "gone": 1})) == []
    assert list(script.presets_of({"scheme": "arkv", "budget_tokens": 1024})) == ["arkv"]
