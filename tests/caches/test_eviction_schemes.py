"""Schemes that evict, without a cache: contract, evidence, and scores and budgets against those of kvpress.

The numbers in kvpress.json are what functions of kvpress (https://github.com/NVIDIA/kvpress, commit 8bb29b9c) gave for
the tensors made here.
"""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import pytest
import torch

from hfkvq import get_scheme
from hfkvq.caches.eviction.evictor import choose
from hfkvq.caches.schemes import H2O, TOVA, ExpectedAttention, PyramidKV, SnapKV, StreamingLLM
from hfkvq.caches.schemes.score_inputs import (
    evidence_of,
    expected_attention,
    keep_mask,
    prompt_candidates,
)
from hfkvq.caches.store import Padding
from hfkvq.kernels.arguments import AttentionArguments

HEADS, SHARE, TOKENS, DIM = 2, 2, 20, 8
KVPRESS = json.loads(Path(__file__).with_name("kvpress.json").read_text(encoding="utf-8"))
SIX = (SnapKV, H2O, StreamingLLM, TOVA, ExpectedAttention, PyramidKV)


def noise(seed, *shape):
    """Numbers between -2 and 2 that are the same everywhere."""
    x = torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) * 12.9898 + seed * 78.233) * 43758.5453
    return ((x - x.floor()) * 4 - 2).float().view(shape)


def rotation(positions):
    """Cosines and sines (n, D) of rotary positions of base 10000, halves side by side."""
    angle = positions[:, None] / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)
    angle = torch.cat([angle, angle], 1)
    return angle.cos(), angle.sin()


def rotated(x, positions):
    cos, sin = rotation(positions)
    return x * cos + torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1) * sin


# (B, Hq, T, D) before and after rotation, and keys and values (B, H, T, D).
PLAIN = noise(1, 1, TOKENS, HEADS * SHARE, DIM).transpose(1, 2)
QUERIES = rotated(PLAIN, torch.arange(TOKENS))
KEYS, VALUES = noise(2, 1, HEADS, TOKENS, DIM), noise(3, 1, HEADS, TOKENS, DIM)


def evidence(scheme, queries=QUERIES, keys=KEYS, values=VALUES, lead=None, **options):
    """All rows' evidence at once."""
    arguments = AttentionArguments(queries.shape[-1] ** -0.5, **options)
    candidates = prompt_candidates(keys, values, lead)
    ((_, found),) = evidence_of(candidates, scheme.evidence, scheme.queries, queries, arguments)
    return found


def columns(scores, room, first, newest):
    """Tokens that stay of rows that are alike."""
    length = torch.full((len(scores),), scores.shape[1])
    return [row.nonzero().flatten().tolist() for row in keep_mask(scores, length, length * 0 + room, first, newest)]


def assert_numbers(got, name):
    torch.testing.assert_close(got, torch.tensor(KVPRESS[name]), rtol=0, atol=2e-6)


class TestKvpress:
    """The same scores, tokens and budgets."""

    def test_snapkv(self):
        """The window's queries, averaged; pooled over what is before the window alone, zeros beyond; then the group."""
        scheme = SnapKV(window=4, kernel=3)
        scores = scheme.scores(evidence(scheme))
        assert_numbers(scores[:, :-4], "snapkv")
        assert (scores[:, -4:] == 0).all()

    def test_tova(self):
        """The last query, averaged over all heads of the layer."""
        scheme = TOVA()
        scores = scheme.scores(evidence(scheme)).mean(0)
        assert_numbers(scores[None, :-1], "tova")

    def test_h2o(self):
        """Its ObservedAttention is H2O's sum over queries, divided by how many of them see the token."""
        scores = H2O().scores(evidence(H2O()))
        seen_by = torch.arange(TOKENS, 0, -1)
        assert_numbers(scores / seen_by, "h2o")

    def test_expected_attention_of_given_statistics(self):
        """μ and Σ of all queries but the first two, before rotation, turned by the mean rotation of six positions.

        The covariance is divided by the number of queries; sinks are left out of the softmax.
        """
        queries = PLAIN[0, :, 2:]
        mean = queries.mean(1)
        covariance = (queries - mean[:, None]).mT @ (queries - mean[:, None]) / (TOKENS - 2)
        cos, sin = rotation(torch.arange(TOKENS, TOKENS + 6))
        half = torch.zeros(DIM, DIM)
        half[DIM // 2 :, : DIM // 2], half[: DIM // 2, DIM // 2 :] = torch.eye(DIM // 2), -torch.eye(DIM // 2)
        turn = (cos[:, None] * torch.eye(DIM) + sin[:, None] * half).mean(0)
        mean, covariance = mean @ turn.T, turn @ covariance @ turn.T
        found = evidence(ExpectedAttention(recent=TOKENS))
        expected = expected_attention(
            mean.view(HEADS, SHARE, DIM), covariance.view(HEADS, SHARE, DIM, DIM), found, first=2
        )
        scores = (expected.mean(1) + 0.01) * VALUES[0].norm(dim=-1)
        assert_numbers(scores[:, 2:], "expected of given statistics")

    @pytest.mark.parametrize(
        ("share", "kept"),
        [(0.5, [0, 1, 2, 3, *range(14, 20)]), (0.7, [0, 1, 2, 3, *range(10, 20)])],
    )
    def test_streaming_llm(self, share, kept):
        """Four sinks and the newest tokens, as many as int(T (1 - ratio))."""
        scheme = StreamingLLM(budget_share=share)
        room = int(scheme.budget(torch.tensor(TOKENS), 0, 4))
        scores = scheme.scores(evidence(scheme))
        assert columns(scores, room, scheme.first, scheme.window) == [kept] * HEADS

    @pytest.mark.parametrize(("tokens", "budget", "window", "beta", "budgets"), KVPRESS["pyramidkv"])
    def test_pyramidkv(self, tokens, budget, window, beta, budgets):
        """Steep where the prompt has room for it; even where the last layer's would not hold the window."""
        scheme = PyramidKV(budget_tokens=budget, window=window, beta=beta)
        found = [int(scheme.budget(torch.tensor(tokens), i, len(budgets))) for i in range(len(budgets))]
        assert found == budgets
        assert abs(sum(found) / len(found) - budget) < 1


class TestBudgets:
    def test_a_number_or_a_share(self):
        given = torch.tensor([10, 100, 3000])
        assert SnapKV().budget(given, 0, 2).tolist() == [1024] * 3
        assert SnapKV(budget_tokens=99).budget(given, 0, 2).tolist() == [99] * 3
        # What always stays does.
        assert SnapKV(budget_share=0.25, window=16).budget(given, 1, 2).tolist() == [16, 25, 750]

    def test_when_a_step_is_trimmed(self):
        """A row may have so many tokens more than its budget; the next trim is as far away as it is below that."""
        given, held = torch.tensor([300, 300, 40]), torch.tensor([50, 57, 40])
        scheme = TOVA(budget_tokens=50, trim_every=8)
        assert scheme.room(given, held, 0, 2).tolist() == [50, 50, 40]
        assert scheme.room(given, held, 0, 2, hold=64).tolist() == [50, 57, 40]
        assert scheme.due_in(given, held, 0, 2).tolist() == [8, 1, 18]
        assert SnapKV().due_in(given, held, 0, 2) is None
        share = StreamingLLM(budget_share=0.5, trim_every=1)
        assert share.due_in(torch.tensor([100, 200]), torch.tensor([50, 100]), 0, 2).tolist() == [1, 1]
        # As soon as there is one token more than the budget.
        assert get_scheme("arkv").due_in(torch.tensor(1024), torch.tensor(1024), 0, 2) == 1


class TestEvidence:
    def test_of_a_padded_row_is_that_of_the_row_alone(self):
        """Ranks count from a row's first token, and padding neither pays nor is paid."""
        kinds = frozenset({"attention", "received", "queries", "keys", "values"})
        queries, keys, values = (torch.cat([x, x.flip(2)]) for x in (QUERIES, KEYS, VALUES))
        lead = torch.tensor([0, 7])
        whole = prompt_candidates(keys, values, lead), prompt_candidates(keys[1:, :, 7:], values[1:, :, 7:])
        ((_, found),) = evidence_of(whole[0], kinds, 5, queries, AttentionArguments(0.5))
        ((_, alone),) = evidence_of(whole[1], kinds, 5, queries[1:, :, 7:], AttentionArguments(0.5))
        assert found.length.tolist() == [20, 20, 13, 13]
        for name in ("attention", "received", "keys", "values"):
            mine, its = found.of(name), alone.of(name)
            axis = 1 if name in ("keys", "values") else 2
            torch.testing.assert_close(mine[2:].narrow(axis, 0, 13), its)
            if axis == 2:
                assert (mine[2:, :, 13:] == 0).all()
        assert torch.equal(found.queries[2:], alone.queries)
        assert found.real.all()
        scheme = SnapKV(window=3)
        torch.testing.assert_close(scheme.scores(found)[2:, :13], scheme.scores(alone))
        assert found.past(3).sum(1).tolist() == [17, 17, 10, 10]

    def test_softcap_and_sinks(self):
        """As attention has them: logits are capped before the mask, and a sink takes its part."""
        sinks = torch.tensor([0.1, -0.3, 0.7, 0.2])
        found = evidence(H2O(), softcap=0.9, sinks=sinks)
        logits = torch.tanh(QUERIES @ KEYS.repeat_interleave(SHARE, 1).mT / math.sqrt(DIM) / 0.9) * 0.9
        logits = logits.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
        logits = torch.cat([logits, sinks[None, :, None, None].expand(1, -1, TOKENS, 1)], -1)
        expected = logits.softmax(-1)[0, :, :, :-1].sum(1)
        torch.testing.assert_close(found.received.flatten(0, 1), expected)

    def test_what_was_not_asked_for_is_missing(self):
        with pytest.raises(ValueError, match="evidence: 'keys' is missing"):
            evidence(SnapKV()).of("keys")


def test_prompts_within_their_budget_are_left_alone():
    """Nothing is computed for them; nor where padding stands among tokens, which takes the general way."""
    given = 0, 2, QUERIES, KEYS, VALUES, AttentionArguments(1.0)
    assert choose(SnapKV(budget_tokens=20, window=4), *given) is None
    holes = Padding(torch.zeros(1, dtype=torch.int32), frozenset({0}), torch.arange(TOKENS)[None])
    assert choose(SnapKV(budget_tokens=9, window=4), *given, padding=holes) is None


def test_what_is_held_for_rollback_stays():
    choice = choose(SnapKV(budget_tokens=9, window=4), 0, 2, QUERIES, KEYS, VALUES, AttentionArguments(1.0), hold=12)
    assert torch.equal(choice.keys, KEYS[:, :, 8:])


class TestKeeping:
    def test_best_first_and_newest(self):
        scores = torch.tensor([[9.0, 1, 5, 5, 7, 0, 0, 0], [0.0, 1, 2, 3, 4, 9, 9, 9]])
        assert columns(scores, 5, 1, 2) == [[0, 2, 4, 6, 7], [0, 4, 5, 6, 7]]

    def test_rows_of_many_lengths(self):
        """A row's tokens depend on it alone, and a row within its budget keeps all."""
        scores, lengths = noise(5, 4, 30), torch.tensor([30, 12, 25, 4])
        rooms = torch.tensor([9, 12, 20, 9])
        mask = keep_mask(scores, lengths, rooms, 2, 3)
        for i, (length, room) in enumerate(zip(lengths.tolist(), rooms.tolist(), strict=True)):
            assert mask[i].nonzero().flatten().tolist() == columns(scores[i : i + 1, :length], room, 2, 3)[0]

    def test_what_always_stays_may_be_more_than_the_budget(self):
        mask = keep_mask(noise(6, 1, 10), torch.tensor([10]), torch.tensor([2]), 2, 3)
        assert mask[0].nonzero().flatten().tolist() == [0, 1, 7, 8, 9]


class TestContract:
    @pytest.mark.parametrize("cls", SIX, ids=lambda cls: cls.name)
    def test_a_scheme_is_its_pages_and_more(self, cls):
        """Bytes are the pages': layout, raised channels, widths of tokens, and what sealing may do at once."""
        for pages in ("full", "kitty-pro", "mixkvq", "saw-int4", "kvarn"):
            scheme, held = get_scheme(f"{cls.name}+{pages}"), get_scheme(pages)
            assert type(scheme) is cls
            assert scheme == get_scheme(cls.name, pages=pages)
            assert scheme.layout(128, 64) == held.layout(128, 64)
            assert (scheme.channel_rule, scheme.step_rule(128)) == (held.channel_rule, held.step_rule(128))
            assert (scheme.needs, scheme.reads_tokens) == (held.needs, held.reads_tokens)
            assert pickle.loads(pickle.dumps(scheme)) == scheme == get_scheme(scheme.to_dict())
            assert hash(scheme) == hash(get_scheme(scheme.to_dict()))
