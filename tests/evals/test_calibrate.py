"""Calibration: D_k(b) and N_k by hand, what is captured, requests from conversations, and the commands."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from evals.capture import Capture, capture, compressed_layers, quantized
from evals.triaxial.__main__ import app
from evals.triaxial.allocation import Sensitivity
from evals.triaxial.calibration import aggregate, calibrate, distortion
from evals.triaxial.conversations import Conversation, data_hash, load_conversations, make_request, parse_conversation
from hfkvq.caches import BitTable
from hfkvq.caches.tags import parse_tag
from hfkvq.kernels.pages import PageFormat
from tests.caches.models import build, prompt
from tests.command import invoke

OBS, USER, INST = "older|text|obs", "current|text|user", "older|text|inst"


class WordTokenizer:
    """A token a word; the template writes a message's role before it and "." behind it."""

    chat_template = "role words ."
    words: dict[str, int]

    def __init__(self):
        self.words = {}

    def apply_chat_template(self, messages, *, tools, add_generation_prompt, tokenize):
        assert not tokenize
        for message in messages:
            if message["role"] == "odd":
                raise RuntimeError("roles must be even")
        said = [f"{m['role']} {m['content']} ." for m in messages]
        said = [*(["tools"] if tools else []), *said, *(["assistant"] if add_generation_prompt else [])]
        return " ".join(said)

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens

        class Encoded:
            input_ids = [self.words.setdefault(word, 5 + len(self.words)) for word in text.split()]  # noqa: RUF012

        return Encoded


class EvenIsObs:
    def tag(self, ids, mask=None):
        return torch.where(ids % 2 == 0, parse_tag(OBS), parse_tag(USER)).to(torch.uint8)


def talk(*contents):
    roles = ("user", "assistant")
    return Conversation(tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(contents)))


# D_k(b).


def test_aggregate_is_max_over_heads_then_mean_over_requests_then_sum_over_layers():
    """Two layers, two requests, two heads: (max(1, 3) + max(5, 2)) / 2 + (max(0, 2) + max(4, 4)) / 2 = 4 + 3."""
    assert aggregate(torch.tensor([[[1.0, 3], [5, 2]], [[0, 2], [4, 4]]])) == 7


def test_distortion_by_hand():
    """One query that looks at two tokens alike: the error of its output is half the error of the value it sees.

    Values of the second token: 0, 1, 3, ... 3 in a group of eight, so INT2 has the step 1 and is exact; of a group
    0, 0.4, 3: 0.4 becomes 0, and the output is off by 0.2 in one channel.
    """
    keys = torch.zeros(1, 2, 8)
    values = torch.zeros(1, 2, 8)
    values[0, 1] = torch.tensor([0, 0.4, 3, 3, 3, 3, 3, 3])
    captured = Capture(torch.zeros(1, 1, 8), keys, values, 1.0)
    exact = captured.attend(keys, values)
    assert exact[0, 0, 1] == pytest.approx(0.2)
    second = torch.tensor([1])
    assert distortion(captured, second, exact, 2, 8).tolist() == [pytest.approx(0.2**2, rel=1e-3)]
    # 15 steps of 0.2: exact.
    assert distortion(captured, second, exact, 4, 8).item() == pytest.approx(0, abs=1e-6)
    assert distortion(captured, torch.tensor([0]), exact, 2, 8).item() == 0


def test_keys_of_int2_share_scales_along_tokens_and_int4_along_channels():
    """An outlier channel costs 2-bit keys nothing in other channels, 4-bit ones their resolution."""
    keys = torch.rand(1, 8, 8)
    keys[..., 3] = 100
    every = torch.arange(8)
    per_channel = quantized(keys, PageFormat(2, "channel", 8, 8), "keys", every)
    per_token = quantized(keys, PageFormat(4, "token", 8, 8), "keys", every)
    others = [c for c in range(8) if c != 3]
    assert (per_channel - keys)[..., others].abs().max() < 0.2
    assert (per_token - keys)[..., others].abs().max() > 0.3


def test_only_the_tokens_asked_for_are_quantized():
    x = torch.randn(2, 21, 16, generator=torch.Generator().manual_seed(0))
    columns = torch.tensor([1, 4, 5, 7, 11, 12, 13, 17, 20])
    got = quantized(x, PageFormat(2, "channel", 8, 8), "keys", columns)
    others = [i for i in range(21) if i not in columns]
    assert torch.equal(got[:, others], x[:, others])
    assert ((got - x)[:, columns].abs().amax((0, 2)) > 0)[:-1].all()
    # The last one fills its group by itself: its scale is 0, its value its own but for f16.
    torch.testing.assert_close(got[:, 20], x[:, 20], rtol=1e-3, atol=1e-3)


# N_k.


# Capture.


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-oss", "gemma2"])
def test_replay_is_what_the_model_computes(family):
    """Replayed outputs equal those of the stock attention, sinks and softcap included."""
    model = build(family)
    layers = compressed_layers(model)
    seen = {}

    def keep(index):
        # The input of the output projection is the attention's output.
        return lambda module, args: seen.__setitem__(index, args[0].detach()[0])

    handles = [model.model.layers[i].self_attn.o_proj.register_forward_pre_hook(keep(i)) for i in layers]
    before = model.config._attn_implementation_internal
    ids = prompt(1, 40)
    with torch.no_grad():
        expected = model(ids).logits
        stock = dict(seen)
        captures = capture(model, ids[0].tolist(), layers)
        assert model.config._attn_implementation_internal == before
        assert torch.equal(model(ids).logits, expected)
    for i, captured in zip(layers, captures, strict=True):
        got = captured.attend(captured.keys.float(), captured.values.float())
        torch.testing.assert_close(got.transpose(0, 1).flatten(1), stock[i], rtol=1e-4, atol=1e-5)
    for handle in handles:
        handle.remove()


# Conversations.


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "t"}]},
        {"messages": [{"role": "user", "content": "a"}], "score": 1, "tools": [{"name": "t"}]},
    ],
)
def test_forms_of_conversations(line):
    assert parse_conversation(line) == Conversation(({"role": "user", "content": "a"},), ({"name": "t"},))
    assert parse_conversation(next(iter(line.values()))).tools is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "data: .* cannot be read"),
        ("\n \n", "data: .* holds no conversation"),
        ('[{"role": "user", "content": "a"}]\n{', "data: .*: line 2 is not JSON"),
        ('{"text": "a"}', r'data: .*: line 1: expected \{"messages"'),
        ('[{"content": "a"}]', "data: .*: line 1: expected a message with a role"),
        ('["a"]', "data: .*: line 1: expected a message with a role"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": 5}', "data: .*: line 1: expected tools that are"),
    ],
)
def test_bad_data_files(tmp_path, text, message):
    path = tmp_path / "data.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_conversations(path)


# All together.


def test_calibrate_measures_each_tag_in_each_request():
    model, tokenizer = build("llama"), WordTokenizer()
    talks = [talk("a b c d e f g", "h i", "j k l"), talk("a b c d", "e", "f g h i j k", "l")]
    found = calibrate(model, tokenizer, talks, tagger=EvenIsObs(), group_size=8)
    assert set(found.counts) == {OBS, USER}
    requests = [make_request(x, tokenizer) for x in talks]
    assert sum(found.counts.values()) == sum(len(x.ids) for x in requests)
    assert found.counts[OBS] == sum(i % 2 == 0 for x in requests for i in x.ids)
    # By hand: each layer's captures, heads, requests.
    raw = torch.zeros(2, 2, 4)
    for r, request in enumerate(requests):
        for i, captured in enumerate(capture(model, request.ids, [0, 1], request.first_new)):
            exact = captured.attend(captured.keys, captured.values)
            columns = (torch.tensor(request.ids) % 2 == 0).nonzero()[:, 0]
            raw[i, r] = distortion(captured, columns, exact, 2, 8)
    assert found.distortion[OBS][0] == pytest.approx(aggregate(raw), rel=1e-5)
    for two, four in found.distortion.values():
        assert 0 < four < two
    assert (found.origin.requests, found.origin.layers) == (2, (0, 1))
    assert found.origin.data == data_hash(talks) != data_hash(talks[:1])


# The commands, on the reference model.


def test_calibrate_then_allocate(tmp_path, monkeypatch):
    from hfkvq import TriAxialCache
    from hfkvq.measure.demo import prompts
    from hfkvq.measure.reference import load_reference, tools

    # CPUs take several times as long in the checkpoint's bf16.
    monkeypatch.setattr(prompts, "load", functools.partial(prompts.load, dtype=torch.float32))

    data, found, table = (tmp_path / name for name in ("data.jsonl", "s.json", "table.json"))
    with data.open("w") as file:
        for seed in range(2):
            example = tools(seed=seed, rounds=2)
            messages = [*example.messages, {"role": "assistant", "content": example.answer}]
            file.write(json.dumps({"messages": messages, "tools": list(example.tools)}) + "\n")
    done = invoke("calibrate", str(data), "--out", str(found), "--layers", "1", "--device", "cpu", app=app)
    assert done.exit_code == 0, done.output
    assert INST in done.output
    sensitivity = Sensitivity.load(found)
    assert sensitivity.origin.requests == 2
    done = invoke("allocate", str(found), app=app)
    assert done.exit_code == 0, done.output
    assert "2.7" in done.output
    done = invoke("allocate", str(found), "--budget", "2.7", "--out", str(table), app=app)
    assert done.exit_code == 0, done.output
    model, tokenizer = load_reference(torch.float32)
    # What the call repeats to the letter gets the bits.
    assert BitTable.load(table).bits[USER] == 4
    assert dict(TriAxialCache(model, tokenizer, table=table).scheme.table).keys() == sensitivity.counts.keys()
