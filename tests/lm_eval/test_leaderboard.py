"""`hfkvq leaderboard`: results as lm-eval saves them, and the report of them."""

import functools
import json
from functools import partial

import pytest
from lm_eval.tasks import TaskManager

from hfkvq.caches import get_preset
from hfkvq.lm_eval import model, runs
from hfkvq.lm_eval.board import Board, fingerprint, folder_name
from hfkvq.measure.models import Source
from tests.command import assert_refused, flat, invoke

run = partial(invoke, "leaderboard")


def test_results_report_and_what_is_there_already(tmp_path, monkeypatch):
    # Without the thousands of files of lm-eval's own tasks.
    monkeypatch.setattr(runs, "TaskManager", functools.partial(TaskManager, include_defaults=False))
    compiled = []

    def compile_ahead(subject, presets, steps, tell):
        compiled.append(([preset.scheme.name for preset in presets], len(steps)))
        tell("compiling kernels")

    monkeypatch.setattr(model, "compile_ahead", compile_ahead)
    options = ["--out", tmp_path / "board", "--tasks", "ref_recall_24", "--limit", "1", "--device", "cpu"]
    options += ["--windows", "1", "--context", "256", "--schemes", "full,kitty:sink_length=4"]
    done = run(*options)
    assert done.exit_code == 0, done.output
    # Those of all schemes, before the first is asked.
    assert compiled == [(["full", "kitty"], 16)]
    assert "compiling kernels" in done.output
    names = {"none", "full", "kitty-sink_length-4"}
    found = {}
    for name in names:
        [file] = (tmp_path / "board" / name).rglob("results_*.json")
        found[name] = json.loads(file.read_text(encoding="utf-8"))
        assert len(list(file.parent.glob("samples_ref_recall_24_*.jsonl"))) == 1
    assert found["none"]["config"]["kvq"]["scheme"] is None
    assert found["kitty-sink_length-4"]["config"]["kvq"]["scheme"]["sink_length"] == 4
    assert found["full"]["config"]["model_args"] == {"pretrained": "reference model", "scheme": "full"}
    text = (tmp_path / "board" / "report.md").read_text(encoding="utf-8")
    assert "full" in text
    # One question tells nothing, and the report says so.
    assert "| `full` | 1 | +0.0 | -100.0 to +100.0 | too few to tell, ±100 |" in text
    assert "Too few questions to distinguish full, kitty:sink_length=4 from DynamicCache" in flat(done.output)
    # Another run finds the results.
    again = run(*options)
    assert again.exit_code == 0, again.output
    assert again.output.count("already") == 3
    assert len(compiled) == 1
    assert not list((tmp_path / "board").rglob("answers*"))
    # A scheme more: only that one is run and measured.
    more = run(*options[:-1], "kitty:sink_length=4,kivi-2")
    assert more.exit_code == 0, more.output
    assert more.output.count("already") == 3
    assert compiled[1:] == [(["kivi"], 16)]
    rows = {path.name: json.loads(path.read_text())["rows"] for path in (tmp_path / "board").glob("kld*.json")}
    assert [row["name"] for row in rows["kld.json"]] == ["full", "kitty:sink_length=4"]
    assert [row["name"] for row in rows["kld-2.json"]] == ["kivi-2"]
    # Whatever else results depend on.
    for other in (["--limit", 2], ["--chat"], ["--gen_kwargs", "temperature=0.5"], ["--context", 200]):
        assert_refused(run(*options, *other), "holds results with other settings")


class TestBoard:
    SETTINGS = {"model": {"name": "m", "fingerprint": "1"}, "limit": None}  # noqa: RUF012

    @pytest.fixture
    def board(self, tmp_path):
        return Board(tmp_path / "board", self.SETTINGS)

    def save(self, board, name, scheme, *tasks):
        folder = board.folder(name) / "model"
        folder.mkdir(parents=True, exist_ok=True)
        content = {"results": {}, "config": {"kvq": {"scheme": scheme}, "asked_tasks": tasks}}
        (folder / f"results_{len(list(folder.iterdir()))}.json").write_text(json.dumps(content))

    def test_other_settings(self, board):
        Board(board.out, self.SETTINGS)
        other = {"model": {"name": "m", "fingerprint": "2"}, "limit": 0.5}
        message = r"model \(there .*'1'.*, here .*'2'.*\); limit \(there None, here 0.5\)\. Choose another folder"
        with pytest.raises(ValueError, match=message):
            Board(board.out, other)

    def test_results_of_nobody_knows_what(self, tmp_path):
        (tmp_path / "none").mkdir()
        (tmp_path / "none" / "results_1.json").write_text("{}")
        with pytest.raises(ValueError, match=r"holds results, but no manifest\.json"):
            Board(tmp_path, self.SETTINGS)

    @pytest.mark.parametrize("text", ["", "[]", '{"settings": 3}', "{"])
    def test_damaged_manifest(self, board, text):
        (board.out / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"manifest\.json cannot be read"):
            Board(board.out, self.SETTINGS)

    def test_tasks_are_added(self, board):
        kivi, kitty = get_preset("kivi-2"), get_preset("kitty")
        assert board.missing("kivi-2", kivi, ["a", "b"]) == ["a", "b"]
        self.save(board, "kivi-2", kivi.to_dict(), "a")
        assert board.missing("kivi-2", kivi, ["a", "b"]) == ["b"]
        self.save(board, "kivi-2", kivi.to_dict(), "b", "c")
        assert board.missing("kivi-2", kivi, ["a", "b"]) == []
        # A preset's file that was changed in between.
        with pytest.raises(ValueError, match="is of another scheme than 'kivi-2' is now"):
            board.missing("kivi-2", kitty, ["a"])
        self.save(board, "none", None, "a")
        assert board.missing("none", None, ["a"]) == []

    def test_one_run_at_a_time(self, board):
        with board.locked(), pytest.raises(ValueError, match="another run is writing"), board.locked():
            pass

    def test_fingerprint(self, tmp_path):
        """Of files, not of the folder's name; a byte of a weight counts."""
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(1000))
        first = fingerprint(Source("model", str(folder)))
        moved = folder.rename(tmp_path / "other")
        assert fingerprint(Source("other", str(moved))) == first
        (moved / "model.safetensors").write_bytes(bytes(999) + b"x")
        assert fingerprint(Source("other", str(moved))) != first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schemes", "kity"], "scheme: got 'kity', which is unknown"),
        (["--metadata", "{"], "which is not JSON"),
        (["--metadata", "[1]"], "allowed a JSON object"),
        (["--gen_kwargs", "temperature"], "gen_kwargs: got 'temperature', allowed NAME=VALUE"),
        (["--device", "tpu"], "device: got 'tpu'"),
    ],
)
def test_bad_input(tmp_path, arguments, message):
    assert_refused(run("--out", tmp_path / "board", *arguments), message)


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run_tasks", interrupted)
    done = run("--out", tmp_path / "board", "--device", "cpu")
    assert_refused(done, f"Stopped: the answers so far are kept in {tmp_path}/board; run the same command again", 130)


def test_folders_of_typed_schemes():
    assert folder_name("kitty:boost_ratio=0.2") == "kitty-boost_ratio-0.2"
    assert folder_name("presets/tuned.json") == "tuned.json"
