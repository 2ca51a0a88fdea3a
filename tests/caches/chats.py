"""Small tokenizers with real markers."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_VISION = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
_BRACKETS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# Added tokens of each family's tokenizer; the first is the padding.
TOKENS = {
    # Of the brackets, Qwen2.5 has tokens for tool calls alone.
    "qwen2_5": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_VISION, "<tool_call>", "</tool_call>"],
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_VISION, *_BRACKETS],
    "internvl": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_BRACKETS, "<img>", "<IMG_CONTEXT>", "</img>"],
    "llama3": [
        "<|finetune_right_pad_id|>",
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
    ],
    "gemma3": [
        *("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        *("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    ],
    "gptoss": [
        "<|endoftext|>",
        *("<|startoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
        *("<|constrain|>", "<|call|>", "<|return|>"),
    ],
    "glm4moe": [
        "<|endoftext|>",
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *_BRACKETS),
    ],
    "mistral": [
        "<pad>",
        *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
        *(
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[SYSTEM_PROMPT]",
            "[/SYSTEM_PROMPT]",
            "[IMG]",
            "[IMG_BREAK]",
            "[IMG_END]",
        ),
        *("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[TOOL_CONTENT]"),
    ],
    # Its role markers are plain text.
    "falcon3": ["<|pad|>", "<|endoftext|>", "<|startoftext|>"],
    "phi3_5": ["<|endoftext|>", "<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    "deepseekv3": [
        "<｜▁pad▁｜>",
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
        *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ],
}

_BOS = {
    "llama3": "<|begin_of_text|>",
    "gemma3": "<bos>",
    "mistral": "<s>",
    "phi3_5": "<s>",
    "deepseekv3": "<｜begin▁of▁sentence｜>",
}


def byte_tokenizer(
    family: str, template: str | None, merges: tuple[str, ...] = (), named: dict[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """One token a byte, the family's markers, and tokens for ``merges``, each built from left to right.

    ``named`` are markers that are attributes of the tokenizer too, as processors ask for them.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    pairs = []
    for text in merges:
        pieces = text.replace("\n", "Ċ").replace(" ", "Ġ")
        for cut in range(1, len(pieces)):
            if pieces[: cut + 1] not in vocab:
                vocab[pieces[: cut + 1]] = len(vocab)
                pairs.append((pieces[:cut], pieces[cut]))
    core = Tokenizer(models.BPE(vocab, pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS[family]])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=TOKENS[family][0],
        bos_token=_BOS.get(family),
        eos_token="<|endoftext|>" if "<|endoftext|>" in TOKENS[family] else None,
        chat_template=template,
        extra_special_tokens=named or {},
        clean_up_tokenization_spaces=False,
    )
