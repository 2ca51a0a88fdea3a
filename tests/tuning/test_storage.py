"""Processes that share a study, also on a real PostgreSQL server: their deaths, Ctrl-C, and passwords."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hfkvq.tuning.storage import hidden, open_storage
from hfkvq.tuning.study import load_study
from tests.test_files import changed, places
from tests.tuning.test_study import Known, search

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def ctrl_c():
    """Python's own handler: a shell's background jobs ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("where", ["sqlite:///{}/tuning.db", "{}/tuning.log"])
def test_ctrl_c_gives_the_trial_back(tmp_path, where):
    """The presets' knobs, which come first, are not lost."""

    class Stopped(Known):
        def __call__(self, preset, report=None):
            super().__call__(preset, report)
            raise KeyboardInterrupt

    storage, stopped, known = where.format(tmp_path), Stopped(), Known()
    with pytest.raises(KeyboardInterrupt):
        search(stopped, trials=3, storage=storage)
    study = search(known, trials=3, storage=storage)
    assert known.calls[0] == stopped.calls[0]
    assert [point.number for point in study.points()] == [1, 2, 3]


@pytest.mark.parametrize("torn", ['{"op_code":', '{"op_code": 4, "worker_id": "w"}', "\x00\x00"])
def test_a_torn_last_line_is_taken_out(tmp_path, caplog, torn):
    """A killed process or a full disk tears the line: the search goes on, and the journal can be read."""
    journal = tmp_path / "tuning.log"
    search(trials=3, storage=str(journal))
    whole = journal.read_text()
    journal.write_text(whole + torn)
    assert len(search(trials=4, storage=str(journal)).points()) == 4
    assert "the last line was torn" in caplog.text
    assert journal.read_text().startswith(whole)
    assert all(json.loads(line) for line in journal.read_text().splitlines())


@pytest.mark.parametrize("line", ["garbage", "[]", "{}", '{"op_code"', "\xff"])
def test_a_damaged_line_is_told_by_its_number(tmp_path, line):
    journal = tmp_path / "tuning.log"
    search(trials=2, storage=str(journal))
    first, *others = journal.read_text().splitlines()
    journal.write_text("\n".join([first, line, *others]) + "\n")
    for read in (lambda: search(trials=3, storage=str(journal)), lambda: load_study(str(journal), "mixkvq")):
        with pytest.raises(ValueError, match=rf"storage: {journal}: line 2 is no operation .* delete the line"):
            read()
    assert line in journal.read_text()


def test_a_file_of_something_else_stays_as_it_is(tmp_path):
    file = tmp_path / "notes.log"
    file.write_text("my notes")
    with pytest.raises(ValueError, match=f"storage: {file}: line 1 is no operation"):
        open_storage(str(file))
    assert file.read_text() == "my notes"


def test_values_of_a_wrong_type_in_a_journal(tmp_path):
    """Any part of any kind of operation: the search goes on, or says that the study is damaged."""
    journal, other = tmp_path / "tuning.log", tmp_path / "other.log"
    search(trials=2, storage=str(journal))
    operations = [json.loads(line) for line in journal.read_text().splitlines()]
    seen, told = set(), 0
    for number, operation in enumerate(operations):
        kind = (operation["op_code"], *operation, *operation.get("user_attr", ()), *operation.get("system_attr", ()))
        if kind in seen:
            continue
        seen.add(kind)
        for at in [at for at in places(operation) if at][:12]:
            for value in ("x", None):
                lines = [*operations[:number], changed(operation, at, value), *operations[number + 1 :]]
                other.write_text("".join(json.dumps(line) + "\n" for line in lines))
                for read in (
                    lambda: search(trials=2, storage=str(other)),
                    lambda: load_study(str(other), "mixkvq").points(),
                ):
                    try:
                        read()
                    except ValueError:
                        told += 1
    assert told > 50


class TestPasswords:
    def test_are_not_shown(self, tmp_path):
        assert hidden("postgresql+psycopg://me:secret@host/db") == "postgresql+psycopg://me:***@host/db"
        assert hidden("tuning.log") == "tuning.log"
        with pytest.raises(ValueError, match="storage") as caught:
            open_storage("postgresql://me:secret@127.0.0.1:1/db")
        assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_stopped_and_gone_on_with(tmp_path):
    """As it is typed."""
    options = ["tune", "kitty:page_size=32:sink_length=4", "--space", "boost_ratio=0..0.5"]
    options += ["--samples", "2", "--held-out", "2", "--context", "192", "--prefill", "128", "--chunk", "64"]
    options += ["--storage", f"{tmp_path}/tuning.log", "--name", "mine", "--device", "cpu", "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "hfkvq.cli", *options]
    first = subprocess.Popen(
        [*command, "--trials", "1000"], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while not (tmp_path / "tuning.log").exists() or '"values":[' not in (tmp_path / "tuning.log").read_text():
        assert time.monotonic() < deadline
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.2)
    # To all of its group, as a terminal does.
    os.killpg(first.pid, signal.SIGINT)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 130, errors
    assert f"Stopped: finished trials are kept in {tmp_path}/tuning.log" in " ".join(errors.split())
    study = load_study(f"{tmp_path}/tuning.log", "mine")
    done = len(study.points())
    assert done >= 1
    again = [*command, "--trials", str(done + 4), "--out", str(tmp_path / "mine.json")]
    ran = subprocess.run(again, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert len(load_study(f"{tmp_path}/tuning.log", "mine").points()) == done + 4
    assert (tmp_path / "mine.json").is_file()
