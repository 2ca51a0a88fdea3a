"""`hf-kvq`: answers and log-likelihoods through the cache, the command as typed, and costs in results."""

import copy
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers.cache_utils import DynamicCache

import hfkvq.lm_eval.model
from hfkvq import MixedKVCache, get_scheme, use
from hfkvq.lm_eval.model import HFKVQ
from hfkvq.measure.reference import load_reference, reference_path
from tests.caches.models import first_layers

# Pages that short prompts fill.
KITTY = {"scheme": "kitty", "page_size": 8, "sink_length": 2, "local_length": 8}

WORDS = "the quick brown fox jumps over a lazy dog while seven wise owls watch from old trees".split()


@pytest.fixture(scope="module")
def subject():
    model, tokenizer = load_reference(torch.float32)
    return first_layers(model, 2), tokenizer


@pytest.fixture
def make(subject):
    """Makes models around the one that is loaded, and leaves its config as it was."""
    model, tokenizer = subject
    before = model.config._attn_implementation_internal

    def build(cls=HFKVQ, **arguments):
        return cls(pretrained=model, tokenizer=tokenizer, max_length=256, **arguments)

    yield build
    model.config._attn_implementation_internal = before


def sentences(count, length):
    """Texts of different lengths."""
    return [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(length + 3 * i)) for i in range(count)]


def instances(kind, arguments, task="task"):
    return [Instance(kind, {}, pair, i, (task, i, 1)) for i, pair in enumerate(arguments)]


def generate(lm, prompts, task="task", **kwargs):
    settings = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False} | kwargs
    return lm.generate_until(instances("generate_until", [(text, settings) for text in prompts], task), True)


def score(lm, pairs, task="task"):
    return lm.loglikelihood(instances("loglikelihood", pairs, task), True)


def pairs(count=4):
    """Contexts of different lengths with two endings each, of several tokens."""
    return [(text, end) for text in sentences(count, 12) for end in (" and then some more words", " so it is")]


def close(mine, others, tolerance=1e-4):
    for (value, greedy), (other, also) in zip(mine, others, strict=True):
        assert value == pytest.approx(other, abs=tolerance * max(1.0, abs(other)))
        assert greedy == also


@pytest.mark.parametrize("scheme", ["none", "full"])
def test_nothing_lost_answers_as_hf_does(make, scheme):
    """bf16's place is taken by float32 here: then the two orders of summing agree to the last choice."""
    hf, ours = make(HFLM, batch_size=3), make(scheme=scheme, batch_size=3)
    prompts = sentences(4, 10)
    # hf first: it runs before the config's attention is switched.
    texts, scores = generate(hf, prompts), score(hf, pairs())
    assert generate(ours, prompts) == texts
    close(score(ours, pairs()), scores)
    rolling = instances("loglikelihood_rolling", [(text,) for text in prompts])
    for mine, other in zip(ours.loglikelihood_rolling(rolling), hf.loglikelihood_rolling(rolling), strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


def by_hand(model, scheme, context, continuation, chunk):
    """Feeds a prompt and then chunks, as the class says, without padding or batches."""
    cache = DynamicCache(config=model.config) if scheme is None else MixedKVCache(model, scheme)
    split = len(context) - 1
    logits = []
    if split:
        model(torch.tensor([context[:split]]), past_key_values=cache, use_cache=True)
    tail = [*context, *continuation][split:-1]
    for start in range(0, len(tail), chunk):
        part = torch.tensor([tail[start : start + chunk]])
        logits.append(model(part, past_key_values=cache, use_cache=True).logits[0])
    log_p = F.log_softmax(torch.cat(logits), -1)
    assert len(log_p) == len(continuation)
    found = log_p[torch.arange(len(continuation)), torch.tensor(continuation)].sum()
    return float(found), log_p.argmax(-1).tolist() == continuation


@pytest.mark.parametrize("chunk", [3, 1])
def test_log_likelihood_by_hand(subject, make, chunk):
    model, _ = subject
    scheme = get_scheme(**{"name": "kitty", **{k: v for k, v in KITTY.items() if k != "scheme"}})
    lm = make(**KITTY, ll_chunk=chunk, batch_size=1)
    found = score(lm, pairs(2))
    expected = []
    for context, continuation in pairs(2):
        begin, end = lm._encode_pair(context, continuation)
        with torch.no_grad():
            expected.append(by_hand(model, scheme, begin, end, chunk))
    close(found, expected, 2e-5)


def test_what_the_cache_loses_is_seen(make):
    """Compression shows in the first token behind a prompt, too."""
    many = [(text, ".") for text in sentences(3, 24)]
    assert all(len(make(scheme="full")._encode_pair(*pair)[1]) == 1 for pair in many)
    full, seen = score(make(scheme="full"), many), score(make(**KITTY), many)
    assert max(abs(a[0] - b[0]) for a, b in zip(seen, full, strict=True)) > 1e-3


def test_triaxial_reads_roles(subject, make):
    """The cache is shown the ids of padded batches, of chunks and of copies."""
    _, tokenizer = subject
    chat = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "So be it."},
        {"role": "user", "content": " ".join(WORDS)},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    low = {f"{when}|text|user": 2 for when in ("older", "turn_m2", "turn_m1", "current")}
    narrow = make(scheme={"scheme": "triaxial", "table": low, "page_size": 8, "seal_unit": 8, "group_size": 8})
    generate(narrow, [text, text[:-20]])
    assert figures_of(narrow)["code_bits"] < 4
    wide = make(scheme={"scheme": "triaxial", "table": {}, "page_size": 8, "seal_unit": 8, "group_size": 8})
    generate(wide, [text])
    assert figures_of(wide)["code_bits"] == 4


class TestTruncation:
    LONG = " ".join(WORDS * 12)

    def test_middle_keeps_both_ends(self, make):
        lm = make(scheme="none", truncate="middle")
        ids = lm.tok_encode(self.LONG)
        short = lm.tok_encode("the quick")
        limit = 41
        got, mask = lm.tok_batch_encode([self.LONG, "the quick"], left_truncate_len=limit)
        assert got.shape == mask.shape == (2, limit)
        assert got[0].tolist() == ids[:20] + ids[-21:]
        assert got[1, -len(short) :].tolist() == short
        assert mask[1].tolist() == [0] * (limit - len(short)) + [1] * len(short)
        context, continuation = lm._encode_pair(self.LONG, " dog")
        prompt, fed = lm._split(context, continuation)
        assert len(prompt) + len(fed) == lm.max_length
        assert prompt[:10] == tuple(context[:10])

    def test_left_is_lm_evals(self, make):
        hf, ours = make(HFLM), make(scheme="none")
        assert generate(ours, [self.LONG]) == generate(hf, [self.LONG])
        close(score(ours, [(self.LONG, " dog")]), score(hf, [(self.LONG, " dog")]))

    def test_refused(self, make):
        lm = make(scheme="none", truncate="refuse")
        with pytest.raises(ValueError, match=r"truncate: a prompt of task 'essay' has \d+ tokens, but 244 fit"):
            generate(lm, [self.LONG], "essay")
        with pytest.raises(ValueError, match="truncate: a prompt of task 'essay'"):
            score(lm, [(self.LONG, " dog")], "essay")


def figures_of(lm):
    """Costs as lm-eval writes them into its results."""
    return lm.get_model_info()["kvq"]


class TestCosts:
    def test_bits_by_hand(self, subject, make):
        """Bytes of a cache of the same tokens, made without lm-eval."""
        model, tokenizer = subject
        lm = make(**KITTY, batch_size=2)
        prompts = sentences(2, 20)
        generate(lm, prompts, until=[])
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        cache = MixedKVCache(model, lm.cache_arguments.preset)
        model.generate(**batch, past_key_values=cache, max_new_tokens=12, do_sample=False)
        memory = cache.memory()
        figures = figures_of(lm)
        assert figures["total_bits"] == pytest.approx(16 * memory.compressed.total / memory.bf16)
        assert figures["code_bits"] == pytest.approx(memory.code_bits)
        assert figures["peak_cache_bytes"] == memory.total
        assert figures["requests"] == 2
        assert figures["context_tokens"] == batch.attention_mask.sum() / 2
        assert figures["tokens_per_second"] > 0

    def test_each_task_has_its_own(self, make):
        lm = make(**KITTY)
        requests = instances("loglikelihood", pairs(1), "one") + instances("loglikelihood", pairs(2), "two")
        mixed = [requests[i] for i in (2, 0, 3, 1, 4, 5)]
        assert lm.loglikelihood(mixed, True) == [lm.loglikelihood([request], True)[0] for request in mixed]
        lm.use(KITTY)
        lm.loglikelihood(mixed, True)
        tasks = figures_of(lm)["tasks"]
        assert {task: figures["requests"] for task, figures in tasks.items()} == {"two": 4, "one": 2}
        assert tasks["one"]["total_bits"] != tasks["two"]["total_bits"]

    def test_shared_pages_are_not_counted_as_savings(self, subject, make):
        """Ten endings of a context hold its pages once; the figure is that of one row, by hand."""
        model, _ = subject
        lm, asked = make(**KITTY, batch_size=16), [(sentences(1, 40)[0], f" {word} and") for word in WORDS[:10]]
        score(lm, asked)
        context, _ = lm._encode_pair(*asked[0])
        cache = MixedKVCache(model, lm.cache_arguments.preset)
        with torch.no_grad():
            model(torch.tensor([context[:-1]]), past_key_values=cache)
        memory = cache.memory()
        figures = figures_of(lm)
        assert figures["total_bits"] == pytest.approx(16 * memory.compressed.total / memory.bf16)
        assert figures["peak_cache_bytes"] == memory.total


class TestBadInput:
    """Refused before any weight is read."""

    @pytest.fixture(autouse=True)
    def no_weights(self, monkeypatch):
        def load(*args, **kwargs):
            raise AssertionError("the weights were asked for")

        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
        monkeypatch.setattr(transformers.AutoModelForSeq2SeqLM, "from_pretrained", load)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"scheme": "kitty", "tau_bf16": 1.4}, "'tau_bf16' is a knob of 'mixkvq', not of 'kitty'"),
            (
                {"scheme": "none", "boost_ratio": 0.2},
                "'boost_ratio' is a knob of 'kitty', Transformers' own cache has no",
            ),
            ({"scheme": "kitty", "boost_raito": 0.2}, "'boost_raito' is unknown; did you mean 'boost_ratio'"),
            ({"scheme": "triaxial", "table": "nowhere.json"}, "table: nowhere.json cannot be read"),
            ({"scheme": "saw-int4", "block": 96}, "block"),
            ({"scheme": "none", "layers": {"0": "full"}}, "Transformers' own cache has no schemes of layers"),
        ],
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            HFKVQ(pretrained=str(reference_path()), device="cpu", **arguments)

    def test_encoder_decoder(self, tmp_path):
        transformers.T5Config(d_model=32, d_kv=8, num_layers=1, num_heads=4).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="pretrained: got an encoder-decoder model"):
            HFKVQ(pretrained=str(tmp_path), device="cpu")

    def test_options_of_the_model_pass(self):
        """What hf takes reaches from_pretrained."""
        with pytest.raises(AssertionError, match="the weights were asked for"):
            HFKVQ(pretrained=str(reference_path()), device="cpu", attn_implementation="eager", use_sliding_window=False)


def test_answers_kept_by_lm_eval_are_refused(make, tmp_path):
    pytest.importorskip("sqlitedict")
    from lm_eval.api.model import CachingLM

    with pytest.raises(ValueError, match="use_cache: lm-eval keeps answers by their prompts alone"):
        CachingLM(make(scheme="full"), str(tmp_path / "answers.db"))


# peft asks Transformers for names that are on their way out.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters(subject):
    """The model below an adapter shows the cache its ids, and its config."""
    peft = pytest.importorskip("peft")
    model, tokenizer = subject
    wrapped = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    lm = HFKVQ(pretrained=wrapped, tokenizer=tokenizer, scheme="full", max_length=256)
    texts = generate(lm, sentences(2, 10))
    merged = HFKVQ(pretrained=wrapped.merge_and_unload(), tokenizer=tokenizer, scheme="none", max_length=256)
    assert generate(merged, sentences(2, 10)) == texts


def test_a_model_in_use_answers_under_lm_evals_own_model(subject):
    """Answers of lm-eval's `hf` are those of `hf-kvq` with the same scheme."""
    model, tokenizer = subject
    own = HFLM(pretrained=model, tokenizer=tokenizer, max_length=256)
    requests = [
        Instance("generate_until", {}, ("Compute 12 + 7. Then add 5.", {"until": ["\n\n"], "max_gen_toks": 8}), 0)
    ]
    want = HFKVQ(pretrained=model, tokenizer=tokenizer, scheme="kivi-2", max_length=256).generate_until(requests)
    with use(model, "kivi-2") as used:
        made, new = [], used._make
        used._make = lambda model: made.append(1) or new(model)
        assert own.generate_until(requests) == want
    assert made


ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "evals" / "tasks"
START = Path(hfkvq.lm_eval.__file__).parent / "start"


def load_start():
    spec = importlib.util.spec_from_file_location("start_of_hfkvq", START / "_hfkvq_lm_eval.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed():
    """The command that pip made."""
    command = Path(sys.executable).with_name("lm_eval")
    if importlib.util.find_spec("_hfkvq_lm_eval") is None or not command.is_file():
        pytest.skip("hfkvq is not installed here: pip install -e '.[eval]'")
    return command


def test_lm_eval_knows_the_name(installed):
    """By the installed files, which ran when this process began: nothing else imports the module by this name."""
    from lm_eval.api.registry import get_model

    assert "_hfkvq_lm_eval" in sys.modules
    importlib.import_module("lm_eval.models")
    assert get_model("hf-kvq") is hfkvq.lm_eval.model.HFKVQ


@pytest.mark.slow
def test_lm_eval_as_typed(installed, tmp_path):
    """In a process of its own; costs are in what it logs and saves."""
    options = f"pretrained={reference_path()},scheme=kitty,boost_ratio=0.2,dtype=float32"
    ran = subprocess.run(
        [
            installed,
            *("--model", "hf-kvq", "--model_args", options, "--device", "cpu", "--batch_size", "2"),
            *("--include_path", TASKS, "--tasks", "ref_recall", "--limit", "2"),
            *("--output_path", tmp_path, "--log_samples"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert re.search(r"ref_recall: [0-9.]+ total bits, [0-9.]+ bits of codes, largest cache [0-9,]+ bytes", ran.stderr)
    [file] = tmp_path.rglob("results_*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    kvq = found["config"]["kvq"]
    assert kvq["scheme"]["boost_ratio"] == 0.2
    assert 2 < kvq["code_bits"] < kvq["total_bits"] < 16
    assert kvq["total_bits"] == kvq["tasks"]["ref_recall"]["total_bits"]
    assert kvq["peak_cache_bytes"] > 0
    assert kvq["requests"] == 2


def test_registered_once():
    """lm-eval's table has the name, and its own names as well."""
    from lm_eval.api.registry import get_model, model_registry

    start = load_start()
    start.register()
    start.register()
    assert get_model("hf-kvq") is hfkvq.lm_eval.model.HFKVQ
    assert "hf" in model_registry


def test_start_files_name_the_module():
    """One line each: what interpreters before 3.15 read, and what later ones do."""
    assert (START / "hfkvq_lm_eval.pth").read_text() == "import _hfkvq_lm_eval; _hfkvq_lm_eval.install()\n"
    assert (START / "hfkvq_lm_eval.start").read_text() == "_hfkvq_lm_eval:install\n"


def test_costs_of_evaluations(monkeypatch):
    """Of all evaluations since a scheme was chosen."""
    # It asks pip for all that is installed, for a second.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    model, tokenizer = load_reference(torch.float32)
    lm = hfkvq.lm_eval.model.HFKVQ(pretrained=first_layers(model, 1), tokenizer=tokenizer, scheme="kivi-2")
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"ref_size": 24})
    requests = []
    for limit, scheme in ((1, None), (1, None), (1, "kivi-4")):
        if scheme is not None:
            lm.use(scheme)
        found = simple_evaluate(lm, tasks=["ref_recall"], limit=limit, task_manager=manager, bootstrap_iters=0)
        requests.append(found["config"]["kvq"]["requests"])
    assert requests == [1, 2, 1]
    assert found["config"]["kvq"]["code_bits"] == 4
