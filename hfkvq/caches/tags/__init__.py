"""Triaxial tags of the tokens of a conversation, read from their ids alone."""

from .formats import (
    FORMATS,
    MODAL,
    PAD,
    SEMANTIC,
    TAGS,
    TEMPORAL,
    ChatFormat,
    Opening,
    Span,
    find_format,
    get_format,
    parse_tag,
    tag_axes,
)
from .tagger import ImageTokens, Tagger, placeholders

__all__ = [
    "FORMATS",
    "MODAL",
    "PAD",
    "SEMANTIC",
    "TAGS",
    "TEMPORAL",
    "ChatFormat",
    "ImageTokens",
    "Opening",
    "Span",
    "Tagger",
    "find_format",
    "get_format",
    "parse_tag",
    "placeholders",
    "tag_axes",
]
