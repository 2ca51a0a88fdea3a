"""`hfkvq serve` through OpenAI's own client, with the reference model."""

import importlib.util
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from hfkvq.caches import get_scheme
from hfkvq.cli import app
from hfkvq.measure.models import find_model
from hfkvq.measure.reference import load_reference
from hfkvq.measure.watching import look_at_server
from tests.caches.models import first_layers

pytest.importorskip("hfkvq.serving", reason="Transformers before 5.19", exc_type=ImportError)
# Their import takes seconds, which processes that collect tests do not need.
if not all(map(importlib.util.find_spec, ("fastapi", "uvicorn", "openai"))):
    pytest.skip("pip install 'hfkvq[serve]' openai", allow_module_level=True)

QUESTION = [{"role": "user", "content": "Compute 12 + 7. Then add 5."}]


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The reference model with two of its layers, which answer in a fraction of the time."""
    folder = tmp_path_factory.mktemp("reference")
    model, tokenizer = load_reference(torch.float32)
    for each in (first_layers(model, 2), tokenizer):
        each.save_pretrained(folder)
    return find_model(str(folder))


@pytest.fixture(scope="module")
def server(source):
    from hfkvq.serving.server import Server

    server = Server(
        source, "reference", get_scheme("saw-int4"), torch.device("cpu"), torch.float32, port=free_port(),
        cb_num_blocks=8, cb_max_batch_tokens=512,
    )  # fmt: skip
    yield server
    server.close()


def client_of(server):
    import openai

    return openai.OpenAI(base_url=server.url, api_key="none", timeout=60, max_retries=5)


@pytest.fixture
def client(server):
    return client_of(server)


def ask(client, stream=False, messages=QUESTION):
    return client.chat.completions.create(
        model="reference", messages=messages, max_tokens=12, temperature=0.0, stream=stream
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
    assert look_at_server(server.url) == (0, 0, found["hfkvq_tokens"], found["hfkvq_bytes"], 4.25, (), 0)


@pytest.mark.parametrize(
    ("scheme", "given"),
    [("kitty-pro", {"requests": 2, "cb_num_blocks": 8}), (None, {"memory": "64MiB", "request_tokens": 512})],
)
def test_tokens_that_wait_in_16_bits(source, scheme, given):
    """More at once than there are windows, or a budget: every one is answered, and nothing is held then."""
    from hfkvq.serving.server import Server

    server = Server(
        source, "reference", scheme and get_scheme(scheme), torch.device("cpu"), torch.float32, port=free_port(),
        cb_max_batch_tokens=512, **given,
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
    # Without a request a budget is as it begins: pages in the model's own dtype.
    assert scheme or (held["hfkvq_bits"] == 32 and held["hfkvq_room"] < 64 * 2**20)


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


PATHS = {"chat completions": "chat/completions", "completions": "completions", "responses": "responses"}
PLAIN = {
    "chat completions": {"messages": QUESTION, "max_tokens": 8, "temperature": 0},
    "completions": {"prompt": "Compute 12 + 7.", "max_tokens": 8, "temperature": 0},
    "responses": {"input": "Compute 12 + 7.", "max_output_tokens": 8, "temperature": 0},
}


def post(server, endpoint, body):
    """Status and JSON of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/{PATHS[endpoint]}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def schema(endpoint):
    """Fields of OpenAI's package and of Transformers."""
    from transformers.cli.serving import chat_completion, completion, response

    kind = {
        "chat completions": chat_completion.TransformersCompletionCreateParamsStreaming,
        "completions": completion.TransformersTextCompletionCreateParams,
        "responses": response.TransformersResponseCreateParamsStreaming,
    }[endpoint]
    return set(kind.__annotations__)


# A value of a right type that asks for something, for fields that have one.
WISHES = {
    "audio": {"voice": "alloy", "format": "wav"}, "background": True, "best_of": 2, "echo": True,
    "frequency_penalty": 0.5, "function_call": "auto", "functions": [{"name": "f"}], "include": ["message.logprobs"],
    "logit_bias": {"5": 1}, "logprobs": True, "metadata": {"a": "b"}, "modalities": ["audio"], "n": 2,
    "parallel_tool_calls": False, "prediction": {"type": "content", "content": "x"}, "presence_penalty": 0.5,
    "prompt_cache_retention": "24h", "reasoning_effort": "low", "response_format": {"type": "json_object"},
    "service_tier": "flex", "store": True, "suffix": "x", "text": {"format": {"type": "json_object"}},
    "tool_choice": "required", "top_logprobs": 2, "truncation": "auto", "verbosity": "low",
    "stream_options": {"include_obfuscation": True}, "seed": 1,
}  # fmt: skip


@pytest.mark.parametrize("endpoint", PATHS)
def test_a_field_that_is_not_obeyed_is_refused_by_its_name(server, endpoint):
    obeyed = {"user", "safety_identifier", "prompt_cache_key", "tools", "chat_template_kwargs"} | set(PLAIN[endpoint])
    obeyed |= {"model", "max_tokens", "max_completion_tokens", "top_p", "stop", "stream", "instructions"}
    for name in [*sorted(schema(endpoint) - obeyed - {"generation_config"}), "no_such_field"]:
        wish = {name: WISHES.get(name, {"a": 1})}
        if name == "seed":
            wish["temperature"] = 1.0
        status, answer = post(server, endpoint, PLAIN[endpoint] | wish)
        assert (status, answer["error"].get("param")) == (400, name)
        assert name in answer["error"]["message"]


BAD = [
    *({name: value} for name in ("max_tokens", "max_completion_tokens") for value in (0, -1, 1.5, "8", True, 10**30)),
    *({"temperature": value} for value in (-1, 3, "0", True, float("nan"), float("inf"), 10**400)),
    *({"top_p": value} for value in (-0.1, 1.1, "1", [])),
    *({"stop": value} for value in ("", [""], 5, ["a"] * 5, [1], {})),
    *({"messages": value} for value in ([], "hello", {}, [1], [{}], [{"role": "user"}], [{"content": "a"}], None)),
    *({"messages": [{"role": "user", "content": value}]} for value in (5, {}, [], [5], [{"type": "text"}])),
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]},
    *({"messages": [{"role": role, "content": "a"}]} for role in ("banana", 5, None, [])),
    {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
    {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [5]}]},
    *(
        {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}]}
        for text in ('{"a": "\\ud800"}', "{", "[]", 5)
    ),
    {"messages": [*QUESTION, {"role": "assistant", "content": "a", "audio": {"id": "1"}}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": [{"role": "user", "content": "a", "\ud800": 1}]},
    {"messages": [{"role": "user", "content": "7 " * 9000}]},
    # To cut it into tokens would take half a minute.
    {"messages": [{"role": "user", "content": "7 " * 3_000_000}]},
    {"user": "\udfff"},
    *({"tools": value} for value in ("f", [1], [{}], [{"type": "function"}], [{"type": "web_search"}])),
    *({"stream": value} for value in ("true", 1)),
    *({"model": value} for value in ("other", 5, [], {})),
    {"max_tokens": 4096},
    {"max_tokens": 8, "max_completion_tokens": 9},
    *({"chat_template_kwargs": value} for value in ([], "a", {"tokenize": False}, {"padding": "x"})),
    *({"generation_config": value} for value in ({}, "{", "[]", '{"max_new_tokens": 0}', '{"num_beams": 2}')),
    {"user": 5},
    {"stream_options": 5},
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_at_once(server, stream):
    """Answers have status 400, the field's name and one line of words; the server goes on."""
    start = time.monotonic()
    for bad in BAD:
        status, answer = post(server, "chat completions", {"messages": QUESTION, "stream": stream} | bad)
        name = next(iter(bad))
        assert (status, answer["error"]["param"].split("[")[0].split(".")[0]) == (400, name), bad
        assert answer["error"]["message"].startswith(name)
    for body in (
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"a"',
        b"\xff\xfe",
        b"",
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ):
        status, answer = post(server, "chat completions", body)
        assert status == 400, body[:20]
    for bad in ({"prompt": ""}, {"prompt": []}, {"prompt": [1, 2]}, {"prompt": "7 " * 9000}, {"prompt": None}):
        assert post(server, "completions", bad)[0] == 400
    items = ([], [5], [{"type": "function_call"}], [{"type": "input_image"}], [{"type": "message"}], 5, "", None, {})
    for item in items:
        assert post(server, "responses", {"input": item, "stream": stream})[0] == 400, item
    assert time.monotonic() - start < 60
    assert post(server, "chat completions", PLAIN["chat completions"])[0] == 200


def text_of(endpoint, answer):
    if endpoint == "responses":
        return answer["output"][-1]["content"][0]["text"]
    choice = answer["choices"][0]
    return choice["text"] if endpoint == "completions" else choice["message"]["content"]


@pytest.mark.parametrize("endpoint", ["chat completions", "completions"])
def test_stop_texts_end_an_answer(server, client, endpoint):
    plain = PLAIN[endpoint] | {"max_tokens": 12}
    whole = text_of(endpoint, post(server, endpoint, plain)[1])
    assert len(whole) > 6
    for stop in (whole[3:5], [whole[4:7], "never seen"]):
        status, answer = post(server, endpoint, plain | {"stop": stop})
        texts = [stop] if isinstance(stop, str) else stop
        cut = min(at for text in texts if (at := whole.find(text)) >= 0)
        assert (status, text_of(endpoint, answer)) == (200, whole[:cut])
        assert answer["choices"][0]["finish_reason"] == "stop"
        call = client.chat.completions if endpoint == "chat completions" else client.completions
        stream = call.create(model="reference", stream=True, **plain | {"stop": stop})
        choices = [chunk.choices[0] for chunk in stream if chunk.choices]
        assert "".join((c.text if endpoint == "completions" else c.delta.content) or "" for c in choices) == whole[:cut]
    missing = post(server, endpoint, plain | {"stop": "never seen"})[1]
    assert text_of(endpoint, missing) == whole
    assert metrics(server)["hfkvq_requests"] == 0


def test_stop_stream_holds_back_what_may_begin_a_stop_text():
    from hfkvq.serving.server import StopStream

    class Letters:
        @staticmethod
        def step(_, token):
            return token

        @staticmethod
        def encode(text, add_special_tokens):
            return list(text)

    ended = []
    stream = StopStream(Letters, Letters, ["abc", "x"], lambda: ended.append(1))
    assert [stream.step(None, token) for token in ("a", "a", "b", "d", "ab")] == [None, "a", None, "abd", None]
    assert stream.step(None, "cz") is None
    assert (stream.text, stream.tokens(), ended) == ("aabd", ["a", "a", "b", "d"], [1])
    assert (stream.step(None, "q"), stream.rest()) == (None, None)
    stream = StopStream(Letters, Letters, ["abc"], lambda: None)
    assert [stream.step(None, "qa"), stream.rest(), stream.tokens()] == ["q", "a", ["qa"]]
    stream = StopStream(Letters, Letters, ["abc"], lambda: None)
    assert [stream.step(None, "qabcd"), stream.tokens()] == ["q", ["q"]]


def test_a_request_has_to_fit_into_positions_and_blocks():
    from transformers import GenerationConfig, LlamaConfig

    from hfkvq.serving.server import Answers, BadPrompt, LongAnswer

    model = SimpleNamespace(config=LlamaConfig(max_position_embeddings=64), generation_config=GenerationConfig())
    answers, router = Answers(model, None), SimpleNamespace(result_handlers={"taken": None})
    for room, limit, words in ((100, 64, "positions"), (32, 32, "blocks")):
        answers._cb = SimpleNamespace(room=lambda room=room: room, output_router=router, sampling={})
        config = GenerationConfig()
        answers._admit([1] * 10, config, "a")
        assert config.max_new_tokens == limit - 10
        assert answers._cb.sampling == {"a": {"greedy": True, "temperature": 1.0, "top_p": 1.0}}
        for tokens in (0, limit, limit + 1):
            with pytest.raises(BadPrompt, match=f"got {tokens} tokens, allowed 1 to {limit - 1}, since.*{words}"):
                answers._admit([1] * tokens, GenerationConfig(), "a")
        answers._admit([1] * 10, GenerationConfig(max_new_tokens=limit - 10), "a")
        with pytest.raises(LongAnswer, match=f"got {limit}, allowed up to {limit - 10} after 10"):
            answers._admit([1] * 10, GenerationConfig(max_new_tokens=limit), "a")
        with pytest.raises(ValueError, match="x-request-id: got 'taken'"):
            answers._admit([1], GenerationConfig(), "taken")


def test_each_request_has_its_own_temperature(server):
    """The first one's was taken for all."""
    plain = PLAIN["chat completions"] | {"max_tokens": 6}
    best = text_of("chat completions", post(server, "chat completions", plain)[1])
    hot = {
        text_of("chat completions", post(server, "chat completions", plain | {"temperature": 2})[1]) for _ in range(4)
    }
    assert len(hot | {best}) > 2
    for same in ({"temperature": 1e-9}, {"temperature": 2, "top_p": 0}, {"seed": 5}, {"temperature": None}):
        assert text_of("chat completions", post(server, "chat completions", plain | same)[1]) == best


def test_the_vocabulary_is_sorted_only_where_a_request_has_top_p(server, client, monkeypatch):
    from hfkvq.serving.server import SharedTopP

    ask(client)
    manager = server.serving.manager
    top_p = next(each for each in manager.logit_processor.logits_processor if isinstance(each, SharedTopP))
    seen = []
    plain = SharedTopP.__call__
    monkeypatch.setattr(SharedTopP, "__call__", lambda self, *given: seen.append(self.needed) or plain(self, *given))
    ask(client)
    assert seen
    assert not any(seen)
    assert manager.graph_variant() is False
    seen.clear()
    client.chat.completions.create(model="reference", messages=QUESTION, max_tokens=8, temperature=1.0, top_p=0.5)
    assert all(seen)
    # Rows with top_p 1 keep all tokens that any row with less keeps.
    one, half = (SimpleNamespace(state=SimpleNamespace(logit_processor_kwargs={"top_p": top})) for top in (1.0, 0.5))
    scores, given = torch.randn(2, 50), top_p.prepare_tensor_args([one, half])
    kept = top_p(scores, given).isfinite()
    assert kept[0].all()
    assert not kept[1].all()
    assert top_p(scores, top_p.prepare_tensor_args([one])) is scores


def test_fields_without_effect_are_taken(server):
    same = {
        "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False, "logit_bias": {}, "store": False,
        "response_format": {"type": "text"}, "user": "a", "seed": None, "stream_options": None, "service_tier": "auto",
        "tool_choice": "auto", "stop": [], "tools": [], "model": "reference",
    }  # fmt: skip
    assert post(server, "chat completions", PLAIN["chat completions"] | same)[0] == 200
    status, answer = post(server, "responses", PLAIN["responses"] | {"instructions": "Be brief.", "text": {}})
    assert (status, answer["object"]) == (200, "response")
    # Transformers takes a list whose first item has no role for texts alone.
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "id": "1", "summary": [], "content": [{"type": "text", "text": "So"}]}
    for first in (thought, call):
        given = PLAIN["responses"] | {"input": [first, *QUESTION], "instructions": "Be brief."}
        assert post(server, "responses", given)[0] == 200
    turns = [*QUESTION, {"role": "assistant", "content": "24", "refusal": None, "annotations": [], "tool_calls": None}]
    assert post(server, "chat completions", PLAIN["chat completions"] | {"messages": [*turns, *QUESTION]})[0] == 200


def test_the_served_model_is_listed(server, client):
    import openai

    assert [model.id for model in client.models.list()] == ["reference"]
    assert client.models.retrieve("reference").id == "reference"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    for path in ("load_model", "reset", "v1/systemone", "v1/audio/transcriptions"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url.replace("v1", path), b"{}")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--memory", "6GiB", "--scheme", "best-4.3"], "--memory: got 6GiB together with --scheme best-4.3"),
        (["--memory", "6GiB", "--num-blocks", "8"], "--memory: got 6GiB together with --num-blocks 8"),
        (["--memory", "lots"], "memory: got 'lots', allowed a size such as"),
        (["--memory", "1MiB"], "memory: got 1.00 MiB, allowed"),
        (["--memory", "6GiB", "--engine", "vllm"], "--memory: got 6GiB, but vLLM has no such option"),
    ],
)
def test_budgets_that_do_not_go(given, words):
    result = CliRunner().invoke(app, ["serve", "--device", "cpu", *given])
    assert result.exit_code == 2
    assert words in result.output.replace("\n", " ")


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
