"""``hfkvq serve --engine vllm``: what vLLM's server is called with; vLLM is stood in for."""

import importlib.util
import os
import sys

import pytest

from tests.command import assert_refused, invoke


def run(*arguments):
    return invoke("serve", "--engine", "vllm", *arguments)


@pytest.fixture
def called(monkeypatch):
    """Calls of `os.execve`, which would replace the test."""
    found, find = [], importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "vllm" or find(name))
    monkeypatch.setattr(os, "execve", lambda *given: found.append(given))
    return found


def test_options_are_translated(called, tmp_path):
    numbers = "--port", "9000", "--max-requests", "64", "--max-batch-tokens", "2048"
    run("--model", tmp_path, "--scheme", "best-2.5", *numbers)
    ((program, command, env),) = called
    assert program == command[0] == sys.executable
    assert command[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path)]
    assert dict(zip(command[5::2], command[6::2], strict=True)) == {
        "--host": "localhost",
        "--port": "9000",
        "--max-num-seqs": "64",
        "--max-num-batched-tokens": "2048",
        "--dtype": "auto",
        "--served-model-name": str(tmp_path),
        "--attention-backend": "CUSTOM",
        "--kv-cache-dtype": "int4_per_token_head",
    }
    assert env["HFKVQ_SCHEME"] == "best-2.5"
    run("--model", tmp_path)
    command = called[1][1]
    assert command[command.index("--max-num-seqs") + 1] == "256"
    assert "--max-num-batched-tokens" not in command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-blocks", "9"], "--num-blocks: got 9, but vLLM has no such option"),
        (["--request-tokens", "4096"], "--request-tokens: got 4096"),
        (["--max-memory-percent", "0.5"], "--max-memory-percent: got 0.5"),
        (["--device", "cpu"], "--device: got cpu"),
        (["--scheme", "no-such"], "no-such"),
    ],
)
def test_options_without_a_meaning_are_refused(called, tmp_path, arguments, words):
    assert_refused(run("--model", tmp_path, *arguments), words)
    assert called == []


def test_without_vllm_one_line_says_so(tmp_path):
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed")
    assert_refused(run("--model", tmp_path), "vllm is not installed")
