"""What the documents say can be typed can be typed, and their figures are those of the repository."""

import importlib.util
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
import typer

import hfkvq
from evals import frontier, latents, model_steps, real_docs
from evals.shapes import get_config
from hfkvq import caches
from hfkvq.caches import get_scheme, list_schemes, placement, registry
from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.cli import app
from hfkvq.measure.presets import describe, eviction_markdown, schemes_markdown
from hfkvq.tuning.fit import Weights, outline_of, plan, weights_of
from hfkvq.tuning.fit.layer import Arrival, layer_bytes

# PyTorch looks up once which functions a device context redirects; it must not find the poisoned ones of `everywhere`.
with torch.device("meta"):
    torch.empty(0)

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUP = typer.main.get_command(app)
GIB = 1024**3


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
def test_commands_of_blocks_parse(path):
    for line in blocks(path):
        command, name, words = command_of(shlex.split(line, comments=True)[1:])
        # Parses and checks every option, and runs nothing.
        command.make_context(name, list(words))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_options_of_commands_in_sentences_exist(path):
    for line in spans(path):
        words = line.split()[1:]
        if words == ["bench"]:
            continue
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
    assert others == set(caches.__all__) - set(hfkvq.__all__) - {"schemes"}


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


def test_the_list_of_presets_is_that_of_the_registry():
    text = (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8")
    expected = schemes_markdown()
    found = re.search(r"<!-- presets: begin -->\n(.*?)\n<!-- presets: end -->", text, re.DOTALL)[1]
    evicting = re.search(r"<!-- eviction: begin -->\n(.*?)\n<!-- eviction: end -->", text, re.DOTALL)[1]
    assert evicting == eviction_markdown()
    assert found == expected, f"the table is to be that of `hfkvq schemes --markdown`:\n{expected}"


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
    monkeypatch.setattr(registry, "_PRESETS", dict(registry._PRESETS))
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
    assert "lean" in registry.listed("demo")
    assert "| `lean-2` | The same in 2 bits. |" in schemes_markdown()


def rows(text, heading):
    """Cells by first cell of the table whose header begins so."""
    table = text[text.index(heading) :].split("\n\n")[0]
    return {cells[0]: cells[1:] for line in table.splitlines()[2:] for cells in [re.split(r"\s*\|\s*", line[2:-2])]}


def fitted(name, *contexts):
    """Plans of Qwen3-8B on 24 GiB, the prompt in pieces of 2,048, for a cell that names a preset."""
    model = outline_of(get_config("qwen3-8b"))
    weights: Weights = weights_of(model, model.dtype)
    preset = None if name == "bf16" else re.match("`([^`]+)`", name)[1]
    return [
        plan(model, "", preset, weights, 24 * GIB, tokens, 1, None, GIB, Arrival(0, 0, 2048)) for tokens in contexts
    ]


def steps_of_a_token():
    """Milliseconds of a step after 32k of Qwen3-8B's shape, by engine; where several files have one, all of them."""
    found = {}
    for part in ("steps", "heavy-layer"):
        path = ROOT / "evals" / "results" / f"generate-{part}-qwen3-8b-h200.json"
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if (row["kind"], row["batch"], row["context"]) == ("decode", 1, 32768):
                found.setdefault(row["engine"], set()).add(f"{row['ms']['p50']:.1f} ms")
    return found


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize(("path", "table"), [("README.md", real_docs.readme), ("docs/results.md", real_docs.results)])
def test_the_tables_of_two_models_are_what_was_measured(path, table):
    """Bits and bytes are computed, the rest measured."""
    assert f"{real_docs.BEGIN}\n{table()}\n{real_docs.END}" in (ROOT / path).read_text(encoding="utf-8")


def test_the_tables_of_two_models_have_the_default_and_what_loses():
    assert {DEFAULT_SCHEME, "kivi-2", "arkv"} <= real_docs.README.keys()
    for name in (*real_docs.README, *real_docs.MORE, *real_docs.PLAIN):
        assert all(name in real_docs.losses(model) for model in (real_docs.SMOLLM2, real_docs.QWEN)), name


def test_the_steps_of_the_readme():
    text, steps = (ROOT / "README.md").read_text(encoding="utf-8"), steps_of_a_token()
    (ours, stock) = re.search(r"takes ([0-9.]+ ms) with `best-3.4` and ([0-9.]+ ms) with `DynamicCache`", text).groups()
    assert ours in steps["best-3.4"]
    assert stock in steps["dynamic-nocudnn"]


def test_the_bits_of_the_first_picture():
    """Of pages alone at heads of 64; what has no windows has them as its total bits."""
    found = {row["name"]: (frontier.bits_of_smollm2(row), row["total_bits"]) for row in frontier.rows()}
    assert (found["full"][0], found["saw-int4"][0], found["triaxial"][0]) == (16.0, 4.5, 5.0)
    for name, (bits, total) in found.items():
        assert bits == pytest.approx(total) if "turboquant" in name else bits < total, name


def test_the_table_of_the_real_model_is_what_was_measured():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"{frontier.BEGIN}\n{frontier.table()}\n{frontier.END}" in text


def test_the_table_of_latents_is_what_was_measured():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"{latents.BEGIN}\n{latents.table()}\n{latents.END}" in text


class TestModelSteps:
    ROWS = json.loads(model_steps.RESULTS.read_text(encoding="utf-8"))["rows"]

    def test_the_table_is_what_was_measured(self):
        text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
        assert f"{model_steps.BEGIN}\n{model_steps.table()}\n{model_steps.END}" in text

    def test_the_planner_agrees_with_what_was_measured(self, monkeypatch):
        """To the byte, with the room that buffers had then."""
        monkeypatch.setattr(placement, "MOST_HEADROOM", 1 << 30)
        # Bytes of a layer are kept by what they follow from, which this is not.
        layer_bytes.cache_clear()
        try:
            for row in self.ROWS:
                grown = row["shape"] in ("bloom-7b1", "gpt-j-6b") and row["cache"] == "kitty-pro"
                # These kept no tokens whole then.
                bare = ":sink_length=0:local_length=0" if row["cache"].startswith("latent") else ""
                if row["cache"] != "DynamicCache" and not grown:
                    planned = model_steps.planned(row | {"cache": row["cache"] + bare})
                    assert planned == row["bytes"], (row["shape"], row["cache"])
        finally:
            layer_bytes.cache_clear()


class TestChoosing:
    TEXT = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")

    def test_what_fits_is_what_is_computed(self):
        for name, cells in rows(self.TEXT, "| cache | 32k tokens").items():
            found = []
            for one in fitted(name, 32768, 131072):
                found += [f"{one.cache / GIB:.2f} GiB", f"{one.left / GIB:.2f} GiB", str(one.batch or "none")]
            assert cells == found, name

    def test_what_is_advised_exists(self):
        taken = [line.split(" | ")[1] for line in self.TEXT.splitlines() if line.count(" | ") == 2]
        named = {name for each in taken for name in re.findall("`([a-z0-9.-]+)`", each)}
        assert {DEFAULT_SCHEME, "full"} <= named <= list_schemes().keys()

    def test_costs_are_those_that_were_measured(self):
        measured, speed = rows(self.RESULTS, "| cache | code bits"), rows(self.RESULTS, "| kernel | bits | 32 x 32k")
        for name, (bits, plain, outliers, long, short) in rows(self.TEXT, "| cache | bits | KLD").items():
            preset = name.strip("`")
            known = measured.get(name) or measured.get(f"`{preset}-fractions`")
            assert (plain, outliers) == (known[5], known[7]), name
            least, most = describe(preset, get_scheme(preset))["long_context_bits"]
            assert bits.removesuffix(" per kept token") == (
                f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"
            )
            if name in speed:
                assert (long, short) == (speed[name][1], speed[name][5])
