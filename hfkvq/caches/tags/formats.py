"""Axes of a tag, ``temporal|modal|semantic``, and chat formats: a template's markers, and semantics between them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import product

# Axes of TriAxialKV, section 3.1 and Table 1.
TEMPORAL = ("older", "turn_m2", "turn_m1", "current")
MODAL = ("text", "image")
SEMANTIC = ("inst", "user", "assistant", "reasoning", "tool_call", "obs", "delim")

# Kinds of tokens: modal and semantic together, in any turn.
KINDS = len(MODAL) * len(SEMANTIC)

TAGS = (*("|".join(axes) for axes in product(TEMPORAL, MODAL, SEMANTIC)), "pad")
"""Names by number: tag ``k`` is ``TAGS[k]``. Fifty-six tags of the three axes, then ``pad``."""

PAD = len(TAGS) - 1
"""Number of the tag of padding, which lies on no axis."""

_NUMBERS = {name: number for number, name in enumerate(TAGS)}


def parse_tag(name: str) -> int:
    """Number of a tag given by name, e.g. ``parse_tag("older|text|obs") == 5``; ``parse_tag("pad") == PAD``.

    Raises:
        ValueError: There is no such tag.
    """
    number = _NUMBERS.get(name.replace(" ", ""))
    if number is None:
        near = get_close_matches(name, TAGS, n=1)
        raise ValueError(
            f"tag: got {name!r}, allowed 'pad' or temporal|modal|semantic with temporal in {', '.join(TEMPORAL)}; "
            f"modal in {', '.join(MODAL)}; semantic in {', '.join(SEMANTIC)}."
            + (f" Did you mean {near[0]!r}?" if near else "")
        )
    return number


@dataclass(frozen=True)
class Span:
    """A bracketed part of a message.

    Attributes:
        open: Marker at its beginning.
        close: Marker at its end; empty for "the rest of the message".
        semantic: Semantic of the text inside. Markers inside it, other than its own closing one, are text.
        within: Semantics of the messages it may stand in. Elsewhere its markers are text: a system prompt may explain
            ``<tool_call>`` and a user may type it.
    """

    open: str
    close: str
    semantic: str
    within: tuple[str, ...] = ("assistant",)


@dataclass(frozen=True)
class Opening:
    """A message whose beginning gives it another semantic than its header.

    Attributes:
        role: Semantic that the header gives the message.
        text: Text at its beginning, newlines aside.
        semantic: Semantic of the message then.
    """

    role: str
    text: str
    semantic: str


@dataclass(frozen=True)
class ChatFormat:
    r"""Markers that a chat template writes around and inside messages.

    A message begins either with ``start``, a role written out as text and ``header_end``, or with one of ``markers``;
    it ends with one of ``ends`` or where the next begins. A string need not be one token of the tokenizer.

    Attributes:
        name: Name, for error messages and for choosing it.
        detect: Strings of a chat template of this format; all must occur in it.
        start: Marker of a header whose role follows as text, e.g. ``<|im_start|>``; empty if there is none.
        header_end: Marker at the end of this header; ``\n`` if it ends with its line.
        roles: Semantic by role name, as written in the header.
        other_role: Semantic of a role that ``roles`` does not name.
        channel: Marker before the name of a channel inside the header; empty if there are none.
        channels: Semantic of an assistant's message by channel name.
        recipient: Text inside an assistant's header that makes the message a tool call, e.g. `` to=``.
        markers: Headers that are complete in themselves, with the semantic of their message, e.g. ``<|user|>``.
        ends: Markers that end a message.
        spans: Brackets inside messages.
        openings: Messages whose beginning gives them another semantic.
        delims: Markers that are ``delim`` anywhere and change nothing, e.g. the token that begins a text.
        images: Placeholders of images and of video frames; those the tokenizer does not know are passed over.

    Raises:
        ValueError: An unknown semantic, no marker that begins a message, or a string in place of several.
    """

    name: str
    detect: tuple[str, ...]
    start: str = ""
    header_end: str = "\n"
    roles: Mapping[str, str] = field(default_factory=dict)
    other_role: str = "inst"
    channel: str = ""
    channels: Mapping[str, str] = field(default_factory=dict)
    recipient: str = ""
    markers: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    openings: tuple[Opening, ...] = ()
    delims: tuple[str, ...] = ()
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.start and not self.markers:
            raise ValueError(f"chat format {self.name!r}: nothing begins a message; give start with roles, or markers.")
        if self.start and not self.roles:
            raise ValueError(f"chat format {self.name!r}: roles is empty; name the roles that follow {self.start!r}.")
        for name in ("detect", "ends", "delims", "images"):
            # Strings would be taken for their letters.
            if isinstance(value := getattr(self, name), str):
                raise ValueError(f"chat format {self.name!r}: got {name} = {value!r}, allowed a tuple of strings.")
        given = [self.other_role, *self.roles.values(), *self.channels.values(), *self.markers.values()]
        given += [part.semantic for part in (*self.spans, *self.openings)] + [part.role for part in self.openings]
        given += [semantic for span in self.spans for semantic in span.within]
        for semantic in given:
            if semantic not in SEMANTIC:
                allowed = ", ".join(SEMANTIC)
                raise ValueError(f"chat format {self.name!r}: got semantic {semantic!r}, allowed {allowed}.")


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
        "hfkvq.caches.tags.ChatFormat and give it as chat_format."
    )
