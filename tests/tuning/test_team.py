"""Workers of one command: their places, their deaths, and their storage, also on a real PostgreSQL server."""

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
from functools import partial
from pathlib import Path

import optuna
import pytest
import torch
from optuna.trial import TrialState

from hfkvq.tuning.storage import hidden, open_storage
from hfkvq.tuning.study import load_study
from hfkvq.tuning.team import Place, find_places, run_team
from hfkvq.tuning.workers import AGAIN, finished, give_back
from tests.command import assert_refused, invoke
from tests.tuning.test_study import Known, search

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def ctrl_c():
    """Python's own handler: a shell's background jobs ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class TestPlaces:
    def test_a_worker_a_gpu(self, monkeypatch):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        places, used = find_places(None, "all", "cuda", 4)
        assert used == [0, 1, 2, 3]
        assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == ["0", "1", "2", "3"]
        assert find_places(None, "2,0", "cuda", 4)[1] == [2, 0]
        # More than there are GPUs share them; one is alone.
        assert find_places(3, None, "cuda", 2)[1] == [0, 1, 0]
        assert find_places(None, None, "cuda", 2)[1] == [0]

    def test_of_those_that_are_visible(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-abc")
        places, _ = find_places(2, None, "cuda", 2)
        assert [place.environment for place in places] == [
            {"CUDA_VISIBLE_DEVICES": "4"},
            {"CUDA_VISIBLE_DEVICES": "GPU-abc"},
        ]

    def test_cores_are_shared(self, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        places, used = find_places(4, None, "cpu", 0)
        assert used == []
        assert [place.environment for place in places] == [{"OMP_NUM_THREADS": "2"}] * 4

    @pytest.mark.parametrize(("gpus", "kind"), [("2", "cuda"), ("0,x", "cuda"), ("", "cuda"), ("0", "cpu")])
    def test_no_such_gpu(self, gpus, kind):
        with pytest.raises(ValueError, match="gpus: got"):
            find_places(None, gpus, kind, 2)

    def test_refused_as_typed(self):
        assert_refused(invoke("tune", "kitty", "--device", "cpu", "--gpus", "0"), "but the device is cpu")


def job(folder, tell):
    """By the name of its process."""
    what = multiprocessing.current_process().name
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "fails":
        raise ValueError("x: got 1, allowed 2.")
    try:
        tell((what, os.environ["PLACE"]))
        if what == "waits":
            time.sleep(60)
    except KeyboardInterrupt:
        (folder / "stopped").touch()
        raise


def places(*names):
    return [Place(name, {"PLACE": f"of {name}"}) for name in names]


class TestTeam:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        """Processes that have imported everything; the slow test has real ones."""
        fork = multiprocessing.get_context("fork")
        monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)

    def test_workers_end_alone(self, tmp_path):
        heard, said = [], []
        run_team(places("dies", "fails", "works"), partial(job, tmp_path), heard.append, said.append)
        assert heard == [("works", "of works")]
        assert "PLACE" not in os.environ
        # What the last one says, if it fails, nobody can take up.
        assert set(said) <= {
            "dies: It has died: killed by SIGKILL. The others go on, and take up what it was at.",
            "fails: x: got 1, allowed 2. The others go on, and take up what it was at.",
        }

    def test_all_fail(self, tmp_path):
        with pytest.raises(ValueError, match=r"workers: all have failed; .* x: got 1, allowed 2\.$"):
            run_team(places("fails", "fails"), partial(job, tmp_path), print, print)
        with pytest.raises(ValueError, match=r"said: It has died: killed by SIGKILL\.$"):
            run_team(places("dies"), partial(job, tmp_path), print, print)

    def test_ctrl_c_stops_all(self, tmp_path):
        """Those that still run, and they have time to give back what they are at."""
        heard = []

        def interrupt(what):
            heard.append(what)
            raise KeyboardInterrupt

        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run_team(places("fails", "waits"), partial(job, tmp_path), interrupt, print)
        assert heard == [("waits", "of waits")]
        assert time.monotonic() - began < 30
        assert (tmp_path / "stopped").exists()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stop_gives_the_trial_back(tmp_path):
    """The presets' knobs, which come first, are not lost."""

    class Stopped(Known):
        def __call__(self, preset, report=None):
            super().__call__(preset, report)
            raise KeyboardInterrupt

    storage, stopped, known = f"{tmp_path}/tuning.log", Stopped(), Known()
    with pytest.raises(KeyboardInterrupt):
        search(stopped, trials=3, storage=storage)
    study = search(known, trials=3, storage=storage)
    assert known.calls[0] == stopped.calls[0]
    assert len(study.points()) == 3
    assert study.points()[0].number == 1
    assert study.optuna.get_trials()[1].user_attrs[AGAIN] == 0


def test_a_stop_while_asking_waits(tmp_path, monkeypatch):
    """Else the trial would belong to nobody until others take this worker for dead."""
    ask = optuna.Study.ask

    def interrupted(study, *arguments, **options):
        trial = ask(study, *arguments, **options)
        signal.raise_signal(signal.SIGINT)
        return trial

    storage = f"{tmp_path}/tuning.log"
    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            search(trials=3, storage=storage)
    states = [trial.state for trial in search(trials=1, storage=storage).optuna.get_trials()]
    assert states == [TrialState.FAIL, TrialState.COMPLETE]


def test_a_trial_that_kills_its_workers_stays_failed(tmp_path):
    study = search(trials=1).optuna
    ranges = finished(study)[0].distributions
    study.enqueue_trial({"tau_bf16": 0.3, "tau_int4": 0.2})
    for number in range(1, 3):
        asked = study.ask(ranges)
        assert asked.params == {"tau_bf16": 0.3, "tau_int4": 0.2}
        assert give_back(study, study.get_trials()[number], died=True)
    assert not [trial for trial in study.get_trials() if trial.state is TrialState.WAITING]
    assert not give_back(study, study.get_trials()[1])


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
    """Takes a moment; the worker named a is killed in the middle of its second trial."""

    def __init__(self, who):
        super().__init__()
        self.who = who

    def __call__(self, preset, report=None):
        time.sleep(0.05)
        score = super().__call__(preset, report)
        if self.who == "a" and len(self.calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return score


def test_workers_on_postgres(postgres):
    """Three that start together on an empty database, one killed in the middle: no trial is lost or doubled."""
    context = multiprocessing.get_context("fork")

    def work(name):
        # Time enough for beats of a busy machine: a worker taken for dead twice would leave its trial failed.
        search(Slow(name), trials=15, storage=postgres, beat=0.2, grace=4)

    workers = [context.Process(target=work, args=(name,)) for name in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL, 0, 0]
    study = load_study(postgres, "mixkvq")
    assert len(study.points()) == len(finished(study.optuna)) == 15
    knobs = [json.dumps(point.knobs, sort_keys=True) for point in study.points()]
    assert len(set(knobs)) == 15
    trials = study.optuna.get_trials()
    assert not {trial.state for trial in trials} & {TrialState.RUNNING, TrialState.WAITING}
    # The one that died has all its knobs, so another worker has run just these.
    died = [json.dumps(trial.params, sort_keys=True) for trial in trials if trial.state is TrialState.FAIL]
    assert died
    assert set(died) <= set(knobs)


@pytest.mark.slow
def test_tune_with_two_workers(tmp_path):
    """As it is typed; and stopped in the middle, then gone on with."""
    options = ["tune", "kitty:page_size=32:sink_length=4", "--space", "boost_ratio=0..0.5", "--workers", "2"]
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
    assert first.returncode == 130
    assert f"Stopped: finished trials are kept in {tmp_path}/tuning.log" in " ".join(errors.split())
    study = load_study(f"{tmp_path}/tuning.log", "mine")
    done = len(study.points())
    assert done >= 1
    assert TrialState.RUNNING not in {trial.state for trial in study.optuna.get_trials()}
    again = [*command, "--trials", str(done + 4), "--out", str(tmp_path / "mine.json")]
    ran = subprocess.run(again, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert len(load_study(f"{tmp_path}/tuning.log", "mine").points()) == done + 4
    assert (tmp_path / "mine.json").is_file()


@pytest.mark.gpu
class TestGPUs:
    @pytest.fixture(autouse=True)
    def two(self):
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")

    def test_each_worker_sees_its_own(self):
        heard = []
        run_team(find_places(2, None, "cuda", 2)[0], look, heard.append, print)
        assert {(count, first) for count, first, _ in heard} == {(1, True)}
        assert len({name for _, _, name in heard}) == 2

    def test_tune_as_typed(self, tmp_path):
        options = ["kitty:page_size=32:sink_length=4", "--space", "boost_ratio=0..0.5", "--gpus", "all", "--trials", 8]
        options += ["--samples", 2, "--held-out", 2, "--context", 192, "--prefill", 128, "--chunk", 64]
        options += ["--storage", f"{tmp_path}/tuning.log", "--name", "mine", "--dtype", "float32"]
        done = invoke("tune", *options)
        assert done.exit_code == 0, done.output
        assert len(load_study(f"{tmp_path}/tuning.log", "mine").points()) == 8


def look(tell):
    tell(
        (torch.cuda.device_count(), torch.ones(1, device="cuda").is_cuda, str(torch.cuda.get_device_properties(0).uuid))
    )
