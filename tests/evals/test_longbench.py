"""LongBench's scores are those of its authors' scorer, and its prompts their prompts."""

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("jieba")
pytest.importorskip("rouge")
pytest.importorskip("fuzzywuzzy")

from evals.tasks.long_context import code_sim, score


def test_code_is_compared_without_levenshtein(monkeypatch):
    """Another backend of fuzzywuzzy must not change a score: none is asked."""
    monkeypatch.setattr("fuzzywuzzy.fuzz.SequenceMatcher", None)
    assert code_sim("\n\n# comment\n`fence`\nreturn a + b\nmore", "return a + c") == 0.92
    assert code_sim("return a", "return a") == 1.0
    assert code_sim("", "return a") == 0.0
    assert code_sim("# only a comment", "return a") == 0.0


def test_first_line_counts_where_the_authors_cut():
    doc = {"longbench": "trec", "answers": ["City"], "all_classes": ["City", "Date"]}
    assert score(doc, ["\n\nCity\nDate"]) == {"score": 100.0}
    assert score(doc, ["City Date"]) == {"score": 50.0}
    doc = {"longbench": "hotpotqa", "answers": ["Rome", "the city of Rome"], "all_classes": None}
    assert score(doc, ["City of Rome"])["score"] == 100.0
