"""Tables of docs/schemes.md, a row for each preset, and of docs/serving.md, a row for each field of a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.caches.schemes.base import Scheme, entry_of, get_scheme, presets
from hfkvq.measure.presets import bits_words, describe
from hfkvq.measure.tables import markdown_table


def _paper_words(item: dict[str, Any]) -> str:
    number = item["paper"].removeprefix("arXiv:")
    link = item["paper"] if number == item["paper"] else f"[{number}](https://arxiv.org/abs/{number})"
    return f"baseline in {link}" if item["group"] == "baseline" else link


def _markdown_rows() -> Iterator[tuple[str, ...]]:
    names: dict[Scheme, list[str]] = {}
    for name in presets():
        names.setdefault(get_scheme(name), []).append(name)
    for scheme, own in names.items():
        item = describe(own[0], scheme)
        if item["group"] == "eviction":
            continue
        known = ", ".join(f"`{name}`" for name in own) + (" (default)" if DEFAULT_SCHEME in own else "")
        # An alias says nothing of its own.
        purpose = next((text for name in own if (text := entry_of(name)[1].purpose)), item["purpose"])
        values = "as the keys" if item["values"] == item["keys"] else item["values"]
        bits = bits_words(item["long_context_bits"])
        yield known, purpose, bits, item["keys"], values, item["whole"], _paper_words(item)


def eviction_markdown() -> str:
    """Table of the schemes that only evict, whose pages are any other scheme's."""
    lines = ["| name | description | tokens kept | paper |", "|---|---|---|---|"]
    for name in presets():
        if entry_of(name)[1].group == "eviction":
            item = describe(name, get_scheme(name))
            lines.append(f"| `{name}` | {item['purpose']} | {item['stays']} | {_paper_words(item)} |")
    return "\n".join(lines)


def schemes_markdown() -> str:
    """The table of docs/schemes.md: a row for each scheme with its knobs; without those that only evict."""
    return markdown_table(
        ("name", "description", "bits", "keys", "values", "kept in 16 bits", "paper"), _markdown_rows()
    )


def request_fields() -> str:
    """The table of docs/serving.md: a row for each field."""
    # Serving needs a newer Transformers than the other tables.
    from hfkvq.serving.fields import ENDPOINTS, FIELDS

    lines = [f"| field | {' | '.join(ENDPOINTS)} |", "|---|---|---|---|"]
    for name, rules in FIELDS.items():
        cells = ("" if rule is None else rule.allowed for rule in rules)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)
