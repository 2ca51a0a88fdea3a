"""Launch parameters: which layer wins, and that no file can break attention."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from hfkvq.kernels.triton import configs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KEY = "2c128/2t128,D128,N8"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Pretends that the device is a GPU of some name and capability."""

    def pretend(name: str, major: int, minor: int) -> None:
        properties = SimpleNamespace(name=name, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        configs.renew()

    pretend("Synthetic 9000", 9, 0)
    return pretend


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_every_class_knows_every_knob(gpu, capability):
    gpu("Synthetic", *capability)
    knobs = configs.lookup(GPU, "decode", KEY)
    assert list(knobs) == list(configs.DEFAULTS["decode"])
    assert all(value >= (1 if name in ("programs_per_sm", "stages", "loose") else 0) for name, value in knobs.items())
    # Less shared memory, fewer loads in flight.
    assert knobs["stages"] == {8: 3, 12: 3}.get(capability[0], 5)


def test_what_is_shipped_for_a_gpu_wins_over_its_kind(gpu, monkeypatch, tmp_path):
    shipped = tmp_path / "parameters.json"
    table = {"9": {"decode": {"*": {"stages": 2, "step": 64}}}, "9.0": {"decode": {"*": {"stages": 4}}}}
    shipped.write_text(json.dumps({**table, "Synthetic 9000": {"decode": {KEY: {"stages": 7}}}}), encoding="utf-8")
    monkeypatch.setattr(configs, "SHIPPED", shipped)
    configs._shipped.cache_clear()
    try:
        configs.renew()
        found = configs.lookup(GPU, "decode", KEY), configs.lookup(GPU, "decode", "other")
        assert [(knobs["stages"], knobs["step"]) for knobs in found] == [(7, 64), (4, 64)]
    finally:
        configs._shipped.cache_clear()


def test_the_interpreter_gets_small_numbers():
    knobs = configs.lookup(CPU, "decode", KEY)
    assert (knobs["programs_per_sm"], knobs["stages"]) == (4, 1)


def test_a_candidate_wins_until_it_is_taken_back(monkeypatch):
    before, forgotten = configs.lookup(CPU, "decode", KEY), []
    monkeypatch.setattr(configs, "FORGET", [lambda: forgotten.append(1)])
    for stages in (7, 3):
        configs.try_out("decode", KEY, {"stages": stages})
        assert configs.lookup(CPU, "decode", KEY) == {**before, "stages": stages}
        assert configs.lookup(CPU, "decode", "other") == before
    assert len(forgotten) == 2
    assert set(configs.ANSWERS) == {(CPU, "decode", KEY), (CPU, "decode", "other")}
    configs.try_out("decode", KEY, None)
    assert configs.lookup(CPU, "decode", KEY) == before


def test_the_shipped_file_has_a_line_for_each_key():
    from evals.parameters import text_of

    text = configs.SHIPPED.read_text(encoding="utf-8")
    assert text == text_of(json.loads(text)), "run evals/parameters.py"
    for kernels in json.loads(text).values():
        for kernel, keys in kernels.items():
            assert all(set(knobs) <= set(configs.DEFAULTS[kernel]) for knobs in keys.values())
    assert text_of({"a": {"k": {"*": {"x": 1, "y": 2}}}}).splitlines()[3] == '   "*": {"x": 1, "y": 2}'
