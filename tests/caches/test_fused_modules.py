"""Modules that are fused while steps are captured, against the modules themselves."""

from __future__ import annotations

import threading

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

from hfkvq.caches import MixedKVCache, fused_modules
from hfkvq.caches.fused_modules import Fusion
from tests.caches.graph_recorder import captured  # noqa: F401
from tests.caches.models import build, prompt


@pytest.fixture
def cpu(monkeypatch, captured):  # noqa: F811
    """Steps on the CPU are replayed from tapes, and their modules fused."""
    monkeypatch.setattr(fused_modules, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr("hfkvq.caches.step_graphs.DEVICES", {"cuda", "cpu"})
    monkeypatch.setenv("HFKVQ_FUSION", "1")
    return captured


def shaken(family, dtype=torch.float32):
    """A model whose norms have weights of their own."""
    model = build(family).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


def logits(model, tokens=4, rows=2):
    cache = MixedKVCache(model, "full")
    with torch.no_grad():
        found = [model(prompt(rows, 20).to(model.device), past_key_values=cache).logits]
        found += [model(prompt(rows, 1, i).to(model.device), past_key_values=cache).logits for i in range(tokens)]
    return torch.cat(found, 1)


FUSED = {
    "llama": ["LlamaRMSNorm", "apply_rotary_pos_emb", "LlamaMLP"],
    "qwen3": ["Qwen3RMSNorm", "Qwen3RMSNorm", "apply_rotary_pos_emb", "Qwen3MLP"],
    "qwen3-moe": ["Qwen3MoeRMSNorm", "Qwen3MoeRMSNorm", "apply_rotary_pos_emb"],
    "gemma3": ["Gemma3RMSNorm", "Gemma3RMSNorm", "apply_rotary_pos_emb", "Gemma3MLP"],
    "gpt-oss": ["GptOssRMSNorm"],
    "phi3": ["Phi3RMSNorm", "apply_rotary_pos_emb", "Phi3MLP"],
    "glm4": ["Glm4RMSNorm", "Glm4MLP"],
    "deepseek-v3": ["DeepseekV3RMSNorm", "DeepseekV3RMSNorm", "DeepseekV3MLP", "DeepseekV3MLP"],
}


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in FUSED), ("gpt-oss", torch.bfloat16)]
)
def test_steps_are_those_of_the_models_own_modules(family, dtype, cpu, monkeypatch):
    """Norms of all forms, of hidden states, queries and keys, gated MLPs, rotary embedding; others run as they are."""
    model = shaken(family, dtype)
    found, made = logits(model), cpu.made
    assert made == 1
    kinds = model._compiled_call_impl.fusion.found
    named = sorted(kind[0].__name__ for kind, form in kinds.items() if form is not None)
    assert [name for name in named if name != "Linear"] == sorted(FUSED[family])
    assert "Linear" in named
    assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.setenv("HFKVQ_FUSION", "0")
    plain = shaken(family, dtype)
    torch.testing.assert_close(found, logits(plain), **({} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}))
    assert plain._compiled_call_impl.fusion is None


def called(monkeypatch):
    """Layers of each call of `linears`."""
    counts, own = [], fused_modules.linears
    monkeypatch.setattr(
        fused_modules, "linears", lambda x, weights, biases: counts.append(len(weights)) or own(x, weights, biases)
    )
    return counts


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_queries_keys_and_values_are_one_launch(family, cpu, monkeypatch):
    """Each recorded layer launches them together, then two projections; the last is the head's."""
    counts = called(monkeypatch)
    model = shaken(family)
    logits(model)
    assert counts[-7:] == [3, 1, 1, 3, 1, 1, 1]


def test_inputs_that_change_between_layers_are_no_group(monkeypatch):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            first = self.one(x)
            return first[..., :4] + self.other(x.mul_(2))

    model, fusion, counts = Block(), Fusion(), called(monkeypatch)
    with torch.no_grad():
        expected = model(torch.ones(1, 1, 8))
        for compares in (True, False):
            with fusion.applied(model, compares):
                torch.testing.assert_close(model(torch.ones(1, 1, 8)), expected)
    assert counts[-2:] == [1, 1]


def replaced(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


def quantized(model):
    class Half(nn.Linear):
        def forward(self, x):
            return super().forward(x) / 2

    mlp = model.model.layers[0].mlp
    mlp.up_proj.__class__ = Half


@pytest.mark.parametrize("change", [replaced, quantized])
def test_what_others_have_changed_runs_as_it_is(change, cpu, monkeypatch):
    found = []
    for given in ("1", "0"):
        monkeypatch.setenv("HFKVQ_FUSION", given)
        model = shaken("llama")
        change(model)
        found.append(logits(model))
        assert change is not replaced or "forward" in vars(model.model.layers[0].mlp)
    assert torch.equal(*found)
    monkeypatch.setenv("HFKVQ_FUSION", "1")
    assert not torch.equal(found[0], logits(shaken("llama")))


def test_other_threads_have_the_models_own_modules():
    model, seen = shaken("llama"), []
    fusion = Fusion()
    x = torch.randn(1, 1, 64)
    with fusion.applied(model, compares=True):
        thread = threading.Thread(target=lambda: seen.append(model.model.norm(x)))
        thread.start()
        thread.join()
        assert not fusion.found
        with torch.no_grad():
            model.model.norm(x)
        assert fusion.found
    assert torch.equal(seen[0], model.model.norm(x))


def test_modules_that_accelerate_has_hooked(cpu):
    """They are fused as those of a model on one device, and their hooks are theirs again afterwards."""
    model = shaken("qwen3")
    expected = logits(model)
    fused = model._compiled_call_impl.fusion
    model = shaken("qwen3")
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=module is model))
    before = [vars(module)["forward"] for module in model.modules()]
    assert torch.equal(logits(model), expected)
    found = model._compiled_call_impl.fusion
    assert found.found == fused.found
    assert sorted(map(len, found.groups.values())) == sorted(map(len, fused.groups.values()))
    assert all(vars(module)["forward"] is own for module, own in zip(model.modules(), before, strict=True))


def test_what_computes_another_thing_is_left():
    """A norm by name that is none, and results that say nothing."""

    class Norm(nn.Module):
        def __init__(self, power):
            super().__init__()
            self.weight, self.eps, self.power = nn.Parameter(torch.ones(64)), 1e-6, power

        def forward(self, x):
            return self.weight * x / x.abs().pow(self.power).mean(-1, keepdim=True)

    fusion, x = Fusion(), torch.randn(1, 1, 64)
    for module, given in ((Norm(3), x), (shaken("llama").model.norm, torch.zeros(1, 1, 64))):
        expected = module(given)
        with torch.no_grad(), fusion.applied(module, compares=True):
            assert torch.equal(module(given), expected)
    assert set(fusion.found.values()) == {None}


def test_a_kernel_that_fails_leaves_modules_as_they_are(cpu, monkeypatch, caplog):
    def failing(*_):
        raise RuntimeError("out of shared memory")

    for name in ("rms_norm", "linears"):
        monkeypatch.setattr(fused_modules, name, failing)
    caplog.set_level("INFO", logger=fused_modules.__name__)
    model = shaken("llama")
    found = logits(model)
    kinds = model._compiled_call_impl.fusion.found
    assert {kind[0].__name__ for kind, form in kinds.items() if form is None} == {"Linear", "LlamaRMSNorm"}
    assert "A fused kernel failed, so modules run as they are: out of shared memory" in caplog.text
    monkeypatch.setenv("HFKVQ_FUSION", "0")
    torch.testing.assert_close(found, logits(model))


@pytest.mark.parametrize("other", [0, 1])
def test_modules_of_a_kind_that_differ_by_a_flag(other, cpu, monkeypatch):
    """MLPs of one class may be sparse or not, as Gemma 3n's are."""
    model = shaken("llama")
    mlp = type(model.model.layers[0].mlp)
    own = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: own(self, x) / (3 if hasattr(self, "sparse") else 1))
    model.model.layers[other].mlp.sparse = True
    found = logits(model)
    fused = [model._compiled_call_impl.fusion.checked[layer.mlp] for layer in model.model.layers]
    # A kind whose first module is none that a kernel computes is left as a whole.
    assert fused == ([False, False] if other == 0 else [True, False])
    monkeypatch.setenv("HFKVQ_FUSION", "0")
    torch.testing.assert_close(found, logits(model))


@pytest.mark.parametrize("given", ["2", "yes", "auto"])
def test_a_value_that_says_nothing(given, cpu, monkeypatch):
    monkeypatch.setenv("HFKVQ_FUSION", given)
    with pytest.raises(ValueError, match=f"HFKVQ_FUSION: got '{given}', allowed 1 .* or 0"):
        MixedKVCache(shaken("llama"), "full")


def test_modules_are_whole_after_an_error(cpu):
    model = shaken("llama")

    def failing(x):
        raise RuntimeError("no")

    cache = MixedKVCache(model, "full")
    with torch.no_grad():
        model(prompt(1, 20), past_key_values=cache)
        model.model.layers[1].mlp.forward = failing
        with pytest.raises(RuntimeError, match="no"):
            model(prompt(1, 1), past_key_values=cache)
    own = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert own == ["model.layers.1.mlp"]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FUSED)
def test_captured_steps_of_kernels(family, monkeypatch):
    """In bf16 nearly all that the modules compute is the same to the last bit."""
    found = []
    for given in ("1", "0"):
        monkeypatch.setenv("HFKVQ_FUSION", given)
        model = shaken(family, torch.bfloat16).cuda()
        found.append(logits(model, 6)[:, 20:].float())
        if given == "1":
            kinds = model._compiled_call_impl.fusion.found
            named = sorted(kind[0].__name__ for kind, form in kinds.items() if form is not None)
            assert [name for name in named if name != "Linear"] == sorted(FUSED[family])
            assert all(form is not None for kind, form in kinds.items() if kind[0].__name__ == "Linear")
    assert (found[0] - found[1]).norm() < 0.03 * found[1].norm()
