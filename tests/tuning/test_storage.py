"""Storages of studies: Ctrl-C, searches that go on, and passwords."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hfkvq.tuning.study import hidden, load_study, open_storage
from tests.tuning.test_study import Known, search

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def ctrl_c():
    """Python's own handler: a shell's background jobs ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


class TestPasswords:
    def test_are_not_shown(self, tmp_path):
        assert hidden("postgresql+psycopg://me:secret@host/db") == "postgresql+psycopg://me:***@host/db"
        with pytest.raises(ValueError, match="storage") as caught:
            open_storage("postgresql://me:secret@127.0.0.1:1/db")
        assert "secret" not in str(caught.value)


def finished(storage):
    """Number of points that a study has by now."""
    with contextlib.suppress(ValueError):
        return len(load_study(storage, "mine").points())
    return 0


@pytest.mark.slow
def test_stopped_and_gone_on_with(tmp_path):
    """As it is typed."""
    options = ["tune", "kitty:page_size=32:sink_length=4", "--space", "boost_ratio=0..0.5"]
    options += ["--samples", "2", "--held-out", "2", "--context", "192", "--prefill", "128", "--chunk", "64"]
    storage = f"sqlite:///{tmp_path}/tuning.db"
    options += ["--storage", storage, "--name", "mine", "--device", "cpu", "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "hfkvq.cli", *options]
    first = subprocess.Popen(
        [*command, "--trials", "1000"], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while not finished(storage):
        assert time.monotonic() < deadline
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.2)
    # To all of its group, as a terminal does.
    os.killpg(first.pid, signal.SIGINT)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 130, errors
    assert f"Stopped: finished trials are kept in {storage}" in " ".join(errors.split())
    study = load_study(storage, "mine")
    done = len(study.points())
    assert done >= 1
    again = [*command, "--trials", str(done + 4), "--out", str(tmp_path / "mine.json")]
    ran = subprocess.run(again, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert len(load_study(storage, "mine").points()) == done + 4
    assert (tmp_path / "mine.json").is_file()
