"""Chat formats that are known by name."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from difflib import get_close_matches

from .templates import ChatFormat, Opening, Span

_THINK = Span("<think>", "</think>", "reasoning")
_TOOL_CALL = Span("<tool_call>", "</tool_call>", "tool_call")
_TOOL_RESPONSE = Span("<tool_response>", "</tool_response>", "obs", within=("obs",))
# Tool results of Qwen are messages of the user.
_FROM_TOOL = Opening("user", "<tool_response>", "obs")

# Placeholders that InternVL puts into the formats of its language models, Qwen's and gpt-oss.
_INTERNVL = ("<img>", "<IMG_CONTEXT>", "</img>")

_ROLES = {
    "system": "inst",
    "developer": "inst",
    "user": "user",
    "assistant": "assistant",
    "tool": "obs",
    "function": "obs",
    "ipython": "obs",
    "environment": "obs",
    "observation": "obs",
}

CHATML = ChatFormat(
    name="chatml",
    detect=("<|im_start|>",),
    start="<|im_start|>",
    roles=_ROLES,
    ends=("<|im_end|>", "<|endoftext|>"),
    spans=(_THINK, _TOOL_CALL, _TOOL_RESPONSE),
    openings=(_FROM_TOOL,),
    images=("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", *_INTERNVL),
)

PHI4 = replace(CHATML, name="phi4", detect=("<|im_start|>", "<|im_sep|>"), header_end="<|im_sep|>")

LLAMA3 = ChatFormat(
    name="llama3",
    detect=("<|start_header_id|>",),
    start="<|start_header_id|>",
    header_end="<|end_header_id|>",
    roles=_ROLES,
    ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    spans=(Span("<|python_tag|>", "", "tool_call"), _THINK),
    # Calls of custom tools are bare JSON; both orders of keys are seen.
    openings=(
        Opening("assistant", '{"name":', "tool_call"),
        Opening("assistant", '{"type": "function"', "tool_call"),
    ),
    delims=("<|begin_of_text|>",),
    images=("<|image|>",),
)

LLAMA4 = replace(
    LLAMA3,
    name="llama4",
    detect=("<|header_start|>",),
    start="<|header_start|>",
    header_end="<|header_end|>",
    ends=("<|eot|>", "<|eom|>", "<|end_of_text|>"),
    spans=(*LLAMA3.spans, Span("<|python_start|>", "<|python_end|>", "tool_call")),
    images=(
        *("<|image_start|>", "<|image|>", "<|patch|>", "<|image_end|>"),
        *("<|tile_x_separator|>", "<|tile_y_separator|>"),
    ),
)

GEMMA = ChatFormat(
    name="gemma",
    detect=("<start_of_turn>",),
    start="<start_of_turn>",
    roles={"user": "user", "model": "assistant", "system": "inst", "developer": "inst", "tool": "obs"},
    ends=("<end_of_turn>", "<eos>"),
    delims=("<bos>",),
    images=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
)

HARMONY = ChatFormat(
    name="gpt-oss",
    detect=("<|channel|>", "<|message|>"),
    start="<|start|>",
    header_end="<|message|>",
    roles={"system": "inst", "developer": "inst", "user": "user", "assistant": "assistant"},
    # Roles of tool results are the tools' own names.
    other_role="obs",
    channel="<|channel|>",
    # Commentary without a recipient is a preamble that the user reads.
    channels={"analysis": "reasoning", "commentary": "assistant", "final": "assistant"},
    recipient=" to=",
    ends=("<|end|>", "<|call|>", "<|return|>", "<|endoftext|>"),
    delims=("<|startoftext|>",),
    images=_INTERNVL,
)

MISTRAL = ChatFormat(
    name="mistral",
    detect=("[INST]",),
    markers={
        "[SYSTEM_PROMPT]": "inst",
        "[AVAILABLE_TOOLS]": "inst",
        "[INST]": "user",
        "[/INST]": "assistant",
        "[TOOL_RESULTS]": "obs",
        "[/TOOL_RESULTS]": "assistant",
    },
    ends=("[/SYSTEM_PROMPT]", "[/AVAILABLE_TOOLS]", "</s>"),
    spans=(Span("[TOOL_CALLS]", "", "tool_call"), Span("[THINK]", "[/THINK]", "reasoning")),
    delims=("<s>", "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]"),
    images=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)

GLM4 = ChatFormat(
    name="glm4",
    detect=("[gMASK]", "<|user|>"),
    markers={"<|system|>": "inst", "<|user|>": "user", "<|assistant|>": "assistant", "<|observation|>": "obs"},
    ends=("<|endoftext|>",),
    spans=(_THINK, _TOOL_CALL, _TOOL_RESPONSE),
    delims=("[gMASK]", "<sop>"),
    images=(
        *("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
        *("<|begin_of_video|>", "<|video|>", "<|end_of_video|>"),
    ),
)

PHI3 = ChatFormat(
    name="phi3",
    detect=("<|user|>", "<|end|>"),
    markers={"<|system|>": "inst", "<|user|>": "user", "<|assistant|>": "assistant", "<|tool|>": "obs"},
    ends=("<|end|>", "<|endoftext|>"),
    spans=(_THINK, Span("<|tool_call|>", "<|/tool_call|>", "tool_call")),
    delims=("<s>",),
)

FALCON3 = ChatFormat(
    name="falcon3",
    detect=("<|user|>", "<|assistant|>"),
    markers={"<|system|>": "inst", "<|user|>": "user", "<|assistant|>": "assistant", "<|tool|>": "obs"},
    ends=("<|endoftext|>",),
    spans=(_THINK, _TOOL_CALL, _TOOL_RESPONSE),
    openings=(_FROM_TOOL,),
)

DEEPSEEK = ChatFormat(
    name="deepseek",
    detect=("<｜User｜>",),
    # Results of one round have one marker before the first of them.
    markers={
        "<｜User｜>": "user",
        "<｜Assistant｜>": "assistant",
        "<｜tool▁outputs▁begin｜>": "obs",
        "<｜tool▁output▁begin｜>": "obs",
        "<｜tool▁outputs▁end｜>": "assistant",
    },
    ends=("<｜end▁of▁sentence｜>",),
    spans=(_THINK, Span("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "tool_call")),
    delims=("<｜begin▁of▁sentence｜>", "<｜tool▁output▁end｜>"),
)

# Formats are tried in this order, so a format whose markers are part of another's comes after it.
FORMATS = {
    known.name: known
    for known in (HARMONY, PHI4, CHATML, LLAMA3, LLAMA4, GEMMA, GLM4, DEEPSEEK, MISTRAL, PHI3, FALCON3)
}


def find_format(template: str, tokens: Container[str] = ()) -> ChatFormat:
    """Format of a chat template, by the markers in its text, else by the tokens of the tokenizer.

    Args:
        template: Source of the chat template.
        tokens: Added tokens of the tokenizer, for templates that put markers together from pieces.

    Raises:
        ValueError: None of `FORMATS` fits.
    """
    for source in (template, tokens):
        for known in FORMATS.values():
            if all(marker in source for marker in known.detect):
                return known
    looked = "; ".join(f"{known.name} by {' and '.join(known.detect)}" for known in FORMATS.values())
    raise ValueError(
        f"chat template: no known format fits; looked for {looked}. Describe the template with "
        "hfkvq.caches.tags.ChatFormat (from_file reads JSON or TOML) and give it as chat_format."
    )


def get_format(name: str) -> ChatFormat:
    """Format of a name.

    Raises:
        ValueError: No format has that name.
    """
    if name not in FORMATS:
        near = get_close_matches(name, FORMATS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"chat format: got {name!r}, allowed {', '.join(FORMATS)} or a ChatFormat.{hint}")
    return FORMATS[name]
