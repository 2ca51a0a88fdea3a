"""Conversations with tools, the last call of which uses values of earlier results or requests."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from .chat import WORDS, Example, Message, Split, call_text, draw_people, random_stream, render


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


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
    nouns = [rng.choice(WORDS) if rng.random() < 0.25 else noun for noun in nouns]
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
        return draw_people(rng, 1, split)[0]
    if name in _TEXT:
        return rng.choice(_TEXT[name])
    return rng.randint(10, 999) if name in _COUNTS else rng.randint(10_000, 99_999)


def _join(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def tools(*, seed: int, split: Split = "train") -> Example:
    """Call tools over several turns; the last call uses values of earlier results or requests.

    Args:
        seed: the example's number within its split.
        split: "train" or "eval".
    """
    rng = random_stream(split, "tools", seed)
    while True:
        available = _make_tools(rng, rng.randint(3, 6))
        built = _converse(rng, available, rng.randint(2, 4), split)
        if built is not None:
            return built


def _converse(rng: random.Random, available: list[_Tool], calls: int, split: Split) -> Example | None:
    """Build one conversation, or None if the drawn tools do not let the last request refer to anything."""
    style = rng.choice(tuple(_REPLIES))
    system = f"{rng.choice(('You are a helpful assistant.', 'You work with tools.', 'You help people.'))} "
    messages: list[Message] = [{"role": "system", "content": system + rng.choice(_REPLIES[style])}]
    (owner,) = draw_people(rng, 1, split)
    # Values said so far under each name. A name keeps its first value, so that "the same city" is one city.
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
            return Example("tools", render(messages, schemas), call_text(call["function"]), tuple(messages), schemas)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = {name: known[name] if name in known else _value(rng, name, split) for name in tool.returns}
        known = {**result, **known}
        messages.append({"role": "tool", "content": json.dumps(result, ensure_ascii=False)})
        summary = _join([f"the {name} is {json.dumps(value)}" for name, value in result.items()])
        reply = f"{summary[0].upper()}{summary[1:]}." if style == "summary" else "Done."
        messages.append({"role": "assistant", "content": reply})
    return None
