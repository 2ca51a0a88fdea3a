"""Bytes and arithmetic: page formats and the operations over them. Knows nothing of models or policies."""

from .append import append
from .claim import Claimed, claim, new_slots
from .decode import decode_attention
from .dispatch import use_interpreter, use_reference
from .gather import gather_requests, gather_rows
from .hadamard import hadamard
from .norms import page_norms
from .pages import PageFormat, RunView, StoreFormat
from .place import place
from .products import run_pages
from .quantize import dequantize_pages, quantize_pages
from .query_sums import page_weights
from .restore import restore
from .seal import channel_widths, seal_side
from .smooth import smooth, unsmooth
from .take import take_page, take_token
from .windows import due

__all__ = [
    "Claimed",
    "PageFormat",
    "RunView",
    "StoreFormat",
    "append",
    "channel_widths",
    "claim",
    "decode_attention",
    "dequantize_pages",
    "due",
    "gather_requests",
    "gather_rows",
    "hadamard",
    "new_slots",
    "page_norms",
    "page_weights",
    "place",
    "quantize_pages",
    "restore",
    "run_pages",
    "seal_side",
    "smooth",
    "take_page",
    "take_token",
    "unsmooth",
    "use_interpreter",
    "use_reference",
]
