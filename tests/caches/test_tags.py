"""Tags against conversations tagged by hand, real templates and real conversations."""

from __future__ import annotations

import base64
import functools
import json
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfkvq.caches.tags import (
    FORMATS,
    PAD,
    SEMANTIC,
    TAGS,
    ChatFormat,
    Opening,
    Span,
    Tagger,
    age_tags,
    find_format,
    get_format,
    parse_tag,
    tag_axes,
    tag_number,
)
from tests.caches.chat_samples import SAMPLES, Sample, spell
from tests.caches.chats import MERGES, TOKENS, bfcl_conversations, bfcl_tools, byte_tokenizer, tau_conversations

IDS = [sample.name for sample in SAMPLES]


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@functools.lru_cache(maxsize=None)
def tokenizer_for(sample_name: str, merging: bool):
    sample = SAMPLES[IDS.index(sample_name)]
    # Only the markers of a template matter to the tagger.
    template = "".join(TOKENS[sample.family]) + sample.template
    if sample.family == "falcon3":
        template = sample.template
    return byte_tokenizer(sample.family, template, MERGES if merging else ())


@functools.lru_cache(maxsize=None)
def tagger_for(sample_name: str, merging: bool) -> Tagger:
    return Tagger.from_tokenizer(tokenizer_for(sample_name, merging))


def names(tags) -> list[str]:
    return [TAGS[tag] for tag in tags.tolist()]


def expected(sample: Sample, tokenizer) -> tuple[list[int], list[str]]:
    """Ids, and by hand the tag of each: a token belongs to the piece in which it begins."""
    made = tokenizer(sample.text, add_special_tokens=False, return_offsets_mapping=True)
    letters = [spell(tag) for text, tag in sample.pieces for _ in text]
    return made["input_ids"], [letters[begin] for begin, _ in made["offset_mapping"]]


# By hand


@pytest.mark.parametrize("merging", [False, True], ids=["bytes", "merging"])
@pytest.mark.parametrize("name", IDS)
def test_every_token_of_a_sample_has_the_tag_written_by_hand(name, merging):
    sample, tokenizer = SAMPLES[IDS.index(name)], tokenizer_for(name, merging)
    ids, wanted = expected(sample, tokenizer)
    got = names(tagger_for(name, merging).tag(ids)[0])
    text = [tokenizer.decode([i]) for i in ids]
    assert list(zip(text, got, strict=True)) == list(zip(text, wanted, strict=True))


@pytest.mark.parametrize("name", [sample.name for sample in SAMPLES if sample.messages is not None])
def test_the_real_template_writes_the_sample(name, shared_data):
    sample = SAMPLES[IDS.index(name)]
    template = (shared_data / "chat_templates" / f"{sample.template}.jinja").read_text(encoding="utf-8")
    tokenizer = byte_tokenizer(sample.family, template)
    written = tokenizer.apply_chat_template(sample.messages, tokenize=False, **sample.arguments)
    wanted = "".join(text for text, _ in sample.pieces[sample.skip :])
    assert written.endswith(wanted) if sample.skip else written == wanted
    if sample.skip == 0:
        ids, tags = expected(sample, tokenizer)
        assert names(Tagger.from_tokenizer(tokenizer).tag(ids)[0]) == tags
