"""Tasks in evals/tasks: every YAML names what exists, local and remote rows, and right answers that score 1.0."""

import gzip
import importlib
import json
import logging
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

import datasets
import lm_eval.tasks
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from evals.ruler_data import needles
from evals.tasks import public
from evals.tasks.common import Task, data_folder, read_jsonl
from evals.tasks.long_context import METRICS
from hfkvq.measure.models import find_model, load_tokenizer
from hfkvq.measure.reference import reference_path

FOLDER = Path(__file__).resolve().parents[2] / "evals" / "tasks"
FILES = sorted(FOLDER.rglob("*.yaml"))
QUESTION = {"question": "1 + 1?", "answer": "One and one.\n#### 1,002"}


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


@pytest.fixture
def no_data():
    """Makes tasks whose data is one row with every field there is."""
    row = {"problem": "P?", "gold": "\\boxed{1}", "answer": "1 #### 1", "solution": "\\boxed{1}", "question": "Q?"}
    row |= {"prompt": "def f():\n", "canonical_solution": "    pass\n", "entry_point": "f", "test": ""}
    rows = datasets.Dataset.from_list([row])

    def build(name):
        (path,) = [path for path in FILES if name_of(path) == name]
        return Task(config={**load_yaml(path), "custom_dataset": lambda **_: {"train": rows, "test": rows}})

    return build


def test_prompts(no_data):
    task = no_data("kvq_aime24")
    assert task.doc_to_text(task.eval_docs[0]) == (
        "P?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    task = no_data("kvq_humaneval_chat")
    assert task.doc_to_text(task.eval_docs[0]).endswith("```python\ndef f():\n```")
    assert task.UNSAFE_CODE is True
    chat = {"apply_chat_template": True, "chat_template": lambda *_, **__: "<chat>", "num_fewshot": 0}
    assert task.fewshot_context(task.eval_docs[0], **chat) == "<chat>"
    assert no_data("kvq_humaneval").fewshot_context(task.eval_docs[0], **chat) == "def f():\n"
    context = no_data("kvq_gsm8k_cot").fewshot_context(task.eval_docs[0], num_fewshot=8)
    assert context.startswith("Q: There are 15 trees")
    assert context.count("A:") == 9
    assert context.endswith("Q: Q?\nA:")
    assert no_data("kvq_math500").config.generation_kwargs["until"] == ["Problem:"]


def test_local_files_plain_and_compressed(tmp_path, monkeypatch):
    """`--metadata data_dir` before the environment before the Hub."""
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    lines = f"{json.dumps(QUESTION)}\n{json.dumps({**QUESTION, 'extra': 1})}\n"
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")
    (folder / "test.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    rows = public.gsm8k(data_dir=str(tmp_path), pretrained="anything", dtype="float32")
    assert {split: len(part) for split, part in rows.items()} == {"train": 2, "test": 2}
    assert rows["test"][0] == {**QUESTION, "problem": "1 + 1?", "gold": "\\boxed{1002}"}
    assert data_folder(None) is None
    monkeypatch.setenv("HFKVQ_DATA", str(tmp_path))
    assert len(public.gsm8k()["test"]) == 2
    assert data_folder(str(folder)) == folder
    with pytest.raises(FileNotFoundError, match=r"must have gsm8k/train.jsonl or gsm8k/train.jsonl.gz"):
        public.gsm8k(data_dir=str(folder))
    (folder / "train.jsonl").write_text('{"question": "?", "target": 2}', encoding="utf-8")
    with pytest.raises(ValueError, match="a row has question, target, not all of question, answer"):
        public.gsm8k()


def test_line_separators_inside_of_strings(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"a": "b\u2028c"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_jsonl(str(tmp_path), "x.jsonl") == [{"a": "b\u2028c"}]


def test_the_hub(monkeypatch):
    asked = []

    def hub(*where, split):
        asked.append((*where, split))
        return datasets.Dataset.from_list([{"Problem": "p", "Answer": 7, "ID": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert public.aime24()["test"][0] == {"problem": "p", "answer": "7", "gold": "\\boxed{7}"}
    assert asked == [("Maxwell-Jia/AIME_2024", None, "train")]
    with pytest.raises(FileNotFoundError, match=r"no folder is named, which must have ruler/niah_.*_4096"):
        public.ruler()


@pytest.mark.parametrize(
    ("loader", "documents", "every"),
    [
        (public.gsm8k, 1319, 100),
        (public.math500, 500, 20),
        (public.math_algebra, 1187, 60),
        (public.aime24, 30, 3),
        (public.aime25, 30, 3),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_right_solutions_score_one(shared_data, loader, documents, every):
    rows = loader(data_dir=str(shared_data))["test"]
    assert len(rows) == documents
    for row in rows.select(range(0, documents, every)):
        solution = row.get("solution") or f"So it is {row['gold']}."
        assert public.score_math(row, [f"<think>\\boxed{{-1}}</think>{solution}"]) == {"math_verify": 1.0}
        assert public.score_math(row, ["I do not know."]) == {"math_verify": 0.0}


# Upstream sorts five million pairs of words at its import.
@pytest.mark.slow
def test_needles_are_the_same_every_time(monkeypatch):
    pytest.importorskip("wonderwords")
    # Importing upstream's generator begins a download, which these questions do not need.
    monkeypatch.setattr(pytest.importorskip("nltk"), "download", lambda *_: False)
    tokenizer = load_tokenizer(find_model(None))
    rows = needles(tokenizer, 1024, 2)
    importlib.import_module("random").random()
    assert rows == needles(tokenizer, 1024, 2)
    assert all(row["outputs"][0] in row["input"] and row["length"] <= 1024 for row in rows)
    assert public.score_ruler(rows[0], [f" {rows[0]['outputs'][0]}."]) == {"score": 100.0}
    assert public.score_ruler(rows[0], [rows[1]["outputs"][0]]) == {"score": 0.0}


def test_reference_model_through_lm_eval():
    """The whole way, with lm-eval's stock model: generation and log-likelihoods."""
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
