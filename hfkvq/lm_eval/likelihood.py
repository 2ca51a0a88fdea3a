"""Log-likelihoods of continuations whose context lies in a cache."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from hfkvq.caches.base.model_calls import with_cache

Answer = tuple[float, bool]
"""Sum of the continuation's log-probabilities, and whether greedy decoding would give it."""


@dataclass(frozen=True)
class Request:
    """A continuation to be scored.

    Attributes:
        head: tokens that are the prompt: the context, but for its last token.
        fed: tokens that come behind it, through the cache.
        targets: the continuation, predicted by ``fed``.
    """

    head: tuple[int, ...]
    fed: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass
class Group:
    """Requests of one head.

    Attributes:
        rows: by what is fed behind it, the numbers of the requests: several end in another token only.
    """

    head: tuple[int, ...]
    rows: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


def group_requests(requests: Sequence[Request]) -> list[Group]:
    """Groups of requests by head, longest first: memory runs out early if at all. Groups without a head come last."""
    groups: dict[tuple[int, ...], Group] = {}
    for number, request in enumerate(requests):
        group = groups.setdefault(request.head, Group(request.head))
        group.rows.setdefault(request.fed, []).append(number)
    return sorted(groups.values(), key=lambda group: (-len(group.head), group.head))


def batches(groups: Sequence[Group], size: int) -> Iterator[list[Group]]:
    """Groups whose rows together are at most ``size``, one group at least; never with and without a head together."""
    batch: list[Group] = []
    rows = 0
    for group in groups:
        if batch and (rows + len(group.rows) > size or bool(batch[0].head) != bool(group.head)):
            yield batch
            batch, rows = [], 0
        batch.append(group)
        rows += len(group.rows)
    if batch:
        yield batch


class Job(NamedTuple):
    """A row to be fed: its head's row in the prefilled cache, what is fed, and the numbers of the requests."""

    row: int
    fed: tuple[int, ...]
    numbers: list[int]


class Scorer:
    """Scores requests of one model.

    Args:
        model: a causal language model.
        chunk: tokens fed at once behind the head.
        pad: any token id, for rows that are shorter than others.
        softmax_dtype: of the log-softmax; None takes the logits' dtype.
        account: told each cache (with the mask of its columns) when it holds as much as it will.
        device: of the model's inputs; its own weights may be on several, or on none while they are not used.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        make_cache: Callable[[], Cache],
        chunk: int,
        pad: int,
        softmax_dtype: torch.dtype | None,
        account: Callable[[Cache, Tensor], None],
        device: torch.device,
    ) -> None:
        self.device = device
        self.model, self.make_cache, self.chunk, self.pad = model, make_cache, chunk, pad
        self.softmax_dtype, self.account = softmax_dtype, account
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        names = inspect.signature(inner.forward).parameters  # type: ignore[union-attr]
        self._positions = "position_ids" in names
        self._keep = "logits_to_keep" in names

    @torch.no_grad()
    def score(
        self, requests: Sequence[Request], batch: Sequence[Group], size: int, answers: list[Answer | None]
    ) -> None:
        """Answers the requests of these groups.

        Args:
            batch: groups to be prefilled together.
            size: most rows fed at once.
            answers: written, by the requests' numbers.
        """
        device = self.device
        cache = self.make_cache()
        length = max(len(group.head) for group in batch)
        ids = self._table([group.head for group in batch], left=True).to(device)
        mask = self._table([(1,) * len(group.head) for group in batch], left=True, pad=0).to(device)
        if length:
            self._forward(ids, mask, cache, last_only=True)
        jobs = [Job(row, fed, numbers) for row, group in enumerate(batch) for fed, numbers in group.rows.items()]
        # Neighbours have continuations of similar lengths.
        jobs.sort(key=lambda job: -len(job.fed))
        # Rows that share a prompt share its pages, which would make any scheme look smaller than it is.
        shared = length > 0 and len(jobs) > len(batch)
        if shared:
            self.account(cache, mask)
        pieces = [jobs[start : start + size] for start in range(0, len(jobs), size)]
        for number, piece in enumerate(pieces):
            own = cache
            if number + 1 < len(pieces):
                own = copy.deepcopy(cache) if length else self.make_cache()
            rows = torch.tensor([job.row for job in piece], device=device, dtype=torch.int64)
            if length and [job.row for job in piece] != list(range(len(batch))):
                own.batch_select_indices(rows)
            columns = self._feed(own, mask[rows], piece, requests, answers)
            if not shared:
                self.account(own, columns)

    def _table(self, rows: Sequence[Sequence[int]], left: bool = False, pad: int | None = None) -> Tensor:
        """i64 (rows, longest), shorter rows padded."""
        width = max(len(row) for row in rows)
        table = torch.full((len(rows), width), self.pad if pad is None else pad, dtype=torch.long, device="cpu")
        for at, row in enumerate(rows):
            start = width - len(row) if left else 0
            table[at, start : start + len(row)] = torch.tensor(row, dtype=torch.long, device="cpu")
        return table

    def _feed(
        self,
        cache: Cache,
        mask: Tensor,
        piece: Sequence[Job],
        requests: Sequence[Request],
        answers: list[Answer | None],
    ) -> Tensor:
        """Answers the requests of the jobs, row by row of the cache; returns the mask of its columns."""
        device = mask.device
        wanted = [(number, row) for row, job in enumerate(piece) for number in job.numbers]
        rows = torch.tensor([row for _, row in wanted], device=device, dtype=torch.int64)
        targets = self._table([requests[number].targets for number, _ in wanted], pad=0).to(device)
        ids = self._table([job.fed for job in piece]).to(device)
        scores, hits = [], []
        for start in range(0, ids.shape[1], self.chunk):
            part = ids[:, start : start + self.chunk]
            mask = torch.cat([mask, torch.ones_like(part)], 1)
            score, hit = self._gather(self._forward(part, mask, cache), rows, targets[:, start : start + self.chunk])
            scores.append(score)
            hits.append(hit)
        score, hit = torch.cat(scores, 1), torch.cat(hits, 1).cpu()
        for at, (number, _) in enumerate(wanted):
            end = len(requests[number].targets)
            answers[number] = (float(score[at, :end].sum()), bool(hit[at, :end].all()))
        return mask

    def _gather(self, logits: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each target (R, n) in its row of logits (rows, n, V), and whether it is the likeliest."""
        columns = torch.arange(logits.shape[1], device=logits.device)
        log_p = F.log_softmax(logits, -1, dtype=self.softmax_dtype)
        return log_p[rows[:, None], columns, targets], logits.argmax(-1)[rows] == targets

    def _forward(self, ids: Tensor, mask: Tensor, cache: Cache, last_only: bool = False) -> Tensor:
        extra = {}
        if self._positions:
            # Padding is no position, as in `generate`.
            extra["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if last_only and self._keep:
            extra["logits_to_keep"] = 1
        return self.model(
            input_ids=ids, attention_mask=mask, **with_cache(self.model, cache), use_cache=True, **extra
        ).logits
