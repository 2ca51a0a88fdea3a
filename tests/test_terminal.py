"""Progress and Ctrl-C of commands, `hfkvq env`, and `hfkvq warm`."""

import time
from functools import partial

import pytest
import torch
import transformers
import typer
from transformers import DeepseekV3Config, Gemma3TextConfig, LlamaConfig

import hfkvq
from hfkvq.caches.compile import shapes_of, widths_of
from hfkvq.measure import records
from hfkvq.terminal import duration, progress_bar, stoppable
from tests.command import assert_refused, invoke


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (125, "2 min 05 s"), (3599.9, "1 h 00 min"), (7325, "2 h 02 min")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_plain_lines_go_to_standard_error(capsys, monkeypatch):
    """Where no terminal is: at most one every ten seconds, with the time left."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress_bar() as show:
        for seconds, name, share in ((0, "first    ", 0.0), (5, "second", 0.1), (10, "third", 0.25), (40, "last", 0.5)):
            now[0] = 100.0 + seconds
            show(name, share)
    found = capsys.readouterr()
    assert found.out == ""
    lines = found.err.splitlines()
    assert [line.partition(", about")[0] for line in lines] == ["first, 0 %", "third, 25 %", "last, 50 %"]
    assert lines[-1].endswith(" left")


def test_stops(capsys):
    with pytest.raises(typer.Exit) as left, stoppable("go on with --resume."):
        raise KeyboardInterrupt
    assert left.value.exit_code == 130
    assert capsys.readouterr().err == "Stopped: go on with --resume.\n"


def rows() -> dict[str, str]:
    done = invoke("env", columns=400)
    assert done.exit_code == 0, done.output
    return {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in done.output.splitlines()}


def test_versions_and_devices(monkeypatch):
    monkeypatch.setattr(records, "commit", lambda: None)
    said = rows()
    assert said["hfkvq"] == f"{hfkvq.__version__}, package"
    assert said["torch"] == torch.__version__
    assert said["transformers"] == transformers.__version__
    assert said["liger-kernel"]
    assert [name for name in said if name.startswith("GPU")] == (
        [f"GPU {index}" for index in range(torch.cuda.device_count())] or ["GPU"]
    )
    monkeypatch.setattr(records, "commit", lambda: "abc-dirty")
    assert rows()["hfkvq"].endswith("checkout at abc-dirty")


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
