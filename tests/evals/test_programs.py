"""Generated code is run with limits, and nothing but passing its tests counts."""

import pytest

pytest.importorskip("lm_eval")

from evals.tasks.programs import code_of, passes, program, score, score_chat

DOC = {
    "prompt": 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """Sum."""\n',
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}


def test_a_right_and_wrong_functions():
    assert score(DOC, ["    return sum(numbers)\n"]) == {"pass@1": 1.0}
    assert score(DOC, ["    return 3\n"]) == {"pass@1": 0.0}
    assert score(DOC, ["    return (\n"]) == {"pass@1": 0.0}


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
