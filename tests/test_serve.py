"""`hfkvq serve` through OpenAI's own client, with the reference model."""

import json
import socket
import threading
import time
import urllib.request

import pytest
import torch
from typer.testing import CliRunner

from hfkvq.caches import get_scheme
from hfkvq.cli import app
from hfkvq.measure.models import find_model

pytest.importorskip("hfkvq.serving", reason="Transformers before 5.19", exc_type=ImportError)
for name in ("fastapi", "uvicorn"):
    pytest.importorskip(name)
openai = pytest.importorskip("openai")

QUESTION = [{"role": "user", "content": "Compute 12 + 7. Then add 5."}]


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def server():
    from hfkvq.serving.server import Server

    server = Server(
        find_model(None), "reference", get_scheme("saw-int4"), torch.device("cpu"), torch.float32, port=free_port(),
        cb_num_blocks=8, cb_max_batch_tokens=512,
    )  # fmt: skip
    yield server
    server.close()


def client_of(server):
    return openai.OpenAI(base_url=server.url, api_key="none", timeout=60, max_retries=5)


@pytest.fixture
def client(server):
    return client_of(server)


def ask(client, stream=False, messages=QUESTION):
    return client.chat.completions.create(
        model="reference", messages=messages, max_tokens=24, temperature=0.0, stream=stream
    )


def metrics(server):
    with urllib.request.urlopen(server.url.replace("/v1", "/metrics"), timeout=30) as answer:
        return {name: float(value) for name, value in (line.split() for line in answer.read().decode().splitlines())}


def test_answers_whole_and_streamed(server, client):
    whole = ask(client).choices[0].message.content
    assert whole
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True) if chunk.choices]
    assert "".join(pieces) == whole
    found = metrics(server)
    assert found["hfkvq_requests"] == 0
    # Heads of 128: 4 bits, and a scale and a zero of 16 each.
    assert found["hfkvq_bits"] == 4.25
    assert 0 <= found["hfkvq_bytes"] <= found["hfkvq_room"]


def test_tokens_that_wait_in_16_bits():
    """More at once than there are windows: every one is answered, and nothing is held then."""
    from hfkvq.serving.server import Server

    server = Server(
        find_model(None), "reference", get_scheme("kitty-pro"), torch.device("cpu"), torch.float32, port=free_port(),
        requests=2, cb_num_blocks=8, cb_max_batch_tokens=512,
    )  # fmt: skip
    found = {}
    try:
        threads = [
            threading.Thread(target=lambda n=n: found.setdefault(n, ask(client_of(server)).choices[0].message.content))
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = metrics(server)
    finally:
        server.close()
    assert len(set(found.values())) == 1
    assert found[0]
    assert held["hfkvq_requests"] == held["hfkvq_bytes"] == 0 < held["hfkvq_room"]


def test_many_at_once(client):
    """The same question among others gets the answer that it gets alone."""
    alone = ask(client).choices[0].message.content
    found = {}

    def one(number):
        other = [{"role": "user", "content": f"Compute {number} + 3."}]
        found[number] = ask(client, messages=QUESTION if number % 2 else other).choices[0].message.content

    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {found[number] for number in (1, 3, 5)} == {alone}


def test_a_request_longer_than_the_pool_is_refused(server, client):
    """And the next one is answered."""
    ask(client)
    with pytest.raises(openai.BadRequestError, match="all blocks hold no more"):
        ask(client, messages=[{"role": "user", "content": "12 " * 9000}])
    assert ask(client).choices[0].message.content
    assert metrics(server)["hfkvq_requests"] == 0


def test_a_client_that_goes_away_leaves_nothing_behind(server, client):
    """Its request ends long before its answer would, it has no block any more, and the next one is answered."""
    stream = client.chat.completions.create(
        model="reference", messages=QUESTION, max_tokens=700, temperature=0.0, stream=True,
        extra_body={"generation_config": json.dumps({"eos_token_id": -1, "max_new_tokens": 700})},
    )  # fmt: skip
    next(iter(stream))
    assert metrics(server)["hfkvq_requests"] == 1
    stream.close()
    tokens = []
    deadline = time.monotonic() + 30
    while metrics(server)["hfkvq_requests"]:
        tokens.append(metrics(server)["hfkvq_tokens"])
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert max(tokens, default=0) < 300
    (pages,) = server.serving.manager.batch_processor.cache.cache_allocators.values()
    assert not any(pages.block_table.values())
    assert ask(client).choices[0].message.content


def test_another_model_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="400"):
        client.chat.completions.create(model="other", messages=QUESTION)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--scheme", "snapkv"], "forgets tokens"),
        (["--scheme", "saw-int5"], "saw-int5"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_command_refuses(options, words):
    result = CliRunner().invoke(app, ["serve", "--device", "cpu", *options])
    assert result.exit_code == 2
    assert words in result.output.replace("\n", "")


# The thread of a server that cannot listen ends by SystemExit.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", "--device", "cpu", "--num-blocks", "2", "--port", port])
    assert result.exit_code == 2
    assert "where no server can listen" in result.output.replace("\n", " ")
