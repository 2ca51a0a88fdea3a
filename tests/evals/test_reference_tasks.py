"""Tasks of the reference model: always the same documents, and the prompts of the demo to the last token."""

import re

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM

from evals.tasks.reference import examples, recall_choices, score
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
