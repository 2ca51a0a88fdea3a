"""Seeded tasks: exact recall, chained arithmetic and tool calls of the reference model, and plain text.

Every example is a function of its task, split and seed. The two splits cannot meet: their random streams differ, and
each example names a person whose name is drawn from the names held out for its split (see `draw_people`).
"""

from __future__ import annotations

import random
import re

from hfkvq.measure.texts import read_text

from .chat import WORDS, Example, Message, Split, draw_people, random_stream, render
from .tool_calls import tools

EVALUATION_TASKS = ("recall-24", "recall-80", "arithmetic-4", "arithmetic-12", "tools")

_RECORDS = "access code,account number,badge number,booking number,desk number,file number,invoice number,key code,"
_RECORDS += "licence number,locker number,member number,order number,parcel number,pass code,phone number,plot number,"
_RECORDS += "room code,seat number,serial number,staff number,tax number,ticket number,vault code,voucher code"
_RECORDS_LIST = tuple(_RECORDS.split(","))
_LINES = ("- {0}: {1}", "* {0} = {1}", "- {0} -> {1}", "| {0} | {1} |")
_HEADERS = (
    "Here is a list with the {0} of each person.",
    "The {0} of everyone on file:",
    "Please keep each {0} in mind.",
    "Register. Each line holds a name and a {0}.",
    "These are our records. Every person has one {0}.",
)
_QUESTIONS = (
    "What is the {0} of {1}?",
    "Which {0} belongs to {1}?",
    "Please give me the {0} of {1}.",
    "I need the {0} for {1}.",
    "Look up {1}. What is the {0}?",
    "Tell me the {0} that is listed for {1}.",
)
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Answer exactly.",
    "Answer with the number only.",
    "You look things up and answer without any comment.",
)

_THINGS = (
    "apples beads books bricks cards coins cups eggs flowers keys lamps marbles pears pens plates points ribbons "
    "shells stamps stones tickets toys"
).split()
_ADD = ("finds {0} more", "gets {0}", "buys {0}", "adds {0}", "wins {0}", "collects {0} more")
_SUBTRACT = ("loses {0}", "gives away {0}", "sells {0}", "drops {0}", "returns {0}", "uses up {0}")
_MULTIPLY = {2: ("doubles the number", "gets twice as many"), 3: ("triples the number", "gets three times as many")}
_HOW_MANY = (
    "How many {0} does {1} have now?",
    "How many {0} are there in the end?",
    "Work out how many {0} {1} has.",
    "What is the final number of {0}?",
)
_LARGEST = 999


def _system(rng: random.Random) -> list[Message]:
    if rng.random() < 0.4:
        return []
    return [{"role": "system", "content": rng.choice(_SYSTEMS)}]


def recall(n_entries: int, *, seed: int, split: Split = "train", questions: int = 1) -> Example:
    """Ask for the 5-digit value of one name in a list of records; 80 entries are about 1,100 tokens.

    Args:
        n_entries: number of records in the list.
        seed: the example's number within its split.
        split: "train" or "eval".
        questions: questions in a row, each about another name; the answer is that of the last one.
    """
    if not 1 <= questions <= n_entries:
        raise ValueError(f"questions={questions} must be between 1 and n_entries={n_entries}")
    task = f"recall-{n_entries}"
    rng = random_stream(split, task, seed)
    names = draw_people(rng, n_entries, split)
    values = [str(10_000 + int(rng.random() * 90_000)) for _ in names]
    noun, line = rng.choice(_RECORDS_LIST), rng.choice(_LINES)
    listing = "\n".join(line.format(name, value) for name, value in zip(names, values, strict=True))
    asked = rng.sample(range(n_entries), questions)
    ask = [rng.choice(_QUESTIONS).format(noun, names[i]) for i in asked]
    first = f"{rng.choice(_HEADERS).format(noun)}\n\n{listing}\n\n{ask[0]}"
    messages = [*_system(rng), {"role": "user", "content": first}]
    for previous, question in zip(asked, ask[1:], strict=False):
        messages.append({"role": "assistant", "content": values[previous]})
        messages.append({"role": "user", "content": question})
    return Example(task, render(messages), values[asked[-1]], tuple(messages))


def arithmetic(steps: int, *, seed: int, split: Split = "train") -> Example:
    """Follow a number through a chain of steps, worked out in `<think>`, to the final number.

    Args:
        steps: number of steps; numbers stay between 0 and 999.
    """
    task = f"arithmetic-{steps}"
    rng = random_stream(split, task, seed)
    (name,) = draw_people(rng, 1, split)
    thing = rng.choice(_THINGS)
    value = rng.randint(2, 99)
    story, thoughts = [f"{name} starts with {value} {thing}."], []
    for number in range(1, steps + 1):
        factor = rng.choice((2, 3))
        kind = rng.random()
        if kind < 0.2 and 0 < value * factor <= _LARGEST:
            said, worked, result = rng.choice(_MULTIPLY[factor]), f"{value} * {factor}", value * factor
        elif (kind < 0.6 or value < 3) and value < _LARGEST:
            term = rng.randint(2, 99) if value + 99 <= _LARGEST else rng.randint(1, _LARGEST - value)
            said, worked, result = rng.choice(_ADD).format(term), f"{value} + {term}", value + term
        else:
            term = rng.randint(2, min(99, value))
            said, worked, result = rng.choice(_SUBTRACT).format(term), f"{value} - {term}", value - term
        story.append(f"{number}. {name.split()[0]} {said}.")
        thoughts.append(f"{number}. {worked} = {result}")
        value = result
    question = rng.choice(_HOW_MANY).format(thing, name)
    messages = [*_system(rng), {"role": "user", "content": "\n".join([*story, question])}]
    answer = "\n".join(["<think>", *thoughts, "</think>", str(value)])
    return Example(task, render(messages), answer, tuple(messages))


# Tasks as plain text to be continued, without a chat template, which a small pretrained model can do. The only right
# answer stands in the text already. Sizes are tokens of the text, about.

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
    text = read_text("play")
    begin = rng.randrange(len(text) - round(size * _OF_PLAY))
    return _hidden(text[begin : begin + round(size * _OF_PLAY)].split("\n"), rng)


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


def evaluation_set(task: str, n: int = 200, *, seed: int = 0) -> list[Example]:
    """Return the first `n` evaluation examples of a task, the same ones every time.

    Args:
        task: one of `EVALUATION_TASKS`, also with other sizes, for instance "recall-40"; or of `PLAIN_TASKS`, with a
            size.
        n: number of examples.
        seed: another seed gives other examples, none of them training data.
    """
    first = seed * 1_000_000
    numbers = range(first, first + n)
    match = re.fullmatch(r"(recall|arithmetic)-([1-9][0-9]*)", task)
    if match:
        make = {"recall": recall, "arithmetic": arithmetic}[match[1]]
        return [make(int(match[2]), seed=number, split="eval") for number in numbers]
    kind, _, size = task.partition("-")
    if kind in PLAIN_TASKS and size.isdecimal():
        name, make = f"{kind}-{int(size)}", _MAKERS[kind]
        return [Example(name, *make(int(size), random_stream("eval", name, number)), ()) for number in numbers]
    if task == "tools":
        return [tools(seed=number, split="eval") for number in numbers]
    raise ValueError(f"task={task!r} is unknown; known are {', '.join((*EVALUATION_TASKS, *PLAIN_TASKS))}")
