"""LiveCodeBench: programs for contest problems, from local files, run against the problems' own tests.

A program runs in a process of its own with limits; what `hfkvq.lm_eval.humaneval` says of these holds here too.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Sequence
from datetime import date
from typing import Any

import datasets

from hfkvq.bounded import DAMAGE, MOST_BYTES, parse_json

from .humaneval import code_of, pass_at, passes
from .rows import ENVIRONMENT, Row, as_dataset, data_folder, read_jsonl

SECONDS = 6.0
"""Time for each test, as in the authors' checker."""

_ASK = (
    "You will be given a question (problem specification) and will generate a correct Python program that matches the "
    "specification and passes all tests.\n\nQuestion: {question}\n\n"
)
_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your code within "
    "delimiters.\n```python\n{starter}\n```\n"
)
_STDIN = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample "
    "inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the "
    "inputs, runs the algorithm and writes output to STDOUT.\n```python\n# YOUR CODE HERE\n```\n"
)

# Lines are the same as text, or as numbers, word by word; white space at their ends does not count.
_HARNESS = """
import contextlib, decimal, io, json, signal, sys
code, tests, name, seconds = json.loads({given!r})

def numbers(line):
    try:
        return [decimal.Decimal(word) for word in line.split()]
    except decimal.InvalidOperation:
        return None

def same(got, wanted):
    got, wanted = ([line.strip() for line in text.strip().split("\\n")] for text in (got, wanted))
    if len(got) != len(wanted):
        return False
    return all(a == b or (numbers(a) is not None and numbers(a) == numbers(b)) for a, b in zip(got, wanted))

def plain(x):
    return [plain(each) for each in x] if isinstance(x, (list, tuple)) else x

def passes(test):
    sys.stdin, out = io.TextIOWrapper(io.BytesIO(test["input"].encode())), io.TextIOWrapper(io.BytesIO())
    space = {{"__name__": "__main__" if test["testtype"] == "stdin" else "program"}}
    with contextlib.redirect_stdout(out):
        try:
            exec("from typing import *\\n" + code if name else code, space)
            if name:
                call = getattr(space["Solution"](), name) if "Solution" in space else space[name]
                found = call(*(json.loads(line) for line in test["input"].split("\\n") if line.strip()))
        except SystemExit:
            if name:
                return False
        out.flush()
    if name:
        return plain(found) == json.loads(test["output"])
    return same(out.buffer.getvalue().decode(), test["output"])

sys.setrecursionlimit(50000)
for test in tests:
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, lambda *_: sys.exit("too slow"))
        signal.setitimer(signal.ITIMER_REAL, seconds)
    assert passes(test)
"""


class _Text(pickle.Unpickler):
    """Reads a pickled string, which is what the authors' files hold, and nothing that would run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no text")


def _tests(text: str) -> list[dict[str, str]]:
    """Tests of a problem: JSON, or JSON that is pickled, compressed and in base 64."""
    if not text.lstrip().startswith("["):
        unpacked = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MOST_BYTES)
        text = _Text(io.BytesIO(unpacked)).load()
    found = [{name: str(test[name]) for name in ("input", "output", "testtype")} for test in parse_json(text)]
    if any(test["testtype"] not in ("stdin", "functional") for test in found):
        raise ValueError("a test is neither of 'stdin' nor 'functional'")
    return found


def _day(name: str, value: Any) -> date | None:
    try:
        return None if value is None else date.fromisoformat(str(value))
    except ValueError:
        raise ValueError(f"{name}: got {value!r}, allowed a day as 2025-01-01.") from None


def livecodebench(
    data_dir: str | None = None, start_date: str | None = None, end_date: str | None = None, **_: Any
) -> datasets.DatasetDict:
    """The problems of ``livecodebench/*.jsonl`` in the data folder, as the authors publish them.

    Args:
        data_dir: the folder; None asks the environment.
        start_date: first day of contests, as ``2025-01-01``; None takes all.
        end_date: last one, which is included.

    Raises:
        FileNotFoundError: no folder is named, or it has no such file.
        ValueError: a file is damaged, a date is none, or no problem is of these days.
    """
    first, last = _day("start_date", start_date), _day("end_date", end_date)
    folder = data_folder(data_dir)
    place = None if folder is None else folder / "livecodebench"
    files = [] if place is None else sorted([*place.glob("*.jsonl"), *place.glob("*.jsonl.gz")])
    if not files:
        raise FileNotFoundError(
            f"data_dir: {place or 'no folder is named, and LiveCodeBench'} has no *.jsonl; put test.jsonl to "
            "test6.jsonl of livecodebench/code_generation_lite into the folder livecodebench, and name its parent with "
            f"--metadata data_dir=DIR or {ENVIRONMENT}."
        )
    rows: list[Row] = []
    for path in files:
        for number, row in enumerate(read_jsonl(path), start=1):
            try:
                day = date.fromisoformat(row["contest_date"][:10])
                if (first is None or day >= first) and (last is None or day <= last):
                    rows.append(_row(row, day))
            except (*DAMAGE, pickle.UnpicklingError, zlib.error, binascii.Error, EOFError) as error:
                raise ValueError(f"{path}: row {number} is not a problem of LiveCodeBench ({error!r}).") from error
    if not rows:
        raise ValueError(f"start_date, end_date: got {start_date} and {end_date}, but {place} has none from that time.")
    return as_dataset({"test": rows})


def _row(row: Row, day: date) -> Row:
    starter = row["starter_code"] or ""
    how = _STARTER.format(starter=starter) if starter else _STDIN
    tests = _tests(row["public_test_cases"]) + _tests(row["private_test_cases"])
    metadata = row.get("metadata") or "{}"
    function = (parse_json(metadata) if isinstance(metadata, str) else metadata).get("func_name") or ""
    if any((test["testtype"] == "functional") != bool(function) for test in tests):
        raise ValueError("tests of functions need metadata with 'func_name', others none")
    return {
        "id": str(row["question_id"]),
        "date": day.isoformat(),
        "difficulty": str(row["difficulty"]),
        "prompt": _ASK.format(question=row["question_content"]) + how,
        "function": function,
        "tests": json.dumps(tests),
    }


def is_right(doc: Row, code: str) -> bool:
    """Whether a program passes all tests of a problem."""
    tests = json.loads(doc["tests"])
    given = json.dumps([code, tests, doc["function"], SECONDS])
    return passes(_HARNESS.format(given=given), SECONDS * (len(tests) + 1))


def score(doc: Row, results: Sequence[Sequence[str]]) -> dict[str, float]:
    """pass@1: the share of the answers whose last fenced block passes."""
    answers = results[0]
    return {"pass@1": pass_at(1, len(answers), sum(is_right(doc, code_of(text)) for text in answers))}
