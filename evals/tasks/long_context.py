"""LongBench as its authors run and score it.

Upstream's metrics are used where they compute what the authors' do. Three things differ, and are done here as in the
authors' `metrics.py`, `eval.py` and `pred.py`: the code metric (which line counts, and which library compares lines),
the cut after the first line of four tasks, and the six tasks that never get a chat template.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from typing import Any

import datasets

with warnings.catch_warnings():
    # It recommends python-Levenshtein, which changes the scores.
    warnings.filterwarnings("ignore", "Using slow pure-python SequenceMatcher")
    from lm_eval.tasks.longbench import metrics

from evals.tasks.common import Row, Task, as_dataset, read_rows

_BY_METRIC = {
    "qa_f1": "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa",
    "qa_f1_zh": "multifieldqa_zh",
    "rouge_zh": "dureader vcsum",
    "rouge": "gov_report qmsum multi_news samsum",
    "classification": "trec lsht",
    "count": "passage_count",
    "retrieval": "passage_retrieval_en",
    "retrieval_zh": "passage_retrieval_zh",
    "code_sim": "lcc repobench-p",
}
METRICS = {name: metric for metric, names in _BY_METRIC.items() for name in names.split()}
"""Metric of each task."""

FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
"""Tasks of which only the first line of an answer counts."""

PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
"""Tasks whose prompts get no chat template: they are examples to be continued."""

PROMPTS = {
    "triviaqa": "Answer the question based on the given passage. Only give me the answer and do not output any other "
    "words. The following are some examples.\n\n{{context}}\n\n{{question}}",
    "samsum": "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{{context}}\n\n"
    "{{question}}",
    "passage_count": "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please "
    "carefully read these paragraphs and determine how many unique paragraphs there are after removing duplicates. In "
    "other words, how many non-repeating paragraphs are there in total?\n\n{{context}}\n\nPlease enter the final count "
    "of unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
    "3, and so on.\n\nThe final answer is: ",
    "passage_retrieval_en": "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
    "paragraph the abstract is from.\n\n{{context}}\n\nThe following is an abstract.\n\n{{question}}\n\nPlease enter "
    'the number of the paragraph that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph '
    '2", etc.\n\nThe answer is: ',
    # A template's last line break is dropped unless it is an expression.
    "lcc": "Please complete the code given below. \n{{context}}Next line of code:{{'\\n'}}",
    "repobench-p": "Please complete the code given below. \n{{context}}{{question}}Next line of code:{{'\\n'}}",
}
"""The authors' prompts where upstream's differ, by white space; all others are taken from upstream."""


class LongBenchTask(Task):
    """One of the 21 tasks; YAML gives its name as ``longbench``."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        config = dict(config or {})
        name = config.pop("longbench")
        config.update(
            upstream=f"longbench/{name}.yaml",
            rendered=name in PLAIN,
            custom_dataset=load,
            dataset_kwargs={"longbench": name},
            process_results=score,
            # The version differs from upstream's: prompts and scores differ.
            metadata={"version": 1.0, **(config.get("metadata") or {})},
            metric_list=[{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        )
        if name in PROMPTS:
            config["doc_to_text"] = PROMPTS[name]
        super().__init__(config=config)
        # `temperature` only brings a warning, and lines are cut in `score`: an answer may begin with a line break.
        kept = {"max_gen_toks": (self.config.generation_kwargs or {})["max_gen_toks"]}
        self.set_config("generation_kwargs", {"until": [], "do_sample": False, **kept})


def load(longbench: str, data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """One task's 150 to 500 documents. The authors' files say `input` where upstream says `question`."""
    fields, hub = ("question|input", "context", "answers", "all_classes"), ("Xnhyacinth/LongBench", longbench, "test")
    rows = read_rows(f"longbench/{longbench}.jsonl", hub, fields, data_dir)
    return as_dataset(test=[{**row, "longbench": longbench} for row in rows])


def score(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """The best score over all right answers, times 100 as published."""
    return {"score": 100 * score_text(doc["longbench"], results[0], doc["answers"], doc["all_classes"])}


def score_text(name: str, text: str, answers: Sequence[str], all_classes: Sequence[str] | None) -> float:
    """Score of one answer, 0 to 1."""
    if name in FIRST_LINE:
        text = text.lstrip("\n").split("\n")[0]
    metric = code_sim if METRICS[name] == "code_sim" else getattr(metrics, f"{METRICS[name]}_score")
    return max([0.0, *(float(metric(text, answer, all_classes=all_classes)) for answer in answers)])


def code_sim(text: str, answer: str, **_: Any) -> float:
    """Likeness of the first line that is no comment and no fence, in whole percent.

    The authors' fuzzywuzzy compares with `difflib` unless python-Levenshtein is there; published scores are from
    `difflib`.
    Upstream skips blank lines at any place, the authors only line breaks at the start.
    """
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == answer:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100
