"""`hfkvq doctor`: verdicts, their reasons, and what to take instead."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from evals.reference.outliers import with_outliers
from hfkvq.caches import get_preset
from hfkvq.measure import doctor
from hfkvq.measure.demo.prompts import Subject
from hfkvq.measure.doctor import EFFORTS, LOSSY, PRESETS, SAFE, UNSAFE, Effort, examine, judge
from hfkvq.measure.reference import load_reference
from tests.command import assert_refused, flat, invoke

run = partial(invoke, "doctor")
SMALL = Effort(1, 160, 16, ("recall-4", "copy-64"), 2, 2)


@pytest.mark.parametrize(
    ("kld", "tail", "top1", "lost", "evicts", "verdict", "words"),
    [
        (0.02, 1.0, 0.9, {"copy": (2, 8), "passkey": (1, 2)}, False, SAFE, []),
        (0.0208, 0.8, 0.955, {}, False, LOSSY, ["mean KLD 0.0208, safe is up to 0.02"]),
        (0.01, 1.5, 0.95, {}, False, LOSSY, ["99.9 % KLD 1.5, safe is up to 1"]),
        (0.01, 5.1, 0.95, {}, False, UNSAFE, ["99.9 % KLD 5.1, unsafe is above 5"]),
        (0.01, 0.1, 0.89, {}, False, LOSSY, ["top-1 89.0%, safe is from 90% on"]),
        (0.01, 0.1, 0.74, {}, False, UNSAFE, ["top-1 74.0%, unsafe is below 75%"]),
        (0.21, 0.1, 0.95, {}, False, UNSAFE, ["mean KLD 0.21, unsafe is above 0.2"]),
        (0.0, 0.0, 1.0, {"copy": (3, 8), "passkey": (0, 8)}, False, LOSSY, ["copy: 3 of 8 answers lost"]),
        (0.0, 0.0, 1.0, {"passkey": (6, 8)}, False, UNSAFE, ["passkey: 6 of 8 answers lost"]),
        (0.0, 0.0, 1.0, {}, True, LOSSY, ["it evicts: what does not fit its budget is lost"]),
    ],
)
def test_verdicts(kld, tail, top1, lost, evicts, verdict, words):
    assert judge(kld, tail, top1, lost, evicts) == (verdict, words)


def test_what_is_measured_exists():
    for name in PRESETS.split():
        assert get_preset(name)
    assert set(EFFORTS) == {"cpu", "cuda"}


PLAIN = "saw-int4:smooth_keys=false"


@pytest.fixture(scope="module")
def outliers() -> tuple[Subject, torch.Tensor]:
    """The reference model with uneven keys, and a window of text that it knows."""
    model, tokenizer = load_reference(torch.float32)
    found = doctor.make_batches(Subject("", model, tokenizer, True), "recall-12", 1, 1, 0, None)[0].ids
    assert found.shape[1] >= 176
    return Subject("outliers", with_outliers(model, 1024.0), tokenizer, True), found[:, -176:]


def test_uneven_keys_are_unsafe_where_channels_share_a_scale(outliers):
    told = []
    presets = {name: get_preset(name) for name in ("full", PLAIN, "kvarn-k4v4", "arkv")}
    record = examine(*outliers, presets, SMALL, {"latent-8": "no latents"}, lambda *each: told.append(each))
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["full", PLAIN, "kvarn-k4v4", "arkv", "latent-8"]
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts == {"full": SAFE, PLAIN: UNSAFE, "kvarn-k4v4": SAFE, "arkv": LOSSY, "latent-8": "refused"}
    layer, ratio = record["keys"]["layer"], record["keys"]["times_median"]
    assert ratio > 200
    assert f"keys of layer {layer} have channels {ratio:.0f} times the median" in rows[PLAIN]["reason"]
    assert "recall-4: 2 of 2 answers lost" in rows[PLAIN]["reason"]
    assert "it evicts" in rows["arkv"]["reason"]
    assert rows["latent-8"]["reason"] == "no latents"
    assert {row["take"] for name, row in rows.items() if name != "full"} == {'MixedKVCache(model, "kvarn-k4v4")'}
    # Of the copy the model is not capable, and no cache is blamed for it.
    assert record["left_out"] == {"copy-64": "DynamicCache itself answers 0 of 2"}
    assert rows["full"]["tasks"] == {"recall-4": {"right": 2, "of": 2}}
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] < 1
    assert outliers[0].model.config._attn_implementation == record["attention"] == "sdpa"


class TestCommand:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(EFFORTS, "cpu", Effort(2, 150, 16, ("copy-64", "passkey-9000"), 1, 1))

    @pytest.fixture
    def text(self, tmp_path: Path) -> Path:
        path = tmp_path / "story.txt"
        path.write_text("Keys and values, please. The cache holds 4 bits of each. " * 40, encoding="utf-8")
        return path

    def test_a_report_and_json(self, stand_in, text, tmp_path):
        saved = tmp_path / "doctor.json"
        options = ("--model", stand_in, "--text", text, "--device", "cpu", "--json", saved)
        done = run(*options, "--presets", "kivi-2,latent-8,snapkv:budget_tokens=96", columns=100)
        assert done.exit_code == 0, done.output
        said = flat(done.output)
        assert "2 windows of story.txt, 16 tokens each after 150" in said
        assert "passkey-9000 is left out of the verdicts: longer than the model's positions." in said
        assert "copy-64 is left out of the verdicts: DynamicCache itself answers 0 of 1." in said
        report = done.output.split("```text\n")[1].split("```")[0]
        for words in (
            "2 layers, 2 query and 1 KV heads of 64",
            "float32, attention sdpa",
            f"torch          {torch.__version__}",
        ):
            assert words in report
        record = json.loads(saved.read_text(encoding="utf-8"))
        assert str(tmp_path) not in saved.read_text(encoding="utf-8") + done.output.replace(f"Saved {saved}", "")
        assert record["kind"] == "hfkvq doctor"
        assert [row["name"] for row in record["rows"]] == ["full", "kivi-2", "snapkv:budget_tokens=96", "latent-8"]
        full, kivi, snap, latent = record["rows"]
        assert (full["verdict"], latent["verdict"]) == (SAFE, "refused")
        assert snap["verdict"] in (LOSSY, UNSAFE)
        assert kivi["kld"]["mean"] <= kivi["kld"]["p999"]
        assert record["environment"]["torch"] == torch.__version__

    def test_presets_of_other_models(self):
        assert_refused(run("--device", "cpu", "--presets", "latent-8"), "reference model can use none of them")
