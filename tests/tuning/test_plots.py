"""Pictures on small inputs: what their axes, marks and files are; and which channels of a cache are raised."""

from __future__ import annotations

import builtins
import math
from dataclasses import replace

import pytest
import torch

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches import get_preset
from hfkvq.tuning.layer_plan import Compared, LayerCell, LayerPlan, LayerStep, override
from hfkvq.tuning.score import Score
from hfkvq.tuning.sensitivity import Sensitivity
from hfkvq.tuning.study import tune
from tests.caches.models import build

pytest.importorskip("matplotlib")

from hfkvq.tuning import plots
from hfkvq.tuning.plot_layers import layer_bits


class Boost:
    """A divergence that falls with the boosted share, and bits that rise with it."""

    name, direction = "KLD", "minimize"

    def __call__(self, preset, report=None):
        scheme = preset.scheme
        value = math.exp(-8 * scheme.boost_ratio) * (1.0 if scheme.sink_length else 2.0)
        bits = 2.5 + scheme.boost_ratio + scheme.sink_length / 100
        return Score(value, bits, 2.0, cache_bytes=bits * 2**20, samples=8, low=0.8 * value, high=1.3 * value)


class Right(Boost):
    name, direction = "accuracy", "maximize"

    def __call__(self, preset, report=None):
        score = super().__call__(preset)
        return replace(score, value=1 - score.value / 4, low=None, high=None)


SPACE = {"boost_ratio": (0.0, 0.5), "sink_length": [0, 32]}


def search(objective=None, trials=8, **options):
    return tune("kitty", objective or Boost(), trials=trials, space=SPACE, **options)


def labels(axes):
    return axes.get_legend_handles_labels()[1]


def written(axes):
    return [text.get_text() for text in axes.texts]


def marks(axes, label):
    """Points of the marks with this label."""
    found = next(held for held in axes.containers if held.get_label() == label)
    return sorted(map(tuple, found.lines[0].get_xydata().tolist()))


def check_file(figure, tmp_path):
    path = tmp_path / "picture.png"
    plots.save(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG")


class TestStudy:
    def test_front(self, tmp_path):
        study = search()
        study.confirm(Boost(), most=2)
        study.refer({"kivi-2": get_preset("kivi-2")}, lambda preset: Score(0.9, 2.4))
        picked = study.pick(max_total_bits=3.0)
        figure = plots.pareto_front(study, picked, limit=3.0)
        axes = figure.axes[0]
        assert axes.get_xlabel() == "total bits per element, everything counted"
        assert axes.get_ylabel() == "mean KL divergence to DynamicCache, nats (lower is better)"
        assert set(labels(axes)) == {
            "trials",
            "front, with 95 % intervals",
            "presets",
            "on held-out samples",
            "picked",
            "limit",
        }
        assert len(marks(axes, "trials")) == 8
        front = [(point.score.total_bits, point.score.value) for point in study.pareto()]
        assert marks(axes, "front, with 95 % intervals") == sorted(front)
        assert len(marks(axes, "on held-out samples")) == 2
        assert {"kitty", "kitty-pro", "kivi-2"} <= set(written(axes))
        assert (2.4, 0.9) in marks(axes, "presets")
        check_file(figure, tmp_path)

    def test_front_of_bytes_and_accuracy(self):
        study = search(Right(), cost="cache_bytes")
        axes = plots.pareto_front(study).axes[0]
        assert axes.get_xlabel() == "cache of a sample, MiB"
        assert axes.get_ylabel() == "accuracy (higher is better)"
        # In the unit of the axis.
        assert all(2.4 < x < 3.5 for x, _ in marks(axes, "trials"))
        assert axes.get_yscale() == "linear"

    def test_importance(self, tmp_path):
        figure = plots.knob_importance(search(trials=10))
        value, cost = figure.axes
        assert [axes.get_title() for axes in (value, cost)] == ["KLD", "total bits"]
        assert [label.get_text() for label in value.get_yticklabels()] == ["sink_length", "boost_ratio"]
        for axes in (value, cost):
            assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(100)
        check_file(figure, tmp_path)

    def test_importance_of_what_never_differs(self):
        class Same(Boost):
            def __call__(self, preset, report=None):
                return replace(super().__call__(preset), total_bits=3.0)

        cost = plots.knob_importance(search(Same())).axes[1]
        assert [bar.get_width() for bar in cost.patches] == [0, 0]

    @pytest.mark.parametrize("objective", [Boost, Right])
    def test_hypervolume(self, tmp_path, objective):
        from matplotlib import pyplot

        figure = plots.hypervolume(search(objective()))
        axes = figure.axes[0]
        assert axes.get_ylabel() == "hypervolume, larger is better"
        assert len(axes.get_lines()[0].get_ydata()) == 8
        # Only ever grows.
        grown = list(axes.get_lines()[0].get_ydata())
        assert grown == sorted(grown)
        assert pyplot.get_fignums() == []
        check_file(figure, tmp_path)

    def test_too_few_trials(self):
        with pytest.raises(ValueError, match="study: it has 3 measured trials, and this picture needs 4"):
            plots.knob_importance(search(trials=3))
        with pytest.raises(ValueError, match="searched only for the value"):
            plots.hypervolume(search(single=True))


def make_plan():
    base, full, wide = get_preset("kivi-2"), get_scheme("full"), get_scheme("kivi-4")
    table = [
        LayerCell(layer, name, Score(value, bits, samples=4, low=value / 2, high=2 * value))
        for layer, name, value, bits in (
            (0, "full", 0.05, 5.0),
            (0, "kivi-4", 0.06, 3.0),
            (2, "full", 0.09, 5.0),
            (2, "kivi-4", 0.12, 3.0),
        )
    ]
    start = Score(0.1, 2.5, samples=4)
    chosen = override(base, [wide, base.scheme, base.scheme])
    naive = override(base, [full, base.scheme, full])
    score = table[1].score
    return LayerPlan(
        chosen,
        base,
        3,
        {"full": full, "kivi-4": wide},
        "KLD",
        "minimize",
        "total_bits",
        3.2,
        start,
        tuple(table),
        (LayerStep(((0, "kivi-4"),), 0.04, 0.01, score, "raise"),),
        "budget",
        (
            Compared("plan", chosen, score, replace(score, value=0.07, high=0.2)),
            Compared("base", base, start, start),
            Compared("first and last 1 full", naive, Score(0.04, 7.5)),
        ),
    )


class TestLayers:
    def test_sensitivity(self, tmp_path):
        figure = plots.layer_sensitivity(make_plan())
        axes, bar = figure.axes
        # Per cent of the base's 0.1, candidates from the top.
        assert written(axes) == ["+50.0", "+10.0", "+40.0", "-20.0"]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "2"]
        assert [x.get_text() for x in axes.get_yticklabels()] == ["full\n+2.50 bits each", "kivi-4\n+0.50 bits each"]
        assert bar.get_ylabel() == "gain, % of the base's KLD"
        # Layer 0 got kivi-4.
        assert [(frame.get_x(), frame.get_y()) for frame in axes.patches] == [(-0.46, 0.54)]
        check_file(figure, tmp_path)

    def test_steps(self, tmp_path):
        figure = plots.layer_steps(make_plan())
        axes = figure.axes[0]
        assert set(written(axes)) == {"base", "plan", "1 + 1"}
        line = next(line for line in axes.get_lines() if line.get_label() == "steps from the base")
        assert line.get_xydata().tolist() == [[2.5, 0.1], [3.0, 0.06]]
        assert marks(axes, "first and last layers full") == [(7.5, 0.04)]
        assert len(marks(axes, "on held-out samples,\nwith 95 % intervals")) == 2
        assert "budget" in labels(axes)
        check_file(figure, tmp_path)

    def test_bits_of_a_preset(self, tmp_path):
        preset = get_preset("kitty", {"0": "full", "-1": "kitty-pro"})
        bits = layer_bits(preset, 4, 128)
        # 16 of 128 channels raised cost two more bits, their indices 8 bits a page of 128 tokens, a scale 32.
        assert bits[1]["keys"] == (2.25, 2.25 + 32 / 128 + 16 * 8 / (128 * 128))
        assert [layer["keys"][0] for layer in bits] == [16, 2.25, 2.25, 2.5]
        assert [layer["values"][1] for layer in bits] == [16, 2.25, 2.25, 2.25]
        figure = plots.bits_by_layer(preset, 4)
        axes = figure.axes[0]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2", "3"]
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("layer", "bits per element")
        assert len(axes.patches) == 16
        check_file(figure, tmp_path)
        with pytest.raises(ValueError, match="layers: a preset does not say how many there are"):
            plots.bits_by_layer(preset)


@pytest.fixture(scope="module")
def filled():
    """Two rows of 150 tokens through two layers of two heads, pages of 32 tokens."""
    model = build("qwen3")
    caches = {}
    for name, scheme in {
        "kitty": get_scheme("kitty", page_size=32, sink_length=0, local_length=16, boost_ratio=0.25),
        "mixkvq": get_scheme("mixkvq", select="thresholds", tau_bf16=0.9, tau_int4=0.4),
        "kivi-2": get_scheme("kivi-2"),
    }.items():
        cache = caches[name] = MixedKVCache(model.config, scheme)
        ids = torch.randint(3, 120, (2, 300), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    return caches


class TestChannels:
    def test_what_the_pages_hold(self, filled):
        """Counted from the dense keys: of 32 tokens, a channel in 2 bits has four values at the most."""
        cache = filled["kitty"]
        shares = plots.raised_channels(cache)
        assert list(shares) == [0, 1]
        for layer, widths in shares.items():
            assert list(widths) == [4]
            assert widths[4].sum(1).tolist() == pytest.approx([8.0, 8.0])
            # 9 pages of 32 tokens in each of two rows.
            pages = cache.layers[layer].dense("keys")[:, :, :288].unflatten(2, (9, 32)).sort(3).values
            values = 1 + (pages.diff(dim=3) != 0).sum(3)
            torch.testing.assert_close(widths[4], (values > 4).float().mean((0, 2)))

    def test_both_widths(self, filled):
        shares = plots.raised_channels(filled["mixkvq"])[1]
        assert list(shares) == [4, 16]
        assert all(((share >= 0) & (share <= 1)).all() for share in shares.values())
        # No channel of a page is of two widths.
        assert (sum(shares.values()) <= 1 + 1e-6).all()

    def test_unused_ranks_are_not_channel_0(self):
        """Thresholds that no channel passes leave every rank empty, and empty ranks name channel 0."""
        model = build("qwen3")
        scheme = get_scheme("mixkvq", select="thresholds", tau_bf16=100.0, tau_int4=100.0)
        cache = MixedKVCache(model.config, scheme)
        with torch.inference_mode():
            model(input_ids=torch.randint(3, 120, (1, 300)), past_key_values=cache, use_cache=True)
        assert all(share.sum() == 0 for widths in plots.raised_channels(cache).values() for share in widths.values())

    def test_picture(self, filled, tmp_path):
        figure = plots.channels_by_layer(filled["mixkvq"])
        four, sixteen = [axes for axes in figure.axes if axes.get_title()]
        assert four.get_title().startswith("raised to 4 bits: ")
        assert sixteen.get_xlabel() == "key channel"
        assert four.get_ylabel() == "layer (2 heads each)"
        assert four.images[0].get_array().shape == (4, 32)
        check_file(figure, tmp_path)

    def test_bits_of_a_cache(self, filled, tmp_path):
        cache = filled["kitty"]
        figure = plots.bits_by_layer(cache)
        axes = figure.axes[0]
        assert labels(axes) == ["codes", "metadata", "windows", "tables"]
        tops = [sum(bars[layer].get_height() for bars in axes.containers) for layer in range(2)]
        # But for the notes that all layers share.
        assert sum(tops) / 2 == pytest.approx(cache.memory().total_bits, rel=0.01)
        check_file(figure, tmp_path)

    def test_nothing_there(self, filled):
        with pytest.raises(ValueError, match="cache: it has no sealed pages whose channels are raised"):
            plots.channels_by_layer(filled["kivi-2"])
        with pytest.raises(ValueError, match="cache: it holds no tokens yet"):
            plots.bits_by_layer(MixedKVCache(build("qwen3").config, "kivi-2"))


class TestTags:
    SENSITIVITY = Sensitivity(
        {"current|text|user": (9.0, 0.5), "older|text|obs": (2.0, 0.1), "older|text|user": (0.3, 0.2)},
        {"current|text|user": 100.0, "older|text|obs": 1000.0, "older|text|user": 0.0},
    )

    def test_picture(self, tmp_path):
        figure = plots.tag_sensitivity(self.SENSITIVITY, {"current|text|user": 4, "older|text|obs": 2})
        left, right = figure.axes
        # The one that gains most a token is on top; the one without tokens is left out.
        names = [label.get_text() for label in left.get_yticklabels()]
        assert names == ["older|text|obs  (2 bits)", "current|text|user  (4 bits)"]
        two, four = left.get_lines()
        assert (two.get_label(), four.get_label()) == ("in 2 bits", "in 4 bits")
        assert list(two.get_xdata()) == [2.0, 9.0]
        assert [bar.get_width() for bar in right.patches] == [1000, 100]
        assert left.get_xscale() == "log"
        check_file(figure, tmp_path)

    def test_no_distortion_at_all(self):
        some = replace(self.SENSITIVITY, distortion=self.SENSITIVITY.distortion | {"older|text|obs": (2.0, 0.0)})
        assert plots.tag_sensitivity(some).axes[0].get_xscale() == "symlog"

    def test_no_tokens(self):
        empty = replace(self.SENSITIVITY, counts=dict.fromkeys(self.SENSITIVITY.counts, 0.0))
        with pytest.raises(ValueError, match="no tag has a token"):
            plots.tag_sensitivity(empty)


def test_without_matplotlib(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **more):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"matplotlib is not installed; pip install 'hfkvq\[plot\]'"):
        plots.layer_steps(make_plan())


def test_no_such_folder(tmp_path):
    figure = plots.tag_sensitivity(TestTags.SENSITIVITY)
    with pytest.raises(ValueError, match=r"path: got .*, but its folder does not exist"):
        plots.save(figure, tmp_path / "none" / "picture.png")
