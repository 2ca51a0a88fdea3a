"""What the questions of a board tell of each cache."""

import json

import pytest

from hfkvq.measure.report.paired import judge
from hfkvq.measure.report.samples import Pairs
from hfkvq.measure.report.telling import make_telling, tell, telling_markdown, telling_note, telling_table
from tests.command import printed

pytest.importorskip("scipy")


def told(first, second):
    return make_telling("kitty", judge(Pairs("task", "exact_match,none", first, second, True)))


def test_answers_that_never_differ_tell_as_much_as_there_are():
    """Three of n may have differed by chance: 2 points take 150 questions."""
    few, many = told([1.0] * 10, [1.0] * 10), told([1.0] * 400, [1.0] * 400)
    assert (few.interval, few.words) == ((-30.0, 30.0), "too few to tell, ±30")
    assert few.needed == pytest.approx(150)
    assert many.words == "alike within 0.8 points"
    assert "to distinguish kitty from DynamicCache: about 150 would detect a difference of 2" in telling_note([few])
    assert "Too few" not in telling_note([many])


def test_differences_beyond_chance():
    worse = told([1.0] * 100, [0.0] * 30 + [1.0] * 70)
    assert worse.differs
    assert worse.words == "worse"
    assert worse.interval[0] < worse.points == -30.0 < worse.interval[1] < 0
    better = told([0.0] * 30 + [1.0] * 70, [1.0] * 100)
    assert better.words == "better"
    # Three of eight: the bootstrap alone would say worse.
    chance = told([1.0] * 8, [0.0] * 3 + [1.0] * 5)
    assert not chance.differs
    # Ten times as many questions, a third of the interval.
    some, more = (told([1.0, 1.0, 0.0, 1.0] * n, [1.0, 0.0, 1.0, 1.0] * n) for n in (25, 250))
    assert some.words.startswith("too few to tell")
    assert more.half == pytest.approx(some.half / 10**0.5, rel=0.1)


def save(folder, scheme, scores):
    folder.mkdir(parents=True)
    config = {"kvq": {"scheme": scheme, "total_bits": 3.0}, "model_args": {"pretrained": "m"}}
    content = {"results": {"a": {"exact_match,none": 0.5}}, "config": config}
    (folder / "results_2026-01-01.json").write_text(json.dumps(content))
    lines = [
        {"doc_id": i, "doc_hash": f"d{i}", "prompt_hash": f"p{i}", "filter": "none", "metrics": ["exact_match"],
         "exact_match": score}
        for i, score in enumerate(scores)
    ]  # fmt: skip
    (folder / "samples_a_2026-01-01.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_a_board(tmp_path):
    save(tmp_path / "none", None, [1.0] * 40)
    save(tmp_path / "kitty", {"scheme": "kitty", "boost_ratio": 0.25}, [1.0] * 20 + [0.0] * 20)
    save(tmp_path / "full", {"scheme": "full", "page_size": 128}, [1.0] * 40)
    (tmp_path / "empty").mkdir()
    found = tell(tmp_path)
    assert [one.cache for one in found] == ["full", "kitty:boost_ratio=0.25"]
    assert [one.words for one in found] == ["too few to tell, ±8", "worse"]
    table = printed(telling_table(found), 100)
    assert "kitty:boost_ratio=0.25" in table
    assert "-50.0" in table
    assert "| `kitty:boost_ratio=0.25` | 40 | -50.0 | " in telling_markdown(found)
    assert tell(tmp_path / "none") == []
