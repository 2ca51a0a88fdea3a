"""Other packages' kernels: what is put into their layouts, what is checked before they are timed, and what is told."""

from __future__ import annotations

import sys

import pytest
import torch

from hfkvq.measure.bench import report
from hfkvq.measure.bench.cases import Shape
from hfkvq.measure.bench.peers import PEERS, choose, measure, present
from hfkvq.measure.bench.peers.peer import paged
from hfkvq.measure.bench.rows import add_speedups, row_of
from hfkvq.measure.bench.timing import Timing

from . import peer_fakes as fakes

SHAPE = Shape(2, 512, 4, 2, 128)
DATA = SHAPE.data(torch.device("cpu"))
ROOTS = ("vllm", "flashinfer", "kitty", "kivi_gemv", "bit_decode_cuda")


@pytest.fixture
def absent(monkeypatch):
    for name in [x for x in sys.modules if x.partition(".")[0] in ROOTS]:
        monkeypatch.delitem(sys.modules, name)
    for root in ROOTS:
        monkeypatch.setitem(sys.modules, root, None)


# Names.


def test_all_none_and_names():
    assert choose("all") == tuple(PEERS)
    assert choose("none") == ()
    assert choose("official-kitty, vllm-fa3,vllm-fa3") == ("official-kitty", "vllm-fa3")


@pytest.mark.parametrize(
    ("text", "words"), [("vllm-fa4", "did you mean 'vllm-fa"), ("all,vllm-fa3", "got 'all'"), ("", "got none")]
)
def test_unknown_names_are_told(text, words):
    with pytest.raises(ValueError, match="peers: ") as told:
        choose(text)
    assert words in str(told.value)


def test_a_package_that_is_not_installed_has_one_line(absent):
    lines: list[str] = []
    assert present(PEERS, lines.append) == []
    assert lines[0] == "vllm-fa3, vllm-fa2, vllm-fa3-fp8: vllm is not installed; pip install vllm"
    assert all("is not installed; " in line for line in lines)
    assert [name for line in lines for name in line.partition(":")[0].split(", ") if name not in PEERS] == []
    assert sum(line.partition(":")[0].count(", ") + 1 for line in lines) == len(PEERS)
    # TurboQuant needs a newer vllm than the others.
    assert len(lines) == len(ROOTS) + 1


def test_what_is_installed_but_broken_says_why(absent, monkeypatch):
    fakes.flash(monkeypatch, FA3_AVAILABLE=False, FA3_UNAVAILABLE_REASON="undefined symbol: x")
    lines: list[str] = []
    assert [peer.name for peer in present(["vllm-fa2", "vllm-fa3"], lines.append)] == ["vllm-fa2"]
    assert lines == ["vllm-fa3: FlashAttention 3 cannot be loaded: undefined symbol: x; pip install vllm"]
    fakes.install(monkeypatch, "flashinfer.decode")
    assert present(["flashinfer"], lines.append) == []
    assert "flashinfer.decode has no BatchDecodeWithPagedKVCacheWrapper" in lines[-1]


# Layouts.


@pytest.mark.parametrize("heads_first", [False, True])
def test_pages_hold_tokens_in_order_and_zeros_behind(heads_first):
    x = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)
    pages = paged(x, 2, heads_first)
    tokens = pages.transpose(1, 2) if heads_first else pages
    assert torch.equal(tokens.reshape(2, 6, 3, 4)[:, :5].transpose(1, 2), x)
    assert not tokens.reshape(2, 6, 3, 4)[:, 5].any()


PACKAGES = {
    "vllm-fa3": fakes.flash,
    "vllm-fa2": fakes.flash,
    "vllm-fa3-fp8": fakes.flash,
    "flashinfer": fakes.flashinfer,
    "flashinfer-fp8": fakes.flashinfer,
    "turboquant-k8v4": fakes.turboquant,
    "turboquant-4": fakes.turboquant,
    "turboquant-3": fakes.turboquant,
    "bitdecoding-4": fakes.bitdecoding,
    "bitdecoding-2": fakes.bitdecoding,
    "official-kivi-4": fakes.kivi,
    "official-kivi-2": fakes.kivi,
    "official-kitty-pro": fakes.kitty,
    "official-kitty": fakes.kitty,
}
BITS = {
    "turboquant-k8v4": (128 + 68) / 32,
    "turboquant-4": (66 + 68) / 32,
    "turboquant-3": (50 + 52) / 32,
    "bitdecoding-4": 4.25,
    "bitdecoding-2": 2.25,
}
"""Total bits a value where nothing stays whole."""


def test_every_peer_is_tested():
    assert set(PACKAGES) == set(PEERS)


@pytest.mark.parametrize("name", list(PEERS))
def test_each_layout_is_what_its_kernel_reads(name, absent, monkeypatch):
    PACKAGES[name](monkeypatch)
    (peer,) = present([name], pytest.fail)
    for variant in peer.variants(SHAPE):
        error = measure.check_variant(peer, SHAPE, DATA, variant)
        assert isinstance(error, float), error
    prepared = peer.prepare(SHAPE, *DATA, peer.variants(SHAPE)[0])
    exact = prepared.exact()
    assert exact[0].shape == exact[1].shape == DATA[1].shape
    # Rounded, but to no other tokens or channels.
    widest = {16: 0.0, 8: 0.03, 4: 0.13, 3: 0.35, 2: 0.6}
    for found, given, bits in zip(exact, DATA[1:], peer.code_bits, strict=True):
        assert measure.error_of(found, given) <= widest[bits]
    total = 8 * prepared.read / (2 * DATA[1].numel())
    assert total >= sum(peer.code_bits) / 2
    assert total == pytest.approx(BITS.get(name, total))


@pytest.mark.parametrize(
    ("name", "context"),
    [("turboquant-4", 500), ("bitdecoding-4", 384), ("official-kivi-2", 500), ("official-kitty", 100)],
)
def test_contexts_that_a_peer_does_not_hold(name, context, absent, monkeypatch):
    PACKAGES[name](monkeypatch)
    (peer,) = present([name], pytest.fail)
    shape = Shape(1, context, 4, 2, 128)
    with pytest.raises(ValueError, match=f"context: got {context}, allowed for {name}"):
        peer.prepare(shape, *shape.data(torch.device("cpu")), peer.variants(shape)[0])


# Checks and times.


def test_several_queries_are_the_newest(absent, monkeypatch):
    """Of steps, and of prompts behind their context; other packages are asked for one."""
    fakes.flash(monkeypatch)
    fakes.flashinfer(monkeypatch)
    monkeypatch.setattr(measure, "CONTEXT", 256)
    peers = present(["vllm-fa3", "vllm-fa2", "flashinfer"], pytest.fail)
    shapes = [Shape(1, 512, 4, 2, 128, queries=queries) for queries in (4, 24)]
    assert [peer.name for peer in measure.taking(peers, shapes[0])] == ["vllm-fa3", "vllm-fa2"]
    checked = measure.check_peers(peers, shapes, torch.device("cpu"))
    assert set(checked) == {"vllm-fa3", "vllm-fa2"}
    assert all(isinstance(error, float) and error < 0.01 for own in checked.values() for error in own.values())


def test_a_wrong_kernel_is_not_timed(absent, monkeypatch):
    fakes.flash(monkeypatch, flash_attn_varlen_func=lambda q, k, v, **o: 1.05 * fakes.varlen(q, k, v, **o))
    monkeypatch.setattr(measure, "time_calls", lambda *rest: pytest.fail("it was timed"))
    peers = present(["vllm-fa3", "vllm-fa2"], pytest.fail)
    monkeypatch.setattr(measure, "CONTEXT", 512)
    checked = measure.check_peers(peers, [SHAPE], torch.device("cpu"))
    assert all(words.startswith("wrong: off by 0.05") for own in checked.values() for words in own.values())
    row = measure.measure_peer(peers[0], SHAPE, DATA, 30, 4e12, checked["vllm-fa3"])
    assert row["error"].startswith("wrong: off by 0.05")


def test_a_kernel_that_raises_is_reported(absent, monkeypatch):
    def broken(*rest, **options):
        raise RuntimeError("no kernel image is available\nmore")

    fakes.flash(monkeypatch, flash_attn_varlen_func=broken)
    (peer,) = present(["vllm-fa2"], pytest.fail)
    found = measure.check_variant(peer, SHAPE, DATA, "pages of 128")
    assert found == "RuntimeError: no kernel image is available"
    row = measure.measure_peer(peer, SHAPE, DATA, 30, None, {"pages of 128": found})
    assert row["error"] == found


@pytest.fixture
def invented(monkeypatch):
    """Times on the CPU: a variant's is the number of its calls so far."""
    seen: list[int] = []

    def timed(calls, replays):
        for call in calls:
            call()
        seen.append(replays)
        us = {measure.SEARCH_REPLAYS: [9.0, 4.0, 6.0][(len(seen) - 1) % 3]}.get(replays, 5.0)
        return Timing(us, us, us, len(calls), len(calls), replays)

    monkeypatch.setattr(measure, "time_calls", timed)
    monkeypatch.setattr(measure, "time_launches", timed)
    monkeypatch.setattr(measure, "cache_size", lambda device: 10**6)
    return seen


def test_the_fastest_variant_is_reported(absent, monkeypatch, invented):
    fakes.flashinfer(monkeypatch)
    (peer,) = present(["flashinfer"], pytest.fail)
    checked = dict.fromkeys(peer.variants(SHAPE), 0.001)
    row = measure.measure_peer(peer, SHAPE, DATA, 30, 4e12, checked)
    assert invented == [*[measure.SEARCH_REPLAYS] * 3, 30]
    assert (row["name"], row["kind"], row["remark"], row["us"]["p50"]) == ("flashinfer", "peer", "tensor cores", 5.0)
    assert row["bytes"] == DATA[1].nbytes + DATA[2].nbytes + 2 * DATA[0].nbytes
    assert (row["bits"], row["quantized"], row["graph"]) == ({"code": 16, "total": 16}, False, True)
    assert row["copies"] > 1


def test_what_cannot_be_captured_is_marked(absent, monkeypatch, invented):
    fakes.kivi(monkeypatch)
    (peer,) = present(["official-kivi-2"], pytest.fail)
    row = measure.measure_peer(peer, SHAPE, DATA, 30, 4e12, dict.fromkeys(peer.variants(SHAPE), 0.001))
    assert not row["graph"]
    assert measure.UNGRAPHED in row["remark"]
    assert row["quantized"]


def lines(**times: float) -> list[dict]:
    """Invented lines: kitty is a format, the rest are peers or baselines."""
    rows = []
    for name, us in times.items():
        kind = {"kitty": "format", "plain": "baseline"}.get(name, "peer")
        row = row_of(SHAPE, name, kind, Timing(us, us, us, 1, 1, 1), 2_000_000, 4e12)
        rows.append(row | ({"quantized": name == "quantized"} if kind == "peer" else {}))
    add_speedups(rows)
    return rows


def test_formats_are_compared_with_the_fastest_unquantized_kernel_of_all():
    rows = {row["name"]: row for row in lines(plain=10.0, peer=8.0, quantized=1.0, kitty=2.0)}
    assert rows["kitty"]["against"] == "peer"
    assert [rows[name]["speedup"] for name in ("plain", "peer", "quantized", "kitty")] == [0.8, 1.0, 8.0, 4.0]


def test_the_picture_has_peers_and_the_memory_limit(monkeypatch, tmp_path):
    drawn = {}
    monkeypatch.setattr(report, "save_chart", lambda *given: drawn.update(given=given) or True)
    rows = lines(plain=10.0, peer=8.0, quantized=1.0, kitty=2.0)
    assert report.save_plot({"rows": rows, "gpu": "Synthetic 9000"}, tmp_path / "a.png")
    names, (column,), title, _, grey = drawn["given"]
    assert names == ["plain", "peer", "quantized", "kitty"]
    assert set(grey) == {"plain", "peer", "quantized"}
    # 2 MB at 4 TB/s take 0.5 us, a sixteenth of the fastest unquantized kernel's time.
    assert (column.marks["kitty"].low, column.marks["kitty"].high) == pytest.approx((4.0, 16.0))
    assert "bandwidth of a copy" in title
