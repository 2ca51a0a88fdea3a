"""Seeded tasks of the reference model: exact recall, chained arithmetic and tool calls.

Every example is a function of its task, split and seed. The two splits cannot meet: their random streams differ, and
each example names a person whose name is drawn from the names held out for its split (see `_held_out`).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

Split = Literal["train", "eval"]
Message = dict[str, Any]

EVALUATION_TASKS = ("recall-24", "recall-80", "arithmetic-4", "arithmetic-12", "tools")

IM_START, IM_END = "<|im_start|>", "<|im_end|>"

# Rendered by `render` in Python, which is about 30 times faster; a test keeps the two equal.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Example:
    """One prompt with its only right answer.

    Fields:
        task: name of the task with its size, for instance "recall-80".
        prompt: text of `messages` and `tools` up to and including the header of the assistant's turn.
        answer: text of that turn, without the end token.
        messages: the conversation, as `apply_chat_template` takes it.
        tools: JSON schemas of the tools, as `apply_chat_template` takes them; empty if the task has none.
    """

    task: str
    prompt: str
    answer: str
    messages: tuple[Message, ...] = field(repr=False)
    tools: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @property
    def text(self) -> str:
        """The whole conversation, the answer included: a training document."""
        return f"{self.prompt}{self.answer}{IM_END}\n"

    def score(self, text: str) -> bool:
        """Tell whether generated text gives the answer, exactly.

        Recall compares the whole turn, arithmetic the number behind `</think>`, and tools the call as parsed JSON.
        """
        text = text.split(IM_END)[0]
        if self.task == "tools":
            wanted = parse_tool_call(self.answer)
            return wanted is not None and parse_tool_call(text) == wanted
        return _final(text) == _final(self.answer)


def parse_tool_call(text: str) -> dict[str, Any] | None:
    """Return the one `<tool_call>` of a text as parsed JSON, or None unless there is exactly one and it parses."""
    calls = re.findall(r"<tool_call>(.*?)</tool_call>", text, flags=re.DOTALL)
    if len(calls) != 1:
        return None
    try:
        call = json.loads(calls[0])
    except json.JSONDecodeError:
        return None
    return call if isinstance(call, dict) else None


def _final(text: str) -> str | None:
    """Return what follows the thoughts; None if thoughts were begun and not ended."""
    if "<think>" in text and "</think>" not in text:
        return None
    return text.rsplit("</think>", maxsplit=1)[-1].strip()


def render(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, add_generation_prompt: bool = True
) -> str:
    """Return what the chat template gives for a conversation."""
    parts = []
    head = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    if tools:
        schemas = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
        intro = f"{head}\n\n" if head is not None else ""
        parts.append(f"{IM_START}system\n{intro}# Tools\n\n<tools>{schemas}\n</tools>{IM_END}\n")
    elif head is not None:
        parts.append(f"{IM_START}system\n{head}{IM_END}\n")
    for message in messages[head is not None :]:
        calls = "".join(_call_text(call["function"]) for call in message.get("tool_calls") or ())
        parts.append(f"{IM_START}{message['role']}\n{message.get('content') or ''}{calls}{IM_END}\n")
    if add_generation_prompt:
        parts.append(f"{IM_START}assistant\n")
    return "".join(parts)


def _call_text(function: dict[str, Any]) -> str:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Names are made up of syllables, so that none carries knowledge; there are 1.5 million full names.
_HEADS = "Ab An Ar Ba Bel Bri Ca Cor Da Del Dor El Fa Fen Gar Hal Hol Il Ja Jor Ka Kel Lan Lo Ma Mer Mi Nor Ol Or Pa "
_HEADS += "Per Ra Ros Sa Sel Ta Tor Ul Va Ver Wil Yan Za"
_TAILS = "ba bin bri co da del den dor fa fin ga gan ha ki la lan len lo ma mer min mo na nel ni no ra ren rik ro sa "
_TAILS += "sen so ta ton va vin wen xa zo"
_FIRST = tuple(head + tail for head in _HEADS.split() for tail in _TAILS.split()[::2])
_LAST = tuple(head + tail for head in _HEADS.split()[::-1] for tail in _TAILS.split())
_WORDS = tuple((head + tail).lower() for head in _HEADS.split() for tail in _TAILS.split()[1::2])

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

_THINGS = _words(
    "apples beads books bricks cards coins cups eggs flowers keys lamps marbles pears pens plates points ribbons "
    "shells stamps stones tickets toys"
)
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

_VERBS = _words(
    "archive assign book cancel check close convert copy create delete deliver export fetch find inspect list load "
    "lock measure merge move open order pack print publish read rename repair reserve restore review schedule search "
    "sell send share sign sort start stop store sync track transfer update verify"
)
_NOUNS = _words(
    "account album alarm badge bike boat bridge camera car card cart claim contract course crate desk device door "
    "event file flight form garden hotel invoice job journal key lamp letter locker machine map meeting order package "
    "parcel payment permit phone photo plan policy printer project recipe record report room sample seat sensor "
    "server ship shipment song table task ticket tour train truck user vehicle visit voucher"
)
_PERSON = _words("agent author client contact customer driver guest holder member owner patient sender tenant")
_TEXT = {
    "city": _words("Berlin Bern Cairo Delhi Dublin Lagos Lima London Madrid Milan Oslo Paris Porto Prague Rome"),
    "color": _words("black blue brown green grey orange pink purple red white yellow"),
    "day": _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "format": _words("csv html json pdf png text xml"),
    "mode": _words("auto fast full light manual night quiet safe"),
    "priority": _words("high low medium normal urgent"),
    "status": _words("active closed done failed open paused pending"),
}
_COUNTS = _words("amount count days distance hours level limit pages price quantity score size weight")
_DESCRIPTIONS = ("{0} the {1} with {2}.", "{0} a {1} by {2}.", "{0} one {1}, given {2}.")
_REQUESTS = (
    "{0} the {1} with {2}.",
    "Please {3} the {1} with {2}.",
    "Could you {3} the {1} with {2}?",
    "I want you to {3} the {1} with {2}.",
    "Next, {3} the {1} with {2}.",
)
_SAME = ("the same {0}", "the {0} from before", "that {0} again")
_OTHER = ("{0} set to the {1} from before", "the {1} from above as {0}", "{0} equal to that {1}")
# The line decides what the assistant says after a result, so that the reply is a function of the prompt.
_REPLIES = {
    "summary": ("After each result, repeat its values.", "Report what every tool returned."),
    "done": ("After each result, only say that it is done.", "Confirm each result with one word."),
}


def _held_out(name: str) -> bool:
    """Tell whether a full name belongs to the evaluation split; one in eight does."""
    return crc32(name.encode()) % 8 == 0


def _people(rng: random.Random, count: int, split: Split) -> list[str]:
    held_out = split == "eval"
    draw = rng.random
    found: dict[str, None] = {}
    while len(found) < count:
        name = f"{_FIRST[int(draw() * len(_FIRST))]} {_LAST[int(draw() * len(_LAST))]}"
        if _held_out(name) == held_out:
            found[name] = None
    return list(found)


def _stream(split: Split, task: str, seed: int) -> random.Random:
    if split not in ("train", "eval"):
        raise ValueError(f'split={split!r} is unknown; use "train" or "eval"')
    return random.Random(f"{split}/{task}/{seed}")


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
    rng = _stream(split, task, seed)
    names = _people(rng, n_entries, split)
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
        seed: the example's number within its split.
        split: "train" or "eval".
    """
    task = f"arithmetic-{steps}"
    rng = _stream(split, task, seed)
    (name,) = _people(rng, 1, split)
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


@dataclass(frozen=True)
class _Tool:
    name: str
    verb: str
    noun: str
    parameters: dict[str, str]
    returns: tuple[str, ...]
    schema: dict[str, Any]


def _kind(parameter: str) -> str:
    return "string" if parameter in _PERSON or parameter in _TEXT else "integer"


def _meaning(name: str) -> Literal["person", "identifier", "value"]:
    if name in _PERSON:
        return "person"
    return "identifier" if name.endswith("_id") else "value"


def _make_tools(rng: random.Random, count: int) -> list[_Tool]:
    """Draw tools with different names; every parameter and returned field has one meaning in the conversation."""
    nouns = rng.sample(_NOUNS, count)
    nouns = [rng.choice(_WORDS) if rng.random() < 0.25 else noun for noun in nouns]
    identifiers = list(dict.fromkeys(f"{noun}_id" for noun in [*nouns, *rng.sample(_NOUNS, 2)]))
    made: dict[str, _Tool] = {}
    for noun in nouns:
        verb = rng.choice(_VERBS)
        name = f"{verb}_{noun}"
        if name in made:
            continue
        pool = [rng.choice(_PERSON), *rng.sample(identifiers, 2), *rng.sample(_COUNTS, 2), *rng.sample(list(_TEXT), 2)]
        chosen = rng.sample(list(dict.fromkeys(pool)), rng.randint(1, 3))
        parameters = {parameter: _kind(parameter) for parameter in chosen}
        returns = (f"{noun}_id", *rng.sample([c for c in (*_COUNTS, *_TEXT) if c not in parameters], rng.randint(1, 2)))
        listed = ", ".join(chosen)
        described = rng.choice(_DESCRIPTIONS).format(verb.capitalize(), noun, listed)
        properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
        schema = {
            "type": "function",
            "function": {
                "name": name,
                "description": described,
                "parameters": {"type": "object", "properties": properties, "required": chosen},
            },
        }
        made[name] = _Tool(name, verb, noun, parameters, returns, schema)
    return list(made.values())


def _value(rng: random.Random, name: str, split: Split) -> str | int:
    if name in _PERSON:
        return _people(rng, 1, split)[0]
    if name in _TEXT:
        return rng.choice(_TEXT[name])
    return rng.randint(10, 999) if name in _COUNTS else rng.randint(10_000, 99_999)


def _join(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def tools(*, seed: int, split: Split = "train", rounds: int | None = None) -> Example:
    """Call tools over several turns; the last call uses values of earlier results or requests.

    Args:
        seed: the example's number within its split.
        split: "train" or "eval".
        rounds: number of calls, the last of which is the answer; drawn between 2 and 4 if None.
    """
    rng = _stream(split, "tools", seed)
    while True:
        available = _make_tools(rng, rng.randint(3, 6))
        calls = rounds if rounds is not None else rng.randint(2, 4)
        built = _converse(rng, available, calls, split)
        if built is not None:
            return built


def _converse(rng: random.Random, available: list[_Tool], calls: int, split: Split) -> Example | None:
    """Build one conversation, or None if the drawn tools do not let the last request refer to anything."""
    style = rng.choice(tuple(_REPLIES))
    system = f"{rng.choice(('You are a helpful assistant.', 'You work with tools.', 'You help people.'))} "
    messages: list[Message] = [{"role": "system", "content": system + rng.choice(_REPLIES[style])}]
    (owner,) = _people(rng, 1, split)
    # What was said so far under each name. A name keeps its first value, so that "the same city" is one city.
    known: dict[str, str | int] = {rng.choice(_PERSON): owner}
    greeting = next(iter(known))
    if calls > len(available):
        return None
    for number, tool in enumerate(rng.sample(available, calls)):
        arguments: dict[str, str | int] = {}
        said: list[str] = []
        referred = 0
        for parameter in tool.parameters:
            others = [name for name in known if _meaning(name) == _meaning(parameter) and _meaning(name) != "value"]
            if parameter in known:
                arguments[parameter] = known[parameter]
                said.append(rng.choice(_SAME).format(parameter))
                referred += 1
            elif others and rng.random() < 0.8:
                other = rng.choice(others)
                arguments[parameter] = known[other]
                said.append(rng.choice(_OTHER).format(parameter, other))
                referred += 1
            else:
                arguments[parameter] = _value(rng, parameter, split)
                said.append(f"{parameter} {json.dumps(arguments[parameter])}")
        known = {**arguments, **known}
        rng.shuffle(said)
        request = rng.choice(_REQUESTS).format(tool.verb.capitalize(), tool.noun, _join(said), tool.verb)
        if number == 0:
            request = f'The {greeting} is "{owner}". {request}'
        messages.append({"role": "user", "content": request})
        call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
        if number == calls - 1:
            if not referred:
                return None
            schemas = tuple(tool.schema for tool in available)
            return Example("tools", render(messages, schemas), _call_text(call["function"]), tuple(messages), schemas)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = {name: known[name] if name in known else _value(rng, name, split) for name in tool.returns}
        known = {**result, **known}
        messages.append({"role": "tool", "content": json.dumps(result, ensure_ascii=False)})
        summary = _join([f"the {name} is {json.dumps(value)}" for name, value in result.items()])
        reply = f"{summary[0].upper()}{summary[1:]}." if style == "summary" else "Done."
        messages.append({"role": "assistant", "content": reply})
    return None


def evaluation_set(task: str, n: int = 200, *, seed: int = 0) -> list[Example]:
    """Return the first `n` evaluation examples of a task, the same ones every time.

    Args:
        task: one of `EVALUATION_TASKS`; other sizes work too, for instance "recall-40".
        n: number of examples.
        seed: another seed gives other examples, none of them training data.
    """
    first = seed * 1_000_000
    numbers = range(first, first + n)
    match = re.fullmatch(r"(recall|arithmetic)-([1-9][0-9]*)", task)
    if match:
        make = {"recall": recall, "arithmetic": arithmetic}[match[1]]
        return [make(int(match[2]), seed=number, split="eval") for number in numbers]
    if task == "tools":
        return [tools(seed=number, split="eval") for number in numbers]
    raise ValueError(f"task={task!r} is unknown; known are {', '.join(EVALUATION_TASKS)}")
