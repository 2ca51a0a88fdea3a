"""Launch parameters: which layer wins, and that no file can break attention."""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evals.kernel_tuning import save
from hfkvq.kernels.triton import configs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KEY = "2c128/2t128,D128,N8"


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The tuning file of this test; there is none yet."""
    path = tmp_path / "deep" / "tuning.json"
    monkeypatch.setenv("HFKVQ_TUNING", str(path))
    configs.reload()
    yield path
    configs.reload()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Pretends that the device is a GPU of some name and capability."""

    def pretend(name: str, major: int, minor: int) -> None:
        properties = SimpleNamespace(name=name, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        configs.reload()

    pretend("Synthetic 9000", 9, 0)
    return pretend


def write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    configs.reload()


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_every_class_knows_every_knob(gpu, capability):
    gpu("Synthetic", *capability)
    knobs = configs.lookup(GPU, "decode", KEY)
    assert list(knobs) == list(configs.DEFAULTS["decode"])
    assert all(knobs[name] >= configs.LEAST[name] for name in knobs)
    # Less shared memory, fewer loads in flight.
    assert knobs["stages"] == {8: 3, 12: 3}.get(capability[0], 5)


def test_what_is_shipped_for_a_gpu_wins_over_its_kind(gpu, file, monkeypatch, tmp_path):
    shipped = tmp_path / "parameters.json"
    table = {"9": {"decode": {"*": {"stages": 2, "step": 64}}}, "9.0": {"decode": {"*": {"stages": 4}}}}
    shipped.write_text(json.dumps({**table, "Synthetic 9000": {"decode": {KEY: {"stages": 7}}}}), encoding="utf-8")
    monkeypatch.setattr(configs, "SHIPPED", shipped)
    configs._shipped.cache_clear()
    try:
        configs.reload()
        found = configs.lookup(GPU, "decode", KEY), configs.lookup(GPU, "decode", "other")
        assert [(knobs["stages"], knobs["step"]) for knobs in found] == [(7, 64), (4, 64)]
        write(file, {configs.gpu_key("Synthetic 9000"): {"decode": {KEY: {"stages": 3}}}})
        assert configs.lookup(GPU, "decode", KEY)["stages"] == 3
    finally:
        configs._shipped.cache_clear()


def test_the_interpreter_gets_small_numbers_and_no_file(file):
    write(file, {configs.gpu_key("cpu"): {"decode": {KEY: {"stages": 4}}}})
    knobs = configs.lookup(CPU, "decode", KEY)
    assert (knobs["programs_per_sm"], knobs["stages"]) == (4, 1)


def test_the_file_wins_over_the_class_for_its_gpu_and_key_alone(gpu, file):
    gpu("Synthetic 80", 8, 0)
    write(file, {f"Synthetic 80, Triton {version('triton')}": {"decode": {KEY: {"stages": 4, "step": 64}}}})
    knobs = configs.lookup(GPU, "decode", KEY)
    assert (knobs["stages"], knobs["step"], knobs["programs_per_sm"]) == (4, 64, 8)
    assert configs.lookup(GPU, "decode", "4c128/4t128,D128,N8")["stages"] == 3
    gpu("Synthetic 80 Super", 8, 0)
    assert configs.lookup(GPU, "decode", KEY)["stages"] == 3


def test_findings_of_another_triton_do_not_count(gpu, file):
    write(file, {"Synthetic 9000, Triton 0.1": {"decode": {KEY: {"stages": 1}}}})
    assert configs.lookup(GPU, "decode", KEY)["stages"] == 5


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "\x00\xff",
        [],
        {"gpu": 1},
        {"gpu": {"encode": {}}},
        {"gpu": {"decode": [KEY]}},
        {"gpu": {"decode": {KEY: 4}}},
        {"gpu": {"decode": {KEY: {"stages": 0}}}},
        {"gpu": {"decode": {KEY: {"stages": "4"}}}},
        {"gpu": {"decode": {KEY: {"stages": True}}}},
        {"gpu": {"decode": {KEY: {"blocks": 4}}}},
    ],
)
def test_a_broken_or_foreign_file_is_ignored_with_one_warning_and_never_overwritten(gpu, file, content, caplog):
    write(file, content)
    before = file.read_bytes()
    with caplog.at_level(logging.WARNING, logger="hfkvq"):
        for key in (KEY, "4t128/4t128,D128,N8"):
            assert configs.lookup(GPU, "decode", key)["stages"] == 5
    assert len(caplog.records) == 1
    assert str(file) in caplog.text
    with pytest.raises(ValueError, match="is something else"):
        save(GPU, {"decode": {KEY: {"stages": 3}}})
    assert file.read_bytes() == before


def test_saving_keeps_what_is_there(gpu, file):
    assert save(GPU, {"decode": {KEY: {"stages": 3}}}) == file
    assert configs.lookup(GPU, "decode", KEY)["stages"] == 3
    gpu("Synthetic 2", 8, 9)
    save(GPU, {"decode": {"other": {"step": 64}}})
    save(GPU, {"decode": {KEY: {"stages": 4}}})
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved == {
        configs.gpu_key("Synthetic 9000"): {"decode": {KEY: {"stages": 3}}},
        configs.gpu_key("Synthetic 2"): {"decode": {"other": {"step": 64}, KEY: {"stages": 4}}},
    }
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]


def test_a_candidate_wins_until_it_is_taken_back():
    before, edition = configs.lookup(CPU, "decode", KEY), configs.edition()
    for stages in (7, 3):
        configs.try_out("decode", KEY, {"stages": stages})
        assert configs.lookup(CPU, "decode", KEY) == {**before, "stages": stages}
        assert configs.lookup(CPU, "decode", "other") == before
        assert configs.edition() > edition
        edition = configs.edition()
    assert set(configs.ANSWERS) == {(CPU, "decode", KEY), (CPU, "decode", "other")}
    configs.try_out("decode", KEY, None)
    assert configs.lookup(CPU, "decode", KEY) == before


def test_the_shipped_file_has_a_line_for_each_key():
    from evals.parameters import text_of

    text = configs.SHIPPED.read_text(encoding="utf-8")
    assert text == text_of(json.loads(text)), "run evals/parameters.py"
    assert text_of({"a": {"k": {"*": {"x": 1, "y": 2}}}}).splitlines()[3] == '   "*": {"x": 1, "y": 2}'
