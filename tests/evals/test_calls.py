"""Function calls: parsed from what models write, and compared as BFCL compares them."""

import json

import pytest

pytest.importorskip("lm_eval")

from evals.tasks.calls import as_tool, matches, parse_calls, score_call, score_memory

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
