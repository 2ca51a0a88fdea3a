"""`hfkvq warm`: what it is told wrongly it says plainly."""

from functools import partial

import pytest
import torch
from transformers import DeepseekV3Config, Gemma3TextConfig, LlamaConfig

from hfkvq.caches.compile import shapes_of, widths_of
from tests.command import assert_refused, invoke

run = partial(invoke, "warm")


SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(**SMALL, num_key_value_heads=2, head_dim=64), {("kitty-pro", 0, 128, 64, False)}),
        # A window of 64 is short for the scheme, so it takes 16-bit pages.
        (
            Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=64, sliding_window=64, sliding_window_pattern=3),
            {("kitty-pro", 0, 128, 64, False), ("full", 64, 32, 64, False)},
        ),
        (
            Gemma3TextConfig(
                **SMALL, num_key_value_heads=2, head_dim=64, sliding_window=2048, sliding_window_pattern=3
            ),
            {("kitty-pro", 0, 128, 64, False), ("kitty-pro", 2048, 128, 64, False)},
        ),
        (
            DeepseekV3Config(**SMALL, kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32),
            {("latent-4", 0, 128, 128, True)},
        ),
    ],
    ids=["llama", "short windows", "long windows", "latents"],
)
def test_every_kind_of_layer_of_a_model_is_compiled_for(config, expected, tmp_path, monkeypatch):
    config.save_pretrained(tmp_path)
    given = []

    def compile_layers(layers, device, absent, around):
        assert around == (widths_of(config, shapes_of(config)[0]), torch.bfloat16)
        given.extend(layers)
        return [("kernel", "")]

    monkeypatch.setattr("hfkvq.kernels.compile.compile_layers", compile_layers)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    preset = "latent-4" if isinstance(config, DeepseekV3Config) else "kitty-pro"
    done = run("--preset", preset, "--model", str(tmp_path), "--gpu", "sm_90")
    assert done.exit_code == 0, done.output
    found = set()
    for plan, heads, rule, _ in given:
        form = plan.format
        (keys, _), name = form.runs[0], "full" if form.runs[0][0].bits == 16 else preset
        found.add((name, form.window, keys.page_size, plan.key_dim, form.latent))
        assert heads == 4
        # Neither 16-bit pages nor latents have channels that a rule would raise.
        assert (rule is None) == (name != "kitty-pro")
    assert found == expected


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(run("--preset", "kitty-pro"), "there is no GPU here; say which one it is for: sm_80")
