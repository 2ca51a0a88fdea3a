"""Searches with an objective whose answers are known, their storage, what is picked, and Ctrl-C."""

from __future__ import annotations

import math

import pytest

from hfkvq import get_scheme
from hfkvq.caches import get_preset
from hfkvq.tuning.objectives import Score
from hfkvq.tuning.study import hidden, load_study, open_storage, published, space_of, tune

SPACE = {"tau_bf16": (0.1, 2.0), "tau_int4": (0.1, 2.0)}


class Known:
    """A divergence that is least at (0.5, 0.4), and bits that fall with both thresholds."""

    name, direction = "KLD", "minimize"

    def __init__(self, shift=0.0):
        self.calls, self.shift = [], shift

    def __call__(self, preset):
        scheme = preset.scheme
        self.calls.append((scheme.tau_bf16, scheme.tau_int4))
        value = (scheme.tau_bf16 - 0.5) ** 2 + (scheme.tau_int4 - 0.4) ** 2 + self.shift
        return Score(value, 5 - scheme.tau_bf16 - 0.5 * scheme.tau_int4, 2.0, cache_bytes=1000, samples=4)


def search(objective=None, trials=20, **options):
    scheme = get_preset("mixkvq", select="thresholds")
    return tune(scheme, objective or Known(), trials=trials, space=SPACE, **options)


class TestSpace:
    def test_ranges_by_hand(self):
        space = space_of(get_scheme("kitty"), {"boost_ratio": [0.0, 0.25], "sink_length": (0, 64)})
        assert list(space) == ["boost_ratio", "sink_length"]
        assert space["boost_ratio"].choices == (0.0, 0.25)
        assert (space["sink_length"].low, space["sink_length"].high) == (0, 64)

    def test_presets_inside_the_space(self):
        """Those that differ in nothing but what is searched: the paper's other pairs have other room."""
        scheme = get_scheme("mixkvq-r1-llama-8b")
        assert published(scheme, space_of(scheme, SPACE)) == [{"tau_bf16": 1.44, "tau_int4": 0.79}]
        narrow = space_of(scheme, {"tau_bf16": (0.1, 1.0)})
        assert published(scheme, narrow) == []
        kitty = get_scheme("kitty")
        assert published(kitty, space_of(kitty, {"boost_ratio": (0.0, 0.5)})) == [
            {"boost_ratio": 0.125},
            {"boost_ratio": 0.25},
        ]


class TestSearch:
    def test_finds_what_is_better_than_the_presets(self):
        objective = Known()
        study = search(objective, trials=30)
        assert len(study.points()) == 30
        # The presets' thresholds come first.
        assert objective.calls[0] == (1.44, 0.79)
        first, best = study.points()[0].score.value, min(point.score.value for point in study.points())
        assert best < 0.1 * first
        front = study.pareto()
        costs = [point.score.total_bits for point in front]
        values = [point.score.value for point in front]
        assert costs == sorted(costs)
        assert values == sorted(values, reverse=True)

    def test_pick(self):
        study = search(trials=20)
        for limit in (3.0, 4.0):
            best = min(
                (point for point in study.points() if point.score.total_bits <= limit), key=lambda p: p.score.value
            )
            assert study.pick({"total_bits": limit}).number == best.number
        with pytest.raises(
            ValueError, match=r"none of 20 trials is within total_bits <= 1; the closest is trial \d+ with"
        ):
            study.pick({"total_bits": 1.0})
        with pytest.raises(ValueError, match="cost: got 'key_bits', which this objective does not measure"):
            study.pick({"key_bits": 5.0})

    def test_accuracy_is_maximized(self):
        class Accuracy(Known):
            name, direction = "accuracy", "maximize"

            def __call__(self, preset):
                score = super().__call__(preset)
                return Score(1 - score.value, score.total_bits)

        study = search(Accuracy(), trials=12)
        values = [point.score.value for point in study.points()]
        assert study.pick().score.value == max(values)
        front = [point.score.value for point in study.pareto()]
        assert front == sorted(front)

    def test_held_out_samples_decide(self):
        """The best of the search is the worst of the candidates there, and is not picked."""
        study = search(trials=20)
        best = study.pick()

        class Others(Known):
            def __call__(self, preset):
                score = super().__call__(preset)
                return Score(9.0 if preset == best.preset else score.value, score.total_bits)

        held_out = Others(0.01)
        confirmed = study.confirm(held_out, most=3)
        assert len(confirmed) == 3
        assert len(held_out.calls) == 3
        assert confirmed[-1].number == best.number
        picked = study.pick()
        assert picked.number == confirmed[0].number != best.number
        assert picked.held_out.value == pytest.approx(picked.score.value + 0.01)
        # Kept: the same candidates are not measured twice.
        study.confirm(held_out, most=3)
        assert len(held_out.calls) == 3

    def test_limits_make_trials_infeasible(self):
        study = search(trials=15, limits={"total_bits": 3.5})
        inside = [trial for trial in study.optuna.best_trials]
        assert inside
        assert all(trial.values[1] <= 3.5 for trial in inside)

    def test_nan_is_refused_and_others_are_kept(self, tmp_path):
        class Breaks(Known):
            def __call__(self, preset):
                if len(self.calls) == 3:
                    return Score(math.nan, 3.0)
                return super().__call__(preset)

        storage = f"sqlite:///{tmp_path}/tuning.db"
        with pytest.raises(
            ValueError, match=r"objective: got nan at 3.0 total bits for tau_bf16=.*all others are kept"
        ):
            search(Breaks(), trials=8, storage=storage)
        assert len(load_study(storage, "mixkvq").points()) == 3
        assert len(search(trials=8, storage=storage).points()) == 8


class TestStorage:
    def test_goes_on_where_it_stopped(self, tmp_path):
        storage = f"sqlite:///{tmp_path}/tuning.db"
        first = Known()
        search(first, trials=6, storage=storage)
        second = Known()
        study = search(second, trials=10, storage=storage)
        assert (len(first.calls), len(second.calls)) == (6, 4)
        assert len(study.points()) == 10
        loaded = load_study(storage, "mixkvq")
        assert [p.preset for p in loaded.points()] == [p.preset for p in study.points()]
        assert loaded.pick().number == study.pick().number

    def test_another_study_under_the_name(self, tmp_path):
        storage = f"sqlite:///{tmp_path}/tuning.db"
        search(trials=2, storage=storage, name="one")
        with pytest.raises(ValueError, match=r"the study 'one' in .* is one of another space"):
            tune(
                get_preset("mixkvq", select="thresholds"),
                Known(),
                trials=3,
                space={"tau_int4": (0, 1)},
                storage=storage,
                name="one",
            )
        with pytest.raises(ValueError, match="is one of another cost"):
            search(trials=3, storage=storage, name="one", cost="cache_bytes")
        with pytest.raises(ValueError, match="has no study 'two'; it has one"):
            load_study(storage, "two")


def test_ctrl_c_gives_the_trial_back(tmp_path):
    """The presets' knobs, which come first, are not lost."""

    class Stopped(Known):
        def __call__(self, preset):
            super().__call__(preset)
            raise KeyboardInterrupt

    storage, stopped, known = f"sqlite:///{tmp_path}/tuning.db", Stopped(), Known()
    with pytest.raises(KeyboardInterrupt):
        search(stopped, trials=3, storage=storage)
    study = search(known, trials=3, storage=storage)
    assert known.calls[0] == stopped.calls[0]
    assert [point.number for point in study.points()] == [1, 2, 3]


def test_passwords_are_not_shown():
    assert hidden("postgresql+psycopg://me:secret@host/db") == "postgresql+psycopg://me:***@host/db"
    with pytest.raises(ValueError, match="storage") as caught:
        open_storage("postgresql://me:secret@127.0.0.1:1/db")
    assert "secret" not in str(caught.value)
