"""Text, its windows, and schemes as they are typed."""

from __future__ import annotations

import types

import pytest
import torch

from hfkvq import get_scheme
from hfkvq.measure.divergence.naming import parse_measured
from hfkvq.measure.divergence.windows import Text, cut, read_file, reference_documents


class Letters:
    """A tokenizer of one token a letter; "^" begins a text, if it is told so."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True):
        ids = [ord(letter) for letter in text]
        if add_special_tokens and self.bos_token_id is not None:
            ids = [self.bos_token_id, *ids]
        return types.SimpleNamespace(input_ids=ids)


def text_of(tokens: torch.Tensor) -> list[str]:
    return ["".join(map(chr, row)) for row in tokens.tolist()]


def test_windows_follow_one_another() -> None:
    found = cut([Text("a", ["abcde", "fghij", "klmno"], "-")], Letters(), 4, 3)
    assert text_of(found.tokens) == ["abcd", "e-fg", "hij-"]
    assert found.first_token is None
    assert text_of(cut([Text("a", ["abcde"])], Letters(), 4, 3).tokens) == ["abcd"]


def test_every_window_begins_as_texts_do() -> None:
    found = cut([Text("a", ["abcdefgh"])], Letters(ord("^")), 4, 9)
    assert text_of(found.tokens) == ["^abc", "^def"]
    assert found.first_token == ord("^")


def test_texts_share_the_windows_and_take_turns() -> None:
    texts = [Text("small", ["abcdefghi"]), Text("large", ["ABCDEFGHI"])]
    found = cut(texts, Letters(), 2, 5)
    assert text_of(found.tokens) == ["ab", "AB", "cd", "CD", "ef"]
    assert found.names == ("small", "large", "small", "large", "small")
    # A text gives no more than it has, and only what is asked for is read.
    assert cut([*texts, Text("none", [])], Letters(), 2, 2).names == ("small", "large")
    assert cut(texts, Letters(), 4, 9).names == ("small", "large") * 2


def test_too_little_text() -> None:
    with pytest.raises(ValueError, match="text: a has 3 tokens, but a window needs 8; give more text, or smaller"):
        cut([Text("a", ["abc"])], Letters(), 8, 1)


def test_files(tmp_path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("Grüße", encoding="utf-8")
    lines.write_text('{"body": "one"}\n\n{"body": "two", "n": 1}\n', encoding="utf-8")
    assert read_file(plain, "body") == ["Grüße"]
    assert read_file(lines, "body") == ["one", "two"]


def test_the_reference_models_own_text() -> None:
    documents = reference_documents()
    first = [next(documents) for _ in range(6)]
    assert len(set(first)) == 6
    assert all(text.endswith("<|im_end|>\n") for text in first)
    assert next(reference_documents(seed=1)) not in first


def test_schemes_with_knobs() -> None:
    found = parse_measured(["kivi-2", "kitty:boost_ratio=0.2:sink_length=0", "kitty:rotate_values=true"])
    assert list(found) == ["kivi-2", "kitty:boost_ratio=0.2:sink_length=0", "kitty:rotate_values=true"]
    assert [preset.scheme for preset in found.values()] == [
        get_scheme("kivi-2"),
        get_scheme("kitty", boost_ratio=0.2, sink_length=0),
        get_scheme("kitty", rotate_values=True),
    ]
    assert "full" in parse_measured([])
