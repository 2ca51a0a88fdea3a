"""`hfkvq recommend`: what fits, what it loses, and the one that is chosen."""

import json
import sys
from functools import partial

import pytest
from transformers import DeepseekV3Config as DeepseekConfig

from hfkvq.caches import get_preset
from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.measure.divergence import run as divergence
from hfkvq.measure.models.outline import outline
from hfkvq.tuning.fit.compute import presets_for
from hfkvq.tuning.fit.model import Plan
from hfkvq.tuning.fit.recommend import Loss, Row, candidates, choose
from tests.command import assert_refused, flat, invoke

run = partial(invoke, "recommend")
SMALL = ("--gpu-memory", "64MiB", "--overhead", "0", "--context", "4k", "--device", "cpu")


def row(name, users, size, loss):
    plan = Plan(name, size, 0, 1 if users else -1, users, 100)
    return Row(plan, None if name == "bf16" else get_preset(name), (4.0, 4.0), loss, None)


def loss(percent, kld, high=None, verdict=None):
    return Loss(1 + percent / 100, None if high is None else (1.0, 1 + high / 100), kld, None, verdict)


ROWS = [
    row("bf16", 1, 90, loss(0, 0)),
    row("kvarn-k4v4", 2, 45, loss(0.3, 0.005)),
    row("best-3.4", 3, 34, loss(0.6, 0.01)),
    row("kitty-pro", 5, 25, loss(6.9, 0.07)),
    # Of text that a model does not know perplexity may fall.
    row("kitty", 6, 24, loss(-2, 0.4)),
    row("kivi-2", 6, 24, None),
]


class TestChoice:
    @pytest.mark.parametrize(
        ("users", "most", "name", "words"),
        [
            (None, 0.01, "best-3.4", "it is the smallest of those that lose at most 1 %"),
            (None, 0.1, "kitty-pro", "it is the smallest of those that lose at most 10 %"),
            (None, 0.0, "kvarn-k4v4", "none stays within 0 %"),
            (2, 0.01, "kvarn-k4v4", "the least loss of those that hold 2 users"),
            (3, 0.01, "best-3.4", "the least loss of those that hold 3 users"),
            (5, 0.0, "kitty-pro", "the least loss of those that hold 5 users"),
        ],
    )
    def test_rules(self, users, most, name, words):
        found = choose(ROWS, users, most)
        assert found.row.plan.name == name
        assert words in found.reason

    def test_nothing_fits(self):
        assert choose(ROWS, 7, 0.01) is None
        assert choose(ROWS[:1], None, 0.01) is None


def test_candidates_keep_every_token_once():
    names = candidates()
    assert {DEFAULT_SCHEME, "kvarn", "kitty", "latent-4"} <= set(names)
    assert not {"full", "int4", "arkv", "snapkv", "triaxial"} & set(names)
    assert len({get_preset(name).scheme for name in names}) == len(names)


class TestCommand:
    def test_ends_with_lines_to_copy(self):
        done = run(*SMALL, "--schemes", "bf16,kitty-pro,saw-int4", columns=79)
        assert done.exit_code == 0, done.output
        lines = done.stdout.splitlines()
        assert lines[-2:] == [
            'Python:  cache = MixedKVCache(model, "saw-int4")',
            "Command: hfkvq demo --schemes saw-int4",
        ]
        assert max(map(len, lines[:-3])) <= 79
        assert "of 4,096 tokens; bf16 holds none" in lines[-3]

    @pytest.mark.parametrize("server", [True, False])
    def test_a_folder_with_a_config_alone_as_json(self, server, tmp_path, monkeypatch):
        """Transformers before 5.19 has no server to recommend."""
        if server:
            pytest.importorskip("hfkvq.serving", reason="Transformers before 5.19", exc_type=ImportError)
        else:
            monkeypatch.setitem(sys.modules, "hfkvq.serving.engine", None)
        config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 2}
        config |= {"num_key_value_heads": 1, "vocab_size": 64, "intermediate_size": 256, "dtype": "bfloat16"}
        (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 65536}))
        options = ["--model", tmp_path, "--gpu-memory", "200MiB", "--overhead", "0", "--context", "32k", "--json"]
        done = run(*options, "--schemes", f"bf16,kitty,{DEFAULT_SCHEME}")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert found["context"] == 32768
        assert [each["name"] for each in found["caches"]] == ["bf16", "kitty", DEFAULT_SCHEME]
        assert found["recommended"]["python"] == "cache = MixedKVCache(model)"
        verb, option = ("serve", "scheme") if server else ("demo", "schemes")
        assert found["recommended"]["command"] == f"hfkvq {verb} --model {tmp_path} --{option} {DEFAULT_SCHEME}"

    def test_with_a_text(self, tmp_path, monkeypatch):
        """The candidates that fit are measured, and the floor; what is measured decides."""
        asked = {}

        def measured(model, chosen, **options):
            asked.update(options, names=list(chosen))
            options["on_progress"]("full", 0.0)
            ratio = {"full": 1.0, "kitty-pro": 1.004, "saw-int4": 1.03, "kivi-2": 1.001}
            rows = [
                {
                    "name": name,
                    "kld": {"mean": 0.01, "interval": (0.009, 0.011), "p999": 0.4 if name != "kitty-pro" else 1.5},
                    "top1": {"share": 0.97 if name != "kivi-2" else 0.03},
                    "perplexity_ratio": {"value": ratio[name], "interval": (ratio[name] - 0.01, ratio[name] + 0.01)},
                }
                for name in chosen
            ]
            return {"rows": rows, "windows": 4, "settings": {"context": 512}, "text": {"source": "mine.txt"}}

        monkeypatch.setattr(divergence, "measure_text", measured)
        text = tmp_path / "mine.txt"
        text.write_text("words", encoding="utf-8")
        options = [*SMALL, "--text", text, "--window", "512", "--schemes", "bf16,kitty-pro,saw-int4,kivi-2"]
        done = run(*options)
        assert done.exit_code == 0, done.output
        assert asked["names"] == ["full", "kitty-pro", "saw-int4", "kivi-2"]
        assert (asked["context"], asked["windows"], asked["text"]) == (512, 4, [text])
        said = flat(done.output)
        assert "Measuring 4 caches on 4 windows of 512 tokens" in said
        assert "+0.40 % (-0.60 to +1.40)" in said
        assert "too few to be sure: give more with --windows" in said
        assert 'Python: cache = MixedKVCache(model, "kitty-pro")' in said
        assert (
            "Verdict: lossy; 99.9 % KLD 1.5, safe is up to 1 (by divergence; `hfkvq doctor --presets kitty-pro`" in said
        )
        assert "kivi-2: unsafe on this model, and so not recommended: top-1 3.0%, unsafe is below 75%." in said
        assert_refused(run(*options[:-1], "kivi-2"), "schemes: all that fit are unsafe on this model", 1)

        def stopped(*args, **options):
            raise divergence.Stopped

        monkeypatch.setattr(divergence, "measure_text", stopped)
        assert_refused(run(*options), "Stopped: no window was finished", 130)


def test_latents_are_offered_what_attends_to_them():
    config = DeepseekConfig(num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=8, n_group=1, topk_group=1)
    found = presets_for(outline(config), default=candidates())
    assert set(found) == {"bf16", "latent-8", "latent-4", "saw-int4", "saw-int4-kv"}
