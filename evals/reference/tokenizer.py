"""Train the tokenizer of the reference model: byte-level BPE of 1,024 tokens in which every digit is a token.

Run from the root of the checkout:

    python evals/reference/tokenizer.py --text gsm8k_train.jsonl --out evals/reference/checkpoint
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hfkvq.measure.reference import chat, tasks, tools

VOCABULARY = 1_024
MAX_LENGTH = 4_096
END_OF_TEXT = "<|endoftext|>"
# Control tokens are left out of decoded text; the tags are text that always is one token.
CONTROL = (END_OF_TEXT, chat.IM_START, chat.IM_END)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tools>", "</tools>")

# The template says in Jinja what `chat.render` says in Python; a test keeps the two equal.
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


def corpus(text: Path | None, documents: int) -> Iterator[str]:
    """Yield generated documents of every task, then grade-school problems."""
    rng = random.Random(0)
    for seed in range(documents):
        yield tasks.recall(rng.randint(4, 40), seed=seed, questions=2).text
        yield tasks.arithmetic(rng.randint(1, 12), seed=seed).text
        yield tools(seed=seed).text
    if text is not None:
        for line in text.read_text(encoding="utf-8").splitlines():
            problem = json.loads(line)
            yield problem["question"] + "\n" + problem["answer"] + "\n"


def train(text: Path | None, documents: int) -> PreTrainedTokenizerFast:
    """Return a trained tokenizer with the chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A line break never merges with its neighbours, so a prompt and its answer tokenize apart as together.
            pre_tokenizers.Split(Regex(r"\n"), behavior="isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(corpus(text, documents), trainer)
    backend.add_tokens(list(TAGS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=chat.IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="GSM8K train.jsonl; generated text alone is used without it")
    parser.add_argument("--documents", type=int, default=3_000, help="generated documents of each task")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = train(arguments.text, arguments.documents)
    tokenizer.save_pretrained(arguments.out)
    print(f"{len(tokenizer)} tokens in {arguments.out}")


if __name__ == "__main__":
    main()
