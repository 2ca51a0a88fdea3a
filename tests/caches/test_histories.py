"""Random histories: whatever is done to caches, in whatever order, they hold what plain tensors hold."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hfkvq import MixedKVCache, Scheme, get_scheme, list_schemes
from hfkvq.caches.schemes.arkv import Arkv
from hfkvq.caches.schemes.base import Layout, SideLayout, knob
from hfkvq.kernels import PageFormat
from tests.caches.driver import assert_same_bits, cases, evicting, same_bits, small
from tests.caches.plain import DIM, HEADS, KINDS, New, Subject
from tests.caches.test_faults import FailAt, Fault

MOST_ROWS, MOST_TOKENS = 5, 420

HISTORIES, SEED = 10_000, 21


@dataclass(frozen=True, kw_only=True)
class LongKeys(Scheme):
    """Tokens with a long key get 4 bits, the others 2; several runs, without an observer."""

    length: float = knob(11.0, low=0.0)

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        runs = [tuple(PageFormat(bits, "token", dim, 16) for bits in (2, 4)) for dim in (key_dim, value_dim)]
        return Layout(*(SideLayout(formats, local=8) for formats in runs))

    def token_bits(self, keys, values, position, tags=None):
        return torch.where(keys.float().norm(dim=-1).amax(1) > self.length, 4, 2).to(torch.uint8)


def schemes() -> dict[str, Scheme]:
    """Presets with small pages and as published, corners of windows, and what evicts over pages of several kinds."""
    published = {f"{name} as published": get_scheme(name) for name in list_schemes()}
    for name, scheme in published.items():
        if scheme.evicts:
            published[name] = get_scheme(scheme, budget_tokens=160, window=min(scheme.window, 64))
    keeping = {name: scheme for name, scheme in cases().items() if not scheme.evicts}
    tiered = {name: small(name, budget_tokens=40) for name, x in list_schemes().items() if isinstance(x, Arkv)}
    found = keeping | evicting() | tiered | published | {"long-keys": LongKeys()}
    return {name: scheme for name, scheme in found.items() if not scheme.latents}


SCHEMES = schemes()

MODES = {"grad": contextlib.nullcontext, "no grad": torch.no_grad, "inference": torch.inference_mode}

COPIES = {
    "deepcopy": lambda subject: copy.deepcopy(subject.cache),
    "file": lambda subject: _through_file(subject),
}

modes = st.sampled_from(sorted(MODES))
seeds = st.integers(0, 2**16)


def _through_file(subject):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        if not all(scheme.name for scheme in subject.cache.preset.schemes):
            with pytest.raises(ValueError, match="scheme: LongKeys has no name"):
                subject.cache.save(path)
            return copy.deepcopy(subject.cache)
        subject.cache.save(path)
        return MixedKVCache.load(path, subject.config, **subject.options)


class Histories(RuleBasedStateMachine):
    """Two caches of unlike kinds through the same history, each beside its plain tensors."""

    @initialize(
        name=st.sampled_from(sorted(SCHEMES)),
        other=st.none() | st.sampled_from(sorted(SCHEMES)),
        kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=2, unique=True),
        capacity=st.integers(40, MOST_TOKENS),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    )
    def begin(self, name, other, kinds, capacity, dtype):
        second = SCHEMES[name if other is None else other]
        self.schemes = (SCHEMES[name], second)
        self.plainly = any("query" in scheme.needs for scheme in self.schemes)
        self.evicts = any(scheme.evicts for scheme in self.schemes)
        self.dtype, self.frozen = dtype, []
        self.subjects = [Subject(kind, self.schemes, capacity) for kind in kinds]

    @property
    def first(self):
        return self.subjects[0]

    @property
    def length(self):
        return self.first.plain.length

    @property
    def rows(self):
        return self.first.plain.rows

    # Tokens come.

    def new(self, number, rows, tokens, pads=(), holes=()):
        valid = torch.ones(rows, tokens, dtype=torch.bool)
        for row, pad in enumerate(pads):
            if row < rows:
                valid[row, : min(pad, tokens)] = False
        for row, first, count in holes:
            if row < rows and tokens > 1:
                valid[row, first : first + count] = False
        # A column that nobody sees is no column.
        valid[0] |= ~valid.any(0)
        # No two tokens of a history are alike.
        return New.random(number * 1000 + self.length, rows, tokens, self.dtype, self.plainly, valid)

    def feed(self, new, mode, watch=False, seen=True):
        """All subjects, or none if it is too much for any."""
        full = [x for x in self.subjects if x.capacity is not None and self.length + new.tokens > x.capacity]
        for subject in full:
            before = subject.bits()
            with MODES[mode](), pytest.raises(ValueError, match="max_cache_len"):
                subject.forward(new)
            self.unchanged(subject, before)
        if full:
            return False
        for subject in self.subjects:
            with MODES[mode]():
                subject.forward(new, watch, seen)
        return True

    def unchanged(self, subject, before):
        for a, b in zip(subject.bits(), before, strict=True):
            for x, y in zip(a, b, strict=True):
                assert_same_bits(x, y)

    @rule(
        number=seeds,
        rows=st.integers(1, 3),
        tokens=st.integers(0, 40) | st.integers(0, 300),
        pads=st.just(()) | st.lists(st.integers(0, 60), max_size=4),
        holes=st.just(()) | st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 20)), max_size=2),
        mode=modes,
        watch=st.booleans(),
        seen=st.sampled_from([True, True, True, False]),
    )
    def prompt(self, number, rows, tokens, pads, holes, mode, watch, seen):
        """A prompt, a chunk or a turn."""
        tokens = min(tokens, MOST_TOKENS - self.length)
        if tokens < 1:
            return
        rows = self.rows or rows
        fresh = any(lead == self.length for lead in self.first.plain.lead) or not self.length
        pads = pads if fresh else ()
        if self.length:
            # Those that have begun have no leading padding.
            pads = [pad if i < rows and self.first.plain.lead[i] == self.length else 0 for i, pad in enumerate(pads)]
        new = self.new(number, rows, tokens, pads, holes)
        hidden = (
            self.evicts
            or self.plainly
            or not bool(new.valid.all())
            or bool(self.length and not self.first.plain.valid.all())
        )
        self.feed(new, mode, watch, seen or hidden)

    @precondition(lambda self: self.length)
    @rule(
        number=seeds,
        count=st.integers(1, 24),
        mode=modes,
        watch=st.booleans(),
        tokens=st.sampled_from([1, 1, 1, 2, 5, 16]),
    )
    def steps(self, number, count, tokens, mode, watch):
        """Several steps, the last of which is looked at."""
        for i in range(count):
            if self.length + tokens > MOST_TOKENS:
                return
            new = self.new(number, self.rows, tokens)
            if not self.feed(new, mode, watch and i == count - 1):
                return

    # Changes.

    def change(self, act, on_plain, mode="no grad", refuses=NotImplementedError):
        """All subjects; what one refuses, all refuse, and nothing is changed."""
        refused = []
        for subject in self.subjects:
            before = subject.bits()
            try:
                with MODES[mode]():
                    act(subject.cache)
            except refuses as error:
                refused.append(str(error))
                self.unchanged(subject, before)
            else:
                on_plain(subject)
        if refused and any(x.exact for x in self.subjects):
            assert len(refused) == len(self.subjects) or not all(x.exact for x in self.subjects), refused

    @precondition(lambda self: self.length)
    @rule(tokens=st.integers(0, 20) | st.integers(0, 300), mode=modes)
    def crop(self, tokens, mode):
        tokens = min(tokens, self.length)

        def on_plain(subject):
            subject.plain.crop(tokens)
            subject.adopt()

        self.change(lambda cache: cache.crop(-tokens), on_plain, mode)

    @precondition(lambda self: self.length)
    @rule(rows=st.lists(st.integers(0, 7), min_size=1, max_size=MOST_ROWS), mode=modes)
    def reorder(self, rows, mode):
        rows = torch.tensor(rows) % self.rows
        self.change(lambda cache: cache.reorder_cache(rows), lambda x: x.plain.take_rows(rows), mode)

    @precondition(lambda self: self.length and self.rows * 2 <= MOST_ROWS)
    @rule(mode=modes)
    def repeat(self, mode):
        rows = torch.arange(self.rows).repeat_interleave(2)
        self.change(lambda cache: cache.batch_repeat_interleave(2), lambda x: x.plain.take_rows(rows), mode)

    @precondition(lambda self: self.length)
    @rule(rows=st.lists(st.integers(-8, 7), min_size=1, max_size=MOST_ROWS), as_mask=st.booleans(), mode=modes)
    def select(self, rows, as_mask, mode):
        rows = torch.tensor(rows) % self.rows
        if as_mask:
            mask = torch.zeros(self.rows, dtype=torch.bool)
            mask[rows] = True
            self.change(
                lambda cache: cache.batch_select_indices(mask), lambda x: x.plain.take_rows(mask.nonzero()[:, 0]), mode
            )
            return
        # Some from the end.
        given = rows - self.rows * (rows % 2)
        self.change(lambda cache: cache.batch_select_indices(given), lambda x: x.plain.take_rows(rows), mode)

    @precondition(lambda self: self.length)
    @rule(mode=modes)
    def reset(self, mode):
        def on_plain(subject):
            subject.plain.reset()
            subject.exact, subject.cropped, subject.waits = True, bool(subject.plain.hold), False

        self.change(lambda cache: cache.reset(), on_plain, mode)

    @precondition(lambda self: not any(x.waits for x in self.subjects))
    @rule()
    def past(self):
        """As assisted decoding begins."""
        for subject in self.subjects:
            subject.cache.activate_past_recording()
            subject.plain.hold, subject.cropped = 64, True

    @rule(which=st.integers(0, 1), how=st.sampled_from(sorted(COPIES)), mode=modes)
    def copy(self, which, how, mode):
        """History goes on with a copy; what it was taken from stays what it was."""
        subject = self.subjects[which]
        old, before = subject.cache, subject.bits()
        with MODES[mode]():
            subject.cache = COPIES[how](subject)
        self.unchanged(subject, before)
        if len(self.frozen) < 2:
            self.frozen.append((old, subject, before))

    # What fails.

    @rule(which=st.integers(0, 1), mode=modes)
    def bad_calls(self, which, mode):
        """Refused, and nothing is changed."""
        subject = self.subjects[which]
        cache, before, rows = subject.cache, subject.bits(), max(self.rows, 1)
        x = torch.zeros(rows, HEADS, 2, DIM, dtype=self.dtype)
        calls = [
            lambda: cache.update(x, x[:, :1], 0),
            lambda: cache.update(x[0], x[0], 0),
            lambda: cache.update(x.long(), x.long(), 0),
            lambda: cache.update(x, x.double(), 0),
            lambda: cache.update(x[:0], x[:0], 0),
            lambda: cache.crop(3),
            lambda: cache.crop(-1.5),
            lambda: cache.reorder_cache(torch.tensor([0.5])),
            lambda: cache.batch_repeat_interleave(0),
        ]
        if self.length:
            calls += [
                lambda: cache.update(torch.cat([x, x]), torch.cat([x, x]), 0),
                lambda: cache.update(x.double(), x.double(), 0),
                lambda: cache.crop(-self.length - 1),
                lambda: cache.reorder_cache(torch.tensor([rows])),
                lambda: cache.reorder_cache(torch.tensor([], dtype=torch.long)),
                lambda: cache.batch_select_indices(torch.tensor([rows])),
                lambda: cache.batch_select_indices(torch.zeros(rows, dtype=torch.bool)),
            ]
        for call in calls:
            with MODES[mode](), pytest.raises(ValueError, match=r"(G|g)ot|keys are|max_cache_len"):
                call()
        self.unchanged(subject, before)

    @precondition(lambda self: self.length)
    @rule(number=seeds, which=st.integers(0, 1), fails=st.integers(1, 90), tokens=st.sampled_from([1, 1, 3, 16, 40]))
    def interrupted(self, number, which, fails, tokens):
        """A forward stops anywhere: layers have all of it or nothing, and the cache can be mended."""
        if self.length + tokens > MOST_TOKENS:
            return
        new = self.new(number, self.rows, tokens)
        subject, others = self.subjects[which], [self.subjects[1 - which]]
        if any(x.capacity is not None and self.length + tokens > x.capacity for x in self.subjects):
            return
        before, plain = self.length, subject.plain.copy()
        for other in others:
            other.forward(new)
        try:
            with FailAt(fails):
                subject.forward(new)
        except (Fault, torch.OutOfMemoryError):
            pass
        else:
            return
        cache = subject.cache
        cache._catch_up()
        seen = {layer.seen for layer in subject.layers}
        assert seen <= {before, before + tokens}
        if len(seen) > 1:
            with pytest.raises((RuntimeError, ValueError), match=r"has seen .* Call reset\(\)|max_cache_len"):
                subject.forward(new)
            try:
                cache.level()
            except NotImplementedError:
                note("evicted: reset")
                for each in self.subjects:
                    each.cache.reset()
                    each.plain.reset()
                    each.exact = True
                return
            subject.plain = plain
            subject.exact = False
            for layer, ahead in enumerate(subject.layers):
                # Pages that these tokens had filled were reopened.
                assert ahead.seen == before, layer
            self.level_plain(subject, tokens)
        if cache.get_seq_length() == before:
            subject.plain = plain if len(seen) == 1 else subject.plain
            subject.forward(new)
        else:
            subject.plain = plain
            subject.plain.append(new, [layer.smoothing for layer in subject.layers])
            # It stopped between the last layer's update and its attention, perhaps, or before what is due was sealed.
            subject.waits = any(layer.staged is not None or layer.uncommitted for layer in subject.layers)
        if self.evicts or self.plainly:
            subject.exact = False

    def level_plain(self, subject, tokens):
        """Layers that were ahead have been cropped."""
        subject.adopt()
        for i, layer in enumerate(subject.layers):
            if not subject.plain.schemes[i].evicts:
                runs = layer.store.counters[2:]
                for row, sealed in enumerate(subject.plain.sealed[i]):
                    own = [int(runs[side::2, row].sum()) for side in (0, 1)]
                    # These tokens may have pushed older ones out of the window.
                    sealed[:] = own
        subject.plain.seal()

    @precondition(lambda self: self.length)
    @rule(
        which=st.integers(0, 1),
        fails=st.integers(1, 60),
        verb=st.sampled_from(["crop", "reorder", "repeat", "select", "reset"]),
        amount=st.integers(0, 60),
    )
    def interrupted_change(self, which, fails, verb, amount):
        """It has happened in all layers, or in none."""
        rows = torch.arange(self.rows).flip(0)
        if verb == "repeat" and self.rows * 2 > MOST_ROWS:
            return
        amount = min(amount, self.length)
        act, on_plain = {
            "crop": (lambda cache: cache.crop(-amount), lambda x: (x.plain.crop(amount), x.adopt())),
            "reorder": (lambda cache: cache.reorder_cache(rows), lambda x: x.plain.take_rows(rows)),
            "repeat": (
                lambda cache: cache.batch_repeat_interleave(2),
                lambda x: x.plain.take_rows(rows.flip(0).repeat_interleave(2)),
            ),
            "select": (lambda cache: cache.batch_select_indices(rows[:1]), lambda x: x.plain.take_rows(rows[:1])),
            "reset": (lambda cache: cache.reset(), lambda x: x.plain.reset()),
        }[verb]
        subject = self.subjects[which]
        before, length, done = subject.bits(), self.length, copy.deepcopy(subject.cache)
        try:
            act(done)
        except NotImplementedError:
            return self.change(act, on_plain)
        after = self.bits_of(subject, done)
        failed = False
        try:
            with FailAt(fails):
                act(subject.cache)
        except (Fault, torch.OutOfMemoryError, ValueError) as error:
            # A fault while rows are read is told as rows that cannot be read.
            if isinstance(error, ValueError) and not isinstance(error.__context__, Fault):
                raise
            failed = True
        left = subject.bits()
        # Rows of nothing but padding look alike at any length.
        undone = subject.cache.get_seq_length() == length if verb == "crop" else not same_bits(left, after)
        if failed and same_bits(left, before) and undone:
            act(subject.cache)
        elif failed and verb == "reset":
            # As often as one likes.
            act(subject.cache)
        else:
            assert same_bits(left, after), "neither before nor after"
        on_plain(subject)
        other = self.subjects[1 - which]
        act(other.cache)
        on_plain(other)

    @staticmethod
    def bits_of(subject, cache):
        twin = copy.copy(subject)
        twin.cache = cache
        return twin.bits()

    # What must be.

    @rule()
    def rebuild(self):
        for subject in self.subjects:
            if subject.exact:
                subject.check_rebuilt()

    @invariant()
    def whole(self):
        if not hasattr(self, "subjects"):
            return
        for subject in self.subjects:
            subject.cache.integrity_check()
            subject.check()
        a, b = self.subjects
        assert a.plain.lead == b.plain.lead
        if a.exact and b.exact:
            for i, (x, y) in enumerate(zip(a.bits(), b.bits(), strict=True)):
                for row, (p, q) in enumerate(zip(x, y, strict=True)):
                    try:
                        assert_same_bits(p, q)
                    except AssertionError as error:
                        raise AssertionError(f"layer {i}, row {row} of {a.kind} and {b.kind}: {error}") from error

    def teardown(self):
        for cache, subject, before in getattr(self, "frozen", []):
            assert same_bits(self.bits_of(subject, cache), before), "a copy's history is its own"


def options(count, **more):
    return settings(
        max_examples=count,
        stateful_step_count=12,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=[Phase.generate],
        **more,
    )


@pytest.mark.parametrize("start", range(5))
def test_short_histories(start):
    """The same ones in every run."""
    run_state_machine_as_test(seed(start)(Histories), settings=options(8))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_histories():
    """HFKVQ_HISTORIES of them, from HFKVQ_SEED."""
    count, start = (
        int(os.environ.get(f"HFKVQ_{name}", value)) for name, value in (("HISTORIES", HISTORIES), ("SEED", SEED))
    )
    print(f"{count} histories from seed {start}")
    run_state_machine_as_test(seed(start)(Histories), settings=options(count))
