"""Every reader of files: whatever a file holds, it is read, or refused with a ValueError."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path

import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evals import kernel_bench as kernels
from evals.triaxial.allocation import Sensitivity
from evals.triaxial.conversations import load_conversations, load_format
from hfkvq.bounded import MOST_LEVELS, load_json, parse_json
from hfkvq.caches import get_preset
from hfkvq.caches.schemes.preset import Preset
from hfkvq.caches.tags.bit_table import BitTable
from hfkvq.measure.divergence.windows import read_file
from hfkvq.tuning.study import SETUP, load_study

PRESET = get_preset("kitty", {"0": "full"}).to_dict()
ORIGIN = {"model": "m", "config": "c", "template": "t", "data": "d", "requests": 1, "layers": [0], "versions": {}}
TAG = "older|text|obs"
SPACE = {"boost_ratio": {"name": "CategoricalDistribution", "attributes": {"choices": [0.1, 0.2]}}}
CHAT = {"name": "mine", "spans": [{"start": "<a>", "end": "</a>", "role": "user"}], "openings": []}


def bit_table(tmp: Path) -> dict:
    BitTable({TAG: 2}, ORIGIN, {"budget": 2.5}).save(tmp)
    return json.loads(tmp.read_text())


def read_study(path: Path) -> None:
    """Reads the setup that a study keeps, from a database that is sound."""
    storage = f"sqlite:///{path.with_suffix('.db')}"
    if not path.with_suffix(".db").exists():
        optuna.create_study(study_name="s", storage=storage, directions=["minimize", "minimize"])
    optuna.load_study(study_name="s", storage=storage).set_user_attr(SETUP, load_json(path))
    load_study(storage, "s")


# A reader, and a file that it reads.
READERS = {
    "table": (BitTable.load, None),
    "preset": (Preset.load, {"kind": "hfkvq preset", "scheme": PRESET, "origin": {}}),
    "sensitivity": (
        Sensitivity.load,
        {
            "kind": "hfkvq.sensitivity",
            "distortion": {TAG: [1.0, 0.5]},
            "counts": {TAG: 3.0},
            "origin": ORIGIN,
            "shared_inst": True,
        },
    ),
    "kernels": (kernels.load, {"kind": kernels.KIND, "rows": []}),
    "conversations": (load_conversations, {"messages": [{"role": "user", "content": "x"}], "tools": []}),
    "chat format": (load_format, CHAT),
    "study": (
        read_study,
        {"space": SPACE, "scheme": PRESET, "cost": "total_bits", "direction": "minimize", "objective": "KLD"},
    ),
    "text": (lambda path: read_file(path, "text"), {"text": "words"}),
}
LINES = ("conversations", "text")

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([10**400, 1e308, TAG]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def places(thing, at=()):
    """Paths of all parts."""
    yield at
    for key in thing if isinstance(thing, dict) else range(len(thing)) if isinstance(thing, list) else ():
        yield from places(thing[key], (*at, key))


def changed(thing, at, value):
    """A copy with another part at a path; without that part if the value is `places`."""
    if not at:
        return value
    thing = copy.deepcopy(thing)
    inner = thing
    for key in at[:-1]:
        inner = inner[key]
    if value is places:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return thing


def read(name, path, text):
    """Reads a text as a file; ValueErrors are fine."""
    suffix = ".jsonl" if name in LINES else ".json"
    file = path / f"file{suffix}"
    file.write_text(text)
    with contextlib.suppress(ValueError):
        READERS[name][0](file)


def sound(name, path):
    """A file's content, as the reader takes it."""
    return bit_table(path / "made.json") if name == "table" else READERS[name][1]


@pytest.mark.parametrize("name", READERS)
def test_hostile_texts(name, tmp_path):
    """Depth, size of numbers, what is no JSON, and JSON that is something else."""
    deep = "[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900
    digits = "1" * 5_000
    odd = "null", "", "\x00", '"x"', "[]", "{}", "NaN", "1e999", "[[null]]"
    for text in (*deep, digits, f'{{"kind": {digits}}}', *odd):
        read(name, tmp_path, text)


@pytest.mark.parametrize("name", READERS)
def test_damaged_files(name, tmp_path):
    """Any part of a sound file gone, or something else in its place."""
    whole = sound(name, tmp_path)

    @settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(list(places(whole))), values | st.just(places))
    def damage(at, value):
        if value is not places or at:
            read(name, tmp_path, json.dumps(changed(whole, at, value)))

    damage()


@pytest.mark.parametrize("name", ["table", "preset", "kernels", "text", "conversations", "sensitivity", "study"])
def test_a_byte_order_mark_is_no_part_of_a_file(name, tmp_path):
    """Sound files are read, or the tests above would test nothing."""
    file = tmp_path / f"file{'.jsonl' if name in LINES else '.json'}"
    file.write_text(json.dumps(sound(name, tmp_path)), encoding="utf-8-sig")
    READERS[name][0](file)


@pytest.mark.parametrize("name", ["conversations", "text"])
def test_lines_of_json(name, tmp_path):
    """Wrong lines are told by number; what Unicode calls a line break is none."""
    file = tmp_path / "file.jsonl"
    last = "words" if name == "text" else "x"

    def line(text):
        return json.dumps(READERS[name][1]).replace(f'"{last}"', f'"{text}"')

    whole = line("words")
    file.write_text(f"{whole}\r\n\n{line(f'a{chr(0x2028)}b{chr(0x85)}c')}\n", encoding="utf-8", newline="")
    assert len(READERS[name][0](file)) == 2
    for wrong in (whole[:-5], "\x00", line("\\ud800"), "NaN]"):
        file.write_text(f"{whole}\n{wrong}", encoding="utf-8")
        with pytest.raises(ValueError, match=rf"{file}: line 2 is not JSON \(.*correct it, or delete the line"):
            READERS[name][0](file)


def test_halves_of_surrogate_pairs_are_no_text():
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"
    for text in ('"\\ud800"', '{"\\uDC00": 1}', '["a", {"b": ["\\udfff"]}]'):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            parse_json(text)


def test_a_file_is_named_with_what_is_wrong_in_it(tmp_path):
    file = tmp_path / "preset.json"
    file.write_text(json.dumps({"kind": "hfkvq preset", "scheme": {"scheme": "kitty", "boost_ratio": "much"}}))
    with pytest.raises(ValueError, match=rf"{file}: boost_ratio: got 'much', allowed a number"):
        Preset.load(file)


def test_bounds():
    assert parse_json("[" * MOST_LEVELS + "]" * MOST_LEVELS) is not None
    with pytest.raises(ValueError, match="nested deeper"):
        parse_json("[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1))
