"""Nothing is compiled again for another batch or length, and all that a run needs can be compiled ahead of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import types
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch

from hfkvq import kernels
from hfkvq.caches.make import LayerShape, layer_plan
from hfkvq.caches.scheme import get_scheme
from hfkvq.kernels import dispatch, warm

ROOT = Path(__file__).resolve().parents[2]

WINDOWS = ("full@128", "kitty-pro@2048")

PRESETS = ("best-3.4", "kitty-pro", "mixkvq", "saw-int4", "triaxial", "arkv", "kvarn", "full", *WINDOWS)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    tuning = str(tmp_path_factory.mktemp("tuning") / "none.json")
    return _run("tests.kernels.warm_kernels", [",".join(PRESETS)], {"HFKVQ_TUNING": tuning})


def _run(module, arguments, variables):
    """In a process of its own, since Triton decides when it is imported whether it compiles."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def variants(pairs, merges=False):
    return {(name, key) for name, key in pairs if merges or name != "merge.merge_kernel"}


@pytest.mark.parametrize("preset", PRESETS)
def test_variants_do_not_depend_on_rows_and_lengths(found, preset):
    first, *others = [pairs for name, pairs in found[preset].items() if " x " in name]
    for pairs in others:
        # Of a short prompt there may be nothing to seal.
        assert {name for name, _ in variants(pairs) - variants(first)} == set()
    merges = {key for name, key in found[preset]["ahead"] if name == "merge.merge_kernel"}
    assert len(merges) <= 3


@pytest.mark.parametrize("preset", PRESETS)
def test_all_that_runs_need_is_compiled_ahead(found, preset):
    ahead, several = (variants(found[preset][name], merges=True) for name in ("ahead", "several ahead"))
    assert ahead < several
    assert ("several" in found[preset]) == (preset not in ("triaxial", "arkv"))
    for case, pairs in found[preset].items():
        have = several if case.startswith("several") else ahead
        missing = sorted(name for name, _ in variants(pairs, merges=True) - have)
        assert missing == [], case


def test_names_of_kernels_do_not_depend_on_what_came_before():
    """Else a process would not find what another one has compiled."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    first, second = _run("tests.kernels.kernel_names", ("forward", "backward"), {}).values()
    assert len(first) > 100
    assert [name for name in first if first[name] != second[name]] == []


def test_layers_alike_but_for_rows_and_capacity_are_one():
    plan = layer_plan(get_scheme("kitty-pro"), LayerShape(32, 8, 128), torch.bfloat16)
    assert plan.heads == 8
    assert warm.normal(plan) == warm.normal(warm.normal(plan))
    assert warm.normal(plan).capacity == 1


def test_nothing_begins_without_a_gpu(monkeypatch):
    plan = layer_plan(get_scheme("arkv"), LayerShape(32, 8, 128), torch.float16)
    assert (plan.fold, plan.heads, plan.query_heads) == (8, 1, 32)
    begun = []
    monkeypatch.setattr(warm, "_start", lambda *given: begun.append(given))
    warm.start(plan, 32, torch.device("cpu"), None)
    assert not begun
    warm.start(plan, 32, torch.device("cuda", 0), None)
    assert begun == [(warm.normal(plan), 32, torch.device("cuda", 0), None, (1,))]


def test_what_goes_wrong_is_nobodys_concern():
    ahead = pytest.importorskip("hfkvq.kernels.triton.ahead")

    def wanted():
        raise OSError("no room left")

    beside = ahead.Beside(wanted, lambda: None, torch.device("cpu")).start()
    assert beside.is_ready()
    assert not beside.lacks("seal")
    assert dispatch.compiling == []


def test_who_measures_waits_for_kernels(monkeypatch):
    """Of a kernel that is being compiled, nobody else waits for the end."""
    ahead = pytest.importorskip("hfkvq.kernels.triton.ahead")
    compiled, found = threading.Event(), []
    monkeypatch.setattr(ahead, "find", lambda each: compiled.is_set())
    kernel = types.SimpleNamespace(__module__="hfkvq.kernels.triton.seal.channel", __name__="seal_channel_kernel")
    wanted = [ahead.Wanted(kernel, (), {})]
    beside = ahead.Beside(lambda: wanted, lambda: compiled.wait(30) and None, torch.device("cpu")).start()
    assert beside.lacks("seal")
    with kernels.await_kernels():
        waiting = threading.Thread(target=lambda: found.append(beside.lacks("seal")))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        assert not found
        compiled.set()
        waiting.join(30)
    assert found == [False]
    assert dispatch.awaited == 0
    assert dispatch.compiling == []


# That what is compiled ahead is what runs need, and that another process is started and heard, the others say.
@pytest.mark.slow
def test_another_process_compiles_what_is_not_there(tmp_path):
    """Meanwhile it is lacking; afterwards all is found on disk."""
    done = _run(
        "tests.kernels.beside", ["full"], {"TRITON_CACHE_DIR": str(tmp_path), "HFKVQ_TUNING": str(tmp_path / "no")}
    )
    assert done["while"] == [False, True, False, 1]
    assert done["after"] == [True, False, False, 0]
    assert done["errors"] == []
    assert done["compiled"] == done["wanted"]
    assert "decode_kernel" in done["compiled"]
    assert all(done["found"])
    # Found, so not compiled.
    assert done["again"] == [True, True, False]


def test_one_variant_is_compiled_once():
    """Lengths and strides are told apart by what Triton asks of them."""
    worker = pytest.importorskip("hfkvq.kernels.triton.worker")
    ahead = pytest.importorskip("hfkvq.kernels.triton.ahead")
    kernel = types.SimpleNamespace(__name__="decode_kernel")

    def key(*numbers, **constants):
        return worker.key_of(ahead.Wanted(kernel, (torch.float16, numbers), constants))

    assert key(32, 48) == key(64, 16)
    assert key(3, 5) == key(7, 9)
    different = [key(32), key(3), key(1), key(1 << 31), key((1 << 31) + 1), key(32, 32), key(32, BLOCK=2), key(True)]
    assert len(set(different)) == len(different)


def test_nothing_is_looked_for_where_no_kernel_of_the_name_is(tmp_path, monkeypatch):
    ahead = pytest.importorskip("hfkvq.kernels.triton.ahead")
    kernel = types.SimpleNamespace(__name__="decode_kernel", __module__=f"{ahead.__package__}.attend")
    looked, prepared, found = [], [], threading.Event()

    def find(each):
        looked.append(threading.current_thread().name)
        return found.is_set()

    monkeypatch.setattr(ahead, "find", find)
    monkeypatch.setattr(ahead, "_prepare", lambda each, device: prepared.extend(each))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wanted = [ahead.Wanted(kernel, (), {})]

    def work():
        beside = ahead.Beside(lambda: wanted, found.set, torch.device("cpu"))
        beside.start()
        beside._done.wait()
        assert beside.is_ready()
        return len(looked)

    # Afterwards it is looked for, and there.
    assert work() == 1
    assert prepared == wanted
    (tmp_path / "KEY").mkdir()
    (tmp_path / "KEY" / "decode_kernel.json").touch()
    looked.clear()
    found.clear()
    assert work() == 2
    # Another manager keeps them elsewhere.
    (tmp_path / "KEY" / "decode_kernel.json").unlink()
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "of.somebody:Manager")
    looked.clear()
    found.clear()
    assert work() == 2
    assert prepared == wanted


def test_every_thread_looks_for_kernels_of_its_device(monkeypatch):
    ahead = pytest.importorskip("hfkvq.kernels.triton.ahead")
    current, found = [], []

    @contextlib.contextmanager
    def on(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(ahead, "find", lambda each: found.append((each, *current)))
    ahead._prepare(["one", "two"], torch.device("cuda", 1))
    assert found == [("one", torch.device("cuda", 1)), ("two", torch.device("cuda", 1))]


def test_what_another_triton_gives_is_passed_on(monkeypatch):
    keys, jit = pytest.importorskip("hfkvq.kernels.triton.keys"), pytest.importorskip("triton.runtime.jit")

    class Finder:
        def _update_hash(self, *given, **more):
            return given, more

    monkeypatch.setattr(jit, "DependenciesFinder", Finder)
    keys.look_into_callees_first()
    ours = types.SimpleNamespace(fn=types.SimpleNamespace(__module__=f"{keys._OURS}.attend"), cache_key="key")
    for func in (object(), types.SimpleNamespace(fn=None), ours):
        assert Finder()._update_hash(func, "more", deep=True) == ((func, "more"), {"deep": True})


def come_while_one_begins(own, given, begun, go):
    """Orders by name and capability, each from a thread of its own: the others wait when the first one goes on."""
    threads = [threading.Thread(target=own.compile_in_turn, args=(name, own.GPUS[gpu])) for name, gpu in given]
    threads[0].start()
    assert begun.wait(60)
    for thread in threads[1:]:
        thread.start()
    while len(own._WAITING) < 3:
        time.sleep(0.01)
    go.set()
    for thread in threads:
        thread.join(60)
    assert own._WAITING == []


def test_layers_that_come_while_a_process_starts_go_along(monkeypatch):
    own = pytest.importorskip("hfkvq.kernels.triton.warm")
    starts, go, taken = threading.Event(), threading.Event(), []

    def compile_elsewhere(orders, gpu, beside):
        starts.set()
        assert go.wait(60)
        taken.append(sorted(orders()))
        return []

    monkeypatch.setattr(own, "compile_elsewhere", compile_elsewhere)
    come_while_one_begins(own, [("a", 90), ("b", 90), ("c", 90)], starts, go)
    assert taken == [["a", "b", "c"]]


def test_a_process_that_fails_is_started_once(monkeypatch):
    own = pytest.importorskip("hfkvq.kernels.triton.warm")
    started = []

    def compile_elsewhere(orders, gpu, beside):
        started.append(1)
        own._WAITING.append(("of another layer", gpu))
        raise RuntimeError("no process")

    monkeypatch.setattr(own, "compile_elsewhere", compile_elsewhere)
    with pytest.raises(RuntimeError, match="no process"):
        own.compile_in_turn("one", own.GPUS[90])
    assert started == [1]
    assert own._WAITING == []


def test_what_comes_while_a_process_fails_has_one_of_its_own(monkeypatch):
    own = pytest.importorskip("hfkvq.kernels.triton.warm")

    def compile_elsewhere(orders, gpu, beside):
        assert orders() == ["one"]
        own._WAITING.append(("of another layer", gpu))
        raise RuntimeError("no memory")

    monkeypatch.setattr(own, "compile_elsewhere", compile_elsewhere)
    monkeypatch.setattr(own, "_WAITING", [])
    with pytest.raises(RuntimeError, match="no memory"):
        own.compile_in_turn("one", own.GPUS[90])
    assert [order for order, _ in own._WAITING] == ["of another layer"]


class Deadly:
    """A kernel whose compiler is killed."""

    @property
    def device_caches(self):
        os._exit(9)


def test_a_compiler_that_dies_is_not_waited_for(monkeypatch):
    worker = pytest.importorskip("hfkvq.kernels.triton.worker")
    monkeypatch.setattr(worker, "_JOBS", [types.SimpleNamespace(kernel=Deadly())] * 3)
    with pytest.raises(BrokenProcessPool):
        worker._side_by_side(2)


class Talking:
    """A kernel whose compiler prints."""

    __name__ = "talks"

    @property
    def device_caches(self):
        os.write(1, b"compiling")
        raise ValueError("it cannot be")


def test_children_do_not_hold_what_is_read(monkeypatch, capfd):
    """Else the end of the first process would not be seen while they live."""
    worker = pytest.importorskip("hfkvq.kernels.triton.worker")
    monkeypatch.setattr(worker, "_JOBS", [types.SimpleNamespace(kernel=Talking())])
    (done,) = worker._side_by_side(1)
    assert "it cannot be" in done.error
    assert capfd.readouterr().out == ""


LATE = """
import pathlib, pickle, sys, time
pickle.load(sys.stdin.buffer)
folder = pathlib.Path(sys.argv[1])
(folder / "begun").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
from hfkvq.kernels.triton import worker
worker._say(worker._READY)
orders = pickle.load(sys.stdin.buffer)
(folder / "orders").write_text(repr(orders))
worker._say(worker._ANSWER)
"""
"""Stands for the process that compiles: it is ready when it may."""


def late(folder):
    command = [sys.executable, "-c", LATE, str(folder)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True, env=os.environ
    )


def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert path.exists()


def test_orders_are_given_when_this_process_ends(tmp_path, monkeypatch):
    """Before the one that compiles is ready, and once."""
    worker = pytest.importorskip("hfkvq.kernels.triton.worker")
    leaving, asked, lines = [], [], []
    monkeypatch.setattr(worker.atexit, "register", leaving.append)
    monkeypatch.setattr(worker.atexit, "unregister", leaving.remove)

    def orders():
        asked.append(1)
        return ["a layer"]

    with late(tmp_path) as process:
        listening = threading.Thread(
            target=lambda: lines.extend(worker._told(process, worker.pickle.dumps("first"), orders)), daemon=True
        )
        listening.start()
        wait_for(tmp_path / "begun")
        for _ in range(2):
            leaving[0]()
        (tmp_path / "go").touch()
        listening.join(60)
    assert lines[-1].startswith(worker._ANSWER)
    assert (tmp_path / "orders").read_text() == "['a layer']"
    assert len(asked) == 1
    assert not leaving


@pytest.mark.slow
def test_compiling_outlives_who_has_asked(tmp_path):
    """A script that ends within seconds leaves its kernels to the next one."""
    pytest.importorskip("hfkvq.kernels.triton.worker")
    script = f"""
import pathlib, threading
from hfkvq.kernels.triton import worker
from tests.kernels.test_warm import late, wait_for
folder = pathlib.Path({str(tmp_path)!r})
process = late(folder)
given = process, worker.pickle.dumps("first"), lambda: ["a layer"]
threading.Thread(target=worker._told, args=given, daemon=True).start()
wait_for(folder / "begun")
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=100)
    assert not (tmp_path / "orders").exists()
    (tmp_path / "go").touch()
    wait_for(tmp_path / "orders")
    assert (tmp_path / "orders").read_text() == "['a layer']"


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="there are no groups of processes")
def test_a_process_that_takes_too_long_ends_with_its_children(monkeypatch):
    worker, warm_kernels = (pytest.importorskip(f"hfkvq.kernels.triton.{name}") for name in ("worker", "warm"))
    script = "import subprocess; subprocess.run(['sleep', '60'])"
    monkeypatch.setattr(worker, "_START", script)
    monkeypatch.setattr(worker, "LONGEST", 1.0)
    begun = time.perf_counter()
    with pytest.raises(RuntimeError, match="ended with -9"):
        worker.compile_elsewhere(list, warm_kernels.GPUS[90], beside=True)
    assert time.perf_counter() - begun < 30


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel's files what has become of a process")
def test_an_interrupt_ends_the_process_with_its_children(tmp_path, monkeypatch):
    worker, warm_kernels = (pytest.importorskip(f"hfkvq.kernels.triton.{name}") for name in ("worker", "warm"))
    file = tmp_path / "child"
    script = f"""
import subprocess
child = subprocess.Popen(["sleep", "60"])
open({str(file)!r}, "w").write(str(child.pid))
print({worker._READY!r}, flush=True)
child.wait()
"""

    def orders():
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "_START", script)
    with pytest.raises(KeyboardInterrupt):
        worker.compile_elsewhere(orders, warm_kernels.GPUS[90])
    stat, end = Path("/proc", file.read_text(), "stat"), time.monotonic() + 30

    def lives():
        # It may have ended without anybody having asked for its exit status.
        with contextlib.suppress(OSError):
            return stat.read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    while lives() and time.monotonic() < end:
        time.sleep(0.05)
    assert not lives()


def test_what_lies_in_the_folder_is_not_imported(tmp_path, monkeypatch):
    """And what a process prints is not its answer; one that fails says why."""
    worker, warm_kernels = (pytest.importorskip(f"hfkvq.kernels.triton.{name}") for name in ("worker", "warm"))
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert worker.compile_elsewhere(list, warm_kernels.GPUS[90]) == []
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(RuntimeError, match="no interpreter of its own"):
        worker.compile_elsewhere(list, warm_kernels.GPUS[90])


def test_one_process_at_a_time_takes_along_what_came_meanwhile(monkeypatch):
    own = pytest.importorskip("hfkvq.kernels.triton.warm")
    begun, go, taken = threading.Event(), threading.Event(), []

    def compile_elsewhere(orders, gpu, beside):
        taken.append((list(orders()), gpu.name, beside))
        begun.set()
        assert go.wait(60)
        return []

    monkeypatch.setattr(own, "compile_elsewhere", compile_elsewhere)
    given = [("first", 90), ("second", 90), ("third", 90), ("elsewhere", 80)]
    come_while_one_begins(own, given, begun, go)
    assert taken[0] == (["first"], "sm_90", True)
    assert sorted((sorted(orders), gpu) for orders, gpu, _ in taken[1:]) == [
        (["elsewhere"], "sm_80"),
        (["second", "third"], "sm_90"),
    ]


def test_no_thread_to_be_had(monkeypatch):
    ahead = pytest.importorskip("hfkvq.kernels.triton.ahead")

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ahead.threading.Thread, "start", no_thread)
    beside = ahead.Beside(list, lambda: None, torch.device("cpu")).start()
    assert beside.is_ready()
    assert dispatch.compiling == []


def test_a_kernel_that_could_not_be_loaded_is_not_launched():
    """Triton has a launcher then, and no function."""
    ahead = pytest.importorskip("hfkvq.kernels.triton.ahead")
    compiled = types.SimpleNamespace(name="decode_kernel", function=None, _init_handles=lambda: None)
    with pytest.raises(RuntimeError, match="decode_kernel: this kernel could not be loaded"):
        ahead.load(compiled)


class OnItsWay:
    """Kernels of some modules that are being compiled."""

    def __init__(self, *modules):
        self.modules = modules

    def lacks(self, module):
        return module in self.modules


@pytest.mark.parametrize("module", ["hadamard", "seal"])
def test_the_reference_stands_in_for_a_kernel_that_is_not_there(module, triton_backend, monkeypatch):
    used = []
    run = dispatch._LAUNCHERS["hadamard"]
    monkeypatch.setitem(dispatch._LAUNCHERS, "hadamard", lambda *args: used.append(1) or run(*args))
    x = torch.randn(4, 64, device=triton_backend)
    monkeypatch.setattr(dispatch, "compiling", [OnItsWay(module)])
    with kernels.use_interpreter():
        assert not dispatch.launches(x)
        got = kernels.hadamard(x, 32)
    assert bool(used) == (module != "hadamard")
    torch.testing.assert_close(got, kernels.hadamard(x, 32))
    # Of much, it would take too much memory.
    monkeypatch.setattr(dispatch, "MOST_BYTES", x.nbytes - 1)
    used.clear()
    with kernels.use_interpreter():
        kernels.hadamard(x, 32)
    assert used
