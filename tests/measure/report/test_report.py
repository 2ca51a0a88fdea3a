"""Leaderboards of small files."""

from __future__ import annotations

import pytest

from hfkvq import get_scheme
from hfkvq.measure.report.leaderboard import make_boards
from hfkvq.measure.report.metrics import main_metrics, title
from hfkvq.measure.report.names import model_label, scheme_label
from hfkvq.measure.report.pictures import save_quality, save_speed
from hfkvq.measure.report.results import read_files
from hfkvq.measure.report.tables import markdown

from .files import divergence, divergences, evaluation, kvq, write

GOLDEN = """\
# A title

## org/model

| cache | code bits | total bits | peak MiB | gsm8k: exact_match (flexible-extract), % | gsm8k: exact_match \
(strict-match), % | mmlu: acc, % | wikitext: word_perplexity, less is better | mean of 2 tasks, % | \
total bits of KLD | KLD mean, nats | KLD 99.9 % | top-1, % | perplexity / bf16 | tokens/s |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
| `DynamicCache` | 16.00 | 16.00 |  | 60.0 ± 1.0 | 50.0 ± 1.0 | 70.0 ± 1.0 | 8.5000 ± 0.0100 | 65.0 |  |  |  |  |  |  |
| `full` | 2.00 | 16.50 | 16.50 | 60.0 ± 1.0 | 50.0 ± 1.0 | 70.0 ± 1.0 | 8.5000 ± 0.0100 | 65.0 |  |  |  |  |  | 10.0 |
| `kivi-2` | 2.00 | 3.50 | 3.50 | 40.0 ± 1.0 | 30.0 ± 1.0 | 60.0 ± 1.0 | 9.5000 ± 0.0100 | 50.0 | 3.60 | \
0.0200 (0.0100 to 0.0400) | 0.0200 | 97.00 (96.00 to 98.00) | 1.0100 | 10.0 |
| `kitty` |  |  |  |  |  |  |  |  | 4.00 | <0.0001 (<0.0001 to <0.0001) | <0.0001 | \
97.00 (96.00 to 98.00) | 1.0100 |  |

Scores are lm-eval's, ± its standard error. Questions: gsm8k 50, mmlu 50, wikitext 50. Bits and bytes are those of \
the caches that gave these answers, every byte counted; bits are means over the tasks that all caches did, the peak is \
that of the largest. The stock cache of plain `hf` is taken to hold 16 bits.

KLD is the divergence of a cache's predictions from `DynamicCache`'s on the same tokens, in nats, with 95 % intervals; \
top-1 says how often both have the same most likely token. Bits of that text are its own: a cache's bits depend on the \
length.

![words](quality.png)
"""


def scores(flexible: float, strict: float, acc: float, perplexity: float) -> dict[str, dict[str, float]]:
    gsm8k = {"exact_match,strict-match": strict, "exact_match,flexible-extract": flexible}
    return {"gsm8k": gsm8k, "mmlu": {"acc,none": acc}, "wikitext": {"word_perplexity,none": perplexity}}


HIGHER = {"higher_is_better": {"wikitext": {"word_perplexity": False}}}


@pytest.fixture
def results(tmp_path):
    good, bad = scores(0.6, 0.5, 0.7, 8.5), scores(0.4, 0.3, 0.6, 9.5)
    write(tmp_path / "m" / "results_2.json", evaluation(bad, kvq("kivi-2", 3.5), **HIGHER))
    write(tmp_path / "m" / "results_1.json", evaluation(good, kvq("full", 16.5), **HIGHER))
    write(tmp_path / "m" / "results_0.json", evaluation(good, **HIGHER))
    write(tmp_path / "kld.json", divergences(divergence("kitty", 1e-6, 4.0), divergence("kivi-2", 0.02, 3.6)))
    return tmp_path


def test_golden_markdown(results) -> None:
    boards = make_boards(read_files([results]).sources)
    assert markdown(boards, "A title", {"org/model": [("words", "quality.png")]}) == GOLDEN


def test_the_newest_counts(tmp_path) -> None:
    old = write(tmp_path / "old.json", evaluation({"a": {"acc,none": 0.1}, "b": {"acc,none": 0.2}}, kvq("int4", 5.0)))
    new = write(tmp_path / "new.json", evaluation({"a": {"acc,none": 0.3}}, kvq("int4", 6.0), date=200.0))
    for paths in ([old, new], [new, old]):
        (board,) = make_boards(read_files(paths).sources)
        (row,) = board.rows
        assert {task: found.scores["acc,none"].value for task, found in row.tasks.items()} == {"a": 0.3, "b": 0.2}
        assert row.mean("total_bits") == 5.5
        assert board.notes == ["`int4` on a was measured again later; old.json is left out."]


def test_the_stock_cache_through_either_model_is_one_row(tmp_path) -> None:
    plain = write(tmp_path / "a.json", evaluation({"a": {"acc,none": 0.1}}))
    through = write(tmp_path / "b.json", evaluation({"b": {"acc,none": 0.2}}, kvq(None, 16.0)))
    (board,) = make_boards(read_files([plain, through]).sources)
    assert [row.label for row in board.rows] == ["DynamicCache"]
    assert list(board.rows[0].tasks) == ["a", "b"]


def test_bits_are_of_the_tasks_that_all_have_done(tmp_path) -> None:
    own = {"a": {"total_bits": 3.0}, "b": {"total_bits": 9.0}}
    more = evaluation({"a": {"acc,none": 0.1}, "b": {"acc,none": 0.2}}, kvq("kivi-2", 6.0, own))
    less = evaluation({"a": {"acc,none": 0.1}}, kvq("int4", 5.0, {"a": {"total_bits": 5.0}}))
    files = [write(tmp_path / "more.json", more), write(tmp_path / "less.json", less)]
    (board,) = make_boards(read_files(files).sources)
    assert {row.label: board.bits(row, "total_bits") for row in board.rows} == {"kivi-2": 3.0, "int4": 5.0}
    assert board.compared == [("a", "acc,none")]


def test_models_are_kept_apart(tmp_path) -> None:
    other = evaluation({"a": {"acc,none": 0.1}})
    other["config"]["model_args"] = "pretrained=x"
    other["model_name"] = "evals/reference/checkpoint"
    files = [write(tmp_path / "a.json", evaluation({"a": {"acc,none": 0.1}})), write(tmp_path / "b.json", other)]
    assert [board.model for board in make_boards(read_files(files).sources)] == ["org/model", "reference model"]


def test_a_group_with_a_score_stands_for_its_tasks(tmp_path) -> None:
    values = {"mmlu": {"acc,none": 0.5}, "mmlu_law": {"acc,none": 0.4}, "suite": {}, "a": {"acc,none": 0.1}}
    groups = {"mmlu": ["mmlu_law"], "suite": ["a"], "a": [], "mmlu_law": []}
    path = write(tmp_path / "a.json", evaluation(values, group_subtasks=groups))
    assert [task.task for task in read_files([path]).sources[0].tasks] == ["mmlu", "a"]


def test_a_group_has_the_means_of_its_tasks(tmp_path) -> None:
    own = {"law": {"total_bits": 3.0, "peak_cache_bytes": 7}, "art": {"total_bits": 5.0, "peak_cache_bytes": 9}}
    own["other"] = {"total_bits": 90.0}
    groups = {"mmlu": ["mmlu_humanities", "law"], "mmlu_humanities": ["art"], "law": [], "art": []}
    content = evaluation({"mmlu": {"acc,none": 0.5}}, kvq("kivi-2", 50.0, own), group_subtasks=groups)
    (task,) = read_files([write(tmp_path / "a.json", content)]).sources[0].tasks
    assert (task.bill.total_bits, task.bill.peak_bytes) == (4.0, 9.0)


def test_a_score_that_read_no_cache_is_told(tmp_path) -> None:
    bill = kvq("kivi-2", 3.5, ll_mode="stock")
    (board,) = make_boards(read_files([write(tmp_path / "a.json", evaluation({"a": {"acc,none": 1.0}}, bill))]).sources)
    assert board.notes == ["`kivi-2` in a.json: log-likelihoods scored with ll_mode=stock."]


def test_bits_and_speeds_by_task(tmp_path) -> None:
    own = {"a": {"total_bits": 3.0, "peak_cache_bytes": 7, "tokens_per_second": 20.0, "context_tokens": 900.0}}
    # Log-likelihoods generate nothing, and the run's mean is not their speed.
    own["b"] = {"total_bits": 5.0, "peak_cache_bytes": 9, "tokens_per_second": None, "context_tokens": 100.0}
    bill = kvq("kivi-2", 3.5, own)
    path = write(tmp_path / "a.json", evaluation({"a": {"acc,none": 1.0}, "b": {"acc,none": 1.0}}, bill))
    (board,) = make_boards(read_files([path]).sources)
    row = board.rows[0]
    assert (row.mean("total_bits"), row.peak_bytes, row.mean("tokens_per_second")) == (4.0, 9.0, 20.0)


def test_main_metrics() -> None:
    assert main_metrics(["exact_match,none", "math_verify,none", "exact_match_stderr,none"]) == ["math_verify,none"]
    assert main_metrics(["acc_norm,none", "acc,none", "total_bits,none", "f1,none"]) == ["acc,none", "acc_norm,none"]
    assert main_metrics(["exact_match,strict-match", "exact_match,flexible-extract"])[0].endswith("flexible-extract")
    assert main_metrics(["word_perplexity,none", "tokens_per_second,none"]) == ["word_perplexity,none"]
    assert title("acc,none") == "acc"
    assert title("exact_match,strict-match") == "exact_match (strict-match)"


def test_names() -> None:
    assert scheme_label(None) == "DynamicCache"
    assert scheme_label(get_scheme("kivi-2").to_dict()) == "kivi-2"
    assert scheme_label(get_scheme("mixkvq").to_dict(), "mixkvq") == "mixkvq"
    assert scheme_label(get_scheme("kitty-pro", sink_length=0).to_dict(), "kitty-pro") == "kitty-pro:sink_length=0"
    assert scheme_label(get_scheme("kitty", boost_ratio=0.5).to_dict()) == "kitty:boost_ratio=0.5"
    assert scheme_label({"scheme": "of-later", "width": 3}) == "of-later:width=3"
    assert model_label("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert model_label("../models/mine") == "mine"
    assert model_label("evals/reference/checkpoint") == "reference model"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "was not written by lm-eval"),
        ('{"kind": "hfkvq kld", "date": "2026-01-01"}', "looks like a file of hfkvq kld, but is damaged: KeyError"),
        ('{"results": {"a": 3}, "config": {}}', "looks like a file of lm-eval, but is damaged: AttributeError"),
    ],
)
def test_bad_files(tmp_path, content, message) -> None:
    path = tmp_path / "x.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_files([path])


def test_nothing_to_report(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"none.json does not exist"):
        read_files([tmp_path / "none.json"])
    write(tmp_path / "other.json", {"a": 1})
    with pytest.raises(ValueError, match=r"no results in .*--output_path"):
        read_files([tmp_path])


def test_pictures(results, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    (board,) = make_boards(read_files([results]).sources)
    assert save_quality(board, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert save_speed(board, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
