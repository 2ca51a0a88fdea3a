"""Triaxial tags of the tokens of a conversation, read from their ids alone."""

from .axes import MODAL, PAD, SEMANTIC, TAGS, TEMPORAL, age_tags, parse_tag, tag_axes, tag_number
from .formats import FORMATS, ChatFormat, Opening, Span, find_format, get_format
from .tagger import Extension, ImageTokens, Tagger, TagState, placeholders

__all__ = [
    "FORMATS",
    "MODAL",
    "PAD",
    "SEMANTIC",
    "TAGS",
    "TEMPORAL",
    "ChatFormat",
    "Extension",
    "ImageTokens",
    "Opening",
    "Span",
    "TagState",
    "Tagger",
    "age_tags",
    "find_format",
    "get_format",
    "parse_tag",
    "placeholders",
    "tag_axes",
    "tag_number",
]
