"""A walk through every command and option: each wrong value ends with status 2 and one line, before anything slow."""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner

from hfkvq.cli import app

COMMAND = typer.main.get_command(app)

OUTPUTS = {"out", "json_file"}
"""Parameters of files that are written; all other paths are read."""

MODELS = ["/no/such/folder", "./none", "{folder}", "{missing}.gguf", "{empty}.gguf", "{model}"]
SCHEMES = ["nosuch", "kitty:nosuch=1", "kitty:boost_ratio=abc", "kitty:boost_ratio=9", "kitty:", ":", "{missing}.json"]
SCHEMES += ["{empty}.json", "{garbage}.json", "{list}.json", "{preset}.json", "{folder}"]
SIZES = ["abc", "", "-1", "0", "5", "nan", "1e999GiB", "4XB"]
WRONG: dict[str, list[str]] = {
    "model": MODELS,
    "name": [],
    "prompt": [],
    "schemes": SCHEMES,
    "scheme": SCHEMES,
    "preset": SCHEMES,
    "presets": SCHEMES,
    "tasks": ["nosuch", "recall-abc", "recall-0", "recall--5"],
    "space": ["nosuch=1..2", "boost_ratio", "boost_ratio=", "=1"]
    + [f"boost_ratio={x}" for x in ("a..b", "1..0", "9,10")],
    "storage": ["nosuch", "nosuch://x", "sqlite:////none/x.db", "tuning.log", "{folder}", "sqlite:///{garbage}.log"],
    "device": ["abc", "", "cpu:x", "cuda:99", "cuda:x", "gpu", "meta"],
    "gpu": ["abc", "sm_1", "", "90a"],
    "gpu_memory": SIZES,
    "memory": SIZES,
    "overhead": SIZES[:3],
    "dataset": ["", "{missing}", "{empty}.json"],
    "part": ["", "nosuch"],
    "field": ["", "nosuch"],
    "host": ["no.such.host.invalid", "", "999.1.1.1"],
}  # fmt: skip
"""Wrong values of every parameter that is a text; a new one needs an entry."""

# Arguments beside the one that is wrong, by command.
BASE: dict[str, list[str]] = {
    "tune": ["kitty"],
    "warm": ["--preset", "kitty", "--gpu", "sm_90"],
}
# Arguments that an option needs to have an effect at all.
BESIDE: dict[tuple[str, str], list[str]] = {
    ("kld", "part"): ["--dataset", "{missing}"],
    ("kld", "field"): ["--text", "{messages}.jsonl"],
    ("tune", "tasks"): ["--objective", "tasks"],
}


def commands():
    """Every command: its name, and its parameters by name, with type and description."""
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        hints = typing.get_type_hints(command.callback, include_extras=True)
        found = {}
        for parameter in inspect.signature(command.callback).parameters.values():
            kind, about = typing.get_args(hints[parameter.name])[:2]
            kinds = [each for each in (typing.get_args(kind) or (kind,)) if each is not type(None)]
            inner = typing.get_args(kinds[0]) or (kinds[0],)
            found[parameter.name] = (inner[0], about, parameter.default is inspect.Parameter.empty)
        yield (name,), found


def wrong_values(name, kind, about):
    """Wrong values of a parameter."""
    if kind is bool:
        return ["=5"]
    if kind is Path and name in OUTPUTS:
        return ["/none/file", "/proc/file", "{empty}.json/file", "{folder}"]
    if kind is Path:
        files = [f"{{{name}}}.json" for name in ("empty", "garbage", "list")]
        return ["{missing}", "{folder}", *files, "{surrogate}.jsonl", "{torn}.jsonl", ""]
    if isinstance(kind, str):
        # One of the choices.
        return ["nosuch", "", "1"]
    if about.parser is not None:
        return ["abc", "-5", "1.5k", "", "nan"]
    if kind is int:
        return ["abc", "1.5", "", "-1", "nan", "0x5"]
    if kind is float:
        return ["abc", "nan", "inf", "", "-inf", *["1.5"] * (name == "max_memory_percent")]
    assert kind is str, f"{name}: {kind}"
    return WRONG[name]


def cases():
    for path, parameters in commands():
        for name, (kind, about, required) in parameters.items():
            argument = type(about).__name__ == "ArgumentInfo"
            option = name if argument else (about.param_decls or (f"--{name.replace('_', '-')}",))[0].split("/")[0]
            # None leaves it out.
            values = [*wrong_values(name, kind, about), *([None] if required else [])]
            yield pytest.param(path, name, option, values, argument, id=f"{'-'.join(path)}-{name}")
        yield pytest.param(path, "nosuch", "--nosuch", ["5"], False, id=f"{'-'.join(path)}-nosuch")
        if not any(type(about).__name__ == "ArgumentInfo" for _, about, _ in parameters.values()):
            yield pytest.param(path, "nosuch", "nosuch", ["nosuch"], True, id=f"{'-'.join(path)}-an argument")


TEXTS = {
    "empty": "",
    "list": "[1]",
    "garbage": "\x00{]\n",
    "surrogate": '{"messages": [{"role": "user", "content": "\\ud800"}]}\n',
    "preset": '{"kind": "hfkvq preset", "scheme": {"scheme": "kitty", "boost_ratio": "much"}, "origin": {}}',
    "messages": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
    "torn": '{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [{"ro',
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A function that puts the paths of the walk's files into words: ``{list}.json`` and others."""
    folder = tmp_path_factory.mktemp("walk")
    for name, content in TEXTS.items():
        for suffix in (".json", ".jsonl", ".toml", ".gguf", ".log"):
            (folder / f"{name}{suffix}").write_text(content, encoding="utf-8")
    for name in ("folder", "folder.json", "model"):
        (folder / name).mkdir()
    config = '{"model_type": "llama", "num_key_value_heads": "2", "hidden_size": 64}'
    (folder / "model" / "config.json").write_text(config)
    named = re.compile(f"{{({'|'.join([*TEXTS, 'folder', 'missing', 'new', 'model'])})}}")
    return lambda words: [named.sub(lambda found: str(folder / found[1]), word) for word in words]


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """No model is loaded, nothing is fetched, and no GPU is there."""

    def loads(*_, **__):
        pytest.fail("a model was loaded before the arguments were checked")

    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        monkeypatch.setattr(auto, "from_pretrained", loads)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Made once: it takes longer than most cases.
    monkeypatch.setattr("typer.testing._get_command", lambda asked: COMMAND)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def words_of(path, option, value, argument, name):
    """The command line of a case."""
    words = list(path)
    base = BASE.get(" ".join(path), []) + BESIDE.get((path[-1], name), [])
    if option in base:
        at = base.index(option)
        base = base[:at] + base[at + 2 :]
    if argument and name != "nosuch" and base and not base[0].startswith("--"):
        base = base[1:]
    if value is None:
        return words + base
    if argument:
        return [*words, *base, "--", value]
    return [*words, *base, *([option + value] if value.startswith("=") else [option, value])]


@pytest.mark.parametrize(("path", "name", "option", "values", "argument"), list(cases()))
def test_wrong_arguments(files, tmp_path, monkeypatch, path, name, option, values, argument):
    monkeypatch.chdir(tmp_path)
    for value in values:
        check_refusal(files(words_of(path, option, value, argument, name)), name, option)
    assert not list(tmp_path.iterdir())


def check_refusal(words, name, option):
    """The command says in one line what is wrong with the option."""
    done = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    said = f"hfkvq {' '.join(words)}\n{done.output}\n{done.exception!r}"
    assert done.exit_code == 2, said
    assert isinstance(done.exception, SystemExit), said
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, said
    assert lines[0].startswith("Error: "), said
    assert not done.stdout, said
    assert "Traceback" not in done.output
    plain = lines[0].lower().replace("-", "_")
    names = {name, option.strip("-").replace("-", "_")}
    if name in ("scheme", "schemes", "preset", "presets"):
        # The knob, where one is wrong.
        names |= {"scheme", "knob", "boost_ratio"}
    assert any(each in plain for each in names), said


def model_arguments(model):
    """Wrong values of every argument of lm-eval's model; of Hugging Face's own by their types."""
    own = {
        "pretrained": ["/no/such", "{empty}.gguf", "{model}", "", 5, None],
        "scheme": [*SCHEMES[:4], "{missing}.json", "{empty}.json", "{garbage}.json", "{preset}.json", 5, [], {"a": 1}],
        "layers": ["abc", 5, [], {"0": "nosuch"}, {"99": "full"}, {"x": "full"}],
        "ll_chunk": ["abc", 0, -1, 1.5, True, None],
        "truncate": ["nosuch", 5, "", None],
        "nosuch": [5],
        "boost_ratio": ["abc", 9],
        "batch_size": ["abc", 0, -1, 1.5, "auto:", True],
        "device": ["abc", "cuda:99", "", 5],
        "tokenizer": ["/none", 5],
        **{name: ["bfloat17", "", 5] for name in ("dtype", "softmax_dtype", "mixed_precision_dtype")},
        **{name: ["abc", 0, -1, 1.5] for name in ("max_length", "max_batch_size")},
    }
    signature = inspect.signature(model.HFKVQ.__init__).parameters
    assert set(signature) - {"self", "others"} <= set(own)
    for name, kind in model._TYPES.items():
        if name not in own and name != "return":
            # A value that no type among them takes.
            own[name] = [object()] if "str" not in str(kind) or "dict" in str(kind) else [1.5, object()]
    return own


def test_wrong_model_arguments(files):
    """All in one test: lm-eval takes seconds to import."""
    model = pytest.importorskip("hfkvq.lm_eval.model", reason="pip install 'hfkvq[eval]'")
    for name, values in model_arguments(model).items():
        for value in values:
            value = files([value])[0] if isinstance(value, str) else value
            others = {"pretrained": "reference", "scheme": "kitty", "device": "cpu"} | {name: value}
            try:
                found = model.HFKVQ(**others)
            except ValueError as error:
                found = str(error)
            also = {"scheme": ("boost_ratio", "knob")}
            also |= dict.fromkeys(("layers", "pretrained"), ("scheme: got 'nosuch'", "model:"))
            said = f"{name}={value!r}: {found}"
            assert isinstance(found, str), said
            assert re.match(r"\S+: ", found), said
            assert any(each in found.replace("-", "_") for each in (name, *also.get(name, ()))), said
