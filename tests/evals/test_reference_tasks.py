"""Tasks of the reference model: always the same documents, and the prompts of the demo to the last token."""

import re

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM

from evals.tasks.reference import examples, next_passages, recall_choices, score, score_choices
from hfkvq.measure.demo.prompts import Subject, make_batches
from hfkvq.measure.reference import evaluation_set, load_reference
from hfkvq.measure.reference.model import reference_path


@pytest.fixture(scope="module")
def reference():
    model, tokenizer = load_reference(torch.float32)
    return HFLM(pretrained=model, tokenizer=tokenizer, max_length=4096), Subject("r", model, tokenizer, True)


@pytest.mark.parametrize("task", ["recall-24", "arithmetic-4", "tools"])
def test_tokens_are_those_of_the_demo(reference, task):
    """Special tokens too: what lm-eval encodes, for generation and for log-likelihoods, is what the demo feeds."""
    lm, subject = reference
    rows = examples(task, ref_samples=3, pretrained=str(reference_path()))["test"]
    (batch,) = make_batches(subject, task, 3, 3, 0, None)
    ids, mask = lm.tok_batch_encode(list(rows["prompt"]))
    assert torch.equal(ids, batch.ids)
    assert torch.equal(mask, batch.mask)
    for row, wanted, there in zip(rows, batch.ids, batch.mask, strict=True):
        context, answer = lm._encode_pair(row["prompt"], row["answer"])
        own = lm.tokenizer(row["answer"], add_special_tokens=False).input_ids
        assert context + answer == [*wanted[there.bool()].tolist(), *own]


def test_documents_are_the_same_every_time():
    first = examples("recall-24", ref_samples=5)["test"].to_list()
    assert first == examples("recall-24", ref_samples=5)["test"].to_list()
    assert [row["prompt"] for row in first] == [each.prompt for each in evaluation_set("recall-24", 5)]
    assert first[:2] == examples("recall-24", ref_samples=2)["test"].to_list()
    assert first != examples("recall-24", ref_samples=5, ref_seed=1)["test"].to_list()
    assert examples("recall-24", ref_samples=1, ref_size=40)["test"][0]["task"] == "recall-40"
    assert recall_choices("recall-24", ref_samples=5).data == recall_choices("recall-24", ref_samples=5).data


@pytest.mark.parametrize("task", ["recall-24", "arithmetic-4", "tools"])
def test_right_answers_are_right(task):
    for row in examples(task, ref_samples=10)["test"]:
        assert score(row, [row["answer"]]) == {"exact_match": 1.0}
        assert score(row, [row["answer"] + "<|im_end|>\n<|im_start|>"]) == {"exact_match": 1.0}
        assert score(row, [""]) == {"exact_match": 0.0}
        assert score(row, [re.sub(r"\d", "7", row["answer"][:-9]) + "0"]) == {"exact_match": 0.0}


def test_passages_and_what_follows():
    rows = next_passages(64, ref_samples=4)["test"]
    assert [len(row["choices"]) for row in rows] == [4] * 4
    right = [(0.0, False)] * 4
    right[rows[0]["gold"]] = (9.0, True)
    assert score_choices(rows[0], right)["acc"] == 1.0
    assert len(next_passages(64, ref_size=32, ref_samples=1)["test"][0]["prompt"]) == 106


def test_choices_are_five_tokens_and_one_is_right(reference):
    lm, _ = reference
    rows = recall_choices("recall-24", ref_samples=20)["test"]
    for row in rows:
        assert row["choices"][row["gold"]] == row["answer"]
        assert len(set(row["choices"])) == len(row["choices"]) == 8
        assert {len(lm.tok_encode(choice)) for choice in row["choices"]} == {5}
        # The first digit alone, which the prompt's own logits give, does not tell the right one.
        assert sum(choice[0] == row["answer"][0] for choice in row["choices"]) >= 4
    assert len(set(rows["gold"])) > 4
    likelihoods = [(-9.0, False)] * 8
    likelihoods[rows[0]["gold"]] = (-2.5, True)
    assert score_choices(rows[0], likelihoods) == {"acc": 1.0, "nll": 0.5}
    assert score_choices(rows[1], [(-5.0, False)] * 8)["nll"] == 1.0
