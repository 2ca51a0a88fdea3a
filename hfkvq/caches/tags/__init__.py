"""Triaxial tags: what each token of a conversation is, read from its ids alone."""

from .axes import MODAL, PAD, SEMANTIC, TAGS, TEMPORAL, age_tags, parse_tag, tag_axes, tag_number
from .tagger import Extension, Tagger, TagState

__all__ = [
    "MODAL",
    "PAD",
    "SEMANTIC",
    "TAGS",
    "TEMPORAL",
    "Extension",
    "TagState",
    "Tagger",
    "age_tags",
    "parse_tag",
    "tag_axes",
    "tag_number",
]
