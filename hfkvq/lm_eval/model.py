"""lm-eval's model ``hf-kvq``: its Hugging Face model, with every request answered through a compressed cache."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
from accelerate.utils import find_executable_batch_size
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.api.registry import register_model
from lm_eval.models import huggingface
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache

import hfkvq
from hfkvq.caches import MixedKVCache, make_cache
from hfkvq.caches.base.model_calls import with_cache
from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.caches.tags import Tagger
from hfkvq.measure.demo.answers import answer_lengths
from hfkvq.measure.divergence.measurement import read_memory
from hfkvq.measure.models import find_model
from hfkvq.measure.records import clock

from .arguments import CacheArguments, check_loading, check_options, take_arguments

# Within lm-eval's tree of loggers, whose command line shows that tree alone.
logger = logging.getLogger("lm_eval.models.hf_kvq")

# The decorator that registers it hides its type.
HFLM: Any = huggingface.HFLM

_MODEL_OPTIONS = frozenset(inspect.signature(HFLM.__init__).parameters)
_TYPES = get_type_hints(HFLM.__init__)


@dataclass
class Cost:
    """Sums over the caches of a task.

    Attributes:
        requests: number of answers.
        context_tokens: tokens of all prompts, without padding.
        generated_tokens: tokens of all answers.
        steps: generated tokens without the first of each answer, which the prompt's forward gives.
        seconds: time from the first tokens to the last ones.
        held: bytes of the compressed layers when an answer was finished.
        bf16: bytes of the same keys and values in bf16.
        sealed: the part of ``bf16`` in caches that have sealed anything.
        payload: code bits times ``sealed``.
        keys: mean width of the keys' channels times ``sealed``.
        peak: bytes of the largest cache, all layers counted.
    """

    requests: int = 0
    context_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    held: float = 0
    bf16: float = 0
    sealed: float = 0
    payload: float = 0.0
    keys: float = 0.0
    peak: int = 0

    def figures(self) -> dict[str, Any]:
        """Means and rates by name; None where nothing was measured."""
        return {
            "code_bits": self.payload / self.sealed if self.sealed else None,
            "key_bits": self.keys / self.sealed if self.sealed else None,
            "total_bits": 16 * self.held / self.bf16 if self.bf16 else None,
            "peak_cache_bytes": self.peak,
            "tokens_per_second": self.steps / self.seconds if self.seconds else None,
            "generated_tokens": self.generated_tokens,
            "requests": self.requests,
            "context_tokens": self.context_tokens / self.requests if self.requests else None,
        }


def total(costs: Iterable[Cost]) -> Cost:
    """Sum of costs; the peak is the largest."""
    whole = Cost()
    for cost in costs:
        for name, value in vars(cost).items():
            mine = getattr(whole, name)
            setattr(whole, name, max(mine, value) if name == "peak" else mine + value)
    return whole


class _FirstToken(LogitsProcessor):
    """Takes the time, and the cache's bytes, when the prompt is done; leaves the logits as they are."""

    def __init__(self, look: Callable[[], int], device: torch.device) -> None:
        self.look, self.device = look, device
        self.peak = 0
        self.began: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        if self.began is None:
            self.peak = self.look()
            self.began = clock(self.device)
        return scores


Answer = tuple[float, bool]
"""Sum of the continuation's log-probabilities, and whether greedy decoding would give it."""


Tokens = tuple[int, ...]

Group = tuple[Tokens, dict[Tokens, list[int]]]
"""Tokens of a prompt, and by what is fed behind it the numbers of the requests: several end in another token only."""


def _batches(groups: Sequence[Group], size: int) -> Iterator[list[Group]]:
    """Groups whose rows together are at most ``size``, one group at least; never with and without a prompt together."""
    batch: list[Group] = []
    rows = 0
    for group in groups:
        if batch and (rows + len(group[1]) > size or bool(batch[0][0]) != bool(group[0])):
            yield batch
            batch, rows = [], 0
        batch.append(group)
        rows += len(group[1])
    if batch:
        yield batch


@register_model("hf-kvq")
class HFKVQ(HFLM):
    """``hf`` with a compressed cache, fresh for every batch.

    ``lm_eval --model hf-kvq --model_args pretrained=...,scheme=mixkvq,tau_bf16=1.44 --tasks ...``: all options of
    ``hf``, and those below. Left padding is never cached, so an answer does not depend on the prompts beside it. Bits,
    bytes and speed are logged by task, and lm-eval writes them into its results as ``config.kvq``; under
    ``accelerate launch`` they are those of the first process's share.

    Args:
        pretrained: a loaded model, or its name as `hfkvq.measure.models.find_model` takes it.
        scheme: a preset (`hfkvq schemes` lists them), or a scheme's description as a JSON object; ``none`` or ``bf16``
            is Transformers' own cache; the ``.json`` file of a preset as `hfkvq tune` writes it. The scheme's knobs are
            arguments of their own.
        layers: schemes of single layers, e.g. {"0-1": "full"}; see `MixedKVCache`.
        ll_chunk: tokens of a chunk in which continuations are fed for their log-likelihood. The context but for its
            last token is the prompt; that token and the continuation see the prompt as the cache holds it, and the
            tokens of their own chunk as they are. 1 is as in generation.
        truncate: what becomes of a prompt that is too long for the model: "left" cuts its beginning (lm-eval's way),
            "middle" keeps both ends (LongBench's way), "refuse" raises.
        **others: the scheme's knobs, and everything that ``hf`` takes.

    Raises:
        ValueError: an argument that nobody knows, a knob of another scheme, a scheme that cannot hold the model's
            heads, an encoder-decoder model; all of them before the model is loaded.

    Attributes:
        costs: by task, since the model was made or `use` was called.
    """

    def __init__(
        self,
        pretrained: Any,
        scheme: Any = DEFAULT_SCHEME,
        layers: Any = None,
        ll_chunk: int = 16,
        truncate: str = "left",
        **others: Any,
    ) -> None:
        if not isinstance(pretrained, str) and not hasattr(pretrained, "config"):
            raise ValueError(f"pretrained: got {pretrained!r}, allowed the name of a model, or a loaded one.")
        self.cache_arguments = take_arguments(scheme, layers, ll_chunk, truncate, others, _MODEL_OPTIONS)
        check_options(others, _TYPES)
        self.costs: dict[str, Cost] = {}
        self._tagger: Tagger | None = None
        self._task = ""
        if not isinstance(pretrained, str):
            unknown = {name: value for name, value in others.items() if name not in _MODEL_OPTIONS}
            self._check(unknown, pretrained.config)
        super().__init__(find_model(pretrained).path if isinstance(pretrained, str) else pretrained, **others)
        if self.cache_arguments.table is not None:
            self.cache_arguments.table.check(self._subject.config, self.tokenizer)

    def _get_config(self, pretrained: str, *args: Any, **kwargs: Any) -> None:
        """Reads the config; whatever is wrong with it is a ValueError that names the argument."""
        try:
            super()._get_config(pretrained, *args, **kwargs)
        except Exception as error:
            # Configs of each kind of model stumble over wrong values in their own way.
            raise ValueError(f"pretrained: the config of {pretrained!r} cannot be read: {error}") from error

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads the tokenizer; whatever is wrong with it is a ValueError that names the argument."""
        try:
            return super()._create_tokenizer(pretrained, tokenizer, *args, **kwargs)
        except (OSError, ValueError) as error:
            name = "pretrained" if tokenizer is None else "tokenizer"
            raise ValueError(
                f"{name}: the tokenizer of {tokenizer or pretrained!r} cannot be loaded: {error}"
            ) from error

    def _get_backend(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Refuses encoder-decoder models, as soon as the config tells."""
        super()._get_backend(config, *args, **kwargs)
        if self.backend != "causal":
            raise ValueError(
                f"pretrained: got an encoder-decoder model ({getattr(config, 'model_type', '?')}), allowed "
                "decoder-only models; use --model hf for this one."
            )

    def _create_model(self, pretrained: str, *args: Any, **kwargs: Any) -> None:
        """Checks what can be checked with the config alone, then loads the model."""
        named = inspect.signature(HFLM._create_model).parameters
        unknown = {name: value for name, value in kwargs.items() if name not in named}
        self._check(unknown, self.config)
        super()._create_model(pretrained, *args, **kwargs)

    def _check(self, unknown: dict[str, Any], config: Any, given: CacheArguments | None = None) -> None:
        """Refuses arguments that nobody knows, and a scheme that cannot hold a model's heads."""
        preset = (given or self.cache_arguments).preset
        check_loading(unknown, config, preset)
        if preset is not None:
            MixedKVCache(config, preset, attach=False)

    def use(self, scheme: Any, layers: Any = None, **knobs: Any) -> None:
        """Sets another scheme for the requests that follow, with the model as it is loaded; costs begin anew.

        Raises:
            ValueError: see the constructor. Nothing is changed then.
        """
        old, others = self.cache_arguments, dict(knobs)
        new = take_arguments(scheme, layers, old.chunk, old.truncate, others, ())
        self._check(others, self._subject.config, new)
        if new.table is not None:
            new.table.check(self._subject.config, self.tokenizer)
        self.cache_arguments, self.costs = new, {}

    @property
    def _subject(self) -> Any:
        """The model that runs forwards: below an adapter, if there is one."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def make_cache(self) -> Cache:
        """An empty cache of the scheme."""
        preset = self.cache_arguments.preset
        if preset is not None and "tags" in preset.needs and self._tagger is None:
            self._tagger = Tagger.from_tokenizer(self.tokenizer, config=self.model.config)
        return make_cache(self._subject, preset, tagger=self._tagger)

    def get_model_info(self) -> dict[str, Any]:
        """Text that lm-eval writes under "config": the model, and under "kvq" the cache with its figures."""
        cache, model = self.cache_arguments, self._subject
        described: dict[str, Any] = {
            "preset": cache.asked,
            "scheme": None if cache.preset is None else cache.preset.to_dict(),
            "ll_chunk": cache.chunk,
            "truncate": cache.truncate,
            "hfkvq_version": hfkvq.__version__,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
        }
        figures = {task: cost.figures() for task, cost in self.costs.items()}
        kvq = {**described, **total(self.costs.values()).figures(), "tasks": figures}
        return {**super().get_model_info(), "kvq": kvq}

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Refuses lm-eval's store of answers, which does not tell one scheme's answers from another's."""
        if cache_hook.dbdict is not None:
            raise ValueError(
                "use_cache: lm-eval keeps answers by their prompts alone, so one scheme's answers would be reported "
                "for another; leave out --use_cache."
            )
        super().set_cache_hook(cache_hook)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._by_task(super().generate_until, requests, disable_tqdm)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        return self._by_task(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._by_task(super().loglikelihood_rolling, requests, disable_tqdm)

    def _by_task(self, answer: Callable[..., list[Any]], requests: Sequence[Instance], quiet: bool) -> list[Any]:
        """Answers requests task by task, so that each task's costs are its own."""
        found: dict[int, Any] = {}
        for task in dict.fromkeys(request.task_name or "" for request in requests):
            self._task = task
            mine = [i for i, request in enumerate(requests) if (request.task_name or "") == task]
            found |= zip(mine, answer([requests[i] for i in mine], quiet), strict=True)
            if self.rank == 0 and task in self.costs:
                figures = self.costs[task].figures()
                words = [("{:.2f} total bits", "total_bits"), ("{:.2f} bits of codes", "code_bits")]
                words += [("largest cache {:,} bytes", "peak_cache_bytes"), ("{:.1f} tokens/s", "tokens_per_second")]
                known = [form.format(figures[name]) for form, name in words if figures[name] is not None]
                logger.info("%s: %s", task, ", ".join(known))
        return [found[i] for i in range(len(requests))]

    def _cost(self) -> Cost:
        """Costs of the task that is being answered, to add to."""
        return self.costs.setdefault(self._task, Cost())

    # Generation

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See `HFLM.tok_batch_encode`; prompts that are too long are cut as ``truncate`` says."""
        if self.cache_arguments.truncate == "left" or not left_truncate_len:
            return super().tok_batch_encode(strings, padding_side, left_truncate_len, truncation)
        ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        if ids.shape[1] <= left_truncate_len:
            return ids, mask
        rows = [self._fit(row[seen.bool()].tolist(), left_truncate_len) for row, seen in zip(ids, mask, strict=True)]
        return _padded(rows, self.tokenizer.pad_token_id, padding_side)

    def _fit(self, tokens: list[int], limit: int) -> list[int]:
        """At most ``limit`` tokens of a prompt, cut as ``truncate`` says."""
        if len(tokens) <= limit:
            return tokens
        if self.cache_arguments.truncate == "refuse":
            raise ValueError(
                f"truncate: a prompt of task {self._task!r} has {len(tokens)} tokens, but {limit} fit beside the "
                f"answer in the model's {self.max_length}; raise max_length, lower max_gen_toks or use truncate=middle."
            )
        if self.cache_arguments.truncate == "left":
            return tokens[-limit:]
        half = limit // 2
        return [*tokens[:half], *tokens[len(tokens) - (limit - half) :]]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Generates with a fresh cache, and counts what it cost."""
        cache, device = self.make_cache(), context.device
        mask = generation_kwargs.get("attention_mask")
        if mask is None:
            mask = torch.ones_like(context)
        first = _FirstToken(lambda: _held(cache), device)
        out = super()._model_generate(
            context,
            max_length,
            stop,
            **with_cache(self.model, cache),
            logits_processor=LogitsProcessorList([first]),
            **generation_kwargs,
        )
        seconds = clock(device) - (first.began or 0.0)
        ends = self._subject.generation_config.eos_token_id
        lengths = answer_lengths(out[:, context.shape[1] :], ends if isinstance(ends, list) else [ends])
        cost = self._cost()
        cost.requests += len(lengths)
        cost.context_tokens += int(mask.sum())
        cost.generated_tokens += sum(lengths)
        cost.steps += sum(max(length - 1, 0) for length in lengths)
        cost.seconds += seconds
        self._count(cache, mask)
        cost.peak = max(cost.peak, first.peak)
        return out

    def _count(self, cache: Cache, mask: Tensor) -> None:
        cost, memory = self._cost(), read_memory(cache, mask)
        cost.held += memory.held_bytes
        cost.bf16 += memory.bf16_bytes
        if not math.isnan(memory.code_bits):
            cost.sealed += memory.bf16_bytes
            cost.payload += memory.code_bits * memory.bf16_bytes
            cost.keys += memory.key_bits * memory.bf16_bytes
        cost.peak = max(cost.peak, _held(cache))

    # Log-likelihood

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Answer]:
        """Scores continuations behind a context that lies in the cache, in chunks."""
        groups: dict[Tokens, dict[Tokens, list[int]]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            prompt, fed = self._split(context, continuation)
            groups.setdefault(prompt, {}).setdefault(fed, []).append(number)
        # Longest first: memory runs out early if at all. Requests without a prompt come last.
        ordered = sorted(groups.items(), key=lambda group: (-len(group[0]), group[0]))
        answers: list[Answer | None] = [None] * len(requests)
        size = override_bs or self.batch_size
        if size == "auto":
            size = self._detect_batch_size(list(requests), 0)
        cost, asked = self._cost(), self.cache_arguments
        name = "bf16" if asked.preset is None else asked.asked or asked.preset.scheme.name
        quiet = disable_tqdm or override_bs is not None or self.rank != 0
        with (
            tqdm(total=len(requests), disable=quiet, desc=f"log-likelihood through {name}") as bar,
            torch.autocast(
                device_type=self.device.type,
                dtype=self.mixed_precision_dtype,
                enabled=self.mixed_precision_dtype is not None,
            ),
        ):
            for batch in _batches(ordered, size):
                self._score([continuation for *_, continuation in requests], batch, size, answers)
                for number in (number for _, rows in batch for numbers in rows.values() for number in numbers):
                    key, context, _ = requests[number]
                    cost.requests += 1
                    cost.context_tokens += len(context)
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answers[number])
                    bar.update()
        done = [answer for answer in answers if answer is not None]
        assert len(done) == len(requests)
        return done

    def _split(self, context: list[int], continuation: list[int]) -> tuple[Tokens, Tokens]:
        """Tokens that are the prompt, and those that are fed behind it, through the cache, which predict what follows.

        The prompt ends one token before the continuation, which is then predicted through the cache alone.
        """
        limit = self.max_length + 1 - len(continuation)
        if not continuation or limit < 1:
            raise ValueError(
                f"continuation: got {len(continuation)} tokens, allowed 1 to {self.max_length}, the model's max_length."
            )
        *prompt, last = self._fit(context, limit)
        return tuple(prompt), (last, *continuation[:-1])

    @torch.no_grad()
    def _score(
        self, targets: Sequence[list[int]], batch: Sequence[Group], size: int, answers: list[Answer | None]
    ) -> None:
        """Answers the requests of groups that are prefilled together, of which ``size`` rows at most are fed at once.

        ``answers`` are written, and ``targets`` read, by the requests' numbers.
        """
        cache, pad = self.make_cache(), self.tokenizer.pad_token_id or 0
        ids, mask = (x.to(self.device) for x in _padded([prompt for prompt, _ in batch], pad, "left"))
        length = ids.shape[1]
        if length:
            self._forward(ids, mask, cache, last_only=True)
        jobs = [(row, fed, numbers) for row, (_, rows) in enumerate(batch) for fed, numbers in rows.items()]
        # Neighbours have continuations of similar lengths.
        jobs.sort(key=lambda job: -len(job[1]))
        # Rows that share a prompt share its pages, which would make any scheme look smaller than it is.
        shared = length > 0 and len(jobs) > len(batch)
        if shared:
            self._count(cache, mask)
        pieces = [jobs[start : start + size] for start in range(0, len(jobs), size)]
        for number, piece in enumerate(pieces):
            own = cache
            if number + 1 < len(pieces):
                own = copy.deepcopy(cache) if length else self.make_cache()
            chosen = [row for row, *_ in piece]
            rows = torch.tensor(chosen, device=self.device, dtype=torch.int64)
            if length and chosen != list(range(len(batch))):
                own.batch_select_indices(rows)
            columns = self._feed(own, mask[rows], [job[1:] for job in piece], targets, answers)
            if not shared:
                self._count(own, columns)

    def _feed(
        self,
        cache: Cache,
        mask: Tensor,
        piece: Sequence[tuple[Tokens, list[int]]],
        targets: Sequence[list[int]],
        answers: list[Answer | None],
    ) -> Tensor:
        """Answers requests row by row of the cache: what is fed, and their numbers. Returns the mask of its columns."""
        chunk, wanted = self.cache_arguments.chunk, [(x, row) for row, (_, own) in enumerate(piece) for x in own]
        rows = torch.tensor([row for _, row in wanted], device=self.device, dtype=torch.int64)
        wished = _padded([targets[number] for number, _ in wanted], 0, "right")[0].to(self.device)
        ids = _padded([fed for fed, _ in piece], self.tokenizer.pad_token_id or 0, "right")[0].to(self.device)
        scores, hits = [], []
        for part, target in zip(ids.split(chunk, 1), wished.split(chunk, 1), strict=True):
            mask = torch.cat([mask, torch.ones_like(part)], 1)
            logits = self._forward(part, mask, cache)
            columns = torch.arange(logits.shape[1], device=logits.device)
            log_p = F.log_softmax(logits, -1, dtype=self.softmax_dtype)
            scores.append(log_p[rows[:, None], columns, target])
            hits.append(logits.argmax(-1)[rows] == target)
        score, hit = torch.cat(scores, 1), torch.cat(hits, 1).cpu()
        for at, (number, _) in enumerate(wanted):
            end = len(targets[number])
            answers[number] = (float(score[at, :end].sum()), bool(hit[at, :end].all()))
        return mask

    def _forward(self, ids: Tensor, mask: Tensor, cache: Cache, last_only: bool = False) -> Tensor:
        extra: dict[str, Any] = {}
        named = inspect.signature(self._subject.forward).parameters
        if "position_ids" in named:
            # Padding is no position, as in `generate`.
            extra["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if last_only and "logits_to_keep" in named:
            extra["logits_to_keep"] = 1
        return self.model(
            input_ids=ids, attention_mask=mask, **with_cache(self.model, cache), use_cache=True, **extra
        ).logits

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """See `HFLM._detect_batch_size`: the largest batch that fits, tried with the cache."""
        length = self.max_length - 1
        if requests:
            length = min(max(len(context) + len(continuation) for _, context, continuation in requests), length)

        @find_executable_batch_size(starting_batch_size=self.max_batch_size)
        def attempt(batch_size: int) -> int:
            ids = torch.ones(batch_size, length, dtype=torch.long, device=self.device)
            with torch.no_grad():
                cache = self.make_cache()
                self.model(input_ids=ids, **with_cache(self.model, cache), use_cache=True, logits_to_keep=1)
                self.model(
                    input_ids=ids[:, : 1 if requests is None else 16], **with_cache(self.model, cache), use_cache=True
                )
            return batch_size

        try:
            found = attempt()  # type: ignore[call-arg] - the decorator gives it
        except RuntimeError as error:
            # accelerate's words. Prompts may be shorter than the longest that was tried.
            if "No executable batch size found" not in str(error):
                raise
            found = 1
        return found


def _held(cache: Cache) -> int:
    """Bytes of all layers."""
    if isinstance(cache, MixedKVCache):
        return cache.memory().total
    return sum(tensor.nbytes for layer in cache.layers for tensor in vars(layer).values() if isinstance(tensor, Tensor))


def _padded(rows: Sequence[Sequence[int]], pad: int, side: str) -> tuple[Tensor, Tensor]:
    """Token ids and mask (B, T) of rows, padded on the "left" or "right"."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad, dtype=torch.int64, device="cpu")
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        at = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[i, at] = torch.tensor(row, dtype=torch.int64, device="cpu")
        mask[i, at] = 1
    return ids, mask
