"""`watch`: exact without asking a device, drawn from a thread, and the same of a server."""

import functools
import io
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import hfkvq
from hfkvq import MixedKVCache
from hfkvq.cli import app
from hfkvq.measure import watching
from hfkvq.measure.watching import Moment, look
from tests.caches.driver import small
from tests.caches.graph_recorder import TapeGraph, captured  # noqa: F401
from tests.caches.models import build, prompt
from tests.caches.test_graphs import steps
from tests.command import assert_refused, invoke

run = functools.partial(invoke, "watch")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watching, "INTERVAL", 0.01)


@pytest.mark.parametrize("capacity", [None, 90])
@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "best-3.4"), ("llama", "snapkv+kivi-2"), ("gemma3", "kitty"), ("qwen3-next", "full")],
)
def test_looks_are_exact(family, name, capacity):
    model = build(family)
    cache = MixedKVCache(model, small(name), max_cache_len=capacity)
    assert look([cache])[:3] == (0, 0, 0)
    model.generate(prompt(2, 70), past_key_values=cache, max_new_tokens=9, do_sample=False)
    report, now = cache.memory(), look([cache], seconds=3.0)
    assert now[:4] == (3.0, 2, 2 * 78, report.total)
    assert len(now.bits) == len(cache.compressed_layers)
    assert now.mean_bits == pytest.approx(report.total_bits)
    assert min(now.bits) <= now.mean_bits <= max(now.bits)
    both = look([cache, cache], [torch.zeros(7, dtype=torch.uint8)])
    assert both[1:4] == (4, 4 * 78, report.total + 7)


@pytest.mark.usefixtures("captured")
def test_tokens_of_captured_steps_count_and_no_device_is_asked(monkeypatch):
    model = build("llama")
    cache = MixedKVCache(model, small("kitty-pro"))
    steps(model, cache, 6)
    assert TapeGraph.made
    assert cache.graphs.sync.ahead

    def asked(*_):
        pytest.fail("a look asked the device")

    for name in ("item", "tolist", "cpu", "sum", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, asked)
    now = look([cache])
    monkeypatch.undo()
    assert now.tokens == 26 == cache.get_seq_length()
    assert now.bytes == cache.memory().total


def test_a_live_picture(quick):
    """Of a model in use; its moments are rows for a plot."""
    model, told = build("llama"), io.StringIO()
    with (
        hfkvq.use(model, small("best-3.4")) as used,
        hfkvq.watch(used, Console(file=told, force_terminal=True)) as moments,
    ):
        model.generate(prompt(2, 40), max_new_tokens=20, do_sample=False)
    assert any(now.users == 2 and now.bytes and len(now.bits) == 2 for now in moments)
    assert [now.seconds for now in moments] == sorted(now.seconds for now in moments)
    for word in ("LlamaForCausalLM", "users", "tokens", "bytes", "bits", "layers"):
        assert word in told.getvalue()


def test_forgotten_tokens_are_told(quick):
    model, told = build("llama"), io.StringIO()
    cache = MixedKVCache(model, memory="64MiB", evict="snapkv")
    model.generate(prompt(2, 40), past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert "forgotten" not in watching.line_of(look([cache]))
    for layer in cache.compressed_layers:
        layer.gone = 7
    assert "tokens 82 (14 forgotten), " in watching.line_of(look([cache]))
    Console(file=told).print(watching.picture_of([look([cache])], "budget"))
    assert "forgotten  14" in told.getvalue()


def test_a_layer_that_changes_is_looked_at_later(quick, monkeypatch):
    """The watch goes on, and so does what is watched."""
    looks, told = [], io.StringIO()

    def source(caches, kept, seconds):
        looks.append(seconds)
        if len(looks) == 2:
            raise AttributeError("'NoneType' object has no attribute 'untyped_storage'")
        return Moment(seconds, 1, 5, 1024, 4.0)

    monkeypatch.setattr(watching, "look", source)
    with hfkvq.watch(MixedKVCache(build("llama")), Console(file=told, width=100)) as moments:
        while len(looks) < 4:
            time.sleep(0.01)
    assert len(moments) >= 3
    assert told.getvalue().splitlines()[0] == "0 s: users 1, tokens 5, 1.00 KiB, 4.00 bits"


@pytest.fixture
def server():
    """The address of a server that tells what ours does, and of another."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            told = b"hfkvq_requests 3\nhfkvq_tokens 1200\nhfkvq_bytes 2048\nhfkvq_room 4096\nhfkvq_bits 4.25\n"
            self.send_response(200 if self.path in ("/metrics", "/other/metrics") else 404)
            self.end_headers()
            self.wfile.write(told if self.path == "/metrics" else b"up 1\n")

        def log_message(self, *_):
            pass

    held = HTTPServer(("localhost", 0), Handler)
    thread = threading.Thread(target=held.serve_forever)
    thread.start()
    yield f"http://localhost:{held.server_port}"
    held.shutdown()
    thread.join()
    held.server_close()


def test_a_server(server, quick):
    for url in (server, f"{server}/v1", f"{server}/v1/"):
        assert watching.look_at_server(url, 2.0) == Moment(2.0, 3, 1200, 2048, 4.25)
    told = io.StringIO()
    with hfkvq.watch(server, Console(file=told, width=100)) as moments:
        assert len(moments) == 1
    assert "users 3, tokens 1,200, 2.00 KiB, 4.25 bits" in told.getvalue()
    assert_refused(run(f"{server}/other"), "allowed the address of a server by hfkvq serve")
    assert_refused(run("http://localhost:1"), "does not answer")


@pytest.mark.parametrize("what", [None, "best-3.4", 5, torch.nn.Linear(1, 1)], ids=repr)
def test_what_cannot_be_watched(what):
    said = r"what: got .*, allowed a MixedKVCache, what hfkvq.use returns"
    with pytest.raises(ValueError, match=said), hfkvq.watch(what):
        pass


@pytest.mark.parametrize("chat", [False, True])
def test_the_command_answers(chat, quick):
    """A prompt; or lines of a chat, each after what was said before."""
    options, asked = ["--preset", "kitty:sink_length=8", "--max-new-tokens", "12"], "Compute 12 + 7. Then add 5."
    if chat:
        done = CliRunner().invoke(app, ["watch", *options], input=f"{asked}\n{asked}\n")
    else:
        done = run(*options, "--prompt", asked)
    assert done.exit_code == 0, done.output
    tokens = [int(count) for count in re.findall(r"users 1, tokens (\d+), ", done.stdout)]
    assert tokens
    assert not chat or tokens[-1] > tokens[0] + 20
    assert re.search(r"bits\n\w", done.stdout)
