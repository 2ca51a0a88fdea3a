"""Rows from local folders and from the hub, right answers that score 1.0, and errors that say what to do."""

import csv
import gzip
import json

import pytest

pytest.importorskip("lm_eval")

import datasets

from hfkvq.lm_eval import bfcl, boxed, ruler, sources
from hfkvq.lm_eval.longbench import load
from hfkvq.lm_eval.rows import ENVIRONMENT, data_folder, read_csv, read_jsonl, read_text
from hfkvq.measure.reference.model import reference_path

QUESTION = {"question": "1 + 1?", "answer": "One and one.\n#### 1,002"}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)


@pytest.fixture
def gsm8k_folder(tmp_path):
    """A data folder with two GSM8K problems of each split, one file of them compressed."""
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    lines = f"{json.dumps(QUESTION)}\n{json.dumps({**QUESTION, 'extra': 1})}\n"
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")
    (folder / "test.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return tmp_path


def test_plain_and_compressed_files(gsm8k_folder):
    rows = sources.gsm8k(data_dir=str(gsm8k_folder), pretrained="anything", dtype="float32")
    assert {split: len(part) for split, part in rows.items()} == {"train": 2, "test": 2}
    assert rows["test"][0] == {**QUESTION, "problem": "1 + 1?", "gold": "\\boxed{1002}"}


def test_order_of_folders(gsm8k_folder, tmp_path, monkeypatch):
    """`--metadata data_dir` before the environment before the hub."""
    assert data_folder(None) is None
    monkeypatch.setenv(ENVIRONMENT, str(gsm8k_folder))
    assert data_folder(None) == gsm8k_folder
    other = tmp_path / "other"
    other.mkdir()
    assert data_folder(str(other)) == other
    assert len(sources.gsm8k()["test"]) == 2
    with pytest.raises(FileNotFoundError, match=r"neither gsm8k/train.jsonl nor gsm8k/train.jsonl.gz"):
        sources.gsm8k(data_dir=str(other))


def test_no_such_folder(monkeypatch):
    with pytest.raises(
        FileNotFoundError, match=r"data_dir: got '/no/such' \(--metadata data_dir\), which is not a folder"
    ):
        sources.gsm8k(data_dir="/no/such")
    monkeypatch.setenv(ENVIRONMENT, "/no/such")
    with pytest.raises(
        FileNotFoundError, match=rf"\({ENVIRONMENT}\), which is not a folder; name one that is laid out"
    ):
        sources.gsm8k()


@pytest.mark.parametrize(
    ("third", "message"),
    [
        (
            '{"question": "cut o',
            r"line 3 is not JSON \(Unterminated string.*got '.*cut o', allowed one JSON object per line",
        ),
        ("[1, 2]", "line 3 is list, allowed one JSON object per line"),
        ('{"question": "?", "target": 2}', "row 3 has no field 'answer'; got 'question', 'target'"),
    ],
)
def test_a_bad_line_in_the_middle(gsm8k_folder, third, message):
    path = gsm8k_folder / "gsm8k" / "train.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + f"{third}\n{json.dumps(QUESTION)}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        sources.gsm8k(data_dir=str(gsm8k_folder))
    assert str(path) in str(caught.value)


def test_damaged_and_empty_files(tmp_path):
    whole = gzip.compress(json.dumps(QUESTION).encode() * 1000)
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty").write_bytes(b"\n")
    (tmp_path / "latin").write_bytes("caf\xe9".encode("latin-1"))
    for name in ("cut.gz", "latin"):
        with pytest.raises(ValueError, match=r"cannot be read .* Fetch it again"):
            read_text(tmp_path / name)
    with pytest.raises(ValueError, match="has no rows"):
        read_jsonl(tmp_path / "empty")
    (tmp_path / "short.csv").write_text("a,b\nc\n", encoding="utf-8")
    with pytest.raises(ValueError, match="row 2 does not have 2 columns"):
        read_csv(tmp_path / "short.csv", ("x", "y"))


def test_line_separators_inside_of_strings(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"a": "b\u2028c"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_jsonl(tmp_path / "x.jsonl") == [{"a": "b\u2028c"}]


def test_the_hub(monkeypatch):
    """Its rows come in the same form; when it does not answer, the remedy is a local folder."""
    asked = []

    def hub(name, configuration, split):
        asked.append((name, configuration, split))
        return datasets.Dataset.from_list([{"Problem": "p", "Answer": 7, "ID": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert sources.aime24()["test"][0] == {"problem": "p", "answer": "7", "gold": "\\boxed{7}"}
    assert asked == [("Maxwell-Jia/AIME_2024", None, "train")]

    def silent(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", silent)
    with pytest.raises(
        ConnectionError, match=r"(?s)could not be had from the hub: no route.*gsm8k/train.jsonl, gsm8k/te"
    ):
        sources.gsm8k()
    with pytest.raises(ConnectionError, match="It is gated: accept its terms"):
        sources.gpqa_diamond()
    with pytest.raises(FileNotFoundError, match="BFCL's files are on GitHub"):
        bfcl.simple(pretrained=str(reference_path()))
    with pytest.raises(FileNotFoundError, match="read from a local folder only"):
        ruler.from_file()


def _write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)


def test_gpqa_options_depend_on_the_question_only(tmp_path):
    head = ["Question", "Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3)), "Explanation"]
    rows = [[f"Why {n}?", "right\n", "wrong, 1", "wrong 2", "wrong 3", ""] for n in range(40)]
    _write_csv(tmp_path / "gpqa" / "gpqa_diamond.csv", [head, *rows])
    made = sources.gpqa_diamond(data_dir=str(tmp_path))["train"]
    assert set(made["letter"]) == set("ABCD")
    for row in made:
        assert row["choices"]["ABCD".index(row["letter"])] == "right" == row[f"choice{'ABCD'.index(row['letter']) + 1}"]
        assert boxed.score_letter(row, [f"Thus\nAnswer: {row['letter']}"]) == {"exact_match": 1.0}
    _write_csv(tmp_path / "gpqa" / "gpqa_diamond.csv", [head, *rows[::-1]])
    assert sources.gpqa_diamond(data_dir=str(tmp_path))["train"][39] == made[0]
    assert sources.gpqa_diamond(data_dir=str(tmp_path), option_seed=1)["train"]["letter"][::-1] != made["letter"]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (C).", "C"),
        ("Answer: A is tempting.\n**Answer: B**", "B"),
        ("answer: $\\boxed{D}$", "D"),
        ("\\boxed{\\text{(A)}}", "A"),
        ("<think>Answer: A</think>Answer: D", "D"),
        ("The answer is Berlin.", None),
        ("", None),
    ],
)
def test_chosen_letters(text, letter):
    assert boxed.chosen_letter(boxed.after_thoughts(text)) == letter


def test_mmlu_and_commonsense_qa(tmp_path):
    for split in ("test", "dev"):
        _write_csv(tmp_path / "mmlu" / split / f"anatomy_{split}.csv", [["A, b?", "1", "2", "3", "4", "C"]])
    rows = sources.mmlu("anatomy", data_dir=str(tmp_path))
    assert rows["test"][0] == {"question": "A, b?", "choices": ["1", "2", "3", "4"], "answer": 2}
    _write_csv(tmp_path / "mmlu" / "test" / "anatomy_test.csv", [["q", "1", "2", "3", "4", "E"]])
    with pytest.raises(ValueError, match="row 1 has the answer 'E', allowed A, B, C, D"):
        sources.mmlu("anatomy", data_dir=str(tmp_path))

    choices = [{"label": label, "text": f"t{label}"} for label in "BADCE"]
    line = json.dumps({"answerKey": "A", "id": "1", "question": {"stem": "Where?", "choices": choices}})
    (tmp_path / "commonsense_qa").mkdir()
    for name in ("train", "dev"):
        (tmp_path / "commonsense_qa" / f"{name}_rand_split.jsonl").write_text(line, encoding="utf-8")
    row = sources.commonsense_qa(data_dir=str(tmp_path))["validation"][0]
    assert row["question"] == "Where?"
    assert row["choices"] == {"label": list("ABCDE"), "text": ["tA", "tB", "tC", "tD", "tE"]}


@pytest.mark.parametrize(
    ("loader", "documents", "every"),
    [
        (sources.gsm8k, 1319, 100),
        (sources.math500, 500, 20),
        (sources.math_algebra, 1187, 60),
        (sources.aime24, 30, 3),
        (sources.aime25, 30, 3),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_right_solutions_score_one(shared_data, loader, documents, every):
    pytest.importorskip("math_verify")
    rows = loader(data_dir=str(shared_data))["test"]
    assert len(rows) == documents
    for row in rows.select(range(0, documents, every)):
        solution = row.get("solution") or f"So it is {row['gold']}."
        assert boxed.score(row, [f"<think>\\boxed{{-1}}</think>{solution}"]) == {"math_verify": 1.0}, row["problem"]
        assert boxed.score(row, ["I do not know."]) == {"math_verify": 0.0}


@pytest.mark.parametrize("name", ["multi_news", "multifieldqa_zh", "passage_retrieval_zh"])
def test_longbench_files(shared_data, name):
    rows = load(name, data_dir=str(shared_data))["test"]
    assert len(rows) == 200
    assert all(row["longbench"] == name and row["context"] and row["answers"] for row in rows)


def test_bfcl_prompts_show_the_tools(shared_data):
    """With the reference model's template; a right call scores, and memories hold what is asked for."""
    rows = bfcl.simple(data_dir=str(shared_data), pretrained=str(reference_path()))["test"]
    assert len(rows) == 400
    assert '"name": "calculate_triangle_area"' in rows[0]["prompt"]
    assert rows[0]["prompt"].endswith("<|im_start|>assistant\n")
    for row in rows:
        ((name, possible),) = json.loads(row["expected"]).items()
        needed = json.loads(row["schema"])["required"]
        arguments = {key: _first(values) for key, values in possible.items() if key in needed or "" not in values}
        call = json.dumps({"name": name.replace(".", "_"), "arguments": arguments})
        assert bfcl.score_call(row, [f"<tool_call>\n{call}\n</tool_call>"]) == {"acc": 1.0}, (row["id"], call)
        assert bfcl.score_call(row, [call.replace('"arguments": {', '"arguments": {"surely_not": 1, ', 1)]) == {
            "acc": 0.0
        }
    rows = bfcl.memory(data_dir=str(shared_data), pretrained=str(reference_path()))["test"]
    assert len(rows) == 155
    assert all("core_memory_retrieve_all" in row["prompt"] for row in rows)
    found = [bfcl.score_memory(row, [row["prompt"]])["acc"] for row in rows]
    # What is missing is to be put in other words or worked out, as an age in words from one in figures.
    assert sum(found) >= 140


def _first(values):
    """One possible value, with one possible value for each field inside of it."""
    value = next(value for value in values if value != "")
    if isinstance(value, dict):
        return {key: _first(inner) for key, inner in value.items() if "" not in inner}
    if isinstance(value, list):
        return [_first([each]) if isinstance(each, dict) else each for each in value]
    return value


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3_1", "glm4moe"])
def test_chat_templates_of_others(shared_data, tmp_path, template):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((reference_path() / name).read_bytes())
    text = (shared_data / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(text, encoding="utf-8")
    metadata = {"data_dir": str(shared_data), "pretrained": str(tmp_path), "enable_thinking": False}
    assert "calculate_triangle_area" in bfcl.simple(**metadata)["test"][0]["prompt"]
    prompt = bfcl.memory(**metadata)["test"][0]["prompt"]
    assert "conversation_1_turn_1" in prompt
    assert "What is my first name?" in prompt


def test_templates_that_do_not_do(tmp_path, shared_data):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((reference_path() / name).read_bytes())
    with pytest.raises(ValueError, match="has no chat template"):
        bfcl.simple(data_dir=str(shared_data), pretrained=str(tmp_path))
    with pytest.raises(ValueError, match=r"bfcl_simple: .* no model is named; pass --model_args"):
        bfcl.simple(data_dir=str(shared_data))


def test_a_template_that_ignores_tools(tmp_path, shared_data):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((reference_path() / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}", encoding="utf-8")
    with pytest.raises(ValueError, match="the chat template ignores tools"):
        bfcl.simple(data_dir=str(shared_data), pretrained=str(tmp_path))


# Upstream sorts five million pairs of words at its import.
@pytest.mark.slow
def test_needles_are_the_same_every_time(monkeypatch):
    pytest.importorskip("wonderwords")
    # Importing upstream's generator begins a download, which these two tasks do not need.
    monkeypatch.setattr(pytest.importorskip("nltk"), "download", lambda *_: False)
    options = {"max_seq_lengths": [1024], "ruler_samples": 2, "pretrained": str(reference_path())}
    rows = ruler.needles("niah_multikey_3", **options)["test"]
    ruler.needles("niah_single_1", **options)
    assert rows.to_list() == ruler.needles("niah_multikey_3", **options)["test"].to_list()
    assert all(row["outputs"][0] in row["input"] and row["length"] <= 1024 for row in rows)
    assert ruler.score(rows[0], [f" {rows[0]['outputs'][0]}."]) == {"score": 100.0}
    assert ruler.score(rows[0], [rows[1]["outputs"][0]]) == {"score": 0.0}
    with pytest.raises(ValueError, match="niah_single_1: prompts are made with the model's tokenizer"):
        ruler.needles("niah_single_1")
