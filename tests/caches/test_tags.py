"""Tags against conversations tagged by hand, in chunks and in batches."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from evals.triaxial.conversations import load_format
from hfkvq.caches.tags import (
    FORMATS,
    PAD,
    SEMANTIC,
    TAGS,
    Opening,
    Span,
    Tagger,
    parse_tag,
)
from tests.caches.chat_samples import SAMPLES
from tests.caches.chats import TOKENS, byte_tokenizer

# A tokenizer that merges where it can: roles with their newline, newlines, brackets with what follows.
MERGES = ("user\n", "assistant\n", "system\n", "\n\n", ">\n", '{"', "<tool", "</tool", "_response>\n", "ab", "ce")


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def names(tags):
    return [TAGS[tag] for tag in tags.tolist()]


@functools.cache
def tokenizer_for(sample_name: str, merging: bool):
    sample = SAMPLES[sample_name]
    # Only the markers of a template matter to the tagger.
    template = sample.template or "".join(TOKENS[sample.family])
    return byte_tokenizer(sample.family, template, MERGES if merging else ())


@functools.cache
def tagger_for(sample_name: str, merging: bool) -> Tagger:
    return Tagger.from_tokenizer(tokenizer_for(sample_name, merging))


# By hand


@pytest.mark.parametrize("merging", [False, True], ids=["bytes", "merging"])
@pytest.mark.parametrize("name", SAMPLES)
def test_every_token_of_a_sample_has_the_tag_written_by_hand(name, merging):
    sample, tokenizer = SAMPLES[name], tokenizer_for(name, merging)
    made = tokenizer(sample.text, add_special_tokens=False, return_offsets_mapping=True)
    letters = [tag for text, tag in sample.pieces for _ in text]
    # A token belongs to the piece in which it begins.
    ids, wanted = made["input_ids"], [letters[begin] for begin, _ in made["offset_mapping"]]
    got = names(tagger_for(name, merging).tag(torch.tensor([ids]))[0])
    text = [tokenizer.decode([i]) for i in ids]
    assert list(zip(text, got, strict=True)) == list(zip(text, wanted, strict=True))


# Padding and batches


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_has_the_tags_of_the_row_alone(side):
    name = "qwen3-five-turns"
    tokenizer, tagger = tokenizer_for(name, False), tagger_for(name, False)
    texts = [SAMPLES[name].text, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", ""]
    rows = [encode(tokenizer, text) for text in texts]
    width = max(map(len, rows)) + 2
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, columns] = torch.tensor(row, dtype=torch.int64)
        mask[i, columns] = 1
    tags = tagger.tag(ids, mask)
    assert tags.dtype == torch.uint8
    assert tags.device.type == "cpu"
    for i, row in enumerate(rows):
        assert torch.equal(tags[i][mask[i].bool()], tagger.tag(torch.tensor([row], dtype=torch.int64))[0])
        assert (tags[i][~mask[i].bool()] == PAD).all()


# Numbers and names


def test_tags_are_numbered_by_their_axes():
    assert len(TAGS) == 4 * 2 * 7 + 1
    assert PAD == 56
    for number, name in enumerate(TAGS):
        assert parse_tag(name) == number
    assert parse_tag("older|text|obs") == SEMANTIC.index("obs")
    assert parse_tag(" current | image | user ") == parse_tag("current|image|user")


@pytest.mark.parametrize("name", ["older|text", "newer|text|obs", "older|text|observation", ""])
def test_unknown_tags_are_refused(name):
    with pytest.raises(ValueError, match="tag: got"):
        parse_tag(name)


# Formats


def test_without_a_template_all_is_the_users():
    tokenizer = byte_tokenizer("qwen3", None)
    tags = Tagger.from_tokenizer(tokenizer).tag(torch.tensor([encode(tokenizer, "a<|im_start|>user\nb")]))
    assert names(tags[0]) == ["current|text|user"] * 8


def test_a_template_of_no_known_format_is_refused():
    tokenizer = byte_tokenizer("falcon3", "{{ messages[0].content }} USER: ASSISTANT:")
    with pytest.raises(ValueError, match=r"no known format fits; looked for gpt-oss by .*tags\.ChatFormat"):
        Tagger.from_tokenizer(tokenizer)
    assert Tagger.from_tokenizer(tokenizer, load_format("falcon3")).grammar.format is FORMATS["falcon3"]
    with pytest.raises(ValueError, match=r"got 'falcon', allowed gpt-oss, .* or a \.json file"):
        load_format("falcon")


@pytest.mark.parametrize("family", [family for family in TOKENS if family != "falcon3"])
def test_formats_are_found_by_added_tokens_too(family):
    # A template that puts its markers together from pieces.
    tokenizer = byte_tokenizer(family, "{{ '<|' + message.role + '|>' }}")
    found = Tagger.from_tokenizer(tokenizer).grammar.format.name
    assert found == {
        **{"qwen2_5": "chatml", "qwen3": "chatml", "internvl": "chatml", "gemma3": "gemma", "gptoss": "gpt-oss"},
        **{"glm4moe": "glm4", "phi3_5": "phi3", "deepseekv3": "deepseek"},
    }.get(family, family)


def test_sentencepiece_writes_spaces_of_its_own():
    """Llama 2 and Mistral: markers are text, and pieces begin with a space that nobody wrote."""
    letters = ["▁", *"[/INST]helo"]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    vocab |= {letter: 257 + i for i, letter in enumerate(dict.fromkeys(letters))}
    vocab |= {"▁[": len(vocab), "IN": len(vocab) + 1}
    core = Tokenizer(models.BPE(vocab, [("▁", "["), ("I", "N")], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", chat_template="[INST]")
    ids = encode(tokenizer, "<s>[INST] hello[/INST] hell</s>[INST]hole[/INST]")
    pieces = tokenizer.convert_ids_to_tokens(ids)
    got = [tag.split("|") for tag in names(Tagger.from_tokenizer(tokenizer).tag(torch.tensor([ids]))[0])]
    by_semantic = {
        semantic: "".join(piece for piece, tag in zip(pieces, got, strict=True) if tag[2] == semantic)
        for semantic in {tag[2] for tag in got}
    }
    assert by_semantic["user"] == "▁hellohole"
    assert by_semantic["assistant"] == "▁hell"
    assert set(by_semantic) == {"user", "assistant", "delim"}


def test_templates_by_name_and_processors():
    tokenizer = byte_tokenizer("qwen3", None)
    tokenizer.chat_template = {"default": "<|im_start|>", "tool_use": ""}

    class Processor:
        chat_template = None

    processor = Processor()
    processor.tokenizer = tokenizer
    assert Tagger.from_tokenizer(processor).grammar.format.name == "chatml"


_OWN = {
    "name": "own",
    "detect": ["@@"],
    "markers": {"@@me\n": "user", "@@you\n": "assistant", "@@rule\n": "inst"},
    "spans": [{"open": "((", "close": "))", "semantic": "reasoning", "within": ["assistant"]}],
    "openings": [{"role": "user", "text": "RESULT", "semantic": "obs"}],
}


def test_a_format_of_ones_own(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps(_OWN), encoding="utf-8")
    form = load_format(path)
    assert form.spans == (Span("((", "))", "reasoning"),)
    assert form.openings == (Opening("user", "RESULT", "obs"),)
    tokenizer = byte_tokenizer("falcon3", "@@")
    text = "@@rule\nA@@me\nBb@@you\n((C))D@@me\nRESULT"
    assert names(Tagger.from_tokenizer(tokenizer, form).tag(torch.tensor([encode(tokenizer, text)]))[0]) == [
        *["older|text|delim"] * 7,
        "older|text|inst",
        *["current|text|delim"] * 5,
        *["current|text|user"] * 2,
        *["current|text|delim"] * 6,
        *["current|text|delim"] * 2,
        "current|text|reasoning",
        *["current|text|delim"] * 2,
        "current|text|assistant",
        *["current|text|delim"] * 5,
        *["current|text|obs"] * 6,
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"markers": {}}, "nothing begins a message"),
        ({"start": "<<"}, "roles is empty"),
        ({"markers": {"@@": "human"}}, "got semantic 'human', allowed inst, user"),
        ({"ends": "</s>"}, "got ends = '</s>', allowed a tuple"),
        ({"marker": {}}, "got marker, allowed channel"),
        ({"spans": [{"open": "(("}]}, "missing 2 required"),
        ({"openings": [{"role": "user", "text": "R", "semantic": "tool"}]}, "got semantic 'tool'"),
    ],
)
def test_formats_that_cannot_be(tmp_path, change, message):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({**_OWN, **change}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_format(path)
