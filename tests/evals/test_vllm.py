"""The scripts that run vLLM, as far as they need none: sizes, agreement, GSM8K's prompts and scores."""

import json

import pytest

pytest.importorskip("lm_eval")

from evals.tasks.common import Task as LmEvalTask
from evals.vllm_gsm8k import Task, against, task_file
from evals.vllm_peer import parse_sizes
from evals.vllm_plugin import RUNS, TOKENS, agreement, failures

ROWS = [
    {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "A house?\nIn dollars?", "answer": "It is dear.\n#### 1,250"},
]


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """Lm-eval's own task over the rows."""
    for split in ("train", "test"):
        (tmp_path / "gsm8k").mkdir(exist_ok=True)
        text = "\n".join(map(json.dumps, ROWS))
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.setenv("HFKVQ_DATA", str(tmp_path))
    from evals.tasks.public import gsm8k

    return LmEvalTask({"upstream": "gsm8k/gsm8k-cot.yaml", "task": "kvq_gsm8k_cot", "custom_dataset": gsm8k})


def test_gsm8k_is_asked_and_scored_as_by_lm_eval(upstream):
    task, docs = Task(task_file()), list(upstream.test_docs())
    answers = [
        "So it is 4. The answer is 4.",
        "The answer is $1250.",
        "The answer is 1,250. Q",
        "4",
        "The answer is 5.",
    ]
    for doc in docs:
        assert task.prompt(doc) == upstream.fewshot_context(doc, num_fewshot=8)
        for answer in answers:
            found = upstream.config.filter_list[0]["filter"][0]["regex_pattern"]
            assert found == task._found.pattern
            picked = pick(upstream, doc, answer)
            assert task.is_right(doc, answer) == bool(upstream.process_results(doc, [picked])["exact_match"])
    assert [task.is_right(docs[0], answer) for answer in answers] == [True, False, False, False, False]
    assert task.is_right(docs[1], answers[2])
    assert task.until == upstream.config.generation_kwargs["until"]


def pick(upstream, doc, answer):
    """What lm-eval's filter makes of an answer."""
    ensemble = upstream._filters[0]
    assert ensemble.name == "strict-match"
    found = [[answer]]
    for make in ensemble.filters:
        found = make().apply(found, [doc])
    return next(iter(found))


def test_answers_are_compared_with_those_of_another_run():
    assert against([True, False, True], [True, True, False, True]) == {"lost": 1, "gained": 1}
    with pytest.raises(ValueError, match="got 1 answers, allowed 2"):
        against([True, False], [True])


def test_sizes_have_their_own_numbers_of_new_tokens():
    assert parse_sizes("1x1k,96x8k:128", 256) == [(1, 1024, 256), (96, 8192, 128)]
    assert parse_sizes("", 256) == []
    with pytest.raises(ValueError, match="sizes: got 'x'"):
        parse_sizes("1xx", 256)


def test_agreement_counts_until_the_first_other_token():
    assert agreement([[1, 2, 3, 4], [5, 6, 7, 8], [9]], [[1, 2, 3, 4], [5, 0, 7, 8], [8]]) == {
        "equal": 1, "of": 3, "until": 0.417, "first": 2,
    }  # fmt: skip


def test_each_failure_of_a_run_is_named():
    whole = [[[0] * TOKENS] * 12]
    row = {"run": "main", "free": 9, "blocks": 10, "cached": [0], "preemptions": 0, "to_generate": {"first": 12}}
    assert failures(row, whole) == []
    assert failures({"run": "main", "error": "exit 1"}, None) == ["exit 1"]
    assert failures(row, [[[0]]]) == ["an answer is not whole"]
    assert failures(row | {"free": 8}, whole) == ["blocks are not free"]
    assert failures(row | {"run": "prefix"}, whole) == ["nothing was cached"]
    assert failures(row | {"run": "preempted"}, whole) == ["nothing was preempted"]
    assert failures(row | {"to_generate": {"first": 8}}, whole) == ["first tokens are not those of generate"]
    assert {"prefix", "preempted"} <= set(RUNS)
