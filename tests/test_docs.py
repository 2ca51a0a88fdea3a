"""Commands that the documents name can be typed, and their examples run."""

import contextlib
import importlib.util
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
import typer

import hfkvq
from evals.preset_tables import schemes_markdown
from hfkvq.caches import get_scheme, list_schemes
from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.caches.schemes import base
from hfkvq.cli import app

# PyTorch looks up once which functions a device context redirects; it must not find the poisoned ones of `everywhere`.
with torch.device("meta"):
    torch.empty(0)

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUP = typer.main.get_command(app)


def blocks(path):
    """Commands of a document's blocks of code, continued lines joined."""
    text = path.read_text(encoding="utf-8")
    for block in re.findall(r"^```(?:sh|bash)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("hfkvq "):
                yield line


def spans(path):
    """Commands within a sentence, which may be incomplete."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`(hfkvq [a-z][^`]*)`", text):
        yield " ".join(span.split())


def command_of(words):
    """The command that words name, its name, and the words behind it."""
    command, name = GROUP, "hfkvq"
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"hfkvq has no command {name!r}"
        command = command.commands[name]
    return command, name, words


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_of_blocks_parse(path, monkeypatch):
    # Files of the examples.
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: contextlib.nullcontext())
    for line in blocks(path):
        command, name, words = command_of(shlex.split(line, comments=True)[1:])
        words = [__file__ if before == "--text" else word for before, word in zip(["", *words], words, strict=False)]
        # Parses and checks every option, and runs nothing.
        command.make_context(name, list(words))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_options_of_commands_in_sentences_exist(path):
    for line in spans(path):
        words = line.split()[1:]
        command, name, words = command_of(words)
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, name


def test_the_site_has_every_guide_and_what_the_package_offers():
    """Also where Sphinx is not installed, which `make docs` brings."""
    site = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    pages = [page for part in site["PAGES"].values() for page in part]
    assert len(set(pages)) == len(pages)
    assert [page for page in pages if not (ROOT / f"{page}.md").is_file()] == []
    assert {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")} <= set(pages)

    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in re.findall(r"automodule:: (\S+)", reference):
        assert importlib.util.find_spec(name) is not None, name
    others = set(re.findall(r"auto(?:class|function):: (\w+)", reference))
    offered = re.findall(r"import (\w+) as \1", (ROOT / "hfkvq" / "caches" / "__init__.py").read_text(encoding="utf-8"))
    assert others == set(offered) - set(hfkvq.__all__) - {"schemes"}


def test_folders_lead_to_their_readme_on_the_site():
    """And the contents go behind the README, for the site alone."""
    site = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    source = ["[a](notebooks), [b](evals/results), [c](docs/speed.md#warnings), [d](evals/tasks/)"]
    site["adapt"](None, "docs/speed", source)
    assert source == ["[a](notebooks), [b](evals/results), [c](docs/speed.md#warnings), [d](evals/tasks/)"]
    site["adapt"](None, "README", source)
    text, _, contents = source[0].partition("\n```{toctree}")
    assert text == (
        "[a](notebooks/README.md), [b](evals/results), [c](docs/speed.md#warnings), [d](evals/tasks/README.md)"
    )
    assert contents.count("```{toctree}") == len(site["PAGES"]) - 1


def test_decisions_are_dated_and_short():
    text = (ROOT / "DECISIONS.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 40_000
    entries = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(entries) > 50
    for entry in entries:
        heading, *lines = re.split(r"\n##? ", entry)[0].strip().splitlines()
        assert re.match(r"\d{4}-\d\d-\d\d \S", heading), heading
        starts = [line.split(":**")[0] for line in lines if line]
        assert starts in (["**Decided", "**Why", kind] for kind in ("**Turned down", "**Changes our mind")), heading


def test_the_schemes_of_contributing_run_as_they_stand(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(base, "_PRESETS", dict(base._PRESETS))
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = "\n\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    path = tmp_path / "example.py"
    path.write_text(code, encoding="utf-8")
    done = runpy.run_path(str(path))
    printed = capsys.readouterr().out
    assert "torch.Size([1, 48])" in printed
    assert "tokens that a step seals may belong in several runs" in printed
    # Of 47 tokens a head holds less than half.
    assert done["cache"].layers[0].evicted
    assert int(done["cache"].layers[0].store.counters[1].max()) <= 32
    assert get_scheme("lean-2") == done["Lean"](bits=2)
    assert "lean" in base.listed("demo")
    assert "| `lean-2` | The same in 2 bits. |" in schemes_markdown()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_presets_that_are_advised_exist():
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    taken = [line.split(" | ")[1] for line in text.splitlines() if line.count(" | ") == 2]
    named = {name for each in taken for name in re.findall("`([a-z0-9.-]+)`", each)}
    assert {DEFAULT_SCHEME, "full"} <= named <= list_schemes().keys()
