"""Calibration of TriAxialKV: error of the attention's output if the tokens of one tag are quantized (section 3.1.4)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evals.capture import Capture, capture, compressed_layers, quantized, spread_layers
from evals.triaxial.allocation import Origin, Sensitivity
from evals.triaxial.conversations import Conversation, data_hash, make_request
from hfkvq.caches.schemes.base import get_scheme
from hfkvq.caches.tags import PAD, TAGS, Tagger
from hfkvq.caches.tags.bit_table import config_hash, template_hash
from hfkvq.measure.records import versions

WIDTHS = (2, 4)


def distortion(captured: Capture, columns: Tensor, exact: Tensor, bits: int, group_size: int = 32) -> Tensor:
    """Distortion ``E_i ||o_i - õ_i||²`` of each head, eq. (1), if only these tokens are held in ``bits``.

    Args:
        captured: one layer of one request.
        columns: i64 (m,), the tokens.
        exact: f32 (Hq, n, Dv), o.
        bits: 2 or 4, in the formats of the "triaxial" scheme.

    Returns:
        f64 (Hq,), the mean over the n positions of the captured queries.
    """
    dims = captured.keys.shape[-1], captured.values.shape[-1]
    layout = get_scheme("triaxial", group_size=group_size, page_size=group_size).layout(*dims)
    layout.check(*dims)
    run = WIDTHS.index(bits)
    keys = quantized(captured.keys, layout.keys.formats[run], "keys", columns)
    values = quantized(captured.values, layout.values.formats[run], "values", columns)
    error = captured.attend(keys, values) - exact
    return error.double().square().sum(-1).mean(-1)


def aggregate(raw: Tensor) -> float:
    """Distortion ``D_k(b)`` of raw ones (L, R, Hq): max over heads, mean over requests, sum over layers."""
    return float(raw.amax(-1).mean(-1).sum())


def count_tokens(counts: Mapping[str, Sequence[int]], shared_inst: bool = True) -> dict[str, float]:
    """Counts ``N_k`` of tokens by tag and request: the sum, and for instructions the median (section 3.1.3).

    Args:
        counts: tokens of each tag in each request; requests without the tag may be left out or 0.
        shared_inst: whether requests share one copy of their instructions, as under prefix caching. The median is
            taken over the requests that have the tag.
    """
    total: dict[str, float] = {}
    for tag, per_request in counts.items():
        present = [count for count in per_request if count]
        if shared_inst and tag.endswith("|inst") and present:
            total[tag] = float(statistics.median(present))
        else:
            total[tag] = float(sum(present))
    return total


def calibrate(
    model: Any,
    tokenizer: Any,
    conversations: Iterable[Conversation],
    *,
    tagger: Tagger | None = None,
    layers: int = 6,
    shared_inst: bool = True,
    max_tokens: int | None = None,
    group_size: int = 32,
    progress: Callable[[float], None] | None = None,
) -> Sensitivity:
    """Measures D_k(2), D_k(4) and N_k of every tag on a model's own prefills.

    Each conversation is one request: its messages up to the last answer. The queries are those of the new tokens,
    behind the answer before; earlier tokens would be in the cache by then.

    Args:
        model: a causal language model of Transformers.
        tokenizer: its tokenizer, with a chat template; for conversations that show images its processor, which makes
            their tokens.
        conversations: a few percent of a workload (the paper: 5 %).
        tagger: in place of the tokenizer's.
        layers: number of layers measured, evenly spread over those that a cache compresses (the paper: four to six).
        shared_inst: see `count_tokens`.
        max_tokens: leave out requests that are longer; None takes all.
        group_size: elements that share a scale.
        progress: called with the finished share.

    Returns:
        Sensitivities with their origin. Requests in which a tag does not occur count as 0 in the
        mean over requests, so that the D_k of all tags are of the same requests.

    Raises:
        ValueError: no conversation has an answer, all are too long, a template that does not take them, images and no
            processor or one that does not expand them, or a head dim that the formats cannot hold.
    """
    conversations = list(conversations)
    requests = [x for x in (make_request(conversation, tokenizer) for conversation in conversations) if x is not None]
    if not requests:
        raise ValueError(
            f"data: none of the {len(conversations)} conversations has an assistant's turn after another turn, so "
            "there is no request to measure; pass complete conversations, with the model's answers."
        )
    chosen = [x for x in requests if max_tokens is None or len(x.ids) <= max_tokens]
    if not chosen:
        shortest = min(len(x.ids) for x in requests)
        raise ValueError(f"max_tokens: got {max_tokens}, but the shortest request has {shortest} tokens.")
    tagger = Tagger.from_tokenizer(tokenizer, config=model.config) if tagger is None else tagger
    which = spread_layers(compressed_layers(model), layers)
    raw: dict[tuple[int, int], dict[tuple[int, int], Tensor]] = {}
    counts: dict[str, list[int]] = {}
    for r, request in enumerate(chosen):
        tags = tagger.tag(torch.tensor([request.ids], dtype=torch.int64, device="cpu"))[0]
        present = [(int(tag), (tags == tag).nonzero()[:, 0]) for tag in tags.unique() if int(tag) != PAD]
        for tag, columns in present:
            counts.setdefault(TAGS[tag], []).append(len(columns))
        for i, captured in enumerate(capture(model, request.ids, which, request.first_new, request.inputs)):
            exact = captured.attend(captured.keys.float(), captured.values.float())
            for tag, columns in present:
                for bits in WIDTHS:
                    error = distortion(captured, columns.to(exact.device), exact, bits, group_size)
                    raw.setdefault((tag, bits), {})[i, r] = error.cpu()
        if progress is not None:
            progress((r + 1) / len(chosen))

    def total(tag: int, bits: int) -> float:
        found = raw[tag, bits]
        nothing = torch.zeros_like(next(iter(found.values())))
        cube = [torch.stack([found.get((i, r), nothing) for r in range(len(chosen))]) for i in range(len(which))]
        return sum(aggregate(layer[None]) for layer in cube)

    tags = sorted({tag for tag, _ in raw})
    origin = Origin(
        model=str(getattr(model.config, "name_or_path", "") or type(model).__name__),
        config=config_hash(model.config),
        template=template_hash(tokenizer),
        data=data_hash(conversations),
        requests=len(chosen),
        layers=tuple(which),
        versions={name: str(found) for name, found in versions("torch", "transformers").items()},
    )
    return Sensitivity(
        {TAGS[tag]: (total(tag, 2), total(tag, 4)) for tag in tags},
        count_tokens({TAGS[tag]: counts[TAGS[tag]] for tag in tags}, shared_inst),
        origin,
        shared_inst,
    )
