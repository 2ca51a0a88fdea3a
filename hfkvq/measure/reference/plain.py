"""Tasks as plain text to be continued, which a small pretrained model can do: passkeys, needles, copied code, settings.

No chat template and no question: the right answer is what stands in the context, and exact. Sizes are about as many tokens
as the context has. Like the other tasks each example is a function of its task and seed.
"""

from __future__ import annotations

import random
from functools import cache

from hfkvq.measure.texts import read_text

from .chat import Example
from .people import WORDS, random_stream

PLAIN_TASKS = ("passkey", "needle", "copy", "settings")

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# Characters of a token, about: of such sentences, of verse, of made-up code.
_OF_PROSE, _OF_PLAY, _OF_CODE = 4.2, 3.3, 2.2


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
    at = rng.randrange(1, len(lines))
    found = [*lines[:at], f"The pass key is {key}. Remember it. {key} is the pass key.", *lines[at:]]
    return "\n".join(found) + "\n\nWhat is the pass key? The pass key is", f" {key}"


def _function(name: str, rng: random.Random) -> tuple[str, str]:
    """Head and body of a function that nobody has written before."""
    one, two, three = rng.sample(WORDS, 3)
    first, second = rng.randint(10, 99), rng.randint(10, 99)
    head = f"def {name}({one}, {two}):\n"
    body = f"    {three} = {one} * {first} + {two}\n    return {three} - {second}\n"
    return head, body


def copy(size: int, rng: random.Random) -> tuple[str, str]:
    """Functions of Python, one of which is written again."""
    names = rng.sample(WORDS, max(2, round(size * _OF_CODE / 90)))
    functions = [_function(name, rng) for name in names]
    head, body = rng.choice(functions)
    listed = "\n\n".join(head + body for head, body in functions)
    return f"# module.py\n\n{listed}\n\n# The same function again, copied from module.py:\n\n{head}", body.rstrip("\n")


def settings(size: int, rng: random.Random) -> tuple[str, str]:
    """Assignments of Python, one of which is looked up."""
    names = rng.sample(WORDS, max(2, round(size * _OF_CODE / 15)))
    values = [rng.randint(1_000, 9_999) for _ in names]
    listed = "\n".join(f"{name} = {value}" for name, value in zip(names, values, strict=True))
    at = rng.randrange(len(names))
    return f"# settings.py\n{listed}\n\n# test_settings.py\nassert settings.{names[at]} ==", f" {values[at]}"


_MAKERS = {"passkey": passkey, "needle": needle, "copy": copy, "settings": settings}


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
