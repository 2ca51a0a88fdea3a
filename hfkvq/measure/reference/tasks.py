"""Seeded tasks of the reference model: exact recall, chained arithmetic and tool calls.

Every example is a function of its task, split and seed. The two splits cannot meet: their random streams differ, and
each example names a person whose name is drawn from the names held out for its split (see `draw_people`).
"""

from __future__ import annotations

import random
import re

from .chat import Example, Message, Split, draw_people, random_stream, render
from .plain import PLAIN_TASKS, plain
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
        return [plain(kind, int(size), seed=number) for number in numbers]
    if task == "tools":
        return [tools(seed=number, split="eval") for number in numbers]
    raise ValueError(f"task={task!r} is unknown; known are {', '.join((*EVALUATION_TASKS, *PLAIN_TASKS))}")
