"""Tasks in evals/tasks: files, rows, right answers, programs that are run, and calls of functions."""

import json
import logging
import re
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

import lm_eval.tasks
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from evals.tasks.calls import as_tool, matches, parse_calls, score_call, score_memory
from evals.tasks.common import Task, read_jsonl
from evals.tasks.long_context import METRICS
from evals.tasks.programs import code_of, passes, program, score_chat
from evals.tasks.programs import score as score_code
from evals.tasks.reference import examples, recall_choices, score
from hfkvq.measure.demo.prompts import Subject, make_batches
from hfkvq.measure.reference import evaluation_set, load_reference, reference_path

FOLDER = Path(__file__).resolve().parents[2] / "evals" / "tasks"
FILES = sorted(FOLDER.rglob("*.yaml"))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("HFKVQ_DATA", raising=False)


@pytest.fixture(scope="module")
def manager():
    logging.disable(logging.WARNING)
    metadata = {"pretrained": str(reference_path()), "ref_samples": 3}
    yield TaskManager(include_path=[str(FOLDER)], include_defaults=False, metadata=metadata)
    logging.disable(logging.NOTSET)


def name_of(path):
    config = load_yaml(path, resolve_func=False)
    return config["group"] if "group" in config else config["task"]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_each_file(manager, path):
    """Functions exist, members of groups and lm-eval's own YAML too."""
    config = load_yaml(path)
    assert name_of(path).startswith(("kvq_", "plain_", "ref_"))
    assert name_of(path) in manager.all_tasks
    if "group" in config:
        assert set(config["task"]) <= set(manager.all_tasks)
        return
    assert issubclass(config["class"], Task)
    assert (Path(lm_eval.tasks.__file__).parent / config.get("upstream", "gsm8k/gsm8k.yaml")).is_file()


def test_names_are_unique():
    names = [name_of(path) for path in FILES]
    assert len(set(names)) == len(names)
    assert {f"kvq_longbench_{name}" for name in METRICS} <= set(names)


def test_line_separators_inside_of_strings(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"a": "b\u2028c"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_jsonl(str(tmp_path), "x.jsonl") == [{"a": "b\u2028c"}]


def test_reference_model_through_lm_eval(monkeypatch):
    """The whole way, with lm-eval's stock model: generation and log-likelihoods."""
    # It asks pip for all that is installed, for a second.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    metadata = {"pretrained": str(reference_path()), "ref_samples": 3, "ref_size": 24}
    found = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(reference_path()), "dtype": "float32"},
        tasks=["ref_recall", "ref_recall_ll"],
        task_manager=TaskManager(include_path=[str(FOLDER)], include_defaults=False, metadata=metadata),
        limit=1,
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
    )
    results = found["results"]
    assert results["ref_recall"]["exact_match,none"] == 1.0
    assert results["ref_recall_ll"]["acc,none"] == 1.0
    assert 0.0 <= results["ref_recall_ll"]["nll,none"] < 0.5
    assert json.dumps(found["configs"]["ref_recall"]["generation_kwargs"])


@pytest.fixture(scope="module")
def reference():
    model, tokenizer = load_reference(torch.float32)
    return HFLM(pretrained=model, tokenizer=tokenizer, max_length=4096), Subject("r", model, tokenizer, True)


@pytest.mark.parametrize("task", ["recall-24", "arithmetic-4", "tools"])
def test_tokens_are_those_of_the_demo(reference, task):
    """Special tokens too: what lm-eval encodes, for generation and for log-likelihoods, is what the demo feeds."""
    lm, subject = reference
    rows = examples(task, ref_samples=3, pretrained=str(reference_path()))["test"]
    (batch,) = make_batches(subject, task, 3, 3, 0, None)
    ids, mask = lm.tok_batch_encode(list(rows["prompt"]))
    assert torch.equal(ids, batch.ids)
    assert torch.equal(mask, batch.mask)
    for row, wanted, there in zip(rows, batch.ids, batch.mask, strict=True):
        context, answer = lm._encode_pair(row["prompt"], row["answer"])
        own = lm.tokenizer(row["answer"], add_special_tokens=False).input_ids
        assert context + answer == [*wanted[there.bool()].tolist(), *own]


def test_documents_are_the_same_every_time():
    first = examples("recall-24", ref_samples=5)["test"].to_list()
    assert first == examples("recall-24", ref_samples=5)["test"].to_list()
    assert [row["prompt"] for row in first] == [each.prompt for each in evaluation_set("recall-24", 5)]
    assert first[:2] == examples("recall-24", ref_samples=2)["test"].to_list()
    assert first != examples("recall-24", ref_samples=5, ref_seed=1)["test"].to_list()
    assert examples("recall-24", ref_samples=1, ref_size=40)["test"][0]["task"] == "recall-40"
    assert recall_choices("recall-24", ref_samples=5).data == recall_choices("recall-24", ref_samples=5).data


@pytest.mark.parametrize("task", ["recall-24", "arithmetic-4", "tools"])
def test_right_answers_are_right(task):
    for row in examples(task, ref_samples=10)["test"]:
        assert score(row, [row["answer"]]) == {"exact_match": 1.0}
        assert score(row, [row["answer"] + "<|im_end|>\n<|im_start|>"]) == {"exact_match": 1.0}
        assert score(row, [""]) == {"exact_match": 0.0}
        assert score(row, [re.sub(r"\d", "7", row["answer"][:-9]) + "0"]) == {"exact_match": 0.0}


DOC = {
    "prompt": 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """Sum."""\n',
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}


def test_a_right_and_wrong_functions():
    assert score_code(DOC, ["    return sum(numbers)\n"]) == {"pass@1": 1.0}
    assert score_code(DOC, ["    return 3\n"]) == {"pass@1": 0.0}
    assert score_code(DOC, ["    return (\n"]) == {"pass@1": 0.0}


def test_a_chat_answer():
    whole = "Here:\n```python\ndef total(numbers: List[int]) -> int:\n    return sum(numbers)\n```\nDone."
    assert score_chat(DOC, [whole]) == {"pass@1": 1.0}
    assert code_of("<think>```python\nno\n```</think>```py\nyes = 1\n```") == "yes = 1"
    assert code_of("plain = 1") == "plain = 1"
    assert code_of("```python\ncut = 1") == "cut = 1"
    assert "import List" in program(DOC, "def total(numbers: List[int]):\n    return 0")


@pytest.mark.parametrize(
    "text",
    ["while True:\n    pass", "import time; time.sleep(60)", "import sys; sys.exit(0)", "import os; os._exit(0)"],
)
def test_what_does_not_end_well_fails(text):
    assert not passes(text, seconds=1.0)


def test_no_memory_without_bound_and_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET_OF_MINE", "x")
    pytest.importorskip("resource")
    assert not passes("x = bytearray(2**36)")
    assert passes("open('left.txt', 'w').write('x')\nimport os\nassert 'SECRET_OF_MINE' not in os.environ")
    assert not (tmp_path / "left.txt").exists()


def test_children_end_too(tmp_path):
    """A process that the code started does not keep the run waiting, nor outlive it."""
    assert not passes("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])", seconds=1.0)


AREA = ("area", {"base": 10, "height": 5})


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "area", "arguments": {"base": 10, "height": 5}}\n</tool_call>',
        '<think>\n{"name": "no", "arguments": {}}\n</think>\n<tool_call>{"name": "area", "arguments": '
        '{"base": 10, "height": 5}}</tool_call>',
        '<tool_call>{"name": "area", "arguments": {"base": 10, "height": 5}}',
        '{"name": "area", "parameters": {"base": 10, "height": 5}}',
        '<|python_tag|>{"name": "area", "parameters": {"base": 10, "height": 5}}<|eom_id|>',
        'Sure {not json}: [{"name": "area", "arguments": {"base": 10, "height": 5}}]',
        '{"type": "function", "function": {"name": "area", "arguments": "{\\"base\\": 10, \\"height\\": 5}"}}',
    ],
)
def test_ways_to_write_one_call(text):
    assert parse_calls(text) == [AREA]


def test_several_calls_and_none():
    one = json.dumps({"name": "area", "parameters": {"base": 10, "height": 5}})
    assert parse_calls(f"{one}; {one}") == [AREA, AREA]
    assert parse_calls("The area is 25, see {this}.") == []


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>area(10, 5)</tool_call>",
        '<tool_call>{"name": "area", "arguments": [10, 5]}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '{"name": 3, "arguments": {}}',
    ],
)
def test_what_is_no_call(text):
    assert parse_calls(text) is None


SCHEMA = {
    "type": "dict",
    "properties": {
        "base": {"type": "integer"},
        "height": {"type": "float"},
        "unit": {"type": "string"},
        "points": {"type": "array", "items": {"type": "dict"}},
        "exact": {"type": "boolean"},
    },
    "required": ["base", "height"],
}
EXPECTED = {
    "geo.area": {
        "base": [10],
        "height": [5, 5.5],
        "unit": ["square meters", ""],
        "points": [[{"x": [1], "label": ["a", ""]}], ""],
        "exact": [True, ""],
    }
}


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"base": 10, "height": 5}, True),
        ({"base": 10, "height": 5.5, "unit": "Square-Meters"}, True),
        ({"base": 10, "height": 5, "points": [{"x": 1}]}, True),
        ({"base": 10, "height": 5, "points": [{"x": 1, "label": "A"}], "exact": True}, True),
        ({"base": 10}, False),
        ({"base": 11, "height": 5}, False),
        ({"base": 10.0, "height": 5}, False),
        ({"base": "10", "height": 5}, False),
        ({"base": True, "height": 5}, False),
        ({"base": 10, "height": 5, "unit": "feet"}, False),
        ({"base": 10, "height": 5, "colour": "red"}, False),
        ({"base": 10, "height": 5, "exact": 1}, False),
        ({"base": 10, "height": 5, "exact": False}, False),
        ({"base": 10, "height": 5, "points": [{"label": "a"}]}, False),
        ({"base": 10, "height": 5, "points": [{"x": 1}, {"x": 1}]}, False),
        ({"base": 10, "height": 5, "points": {"x": 1}}, False),
        ({"base": 10, "height": 5, "unit": None}, False),
    ],
)
def test_possible_answers(arguments, right):
    assert matches(("geo_area", arguments), EXPECTED, SCHEMA) is right
    assert not matches(("area", arguments), EXPECTED, SCHEMA)


def test_a_parameter_that_may_not_be_left_out():
    assert not matches(("f", {}), {"f": {"a": [1]}}, {"properties": {"a": {"type": "integer"}}})


def test_one_call_is_asked_for():
    doc = {"expected": json.dumps(EXPECTED), "schema": json.dumps(SCHEMA)}
    call = '<tool_call>{"name": "geo_area", "arguments": {"base": 10, "height": 5}}</tool_call>'
    assert score_call(doc, [call]) == {"acc": 1.0}
    assert score_call(doc, [f"{call}\n{call}"]) == {"acc": 0.0}
    assert score_call(doc, ["It is 25."]) == {"acc": 0.0}
    assert score_call(doc, ["<tool_call>{</tool_call>"]) == {"acc": 0.0}


def test_answers_from_memory_are_whole_words():
    doc = {"answers": ["513", "five hundred thirteen"]}
    assert score_memory(doc, ["You said 513 mL."]) == {"acc": 1.0}
    assert score_memory(doc, ["Five-hundred thirteen"]) == {"acc": 0.0}
    assert score_memory(doc, ["FIVE hundred thirteen!"]) == {"acc": 1.0}
    assert score_memory(doc, ["It was 1513."]) == {"acc": 0.0}
    assert score_memory(doc, ["<think>513</think>I do not know."]) == {"acc": 0.0}


def test_schemas_become_json_schema():
    """A parameter may be called "type", as one of BFCL's is."""
    properties = {
        "type": {"type": "string"},
        "at": {"type": "tuple", "items": {"type": "float"}},
        "any": {"type": "any"},
    }
    parameters = {"type": "dict", "properties": properties, "required": ["type"]}
    tool = as_tool({"name": "a.b", "description": "d", "parameters": parameters})["function"]
    assert tool["name"] == "a_b"
    assert tool["parameters"]["type"] == "object"
    assert tool["parameters"]["required"] == ["type"]
    assert tool["parameters"]["properties"] == {
        "type": {"type": "string"},
        "at": {"type": "array", "items": {"type": "number"}},
        "any": {},
    }
