"""BFCL's memory, whole: what the simulated memories do, how notes outlive conversations, and the command."""

from __future__ import annotations

import json

import pytest

from evals.bfcl_memory import STEPS, Chat, KeyValueMemory, TextMemory, bm25_plus, carry_out, main, run, take_turn
from evals.tasks.calls import SCENARIOS
from hfkvq.measure.models import find_model, load_model, load_tokenizer


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Script:
    """Says one thing after the other, and notes what it was asked."""

    def __init__(self, *said):
        self.said, self.asked, self.begun = list(said), [], 0

    def begin(self):
        self.begun += 1

    def __call__(self, messages):
        self.asked.append(json.loads(json.dumps(messages)))
        return self.said.pop(0)


def test_keys_and_values():
    memory = KeyValueMemory()
    assert "status" in carry_out(memory, "core_memory_add", {"key": "first_name", "value": "Ada"})
    assert "there already" in carry_out(memory, "core_memory_add", {"key": "first_name", "value": "Eva"})["error"]
    assert "snake_case" in carry_out(memory, "core_memory_add", {"key": "First name", "value": "Ada"})["error"]
    assert "301" in carry_out(memory, "core_memory_add", {"key": "long", "value": "x" * 301})["error"]
    assert carry_out(memory, "core_memory_retrieve_all", {}) == {"first_name": "Ada"} == json.loads(memory.shown())
    for i in range(6):
        assert "status" in carry_out(memory, "core_memory_add", {"key": f"k{i}", "value": "v"})
    assert "7 entries" in carry_out(memory, "core_memory_add", {"key": "more", "value": "v"})["error"]
    carry_out(memory, "core_memory_replace", {"key": "first_name", "value": "Eva"})
    assert carry_out(memory, "core_memory_retrieve", {"key": "first_name"}) == {"value": "Eva"}
    assert "no key" in carry_out(memory, "archival_memory_retrieve", {"key": "first_name"})["error"]
    carry_out(memory, "core_memory_remove", {"key": "first_name"})
    assert carry_out(memory, "core_memory_list_keys", {})["keys"] == [f"k{i}" for i in range(6)]
    carry_out(memory, "core_memory_clear", {})
    assert json.loads(memory.shown()) == {}


def test_keys_are_found_by_their_words():
    memory = KeyValueMemory()
    for key in ("first_name", "favorite_class", "class_schedule", "home_town"):
        carry_out(memory, "archival_memory_add", {"key": key, "value": "v"})
    found = carry_out(memory, "archival_memory_key_search", {"query": "favorite class", "k": 2})["ranked_results"]
    assert [key for _, key in found] == ["favorite_class", "class_schedule"]
    # By hand: one text of the mean length, one word of two: log(3 / 1) (1 + 2.5 / 2.5).
    assert bm25_plus(["a"], [["a", "b"], ["c", "d"]]) == [pytest.approx(2 * 1.0986123), 0.0]


def test_one_text():
    memory = TextMemory()
    carry_out(memory, "memory_append", {"text": "Ada, 35. "})
    carry_out(memory, "memory_append", {"text": "Lives in Bonn."})
    carry_out(memory, "memory_replace", {"old_text": "Bonn", "new_text": "Rome"})
    assert carry_out(memory, "memory_retrieve", {}) == {"memory_content": "Ada, 35. Lives in Rome."}
    assert "error" in carry_out(memory, "memory_replace", {"old_text": "Bonn", "new_text": "Oslo"})
    assert "10001" in carry_out(memory, "memory_update", {"text": "x" * 10_001})["error"]
    assert memory.shown() == "Ada, 35. Lives in Rome."


def test_what_is_no_call_of_it_is_answered_so():
    assert "no function" in carry_out(KeyValueMemory(), "core_memory_explode", {})["error"]
    assert "no function" in carry_out(KeyValueMemory(), "shelves", {})["error"]
    assert "error" in carry_out(KeyValueMemory(), "core_memory_add", {"name": "x"})
    assert "error" in carry_out(TextMemory(), "memory_append", {})


def test_a_turn_ends_with_an_answer_or_after_so_many_steps():
    memory = KeyValueMemory()
    script, messages = Script(call("core_memory_add", key="pet", value="cat"), "Noted."), []
    assert take_turn(script, messages, memory) == ("Noted.", 1)
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
    assert json.loads(messages[1]["content"]) == {"status": "stored"}
    endless = Script(*[call("core_memory_list_keys")] * (STEPS + 5))
    assert take_turn(endless, [], memory)[1] == STEPS


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "bfcl"

    def write(name, *rows):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    said = [[[{"role": "user", "content": "I am Ada."}], [{"role": "user", "content": "I have a cat."}]]] * 2
    write("memory_prereq_conversation/memory_student.json", *({"question": each} for each in said))
    asked = [{"role": "user", "content": "What is my name?"}]
    rows = [{"id": f"q{i}", "question": [asked], "scenario": scenario} for i, scenario in enumerate(SCENARIOS)]
    rows.append({"id": "last", "question": [asked], "scenario": "student"})
    write("BFCL_v4_memory.json", *rows)
    write("possible_answer/BFCL_v4_memory.json", *({"id": row["id"], "ground_truth": ["Ada"]} for row in rows))
    text = {"type": "string", "description": "The text."}
    one = {
        "name": "memory_append",
        "description": "Adds.",
        "parameters": {"type": "dict", "properties": {"text": text}},
    }
    write("multi_turn_func_doc/memory_rec_sum.json", one)
    return str(tmp_path)


def test_notes_outlive_conversations_and_no_question_changes_them(data):
    script = Script(
        # Two conversations of two turns.
        *(call("core_memory_add", key="name", value="Ada"), "Hello Ada."),
        *(call("core_memory_add", key="pet", value="cat"), "Lovely."),
        *("Hello again.", "I know."),
        # Two questions.
        *(call("core_memory_clear"), "I do not know."),
        *("Your name is Ada!",),
    )
    found = run(script, KeyValueMemory, "student", data, None, None)
    assert (found["right"], found["questions"], found["calls"], script.begun) == (1, 2, 2, 4)
    assert [each["calls"] for each in found["asked"]] == [1, 0]
    first, last = script.asked[0][0]["content"], script.asked[-1][0]["content"]
    assert "Ada" not in first
    assert "Ada" in last
    assert "cat" in last
    few = Script("Hello.", "Hello.", "Ada.")
    assert run(few, KeyValueMemory, "student", data, 1, 1)["questions"] == 1


def test_the_command(data, tmp_path, capsys):
    out = tmp_path / "out.json"
    main(
        [
            *("--schemes", "none,kitty-pro", "--memory", "rec_sum", "--scenarios", "student", "--data-dir", data),
            *("--limit", "1", "--max-new-tokens", "6", "--device", "cpu", "--json", str(out)),
        ]
    )
    record = json.loads(out.read_text(encoding="utf-8"))
    assert [row["scheme"] for row in record["rows"]] == ["none", "kitty-pro"]
    assert "student" in capsys.readouterr().out
    assert all(tokens["generated"] > 0 for tokens in record["tokens"].values())
    with pytest.raises(SystemExit):
        main(["--scenarios", "school", "--data-dir", data])


def test_a_cache_is_kept_for_as_long_as_prompts_go_on():
    source = find_model(None)
    chat = Chat(load_model(source), load_tokenizer(source), "kitty-pro", [], 8)
    messages = [{"role": "user", "content": "Hello there."}]
    messages.append({"role": "assistant", "content": chat(messages)})
    first, held, cache = chat.prefilled, len(chat.held), chat.cache
    chat([*messages, {"role": "user", "content": "And again."}])
    assert chat.cache is cache
    # What is new alone; what was generated is not given back before.
    assert chat.prefilled - first <= len(chat.held) - held
    # Another history: nothing of what is held may be used.
    chat([{"role": "user", "content": "Something else."}])
    assert chat.cache is not cache
