"""Answers of one cache to one batch: text, speed, and distance of its predictions from the baseline's."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessor, LogitsProcessorList

from hfkvq.caches.base.model_calls import with_cache
from hfkvq.caches.named import make_cache as make
from hfkvq.caches.schemes.base import Scheme

from ..records import clock
from .prompts import Batch, Subject


def make_cache(subject: Subject, scheme: Scheme | None) -> Cache:
    """A fresh cache; no scheme means the stock one."""
    return make(subject.model, scheme, subject.tokenizer)


def greedy(subject: Subject, limit: int) -> GenerationConfig:
    """Greedy search whatever the checkpoint's own defaults are."""
    own, tokenizer = subject.model.generation_config, subject.tokenizer
    ends = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        max_new_tokens=limit,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    )


class _PromptEnd(LogitsProcessor):
    """Takes the time when the prompt is done and a copy of the cache at that point, and records logits."""

    def __init__(self, cache: Cache, device: torch.device, rows: int) -> None:
        self.cache, self.device, self.rows = cache, device, rows
        self.copy: Cache | None = None
        self.done = self.resumed = 0.0
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        if self.copy is None:
            self.done = clock(self.device)
            self.copy = copy.deepcopy(self.cache)
            self.resumed = clock(self.device)
        self.logits.append(scores[: self.rows].to(torch.float32, copy=True))
        return scores


class _ForcedTokens(LogitsProcessor):
    """Records logits, and makes ``generate`` go on with given tokens (B, n) whatever it would choose."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        forced = torch.full_like(scores, -math.inf)
        forced.scatter_(1, self.tokens[:, len(self.logits), None], 0.0)
        self.logits.append(scores.float())
        return forced


@dataclass
class Written:
    """The answers to one batch.

    Attributes:
        ids: i64 (B, n), as generated, padding behind their ends.
        lengths: tokens of each answer, its end token included.
    """

    ids: Tensor
    lengths: list[int]


@dataclass
class Answers(Written):
    """Result of a cache on one batch.

    Attributes:
        logits: f32 (rows, n, vocabulary), what the first rows' tokens were chosen by.
        cache: as it is after the answers.
        after_prompt: a copy from before the first answer token was fed.
        prompt_seconds: time to the first token.
        decode_seconds: time of all further tokens.
    """

    logits: Tensor
    cache: Cache
    after_prompt: Cache
    prompt_seconds: float
    decode_seconds: float


def answer(subject: Subject, batch: Batch, cache: Cache, rows: int = 0) -> Answers:
    """Runs ``generate``, greedy, to the end token; keeps the logits of the first ``rows``."""
    device, config = batch.ids.device, greedy(subject, batch.limit)
    watch = _PromptEnd(cache, device, rows)
    begin = clock(device)
    out = subject.model.generate(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        **with_cache(subject.model, cache),
        generation_config=config,
        logits_processor=LogitsProcessorList([watch]),
    )
    end = clock(device)
    assert watch.copy is not None
    ids = out[:, batch.ids.shape[1] :]
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return Answers(
        ids,
        answer_lengths(ids, ends),
        torch.stack(watch.logits, 1),
        cache,
        watch.copy,
        watch.done - begin,
        end - watch.resumed,
    )


def answer_lengths(ids: Tensor, ends: Sequence[int | None]) -> list[int]:
    """Tokens up to and including the first end token, for each row of (B, n)."""
    stop = torch.isin(ids, torch.tensor([end for end in ends if end is not None], device=ids.device, dtype=ids.dtype))
    first = torch.where(stop.any(1), stop.int().argmax(1) + 1, ids.shape[1])
    return first.tolist()


def texts(subject: Subject, answers: Written) -> list[str]:
    """The generated texts, with their end tokens."""
    rows = zip(answers.ids.tolist(), answers.lengths, strict=True)
    return [subject.tokenizer.decode(row[:length]) for row, length in rows]


def predictions(subject: Subject, batch: Batch, mine: Answers, baseline: Written) -> Tensor:
    """Logits at each token of the baseline's answers from the second on, as predicted through a cache.

    Where a row's own answer is the baseline's, these are the logits it was chosen by. Other rows go back to where the
    prompt ended, and the baseline's tokens are fed one by one by ``generate`` itself, so that masks and positions are
    what they always are. ``mine.after_prompt`` is used up by that.

    Args:
        mine: the answers of the cache under test.
        baseline: the answers to be predicted.

    Returns:
        f32 (N, vocabulary): N is the sum of the answers' lengths, each less one, of the rows whose logits were kept.
    """
    rows, lengths = len(mine.logits), baseline.lengths
    same = [torch.equal(mine.ids[row, : lengths[row]], baseline.ids[row, : lengths[row]]) for row in range(rows)]
    logits = {row: mine.logits[row, 1 : lengths[row]] for row in range(rows) if same[row]}
    others = torch.tensor([row for row in range(rows) if not same[row]], device=batch.ids.device, dtype=torch.long)
    steps = max((lengths[row] - 1 for row in others.tolist()), default=0)
    if steps:
        if len(others) < len(batch.ids):
            mine.after_prompt.batch_select_indices(others)
        force = _ForcedTokens(baseline.ids[others, 1:])
        first = baseline.ids[others, :1]
        subject.model.generate(
            input_ids=torch.cat([batch.ids[others], first], 1),
            attention_mask=torch.cat([batch.mask[others], torch.ones_like(first)], 1),
            **with_cache(subject.model, mine.after_prompt),
            generation_config=greedy(subject, steps),
            logits_processor=LogitsProcessorList([force]),
        )
        forced = torch.stack(force.logits, 1)
        logits |= {row: forced[i, : lengths[row] - 1] for i, row in enumerate(others.tolist())}
    return torch.cat([logits[row] for row in sorted(logits)])
