"""Tasks of the bundled reference model: exact answers, any size, no download.

Prompts are those of `hfkvq demo`. Another model gets the same conversations through its own chat template.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from evals.reference.tokenizer import CHAT_TEMPLATE
from evals.tasks.common import Row, as_dataset, tokenizer_name, tokenizer_of
from hfkvq.measure.demo.prompts import Subject, full_name, is_right, prompt_text
from hfkvq.measure.reference import Example, evaluation_set
from hfkvq.measure.reference.chat import random_stream
from hfkvq.measure.texts import KINDS, read_text

PIECE = 80
"""Characters that are to be chosen from."""

OF_PLAY = 3.3
"""Characters of a token of verse, about."""

SAMPLES = 200
"""Documents of a task, unless ``ref_samples`` says otherwise; ``--limit`` takes the first of them."""


def examples(
    example: str,
    ref_size: int | None = None,
    ref_samples: int = SAMPLES,
    ref_seed: int = 0,
    **metadata: Any,
) -> datasets.DatasetDict:
    """Generated documents of one task, the same for the same arguments.

    Args:
        example: the task, as `hfkvq.measure.reference.evaluation_set` names it; YAML gives it.
        ref_size: records, steps or tokens, instead of the task's own number.
        ref_samples: number of documents.
        ref_seed: another seed gives other documents.
        **metadata: what lm-eval knows of the model; its tokenizer's chat template renders the prompts.

    Raises:
        ValueError: a size or number out of range.
    """
    subject = _subject(metadata)
    made = _made(example, ref_size, ref_samples, ref_seed)
    return as_dataset(test=[_row(each, subject) for each in made])


def recall_choices(
    example: str,
    ref_size: int | None = None,
    ref_samples: int = SAMPLES,
    ref_seed: int = 0,
    **metadata: Any,
) -> datasets.DatasetDict:
    """The same for recall, with eight values to choose from.

    Four others are of the same list, which tells whether the right record is found; three differ from the right value
    in one digit, which tells whether it is read exactly. All have five tokens.
    """
    subject, rows = _subject(metadata), []
    for each in _made(example, ref_size, ref_samples, ref_seed):
        rng = random.Random(f"choices/{each.prompt}")
        user = next(message["content"] for message in each.messages if message["role"] == "user")
        others = sorted(set(re.findall(r"\b\d{5}\b", user)) - {each.answer})
        near: set[str] = set()
        while len(near) < 3:
            place = rng.randrange(1, 5)
            digit = rng.choice([digit for digit in "0123456789" if digit != each.answer[place]])
            near.add(each.answer[:place] + digit + each.answer[place + 1 :])
        choices = sorted({each.answer, *near, *rng.sample(others, min(4, len(others)))})
        rng.shuffle(choices)
        rows.append({**_row(each, subject), "choices": choices, "gold": choices.index(each.answer)})
    return as_dataset(test=rows)


def next_passages(
    size: int, ref_size: int | None = None, ref_samples: int = SAMPLES, ref_seed: int = 0, **metadata: Any
) -> datasets.DatasetDict:
    """Passages of the four texts of `hfkvq.measure.texts`, with four pieces of which one follows.

    Args:
        size: tokens of a passage, about; YAML gives it.
        ref_size: another size.
        ref_samples: number of documents.
        ref_seed: another seed gives other documents.
        **metadata: not used.
    """
    rows = []
    for number in range(ref_seed * 1_000_000, ref_seed * 1_000_000 + ref_samples):
        prompt, choices, gold = next_choices(ref_size or size, seed=number)
        rows.append({"prompt": prompt, "choices": choices, "gold": gold})
    return as_dataset(test=rows)


def next_choices(size: int, *, seed: int) -> tuple[str, list[str], int]:
    """A passage of one of the four texts, four pieces of the same text and length, and which of them follows it.

    Args:
        size: tokens of the passage, about.
        seed: the example's number; the texts take turns.
    """
    rng = random_stream("eval", f"next-{size}", seed)
    text = read_text(KINDS[seed % len(KINDS)])
    length = round(size * OF_PLAY)
    begin = rng.randrange(len(text) - length - PIECE)
    # Others overlap neither each other nor what was read.
    starts = [at for at in range(0, len(text) - PIECE, PIECE) if not begin - PIECE < at < begin + length + PIECE]
    places = [begin + length, *rng.sample(starts, 3)]
    choices = [text[at : at + PIECE] for at in places]
    rng.shuffle(choices)
    end = begin + length
    return text[begin:end], choices, choices.index(text[end : end + PIECE])


def _made(example: str, size: int | None, samples: int, seed: int) -> list[Example]:
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"ref_samples: got {samples!r}, allowed 1 or more.")
    if size is not None:
        kind = example.partition("-")[0]
        if kind == "tools":
            raise ValueError(f"ref_size: got {size!r} for {example}, which has no size; leave it out.")
        example = f"{kind}-{size}"
    return evaluation_set(full_name(example), samples, seed=seed)


def _subject(metadata: dict[str, Any]) -> Subject:
    """Text of the question: without a name, or with the reference model's template, the reference model."""
    name = tokenizer_name(metadata)
    if name is None:
        return Subject("reference model", None, None, True)
    tokenizer = tokenizer_of(metadata, "ref")
    return Subject(Path(name).name, None, tokenizer, str(tokenizer.chat_template).strip() == CHAT_TEMPLATE.strip())


def _row(each: Example, subject: Subject) -> Row:
    row = {"task": each.task, "prompt": prompt_text(subject, each), "answer": each.answer}
    return {**row, "reference": subject.reference}


def score(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """True if the answer is right: exactly for the reference model; of others, the last number counts."""
    subject = Subject("", None, None, doc["reference"])
    each = Example(doc["task"], doc["prompt"], doc["answer"], ())
    return {"exact_match": float(is_right(subject, each, results[0]))}


def score_choices(doc: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """Flag that the right value is the likeliest, and its negative log-likelihood in nats a digit or letter."""
    likelihoods = [likelihood for likelihood, _ in results]
    gold = doc["gold"]
    best = max(range(len(likelihoods)), key=likelihoods.__getitem__)
    return {"acc": float(best == gold), "nll": -likelihoods[gold] / len(doc["choices"][gold])}
