"""Processes that share a study, also on a real PostgreSQL server: their deaths, Ctrl-C, and passwords."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from hfkvq.tuning import storage as storages
from hfkvq.tuning.storage import hidden, open_storage
from hfkvq.tuning.study import load_study
from tests.tuning.test_study import SPACE, Known, search

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


@pytest.mark.parametrize("moment", ["set_trial_param", "set_trial_state_values"])
def test_ctrl_c_waits_while_the_storage_is_written(tmp_path, monkeypatch, moment):
    """Else Optuna fails in its own words, or the trial stays with a process that is gone."""
    write = getattr(optuna.storages.JournalStorage, moment)

    def interrupted(*arguments, **options):
        done = write(*arguments, **options)
        signal.raise_signal(signal.SIGINT)
        return done

    storage = f"{tmp_path}/tuning.log"
    with monkeypatch.context() as patch:
        patch.setattr(optuna.storages.JournalStorage, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            search(trials=3, storage=storage)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    study = search(trials=3, storage=storage)
    assert len(study.points()) == 3
    assert TrialState.RUNNING not in {trial.state for trial in study.optuna.get_trials()}


class TestPasswords:
    def test_are_not_shown(self, tmp_path):
        assert hidden("postgresql+psycopg://me:secret@host/db") == "postgresql+psycopg://me:***@host/db"
        assert hidden("tuning.log") == "tuning.log"
        with pytest.raises(ValueError, match="storage") as caught:
            open_storage("postgresql://me:secret@127.0.0.1:1/db")
        assert "secret" not in str(caught.value)


@pytest.fixture(scope="module")
def postgres():
    """URL of a server of this test's own, which is reached by a file alone."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), reverse=True)
    control = str(found[0]) if found else shutil.which("pg_ctl")
    if control is None:
        pytest.skip("no PostgreSQL server here: apt install postgresql")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("no driver of PostgreSQL here: pip install 'hfkvq[postgres]'")
    # The server refuses to be root. A short path, as sockets have.
    other = {"user": "nobody", "cwd": "/"} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    if other:
        shutil.chown(folder, "nobody")

    def run(*arguments):
        # Not to a pipe: the server would hold it open.
        done = subprocess.run(
            [control, "-D", str(folder / "data"), "-s", *arguments], stdout=subprocess.DEVNULL, **other
        )
        if done.returncode:
            pytest.skip(f"PostgreSQL does not start here: pg_ctl {arguments[0]} failed")

    try:
        run("init", "-o", "-U postgres -A trust --no-sync")
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        run("start", "-w", "-l", str(folder / "log"), "-o", options)
        yield f"postgresql://postgres@/postgres?host={folder}"
        run("stop", "-m", "immediate")
    finally:
        shutil.rmtree(folder)


class Slow(Known):
    """Takes a moment; the process named a is killed in the middle of its second trial."""

    def __init__(self, who):
        super().__init__()
        self.who = who

    def __call__(self, preset, report=None):
        time.sleep(0.4)
        score = super().__call__(preset, report)
        if self.who == "a" and len(self.calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return score


@pytest.mark.parametrize("kind", ["sqlite", "journal", "postgres"])
def test_processes_share_a_study(tmp_path, monkeypatch, request, kind):
    """Three that start together on an empty storage, one killed: databases run its trial again, a journal goes on."""
    monkeypatch.setattr(storages, "HEARTBEAT", 1)
    monkeypatch.setattr(storages, "GRACE", 2)
    wheres = {"sqlite": f"sqlite:///{tmp_path}/tuning.db", "journal": f"{tmp_path}/tuning.log"}
    where = request.getfixturevalue("postgres") if kind == "postgres" else wheres[kind]
    context = multiprocessing.get_context("fork")

    def work(name):
        search(Slow(name), trials=24, storage=where)

    processes = [context.Process(target=work, args=(name,)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0, 0]
    study = load_study(where, "mixkvq")
    # Those that end last may each have been at one more.
    assert 24 <= len(study.points()) == len(study.finished()) <= 25
    knobs = [json.dumps(point.knobs, sort_keys=True) for point in study.points()]
    assert len(set(knobs)) == len(knobs)
    [lost] = [x for x in study.optuna.get_trials() if x.state not in (TrialState.COMPLETE, TrialState.WAITING)]
    assert lost.state is (TrialState.RUNNING if kind == "journal" else TrialState.FAIL)
    assert set(lost.params) == set(SPACE)
    assert (json.dumps(lost.params, sort_keys=True) in knobs) == (kind != "journal")


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
