"""Tasks as plain text to be continued, which a small pretrained model can do: passkeys, needles, copied code.

No chat template: the text is to be continued, and the only right answer stands in it already. Sizes are tokens of the
text, about. Like the other tasks each example is a function of its task and seed.
"""

from __future__ import annotations

import random
from functools import cache

from hfkvq.measure.texts import read_text

from .chat import WORDS, Example, random_stream

PLAIN_TASKS = ("passkey", "needle", "copy")

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# Characters of a token, about: of such sentences and of verse.
_OF_PROSE, _OF_PLAY = 4.2, 3.3


def passkey(size: int, rng: random.Random) -> tuple[str, str]:
    """A number of five digits in the midst of sentences that repeat."""
    lines = [_FILLER] * max(2, round(size * _OF_PROSE / len(_FILLER)))
    return _hidden(lines, rng)


def needle(size: int, rng: random.Random) -> tuple[str, str]:
    """The same in a play."""
    text = _play()
    begin = rng.randrange(len(text) - round(size * _OF_PLAY))
    return _hidden(text[begin : begin + round(size * _OF_PLAY)].split("\n"), rng)


@cache
def _play() -> str:
    return read_text("play")


def _hidden(lines: list[str], rng: random.Random) -> tuple[str, str]:
    key = str(rng.randint(10_000, 99_999))
    at = rng.randint(0, len(lines))
    found = [*lines[:at], f'The pass key is "{key}". Remember it. "{key}" is the pass key.', *lines[at:]]
    return "\n".join(found) + '\n\nWhat is the pass key? The pass key is "', key


def _function(name: str, rng: random.Random) -> tuple[str, str]:
    """Beginning and rest of a function that nobody has written before."""
    one, two, three = rng.sample(WORDS, 3)
    first, second = rng.randint(10, 99), rng.randint(10, 99)
    begin = f"def {name}({one}, {two}):\n    {three} ="
    return begin, f" {one} * {first} + {two}\n    return {three} - {second}\n"


def copy(size: int, rng: random.Random) -> tuple[str, str]:
    """Functions of Python, which are written again up to the midst of one."""
    names = rng.sample(WORDS, max(2, round(size / 57)))
    functions = [_function(name, rng) for name in names]
    whole = ["".join(each) for each in functions]
    at = rng.randrange(len(functions))
    begin, rest = functions[at]
    text = "\n\n".join(["# module.py", *whole, "# The same functions again: copy.py", *whole[:at], begin])
    return text, rest.rstrip("\n")


_MAKERS = {"passkey": passkey, "needle": needle, "copy": copy}


def is_plain(task: str) -> bool:
    """True if a task, by its name with its size, is one of `PLAIN_TASKS`."""
    return task.partition("-")[0] in PLAIN_TASKS


def plain(kind: str, size: int, *, seed: int) -> Example:
    """One example.

    Args:
        kind: one of `PLAIN_TASKS`.
        size: tokens of the context, about.
        seed: the example's number.
    """
    task = f"{kind}-{size}"
    prompt, answer = _MAKERS[kind](size, random_stream("eval", task, seed))
    return Example(task, prompt, answer, ())
