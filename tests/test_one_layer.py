"""The tables of one layer in the documents are those of the figures that are committed."""

from __future__ import annotations

import pytest

from evals import one_layer
from hfkvq.measure.bench import kernels

RECORD = kernels.load(one_layer.RESULTS / f"{one_layer.RUN}.json")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("one layer", [*one_layer.speedups(RECORD)]),
        ("one layer, others", [*one_layer.beside(RECORD)]),
    ],
)
def test_documents_have_the_tables(name, lines):
    page = (one_layer.DOCS / "results.md").read_text(encoding="utf-8")
    assert one_layer.replace(page, name, lines) == page, "run evals/one_layer.py"


def test_choosing_has_the_speedups():
    page = (one_layer.DOCS / "choosing.md").read_text(encoding="utf-8")
    assert one_layer.choosing(page, RECORD) == page, "run evals/one_layer.py"


def test_an_h100_is_in_if_it_was_measured():
    page, path = (one_layer.DOCS / "results.md").read_text(encoding="utf-8"), one_layer.RESULTS / "kernels-h100.json"
    lines = [*one_layer.speedups(kernels.load(path))] if path.exists() else ["An H100 was not measured."]
    assert one_layer.replace(page, "one layer, H100", lines) == page


def row(name, kind, us, nbytes, quantized=None):
    """One of 2 bytes a number at 1 x 1k is 4 MiB."""
    more = {} if quantized is None else {"quantized": quantized}
    shape = {"batch": 1, "context": 1024, "heads": 32, "kv_heads": 8, "head_dim": 128}
    return {**shape, "name": name, "kind": kind, "us": {"p50": us}, "bytes": nbytes + 4 * 32 * 128, **more}


def test_ours_are_held_against_others_with_as_many_bits():
    """The slowest of those with no more bits; a windows' share of bits does not count."""
    quarter = 1 << 20
    rows = [
        row("2-bit", "format", 2.0, quarter // 2),
        row("kitty-pro", "format", 4.0, int(0.637 * quarter)),
        row("saw-int4", "format", 5.0, quarter),
        row("int4", "format", 50.0, quarter // 8),
        row("official-kitty-pro", "peer", 10.0, int(0.625 * quarter), True),
        row("vllm-fa3", "peer", 7.0, 4 * quarter, False),
    ]
    record = {
        "rows": rows,
        "checks": {"peers": {"bitdecoding-2": {"x": "wrong: off by 1"}, "official-kivi-2": {"x": 0.1}}},
    }
    lines = [*one_layer.beside(record)]
    assert lines[2] == "| Kitty-Pro's own | 2.50 | 10.0 (2.5x) | `2-bit`, `kitty-pro` |"
    told = "Not timed: BitDecoding, 2 bits (wrong: off by 1); KIVI's own, 2 bits (not reached in time)."
    assert lines[3:] == ["", told]


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="without the markers of 'one layer'"):
        one_layer.replace("nothing", "one layer", [])
