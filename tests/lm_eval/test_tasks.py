"""Every task of evals/tasks is found by lm-eval, and does what its name says."""

import importlib.util
import json
import logging
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from hfkvq.lm_eval import task_folder
from hfkvq.lm_eval import upstream as upstream_module
from hfkvq.lm_eval.longbench import METRICS
from hfkvq.lm_eval.upstream import NEEDS, PROTOCOLS, UpstreamTask
from hfkvq.measure.reference.model import reference_path

FOLDER = task_folder()
FILES = sorted(FOLDER.rglob("*.yaml"))
SPLITS = {"train": [0], "test": [0], "validation": [0], "dev": [0]}


@pytest.fixture(scope="module")
def manager():
    """Our tasks, and those of lm-eval that a group of ours has; `test_lm_eval_as_typed` takes the seconds for all."""
    logging.disable(logging.WARNING)
    metadata = {"pretrained": str(reference_path()), "ref_samples": 3}
    folders = [str(FOLDER), str(Path(upstream_module.lm_eval.tasks.__file__).parent / "mmlu")]
    yield TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    logging.disable(logging.NOTSET)


def read(path):
    return load_yaml(path, resolve_func=False)


def name_of(path):
    config = read(path)
    return config["group"] if "group" in config else config["task"]


def test_names_are_ours_and_unique(manager):
    names = [name_of(path) for path in FILES]
    assert len(set(names)) == len(names)
    assert all(name.startswith(("kvq_", "plain_", "ref_")) or name in ("plain", "ref") for name in names)
    assert set(names) <= set(manager.all_tasks)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_each_file(manager, path):
    """Functions exist; members of groups, too; a suffix says how answers are generated."""
    config = load_yaml(path)
    if "group" in config:
        members = [each if isinstance(each, str) else each["task"] for each in config["task"]]
        assert set(members) <= set(manager.all_tasks)
        assert len(set(members)) == len(members)
        return
    assert issubclass(config["class"], UpstreamTask)
    assert config.get("needs", "math") in NEEDS
    suffix = "_".join(config["task"].split("_")[-2:])
    if suffix.startswith("sampled"):
        assert config["protocol"] == suffix
        assert suffix in PROTOCOLS
    for base in [config.get("upstream")] if "upstream" in config else []:
        assert (Path(upstream_module.lm_eval.tasks.__file__).parent / base).is_file()


def test_all_that_is_promised(manager):
    names = {name_of(path) for path in FILES}
    assert {f"kvq_longbench_{name}" for name in METRICS} <= names
    assert len(load_yaml(FOLDER / "mmlu" / "mmlu.yaml")["task"]) == 57
    for name in (
        "gsm8k_cot",
        "gsm8k_chat",
        "math_algebra",
        "math500",
        "aime24",
        "aime25",
        "gpqa_diamond_cot",
        "humaneval",
    ):
        assert {f"kvq_{name}", f"kvq_{name}_sampled_4k"} <= names
    for name in ("gsm8k_chat", "math500_chat", "aime24", "aime25", "gpqa_diamond_chat", "humaneval_chat"):
        assert f"kvq_{name}_sampled_32k" in names


@pytest.fixture
def no_data(monkeypatch):
    """Data sets of one row with every field there is."""
    row = {"problem": "P?", "gold": "\\boxed{1}", "answer": "1 #### 1", "solution": "\\boxed{1}", "question": "Q?"}
    row |= {"prompt": "def f():\n", "canonical_solution": "    pass\n", "entry_point": "f", "test": ""}
    rows = importlib.import_module("datasets").Dataset.from_list([row])

    def build(name, **changes):
        (path,) = [path for path in FILES if name_of(path) == name]
        config = {**load_yaml(path), "custom_dataset": lambda **_: dict.fromkeys(SPLITS, rows), **changes}
        return UpstreamTask(config=config)

    return build


def test_protocols(no_data):
    pytest.importorskip("math_verify")
    task = no_data("kvq_math500_chat_sampled_32k")
    wanted = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_gen_toks": 32768, "until": []}
    assert task.config.generation_kwargs == wanted
    assert task.config.metadata["protocol"] == "sampled_32k"
    assert no_data("kvq_math500_chat").config.generation_kwargs["do_sample"] is False
    task = no_data("kvq_gsm8k_cot_sampled_4k")
    assert task.config.generation_kwargs["max_gen_toks"] == 4096
    assert task.config.generation_kwargs["until"] == ["Q:", "</s>", "<|im_end|>"]
    assert task.config.num_fewshot == 8
    with pytest.raises(
        ValueError, match="protocol: got 'sampled_8k' in kvq_gsm8k_cot, allowed sampled_4k, sampled_32k"
    ):
        no_data("kvq_gsm8k_cot", protocol="sampled_8k")


def test_prompts(no_data):
    pytest.importorskip("math_verify")
    task = no_data("kvq_aime24")
    assert task.doc_to_text(task.eval_docs[0]) == (
        "P?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    task = no_data("kvq_humaneval_chat")
    assert task.doc_to_text(task.eval_docs[0]).endswith("```python\ndef f():\n```")
    chat = {"apply_chat_template": True, "chat_template": lambda *_, **__: "<chat>", "num_fewshot": 0}
    assert task.fewshot_context(task.eval_docs[0], **chat) == "<chat>"
    assert no_data("kvq_humaneval").fewshot_context(task.eval_docs[0], **chat) == "def f():\n"
    context = no_data("kvq_gsm8k_cot").fewshot_context(task.eval_docs[0], num_fewshot=8)
    assert context.startswith("Q: There are 15 trees")
    assert context.count("A:") == 9
    assert context.endswith("Q: Q?\nA:")


def test_a_question_is_not_its_own_example(no_data):
    """Shots come from the same set of questions."""
    fields = ("choice1", "choice2", "choice3", "choice4")
    made = [{"Question": f"Why {n}?", **dict.fromkeys(fields, "x"), "answer": "(A)"} for n in range(7)]
    rows = importlib.import_module("datasets").Dataset.from_list(made)
    task = no_data("kvq_gpqa_diamond_cot", custom_dataset=lambda **_: {"train": rows})
    task.set_fewshot_seed(1234)
    for row in task.eval_docs:
        context = task.fewshot_context(row, num_fewshot=5)
        assert context.count("Question: Why") == 6
        assert context.count(row["Question"]) == 1


def test_generated_code_needs_leave(manager, no_data):
    assert no_data("kvq_humaneval").UNSAFE_CODE is True
    assert no_data("kvq_humaneval_chat_sampled_4k").UNSAFE_CODE is True


def test_a_missing_library_is_told_before_anything_else(no_data, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'math_verify, sympy, antlr4\): pip install "lm-eval\[math\]"'):
        no_data("kvq_math500_chat")


def test_another_lm_eval(no_data):
    with pytest.raises(
        FileNotFoundError, match=r"which this lm-eval does not have; kvq_gsm8k_cot is written for 0.4.13"
    ):
        no_data("kvq_gsm8k_cot", upstream="gsm8k/gone.yaml")


def test_reference_model_through_lm_eval(manager):
    """The whole way, with lm-eval's stock model: generation and log-likelihoods."""
    found = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(reference_path()), "dtype": "float32"},
        tasks=["ref_recall_24", "ref_tools", "ref_recall_ll"],
        task_manager=manager,
        limit=1,
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
    )
    results = found["results"]
    assert results["ref_recall_24"]["exact_match,none"] == 1.0
    assert results["ref_tools"]["exact_match,none"] == 1.0
    assert results["ref_recall_ll"]["acc,none"] == 1.0
    assert 0.0 <= results["ref_recall_ll"]["nll,none"] < 0.5
    assert json.dumps(found["configs"]["ref_recall_24"]["generation_kwargs"])
