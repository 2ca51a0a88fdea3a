"""BFCL v4's memory task whole: a model keeps notes over many conversations, and later answers from them alone.

    PYTHONPATH=. python evals/bfcl_memory.py --model Qwen/Qwen3-8B --schemes none,triaxial,kitty-pro --data-dir DIR

First the conversations of a scenario are held one after the other. The model writes into a simulated memory by calling
functions, and each conversation begins with the memory as the last has left it. Then every question is asked in a
conversation of its own, from a copy of that memory, and counts if the answer has one of the right answers as whole
words. ``none`` is Transformers' own cache. Two of BFCL's three memories are here: ``kv`` (keys and values, of short and
of long term) and ``rec_sum`` (one text); the third ranks by embeddings, for which BFCL loads another model.

Differs from BFCL: the words of the system prompt, and greedy decoding. A cache is kept from turn to turn of a
conversation for as long as the chat template repeats what it holds, token by token.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from evals.tasks.calls import SCENARIOS, conversations, memory_tools, parse_calls, questions, score_memory
from evals.tasks.common import render
from hfkvq.caches.named import make_cache
from hfkvq.measure.models import find_model, load_model, load_tokenizer
from hfkvq.measure.records import commit, device_name, now, versions

STEPS = 20
"""Most generations of a turn."""

PROMPT = (
    "You are a helpful assistant who meets the same user again and again. Of earlier conversations you remember only "
    "what is in your memory, which you read and write with functions. Store what may be asked for later while the user "
    "tells it; look up what you are asked, and then answer in one short sentence. What the memory shows now:\n"
)

Messages = list[dict[str, Any]]


class Memory(Protocol):
    """Memory that a model writes into: public methods are BFCL's functions, answers are plain data."""

    def shown(self) -> str:
        """Text that the model sees without a call."""
        ...


class _Refused(Exception):
    """A call that the memory does not carry out; the model is told why."""


class _Shelf:
    """Values by key, up to a number and a length."""

    def __init__(self, entries: int, length: int) -> None:
        self.entries, self.length = entries, length
        self.values: dict[str, str] = {}

    def add(self, key: str, value: str) -> dict[str, Any]:
        if key in self.values:
            raise _Refused(f"the key {key!r} is there already; replace its value")
        if not re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", key):
            raise _Refused(f"the key {key!r} is not in snake_case")
        if len(self.values) >= self.entries:
            raise _Refused(f"there is room for {self.entries} entries, and all are taken; remove one")
        return self._put(key, value)

    def replace(self, key: str, value: str) -> dict[str, Any]:
        self.retrieve(key)
        return self._put(key, value)

    def remove(self, key: str) -> dict[str, Any]:
        self.retrieve(key)
        del self.values[key]
        return {"status": "removed"}

    def clear(self) -> dict[str, Any]:
        self.values.clear()
        return {"status": "cleared"}

    def retrieve(self, key: str) -> dict[str, Any]:
        if key not in self.values:
            raise _Refused(f"there is no key {key!r}")
        return {"value": self.values[key]}

    def retrieve_all(self) -> dict[str, Any]:
        return dict(self.values)

    def list_keys(self) -> dict[str, Any]:
        return {"keys": list(self.values)}

    def key_search(self, query: str, k: int = 5) -> dict[str, Any]:
        keys = list(self.values)
        scores = bm25_plus(query.lower().split(), [key.split("_") for key in keys])
        ranked = sorted(zip(scores, keys, strict=True), key=lambda pair: -pair[0])
        return {"ranked_results": [[score, key] for score, key in ranked[:k]]}

    def _put(self, key: str, value: str) -> dict[str, Any]:
        if len(value) > self.length:
            raise _Refused(f"a value has up to {self.length} characters, and this has {len(value)}")
        self.values[key] = value
        return {"status": "stored"}


class KeyValueMemory:
    """Short and long term, with BFCL's bounds: 7 entries of 300 characters, and 50 of 2,000."""

    def __init__(self) -> None:
        self.shelves = {"core_memory": _Shelf(7, 300), "archival_memory": _Shelf(50, 2000)}

    def shown(self) -> str:
        """The short term; the rest has to be asked for."""
        return json.dumps(self.shelves["core_memory"].values, ensure_ascii=False)

    def find(self, name: str) -> Callable[..., dict[str, Any]] | None:
        """Implementation of a function; None if there is none of this name."""
        shelf = next((kind for kind in self.shelves if name.startswith(f"{kind}_")), None)
        return None if shelf is None else getattr(self.shelves[shelf], name.removeprefix(f"{shelf}_"), None)


class TextMemory:
    """Text of up to 10,000 characters."""

    MOST = 10_000

    def __init__(self) -> None:
        self.text = ""

    def shown(self) -> str:
        """Text, all of it."""
        return self.text

    def find(self, name: str) -> Callable[..., dict[str, Any]] | None:
        """Implementation of a function; None if there is none of this name."""
        return {
            "memory_append": lambda text: self._put(f"{self.text}{text}"),
            "memory_update": self._put,
            "memory_replace": self._replace,
            "memory_clear": lambda: self._put(""),
            "memory_retrieve": lambda: {"memory_content": self.text},
        }.get(name)

    def _replace(self, old_text: str, new_text: str) -> dict[str, Any]:
        if old_text not in self.text:
            raise _Refused("the memory does not have the old text")
        return self._put(self.text.replace(old_text, new_text))

    def _put(self, text: str) -> dict[str, Any]:
        if len(text) > self.MOST:
            raise _Refused(f"the memory has up to {self.MOST} characters, and this would be {len(text)}")
        self.text = text
        return {"status": "stored"}


MEMORIES: dict[str, Callable[[], Any]] = {"kv": KeyValueMemory, "rec_sum": TextMemory}


def bm25_plus(query: Sequence[str], texts: Sequence[Sequence[str]]) -> list[float]:
    """BM25+ of each text (Lv and Zhai, 2011; k1 1.5, b 0.75, delta 1)."""
    mean = sum(map(len, texts)) / max(1, len(texts))
    scores = [0.0] * len(texts)
    for word in query:
        having = sum(word in text for text in texts)
        rarity = math.log((len(texts) + 1) / having) if having else 0.0
        for i, text in enumerate(texts):
            count = text.count(word)
            if count:
                scores[i] += rarity * (1 + 2.5 * count / (count + 1.5 * (0.25 + 0.75 * len(text) / mean)))
    return scores


def carry_out(memory: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Answer of a call; errors are answers, too."""
    function = memory.find(name)
    if function is None:
        return {"error": f"there is no function {name!r}"}
    try:
        return function(**arguments)
    except (_Refused, TypeError, AttributeError) as error:
        return {"error": str(error)}


def take_turn(ask: Callable[[Messages], str], messages: Messages, memory: Any) -> tuple[str, int]:
    """Generations and calls until an answer without calls, all of which go into ``messages``; how many calls."""
    text, made = "", 0
    for _ in range(STEPS):
        text = ask(messages)
        calls = parse_calls(text)
        if not calls:
            break
        asked = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
        messages.append({"role": "assistant", "content": "", "tool_calls": asked})
        for name, given in calls:
            found = json.dumps(carry_out(memory, name, given), ensure_ascii=False)
            messages.append({"role": "tool", "name": name, "content": found})
        made += len(calls)
    messages.append({"role": "assistant", "content": text})
    return text, made


class Chat:
    """A model, and one cache for as long as prompts go on where it ends."""

    def __init__(self, model: Any, tokenizer: Any, scheme: str | None, tools: Sequence[Any], most: int) -> None:
        self.model, self.tokenizer, self.scheme, self.tools, self.most = model, tokenizer, scheme, tools, most
        self.prefilled = self.generated = self.longest = 0
        self.begin()

    def begin(self) -> None:
        """A conversation of its own."""
        self.held: list[int] = []
        self.cache: Any = None

    def __call__(self, messages: Messages) -> str:
        """The model's next message."""
        text = render(self.tokenizer, messages, self.tools, {}, "bfcl_memory")
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if self.cache is None or ids[: len(self.held)] != self.held or len(ids) <= len(self.held):
            self.cache, self.held = make_cache(self.model, self.scheme, self.tokenizer), []
        given = torch.tensor([ids], device=self.model.device)
        out = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            past_key_values=self.cache,
            max_new_tokens=self.most,
            do_sample=False,
        )[0].tolist()
        self.prefilled += len(ids) - len(self.held)
        self.generated += len(out) - len(ids)
        self.longest = max(self.longest, len(out))
        # The last token was not given back to the model.
        self.held = out[:-1]
        return self.tokenizer.decode(out[len(ids) :], skip_special_tokens=True)


def run(
    ask: Any, make_memory: Callable[[], Any], scenario: str, data_dir: str | None, limit: int | None, turns: int | None
) -> dict[str, Any]:
    """A scenario: its conversations, and then its questions.

    Args:
        ask: gives the model's next message; ``begin`` of it begins a conversation.
        make_memory: an empty memory.
        scenario: one of `SCENARIOS`.
        data_dir: folder of the data.
        limit: questions that are asked; None for all.
        turns: turns of each conversation that are held; None for all.
    """
    memory, calls, asked = make_memory(), 0, []
    for said in conversations(scenario, data_dir):
        ask.begin()
        messages: Messages = [{"role": "system", "content": PROMPT + memory.shown()}]
        for turn in said[:turns]:
            messages += copy.deepcopy(turn)
            calls += take_turn(ask, messages, memory)[1]
    for question in questions(scenario, data_dir)[:limit]:
        ask.begin()
        own = copy.deepcopy(memory)
        messages = [{"role": "system", "content": PROMPT + own.shown()}, *copy.deepcopy(question["messages"])]
        answer, looked_up = take_turn(ask, messages, own)
        right = score_memory({"answers": question["answers"]}, [answer])["acc"]
        asked.append({"id": question["id"], "right": right, "calls": looked_up, "answer": answer})
    return {
        "scenario": scenario,
        "right": sum(each["right"] for each in asked),
        "questions": len(asked),
        "calls": calls,
        "asked": asked,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as the other commands take it; the reference model by default")
    parser.add_argument("--schemes", default="none,triaxial", help="presets, between commas")
    parser.add_argument("--memory", choices=sorted(MEMORIES), default="kv")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="between commas")
    parser.add_argument("--data-dir", help="folder that has bfcl/, see evals/tasks/README.md")
    parser.add_argument("--limit", type=int, help="questions of each scenario")
    parser.add_argument("--turns", type=int, help="turns of each conversation")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for what was found")
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.scenarios.split(",")) - set(SCENARIOS))
    if unknown:
        parser.error(f"--scenarios: got {', '.join(unknown)}, allowed {', '.join(SCENARIOS)}")
    source = find_model(args.model)
    model, tokenizer = load_model(source, args.device), load_tokenizer(source)
    tools = memory_tools(args.memory, args.data_dir)
    record: dict[str, Any] = {"kind": "bfcl-memory", "model": source.name, "memory": args.memory, "date": now()}
    record |= {"device": device_name(torch.device(args.device)), "commit": commit(), "versions": versions(), "rows": []}
    for scheme in args.schemes.split(","):
        chat = Chat(model, tokenizer, None if scheme == "none" else scheme, tools, args.max_new_tokens)
        for scenario in args.scenarios.split(","):
            row = run(chat, MEMORIES[args.memory], scenario, args.data_dir, args.limit, args.turns)
            record["rows"].append({"scheme": scheme, **row})
            print(
                f"{scheme:16} {scenario:12} {row['right']:.0f} of {row['questions']}, {row['calls']} calls", flush=True
            )
        record.setdefault("tokens", {})[scheme] = {
            "prefilled": chat.prefilled,
            "generated": chat.generated,
            "longest": chat.longest,
        }
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
