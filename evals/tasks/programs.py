"""HumanEval: completed functions are run against their tests, each in a process of its own with limits.

The limits (time, memory, files, an empty environment and folder) stop accidents, not attacks: generated code runs with
the user's rights. lm-eval runs these tasks with ``--confirm_run_unsafe_code`` only; use a container.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import datasets

from evals.tasks.common import Row, after_thoughts, as_dataset, read_rows

SECONDS = 10.0
"""Time for all tests of a function; the slowest right one takes well under one second."""

_MEMORY = 4 * 2**30

_LIMITS = f"""\
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY}, {_MEMORY}))
    resource.setrlimit(resource.RLIMIT_FSIZE, ({2**24}, {2**24}))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, ValueError, OSError):
    pass
"""
# Printed behind the tests, and not to be guessed: a program that leaves early with exit(0) has not passed.
_RUN = "import sys; namespace = {'__name__': 'program'}; token, program = sys.stdin.read().split('\\n', 1); "
_RUN += "exec(compile(program, 'program', 'exec'), namespace); print(token, end='', flush=True)"


def passes(program: str, seconds: float = SECONDS) -> bool:
    """True if a program runs to its end without an error, within the time."""
    token = os.urandom(16).hex()
    keep = {name: os.environ[name] for name in ("SYSTEMROOT", "PATH") if name in os.environ}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LIMITS + _RUN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=keep,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(f"{token}\n{program}".encode(errors="replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
    return process.returncode == 0 and output.endswith(token.encode())


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it started."""
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass
    process.communicate()


def humaneval(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """HumanEval's 164 functions."""
    fields = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    hub = ("openai/openai_humaneval", None, "test")
    return as_dataset(test=read_rows("humaneval/HumanEval.jsonl", hub, fields, data_dir))


def program(doc: Row, answer: str) -> str:
    """Program to run: the function, completed by ``answer`` or replaced by one it contains, and its tests."""
    code = answer if f"def {doc['entry_point']}(" in answer else doc["prompt"] + answer
    # The prompt may import what a rewritten function uses.
    head = "" if code.startswith(doc["prompt"]) else doc["prompt"].split("\ndef ")[0].split("def ")[0]
    return f"{head}\n{code}\n\n{doc['test']}\n\ncheck({doc['entry_point']})\n"


def code_of(text: str) -> str:
    """The last fenced block of a chat answer, or all of it."""
    text = after_thoughts(text)
    blocks = re.findall(r"```(?:[pP]ython3?|py)?[ \t]*\n(.*?)(?:\n```|\Z)", text, flags=re.DOTALL)
    return blocks[-1] if blocks else text


def score(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """True if the completed function passes its tests."""
    return {"pass@1": float(passes(program(doc, results[0])))}


def score_chat(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """The same for answers in prose with fenced code."""
    return score(doc, [code_of(results[0])])
